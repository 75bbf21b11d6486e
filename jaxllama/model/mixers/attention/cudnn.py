"""Attention of several new tokens on a GPU in 16-bit floats: cuDNN's fused kernels, mostly.

    causal(q, k, v, window)                a sequence by itself: training, prompts of an empty cache
    extend(q, k, v, cache, n)   new tokens after the n[B] in each row's cache; with a
                                           window, after the last of these

cuDNN's causal mask begins at the first key of a call, and its padding mask ends at a row's last
key.  So a token's sum over keys has two parts: a causal one over its own chunk, and one without a
mask over the past, in blocks of keys.  Each call returns the logarithm of its sum of exponentials,
which weighs the parts in float32 (FlashAttention, arXiv 2205.14135; the split over keys is
FlashDecoding's).

A block of the past is a copy of a part of the cache.  Quantized values become floats in it.  Values
that no row owns become zeros: cuDNN multiplies them by a weight of zero, and they may be NaN.
Blocks past the longest row are not run.  For an int8 cache ``pallas_kernels.attention.past``
computes a block from the codes, where it has a kernel.

With a window, a token sees one key of the past less than the token before it.  Count the past's
keys from the newest.  All tokens see the first of them; fewer and fewer tokens see the others.
With the tokens in reverse order too, that is the causal mask.

A head's sink is one more key, whose value is zero.  It scales the result by
sigmoid(log-sum-exp - sink), in float32 and before the only cast.

Left out: capped scores (Gemma 2).  ``attention.chunk.has_cudnn`` says which heads cuDNN takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.attention import past
from pallas_kernels.attention.blockwise import floats, part_of
from pallas_kernels.attention.operands import Cached, Entries, capacity_of
from pallas_kernels.attention.plain import is_visible
from pallas_kernels.attention.rope_cache import place
from pallas_kernels.dispatch import choose_plan, device_of
from pallas_kernels.fixed_sums import has_fixed_sums, planned_capacity
from pallas_kernels.jax_internals import cudnn_attention, cudnn_version
from pallas_kernels.qtensor import QTensor
from pallas_kernels.transform import Op, chosen

# Tokens of the past, of all rows together, that are copied at once: 134 MB for 8 heads of 128.
PAST_TOKENS = 32768
# Largest number of segments of a row that are read one by one, and of bytes that the backward pass
# works in then.  With 16 both passes take 1.1 to 1.55 ms, with 64 2.2 to 2.6, and a mask's 2.25 (4
# rows of 2,048, 32 heads of 128).
MOST_SEGMENTS = 16
MOST_WORK = 5 * 10**9


def causal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None = None,
    sinks: jax.Array | None = None,
    segments: jax.Array | None = None,
    begins: jax.Array | None = None,
) -> jax.Array:
    """``q[B, T, N, H]`` over ``k, v[B, T, K, H]`` -> ``[B, T, N, H]``; see ``has_two_widths``.

    window: keys that a query sees, itself included.  sinks: ``[N]``, without a derivative here.
    segments: int32 ``[B, T]``; a query sees the keys of its own segment.  Without sinks only.
    begins: int32 ``[B, M]``, where they begin, then -1.  On Hopper, without a window, up to
    ``MOST_SEGMENTS`` are read one by one if the backward pass then works in at most ``MOST_WORK``
    bytes.  Otherwise a mask is an array ``[B, 1, T, T]``.
    """
    if (
        segments is not None
        and begins is not None
        and window is None
        and _reads_segments(q, begins)
    ):
        return _segments_alone(q, k, v, begins)
    if segments is not None:
        place = jnp.arange(q.shape[1], dtype=jnp.int32)
        seen = segments[:, :, None] == segments[:, None, :]
        seen &= is_visible(place[None], place[None], window)
        # The kernels skip what lies behind the diagonal; a mask alone would be read whole.
        return jax.nn.dot_product_attention(
            q, k, v, mask=seen[:, None], is_causal=True, implementation="cudnn"
        )
    if sinks is not None:
        inner = window if window is not None and window < q.shape[1] else None
        return _finished(*_with_log_sum(q, k, v, is_causal=True, window=inner), sinks, q.dtype)
    if v.shape[-1] != q.shape[-1]:  # which jax.nn.dot_product_attention refuses
        fused_attention, masks = cudnn_attention()
        return fused_attention(
            q,
            k,
            v,
            scale=q.shape[-1] ** -0.5,
            mask_type=masks.CAUSAL,
            sliding_window_length=window,
        )
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def has_two_widths() -> bool:
    """Whether cuDNN takes keys and values of different widths: from Hopper and 9.10 on."""
    major = float(getattr(jax.devices()[0], "compute_capability", "0"))
    return major >= 9 and cudnn_version() >= 91000


def _reads_segments(q: jax.Array, begins: jax.Array) -> bool:
    """Whether each segment is read alone; cuDNN's packed layout needs Hopper.

    With more than 128 features its derivatives are wrong, NaN among them (cuDNN 9.14).
    """
    # The backward pass has an array of q's shape for each of the M segments, however short.
    work = 8 * begins.shape[1] * q.size
    is_small = begins.shape[1] <= MOST_SEGMENTS and work <= MOST_WORK and q.shape[-1] <= 128
    return is_small and str(getattr(device_of(q), "compute_capability", "")).startswith("9.")


def _segments_alone(q: jax.Array, k: jax.Array, v: jax.Array, begins: jax.Array) -> jax.Array:
    """Causal attention within the segments that begin at ``begins[B, M]``, then -1."""
    fused_attention, masks = cudnn_attention()
    end = jnp.int32(q.shape[1])
    ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    sizes = jnp.where(begins < 0, -1, jnp.where(ends < 0, end, ends) - begins)
    # The API wants M + 1 offsets, of which a row's last ones are -1.
    offsets = jnp.pad(begins, ((0, 0), (0, 1)), constant_values=-1)
    return fused_attention(
        q,
        k,
        v,
        q_seqlen=sizes,
        kv_seqlen=sizes,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=q.shape[-1] ** -0.5,
        mask_type=masks.PADDING_CAUSAL,
    )


def extend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: tuple[Entries, ...],
    n_past: jax.Array,
    table: jax.Array | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    expand: Callable[..., tuple[Any, Any]] = lambda k, v: (k, v),
) -> jax.Array:
    """Return attention ``[B, T, N, H]`` of new tokens over their past and causally over themselves.

    q: ``[B, T, N, H]``.  k, v: the new tokens, ``[B, T, K, H]``.
    cache: keys and values ``[B, S, K, H]``, or pages with a table (``model.cache.Cache``).
    n_past: ``[B]``, tokens of each row of the cache that are read.
    window, sinks: as for ``causal``.
    expand: makes keys and values of a part of other caches, which have no window.
    """
    batch, page, capacity = q.shape[0], cache[0].shape[1], capacity_of(cache[0], table)
    if window is not None and window < capacity:
        return _extend_through(window, q, k, v, cache, n_past, table, sinks)
    block = min(planned_capacity(max(PAST_TOKENS // batch, 128)), capacity)
    if table is not None:
        block -= block % page if block > page else block - page  # whole pages

    def one_block(index: jax.Array, carry: tuple[jax.Array, jax.Array]):
        # A last block that exceeds the capacity begins earlier; a roll moves keys done to its end.
        begin = jnp.minimum(index * block, capacity - block)
        n_keys = jnp.clip(n_past - index * block, 0, block)

        def keys_first(kv: Entries) -> Entries:
            part = part_of(kv, begin, block, table)
            if not capacity % block:
                return part
            return jax.tree.map(lambda x: jnp.roll(x, begin - index * block, axis=1), part)

        past_k, past_v = expand(*map(keys_first, cache))
        part, log = attend_past(q, past_k, past_v, n_keys)
        return _merge(*carry, part, jnp.where((n_keys > 0)[:, None, None], log, -jnp.inf))

    def with_past() -> jax.Array:
        out, log = _with_log_sum(q, k, v, is_causal=True)
        carry = out.astype(jnp.float32), log
        out, log = _each_block(block == capacity, block, jnp.max(n_past), one_block, carry)
        return _finished(out, log, sinks, q.dtype)

    # Each branch has its own call: a result from outside would be copied.
    def alone() -> jax.Array:
        return _finished(*_with_log_sum(q, k, v, is_causal=True), sinks, q.dtype)

    return _unless_empty(n_past, table, with_past, alone)


def _unless_empty(
    n_past: jax.Array,
    table: jax.Array | None,
    with_past: Callable[[], jax.Array],
    alone: Callable[[], jax.Array],
) -> jax.Array:
    """Choose a branch by whether a row has a past. One of those in pages has, or ``Chunk.fresh``
    says that none has. Where sums are fixed, pages have the other cache's program, and its bits."""
    if table is not None and not has_fixed_sums():
        return with_past()
    return lax.cond(jnp.max(n_past) > 0, with_past, alone)


def _each_block(
    is_one: bool,
    block: int,
    longest: jax.Array,
    one_block: Callable[..., tuple[jax.Array, jax.Array]],
    carry: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Run ``one_block`` for each block of the longest past; the only one without a loop, unless
    sums are fixed."""
    if is_one and not has_fixed_sums():
        return one_block(jnp.int32(0), carry)
    return lax.fori_loop(0, (longest + block - 1) // block, one_block, carry)


def _extend_through(
    window: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: tuple[Entries, ...],
    n_past: jax.Array,
    table: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """``extend`` with a window.

    Count the past's keys from the newest.  All tokens see the first ``shared`` keys.  Only the
    first ``corner`` tokens see the next ``corner`` keys: token i sees all of them but the last i.
    """
    corner = min(q.shape[1], window - 1)
    shared = window - 1 - corner  # none where some tokens see no past
    most = planned_capacity(max(PAST_TOKENS // q.shape[0], 128))
    block = min(most, -(-shared // 128) * 128)

    def one_block(index: jax.Array, carry: tuple[jax.Array, jax.Array]):
        n_keys = jnp.clip(jnp.minimum(n_past, shared) - index * block, 0, block)
        past_k, past_v = _newest(cache, n_past, index * block, block, table)
        part, log = attend_past(q, past_k, past_v, n_keys)
        return _merge(*carry, part, jnp.where((n_keys > 0)[:, None, None], log, -jnp.inf))

    def with_corner(out: jax.Array, log: jax.Array) -> tuple[jax.Array, jax.Array]:
        n_keys = jnp.clip(n_past - shared, 0, corner)
        newest = _newest(cache, n_past, shared, corner, table)
        past_k, past_v = (_zeros_behind(floats(kv, q.dtype), n_keys) for kv in newest)
        reverse = lambda x: jnp.flip(x, axis=1)  # noqa: E731
        seeing = reverse(q[:, :corner])
        at_least_one = jnp.maximum(n_keys, 1)
        part, part_log = _with_log_sum(seeing, past_k, past_v, at_least_one, is_causal=True)
        part_log = jnp.where((n_keys > 0)[:, None, None], reverse(part_log), -jnp.inf)
        merged = _merge(out[:, :corner], log[:, :corner], reverse(part), part_log)
        pairs = zip(merged, (out, log), strict=True)
        out, log = (jnp.concatenate([new, old[:, corner:]], axis=1) for new, old in pairs)
        return out, log

    def chunk_alone() -> tuple[jax.Array, jax.Array]:
        inner = window if window < q.shape[1] else None
        return _with_log_sum(q, k, v, is_causal=True, window=inner)

    def with_past() -> jax.Array:
        out, log = chunk_alone()
        out = out.astype(jnp.float32)
        if shared:
            longest = jnp.minimum(jnp.max(n_past), shared)
            out, log = _each_block(block >= shared, block, longest, one_block, (out, log))
        return _finished(*with_corner(out, log), sinks, q.dtype)

    alone = lambda: _finished(*chunk_alone(), sinks, q.dtype)  # noqa: E731
    return _unless_empty(n_past, table, with_past, alone) if corner else alone()


def _newest(
    cache: tuple[Entries, ...],
    n_past: jax.Array,
    first: jax.Array | int,
    n: int,
    table: jax.Array | None,
) -> tuple[Any, ...]:
    """Return ``n`` tokens of each row's past, newest first, ``[B, n, ...]``.

    They follow the newest ``first`` of the row's ``n_past[B]`` tokens.  Entries past a row's oldest
    token have arbitrary values.
    """
    slots = n_past[:, None] - 1 - first - jnp.arange(n, dtype=jnp.int32)[None, :]
    slots = jnp.maximum(slots, 0)
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    if table is not None:
        rows, slots = place(cache[0], slots, table)
    return jax.tree.map(lambda leaf: leaf.at[rows, slots].get(mode="clip"), cache)


def attend_past(
    q: jax.Array, k: Cached, v: Cached, n_keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return attention of ``q`` over each row's first ``n_keys[B]`` keys, and its log-sum-exp.

    q: ``[B, T, N, H]``.  k, v: ``[B, S, K, H]``.  The logarithms are float32 ``[B, T, N]``.  A row
    without keys is computed with one key of zeros.
    """
    found = choose_plan("attend_past", None, lambda: past.plan(q, k), q, k)
    return _attend_past(chosen(found, None), None, q, k, v, n_keys)


def _past_by_cudnn(
    _: None, q: jax.Array, k: Cached, v: Cached, n_keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    k, v = (_zeros_behind(floats(kv, q.dtype), n_keys) for kv in (k, v))
    return _with_log_sum(q, k, v, jnp.maximum(n_keys, 1))


def _past_by_kernel(
    _: None, q: jax.Array, k: QTensor, v: QTensor, n_keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return past.attend(q, k, _zeros_behind(floats(v, q.dtype), n_keys), n_keys)


_attend_past = Op("attend_past", _past_by_cudnn, _past_by_kernel)


def _merge(
    out: jax.Array, log: jax.Array, part: jax.Array, part_log: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two means and the logarithms of their weights -> those of both; the first's is finite."""
    total = jnp.logaddexp(log, part_log)
    share, part_share = jnp.exp(log - total)[..., None], jnp.exp(part_log - total)[..., None]
    return out * share + part.astype(jnp.float32) * part_share, total


def _finished(
    out: jax.Array, log: jax.Array, sinks: jax.Array | None, dtype: DTypeLike
) -> jax.Array:
    """``out [B, T, N, H]`` in ``dtype``, with the heads' sinks in its softmax; log: of its sums."""
    if sinks is not None:
        share = jax.nn.sigmoid(log - sinks.astype(jnp.float32))
        out = out.astype(jnp.float32) * share[..., None]
    return out.astype(dtype)


def _zeros_behind(x: jax.Array, n: jax.Array) -> jax.Array:
    """``x[B, S, K, H]`` with zeros from position ``n[B]`` on."""
    is_owned = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < n[:, None]
    return jnp.where(is_owned[:, :, None, None], x, jnp.zeros_like(x))


def _with_log_sum(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    n_keys: jax.Array | None = None,
    *,
    is_causal: bool = False,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention, causal, over the first ``n_keys[B]`` keys, or both, and the logarithm of each sum
    of exponentials, float32 ``[B, T, N]``.  Causally the first query sees the first key alone."""
    # jax.nn.dot_product_attention rounds the logarithms to 16 bits: weights off by percents.
    fused_attention, masks = cudnn_attention()
    mask, n_queries = masks.CAUSAL, None
    if n_keys is not None:
        mask = masks.PADDING_CAUSAL if is_causal else masks.PADDING
        n_queries = jnp.full(q.shape[:1], q.shape[1], jnp.int32)
    out, log = fused_attention(
        q,
        k,
        v,
        q_seqlen=n_queries,
        kv_seqlen=n_keys,
        scale=q.shape[-1] ** -0.5,
        mask_type=mask,
        sliding_window_length=window,
        return_residual=True,
    )
    return out, jnp.swapaxes(log, 1, 2)
