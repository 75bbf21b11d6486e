"""The tile kernel's x: a warp's run of columns through shared memory into fragments of the mma.

With a norm, x is multiplied by the norm's weight on the way. Its squares are summed in float32, in
an order that depends on K's division alone. The token's factor multiplies the product's sum later.
The pending term is added to x first, and the sum is rounded to x's dtype, as it is stored.

Copies: a warp copies its run by cp.async.  With a norm its lanes load x and the norm's weight, and
store the products in shared memory.
Waits (``tile``): a lane for its copies, then its warp.  A block barrier precedes the
sum of squares; the batch's barrier, or with ``split`` the cluster's, precedes the factor.
Writes: shared memory; the first cluster also stores x with what was pending.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.few_rows.block import TileBlock
from pallas_kernels.matmul.few_rows.operands import BYTES, add_squares, lane_sums
from pallas_kernels.matmul.few_rows.plan import TOKENS, WARPS
from pallas_kernels.ptx import Value
from pallas_kernels.rows.fused_parts import floats, packed


def in_flight() -> int:
    """Return how many loads of 16 bytes a lane holds in registers: most in Hopper's code."""
    return 8 if gpu().wgmma else 4


@dataclasses.dataclass(frozen=True)
class StagedX:
    """x_mine: shared memory of the warp's run."""

    block: TileBlock
    x_mine: Value

    def granule(self, token, index):
        """Address of 8 columns of a token in the warp's run of x.

        A load of fragments takes 4 granules of 2 tokens at a time; the exchange puts those 8 in
        different banks.
        """
        odd, bits = token & 1, self.block.weight.bits
        if bits == 4:
            odd = (odd * 2) ^ ((index >> 3) & 1)
        elif bits == 16:
            odd = odd * 4
        row = token * (2 * self.block.plan.k_warp)
        return self.x_mine + row + (index ^ odd) * 16

    def source(self, token, index):
        at = p.offset(self.block.operands.x, token, 2 * self.block.operands.k)
        return p.offset(at, self.block.k0 + index * 8, 2)

    def repeated(self):
        """Granules at the start of the run that the warp before has too, or None."""
        if not self.block.overlap:
            return None
        last = self.block.plan.warps - 2 < self.block.working
        return p.where(last, p.ci(self.block.overlap // 8), 0)

    def copy(self) -> None:
        """The warp's run of x to shared memory, whole lines at a time."""
        per_token = self.block.plan.k_warp // 8
        repeated = self.repeated()
        count = self.block.plan.m * per_token
        for first in range(0, count, 32):
            piece = self.block.lane + first

            def copy(piece=piece):
                token, index = piece // per_token, piece % per_token
                to, source = self.granule(token, index), self.source(token, index)
                if repeated is None:
                    p.copy_async(to, source, 0)
                else:
                    size = p.where(index < repeated, p.ci(0), p.ci(16))
                    p.copy_async(to, source, 0, size=size)

            if first + 32 <= count:
                copy()
            else:
                p.when(piece < count, copy)

    def fragments(self) -> Fragments:
        """In registers or, ``resident``, left where they are, in the order of the codes."""
        block = self.block
        pieces, tokens = range(block.n_blocks), range(block.plan.n_tiles)
        x = Fragments(block, [self.granules(t) for t in tokens])
        if not block.plan.resident:
            ready = [[x.permuted(x.load(i, t)) for t in tokens] for i in pieces]
            return dataclasses.replace(x, ready=ready)
        if block.weight.plain:
            return x  # words are pairs as they are

        def in_place():
            for i, t in itertools.product(pieces, tokens):
                words = x.permuted(x.load(i, t))
                p.warp_barrier()  # lanes beyond the last token read its words, and write the same
                for j, at in enumerate(x.at[t]):
                    step = 2 * block.columns
                    p.store_shared(at, words[4 * j : 4 * j + 4], step * i)
            p.warp_barrier()

        block.working_warps(in_place)
        return x

    def granules(self, tile: int):
        """Addresses of the lane's columns of the first block; a later block's are a multiple of
        ``2 * columns`` after.  (Plain weights: of the first two blocks, which are one granule
        each.)"""
        block = self.block
        # Columns of mma beyond the last token repeat it and are not stored.
        token = p.minimum(block.row + 8 * tile, block.plan.m - 1)
        if block.weight.plain:
            return [self.granule(token, block.quad + 4 * i) for i in range(2)]
        pieces = block.columns // 32
        mine = block.quad * pieces
        return [self.granule(token, mine + i) for i in range(pieces)]


@dataclasses.dataclass(frozen=True)
class Fragments:
    """at: by 8 tokens, the lane's places in shared memory.  ready: by block of columns and 8
    tokens, pairs in the order of the codes; None where they are read when they are needed."""

    block: TileBlock
    at: Sequence[Sequence[Value]]
    ready: Sequence[Sequence[Sequence[Value]]] | None = None

    def of(self, piece: int):
        """The fragments of one block of columns, by 8 tokens."""
        if self.ready is not None:
            return self.ready[piece]
        return [self.load(piece, t) for t in range(self.block.plan.n_tiles)]

    def load(self, piece: int, tile: int):
        if self.block.weight.plain:
            return p.load_shared(self.at[tile][piece % 2], 4, 128 * (piece // 2))
        step = 2 * self.block.columns
        return [v for at in self.at[tile] for v in p.load_shared(at, 4, step * piece)]

    def permuted(self, words):
        weight = self.block.weight
        per = weight.per_word // 2
        groups = [widen.x_pairs(weight, words[i : i + per]) for i in range(0, len(words), per)]
        return [pair for group in groups for pair in group]


@dataclasses.dataclass(frozen=True)
class NormedX:
    """x times the norm's weight.  squares: shared memory of sums by warp and token, then of one by
    token.

    lanes: of a warp that a token has; lane: in them.  tokens: by round of so many at once; inside:
    is it one?  works: has the warp columns of its own?  None where all have.
    """

    block: TileBlock
    staged: StagedX
    squares: Value
    lanes: int
    lane: Value
    tokens: Sequence[Value]
    inside: Sequence[Value]
    repeated: Value | None
    works: Value | None
    sums: list[list[Value]]

    @classmethod
    def of(cls, block: TileBlock, staged: StagedX, squares: Value) -> NormedX:
        plan = block.plan
        lanes = {1: 32, 2: 16}.get(plan.m, 8)
        at_once = 32 // lanes
        lane = block.lane & (lanes - 1)
        first = block.lane >> (lanes.bit_length() - 1)
        tokens = [first + start for start in range(0, plan.m, at_once)]
        inside = [t < plan.m for t in tokens]
        repeated = staged.repeated()
        works = None if plan.warps == WARPS else block.warp < plan.warps
        # Squares of the granules whose number is the same modulo 32: the same sums for any lanes.
        sums = [[p.cf(0.0)] * at_once for _ in tokens]
        where = lanes, lane, tokens, inside, repeated, works, sums
        return cls(block, staged, squares, *where)

    @property
    def per_token(self) -> int:
        """Granules of 8 columns."""
        return self.block.plan.k_warp // 8

    @property
    def steps(self) -> list[range]:
        """Granules of a lane, by what is loaded together."""
        steps, each = -(-self.per_token // self.lanes), max(1, in_flight() // len(self.tokens))
        return [range(start, min(start + each, steps)) for start in range(0, steps, each)]

    def begin(self) -> list:
        """Request the first of x, which travels until ``end``."""
        return [self.load(step) for step in self.steps[0]]

    def end(self, loaded: list) -> None:
        """Everything else, up to the warp's sums of squares in shared memory."""
        for some in self.steps:
            if some.start > 0:
                loaded = [self.load(step) for step in some]
            for step, (xs, gamma) in zip(some, loaded, strict=True):
                self.use(step, xs, gamma)
        for token, is_one, parts in zip(self.tokens, self.inside, self.sums, strict=True):
            while len(parts) > 1:
                half = len(parts) // 2
                parts = [u + v for u, v in zip(parts[:half], parts[half:], strict=True)]
            (total,) = lane_sums(parts, self.lanes)
            mine = (self.lane < 1) & is_one
            mine = mine & (self.block.warp < self.block.plan.warps)
            at = self.squares + self.block.warp * (4 * TOKENS) + token * 4
            p.when(mine, lambda at=at, total=total: p.store_shared(at, [total]))

    def load(self, step: int):
        operands, index = self.block.operands, self.lane + step * self.lanes
        index = p.minimum(index, self.per_token - 1)
        rows = [p.minimum(t, self.block.plan.m - 1) for t in self.tokens]
        xs = [p.load_global(self.staged.source(row, index), 4) for row in rows]
        if operands.pending is not None:
            pending = [self.load_pending(row, index) for row in rows]
            xs = list(zip(xs, pending, strict=True))
        column = self.block.k0 + index * 8
        size = BYTES[operands.kinds["gamma"]]
        return xs, operands.eight("gamma", p.offset(operands.gamma, column, size))

    def use(self, step: int, xs, gamma) -> None:
        plan, per_token, at_once = self.block.plan, self.per_token, len(self.sums[0])
        index = self.lane + step * self.lanes
        whole = (step + 1) * self.lanes <= per_token

        def is_one():
            return index < per_token

        for r, (token, words) in enumerate(zip(self.tokens, xs, strict=True)):
            if self.block.operands.pending is not None:
                words = self.store_total(*words, token, p.minimum(index, per_token - 1))
            if self.repeated is not None:
                keep = index < self.repeated
                words = [p.where(keep, 0, w) for w in words]
            values, i = floats(words), step % at_once
            self.sums[r][i] = add_squares(self.sums[r][i], values, None if whole else is_one)
            scaled = [v * g for v, g in zip(values, gamma, strict=True)]
            pairs = packed(scaled)

            def store(token=token, pairs=pairs):
                p.store_shared(self.staged.granule(token, index), pairs)

            limits = [] if (r + 1) * at_once <= plan.m else [self.inside[r]]
            limits += [] if whole else [is_one()]
            limits += [] if self.works is None else [self.works]
            if limits:
                p.when(functools.reduce(operator.and_, limits), store)
            else:
                store()

    def load_pending(self, token, index):
        """Load 8 columns of a token's pending term, as floats."""
        operands = self.block.operands
        size = BYTES[operands.kinds["pending"]]
        at = p.offset(operands.pending, token, size * operands.k)
        return operands.eight("pending", p.offset(at, self.block.k0 + index * 8, size))

    def store_total(self, words, pending, token, index):
        """8 columns of a token with what was pending: words, which the first cluster stores."""

        def place(total):
            at = p.offset(total, p.minimum(token, self.block.plan.m - 1), 2 * self.block.operands.k)
            return p.offset(at, self.block.k0 + index * 8, 2)

        return self.block.operands.store_total(words, pending, place, lambda: self.block.cluster)

    def sum_squares(self) -> None:
        """A thread per token: the warps' sums to the block's; with one block the token's factor."""
        block, plan = self.block, self.block.plan

        def one():
            at = self.squares + block.thread * 4
            total = p.load_float(at)
            for w in range(1, plan.warps):
                total = total + p.load_float(at, 4 * TOKENS * w)
            if plan.split == 1:
                total = self.block.operands.factor(total)
            p.store_shared(at, [total], 4 * TOKENS * WARPS)

        p.when(block.thread < plan.m, one)

    def factor(self, token):
        """The token's factor, in any thread, after the last barrier before the sums are written."""
        at = self.squares + token * 4 + 4 * TOKENS * WARPS
        split = self.block.plan.split
        if split == 1:
            return p.load_float(at)
        total = p.load_peer(p.peer_address(at, 0))
        for i in range(1, split):
            total = total + p.load_peer(p.peer_address(at, i))
        return self.block.operands.factor(total)
