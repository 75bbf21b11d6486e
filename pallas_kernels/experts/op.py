"""Matrix products with the experts that each token has chosen.

    y[t, j] = x[t] @ w[experts[t, j]].T + bias[experts[t, j]]       then the gate, in float32
    out[t]  = sum_j weights[t, j] * y[t, j]                         with weights; else y itself

The two products of a mixture of experts are two calls.  The first has ``gated``; the second reads
``[T, k, in]``, a row for each pair of a token and an expert, and has ``weights``.

Sums are float32 from the product to the only cast.  The weighted sum goes in the order of j.  On a
CPU a token's result has the same bits in any batch, because every product has the same shape.

The weight is an array, or a QTensor with a leading axis of experts (weight-only: codes by rows or
groups, zeros of both kinds, scales in two levels).  No form dequantizes an expert that no token has
chosen.  ``experts.xla`` holds the forms.

Gradients: x, weights, bias, and a plain w or a QTensor's scales and floating zeros.  Codes have
none.  The backward pass keeps only the operands.

Left out: quantized activations, act-order (``columns``), experts over several devices.
Sources: sparsely gated mixtures (arXiv 1701.06538), MegaBlocks (2211.15841).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Reason, choose_plan, is_empty
from pallas_kernels.experts import xla
from pallas_kernels.experts.gate import ClampedGate, Gate, apply_gate, check_gate
from pallas_kernels.operands import check
from pallas_kernels.qtensor import QTensor, dequantize
from pallas_kernels.transform import XLA, Op, OpChoice

__all__ = ["ClampedGate", "grouped_matmul", "grouped_matmul_reference"]

_Static = tuple[int, Gate | None]  # experts of a row of x, the gate
_OPERANDS = {
    "w": "float|QTensor [E+, out, in]",
    "experts": "int32 [T, k+]",
    "weights": "float [T, k] ?",
    "bias": "float [E, out] ?",
}


def grouped_matmul(
    x: jax.Array,
    w: jax.Array | QTensor,
    experts: jax.Array,
    *,
    weights: jax.Array | None = None,
    bias: jax.Array | None = None,
    gated: Gate | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The products of every token with its experts, summed by ``weights`` if they are given.

    Parameters
    ----------
    x : Array [T, in] or [T, k, in]
        float32, bfloat16 or float16.  With three axes each pair has a row of its own.
    w : Array or QTensor [E, out, in]
        The experts' weights.
    experts : int32 [T, k]
        Each token's experts.  Indices outside of [0, E) are clamped to it.
    weights : float [T, k], optional
        Of each pair in the token's sum.
    bias : float [E, out], optional
        Added in float32 before the gate.
    gated : "silu", "gelu", "gelu_tanh" or ClampedGate, optional
        An expert's rows are gate, then up; the pair's result is ``activation(gate) * up``.
    implementation : "xla", "mosaic", "cpu" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    Array [T, out] with weights, else [T, k, out]
        In x's dtype; ``out`` is halved by ``gated``.

    Raises
    ------
    ValueError
        Names the operand that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that is not there.

    Notes
    -----
    | jit, vmap, shard_map          | any operand |
    | jvp, grad, at any order       | x, weights, bias, floats and scales of w |
    | export, jit over many devices | the XLA form; ValueError if the caller named a kernel |
    """
    op = "grouped_matmul"
    rows = "float [T, in]" if getattr(x, "ndim", 2) == 2 else "float [T, k, in]"
    sizes = check(
        op, {"x": rows, **_OPERANDS}, x=x, w=w, experts=experts, weights=weights, bias=bias
    )
    check_gate(op, gated, sizes["out"])
    if isinstance(w, QTensor):
        w = _weight_only(op, w)
    plan = choose_plan(op, implementation, _plan, x, w, experts)
    assert plan is None
    if is_empty(x, w, experts):
        out = sizes["out"] // 2 if gated else sizes["out"]
        shape = experts.shape if weights is None else experts.shape[:1]
        return jnp.zeros((*shape, out), x.dtype)
    experts = jnp.clip(experts, 0, sizes["E"] - 1)
    return _composed((1 if x.ndim == 3 else sizes["k"], gated), x, w, experts, weights, bias)


def _plan() -> Reason:
    return Reason("grouped products have no kernel yet")


def _weight_only(op: str, w: QTensor) -> QTensor:
    """w without notes, in one level of scales."""
    if w.activations is not None:
        raise ValueError(f"{op}: w asks for activations in {w.activations}; experts read floats")
    if w.columns is not None:
        raise ValueError(f"{op}: w has columns in another order, which experts have not")
    w = w.in_one_level
    return QTensor(w.q, w.scale, w.zero)


def _composed(
    static: _Static,
    x: jax.Array,
    w: jax.Array | QTensor,
    experts: jax.Array,
    weights: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    fan, gated = static
    y = _sums(XLA, fan, x.reshape(-1, x.shape[-1]), w, experts.reshape(-1))
    return _finished(y.reshape(*experts.shape, -1), gated, experts, weights, bias, x.dtype)


def _finished(
    y: jax.Array,
    gated: Gate | None,
    experts: jax.Array,
    weights: jax.Array | None,
    bias: jax.Array | None,
    dtype: jnp.dtype,
) -> jax.Array:
    """What stands behind the float32 products ``[T, k, out]``."""
    y = y if bias is None else y + bias.astype(jnp.float32)[experts]
    y = y if gated is None else apply_gate(y, gated)
    if weights is None:
        return y.astype(dtype)
    parts = weights.astype(jnp.float32)[..., None] * y
    total = functools.reduce(jnp.add, (parts[:, j] for j in range(experts.shape[1])))
    return total.astype(dtype)


def grouped_matmul_reference(
    x: jax.Array,
    w: jax.Array | QTensor,
    experts: jax.Array,
    *,
    weights: jax.Array | None = None,
    bias: jax.Array | None = None,
    gated: Gate | None = None,
) -> jax.Array:
    """The same written plainly, in float32; never optimised."""
    floats = dequantize(w) if isinstance(w, QTensor) else w.astype(jnp.float32)
    x32 = x.astype(jnp.float32)
    x32 = jnp.broadcast_to(x32[:, None], (*experts.shape, x.shape[-1])) if x.ndim == 2 else x32
    y = jnp.einsum("tki,tkoi->tko", x32, floats[experts], precision=jax.lax.Precision.HIGHEST)
    return _finished(y, gated, experts, weights, bias, jnp.dtype(jnp.float32))


def _sums_xla(fan: int, x: jax.Array, w: jax.Array | QTensor, experts: jax.Array) -> jax.Array:
    return xla.sums(x, w, experts, fan)


def _sums_backward(
    choice: OpChoice, fan: int, operands: Any, saved: Any, dy: jax.Array
) -> tuple[Any, ...]:
    x, w, experts = operands
    dx, dw = xla.backward(x, w, experts, dy, fan)
    if isinstance(w, QTensor):
        dw = QTensor(*dw)
    return dx, dw, None


_sums = Op("grouped_matmul", _sums_xla, backward=_sums_backward)
