"""The decode matmul of weights that lie in different places: see ``matmul.blocks``.

A tile of 16 rows belongs to one of a group's weights, and only the addresses of its words and
scales depend on which: a shift, picked by comparing the tile's number with the weights' first ones.
Each group has blocks of its own, which run the program of its form.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic as p
from pallas_kernels.matmul.few_rows import kernel as decode
from pallas_kernels.matmul.few_rows.plan import WARPS, BlocksPlan, Group
from pallas_kernels.matmul.few_rows.scheme import KIND, Scheme
from pallas_kernels.qtensor import QTensor


class Kernel(decode.Kernel):
    """The decode matmul's program; its own operands are the first weight's.

    begin: the first block (or cluster) that runs it.  firsts: the first tile of each weight but the
    first.  others: their references, each (words, scale, zero), None where there is none.
    """

    def __init__(self, plan, scheme, n, k, given, scratch, *, begin, firsts, others, **kinds):
        super().__init__(plan, scheme, n, k, given, scratch, **kinds)
        self.cluster = p.add(self.cluster, -begin)
        self.firsts = firsts
        words, scales, zeros = zip(*others, strict=True) if others else [()] * 3
        self.moves = {
            "w": self.shifts(self.w, words, self.row_bytes),
            "scale": self.shifts(self.scale, scales, self.scale_row),
            "zero": self.shifts(self.zero, zeros, self.zero_row),
        }

    def shifts(self, base, refs, row: int):
        """Bytes from where the other weights would lie behind the first to where they do."""
        if base is None:
            return None
        near = [p.offset(base, p.ci(first), 16 * row) for first in self.firsts]
        return [arith.subi(p.address(ref), at) for ref, at in zip(refs, near, strict=True)]

    def rows_of(self, name: str, tile, row: int):
        at = super().rows_of(name, tile, row)
        shift = arith.subi(at, at)
        for first, other in zip(self.firsts, self.moves[name], strict=True):
            shift = arith.select(p.less(tile, first), shift, other)
        return arith.addi(at, shift)


@functools.partial(jax.jit, static_argnames=("out_dtype", "eps", "plan"))
def matmul(
    x: jax.Array,
    groups: tuple[tuple[jax.Array | QTensor, ...], ...],
    gamma: jax.Array,
    *,
    eps: float,
    out_dtype,
    plan: BlocksPlan,
) -> tuple[jax.Array, ...]:
    """x [M, K] bf16, groups of weights [N_i, K] of one form, gamma [K] -> [M, sum N_i] of each."""
    m, k = x.shape
    kinds = {"out": KIND[out_dtype.name], "gamma": KIND[gamma.dtype.name], "eps": eps}
    parts = [[decode.parts_of(w) for w in group] for group in groups]
    given, tree = jax.tree.flatten((x, gamma, parts))

    def emit(ctx, *refs):
        del ctx
        x_ref, gamma_ref, parts = jax.tree.unflatten(tree, refs[: len(given)])
        outs, scratch = refs[len(given) :][: len(groups)], refs[len(given) + len(groups) :]
        for group, weights, (first, *others), out in zip(
            plan.groups, groups, parts, outs, strict=True
        ):
            operands = decode.Operands(x_ref, *first, None, gamma_ref, None, out)
            scheme = Scheme.of(weights[0], KIND[x.dtype.name])
            run = functools.partial(_run, group, scheme, k, operands, others, scratch, kinds)
            if len(groups) == 1:
                run()
            else:
                block = p.add(p.register("ctaid.x"), -group.begin)
                p.when(p.less(block, group.tiles.clusters), run)

    def quantized_matmul_blocks(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(emit)(*refs)

    split = plan.groups[0].tiles.split
    sizes = [group.tiles.scratch_sizes(normed=True) for group in plan.groups]
    kernel = plgpu.kernel(
        quantized_matmul_blocks,
        out_type=tuple(jax.ShapeDtypeStruct((m, sum(g.rows)), out_dtype) for g in plan.groups),
        grid=(sum(group.tiles.clusters for group in plan.groups),),
        grid_names=("tiles",),
        cluster=(split,) if split > 1 else (),
        cluster_names=("run",) if split > 1 else (),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((max(size) // 4,), jnp.float32) for size in zip(*sizes, strict=True)
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return kernel(*given)


def _run(group: Group, scheme: Scheme, k: int, operands, others, scratch, kinds) -> None:
    weights = {"begin": group.begin, "firsts": group.firsts, "others": others}
    n = sum(group.rows)
    Kernel(group.tiles, scheme, n, k, operands, scratch, **weights, **kinds).run()
