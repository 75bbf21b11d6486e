"""The kernels of few rows for weights that lie in different places: see ``matmul.blocks``.

A tile of 16 rows, or in the program of one row a row, belongs to one of a group's weights. Only the
addresses of its codes and scales depend on which: a shift, picked by comparing its number with the
weights' first ones (``several``).  Each group has blocks of its own, which run the program of its
form.

``row`` and ``tile`` say who copies, who waits and who writes.
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels import ptx as p
from pallas_kernels.launch import launch
from pallas_kernels.matmul.few_rows import row, tile
from pallas_kernels.matmul.few_rows.blocks_plan import BlocksPlan
from pallas_kernels.matmul.few_rows.kernel import Weight, kinds_of, parts_of
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.few_rows.plan import WARPS, RowDivision
from pallas_kernels.matmul.few_rows.several import Several
from pallas_kernels.matmul.stored import StoredWeight


@functools.partial(jax.jit, static_argnames=("out_dtype", "eps", "plan"))
def matmul(
    x: jax.Array,
    groups: tuple[tuple[Weight, ...], ...],
    gamma: jax.Array,
    *,
    eps: float,
    out_dtype,
    plan: BlocksPlan,
) -> tuple[jax.Array, ...]:
    """x [M, K] bf16, groups of weights [N_i, K] of one form, gamma [K] -> [M, sum N_i] of each."""
    m, k = x.shape
    parts = [[tuple(parts_of(w).values()) for w in group] for group in groups]
    outs = [jax.ShapeDtypeStruct((m, sum(g.rows)), out_dtype) for g in plan.groups]
    first = plan.groups[0].division
    is_row = isinstance(first, RowDivision)
    names = ("w", "scale", "zero")

    def program(i, gmem, smem):
        group, (own, *others) = plan.groups[i], gmem.weights[i]
        memory = {"x": gmem.x, "gamma": gmem.gamma, "out": gmem.out[i]}
        held = dict(zip(names, parts[i][0], strict=True))
        kinds = kinds_of({"x": x, "gamma": gamma, "out": outs[i], **held})
        memory |= dict(zip(names, own, strict=True))
        shape = {"weight": StoredWeight.of(groups[i][0]), "n": sum(group.rows), "k": k}
        operands = FewRowsOperands.of(memory, **shape, kinds=kinds, eps=eps, swiglu=False)
        several = Several(group.begin, group.firsts, others)
        if isinstance(group.division, RowDivision):
            block = p.register("ctaid.x") - group.begin
            row.RowProgram(group.division, operands, smem, block, several).run()
            return
        tile.TileProgram(group.division, operands, smem, several).run()

    def body(gmem, smem):
        for i, group in enumerate(plan.groups):
            run = functools.partial(program, i, gmem, smem)
            if len(groups) == 1:
                run()
            else:
                block = p.register("ctaid.x") - group.begin
                p.when(block < group.blocks, run)

    sizes = [group.division.scratch_sizes(normed=True) for group in plan.groups]
    largest = [max(size) // 4 for size in zip(*sizes, strict=True)]
    (out,) = launch(
        body,
        {"x": x, "gamma": gamma, "weights": parts},
        {"out": outs},
        name="quantized_matmul_blocks",
        grid=sum(group.blocks for group in plan.groups),
        cluster=1 if isinstance(first, RowDivision) else first.split,
        warpgroups=(first.warps if is_row else WARPS) // 4,
        scratch=dict(zip(row.SCRATCH if is_row else tile.SCRATCH, largest, strict=True)),
        registers=True,
    )
    return tuple(out)
