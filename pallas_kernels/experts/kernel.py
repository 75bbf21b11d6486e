"""A grouped product of few pairs on Hopper: all experts of all tokens in one launch.

    out[p] = x[p // fan] @ w[experts[p]].T          float32, behind bias and SwiGLU

The program is that of one row (``matmul.few_rows.row``), which says who does what and in which
order sums go.  A block belongs to one pair: it reads the pair's expert and moves the addresses of
w, scales, zeros, bias, x and the result there.

    block  ctaid -> pair, block of the pair | the kernel before has ended | the pair's expert
    all    the program of one row with that expert's weight; x does not wait for the expert,
           but for ``partial``, where a branch on the expert stands before everything

Copies, waits and writes are those of ``few_rows.row``: warps copy codes for themselves, all threads
meet at its one block barrier.  All threads load the pair's expert first.

Numerics are the one-row kernel's, so a pair's result depends on its row and expert alone.
Floor: the bytes of the pairs' experts at the rate of a copy.  On an H100 (3.0 TB/s), 8 pairs of
``[1536, 2048]`` with SwiGLU, us [floor]: bfloat16 27.0 [16.8], int8 15.6 [8.4], int4 10.2 [4.4].
On an H200 (4.3 TB/s, jax 0.11.2) int4 5.8 [3.1].
Command: ``python -m benchmarks.kernels.experts --tokens 1 8``.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import ptx as p
from pallas_kernels.experts.gate import Gate
from pallas_kernels.experts.plan import GroupedRowPlan
from pallas_kernels.launch import launch
from pallas_kernels.matmul.few_rows import row
from pallas_kernels.matmul.few_rows.kernel import kinds_of, parts_of
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.qtensor import QTensor


@functools.partial(jax.jit, static_argnames=("fan", "gate", "plan", "out_dtype", "partial"))
def grouped_rows(
    x: jax.Array,
    w: jax.Array | QTensor,
    experts: jax.Array,
    bias: jax.Array | None = None,
    *,
    shared: QTensor | None = None,
    fan: int,
    gate: Gate | None,
    plan: GroupedRowPlan,
    out_dtype: DTypeLike = jnp.float32,
    partial: bool = False,
) -> jax.Array:
    """``[P, N]`` in out_dtype (float32 or bfloat16), or ``[P, N / 2]`` with a gate.

    x bfloat16 ``[P / fan, K]``, w ``[E, N, K]``, experts int32 ``[P]``, bias ``[E, N]``.
    Experts are clamped to [0, E).  With ``partial`` they must lie in [0, E], and the row of a pair
    whose expert is E is not computed and may hold anything.
    shared: ``[N, K]``, the expert of each token's last pair, which ``experts`` then leaves out.
    """
    _, n, k = w.shape
    beside = None if shared is None else parts_of(shared)
    inputs = {"x": x, **parts_of(w), "bias": bias, "experts": experts}
    shape = {"weight": StoredWeight.of(w), "n": n, "k": k}
    n_out = n if gate is None else n // 2
    out = jax.ShapeDtypeStruct((plan.pairs, n_out), out_dtype)
    kinds = kinds_of({**inputs, "out": out})
    gated = {"swiglu": gate is not None, "activation": gate or "silu"}
    # Bytes of an expert, of each operand that has one.
    sizes = {
        name: v.size // w.shape[0] * jnp.iinfo(v.dtype).bits // 8
        if jnp.issubdtype(v.dtype, jnp.integer)
        else v.size // w.shape[0] * v.dtype.itemsize
        for name, v in inputs.items()
        if v is not None and name not in ("x", "experts")
    }

    def body(gmem, smem):
        memory = dict(vars(gmem))
        chosen, apart = p.address(memory.pop("experts")), memory.pop("shared")
        operands = FewRowsOperands.of(memory, **shape, kinds=kinds, eps=None, **gated)
        block = p.register("ctaid.x")
        pair, block = block // plan.row.blocks, block % plan.row.blocks
        p.await_kernel()
        index, token, last = pair, pair // fan, None
        if apart is not None:
            index, last = pair % fan, fan - 1
            last = p.equal(index, last)
            index = token * (fan - 1) + p.smaller(index, fan - 2)
        (expert,) = p.load_global(p.offset(chosen, index, 4), 1)
        if not partial:
            expert = p.smaller(p.larger(expert, 0), w.shape[0] - 1)
        is_own = expert < w.shape[0]
        moved = {name: p.offset(getattr(operands, name), expert, sizes[name]) for name in sizes}
        if apart is not None:
            moved = {k: p.where(last, p.address(apart[k]), v) for k, v in moved.items()}
        moved["x"] = p.offset(operands.x, token, 2 * k)
        moved["out"] = p.offset(operands.out, pair, out.dtype.itemsize * n_out)
        operands = dataclasses.replace(operands, **moved)

        def product() -> None:
            row.RowProgram(plan.row, operands, smem, block).run(waits=False)

        if partial:
            p.when(is_own, product)
        else:
            product()

    sizes_of_scratch = [size // 4 for size in plan.row.scratch_sizes(normed=False)]
    (found,) = launch(
        body,
        {**inputs, "shared": beside},
        {"out": out},
        name=plan.kernel.removesuffix("_mosaic"),
        grid=plan.row.blocks * plan.pairs,
        warpgroups=plan.row.warps // 4,
        scratch=dict(zip(row.SCRATCH, sizes_of_scratch, strict=True)),
        registers=True,
    )
    return found
