"""Register work of ``gla.gradients``: the six levels of the tree, for a slice of a chunk.

Contract: ``levels_call`` returns an ``inline_mgpu`` call of a whole warpgroup.  Its registers
travel as a bundle (``recurrence.channels``).  The algorithm is in ``gla.gradients``.
"""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.fused_parts import floats
from pallas_kernels.jax_internals import arith
from pallas_kernels.recurrence.channels import (
    ROWS,
    TILE,
    ChannelLane,
    b_tiles,
    bundle,
    bundle_type,
    zero_acc,
)
from pallas_kernels.recurrence.slices import LEVELS, each, flat, load_block

# Registers of a slice (``recurrence.slices``): dq, dk, p, t; the chunk's decay; which gates are 0.
# q and k are read again where they are needed.  The flux q dq - k dk of every element waits in the
# tile of its gate.
N_STATE = 4 * 32 + 2 + 1


def gate_at(gates, h, m, e):
    """A gate, or the flux that took its place, out of its tile."""
    return p.load_shared(gates[h][e], 1, 2 * TILE + 1024 * m, "f32")[0]


class _Levels:
    """The six levels of a slice, in a warp's registers.

    Everything is emitted while the kernel is traced.  [h][m][e] as above: pp and tt are the factors
    p and t; y and factor are a level's rows and what they are multiplied by; block is the product
    of the tile's part known so far.
    """

    def __init__(self, slot_ref, pair_ref):
        self.lane = ChannelLane()
        base = p.shared_address(slot_ref)
        self.columns, self.gates = self.lane.column_matrices(base), self.lane.gate_words(base)
        self.pair = self.lane.row_matrices(p.shared_address(pair_ref))
        a = each(lambda *at: p.exp2(gate_at(self.gates, *at) * p.LOG2E))
        self.one, self.zero = p.cf(1.0), p.cf(0.0)
        self.gone = p.ci(0)
        for i, x in enumerate(flat(a)):
            is_zero = arith.cmpf(arith.CmpFPredicate.OEQ, x, self.zero)
            mask = p.ci(1 << i)
            self.gone = self.gone | arith.select(is_zero, mask, p.ci(0))
        self.flux, self.dq, self.dk = (each(lambda *_: self.zero) for _ in range(3))
        self.pp, self.tt = a, each(lambda *_: self.one)
        self.block = [[None] * 8, [None] * 8]

    def run(self) -> None:
        for level in LEVELS:
            self.level, self.bit = level, None
            self.y, self.factor = ([[None] * 8, [None] * 8] for _ in range(2))
            if level in (2, 4):  # whether the lane's tokens are query rows
                self.bit = p.bit(self.lane.c, 0 if level == 2 else 1)
            for b in range(4):
                self.build(b)
                if level <= 8:
                    self.apply(b)
            if level > 8:
                for b in range(4):
                    self.apply(b)
            self.climb()

    def is_query(self, m: int) -> bool:
        """Whether tokens 8m .. 8m + 7 are query rows of a level from 8 on."""
        return self.level >= 8 and bool(m & (self.level // 8))

    # --- y and f of tokens 16b .. 16b + 15 ---

    def build(self, b: int) -> None:
        level, query = self.level, [self.is_query(m) for m in (2 * b, 2 * b + 1)]
        q = load_block(self.columns, 0, b) if level < 8 or any(query) else None
        k = load_block(self.columns, TILE, b) if level < 8 or not all(query) else None
        for half in range(2):
            for h in range(2):
                self.build_pair(h, 2 * b + half, *(x and x[h][half] for x in (q, k)))

    def build_pair(self, h: int, m: int, q, k) -> None:
        """Two tokens of a channel; q, k: their words, None where the level has no use for one."""
        pp, tt, bit = self.pp[h][m], self.tt[h][m], self.bit
        if self.level == 1:
            gated = p.mul_pairs(q, p.pack(self.one, pp[1]))
            self.y[h][m] = (k & 0xFFFF) | (gated & -65536)
            self.factor[h][m] = [self.one, pp[1]]
            return
        if bit is not None:
            word = arith.select(bit, q, k)
            f = [arith.select(bit, x, y) for x, y in zip(pp, tt, strict=True)]
        else:
            word, f = (q, pp) if self.is_query(m) else (k, tt)
        self.factor[h][m] = f
        self.y[h][m] = p.mul_pairs(word, p.pack(*f))

    # --- dq or dk of the same tokens ---

    def apply(self, b: int) -> None:
        z = self.products(b)
        for h in range(2):
            for half in range(2):
                self.apply_pair(h, 2 * b + half, z[h][half])

    def products(self, b: int):
        """Z of tokens 16b .. 16b + 15: [h][half][e]."""
        level, y, pair = self.level, self.y, self.pair

        def fragment(kb):
            return [y[0][2 * kb], y[1][2 * kb], y[0][2 * kb + 1], y[1][2 * kb + 1]]

        if level < 16:
            steps = [(fragment(b), pair[level.bit_length() - 1], TILE)]
        else:
            blocks = [b ^ 1] if level == 16 else [2 * (1 - b // 2), 2 * (1 - b // 2) + 1]
            steps = [(fragment(kb), pair[kb], 0) for kb in blocks]
        acc = [zero_acc(), zero_acc()]
        for left, address, tile in steps:
            rights = b_tiles(p.load_matrices(address, at=tile + 2048 * b))
            acc = [p.mma(x, left, right) for x, right in zip(acc, rights, strict=True)]
        return [[acc[half][2 * h : 2 * h + 2] for half in range(2)] for h in range(2)]

    def apply_pair(self, h: int, m: int, z) -> None:
        level, bit, word = self.level, self.bit, self.y[h][m]
        if bit is not None:
            word = word ^ arith.select(bit, p.ci(0), p.ci(-0x7FFF8000))
        rounded = floats([word])
        if level == 1:
            rounded[0] = -rounded[0]
        elif level >= 8 and not self.is_query(m):
            rounded = [-x for x in rounded]
        flux = self.flux[h][m]
        for e in range(2):
            flux[e] = p.fma(rounded[e], z[e], flux[e])
            self.add(h, m, e, self.factor[h][m][e], z[e])

    def add(self, h: int, m: int, e: int, f, z) -> None:
        """f z to dq on query rows, to dk on key rows."""
        dq, dk, bit, zero = self.dq[h][m], self.dk[h][m], self.bit, self.zero
        if self.level == 1:
            if e:
                dq[e] = p.fma(f, z, dq[e])
            else:
                dk[e] = dk[e] + z
        elif bit is not None:
            fz = f * z
            dq[e] = dq[e] + arith.select(bit, fz, zero)
            dk[e] = dk[e] + arith.select(bit, zero, fz)
        elif self.is_query(m):
            dq[e] = p.fma(f, z, dq[e])
        else:
            dk[e] = p.fma(f, z, dk[e])

    # --- p, t and the block products of twice the block ---

    def climb(self) -> None:
        old = [list(x) for x in self.block]
        for h in range(2):
            for m in range(8):
                self.climb_pair(h, m, old[h])

    def climb_pair(self, h: int, m: int, old) -> None:
        pp, tt, block, one = self.pp[h], self.tt[h], self.block[h], self.one
        if self.level == 1:
            a0, a1 = pp[m]
            both = a0 * a1
            pp[m], tt[m], block[m] = [a0, both], [a1, one], both
        elif self.bit is not None:
            other = p.shuffle_xor(old[m], self.level // 2)
            before = arith.select(self.bit, other, one)
            after = arith.select(self.bit, one, other)
            pp[m] = [x * before for x in pp[m]]
            tt[m] = [x * after for x in tt[m]]
            block[m] = old[m] * other
        else:
            other = old[m ^ (self.level // 8)]
            if self.is_query(m):
                pp[m] = [x * other for x in pp[m]]
            else:
                tt[m] = [x * other for x in tt[m]]
            block[m] = old[m] * other

    def add_diagonal(self, diagonal_ref) -> None:
        """The pairs i = j, which have no decay; and the fluxes into the gates' tile."""
        diagonal = p.shared_address(diagonal_ref) + (self.lane.c << 3)
        for b in range(4):
            q, k = load_block(self.columns, 0, b), load_block(self.columns, TILE, b)
            for half in range(2):
                m = 2 * b + half
                weight = p.load_shared(diagonal, 2, 32 * m, "f32")
                for h in range(2):
                    dq, dk, flux = self.dq[h][m], self.dk[h][m], self.flux[h][m]
                    qs, ks = floats([q[h][half]]), floats([k[h][half]])
                    for e in range(2):
                        dq[e] = p.fma(weight[e], ks[e], dq[e])
                        dk[e] = p.fma(weight[e], qs[e], dk[e])
                        p.store_shared(self.gates[h][e], [flux[e]], 2 * TILE + 1024 * m)

    def state(self) -> list:
        """``N_STATE`` registers."""
        decay = [self.block[0][0], self.block[1][0]]
        parts = self.dq, self.dk, self.pp, self.tt
        return [*(x for part in parts for x in flat(part)), *decay, self.gone]


def levels_call():
    """(slot, pairs, diagonal) -> the state of a slice."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(ROWS), plgpu.RefType(ROWS), plgpu.RefType()),
        return_type=bundle_type(N_STATE),
    )
    def call(ctx, slot_ref, pair_ref, diagonal_ref):
        del ctx
        levels = _Levels(slot_ref, pair_ref)
        levels.run()
        levels.add_diagonal(diagonal_ref)
        return bundle(levels.state())

    return call
