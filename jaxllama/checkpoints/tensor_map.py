"""Which tensors of a checkpoint make up which parameter: one table, read by load and by save.

``tensor_table(cfg)`` maps every path of the parameter tree to a ``TensorSpec``: the checkpoint's
tensors whose rows, one after the other, are that parameter.  Fusion (q|k|v, gate|up) is therefore
data, and loading and saving are the same walk in two directions.  Another family of names is
another ``Names``; a mixer that is not attention supplies its own rows (``checkpoints.fla`` does for
GLA layers).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection

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
class TensorSpec:
    """A parameter of ``shape`` whose memory is its ``sources``' memory, one after the other."""

    sources: tuple[Source, ...]
    shape: Shape

    def __post_init__(self) -> None:
        assert sum(source.size for source in self.sources) == math.prod(self.shape), self

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def one(name: str, *shape: int) -> TensorSpec:
    """A parameter that is one tensor."""
    return TensorSpec((Source(name, shape),), shape)


def rows(names_and_rows: list[tuple[str, int]], *rest: int) -> TensorSpec:
    """A parameter that stacks tensors ``[rows_i, *rest]``."""
    sources = tuple(Source(name, (n, *rest)) for name, n in names_and_rows)
    return TensorSpec(sources, (sum(n for _, n in names_and_rows), *rest))


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
MixerMap = Callable[[ModelConfig, str], dict[Path, TensorSpec]]


def tensor_table(cfg: ModelConfig, present: Collection[str] = ()) -> dict[Path, TensorSpec]:
    """The table of ``cfg`` under the names that its checkpoints use: ``fla``'s with GLA layers.

    present: the checkpoint's tensors, where a family has had more than one name for a thing.
    """
    if "gla" in cfg.layer_types:
        from jaxllama.checkpoints import fla

        return fla.tensor_map(cfg, present)
    return tensor_map(cfg)


def tensor_map(
    cfg: ModelConfig, names: Names = LLAMA, gla_mixer: MixerMap | None = None
) -> dict[Path, TensorSpec]:
    """The table for ``cfg`` under given names, in the order of the forward pass.

    gla_mixer(cfg, prefix) gives the parameters of a layer of type "gla", paths relative to its
    mixer; the rest of such a layer is as in any other.
    """
    d = cfg.d_model
    table: dict[Path, TensorSpec] = {
        ("embed", "weight"): one(f"{names.embed}.weight", cfg.vocab_size, d)
    }
    for index, kind in enumerate(cfg.layer_types):
        prefix, layer = names.layer.format(index), f"layer_{index}"
        if kind == "attention":
            mixer = attention_map(cfg, f"{prefix}.{names.mixer}")
        else:
            assert gla_mixer is not None, "layers of type 'gla' need their own names"
            mixer = gla_mixer(cfg, f"{prefix}.{names.mixer}")
        table[layer, "mixer_norm", "weight"] = one(f"{prefix}.{names.mixer_norm}.weight", d)
        table.update({(layer, "mixer", *path): spec for path, spec in mixer.items()})
        table[layer, "mlp_norm", "weight"] = one(f"{prefix}.{names.mlp_norm}.weight", d)
        mlp = mlp_map(cfg, f"{prefix}.{names.mlp}")
        table.update({(layer, "mlp", *path): spec for path, spec in mlp.items()})
    table["norm", "weight"] = one(f"{names.norm}.weight", d)
    if not cfg.tie_embeddings:
        table["head", "weight"] = one(f"{names.head}.weight", cfg.vocab_size, d)
    return table


def attention_map(cfg: ModelConfig, prefix: str) -> dict[Path, TensorSpec]:
    """q, k and v fused by rows, and o."""
    q, kv = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    parts = [(f"{prefix}.q_proj", q), (f"{prefix}.k_proj", kv), (f"{prefix}.v_proj", kv)]
    table = {("qkv", "weight"): rows([(f"{n}.weight", r) for n, r in parts], cfg.d_model)}
    if cfg.qkv_bias:
        table["qkv", "bias"] = rows([(f"{n}.bias", r) for n, r in parts])
    table["o", "weight"] = one(f"{prefix}.o_proj.weight", cfg.d_model, q)
    if cfg.o_bias:
        table["o", "bias"] = one(f"{prefix}.o_proj.bias", cfg.d_model)
    return table


def mlp_map(cfg: ModelConfig, prefix: str) -> dict[Path, TensorSpec]:
    """gate and up fused by rows, and down."""
    parts = [(f"{prefix}.gate_proj", cfg.d_ff), (f"{prefix}.up_proj", cfg.d_ff)]
    table = {("gate_up", "weight"): rows([(f"{n}.weight", r) for n, r in parts], cfg.d_model)}
    if cfg.mlp_bias:
        table["gate_up", "bias"] = rows([(f"{n}.bias", r) for n, r in parts])
    table["down", "weight"] = one(f"{prefix}.down_proj.weight", cfg.d_model, cfg.d_ff)
    if cfg.mlp_bias:
        table["down", "bias"] = one(f"{prefix}.down_proj.bias", cfg.d_model)
    return table
