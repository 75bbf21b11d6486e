"""Lengths, segments and the check of a decay's sign, for every scan over tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.core import Tracer


def zero_padding(lengths: jax.Array | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """``[B, T, ...]`` arrays with zeros, which change nothing, at t >= lengths[b]."""
    if lengths is None:
        return arrays
    positions = jnp.arange(arrays[0].shape[1], dtype=lengths.dtype)
    valid = positions[None, :] < lengths[:, None]
    return tuple(
        jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros_like(x))
        for x in arrays
    )


def restarted(log_decay: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """``log_decay [B, T, ...]`` that forgets the state where ``segment_ids [B, T]`` differ from the
    token before: exactly, by a decay of exp(-inf) = 0."""
    if segment_ids is None:
        return log_decay
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    starts = starts.reshape(*starts.shape, *(1,) * (log_decay.ndim - 2))
    return jnp.where(starts, -jnp.inf, log_decay)


def check_decay(op: str, log_decay: jax.Array, lengths: jax.Array | None = None) -> None:
    """ValueError for a positive one; only concrete arrays have values to look at."""
    if isinstance(log_decay, Tracer) or isinstance(lengths, Tracer):
        return
    with jax.ensure_compile_time_eval():  # under jit too, for what it closes over
        (log_decay,) = zero_padding(lengths, log_decay)
        highest = float(jnp.max(log_decay.astype(jnp.float32), initial=-jnp.inf))
    if highest > 0:
        raise ValueError(f"{op}: log_decay holds {highest:g}; a decay's logarithm is <= 0")
