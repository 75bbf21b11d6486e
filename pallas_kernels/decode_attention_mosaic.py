"""Attention of one query token per row over a cache, on Hopper: two kernels, one pass over bytes.

The cache is cut into chunks of tokens; a team of warps takes one chunk of one row, a warp one kv
head of it, with the G query heads that share it as the narrow side of the mma (padded to 8).

    leader's lanes  one bulk copy per token: all of the team's kv heads, one run of memory
                    K 0 | V 0 | K 1 ...                into a ring, counted by one barrier per slot
    every warp      wait K | scores = K q^T, tiles of 16 tokens x 8 heads | release K
                    | running maximum, exp2 | weights transposed in registers (movmatrix)
                    | wait V | out^T += V^T weights | release V
    end             out, maximum and sum of the chunk to memory
    merge kernel    one block per (row, head): chunks faded to the common maximum and summed;
                    where one chunk holds the capacity there is no second kernel

Neither operand is converted or transposed in shared memory.  Sums over features and over tokens may
run in any order, so a lane takes the features that lie side by side in memory: of K, 16 bytes of a
token for two k16 steps; of V, the same features of four tokens, paired by PRMT.  int8, int4 and
float8 become 16-bit floats between the load and the mma (one LOP3 and one subtraction a pair of
int4); K's scales multiply scores, V's multiply weights.  The rows of two tokens are 32 bytes apart
in the banks and a tile's rows are numbered so that no read conflicts.

The split depends on the capacity and the cache's dtype alone.  Nothing is added atomically: the
same bits every time, whatever the other rows hold.  Past a row's end the last token is copied once
more and its scores are -inf; teams with no token leave at once.

NOTES.  Floor: the bytes of K, V and scales at 4.2 TB/s; cuDNN's decode shows that 4.46 can be read.
H200, 32/8 heads of 128, microseconds of both kernels (XLA: its own; the merge takes 4 to 7):

                     64 rows x 8192            1 row x 131072
    bfloat16   535   4.01 TB/s  95%        132   4.05 TB/s  96%
    int8       281   3.94 TB/s  94%         77   3.58 TB/s  85%
    int4       262   2.31 TB/s  55%         71   2.13 TB/s  51%
    cuDNN      481 (bfloat16 only)          126
    XLA       3085, 2912, 2809             1100, 1200, 1193

* Every warp its own ring of cp.async, each lane copying what it reads: no barriers at all, but 3.1
  TB/s for bfloat16 and int8 alike (679 and 353 us), more bytes in flight or not.  The pieces were
  64 bytes a token.  One run per token by the copy engine brought 4.0.
* int4 is bound by instructions, not bytes: that first form took 220 and 62 us.  Two reasons are
  known: the leader issues 32 copies a step one after another while the others wait, and widening
  takes 11 operations per 8 words.  Not yet run: copies shared out among the team's warps, and
  words left as subnormal 16-bit floats (n times the smallest one), 5 operations per 8 words.
* int8: 2 tiles a step and one step in the ring 281 us, 1 and two 308; 8 warps a block 477 (160
  registers a thread: one block an SM).  bfloat16 with 16 warps 531, chunks of 1024 tokens 551.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import attention_ptx as a
from pallas_kernels import mosaic as p
from pallas_kernels.attention_words import KIND, Words
from pallas_kernels.decode_attention_merge import merge_chunks
from pallas_kernels.qtensor import QTensor

SHARED_BYTES = 226 * 1024
PAD = 32  # bytes between the rows of two tokens in shared memory
TILE = 16  # tokens of one mma
HEADS = 8  # query heads of one mma
LOG2E = math.log2(math.e)
NEG_INF = float("-inf")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is cut: ``chunk`` tokens to a team of warps, ``tiles`` mma tiles of tokens per
    step, ``depth`` steps of keys and of values in the ring, ``warps`` to a block."""

    chunk: int
    tiles: int
    depth: int
    warps: int


def make_plan(capacity: int, n_kv: int, group: int, words: Words, **given) -> Plan:
    """What was fastest, cut down to the shared memory there is; given: fields to set instead."""
    chunk = min(512, max(128, capacity // 16))
    if words.bits == 16:
        chunk = max(chunk, min(1024, capacity // 128))
    # Two blocks of 8 warps fit where a thread needs 128 registers by itself; 16 warps force that.
    tiles, depth, warps = {16: (1, 1, 8), 8: (2, 1, 16), 4: (2, 2, 16)}[words.bits]
    plan = Plan(1 << (chunk - 1).bit_length(), tiles, depth, warps)
    plan = dataclasses.replace(plan, **given)
    while sum(_shared_bytes(plan, n_kv, group, words)) > SHARED_BYTES:
        if plan.depth > 1:
            plan = dataclasses.replace(plan, depth=plan.depth - 1)
        elif plan.warps > 8:
            plan = dataclasses.replace(plan, warps=8)
        else:
            plan = dataclasses.replace(plan, tiles=plan.tiles // 2)
    return plan


def _shared_bytes(plan: Plan, n_kv: int, group: int, words: Words) -> tuple[int, int, int]:
    """Of a block: ring, scales, barriers."""
    heads, _, teams = _team(n_kv, -(-group // HEADS), plan.warps)
    slot = plan.tiles * TILE * (heads * words.row_bytes + PAD)
    scales = plan.warps * plan.tiles * 4 * 32 * 4 * words.groups if words.quantized else 16
    return teams * 2 * plan.depth * slot, scales, teams * 2 * plan.depth * 16


def _team(n_kv: int, subs: int, warps: int) -> tuple[int, int, int]:
    """(kv heads of a team, warps of a team, teams of a block): a team reads neighbouring heads of
    the same tokens, so that what it copies per token is one run of memory."""
    heads = max(d for d in range(1, n_kv + 1) if n_kv % d == 0 and d * subs <= 8)
    return heads, heads * subs, warps // (heads * subs)


def _attend(ctx, *refs, plan, words, shape, window, scale, direct):
    del ctx
    batch, capacity, n_kv, n, h = shape
    outs = 1 if direct else 2
    k_refs, v_refs = refs[1 : 2 + words.quantized], refs[2 + words.quantized : -4 - outs]
    q_ref, lengths_ref, out_ref = refs[0], refs[-4 - outs], refs[-3 - outs]
    stats_ref = None if direct else refs[-4]
    ring_ref, scale_ring_ref, barrier_ref = refs[-3:]
    group = n // n_kv
    subs = -(-group // HEADS)  # mma-fuls of query heads of a kv head
    heads, members, teams = _team(n_kv, subs, plan.warps)
    splits = -(-capacity // plan.chunk)
    units = splits * (n_kv // heads)  # of work for a team, in a row
    blocks = -(-units // teams)
    per_step = plan.tiles * TILE

    thread, block = p.register("tid.x"), p.register("ctaid.x")
    warp, lane = p.shift_right(thread, 5), arith.andi(thread, p.ci(31))
    g, quad = p.shift_right(lane, 2), arith.andi(lane, p.ci(3))
    row = arith.divui(block, p.ci(blocks))
    team, member = arith.divui(warp, p.ci(members)), arith.remui(warp, p.ci(members))
    unit = p.add(p.mul(arith.remui(block, p.ci(blocks)), teams), team)
    sub = arith.remui(member, p.ci(subs))
    first_head = p.mul(arith.remui(unit, p.ci(n_kv // heads)), heads)
    own = arith.divui(member, p.ci(subs))  # kv head within the team
    head = p.add(first_head, own)
    split = arith.divui(unit, p.ci(n_kv // heads))

    (length,) = a.load_words(p.offset(p.address(lengths_ref), row, 4), 1, cache=".nc")
    length = a.smaller(length, p.ci(capacity))
    begin = p.mul(split, plan.chunk)
    end = a.smaller(p.add(begin, plan.chunk), length)
    if window is not None:
        begin = a.larger(begin, p.add(length, -window))

    token_bytes = n_kv * words.row_bytes
    scale_bytes = 4 * words.groups
    token_scales = n_kv * scale_bytes
    run_bytes = heads * words.row_bytes  # of one token, for the team
    stride = run_bytes + PAD
    slot_bytes = per_step * stride
    ring = p.add(p.shared_address(ring_ref), p.mul(team, 2 * plan.depth * slot_bytes))
    # Barriers of a team: [keys | values] x depth x [full | empty].
    barriers = p.add(p.shared_address(barrier_ref), p.mul(team, 2 * plan.depth * 16))
    # A tile's row r holds token order(r): with it and PAD no read below has a bank conflict.
    even = p.shift_right(g, 1)
    odd = p.add(arith.xori(even, p.ci(2)), 4)
    k_token = arith.select(p.less(arith.andi(g, p.ci(1)), 1), even, odd)
    v_tokens = [quad, p.add(arith.xori(quad, p.ci(2)), 4)]
    own_at = p.add(ring, p.mul(own, words.row_bytes))
    k_at = p.add(own_at, p.mul(k_token, stride), p.mul(quad, words.k_chunk))
    v_at = [
        p.add(own_at, p.mul(t, stride), p.mul(g, words.v_chunk), plan.depth * slot_bytes)
        for t in v_tokens
    ]
    s_bytes = plan.tiles * 2 * scale_bytes * 32 if words.quantized else 0
    s_at = p.add(
        p.shared_address(scale_ring_ref), p.mul(warp, 2 * s_bytes), p.mul(lane, scale_bytes)
    )

    def barrier(slot, values: bool, empty: bool):
        return p.add(barriers, p.mul(slot, 16), (16 * plan.depth if values else 0) + 8 * empty)

    def init():
        for i in range(2 * plan.depth * teams):
            at = p.add(p.shared_address(barrier_ref), 16 * i)
            a.barrier_init(at, 1)
            a.barrier_init(p.add(at, 8), members)
        a.barriers_ready()

    p.when(p.less(thread, 1), init)
    p.barrier()

    def body():
        last = p.add(end, -1)
        bases = [
            p.offset(
                p.offset(p.address(refs_[0]), row, capacity * token_bytes),
                first_head, words.row_bytes,
            )
            for refs_ in (k_refs, v_refs)
        ]  # fmt: skip

        def fill(token0, slot, values: bool):
            """One lane a token; past the end the last token is copied once more."""
            full = barrier(slot, values, False)
            p.when(p.less(lane, 1), lambda: a.barrier_expect(full, per_step * run_bytes))
            a.warp_barrier()
            to = p.add(ring, p.mul(slot, slot_bytes), plan.depth * slot_bytes if values else 0)

            def copy(first):
                index = p.add(lane, first)
                token = a.smaller(p.add(token0, index), last)
                source = a.offset_rows(bases[values], token, token_bytes)
                a.copy_bulk(p.add(to, p.mul(index, stride)), source, run_bytes, full)

            if per_step < 32:
                p.when(p.less(lane, per_step), lambda: copy(0))
            else:
                for first in range(0, per_step, 32):
                    copy(first)

        if words.quantized:
            ks_base, vs_base = (
                p.offset(
                    p.offset(p.address(refs_[1]), row, capacity * token_scales), head, scale_bytes
                )
                for refs_ in (k_refs, v_refs)
            )

        def issue_scales(token0):
            """Every lane reads what it copied itself: no barrier.  No token, no scale: zero."""
            for u in range(plan.tiles):
                for half in range(2):
                    token = p.add(token0, k_token, u * TILE + 8 * half)
                    size = arith.select(a.below(token, end), p.ci(scale_bytes), p.ci(0))
                    token = a.smaller(token, last)
                    for i, base in enumerate((ks_base, vs_base)):
                        source = a.offset_rows(base, token, token_scales)
                        to = (u * 2 + half) * scale_bytes * 32 + i * s_bytes
                        a.copy_or_zero(s_at, source, size, scale_bytes, to, 0)
            p.copies_commit()

        def start_ring():
            for i in range(plan.depth):
                token0 = p.add(begin, i * per_step)

                def both(token0=token0, i=i):
                    fill(token0, p.ci(i), False)
                    fill(token0, p.ci(i), True)

                p.when(a.below(token0, end), both) if i else both()

        leader = p.less(member, 1)
        p.when(leader, start_ring)
        if words.quantized:
            issue_scales(begin)

        # Query features in the order that key words come in; heads past the group are copies.
        query_head = p.add(p.mul(sub, HEADS), a.smaller(g, p.add(p.mul(sub, -HEADS), group - 1)))
        query_head = p.add(p.mul(head, group), query_head)
        q_base = p.offset(p.address(q_ref), p.add(p.mul(row, n), query_head), 2 * h)
        features = words.k_chunk * 8 // words.bits
        q_base = p.offset(q_base, p.mul(quad, 2 * features))
        query = []
        for j in range(words.k_chunks):
            loaded = []
            for i in range(features // 8):
                loaded += a.load_words(q_base, 4, 8 * features * j + 16 * i, cache=".nc")
            per = words.per_word // 2
            query.append([
                pair
                for w in range(words.k_chunk // 4)
                for pair in words.query_pairs(loaded[w * per : (w + 1) * per])
            ])  # fmt: skip

        zero, factor = p.cf(0.0), p.cf(scale * LOG2E)

        def tile_words(u, at):
            """Key words of a tile: rows g and g + 8."""
            return [
                [
                    w
                    for j in range(words.k_chunks)
                    for w in a.load_shared(
                        at, words.k_chunk // 4,
                        (u * TILE + 8 * half) * stride + j * 4 * words.k_chunk,
                    )
                ]
                for half in range(2)
            ]  # fmt: skip

        def tile_scales(u):
            """[keys | values][row g | g + 8][group]."""
            return [
                [
                    a.load_shared(
                        s_at, words.groups, (u * 2 + half) * scale_bytes * 32 + i * s_bytes, "f32"
                    )
                    for half in range(2)
                ]
                for i in range(2)
            ]

        def tile_products(rows, scales):
            """Base-2 scores of a tile: [row g | g + 8] x [head 2 quad | 2 quad + 1]."""
            acc = [[zero] * 4 for _ in range(words.groups)]
            count = words.k_chunk // 4
            for j in range(words.k_chunks):
                of = j * 4 * words.k_chunk // words.group_bytes
                mine = slice(j * count, (j + 1) * count)
                low, high = (
                    [x for w in r[mine] for x in words.pairs(w, words.q_kind)] for r in rows
                )
                for s in range(0, len(low), 2):
                    left = [low[s], high[s], low[s + 1], high[s + 1]]
                    acc[of] = p.mma(acc[of], left, query[j][s : s + 2], words.q_kind)
            if scales is None:
                return [arith.mulf(x, factor) for x in acc[0]]
            out = []
            for i in range(4):
                total = zero
                for of in range(words.groups):
                    weight = arith.mulf(scales[0][i // 2][of], factor)
                    total = p.fma(acc[of][i], weight, total)
                out.append(total)
            return out

        def release(slot, values):
            a.warp_barrier()
            p.when(p.less(lane, 1), lambda: a.barrier_arrive(barrier(slot, values, True)))

        def refill(token0, slot, parity, values):
            token = p.add(token0, plan.depth * per_step)

            def go():
                a.barrier_wait(barrier(slot, values, True), parity)
                fill(token, slot, values)

            p.when(arith.andi(leader, a.below(token, end)), go)

        def step(token0, carry):
            slot, parity = carry[:2]
            top, total, out = carry[2:4], carry[4:6], carry[6:]
            slot_at = p.mul(slot, slot_bytes)
            scales = [None] * plan.tiles
            if words.quantized:
                p.copies_wait(0)
                scales = [tile_scales(u) for u in range(plan.tiles)]
                issue_scales(p.add(token0, per_step))
            a.barrier_wait(barrier(slot, False, False), parity)
            scores = []
            for u in range(plan.tiles):
                rows = tile_words(u, p.add(k_at, slot_at))
                if u == plan.tiles - 1:
                    release(slot, False)
                products = tile_products(rows, scales[u])
                for i in range(4):
                    token = p.add(token0, k_token, u * TILE + 8 * (i // 2))
                    products[i] = arith.select(a.below(token, end), products[i], p.cf(NEG_INF))
                scores.append(products)
            value_scales = [None if x is None else x[1] for x in scales]
            new_top, fade = [], []
            for c in range(2):
                best = functools.reduce(a.maximum, [s[i] for s in scores for i in (c, c + 2)])
                for lanes in (4, 8, 16):
                    best = a.maximum(best, a.shuffle_xor(best, lanes))
                best = a.maximum(best, top[c])
                new_top.append(best)
                fade.append(a.exp2(arith.subf(top[c], best)))
            weights = [[a.exp2(arith.subf(s[i], new_top[i % 2])) for i in range(4)] for s in scores]
            total = [
                functools.reduce(
                    arith.addf,
                    [w[i] for w in weights for i in (c, c + 2)],
                    arith.mulf(total[c], fade[c]),
                )
                for c in range(2)
            ]
            out = [arith.mulf(x, fade[i % 2]) for i, x in enumerate(out)]
            # The weights as the right operand of an mma: per group of features, transposed.
            right = []
            for u in range(plan.tiles):
                right.append([])
                for of in range(words.groups):
                    w = weights[u]
                    if words.quantized:
                        w = [arith.mulf(x, value_scales[u][i // 2][of]) for i, x in enumerate(w)]
                    halves = [a.pack(w[2 * i], w[2 * i + 1], words.v_kind) for i in range(2)]
                    right[u].append([a.transpose_8x8(x) for x in halves])
            refill(token0, slot, parity, False)
            a.barrier_wait(barrier(slot, True, False), parity)
            for u in range(plan.tiles):
                tokens = [
                    [
                        w
                        for j in range(words.v_chunks)
                        for w in a.load_shared(
                            p.add(v_at[t % 2], slot_at), words.v_chunk // 4,
                            (u * TILE + 8 * (t // 2)) * stride + j * 8 * words.v_chunk,
                        )
                    ]
                    for t in range(4)
                ]  # fmt: skip
                if u == plan.tiles - 1:
                    release(slot, True)
                tile = 0
                for w in range(words.v_chunks * words.v_chunk // 4):
                    of = w // (words.v_chunk // 4) * 8 * words.v_chunk // words.group_bytes
                    early = words.value_pairs(tokens[0][w], tokens[1][w])
                    late = words.value_pairs(tokens[2][w], tokens[3][w])
                    for s in range(0, len(early), 2):
                        left = [early[s], early[s + 1], late[s], late[s + 1]]
                        acc = out[4 * tile : 4 * tile + 4]
                        out[4 * tile : 4 * tile + 4] = p.mma(acc, left, right[u][of], words.v_kind)
                        tile += 1
            refill(token0, slot, parity, True)
            if plan.depth == 1:
                following = slot, arith.xori(parity, p.ci(1))
            else:
                wraps = arith.cmpi(arith.CmpIPredicate.eq, slot, p.ci(plan.depth - 1))
                following = (
                    arith.select(wraps, p.ci(0), p.add(slot, 1)),
                    arith.select(wraps, arith.xori(parity, p.ci(1)), parity),
                )
            return [*following, *new_top, *total, *out]

        start = [p.ci(0)] * 2 + [p.cf(NEG_INF)] * 2 + [zero] * (2 + h // 4)
        carry = a.loop(begin, end, p.ci(per_step), start, step)
        if words.quantized:
            p.copies_wait(0)
        top, total, out = carry[2:4], carry[4:6], carry[6:]
        run = words.v_chunk * 8 // words.bits  # features of a lane that lie side by side
        for c in range(2):
            whole = total[c]
            for lanes in (4, 8, 16):
                whole = arith.addf(whole, a.shuffle_xor(whole, lanes))
            mine_head = p.add(p.mul(sub, HEADS), p.mul(quad, 2), c)

            def write(c=c, whole=whole, mine_head=mine_head):
                to_head = p.add(p.mul(head, group), mine_head)
                if direct:
                    inverse = a.divide(p.cf(1.0), whole)
                    base = p.offset(p.address(out_ref), p.add(p.mul(row, n), to_head), 2 * h)
                    base = p.offset(base, p.mul(g, 2 * run))
                else:
                    line = p.add(p.mul(p.add(p.mul(row, splits), split), n), to_head)
                    base = p.offset(p.address(out_ref), line, 4 * h)
                    base = p.offset(base, p.mul(g, 4 * run))
                    stats = p.offset(p.address(stats_ref), line, 8)
                    p.when(p.less(g, 1), lambda: a.store_words(stats, [top[c], whole]))
                for j in range(words.v_chunks):
                    first = j * run * 2  # of out's floats: two features and two heads an mma tile
                    values = [out[first + 4 * (i // 2) + 2 * (i % 2) + c] for i in range(run)]
                    if direct:
                        values = [arith.mulf(x, inverse) for x in values]
                        pairs = zip(values[::2], values[1::2], strict=True)
                        values = [a.pack(x, y, words.q_kind) for x, y in pairs]
                    size = 2 if direct else 4
                    for i in range(0, len(values), 4):
                        a.store_words(base, values[i : i + 4], size * j * 8 * run + 4 * i)

            p.when(p.less(mine_head, group), write)

    busy = arith.andi(p.less(team, teams), p.less(unit, units))
    p.when(arith.andi(busy, a.below(begin, end)), body)
    if direct:
        _zero_empty_rows(out_ref, row, p.add(unit, member), length, n, h, lane)


def _zero_empty_rows(out_ref, row, rank, length, n, h, lane):
    """The first warp of a row without keys writes its zeros."""

    def write():
        base = p.offset(p.offset(p.address(out_ref), row, 2 * n * h), lane, 4)
        for at in range(0, n * h // 2, 32):
            a.store_words(base, [p.ci(0)], 4 * at)

    empty = a.below(length, p.ci(1))
    p.when(arith.andi(empty, p.less(rank, 1)), write)


@functools.partial(jax.jit, static_argnames=("window", "scale", "chunk", "tiles", "depth", "warps"))
def decode_attention(
    q: jax.Array, k: jax.Array | QTensor, v: jax.Array | QTensor, lengths: jax.Array, *,
    window: int | None, scale: float, **given,
) -> jax.Array:  # fmt: skip
    """See ``pallas_kernels.decode_attention``; given: fields of the Plan, for benchmarks."""
    batch, n, h = q.shape
    _, capacity, n_kv, _ = k.shape
    kind = KIND[q.dtype.name]
    words = Words(k.dtype, h, k.scale.shape[-1] if isinstance(k, QTensor) else 1, kind)
    plan = make_plan(capacity, n_kv, n // n_kv, words, **given)
    splits = -(-capacity // plan.chunk)
    direct = splits == 1
    heads, _, teams = _team(n_kv, -(-(n // n_kv) // HEADS), plan.warps)
    blocks = -(-(splits * (n_kv // heads)) // teams)
    attend = functools.partial(
        _attend, plan=plan, words=words, shape=(batch, capacity, n_kv, n, h), window=window,
        scale=scale, direct=direct,
    )  # fmt: skip
    operands = [q]
    for x in (k, v):
        operands += [x.q, x.scale] if isinstance(x, QTensor) else [x]
    operands.append(lengths)

    def decode_attention_kernel(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(attend)(*refs)

    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
    )
    out_type = jax.ShapeDtypeStruct(q.shape, q.dtype)
    parts = (
        jax.ShapeDtypeStruct((batch, splits, n, h), jnp.float32),
        jax.ShapeDtypeStruct((batch, splits, n, 2), jnp.float32),
    )
    result = plgpu.kernel(
        decode_attention_kernel,
        out_type=out_type if direct else parts,
        grid=(batch * blocks,),
        grid_names=("units",),
        num_threads=plan.warps // 4,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((size // 4,), jnp.float32)
            for size in _shared_bytes(plan, n_kv, n // n_kv, words)
        ],
        compiler_params=params,
    )(*operands)
    if direct:
        return result
    return merge_chunks(*result, lengths, capacity=capacity, chunk=plan.chunk, window=window,
                        out_dtype=q.dtype)  # fmt: skip
