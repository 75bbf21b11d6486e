"""Two readable forms of Gated Linear Attention, for tests and for reading; neither is fast.

    S_t = exp(g_t)[:, None] * S_{t-1} + k_t v_t^T        o_t = scale * q_t S_t

``gla_recurrent`` is that recursion, one step after the other: the oracle.  ``gla_parallel`` is the
form without a recursion, which the chunkwise form uses inside a chunk: with

    o = scale * ((q * exp(b)) S_0 + P v),    P_ij = sum_d q_id k_jd exp(b_id - b_jd)  for j <= i

and b the running sum of g.  The difference b_i - b_j is the sum of g over j+1..i. It is never
formed from two large sums: -1e4 would swallow small numbers beside it, and -inf minus -inf is no
number.

Source: arXiv 2312.06635, equations 3 and 4.  Shapes, ``lengths`` and ``segment_ids`` as in
``pallas_kernels.gla.op.gla``.  Left out: speed, and memory for long sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def gla_recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One step per token.  ``q, k, log_decay [B, T, H, Dk]``, ``v [B, T, H, Dv]`` ->
    (``o [B, T, H, Dv]`` in v's dtype, ``state [B, H, Dk, Dv]``).

    Computes in float32, or in float64 when log_decay is float64 (jax's x64 mode).
    """
    scale, state, dtype = _prepare(q, v, log_decay, scale, initial_state)
    by_time = [jnp.moveaxis(x.astype(dtype), 1, 0) for x in (q, k, v, log_decay)]

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_t, k_t, v_t, g_t = token  # [B, H, D]
        state = jnp.exp(g_t)[..., None] * state + k_t[..., None] * v_t[..., None, :]
        return state, scale * jnp.sum(q_t[..., None] * state, axis=-2)

    state, o = lax.scan(step, state, tuple(by_time))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state


def gla_parallel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """All tokens at once, in memory ``B * T * T * H * Dk``.  Shapes as in ``gla_recurrent``."""
    scale, state, dtype = _prepare(q, v, log_decay, scale, initial_state)
    out_dtype = v.dtype
    q, k, v, g = (x.astype(dtype) for x in (q, k, v, log_decay))
    highest = lax.Precision.HIGHEST
    causal = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))[None, :, :, None, None]  # i >= j
    later = jnp.tril(causal[0, :, :, 0, 0], -1)[None, :, :, None, None]  # i > j
    between = jnp.cumsum(jnp.where(later, g[:, :, None], 0.0), axis=1)  # [B, i, j, H, Dk]
    weight = jnp.where(causal, jnp.exp(between), 0.0)
    p = jnp.einsum("bihd,bjhd,bijhd->bhij", q, k, weight, precision=highest)
    since_start = jnp.exp(jnp.cumsum(g, axis=1))
    o = jnp.einsum("bhij,bjhe->bihe", p, v, precision=highest)
    o = o + jnp.einsum("bihd,bhde->bihe", q * since_start, state, precision=highest)
    to_end = weight[:, -1]  # [B, j, H, Dk]
    state = since_start[:, -1][..., None] * state
    state = state + jnp.einsum("bjhd,bjhe->bhde", k * to_end, v, precision=highest)
    return (scale * o).astype(out_dtype), state


def _prepare(
    q: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    scale: float | None,
    initial_state: jax.Array | None,
) -> tuple[float, jax.Array, jnp.dtype]:
    batch, _, heads, d_k = q.shape
    dtype = jnp.promote_types(jnp.float32, log_decay.dtype)
    shape = (batch, heads, d_k, v.shape[-1])
    state = jnp.zeros(shape, dtype) if initial_state is None else initial_state.astype(dtype)
    return d_k**-0.5 if scale is None else scale, state, dtype
