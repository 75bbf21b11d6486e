"""Communication of a layer that holds one shard of its weights.

Inside a ``shard_map`` over the mesh's "model" axis (``model.sharded``) a layer sees local arrays.
Three computations need the other shards:

    row_parallel_matmul   a matmul with split inputs ends in a sum over the shards
    lookup_rows           a lookup in a split embedding ends in such a sum, too
    quantization          activations quantized per token take the scale of the whole token

A weight with act-order columns also gathers its input.  ``mesh.is_split()`` asks the trace whether
it is inside such a ``shard_map``; outside of one nothing changes.

Partial sums are added in float32 and rounded once, as one long sum would be.  A token's int8 codes
are those of the unsplit model.  So tokens do not depend on the mesh, and W8A8 logits are the same
bits.  One exception: a kernel that writes only 16-bit floats, such as the weight-only one for
prefill, rounds its partial sums first.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxllama.parallel.mesh import MODEL_AXIS
from pallas_kernels.dispatch import named_plan, wants_kernel
from pallas_kernels.matmul.fused import fused_matmul
from pallas_kernels.matmul.op import product_plan, quantized_matmul
from pallas_kernels.qtensor import QTensor, dequantize, quantize
from pallas_kernels.rows.quantize_tokens import quantize_tokens


def row_parallel_matmul(
    x: jax.Array, weight: jax.Array | QTensor, bias: jax.Array | None, dtype: DTypeLike | None
) -> jax.Array:
    """Return ``x @ weight.T + bias``, where ``x[..., in / n]`` and ``weight[out, in / n]`` are one
    shard's. Every shard has the whole result in float32, to be rounded to ``dtype``."""
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if isinstance(weight, QTensor):
        if weight.columns is not None:  # this shard's columns take features from all shards
            x = lax.all_gather(x, MODEL_AXIS, axis=x.ndim - 1, tiled=True)
            x = jnp.take(x, weight.columns, axis=-1, mode="clip")
            weight = dataclasses.replace(weight, columns=None)
        inputs: jax.Array | QTensor = x
        if weight.activations is not None and weight.input_scale is not None:
            inputs = quantize_tokens(x, weight.activations, scale=weight.input_scale)
        elif weight.activations is not None and weight.has_input_groups:
            inputs = quantize_tokens(x, weight.activations, group_size=weight.group_size)
        elif weight.activations is not None:
            inputs = quantize_split_tokens(x, weight.activations)
        total = _quantized_sum(inputs, weight, dtype)
    elif (partial := fused_matmul(x, weight, out_dtype=jnp.float32)) is not None:
        total = lax.psum(partial, MODEL_AXIS)
    else:
        partial = lax.dot_general(
            x.reshape(-1, x.shape[-1]),
            weight.astype(x.dtype),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        total = lax.psum(partial, MODEL_AXIS).reshape(*x.shape[:-1], weight.shape[0])
    return total if bias is None else total + bias.astype(jnp.float32)


def _quantized_sum(x: jax.Array | QTensor, weight: QTensor, dtype: jnp.dtype) -> jax.Array:
    """The float32 product, summed over the shards."""
    if isinstance(x, QTensor) and x.scale.shape[-1] > 1:
        return lax.psum(quantized_matmul(x, weight, out_dtype=jnp.float32), MODEL_AXIS)
    if isinstance(x, QTensor):
        # Sums of codes come first, scales after: integers below 2^24 add up exactly.
        unit = jnp.ones((), jnp.float32)
        ones = jnp.broadcast_to(unit, x.scale.shape)
        integers = dataclasses.replace(x, scale=ones, input_scale=None)
        name = "scale" if weight.unit is None else "unit"
        of_rows = getattr(weight, name)
        # A shard's groups have their own, and its one group may be a block of FP8.
        if name == "scale" and weight.dtype in (jnp.int4, jnp.float8_e4m3fn):
            of_rows = unit.reshape(1, 1)
        else:
            weight = dataclasses.replace(weight, **{name: jnp.ones_like(of_rows)})
        sums = lax.psum(quantized_matmul(integers, weight, out_dtype=jnp.float32), MODEL_AXIS)
        return sums * (x.scale * of_rows.astype(jnp.float32)[:, 0])
    out = jnp.dtype(jnp.float32)
    if wants_kernel(None, x, weight):
        whole, rounded = (named_plan(product_plan(x, weight, out_dtype=d)) for d in (out, dtype))
        out = dtype if whole is None and rounded is not None else out
    partial = quantized_matmul(x, weight, out_dtype=out)
    return lax.psum(partial.astype(jnp.float32), MODEL_AXIS)


def quantize_split_tokens(x: jax.Array, dtype: str) -> QTensor:
    """``quantize`` of tokens whose features ``x[..., in / n]`` are split: one scale per token, that
    of all its features."""
    x = x.astype(jnp.float32)
    top = lax.pmax(jnp.max(jnp.abs(x), axis=-1, keepdims=True), MODEL_AXIS)
    # A scale is made from the largest magnitude, so a row that also holds it gets the right one,
    # by quantize's own arithmetic.
    whole = quantize(jnp.concatenate((x, top), axis=-1), dtype, scale_dtype=jnp.float32)
    return dataclasses.replace(whole, q=whole.q[..., :-1])


def lookup_rows(weight: jax.Array | QTensor, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows ``tokens[...]`` of a matrix whose rows are split, on every shard."""
    rows = weight.shape[0]
    local = tokens - lax.axis_index(MODEL_AXIS) * rows
    mine = (local >= 0) & (local < rows)
    local = jnp.where(mine, local, 0)
    if isinstance(weight, QTensor):
        picked = dequantize(weight.rows(local), dtype)
    else:
        picked = weight[local].astype(dtype)
    return lax.psum(jnp.where(mine[..., None], picked, jnp.zeros_like(picked)), MODEL_AXIS)
