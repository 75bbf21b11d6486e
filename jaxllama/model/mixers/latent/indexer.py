"""The indexer of sparse attention over latents: which keys a query reads.

    score[t, s] = sum_i w[t, i] relu(q[t, i] . k[s])        i: the indexer's heads
    choice[t]   = the top_k keys s that t may see, by their scores

q comes from the latent of the queries, w and k from the layer's input. k has a LayerNorm, and the
first features of q and k have RoPE. ``LatentCache.v`` holds k.

A row that cannot hold more than ``top_k`` keys is read whole, and no score is computed.

Source: DeepSeek-V3.2-Exp (technical report, section 2.1). Positive factors of the scores change no
choice and are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxllama.config import IndexerConfig, LatentAttentionConfig
from jaxllama.model.elementwise import layer_norm
from jaxllama.model.linear import linear
from jaxllama.model.mixers.attention.chunk import by_query_blocks, without_padding
from jaxllama.model.mixers.latent.state import LatentCache
from jaxllama.model.records import At, Draft, Pieces
from jaxllama.typing import Params
from pallas_kernels.attention.blockwise import floats, joined
from pallas_kernels.attention.operands import Entries
from pallas_kernels.attention.plain import precision, rotate
from pallas_kernels.attention.rope_cache import from_cache_basis, place, to_cache_basis
from pallas_kernels.dispatch import own_plan
from pallas_kernels.latent.chosen import attend_list, chosen_latent_attention, plan

EPS = 1e-6  # of k's LayerNorm
MOST = 1 << 26  # values of scores, or of chosen entries, that are alive at once


class IndexHeads(NamedTuple):
    """Queries ``[B, T, I, d]``, their weights ``[B, T, I]`` and keys ``[B, T, 1, d]``."""

    q: jax.Array
    weights: jax.Array
    key: jax.Array


def heads_of(
    options: IndexerConfig, p: Params, low: jax.Array, key: jax.Array, weights: jax.Array
) -> IndexHeads:
    """Return the heads before RoPE.

    low: the latent of the queries.  key, weights: the products of the layer's input.
    """
    q = linear(low, p["index_q"]).reshape(*low.shape[:-1], options.n_heads, options.head_dim)
    return IndexHeads(q, weights, layer_norm(key, p["index_norm"], EPS)[..., None, :])


def turned(heads: IndexHeads, cos: jax.Array, sin: jax.Array) -> IndexHeads:
    """Return the heads with RoPE; tables ``[B, T, r / 2]`` of the features that turn."""
    still = ((0, 0), (0, 0), (0, heads.q.shape[-1] // 2 - cos.shape[-1]))
    cos, sin = jnp.pad(cos, still, constant_values=1.0), jnp.pad(sin, still)
    return heads._replace(q=rotate(heads.q, cos, sin), key=rotate(heads.key, cos, sin))


def over_chosen(
    cfg: LatentAttentionConfig, q: jax.Array, heads: IndexHeads, cache: LatentCache, at: At
) -> jax.Array:
    """Return attention of ``q [B, T, N, F]`` over the entries that the indexer chooses: sums of
    entries, or with the kernel of chosen latents of their latents.

    The cache holds the new tokens already.
    """
    queries: tuple[jax.Array, ...] = (q, heads.q, heads.weights)
    positions, lengths, shape = at.positions, at.lengths, q.shape
    if isinstance(at, Draft):
        queries = tuple(map(at.by_row, queries))
        positions, lengths = at.by_row(positions), at.row_lengths()
    if isinstance(at, Pieces):  # two calls, so that both pieces of a row read its cache
        halves = [x.reshape(2, -1, *x.shape[1:]) for x in (*queries, positions, lengths)]
        outs = [_over_cache(cfg, half, cache, at.table) for half in zip(*halves, strict=True)]
        return jnp.concatenate(outs)
    if at.segments is not None:
        positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape[:2])
    rows = (*queries, positions, lengths)
    out = _over_cache(cfg, rows, cache, at.table, at.segments)
    return out.reshape(*shape[:3], out.shape[-1])


def _over_cache(
    cfg: LatentAttentionConfig,
    rows: Sequence[jax.Array],
    cache: LatentCache,
    table: jax.Array | None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """``over_chosen`` of rows (q, the indexer's q and weights, positions, lengths), a block of
    queries at a time."""
    assert cfg.indexer is not None
    q, *index, positions, lengths = rows
    batch, _, _, width = q.shape
    top_k, heads = cfg.indexer.top_k, cfg.indexer.n_heads
    keys = floats(cache.v if table is None else joined(cache.v, table), index[0].dtype)[:, :, 0]
    seen = jnp.where(lengths[:, None] > 0, without_padding(positions, lengths) + 1, 0)
    queries = (*to_cache_basis(cache.k, q), *index, seen)
    held = None
    if cache.k.dtype == q.dtype:
        assert isinstance(cache.k, jax.Array)
        held = cache.k[:, :, 0]
    queries = queries if segments is None else (*queries, segments)

    # One block of scores is alive at a time, in a backward pass, too.
    @jax.checkpoint
    def block(queries: tuple[jax.Array, ...]) -> jax.Array:
        q, of_index, weights, seen = queries[:4]
        of_queries = queries[4] if segments is not None else None
        chosen, is_chosen = choice(of_index, weights, keys, seen, top_k, of_queries, segments)
        if held is not None and own_plan(functools.partial(plan, q, held, chosen), q, held):
            places = jnp.where(is_chosen, chosen, -1)  # the best come first
            return chosen_latent_attention(q, held, places, scale=width**-0.5, table=table)
        entries = _taken(cache.k, chosen, table, q.dtype)
        entries = jnp.where(is_chosen[..., None], entries, jnp.zeros_like(entries))
        return attend_list(q, entries, entries, is_chosen, width**-0.5)

    size = max(1, MOST // (batch * max(heads * keys.shape[1], top_k * width)))
    return from_cache_basis(cache.k, by_query_blocks(block, queries, size=size))


def choice(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    seen: jax.Array,
    top_k: int,
    of_queries: jax.Array | None = None,
    of_keys: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the places of the keys that queries read, int32 ``[B, T, top_k]``, and which of these
    exist.

    Parameters
    ----------
    q, weights, keys
        Float ``[B, T, I, d]``, ``[B, T, I]`` and ``[B, S, d]``.
    seen
        Number of keys before and at each query, int32 ``[B, T]``.
    of_queries, of_keys
        Segments of packed rows, int32 ``[B, T]`` and ``[B, S]``.
    """
    scores = jnp.einsum(
        "btid,bsd->btis", q, keys, preferred_element_type=jnp.float32, precision=precision(q)
    )
    scores = jnp.einsum(
        "btis,bti->bts",
        jax.nn.relu(scores),
        weights.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    visible = jnp.arange(keys.shape[1], dtype=jnp.int32) < seen[..., None]
    if of_queries is not None and of_keys is not None:
        visible &= of_queries[:, :, None] == of_keys[:, None, :]
    # No derivative: a choice has none.
    scores = lax.stop_gradient(jnp.where(visible, scores, -jnp.inf))
    best, chosen = lax.top_k(scores, top_k)
    return chosen, best > -jnp.inf


def _taken(kv: Entries, chosen: jax.Array, table: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """Entries ``[B, T, top_k, F]`` of a cache ``[B, S, 1, F]``, or of its pages."""
    slots = chosen.reshape(chosen.shape[0], -1)
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    if table is not None:
        rows, slots = place(kv, slots, table)
    taken = jax.tree.map(lambda leaf: leaf.at[rows, slots].get(mode="clip"), kv)
    return floats(taken, dtype).reshape(*chosen.shape, -1)
