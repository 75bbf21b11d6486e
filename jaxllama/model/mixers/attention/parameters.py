"""The parameters of an attention layer, and functions of them.

They say how a mesh splits the parameters, where a scale can be absorbed, and how many operations a
token takes.
"""

from __future__ import annotations

import functools

import numpy as np

from jaxllama.config import UNMULTIPLIED, AttentionConfig, LayerConfig
from jaxllama.model.mixers.attention.parts import NAMES as PARTS
from jaxllama.model.mixers.attention.parts import part
from jaxllama.model.mixers.common import Heads, Sites, heads_obstacle
from jaxllama.model.names import Source
from jaxllama.model.param import (
    ByHead,
    Param,
    Path,
    Turned,
    fused,
    tensor,
    transposed,
    written,
)
from jaxllama.typing import Options

KEEPS_TOKENS = True
SPLIT: dict[str, int] = {
    **dict.fromkeys(("qkv", "sinks"), 0),
    **{key: axis for name in PARTS for key, axis in part(name).SPLIT.items()},
}


def table(layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]:
    """q, k and v fused by rows, before them q's gate, the norms of q and k, sinks, and o."""
    cfg: AttentionConfig = layer.mixer
    names, stored, d = source.names, source.stored, layer.d_model
    prefix = f"{prefix}{names.mixer}"
    h, query = cfg.head_dim, stored.query * cfg.query_scale
    q, kv, values = cfg.n_heads * h, cfg.n_kv_heads * h, cfg.n_kv_heads * cfg.value_dim
    n_rows = (2 * q if cfg.attn_gate else q), kv, values
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
        n_rows = q, q, kv, values
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
            if not cfg.norm_weight or not own_names[name]:
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
    width, is_transposed = cfg.n_heads * cfg.value_dim, names.is_transposed
    return table | written("o", f"{prefix}{names.o}", d, width, cfg.o_bias, scale, is_transposed)


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
    queries = [(cfg.n_heads, cfg.head_dim)] * (1 + cfg.attn_gate)
    keys_values = [(cfg.n_kv_heads, cfg.head_dim), (cfg.n_kv_heads, cfg.value_dim)]
    return queries + keys_values[: 0 if cfg.borrows else 2 - cfg.k_is_v]


def sites(layer: LayerConfig) -> Sites:
    """With GQA each v channel is read by the query heads of its group, which share its scale."""
    cfg: AttentionConfig = layer.mixer
    n, n_kv, h, width = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim, cfg.value_dim
    shared = np.arange(n_kv * width).reshape(n_kv, 1, width)
    channel = np.broadcast_to(shared, (n_kv, n // n_kv, width)).reshape(-1)
    is_alone = not (cfg.attention_parts or cfg.k_is_v or cfg.inner_norms or cfg.borrows)
    if not is_alone or cfg.qkv_limit is not None:  # no rows of v alone, or a norm or limit between
        return Sites(("qkv",), "", None, channel)
    before_v = (n * (1 + cfg.attn_gate) + n_kv) * h
    return Sites(("qkv",), "qkv", (before_v, before_v + n_kv * width), channel)


def flops(layer: LayerConfig, sequence_length: int) -> float:
    """A token's operations beside its products with weights, the mean over a sequence."""
    cfg: AttentionConfig = layer.mixer
    window = cfg.sliding_window or sequence_length
    # The mean number of keys a query sees: half of T, or nearly the window.
    seen = min(window, sequence_length)
    keys = seen - seen * seen / (2.0 * sequence_length)
    return 2.0 * cfg.n_heads * (cfg.head_dim + cfg.value_dim) * keys
