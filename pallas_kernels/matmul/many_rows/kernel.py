"""The products of many rows on Hopper: the kernel of a plan, and the preparation of its operands.

Weights stay in the plain ``[N, K]`` layout; int4 stays packed up to the registers.

Accuracy.  int8: the int32 sum is exact.  FP8: the tensor cores add with about 14 bits, so every
256 columns the sum moves to a float32 register (``promote``): relative RMS error 2.2e-4 on normal
values, K = 4096, against 1.3e-3 for one long sum (which is what XLA's fp8 dot does).  FP8 in groups
of 128 columns: a group's sum is multiplied by both scales in float32.  Weight-only:
a weight is (q - zero) * scale rounded once to x's dtype where there are groups; with one scale per
row the scale multiplies the float32 accumulator instead.  Codes of x beside int4: in two levels of
scales int8 sums are exact; else a group's sum is multiplied in float32 by its scale (int8 exact up
to there, e4m3 as above: relative RMS error 8e-5); where groups are no multiples of 128 columns,
codes are multiplied as bf16, which holds them.  f16 with groups is divided by the row's
largest scale, which the epilogue multiplies back, so that no scale over- or underflows f16.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.few_rows.kernel import parts_of
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.matmul.many_rows.pair import pair_matmul
from pallas_kernels.matmul.many_rows.plan import CODES_K, PairTile, WeightTile, has_block_scales
from pallas_kernels.matmul.many_rows.weight import weight_matmul
from pallas_kernels.qtensor import BLOCK_ROWS, FLOAT4, QTensor
from pallas_kernels.rows.swiglu import swiglu as gate


def matmul(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor,
    bias: jax.Array | None,
    out_dtype,
    plan: PairTile | WeightTile,
    *,
    swiglu: bool = False,
    activation: str = "silu",
    low_rank: tuple[jax.Array, tuple[jax.Array, ...]] | None = None,
) -> jax.Array:
    """x [M, K], w [N, K] -> [M, N]; sums in float32, of int8 in int32.

    swiglu: w is plain, its rows are gate, then up; activation(gate) * up [M, N / 2] is returned.
    low_rank: of a quantized x, as ``pair_matmul`` takes it.
    """
    if isinstance(plan, WeightTile):
        return _weight_only(x, w, bias, out_dtype, plan)
    if isinstance(x, QTensor):
        if x.scale.shape[1] > 1:
            scales = _scales_of_groups(x.scale, w, plan)
        else:
            of_all = x.input_scale
            of_x = x.scale.reshape(-1) if of_all is None else of_all.reshape(1)
            scales = of_x, w.scale.reshape(-1)
        return pair_matmul(x.q, w.q, *scales, bias, out_dtype, plan, low_rank=low_rank)
    out_dtype = jnp.dtype(out_dtype)
    fused = swiglu and bias is None and activation == "silu"
    kernel_dtype = jnp.dtype(jnp.float32) if swiglu and not fused else out_dtype
    y = pair_matmul(x, w, None, None, bias, kernel_dtype, plan, fused)
    if swiglu and not fused:
        y = gate(y, activation=activation, implementation="xla").astype(out_dtype)
    return y


def _scales_of_groups(of_x: jax.Array, w: QTensor, plan: PairTile) -> tuple[jax.Array, jax.Array]:
    """Scales of x and of w as ``pair_matmul`` takes them."""
    if plan.m > 64 and has_block_scales(w):
        return _whole_units(of_x), _by_block(w.scale)
    of_x = of_x.astype(jnp.float32)
    prepared = _whole_units if plan.m == 64 else _by_step
    return prepared(of_x), prepared(w.scale)


def _by_step(scale: jax.Array) -> jax.Array:
    """float32 ``[groups, rows]`` of scales ``[rows, groups]``; copies want 16 bytes of rows."""
    return jnp.pad(scale.astype(jnp.float32).T, ((0, 0), (0, -scale.shape[0] % 4)))


def _by_block(scale: jax.Array) -> jax.Array:
    """Scales ``[blocks, 128, groups]`` of rows ``[N, groups]``; groups have whole 16 bytes."""
    scale = _whole_units(scale)
    return scale.reshape(-1, BLOCK_ROWS, scale.shape[1])


def _whole_units(scale: jax.Array) -> jax.Array:
    """Scales ``[rows, groups]`` with zeros behind the groups, so that rows have whole 16 bytes."""
    return jnp.pad(scale, ((0, 0), (0, -scale.shape[1] % (16 // scale.dtype.itemsize))))


def _weight_only(
    x: jax.Array | QTensor, w: QTensor, bias: jax.Array | None, out_dtype, plan: WeightTile
) -> jax.Array:
    token = None
    if w.dtype == FLOAT4:
        return _float4(x, w, bias, out_dtype, plan)
    if isinstance(x, QTensor):
        token = x.scale.reshape(-1)
        if plan.block >= CODES_K:
            unit = None if w.unit is None else w.unit.reshape(-1)
            vectors = w.scale, w.zero, unit, bias
            of_groups = {"group": w.group_size, "interleaved": w.interleaved, "tile": plan}
            return weight_matmul(x.q, w.q, *vectors, out_dtype, token, **of_groups)
        x, w = x.q.astype(jnp.bfloat16), w.in_one_level
    scale, zero, row = (w.scale, w.zero, None) if plan.stored else _weight_vectors(w, x.dtype)
    float_zero = zero is not None and not jnp.issubdtype(w.zero.dtype, jnp.integer)
    vectors = scale, zero, row, bias
    of_groups = {"group": w.group_size, "float_zero": float_zero}
    return weight_matmul(x, w.q, *vectors, out_dtype, token, **of_groups, tile=plan)


def _float4(x: jax.Array, w: QTensor, bias: jax.Array | None, out_dtype, plan: WeightTile):
    parts = parts_of(w)
    unit = None if w.unit is None else w.unit.reshape(-1)
    kind = FewRowsScheme.of(w, "bf16").scale_kind
    scale = parts["scale"] if plan.stored else parts["scale"].T
    vectors = scale, None, unit, bias
    how = {"group": w.group_size, "float4": kind, "tile": plan}
    return weight_matmul(x, parts["w"], *vectors, out_dtype, **how)


def _weight_vectors(w: QTensor, dtype):
    """(scale [K / g, N], zero [K / g, N], row scale [N]): the first two are of the loop."""
    float_zero = w.zero is not None and not jnp.issubdtype(w.zero.dtype, jnp.integer)
    zero = None if w.zero is None else w.zero.T
    if w.scale.shape[-1] == 1 and not float_zero:
        return None, None if zero is None else zero.astype(dtype), w.scale.reshape(-1)
    scale, row = w.scale.T, None
    if dtype == jnp.float16:
        scale = scale.astype(jnp.float32)
        zero = zero.astype(jnp.float32) if float_zero else zero
        row = jnp.max(jnp.abs(scale), axis=0)
        if float_zero:
            row = jnp.maximum(row, jnp.max(jnp.abs(zero), axis=0))
        inverse = jnp.where(row > 0, 1.0 / jnp.where(row > 0, row, 1.0), 0.0)
        scale = scale * inverse
        zero = zero * inverse if float_zero else zero
    return scale.astype(dtype), None if zero is None else zero.astype(dtype), row
