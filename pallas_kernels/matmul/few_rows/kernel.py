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

NOTES.  K = 4096, N = 14336, group 128, H200, cold L2, CUPTI.  Floor: 29.4 MB of words + 0.9 of
scales at 4.3 TB/s, 7.0 us; an empty kernel of this shape takes 0.6, the same ring without
arithmetic 9.2.
  * Where the time goes, by %clock (at 1.755 GHz), us after the block's start at M = 1 / 8 / 16: x
    there 1.5 / 2.1 / 2.4, first tile done 2.7 / 3.3 / 3.9, then 0.95 / 0.99 / 1.03 a tile (4.3 MB:
    what memory gives), and 0.2 / 0.7 / 1.2 for the sum over the warps.  x's 17 MB in 2.1 us are 8
    TB/s from L2; memory waits.  Not measured: an end with 4 rows a thread (predicted 0.4 and 0.7
    less), two passes of half the columns, the first begun with half of x (0.3 and 1.0 less).
  * Arithmetic is not what it waits for.  x as two or three bytes a value (fixed point of a token's
    run), int4 as bytes times 16, int8 as it is, mma of s8 with s32 sums read as floats: 120 instead
    of 239 instructions a tile at M = 1, 197 instead of 266 at M = 16; predicted 0.5 less, found
    10.1 (9.85), M = 8 11.3 (10.7), M = 16 14.0 (12.4), int8 16.9 (15.8) and 21.6 (18.2).  Making
    the bytes costs 0.9 and 1.7; without, 10.4 and 12.2; and two are off by 5% of the result where
    an x of 1e4 meets weights of 0.
  * Fewer ring slots are faster (2 / 3 / 4 / 5: M = 1 9.9 / 10.1 / 10.7 / 10.5, M = 8 10.8 / 10.9 /
    11.3 / 11.5, M = 16 12.3 / 12.9 / 12.6 / 13.6, int8 18.3 / - / 19.1): a ring that is full at the
    start delays x and the first words.  Each block another token of x first: M = 8 and 16 10.8 and
    12.6; and words before x: 11.0 and 12.8.
  * x through shared memory by cp.async, whole lines an instruction: M = 1 / 8 / 16 from 10.3 / 11.4
    / 14.9 to 10.1 / 10.8 / 12.4 (4096 x 4096, M = 16: 7.4 to 6.0).  Straight to registers, a load
    touches 16 lines (8 tokens x 4 lanes, 64 bytes apart) and the L1 looks up one a cycle: 2.3 us at
    M = 16, during which the ring stands still.  By bulk copies of 128 bytes: 11.0 / 13.1 / 15.8;
    of 8 KB (in the form of bytes) 14.8 instead of 14.0, of 4 KB to pairs of blocks 15.2.
  * Clusters of 2 along K, two rows of tiles a block, to halve x's 17 MB from L2 at M = 16: 14.3
    (the sum over a cluster costs 1.6).  Starting each warp when its own x is there: no change.
  * 4096 x 14336, clusters of 4: 32 of them 19.7, 31 21.1, 30 12.0: only 30 fit at a time.  Clusters
    of 2 with 512 columns a warp: 11.9 to 12.8.  M = 8: 13.1 and 13.2; M = 16: 18.0, staged x 16.4.
  * ``(w & mask) ^ flip`` written as two operations with two immediates becomes two LOP3; one
    lop3.b32 with a register halves the logic.
  * L2 prefetch of the kernel's own later tiles: 10.8 to 12.4.  Programmatic launch (prefetch or
    fill before griddepcontrol.wait): XLA's command buffers record every call by itself, so nothing
    overlaps (a layer of four products 56 us without, 65 with); without command buffers the host is
    the limit (64.5, 60 to 64).
  * Fused, M = 1, us without and with: norm on 6144 x 4096 5.9 and 6.5, on 28672 x 4096 17.6 and
    17.5, with SwiGLU 17.8; residual on 4096 x 4096 4.8 and 4.5, on 4096 x 14336 11.4 and 11.7.  A
    chain of 8B layers (W4A16, 6 us of idling in attention's place) takes 53.0 instead of 57.4 us a
    layer; predicted 6: a kernel saved is worth its own time and 0.9 us, but four cost one launch
    each as before.
  * 4096 x 14336 at M <= 4 without clusters, x resident: int4 11.4 to 10.5 (M = 4: 11.3 to 11.0),
    int8 18.3 to 18.0, plain 33.5 to 31.1; with 4 ring slots (3: 10.9, 6: 11.1).
  * Ring slots 2 / 3 / 4: 28672 x 4096 int4 16.9 / 17.3 / 18.3, int8 30.4 / 31.5 / 31.7, plain
    - / 60.4 / 57.1 (6: 60.0); 6144 x 4096 int4 5.8 / 5.9 / 6.3; M = 16 21.9 / 21.7 / -.
  * Two or four neighbouring blocks of columns asked for at once, whole lines of 128 or 256 bytes:
    no better anywhere (plain 28672 x 4096 57 to 66 and 72).
  * L2 prefetch of the next kernels' weights (cp.async.bulk.prefetch.L2, from the kernel before or
    from an idle one of 6 us): o after 6 us without and with: int4 11.4 and 11.2, int8 13.0 and
    12.5, plain 16.8 and 17.1; in the chain nothing above its scatter.  Even with all of o in L2 the
    kernel takes 3.9 (int4, cold 4.9), 4.2 (int8, 6.2), 5.4 (plain, 10.0): x, barriers and the sums
    are what a short product costs.
    On two GPUs, between whose products stands a sum of 4 us (8B, M = 1, ms a step, 2.89 without):
    asked for by the product before the sum, 4 / 8 / 16 / 24 MB, 2.93 / 2.92 / 3.03 / 2.99; by a
    kernel beside the sum, 3.30 (2.91 with the same freedom in the graph and no such kernel).  One
    GPU, 4096 x 7168, 3.7 us of idling, 3072 x 4096: 38.4 us a pair, with 16 MB 40.5, and 42.6 with
    a kernel that reads all of it.
  * What is pending (a sum over devices) added here rather than by a kernel before: 8B on two GPUs,
    ms a step, plain 3.04 to 2.89, int4 from between 1.73 and 1.89 to 1.63.
  * o, gate_up and down, and qkv, in one kernel with barriers of the grid between the products and
    the ring filled ahead: 34.5 us, the sum of the three (34.0); the gaps saved are 0.7 to 2 us of
    52.6 a layer, int8 slower.  Without its barriers (and so wrong) the kernel is 2 faster.
Microseconds at M = 1, cold L2, int4 group 128 / int8 / plain (XLA): 4096 x 4096 4.8 / 6.2 / 10.0
(11.6), 6144 x 4096 5.8 / 8.3 / 13.9 (15.1), 28672 x 4096 16.9 / 30.4 / 57.1 (54.2), 4096 x 14336
10.5 / 18.0 / 31.1 (29.7); floors 2.1 / 3.9 / 7.8, 3.1 / 5.9 / 11.7, 14.5 / 27.3 / 54.6, 7.3 / 13.7
/ 27.3.  M = 16: 28672 x 4096 int4 21.9, plain 59.7 (56.5), 6144 x 4096 plain 15.0 (16.4), 4096 x
4096 plain 10.8 (11.3).  14336 x 4096 at M = 1 / 8 / 16 (humming 15.5 / 15.6 / 17.1; int8 23.1 /
23.4 / 24.6): int4 9.9 / 10.7 / 12.4, with zeros 10.2 / - / 12.6, int8 15.8 / 17.3 / 18.3; 4096 x
4096 at M = 8 and 16 4.9 and 6.1.  Before the last changes, at M = 16: 6144 x 4096 7.6, 4096 x
14336 16.7; 3584 x 18944 (``resident``) 13.8; 128256 x 4096 67.
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
