"""Attention of a chunk's queries: many tokens of a row at once.

    attend(q, k, v, positions, window)                     over keys and values of the sequence
    attend_cached(q, cache, positions, lengths, window)    over a cache that holds the new tokens
    over_past(q, k, v, cache, positions, lengths, window)  the same, by the fastest form

Queries go in blocks, so memory is linear in the sequence.  On a GPU in 16 bits ``attend`` is
cuDNN's kernel, unless scores are capped.  On a CPU both are one handler
(``pallas_kernels.cpu.attend``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.model.mixers.attention.cudnn import causal, extend, has_two_widths
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.typing import Tree
from pallas_kernels.attention.blockwise import blockwise_attention
from pallas_kernels.attention.plain import (
    attention_scores,
    is_visible,
    softmax,
    weighted_values,
)
from pallas_kernels.attention.rope_cache import from_cache_basis
from pallas_kernels.cpu import attend as cpu
from pallas_kernels.cpu.handler import CpuPlan
from pallas_kernels.dispatch import Plan, Reason, choose_plan, device_of
from pallas_kernels.qtensor import QTensor
from pallas_kernels.transform import XLA, Op, chosen

_Static = tuple[int | None, float | None, Plan | None]  # window, softcap, the handler's plan
QUERY_BLOCK = 512


def has_cudnn(
    q: jax.Array | jax.ShapeDtypeStruct, v: jax.Array | jax.ShapeDtypeStruct | None = None
) -> bool:
    """Return whether cuDNN's fused attention takes these heads on this machine.

    It takes 16-bit heads of up to 128 features, in eights, and on Hopper of up to 256.  From there
    on values may have fewer than keys, as in latent attention.  v: None is as wide as q.  AMD's
    GPUs, which jax calls "gpu" too, have no compute capability in numbers.
    """
    is_half = q.dtype in (jnp.bfloat16, jnp.float16)
    capability = str(getattr(device_of(q), "compute_capability", ""))
    is_cuda = jax.default_backend() == "gpu" and capability[:1].isdigit()
    if not is_cuda or not is_half or q.shape[-1] % 8:
        return False
    if v is None or v.shape[-1] == q.shape[-1]:
        return q.shape[-1] <= (256 if capability.startswith("9.") else 128)
    return v.shape[-1] <= 128 and v.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and has_two_widths()


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    window: int | None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    segments: jax.Array | None = None,
    begins: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of ``q[B, T, N, H]`` over ``k, v[B, T, K, H]``.

    positions: ``[B, T]``, which count up by one.  v: as wide as k, or narrower.
    sinks: as ``decode_attention`` takes them.  segments: int32 ``[B, T]`` of packed rows, whose
    tokens see their own segment; ``positions`` are not read then.  begins: int32 ``[B, M]``, where
    these segments begin, then -1, if that is known.
    """
    width = v.shape[-1]
    if width < q.shape[-1] and (segments is not None or not has_cudnn(q, v)):
        v = jnp.pad(v, ((0, 0),) * 3 + ((0, q.shape[-1] - width),))
        out = attend(q, k, v, positions, window, softcap, sinks, segments, begins)
        return out[..., :width]
    if segments is not None:
        if has_cudnn(q) and softcap is None and sinks is None:
            return causal(q, k, v, window, segments=segments, begins=begins)
        place = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), segments.shape)
        return _attend_in_blocks((window, softcap, None), q, k, v, place, sinks, segments)
    if has_cudnn(q, v) and softcap is None:
        if sinks is None:
            return causal(q, k, v, window)
        return _causal_with_sinks(XLA, (window, None, None), q, k, v, positions, sinks)
    plan = _cpu_plan("attend", q, k, softcap, sinks=sinks)
    form = _attend_in_blocks if plan is None else functools.partial(_attend, chosen(plan, None))
    return form((window, softcap, plan), q, k, v, positions, sinks)


def _cpu_plan(
    name: str,
    q: jax.Array,
    k: jax.Array | QTensor,
    softcap: float | None,
    table: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> Plan | None:
    """The CPU's handler, where it takes the call."""
    no_kernel = lambda: Reason("several tokens of a row have no Mosaic kernel")  # noqa: E731
    on_cpu = functools.partial(cpu.prompt_plan, q, k, table, softcap, sinks is not None)
    return choose_plan(name, None, no_kernel, q, k, cpu=on_cpu)


def _attend_on_cpu(
    call: _Static,
    q: jax.Array,
    k: jax.Array | QTensor,
    v: jax.Array | QTensor,
    positions: jax.Array,
    table: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    window, _, plan = call
    assert isinstance(plan, CpuPlan)
    return cpu.attend(
        q,
        k,
        v,
        positions + 1,
        table,
        sinks=sinks,
        window=window,
        scale=q.shape[-1] ** -0.5,
        plan=plan,
    )


def _attend_in_blocks(
    call: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """XLA's form of ``attend``."""
    window, softcap, _ = call
    marks = (positions,) if segments is None else (positions, segments)

    def block(
        queries: tuple[jax.Array, ...],
        k: jax.Array,
        v: jax.Array,
        marks: tuple[jax.Array, ...],
        sinks: jax.Array | None,
    ) -> jax.Array:
        q, *q_marks = queries
        scores = attention_scores(q, k, softcap=softcap)
        visible = is_visible(q_marks[0], marks[0], window)
        for q_segments, k_segments in zip(q_marks[1:], marks[1:], strict=True):
            visible &= q_segments[:, :, None] == k_segments[:, None, :]
        weights = softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), sinks)
        return weighted_values(weights, v).astype(q.dtype)

    return by_query_blocks(block, (q, *marks), k, v, marks, sinks, recomputes=True)


def _causal_on_cpu(
    call: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None = None,
) -> jax.Array:
    return _attend_on_cpu(call, q, k, v, positions - positions[:, :1], sinks=sinks)


def _causal_by_cudnn(
    call: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    sinks: jax.Array,
) -> jax.Array:
    del positions
    return causal(q, k, v, call[0], sinks)


_attend = Op("attend", _attend_in_blocks, _causal_on_cpu)
# cuDNN's logarithms of sums, which sinks need, have no derivative.
_causal_with_sinks = Op("attend", _causal_by_cudnn, derivative=_attend_in_blocks)


def attend_cached(
    q: jax.Array,
    cache: KVCache,
    positions: jax.Array,
    lengths: jax.Array,
    window: int | None,
    softcap: float | None = None,
    table: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of ``q[B, T, N, H]`` over the cache, which already holds the T new tokens.

    ``positions[B, T]`` are the queries'; ``lengths[B]`` says how many of the T are valid; the
    others give finite garbage.  sinks: as ``decode_attention`` takes them.
    """
    plan = _cpu_plan("attend_cached", q, cache.k, softcap, table, sinks)
    form = _cached_in_blocks
    if plan is not None:
        form = functools.partial(_attend_cached, chosen(plan, None))
    positions = without_padding(positions, lengths)
    return form((window, softcap, plan), q, cache.k, cache.v, positions, table, sinks)


def _cached_in_blocks(
    call: _Static,
    q: jax.Array,
    k: jax.Array | QTensor,
    v: jax.Array | QTensor,
    positions: jax.Array,
    table: jax.Array | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """XLA's form of ``attend_cached``."""
    window, softcap, _ = call
    block = functools.partial(
        blockwise_attention, k=k, v=v, window=window, softcap=softcap, table=table, sinks=sinks
    )
    return by_query_blocks(lambda qp: block(qp[0], positions=qp[1]), (q, positions))


_attend_cached = Op("attend_cached", _cached_in_blocks, _attend_on_cpu)


def over_past(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVCache,
    positions: jax.Array,
    lengths: jax.Array,
    window: int | None,
    softcap: float | None,
    table: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """``attend_cached`` of q, whose tokens' own keys and values are k and v ``[B, T, K, H]``.

    The cache holds them, their past and perhaps later tokens.  All are in the cache's basis, and
    the result is in the model's.
    """
    if has_cudnn(q) and softcap is None:
        # The past of a row without new tokens need not be read.
        n_past = jnp.where(lengths > 0, positions[:, 0], 0)
        out = extend(q, k, v, (cache.k, cache.v), n_past, table, window, sinks)
    else:
        out = attend_cached(q, cache, positions, lengths, window, softcap, table, sinks)
    return from_cache_basis(cache.v, out)


def without_padding(positions: jax.Array, lengths: jax.Array) -> jax.Array:
    """``positions [B, T]`` with padded queries at their row's last valid position: they look at
    nothing unwritten."""
    valid = jnp.arange(positions.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    last = jnp.max(jnp.where(valid, positions, 0), axis=1, keepdims=True)
    return jnp.minimum(positions, last)


def by_query_blocks(
    block: Callable[..., jax.Array],
    queries: tuple[jax.Array, ...],
    *others: Tree,
    size: int = QUERY_BLOCK,
    recomputes: bool = False,
) -> jax.Array:
    """Return ``block(queries, *others)`` of arrays ``[B, T, ...]``, ``size`` queries at a time.

    recomputes: a backward pass recomputes the scores, so one block of them is alive at a time.
    """
    n_new = queries[0].shape[1]
    if n_new <= size:
        return block(queries, *others)
    blocks = -(-n_new // size)

    def split(x: jax.Array) -> jax.Array:
        """The last query is repeated as padding."""
        padding = (0, 0), (0, blocks * size - n_new), *((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, padding, mode="edge").reshape(x.shape[0], blocks, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    one = jax.checkpoint(block) if recomputes else block
    out = lax.map(lambda some: one(some, *others), tuple(map(split, queries)))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :n_new]
