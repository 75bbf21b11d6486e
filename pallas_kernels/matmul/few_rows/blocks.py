"""The decode matmul of weights that lie in different places: see ``matmul.blocks``.

A tile of 16 rows belongs to one of a group's weights, and only the addresses of its words and
scales depend on which: a shift, picked by comparing the tile's number with the weights' first ones.
Each group has blocks of its own, which run the program of its form.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic as p
from pallas_kernels.matmul.few_rows import kernel as decode
from pallas_kernels.matmul.few_rows.plan import CLUSTERS, WARPS, Plan, make_plan
from pallas_kernels.matmul.few_rows.scheme import KIND, Scheme
from pallas_kernels.qtensor import QTensor, stacked


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


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights of one form, and the blocks that they have."""

    plan: Plan
    scheme: Scheme
    rows: tuple[int, ...]
    begin: int

    @property
    def firsts(self) -> list[int]:
        return [end // 16 for end in itertools.accumulate(self.rows[:-1])]

    def program(self, k: int, operands, others, scratch, kinds) -> Kernel:
        weights = {"begin": self.begin, "firsts": self.firsts, "others": others}
        n = sum(self.rows)
        return Kernel(self.plan, self.scheme, n, k, operands, scratch, **weights, **kinds)


def divide(m: int, groups, kind: str) -> list[Group]:
    """The groups' plans.  The largest leaves SMs to the others where that costs it no time."""
    stacks = [stacked(group) for group in groups]
    plans = [make_plan(m, w) for w in stacks]
    if len(groups) > 1:
        main = max(range(len(groups)), key=lambda i: stacks[i].shape[0])
        tiles = stacks[main].shape[0] // 16
        others = sum(plan.clusters for i, plan in enumerate(plans) if i != main)
        fewest = -(-tiles // plans[main].per)
        clusters = max(fewest, min(plans[main].clusters, CLUSTERS[1] - others))
        plans[main] = dataclasses.replace(plans[main], clusters=clusters)
    begins = [0, *itertools.accumulate(plan.clusters for plan in plans)]
    return [
        Group(plan, Scheme(w, kind), tuple(x.shape[0] for x in group), begin)
        for group, w, plan, begin in zip(groups, stacks, plans, begins, strict=False)
    ]


@functools.partial(jax.jit, static_argnames=("out_dtype", "eps"))
def matmul(
    x: jax.Array,
    groups: tuple[tuple[jax.Array | QTensor, ...], ...],
    gamma: jax.Array,
    *,
    eps: float,
    out_dtype,
) -> tuple[jax.Array, ...]:
    """x [M, K] bf16, groups of weights [N_i, K] of one form, gamma [K] -> [M, sum N_i] of each."""
    m, k = x.shape
    divided = divide(m, groups, KIND[x.dtype.name])
    kinds = {"out": KIND[out_dtype.name], "gamma": KIND[gamma.dtype.name], "eps": eps}
    parts = [[decode.parts_of(w) for w in group] for group in groups]
    given, tree = jax.tree.flatten((x, gamma, parts))

    def emit(ctx, *refs):
        del ctx
        x_ref, gamma_ref, parts = jax.tree.unflatten(tree, refs[: len(given)])
        outs, scratch = refs[len(given) :][: len(groups)], refs[len(given) + len(groups) :]
        for group, (first, *others), out in zip(divided, parts, outs, strict=True):
            operands = decode.Operands(x_ref, *first, None, gamma_ref, None, out)
            run = functools.partial(_run, group, k, operands, others, scratch, kinds)
            if len(groups) == 1:
                run()
            else:
                block = p.add(p.register("ctaid.x"), -group.begin)
                p.when(p.less(block, group.plan.clusters), run)

    def quantized_matmul_blocks(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(emit)(*refs)

    split = divided[0].plan.split
    sizes = [group.plan.scratch_sizes(normed=True) for group in divided]
    kernel = plgpu.kernel(
        quantized_matmul_blocks,
        out_type=tuple(jax.ShapeDtypeStruct((m, sum(g.rows)), out_dtype) for g in divided),
        grid=(sum(group.plan.clusters for group in divided),),
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


def _run(group: Group, *given) -> None:
    group.program(*given).run()
