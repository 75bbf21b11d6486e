"""The chunkwise form of the gated delta rule in plain XLA, forward and backward.

``gated_delta.reference`` has the equations of one chunk: tokens write ``u``, the solution of a
triangular system, instead of v, and the rest is GLA's chunk (``gla.chunked``).  The system's
right-hand side has the state before the chunk in it, so with ``T = (I + M)^-1``

    u      = T diag(b) V - W S           W = T diag(b) (K e^c)
    S_next = e^(c_C) S + (K e^(c_C - c))^T u

Everything but the two products with S is computed for all chunks at once (the WY, or UT,
representation).  T is built by blocks over GLA's binary tree.  If T inverts the blocks of s rows
and M' is the part of M between two of them, ``T - T M' T`` inverts the blocks of 2s rows.  An entry
of T is the effect of one token's value on a later token's write.  For keys of length one, however
alike, no entry exceeds 1; powers of M have no such bound.

Decays are GLA's sums (``recurrence.groups``): no exponential of a positive number, no difference of
running sums.  A decay that is one number a head multiplies the products ``q k^T``, ``k k^T``
afterwards; one number a channel goes into their operands, level by level.

The backward pass keeps the inputs and one state per group of chunks, and is the transpose of a
group's forward pass, computed again; the inverse has its own rule, ``-T dM T``.  Everything is
float32: a delta rule subtracts what it finds, and 16-bit writes of 64 equal keys would miss 5e-3.

Sources: arXiv 2406.06484 section 3, 2412.06464 section 3.3, 2510.26692 (channels).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_sums import row_sums
from pallas_kernels.gated_delta.reference import heads_of
from pallas_kernels.recurrence import groups
from pallas_kernels.recurrence.groups import decay_sums, dot, pairs, scan_unroll, second_halves
from pallas_kernels.recurrence.op import Heads

CHUNK = 64
_FLOAT32 = jnp.dtype(jnp.float32)
_dot = functools.partial(dot, dtype=_FLOAT32)


@functools.partial(jax.jit, static_argnames=("scale", "normalize_qk"))
def chunked_forward(
    heads: Heads, initial_state: jax.Array, scale: float, normalize_qk: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the results of ``groups.forward``."""
    group = functools.partial(_group, scale=scale, normalize_qk=normalize_qk)
    return groups.forward(group, heads, initial_state, CHUNK)


@functools.partial(jax.jit, static_argnames=("scale", "normalize_qk"))
def chunked_backward(
    heads: Heads,
    borders: jax.Array,
    d_o: jax.Array,
    d_state: jax.Array,
    scale: float,
    normalize_qk: bool,
) -> tuple[Heads, jax.Array]:
    """Return the results of ``groups.backward``."""

    def group(
        x: Heads, state: jax.Array, d_out: jax.Array, d_final: jax.Array
    ) -> tuple[Heads, jax.Array]:
        _, pull = jax.vjp(lambda x, s: _group(x, s, scale, normalize_qk), x, state)
        return pull((d_out.astype(jnp.float32), d_final))

    return groups.backward(group, heads, borders, d_o, d_state, CHUNK)


def _group(
    x: Heads, state: jax.Array, scale: float, normalize_qk: bool
) -> tuple[jax.Array, jax.Array]:
    """(o float32 ``[B, H, N, C, Dv]``, state after the group) of ``[B, H, N, C, D]``: N chunks of C
    tokens; q and k have the key heads, log_decay the width Dk or 1, beta 1."""
    q, k, v, g, beta = jax.tree.map(lambda part: part.astype(jnp.float32), x)
    q, k = heads_of(q, k, v.shape[1], scale, normalize_qk, axis=1)
    levels, prefix, suffix = decay_sums(g, _FLOAT32, groups.on_gpu())
    products = _scalar_products if g.shape[-1] == 1 else _channel_products
    p, m = products(q, k, levels)
    inverse = _inverse(beta * m)
    since_start = jnp.exp(prefix)
    own = _dot("...ij,...je->...ie", inverse, beta * v)
    w = _dot("...ij,...jd->...id", inverse, beta * (k * since_start))
    k_end = k * jnp.exp(suffix)

    def step(
        state: jax.Array, chunk: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        own, w, k_end, whole = chunk
        u = own - _dot("...cd,...de->...ce", w, state)
        after = whole[..., None] * state + _dot("...cd,...ce->...de", k_end, u)
        return after, (u, state)

    by_chunk = tuple(jnp.moveaxis(y, 2, 0) for y in (own, w, k_end, since_start[..., -1, :]))
    final, (u, states) = jax.lax.scan(
        step, state, by_chunk, unroll=min(len(by_chunk[0]), scan_unroll())
    )
    o = _dot("...ij,...je->...ie", p, jnp.moveaxis(u, 0, 2))
    o += _dot("...cd,...de->...ce", q * since_start, jnp.moveaxis(states, 0, 2))
    return o, final


def _scalar_products(
    q: jax.Array, k: jax.Array, levels: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """P (lower triangular) and, without beta, M (strictly lower), ``[..., C, C]``."""
    length = q.shape[-2]
    between = jnp.zeros((*levels[0].shape[:-1], length), jnp.float32)
    for index, level in enumerate(levels):
        both = level + jnp.swapaxes(level, -1, -2)
        between = jnp.where(pairs(length, 1 << index), both, between)
    rows = jnp.arange(length)
    decay = jnp.exp(between)
    p, m = (_dot("...id,...jd->...ij", x, k) * decay for x in (q, k))
    return jnp.where(rows[:, None] >= rows, p, 0.0), jnp.where(rows[:, None] > rows, m, 0.0)


def _channel_products(
    q: jax.Array, k: jax.Array, levels: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """The same for a decay of each channel."""
    length = q.shape[-2]
    p = jnp.where(jnp.eye(length, dtype=bool), jnp.sum(q * k, axis=-1)[..., None], 0.0)
    m = jnp.zeros_like(p)
    for index, level in enumerate(levels):
        decay, meet = jnp.exp(level), pairs(length, 1 << index)
        second = second_halves(length, 1 << index)[:, None]
        keys = jnp.where(second, 0.0, k * decay)
        p = jnp.where(meet, _dot("...id,...jd->...ij", q * decay, keys), p)
        m = jnp.where(meet, _dot("...id,...jd->...ij", k * decay, keys), m)
    return p, m


@jax.custom_jvp
def _inverse(m: jax.Array) -> jax.Array:
    """``(I + m)^-1`` of a strictly lower triangular ``m [..., C, C]``, C a power of two."""
    length = m.shape[-1]
    inverse = jnp.eye(length, dtype=m.dtype) - jnp.where(pairs(length, 1), m, 0.0)
    size = 2
    while size < length:
        between = jnp.where(pairs(length, size), m, 0.0)
        inverse = inverse - _product(_product(inverse, between), inverse)
        size *= 2
    return inverse


@_inverse.defjvp
def _inverse_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse(*primals)
    return inverse, -_product(_product(inverse, tangents[0]), inverse)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return _dot("...ij,...jk->...ik", a, b)


def step(
    heads: Heads, state: jax.Array, scale: float, normalize_qk: bool
) -> tuple[jax.Array, jax.Array]:
    """Return (o, the new state) of one token, as ``gated_delta_step``.

    o is read from the decayed state and corrected by ``(q k) u``.  So the state is read once for
    both sums and written once.
    """
    q, k, v = (x.astype(jnp.float32) for x in heads[:3])
    q, k = heads_of(q, k, v.shape[1], scale, normalize_qk, axis=1)
    decay, beta = jnp.exp(heads.log_decay), heads.beta
    assert beta is not None
    state = (decay[..., None] if decay.ndim == 3 else decay[..., None, None]) * state
    found, read = (row_sums(x[..., None] * state, axis=-2)[..., 0, :] for x in (k, q))
    u = beta[..., None] * (v - found)
    o = read + row_sums(q * k) * u
    return o.astype(heads.v.dtype), state + k[..., None] * u[..., None, :]
