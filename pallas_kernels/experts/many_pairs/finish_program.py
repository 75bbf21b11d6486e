"""What is behind a sum of the kernel of many pairs: scale, bias, gate, and whole pieces of rows.

wgmma leaves a lane one result of a token's row, or two neighbours.  bfloat16 results go through
shared memory, so that a lane stores 16 bytes of a row: by ``RowStage`` where tokens are wgmma's N,
by ``TokenStage`` where they are its M.  float32 results stay in registers.  Where tokens are M, two
lanes exchange them until each has 16 bytes (``exchanged_four``).  Where tokens are N, a lane stores
4 bytes at a time (``store_one``).

Copies: lanes load the pairs' places; matrix stores bring bfloat16 results to shared memory.
Waits: ``RowStage`` at a warpgroup barrier before the first turn, and at one in each turn behind its
writes.  Turns alternate between two halves of the memory, so all threads have read a half before it
is written again.  ``TokenStage`` at two warp barriers for eight tokens: before it writes the memory
and behind that.  float32 results at none.
Writes: a lane stores 16 bytes of a pair's row, or 4 with ``store_one``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pallas_kernels import ptx as p
from pallas_kernels.experts.gate import Gate
from pallas_kernels.experts.many_pairs.plan import row_stage
from pallas_kernels.ptx import Value
from pallas_kernels.rows.fused_parts import quickly_gated, two_gated

Vectors = Sequence[Value] | None


@dataclasses.dataclass(frozen=True)
class PairsFinish:
    """The steps behind a sum: the row's scale, the bias and the gate.

    scaled: whether rows have a scale.  gate: None leaves sums as they are.
    rest: a constant factor of all sums.  bytes: of a result, 4 or 2 (bfloat16).
    """

    scaled: bool
    gate: Gate | None
    rest: float
    bytes: int

    def of_one(self, sums: Sequence[Value], scales: Vectors, biases: Vectors) -> list[Value]:
        """The results of a token's sums; with a gate those of gate and up."""
        values = self.values(sums, scales, biases)
        return values if self.gate is None else [quickly_gated(self.gate, *values)]

    def of_two(
        self, sums: Sequence[Sequence[Value]], scales: Vectors, biases: Sequence[Vectors]
    ) -> list[list[Value]]:
        """The results of two neighbours of one token: under a gate they share a reciprocal, so that
        the last bit of each depends on the other."""
        values = [self.values(own, scales, added) for own, added in zip(sums, biases, strict=True)]
        if self.gate is None:
            return values
        return [[y] for y in two_gated(self.gate, *zip(*values, strict=True))]

    def values(self, sums: Sequence[Value], scales: Vectors, biases: Vectors) -> list[Value]:
        """The sums by the rows' scales and biases."""
        values = list(sums)
        if scales is not None:
            values = [v * s for v, s in zip(values, scales, strict=True)]
        if self.rest != 1.0:
            values = [v * self.rest for v in values]
        if biases is not None:
            values = [v + b for v, b in zip(values, biases, strict=True)]
        return values


def store_one(at: Value, value: Value, condition: Value) -> None:
    """Store a float32 where the condition holds."""
    code = "{ .reg .pred q; setp.ne.u32 q, $2, 0; @q st.global.f32 [$0], $1; }"
    p.ptx(code, at, value, p.unsigned(condition))


def exchanged_four(
    results: Callable, h: int, to: Value, n0: Value, is_own: Value, eights: int, n_out: int
) -> None:
    """Store a lane's float32 results of its h-th token, which two lanes exchange before.

    results: (range of two eights, h) -> the lane's two results of each.  to: the token's row.
    """
    quad = p.register("tid.x") & 3
    odd = p.bit(quad, 0)
    column = n0 + (quad & 1) * 8 + (quad & 2) * 2
    to = p.offset(to, column, 4)
    for c in range(0, eights, 2):
        a, b = results(range(c, c + 2), h)
        got = [p.shuffle_xor(p.where(odd, *one), 1) for one in zip(a, b, strict=True)]
        words = [p.where(odd, *one) for one in zip(got, a, strict=True)]
        words += [p.where(odd, *one) for one in zip(b, got, strict=True)]
        is_inside = column + 8 * c < n_out
        p.store_four(to, words, is_own & is_inside, 8 * c * 4)


@dataclasses.dataclass(frozen=True)
class RowStage:
    """Results of a warpgroup's 64 rows of w, 32 under a gate, on their way to tokens' rows.

    A warp has eight neighbouring results, or twice eight, of each token.  A turn has four matrices
    of eight results and eight tokens a warp, which are transposed on the way to shared memory, and
    each thread stores 16 bytes from there: 64 or 128 of a token's row.

    stage: a warpgroup's memory.  pairs: of the tokens.  to: the results.
    n0: the warpgroup's first result.  n_out: results of a row.
    """

    gated: bool
    stage: Value
    pairs: Value
    to: Value
    n0: Value
    n_out: int

    def store(self, values: Callable, first: Value, end: Value, eights: int) -> None:
        """Store a tile's results.  values: i -> the thread's results of tokens
        8 i + 2 (lane % 4) + (0, 1).  first, end: the tokens.  eights: of the tile's tokens."""
        tokens, pitch = row_stage(self.gated)
        sets, pieces = 2 - self.gated, (pitch - 16) // 16
        thread = p.register("tid.x") & 127
        lane, warp = thread & 31, thread >> 5
        matrix, row = lane >> 3, lane & 7
        eight, half = matrix, p.ci(0)
        if sets == 2:
            eight, half = matrix >> 1, matrix & 1
        row = (row + eight * 8) * pitch
        write = self.stage + row + warp * (16 * sets) + half * 16
        shift = pieces.bit_length() - 1
        own, piece = thread >> shift, thread & (pieces - 1)
        read = self.stage + own * pitch + piece * 16
        column = self.n0 + piece * 8
        last, is_inside = end - 1, column < self.n_out
        to = p.offset(self.to, column, 2)
        turns = range(0, eights, tokens // 8)
        own_tokens = [first + own + 8 * c for c in turns]
        at = [p.offset(self.pairs, p.smaller(token, last), 4) for token in own_tokens]
        places = [p.load_global(place, 1)[0] for place in at]
        p.warpgroup_barrier()  # nobody reads the tile before
        for turn, (c, token, place) in enumerate(zip(turns, own_tokens, places, strict=True)):
            words = []
            for i in range(c, min(c + tokens // 8, eights)):
                words += [p.pack(*both) for both in zip(*values(i), strict=True)]
            words += words[-1:] * (4 - len(words))  # of tokens past the part's end
            begin = turn % 2 * tokens * pitch
            p.store_matrices_transposed(write, words, begin)
            p.warpgroup_barrier()
            found = p.load_shared(read, 4, begin)
            is_own = (token < end) & is_inside
            p.store_four(p.offset_rows(to, place, self.n_out * 2), found, is_own, 0)


@dataclasses.dataclass(frozen=True)
class TokenStage:
    """Results of a warp's 16 tokens, eight at a time: as ``RowStage``, without its transposing.

    stage: a warp's memory.  pitch: bytes from a token to the next there, 16 more than its results.
    """

    stage: Value
    pairs: Value
    to: Value
    n0: Value
    n_out: int
    pitch: int

    def store(self, words: Callable, first: Value, end: Value) -> None:
        """Store them.  words: (i, h) -> of eights i to i + 3 the thread's pair of results of its
        h-th token.  first, end: the warp's first token, and the end of the part's."""
        pitch, pieces = self.pitch, self.pitch // 16 - 1
        lane = p.register("tid.x") & 31
        matrix, row = lane >> 3, lane & 7
        write = self.stage + row * pitch + matrix * 16
        at_once, shift = 32 // pieces, pieces.bit_length() - 1  # tokens that a warp reads at once
        own, piece = lane >> shift, lane & (pieces - 1)
        read = self.stage + own * pitch + piece * 16
        column, last = self.n0 + piece * 8, end - 1
        is_inside, to = column < self.n_out, p.offset(self.to, column, 2)
        for h in range(2):
            tokens = [first + own + (8 * h + i) for i in range(0, 8, at_once)]
            at = [p.offset(self.pairs, p.smaller(token, last), 4) for token in tokens]
            places = [p.load_global(place, 1)[0] for place in at]
            p.warp_barrier()  # nobody reads the tokens before
            for c in range(0, pieces, 4):
                p.store_matrices(write, words(c, h), 16 * c)
            p.warp_barrier()
            for i, (token, place) in enumerate(zip(tokens, places, strict=True)):
                found = p.load_shared(read, 4, at_once * i * pitch)
                is_own = p.below(token, end) & is_inside
                p.store_four(p.offset_rows(to, place, self.n_out * 2), found, is_own, 0)
