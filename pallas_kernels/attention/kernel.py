"""Attention of one query token per row over a cache, on Hopper: one pass over the cache's bytes.

A team of warps takes steps of 16 (32) tokens of one row, a warp one kv head of them, with the G
query heads that share it as the narrow side of the mma (``attention.tile``).

    every warp      its share of the team's copies: K 0 | V 0 | K 1 ... into a ring, counted by one
                    barrier per slot (``attention.ring``)
                    wait K | scores, tiles of 16 tokens x 8 heads | release K
                    | running maximum, exp2 | weights transposed in registers
                    | refill the last V | wait V | outputs += V^T weights | release V | refill K
    short rows      the teams of a block, or of a cluster of blocks, take a row's steps in turn, and
                    sum their parts where they are (``attention.gather``)
    long rows       a team takes a chunk of tokens, its parts go to memory, and a second kernel sums
                    them (``attention.merge``); so rows of unequal lengths share the SMs

Neither operand is converted or transposed in shared memory.  Sums over features and over tokens may
run in any order, so a lane takes the features that lie side by side in memory: of K, 16 bytes of a
token for two k16 steps; of V, the same features of four tokens, paired by PRMT.  int8 and float8
become 16-bit floats between the load and the mma; int4 codes are masked out and multiplied as they
are (``attention.codes``).  K's scales multiply scores, V's multiply weights.  Zero points cost two
multiply-adds a score: K's meet the sum of the query's features, V's are summed beside the outputs.

The split depends on the batch, the capacity and the cache's dtype alone, and is made by
``attention.plan``.  Nothing is added atomically: the same bits every time, whatever the
other rows hold.  Past a row's end the last token is copied once more and its scores are -inf; teams
with no token leave at once.

With a block table (``attention.pages``) steps lie in pages: a window's first step begins before it,
masked, and the entries for the steps that the ring will fetch are carried by the loop.

Floor: the bytes of K, V and scales at 4.2 TB/s; cuDNN's decode shows that 4.46 can be read.
Result, one H200, 32/8 heads of 128, 64 rows x 8192, microseconds: bfloat16 536 (95% of the floor's
speed; cuDNN 481, XLA 3085), int8 283 (93%), int4 155 (93%); more, and what was tried, in NOTES.md.
Command: ``python -m pallas_kernels.bench.attention``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels import ptx as p
from pallas_kernels.attention import tile as mma_tile
from pallas_kernels.attention.blockwise import capacity_of
from pallas_kernels.attention.codes import KIND, Codes
from pallas_kernels.attention.gather import write_heads
from pallas_kernels.attention.merge import merge_chunks
from pallas_kernels.attention.pages import Pages, Paging
from pallas_kernels.attention.plan import (
    Plan,
    blocks_of,
    gather_of,
    shared_bytes,
    team_of,
    units_of,
)
from pallas_kernels.attention.ring import Ring, Scales, Tokens, ring_bytes, scale_bytes
from pallas_kernels.attention.tile import HEADS, NEG_INF, TILE
from pallas_kernels.launch import launch
from pallas_kernels.qtensor import QTensor


class Place(NamedTuple):
    """Of a thread in the grid, and of its warp in the team; own: its kv head there, sub: its eight
    query heads."""

    thread: Any
    warp: Any
    lane: Any
    g: Any
    quad: Any
    row: Any
    in_row: Any  # block of the row
    team: Any
    member: Any
    sub: Any
    own: Any


def _attend(*refs, plan, codes, shape, paging, window, scale, kind):
    batch, capacity, n_kv, n, h = shape
    refs = list(refs)

    def take(count):
        return [refs.pop(0) for _ in range(count)]

    arrays = 1 + codes.quantized + codes.zeros  # codes, scales, zero points
    (q_ref,) = take(1)
    k_refs, v_refs, (lengths_ref,) = take(arrays), take(arrays), take(1)
    pages_ref = take(1 if paging else 0)
    (out_ref,), stats_refs = take(1), take(0 if plan.cluster else 1)
    ring_ref, scale_ref, barrier_ref, *gather_refs = refs
    group = n // n_kv
    subs = -(-group // HEADS)  # mma-fuls of query heads of a kv head
    heads, (members, teams) = plan.heads, team_of(plan, group)
    blocks = blocks_of(plan, capacity, n_kv, group)

    def place(**anew) -> Place:
        thread, block = p.register("tid.x", **anew), p.register("ctaid.x", **anew)
        warp, lane = p.shift_right(thread, 5), p.masked(thread, 31)
        g, quad = p.shift_right(lane, 2), p.masked(lane, 3)
        row, in_row = arith.divui(block, p.ci(blocks)), arith.remui(block, p.ci(blocks))
        team, member = arith.divui(warp, p.ci(members)), arith.remui(warp, p.ci(members))
        sub, own = arith.remui(member, p.ci(subs)), arith.divui(member, p.ci(subs))
        return Place(thread, warp, lane, g, quad, row, in_row, team, member, sub, own)

    def share(in_row, team):
        """The team's first head and, of a row in chunks, its unit of work and its chunk."""
        if plan.cluster:
            return p.mul(arith.divui(in_row, p.ci(plan.cluster)), heads), None, None
        unit = p.add(p.mul(in_row, teams), team)
        first_head = p.mul(arith.remui(unit, p.ci(n_kv // heads)), heads)
        return first_head, unit, arith.divui(unit, p.ci(n_kv // heads))

    thread, warp, lane, g, quad, row, in_row, team, member, sub, own = here = place()
    busy = p.less(team, teams)
    (length,) = p.load_global(p.offset(p.address(lengths_ref), row, 4), 1)
    length = p.larger(p.smaller(length, p.ci(capacity)), p.ci(0))
    step_tokens = plan.tiles * TILE
    if plan.cluster:
        rank = p.register("cluster_ctarank") if plan.cluster > 1 else p.ci(0)
        gathering = gather_of(plan, group, codes).on(*gather_refs, thread, rank)
        gathering.start()
        first_head, unit, split = share(in_row, team)
        # All teams of the row take steps in turn.
        begin, end = p.ci(0), length
        late = p.mul(p.add(p.mul(rank, teams), team), step_tokens)
        apart = plan.cluster * teams * step_tokens
    else:
        first_head, unit, split = share(in_row, team)
        begin = p.mul(split, plan.chunk)
        end = p.smaller(p.add(begin, plan.chunk), length)
        busy = arith.andi(busy, p.less(unit, units_of(plan, capacity, n_kv)))
        late, apart = p.ci(0), step_tokens
    head = p.add(first_head, own)  # own: kv head within the team
    pages = Pages(*pages_ref, row, paging) if paging else None
    from_page = pages is not None and window is not None
    seen = begin
    if window is not None:
        seen = begin = p.larger(begin, p.add(length, -window))
    if from_page:
        begin = p.masked(begin, -step_tokens)
    begin = p.add(begin, late)

    order = Ring.order(g)
    barriers = p.shared_address(barrier_ref)
    last = p.add(end, -1)

    def entry_of(step):
        """Of the step at a token, or of the row's last page where it is past the end."""
        return pages.entry(p.smaller(step, last))

    entries = [None] * (plan.depth + 1)
    if pages:
        # The first step's is asked for before the row's length is known, but for a window's.
        following = [p.add(begin, (i + 1) * apart) for i in range(plan.depth)]
        entries = [pages.entry(begin), *map(entry_of, following)]

    def row_of(ref, first, size):
        """A row's (a pool's) first token at a head, ``size`` bytes each."""
        base = p.address(ref)
        if not pages:
            base = p.offset(base, row, capacity * n_kv * size)
        return p.offset(base, first, size)

    ring = Ring(
        plan, codes, heads=heads, n_kv=n_kv, members=members, member=member, lane=lane,
        ring=p.add(p.shared_address(ring_ref), p.mul(team, ring_bytes(plan, heads, codes))),
        barriers=p.add(barriers, p.mul(team, 2 * plan.depth * 16)),
        bases=[row_of(refs_[0], first_head, codes.row_bytes) for refs_ in (k_refs, v_refs)],
        last=last, apart=apart, pages=pages,
    )  # fmt: skip
    tokens = Tokens(ring, codes, own, g, quad)
    k_token = p.mul(order, ring.per_run)

    p.when(p.less(thread, 1), lambda: ring.initialise(teams, barriers))
    p.barrier()

    def body():
        def start_ring():
            for i in range(plan.depth):
                token0 = p.add(begin, i * apart)

                def both(token0=token0, i=i):
                    ring.fill(token0, p.ci(i), False, entries[i])
                    ring.fill(token0, p.ci(i), True, entries[i])

                p.when(p.below(token0, end), both) if i else both()

        def sources(refs_):
            size = codes.groups * codes.scale_size
            return [row_of(ref, head, size) for ref in refs_[1:]]

        def adjust(*numbers):
            return queries.adjust(*numbers)

        start_ring()
        scales = None
        if codes.quantized:
            at = p.add(p.shared_address(scale_ref), p.mul(warp, scale_bytes(plan, codes)))
            scales = Scales(plan, codes, n_kv=n_kv, lane=lane, at=at, last=last, adjust=adjust,
                            pages=pages, sources=[sources(k_refs), sources(v_refs)])  # fmt: skip
            coming = scales.load(begin, entries[0])
        # Heads past the group are copies.
        query_head = p.add(p.mul(sub, HEADS), p.smaller(g, p.add(p.mul(sub, -HEADS), group - 1)))
        query_head = p.add(p.mul(row, n), p.mul(head, group), query_head)
        at = p.offset(p.address(q_ref), query_head, 2 * h)
        at = p.offset(at, p.mul(quad, 2 * mma_tile.features_of(codes)))
        queries = mma_tile.Queries(mma_tile.load_heads(at, codes), codes, scale, kind)
        if codes.quantized:
            scales.store(coming)

        def numbers_of(u, values):
            if not codes.quantized:
                return None
            return [scales.read(order, 2 * u + half, values) for half in range(2)]

        zero = p.cf(0.0)
        sums = 2 * codes.groups if codes.zeros else 0  # of weights times zero points

        def parts_of(carry):
            """Entries for the ``depth`` steps to come; slot, parity; what has been summed."""
            ahead, carry = (carry[: plan.depth], carry[plan.depth :]) if pages else (entries, carry)
            return ahead, *carry[:2], carry[2:4], carry[4:6], carry[6 : 6 + sums], carry[6 + sums :]

        def step(token0, carry):
            ahead, slot, parity, top, total, zeros, out = parts_of(carry)
            later = [entry_of(p.add(token0, (plan.depth + 1) * apart))] if pages else []
            coming = scales.load(p.add(token0, apart), ahead[0]) if codes.quantized else None
            ring.wait(slot, parity, False)
            scores = []
            for u in range(plan.tiles):
                rows = tokens.keys(slot, u)
                if u == plan.tiles - 1:
                    ring.release(slot, False)
                products = queries.scores(rows, numbers_of(u, False))
                for i in range(4):
                    token = p.add(token0, k_token, 2 * u + i // 2)
                    inside = p.below(token, end)
                    if from_page:
                        inside = arith.andi(inside, p.at_most(seen, token))
                    products[i] = arith.select(inside, products[i], p.cf(NEG_INF))
                scores.append(products)
            new_top, fade = mma_tile.maxima(scores, top)
            weights = mma_tile.weights_of(scores, new_top)
            total = [
                functools.reduce(
                    arith.addf,
                    [w[i] for w in weights for i in (c, c + 2)],
                    arith.mulf(total[c], fade[c]),
                )
                for c in range(2)
            ]
            out = [arith.mulf(x, fade[i % 2]) for i, x in enumerate(out)]
            zeros = [arith.mulf(x, fade[i % 2]) for i, x in enumerate(zeros)]
            right = [
                mma_tile.right_operand(w, numbers_of(u, True), zeros, codes)
                for u, w in enumerate(weights)
            ]
            if plan.depth == 1:
                ring.refill(token0, slot, parity, False, ahead[-1])
            else:
                before, emptied = p.add(token0, -apart), ring.neighbour(slot, parity, -1)
                p.when(
                    p.at_most(begin, before),
                    lambda: ring.refill(before, *emptied, True, ahead[-2]),
                )
            ring.wait(slot, parity, True)
            for u in range(plan.tiles):
                values = tokens.values(slot, u)
                if u == plan.tiles - 1:
                    ring.release(slot, True)
                mma_tile.add_values(out, values, right[u], codes)
            ring.refill(token0, slot, parity, plan.depth == 1, ahead[-1])
            if codes.quantized:
                scales.store(coming)
            following = ring.neighbour(slot, parity, 1)
            ahead = [*ahead[1:], *later] if pages else []
            return [*ahead, *following, *new_top, *total, *zeros, *out]

        start = [p.ci(0)] * 2 + [p.cf(NEG_INF)] * 2 + [zero] * (2 + sums + h // 4)
        carry = p.loop(begin, end, apart, (entries[1:] if pages else []) + start, step)
        _, _, _, top, total, zeros, out = parts_of(carry)
        if not pages:
            return write_parts(top, total, zeros, out, here, head, split)
        # Carried through the loop, this takes a thread past the 128 registers with which two blocks
        # share an SM.
        again = place(volatile=True)
        first, _, chunk = share(again.in_row, again.team)
        write_parts(top, total, zeros, out, again, p.add(first, again.own), chunk)

    def write_parts(top, total, zeros, out, here, head, split):
        run = mma_tile.run_of(codes)
        for c in range(2):
            whole, *parts = [mma_tile.over_tokens(x) for x in (total[c], *zeros[c::2])]
            mine_head = p.add(p.mul(here.sub, HEADS), p.mul(here.quad, 2), c)

            def write(c=c, whole=whole, parts=parts, mine_head=mine_head):
                outputs = mma_tile.head_outputs(out, parts, c, codes)
                if plan.cluster:
                    own_head = p.add(p.mul(here.own, group), mine_head)
                    at, stats = gathering.part(here.team, own_head)
                    at = p.add(at, p.mul(here.g, 4 * run))
                    p.when(p.less(here.g, 1), lambda: p.store_shared(stats, [top[c], whole]))
                    for first, values in outputs:
                        for i in range(0, run, 4):
                            p.store_shared(at, values[i : i + 4], 4 * (first + i))
                    return
                line = p.mul(p.add(p.mul(here.row, -(-capacity // plan.chunk)), split), n)
                line = p.add(line, p.mul(head, group), mine_head)
                base = p.offset(p.offset(p.address(out_ref), line, 4 * h), here.g, 4 * run)
                stats = p.offset(p.address(stats_refs[0]), line, 8)
                p.when(p.less(here.g, 1), lambda: p.store_global(stats, [top[c], whole]))
                for first, values in outputs:
                    for i in range(0, run, 4):
                        p.store_global(base, values[i : i + 4], 4 * (first + i))

            p.when(p.less(mine_head, group), write)

    some = arith.andi(busy, p.below(begin, end))
    p.when(some, body)
    if plan.cluster:
        first = p.mul(own, group)
        mine = [p.add(first, i) for i in range(group)]
        p.when(arith.andi(busy, p.no(some)), lambda: gathering.empty(team, mine))
        first = p.add(p.mul(row, n), p.mul(first_head, group))
        gathering.finish(p.less(p.ci(0), length), write_heads(out_ref, first, lane, kind, h))


@functools.partial(jax.jit, static_argnames=("window", "scale", "plan"))
def decode_attention(
    q: jax.Array, k: jax.Array | QTensor, v: jax.Array | QTensor, lengths: jax.Array,
    table: jax.Array | None, *, window: int | None, scale: float, plan: Plan,
) -> jax.Array:  # fmt: skip
    """See ``pallas_kernels.attention.op``."""
    batch, n, h = q.shape
    capacity, n_kv = capacity_of(k, table), k.shape[2]
    codes = Codes.of(q, k)
    shape = batch, capacity, n_kv, n, h
    body = functools.partial(
        _attend, plan=plan, codes=codes, shape=shape, paging=Paging.of(k, table), window=window,
        scale=scale, kind=KIND[q.dtype.name],
    )  # fmt: skip
    out_type = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if not plan.cluster:
        splits = -(-capacity // plan.chunk)
        out_type = (
            jax.ShapeDtypeStruct((batch, splits, n, h), jnp.float32),
            jax.ShapeDtypeStruct((batch, splits, n, 2), jnp.float32),
        )
    result = launch(
        body, (q, *jax.tree.leaves(k), *jax.tree.leaves(v), lengths, table), out_type,
        name="decode_attention_kernel", cluster=plan.cluster, warpgroups=plan.warps // 4,
        grid=batch * blocks_of(plan, capacity, n_kv, n // n_kv) // max(plan.cluster, 1),
        scratch=[size // 4 for size in shared_bytes(plan, n // n_kv, codes)], registers=True,
    )  # fmt: skip
    if plan.cluster:
        return result
    return merge_chunks(*result, lengths, capacity=capacity, chunk=plan.chunk, window=window,
                        rotated=codes.zeros, out_dtype=q.dtype)  # fmt: skip
