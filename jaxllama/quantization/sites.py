"""Sites: activations that feed weights of a block, and the parameters that can absorb a scale.

    sites(cfg, kind) -> (Site, ...)
    fold(cfg, kind, layer, {site: s}) -> layer      the same function of x, for any s > 0

AWQ and SmoothQuant multiply input channel j of a weight by s_j and divide the activation by it. The
division costs nothing if the parameters that make the activation can absorb it:

    mixer_norm -> qkv, or GLA's q, k, v, g, gk or gk_0,  the norm's weight / s
                  or the delta rule's qkvz, ba, f_0, g_0
    v          -> o                                      v's rows of qkv / s
    g_norm     -> o (GLA; the delta rule's o_norm)       its weight / s, if it has one
    mlp_norm   -> gate_up                                the norm's weight / s
    up         -> down                                   up's rows of gate_up / s
    norm       -> head                                   the last norm's weight / s

No scale is folded before experts, whose router reads the same norm, nor between their products.

With GQA the G query heads of a group read each v channel, and all heads share GLA's g_norm. So
those input channels of o share one s ("tied": ``Site.channel`` has the shared channel). AWQ's code
does not scale o under GQA; tying keeps part of the gain. A GLA value that passed a short
convolution's SiLU is no obstacle, since o reads it after g_norm. Source: AWQ (arXiv 2306.00978),
section 3.2; SmoothQuant (2211.10438), section 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.model.experts import parameters as experts
from jaxllama.model.mixers import MIXERS
from jaxllama.typing import Leaf, Params, ParamsDict

Layer = ParamsDict

Part = LayerConfig | ModelConfig  # a layer, or a model for its head


@dataclasses.dataclass(frozen=True)
class Site:
    """An activation and the weights that read it.

    readers: paths of the Linears that read the activation; only quantized ones are rounded. source:
    path of the parameters that make it, "" if none can absorb a scale (no norm precedes the
    readers). rows: the slice of the source's rows, None for a norm's weight. channel ``[K]``: the
    source's channel of each input channel.
    """

    name: str
    readers: tuple[str, ...]
    source: str
    rows: tuple[int, int] | None
    channel: np.ndarray

    @property
    def n_channels(self) -> int:
        """Number of independent scales."""
        return int(self.channel.max()) + 1

    def of_inputs(self, s: jax.Array) -> jax.Array:
        """Return scales of the source's channels as scales of the input channels ``[K]``."""
        return s[self.channel]


def sites(part: Part) -> tuple[Site, ...]:
    """Return the sites of a layer, or of a model's head."""
    model = np.arange(part.d_model)
    if isinstance(part, ModelConfig):
        return (Site("head", ("head",), "norm" if part.norm.weight else "", None, model),)
    form, feed = part.form, part.feed
    has_weight = part.norm.weight  # a norm without a weight takes no scale
    before = "mixer_norm" if form.mixer_norm and has_weight else ""
    if form.neighbours:  # the norm belongs to two layers
        before = ""
    if feed is None:
        return _mixer_sites(part, before, (), model)
    has_one = form.mixer_norm and not form.feed_norm  # for both sublayers
    first = "mlp/gate_up" if feed.gated_mlp else "mlp/up"
    if feed.experts is not None:
        of_experts = experts.sites(feed.experts, model, feed.gated_mlp)
        mlp = tuple(Site(of[0][0], *of) for of in of_experts)
        before = "" if has_one else before  # the router reads the same norm
        return (*_mixer_sites(part, before, (), model), *mlp)
    beside, gate_up = ((first,), ()) if has_one else ((), (first,))
    keeps = feed.gated_mlp and not feed.inner_norms  # an activation or a norm keeps no scale
    mlp_norm = "mlp_norm" if form.feed_norm and has_weight else ""
    mlp = tuple(Site(first, gate_up, mlp_norm, None, model) for _ in gate_up) + (
        Site(
            "mlp/down",
            ("mlp/down",),
            first if keeps else "",
            (feed.d_ff, 2 * feed.d_ff) if keeps else None,
            np.arange(feed.d_ff),
        ),
    )
    return (*_mixer_sites(part, before, beside, model), *mlp)


def _mixer_sites(
    layer: LayerConfig, before: str, beside: tuple[str, ...], model: np.ndarray
) -> tuple[Site, Site]:
    """Return the mixer's sites. before: the norm's path. beside: further readers of the norm."""
    mixer = MIXERS[layer.kind].parameters.sites(layer)
    readers = tuple(f"mixer/{name}" for name in mixer.readers)
    source = f"mixer/{mixer.source}" if mixer.source else ""
    return (
        Site(readers[0], readers + beside, before, None, model),
        Site("mixer/o", ("mixer/o",), source, mixer.rows, mixer.channel),
    )


def get(layer: Params, path: str) -> ParamsDict:
    """Return the module's parameters at a path such as ``mlp/down``."""
    for name in path.split("/"):
        layer = layer[name]
    return layer  # type: ignore[return-value]


def put(layer: Layer, path: str, leaf: str, value: Leaf) -> Layer:
    """Return a copy of the tree with one leaf replaced."""
    first, _, rest = path.partition("/")
    inner = layer[first]
    new = put(inner, rest, leaf, value) if rest else {**inner, leaf: value}
    return {**layer, first: new}


def fold(part: Part, layer: Layer, scales: Mapping[str, jax.Array]) -> Layer:
    """Return the layer with scaled channels: readers' columns times s, the source over s.

    scales: ``s[n_channels]`` by site name; a missing site stays unchanged. Computed in float32,
    with one cast to each parameter's dtype.
    """
    for site in sites(part):
        if site.name not in scales:
            continue
        s = scales[site.name].astype(jnp.float32)
        for reader in site.readers:
            layer = _times(layer, reader, "weight", site.of_inputs(s)[None, :])
        inverse = 1.0 / s
        if site.rows is None:
            for leaf in get(layer, site.source):  # LayerNorm's bias too
                layer = _times(layer, site.source, leaf, inverse)
            continue
        whole = row_factor(site, get(layer, site.source)["weight"].shape[0], inverse)
        layer = _times(layer, site.source, "weight", whole[:, None])
        if "bias" in get(layer, site.source):
            layer = _times(layer, site.source, "bias", whole)
    return layer


def row_factor(site: Site, n_rows: int, factor: jax.Array) -> jax.Array:
    """Return ``factor`` at the site's rows of its source, and 1 at the others."""
    assert site.rows is not None
    return jnp.ones((n_rows,), jnp.float32).at[site.rows[0] : site.rows[1]].set(factor)


def _times(layer: Layer, path: str, leaf: str, factor: jax.Array) -> Layer:
    value = get(layer, path)[leaf]
    return put(layer, path, leaf, (value.astype(jnp.float32) * factor).astype(value.dtype))
