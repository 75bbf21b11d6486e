"""How a model is cut into ``n`` shards: what must divide, which rows and columns go where.

Tensor parallelism as in Megatron-LM (arXiv 1909.08053): the matmuls that read the residual stream
are split by output rows, those that write it by input columns, so that a layer needs two sums over
the shards.  Heads, the feed-forward's width and the vocabulary are split; norms and low-rank gate
inputs are whole everywhere.

``split_axis(path)`` says along which axis a parameter is split.  Where rows of several kinds are
fused (q|k|v, gate|up), a plain split would hand one shard all of q: ``row_order`` is the
permutation that makes shard j's slice ``[q_j, k_j, v_j]``, so that a shard is an ordinary, smaller
model (``local_config``) that knows nothing of the others.  ``natural_rows`` is its inverse.

Fewer kv heads than shards: each is repeated ``n / K`` times, in the weights and so in the cache,
which is the same function (query head i reads a copy of the head it read before).  A vocabulary
that n does not divide is padded with rows of zeros, whose logits are cut off again.

Left out: splitting the sequence or the layers; experts.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError

Path = tuple[str, ...]

_BY_ROWS = frozenset(
    """
    qkv gate_up embed head q k v g gk gk_1 q_conv k_conv v_conv qkvz ba conv decay f_1 g_1 kv_b
    """.split()
)
_BY_COLUMNS = frozenset(("o", "down"))


def split_axis(path: Path) -> int | None:
    """0: split by rows (outputs), 1: by columns (inputs), None: whole on every shard.

    ``path`` is of the parameter tree, ("layer_0", "mixer", "o", "weight").
    """
    parent, leaf = path[-2:]
    if parent in _BY_ROWS:
        return 0
    return 1 if parent in _BY_COLUMNS and leaf == "weight" else None


def check_shards(cfg: ModelConfig, n: int) -> None:
    """Raises JaxLlamaError naming what ``n`` shards do not divide, and the numbers that do."""
    if cfg.qk_norm == "full" and n > 1:
        raise JaxLlamaError(
            f"mesh: model={n}: the norms of q and k of {cfg.name} are over all heads; allowed: 1"
        )
    reason = _obstacle(cfg, n)
    if reason is None:
        return
    allowed = [k for k in range(1, _most_shards(cfg) + 1) if _obstacle(cfg, k) is None]
    raise JaxLlamaError(
        f"mesh: model={n} does not divide {reason} of {cfg.name}; "
        f"allowed: {', '.join(map(str, allowed))}"
    )


def _most_shards(cfg: ModelConfig) -> int:
    sizes = [cfg.n_heads] if "attention" in cfg.layer_types else []
    if "gla" in cfg.layer_types:
        assert cfg.gla is not None
        sizes.append(cfg.gla.n_heads)
    if "delta" in cfg.layer_types:
        assert cfg.delta is not None
        sizes.append(cfg.delta.n_k_heads)
    return min(sizes)


def _obstacle(cfg: ModelConfig, n: int) -> str | None:
    kinds = []
    if "attention" in cfg.layer_types:
        kinds.append(("", cfg.n_heads, cfg.n_kv_heads))
    if "gla" in cfg.layer_types:
        assert cfg.gla is not None
        kinds.append(("GLA ", cfg.gla.n_heads, cfg.gla.n_kv_heads))
    if "delta" in cfg.layer_types:
        assert cfg.delta is not None
        if cfg.delta.n_k_heads % n:
            return f"the {cfg.delta.n_k_heads} key heads of the delta rule"
    for kind, heads, kv_heads in kinds:
        if heads % n:
            return f"the {heads} {kind}heads"
        if kv_heads % n and n % kv_heads:
            return f"(and is not a multiple of) the {kv_heads} {kind}kv heads"
    return f"the feed-forward width {cfg.d_ff}" if cfg.d_ff % n else None


def replicated_config(cfg: ModelConfig, n: int) -> ModelConfig:
    """``cfg`` with kv heads repeated so that every one of ``n`` shards has its own."""
    check_shards(cfg, n)
    gla = cfg.gla
    if gla is not None and "gla" in cfg.layer_types:
        gla = dataclasses.replace(gla, n_kv_heads=max(gla.n_kv_heads, n))
    kv_heads = max(cfg.n_kv_heads, n) if "attention" in cfg.layer_types else cfg.n_kv_heads
    return cfg.replace(n_kv_heads=kv_heads, gla=gla)


def local_config(cfg: ModelConfig, n: int) -> ModelConfig:
    """The model that one of ``n`` shards of ``replicated_config(cfg, n)`` is."""
    cfg = replicated_config(cfg, n)
    changes: dict[str, object] = {
        "d_ff": cfg.d_ff // n,
        "vocab_size": padded_vocab(cfg, n) // n,
    }
    if "attention" in cfg.layer_types:
        changes |= {"n_heads": cfg.n_heads // n, "n_kv_heads": cfg.n_kv_heads // n}
    if "gla" in cfg.layer_types:
        assert cfg.gla is not None
        d_k, d_v = cfg.gla_head_dims
        heads = cfg.gla.n_heads // n
        changes["gla"] = dataclasses.replace(
            cfg.gla,
            n_heads=heads,
            n_kv_heads=cfg.gla.n_kv_heads // n,
            expand_k=_ratio(heads * d_k, cfg.d_model),
            expand_v=_ratio(heads * d_v, cfg.d_model),
        )
    if "delta" in cfg.layer_types:
        assert cfg.delta is not None
        heads, k_heads = cfg.delta.n_heads // n, cfg.delta.n_k_heads // n
        changes["delta"] = dataclasses.replace(cfg.delta, n_heads=heads, n_k_heads=k_heads)
    return cfg.replace(**changes)


def _ratio(width: int, d_model: int) -> float:
    """The float whose product with d_model is exactly ``width``, as GLAConfig wants it."""
    near = width / d_model
    for ratio in (near, math.nextafter(near, math.inf), math.nextafter(near, 0.0)):
        if ratio * d_model == width:
            return ratio
    raise AssertionError((width, d_model))


def padded_vocab(cfg: ModelConfig, n: int) -> int:
    return -(-cfg.vocab_size // n) * n


def row_order(cfg: ModelConfig, path: Path, n: int) -> np.ndarray | None:
    """For each row of the stored parameter the row of the original it is, -1 for a row of zeros;
    None where nothing moves.  ``cfg`` is the original model's; ``path`` is split by rows."""
    parent = path[-2]
    if n == 1 or split_axis(path) != 0:
        return None
    if parent in ("embed", "head"):
        pad = padded_vocab(cfg, n) - cfg.vocab_size
        return np.pad(np.arange(cfg.vocab_size), (0, pad), constant_values=-1) if pad else None
    if parent == "qkv":
        heads = (cfg.n_heads,) * (1 + cfg.attn_gate) + (cfg.n_kv_heads,) * 2
        return _interleave([(h, cfg.head_dim) for h in heads], n)
    if parent == "gate_up":
        return _interleave([(cfg.d_ff, 1)] * 2, n)
    if parent in ("qkvz", "conv", "ba"):
        assert cfg.delta is not None
        k, v = (cfg.delta.n_k_heads, cfg.delta.d_k), (cfg.delta.n_heads, cfg.delta.d_v)
        parts = [k, k, v] + [v] * (parent == "qkvz" and cfg.delta.gate == "full")
        if parent == "ba":
            parts = [(cfg.delta.n_heads, 1)] * (1 + (cfg.delta.decay == "head"))
        return _interleave(parts, n)
    if parent in ("decay", "f_1", "g_1", "kv_b") or (parent == "q" and cfg.latent is not None):
        return None
    gla = cfg.gla
    assert gla is not None
    if parent in ("q", "g", "gk", "q_conv") or gla.n_kv_heads >= n:
        return None
    d_k, d_v = cfg.gla_head_dims
    return _interleave([(gla.n_kv_heads, d_v if parent in ("v", "v_conv") else d_k)], n)


def _interleave(parts: list[tuple[int, int]], n: int) -> np.ndarray:
    """Rows of fused ``parts`` (heads, rows a head), regrouped as n shards of all parts; a part of
    fewer heads than n has each repeated."""
    begin, columns = 0, []
    for heads, width in parts:
        rows = np.arange(begin, begin + heads * width).reshape(heads, width)
        begin += heads * width
        columns.append(np.repeat(rows, max(1, n // heads), axis=0).reshape(n, -1))
    return np.concatenate(columns, axis=1).reshape(-1)


def natural_rows(order: np.ndarray) -> np.ndarray:
    """For each row of the original, the first place ``order`` puts it: the inverse."""
    rows, places = np.unique(order, return_index=True)
    return places[rows >= 0]
