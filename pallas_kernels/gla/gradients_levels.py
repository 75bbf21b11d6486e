"""Register work of ``gla.gradients``: the six levels of the tree, for a slice of a chunk.

Contract: ``levels_call`` returns a call (``launch.inline``) of a whole warpgroup.  Its registers
travel as a bundle (``recurrence.channels``).  The algorithm is in ``gla.gradients``.

Copies: none; q, k, g and G are in shared memory (``gla.gradients`` waits for them).
Waits: no barrier; a warp reads and writes its own channels alone, and G is only read.
Writes: dq, dk, p, t stay in registers; the flux of each element replaces its gate.
"""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.launch import REF, inline
from pallas_kernels.recurrence.channels import ROWS, TILE, ChannelLane, bundle, bundle_type
from pallas_kernels.recurrence.slices import GATES, Levels, flat, load_block
from pallas_kernels.rows.fused_parts import floats

# Registers of a slice (``recurrence.slices``): dq, dk, p, t; the chunk's decay; which gates are 0.
# q and k are read again where they are needed.  The flux q dq - k dk of every element waits in the
# tile of its gate.
N_STATE = 4 * 32 + 2 + 1


class _Levels(Levels):
    """y and factor: a level's rows and what they are multiplied by."""

    def run(self) -> None:
        self.y = [[None] * 8, [None] * 8]
        super().run()

    # --- y and f of tokens 16b .. 16b + 15 ---

    def build(self, b: int) -> None:
        level, query = self.level, [self.is_second(m) for m in (2 * b, 2 * b + 1)]
        q = load_block(self.columns, 0, b) if level < 8 or any(query) else None
        k = load_block(self.columns, TILE, b) if level < 8 or not all(query) else None
        for half in range(2):
            for h in range(2):
                self.build_pair(h, 2 * b + half, *(x and x[h][half] for x in (q, k)))

    def build_pair(self, h: int, m: int, q, k) -> None:
        """Two tokens of a channel; q, k: their words, None where the level has no use for one."""
        pp, tt, bit = self.up[h][m], self.down[h][m], self.bit
        if self.level == 1:
            gated = p.mul_pairs(q, p.pack(self.one, pp[1]))
            self.y[h][m] = (k & 0xFFFF) | (gated & -65536)
            self.factor[h][m] = [self.one, pp[1]]
            return
        if bit is not None:
            word = p.where(bit, q, k)
            f = [p.where(bit, x, y) for x, y in zip(pp, tt, strict=True)]
        else:
            word, f = (q, pp) if self.is_second(m) else (k, tt)
        self.factor[h][m] = f
        self.y[h][m] = p.mul_pairs(word, p.pack(*f))

    # --- dq or dk of the same tokens ---

    def apply(self, b: int) -> None:
        z = self.products(self.y, b)
        for h in range(2):
            for half in range(2):
                self.apply_pair(h, 2 * b + half, z[h][half])

    def apply_pair(self, h: int, m: int, z) -> None:
        level, bit, word = self.level, self.bit, self.y[h][m]
        if bit is not None:
            word = word ^ p.where(bit, p.ci(0), p.ci(-0x7FFF8000))
        rounded = floats([word])
        if level == 1:
            rounded[0] = -rounded[0]
        elif level >= 8 and not self.is_second(m):
            rounded = [-x for x in rounded]
        flux = self.flux[h][m]
        for e in range(2):
            flux[e] = p.fma(rounded[e], z[e], flux[e])
            self.add(h, m, e, self.factor[h][m][e], z[e])

    def add(self, h: int, m: int, e: int, f, z) -> None:
        """f z to dq on query rows, to dk on key rows."""
        dq, dk, bit, zero = self.d_q[h][m], self.d_k[h][m], self.bit, self.zero
        if self.level == 1:
            if e:
                dq[e] = p.fma(f, z, dq[e])
            else:
                dk[e] = dk[e] + z
        elif bit is not None:
            fz = f * z
            dq[e] = dq[e] + p.where(bit, fz, zero)
            dk[e] = dk[e] + p.where(bit, zero, fz)
        elif self.is_second(m):
            dq[e] = p.fma(f, z, dq[e])
        else:
            dk[e] = p.fma(f, z, dk[e])

    def add_diagonal(self, diagonal_ref) -> None:
        """The pairs i = j, which have no decay; and the fluxes into the gates' tile."""
        diagonal = p.shared_address(diagonal_ref) + (self.lane.c << 3)
        for b in range(4):
            q, k = load_block(self.columns, 0, b), load_block(self.columns, TILE, b)
            for half in range(2):
                m = 2 * b + half
                weight = p.load_shared(diagonal, 2, 32 * m, "f32")
                for h in range(2):
                    dq, dk, flux = self.d_q[h][m], self.d_k[h][m], self.flux[h][m]
                    qs, ks = floats([q[h][half]]), floats([k[h][half]])
                    for e in range(2):
                        dq[e] = p.fma(weight[e], ks[e], dq[e])
                        dk[e] = p.fma(weight[e], qs[e], dk[e])
                        p.store_shared(self.gates[h][e], [flux[e]], GATES + 1024 * m)

    def state(self) -> list:
        """``N_STATE`` registers."""
        decay = [self.whole[0][0], self.whole[1][0]]
        parts = self.d_q, self.d_k, self.up, self.down
        return [*(x for part in parts for x in flat(part)), *decay, self.gone]


def levels_call():
    """(slot, pairs, diagonal) -> the state of a slice."""

    @inline(plgpu.RefType(ROWS), plgpu.RefType(ROWS), REF, out=bundle_type(N_STATE))
    def call(slot_ref, pair_ref, diagonal_ref):
        lane = ChannelLane()
        levels = _Levels(lane, p.shared_address(slot_ref), p.shared_address(pair_ref))
        levels.run()
        levels.add_diagonal(diagonal_ref)
        return bundle(levels.state())

    return call
