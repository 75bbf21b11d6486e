"""Calls of the gated delta rule, and its values and gradients in float64 by the definition."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def case(
    shape: tuple[int, ...], kind: str, seed: int = 0, by_channel: bool = False
) -> tuple[Any, ...]:
    """q, k, v, log_decay, beta and a first state.  kind: of the decay ("weak", "mixed", which has
    -inf) or of the keys ("near" or "equal", with beta = 1 and no decay).  by_channel: a decay for
    every key channel."""
    b, t, hk, h, dk, dv = shape
    rng = np.random.default_rng(seed)
    q, k = (unit(rng.normal(size=(b, t, hk, dk))) for _ in range(2))
    v, state = rng.normal(size=(b, t, h, dv)), rng.normal(size=(b, h, dk, dv))
    gates = (b, t, h, dk) if by_channel else (b, t, h)
    g = -np.abs(rng.normal(size=gates)) * 0.05
    beta = rng.uniform(size=(b, t, h))
    if kind == "mixed":
        g = np.array([0.0, -1e-3, -1.0, -20.0, -1e4, -np.inf])[rng.integers(0, 6, size=gates)]
        beta = np.array([0.0, 0.3, 1.0])[rng.integers(0, 3, size=(b, t, h))]
    if kind in ("near", "equal"):
        spread = 0.0 if kind == "equal" else 0.3
        k = unit(k[:, :1] + spread * k)
        g, beta = np.zeros_like(g), np.ones_like(beta)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    return q, k, v, *(jnp.asarray(x, jnp.float32) for x in (g, beta, state))


def recurrence(q, k, v, g, beta, state, scale):
    """float64 o and state."""
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    decay, out = np.exp(g.reshape(*beta.shape, -1, 1)), []
    for t in range(q.shape[1]):
        state = decay[:, t] * state
        seen = np.einsum("bhk,bhkv->bhv", k[:, t], state)
        change = beta[:, t][..., None] * (v[:, t] - seen)
        state = state + k[:, t][..., None] * change[..., None, :]
        out.append(scale * np.einsum("bhk,bhkv->bhv", q[:, t], state))
    return np.stack(out, axis=1), state


def gradients(q, k, v, g, beta, d_out, d_last, state, scale):
    """float64 dq, dk, dv, dg, dbeta, dstate."""
    given = (q, k, v, g, beta, d_out, d_last, state)
    q, k, v, g, beta, d_out, d_state, state = (np.asarray(x, np.float64) for x in given)
    heads, group = q.shape[2], v.shape[2] // q.shape[2]
    q, k = (np.repeat(x, group, axis=2) for x in (q, k))
    wide, over = (*beta[:, 0].shape, -1, 1), (-1,) if g.ndim == q.ndim else (-1, -2)
    states, out = [], [np.zeros_like(x) for x in (q, k, v, g, beta)]
    for t in range(q.shape[1]):
        decayed = np.exp(g[:, t]).reshape(wide) * state
        rest = v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], decayed)
        change = beta[:, t][..., None] * rest
        state = decayed + k[:, t][..., None] * change[..., None, :]
        states.append((decayed, rest, change, state))
    for t in reversed(range(q.shape[1])):
        decayed, rest, change, state = states[t]
        out[0][:, t] = scale * np.einsum("bhkv,bhv->bhk", state, d_out[:, t])
        d_state = d_state + scale * q[:, t][..., None] * d_out[:, t][..., None, :]
        d_change = np.einsum("bhk,bhkv->bhv", k[:, t], d_state)
        out[4][:, t] = np.sum(d_change * rest, axis=-1)
        d_v = beta[:, t][..., None] * d_change
        out[2][:, t] = d_v
        out[1][:, t] = np.einsum("bhkv,bhv->bhk", d_state, change)
        out[1][:, t] -= np.einsum("bhkv,bhv->bhk", decayed, d_v)
        d_state = d_state - k[:, t][..., None] * d_v[..., None, :]
        decay = np.exp(g[:, t])
        out[3][:, t] = np.where(decay == 0, 0, np.sum(d_state * decayed, axis=over))
        d_state = decay.reshape(wide) * d_state
    for i in range(2):
        out[i] = out[i].reshape(*out[i].shape[:2], heads, group, -1).sum(axis=3)
    return (*out, d_state)


def relative_rms(x: Any, want: np.ndarray) -> float:
    x = np.asarray(x, np.float64)
    return float(np.sqrt(np.mean((x - want) ** 2) / np.mean(want**2)))
