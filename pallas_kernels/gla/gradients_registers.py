"""Register work of ``gla.gradients`` for a slice of a chunk: the six levels of the tree, then the
states' part, dlog_decay and the results.

Contract: every public function returns a call (``launch.inline``) of a whole warpgroup.  Its
registers travel as a bundle (``recurrence.channels``).  The algorithm is in
``gla.gradients``.

Copies: none; the caller's TMA has brought the slice and its stages, and the caller has waited.
Waits: no barrier; a warp reads and writes its own 16 channels of the slice.  All warps read G, and
do and v of a stage.
Writes: ``levels_call`` leaves dq, dk, p, t in registers, and the flux of each element in its gate's
place.  ``states_call`` updates fluxes in the gates' place, ``finish_call`` stores the results in
shared memory, from where the caller's TMA takes them.
"""

from __future__ import annotations

import functools

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.launch import REF, inline
from pallas_kernels.recurrence.channels import (
    ROWS,
    TILE,
    ChannelLane,
    b_tiles,
    bundle,
    bundle_layout,
    bundle_type,
    half_products,
    unbundle,
    zero_acc,
)
from pallas_kernels.recurrence.slices import (
    GATES,
    Levels,
    each,
    flat,
    gate_at,
    load_block,
    nested,
    store_gradients,
)
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


# --- behind the levels ----------------------------------------------------------------------------


N_EXTRA = 2 + 4  # sum_j k_j dk_j of the states' part, per h; accumulator of <S, E>


class _States:
    """Adds the terms that come through the states to a slice's state and extra registers."""

    def __init__(self, slot_ref, stage_ref, state, extra, scale: float, blocks: int):
        self.lane, self.scale, self.blocks = ChannelLane(), scale, blocks
        dq, dk, pp, tt, self.rest = unbundle(state, 32, 32, 32, 32, 3)
        self.dq, self.dk, self.pp, self.tt = (nested(x) for x in (dq, dk, pp, tt))
        slot, stage = p.shared_address(slot_ref), p.shared_address(stage_ref)
        self.own, self.gates = self.lane.column_matrices(slot), self.lane.gate_words(slot)
        self.total, self.inner = unbundle(extra, 2, 4)
        self.tokens = self.lane.row_matrices(stage)
        self.columns = self.lane.column_matrices(stage)

    def run(self) -> None:
        for kv in range(4 * self.blocks):
            self.inner = half_products(self.inner, *self.states(kv))
        for b in range(4):
            self.add(b, *self.products(b))

    def states(self, kv: int):
        """S^T and E^T of 16 value channels."""
        at = 4 * TILE * (kv // 4) + 2 * TILE + 2048 * (kv % 4)
        return [p.load_matrices(self.columns, at=at + x, transposed=True) for x in (0, TILE)]

    def products(self, b: int):
        """S do and E v of tokens 16b .. 16b + 15."""
        zq, zk = [zero_acc(), zero_acc()], [zero_acc(), zero_acc()]
        for kv in range(4 * self.blocks):
            s, e = self.states(kv)
            at = 4 * TILE * (kv // 4) + 2048 * b
            d = p.load_matrices(self.tokens[kv % 4], at=at)
            v = p.load_matrices(self.tokens[kv % 4], at=TILE + at)
            zq = [p.mma(x, s, y) for x, y in zip(zq, b_tiles(d), strict=True)]
            zk = [p.mma(x, e, y) for x, y in zip(zk, b_tiles(v), strict=True)]
        return zq, zk

    def add(self, b: int, zq, zk) -> None:
        """Their part of dq and dk, of the fluxes, and of sum_j k_j dk_j."""
        q, k = load_block(self.own, 0, b), load_block(self.own, TILE, b)
        for half in range(2):
            for h in range(2):
                z = [part[half][2 * h : 2 * h + 2] for part in (zq, zk)]
                self.add_pair(h, 2 * b + half, q[h][half], k[h][half], *z)

    def add_pair(self, h: int, m: int, q, k, zq, zk) -> None:
        dq, dk, at = self.dq[h][m], self.dk[h][m], 2 * TILE + 1024 * m
        qs, ks = floats([q]), floats([k])
        for i in range(2):
            (flux,) = p.load_shared(self.gates[h][i], 1, at, "f32")
            f = self.pp[h][m][i] * self.scale
            x = f * zq[i]
            dq[i] = dq[i] + x
            flux = p.fma(qs[i], x, flux)
            x = self.tt[h][m][i] * zk[i]
            dk[i] = dk[i] + x
            x = ks[i] * x
            p.store_shared(self.gates[h][i], [flux - x], at)
            self.total[h] = self.total[h] + x

    def results(self):
        parts = self.dq, self.dk, self.pp, self.tt
        state = [*(x for part in parts for x in flat(part)), *self.rest]
        return bundle(state), bundle([*self.total, *self.inner])


def states_call(scale: float, blocks: int):
    """Adds ``blocks`` stages of 64 value channels; a stage is the tiles do, v, S^T, E^T."""

    @inline(
        plgpu.RefType(ROWS),
        plgpu.RefType(ROWS),
        bundle_layout(N_STATE),
        bundle_layout(N_EXTRA),
        out=(bundle_type(N_STATE), bundle_type(N_EXTRA)),
    )
    def call(slot_ref, stage_ref, state, extra):
        states = _States(slot_ref, stage_ref, state, extra, scale, blocks)
        states.run()
        return states.results()

    return call


def flux_call():
    """Return the fluxes out of the gates' tile, before their place is overwritten.

    ``finish_call`` stores dlog_decay there, or the next slice's gates arrive there meanwhile.
    """

    @inline(plgpu.RefType(ROWS), out=bundle_type(32))
    def call(slot_ref):
        gates = ChannelLane().gate_words(p.shared_address(slot_ref))
        return bundle(flat(each(functools.partial(gate_at, gates))))

    return call


def finish_call():
    """dg from the fluxes, and the three results into a stage laid out like a slot."""

    @inline(plgpu.RefType(ROWS), bundle_layout(32), bundle_layout(N_STATE), bundle_layout(N_EXTRA))
    def call(out_ref, fluxes, state, extra):
        lane = ChannelLane()
        dq, dk, _, _, decay, gone = unbundle(state, 32, 32, 32, 32, 2, 1)
        gone = p.bits(gone[0])
        dq, dk = nested(dq), nested(dk)
        flux = nested(unbundle(fluxes, 32)[0])
        total, inner = unbundle(extra, 2, 4)
        base = p.shared_address(out_ref)
        columns, gates = lane.column_matrices(base), lane.gate_words(base)

        def start(h):
            # <S, E> of channel 8h + g sits in the lane whose columns hold the same channel.
            twice, states, sums = lane.c << 1, p.cf(0.0), total[h]
            for e in range(2):
                here = p.equal(twice + e, lane.g)
                states = states + p.where(here, inner[2 * h + e], 0.0)
            for lanes in (1, 2):
                states = states + p.shuffle_xor(states, lanes)
                sums = sums + p.shuffle_xor(sums, lanes)
            return p.fma(decay[h], states, sums)

        store_gradients(lane, columns, gates, GATES, gone, start, flux, dq, dk)

    return call
