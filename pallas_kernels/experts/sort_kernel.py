"""Pairs by expert, and the parts that the kernel of many pairs computes, in one launch.

    all      a pair's expert | its place among the block's pairs of that expert, by an atomic count
    all      an expert's pairs in the blocks before, and in all blocks, from their shared memory
    a warp   where each expert's pairs and parts begin: sums over the lanes
    all      a pair at its place | in the first block an expert's rows of the table

Up to ``LONE`` pairs have one block, more have a cluster of ``BLOCKS``.
XLA takes about ten kernels for the same (``blocks.parts_of_pairs``).  The order of one expert's
pairs differs from call to call.  No result depends on it: the kernel of many pairs computes a pair
from its own row and expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.experts.blocks import SortedPairs, most_blocks
from pallas_kernels.jax_internals import arith
from pallas_kernels.launch import launch
from pallas_kernels.ptx import Value

THREADS, BLOCKS = 1024, 8
LONE = 8 * THREADS  # pairs of one block
MOST_PAIRS, MOST_EXPERTS = 16 * THREADS * BLOCKS, THREADS - 1


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
    order, work = launch(
        body,
        {"experts": experts},
        out,
        name="experts_sort",
        grid=1,
        cluster=blocks,
        warpgroups=THREADS // 128,
        registers=True,
        scratch={name: each for name in ("counts", "before", "totals", "begins", "parts")},
    )
    return SortedPairs(order, work)


def _padded(n_experts: int) -> int:
    """Words of shared memory: a multiple of 32, with one for pairs without an expert."""
    return -(-(n_experts + 1) // 32) * 32


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
        self.thread, self.rank = p.register("tid.x"), p.register("cluster_ctarank")
        self.lane = p.masked(self.thread, 31)

    def run(self) -> None:
        each = _padded(self.n_experts)
        zero = lambda: p.store_shared(self.at(self.counts, self.thread), [p.ci(0)])  # noqa: E731
        is_counted = p.less(self.thread, each)
        p.when(is_counted, zero)
        p.await_kernel()
        p.barrier()
        at_once = THREADS * self.blocks
        first = p.add(self.thread, p.mul(self.rank, THREADS))
        pairs = [p.add(first, at_once * i) for i in range(-(-self.n_pairs // at_once))]
        experts = [self.expert_of(pair) for pair in pairs]  # all loads are on their way at once
        found = [self.counted(pair, expert) for pair, expert in zip(pairs, experts, strict=True)]
        if self.blocks > 1:
            p.cluster_barrier()
            p.when(is_counted, self.over_blocks)
            p.cluster_arrive()  # waited for at the end: the others still read this block's counts
        p.barrier()
        p.when(p.less(self.thread, 32), self.sum_up)
        p.barrier()
        for index, expert, place in found:
            self.place(index, expert, place)
        is_writer = p.less(p.add(self.thread, p.mul(self.rank, THREADS)), self.n_experts)
        p.when(is_writer, self.write_rows)
        if self.blocks > 1:
            p.cluster_wait()

    def over_blocks(self) -> None:
        """Leave the pairs of this thread's expert in the blocks before this one, and in all."""
        before, total = p.ci(0), p.ci(0)
        for block in range(self.blocks):
            peer = p.peer_address(self.at(self.counts, self.thread), block)
            count = p.bits(p.load_peer(peer))
            is_before = p.less(p.ci(block), self.rank)
            before = p.add(before, arith.select(is_before, count, p.ci(0)))
            total = p.add(total, count)
        p.store_shared(self.at(self.before, self.thread), [before])
        p.store_shared(self.at(self.totals, self.thread), [total])

    @property
    def all_counts(self) -> Value:
        """Where the experts' numbers of pairs are."""
        return self.counts if self.blocks == 1 else self.totals

    def at(self, base: Value, index: Value) -> Value:
        return p.add(base, p.mul(index, 4))

    def expert_of(self, index: Value) -> Value:
        """A pair's expert as it is stored; the last pair's where there is none."""
        at = p.smaller(index, p.ci(self.n_pairs - 1))
        return p.load_global(p.offset(self.experts, at, 4), 1)[0]

    def counted(self, index: Value, expert: Value) -> tuple[Value, Value, Value]:
        """(index, expert, place among the block's pairs of the expert) of a pair; n_experts where
        there is none.

        The count of n_experts is in no sum.
        """
        expert = p.smaller(p.larger(expert, p.ci(0)), p.ci(self.largest))
        expert = arith.select(p.less(index, self.n_pairs), expert, p.ci(self.n_experts))
        return index, expert, p.add_shared(self.at(self.counts, expert), p.ci(1))

    def sum_up(self) -> None:
        """A lane has neighbouring experts: what lies before them, then each of them."""
        per = _padded(self.n_experts) // 32
        first = p.mul(self.lane, per)

        def count_of(i: int) -> Value:
            (count,) = p.load_shared(self.at(self.all_counts, p.add(first, i)), 1)
            is_expert = p.less(p.add(first, i), self.n_experts)
            return arith.select(is_expert, count, p.ci(0))

        counts = [count_of(i) for i in range(per)]
        parts = [arith.divui(p.add(n, self.size - 1), p.ci(self.size)) for n in counts]
        ends = []
        for own in (p.add(*counts, 0), p.add(*parts, 0)):
            total = own
            for distance in (1, 2, 4, 8, 16):
                below = p.shuffle_up(total, distance)
                is_there = p.less(self.lane, distance)
                total = p.add(total, arith.select(is_there, p.ci(0), below))
            ends.append((arith.subi(total, own), total))
        (begin, _), (part, count) = ends
        for i in range(per):
            expert = p.add(first, i)
            p.store_shared(self.at(self.begins, expert), [begin])
            p.store_shared(self.at(self.parts, expert), [part])
            begin, part = p.add(begin, counts[i]), p.add(part, parts[i])
        none = p.ci(0)
        is_last = p.equal(self.lane, 31)
        p.when(is_last, lambda: p.store_global(self.work, [count, none, none, none]))

    def place(self, index: Value, expert: Value, rank: Value) -> None:
        def store() -> None:
            (begin,) = p.load_shared(self.at(self.begins, expert), 1)
            if self.blocks > 1:
                begin = p.add(begin, p.load_shared(self.at(self.before, expert), 1)[0])
            p.store_global(p.offset(self.order, p.add(begin, rank), 4), [index])

        p.when(p.less(expert, self.n_experts), store)

    def write_rows(self) -> None:
        """Write the rows of the expert that this thread has."""
        expert = self.thread
        count, begin, part = (
            p.load_shared(self.at(base, expert), 1)[0]
            for base in (self.all_counts, self.begins, self.parts)
        )
        end = p.add(begin, count)

        def row(first: Value, carry: list[Value]) -> list[Value]:
            (at,) = carry
            stop = p.smaller(p.add(first, self.size), end)
            p.store_global(p.offset(self.work, at, 16), [expert, first, stop, p.ci(0)])
            return [p.add(at, 1)]

        p.loop(begin, end, self.size, [p.add(part, 1)], row)
