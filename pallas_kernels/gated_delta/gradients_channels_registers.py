"""Register work of ``gated_delta.gradients_channels``: 64 key channels of a chunk, by one
warpgroup.

``gla.gradients_registers`` with two readings of the keys: everything is kept transposed, channels
as rows, so a warp owns 16 channels and all 64 tokens, and levels 1, 8, 16 and 32 of the tree join
registers of one thread ([h][m][e]: channel 16w + 8h + g, token 8m + 2c + e).  Gating multiplies in
float32 and rounds once.
"""

from __future__ import annotations

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.ptx import LOG2E
from pallas_kernels.recurrence.channels import TILE, ChannelLane, b_tiles, zero_acc

LEVELS = (1, 2, 4, 8, 16, 32)
Q, K, GATES, TILES = 0, 1, 2, 4  # tiles of the tokens
ASKED, SEEN, KEYS = range(3)  # tiles of what came through the states
N_STATE = 5 * 32 + 1


def _each(value):
    """[h][m][e] of value(h, m, e)."""
    return [[[value(h, m, e) for e in range(2)] for m in range(8)] for h in range(2)]


def _flat(x):
    return [x[h][m][e] for h in range(2) for m in range(8) for e in range(2)]


def _nested(flat):
    it = iter(flat)
    return _each(lambda *_: next(it))


def _load_block(columns, tile: int, b: int):
    """bf16 token pairs of 16 tokens, [h][half]."""
    r = p.load_matrices(columns, at=TILE * tile + 2048 * b, transposed=True)
    return [[r[0], r[2]], [r[1], r[3]]]


def _floats(word):
    return [p.widen(word), p.widen_high(word)]


def _gated(word, factors):
    return p.pack(*[arith.mulf(x, f) for x, f in zip(_floats(word), factors, strict=True)])


class _Decays:
    """p, to every token from its block's start, and t, from behind it to the block's end, of blocks
    that double; ``whole``: of the tile's part of a block."""

    def __init__(self, lane, a):
        self.lane, self.p, self.t = lane, a, _each(lambda *_: p.cf(1.0))
        self.whole = [[None] * 8, [None] * 8]

    def raise_level(self, level: int, bit) -> None:
        one = p.cf(1.0)
        old = [list(x) for x in self.whole]
        for h in range(2):
            for m in range(8):
                if level == 1:
                    first, second = self.p[h][m]
                    both = arith.mulf(first, second)
                    self.p[h][m], self.t[h][m] = [first, both], [second, one]
                    self.whole[h][m] = both
                    continue
                if bit is not None:
                    other = p.shuffle_xor(old[h][m], level // 2)
                    before, after = arith.select(bit, other, one), arith.select(bit, one, other)
                    self.p[h][m] = [arith.mulf(x, before) for x in self.p[h][m]]
                    self.t[h][m] = [arith.mulf(x, after) for x in self.t[h][m]]
                else:
                    other = old[h][m ^ (level // 8)]
                    side = self.p if m & (level // 8) else self.t
                    side[h][m] = [arith.mulf(x, other) for x in side[h][m]]
                self.whole[h][m] = arith.mulf(old[h][m], other)


def levels(words, pairs):
    """The tree's part of dq and dk, what it is to log_decay, and the decays from the chunk's start
    and to its end: ``N_STATE`` registers.

    words: address of the tiles q, k, log_decay (two).  pairs: of the four tiles of dP and dN, as
    ``gradients_channels_products`` leaves them.
    """
    lane, zero = ChannelLane(), p.cf(0.0)
    columns, gates = lane.column_matrices(words), lane.gate_words(words)
    matrices = lane.row_matrices(pairs)

    def decay(h, m, e):
        (x,) = p.load_shared(gates[h][e], 1, GATES * TILE + 1024 * m, "f32")
        return p.exp2(arith.mulf(x, p.cf(LOG2E)))

    a = _each(decay)
    gone = p.ci(0)
    for i, x in enumerate(_flat(a)):
        dead = arith.cmpf(arith.CmpFPredicate.OEQ, x, zero)
        gone = arith.ori(gone, arith.select(dead, p.ci(1 << i), p.ci(0)))
    decays = _Decays(lane, a)
    flux, d_q, d_k = (_each(lambda *_: zero) for _ in range(3))
    for level in LEVELS:
        bit = p.bit(lane.c, 0 if level == 2 else 1) if level in (2, 4) else None
        _add_level(lane, level, bit, columns, matrices, decays, flux, d_q, d_k)
        decays.raise_level(level, bit)
    parts = (d_q, d_k, flux, decays.p, decays.t)
    return [*(x for part in parts for x in _flat(part)), p.from_bits(gone)]


def finish(words, states, gates_out, diagonal, through, state) -> None:
    """dq, dk and dlog_decay: to the tiles ``ASKED`` and ``SEEN``, and to two tiles of their own.

    states: address of the tiles ``ASKED``, ``SEEN``, ``KEYS``.  diagonal: of dP's diagonal, 64
    floats.  through: of exp(G_64) <S, E>, 64 floats.  state: what ``levels`` gave.
    """
    lane = ChannelLane()
    columns, moved = lane.column_matrices(words), lane.column_matrices(states)
    d_q, d_k, flux, up, down = (_nested(state[32 * n : 32 * n + 32]) for n in range(5))
    sums = _add_rest(lane, columns, moved, diagonal, up, down, flux, d_q, d_k)
    gates = lane.gate_words(gates_out)
    _finish(lane, moved, gates, through, p.bits(state[-1]), sums, flux, d_q, d_k)


def _add_level(lane, level, bit, columns, matrices, decays, flux, d_q, d_k) -> None:
    """Z = (dP + dP^T) y and (dN + dN^T) y' on a level's pairs, y = q p on rows of its second halves
    and y' = k p, and on those of the first both k t.  What y Z are to log_decay enters at a pair's
    second row and leaves at its first, from the same y."""
    ys = [[[None] * 8, [None] * 8] for _ in range(2)]
    factor = [[None] * 8, [None] * 8]

    def build(b):
        asks = [level < 8 or bool(m & (level // 8)) for m in (2 * b, 2 * b + 1)]
        q = _load_block(columns, Q, b) if any(asks) else None
        k = _load_block(columns, K, b)
        for half in range(2):
            m = 2 * b + half
            for h in range(2):
                up, down, key = decays.p[h][m], decays.t[h][m], k[h][half]
                if level == 1:
                    factor[h][m] = f = [p.cf(1.0), up[1]]
                elif bit is not None:
                    factor[h][m] = f = [
                        arith.select(bit, x, y) for x, y in zip(up, down, strict=True)
                    ]
                else:
                    factor[h][m] = f = up if asks[half] else down
                ys[1][h][m] = _gated(key, f)
                if not asks[half]:
                    ys[0][h][m] = ys[1][h][m]
                elif level == 1:  # a pair of tokens: k, q
                    mixed = arith.ori(p.masked(key, 0xFFFF), p.masked(q[h][half], -65536))
                    ys[0][h][m] = _gated(mixed, f)
                elif bit is not None:
                    ys[0][h][m] = _gated(arith.select(bit, q[h][half], key), f)
                else:
                    ys[0][h][m] = _gated(q[h][half], f)

    def products(n, b):
        """Z of tokens 16b..16b+15: [h][half][e]."""
        if level < 16:
            steps = [(b, level.bit_length() - 1, 1)]
        else:
            blocks = [b ^ 1] if level == 16 else [2 * (1 - b // 2), 2 * (1 - b // 2) + 1]
            steps = [(kb, kb, 0) for kb in blocks]
        acc = [zero_acc(), zero_acc()]
        for kb, column, tile in steps:
            y = [ys[n][h][2 * kb + half] for half in range(2) for h in range(2)]
            right = b_tiles(p.load_matrices(matrices[column], at=TILE * (2 * n + tile) + 2048 * b))
            acc = [p.mma(x, y, part) for x, part in zip(acc, right, strict=True)]
        return [[acc[half][2 * h : 2 * h + 2] for half in range(2)] for h in range(2)]

    def add(x, h, m, e, value):
        x[h][m][e] = arith.addf(x[h][m][e], value)

    def apply(b):
        z = [products(n, b) for n in range(2)]
        for half in range(2):
            m = 2 * b + half
            for h in range(2):
                y = [_floats(ys[n][h][m]) for n in range(2)]
                for e in range(2):
                    f = factor[h][m][e]
                    asked, seen = (z[n][h][half][e] for n in range(2))
                    at = h, m, e
                    if bit is not None:
                        both = arith.addf(asked, seen)
                        add(d_q, *at, arith.select(bit, arith.mulf(f, asked), p.cf(0.0)))
                        add(d_k, *at, arith.mulf(f, arith.select(bit, seen, both)))
                        signed = arith.select(bit, asked, arith.negf(both))
                        flux[h][m][e] = p.fma(y[0][e], signed, flux[h][m][e])
                        signed = arith.select(bit, seen, p.cf(0.0))
                        flux[h][m][e] = p.fma(y[1][e], signed, flux[h][m][e])
                    elif e if level == 1 else m & (level // 8):
                        d_q[h][m][e] = p.fma(f, asked, d_q[h][m][e])
                        d_k[h][m][e] = p.fma(f, seen, d_k[h][m][e])
                        flux[h][m][e] = p.fma(y[0][e], asked, flux[h][m][e])
                        flux[h][m][e] = p.fma(y[1][e], seen, flux[h][m][e])
                    else:
                        both = arith.addf(asked, seen)
                        d_k[h][m][e] = p.fma(f, both, d_k[h][m][e])
                        flux[h][m][e] = p.fma(arith.negf(y[0][e]), both, flux[h][m][e])

    for b in range(4):
        build(b)
        if level <= 8:
            apply(b)
    if level > 8:
        for b in range(4):
            apply(b)


def _add_rest(lane, columns, moved, diagonal, from_start, to_end, flux, d_q, d_k):
    """What came through the states, and the diagonal; gives the sums over the thread's tokens of
    k e, decayed to the chunk's end, by h."""
    sums = [p.cf(0.0)] * 2
    start = p.add(diagonal, p.shift_left(lane.c, 3))
    for b in range(4):
        q, k = (_load_block(columns, tile, b) for tile in (Q, K))
        parts = [_load_block(moved, tile, b) for tile in (ASKED, SEEN, KEYS)]
        for half in range(2):
            m = 2 * b + half
            weight = p.load_shared(start, 2, 32 * m, "f32")
            for h in range(2):
                qs, ks = _floats(q[h][half]), _floats(k[h][half])
                asked, seen, keys = (_floats(x[h][half]) for x in parts)
                for e in range(2):
                    up, down = from_start[h][m][e], to_end[h][m][e]
                    asked_e, seen_e = arith.mulf(up, asked[e]), arith.mulf(up, seen[e])
                    keys_e = arith.mulf(down, keys[e])
                    x = arith.addf(d_q[h][m][e], asked_e)
                    d_q[h][m][e] = p.fma(weight[e], ks[e], x)
                    x = arith.addf(d_k[h][m][e], arith.addf(seen_e, keys_e))
                    d_k[h][m][e] = p.fma(weight[e], qs[e], x)
                    x = p.fma(qs[e], asked_e, flux[h][m][e])
                    flux[h][m][e] = p.fma(ks[e], arith.subf(seen_e, keys_e), x)
                    sums[h] = p.fma(ks[e], keys_e, sums[h])
    return sums


def _finish(lane, columns, gates, through, gone, sums, flux, d_q, d_k) -> None:
    """dlog_decay, the fluxes summed from the chunk's end, and the results to their places."""
    odd, upper, zero = p.bit(lane.c, 0), p.bit(lane.c, 1), p.cf(0.0)
    out = [[[None] * 8, [None] * 8] for _ in range(2)]
    channel = p.add(p.shift_left(lane.warp, 4), lane.g)
    for h in range(2):
        total = sums[h]
        for lanes in (1, 2):
            total = arith.addf(total, p.shuffle_xor(total, lanes))
        state = p.load_float(p.add(through, p.shift_left(channel, 2)), 32 * h)
        running = arith.addf(total, state)
        for m in reversed(range(8)):
            x = flux[h][m]
            mine = arith.addf(*x)
            near = p.shuffle_xor(mine, 1)
            two = arith.addf(mine, near)
            far = p.shuffle_xor(two, 2)
            later = arith.addf(arith.select(odd, zero, near), arith.select(upper, zero, far))
            second = arith.addf(arith.addf(running, later), x[1])
            running = arith.addf(running, arith.addf(two, far))
            for e, value in enumerate((arith.addf(second, x[0]), second)):
                dead = p.bit(gone, 16 * h + 2 * m + e)
                value = arith.select(dead, zero, value)
                p.store_shared(gates[h][e], [value], 1024 * m)
            out[0][h][m], out[1][h][m] = p.pack(*d_q[h][m]), p.pack(*d_k[h][m])
    for b in range(4):
        for tile, x in zip((ASKED, SEEN), out, strict=True):
            four = [x[h][2 * b + half] for half in range(2) for h in range(2)]
            p.store_matrices_transposed(columns, four, at=TILE * tile + 2048 * b)
