"""The parameters of a GLA layer, and functions of them.

They say how a mesh splits the parameters, where a scale can be absorbed, and how many operations a
token takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Collection, Mapping

import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.model.mixers.common import Heads, Sites, heads_obstacle
from jaxllama.model.names import Names
from jaxllama.model.param import Param, Path, TensorSource, one, written
from jaxllama.typing import Options

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
def widths(cfg: ModelConfig) -> Mapping[str, int]:
    """Return the width of every projection of the layer's input, in order."""
    gla = cfg.gla
    assert gla is not None
    d_k, d_v = cfg.gla_head_dims
    sizes = {"q": gla.n_heads * d_k, "k": gla.n_kv_heads * d_k, "v": gla.n_kv_heads * d_v}
    if gla.use_output_gate:
        sizes["g"] = gla.n_heads * d_v
    decay = {"channel": {"gk_0": gla.gate_low_rank_dim}, "head": {"gk": gla.n_heads}, "none": {}}
    return types.MappingProxyType({**sizes, **decay[gla.decay]})


def table(
    cfg: ModelConfig, layer: str, names: Names, present: Collection[str]
) -> dict[Path, Param]:
    """The parameters of one GLA mixer."""
    gla, own, prefix = cfg.gla, names.of("gla", GLANames()), f"{layer}{names.mixer}"
    assert gla is not None
    d_k, d_v = cfg.gla_head_dims
    q, k, v = gla.n_heads * d_k, gla.n_kv_heads * d_k, gla.n_kv_heads * d_v
    d, out = cfg.d_model, gla.n_heads * d_v
    table: dict[Path, Param] = {
        ("q", "weight"): one(f"{prefix}q_proj.weight", q, d, fold={"scale": cfg.stored.query}),
        ("k", "weight"): one(f"{prefix}k_proj.weight", k, d),
        ("v", "weight"): one(f"{prefix}v_proj.weight", v, d),
    }
    if gla.use_short_conv:
        for name, width in (("q", q), ("k", k), ("v", v)):
            # The checkpoint's [features, 1, W] is the same memory.
            source = TensorSource(f"{prefix}{name}_conv1d.weight", (width, 1, gla.conv_size))
            table[f"{name}_conv", "weight"] = Param(
                (source,), (width, gla.conv_size), std=gla.conv_size**-0.5
            )
    rank, decay = gla.gate_low_rank_dim, f"{prefix}{own.decay}"
    if gla.decay == "channel":
        table["gk_0", "weight"] = one(f"{decay}.0.weight", rank, d)
        table["gk_1", "weight"] = one(f"{decay}.1.weight", k, rank)
        table["gk_1", "bias"] = one(f"{decay}.1.bias", k, std=0.0)
    elif gla.decay == "head":
        table["gk", "weight"] = one(f"{decay}.weight", gla.n_heads, d)
        table["gk", "bias"] = one(f"{decay}.bias", gla.n_heads, std=0.0)
    if gla.use_output_gate:
        table["g", "weight"] = one(f"{prefix}g_proj.weight", out, d)
        if gla.gate_bias:
            table["g", "bias"] = one(f"{prefix}g_proj.bias", out, std=0.0)
    if gla.norm_weight:
        norms = [f"{prefix}{name}" for name in own.norms]
        plain = norms[0] if gla.use_output_gate else norms[-1]
        norm = next((name for name in norms if f"{name}.weight" in present), plain)
        table["g_norm", "weight"] = one(f"{norm}.weight", d_v, mean=1.0, std=0.0)
    return table | written("o", f"{prefix}{names.o}", d, out, False)


def heads(cfg: ModelConfig) -> int:
    """Return the largest number of shards that each have a head."""
    assert cfg.gla is not None
    return cfg.gla.n_heads


def obstacle(cfg: ModelConfig, n: int) -> str | None:
    """Return the name of the heads that ``n`` shards do not divide, or None."""
    assert cfg.gla is not None
    return heads_obstacle("GLA ", cfg.gla.n_heads, cfg.gla.n_kv_heads, n)


def replicated(cfg: ModelConfig, n: int) -> Options:
    """Changes of the config where each of ``n`` shards has its own kv head."""
    assert cfg.gla is not None
    return {"gla": dataclasses.replace(cfg.gla, n_kv_heads=max(cfg.gla.n_kv_heads, n))}


def shard(cfg: ModelConfig, n: int) -> Options:
    """Changes of the config, ``replicated``'s, that make it one of ``n`` shards'."""
    assert cfg.gla is not None
    d_k, d_v = cfg.gla_head_dims
    count = cfg.gla.n_heads // n
    own = dataclasses.replace(
        cfg.gla,
        n_heads=count,
        n_kv_heads=cfg.gla.n_kv_heads // n,
        expand_k=_ratio(count * d_k, cfg.d_model),
        expand_v=_ratio(count * d_v, cfg.d_model),
    )
    return {"gla": own}


def _ratio(width: int, d_model: int) -> float:
    """The float whose product with d_model is exactly ``width``, as GLAConfig wants it."""
    near = width / d_model
    for ratio in (near, math.nextafter(near, math.inf), math.nextafter(near, 0.0)):
        if ratio * d_model == width:
            return ratio
    raise AssertionError((width, d_model))


def fused_heads(cfg: ModelConfig, name: str, n: int) -> Heads | None:
    """(heads, rows a head) of the parts that a parameter's rows are, None where none moves."""
    gla = cfg.gla
    assert gla is not None
    if name not in ("k", "v", "k_conv", "v_conv") or gla.n_kv_heads >= n:
        return None
    d_k, d_v = cfg.gla_head_dims
    return [(gla.n_kv_heads, d_v if name in ("v", "v_conv") else d_k)]


def sites(cfg: ModelConfig) -> Sites:
    """All heads share g_norm's weight, and so a scale.  A value's short convolution with SiLU is no
    obstacle, since o reads it behind g_norm."""
    assert cfg.gla is not None
    value = np.tile(np.arange(cfg.gla_head_dims[1]), cfg.gla.n_heads)
    if not cfg.gla.norm_weight:
        return Sites(tuple(widths(cfg)), "", None, np.arange(value.size))
    return Sites(tuple(widths(cfg)), "g_norm", None, value)


def flops(cfg: ModelConfig, index: int, sequence_length: int) -> float:
    """A token's operations beside its products with weights."""
    del index, sequence_length
    assert cfg.gla is not None
    d_k, d_v = cfg.gla_head_dims
    return 4.0 * cfg.gla.n_heads * d_k * d_v
