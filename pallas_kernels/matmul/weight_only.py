"""XLA's forms of a weight-only product on an accelerator: ``x[M, K]`` times codes ``[N, K]``.

Three forms give the same float32 sums.  They differ in what they write beside the result:

    words  4-bit codes: multiply and reduce, one kernel that reads them once; for a row or two
    sums   a product with the codes themselves, then the scales; writes one float32 sum for each
           group, row of x and row of w.  With one scale a row these sums are the result
    copy   dequantize, then a product; writes a copy of the weight in x's dtype, because XLA does
           not fuse scales into the operand of its product.

Microseconds at 14336 x 4096 on an H200, int4 in groups of 128, M = 1 / 4 / 16: words 18 / 53 / -,
sums 23 / 26 / 38, copy 113 / 107 / 109; temporaries at M = 1: 16 KB, 4.6 MB, 117 MB.
``few_rows.plan`` and ``many_rows.plan`` hold the kernels; ``matmul.predict`` chooses the form.
"""

from __future__ import annotations

import functools
import operator
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.qtensor import FLOAT4, QTensor
from pallas_kernels.rounding import NIBBLES

Form = Literal["words", "sums", "copy"]
WORD = 8  # 4-bit codes in the 32 bits that a thread of the first form reads at a time


def forms(q: jax.Array, group_size: int) -> tuple[Form, ...]:
    """The forms that exist for codes in groups of ``group_size`` columns."""
    has_words = q.dtype.name in NIBBLES and group_size % WORD == 0
    return ("words", "sums", "copy") if has_words else ("sums", "copy")


def by_words(x: jax.Array, scale: jax.Array, zero: jax.Array | None, q: jax.Array) -> jax.Array:
    n, groups = scale.shape
    words = lax.bitcast_convert_type(q.reshape(n, groups, -1, WORD), jnp.int32)
    if q.dtype == FLOAT4:
        codes = [float4_values(words >> shift) for shift in range(0, 32, 4)]
    else:
        # A code is shifted to the upper end of its word and back, which extends its sign.
        codes = [((words << shift) >> 28).astype(jnp.float32) for shift in range(28, -1, -4)]
    # Neighbouring threads are to read neighbouring values of x, as they do of the words.
    by_code = x.astype(jnp.float32).reshape(-1, *words.shape[1:], WORD)
    by_code = lax.optimization_barrier(jnp.moveaxis(by_code, -1, 1))

    scales = scale.astype(jnp.float32)[..., None]

    def row(parts: jax.Array) -> jax.Array:
        sums = functools.reduce(jnp.add, map(operator.mul, codes, parts))
        return jnp.sum(sums * scales, axis=(1, 2))

    out = jnp.stack([row(by_code[i]) for i in range(x.shape[0])])
    if zero is None:
        return out
    # Zeros have a kernel of their own.  Beside the codes they take 0 to 6 times as long as these,
    # depending on the shape: at 17664 x 1024 54 us, where the codes take 9 and this 4.
    ones = lax.optimization_barrier(_ones(x, groups))
    return out + jnp.sum(ones[:, None] * _scaled(0.0, 1.0, scale, zero), axis=-1)


def by_sums(x: jax.Array, scale: jax.Array, zero: jax.Array | None, q: jax.Array) -> jax.Array:
    (m, k), (n, groups) = x.shape, scale.shape
    if m == 1:  # XLA makes a multiply-and-reduce of such a product, which takes longer
        x = jnp.pad(x, ((0, 1), (0, 0)))
    codes = q.astype(x.dtype)
    if groups == 1:
        sums = dot(x, codes, (((1,), (1,)), ((), ())), x.dtype)[None]
    else:
        by_group = x.reshape(-1, groups, k // groups), codes.reshape(n, groups, k // groups)
        sums = dot(*by_group, (((2,), (2,)), ((1,), (1,))), x.dtype)  # [groups, M, N]
    ones = None if zero is None else _ones(x[:m], groups).T[..., None]
    zeros = None if zero is None else zero.T[:, None]
    return jnp.sum(_scaled(sums[:, :m], ones, scale.T[:, None], zeros), axis=0)


def by_copy(x: jax.Array, scale: jax.Array, zero: jax.Array | None, q: jax.Array) -> jax.Array:
    w = QTensor(q, scale, zero).floats(x.dtype)
    return dot(x, w, (((1,), (1,)), ((), ())), x.dtype)


def float4_values(bits: jax.Array) -> jax.Array:
    """Return the float32 values of the float4_e2m1fn codes in the lowest four bits of integers.

    The code's exponent and mantissa are the same fields of a float16 of 2^-14 times the value.
    """
    bits = bits.astype(jnp.int32)
    halves = ((bits & 8) << 12) | ((bits & 7) << 9)
    return lax.bitcast_convert_type(halves.astype(jnp.int16), jnp.float16).astype(jnp.float32) * (
        2.0**14
    )


BY_FORM = {"words": by_words, "sums": by_sums, "copy": by_copy}


def _ones(x: jax.Array, groups: int) -> jax.Array:
    """Sums of x over the columns of each group, ``[M, groups]`` in float32."""
    return jnp.sum(x.astype(jnp.float32).reshape(x.shape[0], groups, -1), axis=-1)


def _scaled(
    sums: jax.Array | float,
    ones: jax.Array | float | None,
    scale: jax.Array,
    zero: jax.Array | None,
) -> jax.Array:
    """Turn sums of x times codes into sums of x times weights; ones: sums of x alone."""
    scale = scale.astype(jnp.float32)
    if zero is None or ones is None:
        return sums * scale
    if jnp.issubdtype(zero.dtype, jnp.integer):
        return (sums - ones * zero.astype(jnp.float32)) * scale
    return sums * scale + ones * zero.astype(jnp.float32)


Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def dot(a: jax.Array, b: jax.Array, dims: Dims, dtype: DTypeLike) -> jax.Array:
    """``lax.dot_general`` of operands in ``dtype``, summed in float32."""
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        dims,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
