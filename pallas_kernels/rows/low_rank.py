"""The operands of a quantized product with LoRA adapters: codes of rows, and inner products.

    inner[..., s, i, k] = (i + 1 == adapter) * sum_c y[..., c] first[i, s, k, c]

y is the float result of ``rms_norm`` or ``swiglu``, or the input of ``quantize_tokens``, before it
becomes codes.  The ranks of all n adapters lie side by side; those of other adapters are zeros.  So
one product with the second factors serves all rows: ``quantized_matmul(..., low_rank=)``.  Sources
are the tensors that are fused in one weight; each has its own first factors.

Up to 64 rows it is one kernel (``rows.inner``); elsewhere the ops run one after the other.
Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, Plan, choose_plan
from pallas_kernels.fixed_sums import by_blocks
from pallas_kernels.operands import check
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rows.plan import RowsPlan, plan
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.rows.swiglu import swiglu
from pallas_kernels.transform import Op, chosen

_OPERANDS = {
    "x": "float [..., X]",
    "first": "float [n, S, R, K]",
    "adapter": "int32 [...]",
    "weight": "float [K] ?",
    "residual": "x [..., X] ?",
}


# Codes, inner products, and the sum if a residual was added.
_Result = tuple[QTensor, *tuple[jax.Array, ...]]


class _Call(NamedTuple):
    """The static arguments of a call."""

    form: str  # of the rows' kernel: "norm", "gate", "copy"
    eps: float
    quantize: str


def quantize_adapted(
    x: jax.Array,
    first: jax.Array,
    adapter: jax.Array,
    quantize: DTypeLike,
    *,
    norm: tuple[jax.Array, float] | None = None,
    residual: jax.Array | None = None,
    gated: bool = False,
    implementation: Implementation | None = None,
) -> _Result:
    """``x[..., K]`` as codes with a scale a row, and ``inner[..., S n R]`` in x's dtype.

    first: ``[n, S, R, K]``, first factors of n adapters for each of S sources.
    adapter: int32, of x's leading axes: each row's, from 1 on; 0: none.
    norm: (weight ``[K]``, eps) of an RMSNorm that comes first, residual: what is added before it;
        the sum is then the third value.
    gated: x is gate and up ``[..., 2K]``, and the rows are ``silu(gate) * up``.

    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | floats: the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |

    Raises ValueError naming the operand for a wrong shape or dtype, NotImplementedError for a
    kernel that is not there.
    """
    op = "quantize_adapted"
    weight, eps = (None, 0.0) if norm is None else (norm[0], float(norm[1]))
    k = first.shape[-1]
    check(op, _OPERANDS, x=x, first=first, adapter=adapter, weight=weight, residual=residual)
    if x.shape[-1] != k * (1 + gated):
        raise ValueError(f"{op}: x {x.shape} has not the columns of first {first.shape}")
    if norm is None and residual is not None:
        raise ValueError(f"{op}: residual goes with a norm")
    if norm is not None and gated:
        raise ValueError(f"{op}: norm and gated exclude each other")
    form = "gate" if gated else "copy" if norm is None else "norm"
    codes = jnp.dtype(quantize).name
    found = choose_plan(
        op,
        implementation,
        lambda: plan(form, x, codes, weight, residual, eps, first=first),
        *(a for a in (x, first, weight, residual) if a is not None),
    )
    call = _Call(form, eps, codes)
    if found is None:
        return _composed(
            call, "xla" if implementation == "xla" else None, x, first, adapter, weight, residual
        )
    operands = x, first, adapter, weight, residual
    return _quantize_adapted(chosen(found, implementation), (call, found), *operands)


def inner_products(y: jax.Array, first: jax.Array, adapter: jax.Array) -> jax.Array:
    """``y[..., K]`` -> ``inner[..., S n R]``, in y's dtype: XLA's form, for any number of rows.

    One product with the factors of all adapters, of which each is read once; sums are float32.
    """

    def products(rows: tuple[jax.Array, jax.Array], first: jax.Array) -> jax.Array:
        y, adapter = rows
        n = first.shape[0]
        own = adapter[..., None] == jnp.arange(1, n + 1, dtype=jnp.int32)  # [..., n]
        inner = jnp.einsum(
            "...k,nsrk->...snr",
            y,
            first.astype(y.dtype),
            precision=jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        inner = jnp.where(own[..., None, :, None], inner, jnp.float32(0)).astype(y.dtype)
        return inner.reshape(*y.shape[:-1], -1)

    return by_blocks(products, (y, adapter), first, axes=y.ndim - 1)


def _composed(
    call: _Call,
    implementation: Implementation | None,
    x: jax.Array,
    first: jax.Array,
    adapter: jax.Array,
    weight: jax.Array | None,
    residual: jax.Array | None,
) -> _Result:
    """The parts one after the other."""
    codes = call.quantize
    total: tuple[jax.Array, ...] = ()
    if call.form == "norm":
        assert weight is not None
        if residual is not None:
            x, total = x + residual, (x + residual,)
        y = rms_norm(x, weight, call.eps, implementation=implementation)
        q = rms_norm(x, weight, call.eps, quantize=codes, implementation=implementation)
    elif call.form == "gate":
        y = swiglu(x, implementation=implementation)
        q = swiglu(x, quantize=codes, implementation=implementation)
    else:
        y, q = x, quantize_tokens(x, codes, implementation=implementation)
    assert isinstance(q, QTensor)
    return (q, inner_products(y, first, adapter), *total)


def _kernel(
    static: tuple[_Call, RowsPlan],
    x: jax.Array,
    first: jax.Array,
    adapter: jax.Array,
    weight: jax.Array | None,
    residual: jax.Array | None,
) -> _Result:
    from pallas_kernels.rows import kernel

    codes, scale, *rest = kernel.run(static[1], x, residual, weight, first, adapter)
    return (QTensor(codes, scale), *rest[::-1])


def _xla(
    static: tuple[_Call, Plan | None],
    x: jax.Array,
    first: jax.Array,
    adapter: jax.Array,
    weight: jax.Array | None,
    residual: jax.Array | None,
) -> _Result:
    return _composed(static[0], "xla", x, first, adapter, weight, residual)


_quantize_adapted = Op("quantize_adapted", _xla, _kernel)
