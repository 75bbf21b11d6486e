"""Attention over a KVCache: GQA, MQA and MHA, prefill in chunks, decode, sliding window, sparse V.

``q`` heads are grouped by the kv head they share: N = K * G.  A query at position p sees the keys
at positions s <= p (and > p - window).  Two forms:

* ``attend`` over k, v of the sequence itself (no cache: training, teacher forcing).  Queries go in
  blocks, so memory is linear in the sequence.
* ``attend_cached`` over a cache for several new tokens: ``blockwise_attention``, queries in blocks.

On a GPU in 16-bit both are cuDNN's kernels (``cudnn_attention``), the second where no window cuts
the past.

One new token per row goes to ``pallas_kernels.rope_attention``: RoPE, cache write and attention.

An int4 cache is kept in a basis of its own: what goes in and the queries are ``spread``, what
comes out is ``unspread`` (``pallas_kernels.rope_cache``; decoding, by the kernels).  o's weights
could hold that last rotation; they do not, because one set of weights serves caches of every dtype.

``sparse_decode`` is FlexGen's top-k of V (arXiv 2303.06865, section 5).
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxllama.cache import KVCache, quantize_kv, write
from jaxllama.config import ModelConfig
from jaxllama.cudnn_attention import causal, extend, has_cudnn
from jaxllama.layers import Linear, Normed, Stream
from jaxllama.rope import apply_rope
from pallas_kernels.blockwise_attention import (
    attention_scores,
    blockwise_attention,
    floats,
    is_visible,
    load,
    weighted_values,
)
from pallas_kernels.qtensor import QTensor, dequantize
from pallas_kernels.rope_attention import rope_and_attend
from pallas_kernels.rope_cache import rope_and_write, spread, unspread

QUERY_BLOCK = 512


class Attention(nn.Module):
    """Multi-head attention with rotary positions.

    ``(x[B, T, D], cache | None, positions[B, T], lengths[B], rope) -> (y[B, T, D], cache | None)``
    where lengths counts the valid new tokens of each row and rope is ``rope_tables``' pair.
    dtype: of the result, for an x that comes quantized.  stream: the residual stream that y belongs
    to; y is then that stream with it, as ``Linear`` gives it.
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array | QTensor | Normed,
        cache: KVCache | None,
        positions: jax.Array,
        lengths: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        dtype: DTypeLike | None = None,
        *,
        stream: jax.Array | None = None,
    ) -> tuple[jax.Array | Stream, KVCache | None]:
        cfg = self.cfg
        batch, n_new, _ = x.shape
        n, n_kv, h = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
        qkv = Linear((n + 2 * n_kv) * h, cfg.d_model, cfg.qkv_bias, name="qkv")(x, dtype)
        if isinstance(x, Normed) and x.pending is not None:
            qkv, stream = qkv
        qkv = qkv.reshape(batch, n_new, n + 2 * n_kv, h)
        if cache is not None and n_new == 1:
            out, cache = self._decode(qkv, cache, positions, lengths, rope)
        else:
            out, cache = self._extend(qkv, cache, positions, lengths, rope)
        out = out.reshape(batch, n_new, n * h)
        o = Linear(cfg.d_model, n * h, cfg.o_bias, split_inputs=True, name="o")
        return o(out, stream=stream), cache

    def _extend(
        self,
        qkv: jax.Array,
        cache: KVCache | None,
        positions: jax.Array,
        lengths: jax.Array,
        rope: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, KVCache | None]:
        """Any number of tokens: ``qkv [B, T, N + 2K, H]`` -> (heads ``[B, T, N, H]``, cache)."""
        n, n_kv, window = self.cfg.n_heads, self.cfg.n_kv_heads, self.cfg.sliding_window
        q, k, v = jnp.split(qkv, (n, n + n_kv), axis=2)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        if cache is None:
            return attend(q, k, v, positions, window), None
        q, k, v = spread(cache.k, q, k, v)
        is_new = jnp.arange(q.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
        cache = write(cache, k, v, jnp.where(is_new, positions, cache.k.shape[1]))
        if has_cudnn(q) and window is None:
            # What a row without new tokens holds need not be read.
            n_past = jnp.where(lengths > 0, positions[:, 0], 0)
            out = extend(q, *_as_stored(cache, k, v), cache.k, cache.v, n_past)
        elif has_cudnn(q):
            # Rows that begin at position 0 see their own new tokens and nothing else.
            out = lax.cond(
                jnp.all(positions[:, 0] == 0),
                lambda: attend(q, *_as_stored(cache, k, v), positions, window),
                lambda: attend_cached(q, cache, positions, lengths, window),
            )
        else:
            out = attend_cached(q, cache, positions, lengths, window)
        return unspread(cache.v, out), cache

    def _decode(
        self,
        qkv: jax.Array,
        cache: KVCache,
        positions: jax.Array,
        lengths: jax.Array,
        rope: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, KVCache]:
        """One token per row: ``qkv [B, 1, N + 2K, H]`` -> (heads ``[B, N, H]``, cache)."""
        cfg, position = self.cfg, positions[:, 0]
        slots = jnp.where(lengths > 0, position, cache.k.shape[1])
        new = (qkv[:, 0], *(table[:, 0] for table in rope), cache.k, cache.v, slots)
        if cfg.attn_sparsity < 1.0:
            q, *kv = rope_and_write(*new)
            cache = KVCache(*kv)
            q = q[:, None]
            out = sparse_decode(q, cache, positions, cfg.attn_sparsity, cfg.sliding_window)
            return unspread(cache.v, out[:, 0]), cache
        # A row without a new token sees nothing and gives zeros.
        out, *kv = rope_and_attend(*new, window=cfg.sliding_window)
        return out, KVCache(*kv)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, window: int | None
) -> jax.Array:
    """Causal attention of ``q[B, T, N, H]`` over ``k, v[B, T, K, H]``, all at ``positions``, which
    count up by one."""
    n_new = q.shape[1]
    if has_cudnn(q):
        return causal(q, k, v, window)
    if n_new <= QUERY_BLOCK:
        return _attend_block(q, k, v, positions, positions, window)
    blocks = -(-n_new // QUERY_BLOCK)
    pad = blocks * QUERY_BLOCK - n_new
    q_blocks, p_blocks = _split_queries(q, pad, blocks), _split_queries(positions, pad, blocks)
    # Scores are recomputed in the backward pass: one block of them is alive at a time.
    block = jax.checkpoint(functools.partial(_attend_block, window=window))
    out = lax.map(lambda qp: block(qp[0], k, v, qp[1], positions), (q_blocks, p_blocks))
    return _join_queries(out, n_new)


def _attend_block(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: int | None,
) -> jax.Array:
    scores = attention_scores(q, k)
    visible = is_visible(q_positions, k_positions, window)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return weighted_values(weights, v).astype(q.dtype)


def attend_cached(
    q: jax.Array,
    cache: KVCache,
    positions: jax.Array,
    lengths: jax.Array,
    window: int | None,
) -> jax.Array:
    """Attention of ``q[B, T, N, H]`` over the cache, which already holds the T new tokens.

    ``positions[B, T]`` are the queries'; ``lengths[B]`` says how many of the T are valid; the
    others give finite garbage.
    """
    n_new = q.shape[1]
    valid = jnp.arange(n_new, dtype=jnp.int32)[None, :] < lengths[:, None]
    # A padded query stands at the row's last valid position: it looks at nothing unwritten.
    last = jnp.max(jnp.where(valid, positions, 0), axis=1, keepdims=True)
    positions = jnp.minimum(positions, last)
    if n_new <= QUERY_BLOCK:
        return blockwise_attention(q, cache.k, cache.v, positions, window=window)
    blocks = -(-n_new // QUERY_BLOCK)
    pad = blocks * QUERY_BLOCK - n_new
    q_blocks, p_blocks = _split_queries(q, pad, blocks), _split_queries(positions, pad, blocks)
    block = functools.partial(blockwise_attention, k=cache.k, v=cache.v, window=window)
    out = lax.map(lambda qp: block(qp[0], positions=qp[1]), (q_blocks, p_blocks))
    return _join_queries(out, n_new)


def sparse_decode(
    q: jax.Array,
    cache: KVCache,
    positions: jax.Array,
    sparsity: float,
    window: int | None,
) -> jax.Array:
    """One query token per row, ``q[B, 1, N, H]``, reading only the heaviest rows of V.

    Of a row's ``len - 1`` older keys each head keeps the ``int(sparsity * (len - 1))`` with the
    largest softmax weights, plus the newest token always; the weights are those of the full softmax
    and are not renormalised.  Keys are all read; of V only the kept rows are gathered.
    """
    batch, _, n, h = q.shape
    n_kv, capacity = cache.k.shape[2], cache.k.shape[1]
    k = load(cache.k, jnp.int32(0), capacity, q.dtype)
    k_positions = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    visible = is_visible(positions, k_positions, window)[:, None, None]
    scores = jnp.where(visible, attention_scores(q, k), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)[:, :, :, 0]  # [B, K, G, S]
    newest = k_positions[:, None, None, :] == positions[:, :, None, None]  # [B, 1, 1, S]
    # The newest is ranked above every probability, so it is always the first that is kept.
    ranked = jnp.where(newest, 2.0, weights)
    keep = 1 + int(sparsity * (capacity - 1))
    _, index = lax.top_k(ranked, keep)  # [B, K, G, keep]
    kept = jnp.take_along_axis(weights, index, axis=-1)
    quota = 1 + jnp.floor(jnp.float32(sparsity) * positions.astype(jnp.float32)).astype(jnp.int32)
    used = jnp.arange(keep, dtype=jnp.int32) < quota[:, :, None, None]
    used &= jnp.take_along_axis(jnp.broadcast_to(visible[:, :, :, 0], weights.shape), index, -1)
    rows = jnp.arange(batch)[:, None, None, None]
    heads = jnp.arange(n_kv)[None, :, None, None]
    v = jax.tree.map(lambda leaf: leaf[rows, index, heads], cache.v)  # [B, K, G, keep, H]
    v = floats(v, q.dtype)
    v = jnp.where(used[..., None], v, jnp.zeros_like(v))
    kept = jnp.where(used, kept, 0.0)
    out = jnp.einsum(
        "bkgs,bkgsh->bkgh", kept, v.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return out.reshape(batch, 1, n, h).astype(q.dtype)


def _as_stored(cache: KVCache, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """k and v as a reader of the cache would get them, rounding included."""

    def stored(kv: jax.Array | QTensor, new: jax.Array) -> jax.Array:
        if isinstance(kv, QTensor):
            return dequantize(quantize_kv(new, jnp.dtype(kv.dtype).name), new.dtype)
        return new.astype(kv.dtype).astype(new.dtype)

    return stored(cache.k, k), stored(cache.v, v)


def _split_queries(x: jax.Array, pad: int, blocks: int) -> jax.Array:
    """``[B, T, ...]`` -> ``[blocks, B, T / blocks, ...]``, the last query repeated as padding."""
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2), mode="edge")
    x = x.reshape(x.shape[0], blocks, -1, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def _join_queries(blocks: jax.Array, n_new: int) -> jax.Array:
    joined = jnp.moveaxis(blocks, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :n_new]
