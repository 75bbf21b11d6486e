"""Multi-head latent attention (MLA): keys and values come from one latent of each token.

    latent_s = norm(down x_s)                    R features, which all heads share
    k[n, s]  = up_k[n] latent_s | rope(key_s)    the turning part of a key is shared, too
    v[n, s]  = up_v[n] latent_s

The cache holds ``latent | rope(key)`` of each token: one array with one head, whose first R
features also stand for the values.  Several tokens are attended to in this form, with the keys
and values of each head ("expanded"); those of a past are made again, where cuDNN takes the heads.

With an indexer a query reads the keys that ``latent.indexer`` chooses, absorbed as well.

Over a cache the up products move to the other side of attention ("absorbed"), because
``q . up_k latent = (up_k^T q) . latent``.  All query heads then read the same R + r features, and
``up_v`` multiplies the sum of latents.  The ops of ordinary attention do so, as they do for a
single kv head.  Where ``pallas_kernels.latent`` has a kernel, new tokens of a step or a draft take
it.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllama.config import LatentAttentionConfig, LayerConfig
from jaxllama.model.linear import linear, linear_of_norm
from jaxllama.model.lora import floats as float_weight
from jaxllama.model.mixers.attention.chunk import attend, has_cudnn
from jaxllama.model.mixers.attention.cudnn import extend
from jaxllama.model.mixers.attention.shared import over_cache
from jaxllama.model.mixers.attention.state import KVCache, as_pages
from jaxllama.model.mixers.latent import indexer
from jaxllama.model.mixers.latent.indexer import IndexHeads
from jaxllama.model.mixers.latent.state import LatentCache, init_state
from jaxllama.model.records import At, Chunk, Draft, Step
from jaxllama.model.rope import scaled_by_position
from jaxllama.typing import Params
from pallas_kernels.attention.blockwise import floats
from pallas_kernels.attention.operands import Entries, LatentCodes, capacity_of
from pallas_kernels.attention.rope_cache import from_cache_basis, store, to_cache_basis
from pallas_kernels.dispatch import own_plan
from pallas_kernels.latent.op import latent_attention, plan
from pallas_kernels.latent.step import absorbed, latent_step, of_heads, turned_last
from pallas_kernels.latent.step_plan import LatentStep, step_plan
from pallas_kernels.operands import Columns
from pallas_kernels.rows.rms_norm import rms_norm

__all__ = ["init_state", "inputs", "mix"]


class LatentHeads(NamedTuple):
    """Queries ``[B, T, N, d_nope + r]``, latents ``[B, T, R]`` and shared keys ``[B, T, 1, r]``.

    indexed: the indexer's, if the layer has one.
    """

    q: jax.Array
    low: jax.Array
    key: jax.Array
    indexed: IndexHeads | None = None


def inputs(layer: LayerConfig, p: Params) -> list[Params]:
    """Return the weights that multiply the layer's input."""
    del layer
    names = ("q_a" if "q_a" in p else "q", "kv_a", "index_k", "index_w")
    return [p[name] for name in names if name in p]


def mix(
    layer: LayerConfig,
    p: Params,
    projected: Sequence[Columns],
    cache: LatentCache | None,
    at: At,
) -> tuple[jax.Array, LatentCache | None]:
    """The products of ``inputs`` -> (heads ``[B, T, N d_v]``, cache)."""
    cfg: LatentAttentionConfig = layer.mixer
    assert at.rope is not None
    tables = at.rope.of(cfg.rope, cfg.d_rope)
    heads = heads_of(cfg, p, projected)
    if isinstance(at, Step) and cache is not None and cfg.indexer is None:
        found = _step(cfg, p, heads.q, projected[1], cache, at)
        if found is not None:
            return found
    heads = turned(heads, *tables)
    if cfg.rope.query_beta:
        heads = heads._replace(q=scaled_by_position(cfg.rope, heads.q, at.positions))
    if cache is not None:
        cache = written(heads, cache, at)
    if _chooses(cfg, cache, at):
        assert heads.indexed is not None
        held = LatentCache(entries(heads), heads.indexed.key) if cache is None else cache
        out = indexer.over_chosen(cfg, absorbed_heads(cfg, p, heads), heads.indexed, held, at)
        out = lifted(cfg, p, out)
    elif isinstance(at, Chunk) and (cache is None or at.fresh or _has_cudnn(cfg, heads.q)):
        k, v = expanded(cfg, p, heads.low, heads.key)
        if cache is None or at.fresh:
            out = attend(heads.q, k, v, at.positions, None, segments=at.segments)
        else:
            n_past = jnp.where(at.lengths > 0, at.positions[:, 0], 0)
            past = functools.partial(_past, cfg, p, heads.q.dtype)
            out = extend(heads.q, k, v, (cache.k,), n_past, at.table, expand=past)
    else:
        assert cache is not None
        out = lifted(cfg, p, over_latents(absorbed_heads(cfg, p, heads), cache, at))
    return out.reshape(*out.shape[:2], -1), cache


def _step(
    cfg: LatentAttentionConfig,
    p: Params,
    q: jax.Array,
    entry: Columns,
    cache: LatentCache,
    at: Step,
) -> tuple[jax.Array, LatentCache] | None:
    """Return ``mix`` of queries before RoPE if the kernels of a step compute it, else None."""
    weight, gamma = p["kv_b"]["weight"], p["kv_norm"]["weight"]
    if not isinstance(weight, jax.Array) or cfg.rope.query_beta:
        return None
    assert at.rope is not None
    is_new, position = at.lengths > 0, at.positions[:, 0]
    slots = jnp.where(is_new, position, capacity_of(cache.k, at.table))
    seen = jnp.where(is_new, position + 1, 0)
    cos, sin = (table[:, 0] for table in at.rope.of(cfg.rope, cfg.d_rope))
    up = weight.reshape(cfg.n_heads, -1, cfg.kv_rank)
    tokens = q[:, 0], entry.rows[:, 0]
    x = LatentStep(*tokens, gamma, cos, sin, cache.k, slots, seen, at.table, up)
    if own_plan(lambda: step_plan(x), *x) is None:
        return None
    out, entries = latent_step(x, start=entry.start, eps=cfg.norm_eps)
    return out.reshape(*q.shape[:2], -1), dataclasses.replace(cache, k=entries)


def over_latents(q: jax.Array, cache: LatentCache, at: At) -> jax.Array:
    """Return attention of absorbed queries ``[B, T, N, R + r]`` over a cache that holds their
    tokens: sums of its entries, or with the op of latent attention of their latents."""
    both, rows, table = KVCache(cache.k, cache.k), at.by_row(q), at.table
    has_op = isinstance(cache.k, LatentCodes)
    if isinstance(at, Step | Draft) and (has_op or cache.k.dtype == q.dtype):
        held = both
        if isinstance(at, Draft) and at.exact:
            held, table = as_pages(both, table, at.width)
            rows = q
        entries = jax.tree.map(lambda leaf: leaf[:, :, 0], held.k)
        if has_op or own_plan(lambda: plan(rows, entries, table), rows, entries) is not None:
            seen = jnp.where(at.lengths > 0, at.positions[:, 0] + 1, 0).reshape(rows.shape[:2])
            scale = q.shape[-1] ** -0.5
            out = latent_attention(rows, entries, seen, scale=scale, table=table)
            return out.reshape(*q.shape[:-1], -1)
    return over_cache(q, both, at, None)


def _chooses(cfg: LatentAttentionConfig, cache: LatentCache | None, at: At) -> bool:
    """Whether a query may see more keys than the indexer chooses."""
    if cfg.indexer is None:
        return False
    is_first = isinstance(at, Chunk) and at.fresh
    n_new = at.positions.shape[1]
    most = n_new if cache is None or is_first else capacity_of(cache.k, at.table)
    return most > cfg.indexer.top_k


def heads_of(cfg: LatentAttentionConfig, p: Params, projected: Sequence[Columns]) -> LatentHeads:
    """Return the heads of the products of ``inputs``, before RoPE."""
    q, down, *of_index = (columns.value for columns in projected)
    index = None
    if "q_a" in p:
        scale = p["q_norm"]["weight"]
        if cfg.indexer is not None:
            q_low = rms_norm(q, scale, cfg.norm_eps)
            index = indexer.heads_of(cfg.indexer, p, q_low, *of_index)
        q = linear_of_norm(projected[0], scale, cfg.norm_eps, p["q"])
    low, key = jnp.split(down, (cfg.kv_rank,), axis=-1)
    low = rms_norm(low, p["kv_norm"]["weight"], cfg.norm_eps)
    q = q.reshape(*q.shape[:-1], cfg.n_heads, cfg.head_dim)
    return LatentHeads(q, low, key[..., None, :], index)


def turned(heads: LatentHeads, cos: jax.Array, sin: jax.Array) -> LatentHeads:
    """Return the heads with RoPE; tables ``[B, T, r / 2]``."""
    turn = functools.partial(turned_last, cos=cos, sin=sin)
    index = None if heads.indexed is None else indexer.turned(heads.indexed, cos, sin)
    return LatentHeads(turn(heads.q), heads.low, turn(heads.key), index)


def entries(heads: LatentHeads) -> jax.Array:
    """Return what the cache holds of each token, ``[B, T, 1, R + r]``."""
    return jnp.concatenate([heads.low[:, :, None], heads.key], axis=-1)


def written(heads: LatentHeads, cache: LatentCache, at: At) -> LatentCache:
    """Return the cache with the new tokens, whose key has RoPE already."""
    new = at.by_row(entries(heads))
    positions = at.by_row(at.positions).reshape(new.shape[:2])
    place = jnp.arange(new.shape[1], dtype=jnp.int32)[None, :]
    is_new = place < at.row_lengths()[:, None]
    slots = jnp.where(is_new, positions, capacity_of(cache.k, at.table))
    (new,) = to_cache_basis(cache.k, new)
    keys = cache.v
    if heads.indexed is not None:
        keys = store(keys, at.by_row(heads.indexed.key), slots, at.table)
    return dataclasses.replace(cache, k=store(cache.k, new, slots, at.table), v=keys)


def absorbed_heads(cfg: LatentAttentionConfig, p: Params, heads: LatentHeads) -> jax.Array:
    """Return the queries of latents ``[B, T, N, R + r]``."""
    return absorbed(heads.q, _ups(cfg, p)[0], cfg.width)


def lifted(cfg: LatentAttentionConfig, p: Params, out: jax.Array) -> jax.Array:
    """Return the heads ``[B, T, N, d_v]`` of sums of the cache's entries ``[B, T, N, R + r]``."""
    _, up = _ups(cfg, p)
    return of_heads("btnr,nvr->btnv", out[..., : cfg.kv_rank], up).astype(out.dtype)


def _ups(cfg: LatentAttentionConfig, p: Params) -> tuple[jax.Array, jax.Array]:
    """The products that make keys ``[N, d_nope, R]`` and values ``[N, d_v, R]``."""
    both = float_weight(p["kv_b"]["weight"]).reshape(cfg.n_heads, -1, cfg.kv_rank)
    return both[:, : cfg.d_nope], both[:, cfg.d_nope :]


def expanded(
    cfg: LatentAttentionConfig, p: Params, low: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Latents ``[B, T, R]`` and shared keys ``[B, T, 1, r]`` -> each head's keys and values."""
    keys_values = linear(low, p["kv_b"]).reshape(*low.shape[:2], cfg.n_heads, -1)
    k, v = jnp.split(keys_values, (cfg.d_nope,), axis=-1)
    shared = jnp.broadcast_to(key, (*k.shape[:-1], cfg.d_rope))
    return jnp.concatenate([k, shared], axis=-1), v


def _has_cudnn(cfg: LatentAttentionConfig, q: jax.Array) -> bool:
    return has_cudnn(q, jax.ShapeDtypeStruct((*q.shape[:-1], cfg.d_v), q.dtype))


def _past(
    cfg: LatentAttentionConfig, p: Params, dtype: jnp.dtype, part: Entries
) -> tuple[jax.Array, jax.Array]:
    """Return the keys and values of a part of the cache, expanded.

    A product of ``kv_b`` with the past costs less than scores of absorbed queries, which are
    (2 R + r) / (d_nope + r + d_v) times wider.
    """
    both = from_cache_basis(part, floats(part, dtype))
    low, key = jnp.split(both, (cfg.kv_rank,), axis=-1)
    return expanded(cfg, p, low[:, :, 0], key)
