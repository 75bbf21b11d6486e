"""Register work of ``gated_delta.kernel_chunks``: a chunk's decays, and the inverse of its I + A.

Everything here runs inside ``launch.inline``, on the four warps of a warpgroup.
Warp w holds rows 16w..16w+15 of a [64, 64] matrix as ``x[tile][half]``.  These are two columns from
8 tile + 2c on of row g + 8 half, the layout of wgmma and of mma.  g and c are those of
``recurrence.channels.ThreadPlace``.

The inverse X = (I + A)^-1 of a unit lower triangular matrix is computed by blocks of 16.  The
blocks on the diagonal come from substitution in float32, one column a lane.  The blocks below are

    X_IJ = -X_II (A_IJ X_JJ + ... + A_I,I-1 X_I-1,J),

by mma on bf16 pairs (high, low), three products each, so 16 bits of every factor count.  If keys
are almost parallel and beta is 1, X is a difference of large terms; bf16 alone would leave an error
of one percent.  Warp J computes X_IJ^T.  Its factor X_MJ^T is an earlier result of the same warp:
the layout that mma writes is the layout that it reads on the left.

Copies: ``chunk_vectors`` loads log_decay and beta by the first warp; everything else is in shared
memory or registers.
Waits: the callers' warpgroup barriers.  In ``inverse_parts`` a warp barrier follows the store of a
warp's diagonal block, and another one its reading.  The warpgroup's barrier follows the inverses,
which all warps then read.
Writes: ``chunk_vectors`` stores the vectors in shared memory, and the decays from the chunk's start
in device memory if it has ``out``.  Tiles, blocks and sums go to shared memory.
"""

from __future__ import annotations

from pallas_kernels import ptx as p
from pallas_kernels.ptx import LOG2E
from pallas_kernels.recurrence.channels import TILE, ThreadPlace

LOWEST = -128.0  # exp2 of it is 0 in float32
_PITCH = 48  # bytes of a row of 16 bf16, so that eight rows lie in all banks
_BLOCK = 16 * _PITCH
_ROW = 80  # bytes of a row of 16 f32 in a diagonal block
WORDS = 3 * 64 + 4 * 2 * _BLOCK // 4  # of scratch: vectors, blocks

# Scratch, in bytes: the chunk's three vectors of 64 floats, and A's diagonal blocks in float32.
# The transposes of the blocks' inverses, as bf16 high and low, later replace the blocks.
LOG, BETA, TO_END = 0, 256, 512
DECAY = 768  # of a kernel that has no blocks there
_BLOCKS = 768


def chunk_vectors(scratch, decays, betas, limit, pitch, out, scale) -> None:
    """By the first warp, of its chunk's tokens: sums of log_decay as powers of 2, beta, decay to
    the chunk's end (see ``LOG``, ``BETA``, ``TO_END``); and to ``out``, if it is there, the decay
    from the chunk's start, as it is and times ``scale``; if not, log_decay itself is a fourth
    vector (``DECAY``).

    decays, betas: addresses of the first token's float, the next is ``pitch`` bytes on.
    limit: how many tokens there are; those past them decay nothing, though ``DECAY`` is token 0's
    there, and have beta = 0.
    """
    thread = p.register("tid.x") & 127

    def work():
        lane = thread & 31
        plain, x, beta = [], [], []
        for e in range(2):
            token = (lane << 1) + e
            inside = p.below(token, limit)
            safe = p.where(inside, token, 0)
            (g,) = p.load_global(p.offset(decays, safe, pitch), 1, 0, "f32", cache=p.READ_ONLY)
            (b,) = p.load_global(p.offset(betas, safe, pitch), 1, 0, "f32", cache=p.READ_ONLY)
            plain.append(g)
            g = p.maximum(g * LOG2E, LOWEST)
            x.append(p.where(inside, g, 0.0))
            beta.append(p.where(inside, b, 0.0))
        first = lanes_before(lane, x[0] + x[1]) + x[0]
        log = [first, first + x[1]]
        end = p.shuffle_from(log[1], 31)
        at = scratch + (lane << 3)
        p.store_shared(at, log, LOG)
        p.store_shared(at, beta, BETA)
        p.store_shared(at, [p.exp2(end - y) for y in log], TO_END)
        if out is None:
            p.store_shared(at, plain, DECAY)
            return
        decay = [p.exp2(y) for y in log]
        to = p.offset(out, lane, 8)
        p.store_global(to, decay)
        p.store_global(to, [y * scale for y in decay], 256)

    p.when(thread < 32, work)


def lanes_before(lane, total):
    """The sum of ``total`` over the lanes before this one."""
    for distance in (1, 2, 4, 8, 16):
        other = p.shuffle_up(total, distance)
        total = p.where(~(lane < distance), total + other, total)
    return p.where(lane < 1, 0.0, p.shuffle_up(total, 1))


class InverseRows(ThreadPlace):
    """A thread's rows: warp w owns rows 16w..16w+15."""

    def __init__(self):
        super().__init__()
        self.first = (self.warp << 4) + self.g

    def by_row(self, base, at: int):
        """The thread's two rows' entries of a vector of floats."""
        start = base + (self.first << 2)
        return [p.load_float(start, at + 32 * half) for half in range(2)]

    def by_column(self, base, at: int):
        """The thread's column pairs' entries of a vector, by tile."""
        start = base + (self.c << 3)
        return [p.load_shared(start, 2, at + 32 * tile, "f32") for tile in range(8)]

    def store_tile(self, base, x) -> None:
        """bf16 pairs ``x[tile][half]`` to a swizzled [64, 64] tile."""
        addresses = self.row_matrices(base + (self.warp << 11))
        for n, at in enumerate(addresses):
            p.store_matrices(at, [*x[2 * n], *x[2 * n + 1]])


def split(pair):
    """Split two floats into two words of bf16 pairs: the rounded values, and their remainders."""
    high = p.pack(*pair)
    rest = [x - f(high) for x, f in zip(pair, (p.widen, p.widen_high), strict=True)]
    return high, p.pack(*rest)


def joined(high, low):
    return [f(high) + f(low) for f in (p.widen, p.widen_high)]


def store_split(rows: InverseRows, tiles, x) -> None:
    """Pairs of floats ``x[tile][half]`` as two bf16 tiles, high and low."""
    parts = [[split(pair) for pair in tile] for tile in x]
    for n in range(2):
        rows.store_tile(tiles + n * TILE, [[word[n] for word in tile] for tile in parts])


def scaled_rows(x, factors):
    """``x[tile][half]`` times a factor a row."""
    return [[[y * factors[half] for y in tile[half]] for half in range(2)] for tile in x]


def decays(rows: InverseRows, scratch, transposed: bool):
    """exp(G_i - G_j) for j <= i, else 0; transposed: exp(G_j - G_i) for i < j, else 0."""
    log_row, log_column = rows.by_row(scratch, LOG), rows.by_column(scratch, LOG)
    out = []
    for tile in range(8):
        out.append([])
        for half in range(2):
            row = rows.first + 8 * half
            pair = []
            for e in range(2):
                column = (rows.c << 1) + (8 * tile + e)
                between = log_row[half] - log_column[tile][e]
                if transposed:
                    between = -between
                there = row < column if transposed else ~(row < column)
                decay = p.exp2(p.minimum(between, 0.0))
                pair.append(p.where(there, decay, 0.0))
            out[tile].append(pair)
    return out


def sum_rows(rows: InverseRows, to, x) -> None:
    """Sums of ``x[tile][half]`` over columns: 64 floats at ``to``."""
    sums = []
    for half in range(2):
        total = p.cf(0.0)
        for tile in x:
            total = total + (tile[half][0] + tile[half][1])
        sums.append(p.over_lanes(total, (1, 2)))

    def store():
        for half in range(2):
            p.store_shared(to + (rows.first << 2), [sums[half]], 32 * half)

    p.when(rows.c < 1, store)


def sum_columns(rows: InverseRows, to, x) -> None:
    """Sums of ``x[tile][half]`` over each warp's rows: 4 x 64 floats at ``to``."""
    sums = []
    for tile in x:
        pair = [a + b for a, b in zip(*tile, strict=True)]
        for distance in (4, 8, 16):
            pair = [y + p.shuffle_xor(y, distance) for y in pair]
        sums.append(pair)

    def store():
        at = to + (rows.warp << 8) + (rows.c << 3)
        for tile, pair in enumerate(sums):
            p.store_shared(at, pair, 32 * tile)

    p.when(rows.g < 1, store)


def coefficients(rows: InverseRows, scratch, kk, qk, scale: float):
    """From k k^T and q k^T: A = beta_i k_i k_j decay below the diagonal, and
    P = scale q_i k_j decay with the diagonal."""
    log_row, beta = rows.by_row(scratch, LOG), rows.by_row(scratch, BETA)
    log_column = rows.by_column(scratch, LOG)
    a, scores = [], []
    for tile in range(8):
        a.append([])
        scores.append([])
        for half in range(2):
            row = rows.first + 8 * half
            pairs = [], []
            for e in range(2):
                column = (rows.c << 1) + (8 * tile + e)
                between = log_row[half] - log_column[tile][e]
                decay = p.exp2(p.minimum(between, 0.0))
                below, upto = column < row, ~(row < column)
                x = kk[tile][half][e] * beta[half] * decay
                pairs[0].append(p.where(below, x, 0.0))
                x = qk[tile][half][e] * scale * decay
                pairs[1].append(p.where(upto, x, 0.0))
            a[tile].append(pairs[0])
            scores[tile].append(pairs[1])
    return a, scores


def _of_warp(rows: InverseRows, values):
    """``values[w]`` of the thread's warp w."""
    low, high = p.bit(rows.warp, 0), p.bit(rows.warp, 1)
    first = p.where(low, values[1], values[0])
    return p.where(high, p.where(low, values[3], values[2]), first)


def _invert_diagonal(rows: InverseRows, block) -> None:
    """In the place of the warp's 16x16 block of A the inverse of I + A, transposed: a column of X a
    lane; lanes 0-15 store its high parts, 16-31 the low ones."""
    column = rows.lane & 15
    x = []
    for i in range(16):
        value = p.where(p.equal(column, i), p.cf(1.0), p.cf(0.0))
        for m in range(0, i, 4):
            a = p.load_shared(block, 4, _ROW * i + 4 * m, "f32")
            for n in range(m, min(m + 4, i)):
                value = p.fma(-a[n - m], x[n], value)
        x.append(value)
    upper = rows.lane < 16
    words = [p.where(upper, *split(x[i : i + 2])) for i in range(0, 16, 2)]
    p.warp_barrier()  # all lanes have read A
    at = block + column * _PITCH
    at = at + p.where(upper, 0, p.ci(_BLOCK))
    p.store_shared(at, words)


def _matrices(rows: InverseRows, base):
    """ldmatrix address of a stored 16x16 block."""
    row, side = rows.lane & 15, rows.lane >> 4
    return base + row * _PITCH + (side << 4)


def _product(acc, left, right):
    """acc[2][4] += left right of 16x16 blocks given as (high, low): mma's left fragments, and right
    ones by 8 columns."""
    for x, y in ((0, 0), (0, 1), (1, 0)):
        acc = [p.mma(part, left[x], columns) for part, columns in zip(acc, right[y], strict=True)]
    return acc


def _left(acc):
    """mma's result as (high, low) left fragments."""
    words = [split(acc[tile][2 * half : 2 * half + 2]) for tile in range(2) for half in range(2)]
    return [x for x, _ in words], [x for _, x in words]


def inverse_transposed(rows: InverseRows, tiles, scratch, a):
    """``inverse_parts``'s sum, pairs of floats."""
    return [[joined(*words) for words in tile] for tile in inverse_parts(rows, tiles, scratch, a)]


def inverse_parts(rows: InverseRows, tiles, scratch, a):
    """((I + A)^-1)^T as ``x[tile][half]``, words of high and of low parts, for A below the
    diagonal, of which the diagonal and what is above are zeros.

    tiles: two swizzled [64, 64] bf16 tiles of shared memory, which end up as A's two parts.
    """
    zero = [p.cf(0.0)] * 4
    store_split(rows, tiles, a)
    block = scratch + rows.warp * (2 * _BLOCK) + _BLOCKS
    at = block + rows.g * _ROW + (rows.c << 3)
    for tile in range(2):
        for half in range(2):
            pair = [_of_warp(rows, [a[2 * w + tile][half][e] for w in range(4)]) for e in range(2)]
            p.store_shared(at, pair, 32 * tile + 8 * _ROW * half)
    p.warp_barrier()
    _invert_diagonal(rows, block)
    p.warpgroup_barrier()

    own = _matrices(rows, block)
    own = [p.load_matrices(own, at=_BLOCK * n) for n in range(2)]
    everywhere = _matrices(rows, scratch + _BLOCKS)
    addresses = rows.row_matrices(tiles)
    # As soon as a block is known it is multiplied into the sums of all below it, which wait for
    # nothing else.
    out = []
    sums = [[zero, zero] for _ in range(4)]
    for i in range(4):
        here = p.equal(rows.warp, i)
        acc = sums[i]
        if i:
            right = []
            for n in range(2):
                w = p.load_matrices(everywhere, at=(2 * i + n) * _BLOCK, transposed=True)
                right.append([w[:2], w[2:]])
            acc = [[-x for x in part] for part in acc]
            acc = _product([zero, zero], _left(acc), right)
        words = [
            [p.where(here, x, y) for x, y in zip(*both, strict=True)]
            for both in zip(own, _left(acc), strict=True)
        ]
        for m in range(i + 1, 4):
            right = []
            for n in range(2):
                w = p.load_matrices(addresses[i], at=2048 * m + TILE * n)
                right.append([[w[0], w[2]], [w[1], w[3]]])
            sums[m] = _product(sums[m], words, right)
        for tile in range(2):
            out.append([[part[2 * tile + half] for part in words] for half in range(2)])
    return out
