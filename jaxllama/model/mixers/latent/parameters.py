"""The parameters of a layer of attention from latents, and functions of them."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxllama.config import IndexerConfig, LatentAttentionConfig, LayerConfig
from jaxllama.model.mixers.common import Heads, Sites
from jaxllama.model.names import Source
from jaxllama.model.param import Param, Path, TensorSource, Turned, fused, tensor, written
from jaxllama.typing import Options

KEEPS_TOKENS = True
SPLIT = {"q": 0, "kv_b": 0}  # the latent is whole on every shard


@dataclasses.dataclass(frozen=True)
class LatentNames:
    """The names of the tensors that make k and v of latents, behind the mixer's prefix.

    kv_b: one tensor ``[heads * (d_nope + d_v), rank]``, or (GGUF) that of the keys, ``[heads, rank,
    d_nope]``, and that of the values, ``[heads, d_v, rank]``, which the loader joins.
    """

    q: str = "q_proj"
    kv_a: str = "kv_a_proj_with_mqa"
    kv_norm: str = "kv_a_layernorm"
    kv_b: tuple[str, ...] = ("kv_b_proj",)


def table(layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]:
    """q, or what makes it of a latent; what makes k and v of latents; the indexer's, and o."""
    cfg: LatentAttentionConfig = layer.mixer
    names, d, n = source.names, layer.d_model, cfg.n_heads
    prefix = f"{prefix}{names.mixer}"
    latent_names = names.of("latent", LatentNames())
    rank, width = cfg.kv_rank, n * (cfg.d_nope + cfg.d_v)
    tensors = [f"{prefix}{name}.weight" for name in latent_names.kv_b]
    shapes = [(width, rank)]
    if len(tensors) == 2:
        shapes = [(n, rank, cfg.d_nope), (n, cfg.d_v, rank)]
    kv_b = tuple(TensorSource(*pair) for pair in zip(tensors, shapes, strict=True))
    interleaved = source.stored.interleaved
    turned = functools.partial(Turned, rotary_dim=cfg.d_rope, interleaved=interleaved)
    of_q: Options = {"scale": source.stored.query}
    of_kv: Options = {}
    if interleaved:
        of_q["turned"] = turned(n, cfg.head_dim, first=cfg.d_nope)
        of_kv["turned"] = turned(1, rank + cfg.d_rope, first=rank)
    table: dict[Path, Param] = {}
    of_queries, wide = latent_names.q, d
    if cfg.q_rank is not None:
        of_queries, wide = "q_b_proj", cfg.q_rank
        table |= fused("q_a", [(f"{prefix}q_a_proj", wide, {})], d, cfg.qkv_bias)
        norm = tensor(f"{prefix}q_a_layernorm.weight", wide, mean=1.0, std=0.0)
        table["q_norm", "weight"] = norm
        if cfg.indexer is not None:
            table |= _indexer(cfg, cfg.indexer, f"{prefix}indexer.", wide, d)
    table["q", "weight"] = tensor(f"{prefix}{of_queries}.weight", n * cfg.head_dim, wide, fold=of_q)
    down = [(f"{prefix}{latent_names.kv_a}", rank + cfg.d_rope, of_kv)]
    return {
        **table,
        **fused("kv_a", down, d, cfg.qkv_bias),
        ("kv_norm", "weight"): tensor(
            f"{prefix}{latent_names.kv_norm}.weight", rank, mean=1.0, std=0.0
        ),
        ("kv_b", "weight"): Param(kv_b, (width, rank)),
        **written("o", f"{prefix}{names.o}", d, n * cfg.d_v, cfg.o_bias, source.residual(layer)),
    }


def _indexer(
    cfg: LatentAttentionConfig, options: IndexerConfig, prefix: str, rank: int, d: int
) -> dict[Path, Param]:
    n, width = options.n_heads, options.head_dim
    turned = functools.partial(
        Turned, head_dim=width, rotary_dim=cfg.d_rope, interleaved=options.interleaved
    )
    of_key: Options = {"turned": turned(1)}
    return {
        ("index_q", "weight"): tensor(
            f"{prefix}wq_b.weight", n * width, rank, fold={"turned": turned(n)}
        ),
        ("index_k", "weight"): tensor(f"{prefix}wk.weight", width, d, fold=of_key),
        ("index_norm", "weight"): tensor(
            f"{prefix}k_norm.weight", width, mean=1.0, std=0.0, fold=of_key
        ),
        ("index_norm", "bias"): tensor(f"{prefix}k_norm.bias", width, std=0.0, fold=of_key),
        ("index_w", "weight"): tensor(f"{prefix}weights_proj.weight", n, d),
    }


def heads(layer: LayerConfig) -> int:
    """Return the largest number of shards that each have a head."""
    return layer.mixer.n_heads


def obstacle(layer: LayerConfig, n: int) -> str | None:
    """Return the name of the heads that ``n`` shards do not divide, or None."""
    return f"the {layer.mixer.n_heads} heads" if layer.mixer.n_heads % n else None


def replicated(layer: LayerConfig, n: int) -> LatentAttentionConfig:
    """Return the options as they are."""
    del n
    return layer.mixer


def shard(layer: LayerConfig, n: int) -> LatentAttentionConfig:
    """Return the options of one of ``n`` shards."""
    return layer.mixer.replace(n_heads=layer.mixer.n_heads // n)


def fused_heads(layer: LayerConfig, name: str, n: int) -> Heads | None:
    """Return None: the rows of each parameter are those of one part."""
    del layer, name, n


def sites(layer: LayerConfig) -> Sites:
    """Nothing absorbs the scale of o's input: it is a product of a sum over the keys."""
    cfg: LatentAttentionConfig = layer.mixer
    first = "q" if cfg.q_rank is None else "q_a"
    of_index = () if cfg.indexer is None else ("index_k", "index_w")
    return Sites((first, "kv_a", *of_index), "", None, np.arange(cfg.n_heads * cfg.d_v))


def flops(layer: LayerConfig, sequence_length: int) -> float:
    """A token's operations beside its products with weights, the mean over a sequence."""
    cfg: LatentAttentionConfig = layer.mixer
    seen, found = sequence_length / 2.0, 0.0
    if cfg.indexer is not None:
        found = 2.0 * cfg.indexer.n_heads * cfg.indexer.head_dim * seen
        few = min(cfg.indexer.top_k, sequence_length)
        seen = few - few * few / (2.0 * sequence_length)
    return found + 2.0 * cfg.n_heads * (cfg.head_dim + cfg.d_v) * seen
