"""Calls of the gated delta rule, and its values and gradients in float64 by the definition."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.helpers.arrays import as_jax


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
    q, k, v = (as_jax(x.astype(jnp.bfloat16)) for x in (q, k, v))
    return q, k, v, *(as_jax(x, jnp.float32) for x in (g, beta, state))


def wide(x):
    return np.asarray(x).astype(np.float64)


def _through_length(x, d):
    """The gradient of x, from that of x / length(x)."""
    length = np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)
    return (d - x * np.sum(d * x, -1, keepdims=True) / length**2) / length


def oracle(q, k, v, g, beta, s, d_o=None, d_s=None, *, scale=None, normalize=False):
    """(o, state) in float64, and with cotangents also the gradients of q, k, v, g, beta, s, by the
    definition; g is a decay a head or a key channel."""
    q, k, v, g, beta, s = map(wide, (q, k, v, g, beta, s))
    shape, repeats, raw = q.shape, v.shape[2] // q.shape[2], (q, k)
    if normalize:
        q, k = (x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, repeats, axis=2) for x in (q, k))
    decay = np.exp(g if g.ndim == 4 else g[..., None]) * np.ones_like(q)
    scale, o, kept = scale or q.shape[-1] ** -0.5, np.zeros_like(v), []
    for t in range(q.shape[1]):
        decayed = decay[:, t, :, :, None] * s
        u = v[:, t] - np.einsum("bhd,bhde->bhe", k[:, t], decayed)
        kept.append((s, decayed, u))
        s = decayed + beta[:, t, :, None, None] * k[:, t, :, :, None] * u[:, :, None]
        o[:, t] = scale * np.einsum("bhd,bhde->bhe", q[:, t], s)
    if d_o is None:
        return o, s
    d_o, d_s = wide(d_o), wide(d_s)
    d_q, d_k, d_v, d_decay, d_beta = (np.zeros_like(x) for x in (q, k, v, q, beta))
    after = s
    for t in reversed(range(q.shape[1])):
        before, decayed, u = kept[t]
        d_q[:, t] = scale * np.einsum("bhde,bhe->bhd", after, d_o[:, t])
        d_s = d_s + scale * q[:, t, :, :, None] * d_o[:, t, :, None]
        found = np.einsum("bhd,bhde->bhe", k[:, t], d_s)
        b = beta[:, t, :, None]
        d_beta[:, t], d_v[:, t] = np.sum(found * u, -1), b * found
        d_k[:, t] = np.einsum("bhde,bhe->bhd", d_s, b * u)
        d_k[:, t] -= np.einsum("bhde,bhe->bhd", decayed, b * found)
        d_s = d_s - k[:, t, :, :, None] * (b * found)[:, :, None]
        d_decay[:, t] = np.sum(d_s * before, -1)
        d_s, after = decay[:, t, :, :, None] * d_s, before
    d_g = decay * d_decay
    d_g = d_g if g.ndim == 4 else d_g.sum(-1)
    d_q, d_k = (x.reshape(*shape[:3], repeats, shape[3]).sum(3) for x in (d_q, d_k))
    if normalize:
        d_q, d_k = (_through_length(x, d) for x, d in zip(raw, (d_q, d_k), strict=True))
    return o, s, d_q, d_k, d_v, d_g, d_beta, d_s


def relative_rms(x: Any, want: np.ndarray) -> float:
    x = np.asarray(x, np.float64)
    return float(np.sqrt(np.mean((x - want) ** 2) / np.mean(want**2)))
