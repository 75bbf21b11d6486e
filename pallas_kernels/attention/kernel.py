"""Attention of 1 to 16 query tokens a row over a cache, on Hopper: one pass over the cache's bytes.

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

The G query heads of several tokens are T * G query rows, each with an end (and with a window a
first key) of its own; a warp takes ``Plan.fuls`` times eight of them over the words that it read
once.  Copies end at the row's longest; a query row that has seen no key yet has a finite maximum.

With a block table (``attention.pages``) steps lie in pages, and the entries for the steps that the
ring will fetch are carried by the loop.  A window's first step begins before it, masked, where a
page's would: rows give the bits that pages do.

Floor: the bytes of K, V and scales at 4.2 TB/s; cuDNN's decode shows that 4.46 can be read.
Result, one H200, 32/8 heads of 128, 64 rows x 8192, microseconds: bfloat16 536 (95% of the floor's
speed; cuDNN 481, XLA 3085), int8 283 (93%), int4 155 (93%); more, and what was tried, in NOTES.md.
Command: ``python -m benchmarks.kernels.attention``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.attention import tile as mma_tile
from pallas_kernels.attention.blockwise import capacity_of
from pallas_kernels.attention.codes import Codes
from pallas_kernels.attention.gather import write_heads
from pallas_kernels.attention.merge import merge_chunks
from pallas_kernels.attention.pages import BlockTable, Paging
from pallas_kernels.attention.plan import (
    AttentionPlan,
    blocks_of,
    gather_of,
    shared_bytes,
    team_of,
    units_of,
)
from pallas_kernels.attention.query_rows import QueryRows
from pallas_kernels.attention.ring import Ring, Scales, TokenWords, ring_bytes, scale_bytes
from pallas_kernels.attention.tile import HEADS, LEAST, NEG_INF, TILE
from pallas_kernels.fused_parts import KIND
from pallas_kernels.jax_internals import arith
from pallas_kernels.launch import launch
from pallas_kernels.qtensor import QTensor


class TeamPlace(NamedTuple):
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
    batch, rows, h = shape
    capacity, n_kv, width = rows.capacity, rows.n_kv, rows.width
    refs = list(refs)

    def take(count):
        return [refs.pop(0) for _ in range(count)]

    arrays = 1 + codes.quantized + codes.zeros  # codes, scales, zero points
    (q_ref,) = take(1)
    k_refs, v_refs, (lengths_ref,) = take(arrays), take(arrays), take(1)
    pages_ref = take(1 if paging else 0)
    (out_ref,), stats_refs = take(1), take(0 if plan.cluster else 1)
    ring_ref, scale_ref, barrier_ref, *gather_refs = refs
    heads, (members, teams) = plan.heads, team_of(plan, width)
    fuls, subs = plan.fuls, members // heads  # of a warp; warps of a kv head
    blocks = blocks_of(plan, capacity, n_kv, width)

    def place(**anew) -> TeamPlace:
        thread, block = p.register("tid.x", **anew), p.register("ctaid.x", **anew)
        warp, lane = p.shift_right(thread, 5), p.masked(thread, 31)
        g, quad = p.shift_right(lane, 2), p.masked(lane, 3)
        row, in_row = arith.divui(block, p.ci(blocks)), arith.remui(block, p.ci(blocks))
        team, member = arith.divui(warp, p.ci(members)), arith.remui(warp, p.ci(members))
        sub, own = arith.remui(member, p.ci(subs)), arith.divui(member, p.ci(subs))
        return TeamPlace(thread, warp, lane, g, quad, row, in_row, team, member, sub, own)

    def share(in_row, team):
        """The team's first head and, of a row in chunks, its unit of work and its chunk."""
        if plan.cluster:
            return p.mul(arith.divui(in_row, p.ci(plan.cluster)), heads), None, None
        unit = p.add(p.mul(in_row, teams), team)
        first_head = p.mul(arith.remui(unit, p.ci(n_kv // heads)), heads)
        return first_head, unit, arith.divui(unit, p.ci(n_kv // heads))

    thread, warp, lane, g, quad, row, in_row, team, member, sub, own = here = place()
    busy = p.less(team, teams)
    p.await_kernel()
    fewest, length = rows.span(lengths_ref, row, lane)
    step_tokens = plan.tiles * TILE
    if plan.cluster:
        rank = p.register("cluster_ctarank") if plan.cluster > 1 else p.ci(0)
        gathering = gather_of(plan, width, codes).on(*gather_refs, thread, rank)
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
    pages = BlockTable(*pages_ref, row, paging) if paging else None
    seen = begin
    if window is not None:
        seen = p.larger(begin, p.add(fewest, -window))
        begin = p.masked(seen, -step_tokens)
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
        plan,
        codes,
        heads=heads,
        n_kv=n_kv,
        members=members,
        member=member,
        lane=lane,
        ring=p.add(p.shared_address(ring_ref), p.mul(team, ring_bytes(plan, heads, codes))),
        barriers=p.add(barriers, p.mul(team, 2 * plan.depth * 16)),
        bases=[row_of(refs_[0], first_head, codes.row_bytes) for refs_ in (k_refs, v_refs)],
        last=last,
        apart=apart,
        pages=pages,
    )
    tokens = TokenWords(ring, codes, own, g, quad)
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
            scales = Scales(
                plan,
                codes,
                n_kv=n_kv,
                lane=lane,
                at=at,
                last=last,
                adjust=adjust,
                pages=pages,
                sources=[sources(k_refs), sources(v_refs)],
            )
            coming = scales.load(begin, entries[0])

        def load_queries(ful):
            # Rows past the last are copies.
            number = p.smaller(p.add(p.mul(sub, fuls * HEADS), g, ful * HEADS), p.ci(width - 1))
            at = p.offset(p.address(q_ref), rows.line(row, head, number), 2 * h)
            at = p.offset(at, p.mul(quad, 2 * mma_tile.features_of(codes)))
            return mma_tile.load_heads(at, codes)

        loaded = [load_queries(ful) for ful in range(fuls)]
        spans = [[span_of(ful, c) for c in range(2)] for ful in range(fuls)]
        queries = mma_tile.Queries(loaded, codes, scale, kind)
        if codes.quantized:
            scales.store(coming)

        def numbers_of(u, values):
            if not codes.quantized:
                return None
            return [scales.read(order, 2 * u + half, values) for half in range(2)]

        zero = p.cf(0.0)
        sums = 2 * codes.groups if codes.zeros else 0  # of weights times zero points
        start = [[p.cf(LEAST)] * 2, [zero] * 2, [zero] * sums, [zero] * (h // 4)]
        flat, tree = jax.tree.flatten([start] * fuls)

        def parts_of(carry):
            """Entries for the ``depth`` steps to come; slot, parity; [maximum, sum, sum with zero
            points, outputs] of each ful."""
            ahead, carry = (carry[: plan.depth], carry[plan.depth :]) if pages else (entries, carry)
            return ahead, *carry[:2], jax.tree.unflatten(tree, carry[2:])

        def is_seen(token, ful, c):
            own_first, own_end = spans[ful][c]
            inside = p.below(token, own_end)
            if window is not None:
                inside = arith.andi(inside, p.at_most(own_first, token))
            return inside

        def weigh(sofar, scores):
            """Weights of the step's tiles, and of what was summed up to it what is left."""
            top, total, zeros, out = sofar
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
            return weights, [new_top, total, zeros, out]

        def step(token0, carry):
            ahead, slot, parity, sofar = parts_of(carry)
            later = [entry_of(p.add(token0, (plan.depth + 1) * apart))] if pages else []
            coming = scales.load(p.add(token0, apart), ahead[0]) if codes.quantized else None
            ring.wait(slot, parity, False)
            scores = [[] for _ in range(fuls)]
            for u in range(plan.tiles):
                words = tokens.keys(slot, u)
                if u == plan.tiles - 1:
                    ring.release(slot, False)
                keys, numbers = mma_tile.key_pairs(words, codes), numbers_of(u, False)
                for ful in range(fuls):
                    products = queries.scores(keys, numbers, ful)
                    for i in range(4):
                        inside = is_seen(p.add(token0, k_token, 2 * u + i // 2), ful, i % 2)
                        products[i] = arith.select(inside, products[i], p.cf(NEG_INF))
                    scores[ful].append(products)
            weights, sofar = zip(*map(weigh, sofar, scores), strict=True)
            rights = []  # [tile][ful]
            for u in range(plan.tiles):
                numbers = numbers_of(u, True)
                rights.append(
                    [
                        mma_tile.right_operand(weights[ful][u], numbers, sofar[ful][2], codes)
                        for ful in range(fuls)
                    ]
                )
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
                mma_tile.add_values([out for *_, out in sofar], values, rights[u], codes)
            ring.refill(token0, slot, parity, plan.depth == 1, ahead[-1])
            if codes.quantized:
                scales.store(coming)
            following = ring.neighbour(slot, parity, 1)
            ahead = [*ahead[1:], *later] if pages else []
            return [*ahead, *following, *jax.tree.leaves(list(sofar))]

        first = [*(entries[1:] if pages else []), p.ci(0), p.ci(0)]
        *_, sofar = parts_of(p.loop(begin, end, apart, first + flat, step))
        if not pages:
            return write_parts(sofar, here, head, split)
        # Carried through the loop, this takes a thread past the 128 registers with which two blocks
        # share an SM.
        again = place(volatile=True)
        first, _, chunk = share(again.in_row, again.team)
        write_parts(sofar, again, p.add(first, again.own), chunk)

    def number_of(here, ful, c):
        """Of the kv head's query rows, the lane's two of a ful."""
        return p.add(p.mul(here.sub, fuls * HEADS), p.mul(here.quad, 2), ful * HEADS + c)

    def span_of(ful, c):
        """(first, past the last) key that one of the lane's query rows sees in the team's share."""
        if rows.tokens == 1:
            return seen, end
        number = p.smaller(number_of(here, ful, c), p.ci(width - 1))
        own = rows.seen(lengths_ref, row, rows.token(number))
        return None if window is None else p.add(own, -window), p.smaller(own, end)

    def write_parts(sofar, here, head, split):
        for ful, (top, total, zeros, out) in enumerate(sofar):
            write_ful(ful, top, total, zeros, out, here, head, split)

    def write_ful(ful, top, total, zeros, out, here, head, split):
        run = mma_tile.run_of(codes)
        for c in range(2):
            whole, *parts = [mma_tile.over_tokens(x) for x in (total[c], *zeros[c::2])]
            number = number_of(here, ful, c)

            def write(c=c, whole=whole, parts=parts, number=number):
                outputs = mma_tile.head_outputs(out, parts, c, codes)
                if plan.cluster:
                    own_head = p.add(p.mul(here.own, width), number)
                    at, stats = gathering.part(here.team, own_head)
                    at = p.add(at, p.mul(here.g, 4 * run))
                    p.when(p.less(here.g, 1), lambda: p.store_shared(stats, [top[c], whole]))
                    for first, values in outputs:
                        for i in range(0, run, 4):
                            p.store_shared(at, values[i : i + 4], 4 * (first + i))
                    return
                chunk = p.add(p.mul(here.row, -(-capacity // plan.chunk)), split)
                line = rows.line(chunk, head, number)
                base = p.offset(p.offset(p.address(out_ref), line, 4 * h), here.g, 4 * run)
                stats = p.offset(p.address(stats_refs[0]), line, 8)
                p.when(p.less(here.g, 1), lambda: p.store_global(stats, [top[c], whole]))
                for first, values in outputs:
                    for i in range(0, run, 4):
                        p.store_global(base, values[i : i + 4], 4 * (first + i))

            p.when(p.less(number, width), write)

    some = arith.andi(busy, p.below(begin, end))
    p.when(some, body)
    if plan.cluster:
        first = p.mul(own, width)
        mine = [p.add(first, i) for i in range(width)]
        p.when(arith.andi(busy, p.no(some)), lambda: gathering.empty(team, mine))

        def line(number):
            """Of the team's query rows."""
            if rows.tokens == 1:
                return rows.line(row, first_head, number)
            head = p.add(first_head, arith.divui(number, p.ci(width)))
            return rows.line(row, head, arith.remui(number, p.ci(width)))

        gathering.finish(write_heads(out_ref, line, lane, kind, h))


@functools.partial(jax.jit, static_argnames=("window", "scale", "plan"))
def decode_attention(
    q: jax.Array,
    k: jax.Array | QTensor,
    v: jax.Array | QTensor,
    lengths: jax.Array,
    table: jax.Array | None,
    *,
    window: int | None,
    scale: float,
    plan: AttentionPlan,
) -> jax.Array:
    """See ``pallas_kernels.attention.op``."""
    batch, *tokens, n, h = q.shape
    capacity, n_kv = capacity_of(k, table), k.shape[2]
    codes, rows = Codes.of(q, k), QueryRows(*(tokens or [1]), n, n_kv, capacity)
    shape, n = (batch, rows, h), rows.tokens * n
    body = functools.partial(
        _attend,
        plan=plan,
        codes=codes,
        shape=shape,
        paging=Paging.of(k, table),
        window=window,
        scale=scale,
        kind=KIND[q.dtype.name],
    )
    out_type = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if not plan.cluster:
        splits = -(-capacity // plan.chunk)
        out_type = (
            jax.ShapeDtypeStruct((batch, splits, n, h), jnp.float32),
            jax.ShapeDtypeStruct((batch, splits, n, 2), jnp.float32),
        )
    result = launch(
        body,
        (q, *jax.tree.leaves(k), *jax.tree.leaves(v), lengths, table),
        out_type,
        name="decode_attention_kernel",
        cluster=plan.cluster,
        warpgroups=plan.warps // 4,
        grid=batch * blocks_of(plan, capacity, n_kv, n // n_kv) // max(plan.cluster, 1),
        scratch=[size // 4 for size in shared_bytes(plan, n // n_kv, codes)],
        registers=True,
    )
    if plan.cluster:
        return result
    out = merge_chunks(
        *result,
        lengths,
        capacity=capacity,
        chunk=plan.chunk,
        window=window,
        rotated=codes.zeros,
        out_dtype=q.dtype,
    )
    return out.reshape(q.shape)
