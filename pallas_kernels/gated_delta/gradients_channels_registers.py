"""Register work of ``gated_delta.gradients_channels``: 64 key channels of a chunk, by one
warpgroup.

``gla.gradients_levels`` with two readings of the keys, by the registers of ``recurrence.slices``.
Gating multiplies in float32 and rounds once.
"""

from __future__ import annotations

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.ptx import LOG2E
from pallas_kernels.recurrence.channels import TILE, ChannelLane, b_tiles, zero_acc
from pallas_kernels.recurrence.slices import LEVELS, each, flat, load_block, nested

Q, K, GATES, TILES = 0, 1, 2, 4  # tiles of the tokens
ASKED, SEEN, KEYS = range(3)  # tiles of what came through the states
N_STATE = 5 * 32 + 1


def _floats(word):
    return [p.widen(word), p.widen_high(word)]


def _gated(word, factors):
    return p.pack(*[x * f for x, f in zip(_floats(word), factors, strict=True)])


class _Levels:
    """The six levels of a slice, in a warp's registers ([h][m][e], ``recurrence.slices``).

    up: p, the decay to every token from its block's start.  down: t, from behind it to the block's
    end.  Blocks double from level to level; whole: of the tile's part of a block.
    """

    def __init__(self, words, pairs):
        self.lane, self.zero = ChannelLane(), p.cf(0.0)
        self.columns, self.gates = self.lane.column_matrices(words), self.lane.gate_words(words)
        self.matrices = self.lane.row_matrices(pairs)
        self.up = each(self.decay)
        self.gone = p.ci(0)  # which decays are 0
        for i, x in enumerate(flat(self.up)):
            dead = arith.cmpf(arith.CmpFPredicate.OEQ, x, self.zero)
            self.gone = self.gone | arith.select(dead, p.ci(1 << i), p.ci(0))
        self.down = each(lambda *_: p.cf(1.0))
        self.whole = [[None] * 8, [None] * 8]
        self.flux, self.d_q, self.d_k = (each(lambda *_: self.zero) for _ in range(3))

    def decay(self, h: int, m: int, e: int):
        (x,) = p.load_shared(self.gates[h][e], 1, GATES * TILE + 1024 * m, "f32")
        return p.exp2(x * LOG2E)

    def run(self) -> None:
        for level in LEVELS:
            self.level, self.bit = level, None
            if level in (2, 4):  # whether the lane's tokens are rows of a second half
                self.bit = p.bit(self.lane.c, 0 if level == 2 else 1)
            self.add_level()
            self.climb()

    def state(self) -> list:
        """``N_STATE`` registers."""
        parts = self.d_q, self.d_k, self.flux, self.up, self.down
        return [*(x for part in parts for x in flat(part)), p.from_bits(self.gone)]

    def is_second(self, m: int) -> bool:
        """Whether tokens 8m .. 8m + 7 are in a second half, of a level from 8 on."""
        return bool(m & (self.level // 8))

    # --- Z = (dP + dP^T) y and (dN + dN^T) y' on a level's pairs ---

    def add_level(self) -> None:
        """y = q p and y' = k p on rows of second halves, both k t on rows of first halves.

        The share of y Z in log_decay enters at a pair's second row and leaves at its first, from
        the same y.
        """
        self.ys = [[[None] * 8, [None] * 8] for _ in range(2)]
        self.factor = [[None] * 8, [None] * 8]
        for b in range(4):
            self.build(b)
            if self.level <= 8:
                self.apply(b)
        if self.level > 8:
            for b in range(4):
                self.apply(b)

    def build(self, b: int) -> None:
        """y, y' and factors of tokens 16b .. 16b + 15."""
        asks = [self.level < 8 or self.is_second(m) for m in (2 * b, 2 * b + 1)]
        q = load_block(self.columns, TILE * Q, b) if any(asks) else None
        k = load_block(self.columns, TILE * K, b)
        for half in range(2):
            for h in range(2):
                query = q[h][half] if asks[half] else None
                self.build_pair(h, 2 * b + half, query, k[h][half])

    def build_pair(self, h: int, m: int, query, key) -> None:
        """Two tokens of a channel; query: None on rows of a first half."""
        up, down, bit = self.up[h][m], self.down[h][m], self.bit
        if self.level == 1:
            f = [p.cf(1.0), up[1]]
        elif bit is not None:
            f = [arith.select(bit, x, y) for x, y in zip(up, down, strict=True)]
        else:
            f = down if query is None else up
        self.factor[h][m] = f
        self.ys[1][h][m] = _gated(key, f)
        if query is None:
            self.ys[0][h][m] = self.ys[1][h][m]
        elif self.level == 1:  # a pair of tokens: k, q
            mixed = (key & 0xFFFF) | (query & -65536)
            self.ys[0][h][m] = _gated(mixed, f)
        elif bit is not None:
            self.ys[0][h][m] = _gated(arith.select(bit, query, key), f)
        else:
            self.ys[0][h][m] = _gated(query, f)

    def products(self, n: int, b: int):
        """Z of tokens 16b .. 16b + 15, from y (n = 0) or y' (1): [h][half][e]."""
        level, ys = self.level, self.ys[n]
        if level < 16:
            steps = [(b, level.bit_length() - 1, 1)]
        else:
            blocks = [b ^ 1] if level == 16 else [2 * (1 - b // 2), 2 * (1 - b // 2) + 1]
            steps = [(kb, kb, 0) for kb in blocks]
        acc = [zero_acc(), zero_acc()]
        for kb, column, tile in steps:
            y = [ys[h][2 * kb + half] for half in range(2) for h in range(2)]
            at = TILE * (2 * n + tile) + 2048 * b
            right = b_tiles(p.load_matrices(self.matrices[column], at=at))
            acc = [p.mma(x, y, part) for x, part in zip(acc, right, strict=True)]
        return [[acc[half][2 * h : 2 * h + 2] for half in range(2)] for h in range(2)]

    def apply(self, b: int) -> None:
        z = [self.products(n, b) for n in range(2)]
        for half in range(2):
            for h in range(2):
                self.apply_pair(h, 2 * b + half, *(z[n][h][half] for n in range(2)))

    def apply_pair(self, h: int, m: int, asked, seen) -> None:
        y = [_floats(self.ys[n][h][m]) for n in range(2)]
        for e in range(2):
            values = self.factor[h][m][e], asked[e], seen[e], y[0][e], y[1][e]
            if self.bit is not None:
                self.add_either(h, m, e, *values)
            elif e if self.level == 1 else self.is_second(m):
                self.add_second(h, m, e, *values)
            else:
                self.add_first(h, m, e, *values)

    def add_either(self, h: int, m: int, e: int, f, asked, seen, y_q, y_k) -> None:
        """Add the terms of a query or a key row; the lane's bit selects the half."""
        d_q, d_k, flux, bit = self.d_q[h][m], self.d_k[h][m], self.flux[h][m], self.bit
        both = asked + seen
        d_q[e] = d_q[e] + arith.select(bit, f * asked, p.cf(0.0))
        d_k[e] = d_k[e] + f * arith.select(bit, seen, both)
        signed = arith.select(bit, asked, -both)
        flux[e] = p.fma(y_q, signed, flux[e])
        signed = arith.select(bit, seen, p.cf(0.0))
        flux[e] = p.fma(y_k, signed, flux[e])

    def add_second(self, h: int, m: int, e: int, f, asked, seen, y_q, y_k) -> None:
        d_q, d_k, flux = self.d_q[h][m], self.d_k[h][m], self.flux[h][m]
        d_q[e] = p.fma(f, asked, d_q[e])
        d_k[e] = p.fma(f, seen, d_k[e])
        flux[e] = p.fma(y_q, asked, flux[e])
        flux[e] = p.fma(y_k, seen, flux[e])

    def add_first(self, h: int, m: int, e: int, f, asked, seen, y, _) -> None:
        d_k, flux = self.d_k[h][m], self.flux[h][m]
        both = asked + seen
        d_k[e] = p.fma(f, both, d_k[e])
        flux[e] = p.fma(-y, both, flux[e])

    # --- p, t and the block products of twice the block ---

    def climb(self) -> None:
        one = p.cf(1.0)
        old = [list(x) for x in self.whole]
        for h in range(2):
            for m in range(8):
                self.climb_pair(h, m, old[h], one)

    def climb_pair(self, h: int, m: int, old, one) -> None:
        up, down, whole = self.up[h], self.down[h], self.whole[h]
        if self.level == 1:
            first, second = up[m]
            both = first * second
            up[m], down[m], whole[m] = [first, both], [second, one], both
            return
        if self.bit is not None:
            other = p.shuffle_xor(old[m], self.level // 2)
            before = arith.select(self.bit, other, one)
            after = arith.select(self.bit, one, other)
            up[m] = [x * before for x in up[m]]
            down[m] = [x * after for x in down[m]]
        else:
            other = old[m ^ (self.level // 8)]
            side = up if self.is_second(m) else down
            side[m] = [x * other for x in side[m]]
        whole[m] = old[m] * other


def levels(words, pairs) -> list:
    """Return ``N_STATE`` registers: the tree's part of dq and dk, its share in log_decay, and the
    decays from the chunk's start and to its end.

    words: address of the tiles q, k, log_decay (two).  pairs: of the four tiles of dP and dN, as
    ``gradients_channels_products`` leaves them.
    """
    found = _Levels(words, pairs)
    found.run()
    return found.state()


def finish(words, states, gates_out, diagonal, through, state) -> None:
    """Write dq and dk to the tiles ``ASKED`` and ``SEEN``, and dlog_decay to two other tiles.

    states: address of the tiles ``ASKED``, ``SEEN``, ``KEYS``.  diagonal: address of dP's diagonal,
    64 floats.  through: address of exp(G_64) <S, E>, 64 floats.  state: the result of ``levels``.
    """
    lane = ChannelLane()
    columns, moved = lane.column_matrices(words), lane.column_matrices(states)
    d_q, d_k, flux, up, down = (nested(state[32 * n : 32 * n + 32]) for n in range(5))
    sums = _add_rest(lane, columns, moved, diagonal, up, down, flux, d_q, d_k)
    gates = lane.gate_words(gates_out)
    _finish(lane, moved, gates, through, p.bits(state[-1]), sums, flux, d_q, d_k)


def _add_rest(lane, columns, moved, diagonal, from_start, to_end, flux, d_q, d_k):
    """Add the terms through the states, and the diagonal.

    Returns the sums over the thread's tokens of k e, decayed to the chunk's end, by h.
    """
    sums = [p.cf(0.0)] * 2
    start = diagonal + (lane.c << 3)
    for b in range(4):
        q, k = (load_block(columns, TILE * tile, b) for tile in (Q, K))
        parts = [load_block(moved, TILE * tile, b) for tile in (ASKED, SEEN, KEYS)]
        for half in range(2):
            m = 2 * b + half
            weight = p.load_shared(start, 2, 32 * m, "f32")
            for h in range(2):
                qs, ks = _floats(q[h][half]), _floats(k[h][half])
                asked, seen, keys = (_floats(x[h][half]) for x in parts)
                for e in range(2):
                    up, down = from_start[h][m][e], to_end[h][m][e]
                    asked_e, seen_e = up * asked[e], up * seen[e]
                    keys_e = down * keys[e]
                    x = d_q[h][m][e] + asked_e
                    d_q[h][m][e] = p.fma(weight[e], ks[e], x)
                    x = d_k[h][m][e] + (seen_e + keys_e)
                    d_k[h][m][e] = p.fma(weight[e], qs[e], x)
                    x = p.fma(qs[e], asked_e, flux[h][m][e])
                    flux[h][m][e] = p.fma(ks[e], seen_e - keys_e, x)
                    sums[h] = p.fma(ks[e], keys_e, sums[h])
    return sums


def _finish(lane, columns, gates, through, gone, sums, flux, d_q, d_k) -> None:
    """dlog_decay, the fluxes summed from the chunk's end, and the results to their places."""
    odd, upper, zero = p.bit(lane.c, 0), p.bit(lane.c, 1), p.cf(0.0)
    out = [[[None] * 8, [None] * 8] for _ in range(2)]
    channel = (lane.warp << 4) + lane.g
    for h in range(2):
        total = sums[h]
        for lanes in (1, 2):
            total = total + p.shuffle_xor(total, lanes)
        state = p.load_float(through + (channel << 2), 32 * h)
        running = total + state
        for m in reversed(range(8)):
            x = flux[h][m]
            mine = arith.addf(*x)
            near = p.shuffle_xor(mine, 1)
            two = mine + near
            far = p.shuffle_xor(two, 2)
            later = arith.select(odd, zero, near) + arith.select(upper, zero, far)
            second = running + later + x[1]
            running = running + (two + far)
            for e, value in enumerate((second + x[0], second)):
                dead = p.bit(gone, 16 * h + 2 * m + e)
                value = arith.select(dead, zero, value)
                p.store_shared(gates[h][e], [value], 1024 * m)
            out[0][h][m], out[1][h][m] = p.pack(*d_q[h][m]), p.pack(*d_k[h][m])
    for b in range(4):
        for tile, x in zip((ASKED, SEEN), out, strict=True):
            four = [x[h][2 * b + half] for half in range(2) for h in range(2)]
            p.store_matrices_transposed(columns, four, at=TILE * tile + 2048 * b)
