"""One mma tile of decode attention: 16 tokens of a kv head, 8 of the query heads that share it.

    scores[16 tokens, 8 heads] = K q^T          a lane: tokens g and g + 8, heads 2 quad and + 1
    weights transposed in registers (movmatrix), scaled by V's scales: the right operand of
    out^T[features, 8 heads] += V^T weights     a lane: features that lie side by side, both heads

g is a lane's number / 4, quad the rest.  The kernels bring the words: of keys those of tokens g and
g + 8, in ``codes.k_chunks`` runs of four lanes' chunks; of values those of tokens 2 quad and + 1,
+ 8, + 9, in ``codes.v_chunks`` runs of eight lanes' chunks.
"""

from __future__ import annotations

import functools
import math

from pallas_kernels import ptx as p
from pallas_kernels.attention.codes import Codes, as_float16, query_sums_of

LOG2E = math.log2(math.e)
NEG_INF = float("-inf")
LEAST = -3.0e38  # a maximum of scores that are all -inf
TILE = 16  # tokens
HEADS = 8  # query heads


def load_heads(base, codes: Codes) -> list[list]:
    """A head's 16-bit features that meet a lane's key words, by chunk; base: of the first."""
    features = features_of(codes)
    return [p.load_global(base, features // 2, 8 * features * j) for j in range(codes.k_chunks)]


def features_of(codes: Codes) -> int:
    """Return the number of features in a lane's chunk of keys."""
    return codes.k_chunk * 8 // codes.bits


class Queries:
    """A warp's query heads, as the right operands of the scores, one for each ful of eight.

    raws: what ``load_heads`` gave for head g of each ful.  Scores are base 2: ``scale`` and log2(e)
    are in them.
    """

    def __init__(self, raws: list, codes: Codes, scale: float, kind: str):
        self.codes, self.factor = codes, p.cf(scale * LOG2E)
        chunks = [loaded for raw in raws for loaded in raw]
        if codes.zeros:
            chunks, self.factor = as_float16(chunks, self.factor, kind)
        per, count = codes.per_word // 2, codes.k_chunks
        pairs = [
            [
                pair
                for w in range(0, len(loaded), per)
                for pair in codes.query_pairs(loaded[w : w + per])
            ]
            for loaded in chunks
        ]
        self.pairs = [pairs[i : i + count] for i in range(0, len(pairs), count)]
        self.sums = [query_sums_of(x, codes) for x in self.pairs] if codes.zeros else None

    def adjust(self, scale, zero, values: bool):
        """Return the factors that correct a product of codes.

        The true product is scale times the product of codes, plus zero times the sum of the other
        operand.
        """
        if zero is None:
            return (scale if values else scale * self.factor,)
        # Codes come 8 too large.
        zero = p.fma(scale, -8.0, zero)
        if values:
            return scale, zero
        step = self.factor * self.codes.steps[0]
        return scale * step, zero * self.factor

    def scores(self, keys, numbers, ful: int = 0) -> list:
        """[token g | g + 8] x [head 2 quad | 2 quad + 1] of a ful.

        keys: of tokens g and g + 8, by ``key_pairs``; numbers: theirs by ``adjust``,
        [scale, zero][group].
        """
        codes, zero = self.codes, p.cf(0.0)
        acc = [[zero] * 4 for _ in range(codes.groups)]
        for j, (low, high) in enumerate(keys):
            of = j * 4 * codes.k_chunk // codes.group_bytes
            for s in range(0, len(low), 2):
                left = [low[s], high[s], low[s + 1], high[s + 1]]
                acc[of] = p.mma(acc[of], left, self.pairs[ful][j][s : s + 2], codes.q_kind)
        if numbers is None:
            return [x * self.factor for x in acc[0]]
        out = []
        for i in range(4):
            total = zero
            for of in range(codes.groups):
                total = p.fma(acc[of][i], numbers[i // 2][0][of], total)
                if codes.zeros:
                    total = p.fma(self.sums[ful][of][i % 2], numbers[i // 2][1][of], total)
            out.append(total)
        return out


def key_pairs(rows, codes: Codes) -> list:
    """16-bit pairs of the key words of two tokens, [chunk][token]."""
    count = codes.k_chunk // 4
    return [
        [[x for w in r[j : j + count] for x in codes.pairs(w, codes.q_kind)] for r in rows]
        for j in range(0, codes.k_chunks * count, count)
    ]


def maxima(scores, top) -> tuple[list, list]:
    """Return (new maxima, factors by which earlier sums fade) of a lane's two heads.

    A new maximum is over all tokens of the tiles' scores and the earlier maximum ``top``.
    """
    new, fade = [], []
    for c in range(2):
        best = functools.reduce(p.maximum, [s[i] for s in scores for i in (c, c + 2)])
        best = p.maximum(p.over_lanes(best, (4, 8, 16), p.maximum), top[c])
        new.append(best)
        fade.append(p.exp2(top[c] - best))
    return new, fade


def weights_of(scores, top) -> list:
    return [[p.exp2(s[i] - top[i % 2]) for i in range(4)] for s in scores]


def right_operand(weights, numbers, zeros: list, codes: Codes) -> list:
    """Return a tile's weights times the values' scales, transposed, by group.

    The weights' products with the zero points are added to ``zeros``, [group][head].
    """
    right = []
    for of in range(codes.groups):
        w = weights
        if codes.zeros:
            for i, x in enumerate(w):
                at = 2 * of + i % 2
                zeros[at] = p.fma(x, numbers[i // 2][1][of], zeros[at])
        if codes.quantized:
            w = [x * numbers[i // 2][0][of] for i, x in enumerate(w)]
        halves = [p.pack(w[2 * i], w[2 * i + 1], codes.v_kind) for i in range(2)]
        right.append([p.transpose_8x8(x) for x in halves])
    return right


def add_values(outs: list, tokens, rights, codes: Codes) -> None:
    """out += V^T weights of a tile, for each of ``outs`` by its right operand; tokens: value words
    of tokens 2 quad, + 1, + 8 and + 9."""
    tile = 0
    for w in range(codes.v_chunks * codes.v_chunk // 4):
        of = w // (codes.v_chunk // 4) * 8 * codes.v_chunk // codes.group_bytes
        early = codes.value_pairs(tokens[0][w], tokens[1][w])
        late = codes.value_pairs(tokens[2][w], tokens[3][w])
        for s in range(0, len(early), 2):
            left = [early[s], early[s + 1], late[s], late[s + 1]]
            here = slice(4 * tile, 4 * tile + 4)
            for out, right in zip(outs, rights, strict=True):
                out[here] = p.mma(out[here], left, right[of], codes.v_kind)
            tile += 1


def over_tokens(x):
    """The sum over the lanes that share a quad's place."""
    return p.over_lanes(x, (4, 8, 16))


def run_of(codes: Codes) -> int:
    """Features of a lane that lie side by side in out."""
    return codes.v_chunk * 8 // codes.bits


def head_outputs(out, zeros, c: int, codes: Codes):
    """Yield runs of the outputs of head 2 quad + c, as (first feature, values).

    The first feature is relative to the lane's own.  zeros: the sums over all tokens of weights
    times zero points, by group.
    """
    run = run_of(codes)
    for j in range(codes.v_chunks):
        first = j * run * 2  # of out's floats: two features and two heads an mma tile
        values = [out[first + 4 * (i // 2) + 2 * (i % 2) + c] for i in range(run)]
        if codes.zeros:
            of = j * 8 * codes.v_chunk // codes.group_bytes
            values = [p.fma(x, codes.steps[i % 2], zeros[of]) for i, x in enumerate(values)]
        yield j * 8 * run, values
