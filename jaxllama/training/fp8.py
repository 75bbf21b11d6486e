"""FP8 products: a layer's matrices multiply in float8_e4m3fn, forward and backward.

    y [M, N] = x w^T       dx [M, K] = dy w       dw [N, K] = dy^T x

Each of the three products rounds both operands to e4m3. A scale belongs to one row of an operand
along the summed axis, so its largest magnitude is the largest code. Gradients are e4m3 too: with a
scale for each row, precision is scarcer than range (torchao's row-wise recipe; DeepSeek-V3, arXiv
2412.19437). Sums are float32, the master weights are float32, and dw is float32.

A value v of a row with the scale s is rounded by at most max(2^-4 |v|, 2^-10 s). Errors of several
values are independent, so those of a product of many cancel.

``Fp8`` is a ``LayerOps``: ``model.decoder.block`` calls it instead of ``model.linear``. Embedding,
head, norms, mixers, experts and matrices with fewer than 64 rows or columns stay in floats.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from jaxllama.config import StepConfig
from jaxllama.model import linear as ops
from jaxllama.model.layer_ops import Steps
from jaxllama.model.linear import Input
from jaxllama.typing import Params
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.rows.swiglu import swiglu

CODES = "float8_e4m3fn"
LEAST = 64  # rows and columns of a matrix that is multiplied in FP8


@jax.custom_vjp
def fp8_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return ``x[M, K]`` times ``w[N, K]`` transposed, in x's dtype; w is float32."""
    return _product(_rows(x), _rows(w), x.dtype)


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[QTensor, jax.Array]]:
    x = _whole(x)
    # The codes of x are half of its bytes.
    return fp8_product(x, w), (_columns(x), w)


def _backward(saved: tuple[QTensor, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    dy = _whole(dy)
    dx = _product(_rows(dy), _columns(w), dy.dtype)
    return dx, _product(_columns(dy), x, w.dtype)


fp8_product.defvjp(_forward, _backward)


def _whole(x: jax.Array) -> jax.Array:
    """Return x as an array in memory, from which both of its codes are made."""
    return _by_rows(lax.optimization_barrier(x))


def _by_rows(x: jax.Array) -> jax.Array:
    """Return a matrix whose rows lie one behind the other.

    A transposed one would otherwise spread. XLA would choose its layout for all that x comes from
    (the gate, a norm's derivative) and compute that in several float32 passes. It would also
    transpose the weights of all layers before a loop.
    """
    return with_layout_constraint(x, Layout((0, 1)))


def _rows(x: jax.Array) -> QTensor:
    """Return codes of x with a scale for each row."""
    return quantize_tokens(x, CODES)


def _columns(x: jax.Array) -> QTensor:
    """Return codes of x transposed, with a scale for each column of x."""
    if x.dtype.itemsize == 2:
        # XLA's transposition at the memory's rate, then one pass of the kernel: 1.3% of a step of
        # GLA-1.3B less than XLA's two passes, of which one transposes as it rounds.
        return _rows(lax.optimization_barrier(_by_rows(_by_rows(x).T)))
    codes = quantize_tokens(_by_rows(x).T, CODES, implementation="xla")
    return dataclasses.replace(codes, q=_by_rows(codes.q))


def _product(x: QTensor, w: QTensor, dtype: DTypeLike) -> jax.Array:
    return quantized_matmul(x, dataclasses.replace(w, activations=CODES), out_dtype=dtype)


class Fp8(Steps):
    """The operations of a layer with FP8 products; one step after the other."""

    def product(
        self,
        x: Input,
        linear: Params,
        dtype: DTypeLike,
        cfg: StepConfig,
        *,
        into: Params | None = None,
    ) -> jax.Array:
        y = _linear(x, linear, dtype)
        return y if into is None else swiglu(y, activation=cfg.activation)


def _linear(x: Input, linear: Params, dtype: DTypeLike) -> jax.Array:
    """Return ``x[..., K]`` times a layer's weight, with its bias."""
    assert isinstance(x, jax.Array)
    weight, bias = linear["weight"], linear.get("bias")
    if min(weight.shape) < LEAST:
        return ops.linear(x, linear, dtype)
    y = fp8_product(x.reshape(-1, x.shape[-1]), weight)
    y = y if bias is None else y + bias.astype(y.dtype)
    return y.reshape(*x.shape[:-1], -1).astype(dtype)
