"""Register work of ``gated_delta.gradients_channels``: 64 key channels of a chunk, by one
warpgroup.

``gla.gradients_levels`` with two readings of the keys, by the registers of ``recurrence.slices``.
Gating multiplies in float32 and rounds once.

Copies: none; ``gradients_channels`` copies and waits.
Waits: none; a warp has its own channels, and all warps read dP and dN.
Writes: ``finish`` writes the warp's channels of dq, dk and dlog_decay in shared memory.
"""

from __future__ import annotations

from pallas_kernels import ptx as p
from pallas_kernels.recurrence.channels import TILE, ChannelLane
from pallas_kernels.recurrence.slices import K, Levels, Q, flat, load_block, nested, store_gradients
from pallas_kernels.rows.fused_parts import floats

TILES = 4  # of the tokens: q, k, two of gates
ASKED, SEEN, KEYS = range(3)  # tiles of what came through the states
N_STATE = 5 * 32 + 1


def _gated(word, factors):
    return p.pack(*[x * f for x, f in zip(floats([word]), factors, strict=True)])


class _Levels(Levels):
    """ys: y = q p and y' = k p on rows of second halves, both k t on rows of first halves.

    Z is (dP + dP^T) y and (dN + dN^T) y' on a level's pairs.  The share of y Z in log_decay enters
    at a pair's second row and leaves at its first, from the same y.
    """

    def run(self) -> None:
        self.ys = [[[None] * 8, [None] * 8] for _ in range(2)]
        super().run()

    def state(self) -> list:
        """``N_STATE`` registers."""
        parts = self.d_q, self.d_k, self.flux, self.up, self.down
        return [*(x for part in parts for x in flat(part)), p.from_bits(self.gone)]

    def build(self, b: int) -> None:
        """y, y' and factors of tokens 16b .. 16b + 15."""
        asks = [self.level < 8 or self.is_second(m) for m in (2 * b, 2 * b + 1)]
        q = load_block(self.columns, Q, b) if any(asks) else None
        k = load_block(self.columns, K, b)
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
            f = [p.where(bit, x, y) for x, y in zip(up, down, strict=True)]
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
            self.ys[0][h][m] = _gated(p.where(bit, query, key), f)
        else:
            self.ys[0][h][m] = _gated(query, f)

    def apply(self, b: int) -> None:
        z = [self.products(y, b, 2 * n * TILE) for n, y in enumerate(self.ys)]
        for half in range(2):
            for h in range(2):
                self.apply_pair(h, 2 * b + half, *(z[n][h][half] for n in range(2)))

    def apply_pair(self, h: int, m: int, asked, seen) -> None:
        y = [floats([self.ys[n][h][m]]) for n in range(2)]
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
        d_q[e] = d_q[e] + p.where(bit, f * asked, 0.0)
        d_k[e] = d_k[e] + f * p.where(bit, seen, both)
        signed = p.where(bit, asked, -both)
        flux[e] = p.fma(y_q, signed, flux[e])
        signed = p.where(bit, seen, 0.0)
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


def levels(words, pairs) -> list:
    """Return ``N_STATE`` registers: the tree's part of dq and dk, its share in log_decay, and the
    decays from the chunk's start and to its end.

    words: address of the tiles q, k, log_decay (two).  pairs: of the four tiles of dP and dN, as
    ``gradients_channels_products`` leaves them.
    """
    found = _Levels(ChannelLane(), words, pairs)
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
    channel = through + (((lane.warp << 4) + lane.g) << 2)

    def start(h):
        total = sums[h]
        for lanes in (1, 2):
            total = total + p.shuffle_xor(total, lanes)
        return total + p.load_float(channel, 32 * h)

    gates, gone = lane.gate_words(gates_out), p.bits(state[-1])
    store_gradients(lane, moved, gates, 0, gone, start, flux, d_q, d_k)


def _add_rest(lane, columns, moved, diagonal, from_start, to_end, flux, d_q, d_k):
    """Add the terms through the states, and the diagonal.

    Returns the sums over the thread's tokens of k e, decayed to the chunk's end, by h.
    """
    sums = [p.cf(0.0)] * 2
    start = diagonal + (lane.c << 3)
    for b in range(4):
        q, k = (load_block(columns, tile, b) for tile in (Q, K))
        parts = [load_block(moved, TILE * tile, b) for tile in (ASKED, SEEN, KEYS)]
        for half in range(2):
            m = 2 * b + half
            weight = p.load_shared(start, 2, 32 * m, "f32")
            for h in range(2):
                qs, ks = floats([q[h][half]]), floats([k[h][half]])
                asked, seen, keys = (floats([x[h][half]]) for x in parts)
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
