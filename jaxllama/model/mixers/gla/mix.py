"""Gated Linear Attention: the mixer of a GLA layer, chunkwise in prefill, one step in decode.

    q, k, v    = projections of x, each optionally through a short causal convolution and SiLU
    q, k       = feature_map(q), feature_map(k)                optional
    log_decay  = logsigmoid(low-rank projection of x) / gate_logit_normalizer, at least clamp_min
    o          = gla(q, k, v, log_decay)                       per head, scale Dk ** -0.5
    o          = o / (q z)                                     optional, z the sum of keys
    y          = out(norm(o) * silu(gate(x)))                  norm per head; the gate is optional

Simple GLA's decay is one number a head, plain linear attention's is none.  The sum of keys decays
as the state does: it is the state's last column, that of a value which is always 1.

With fewer kv heads than heads, each key, value and decay serves ``n_heads // n_kv_heads``
consecutive query heads.  The state of a row does not grow with its context: one ``[Dk, Dv]`` matrix
a head, and with convolutions the last ``conv_size - 1`` inputs of each.

In a decode step of few rows on Hopper the mixer is three kernels: the projections with the norm
before them, ``gla.token``, and the output product with the residual.  The verification of a draft
has the same three kernels.  ``commit`` is one kernel for all layers.

Sources: arXiv 2312.06635, section 4.4; 2006.16236 (feature maps, normalizer); parameters and their
order are those of flash-linear-attention's ``gla`` layers.  Left out: feature maps with parameters,
gates of values, biases of the convolutions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxllama.config import GLAConfig, LayerConfig
from jaxllama.model.linear import linear
from jaxllama.model.mixers.gla.parameters import widths
from jaxllama.model.mixers.recurrent import (
    RecurrentState,
    decayed,
    empty_state,
    gated_norm,
    last_convolved,
    moving,
    scan_pieces,
    short_convolution,
    steps,
)
from jaxllama.model.records import At, Chunk, Draft, Pieces, Step
from jaxllama.typing import Options, Params, Tree
from pallas_kernels.dispatch import Implementation, wants_kernel
from pallas_kernels.fixed_sums import row_sums
from pallas_kernels.gla.commit import gla_commit, own_commit
from pallas_kernels.gla.op import gla, gla_step
from pallas_kernels.gla.token import GlaLayerTokens, gla_token, own_token
from pallas_kernels.operands import Columns, short_repr
from pallas_kernels.rows.activations import gelu_tanh

_LEAST = 1e-10  # what is added to a normalizer, as flash-linear-attention does


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GLATokens:
    """T tokens of a draft that a state may accept later.

    k, v, log_decay: ``[B, T, H, D]``.  conv: the inputs of the short convolutions, each
    ``[B, T, features]``.
    """

    kind: ClassVar[str] = "gla"
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    conv: tuple[jax.Array, ...] = ()

    __repr__ = short_repr


def init_state(
    layer: LayerConfig, rows: int, length: int, width: int, dtype: str
) -> RecurrentState:
    """Return the state before any token; it does not grow with a row's ``length``."""
    del length, width
    gla: GLAConfig = layer.mixer
    d_k, d_v = gla.head_dims(layer.d_model)
    features = gla.n_heads * d_k, gla.n_kv_heads * d_k, gla.n_kv_heads * d_v
    taps = gla.conv_size if gla.use_short_conv else 0
    # The keys' sum is a column of the state.
    return empty_state(rows, gla.n_heads, d_k, d_v + gla.normalizer, taps, features, dtype)


def inputs(layer: LayerConfig, p: Params) -> list[Params]:
    """Return the weights that multiply the layer's input."""
    return [p[name] for name in widths(layer)]


def mix(
    layer: LayerConfig,
    p: Params,
    projected: Sequence[Columns],
    state: RecurrentState | None,
    at: At,
) -> tuple[jax.Array, RecurrentState | GLATokens | None]:
    """The projections of ``inputs``, columns of ``[B, T, n]`` -> (gated heads ``[B, T, H Dv]``,
    state); a state of None starts from zero and is not returned.  Where tokens are verified
    (``records.Draft``) they are returned instead: ``commit`` adds those that stay.

    Tokens beyond ``at.lengths`` are padding: it reaches neither the valid tokens' heads nor the
    state, and its own heads mean nothing.  The recursion itself knows the order: positions are not
    read.
    """
    gla: GLAConfig = layer.mixer
    streams = dict(zip(widths(layer), projected, strict=True))
    batch, n_new, _ = streams["q"].rows.shape
    conv_state, read = _convolve(p, streams, state, at) if gla.use_short_conv else (None, ())
    before = None if state is None else state.state
    if isinstance(at, Draft):
        o, (k, v, log_decay) = _verify(layer, p, streams, at, before)
        return o.reshape(batch, n_new, -1), GLATokens(k, v, log_decay, read)
    if isinstance(at, Step):
        o, after = _step(layer, p, streams, at, before)
    elif isinstance(at, Pieces):
        assert before is not None
        heads = _heads(layer, p, streams)
        o, after = gla_pieces(heads, at, before)
        o = _gated(layer, p, streams, o)
    else:
        o, after = _scan(layer, p, streams, at, before)
    return o.reshape(batch, n_new, -1), None if after is None else RecurrentState(after, conv_state)


def _convolve(
    p: Params, streams: dict[str, Columns], state: RecurrentState | None, at: At
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Apply the convolutions to q, k and v; return (the convolutions' states, their inputs)."""
    batch, n_new, _ = streams["q"].rows.shape
    past = (None,) * 3 if state is None or state.conv is None else state.conv
    after: list[jax.Array] = []
    read: list[jax.Array] = []
    for name, old in zip(("q", "k", "v"), past, strict=True):
        x, weight = at.by_row(streams[name].value), p[f"{name}_conv"]["weight"]
        y, last = short_convolution(x, weight, old, at)
        streams[name] = Columns.whole(y.reshape(batch, n_new, -1))
        after.append(last)
        read.append(x)
    return tuple(after), tuple(read)


def _fused(
    layer: LayerConfig, p: Params, streams: dict[str, Columns], at: Step | Draft, before: jax.Array
) -> tuple[jax.Array, Tree] | None:
    """Return the result of ``_step`` or ``_verify`` from one kernel, or None if there is none.

    Its heads have no axis of tokens: ``[rows, H, Dv]``.
    """
    gla: GLAConfig = layer.mixer
    plain = (
        gla.decay,
        gla.feature_map,
        gla.normalizer,
        gla.output_norm,
        gla.norm_weight,
        gla.gate_bias,
    ) == ("channel", "none", False, "rms", True, False)
    if not plain:
        return None
    names = ("q", "k", "v", "gk_0", "g")[: 5 if gla.use_output_gate else 4]
    rows = [streams[name]._replace(rows=streams[name].rows[:, 0]) for name in names]
    weights = (p["gk_1"]["weight"], p["gk_1"]["bias"]), p["g_norm"]["weight"]
    lengths, exact = (at.lengths, False) if isinstance(at, Step) else (None, at.exact)
    operands = GlaLayerTokens(rows, *weights, lengths, before)
    plan = own_token(operands, exact=exact)
    if plan is None:
        return None
    options: Options = {
        "eps": gla.norm_eps,
        "normalizer": gla.gate_logit_normalizer,
        "clamp_min": gla.clamp_min,
        "planned": plan,
    }
    o, *after = gla_token(operands, **options, exact=exact)
    return (o, after[0]) if lengths is not None else (o, after)


def _step(
    layer: LayerConfig, p: Params, streams: dict[str, Columns], at: Step, before: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return (gated heads, state) of one token a row.

    The heads are ``[B, 1, H, Dv]``, or ``[B, H, Dv]`` if one kernel computes the step. ``mix``
    gives both the same shape.
    """
    assert before is not None
    fused = _fused(layer, p, streams, at, before) if wants_kernel(None, before) else None
    if fused is not None:
        return fused
    q, k, v, log_decay = (x[:, 0] for x in _heads(layer, p, streams))
    o, after = _gla_step(q, k, v, log_decay, at.lengths > 0, before)
    return _gated(layer, p, streams, o[:, None]), after


def _scan(
    layer: LayerConfig, p: Params, streams: dict[str, Columns], at: Chunk, before: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """(gated heads ``[B, T, H, Dv]``, state, None without one before) of any number of tokens."""
    # Padding comes last and so reaches no valid o; only a state to return must be kept from it, at
    # the price of masking every operand.
    o, after = gla(
        *_heads(layer, p, streams),
        initial_state=before,
        lengths=None if before is None else at.lengths,
        segment_ids=at.segments,
        return_state=before is not None,
    )
    return _gated(layer, p, streams, o), after


def gla_pieces(
    heads: Sequence[jax.Array], at: Pieces, before: jax.Array, scale: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return ``gla`` of rows whose tokens are spread over devices, and the rows' state after them.

    Parameters
    ----------
    heads
        This device's q, k, v and log_decay: ``[2 B, T, H, Dk]``, v ``[2 B, T, H, Dv]``.
    at
        The places of its two pieces of every row.
    before
        The rows' state before all pieces, float32 ``[B, H, Dk, Dv]``, the same on every device.
    scale
        As for ``gla``.

    Returns
    -------
    (o of this device's pieces ``[2 B, T, H, Dv]``, state float32 ``[B, H, Dk, Dv]``)
    """

    def scan(state: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        o, after = gla(*heads, scale=scale, initial_state=state, lengths=at.lengths)
        assert after is not None
        return o, after

    return scan_pieces(scan, lambda: decayed(heads[3], at), at, before)


def _heads(
    layer: LayerConfig, p: Params, streams: dict[str, Columns]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q, k, v and log_decay ``[B, T, H, D]`` of the streams, as the recursion takes them."""
    settings: GLAConfig = layer.mixer
    heads, kv_heads = settings.n_heads, settings.n_kv_heads
    batch, n_new, _ = streams["q"].rows.shape
    q, k, v = (
        streams[name].value.reshape(batch, n_new, n, -1)
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    if settings.feature_map != "none":
        q, k = (_feature(settings.feature_map, x) for x in (q, k))
    if settings.normalizer:  # sums of as many terms as there are tokens, and their quotient
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    log_decay = _log_decay(settings, p, streams, k)
    if kv_heads < heads:
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
        if log_decay.shape[2] < heads:
            log_decay = jnp.repeat(log_decay, heads // kv_heads, axis=2)
    return q, k, v, jnp.broadcast_to(log_decay, k.shape)


def _log_decay(
    settings: GLAConfig, p: Params, streams: dict[str, Columns], k: jax.Array
) -> jax.Array:
    """float32, ``[B, T, Hkv, Dk]``, or of a head ``[B, T, H, 1]``."""
    if settings.decay == "none":
        return jnp.zeros(k.shape, jnp.float32)
    if settings.decay == "head":
        logits = streams["gk"].value[..., None]
    else:
        logits = linear(streams["gk_0"].value, p["gk_1"]).reshape(k.shape)
    log_decay = jax.nn.log_sigmoid(logits.astype(jnp.float32)) / settings.gate_logit_normalizer
    if settings.clamp_min is not None:
        log_decay = jnp.maximum(log_decay, settings.clamp_min)
    return log_decay


_FEATURE_MAPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elu": lambda x: jnp.where(x >= 0, x + 1, jnp.exp(jnp.minimum(x, 0))),
    "relu": jax.nn.relu,
    "sqrelu": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "logsigmoid": jax.nn.log_sigmoid,
    "silu": jax.nn.silu,
    "gelu_tanh": gelu_tanh,
}


def _feature(name: str, x: jax.Array) -> jax.Array:
    """Return the feature map ``name`` of x, computed in float32 and cast once to x's dtype."""
    return _FEATURE_MAPS[name](x.astype(jnp.float32)).astype(x.dtype)


def _gla_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    moves: jax.Array,
    state: jax.Array,
    *,
    form: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (o ``[B, H, Dv]``, state ``[B, H, Dk, Dv]``) after one token a row.

    q, k, log_decay: ``[B, H, Dk]``.  v: ``[B, H, Dv]``.  moves: bool ``[B]``; other rows keep their
    state.  form: the implementation of ``pallas_kernels.gla_step``.
    """
    q, k, v, log_decay = moving(moves, q, k, v, log_decay)
    return gla_step(q, k, v, log_decay, state, implementation=form)


def _one_of_several(exact: bool) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The step for ``steps``.  XLA makes one kernel of a chain of updates; the kernel of a step,
    whose bits ``exact`` asks for, would pass over the state for each of them."""
    fuses = not exact and jax.default_backend() == "gpu"
    return functools.partial(_gla_step, form="xla" if fuses else None)


def _gated(layer: LayerConfig, p: Params, streams: dict[str, Columns], o: jax.Array) -> jax.Array:
    """The recursion's answers ``[B, T, H, Dv]`` between it and the output's product."""
    gla, dtype = layer.mixer, streams["q"].rows.dtype
    if gla.normalizer:
        o = (o[..., :-1] / (o[..., -1:] + _LEAST)).astype(dtype)
    gate = streams["g"].value.reshape(o.shape) if gla.use_output_gate else None
    weight = p["g_norm"]["weight"] if gla.norm_weight else jnp.ones(o.shape[-1:], dtype)
    if gla.output_norm == "layer":
        o = o.astype(jnp.float32)
        o = o - row_sums(o) / o.shape[-1]  # without the mean, the RMS is the deviation
    return gated_norm(o, weight, gla.norm_eps, gate, "silu").astype(dtype)


def _verify(
    layer: LayerConfig, p: Params, streams: dict[str, Columns], at: Draft, before: jax.Array | None
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """``_step`` of the tokens of a draft, from a state that stays as it is: (gated heads,
    (k, v, log_decay) by rows of the cache)."""
    assert before is not None
    fused = _fused(layer, p, streams, at, before)
    if fused is not None:
        return fused
    q, *kept = (at.by_row(x) for x in _heads(layer, p, streams))
    count = at.row_lengths()
    o, _ = steps(_one_of_several(at.exact), (q, *kept), before, count, at.exact)
    return _gated(layer, p, streams, o.reshape(-1, 1, *o.shape[2:])), kept


def commit(
    states: Sequence[RecurrentState], tokens: Sequence[GLATokens], count: jax.Array, exact: bool
) -> Iterator[RecurrentState]:
    """Yield each layer's state after the first ``count[B]`` of a draft's tokens."""
    both = list(zip(states, tokens, strict=True))
    layers = [(state.state, of.k, of.v, of.log_decay) for state, of in both]
    plan = own_commit(layers, count)
    if plan is not None:
        after = gla_commit(layers, count, planned=plan)
    else:
        step = _one_of_several(exact)
        after = [steps(step, (k, k, v, g), state, count, exact)[1] for state, k, v, g in layers]
    for (old, of), state in zip(both, after, strict=True):
        yield RecurrentState(state, last_convolved(old, of, count))
