"""``append_greedy`` of one row: a cluster of 8 blocks reads the logits once; before Hopper 8 blocks
leave their parts in device memory to a second kernel.

    token = argmax(logits [V])        log-probability = logits[token] - log(sum(exp(logits)))

    all          8 logits a thread, then 8 more (V <= 131072: two rounds)
    thread       its largest, the first where several are; sum of 2^((logit - largest) log2 e)
    warp         over lanes, then over the block's warps through shared memory       (``_merged``)
    over_warps   the block's (largest, token, sum) to the first block of the cluster
    over_blocks  in the first block, one warp: stop tokens; lane 0: the row's words, written

Copies: a thread loads its logits into registers, the row's five words, and its lane's stop token.
Waits: all threads for the kernel before (``await_kernel``); at the block's barrier, for the warps'
parts in shared memory; at the cluster's, until all blocks have begun.  The first block's warp 0
waits on its mbarrier for the parts of all 8 blocks.  With two kernels the second one's warp 0 joins
the parts behind a warp barrier.
Writes: lane 0 of the warp that joins the parts stores the row's words, the token and its
log-probability.  With two kernels lane 0 of each of the first one's blocks stores its part.

Numerics: float32.  A part's sum is relative to its own largest logit, as in an online softmax
(arXiv 1805.02867).

Floor: the logits, which lie in L2, and one launch.
"""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.launch import in_place, launch
from pallas_kernels.ptx import LOG2E, Value
from pallas_kernels.rows.fused_parts import KIND, floats

BLOCKS, THREADS = 8, 1024
LN2 = math.log(2.0)
_LARGEST, _NAN = float(jnp.finfo("float32").max), 0x7FC00000
_Part = tuple[Value, Value, Value]  # the largest logit, its token, the sum


def append_greedy(
    logits: jax.Array,
    rows: jax.Array,
    written: jax.Array,
    stop_ids: jax.Array,
    *,
    capacity: int | None,
) -> tuple[jax.Array, jax.Array]:
    """As ``rows.greedy.append_greedy``; logits ``[1, V]``."""
    stops = stop_ids.shape[0]
    options = {
        "vocabulary": logits.shape[1],
        "places": written.shape[2],
        "stops": stops,
        "capacity": capacity,
        "kind": KIND[logits.dtype.name],
    }

    def kernel(kept: tuple) -> list:
        rows, written = kept
        return launch(
            functools.partial(_Greedy, **options),
            {
                "logits": logits,
                "rows": rows,
                "written": written,
                "stop_ids": stop_ids if stops else None,
            },
            {},
            name="append_greedy",
            grid=1,
            cluster=BLOCKS,
            warpgroups=THREADS // 128,
            registers=True,
            scratch={"by_warp": 4 * (THREADS // 32), "by_block": 4 * BLOCKS, "barrier": 4},
        )

    if not gpu().clusters:
        return _in_two_kernels(logits, rows, written, stop_ids, options)
    return in_place(kernel, (rows, written))[1]


def _in_two_kernels(
    logits: jax.Array, rows: jax.Array, written: jax.Array, stop_ids: jax.Array, options: dict
) -> tuple[jax.Array, jax.Array]:
    """``append_greedy`` without clusters: the blocks leave their parts in device memory."""

    def first(gmem, smem) -> None:
        _Greedy(gmem, smem, **options).write_part()

    def second(gmem, smem) -> None:
        _Greedy(gmem, smem, **options).from_parts()

    (parts,) = launch(
        first,
        {"logits": logits},
        {"parts": jax.ShapeDtypeStruct((BLOCKS, 4), jnp.float32)},
        name="append_greedy_parts",
        grid=BLOCKS,
        warpgroups=THREADS // 128,
        registers=True,
        scratch={"by_warp": 4 * (THREADS // 32), "by_block": None, "barrier": None},
    )

    def kernel(kept: tuple) -> list:
        rows, written = kept
        return launch(
            second,
            {
                "parts": parts,
                "rows": rows,
                "written": written,
                "stop_ids": stop_ids if options["stops"] else None,
            },
            {},
            name="append_greedy",
            grid=1,
            registers=True,
            scratch={"by_warp": None, "by_block": 4 * BLOCKS, "barrier": None},
        )

    return in_place(kernel, (rows, written))[1]


class _Greedy:
    """The program of one thread.  Everything is emitted while the kernel is traced."""

    def __init__(self, gmem, smem, *, vocabulary, places, stops, capacity, kind):
        self.gmem, self.vocabulary, self.places = gmem, vocabulary, places
        self.stops, self.capacity, self.kind = stops, capacity, kind
        self.thread = p.register("tid.x")
        self.rank = p.register("cluster_ctarank" if gpu().clusters else "ctaid.x")
        self.warp, self.lane = self.thread >> 5, self.thread & 31
        self.by_warp, self.by_block, self.barrier = (
            None if ref is None else p.shared_address(ref)
            for ref in (smem.by_warp, smem.by_block, smem.barrier)
        )

    def run(self) -> None:
        p.when(self.thread < 1, self.initialise)
        p.cluster_arrive()  # no block sends before all have begun
        p.await_kernel()
        self.load_row()
        self.leave_parts()
        p.cluster_wait()
        p.when(self.warp < 1, self.over_warps)

    def load_row(self) -> None:
        gmem, lane = self.gmem, self.lane
        self.row = [p.load_global(p.address(gmem.rows), 1, 4 * i)[0] for i in range(5)]
        self.stop = None  # the lane's stop token
        if self.stops:
            place = p.offset(p.address(gmem.stop_ids), p.minimum(lane, self.stops - 1), 4)
            self.stop = p.load_global(place, 1)[0]

    def leave_parts(self) -> None:
        """Each warp's part to shared memory, then the block's barrier: any warp may read all."""
        lane, logits = self.lane, p.address(self.gmem.logits)
        part = _of_thread(logits, self.thread, self.rank, self.vocabulary, self.kind)
        part = _over_lanes(part, 32)
        at = self.by_warp + self.warp * 16
        p.when(lane < 1, lambda: p.store_shared(at, _words(part)))
        p.barrier()

    def write_part(self) -> None:
        """The first of two kernels: the block's part to device memory."""
        p.await_kernel()
        self.leave_parts()

        def write() -> None:
            part = _over_lanes(_loaded(self.by_warp, self.lane), THREADS // 32)
            at = p.offset(p.address(self.gmem.parts), self.rank, 16)
            p.when(self.lane < 1, lambda: p.store_global(at, _words(part)))

        p.when(self.warp < 1, write)

    def from_parts(self) -> None:
        """The second of two kernels, of which one warp works."""
        p.await_kernel()
        self.load_row()

        def copy() -> None:
            part = p.load_global(p.offset(p.address(self.gmem.parts), self.lane, 16), 4)
            p.store_shared(self.by_block + self.lane * 16, part)

        def work() -> None:
            p.when(self.lane < BLOCKS, copy)
            p.warp_barrier()
            self.over_blocks()

        p.when(self.warp < 1, work)

    def initialise(self) -> None:
        p.barrier_init(self.barrier, 1)
        p.barriers_ready()
        p.barrier_expect(self.barrier, 16 * BLOCKS)

    def over_warps(self) -> None:
        """The block's part to the first block of the cluster."""
        part = _over_lanes(_loaded(self.by_warp, self.lane), THREADS // 32)
        to = p.peer_address(self.by_block + self.rank * 16, 0)
        p.when(
            self.lane < 1, lambda: p.send_peer(to, _words(part), p.peer_address(self.barrier, 0))
        )
        p.when(self.rank < 1, self.wait_and_join)

    def wait_and_join(self) -> None:
        p.barrier_wait(self.barrier, p.ci(0))
        self.over_blocks()

    def over_blocks(self) -> None:
        """The token and its log-probability, and the row's words after it."""
        share = _loaded(self.by_block, self.lane & (BLOCKS - 1))
        best, token, total = _over_lanes(share, BLOCKS)
        # (newest token, is it done, tokens, length of the cache, step), as ``rows.greedy`` has them
        _, done, count, length, step = self.row
        live = grown = 1 - done
        is_none = p.equal(best, p.cf(-math.inf))
        if self.capacity is not None:
            past = p.below(self.capacity, length + live)
            is_none = is_none | past
            left = p.larger(self.capacity - length, 0)
            grown = p.smaller(live, left)
        token = p.where(is_none, 0, token)
        logprob = p.bits(p.log2(total) * -LN2)
        logprob = p.where(is_none, p.ci(_NAN), logprob)
        done_now = self.is_done(done, token)
        token, logprob = (p.where(p.equal(done, 0), x, 0) for x in (token, logprob))
        place = p.address(self.gmem.written)
        place = p.offset(place, p.minimum(step, self.places - 1), 4)

        def store() -> None:
            new = token, done_now, count + live, length + grown, step + 1
            for i, word in enumerate(new):
                p.store_global(p.address(self.gmem.rows), [word], 4 * i)
            p.store_global(place, [token])
            p.store_global(place, [logprob], 4 * self.places)

        p.when(self.lane < 1, store)

    def is_done(self, done: Value, token: Value) -> Value:
        """1 if the row has ended or any lane's stop token is the new one."""
        if self.stop is None:
            return done
        is_stop = p.where(p.equal(self.stop, token), p.ci(1), p.ci(0))
        return done | p.over_lanes(is_stop, p.WARP, operator.or_)


def _of_thread(logits: Value, thread: Value, rank: Value, vocabulary: int, kind: str) -> _Part:
    pieces, apart, asked = vocabulary // 8, BLOCKS * THREADS, []
    first = rank * THREADS + thread
    for start in range(0, pieces, apart):
        piece, is_one = first + start, None
        if start + apart > pieces:
            is_one, piece = piece < pieces, p.minimum(piece, pieces - 1)
        asked.append((piece, is_one, p.load_global(p.offset(logits, piece, 16), 4)))
    none = p.cf(-math.inf)
    best, token, values = none, first * 8, []
    for piece, is_one, words in asked:
        for i, value in enumerate(floats(words, kind)):
            value = p.minimum(p.maximum(value, none), _LARGEST)  # NaN: the other operand
            value = value if is_one is None else p.where(is_one, value, none)
            is_larger = value > best
            best = p.where(is_larger, value, best)
            token = p.where(is_larger, piece * 8 + i, token)
            values.append(value)
    base = p.where(p.equal(best, none), 0.0, best)
    total = p.cf(0.0)
    for value in values:
        total = total + _power(value - base)
    return best, token, total


def _merged(a: _Part, b: _Part) -> _Part:
    (best_a, token_a, total_a), (best_b, token_b, total_b) = a, b
    is_same, is_first = p.equal(best_a, best_b), token_a < token_b
    is_larger = best_a > best_b
    is_a = is_larger | (is_same & is_first)
    best, other = p.maximum(best_a, best_b), p.minimum(best_a, best_b)
    share = _power(other - best)
    share = p.where(p.equal(other, p.cf(-math.inf)), 0.0, share)
    own, less = (p.where(is_a, *x) for x in ((total_a, total_b), (total_b, total_a)))
    return best, p.where(is_a, token_a, token_b), p.fma(share, less, own)


def _over_lanes(part: _Part, lanes: int) -> _Part:
    while lanes := lanes // 2:
        best, token, total = (p.shuffle_xor(x, lanes) for x in part)
        part = _merged(part, (best, token, total))
    return part


def _words(part: _Part) -> list[Value]:
    best, token, total = part
    return [best, p.from_bits(token), total, p.cf(0.0)]


def _loaded(base: Value, index: Value) -> _Part:
    best, token, total, _ = p.load_shared(base + index * 16, 4, 0, "f32")
    return best, p.bits(token), total


def _power(x: Value) -> Value:
    """e^x for x <= 0."""
    return p.exp2(x * LOG2E)
