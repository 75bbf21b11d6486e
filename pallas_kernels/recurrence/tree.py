"""Register work of ``gla.gates``: one slice of 64 key channels of one chunk, by one warpgroup.

Contract: everything here runs inside ``launch.inline``.  Byte offsets are into a slot of four
8 KiB tiles: q, k and the two halves of the gates.  A tile is 64 rows of 128 bytes with TMA's
128-byte swizzle.  ``gla.gates`` has the algorithm, the copies, their barriers and the loop.

``load_slice``, ``Tree`` and ``Borders`` also serve ``gated_delta.kernel_tree``, with its tiles.

Copies: none; ``gla.gates`` has copied the slot and waited for it.
Waits: ``gate_slice`` has a slice's barriers.  Before ``merge``, ``gla.gates`` has one more, so
that all warps have read y.  A warp works on its own rows between warp barriers.  The
first warpgroup barrier says that the table of the warps' products is full.  The second says that
all y of levels 16 and 32 are stored.
Writes: ``gate_slice`` leaves qg and kg in the slot, and warp 0 stores decay in device memory.
``merge`` leaves A in the place of the gates.
"""

from __future__ import annotations

from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels import ptx as p
from pallas_kernels.ptx import LOG2E
from pallas_kernels.recurrence.channels import TILE, ThreadPlace, half_products, zero_acc

# Where a slot's tiles begin, in bytes: q, k, and the gates' two, which y replaces.
_Q, _K, _LOW, _HIGH = 0, TILE, 2 * TILE, 3 * TILE


class Lane(ThreadPlace):
    """A thread's place: warp w owns rows 16w..16w+15, and a lane owns two columns."""

    def __init__(self, base):
        super().__init__()
        self.row = (self.warp << 4) + self.g
        # Address of the thread's word in row 16w of a swizzled bf16 [64, 64] tile, by row & 7.
        chunk, word = self.lane >> 2, self.lane & 3
        start = base + (self.warp << 11)
        low = start + (word << 2)
        self.pairs = [low + ((chunk ^ r) << 4) for r in range(8)]
        # The same two columns in two swizzled f32 [64, 32] tiles.
        half = self.lane >> 4
        inner = self.lane & 15
        chunk, word = inner >> 1, inner & 1
        low = start + (half << 13) + (word << 3)
        self.floats = [low + ((chunk ^ r) << 4) for r in range(8)]
        self.matrix = self.row_matrices(base)

    def rows_of(self, block):
        """ldmatrix addresses of row block ``block`` (an i32 value)."""
        start = block << 11
        return [x + start for x in self.matrix]

    def far_block(self):
        """(row block, column block) of the level-32 product this warp computes."""
        return 3 - (self.warp >> 1), self.warp & 1

    def near_block(self):
        """The same for level 16; warps 0 and 2 repeat their neighbour's."""
        return self.warp | 1, self.warp & 2


def load_slice(lane, q_at, k_at, g_at, limit):
    """q, k as 16 bf16 pairs and a = exp(log_decay) as [16 rows][2 columns]."""
    q, k, a = [], [], []
    for r in range(16):
        (qw,) = p.load_shared(lane.pairs[r % 8], 1, q_at + 128 * r)
        (kw,) = p.load_shared(lane.pairs[r % 8], 1, k_at + 128 * r)
        gs = p.load_shared(lane.floats[r % 8], 2, g_at + 128 * r, "f32")
        if limit is not None:
            row = (lane.warp << 4) + r
            inside = p.below(row, limit)
            qw, kw = p.where(inside, qw, 0), p.where(inside, kw, 0)
            gs = [p.where(inside, x, 0.0) for x in gs]
        q.append(qw)
        k.append(kw)
        a.append([p.exp2(x * LOG2E) for x in gs])
    return q, k, a


def _gate(word, factors):
    """A bf16 pair times two f32 factors, as a bf16 pair."""
    return p.mul_pairs(word, p.pack(*factors))


def times(xs, ys):
    return [x * y for x, y in zip(xs, ys, strict=True)]


class Tree:
    """p and t of the warp's 16 rows x the thread's 2 columns, raised level by level."""

    def __init__(self, a):
        self.p = [list(x) for x in a]
        self.t = [None] * 16  # None: the empty product

    def operand(self, level, q, k):
        """y of a level inside the 16 rows, as 16 bf16 pairs."""
        out = []
        for r in range(16):
            if r & level:
                out.append(_gate(q[r], self.p[r]))
            else:
                out.append(k[r] if self.t[r] is None else _gate(k[r], self.t[r]))
        return out

    def raise_level(self, level):
        """Join pairs of ``level``-row blocks."""
        products = [self.p[r | (level - 1)] for r in range(16)]
        for r in range(16):
            other = products[r ^ level]
            if r & level:
                self.p[r] = times(self.p[r], other)
            else:
                self.t[r] = other if self.t[r] is None else times(self.t[r], other)
        # The last row of every block still has the empty t.

    def suffix(self, r):
        return [p.cf(1.0)] * 2 if self.t[r] is None else self.t[r]


class Borders:
    """The decays of a lane's two columns from a warp's 16 rows to the borders of 32 and 64 rows.

    Before, every warp stores the product of its rows in a table, at ``at``.

    before, after: products over the rows between a warp's 16 and the first and last of all 64.
    between: the extra factor of level 32's operand beyond that of the 16 rows.  It is the partner
    warp's product, if that warp lies between the row and the border of its 32-row block.
    """

    def __init__(self, lane, table, column, at: int = 0):
        def of_warp(mask):
            warp = lane.warp ^ mask
            return p.load_shared(table + (warp << 8) + column, 2, at, "f32")

        self.near, self.across = of_warp(1), times(of_warp(2), of_warp(3))
        one = p.cf(1.0)
        self.query16, self.query32 = p.bit(lane.warp, 0), p.bit(lane.warp, 1)
        same_side = p.equal(self.query16, self.query32)
        self.between = [p.where(same_side, x, one) for x in self.near]
        self.before, self.after = [], []
        for x, y in zip(self.near, self.across, strict=True):
            passed = [p.where(self.query16, x, one), p.where(self.query32, y, one)]
            self.before.append(passed[0] * passed[1])
            left = [p.where(self.query16, one, x), p.where(self.query32, one, y)]
            self.after.append(left[0] * left[1])

    def whole(self, own):
        """Return the decay of all 64 rows from ``own``, the decay of the warp's rows."""
        return times(times(own, self.near), self.across)


def store_rows(lane, at, words):
    for r in range(16):
        p.store_shared(lane.pairs[r % 8], [words[r]], at + 128 * r)


def _warp_products(lane, acc, level, at):
    """y y^T of a warp's 16 rows, from its rows of the [64, 64] tile at byte ``at``."""
    for address in lane.rows_of(lane.warp):
        a = p.load_matrices(address, at=at)
        if level == 8:
            acc[8] = p.mma(acc[8], a, [a[0], a[2]])
        else:
            acc[level] = half_products(acc[level], a, a)


def diagonal_products(lane, acc, q_at, k_at):
    for address in lane.rows_of(lane.warp):
        a = p.load_matrices(address, at=q_at)
        b = p.load_matrices(address, at=k_at)
        acc[0] = half_products(acc[0], a, b)


def _block_products(lane, acc, name, block, at):
    """y y^T of one 16x16 block away from the diagonal: acc[name + 0], [name + 1]."""
    rows, columns = (lane.rows_of(x) for x in block)
    for row, column in zip(rows, columns, strict=True):
        a = p.load_matrices(row, at=at)
        b = p.load_matrices(column, at=at)
        acc[name] = p.mma(acc[name], a, [b[0], b[2]])
        acc[name + 1] = p.mma(acc[name + 1], a, [b[1], b[3]])


def _diagonal_block(lane, acc):
    """The finished 16x16 block: [column half][4 registers], from the levels' accumulators."""
    out = []
    for tile in range(2):
        regs = []
        for r in range(4):
            row_half, e = r // 2, r % 2
            if row_half != tile:
                regs.append(acc[8][r] if (row_half, tile) == (1, 0) else p.cf(0.0))
                continue
            j = (lane.c << 1) + e
            differ = lane.g ^ j
            below = lane.g > j
            value = p.where(p.equal(differ, 0), acc[0][r], 0.0)
            low = p.where(p.bit(differ, 1), acc[2][r], acc[1][r])
            low = p.where(p.bit(differ, 2), acc[4][r], low)
            regs.append(p.where(below, low, value))
        out.append(regs)
    return out


ACCUMULATORS = (0, 1, 2, 4, 8, 16, 17, 32, 33)  # 16, 32: column halves of a 16x16 block


def gate_slice(lane, acc, table, decay_at, limit, scale):
    """One slice of 64 channels: adds every level's products, leaves qg and kg in place of q and k.

    The slot's two tiles of gates are reused for y.
    """
    q, k, a = load_slice(lane, _Q, _K, _LOW, limit)
    if limit is not None:
        store_rows(lane, _Q, q)
        store_rows(lane, _K, k)
    # From here on every warp reuses its own rows of the g tiles for y.
    mgpu.utils.warp_barrier()
    tree, column = Tree(a), lane.lane << 3
    total = _inner_levels(lane, acc, tree, q, k, table + (lane.warp << 8) + column)
    mgpu.utils.warpgroup_barrier()  # the table is full
    borders = Borders(lane, table, column)
    _outer_operands(lane, tree, q, k, borders, scale)
    first = p.equal(lane.warp, 0)
    with mgpu.when(first):
        p.store_global(p.offset(decay_at, column), borders.whole(total))
    mgpu.utils.warpgroup_barrier()  # y of levels 16 and 32 is there
    _block_products(lane, acc, 16, lane.near_block(), _LOW)
    _block_products(lane, acc, 32, lane.far_block(), _HIGH)


def _inner_levels(lane, acc, tree, q, k, table):
    """Levels 1 to 8, inside a warp's rows; their decay is left in the table, and returned."""
    total = None
    for pair in ((1, 2), (4, 8)):
        for level, at in zip(pair, (_LOW, _HIGH), strict=True):
            store_rows(lane, at, tree.operand(level, q, k))
            tree.raise_level(level)
        if pair[1] == 8:  # the 16-row products of the four warps, exchanged through a table
            total = tree.p[15]
            p.store_shared(table, total)
        mgpu.utils.warp_barrier()
        if pair[0] == 1:
            diagonal_products(lane, acc, _Q, _K)
        for level, at in zip(pair, (_LOW, _HIGH), strict=True):
            _warp_products(lane, acc, level, at)
        mgpu.utils.warp_barrier()
    return total


def _outer_operands(lane, tree, q, k, borders, scale) -> None:
    """Store y of levels 16 and 32 in place of the gates, qg and kg in place of q and k."""
    query16, query32 = borders.query16, borders.query32
    between = p.pack(*borders.between)
    before = [x * scale for x in borders.before]
    y16, y32, qg, kg = [], [], [], []
    for r in range(16):
        suffix = tree.suffix(r)
        yq, yk = _gate(q[r], tree.p[r]), _gate(k[r], suffix)
        y16.append(p.where(query16, yq, yk))
        y32.append(p.mul_pairs(p.where(query32, yq, yk), between))
        qg.append(_gate(q[r], times(tree.p[r], before)))
        kg.append(_gate(k[r], times(suffix, borders.after)))
    for at, words in ((_LOW, y16), (_HIGH, y32), (_Q, qg), (_K, kg)):
        store_rows(lane, at, words)


def _put_block(lane, base, block, tiles, scale):
    """A 16x16 block of A, bf16, into a swizzled [64, 64] tile."""
    rows, columns = block
    for tile, regs in enumerate(tiles):
        for half in range(2):
            row = (rows << 4) + lane.g + 8 * half
            chunk = (columns << 1) + tile
            chunk = chunk ^ (row & 7)
            values = [x * scale for x in regs[2 * half : 2 * half + 2]]
            p.store_shared(lane.pair(base, row, chunk), [p.pack(*values)])


def merge(lane, acc, base, scale):
    """A from the levels' accumulators, as bf16 into a swizzled [64, 64] tile."""
    _put_block(lane, base, (lane.warp, lane.warp), _diagonal_block(lane, acc), scale)
    _put_block(lane, base, lane.far_block(), [acc[32], acc[33]], scale)
    with mgpu.when(p.bit(lane.warp, 0)):
        _put_block(lane, base, lane.near_block(), [acc[16], acc[17]], scale)
    zero = [zero_acc(), zero_acc()]
    for column in range(1, 4):
        above = lane.warp < column
        with mgpu.when(above):
            _put_block(lane, base, (lane.warp, p.ci(column)), zero, scale)
