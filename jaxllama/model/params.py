"""The parameters of a model: one table, read by init, sharding, loading, saving and schemes.

    param_table(cfg) -> {path: Param}     in the order of the forward pass

A path is that of the parameter tree, ("layer_0", "mixer", "qkv", "weight").  A ``Param`` has its
shape, what it is drawn from, and the tensors of a checkpoint whose rows, one after the other, it
is.  Fusion (q|k|v, gate|up) is therefore data, and loading and saving are the same walk in two
directions.  Another family of names is another ``Names``; models with GLA layers have those of
flash-linear-attention.  Along which axis a mesh splits a parameter is a rule of its path
(``parallel.layout.split_axis``).

``decoder.Parameters`` are the linen modules that declare them.  This file imports no jax: who only
reads a checkpoint does without.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxllama.config import ModelConfig

Path = tuple[str, ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor as the checkpoint has it."""

    name: str
    shape: Shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter of ``shape`` whose memory is its ``sources``' memory, one after the other.

    mean, std: of the normal distribution that it is drawn from.
    """

    sources: tuple[Source, ...]
    shape: Shape
    mean: float = 0.0
    std: float = 0.02

    def __post_init__(self) -> None:
        assert sum(source.size for source in self.sources) == math.prod(self.shape), self

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def one(name: str, *shape: int, **facts: Any) -> Param:
    """A parameter that is one tensor."""
    return Param((Source(name, shape),), shape, **facts)


def rows(names_and_rows: list[tuple[str, int]], *rest: int, **facts: Any) -> Param:
    """A parameter that stacks tensors ``[rows_i, *rest]``."""
    sources = tuple(Source(name, (n, *rest)) for name, n in names_and_rows)
    return Param(sources, (sum(n for _, n in names_and_rows), *rest), **facts)


def _norm(name: str, width: int) -> Param:
    return one(f"{name}.weight", width, mean=1.0, std=0.0)


@dataclasses.dataclass(frozen=True)
class Names:
    """What a checkpoint family calls the parts of a decoder; ``layer`` takes the index."""

    embed: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    mixer_norm: str = "input_layernorm"
    mixer: str = "self_attn"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    norm: str = "model.norm"
    head: str = "lm_head"


LLAMA = Names()
FLA = Names(embed="model.embeddings", mixer_norm="attn_norm", mixer="attn", mlp_norm="mlp_norm")


def param_table(cfg: ModelConfig, present: Collection[str] = ()) -> dict[Path, Param]:
    """See the module docstring.

    present: a checkpoint's tensors, where a family has had more than one name for a thing; without
        them the names are the library's present ones.
    """
    names = FLA if "gla" in cfg.layer_types else LLAMA
    d = cfg.d_model
    table: dict[Path, Param] = {
        ("embed", "weight"): one(f"{names.embed}.weight", cfg.vocab_size, d)
    }
    for index, kind in enumerate(cfg.layer_types):
        prefix, layer = names.layer.format(index), f"layer_{index}"
        if kind == "attention":
            mixer = _attention(cfg, f"{prefix}.{names.mixer}")
        else:
            mixer = _gla(cfg, f"{prefix}.{names.mixer}", present)
        table[layer, "mixer_norm", "weight"] = _norm(f"{prefix}.{names.mixer_norm}", d)
        table.update({(layer, "mixer", *path): param for path, param in mixer.items()})
        table[layer, "mlp_norm", "weight"] = _norm(f"{prefix}.{names.mlp_norm}", d)
        mlp = _mlp(cfg, f"{prefix}.{names.mlp}", present)
        table.update({(layer, "mlp", *path): param for path, param in mlp.items()})
    table["norm", "weight"] = _norm(names.norm, d)
    if not cfg.tie_embeddings:
        table["head", "weight"] = one(f"{names.head}.weight", cfg.vocab_size, d)
    return table


def _attention(cfg: ModelConfig, prefix: str) -> dict[Path, Param]:
    """q, k and v fused by rows, and o."""
    q, kv = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    parts = [(f"{prefix}.q_proj", q), (f"{prefix}.k_proj", kv), (f"{prefix}.v_proj", kv)]
    table = _fused("qkv", parts, cfg.d_model, cfg.qkv_bias)
    return table | _back("o", f"{prefix}.o_proj", cfg.d_model, q, cfg.o_bias)


def _mlp(cfg: ModelConfig, prefix: str, present: Collection[str]) -> dict[Path, Param]:
    """gate and up fused by rows, and down.  Old checkpoints of flash-linear-attention have both in
    one tensor."""
    parts = [(f"{prefix}.gate_proj", cfg.d_ff), (f"{prefix}.up_proj", cfg.d_ff)]
    if f"{prefix}.gate_proj.weight" in present and f"{prefix}.up_proj.weight" not in present:
        parts = [(f"{prefix}.gate_proj", 2 * cfg.d_ff)]
    table = _fused("gate_up", parts, cfg.d_model, cfg.mlp_bias)
    return table | _back("down", f"{prefix}.down_proj", cfg.d_model, cfg.d_ff, cfg.mlp_bias)


def _fused(name: str, parts: list[tuple[str, int]], width: int, bias: bool) -> dict[Path, Param]:
    """A product that reads the residual stream."""
    table = {(name, "weight"): rows([(f"{n}.weight", r) for n, r in parts], width)}
    if bias:
        table[name, "bias"] = rows([(f"{n}.bias", r) for n, r in parts], std=0.0)
    return table


def _back(name: str, source: str, d: int, width: int, bias: bool) -> dict[Path, Param]:
    """A product that writes it; its bias is added once, to the sum."""
    table = {(name, "weight"): one(f"{source}.weight", d, width)}
    if bias:
        table[name, "bias"] = one(f"{source}.bias", d, std=0.0)
    return table


def _gla(cfg: ModelConfig, prefix: str, present: Collection[str]) -> dict[Path, Param]:
    """The parameters of one GLA mixer."""
    gla = cfg.gla
    assert gla is not None
    d_k, d_v = cfg.gla_head_dims
    q, k, v = gla.n_heads * d_k, gla.n_kv_heads * d_k, gla.n_kv_heads * d_v
    d, out = cfg.d_model, gla.n_heads * d_v
    table: dict[Path, Param] = {
        ("q", "weight"): one(f"{prefix}.q_proj.weight", q, d),
        ("k", "weight"): one(f"{prefix}.k_proj.weight", k, d),
        ("v", "weight"): one(f"{prefix}.v_proj.weight", v, d),
    }
    if gla.use_short_conv:
        for name, width in (("q", q), ("k", k), ("v", v)):
            # The checkpoint's [features, 1, W] is the same memory.
            source = Source(f"{prefix}.{name}_conv1d.weight", (width, 1, gla.conv_size))
            table[f"{name}_conv", "weight"] = Param(
                (source,), (width, gla.conv_size), std=gla.conv_size**-0.5
            )
    rank = gla.gate_low_rank_dim
    table["gk_0", "weight"] = one(f"{prefix}.gk_proj.0.weight", rank, d)
    table["gk_1", "weight"] = one(f"{prefix}.gk_proj.1.weight", k, rank)
    table["gk_1", "bias"] = one(f"{prefix}.gk_proj.1.bias", k, std=0.0)
    norm = f"{prefix}.g_norm"
    if gla.use_output_gate:
        table["g", "weight"] = one(f"{prefix}.g_proj.weight", out, d)
        if f"{norm}.weight" not in present:
            norm = f"{prefix}.g_norm_swish_gate"
    table["g_norm", "weight"] = _norm(norm, d_v)
    return table | _back("o", f"{prefix}.o_proj", d, out, False)


def nested(table: Mapping[Path, Any]) -> dict[str, Any]:
    """A tree of dicts out of a dict by path."""
    tree: dict[str, Any] = {}
    for path, value in table.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree


def check(cfg: ModelConfig, params: Mapping[str, Any]) -> None:
    """Raises ValueError naming a parameter that is missing or has another shape than ``cfg``'s."""
    for path, param in param_table(cfg).items():
        value: Any = params
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        found = None if value is None else value.shape
        if found != param.shape:
            raise ValueError(f"{'/'.join(path)}: shape {found}, but the config wants {param.shape}")
