"""The parameters of an attention layer, and functions of them.

They say how a mesh splits the parameters, where a scale can be absorbed, and how many operations a
token takes.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxllama.config import (
    UNMULTIPLIED,
    AttentionConfig,
    IndexerConfig,
    LatentConfig,
    LayerConfig,
)
from jaxllama.model.mixers.attention.parts import NAMES as PARTS
from jaxllama.model.mixers.attention.parts import part
from jaxllama.model.mixers.common import Heads, Sites, heads_obstacle
from jaxllama.model.names import Source
from jaxllama.model.param import (
    ByHead,
    Param,
    Path,
    TensorSource,
    Turned,
    fused,
    tensor,
    transposed,
    written,
)
from jaxllama.typing import Options

KEEPS_TOKENS = True
SPLIT: dict[str, int] = {
    **dict.fromkeys(("qkv", "q", "kv_b", "sinks"), 0),
    **{key: axis for name in PARTS for key, axis in part(name).SPLIT.items()},
}


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
    """q, k and v fused by rows, before them q's gate, the norms of q and k, sinks, and o; or q, and
    what makes k and v of latents."""
    cfg: AttentionConfig = layer.mixer
    names, stored, d = source.names, source.stored, layer.d_model
    prefix = f"{prefix}{names.mixer}"
    if cfg.latent is not None:
        return _latent(layer, prefix, source)
    h, query = cfg.head_dim, stored.query * cfg.query_scale
    q, kv = cfg.n_heads * h, cfg.n_kv_heads * h
    n_rows = (2 * q if cfg.attn_gate else q), kv, kv
    is_moved = cfg.rope.scaling != "proportional" and bool(cfg.rope.rotary_dim)
    partial = cfg.rope.rotary_dim if is_moved and cfg.rope.rotary_dim else h
    turned = functools.partial(
        Turned,
        head_dim=h,
        rotary_dim=partial,
        interleaved=stored.interleaved,
        flipped=stored.flipped,
    )
    moves = partial != h or stored.interleaved or stored.flipped
    products = stored.products or UNMULTIPLIED
    of_query = query if cfg.qk_norm == "none" else 1.0
    scales = of_query, products.key, 1.0  # of the outputs
    heads = (cfg.n_heads, cfg.n_kv_heads, 0)
    if len(names.qkv) == 1:
        assert scales[0] == 1.0, "a multiplier of q, which is one tensor with k and v"
        n_rows, heads = (sum(n_rows),), (cfg.n_heads + cfg.n_kv_heads,)
    folds: list[Options] = [
        {
            "scale": scale * products.attention_input,
            "bias_scale": scale,
            "turned": turned(count) if moves and count else None,
        }
        for scale, count in zip(scales, heads, strict=False)
    ]
    if names.is_by_head:
        folds = [{"turned": ByHead(cfg.n_kv_heads, cfg.group_size, turned(1))}]
    if names.is_transposed:
        assert not moves
        folds = [transposed(count) for count in n_rows]
    sources = [f"{prefix}{name}" for name in names.qkv]
    if cfg.attn_gate and names.gate:
        sources, folds = [f"{prefix}{names.gate}", *sources], [{}, *folds]
        n_rows = q, q, kv, kv
    elif cfg.attn_gate:
        assert scales[0] == 1.0 and len(names.qkv) == 3, (
            "a gate that is multiplied, or with k and v"
        )
        folds[0] = {"turned": turned(cfg.n_heads, gated=True)}
    parts = list(zip(sources, n_rows, folds, strict=False))
    n_parts = 1 if cfg.borrows else 2 if cfg.k_is_v else len(parts)
    assert n_parts == len(parts) or len(names.qkv) == 3, "q, k and v in one tensor, where k is v"
    table = fused("qkv", parts[:n_parts], d * layer.form.mixer_reads, cfg.qkv_bias)
    if cfg.qk_norm != "none":
        own_names = {"q_norm": names.q_norm, "k_norm": names.k_norm}
        norms = (("q_norm", q, query), ("k_norm", kv, 1.0))
        for name, width, scale in norms[: 1 if cfg.borrows else 2]:
            width = width if cfg.qk_norm == "full" else h
            if not cfg.norm_weight:
                table[name, "weight"] = Param((), (width,), mean=scale, std=0.0)
                continue
            fold = {
                "scale": scale,
                "offset": scale * stored.norm_offset,
                "turned": turned(width // h) if moves else None,
            }
            stored_name = f"{prefix}{own_names[name]}.weight"
            table[name, "weight"] = tensor(stored_name, width, mean=1.0, std=0.0, fold=fold)
    if cfg.attn_sinks:
        table["sinks", "weight"] = tensor(f"{prefix}{names.sinks}", cfg.n_heads, is_float32=True)
    if cfg.inner_norms:
        name = f"{prefix}{names.inner_norms[0]}.weight"
        table["inner_norm", "weight"] = tensor(name, q, mean=1.0, std=0.0)
    for name in cfg.attention_parts:
        table |= part(name).table(layer, prefix, source)
    scale = source.residual(layer) * products.attention_output
    return table | written("o", f"{prefix}{names.o}", d, q, cfg.o_bias, scale, names.is_transposed)


def _latent(layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]:
    cfg: AttentionConfig = layer.mixer
    names, latent, d, n = source.names, cfg.latent, layer.d_model, cfg.n_heads
    assert latent is not None
    latent_names = names.of("latent", LatentNames())
    rank, width = latent.kv_rank, n * (latent.d_nope + latent.d_v)
    tensors = [f"{prefix}{name}.weight" for name in latent_names.kv_b]
    shapes = [(width, rank)]
    if len(tensors) == 2:
        shapes = [(n, rank, latent.d_nope), (n, latent.d_v, rank)]
    kv_b = tuple(TensorSource(*pair) for pair in zip(tensors, shapes, strict=True))
    interleaved = source.stored.interleaved
    turned = functools.partial(Turned, rotary_dim=latent.d_rope, interleaved=interleaved)
    of_q: Options = {"scale": source.stored.query}
    of_kv: Options = {}
    if interleaved:
        of_q["turned"] = turned(n, cfg.head_dim, first=latent.d_nope)
        of_kv["turned"] = turned(1, rank + latent.d_rope, first=rank)
    table: dict[Path, Param] = {}
    of_queries, wide = latent_names.q, d
    if latent.q_rank is not None:
        of_queries, wide = "q_b_proj", latent.q_rank
        table |= fused("q_a", [(f"{prefix}q_a_proj", wide, {})], d, cfg.qkv_bias)
        norm = tensor(f"{prefix}q_a_layernorm.weight", wide, mean=1.0, std=0.0)
        table["q_norm", "weight"] = norm
        if latent.indexer is not None:
            table |= _indexer(latent, latent.indexer, f"{prefix}indexer.", wide, d)
    table["q", "weight"] = tensor(f"{prefix}{of_queries}.weight", n * cfg.head_dim, wide, fold=of_q)
    down = [(f"{prefix}{latent_names.kv_a}", rank + latent.d_rope, of_kv)]
    return {
        **table,
        **fused("kv_a", down, d, cfg.qkv_bias),
        ("kv_norm", "weight"): tensor(
            f"{prefix}{latent_names.kv_norm}.weight", rank, mean=1.0, std=0.0
        ),
        ("kv_b", "weight"): Param(kv_b, (width, rank)),
        **written("o", f"{prefix}{names.o}", d, n * latent.d_v, cfg.o_bias, source.residual(layer)),
    }


def _indexer(
    latent: LatentConfig, options: IndexerConfig, prefix: str, rank: int, d: int
) -> dict[Path, Param]:
    n, width = options.n_heads, options.head_dim
    turned = functools.partial(
        Turned, head_dim=width, rotary_dim=latent.d_rope, interleaved=options.interleaved
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
    cfg: AttentionConfig = layer.mixer
    return heads_obstacle("", cfg.n_heads, cfg.n_kv_heads, n)


def replicated(layer: LayerConfig, n: int) -> AttentionConfig:
    """Return the options where each of ``n`` shards has its own kv head."""
    return layer.mixer.replace(n_kv_heads=max(layer.mixer.n_kv_heads, n))


def shard(layer: LayerConfig, n: int) -> AttentionConfig:
    """Return the options of one of ``n`` shards; the layer's are ``replicated``'s."""
    cfg: AttentionConfig = layer.mixer
    return cfg.replace(n_heads=cfg.n_heads // n, n_kv_heads=cfg.n_kv_heads // n)


def fused_heads(layer: LayerConfig, name: str, n: int) -> Heads | None:
    """(heads, rows a head) of the parts that a parameter's rows are, None where none moves."""
    del n
    cfg: AttentionConfig = layer.mixer
    if name != "qkv":
        return None
    n_kv = 0 if cfg.borrows else 2 - cfg.k_is_v
    counts = (cfg.n_heads,) * (1 + cfg.attn_gate) + (cfg.n_kv_heads,) * n_kv
    return [(count, cfg.head_dim) for count in counts]


def sites(layer: LayerConfig) -> Sites:
    """With GQA each v channel is read by the query heads of its group, which share its scale."""
    cfg: AttentionConfig = layer.mixer
    if cfg.latent is not None:
        first = "q" if cfg.latent.q_rank is None else "q_a"
        of_index = () if cfg.latent.indexer is None else ("index_k", "index_w")
        readers = (first, "kv_a", *of_index)
        return Sites(readers, "", None, np.arange(cfg.n_heads * cfg.latent.d_v))
    n, n_kv, h = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
    shared = np.arange(n_kv * h).reshape(n_kv, 1, h)
    channel = np.broadcast_to(shared, (n_kv, n // n_kv, h)).reshape(-1)
    is_alone = not (cfg.attention_parts or cfg.k_is_v or cfg.inner_norms or cfg.borrows)
    if not is_alone or cfg.qkv_limit is not None:  # no rows of v alone, or a norm or limit between
        return Sites(("qkv",), "", None, channel)
    before_k = n * (1 + cfg.attn_gate)
    rows = ((before_k + n_kv) * h, (before_k + 2 * n_kv) * h)
    return Sites(("qkv",), "qkv", rows, channel)


def flops(layer: LayerConfig, sequence_length: int) -> float:
    """A token's operations beside its products with weights, the mean over a sequence."""
    cfg: AttentionConfig = layer.mixer
    window = cfg.sliding_window or sequence_length
    # The mean number of keys a query sees: half of T, or nearly the window.
    seen = min(window, sequence_length)
    keys = seen - seen * seen / (2.0 * sequence_length)
    return 4.0 * cfg.n_heads * cfg.head_dim * keys
