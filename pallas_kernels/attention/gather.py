"""Sum the parts of an attention's output that a cluster of blocks holds, without a second kernel.

    out = sum_i 2^(top_i - top) out_i / sum_i 2^(top_i - top) sum_i        top = max_i top_i

Each block sums its own parts through its shared memory.  It sends the sums to the block that owns
the query head (st.async, counted by a barrier there), and the owner sums those.  The order is
always the same.

Copies: none from device memory but sinks.  A warp sends its head's sum to the owner by st.async.
Waits: all threads at the block's barrier, until the parts are written, and for the cluster's start.
An owner's warp waits on the head's barrier until all blocks' bytes have come.
Writes: ``write`` of the caller, by one warp for each head.

    part     [part][head] out | padding, then [part][head] (maximum, sum)    written by the warps
    share    [owned head][block] out, maximum, sum                           by all blocks
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pallas_kernels import ptx as p
from pallas_kernels.attention.codes import hadamard_of_lanes
from pallas_kernels.attention.merge import combine, with_sink
from pallas_kernels.rows.fused_parts import packed

PAD = 8  # floats between two heads' parts: neighbouring heads in other banks
AT_ONCE = 8  # shares that are in registers together


@dataclasses.dataclass(frozen=True)
class Gather:
    """``parts`` of each of ``heads`` query heads in a block of ``warps``; ``cluster`` blocks."""

    head_dim: int
    parts: int
    heads: int
    cluster: int
    warps: int
    rotated: bool
    raw: bool = False  # ``finish`` gives what a block has, (maximum, sum, columns), undivided

    @property
    def owned(self) -> int:
        return -(-self.heads // self.cluster)

    @property
    def floats(self) -> tuple[int, int, int]:
        """Floats of shared memory: parts, shares, barriers."""
        parts = self.parts * self.heads * (self.head_dim + PAD + 2)
        if self.cluster == 1:
            return parts, 4, 4
        return parts, self.owned * self.cluster * (self.head_dim + 4), max(4, 2 * self.owned)

    def on(self, part_ref, share_ref, barrier_ref, thread, rank) -> Gathering:
        return Gathering(self, part_ref, share_ref, barrier_ref, thread, rank)


class Gathering:
    """A gather in a block's shared memory; everything is emitted while a kernel is traced."""

    def __init__(self, plan: Gather, part_ref, share_ref, barrier_ref, thread, rank):
        self.plan, self.thread, self.rank = plan, thread, rank
        self.warp, self.lane = thread >> 5, thread & 31
        self.columns = plan.head_dim // 32
        self.line = 4 * (plan.head_dim + PAD)
        self.parts = p.shared_address(part_ref)
        self.stats = self.parts + plan.parts * plan.heads * self.line
        self.share_line = 4 * plan.head_dim + 16
        self.shares, self.barriers = p.shared_address(share_ref), p.shared_address(barrier_ref)

    def start(self) -> None:
        """Announce that this block has begun.  All threads call it early.

        ``finish`` waits for all blocks before it sends.
        """
        plan = self.plan
        if plan.cluster == 1:
            return

        size = plan.cluster * (4 * plan.head_dim + 8)

        def initialise():
            for i in range(plan.owned):
                p.barrier_init(self.barriers + 8 * i, 1)
            p.barriers_ready()
            for i in range(plan.owned):
                p.barrier_expect(self.barriers + 8 * i, size)

        p.when(self.thread < 1, initialise)
        p.cluster_arrive()

    def part(self, part, head):
        """Addresses of a part's outputs and of its (maximum, sum)."""
        index = part * self.plan.heads + head
        return self.parts + index * self.line, self.stats + index * 8

    def empty(self, part, heads) -> None:
        """By a warp whose part has seen nothing, its ``heads``: no weight, and finite outputs."""
        for head in heads:
            at, at_stats = self.part(part, head)
            at = at + self.lane * (4 * self.columns)
            p.store_shared(at, [p.cf(0.0)] * self.columns)
            p.store_shared(at_stats, [p.cf(float("-inf")), p.cf(0.0)])

    def _combined(self, base, stats, step: int, step_stats: int, count: int):
        """(maximum, sum, this lane's columns) of ``count`` shares."""
        carry = []
        base = base + self.lane * (4 * self.columns)
        for first in range(0, count, AT_ONCE):
            loaded = []
            for i in range(first, min(first + AT_ONCE, count)):
                peak, whole = p.load_shared(stats, 2, i * step_stats, "f32")
                loaded.append((peak, whole, p.load_shared(base, self.columns, i * step, "f32")))
            peak, whole, *x = combine(carry + loaded)
            carry = [(peak, whole, x)]
        return carry[0]

    def _each(self, count: int, body: Callable) -> None:
        """body(i) for i below count, a warp each, in turn."""
        for first in range(0, count, self.plan.warps):
            index = self.warp + first
            p.when(index < count, lambda index=index: body(index))

    def finish(self, write: Callable, sinks_ref, query_head: Callable) -> None:
        """By all threads; write(head, this lane's columns), with ``raw`` write(head, maximum, sum,
        columns).

        A head that has seen no key gives zeros.  sinks_ref: float32, of all query heads, or None;
        ``query_head(head)`` is the number of a head there.
        """
        plan, self.write = self.plan, write
        self.sinks_ref, self.query_head = sinks_ref, query_head
        p.barrier()
        if plan.cluster > 1:
            p.cluster_wait()
        self._each(plan.heads, self._over_parts)
        if plan.cluster > 1:
            self._each(plan.owned, self._over_blocks)

    def _over_parts(self, head) -> None:
        """Sum the block's parts of a head, and send the sum to the block that owns it."""
        plan, vector = self.plan, min(self.columns, 4)
        step = plan.heads * self.line
        first = self.part(p.ci(0), head)
        peak, whole, x = self._combined(*first, step, 8 * plan.heads, plan.parts)
        if plan.cluster == 1:
            if plan.raw:
                return self.write(head, peak, whole, x)
            return self._done(head, [peak, whole, *x])
        owner = head % plan.cluster
        slot = head // plan.cluster
        at = slot * plan.cluster + self.rank
        to = p.peer_address(self.shares + at * self.share_line, owner)
        barrier = p.peer_address(self.barriers + slot * 8, owner)
        mine = to + self.lane * (4 * self.columns)
        for c in range(0, self.columns, vector):
            p.send_peer(mine, x[c : c + vector], barrier, 4 * c)
        stats, first = [peak, whole], self.lane < 1
        return p.when(first, lambda: p.send_peer(to, stats, barrier, 4 * plan.head_dim))

    def _over_blocks(self, slot) -> None:
        """Sum the blocks' shares of an owned head."""
        head = slot * self.plan.cluster + self.rank
        p.when(head < self.plan.heads, lambda: self._sum_shares(slot, head))

    def _sum_shares(self, slot, head) -> None:
        plan, line = self.plan, self.share_line
        p.barrier_wait(self.barriers + slot * 8, p.ci(0))
        at = self.shares + slot * (plan.cluster * line)
        stats = at + 4 * plan.head_dim
        peak, whole, x = self._combined(at, stats, line, line, plan.cluster)
        self._done(head, [peak, whole, *x])

    def _done(self, head, sums) -> None:
        number = None if self.sinks_ref is None else self.query_head(head)
        some = 0 < p.bits(sums[1])  # else the outputs may be NaN
        _, whole, *x = with_sink(sums, self.sinks_ref, number)
        inverse = p.divide(1.0, whole)
        x = [p.where(some, v * inverse, 0.0) for v in x]
        self.write(head, hadamard_of_lanes(x, self.lane, 32) if self.plan.rotated else x)


def write_parts(parts_ref, stats_ref, line: Callable, lane, head_dim: int) -> Callable:
    """``write`` of a raw gather: the lane's columns of parts [lines, H], and stats [lines, 2]."""
    columns = head_dim // 32

    def write(head, peak, whole, x):
        at = line(head)
        base = p.offset(p.address(parts_ref), at, 4 * head_dim)
        base = p.offset(base, lane, 4 * columns)
        p.store_global(base, x)
        stats = p.offset(p.address(stats_ref), at, 8)
        p.when(lane < 1, lambda: p.store_global(stats, [peak, whole]))

    return write


def write_heads(out_ref, line: Callable, lane, kind: str, head_dim: int) -> Callable:
    """``write`` of a gather: the lane's columns of out [heads, H] in line ``line(head)``."""

    def write(head, x):
        base = p.offset(p.address(out_ref), line(head), 2 * head_dim)
        base = p.offset(base, lane, 2 * head_dim // 32)
        p.store_global(base, packed(x, kind))

    return write
