"""``append_greedy`` of one row on Hopper: a cluster of 8 blocks reads the logits once.

    all      8 logits a thread, then 8 more (V <= 131072: two rounds)
    thread   its largest, the first where several are; sum of 2^((logit - largest) log2 e)
    warp     over lanes, then over the block's warps through shared memory           (``_merged``)
    block    its (largest, token, sum) to the first block of the cluster
    first    over blocks; one warp: stop tokens; lane 0: the row's words, written

Numerics: float32; a part's sum is relative to its own largest logit, as in an online softmax
(arXiv 1805.02867).

Floor: the logits, which lie in L2, and one launch.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.fused_parts import KIND, floats
from pallas_kernels.jax_internals import arith
from pallas_kernels.launch import in_place, launch
from pallas_kernels.ptx import LOG2E, Value

CLUSTER, THREADS = 8, 1024
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
    body = functools.partial(
        _body,
        vocabulary=logits.shape[1],
        places=written.shape[2],
        stops=stops,
        capacity=capacity,
        kind=KIND[logits.dtype.name],
    )

    def kernel(kept: tuple) -> jax.Array:
        return launch(
            body,
            (logits, *kept, stop_ids if stops else None),
            (),
            name="append_greedy",
            grid=1,
            cluster=CLUSTER,
            warpgroups=THREADS // 128,
            registers=True,
            scratch=[4 * (THREADS // 32), 4 * CLUSTER, 4],
        )

    return in_place(kernel, (rows, written))[1]


def _body(
    logits_ref,
    rows_ref,
    written_ref,
    *refs,
    vocabulary: int,
    places: int,
    stops: int,
    capacity: int | None,
    kind: str,
) -> None:
    *stops_refs, warps_ref, blocks_ref, barrier_ref = refs
    thread, rank = p.register("tid.x"), p.register("cluster_ctarank")
    warp, lane = p.shift_right(thread, 5), p.masked(thread, 31)
    by_warp, by_block, barrier = map(p.shared_address, (warps_ref, blocks_ref, barrier_ref))

    def initialise() -> None:
        p.barrier_init(barrier, 1)
        p.barriers_ready()
        p.barrier_expect(barrier, 16 * CLUSTER)

    p.when(p.less(thread, 1), initialise)
    p.cluster_arrive()  # nobody sends before all have begun
    p.await_kernel()
    row = [p.load_global(p.address(rows_ref), 1, 4 * i)[0] for i in range(5)]
    stop = [p.offset(p.address(ref), p.minimum(lane, stops - 1), 4) for ref in stops_refs]
    stop = [p.load_global(place, 1)[0] for place in stop]
    part = _over_lanes(_of_thread(p.address(logits_ref), thread, rank, vocabulary, kind), 32)
    at = p.add(by_warp, p.mul(warp, 16))
    p.when(p.less(lane, 1), lambda: p.store_shared(at, _words(part)))
    p.barrier()
    p.cluster_wait()

    def over_warps() -> None:
        part = _over_lanes(_loaded(by_warp, lane), THREADS // 32)
        to = p.peer_address(p.add(by_block, p.mul(rank, 16)), 0)
        p.when(p.less(lane, 1), lambda: p.send_peer(to, _words(part), p.peer_address(barrier, 0)))
        p.when(p.less(rank, 1), over_blocks)

    def over_blocks() -> None:
        p.barrier_wait(barrier, p.ci(0))
        share = _loaded(by_block, p.masked(lane, CLUSTER - 1))
        best, token, total = _over_lanes(share, CLUSTER)
        _, done, count, length, step = row
        live = grown = arith.subi(p.ci(1), done)
        is_none = _equal(best, p.cf(-math.inf))
        if capacity is not None:
            is_none = arith.ori(is_none, p.below(p.ci(capacity), p.add(length, live)))
            grown = p.smaller(live, p.larger(arith.subi(p.ci(capacity), length), p.ci(0)))
        token = arith.select(is_none, p.ci(0), token)
        logprob = p.bits(arith.mulf(p.log2(total), p.cf(-LN2)))
        logprob = arith.select(is_none, p.ci(_NAN), logprob)
        done_now = done
        for own in stop:  # none, or the lane's
            is_stop = arith.select(p.equal(own, token), p.ci(1), p.ci(0))
            for lanes in (16, 8, 4, 2, 1):
                is_stop = arith.ori(is_stop, p.shuffle_xor(is_stop, lanes))
            done_now = arith.ori(done, is_stop)
        token, logprob = (arith.select(p.equal(done, 0), x, p.ci(0)) for x in (token, logprob))
        place = p.offset(p.address(written_ref), p.minimum(step, places - 1), 4)

        def store() -> None:
            new = token, done_now, p.add(count, live), p.add(length, grown), p.add(step, 1)
            for i, word in enumerate(new):
                p.store_global(p.address(rows_ref), [word], 4 * i)
            p.store_global(place, [token])
            p.store_global(place, [logprob], 4 * places)

        p.when(p.less(lane, 1), store)

    p.when(p.less(warp, 1), over_warps)


def _of_thread(logits: Value, thread: Value, rank: Value, vocabulary: int, kind: str) -> _Part:
    pieces, apart, asked = vocabulary // 8, CLUSTER * THREADS, []
    first = p.add(p.mul(rank, THREADS), thread)
    for start in range(0, pieces, apart):
        piece, is_one = p.add(first, start), None
        if start + apart > pieces:
            is_one, piece = p.less(piece, pieces), p.minimum(piece, pieces - 1)
        asked.append((piece, is_one, p.load_global(p.offset(logits, piece, 16), 4)))
    none = p.cf(-math.inf)
    best, token, values = none, p.mul(first, 8), []
    for piece, is_one, words in asked:
        for i, value in enumerate(floats(words, kind)):
            value = p.minimum(p.maximum(value, none), p.cf(_LARGEST))  # NaN: the other operand
            value = value if is_one is None else arith.select(is_one, value, none)
            is_larger = arith.cmpf(arith.CmpFPredicate.OGT, value, best)
            best = arith.select(is_larger, value, best)
            token = arith.select(is_larger, p.add(p.mul(piece, 8), i), token)
            values.append(value)
    base = arith.select(_equal(best, none), p.cf(0.0), best)
    total = p.cf(0.0)
    for value in values:
        total = arith.addf(total, _power(arith.subf(value, base)))
    return best, token, total


def _merged(a: _Part, b: _Part) -> _Part:
    (best_a, token_a, total_a), (best_b, token_b, total_b) = a, b
    is_same, is_first = _equal(best_a, best_b), p.less(token_a, token_b)
    is_larger = arith.cmpf(arith.CmpFPredicate.OGT, best_a, best_b)
    is_a = arith.ori(is_larger, arith.andi(is_same, is_first))
    best, other = p.maximum(best_a, best_b), p.minimum(best_a, best_b)
    share = _power(arith.subf(other, best))
    share = arith.select(_equal(other, p.cf(-math.inf)), p.cf(0.0), share)
    own, less = (arith.select(is_a, *x) for x in ((total_a, total_b), (total_b, total_a)))
    return best, arith.select(is_a, token_a, token_b), p.fma(share, less, own)


def _over_lanes(part: _Part, lanes: int) -> _Part:
    while lanes := lanes // 2:
        best, token, total = (p.shuffle_xor(x, lanes) for x in part)
        part = _merged(part, (best, token, total))
    return part


def _words(part: _Part) -> list[Value]:
    best, token, total = part
    return [best, p.from_bits(token), total, p.cf(0.0)]


def _loaded(base: Value, index: Value) -> _Part:
    best, token, total, _ = p.load_shared(p.add(base, p.mul(index, 16)), 4, 0, "f32")
    return best, p.bits(token), total


def _power(x: Value) -> Value:
    """e^x for x <= 0."""
    return p.exp2(arith.mulf(x, p.cf(LOG2E)))


def _equal(a: Value, b: Value) -> Value:
    return arith.cmpf(arith.CmpFPredicate.OEQ, a, b)
