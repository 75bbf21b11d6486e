"""Gated Linear Attention: the op, its gradient, and one step of it.

    S_t = exp(g_t)[:, None] * S_{t-1} + k_t v_t^T        o_t = scale * q_t S_t

per row and head, with g = log_decay <= 0 one number per key channel.  Contract: any log_decay from
0 to -inf, mixed within a row, at any length: finite, and equal to the recursion, values and
gradients; no exponential of a positive number is taken anywhere.  State and gates are float32.

Forms: ``gla`` is chunkwise (``gla_chunked`` in XLA, ``gla_mosaic`` on Hopper), ``gla_step`` is one
step of the recursion, and ``gla_reference`` holds the recursion itself and the fully parallel form.

Gradients reach q, k, v, log_decay and initial_state, from o and from the final state.  The backward
pass recomputes from the inputs and a state every 64 tokens or more, so memory is linear in T with
no Dk * Dv factor per token.  Where exp(g) = 0 the gradient of log_decay is 0.

Source: arXiv 2312.06635.  Left out: gates on value channels; second derivatives.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose, wants_kernel
from pallas_kernels.gla_chunked import chunked_backward, chunked_forward

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_state: bool = True,
    chunk: int = 64,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """``q, k, log_decay [B, T, H, Dk]``, ``v [B, T, H, Dv]`` -> (``o [B, T, H, Dv]`` in v's dtype,
    float32 ``state [B, H, Dk, Dv]`` after the last token, None unless ``return_state``).

    q, k, v: one dtype of float32, bfloat16, float16.  log_decay: natural logarithm, <= 0, -inf
        allowed, float32 (16-bit is cast up).
    scale: of the output, Dk ** -0.5 by default.
    initial_state: float32 ``[B, H, Dk, Dv]``, zeros by default.
    lengths: int32 ``[B]``; tokens at t >= lengths[b] are padding: whatever they hold, NaN included,
        o is 0 there and the state is that after token lengths[b] - 1.
    segment_ids: int32 ``[B, T]`` for packed sequences: where the id differs from that of the token
        before, the state starts again from zero.  initial_state belongs to a row's first segment,
        the returned state to its last.
    chunk: tokens per chunk of the XLA form, a power of two.
    implementation: "xla", "mosaic" or None; see ``pallas_kernels.dispatch``.

    Raises ValueError naming the argument for a wrong shape or dtype, and for a positive log_decay
    where the array's values are known; under jit, grad and vmap they are not, and a positive
    log_decay is then taken as it is.  NotImplementedError when "mosaic" is asked for and has no
    kernel for the call.
    """
    scale = _check(q, k, v, log_decay, scale, initial_state, token_axes=2)
    batch, length, heads, d_k = q.shape
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"gla: chunk {chunk} is not a power of two")
    if length == 0:
        raise ValueError(f"gla: q {q.shape} has no tokens")
    if lengths is not None:
        _check_ints("lengths", lengths, (batch,))
    _check_decay(log_decay, lengths)
    log_decay = log_decay.astype(jnp.float32)
    if segment_ids is not None:
        _check_ints("segment_ids", segment_ids, (batch, length))
        # A state is forgotten exactly by a decay of exp(-inf) = 0.
        starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        log_decay = jnp.where(starts[:, :, None, None], -jnp.inf, log_decay)
    chosen = choose("gla", implementation, _reason(implementation, q, k, v, log_decay))
    if initial_state is None and chosen == "xla":
        initial_state = jnp.zeros((batch, heads, d_k, v.shape[-1]), jnp.float32)
    o, state = _gla(scale, chunk, chosen, q, k, v, log_decay, initial_state, lengths)
    return o, state if return_state else None


def gla_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    state: jax.Array,
    *,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token: ``q, k, log_decay [B, H, Dk]``, ``v [B, H, Dv]``, float32 ``state [B, H, Dk, Dv]``
    -> (``o [B, H, Dv]`` in v's dtype, new state).  Donate the state to have it updated in place.

    Arguments and errors as in ``gla``.
    """
    scale = _check(q, k, v, log_decay, scale, state, token_axes=1, state_name="state")
    _check_decay(log_decay)
    log_decay = log_decay.astype(jnp.float32)
    reason = None
    if wants_kernel(implementation):
        from pallas_kernels import gla_mosaic

        reason = gla_mosaic.step_unsupported(q, k, v, log_decay)
    if choose("gla_step", implementation, reason) == "mosaic":
        from pallas_kernels import gla_mosaic

        return gla_mosaic.gla_step(q, k, v, log_decay, state, scale)
    q_f, k_f, v_f = (x.astype(jnp.float32) for x in (q, k, v))
    decay = jnp.exp(log_decay)
    state = decay[..., None] * state + k_f[..., None] * v_f[..., None, :]
    o = scale * jnp.sum(q_f[..., None] * state, axis=-2)
    return o.astype(v.dtype), state


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array) -> str | None:
    """Why ``gla`` has no Mosaic kernel for these operands, or None."""
    from pallas_kernels import gla_mosaic

    return gla_mosaic.unsupported(q, k, v, log_decay)


def _reason(implementation: Implementation | None, *operands: jax.Array) -> str | None:
    return unsupported(*operands) if wants_kernel(implementation) else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gla(
    scale: float,
    chunk: int,
    chosen: Implementation,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    if chosen == "mosaic":
        from pallas_kernels import gla_mosaic

        return gla_mosaic.gla_forward(
            q, k, v, g, scale=scale, initial_state=initial_state, lengths=lengths
        )
    q, k, v, g = _zero_padding(lengths, q, k, v, g)
    return chunked_forward(q, k, v, g, initial_state, scale=scale, chunk=chunk)[:2]


def _gla_forward(
    scale: float,
    chunk: int,
    chosen: Implementation,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    residuals = (q, k, v, g, initial_state, lengths)
    q, k, v, g = _zero_padding(lengths, q, k, v, g)
    if chosen == "mosaic":
        from pallas_kernels import gla_mosaic

        # What it saves is linear in T: a bf16 state per 64 tokens, 5 bytes per element of q.
        o, state, saved = gla_mosaic.gla_forward(
            q, k, v, g, scale=scale, initial_state=initial_state, save="all"
        )
    else:
        o, state, saved = chunked_forward(q, k, v, g, initial_state, scale=scale, chunk=chunk)
    return (o, state), (*residuals, saved)


def _gla_backward(
    scale: float,
    chunk: int,
    chosen: Implementation,
    residuals: tuple[Any, ...],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array | None, ...]:
    *inputs, initial_state, lengths, saved = residuals
    d_o, d_state = cotangents
    inputs = _zero_padding(lengths, *inputs, d_o)
    if chosen == "mosaic":
        from pallas_kernels import gla_mosaic

        *grads, d_initial = gla_mosaic.gla_backward(
            *inputs, d_state, scale=scale, initial_state=initial_state, saved=saved
        )
    else:
        *inputs, d_o = inputs
        *grads, d_initial = chunked_backward(*inputs, saved, d_o, d_state, scale=scale, chunk=chunk)
    d_initial = None if initial_state is None else d_initial
    return (*_zero_padding(lengths, *grads), d_initial, None)


def _zero_padding(lengths: jax.Array | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """``[B, T, H, D]`` arrays with zeros, which change nothing, at t >= lengths[b]."""
    if lengths is None:
        return arrays
    positions = jnp.arange(arrays[0].shape[1], dtype=lengths.dtype)
    valid = (positions[None, :] < lengths[:, None])[:, :, None, None]
    return tuple(jnp.where(valid, x, jnp.zeros_like(x)) for x in arrays)


_gla.defvjp(_gla_forward, _gla_backward)


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    scale: float | None,
    state: jax.Array | None,
    token_axes: int,
    state_name: str = "initial_state",
) -> float:
    """Shapes and dtypes of the public functions; returns the scale to use."""
    op = "gla" if token_axes == 2 else "gla_step"
    axes = "[B, T, H, Dk]" if token_axes == 2 else "[B, H, Dk]"
    if q.ndim != token_axes + 2:
        raise ValueError(f"{op}: q {q.shape} is not {axes}")
    for name, x in (("k", k), ("log_decay", log_decay)):
        if x.shape != q.shape:
            raise ValueError(f"{op}: {name} {x.shape} has not the shape of q {q.shape}")
    if v.ndim != q.ndim or v.shape[:-1] != q.shape[:-1]:
        raise ValueError(f"{op}: v {v.shape} differs from q {q.shape} before the last axis")
    for name, x in (("q", q), ("k", k), ("v", v), ("log_decay", log_decay)):
        if x.dtype not in _FLOATS:
            raise ValueError(f"{op}: {name} is {x.dtype}, not float32, bfloat16 or float16")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{op}: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give them one dtype")
    if state is not None:
        shape = (q.shape[0], q.shape[-2], q.shape[-1], v.shape[-1])
        if state.shape != shape:
            raise ValueError(f"{op}: {state_name} {state.shape} is not [B, H, Dk, Dv] = {shape}")
        if state.dtype != jnp.float32:
            raise ValueError(f"{op}: {state_name} is {state.dtype}, not float32")
    return 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def _check_ints(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"gla: {name} is {x.dtype}{list(x.shape)}, not int32{list(shape)}")


def _check_decay(log_decay: Any, lengths: jax.Array | None = None) -> None:
    """Only concrete arrays have values to look at."""
    if isinstance(log_decay, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    (log_decay,) = _zero_padding(lengths, log_decay)
    highest = float(jnp.max(log_decay.astype(jnp.float32)))
    if highest > 0:
        raise ValueError(f"gla: log_decay holds {highest:g}; a decay's logarithm is <= 0")
