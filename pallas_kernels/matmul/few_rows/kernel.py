"""The matmul of a decode step on Hopper: ``x[M, K] w[N, K]^T``, M <= 16, and what stands around it.

w is int4 or int8 in groups or whole rows, or 16-bit floats, in the plain layout (no re-layout at
load); x is bf16 or f16.  The weights are the 16-row operand of mma.m16n8k16, so 8 tokens cost one
instruction.

Who does what.  One block of 16 warps per SM, alone or in clusters of ``split`` that share K.  A
cluster walks over tiles of 16 rows of w; a warp owns the same run of columns of every tile and
keeps x's fragments for it in registers (or, ``resident``, in shared memory).  Each lane brings its
own weights, 16 bytes of one row at a time, through its own places in a ring in shared memory
(cp.async), and reads back only what it wrote: between the first and the last barrier no warp waits
for another.

    all      x, scales of the first batch -> smem, ring filled          (``_x``, ``_copies``)
    warp     its run of x -> registers | barrier
    warp     per tile: wait, words -> registers, refill, dequantize, mma, partial sum -> smem
                                                                        (``_tile``, ``_scheme``)
    all      barrier | sum of the warps' partials in a fixed order (with split > 1 through the
             peers' shared memory), what is fused, one rounding, store  (``_sums``)

What is fused.  A norm, out = rsqrt(mean x^2 + eps) * ((x * gamma) W): x comes by registers instead
of cp.async, is multiplied on its way to shared memory, and the factor meets the sum at the end.  So
can what is still to be added to x come: every block adds it, and the first cluster stores the sum.
Bias and residual are copied beside the scales, a batch ahead of their use.  SwiGLU: the steps are
pairs of a tile of gate and its tile of up, and the sum over the warps is taken of both at once.

Order of columns.  mma does not care which column is called which as long as both operands agree.
A lane with quad index c takes columns 32 c .. 32 c + 31 of a block of 128 (int8: 16 of 64, floats:
8 of 32).  The bit trick that widens two weights at once takes nibbles i and i + 4 of a word (bytes
i and i + 2), so x's pairs are permuted once to match.

Numerics.  A word minus its zero point is exact in bf16 and f16.  Groups of at least one block and
symmetric or integer zeros: the group's sum is scaled in float32.  Smaller groups and floating
zeros (bf16 only): the weight is rounded once to bf16 (``fold``).  x * gamma is rounded once to
bf16.  Everything else is float32, added in an order that depends on K and M alone.

Floor, K = 4096, N = 14336, int4 in groups of 128 on an H200: 29.4 MB of codes + 0.9 of scales at
4.3 TB/s, 7.0 us; measured 9.9 with one row, 10.7 with 8, 12.4 with 16.  The other shapes and what
was tried: ``matmul/NOTES.md``; ``python -m pallas_kernels.bench.matmul quantized_matmul``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic as p
from pallas_kernels.matmul.few_rows.copies import Copies
from pallas_kernels.matmul.few_rows.plan import (
    SLOT,
    THREADS,
    WARPS,
    TilePlan,
)
from pallas_kernels.matmul.few_rows.scheme import KIND, Scheme
from pallas_kernels.matmul.few_rows.staged_x import StagedX
from pallas_kernels.matmul.few_rows.sums import Sums
from pallas_kernels.matmul.few_rows.tile import TileProduct
from pallas_kernels.qtensor import QTensor


class Operands(NamedTuple):
    """The device memory of one call; None for what it does not have."""

    x: Any
    w: Any
    scale: Any
    zero: Any
    bias: Any
    gamma: Any
    residual: Any
    out: Any
    pending: Any = None
    total: Any = None


class Kernel(Copies, StagedX, TileProduct, Sums):
    """One block's program.  Everything it does is emitted while the kernel is traced.

    scratch: partial sums and x, the ring, scales and what else a tile needs, squares of x.
    """

    def __init__(self, plan: TilePlan, scheme: Scheme, n: int, k: int, given, scratch, **kinds):
        self.plan, self.scheme, self.n, self.k = plan, scheme, n, k
        self.out_kind, self.gamma_kind = kinds["out"], kinds.get("gamma")
        self.eps = kinds.get("eps")
        for name, ref in given._asdict().items():
            setattr(self, name, None if ref is None else p.address(ref))
        self.partial, ring, self.params, *squares = (p.shared_address(r) for r in scratch)
        self.squares = squares[0] if squares else None
        self.out_tiles = n // 16 // (2 if plan.pairs else 1)

        self.thread = p.register("tid.x")
        warp, lane = p.shift_right(self.thread, 5), arith.andi(self.thread, p.ci(31))
        self.row, self.quad = p.shift_right(lane, 2), arith.andi(lane, p.ci(3))
        if plan.split > 1:
            self.cluster, self.rank = p.register("clusterid.x"), p.register("cluster_ctarank")
        else:
            self.cluster, self.rank = p.register("ctaid.x"), p.ci(0)
        self.warp = warp
        # Warps without columns of their own repeat the last one's; nobody reads their sums.
        working = p.minimum(warp, plan.warps - 1)
        k0 = p.mul(p.add(p.mul(self.rank, plan.warps), working), plan.k_warp)
        self.overlap = plan.split * plan.warps * plan.k_warp - k
        if self.overlap:
            k0 = p.minimum(k0, k - plan.k_warp)
        self.k0, self.working, self.lane = k0, working, lane
        self.x_mine = p.add(self.partial, p.mul(working, 2 * plan.m * plan.k_warp))
        if plan.resident:
            self.x_mine = p.add(self.x_mine, plan.partial_bytes)
        self.lane_k = p.add(k0, p.mul(self.quad, scheme.columns // 4))
        self.n_blocks = plan.k_warp // scheme.columns
        self.row_bytes = k * scheme.bits // 8
        self.w_mine = p.offset(self.w, self.row, self.row_bytes)
        run_at = p.mul(k0, 2) if scheme.plain else p.shift_right(k0, 1 if scheme.bits == 4 else 0)
        self.w_mine = p.offset(self.w_mine, run_at)
        self.w_mine = p.offset(self.w_mine, self.quad, 16)
        self.ring = p.add(ring, p.mul(warp, 1024), p.mul(lane, 16))

        self.scale_row = scheme.n_groups * scheme.scale_bytes
        self.zero_row = scheme.n_groups * scheme.zero_bytes
        self.bias_at = 16 * (self.scale_row + self.zero_row)
        self.residual_at = self.bias_at + (0 if given.bias is None else 64)
        first = p.ci(0)
        if scheme.n_groups > 1 and not scheme.fold:
            first = arith.divui(k0, p.ci(scheme.group))
        self.my_scales = p.add(
            self.params, p.mul(self.row, self.scale_row), p.mul(first, scheme.scale_bytes)
        )
        self.my_zeros = p.add(
            self.params,
            16 * self.scale_row,
            p.mul(self.row, self.zero_row),
            p.mul(first, scheme.zero_bytes),
        )

    def working_warps(self, body) -> None:
        """body() in the warps that have columns of their own."""
        if self.plan.warps < WARPS:
            p.when(p.less(self.warp, self.plan.warps), body)
        else:
            body()

    def threads(self, count: int, body) -> None:
        """body(i) for i below count, divided among the block's threads."""
        for first in range(0, count, THREADS):
            index = p.add(self.thread, first)
            if first + THREADS <= count:
                body(index)
            else:
                p.when(p.less(index, count), functools.partial(body, index))

    def tile_of(self, step):
        """Tile of w of a step; a step too many is computed on the last tile and dropped.  With
        SwiGLU every second step is the tile of up that belongs to the tile of gate before."""
        if not self.plan.pairs:
            tile = p.add(p.mul(step, self.plan.clusters), self.cluster)
            return p.minimum(tile, self.out_tiles - 1)
        tile = p.add(p.mul(p.shift_right(step, 1), self.plan.clusters), self.cluster)
        up = p.mul(arith.andi(step, p.ci(1)), self.out_tiles)
        return p.add(p.minimum(tile, self.out_tiles - 1), up)

    def run(self) -> None:
        plan, depth = self.plan, self.plan.depth
        normed = None if self.gamma is None else self.normed_x()
        if normed is None:
            self.working_warps(self.copy_x)
        else:
            next(normed)
        self.copy_scales(p.ci(0), p.ci(0))
        p.copies_commit()
        self.fill()
        if normed is not None:
            next(normed)
        p.copies_wait(depth)
        p.warp_barrier()
        x = self.arrange_x()
        p.barrier()
        if normed is not None:
            self.sum_squares()

        def run_tile(batch, buffer, i, slot, left):
            """Tile i of a batch.  slot: byte offset in the ring of the words that come next; left:
            how many tiles there are from this one on, or None if they outlast the ring."""
            slots = [slot]

            def take(block):
                place = p.add(self.ring, slots[-1])
                p.copies_wait(depth - 1)
                rows = [p.load_shared_words(place, 4, 512 * half) for half in range(2)]
                later = block + depth
                if left is None or later < left * self.n_blocks:
                    step = p.add(p.mul(batch, plan.batch), i, later // self.n_blocks)
                    self.copy_words(step, later % self.n_blocks, place)
                p.copies_commit()
                moved = p.add(slots[-1], SLOT)
                slots.append(arith.select(p.less(moved, depth * SLOT), moved, p.ci(0)))
                return rows

            at = p.add(p.mul(buffer, plan.batch), i)
            self.store_partial(at, self.compute_tile(at, x, take))
            return slots[-1]

        def run_batch(batch, slot, count, final):
            buffer = arith.andi(batch, p.ci(1)) if plan.buffers == 2 else p.ci(0)
            self.copy_addends(batch, buffer, count)
            if not final:
                self.copy_scales(p.add(batch, 1), arith.xori(buffer, p.ci(1)))
            last = min(count, -(-depth // self.n_blocks)) if final else 0
            if count > last:
                (slot,) = p.loop(
                    count - last, [slot], lambda i, c: [run_tile(batch, buffer, i, c[0], None)]
                )
            for i in range(count - last, count):
                slot = run_tile(batch, buffer, p.ci(i), slot, count - i)
            # The next batch's scales are in the first group of this one.
            p.copies_wait(min(depth, count * self.n_blocks) - 1)
            p.barrier()
            self.reduce(batch, buffer, count)
            return [slot]

        full = (plan.per - 1) // plan.batch
        slot = [p.ci(0)]
        if full:
            slot = p.loop(full, slot, lambda b, c: run_batch(b, c[0], plan.batch, False))
        run_batch(p.ci(full), slot[0], plan.per - full * plan.batch, True)
        if plan.split > 1:
            p.cluster_barrier()  # no block may leave while others read its shared memory


def parts_of(w: jax.Array | QTensor) -> tuple[jax.Array | None, ...]:
    """Words, scales and zeros."""
    return (w.q, w.scale, w.zero) if isinstance(w, QTensor) else (w, None, None)


@functools.partial(jax.jit, static_argnames=("out_dtype", "eps", "swiglu", "plan"))
def matmul(
    x: jax.Array,
    w: jax.Array | QTensor,
    *,
    bias: jax.Array | None = None,
    out_dtype,
    gamma: jax.Array | None = None,
    eps: float | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    pending: jax.Array | None = None,
    plan: TilePlan,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """x [M, K] bf16 or f16, w [N, K] -> [M, N]; ``plan`` says what else is asked of them.
    gamma [K], eps: of a norm of x; residual: of the result's shape and dtype.  pending [M, K] f32:
    to be added to x before the norm; the result is then a pair, with the sum."""
    (m, k), n = x.shape, w.shape[0]
    scheme = Scheme.of(w, KIND[x.dtype.name])
    bias = None if bias is None else bias.astype(jnp.float32)
    given = [x, *parts_of(w), bias, gamma, residual, pending]
    present = [v is not None for v in given]
    outs = [jax.ShapeDtypeStruct((m, n // 2 if swiglu else n), out_dtype)]
    if pending is not None:
        outs.append(jax.ShapeDtypeStruct((m, k), x.dtype))
    kinds = {"out": KIND[jnp.dtype(out_dtype).name], "eps": eps}
    if gamma is not None:
        kinds["gamma"] = KIND[gamma.dtype.name]

    def emit(ctx, *refs):
        refs = iter(refs)
        *inputs, addend = (next(refs) if there else None for there in present)
        out, *total = (next(refs) for _ in outs)
        operands = Operands(*inputs, out, addend, *total)

        Kernel(plan, scheme, n, k, operands, list(refs), **kinds).run()

    def quantized_matmul_decode(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(emit)(*refs)

    clustered = plan.split > 1
    kernel = plgpu.kernel(
        quantized_matmul_decode,
        out_type=outs[0] if pending is None else tuple(outs),
        grid=(plan.clusters,),
        grid_names=("tiles",),
        cluster=(plan.split,) if clustered else (),
        cluster_names=("run",) if clustered else (),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((size // 4,), jnp.float32)
            for size in plan.scratch_sizes(normed=gamma is not None)
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return kernel(*[v for v in given if v is not None])
