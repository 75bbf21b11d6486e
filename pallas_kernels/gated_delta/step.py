"""One token of the gated delta rule in plain XLA.

o is read from the decayed state and corrected by ``(q k) u``. So the state is read once for both
sums and written once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta.reference import heads_of


def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float,
    normalize_qk: bool,
) -> tuple[jax.Array, jax.Array]:
    """``gated_delta_step`` of its operands, all but q, k and v in float32."""
    q_f, k_f, v_f = (x.astype(jnp.float32) for x in (q, k, v))
    q_f, k_f = heads_of(q_f, k_f, v.shape[1], scale, normalize_qk, axis=1)
    decay = jnp.exp(log_decay)
    state = (decay[..., None] if decay.ndim == 3 else decay[..., None, None]) * state
    found, read = (jnp.sum(x[..., None] * state, axis=-2) for x in (k_f, q_f))
    u = beta[..., None] * (v_f - found)
    o = read + jnp.sum(q_f * k_f, axis=-1, keepdims=True) * u
    return o.astype(v.dtype), state + k_f[..., None] * u[..., None, :]
