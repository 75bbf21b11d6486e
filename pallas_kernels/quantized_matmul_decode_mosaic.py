"""Weight-only matmul for few rows of x on Hopper: ``x[M, K] w[N, K]^T``, M <= 16.

w is int4 or int8 in groups or whole rows, in the plain layout (no re-layout at load); x is bf16 or
f16.  The weights are the 16-row operand of mma.m16n8k16, so 8 tokens cost one instruction.

Who does what.  One block of 16 warps per SM, alone or in clusters of ``split`` that share K.  A
cluster walks over tiles of 16 rows of w; a warp owns the same run of columns of every tile and
keeps x's fragments for it in registers (or, ``resident``, in shared memory).  Each lane brings its
own weights, 16 bytes of one row at a time, through its own places in a ring in shared memory
(cp.async), and reads back only what it wrote: between the first and the last barrier no warp waits
for another.

    all      x, scales of the first batch -> smem, ring filled
    warp     its run of x -> registers | barrier
    warp     per tile: wait, words -> registers, refill, dequantize, mma, partial sum -> smem
    all      barrier | sum of the warps' partials in a fixed order, bias, one rounding, store
             (with split > 1 through the peers' shared memory)

Order of columns.  mma does not care which column is called which as long as both operands agree.
A lane with quad index c takes columns 32 c .. 32 c + 31 of a block of 128 (int8: 16 of 64).  The
bit trick that widens two weights at once takes nibbles i and i + 4 of a word (bytes i and i + 2),
so x's pairs are permuted once to match.

Numerics.  A word minus its zero point is exact in bf16 and f16.  Groups of at least one block and
symmetric or integer zeros: the group's sum is scaled in float32.  Smaller groups and floating
zeros (bf16 only): the weight is rounded once to bf16 (``fold``).  Sums are float32 throughout.

NOTES.  K = 4096, N = 14336, group 128, H200, cold L2, CUPTI.  Floor: 29.4 MB of words + 0.9 of
scales at 4.3 TB/s, 7.0 us; an empty kernel of this shape takes 0.6, the same ring without
arithmetic 9.2.
  * Where the time goes, by leaving parts out (M = 1, of 10.3): no words brought 7.75, no dequantize
    9.6, no mma 9.9, no subtraction 10.1, no x 10.2.  So arithmetic and latency (128 instructions
    per warp and block, of which the ALU, at half rate, has 56) take nearly as long as memory, and
    what is left in the ring when the last word comes is added at the end.
  * That is why fewer ring slots are faster (8: 12.7, 4: 10.4, 3: 10.3, 2: 10.5; M = 16 2: 14.9, 3:
    15.9) although the bare stream does not care (8: 9.4).
  * x through shared memory by cp.async, whole lines an instruction: M = 1 / 8 / 16 from 10.3 / 11.4
    / 14.9 to 10.1 / 10.8 / 12.4 (4096 x 4096, M = 16: 7.4 to 6.0).  Straight to registers, a load
    touches 16 lines (8 tokens x 4 lanes, 64 bytes apart) and the L1 looks up one a cycle: 2.3 us at
    M = 16, during which the ring stands still.  By bulk copies of 128 bytes: 11.0 / 13.1 / 15.8.
  * Clusters of 2 along K, two rows of tiles a block, to halve x's 17 MB from L2 at M = 16: 14.3
    (the sum over a cluster costs 1.6).  Starting each warp when its own x is there: no change.
  * 4096 x 14336, clusters of 4: 32 of them 19.7, 31 21.1, 30 12.0: only 30 fit at a time.  Clusters
    of 2 with 512 columns a warp: 11.9 to 12.8.  M = 8: 13.1 and 13.2; M = 16: 18.0, staged x 16.4.
  * Words straight from global to registers: 11.1 at M = 1, 17.7 at M = 16; the compiler fills the
    registers and sinks the loads to their use.
  * ``(w & mask) ^ flip`` written as two operations with two immediates becomes two LOP3; one
    lop3.b32 with a register halves the logic.
  * A pre-tiled layout is not needed: nibbles of one row are paired by the trick above, x follows.
  * L2 prefetch of later tiles: 10.8 to 12.4.  Programmatic launch (prefetch or fill before
    griddepcontrol.wait): XLA's command buffers record every call by itself, so nothing overlaps
    (a layer of four products 56 us without, 65 with); without command buffers the host is the
    limit (64.5, 60 to 64).
Microseconds at M = 1 / 8 / 16 (humming 15.5 / 15.6 / 17.1; int8 23.1 / 23.4 / 24.6): group 128 10.1
/ 11.2 / 12.1; with zeros 10.6 / - / 12.7; int8 16.7 / - / 18.8.  Other shapes at M = 1 / 16: 4096 x
4096 5.0 / 6.0, 6144 x 4096 6.1 / 7.6, 4096 x 14336 11.5 / 16.7, 3584 x 18944 (``resident``) 13.8;
in a decode step at M = 1 28672 x 4096 17.5, 128256 x 4096 67.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic as p
from pallas_kernels.qtensor import QTensor
from pallas_kernels.quantized_matmul_decode_plan import PITCH, SLOT, WARPS, Plan, make_plan, slices

MAX_TOKENS = 16
THREADS = 32 * WARPS
_KIND = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


class Scheme:
    """How words become 16-bit floats of ``kind``, that of the activations."""

    def __init__(self, w: QTensor, kind: str):
        self.kind = kind
        self.bits = 4 if w.dtype == jnp.int4 else 8
        self.group = w.group_size
        self.n_groups = w.scale.shape[1]
        self.scale_kind = _KIND[jnp.dtype(w.scale.dtype).name]
        self.scale_bytes = w.scale.dtype.itemsize
        self.zero_bytes = 0 if w.zero is None else w.zero.dtype.itemsize
        self.zero = None
        if w.zero is not None:
            self.zero = "int" if jnp.issubdtype(w.zero.dtype, jnp.integer) else "float"

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def columns(self) -> int:
        """Columns of a block: 4 lanes x 4 words."""
        return 16 * self.per_word

    @property
    def fold(self) -> bool:
        """Whether scales go into the 16-bit weights instead of the group's float32 sum."""
        return self.group % self.columns != 0 or self.zero == "float"

    @property
    def bias(self) -> int:
        """The pair of floats that a word of 0 becomes before it is taken off again."""
        if self.bits == 4:
            return 0x43084308 if self.kind == "bf16" else 0x64086408
        return 0x64806480

    def word_pairs(self, word, bias):
        """The word's weights as pairs of floats: nibbles i, i + 4, or bytes i, i + 2.

        A nibble u = q + 8 below the exponent of 128 (bf16) or 1024 (f16) is the float 128 + u;
        flipping its top bit on the way in makes q unsigned.  bf16's 7 bits hold no byte: its sign
        is split off and taken from 128 or 256.
        """
        flip = self.bias
        if self.bits == 4 or self.kind == "f16":
            mask = 0x000F000F if self.bits == 4 else 0x00FF00FF
            return [
                p.sub_pairs(
                    p.and_xor(p.shift_right(word, self.bits * i), mask, flip), bias, self.kind
                )
                for i in range(16 // self.bits)
            ]
        out = []
        for i in range(2):
            w = p.shift_right(word, 8 * i)
            low = p.and_xor(w, 0x007F007F, 0x43004300)
            sign = p.and_xor(w, 0x00800080, 0x43004300)
            out.append(p.sub_pairs(low, sign, self.kind))
        return out

    def x_pairs(self, xs):
        """x of a word's columns, as loaded (neighbours in a pair), in the order of word_pairs."""
        half = len(xs) // 2
        return [
            p.permute(xs[i], xs[i + half], selector)
            for i in range(half)
            for selector in (0x5410, 0x7632)
        ]


class _Kernel:
    """One block's program.  Everything it does is emitted while the kernel is traced."""

    def __init__(self, plan: Plan, scheme: Scheme, n: int, k: int, out_kind: str, refs):
        self.plan, self.scheme, self.n, self.k, self.out_kind = plan, scheme, n, k, out_kind
        x, w, scale, zero, bias, out, partial, ring, params = refs
        self.x, self.w, self.scale, self.out = (p.address(r) for r in (x, w, scale, out))
        self.zero = None if zero is None else p.address(zero)
        self.bias = None if bias is None else p.address(bias)
        self.partial = p.shared_address(partial)
        self.params = p.shared_address(params)

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
        self.w_mine = p.offset(self.w_mine, p.shift_right(k0, 1 if scheme.bits == 4 else 0))
        self.w_mine = p.offset(self.w_mine, self.quad, 16)
        self.ring = p.add(p.shared_address(ring), p.mul(warp, 1024), p.mul(lane, 16))

        self.scale_row = scheme.n_groups * scheme.scale_bytes
        self.zero_row = scheme.n_groups * scheme.zero_bytes
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

    def tile_of(self, step, clamp: bool = True):
        """Tile of a step; a step too many is computed on the last tile and dropped."""
        tile = p.add(p.mul(step, self.plan.clusters), self.cluster)
        return p.minimum(tile, self.n // 16 - 1) if clamp else tile

    # --- copies ---

    def copy_params(self, batch, buffer, count: int) -> None:
        """Scales and zeros of the batch's tiles: the tile's 16 rows are one run of bytes."""
        for base, row, start in (
            (self.scale, self.scale_row, 0),
            (self.zero, self.zero_row, 16 * self.scale_row),
        ):
            if base is None:
                continue

            def copy(index, base=base, row=row, start=start):
                t, piece = arith.divui(index, p.ci(row)), arith.remui(index, p.ci(row))
                tile = self.tile_of(p.add(p.mul(batch, self.plan.batch), t))
                slot = p.add(p.mul(buffer, self.plan.batch), t)
                to = p.add(self.params, p.mul(slot, self.plan.param_bytes), p.mul(piece, 16))
                p.copy_async(to, p.offset(p.offset(base, tile, 16 * row), piece, 16), start)

            self.threads(count * row, copy)

    def copy_words(self, step, block: int, slot) -> None:
        """The lane's words of one block of columns, rows r and r + 8."""
        at = p.offset(self.w_mine, self.tile_of(step), 16 * self.row_bytes)
        for half in range(2):
            source = block * 64 + half * 8 * self.row_bytes
            p.copy_async(slot, at, 512 * half, source)

    def fill(self) -> None:
        for u in range(self.plan.depth):
            if u < self.plan.per * self.n_blocks:
                slot = p.add(self.ring, u * SLOT)
                self.copy_words(p.ci(u // self.n_blocks), u % self.n_blocks, slot)
            p.copies_commit()

    # --- x ---

    def granule(self, token, index):
        """Address of 8 columns of a token in the warp's run of x.

        A load of fragments takes 4 granules of 2 tokens at a time; the exchange puts those 8 in
        different banks.
        """
        odd = arith.andi(token, p.ci(1))
        if self.scheme.bits == 4:
            odd = arith.xori(p.mul(odd, 2), arith.andi(p.shift_right(index, 3), p.ci(1)))
        row = p.mul(token, 2 * self.plan.k_warp)
        return p.add(self.x_mine, row, p.mul(arith.xori(index, odd), 16))

    def copy_x(self) -> None:
        """The warp's run of x to shared memory, whole lines at a time."""
        per_token = self.plan.k_warp // 8
        repeated = None
        if self.overlap:
            last = p.less(p.ci(self.plan.warps - 2), self.working)
            repeated = arith.select(last, p.ci(self.overlap // 8), p.ci(0))
        count = self.plan.m * per_token
        for first in range(0, count, 32):
            piece = p.add(self.lane, first)

            def copy(piece=piece):
                token, index = (f(piece, p.ci(per_token)) for f in (arith.divui, arith.remui))
                source = p.offset(self.x, token, 2 * self.k)
                source = p.offset(source, p.add(self.k0, p.mul(index, 8)), 2)
                to = self.granule(token, index)
                if repeated is None:
                    p.copy_async(to, source, 0)
                else:
                    size = arith.select(p.less(index, repeated), p.ci(0), p.ci(16))
                    p.copy_async(to, source, 0, size=size)

            if first + 32 <= count:
                copy()
            else:
                p.when(p.less(piece, count), copy)

    def x_granules(self, tile: int):
        """Addresses of the lane's columns of the first block; the next block's are x_step after."""
        pieces = self.scheme.columns // 32
        # Columns of mma beyond the last token repeat it and are not stored.
        token = p.minimum(p.add(self.row, 8 * tile), self.plan.m - 1)
        mine = p.mul(self.quad, pieces)
        return [self.granule(token, p.add(mine, i)) for i in range(pieces)]

    def load_x(self, block: int, tile: int):
        step = 2 * self.scheme.columns
        return [v for at in self.x_at[tile] for v in p.load_shared_words(at, 4, step * block)]

    def arrange_x(self):
        """[block][8 tokens][word] pairs in the order of the words, or None and left in place."""
        blocks, tokens = range(self.n_blocks), range(self.plan.n_tiles)
        self.x_at = [self.x_granules(t) for t in tokens]
        if not self.plan.resident:
            return [
                [self.by_word(self.permuted(self.load_x(b, t))) for t in tokens] for b in blocks
            ]

        def in_place():
            for b, t in itertools.product(blocks, tokens):
                words = self.permuted(self.load_x(b, t))
                p.warp_barrier()  # lanes beyond the last token read its words, and write the same
                for i, at in enumerate(self.x_at[t]):
                    step = 2 * self.scheme.columns
                    p.store_shared_words(at, words[4 * i : 4 * i + 4], step * b)
            p.warp_barrier()

        self.working_warps(in_place)
        return None

    def permuted(self, words):
        per = self.scheme.per_word // 2
        groups = [self.scheme.x_pairs(words[i : i + per]) for i in range(0, len(words), per)]
        return [pair for group in groups for pair in group]

    def by_word(self, pairs):
        per = self.scheme.per_word // 2
        return [pairs[i : i + per] for i in range(0, len(pairs), per)]

    # --- one tile ---

    def load_scale(self, at, byte: int = 0):
        """A scale or floating zero of shared memory, as f32."""
        if self.scheme.scale_kind == "f32":
            return p.load_shared(at, byte)
        return p.widen(p.load_shared_narrow(at, "u16", byte), self.scheme.scale_kind)

    def load_params(self, slot, groups: range):
        """By row half: scales, pairs to take off the words, floating zeros of these groups.

        A group of the warp; with ``fold`` a block, and what its columns of the lane need.
        """
        scheme = self.scheme
        scales, biases, zeros = [], [], []
        at_slot = p.mul(slot, self.plan.param_bytes)
        offset = p.ci(scheme.bias)
        for half in range(2):
            at = p.add(self.my_scales, at_slot, half * 8 * self.scale_row)
            at_zero = p.add(self.my_zeros, at_slot, half * 8 * self.zero_row)
            if scheme.fold:
                in_block = [
                    arith.divui(p.add(self.lane_k, b * scheme.columns), p.ci(scheme.group))
                    for b in groups
                ]
                scale_at = [p.add(at, p.mul(g, scheme.scale_bytes)) for g in in_block]
                zero_at = [p.add(at_zero, p.mul(g, scheme.zero_bytes)) for g in in_block]
                scales.append([self.doubled(self.load_scale(a)) for a in scale_at])
                if scheme.zero == "float":
                    zeros.append([self.doubled(self.load_scale(a)) for a in zero_at])
            else:
                zero_at = [p.add(at_zero, g) for g in groups]
                scales.append(self.group_scales(at, groups))
            biases.append([offset] * len(groups))
            if scheme.zero == "int":
                raw = [p.load_shared_narrow(a, "s8") for a in zero_at]
                biases[half] = [arith.addi(offset, p.mul(z, 0x00010001)) for z in raw]
        return scales, biases, zeros

    def group_scales(self, at, groups: range):
        scheme = self.scheme
        if scheme.scale_kind != "f32" and len(groups) % 2 == 0 and scheme.n_groups % 2 == 0:
            words = [p.load_shared_words(at, 1, 2 * g)[0] for g in groups[::2]]
            return [f(w, scheme.scale_kind) for w in words for f in (p.widen, p.widen_high)]
        return [self.load_scale(at, scheme.scale_bytes * g) for g in groups]

    def doubled(self, value):
        half = p.narrow(value, self.scheme.kind)
        return p.permute(half, half, 0x1010)

    def weights(self, word, bias, scale, zero):
        pairs = self.scheme.word_pairs(word, bias)
        if self.scheme.zero == "float":
            return [p.fma_pairs(v, scale, zero) for v in pairs]
        if self.scheme.fold:
            return [p.mul_pairs(v, scale) for v in pairs]
        return pairs

    def compute_tile(self, slot, x, take):
        """The warp's partial sums [8 tokens][4]; ``take(block)`` gives two rows' words."""
        scheme, tokens = self.scheme, range(self.plan.n_tiles)
        nothing = p.cf(0.0)
        total = [[nothing] * 4 for _ in tokens]
        acc = [[nothing] * 4 for _ in tokens]
        in_group = max(1, min(self.n_blocks, scheme.group // scheme.columns))
        groups = self.n_blocks // in_group
        if scheme.fold:
            in_group, groups = 1, self.n_blocks
        at_once = groups if groups <= 4 else 1  # more scales than that crowd the registers
        for b in range(self.n_blocks):
            g = b // in_group
            if b % (in_group * at_once) == 0:
                scales, biases, zeros = self.load_params(slot, range(g, g + at_once))
            g %= at_once
            rows = take(b)
            if x is None:
                columns = [self.by_word(self.load_x(b, t)) for t in tokens]
            else:
                columns = x[b]
            for j in range(4):
                low, high = (
                    self.weights(
                        rows[half][j],
                        biases[half][g],
                        scales[half][g],
                        zeros[half][g] if zeros else None,
                    )
                    for half in range(2)
                )
                for s in range(0, len(low), 2):
                    a = [low[s], high[s], low[s + 1], high[s + 1]]
                    for t in tokens:
                        acc[t] = p.mma(acc[t], a, columns[t][j][s : s + 2], scheme.kind)
            if not scheme.fold and b % in_group == in_group - 1:
                by_row = [scales[0][g]] * 2 + [scales[1][g]] * 2
                total = [
                    [p.fma(*v) for v in zip(acc[t], by_row, total[t], strict=True)] for t in tokens
                ]
                acc = [[nothing] * 4 for _ in tokens]
        return acc if scheme.fold else total

    # --- sums over warps and blocks ---

    def partial_at(self, slot, warp, token, row):
        per_warp = 4 * self.plan.n_tiles * 8 * PITCH
        return p.add(
            self.partial,
            p.mul(slot, WARPS * per_warp),
            p.mul(warp, per_warp),
            p.mul(token, 4 * PITCH),
            p.mul(row, 4),
        )

    def store_partial(self, slot, total) -> None:
        at = self.partial_at(slot, self.warp, p.mul(self.quad, 2), self.row)
        for t in range(self.plan.n_tiles):
            for i in range(4):
                p.store_shared(at, total[t][i], 4 * ((8 * t + i % 2) * PITCH + 8 * (i // 2)))

    def reduce(self, batch, buffer, count: int) -> None:
        plan = self.plan
        warp_bytes = 4 * plan.n_tiles * 8 * PITCH

        def place(index, t):
            rest = arith.remui(index, p.ci(16 * plan.m))
            token, row = p.shift_right(rest, 4), arith.andi(rest, p.ci(15))
            at = self.partial_at(p.add(p.mul(buffer, plan.batch), t), p.ci(0), token, row)
            tile = self.tile_of(p.add(p.mul(batch, plan.batch), t), clamp=False)
            return at, tile, token, row

        def over_warps(index):
            at, *where = place(index, arith.divui(index, p.ci(16 * plan.m)))
            value = p.load_shared(at)
            for w in range(1, plan.warps):
                value = arith.addf(value, p.load_shared(at, w * warp_bytes))
            if plan.split == 1:
                self.write(value, *where)
            else:
                p.store_shared(at, value)

        self.threads(count * 16 * plan.m, over_warps)
        if plan.split == 1:
            return
        p.cluster_barrier()

        def over_blocks(index):
            # Each block finishes every split-th tile.
            t = p.add(p.mul(arith.divui(index, p.ci(16 * plan.m)), plan.split), self.rank)

            def finish():
                at, *where = place(index, t)
                parts = [p.load_peer(p.peer_address(at, i)) for i in range(plan.split)]
                self.write(functools.reduce(arith.addf, parts), *where)

            p.when(p.less(t, count), finish)

        self.threads(-(-count // plan.split) * 16 * plan.m, over_blocks)

    def write(self, value, tile, token, row) -> None:
        def store():
            column = p.add(p.mul(tile, 16), row)
            out = value
            if self.bias is not None:
                word = p.load_global(p.offset(self.bias, column, 4), 1)[0]
                out = arith.addf(out, arith.bitcast(p.f32(), word))
            at = p.offset(self.out, p.add(p.mul(token, self.n), column), _BYTES[self.out_kind])
            if self.out_kind == "f32":
                p.store_global(at, out)
            else:
                p.store_global_half(at, p.narrow(out, self.out_kind))

        p.when(p.less(tile, self.n // 16), store)

    # --- the whole ---

    def run(self) -> None:
        plan, depth = self.plan, self.plan.depth
        self.working_warps(self.copy_x)
        self.copy_params(p.ci(0), p.ci(0), plan.batch)
        p.copies_commit()
        self.fill()
        p.copies_wait(depth)
        p.warp_barrier()
        x = self.arrange_x()
        p.barrier()

        def run_batch(batch, slot, count, final):
            """``slot``: byte offset in the ring of the words that come next."""
            buffer = arith.andi(batch, p.ci(1)) if plan.buffers == 2 else p.ci(0)
            if not final:
                other = arith.xori(buffer, p.ci(1))
                self.copy_params(p.add(batch, 1), other, plan.batch)
            slots = [slot]
            for i in range(count):
                at = p.add(p.mul(buffer, plan.batch), i)

                def take(block, i=i):
                    place = p.add(self.ring, slots[-1])
                    p.copies_wait(depth - 1)
                    rows = [p.load_shared_words(place, 4, 512 * half) for half in range(2)]
                    ahead = i * self.n_blocks + block + depth
                    if not (final and ahead >= count * self.n_blocks):
                        step = p.add(p.mul(batch, plan.batch), ahead // self.n_blocks)
                        self.copy_words(step, ahead % self.n_blocks, place)
                    p.copies_commit()
                    moved = p.add(slots[-1], SLOT)
                    slots.append(arith.select(p.less(moved, depth * SLOT), moved, p.ci(0)))
                    return rows

                self.store_partial(at, self.compute_tile(at, x, take))
            # The next batch's scales are in the first group of this one.
            p.copies_wait(min(depth, count * self.n_blocks) - 1)
            p.barrier()
            self.reduce(batch, buffer, count)
            return [slots[-1]]

        full = (plan.per - 1) // plan.batch
        slot = [p.ci(0)]
        if full:
            slot = p.loop(full, slot, lambda b, c: run_batch(b, c[0], plan.batch, False))
        run_batch(p.ci(full), slot[0], plan.per - full * plan.batch, True)
        if plan.split > 1:
            p.cluster_barrier()  # no block may leave while others read its shared memory


def unsupported(m: int, x_dtype, w: QTensor, out_dtype=None) -> str | None:
    """Why this kernel does not take ``[m, K] x w``, or None."""
    n, k = w.shape
    if w.dtype not in (jnp.int4, jnp.int8):
        return f"weight words {jnp.dtype(w.dtype).name}; the kernel reads int4 and int8"
    if jnp.dtype(x_dtype).name not in ("bfloat16", "float16"):
        return f"activations {jnp.dtype(x_dtype).name}; the kernel multiplies bfloat16 and float16"
    if jnp.dtype(w.scale.dtype).name not in _KIND:
        return f"scales {w.scale.dtype}"
    if out_dtype is not None and jnp.dtype(out_dtype).name not in _KIND:
        return f"the output would be {jnp.dtype(out_dtype).name}"
    if not 1 <= m <= MAX_TOKENS:
        return f"{m} tokens; the decode kernel takes 1 to {MAX_TOKENS}"
    if n % 16:
        return f"N = {n} is not a multiple of 16"
    scheme = Scheme(w, _KIND[jnp.dtype(x_dtype).name])
    if not slices(k, scheme.bits, -(-m // 8)):
        return f"K = {k} is not a multiple of {scheme.columns}, or below {8 * scheme.columns}"
    plan = make_plan(m, w)
    if plan is None:
        return f"{w.scale.shape[1]} groups a row and {m} tokens are more than shared memory holds"
    if scheme.bits == 8 and w.zero is not None:
        return "int8 words with zero points"
    if scheme.zero == "float" and w.zero.dtype != w.scale.dtype:
        return f"zeros {w.zero.dtype} beside scales {w.scale.dtype}"
    if scheme.zero == "int" and w.zero.dtype != jnp.int8:
        return f"zeros {w.zero.dtype}; the kernel reads int8"
    if scheme.fold:
        if scheme.kind != "bf16":
            return f"groups of {scheme.group} or floating zeros with float16 activations"
        if scheme.group % (scheme.columns // 4):
            return f"groups of {scheme.group}; multiples of {scheme.columns // 4} are needed"
    elif scheme.n_groups > 1 and (
        (plan.k_warp % scheme.group and scheme.group % plan.k_warp)
        or (plan.resident and scheme.group > scheme.columns)
    ):
        return f"groups of {scheme.group} columns straddle runs of {plan.k_warp}"
    return None


@functools.partial(jax.jit, static_argnames=("out_dtype", "plan"))
def matmul(
    x: jax.Array,
    w: QTensor,
    *,
    bias: jax.Array | None = None,
    out_dtype,
    plan: Plan | None = None,
) -> jax.Array:
    """x [M, K] bf16 or f16, w [N, K] -> [M, N]; ``unsupported`` says what else is asked of them."""
    (m, k), n = x.shape, w.shape[0]
    plan = make_plan(m, w) if plan is None else plan
    scheme = Scheme(w, _KIND[x.dtype.name])
    out_kind = _KIND[jnp.dtype(out_dtype).name]
    given = [x, w.q, w.scale, w.zero, None if bias is None else bias.astype(jnp.float32)]
    present = [v is not None for v in given]

    def emit(ctx, *refs):
        refs = iter(refs)
        inputs = [next(refs) if there else None for there in present]
        _Kernel(plan, scheme, n, k, out_kind, (*inputs, *refs)).run()

    def quantized_matmul_decode(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(emit)(*refs)

    clustered = plan.split > 1
    kernel = plgpu.kernel(
        quantized_matmul_decode,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(plan.clusters,),
        grid_names=("tiles",),
        cluster=(plan.split,) if clustered else (),
        cluster_names=("run",) if clustered else (),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((plan.arena_bytes // 4,), jnp.float32),
            plgpu.SMEM((plan.depth * SLOT // 4,), jnp.float32),
            plgpu.SMEM((plan.buffers * plan.batch * plan.param_bytes // 4,), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return kernel(*[v for v in given if v is not None])
