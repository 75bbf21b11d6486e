"""Register work of ``gla.gradients``: the steps of one slice of one chunk, by one warpgroup.

Contract: every public function returns an ``inline_mgpu`` call; what it leaves in registers travels
as a bundle (``recurrence.channels``).  The algorithm is in ``gla.gradients``.
"""

from __future__ import annotations

import functools

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
    bundle_layout,
    bundle_type,
    half_products,
    unbundle,
    zero_acc,
)

LEVELS = (1, 2, 4, 8, 16, 32)

# Registers of one slice: [h][m][e] for channel 16w + 8h + g and token 8m + 2c + e.
# dq, dk, p, t; the chunk's decay; which gates are 0.  q and k are read again where they are needed;
# the flux q dq - k dk of every element waits in the tile of its gate.
N_STATE = 4 * 32 + 2 + 1


def _load_block(columns, at, b):
    """bf16 token pairs of 16 tokens, [h][half], from the q (at = 0) or k (TILE) tile."""
    r = p.load_matrices(columns, at=at + 2048 * b, transposed=True)
    return [[r[0], r[2]], [r[1], r[3]]]


def _flat(x):
    return [x[h][m][e] for h in range(2) for m in range(8) for e in range(2)]


def _each(value):
    """[h][m][e] of value(h, m, e)."""
    return [[[value(h, m, e) for e in range(2)] for m in range(8)] for h in range(2)]


def _nested(flat):
    it = iter(flat)
    return _each(lambda h, m, e: next(it))


def _gate_at(gates, h, m, e):
    """A gate, or the flux that took its place, out of its tile."""
    return p.load_shared(gates[h][e], 1, 2 * TILE + 1024 * m, "f32")[0]


def levels_call():
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(ROWS), plgpu.RefType(ROWS), plgpu.RefType()),
        return_type=bundle_type(N_STATE),
    )
    def call(ctx, slot_ref, pair_ref, diagonal_ref):
        del ctx
        lane = ChannelLane()
        base = p.shared_address(slot_ref)
        columns, gates = lane.column_matrices(base), lane.gate_words(base)
        pair = lane.row_matrices(p.shared_address(pair_ref))
        a = _each(lambda *at: p.exp2(arith.mulf(_gate_at(gates, *at), p.cf(p.LOG2E))))
        one, zero = p.cf(1.0), p.cf(0.0)
        gone = p.ci(0)
        for i, x in enumerate(_flat(a)):
            is_zero = arith.cmpf(arith.CmpFPredicate.OEQ, x, zero)
            mask = p.ci(1 << i)
            gone = arith.ori(gone, arith.select(is_zero, mask, p.ci(0)))
        flux, dq, dk = (_each(lambda *_: zero) for _ in range(3))
        pp = a
        tt = _each(lambda *_: one)
        block = [[None] * 8, [None] * 8]  # product of the tile's part known so far

        def products(level, y, b):
            """Z of tokens 16b..16b+15: [h][half][e]."""

            def fragment(kb):
                return [y[0][2 * kb], y[1][2 * kb], y[0][2 * kb + 1], y[1][2 * kb + 1]]

            if level < 16:
                steps = [(fragment(b), pair[level.bit_length() - 1], TILE)]
            else:
                blocks = [b ^ 1] if level == 16 else [2 * (1 - b // 2), 2 * (1 - b // 2) + 1]
                steps = [(fragment(kb), pair[kb], 0) for kb in blocks]
            acc = [zero_acc(), zero_acc()]
            for fragment_a, address, tile in steps:
                tiles = b_tiles(p.load_matrices(address, at=tile + 2048 * b))
                acc = [p.mma(x, fragment_a, y_) for x, y_ in zip(acc, tiles, strict=True)]
            return [[acc[half][2 * h : 2 * h + 2] for half in range(2)] for h in range(2)]

        for level in LEVELS:
            y = [[None] * 8, [None] * 8]
            bit = None
            if level in (2, 4):
                bit = p.bit(lane.c, 0 if level == 2 else 1)
            factor = [[None] * 8, [None] * 8]

            def build(b, level=level, bit=bit, y=y, factor=factor):
                """y and f of tokens 16b..16b+15."""
                query = [level >= 8 and bool(m & (level // 8)) for m in (2 * b, 2 * b + 1)]
                q = _load_block(columns, 0, b) if level < 8 or any(query) else None
                k = _load_block(columns, TILE, b) if level < 8 or not all(query) else None
                for half in range(2):
                    m = 2 * b + half
                    for h in range(2):
                        if level == 1:
                            gated = p.mul_pairs(q[h][half], p.pack(one, pp[h][m][1]))
                            y[h][m] = arith.ori(
                                p.masked(k[h][half], 0xFFFF),
                                p.masked(gated, -65536),
                            )
                            factor[h][m] = [one, pp[h][m][1]]
                            continue
                        if bit is not None:
                            word = arith.select(bit, q[h][half], k[h][half])
                            f = [
                                arith.select(bit, x, y_)
                                for x, y_ in zip(pp[h][m], tt[h][m], strict=True)
                            ]
                        else:
                            word = (q if query[half] else k)[h][half]
                            f = pp[h][m] if query[half] else tt[h][m]
                        factor[h][m] = f
                        y[h][m] = p.mul_pairs(word, p.pack(*f))

            def apply(b, level=level, bit=bit, y=y, factor=factor):
                """dq or dk of the same tokens."""
                z = products(level, y, b)
                for h in range(2):
                    for half in range(2):
                        m = 2 * b + half
                        word = y[h][m]
                        if bit is not None:
                            word = arith.xori(word, arith.select(bit, p.ci(0), p.ci(-0x7FFF8000)))
                        rounded = floats([word])
                        if level == 1:
                            rounded[0] = arith.negf(rounded[0])
                        elif level >= 8 and not m & (level // 8):
                            rounded = [arith.negf(x) for x in rounded]
                        for e in range(2):
                            flux[h][m][e] = p.fma(rounded[e], z[h][half][e], flux[h][m][e])
                            f, zz = factor[h][m][e], z[h][half][e]
                            if level == 1:
                                if e:
                                    dq[h][m][e] = p.fma(f, zz, dq[h][m][e])
                                else:
                                    dk[h][m][e] = arith.addf(dk[h][m][e], zz)
                            elif bit is not None:
                                fz = arith.mulf(f, zz)
                                dq[h][m][e] = arith.addf(dq[h][m][e], arith.select(bit, fz, zero))
                                dk[h][m][e] = arith.addf(dk[h][m][e], arith.select(bit, zero, fz))
                            elif m & (level // 8):
                                dq[h][m][e] = p.fma(f, zz, dq[h][m][e])
                            else:
                                dk[h][m][e] = p.fma(f, zz, dk[h][m][e])

            for b in range(4):
                build(b)
                if level <= 8:
                    apply(b)
            if level > 8:
                for b in range(4):
                    apply(b)
            # Raise p, t and the block products to twice the block.
            old = [list(x) for x in block]
            for h in range(2):
                for m in range(8):
                    if level == 1:
                        a0, a1 = pp[h][m]
                        both = arith.mulf(a0, a1)
                        pp[h][m], tt[h][m], block[h][m] = [a0, both], [a1, one], both
                    elif bit is not None:
                        other = p.shuffle_xor(old[h][m], level // 2)
                        before, after = arith.select(bit, other, one), arith.select(bit, one, other)
                        pp[h][m] = [arith.mulf(x, before) for x in pp[h][m]]
                        tt[h][m] = [arith.mulf(x, after) for x in tt[h][m]]
                        block[h][m] = arith.mulf(old[h][m], other)
                    else:
                        other = old[h][m ^ (level // 8)]
                        if m & (level // 8):
                            pp[h][m] = [arith.mulf(x, other) for x in pp[h][m]]
                        else:
                            tt[h][m] = [arith.mulf(x, other) for x in tt[h][m]]
                        block[h][m] = arith.mulf(old[h][m], other)
        diagonal = p.add(p.shared_address(diagonal_ref), p.shift_left(lane.c, 3))
        for b in range(4):
            q, k = _load_block(columns, 0, b), _load_block(columns, TILE, b)
            for half in range(2):
                m = 2 * b + half
                weight = p.load_shared(diagonal, 2, 32 * m, "f32")
                for h in range(2):
                    qs, ks = floats([q[h][half]]), floats([k[h][half]])
                    for e in range(2):
                        dq[h][m][e] = p.fma(weight[e], ks[e], dq[h][m][e])
                        dk[h][m][e] = p.fma(weight[e], qs[e], dk[h][m][e])
                        p.store_shared(gates[h][e], [flux[h][m][e]], 2 * TILE + 1024 * m)
        decay = [block[0][0], block[1][0]]
        return bundle([*_flat(dq), *_flat(dk), *_flat(pp), *_flat(tt), *decay, gone])

    return call


N_EXTRA = 2 + 4  # sum_j k_j dk_j of the states' part, per h; accumulator of <S, E>


def states_call(scale: float, blocks: int):
    """Adds ``blocks`` stages of 64 value channels; a stage is the tiles do, v, S^T, E^T."""

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(ROWS),
            plgpu.RefType(ROWS),
            bundle_layout(N_STATE),
            bundle_layout(N_EXTRA),
        ),
        return_type=(bundle_type(N_STATE), bundle_type(N_EXTRA)),
    )
    def call(ctx, slot_ref, stage_ref, state, extra):
        del ctx
        lane = ChannelLane()
        dq, dk, pp, tt, rest = unbundle(state, 32, 32, 32, 32, 3)
        dq, dk, pp, tt = (_nested(x) for x in (dq, dk, pp, tt))
        slot, stage = p.shared_address(slot_ref), p.shared_address(stage_ref)
        own, gates = lane.column_matrices(slot), lane.gate_words(slot)
        total, inner = unbundle(extra, 2, 4)
        tokens, columns = lane.row_matrices(stage), lane.column_matrices(stage)

        def states(kv):
            at = 4 * TILE * (kv // 4) + 2 * TILE + 2048 * (kv % 4)
            return [p.load_matrices(columns, at=at + x, transposed=True) for x in (0, TILE)]

        for kv in range(4 * blocks):
            inner = half_products(inner, *states(kv))
        for b in range(4):
            zq, zk = [zero_acc(), zero_acc()], [zero_acc(), zero_acc()]
            for kv in range(4 * blocks):
                s, e = states(kv)
                at = 4 * TILE * (kv // 4) + 2048 * b
                d = p.load_matrices(tokens[kv % 4], at=at)
                v = p.load_matrices(tokens[kv % 4], at=TILE + at)
                zq = [p.mma(x, s, y) for x, y in zip(zq, b_tiles(d), strict=True)]
                zk = [p.mma(x, e, y) for x, y in zip(zk, b_tiles(v), strict=True)]
            q, k = _load_block(own, 0, b), _load_block(own, TILE, b)
            for half in range(2):
                m = 2 * b + half
                for h in range(2):
                    qs, ks = floats([q[h][half]]), floats([k[h][half]])
                    for i in range(2):
                        at = 2 * TILE + 1024 * m
                        (flux,) = p.load_shared(gates[h][i], 1, at, "f32")
                        f = arith.mulf(pp[h][m][i], p.cf(scale))
                        x = arith.mulf(f, zq[half][2 * h + i])
                        dq[h][m][i] = arith.addf(dq[h][m][i], x)
                        flux = p.fma(qs[i], x, flux)
                        x = arith.mulf(tt[h][m][i], zk[half][2 * h + i])
                        dk[h][m][i] = arith.addf(dk[h][m][i], x)
                        x = arith.mulf(ks[i], x)
                        p.store_shared(gates[h][i], [arith.subf(flux, x)], at)
                        total[h] = arith.addf(total[h], x)
        return (
            bundle([*_flat(dq), *_flat(dk), *_flat(pp), *_flat(tt), *rest]),
            bundle([*total, *inner]),
        )

    return call


def flux_call():
    """Fetches the fluxes out of the gates' tile."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(ROWS),), return_type=bundle_type(32))
    def call(ctx, slot_ref):
        del ctx
        gates = ChannelLane().gate_words(p.shared_address(slot_ref))
        return bundle(_flat(_each(functools.partial(_gate_at, gates))))

    return call


def finish_call():
    """dg from the fluxes, and the three results into a stage laid out like a slot."""

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(ROWS),
            bundle_layout(32),
            bundle_layout(N_STATE),
            bundle_layout(N_EXTRA),
        ),
    )
    def call(ctx, out_ref, fluxes, state, extra):
        del ctx
        lane = ChannelLane()
        dq, dk, _, _, decay, gone = unbundle(state, 32, 32, 32, 32, 2, 1)
        gone = arith.bitcast(p.i32(), gone[0])
        dq, dk = _nested(dq), _nested(dk)
        flux = _nested(unbundle(fluxes, 32)[0])
        total, inner = unbundle(extra, 2, 4)
        base = p.shared_address(out_ref)
        columns, gates = lane.column_matrices(base), lane.gate_words(base)
        odd, upper = p.bit(lane.c, 0), p.bit(lane.c, 1)
        zero = p.cf(0.0)
        out_q, out_k = [[None] * 8, [None] * 8], [[None] * 8, [None] * 8]
        for h in range(2):
            # <S, E> of channel 8h + g sits in the lane whose columns hold the same channel.
            twice = p.shift_left(lane.c, 1)
            states = zero
            for e in range(2):
                here = p.equal(p.add(twice, e), lane.g)
                states = arith.addf(states, arith.select(here, inner[2 * h + e], zero))
            sums = total[h]
            for lanes in (1, 2):
                states = arith.addf(states, p.shuffle_xor(states, lanes))
                sums = arith.addf(sums, p.shuffle_xor(sums, lanes))
            running = p.fma(decay[h], states, sums)
            for m in reversed(range(8)):
                x = flux[h][m]
                mine = arith.addf(x[0], x[1])
                near = p.shuffle_xor(mine, 1)
                two = arith.addf(mine, near)
                far = p.shuffle_xor(two, 2)
                later = arith.addf(arith.select(odd, zero, near), arith.select(upper, zero, far))
                high = arith.addf(arith.addf(running, later), x[1])
                dg = [arith.addf(high, x[0]), high]
                running = arith.addf(running, arith.addf(two, far))
                for e in range(2):
                    dead = p.bit(gone, 16 * h + 2 * m + e)
                    p.store_shared(
                        gates[h][e], [arith.select(dead, zero, dg[e])], 2 * TILE + 1024 * m
                    )
                out_q[h][m], out_k[h][m] = p.pack(*dq[h][m]), p.pack(*dk[h][m])
        for b in range(4):
            for out, at in ((out_q, 0), (out_k, TILE)):
                four = [out[0][2 * b], out[1][2 * b], out[0][2 * b + 1], out[1][2 * b + 1]]
                p.store_matrices_transposed(columns, four, at=at + 2048 * b)

    return call
