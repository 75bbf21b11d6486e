"""Attention over a KVCache: GQA, MQA and MHA, prefill in chunks, decode, sliding window, sparse V.

``q`` heads are grouped by the kv head they share: N = K * G.  A query at position p sees the keys
at positions s <= p (and > p - window).  ``attention.chunk`` computes several tokens of a row at
once.  After a cached past, on a GPU in 16 bits, cuDNN computes them (``mixers.attention.cudnn``),
unless scores are capped.

One new token per row goes to ``pallas_kernels.attention.rope_attention``: RoPE, cache write and
attention.  The tokens of a ``records.Draft`` are such rows too, several of one cache row.  All of
them are written first, and then read the row together by ``decode_attention`` of several tokens.
Each reads it alone if its kernel does not take so many tokens, or if the draft is exact.

The caller says which tokens read V sparsely (``attn_sparsity``,
``mixers.attention.sparse``).  Generated tokens do, those of a prompt do not, however many tokens
come at once.

Keys and values of another layer are ``attention.shared``'s.

An int4 cache is stored in a rotated basis.  The op that writes it rotates the queries too, and
``from_cache_basis`` rotates the result back (``pallas_kernels.attention.rope_cache``); in decoding
the kernels do so.  o's weights could include that last rotation.  They do not, because one set of
weights serves caches of every dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import AttentionConfig, LayerConfig
from jaxllama.model.mixers.attention.chunk import (
    attend,
    over_past,
    without_padding,
)
from jaxllama.model.mixers.attention.parts import part
from jaxllama.model.mixers.attention.pieces import attend_pieces
from jaxllama.model.mixers.attention.shared import KeysValues, borrow
from jaxllama.model.mixers.attention.sparse import sparse_attend
from jaxllama.model.mixers.attention.state import KVCache, as_pages, init_state
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.records import At, Chunk, Draft, Pieces, Step
from jaxllama.model.rope import Ropes, narrowed, scaled_by_position, widened
from jaxllama.typing import Params, Tree
from pallas_kernels.attention.blockwise import (
    CPU_DECODE_BLOCK,
    blockwise_attention,
    joined,
)
from pallas_kernels.attention.op import MOST_ROWS, decode_attention
from pallas_kernels.attention.operands import capacity_of
from pallas_kernels.attention.plain import rotate
from pallas_kernels.attention.rope_attention import rope_and_attend, tokens_have_a_steps_bits
from pallas_kernels.attention.rope_cache import (
    from_cache_basis,
    norm_heads,
    rope_and_write,
    rope_and_write_tokens,
)
from pallas_kernels.rows.rms_norm import rms_norm

HeadNorms = tuple[jax.Array, jax.Array, float]  # weights of q and of k, eps

__all__ = ["init_state", "inputs", "mix"]


def inputs(layer: LayerConfig, p: Params) -> Params:
    """Return the weights that multiply the layer's input."""
    del layer
    return p["qkv"]


def mix(
    layer: LayerConfig, p: Params, projected: Tree, cache: LayerState, at: At
) -> tuple[jax.Array, LayerState]:
    """Multi-head attention with rotary positions: the products of ``inputs`` -> (heads
    ``[B, T, N H]``, cache).

    Without a cache a layer that others borrow from returns its keys and values instead.
    """
    cfg: AttentionConfig = layer.mixer
    if cfg.borrows:
        return borrow(cfg, p, projected, cache, at), cache
    gate, qkv = unpacked(cfg, p, projected)
    if cfg.rope.query_beta:
        qkv = _scaled_queries(cfg, qkv, at.positions)
    if cfg.qk_norm_last:
        cfg, qkv, at = _normed_last(cfg, p, qkv, at)
    if cache is not None and at.rope is not None and cache.k.shape[-1] != cfg.head_dim:
        heads, cache = _in_wide_heads(cfg, p, qkv, cache, at, at.rope)
    else:
        heads, cache = _ATTENDS[type(at)](cfg, p, qkv, cache, at)
    return finished(cfg, p, heads.reshape(*qkv.shape[:2], -1, cfg.head_dim), gate), cache


def _scaled_queries(cfg: AttentionConfig, qkv: jax.Array, positions: jax.Array) -> jax.Array:
    """``qkv [B, T, (N + 2K) H]`` with q multiplied by a function of its position."""
    q, kv = jnp.split(qkv, (cfg.n_heads * cfg.head_dim,), axis=-1)
    return jnp.concatenate([scaled_by_position(cfg.rope, q, positions), kv], axis=-1)


def _normed_last(
    cfg: AttentionConfig, p: Params, qkv: jax.Array, at: At
) -> tuple[AttentionConfig, jax.Array, At]:
    """RoPE, then the norms of q and k; what follows has neither: its tables turn by nothing."""
    assert at.rope is not None
    cos, sin = at.rope.of(cfg.rope, cfg.head_dim)
    heads = qkv.reshape(*qkv.shape[:-1], -1, cfg.head_dim)
    qk, v = jnp.split(heads, (cfg.n_heads + cfg.n_kv_heads,), axis=2)
    heads = jnp.concatenate([rotate(qk, cos, sin), v], axis=2)
    heads = norm_heads(heads, cfg.n_kv_heads, _norms(p), cfg.norm_eps, False)
    still = Ropes(((cfg.rope, cfg.head_dim),), ((jnp.ones_like(cos), jnp.zeros_like(sin)),))
    plain = cfg.replace(qk_norm="none", qk_norm_last=False)
    return plain, heads.reshape(qkv.shape), dataclasses.replace(at, rope=still)


def _in_wide_heads(
    cfg: AttentionConfig, p: Params, qkv: jax.Array, cache: KVCache, at: At, rope: Ropes
) -> tuple[jax.Array, KVCache | None]:
    """Attention over a cache of wider heads (``cache.cached_width``)."""
    width = cache.k.shape[-1]
    heads, rope = widened(split_heads(cfg, p, qkv), rope, width)
    wide = cfg.replace(head_dim=width, qk_norm="none")
    at = dataclasses.replace(at, rope=rope)
    out, after = _ATTENDS[type(at)](wide, p, heads.reshape(*qkv.shape[:2], -1), cache, at)
    return narrowed(out.reshape(*qkv.shape[:2], -1, width), cfg.head_dim), after


def unpacked(
    cfg: AttentionConfig, p: Params, projected: Tree
) -> tuple[jax.Array | None, jax.Array]:
    """The product of ``inputs`` as (the heads' gate or None, ``q|k|v [B, T, (N + 2K) H]``)."""
    width, gate = cfg.n_heads * cfg.head_dim, None
    if cfg.attn_gate:
        gate, projected = projected[..., :width], projected[..., width:]
    if cfg.qkv_limit is not None:
        projected = jnp.clip(projected, -cfg.qkv_limit, cfg.qkv_limit)
    if cfg.k_is_v:
        projected = jnp.concatenate([projected, projected[..., width:]], axis=-1)
    if cfg.d_v is not None:
        qk, v = jnp.split(projected, ((cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim,), axis=-1)
        rest = ((0, 0),) * v.ndim + ((0, cfg.head_dim - cfg.d_v),)
        v = jnp.pad(v.reshape(*v.shape[:-1], cfg.n_kv_heads, cfg.d_v), rest)
        projected = jnp.concatenate([qk, v.reshape(*v.shape[:-2], -1)], axis=-1)
    for name in cfg.attention_parts:
        projected = part(name).apply(cfg, p, projected)
    return gate, projected


def sinks_of(cfg: AttentionConfig, p: Params) -> jax.Array | None:
    """The heads' sinks, float32 ``[N]``, if the model has them."""
    return p["sinks"]["weight"] if cfg.attn_sinks else None


def finished(
    cfg: AttentionConfig, p: Params, heads: jax.Array, gate: jax.Array | None
) -> jax.Array:
    """Heads ``[B, T, N, H]`` as the output product reads them: times ``sigmoid(gate)`` in float32,
    with one cast, or with a norm."""
    y = heads[..., : cfg.d_v].reshape(*heads.shape[:2], -1)
    if cfg.inner_norms:
        y = rms_norm(y, p["inner_norm"]["weight"], cfg.norm_eps)
    if gate is None:
        return y
    return (y.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(y.dtype)


def split_heads(cfg: AttentionConfig, p: Params, qkv: jax.Array) -> jax.Array:
    """``qkv [..., (N + 2K) H]`` -> ``[..., N + 2K, H]``, with the norms of q and k."""
    heads = qkv.reshape(*qkv.shape[:-1], -1, cfg.head_dim)
    if cfg.qk_norm == "none":
        return heads
    return norm_heads(heads, cfg.n_kv_heads, _norms(p), cfg.norm_eps, cfg.qk_norm == "full")


def _with_norm(
    cfg: AttentionConfig, p: Params, qkv: jax.Array
) -> tuple[jax.Array, HeadNorms | None]:
    """``split_heads``, where each head's norm is left to who takes (weights of q, of k, eps)."""
    if cfg.qk_norm != "head":
        return split_heads(cfg, p, qkv), None
    return qkv.reshape(*qkv.shape[:2], -1, cfg.head_dim), (*_norms(p), cfg.norm_eps)


def _norms(p: Params) -> tuple[jax.Array, jax.Array]:
    return p["q_norm"]["weight"], p["k_norm"]["weight"]


def _extend(
    cfg: AttentionConfig, p: Params, qkv: jax.Array, cache: KVCache | None, at: Chunk
) -> tuple[jax.Array, KVCache | KeysValues | None]:
    """Any number of tokens: ``qkv [B, T, (N + 2K) H]`` -> (heads ``[B, T, N, H]``, cache)."""
    n, n_kv, window = cfg.n_heads, cfg.n_kv_heads, cfg.sliding_window
    positions, lengths, table = at.positions, at.lengths, at.table
    assert at.rope is not None
    rope, cap, sinks = at.rope.of(cfg.rope, cfg.head_dim), cfg.attn_softcap, sinks_of(cfg, p)
    if cache is None:
        qkv = split_heads(cfg, p, qkv)
        q, k, v = jnp.split(qkv, (n, n + n_kv), axis=2)
        q, k = rotate(q, *rope), rotate(k, *rope)
        lent = KeysValues(k, v) if cfg.lends else None
        return attend(q, k, v, positions, window, cap, sinks, at.segments, at.begins), lent
    is_new = jnp.arange(qkv.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    slots = jnp.where(is_new, positions, capacity_of(cache.k, table))
    if cap is None and _is_dense(cfg, at):
        heads, norm = _with_norm(cfg, p, qkv)
        if tokens_have_a_steps_bits(heads, cache.k, table):
            out, *kv = rope_and_attend(
                heads,
                *rope,
                cache.k,
                cache.v,
                slots,
                norm=norm,
                window=window,
                table=table,
                sinks=sinks,
            )
            return out, KVCache(*kv)
    qkv = split_heads(cfg, p, qkv)
    q, k, v, *kv = rope_and_write_tokens(qkv, *rope, cache.k, cache.v, slots, table=table)
    cache = KVCache(*kv)

    def dense() -> jax.Array:
        if at.fresh:
            return from_cache_basis(cache.v, attend(q, k, v, positions, window, cap, sinks))
        return over_past(q, k, v, cache, positions, lengths, window, cap, table, sinks)

    return _mixed(cfg, dense, q, cache, at), cache


def _in_pieces(
    cfg: AttentionConfig, p: Params, qkv: jax.Array, cache: KVCache, at: Pieces
) -> tuple[jax.Array, KVCache]:
    """``_extend`` of pieces: ``qkv [2 B, T, (N + 2K) H]`` -> (heads ``[2 B, T, N, H]``, cache)."""
    assert at.rope is not None
    rope, ends = at.rope.of(cfg.rope, cfg.head_dim), (cfg.n_heads, cfg.n_heads + cfg.n_kv_heads)
    q, k, v = jnp.split(split_heads(cfg, p, qkv), ends, axis=2)
    q, k = rotate(q, *rope), rotate(k, *rope)
    limits = cfg.sliding_window, cfg.attn_softcap
    return attend_pieces(q, k, v, cache, at, *limits, sinks_of(cfg, p))


def _decode(
    cfg: AttentionConfig, p: Params, qkv: jax.Array, cache: KVCache, at: Step
) -> tuple[jax.Array, KVCache]:
    """One token per row: ``qkv [B, 1, (N + 2K) H]`` -> (heads ``[B, N, H]``, cache)."""
    assert at.rope is not None
    window, position, table = cfg.sliding_window, at.positions[:, 0], at.table
    slots = jnp.where(at.lengths > 0, position, capacity_of(cache.k, table))
    cos, sin = at.rope.of(cfg.rope, cfg.head_dim)
    where = (cos[:, 0], sin[:, 0], cache.k, cache.v, slots)
    if cfg.attn_softcap is not None or not _is_dense(cfg, at):
        q, *kv = rope_and_write(split_heads(cfg, p, qkv)[:, 0], *where, table=table)
        return _query(cfg, p, q, KVCache(*kv), at), KVCache(*kv)
    heads, norm = _with_norm(cfg, p, qkv)
    sinks = sinks_of(cfg, p)
    # A row without a new token sees nothing and gives zeros.
    out, *kv = rope_and_attend(
        heads[:, 0], *where, norm=norm, window=window, table=table, sinks=sinks
    )
    return out, KVCache(*kv)


def _query(cfg: AttentionConfig, p: Params, q: jax.Array, cache: KVCache, at: Step) -> jax.Array:
    """One query a row, ``q [B, N, H]``, over the cache that holds its token already; a row without
    a new token sees nothing."""
    window, position, table = cfg.sliding_window, at.positions[:, 0], at.table
    seen = jnp.where(at.lengths > 0, position + 1, 0)
    if cfg.attn_softcap is not None:  # no kernel caps scores
        out = blockwise_attention(
            q[:, None],
            cache.k,
            cache.v,
            seen[:, None] - 1,
            window=window,
            softcap=cfg.attn_softcap,
            table=table,
            sinks=sinks_of(cfg, p),
        )
        return from_cache_basis(cache.v, out[:, 0])

    def dense() -> jax.Array:
        sinks = sinks_of(cfg, p)
        out = decode_attention(q, cache.k, cache.v, seen, table=table, window=window, sinks=sinks)
        return out[:, None]

    return _mixed(cfg, dense, q[:, None], cache, at)[:, 0]


def _verify(
    cfg: AttentionConfig, p: Params, qkv: jax.Array, cache: KVCache, at: Draft
) -> tuple[jax.Array, KVCache]:
    """``_decode`` where ``at.width`` consecutive rows are tokens of one row of the cache."""
    assert at.rope is not None
    positions, is_new = at.by_row(at.positions), at.by_row(at.lengths[:, None])
    has_kernel = cfg.attn_softcap is None and _is_dense(cfg, at)
    if has_kernel:
        heads, norm = _with_norm(cfg, p, qkv)
        heads = at.by_row(heads)
        if tokens_have_a_steps_bits(heads, cache.k, at.table):
            cos, sin = map(at.by_row, at.rope.of(cfg.rope, cfg.head_dim))
            slots = jnp.where(is_new > 0, positions, capacity_of(cache.k, at.table))
            out, *kv = rope_and_attend(
                heads,
                cos,
                sin,
                cache.k,
                cache.v,
                slots,
                norm=norm,
                window=cfg.sliding_window,
                table=at.table,
                sinks=sinks_of(cfg, p),
            )
            return out.reshape(-1, *out.shape[2:]), KVCache(*kv)
    pages, shared = as_pages(cache, at.table, at.width)
    step = Step(at.positions, at.lengths, at.rope, shared, sparse=at.sparse)
    if at.exact and has_kernel:
        # A step writes and attends in one kernel, with roundings of its own: so all tokens are
        # written by the first call, and each finds those before it in the second.
        _, pages = _decode(cfg, p, qkv, pages, step)
        out, pages = _decode(cfg, p, qkv, pages, step)
        return out, jax.tree.map(lambda new, old: new.reshape(old.shape), pages, cache)
    slots = jnp.where(at.lengths > 0, at.positions[:, 0], capacity_of(pages.k, shared))
    cos, sin = (table[:, 0] for table in at.rope.of(cfg.rope, cfg.head_dim))
    q, *kv = rope_and_write(
        split_heads(cfg, p, qkv)[:, 0], cos, sin, pages.k, pages.v, slots, table=shared
    )
    pages = KVCache(*kv)
    cache = jax.tree.map(lambda new, old: new.reshape(old.shape), pages, cache)
    too_many = at.width * cfg.n_heads > MOST_ROWS * cfg.n_kv_heads
    if at.exact or (too_many and has_kernel and jax.default_backend() == "gpu"):
        return _query(cfg, p, q, pages, step), cache

    q = at.by_row(q[:, None])
    chunk = Chunk(positions, at.row_lengths(), at.rope, at.table, sparse=at.sparse)
    seen = jnp.where(is_new > 0, positions + 1, 0)
    window, cap = cfg.sliding_window, cfg.attn_softcap

    def dense() -> jax.Array:
        table, sinks = at.table, sinks_of(cfg, p)
        if cap is None:
            return decode_attention(
                q, cache.k, cache.v, seen, table=table, window=window, sinks=sinks
            )
        out = blockwise_attention(
            q,
            cache.k,
            cache.v,
            seen - 1,
            window=window,
            softcap=cap,
            block=CPU_DECODE_BLOCK if jax.default_backend() == "cpu" else None,
            table=table,
            sinks=sinks,
        )
        return from_cache_basis(cache.v, out)

    return _mixed(cfg, dense, q, cache, chunk).reshape(qkv.shape[0], *q.shape[2:]), cache


# By the record of the tokens: ``qkv [B, T, (N + 2K) H]`` -> (heads of B T tokens, cache).
_ATTENDS: dict[type[At], Callable[..., tuple[jax.Array, LayerState]]] = {
    Chunk: _extend,
    Step: _decode,
    Draft: _verify,
    Pieces: _in_pieces,
}


def _is_dense(cfg: AttentionConfig, at: At) -> bool:
    """Whether every token reads all of V."""
    return cfg.attn_sparsity == 1.0 or not at.sparse


def _mixed(
    cfg: AttentionConfig,
    dense: Callable[[], jax.Array],
    q: jax.Array,
    cache: KVCache,
    at: Chunk | Step,
) -> jax.Array:
    """``[B, T, N, H]``: sparse attention of q over the cache for the tokens that ``at.sparse``
    names, ``dense()`` for the others; each runs only where some token wants it."""
    share, window = cfg.attn_sparsity, cfg.sliding_window
    positions, lengths, sparse, table = at.positions, at.lengths, at.sparse_tokens, at.table
    if share == 1.0:
        return dense()

    def few() -> jax.Array:
        whole = cache
        if table is not None:
            whole = KVCache(joined(cache.k, table), joined(cache.v, table))
        places = positions if q.shape[1] == 1 else without_padding(positions, lengths)
        out = sparse_attend(q, whole, places, share, window)
        return from_cache_basis(cache.v, out)

    if sparse is None:
        return few() if at.sparse else dense()
    is_new = jnp.arange(q.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    kinds = jnp.stack([jnp.any(is_new & sparse), jnp.all(sparse | ~is_new)])
    both = lambda: jnp.where(sparse[:, :, None, None], few(), dense())  # noqa: E731
    return lax.switch(jnp.sum(kinds, dtype=jnp.int32), (dense, both, few))
