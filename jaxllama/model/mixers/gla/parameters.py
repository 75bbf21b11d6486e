"""The parameters of a GLA layer, and functions of them.

They say how a mesh splits the parameters, where a scale can be absorbed, and how many operations a
token takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping

import numpy as np

from jaxllama.config import GLAConfig, LayerConfig
from jaxllama.model.mixers.common import Heads, Sites, heads_obstacle
from jaxllama.model.names import Source
from jaxllama.model.param import Param, Path, TensorSource, tensor, written

KEEPS_TOKENS = False
SPLIT = dict.fromkeys(("q", "k", "v", "g", "gk", "gk_1", "q_conv", "k_conv", "v_conv"), 0)


@dataclasses.dataclass(frozen=True)
class GLANames:
    """The names of a GLA layer's tensors in a checkpoint.

    norms: names for the norm of a head's output; a file has one of them.  If the file is not known,
    the first is the name for a layer with an output gate.
    """

    decay: str = "gk_proj"
    norms: tuple[str, ...] = ("g_norm_swish_gate", "g_norm")


@functools.lru_cache(maxsize=64)
def widths(layer: LayerConfig) -> Mapping[str, int]:
    """Return the width of every projection of the layer's input, in order."""
    gla: GLAConfig = layer.mixer
    d_k, d_v = gla.head_dims(layer.d_model)
    sizes = {"q": gla.n_heads * d_k, "k": gla.n_kv_heads * d_k, "v": gla.n_kv_heads * d_v}
    if gla.use_output_gate:
        sizes["g"] = gla.n_heads * d_v
    decay = {"channel": {"gk_0": gla.gate_low_rank_dim}, "head": {"gk": gla.n_heads}, "none": {}}
    return types.MappingProxyType({**sizes, **decay[gla.decay]})


def table(layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]:
    """The parameters of one GLA mixer."""
    names = source.names
    gla, gla_names, prefix = layer.mixer, names.of("gla", GLANames()), f"{prefix}{names.mixer}"
    d_k, d_v = gla.head_dims(layer.d_model)
    q, k, v = gla.n_heads * d_k, gla.n_kv_heads * d_k, gla.n_kv_heads * d_v
    d, out = layer.d_model, gla.n_heads * d_v
    scale = {"scale": source.stored.query}
    table: dict[Path, Param] = {
        ("q", "weight"): tensor(f"{prefix}q_proj.weight", q, d, fold=scale),
        ("k", "weight"): tensor(f"{prefix}k_proj.weight", k, d),
        ("v", "weight"): tensor(f"{prefix}v_proj.weight", v, d),
    }
    if gla.use_short_conv:
        for name, width in (("q", q), ("k", k), ("v", v)):
            # The checkpoint's [features, 1, W] is the same memory.
            taps = TensorSource(f"{prefix}{name}_conv1d.weight", (width, 1, gla.conv_size))
            table[f"{name}_conv", "weight"] = Param(
                (taps,), (width, gla.conv_size), std=gla.conv_size**-0.5
            )
    rank, decay = gla.gate_low_rank_dim, f"{prefix}{gla_names.decay}"
    if gla.decay == "channel":
        table["gk_0", "weight"] = tensor(f"{decay}.0.weight", rank, d)
        table["gk_1", "weight"] = tensor(f"{decay}.1.weight", k, rank)
        table["gk_1", "bias"] = tensor(f"{decay}.1.bias", k, std=0.0)
    elif gla.decay == "head":
        table["gk", "weight"] = tensor(f"{decay}.weight", gla.n_heads, d)
        table["gk", "bias"] = tensor(f"{decay}.bias", gla.n_heads, std=0.0)
    if gla.use_output_gate:
        table["g", "weight"] = tensor(f"{prefix}g_proj.weight", out, d)
        if gla.gate_bias:
            table["g", "bias"] = tensor(f"{prefix}g_proj.bias", out, std=0.0)
    if gla.norm_weight:
        norms = [f"{prefix}{name}" for name in gla_names.norms]
        plain = norms[0] if gla.use_output_gate else norms[-1]
        norm = next((name for name in norms if f"{name}.weight" in source.present), plain)
        table["g_norm", "weight"] = tensor(f"{norm}.weight", d_v, mean=1.0, std=0.0)
    return table | written("o", f"{prefix}{names.o}", d, out, False)


def heads(layer: LayerConfig) -> int:
    """Return the largest number of shards that each have a head."""
    gla: GLAConfig = layer.mixer
    return gla.n_heads


def obstacle(layer: LayerConfig, n: int) -> str | None:
    """Return the name of the heads that ``n`` shards do not divide, or None."""
    gla: GLAConfig = layer.mixer
    return heads_obstacle("GLA ", gla.n_heads, gla.n_kv_heads, n)


def replicated(layer: LayerConfig, n: int) -> GLAConfig:
    """Return the options where each of ``n`` shards has its own kv head."""
    gla: GLAConfig = layer.mixer
    return dataclasses.replace(gla, n_kv_heads=max(gla.n_kv_heads, n))


def shard(layer: LayerConfig, n: int) -> GLAConfig:
    """Return the options of one of ``n`` shards; the layer's are ``replicated``'s."""
    gla: GLAConfig = layer.mixer
    d_k, d_v = gla.head_dims(layer.d_model)
    count = gla.n_heads // n
    return dataclasses.replace(
        gla,
        n_heads=count,
        n_kv_heads=gla.n_kv_heads // n,
        expand_k=_ratio(count * d_k, layer.d_model),
        expand_v=_ratio(count * d_v, layer.d_model),
    )


def _ratio(width: int, d_model: int) -> float:
    """The float whose product with d_model is exactly ``width``, as GLAConfig wants it."""
    near = width / d_model
    for ratio in (near, math.nextafter(near, math.inf), math.nextafter(near, 0.0)):
        if ratio * d_model == width:
            return ratio
    raise AssertionError((width, d_model))


def fused_heads(layer: LayerConfig, name: str, n: int) -> Heads | None:
    """(heads, rows a head) of the parts that a parameter's rows are, None where none moves."""
    gla: GLAConfig = layer.mixer
    if name not in ("k", "v", "gk_1", "k_conv", "v_conv") or gla.n_kv_heads >= n:
        return None
    d_k, d_v = gla.head_dims(layer.d_model)
    return [(gla.n_kv_heads, d_v if name in ("v", "v_conv") else d_k)]


def sites(layer: LayerConfig) -> Sites:
    """All heads share g_norm's weight, and so a scale.  A value's short convolution with SiLU is no
    obstacle, since o reads it behind g_norm."""
    gla: GLAConfig = layer.mixer
    value = np.tile(np.arange(gla.head_dims(layer.d_model)[1]), gla.n_heads)
    if not gla.norm_weight:
        return Sites(tuple(widths(layer)), "", None, np.arange(value.size))
    return Sites(tuple(widths(layer)), "g_norm", None, value)


def flops(layer: LayerConfig, sequence_length: int) -> float:
    """A token's operations beside its products with weights."""
    del sequence_length
    gla: GLAConfig = layer.mixer
    d_k, d_v = gla.head_dims(layer.d_model)
    return 4.0 * gla.n_heads * d_k * d_v
