"""SwiGLU's gate: silu(gate) * up over a fused gate/up projection, and an optional quantize.

The gate may be GELU's instead, by XLA and in floats.

Source: GLU variants, arXiv 2002.05202; FasterLLaMA's DequantizedSiluMultiplyQuantized.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan
from pallas_kernels.operands import ROW_CODES, check, dtype_name
from pallas_kernels.qtensor import QTensor, of_one_scale
from pallas_kernels.qtensor import quantize as quantize_rows
from pallas_kernels.rounding import to_codes
from pallas_kernels.rows.activations import ACTIVATIONS, GATES
from pallas_kernels.rows.plan import RowsPlan, plan
from pallas_kernels.transform import Op, chosen

_OPERANDS = {"gate_up": "float [..., 2F+]", "scale": "float [] ?"}


@overload
def swiglu(
    gate_up: jax.Array,
    *,
    activation: str = ...,
    quantize: None = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...
@overload
def swiglu(
    gate_up: jax.Array,
    *,
    activation: str = ...,
    quantize: DTypeLike,
    scale: jax.Array | None = ...,
    implementation: Implementation | None = ...,
) -> QTensor: ...
def swiglu(
    gate_up: jax.Array,
    *,
    activation: str = "silu",
    quantize: DTypeLike | None = None,
    scale: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | QTensor:
    """Return ``silu(gate) * up``, computed in float32.

    Parameters
    ----------
    gate_up : float [..., 2F]
        The gate's features, then up's. float32, bfloat16 or float16.
    activation : "silu", "gelu" or "gelu_tanh"
        The gate's.
    quantize : "int8" or "float8_e4m3fn", optional
        Dtype of codes to return in place of floats, of the gate "silu" alone.
    scale : float scalar, optional
        With ``quantize``: the scale of every row; values beyond its range are clipped. By default
        each row has a scale for its largest magnitude.
    implementation : "xla", "mosaic" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    float [..., F], or QTensor with ``quantize``
        Floats have gate_up's dtype. The QTensor has one float32 scale for each row, and with
        ``scale`` its ``input_scale``.

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
    width = check("swiglu", _OPERANDS, gate_up=gate_up, scale=scale)["2F"]
    if width % 2:
        raise ValueError(f"swiglu: the last axis of gate_up {gate_up.shape} is not gate and up")
    codes = None if quantize is None else dtype_name("swiglu", "quantize", quantize, ROW_CODES)
    if scale is not None and codes is None:
        raise ValueError("swiglu: scale without quantize")
    if activation not in GATES or (codes is not None and activation != "silu"):
        known = ", ".join(GATES if codes is None else GATES[:1])
        raise ValueError(f"swiglu: activation {activation!r} is not one of {known}")
    scale = None if scale is None else scale.astype(jnp.float32)
    find = functools.partial(_plan, gate_up, codes, scale is not None)
    found = choose_plan("swiglu", implementation, find, gate_up, scale)
    return _swiglu(chosen(found, implementation), _Call(activation, codes, found), gate_up, scale)


def _plan(gate_up: jax.Array, codes: str | None, given: bool) -> RowsPlan | Reason:
    if codes is None:
        return Reason(
            "without a quantize it is element-wise, and XLA's fusion runs at memory speed"
        )
    return plan("gate", gate_up, codes, given=given, name="gate_up")


class _Call(NamedTuple):
    """The static arguments of a call."""

    activation: str
    codes: str | None
    plan: Plan | None


def _kernel(static: _Call, gate_up: jax.Array, scale: jax.Array | None) -> QTensor:
    from pallas_kernels.rows import kernel

    assert isinstance(static.plan, RowsPlan)
    out = kernel.run(static.plan, gate_up, given=scale)
    return QTensor(out[0], out[1]) if scale is None else of_one_scale(out[0], scale)


def _xla(static: _Call, gate_up: jax.Array, scale: jax.Array | None) -> jax.Array | QTensor:
    codes = static.codes
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    y = ACTIVATIONS[static.activation](gate) * up
    if codes is None:
        return y.astype(gate_up.dtype)
    if scale is None:
        return quantize_rows(y, codes)
    return of_one_scale(to_codes(y / scale, codes), scale)


_swiglu = Op("swiglu", _xla, _kernel)
