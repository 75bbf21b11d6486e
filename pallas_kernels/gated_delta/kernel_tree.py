"""Register work of ``gated_delta.kernel_channels``: q k^T and k k^T of a chunk whose decay is one
number a key channel, by ``gla.gates``'s tree.

Let a = exp(log_decay).  p is the product of a from a block's start to a row, t that from after the
row to the block's end.  Rows i and j of a chunk meet at one level s: there i lies in the second and
j in the first half of one block of 2s rows.  exp(G_i - G_j) = p_i t_j, both in [0, 1].  A level
inside a warp's 16 rows is one mma per 16 channels: on the left its 8 rows q p, then 8 rows k p, on
the right its 8 rows k t; of the 64 pairs those of one block count.  Levels 16 and 32 exchange the
warps' products, and have one block of 16 x 16 for each warp and product, two at most.

Gating multiplies in float32 and rounds once, because a delta rule subtracts values that it reads.

Everything here runs inside ``launch.inline`` on a warpgroup.  Memory is ``TILES`` tiles of 64
rows of 128 bytes with TMA's swizzle.  ``Slot`` and the constants after it number the tiles.

Copies: ``load_betas`` loads beta; ``kernel_channels`` copies everything else and waits for it.
Waits: warp barriers inside 16 rows, warpgroup barriers where warps exchange products and the
operands of levels 16 and 32.
Writes: ``add_slice`` leaves the gated operands in the slice's tiles, and warp 0 stores the decay in
device memory.  ``spread`` stores the sums in shared memory.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from pallas_kernels import ptx as p
from pallas_kernels.gated_delta.kernel_inverse import InverseRows
from pallas_kernels.recurrence.channels import TILE, zero_acc
from pallas_kernels.recurrence.tree import (
    Borders,
    Lane,
    Tree,
    diagonal_products,
    load_slice,
    store_rows,
    times,
)


class Slot(NamedTuple):
    """Tiles of a slice of 64 channels: q, k and two tiles of gates with 32 columns each.

    The results replace them: q decayed from the chunk's start, with the scale, in q's tile; k
    decayed to the chunk's end in k's tile; k decayed from its start in ``near``.
    """

    q: int
    k: int
    gates: int
    near: int
    far: int


SLOTS = Slot(0, 7, 1, 1, 2), Slot(5, 8, 3, 4, 3)
TILES = 9
MIXED = 6  # the right operands of the levels, or rows q p of levels 16 and 32
SCORES, KEYS = 0, 2  # two tiles each, [64, 64] float32: the products for P and A
BLOCKS = 4  # two tiles for the inverse's blocks
TABLE, BETA, WORDS = 0, 1024, 320  # of the scratch: bytes, and how many words in all

# [4] each: the diagonal of q k^T, levels 1 to 8, the near block's halves, the far block's halves of
# q k^T and of k k^T.
ACCUMULATORS = 11
_LEVELS = (1, 2, 4, 8)


def empty_sums():
    return [zero_acc() for _ in range(ACCUMULATORS)]


def load_betas(betas, scratch, limit, pitch: int) -> None:
    """beta of the chunk's tokens, the next one ``pitch`` bytes on; zeros from ``limit`` on."""
    token = p.register("tid.x") & 63
    inside = p.below(token, limit)
    safe = p.where(inside, token, 0)
    (beta,) = p.load_global(p.offset(betas, safe, pitch), 1, 0, "f32", cache=p.READ_ONLY)
    at = scratch + (token << 2)
    p.store_shared(at, [p.where(inside, beta, 0.0)], BETA)


def _floats(word):
    return [p.widen(word), p.widen_high(word)]


def _gated(pair, factors):
    return p.pack(*times(pair, factors))


def _store(lane, tile: int, row: int, word) -> None:
    """The thread's two columns of a row of its warp's 16."""
    p.store_shared(lane.pairs[row % 8], [word], TILE * tile + 128 * row)


def _store_level(lane, tree, level, q, k, tile: int, half: int) -> None:
    """Rows q p and k p of a level to the warp's rows of a tile, k t to 8 of ``MIXED``."""
    second = [r for r in range(16) if r & level]
    first = [r for r in range(16) if not r & level]
    for n, r in enumerate(second):
        _store(lane, tile, n, _gated(_floats(q[r]), tree.p[r]))
        _store(lane, tile, 8 + n, _gated(_floats(k[r]), tree.p[r]))
    for n, r in enumerate(first):
        word = k[r] if tree.t[r] is None else _gated(_floats(k[r]), tree.t[r])
        _store(lane, MIXED, 8 * half + n, word)


def _level_products(lane, acc, first: int, tiles) -> None:
    """Adds levels ``first`` and ``first + 1`` (of ``_LEVELS``)."""
    for address in lane.rows_of(lane.warp):
        right = p.load_matrices(address, at=TILE * MIXED)
        for half, tile in enumerate(tiles):
            left = p.load_matrices(address, at=TILE * tile)
            n = 1 + first + half
            acc[n] = p.mma(acc[n], left, [right[half], right[half + 2]])


def _far_products(lane, acc, slot: Slot, query16) -> None:
    """The blocks of levels 16 and 32: of level 16 a warp has q k^T or k k^T."""
    row, column = lane.near_block()
    mixed = 1 - (lane.warp >> 1) + MIXED * TILE // 2048
    left = p.where(query16, mixed, row + slot.near * TILE // 2048)
    for a, b in zip(lane.rows_of(left), lane.rows_of(column), strict=True):
        a, b = p.load_matrices(a), p.load_matrices(b, at=TILE * slot.near)
        for n in range(2):
            acc[5 + n] = p.mma(acc[5 + n], a, [b[n], b[n + 2]])
    rows, columns = (lane.rows_of(x) for x in lane.far_block())
    for row, column in zip(rows, columns, strict=True):
        b = p.load_matrices(column, at=TILE * slot.far)
        for i, tile in enumerate((MIXED, slot.far)):
            a = p.load_matrices(row, at=TILE * tile)
            for n in range(2):
                at = 7 + 2 * i + n
                acc[at] = p.mma(acc[at], a, [b[n], b[n + 2]])


def add_slice(base, acc, slot: Slot, scratch, decay_at, limit, scale: float) -> None:
    """One slice: adds its products, leaves the gated operands (see ``Slot``), and the chunk's
    decay at ``decay_at``.  limit: tokens there are, the others are taken for zeros; or None."""
    lane = Lane(base)
    q, k, a = load_slice(lane, TILE * slot.q, TILE * slot.k, TILE * slot.gates, limit)
    if limit is not None:
        store_rows(lane, TILE * slot.q, q)
        store_rows(lane, TILE * slot.k, k)
    p.warp_barrier()  # from here on a warp's own rows of the gates are its own
    tree, named = Tree(a), {0: acc[0]}
    diagonal_products(lane, named, TILE * slot.q, TILE * slot.k)
    acc[0] = named[0]
    column = lane.lane << 3
    total = _inner_levels(lane, acc, tree, slot, q, k, scratch + (lane.warp << 8) + column)
    p.warpgroup_barrier()  # the table is full
    borders = Borders(lane, scratch, column, TABLE)
    from_start = _outer_operands(lane, tree, slot, q, k, borders, scale)
    whole = borders.whole(total)
    p.when(p.equal(lane.warp, 0), lambda: p.store_global(p.offset(decay_at, lane.lane, 8), whole))
    p.warpgroup_barrier()  # the operands of levels 16 and 32 are there
    _far_products(lane, acc, slot, borders.query16)
    p.warpgroup_barrier()  # and now read
    store_rows(lane, TILE * slot.near, from_start)


def _inner_levels(lane, acc, tree, slot: Slot, q, k, table):
    """Levels 1 to 8, inside a warp's rows; their decay is left in the table, and returned."""
    tiles, total = (slot.near, slot.far), None
    for first in (0, 2):
        for half, tile in enumerate(tiles):
            level = _LEVELS[first + half]
            _store_level(lane, tree, level, q, k, tile, half)
            tree.raise_level(level)
        if first:  # the 16-row products of the four warps, exchanged through a table
            total = tree.p[15]
            p.store_shared(table, total, TABLE)
        p.warp_barrier()
        _level_products(lane, acc, first, tiles)
        p.warp_barrier()
    return total


def _outer_operands(lane, tree, slot: Slot, q, k, borders, scale: float):
    """Store the operands of levels 16 and 32, and the slice's results (``Slot``) but one: k decayed
    from the chunk's start, whose place is still read.  That is returned."""
    query16, query32, before = borders.query16, borders.query32, borders.before
    scaled = [x * scale for x in before]
    far = [
        times(borders.between, [p.where(query32, x, y) for x, y in zip(up, down, strict=True)])
        for up, down in zip(tree.p, map(tree.suffix, range(16)), strict=True)
    ]

    def mix_near():  # warp 1's rows to its own place, warp 3's to warp 0's
        moved = p.where(query32, p.ci(-3), p.ci(0)) << 11
        for r in range(16):
            word = _gated(_floats(q[r]), tree.p[r])
            p.store_shared(lane.pairs[r % 8] + moved, [word], TILE * MIXED + 128 * r)

    def mix_far():
        for r in range(16):
            _store(lane, MIXED, r, _gated(_floats(q[r]), far[r]))

    p.when(query16, mix_near)
    p.when(query32, mix_far)
    from_start = []
    for r in range(16):
        key, up, down = _floats(k[r]), tree.p[r], tree.suffix(r)
        here = [p.where(query16, x, y) for x, y in zip(up, down, strict=True)]
        _store(lane, slot.near, r, _gated(key, here))
        _store(lane, slot.far, r, _gated(key, far[r]))
        _store(lane, slot.k, r, _gated(key, times(down, borders.after)))
        _store(lane, slot.q, r, _gated(_floats(q[r]), times(up, scaled)))
        from_start.append(_gated(key, times(up, before)))
    return from_start


def _word(base, tile, i, j):
    """Address of entry (i, j) of a [64, 64] float32 matrix of two tiles, swizzled by 32 bytes."""
    chunk = (j >> 3) ^ (i & 7)
    inner = (j & 7) << 2
    return base + tile + (i << 8) + (chunk << 5) + inner


def spread(lane: Lane, acc, base) -> None:
    """The sums to where their pairs belong, on and below the diagonal of ``SCORES`` and ``KEYS``;
    what lies above stays what it was, as do the diagonals of the latter."""
    start = lane.warp << 4
    places = p.ci(SCORES * TILE), p.ci(KEYS * TILE)

    def put(tile, i, j, values):
        p.store_shared(_word(base, tile, i, j), values)

    for e in range(2):
        column = (lane.c << 1) + e
        for n, level in enumerate(_LEVELS):

            def along(x, n=n, level=level):  # the row of the warp's 16 that a half's x-th is
                return start + ((x >> n) << (n + 1)) + (x & (level - 1))

            def level_pairs(n=n, level=level, e=e, column=column, along=along):
                i, j = along(lane.g) + level, along(column)
                for product, tile in enumerate(places):
                    put(tile, i, j, [acc[1 + n][2 * product + e]])

            met = p.equal(lane.g >> n, column >> n)
            p.when(met, level_pairs)

        def diagonal(e=e):
            for half in range(2):
                row = start + lane.g + 8 * half
                put(places[0], row, row, [acc[0][2 * half + e]])

        p.when(p.equal(lane.g, column), diagonal)

    def block(tile, place, halves):
        rows, columns = (x << 4 for x in place)
        for n, values in enumerate(halves):
            for half in range(2):
                i = rows + lane.g + 8 * half
                j = columns + (lane.c << 1) + 8 * n
                put(tile, i, j, values[2 * half : 2 * half + 2])

    near = p.where(p.bit(lane.warp, 0), *places)
    block(near, lane.near_block(), acc[5:7])
    for product, tile in enumerate(places):
        block(tile, lane.far_block(), acc[7 + 2 * product : 9 + 2 * product])


def _lower(rows: InverseRows, base, tile: int, factors, there):
    """A matrix of ``spread`` as ``x[tile][half]``, its rows times factors, zeros elsewhere."""
    at = base + (rows.first << 8) + (rows.c << 3)
    out = []
    for n in range(8):
        chunk = (n ^ rows.g) << 5
        out.append([])
        for half in range(2):
            pair = p.load_shared(at + chunk, 2, TILE * tile + 2048 * half, "f32")
            row = rows.first + 8 * half
            columns = [(rows.c << 1) + (8 * n + e) for e in range(2)]
            out[n].append(
                [
                    p.where(there(column, row), x * factors[half], 0.0)
                    for x, column in zip(pair, columns, strict=True)
                ]
            )
    return out


def coefficients(rows: InverseRows, base, scratch, scale: float):
    """(A, P) of the chunk: beta_i k_i k_j decay below the diagonal, scale q_i k_j decay with it."""
    a = _lower(rows, base, KEYS, rows.by_row(scratch, BETA), operator.lt)
    return a, _lower(rows, base, SCORES, [p.cf(scale)] * 2, _not_above)


def _not_above(column, row):
    return ~(row < column)
