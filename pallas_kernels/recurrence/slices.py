"""Registers of a slice of 64 key channels and a chunk's 64 tokens, transposed: channels as rows.

A warp w owns 16 channels and all tokens.  ``x[h][m][e]`` of a thread (g, c) is channel
16w + 8h + g and token 8m + 2c + e.  So levels 1, 8, 16 and 32 of the binary tree over tokens join
registers of one thread.

``Levels`` climbs the tree for the gradients inside a chunk: ``gla.gradients`` has the algorithm.

Copies: none; the caller has copied the tiles.
Waits: none; the caller has waited.  A warp reads its own channels in shared memory, and the pairs'
tiles, which all warps read.
Writes: ``store_gradients`` writes the warp's channels of dq, dk and dlog_decay in shared memory.
"""

from __future__ import annotations

from pallas_kernels import ptx as p
from pallas_kernels.recurrence.channels import TILE, ChannelLane, b_tiles, zero_acc

LEVELS = (1, 2, 4, 8, 16, 32)
Q, K, GATES = 0, TILE, 2 * TILE  # where the tiles of a slice begin; two of gates


def each(value):
    """[h][m][e] of value(h, m, e)."""
    return [[[value(h, m, e) for e in range(2)] for m in range(8)] for h in range(2)]


def flat(x):
    return [x[h][m][e] for h in range(2) for m in range(8) for e in range(2)]


def nested(values):
    """[h][m][e] of ``flat``'s values."""
    rest = iter(values)
    return each(lambda h, m, e: next(rest))


def load_block(columns, at: int, b: int):
    """bfloat16 token pairs of tokens 16b .. 16b + 15, [h][half], from the tile at byte ``at``."""
    r = p.load_matrices(columns, at=at + 2048 * b, transposed=True)
    return [[r[0], r[2]], [r[1], r[3]]]


def gate_at(gates, h, m, e):
    """A gate, or the flux that took its place, out of its tile."""
    return p.load_shared(gates[h][e], 1, GATES + 1024 * m, "f32")[0]


class Levels:
    """The six levels of a slice, in a warp's registers; everything is emitted while it is traced.

    up: p, the decay to every token from its block's start.  down: t, from behind it to the block's
    end.  Blocks double from level to level.  whole: [h][m], the product of all decays of the block
    that the thread's tokens of tile m are in; None before level 1.  bit: on levels 2 and 4, whether
    the lane's tokens are rows of a second half.  gone: which decays are 0.

    An op's levels supply ``build(b)``, the rows y and their ``factor``, and ``apply(b)``, what
    their products add to ``d_q``, ``d_k`` and ``flux``, of tokens 16b .. 16b + 15.
    """

    def __init__(self, lane: ChannelLane, words, pairs):
        self.lane, self.zero, self.one = lane, p.cf(0.0), p.cf(1.0)
        self.columns, self.gates = self.lane.column_matrices(words), self.lane.gate_words(words)
        self.matrices = self.lane.row_matrices(pairs)
        self.up = each(lambda *at: p.exp2(gate_at(self.gates, *at) * p.LOG2E))
        self.gone = p.ci(0)
        for i, x in enumerate(flat(self.up)):
            is_zero = p.equal(x, self.zero)
            self.gone = self.gone | p.where(is_zero, p.ci(1 << i), 0)
        self.down = each(lambda *_: self.one)
        self.whole = [[None] * 8, [None] * 8]
        self.flux, self.d_q, self.d_k = (each(lambda *_: self.zero) for _ in range(3))

    def run(self) -> None:
        for level in LEVELS:
            self.level, self.bit = level, None
            self.factor = [[None] * 8, [None] * 8]
            if level in (2, 4):
                self.bit = p.bit(self.lane.c, 0 if level == 2 else 1)
            for b in range(4):
                self.build(b)
                if level <= 8:
                    self.apply(b)
            if level > 8:
                for b in range(4):
                    self.apply(b)
            self.climb()

    def build(self, b: int) -> None:
        raise NotImplementedError

    def apply(self, b: int) -> None:
        raise NotImplementedError

    def is_second(self, m: int) -> bool:
        """Whether tokens 8m .. 8m + 7 are in a second half, of a level from 8 on."""
        return bool(m & (self.level // 8))

    def products(self, y, b: int, at: int = 0):
        """Z of tokens 16b .. 16b + 15 from y, by the two tiles of pairs at byte ``at``:
        [h][half][e]."""
        level = self.level
        if level < 16:
            steps = [(b, level.bit_length() - 1, TILE)]
        else:
            blocks = [b ^ 1] if level == 16 else [2 * (1 - b // 2), 2 * (1 - b // 2) + 1]
            steps = [(kb, kb, 0) for kb in blocks]
        acc = [zero_acc(), zero_acc()]
        for kb, column, tile in steps:
            left = [y[h][2 * kb + half] for half in range(2) for h in range(2)]
            place = at + tile + 2048 * b
            right = b_tiles(p.load_matrices(self.matrices[column], at=place))
            acc = [p.mma(x, left, part) for x, part in zip(acc, right, strict=True)]
        return [[acc[half][2 * h : 2 * h + 2] for half in range(2)] for h in range(2)]

    def climb(self) -> None:
        """p, t and the block products of twice the block."""
        old = [list(x) for x in self.whole]
        for h in range(2):
            for m in range(8):
                self.climb_pair(h, m, old[h])

    def climb_pair(self, h: int, m: int, old) -> None:
        up, down, whole = self.up[h], self.down[h], self.whole[h]
        if self.level == 1:
            first, second = up[m]
            both = first * second
            up[m], down[m], whole[m] = [first, both], [second, self.one], both
            return
        if self.bit is not None:
            other = p.shuffle_xor(old[m], self.level // 2)
            before = p.where(self.bit, other, self.one)
            after = p.where(self.bit, self.one, other)
            up[m] = [x * before for x in up[m]]
            down[m] = [x * after for x in down[m]]
        else:
            other = old[m ^ (self.level // 8)]
            side = up if self.is_second(m) else down
            side[m] = [x * other for x in side[m]]
        whole[m] = old[m] * other


def store_gradients(lane, columns, gates, at: int, gone, start, flux, d_q, d_k) -> None:
    """dlog_decay, the fluxes summed from the chunk's end, and dq and dk, to their places.

    columns: of the tiles of dq and dk.  gates, at: of dlog_decay.  start: ``start(h)`` is the sum
    behind the chunk's last token.
    """
    odd, upper, zero = p.bit(lane.c, 0), p.bit(lane.c, 1), p.cf(0.0)
    out = [[[None] * 8, [None] * 8] for _ in range(2)]
    for h in range(2):
        running = start(h)
        for m in reversed(range(8)):
            x = flux[h][m]
            mine = x[0] + x[1]
            near = p.shuffle_xor(mine, 1)
            two = mine + near
            far = p.shuffle_xor(two, 2)
            later = p.where(odd, zero, near) + p.where(upper, zero, far)
            second = running + later + x[1]
            running = running + (two + far)
            for e, value in enumerate((second + x[0], second)):
                dead = p.bit(gone, 16 * h + 2 * m + e)
                p.store_shared(gates[h][e], [p.where(dead, zero, value)], at + 1024 * m)
            out[0][h][m], out[1][h][m] = p.pack(*d_q[h][m]), p.pack(*d_k[h][m])
    for b in range(4):
        for tile, x in zip((Q, K), out, strict=True):
            four = [x[h][2 * b + half] for half in range(2) for h in range(2)]
            p.store_matrices_transposed(columns, four, at=tile + 2048 * b)
