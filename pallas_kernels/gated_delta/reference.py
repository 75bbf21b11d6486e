"""Two readable forms of the gated delta rule, for tests and for reading; neither is fast.

    S_t = (I - b_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T        o_t = scale * q_t S_t

``gated_delta_recurrent`` is that recursion, one step after the other: the oracle.
``gated_delta_parallel`` is the form without a recursion, which the chunkwise form uses inside a
chunk.  A token writes ``u_t = b_t (v_t - k_t diag(exp(g_t)) S_{t-1})``, the difference between its
value and the value that its key reads.  So S is a plain decayed sum of ``k_t u_t^T``, and all u
solve one triangular system:

    (I + M) U = diag(b) (V - (K exp(c)) S_0)      M_ij = b_i sum_d k_id k_jd exp(c_id - c_jd), j < i
    o = scale * ((Q exp(c)) S_0 + P U)            P_ij = sum_d q_id k_jd exp(c_id - c_jd), j <= i

with c the running sum of g; a difference c_i - c_j is formed as the sum of g over j+1..i.

Sources: arXiv 2406.06484 (the triangular system), 2412.06464 (gates).  Shapes as in
``pallas_kernels.gated_delta.op.gated_delta``.  Left out: speed, and memory for long sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fixed_sums import row_sums

EPSILON = 1e-6  # of normalize_qk


def normalized(x: jax.Array) -> jax.Array:
    """Scale x to length one over the last axis; a zero vector stays zero."""
    return x * lax.rsqrt(row_sums(x * x) + EPSILON)


def heads_of(
    q: jax.Array, k: jax.Array, heads: int, scale: float, normalize_qk: bool, axis: int
) -> tuple[jax.Array, jax.Array]:
    """q, times the scale, and k of every value head, whose ``axis`` they share in groups."""
    if normalize_qk:
        q, k = normalized(q), normalized(k)
    repeats = heads // q.shape[axis]
    if repeats != 1:
        q, k = jnp.repeat(q, repeats, axis), jnp.repeat(k, repeats, axis)
    return q * scale, k


def gated_delta_recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    normalize_qk: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """One step per token: (``o [B, T, H, Dv]`` in v's dtype, ``state [B, H, Dk, Dv]``).

    Computes in float32, or in float64 when log_decay is float64 (jax's x64 mode).
    """
    operands, state = _prepare(q, k, v, log_decay, beta, scale, initial_state, normalize_qk)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_t, k_t, v_t, g_t, beta_t = token  # [B, H, D]
        state = jnp.exp(g_t)[..., None] * state
        found = jnp.sum(k_t[..., None] * state, axis=-2)
        state = state + k_t[..., None] * (beta_t * (v_t - found))[..., None, :]
        return state, jnp.sum(q_t[..., None] * state, axis=-2)

    state, o = lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in operands))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state


def gated_delta_parallel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    normalize_qk: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """All tokens at once, in memory ``B * T * T * H * Dk``."""
    out_dtype = v.dtype
    operands, state = _prepare(q, k, v, log_decay, beta, scale, initial_state, normalize_qk)
    q, k, v, g, beta = (jnp.moveaxis(x, 1, 2) for x in operands)  # [B, H, T, D]
    rows = jnp.arange(q.shape[2])
    after = (rows[:, None] > rows)[:, :, None]  # i > j
    between = jnp.cumsum(jnp.where(after, g[:, :, :, None], 0.0), axis=2)  # [B, H, i, j, Dk]
    weight = jnp.where((rows[:, None] >= rows)[:, :, None], jnp.exp(between), 0.0)
    since_start, to_end = jnp.exp(jnp.cumsum(g, axis=2)), weight[:, :, -1]
    system = jnp.eye(rows.size, dtype=q.dtype) + beta * jnp.einsum(
        "bhid,bhjd,bhijd->bhij", k, k, jnp.where(after, weight, 0.0)
    )
    seen = jnp.einsum("bhid,bhde->bhie", k * since_start, state)
    u = lax.linalg.triangular_solve(system, beta * (v - seen), left_side=True, lower=True)
    o = jnp.einsum("bhid,bhjd,bhijd,bhje->bhie", q, k, weight, u)
    o = o + jnp.einsum("bhid,bhde->bhie", q * since_start, state)
    state = since_start[:, :, -1, :, None] * state
    state = state + jnp.einsum("bhjd,bhje->bhde", k * to_end, u)
    return jnp.moveaxis(o, 2, 1).astype(out_dtype), state


def _prepare(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    scale: float | None,
    initial_state: jax.Array | None,
    normalize_qk: bool,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """(q, k, v, log_decay, beta, all with the value heads and a last axis; the state)."""
    heads, d_k, d_v = v.shape[2], q.shape[-1], v.shape[-1]
    dtype = jnp.promote_types(jnp.float32, log_decay.dtype)
    scaled = d_k**-0.5 if scale is None else scale
    shape = (q.shape[0], heads, d_k, d_v)
    state = jnp.zeros(shape, dtype) if initial_state is None else initial_state.astype(dtype)
    q, k, v, g, beta = (x.astype(dtype) for x in (q, k, v, log_decay, beta))
    q, k = heads_of(q, k, heads, scaled, normalize_qk, axis=2)
    g = g[..., None] if g.ndim == 3 else g
    return (q, k, v, jnp.broadcast_to(g, q.shape), beta[..., None]), state
