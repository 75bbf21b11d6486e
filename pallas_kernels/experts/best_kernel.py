"""The largest of each row, a warp a row; and the parts of it that ``route_kernel`` has too.

    values[t, j], places[t, j] = the j-th largest of scores[t, :N], and its place;    j < k

    warp     a row's scores -> registers, lane + 32 i; k times the largest, by two ``redux``
    lane j   stores the j-th

Copies: a lane loads its scores into registers.  Waits: for the kernel before; no barrier.
Writes: lane j stores the j-th largest and its place.

Floor: a launch and a round trip to memory. XLA sorts whole rows in a kernel of its own, copies the
first k of each, and compiles the sort anew for every layer (0.2 s).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.experts.route_plan import BestPlan
from pallas_kernels.jax_internals import arith
from pallas_kernels.launch import launch
from pallas_kernels.ptx import Value

WARPS = 4  # of a block; each has a row


@functools.partial(jax.jit, static_argnames="plan")
def best_of_rows(scores: jax.Array, *, plan: BestPlan) -> tuple[jax.Array, jax.Array]:
    """(float32 ``[T, k]``, int32 ``[T, k]``): the largest of ``scores[T, N]`` and their places."""
    rows, k = plan.rows, plan.k
    out = {
        "values": jax.ShapeDtypeStruct((rows, k), jnp.float32),
        "places": jax.ShapeDtypeStruct((rows, k), jnp.int32),
    }

    def body(gmem, smem) -> None:
        del smem
        thread, block = p.register("tid.x"), p.register("ctaid.x")
        lane = thread & 31
        row = block * WARPS + (thread >> 5)
        at = p.offset(p.address(gmem.scores), p.smaller(row, rows - 1), 4 * plan.n)
        p.await_kernel()
        scores = []
        for i in range(plan.per_lane):
            place = p.smaller(lane + 32 * i, plan.n - 1)
            scores.append(p.from_bits(p.load_global(p.offset(at, place, 4), 1)[0]))
        best, places = largest(scores, lane, plan.n, k)
        value, place = of_lane(lane, best), of_lane(lane, places)

        def store() -> None:
            to = row * k + lane
            p.store_global(p.offset(p.address(gmem.values), to, 4), value)
            p.store_global(p.offset(p.address(gmem.places), to, 4), place)

        p.when((lane < k) & (row < rows), store)

    return tuple(
        launch(
            body,
            {"scores": scores},
            out,
            name="best_of_rows",
            grid=-(-rows // WARPS),
            warpgroups=WARPS // 4,
            registers=True,
        )
    )


def largest(
    scores: Sequence[Value], lane: Value, n: int, k: int
) -> tuple[list[Value], list[Value]]:
    """The k largest of n scores, of which a lane has lane, lane + 32 and so on, and their places:
    in descending order, and of equal ones the lowest place first. Every lane gets all of them.

    Whatever is behind the n-th is never chosen.
    """
    keys = [_ordered(score) for score in scores]
    # 0 is below the key of any float, so that no place comes twice.
    for i in range(len(keys)):
        if 32 * (i + 1) > n:
            keys[i] = p.where(lane + 32 * i < n, keys[i], 0)
    best, places = [], []
    for _ in range(k):
        top = p.warp_largest(functools.reduce(arith.maxui, keys))
        own = p.ci(0xFFFFFFFF)
        for i in reversed(range(len(keys))):
            own = p.where(p.equal(keys[i], top), lane + 32 * i, own)
        place = p.warp_smallest(own)
        for i in range(len(keys)):
            is_it = p.equal(place, lane + 32 * i)
            keys[i] = p.where(is_it, 0, keys[i])
        best.append(_unordered(top))
        places.append(place)
    return best, places


def of_lane(lane: Value, values: Sequence[Value]) -> Value:
    """The lane's of the values that every lane has."""
    mine = values[0]
    for j in range(1, len(values)):
        mine = p.where(p.equal(lane, j), values[j], mine)
    return mine


def _ordered(value: Value) -> Value:
    """A word whose unsigned order is that of floats.  -0 is 0 first."""
    word = p.bits(value + 0.0)
    negative = p.bit(word, 31)
    flip = p.where(negative, p.ci(0xFFFFFFFF), p.ci(0x80000000))
    return word ^ flip


def _unordered(word: Value) -> Value:
    flip = p.where(p.bit(word, 31), p.ci(0x80000000), p.ci(0xFFFFFFFF))
    return p.from_bits(word ^ flip)
