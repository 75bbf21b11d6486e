"""The product of few tokens with their experts in 4 bits on Hopper, summed over the experts.

    out[t] = sum_j weights[t, j] * (x[t, j] @ w[experts[t, j]].T + bias[experts[t, j]])

``summed_program`` says who does what.  The sum needs no other kernel and no results of single
experts in device memory.  Its codes are on their way while x passes through shared memory.

Copies: each warp loads its own codes into registers, ahead of their products, and x through its own
shared memory.
Waits: all threads for the kernel before, and at two block barriers: for all sums of slots, then for
the experts' rows.
Writes: a thread stores a row's result.

Floor: the bytes of the chosen experts at the rate of a copy.  On an H200 (4.3 TB/s, jax 0.11.2), us
[floor]: 8 of ``[2048, 768]`` in int4 4.5 [1.5], 4 of ``[2880, 2880]`` in MXFP4 9.5 [4.1].
Command: ``python -m benchmarks.kernels.experts --tokens 1 --shapes "qwen3 down" "gpt-oss down"``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import ptx as p
from pallas_kernels.experts import summed_program
from pallas_kernels.experts.summed_plan import GroupedSumPlan
from pallas_kernels.launch import launch
from pallas_kernels.matmul.few_rows.kernel import kinds_of, parts_of
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.qtensor import QTensor


@functools.partial(jax.jit, static_argnames=("plan", "out_dtype"))
def grouped_sum(
    x: jax.Array,
    w: QTensor,
    experts: jax.Array,
    weights: jax.Array,
    bias: jax.Array | None = None,
    *,
    shared: QTensor | None = None,
    residual: jax.Array | None = None,
    plan: GroupedSumPlan,
    out_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """``[T, N]`` in out_dtype (float32 or bfloat16).

    x bfloat16 ``[T, k, K]``, w ``[E, N, K]``, experts int32 ``[T, k]``, weights ``[T, k]``, bias
    ``[E, N]``.  Experts are clamped to [0, E); with ``plan.partial`` those outside add nothing.
    shared: ``[N, K]``, the last of a token's k experts, whose weight is 1; experts and weights are
    then ``[T, k - 1]``.  residual: ``[T, N]`` in out_dtype, added last.
    """
    weight = StoredWeight.of(w)
    inputs = {"x": x, **parts_of(w), "bias": bias, "experts": experts}
    inputs["weights"] = weights.astype(jnp.float32)
    out = jax.ShapeDtypeStruct((plan.tokens, plan.n), out_dtype)
    row_bytes = {"w": plan.k // 2, "scale": weight.scale_row, "zero": weight.zero_row}
    kinds = kinds_of({"bias": bias, "out": out})
    inputs |= {"residual": residual, "shared": None if shared is None else parts_of(shared)}

    def body(gmem, smem):
        memory = {name: jax.tree.map(p.address, ref) for name, ref in vars(gmem).items()}
        facts = plan, weight, memory, row_bytes, w.shape[0], kinds
        summed_program.SumProgram(*facts, smem).run()

    sizes = [-(-size // 4) for size in plan.scratch_sizes]
    (found,) = launch(
        body,
        inputs,
        {"out": out},
        name=plan.kernel.removesuffix("_mosaic"),
        grid=plan.blocks * plan.tokens,
        warpgroups=plan.warps // 4,
        scratch=dict(zip(summed_program.SCRATCH, sizes, strict=True)),
        registers=True,
    )
    return found
