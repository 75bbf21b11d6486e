"""Decode attention of one or two rows on Hopper: one kernel, a cluster of blocks per kv head.

    out[b, n] = softmax_s(scale * q[b, n] . k[b, s, n // G]) v[b, s, n // G],    s < lengths[b]

q, out ``[B, N, H]``, k, v ``[B, S, K, H]``, G = N / K.

    all      the first keys and values -> L2 | the kernel before has ended
    warp     16 tokens of keys and values at a time, straight into registers | query heads
             [RoPE: norms and rotates them; the new token's tile takes it from the projection and
              stores it]
    step     scores | maximum, exp2 | out^T += V^T weights | the next tile's words, where used
    end      the warps' parts through shared memory, the blocks' through that of the cluster
             (``attention.gather``), in a fixed order, float32

Before Hopper there are no clusters: the blocks of a kv head write their parts to memory, and a
second kernel sums them (``attention.merge``).

Copies: each lane loads its words of a tile from the cache into registers; no ring, no TMA.  Without
a window and pages, lanes first prefetch the warp's first tile into L2.
Waits: all threads for the kernel before; with a norm also once at the block's barrier, for tables
in shared memory.  At the end (``Gathering.finish``) all warps meet at the block's barrier, and the
blocks wait until their cluster has begun.  A head's owner then waits for all blocks' parts of it.
Writes: with RoPE the warp of the new token's tile stores its key and value.  One warp for each
query head stores the output, or the block's part for ``merge_parts``.

Such a row takes microseconds, so it needs no ring: all its bytes are requested at once.  Launches
are the main cost.  A row's result depends on nothing but the row.

Floor at 1152 tokens: 4.3 MB, 1.0 us, beside a launch.  Result, one H200, 32/8 heads of 128,
bfloat16: 1 x 1152 4.3 us, 2 x 1152 6.3, 1 x 32768 35.8.  With RoPE and the cache write it takes 4.9
in a decode step, where three kernels took 7.2.  More, and attempts: docs/lab/attention.md.
Command: ``python -m benchmarks.kernels.attention``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.attention import tile
from pallas_kernels.attention.codes import Codes
from pallas_kernels.attention.gather import Gather, write_heads, write_parts
from pallas_kernels.attention.merge import merge_parts
from pallas_kernels.attention.operands import Attended, capacity_of
from pallas_kernels.attention.pages import Paging
from pallas_kernels.attention.source import HeadWords, staged_floats
from pallas_kernels.attention.tile import LEAST, NEG_INF, TILE
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.launch import in_place, launch
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rows.fused_parts import KIND, floats

CLUSTER = 8  # the largest that any Hopper GPU takes


@dataclasses.dataclass(frozen=True)
class DirectPlan:
    """``cluster`` blocks of ``warps`` to a kv head of a row; up to ``steps`` tiles to a warp.
    merged: the blocks are no cluster, and a second kernel sums their parts."""

    kernel: ClassVar[str] = "decode_attention_direct"
    cluster: int
    warps: int
    steps: int
    merged: bool = False

    def representative(self) -> DirectPlan:
        cluster = min(self.cluster, 2) if self.merged else self.cluster
        return dataclasses.replace(self, cluster=cluster, steps=min(self.steps, 2))

    def gather(self, group: int, codes: Codes) -> Gather:
        cluster = 1 if self.merged else self.cluster
        return Gather(
            codes.head_dim, self.warps, group, cluster, self.warps, codes.zeros, self.merged
        )


def plan(call) -> DirectPlan | Reason:
    """Return the fastest measured division of a call, or why it has none."""
    return divided(call, merged=not gpu().clusters)


def divided(call, *, merged: bool) -> DirectPlan | Reason:
    """For (q or the projection, k, query heads) of few rows: 64 SMs at most are at work, 8 to a kv
    head of a row, and there are no launches beside this one.  Without clusters all SMs are, and the
    parts are summed by a second launch."""
    q, k, n = call
    batch, capacity, n_kv, h = k.shape
    group, card = n // n_kv, gpu().attention
    longest = card.direct_tokens
    if batch * n_kv < 8:
        longest //= 8
    if isinstance(k, QTensor):
        longest //= 16
    if batch > card.direct_rows or batch * capacity > longest or group > 8:
        return Reason("")
    cluster = min(2 * CLUSTER, max(1, gpu().sms // (batch * n_kv))) if merged else CLUSTER
    while not merged and cluster > 1 and cluster * batch * n_kv > card.direct_blocks:
        cluster //= 2
    # Words, queries and outputs of a tile are in registers, of which Hopper's code takes fewest.
    roomy = h <= 128 and gpu().wgmma and not merged
    most = 12 if roomy else 8  # warps of a block
    tiles = -(-capacity // (TILE * cluster))
    steps = -(-tiles // most)
    warps = -(-max(-(-tiles // steps), group) // 4) * 4
    return DirectPlan(cluster, warps, steps, merged and cluster > 1)


class _Facts(NamedTuple):
    """The facts of a launch.  shape: (batch, capacity, kv heads, query heads, features)."""

    plan: DirectPlan
    codes: Codes
    shape: tuple[int, int, int, int, int]
    paging: Paging | None
    window: int | None
    scale: float
    eps: float | None
    kind: str


class _Kernel:
    """The program of one warp.  Everything is emitted while the kernel is traced."""

    def __init__(self, gmem, smem, facts: _Facts):
        self.plan, self.codes, self.shape, self.paging = plan, codes, shape, _ = facts[:4]
        self.window, self.scale, eps, self.kind = facts[4:]
        self.gmem = gmem
        self.staged = None if eps is None else (eps, p.shared_address(smem.staged))
        thread = p.register("tid.x")
        self.warp, self.lane = thread >> 5, thread & 31
        self.g, self.quad = self.lane >> 2, self.lane & 3
        block, self.rank = p.register("ctaid.x"), p.ci(0)
        if plan.merged:
            self.rank = block % plan.cluster
            block = block // plan.cluster
        elif plan.cluster > 1:
            block, self.rank = p.register("clusterid.x"), p.register("cluster_ctarank")
        _, _, n_kv, n, _ = shape
        self.group = n // n_kv
        self.row, self.head = block // n_kv, block % n_kv
        gather = plan.gather(self.group, codes)
        self.gathering = gather.on(smem.parts, smem.shares, smem.arrivals, thread, self.rank)

    def run(self) -> None:
        self.gathering.start()
        if self.window is None and not self.paging:
            self.prefetch()
        p.await_kernel()
        source = HeadWords(
            self.gmem,
            self.codes,
            self.shape,
            self.paging,
            self.kind,
            self.row,
            self.head,
            self.lane,
            self.staged,
        )
        self.source, self.end, self.begin, first_token = source, source.end, p.ci(0), p.ci(0)
        if self.window is not None:
            self.begin = p.larger(self.end - self.window, 0)
            first_token = self.begin & -TILE
        place = self.warp * self.plan.cluster + self.rank
        token0 = first_token + place * TILE
        query, keys, values = source.first(token0, early=self.window is None)
        self.queries = tile.Queries([query], self.codes, self.scale, self.kind)
        self.write_part(*self.attend(token0, keys, values))
        _, _, _, n, h = self.shape
        first = self.row * n + self.head * self.group
        line = functools.partial(operator.add, first)
        write = write_heads(self.gmem.out, line, self.lane, self.kind, h)
        sinks = self.gmem.sinks
        if self.plan.merged:
            part = self.row * self.plan.cluster + self.rank
            first = part * n + self.head * self.group
            line = functools.partial(operator.add, first)
            write, sinks = write_parts(self.gmem.out, self.gmem.stats, line, self.lane, h), None
        number = lambda head: self.head * self.group + head  # noqa: E731
        self.gathering.finish(write, sinks, number)

    def prefetch(self) -> None:
        """Asks for the warp's first tile: a lane for a token's keys, a lane for its values."""
        _, capacity, n_kv, _, _ = self.shape
        size = self.codes.row_bytes
        keys, values = (p.address(refs[0]) for refs in (self.gmem.k, self.gmem.v))
        place = self.warp * self.plan.cluster + self.rank
        token = p.minimum(place * TILE + (self.lane & (TILE - 1)), capacity - 1)
        base = p.where(self.lane < TILE, keys, values)
        base = p.offset(base, self.row, capacity * n_kv * size)
        p.prefetch(p.offset(p.offset(base, self.head, size), token, n_kv * size), size)

    def adjusted(self, loaded, values: bool):
        """[token g | g + 8][scale, zero][group] of loaded numbers."""
        out = []
        for scales, *zeros in loaded:
            scales = self.floats(scales)
            zeros = self.floats(zeros[0]) if zeros else [None] * self.codes.groups
            pairs = [self.queries.adjust(*x, values) for x in zip(scales, zeros, strict=True)]
            out.append(list(zip(*pairs, strict=True)))
        return out or None

    def floats(self, loaded):
        if self.codes.scale_size == 4:
            return [p.from_bits(w) for w in loaded]
        return floats(loaded, "f16")[: self.codes.groups]

    def attend(self, token0, keys, values):
        """(maximum, sum) of two heads, sums with zero points, outputs of all the warp's tiles."""
        zero, codes = p.cf(0.0), self.codes
        count = 2 * codes.groups if codes.zeros else 0
        start = [p.cf(LEAST)] * 2, [zero] * 2, [zero] * count, [zero] * (self.codes.head_dim // 4)
        if self.plan.steps == 1:
            return self.step(token0, start, keys, values, None, None)[0]
        apart = self.plan.cluster * self.plan.warps * TILE
        coming = self.entry(token0, apart)  # of the next tile's page
        flat, tree = jax.tree.flatten((start, keys, values, coming))

        def body(token0, carry):
            state, keys, values, coming = jax.tree.unflatten(tree, carry)
            later = self.entry(token0, 2 * apart)
            done = self.step(token0, state, keys, values, token0 + apart, coming)
            return jax.tree.leaves((*done, later))

        done = p.loop(token0, self.end, apart, flat, body)
        return jax.tree.unflatten(tree, done)[0]

    def entry(self, token0, ahead: int):
        return self.source.entry(token0 + ahead) if self.paging else None

    def step(self, token0, state, keys, values, following, entry):
        """Compute one tile, and reload each used register for the tile at ``following``.

        entry: the table's entry for the page of that next tile.
        """
        top, total, zeros, out = state
        pairs = tile.key_pairs(keys[0], self.codes)
        scores = self.queries.scores(pairs, self.adjusted(keys[1], False))
        for i in range(4):
            token = token0 + self.g + 8 * (i // 2)
            seen = p.below(token, self.end)
            if self.window is not None:
                seen = seen & p.at_most(self.begin, token)
            scores[i] = p.where(seen, scores[i], NEG_INF)
        keys = self.reload(following, entry, keys, self.source.next_keys)
        new_top, fade = tile.maxima([scores], top)
        (weights,) = tile.weights_of([scores], new_top)
        total, zeros, out = list(total), list(zeros), list(out)
        if following is not None:
            total, zeros, out = (
                [x * fade[i % 2] for i, x in enumerate(part)] for part in (total, zeros, out)
            )
        total = [x + (weights[c] + weights[c + 2]) for c, x in enumerate(total)]
        right = tile.right_operand(weights, self.adjusted(values[1], True), zeros, codes=self.codes)
        tile.add_values([out], values[0], [right], self.codes)
        values = self.reload(following, entry, values, self.source.next_values)
        return (new_top, total, zeros, out), keys, values

    def reload(self, token0, entry, held, load):
        if token0 is None:
            return held
        flat, tree = jax.tree.flatten(held)
        there = p.below(token0, self.end)
        return jax.tree.unflatten(
            tree, p.choose(there, lambda: jax.tree.leaves(load(token0, entry)), flat)
        )

    def write_part(self, top, total, zeros, out) -> None:
        run = tile.run_of(self.codes)
        for c in range(2):
            whole, *parts = [tile.over_tokens(x) for x in (total[c], *zeros[c::2])]
            head = self.quad * 2 + c

            def write(c=c, whole=whole, parts=parts, head=head):
                at, stats = self.gathering.part(self.warp, head)
                at = at + self.g * (4 * run)
                p.when(self.g < 1, lambda: p.store_shared(stats, [top[c], whole]))
                for first, values in tile.head_outputs(out, parts, c, self.codes):
                    p.store_shared(at, values, 4 * first)

            p.when(head < self.group, write)


@functools.partial(jax.jit, static_argnames=("window", "scale", "eps", "plan"))
def attend(
    x: Attended,
    tables: tuple[jax.Array, ...] | None = None,
    *,
    window: int | None,
    scale: float,
    plan: DirectPlan,
    eps: float | None = None,
):
    """See ``pallas_kernels.attention.op``.

    With tables (cos, sin; with eps, the weights of q's and k's norm too) it is
    ``rope_and_attend``: q is the projection, lengths are the slots, and the result is (out, k, v).
    """
    q, k, v, lengths, table, sinks = x
    batch, heads, h = q.shape
    capacity, n_kv = capacity_of(k, table), k.shape[2]
    n = heads - 2 * n_kv if tables else heads
    codes = Codes.of(q, k)
    parts, shares, arrivals = plan.gather(n // n_kv, codes).floats
    staged = None if eps is None else staged_floats(h)
    scratch = {"parts": parts, "shares": shares, "arrivals": arrivals, "staged": staged}
    shape, paging = (batch, capacity, n_kv, n, h), Paging.of(k, table)
    facts = _Facts(plan, codes, shape, paging, window, scale, eps, KIND[q.dtype.name])

    out, stats = jax.ShapeDtypeStruct((batch, n, h), q.dtype), None
    if plan.merged:
        out = jax.ShapeDtypeStruct((batch, plan.cluster, n, h), jnp.float32)
        stats = jax.ShapeDtypeStruct((batch, plan.cluster, n, 2), jnp.float32)

    def run(cache):
        k, v = (jax.tree.leaves(x) for x in cache)
        found, parts = launch(
            functools.partial(_Kernel, facts=facts),
            {
                **{"q": q, "tables": list(tables or ()), "lengths": lengths, "table": table},
                **{"sinks": sinks, "k": k, "v": v},
            },
            {"out": out, "stats": stats},
            name="decode_attention_direct",
            grid=batch * n_kv * (plan.cluster if plan.merged else 1),
            cluster=1 if plan.merged else plan.cluster,
            warpgroups=plan.warps // 4,
            scratch=scratch,
            registers=True,
        )
        if plan.merged:
            return merge_parts(found, parts, sinks, rotated=codes.zeros, out_dtype=q.dtype)
        return found

    if not tables:
        return run((k, v))
    found, cache = in_place(run, (k, v))
    return found, *cache
