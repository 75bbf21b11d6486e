"""A row's inner products with its LoRA adapter's first factors, in the kernel that writes the row.

    inner[s, i, k] = (i == the row's adapter) * sum_c y[c] first[i, s, k, c]       float32, one cast

Every row reads its own adapter.  A thread reads the adapter's columns that it holds of the row: 16
ranks of 8 columns at once, while it prefetches as many.  A warp adds 16 sums over its lanes in 16
shuffles, and each round halves the number of sums in a lane.  The sums of all warps and all blocks
of the row's cluster meet in shared memory.  Ranks of other adapters are zeros, so one product with
the second factors serves all rows (``matmul.many_rows.pair``).

Copies: a thread loads the adapter's columns of its own chunks, one step ahead, into registers.
Waits: all threads at the block's (or the cluster's) barrier, once all warps have stored their sums.
No block of a cluster ends before all have read its sums.
Writes: threads of all blocks of the cluster store the row's inner products.
"""

from __future__ import annotations

import math

from pallas_kernels import ptx as p
from pallas_kernels.rows.fused_parts import floats
from pallas_kernels.rows.one_row import RowShare, load_chunk
from pallas_kernels.rows.plan import RowOp

_RANKS = 16  # whose values a thread has at once


def padded_ranks(op: RowOp) -> int:
    """Return the ranks of one adapter over all sources, rounded up to whole steps of 16."""
    assert op.adapters is not None
    _, sources, rank = op.adapters
    return -(-sources * rank // _RANKS) * _RANKS


class Inner:
    """The inner products of one row.

    It is made before the row's values arrive, so that the first factors are requested early.
    """

    def __init__(self, rows: RowShare, row: p.Value):
        self.rows, self.row, op = rows, row, rows.op
        assert op.adapters is not None
        self.n, self.sources, self.rank = op.adapters
        self.ranks = self.sources * self.rank
        self.adapter = p.load_global(p.offset(rows.adapter, row, 4), 1)[0]  # 0: none
        # Without an adapter the first one's factors are read, and not used.
        index = p.larger(self.adapter, 1) - 1
        self.first = p.offset(rows.first, index, 2 * self.ranks * op.width)
        steps = range(0, self.ranks, _RANKS)
        self.steps = [(first, chunk) for first in steps for chunk in range(len(rows.inside))]
        self.asked = self._ask(*self.steps[0])

    def _ask(self, first: int, chunk: int) -> list[list[p.Value]]:
        """8 columns of each of up to 16 ranks from ``first`` on."""
        rows = self.rows
        return [
            load_chunk(self.first, 2 * rank * rows.op.width + rows.at(chunk, 2), rows.inside[chunk])
            for rank in range(first, min(first + _RANKS, self.ranks))
        ]

    def products(self, chunks: list[list[p.Value]], factor: p.Value | None) -> None:
        """chunks: the row's values here, each still to be multiplied by factor (None: by 1)."""
        plan = self.rows.plan
        warps, width = plan.threads // 32, padded_ranks(self.rows.op)
        warp, lane = self.rows.thread >> 5, self.rows.thread & 31
        here = self.rows.inner_sums + warp * (4 * width) + (lane >> 1) * 4
        sums = [p.cf(0.0)] * _RANKS
        for turn, (first, chunk) in enumerate(self.steps):
            words, following = self.asked, self.steps[turn + 1 : turn + 2]
            self.asked = self._ask(*following[0]) if following else []
            for rank, of_rank in enumerate(words):
                for a, y in zip(floats(of_rank, self.rows.op.x), chunks[chunk], strict=True):
                    sums[rank] = p.fma(a, y, sums[rank])
            if chunk + 1 == len(self.rows.inside):
                total = _warp_sums(sums, lane)
                even = p.equal(lane & 1, 0)
                p.when(even, lambda t=total, at=4 * first: p.store_shared(here, [t], at))
                sums = [p.cf(0.0)] * _RANKS
        if plan.split > 1:
            p.cluster_barrier()
        else:
            p.barrier()
        self._store(warps, width, factor)
        if plan.split > 1:
            p.cluster_arrive("release")  # the wait is at the end of the kernel

    def _store(self, warps: int, width: int, factor: p.Value | None) -> None:
        """The whole row: its adapter's ranks, and zeros."""
        rows, plan = self.rows, self.rows.plan
        columns, split = math.prod(rows.op.adapters), plan.split
        own = self.adapter - 1
        begin = rows.thread
        if split > 1:
            begin = begin + rows.rank * plan.threads
        out = p.offset(rows.inner, self.row, 2 * columns)
        sums = [rows.inner_sums]
        if split > 1:
            sums = [p.peer_address(rows.inner_sums, rank) for rank in range(split)]
        for first in range(0, columns, plan.threads * split):

            def one(column: p.Value) -> None:
                source = column // (self.n * self.rank)
                index = column // self.rank
                rank = column - index * self.rank
                adapter = index - source * self.n
                at = (source * self.rank + rank) * 4
                total = p.cf(0.0)
                for block in sums:
                    for warp in range(warps):
                        here, there = block + at, 4 * width * warp
                        if split > 1:
                            value = p.load_peer(here, there)
                        else:
                            value = p.load_float(here, there)
                        total = total + value
                if factor is not None:
                    total = total * factor
                total = p.where(p.equal(adapter, own), total, 0.0)
                p.store_global_half(p.offset(out, column, 2), p.narrow(total, rows.op.x))

            column = begin + first
            p.when(column < columns, lambda column=column, one=one: one(column))


def _warp_sums(values: list[p.Value], lane: p.Value) -> p.Value:
    """Sum each of 16 values over the warp; a lane gets the sum of value ``lane >> 1``."""
    distance = 16
    while len(values) > 1:
        half = len(values) // 2
        lower = lane & distance < 1
        keep = [p.where(lower, values[i], values[i + half]) for i in range(half)]
        send = [p.where(lower, values[i + half], values[i]) for i in range(half)]
        values = [k + p.shuffle_xor(s, distance) for k, s in zip(keep, send, strict=True)]
        distance //= 2
    return values[0] + p.shuffle_xor(values[0], distance)
