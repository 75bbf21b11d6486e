"""SwiGLU's gate: silu(gate) * up over a fused gate/up projection, and an optional quantize; and
that of GELU (``gate``).

Source: GLU variants, arXiv 2002.05202; FasterLLaMA's DequantizedSiluMultiplyQuantized.
"""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, Reason, choose_plan
from pallas_kernels.operands import ROW_CODES, check, dtype_name
from pallas_kernels.qtensor import QTensor
from pallas_kernels.qtensor import quantize as quantize_rows
from pallas_kernels.rows.plan import RowsPlan, plan
from pallas_kernels.rows.run import run
from pallas_kernels.transform import Op, chosen


@overload
def swiglu(
    gate_up: jax.Array, *, quantize: None = ..., implementation: Implementation | None = ...
) -> jax.Array: ...
@overload
def swiglu(
    gate_up: jax.Array, *, quantize: DTypeLike, implementation: Implementation | None = ...
) -> QTensor: ...
def swiglu(
    gate_up: jax.Array,
    *,
    quantize: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | QTensor:
    """Return ``silu(gate) * up``, computed in float32.

    Parameters
    ----------
    gate_up : float [..., 2F]
        The gate's features, then up's. float32, bfloat16 or float16.
    quantize : "int8" or "float8_e4m3fn", optional
        Dtype of codes to return in place of floats.
    implementation : "xla", "mosaic" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    float [..., F], or QTensor with ``quantize``
        Floats have gate_up's dtype. The QTensor has one float32 scale for each row.

    Raises
    ------
    ValueError
        Names the operand or option that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | gate_up: the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    width = check("swiglu", {"gate_up": "float [..., 2F+]"}, gate_up=gate_up)["2F"]
    if width % 2:
        raise ValueError(f"swiglu: the last axis of gate_up {gate_up.shape} is not gate and up")
    codes = None if quantize is None else dtype_name("swiglu", "quantize", quantize, ROW_CODES)
    found = choose_plan("swiglu", implementation, lambda: _plan(gate_up, codes), gate_up)
    return _swiglu(chosen(found, implementation), (codes, found), gate_up)


def gate(
    gate_up: jax.Array, activation: str, *, implementation: Implementation | None = None
) -> jax.Array:
    """``swiglu``, or with activation "gelu" or "gelu_tanh" the same with GELU, by XLA.  Raises
    ValueError for another activation."""
    if activation not in ("silu", "gelu", "gelu_tanh"):
        raise ValueError(f"gate: activation {activation!r} is not one of silu, gelu, gelu_tanh")
    if activation == "silu":
        return swiglu(gate_up, implementation=implementation)
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.gelu(gate, approximate=activation == "gelu_tanh") * up).astype(gate_up.dtype)


def _plan(gate_up: jax.Array, codes: str | None) -> RowsPlan | Reason:
    if codes is None:
        return Reason(
            "without a quantize it is element-wise, and XLA's fusion runs at memory speed"
        )
    return plan("gate", gate_up, codes, name="gate_up")


def _kernel(static: tuple[str, RowsPlan], gate_up: jax.Array) -> QTensor:
    codes, scale = run(static[1], gate_up)
    return QTensor(codes, scale)


def _xla(static: tuple[str | None, RowsPlan | None], gate_up: jax.Array) -> jax.Array | QTensor:
    codes, _ = static
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    y = jax.nn.silu(gate) * up
    return y.astype(gate_up.dtype) if codes is None else quantize_rows(y, codes)


_swiglu = Op("swiglu", _xla, _kernel)
