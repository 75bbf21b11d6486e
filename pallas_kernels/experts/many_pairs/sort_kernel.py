"""Pairs by expert, and the parts that the kernel of many pairs computes, in one launch.

    order [P] = the pairs, by their expert        work[1 + i] = (expert, first, end) of part i

    all      a pair's expert | its place among the block's pairs of that expert, by an atomic count
    all      an expert's pairs in the blocks before, and in all blocks, from their shared memory
    a warp   where each expert's pairs and parts begin: sums over the lanes
    a warp   where they begin among the block's own pairs
    all      a pair at its place among these, in shared memory
    all      the block's pairs in that order, neighbours of one expert by neighbouring threads
    thread   by its number in the first block, an expert: that expert's rows of the table

Copies: a thread loads its pairs' experts into registers.
Waits: all threads for the kernel before, at block barriers between steps that share memory, and at
the cluster's before they read other blocks' counts.  No block ends before all have read its counts.
Writes: neighbouring threads store neighbours of the order.  A thread of the first block stores an
expert's rows of the table, and a lane of each block the number of parts.

Up to ``LONE`` pairs have one block, more have a cluster of ``BLOCKS``.
XLA takes about ten kernels for the same (``blocks.parts_of_pairs``).  The order of one expert's
pairs differs from call to call.  No result depends on it: the kernel of many pairs computes a pair
from its own row and expert.

``sorted_rows`` brings rows of x into that order.  The kernel of many pairs reads such rows by the
copy engine, and two blocks of a cluster may share them.  A warp copies a row at a time through
registers, 16 bytes a lane, with all of the row's loads under way at once.  It waits for the kernel
before, and at no barrier.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.experts.blocks import SortedPairs, most_blocks
from pallas_kernels.launch import launch
from pallas_kernels.ptx import Value

THREADS, BLOCKS = 1024, 8
LONE = 8 * THREADS  # pairs of one block
MOST_PAIRS, MOST_EXPERTS = 16 * THREADS * BLOCKS, THREADS - 1
_INDEX_BITS = (MOST_PAIRS - 1).bit_length()


def parts_of_pairs(
    experts: jax.Array, n_experts: int, size: int, *, partial: bool = True
) -> SortedPairs:
    """As ``blocks.parts_of_pairs``, but for the order of one expert's pairs.

    experts: int32 ``[P]``, up to ``MOST_PAIRS``; up to ``MOST_EXPERTS`` experts.  An index outside
    of [0, n_experts) is clamped to it.  With ``partial``, n_experts is one that has no part.
    The table behind the last part, and the order there, may hold anything.
    """
    (n_pairs,) = experts.shape
    out = {
        "order": jax.ShapeDtypeStruct((n_pairs,), jnp.int32),
        "work": jax.ShapeDtypeStruct((1 + most_blocks(n_pairs, n_experts, size), 4), jnp.int32),
    }

    blocks = 1 if n_pairs <= LONE else BLOCKS

    def body(gmem, smem) -> None:
        _Sort(gmem, smem, n_pairs, n_experts, size, blocks, n_experts - (not partial)).run()

    each = _padded(n_experts)
    scratch = dict.fromkeys(("counts", "before", "totals", "begins", "parts", "own", "shift"), each)
    order, work = launch(
        body,
        {"experts": experts},
        out,
        name="experts_sort",
        grid=1,
        cluster=blocks,
        warpgroups=THREADS // 128,
        registers=True,
        scratch={**scratch, "sorted": THREADS * _turns(n_pairs, blocks)},
    )
    return SortedPairs(order, work)


def _padded(n_experts: int) -> int:
    """Words of shared memory: a multiple of 32, with one for pairs without an expert."""
    return -(-(n_experts + 1) // 32) * 32


def _turns(n_pairs: int, blocks: int) -> int:
    """Pairs of a thread, at most."""
    return -(-n_pairs // (THREADS * blocks))


class _Sort:
    """The program of one thread.  Everything is emitted while the kernel is traced."""

    def __init__(
        self, gmem, smem, n_pairs: int, n_experts: int, size: int, blocks: int, largest: int
    ):
        self.n_pairs, self.n_experts, self.size = n_pairs, n_experts, size
        self.blocks, self.largest = blocks, largest
        self.experts, self.order, self.work = (
            p.address(ref) for ref in (gmem.experts, gmem.order, gmem.work)
        )
        self.counts, self.before, self.totals, self.begins, self.parts = (
            p.shared_address(ref)
            for ref in (smem.counts, smem.before, smem.totals, smem.begins, smem.parts)
        )
        # Where the block's own pairs of an expert begin, and how far from there they are in all.
        self.own, self.shift = p.shared_address(smem.own), p.shared_address(smem.shift)
        self.sorted = p.shared_address(smem.sorted)
        self.thread, self.rank = p.register("tid.x"), p.register("cluster_ctarank")
        self.lane = self.thread & 31

    def run(self) -> None:
        each = _padded(self.n_experts)
        zero = lambda: p.store_shared(self.at(self.counts, self.thread), [p.ci(0)])  # noqa: E731
        is_counted = self.thread < each
        p.when(is_counted, zero)
        p.await_kernel()
        p.barrier()
        at_once = THREADS * self.blocks
        first = self.thread + self.rank * THREADS
        turns = _turns(self.n_pairs, self.blocks)
        pairs = [first + at_once * i for i in range(turns)]
        experts = [self.expert_of(pair) for pair in pairs]  # all loads are on their way at once
        found = [self.counted(pair, expert) for pair, expert in zip(pairs, experts, strict=True)]
        if self.blocks > 1:
            p.cluster_barrier()
            p.when(is_counted, self.over_blocks)
            p.cluster_arrive()  # waited for at the end: the others still read this block's counts
        p.barrier()
        p.when(self.thread < 32, self.sum_up)
        p.when(p.equal(self.thread >> 5, 1), self.sum_own)
        p.barrier()
        for index, expert, place in found:
            self.place(index, expert, place)
        p.when(is_counted, self.leave_shift)
        p.barrier()
        (count,) = p.load_shared(self.at(self.own, p.ci(self.n_experts)), 1)
        for i in range(turns):
            place = self.thread + THREADS * i
            p.when(place < count, functools.partial(self.write, place))
        is_writer = self.thread + self.rank * THREADS < self.n_experts
        p.when(is_writer, self.write_rows)
        if self.blocks > 1:
            p.cluster_wait()

    def over_blocks(self) -> None:
        """Leave the pairs of this thread's expert in the blocks before this one, and in all."""
        before, total = p.ci(0), p.ci(0)
        for block in range(self.blocks):
            peer = p.peer_address(self.at(self.counts, self.thread), block)
            count = p.bits(p.load_peer(peer))
            is_before = block < self.rank
            before = before + p.where(is_before, count, 0)
            total = total + count
        p.store_shared(self.at(self.before, self.thread), [before])
        p.store_shared(self.at(self.totals, self.thread), [total])

    @property
    def all_counts(self) -> Value:
        """Where the experts' numbers of pairs are."""
        return self.counts if self.blocks == 1 else self.totals

    def at(self, base: Value, index: Value) -> Value:
        return base + index * 4

    def expert_of(self, index: Value) -> Value:
        """A pair's expert as it is stored; the last pair's where there is none."""
        at = p.smaller(index, self.n_pairs - 1)
        return p.load_global(p.offset(self.experts, at, 4), 1)[0]

    def counted(self, index: Value, expert: Value) -> tuple[Value, Value, Value]:
        """(index, expert, place among the block's pairs of the expert) of a pair; n_experts where
        there is none.

        The count of n_experts is in no sum.
        """
        expert = p.smaller(p.larger(expert, 0), self.largest)
        expert = p.where(index < self.n_pairs, expert, p.ci(self.n_experts))
        return index, expert, p.add_shared(self.at(self.counts, expert), p.ci(1))

    def counts_of(self, base: Value) -> tuple[Value, list[Value]]:
        """A lane's first expert, and the pairs of the neighbouring experts that it has."""
        per = _padded(self.n_experts) // 32
        first = self.lane * per

        def count_of(i: int) -> Value:
            (count,) = p.load_shared(self.at(base, first + i), 1)
            is_expert = first + i < self.n_experts
            return p.where(is_expert, count, 0)

        return first, [count_of(i) for i in range(per)]

    def before_lane(self, counts: list[Value]) -> tuple[Value, Value]:
        """The sum over the lanes before this one, and with this one."""
        own = total = functools.reduce(operator.add, counts)
        for distance in (1, 2, 4, 8, 16):
            below = p.shuffle_up(total, distance)
            is_there = self.lane < distance
            total = total + p.where(is_there, 0, below)
        return total - own, total

    def sum_up(self) -> None:
        """A lane has neighbouring experts: what lies before them, then each of them."""
        first, counts = self.counts_of(self.all_counts)
        parts = [(n + (self.size - 1)) // self.size for n in counts]
        (begin, _), (part, count) = self.before_lane(counts), self.before_lane(parts)
        for i, own in enumerate(counts):
            expert = first + i
            p.store_shared(self.at(self.begins, expert), [begin])
            p.store_shared(self.at(self.parts, expert), [part])
            begin, part = begin + own, part + parts[i]
        none = p.ci(0)
        is_last = p.equal(self.lane, 31)
        p.when(is_last, lambda: p.store_global(self.work, [count, none, none, none]))

    def sum_own(self) -> None:
        """The same for the pairs of this block."""
        first, counts = self.counts_of(self.counts)
        begin, _ = self.before_lane(counts)
        for i, own in enumerate(counts):
            p.store_shared(self.at(self.own, first + i), [begin])
            begin = begin + own

    def leave_shift(self) -> None:
        """How far this thread's expert's pairs are from their place among the block's."""
        (begin,) = p.load_shared(self.at(self.begins, self.thread), 1)
        if self.blocks > 1:
            begin = begin + p.load_shared(self.at(self.before, self.thread), 1)[0]
        (own,) = p.load_shared(self.at(self.own, self.thread), 1)
        p.store_shared(self.at(self.shift, self.thread), [begin - own])

    def place(self, index: Value, expert: Value, rank: Value) -> None:
        def store() -> None:
            (begin,) = p.load_shared(self.at(self.own, expert), 1)
            both = (expert << _INDEX_BITS) + index
            p.store_shared(self.at(self.sorted, begin + rank), [both])

        p.when(expert < self.n_experts, store)

    def write(self, place: Value) -> None:
        """Write the block's pair at this place to its place among all."""
        (both,) = p.load_shared(self.at(self.sorted, place), 1)
        expert = both >> _INDEX_BITS
        (shift,) = p.load_shared(self.at(self.shift, expert), 1)
        index = both & ((1 << _INDEX_BITS) - 1)
        p.store_global(p.offset(self.order, place + shift, 4), [index])

    def write_rows(self) -> None:
        """Write the rows of the expert that this thread has."""
        expert = self.thread
        count, begin, part = (
            p.load_shared(self.at(base, expert), 1)[0]
            for base in (self.all_counts, self.begins, self.parts)
        )
        end = begin + count

        def row(first: Value, carry: list[Value]) -> list[Value]:
            (at,) = carry
            stop = p.smaller(first + self.size, end)
            p.store_global(p.offset(self.work, at, 16), [expert, first, stop, p.ci(0)])
            return [at + 1]

        p.loop(begin, end, self.size, [part + 1], row)


# --- rows of x by expert --------------------------------------------------------------------------


WARPS = 8  # of a block
_BLOCKS = 4  # of a multiprocessor, at most by registers
_AT_ONCE = 12  # vectors of 16 bytes that a lane has under way


def sorted_rows(x: jax.Array, order: jax.Array, fan: int) -> jax.Array:
    """Rows of x in the order of pairs, ``[P, K]``.

    x: ``[P / fan, K]``, a row of a multiple of 16 bytes.  order: int32 ``[P]``; an entry past the
    last pair, which no part has, may be anything.
    """
    n_rows, k = x.shape
    n_pairs, row_bytes = order.shape[0], k * x.dtype.itemsize
    blocks = gpu().sms * _BLOCKS

    def body(gmem, smem) -> None:
        del smem
        source, pairs, out = p.address(gmem.x), p.address(gmem.order), p.address(gmem.out)
        p.await_kernel()
        thread = p.register("tid.x")
        lane = thread & 31
        first = p.register("ctaid.x") * WARPS + (thread >> 5)

        def copy(i: Value, _: list[Value]) -> list[Value]:
            (pair,) = p.load_global(p.offset(pairs, i, 4), 1)
            row = pair if fan == 1 else pair // fan
            begin = p.offset_rows(source, p.minimum(row, n_rows - 1), row_bytes)
            copy_row(begin, p.offset_rows(out, i, row_bytes), lane, row_bytes // 16)
            return []

        p.loop(first, n_pairs, blocks * WARPS, [], copy)

    return launch(
        body,
        {"x": x, "order": order},
        {"out": jax.ShapeDtypeStruct((n_pairs, k), x.dtype)},
        name="experts_rows",
        grid=blocks,
        warpgroups=WARPS // 4,
        registers=True,
    )[0]


def copy_row(source: Value, to: Value, lane: Value, vectors: int) -> None:
    """Copy so many vectors of 16 bytes by a warp.  Lanes past the end copy the last one again."""
    for c in range(0, vectors, 32 * _AT_ONCE):
        count = -(-min(vectors - c, 32 * _AT_ONCE) // 32)
        places = [lane + (c + 32 * i) for i in range(count)]
        if c + 32 * count > vectors:
            places[-1] = p.minimum(places[-1], vectors - 1)
        found = [p.load_global(p.offset(source, at, 16), 4) for at in places]
        for at, words in zip(places, found, strict=True):
            p.store_global(p.offset(to, at, 16), words)
