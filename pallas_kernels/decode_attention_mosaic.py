"""Attention of one query token per row over a cache, on Hopper: two kernels, one pass over bytes.

The cache is cut into chunks of tokens (``decode_attention_plan``); a team of warps takes one chunk
of one row, a warp one kv head of it, with the G query heads that share it as the narrow side of the
mma (padded to 8).

    every warp      its share of the team's copies: K 0 | V 0 | K 1 ... into a ring, counted by one
                    barrier per slot (``decode_attention_ring``)
                    wait K | scores = K q^T, tiles of 16 tokens x 8 heads | release K
                    | running maximum, exp2 | weights transposed in registers (movmatrix)
                    | refill the last V | wait V | out^T += V^T weights | release V | refill K
    end             out, maximum and sum of the chunk to memory
    merge kernel    one block per (row, head): chunks faded to the common maximum and summed, int4's
                    rotated back; where one chunk holds the capacity there is no second kernel

Neither operand is converted or transposed in shared memory.  Sums over features and over tokens may
run in any order, so a lane takes the features that lie side by side in memory: of K, 16 bytes of a
token for two k16 steps; of V, the same features of four tokens, paired by PRMT.  int8 and float8
become 16-bit floats between the load and the mma; int4 words are masked out and multiplied as they
are (``attention_words``).  K's scales multiply scores, V's multiply weights.  Zero points cost two
multiply-adds a score: K's meet the sum of the query's features, V's are summed beside the outputs.

The split depends on the batch, the capacity and the cache's dtype alone.  Nothing is added
atomically: the same bits every time, whatever the other rows hold.  Past a row's end the last token
is copied once more and its scores are -inf; teams with no token leave at once.

NOTES.  Floor: the bytes of K, V and scales at 4.2 TB/s; cuDNN's decode shows that 4.46 can be read.
H200, 32/8 heads of 128, microseconds of both kernels (XLA: its own), int4 with float16 scales and
zero points:

                     64 rows x 8192            1 row x 131072        1 row x 1152 (1056 full)
    bfloat16   536   4.00 TB/s  95%        125   4.28 TB/s 102%        4.8
    int8       283   3.91 TB/s  93%         78   3.54 TB/s  84%        5.2
    int4       155   3.91 TB/s  93%         46   3.29 TB/s  78%        5.1
    cuDNN      481 (bfloat16 only)          126
    XLA       3085, 2912, 2854             1100, 1200, 1193

int4's way, 64 rows x 8192 and 1 row x 131072, with the instructions of a warp's 16 tokens x 128
features (K and V) in the compiled loop:
* 262 and 71 us, 366 instructions and 32 copies a step by the leader: words to bf16 by shift, LOP3
  and subtraction.
* 193 and 56, about 280 (176 LOP3, SHF and PRMT instead of 242, no subtractions): words as float16
  subnormals, the bias in the zero points, copies of four tokens shared out among the warps, a lane
  per token for the scales.  Predicted: 155 to 165.  The warps of a team met at every refill.
* 166 and 46: a slot is refilled half a step after it was read, when the others have read it too.
  The merge kernel without its pass over the maxima: 1 us of one row x 1152.
* Without loading scales 148: ptxas had put their first use right behind the load.  They are now
  used at the end of the step.  Without fading the outputs 165, without half of V's mmas 161:
  neither limits.  Chunks of 2048 tokens, one wave of teams, 147 (4.11 TB/s): a chunk's start is
  what is left.  They are 1024 now, so that rows of unequal lengths still share the SMs: with the
  scales at the end of the step 155 and 46 (512: 165).
* 3 steps in the ring 181, 4 tiles a step and one in the ring 183, refills at once 175, all copies
  by one warp 170, 8 warps a block 210.
* One row x 1152, merged inside a cluster of 8 blocks (each warp 18 tokens of one head, shares read
  through distributed shared memory) instead of by a second kernel: bfloat16 6.9 against 5.6 then,
  int4 7.7 against 7.0, int8 7.5 against 7.0.  int4 with 8 warps a block and one tile a step 5.0,
  with 16 and two 6.5.
Elsewhere:
* Every warp its own ring of cp.async, each lane copying what it reads: no barriers at all, but 3.1
  TB/s for bfloat16 and int8 alike (679 and 353 us), more bytes in flight or not.  The pieces were
  64 bytes a token.  One run per token by the copy engine brought 4.0.
* int8: 2 tiles a step and one step in the ring 281 us, 1 and two 308; 8 warps a block 477 (160
  registers a thread: one block an SM).  bfloat16 with 16 warps 531, chunks of 640 or 1024 tokens
  551.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import attention_ptx as a
from pallas_kernels import mosaic as p
from pallas_kernels.attention_words import KIND, Words, as_float16, query_sums_of
from pallas_kernels.decode_attention_merge import merge_chunks
from pallas_kernels.decode_attention_plan import HEADS, make_plan, shared_bytes, team_of
from pallas_kernels.decode_attention_ring import Ring, Scales, ring_bytes, scale_bytes
from pallas_kernels.qtensor import QTensor

LOG2E = math.log2(math.e)
NEG_INF = float("-inf")


def _attend(ctx, *refs, plan, words, shape, window, scale, direct, kind):
    del ctx
    batch, capacity, n_kv, n, h = shape
    outs = 1 if direct else 2
    arrays = 1 + words.quantized + words.zeros  # words, scales, zero points
    k_refs, v_refs = refs[1 : 1 + arrays], refs[1 + arrays : 1 + 2 * arrays]
    q_ref, lengths_ref, out_ref = refs[0], refs[-4 - outs], refs[-3 - outs]
    stats_ref = refs[-4]  # where there are two outputs
    ring_ref, scale_ref, barrier_ref = refs[-3:]
    group = n // n_kv
    subs = -(-group // HEADS)  # mma-fuls of query heads of a kv head
    heads, members, teams = team_of(n_kv, subs, plan.warps)
    splits = -(-capacity // plan.chunk)
    units = splits * (n_kv // heads)  # of work for a team, in a row
    blocks = -(-units // teams)

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

    order = Ring.order(g)
    barriers = p.shared_address(barrier_ref)
    last = p.add(end, -1)
    ring = Ring(
        plan, words, heads=heads, n_kv=n_kv, members=members, member=member, lane=lane,
        ring=p.add(p.shared_address(ring_ref), p.mul(team, ring_bytes(plan, heads, words))),
        barriers=p.add(barriers, p.mul(team, 2 * plan.depth * 16)),
        bases=[
            p.offset(
                p.offset(p.address(refs_[0]), row, capacity * n_kv * words.row_bytes),
                first_head, words.row_bytes,
            )
            for refs_ in (k_refs, v_refs)
        ],
        last=last,
    )  # fmt: skip
    k_token = p.mul(order, ring.per_run)
    own_at = p.add(ring.ring, p.mul(own, words.row_bytes))
    k_at = p.add(own_at, p.mul(order, ring.stride), p.mul(quad, words.k_chunk))
    v_at = [
        p.add(own_at, p.mul(run, ring.stride), p.mul(g, words.v_chunk),
              plan.depth * ring.slot_bytes)
        for run in (Ring.order(p.mul(quad, 2)), Ring.order(p.add(p.mul(quad, 2), 1)))
    ]  # fmt: skip

    p.when(p.less(thread, 1), lambda: ring.initialise(teams, barriers))
    p.barrier()

    def body():
        def start_ring():
            for i in range(plan.depth):
                token0 = p.add(begin, i * ring.per_step)

                def both(token0=token0, i=i):
                    ring.fill(token0, p.ci(i), False)
                    ring.fill(token0, p.ci(i), True)

                p.when(a.below(token0, end), both) if i else both()

        def adjust(scale, zero, values):
            """A product is scale times the words' and zero times the sum of what they meet."""
            if zero is None:
                return (scale if values else arith.mulf(scale, factor),)
            # Words come 8 too large.
            zero = p.fma(scale, p.cf(-8.0), zero)
            if values:
                return scale, zero
            step = arith.mulf(factor, p.cf(words.steps[0]))
            return arith.mulf(scale, step), arith.mulf(zero, factor)

        def sources(refs_):
            size = words.groups * words.scale_size
            return [
                p.offset(p.offset(p.address(ref), row, capacity * n_kv * size), head, size)
                for ref in refs_[1:]
            ]

        start_ring()
        scales = None
        if words.quantized:
            at = p.add(p.shared_address(scale_ref), p.mul(warp, scale_bytes(plan, words)))
            scales = Scales(plan, words, n_kv=n_kv, lane=lane, at=at, last=last, adjust=adjust,
                            sources=[sources(k_refs), sources(v_refs)])  # fmt: skip
            coming = scales.load(begin)
        # Query features in the order that key words come in; heads past the group are copies.
        query_head = p.add(p.mul(sub, HEADS), a.smaller(g, p.add(p.mul(sub, -HEADS), group - 1)))
        query_head = p.add(p.mul(head, group), query_head)
        q_base = p.offset(p.address(q_ref), p.add(p.mul(row, n), query_head), 2 * h)
        features = words.k_chunk * 8 // words.bits
        q_base = p.offset(q_base, p.mul(quad, 2 * features))
        raw = [
            [w for i in range(features // 8)
             for w in a.load_words(q_base, 4, 8 * features * j + 16 * i, cache=".nc")]
            for j in range(words.k_chunks)
        ]  # fmt: skip
        factor = p.cf(scale * LOG2E)
        if words.zeros:
            raw, factor = as_float16(raw, factor, kind)
        per = words.per_word // 2
        query = [
            [pair for w in range(0, len(loaded), per)
             for pair in words.query_pairs(loaded[w : w + per])]
            for loaded in raw
        ]  # fmt: skip

        zero = p.cf(0.0)
        query_sums = query_sums_of(query, words) if words.zeros else None
        if words.quantized:
            scales.store(coming)

        def tile_words(u, at):
            """Key words of a tile: rows g and g + 8."""
            return [
                [
                    w
                    for j in range(words.k_chunks)
                    for w in a.load_shared(
                        at, words.k_chunk // 4,
                        (2 * u + half) * ring.token_bytes + j * 4 * words.k_chunk,
                    )
                ]
                for half in range(2)
            ]  # fmt: skip

        def tile_products(rows, numbers):
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
            if numbers is None:
                return [arith.mulf(x, factor) for x in acc[0]]
            out = []
            for i in range(4):
                total = zero
                for of in range(words.groups):
                    total = p.fma(acc[of][i], numbers[i // 2][0][of], total)
                    if words.zeros:
                        total = p.fma(query_sums[of][i % 2], numbers[i // 2][1][of], total)
                out.append(total)
            return out

        sums = 2 * words.groups if words.zeros else 0  # of weights times zero points

        def step(token0, carry):
            slot, parity = carry[:2]
            top, total, zeros, out = carry[2:4], carry[4:6], carry[6 : 6 + sums], carry[6 + sums :]
            slot_at = p.mul(slot, ring.slot_bytes)
            coming = scales.load(p.add(token0, ring.per_step)) if words.quantized else None
            ring.wait(slot, parity, False)
            scores = []
            for u in range(plan.tiles):
                rows = tile_words(u, p.add(k_at, slot_at))
                if u == plan.tiles - 1:
                    ring.release(slot, False)
                numbers = None
                if words.quantized:
                    numbers = [scales.read(order, 2 * u + half, False) for half in range(2)]
                products = tile_products(rows, numbers)
                for i in range(4):
                    token = p.add(token0, k_token, 2 * u + i // 2)
                    products[i] = arith.select(a.below(token, end), products[i], p.cf(NEG_INF))
                scores.append(products)
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
            zeros = [arith.mulf(x, fade[i % 2]) for i, x in enumerate(zeros)]
            # The weights as the right operand of an mma: per group of features, transposed.
            right = []
            for u in range(plan.tiles):
                right.append([])
                numbers = None
                if words.quantized:
                    numbers = [scales.read(order, 2 * u + half, True) for half in range(2)]
                for of in range(words.groups):
                    w = weights[u]
                    if words.zeros:
                        for i, x in enumerate(w):
                            at = 2 * of + i % 2
                            zeros[at] = p.fma(x, numbers[i // 2][1][of], zeros[at])
                    if words.quantized:
                        w = [arith.mulf(x, numbers[i // 2][0][of]) for i, x in enumerate(w)]
                    halves = [a.pack(w[2 * i], w[2 * i + 1], words.v_kind) for i in range(2)]
                    right[u].append([a.transpose_8x8(x) for x in halves])
            if plan.depth == 1:
                ring.refill(token0, slot, parity, False)
            else:
                before, emptied = p.add(token0, -ring.per_step), ring.neighbour(slot, parity, -1)
                p.when(a.at_most(begin, before), lambda: ring.refill(before, *emptied, True))
            ring.wait(slot, parity, True)
            for u in range(plan.tiles):
                tokens = [
                    [
                        w
                        for j in range(words.v_chunks)
                        for w in a.load_shared(
                            p.add(v_at[t % 2], slot_at), words.v_chunk // 4,
                            (2 * u + t // 2) * ring.token_bytes + j * 8 * words.v_chunk,
                        )
                    ]
                    for t in range(4)
                ]  # fmt: skip
                if u == plan.tiles - 1:
                    ring.release(slot, True)
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
            ring.refill(token0, slot, parity, plan.depth == 1)
            if words.quantized:
                scales.store(coming)
            following = ring.neighbour(slot, parity, 1)
            return [*following, *new_top, *total, *zeros, *out]

        start = [p.ci(0)] * 2 + [p.cf(NEG_INF)] * 2 + [zero] * (2 + sums + h // 4)
        carry = a.loop(begin, end, p.ci(ring.per_step), start, step)
        top, total, zeros, out = carry[2:4], carry[4:6], carry[6 : 6 + sums], carry[6 + sums :]
        run = words.v_chunk * 8 // words.bits  # features of a lane that lie side by side
        for c in range(2):
            whole, *parts = [_over_rows(x) for x in (total[c], *zeros[c::2])]
            mine_head = p.add(p.mul(sub, HEADS), p.mul(quad, 2), c)

            def write(c=c, whole=whole, parts=parts, mine_head=mine_head):
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
                    if words.zeros:
                        of = j * 8 * words.v_chunk // words.group_bytes
                        values = [
                            p.fma(x, p.cf(words.steps[i % 2]), parts[of])
                            for i, x in enumerate(values)
                        ]
                    if direct:
                        values = [arith.mulf(x, inverse) for x in values]
                        pairs = zip(values[::2], values[1::2], strict=True)
                        values = [a.pack(x, y, kind) for x, y in pairs]
                    size = 2 if direct else 4
                    for i in range(0, len(values), 4):
                        a.store_words(base, values[i : i + 4], size * j * 8 * run + 4 * i)

            p.when(p.less(mine_head, group), write)

    busy = arith.andi(p.less(team, teams), p.less(unit, units))
    p.when(arith.andi(busy, a.below(begin, end)), body)
    if direct:
        _zero_empty_rows(out_ref, row, p.add(unit, member), length, n, h, lane)


def _over_rows(x):
    """The sum over the lanes that share a quad's place."""
    for lanes in (4, 8, 16):
        x = arith.addf(x, a.shuffle_xor(x, lanes))
    return x


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
    plan = make_plan(batch, capacity, n_kv, n // n_kv, words, **given)
    splits = -(-capacity // plan.chunk)
    direct = splits == 1 and not words.zeros  # the merge rotates back
    heads, _, teams = team_of(n_kv, -(-(n // n_kv) // HEADS), plan.warps)
    blocks = -(-(splits * (n_kv // heads)) // teams)
    attend = functools.partial(
        _attend, plan=plan, words=words, shape=(batch, capacity, n_kv, n, h), window=window,
        scale=scale, direct=direct, kind=kind,
    )  # fmt: skip
    operands = [q]
    for x in (k, v):
        operands += jax.tree.leaves(x)  # words, scales, zero points
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
            for size in shared_bytes(plan, n_kv, n // n_kv, words)
        ],
        compiler_params=params,
    )(*operands)
    if direct:
        return result
    return merge_chunks(*result, lengths, capacity=capacity, chunk=plan.chunk, window=window,
                        unspread=words.zeros, out_dtype=q.dtype)  # fmt: skip
