"""The chunkwise form of GLA in plain XLA, forward and backward, for calls without a kernel.

A sequence is cut into chunks of C tokens.  With b the running sum of log_decay g inside a chunk,

    o      = (q e^b) S + A v                 A_ij = sum_d q_id k_jd e^(b_i - b_j),  j <= i
    S_next = e^(b_C) S + (k e^(b_C - b))^T v

(scale is applied to q).  The first is all matrix products; the second is a short scan over chunks.
No difference of running sums is ever formed: A is built level by level over a binary tree of
blocks.  At level s = 1, 2, 4 .. C/2, row i and column j meet if they lie in the second and the
first half of one block of 2s tokens, and

    b_i - b_j = (sum of g from the second half's start to i) + (sum of g after j to the first's end)

Both sums run over numbers <= 0, so every exponent is <= 0, nothing cancels, and log_decay = -inf is
a plain 0.  At each level a row is either on the query or on the key side.  So one operand
y = where(second half, q, k) * exp(its sum) gives the level's products as y y^T.

The backward pass keeps the inputs and one state per *group* of chunks, and recomputes the rest
group by group; memory is linear in T with a small constant.  The sums are linear in g, so their
gradient is their transpose: each term has the same exponent <= 0 as in the forward pass. The
gradient of log_decay at exp(g) = 0 is exactly 0.

Sources: arXiv 2312.06635, section 4; the tree replaces its secondary chunking.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.recurrence import groups
from pallas_kernels.recurrence.groups import (
    DecaySums,
    decay_sums,
    dot,
    operand_dtype,
    pairs,
    scan_unroll,
    second_halves,
    transpose_sums,
)
from pallas_kernels.recurrence.op import Heads


@functools.partial(jax.jit, static_argnames=("scale", "chunk"))
def chunked_forward(
    heads: Heads, initial_state: jax.Array, scale: float, chunk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the results of ``groups.forward``."""
    group = functools.partial(_group_forward, scale=scale, dtype=operand_dtype(heads.q.dtype))
    return groups.forward(group, heads, initial_state, chunk)


@functools.partial(jax.jit, static_argnames=("scale", "chunk"))
def chunked_backward(
    heads: Heads, borders: jax.Array, d_o: jax.Array, d_state: jax.Array, scale: float, chunk: int
) -> tuple[Heads, jax.Array]:
    """Return the results of ``groups.backward``."""
    group = functools.partial(_group_backward, scale=scale, dtype=operand_dtype(heads.q.dtype))
    return groups.backward(group, heads, borders, d_o, d_state, chunk)


def _group_forward(
    x: Heads, state: jax.Array, scale: float, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """(o float32 ``[B, H, N, C, Dv]``, state after the group) of ``[B, H, N, C, D]``: N chunks of C
    tokens."""
    levels, prefix, suffix = decay_sums(x.log_decay, dtype, groups.on_gpu())
    q = x.q.astype(jnp.float32) * scale
    k = x.k.astype(jnp.float32)
    a = _chunk_attention(q, k, levels, dtype)
    states, final = _chunk_states(k, x.v, prefix, suffix, state, dtype)
    o = dot("...ij,...je->...ie", a, x.v, dtype)
    return o + dot("...cd,...de->...ce", q * jnp.exp(prefix), states, dtype), final


def _group_backward(
    x: Heads, state: jax.Array, d_o: jax.Array, d_final: jax.Array, scale: float, dtype: jnp.dtype
) -> tuple[Heads, jax.Array]:
    """(gradients of the group's inputs, gradient of the state before the group), all float32."""
    levels, prefix, suffix = decay_sums(x.log_decay, dtype, groups.on_gpu())
    q = x.q.astype(jnp.float32) * scale
    k = x.k.astype(jnp.float32)
    q_decay, k_decay = jnp.exp(prefix), jnp.exp(suffix)
    whole = q_decay[..., -1, :]
    a = _chunk_attention(q, k, levels, dtype)
    states, _ = _chunk_states(k, x.v, prefix, suffix, state, dtype)

    # The state's cotangent runs backward over the same scan.  Each chunk's output adds to it.
    reads = dot("...cd,...ce->...de", q * q_decay, d_o, dtype)
    d_after, d_state = _state_scan(whole, reads, d_final, dtype, reverse=True)

    d_v = dot("...ij,...ie->...je", a, d_o, dtype)
    d_v += dot("...cd,...de->...ce", k * k_decay, d_after, dtype)
    d_qg = dot("...ce,...de->...cd", d_o, states, dtype)
    d_kg = dot("...ce,...de->...cd", x.v, d_after, dtype)
    d_q, d_k = d_qg * q_decay, d_kg * k_decay
    d_prefix, d_suffix = d_q * q, d_k * k
    carried = states.astype(jnp.float32) * d_after.astype(jnp.float32)
    d_prefix = d_prefix.at[..., -1, :].add(whole * jnp.sum(carried, axis=-1))

    d_a = dot("...ie,...je->...ij", d_o, x.v, dtype)
    on_diagonal = jnp.diagonal(d_a, axis1=-2, axis2=-1)[..., None]
    d_q += on_diagonal * k
    d_k += on_diagonal * q
    d_levels = []
    length = x.log_decay.shape[-2]
    for index, level in enumerate(levels):
        second = second_halves(length, 1 << index)[:, None]
        decay = jnp.exp(level)
        y = jnp.where(second, q, k) * decay
        d_pairs = jnp.where(pairs(length, 1 << index), d_a, 0.0)
        d_y = dot("...ij,...jd->...id", d_pairs + jnp.swapaxes(d_pairs, -1, -2), y, dtype)
        d_levels.append(d_y * y)
        d_y = d_y * decay
        d_q += jnp.where(second, d_y, 0.0)
        d_k += jnp.where(second, 0.0, d_y)
    d_g = transpose_sums(DecaySums(tuple(d_levels), d_prefix, d_suffix), dtype, groups.on_gpu())
    return Heads(d_q * scale, d_k, d_v, d_g), d_state


def _chunk_attention(
    q: jax.Array, k: jax.Array, levels: tuple[jax.Array, ...], dtype: jnp.dtype
) -> jax.Array:
    """A ``[..., C, C]`` float32, lower triangular."""
    length = q.shape[-2]
    a = jnp.where(jnp.eye(length, dtype=bool), jnp.sum(q * k, axis=-1)[..., None], 0.0)
    for index, level in enumerate(levels):
        second = second_halves(length, 1 << index)[:, None]
        y = jnp.where(second, q, k) * jnp.exp(level)
        a = jnp.where(pairs(length, 1 << index), dot("...id,...jd->...ij", y, y, dtype), a)
    return a


def _chunk_states(
    k: jax.Array,
    v: jax.Array,
    prefix: jax.Array,
    suffix: jax.Array,
    state: jax.Array,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """(state before each chunk ``[B, H, N, Dk, Dv]``, state after the last)."""
    writes = dot("...cd,...ce->...de", k * jnp.exp(suffix), v, dtype)
    return _state_scan(jnp.exp(prefix[..., -1, :]), writes, state, dtype)


def _state_scan(
    decay: jax.Array, added: jax.Array, state: jax.Array, dtype: jnp.dtype, reverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """``state = decay[n] * state + added[n]`` over the chunk axis; (state before each, in
    ``dtype``, and the last).

    decay ``[B, H, N, Dk]``, added ``[B, H, N, Dk, Dv]``, state ``[B, H, Dk, Dv]``.
    """

    def step(
        carry: tuple[jax.Array, jax.Array], n: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        state, before = carry
        # Indexing in place spares the two transposes that scanning over a moved axis costs.
        at = functools.partial(lax.dynamic_index_in_dim, index=n, axis=2, keepdims=False)
        before = lax.dynamic_update_index_in_dim(before, state.astype(dtype), n, 2)
        return (at(decay)[..., None] * state + at(added), before), None

    n_chunks = decay.shape[2]
    before = jnp.zeros_like(added, dtype)
    (last, before), _ = lax.scan(
        step,
        (state, before),
        jnp.arange(n_chunks),
        reverse=reverse,
        unroll=min(n_chunks, scan_unroll()),
    )
    return before, last
