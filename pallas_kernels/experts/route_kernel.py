"""The norm of a token and its choice of experts in one launch on Hopper.

    y       = x / sqrt(mean(x^2) + eps) * gamma                     rounded to bfloat16
    logits  = y @ router.T + bias                                   float32
    experts = the k largest logits', in descending order; of equal ones the lowest index first
    weights = scale times the softmax over them, or times their entries of that over all experts

With ``sigmoid`` the k largest are those of sigmoid(logits) + choice_bias, and the weights scale
times the chosen sigmoids, over their sum if they are normalized.

A token has a cluster of ``BLOCKS`` blocks, and each block has ``plan.rows`` rows of the router.

    all      the router's rows -> L2 | the kernel before has ended
    all      the warp's first rows, x, gamma -> registers; squares; barrier
    all      y -> shared memory (block 0: -> device memory); barrier
    warp     a row, or a part of it, times y: its sum -> block 0's shared memory, by st.async
    warp 0   (of block 0) all sums have come: the logits -> registers; k times the largest, by two
             ``redux``; the softmax or shares of sigmoids; the results

Copies: lanes load x, gamma and rows of the router into registers; one thread a row prefetches it.
Warp 0 of block 0 loads the biases.
Waits: all threads for the kernel before, and at two block barriers of ``norm``: for the warps'
squares, and for y.  All blocks wait until their cluster has begun.  Warp 0 of block 0 waits on
``arrival`` for all sums.
Writes: block 0 stores y; lane j of its warp 0 stores the j-th expert and its weight.

A barrier in block 0 counts the sums.  One of the cluster would wait for y in device memory, too.

Floor: one launch, a round trip to memory and one between blocks.  One token on an H200 (jax 0.12),
us [norm, router and choice as XLA's kernels]: 8 of 128 experts, 2048 columns 3.7 [7.8]; 4 of 32,
2880 columns 2.7 [7.2].  Command: ``python -m benchmarks.kernels.experts --route``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.experts.best_kernel import largest, of_lane
from pallas_kernels.experts.route_plan import BLOCKS, LEAST, SENT, WARPS, RoutePlan, RouteStatic
from pallas_kernels.launch import launch
from pallas_kernels.matmul.few_rows.kernel import kinds_of
from pallas_kernels.matmul.few_rows.operands import (
    BYTES,
    as_float,
    load_eight,
    load_word,
)
from pallas_kernels.ptx import LOG2E, Value
from pallas_kernels.rows.fused_parts import floats, packed

THREADS = 32 * WARPS
EARLY = 2  # parts of rows that a warp loads before the norm
SCRATCH = "y", "squares", "sums", "arrival"


class Chosen(NamedTuple):
    """An expert that a lane has, its score, and the sum by which the score is divided."""

    expert: Value
    score: Value
    total: Value


@functools.partial(jax.jit, static_argnames=("static", "plan"))
def route_tokens(
    x: jax.Array,
    gamma: jax.Array,
    router: jax.Array,
    bias: jax.Array | None,
    choice_bias: jax.Array | None,
    *,
    static: RouteStatic,
    plan: RoutePlan,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(y bfloat16 ``[T, D]``, experts int32 ``[T, k]``, weights float32 ``[T, k]``).

    x bfloat16 ``[T, D]``, gamma ``[D]``, router bfloat16 ``[E, D]``, biases ``[E]``.
    """
    inputs = {"x": x, "gamma": gamma, "router": router, "bias": bias, "choice_bias": choice_bias}
    kinds = kinds_of(inputs)
    shape = plan.tokens, static.k
    outs = {
        "y": jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
        "experts": jax.ShapeDtypeStruct(shape, jnp.int32),
        "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
    }

    def body(gmem, smem):
        memory = {name: None if r is None else p.address(r) for name, r in vars(gmem).items()}
        shared = {name: p.shared_address(getattr(smem, name)) for name in vars(smem)}
        _Program(plan, static, kinds, SimpleNamespace(**memory), SimpleNamespace(**shared)).run()

    sizes = {name: -(-size // 4) for name, size in _sizes(plan)}
    found = launch(
        body,
        inputs,
        outs,
        name=plan.kernel.removesuffix("_mosaic"),
        grid=plan.tokens,
        cluster=BLOCKS,
        warpgroups=WARPS // 4,
        scratch=sizes,
        registers=True,
    )
    return tuple(found)


def _sizes(plan: RoutePlan) -> Sequence[tuple[str, int]]:
    return list(zip(SCRATCH, plan.scratch_sizes, strict=True))


@dataclasses.dataclass(frozen=True)
class _Program:
    plan: RoutePlan
    static: RouteStatic
    kinds: Mapping[str, str]
    gmem: SimpleNamespace
    smem: SimpleNamespace

    def run(self) -> None:
        """Emit one block's program while the kernel is traced."""
        plan = self.plan
        thread = p.register("tid.x")
        warp, lane = thread >> 5, thread & 31
        token, rank = p.register("clusterid.x"), p.register("cluster_ctarank")
        first = rank * plan.rows
        chooses = (rank < 1) & (warp < 1)
        self.start(thread)
        self.prefetch(thread, first)
        p.await_kernel()
        tasks = [warp + task for task in range(0, plan.tasks, WARPS)]
        early = [self.load(task, lane, first) for task in tasks[:EARLY]]
        biases = [self.load_bias(name, chooses, lane) for name in ("bias", "choice_bias")]
        self.norm(thread, warp, lane, token, rank)
        p.cluster_wait()
        for i, task in enumerate(tasks):
            row = early[i] if i < len(early) else self.load(task, lane, first)
            self.multiply(task, lane, rank, row)
        p.when(chooses, lambda: self.choose(token, lane, *biases))

    def start(self, thread: Value) -> None:
        """Count what will come to this block, and announce that it has begun."""
        arrival = self.smem.arrival

        def initialise() -> None:
            p.barrier_init(arrival, 1)
            p.barriers_ready()
            p.barrier_expect(arrival, SENT * BLOCKS * self.plan.tasks)

        p.when(thread < 1, initialise)
        p.cluster_arrive()

    def prefetch(self, thread: Value, first: Value) -> None:
        """Asks for the block's rows of the router."""
        row = first + thread
        mine = (thread < self.plan.rows) & (row < self.plan.n)
        size = 2 * self.plan.d
        p.when(mine, lambda: p.prefetch(p.offset(self.gmem.router, row, size), size))

    def norm(self, thread: Value, warp: Value, lane: Value, token: Value, rank: Value) -> None:
        """y in shared memory; block 0 stores it."""
        plan, smem = self.plan, self.smem
        x = p.offset(self.gmem.x, token, 2 * plan.d)
        asked, total = [], p.cf(0.0)
        for start in range(0, plan.pieces, THREADS):
            piece = thread + start
            inside = piece < plan.pieces
            at = p.minimum(piece, plan.pieces - 1)
            words = p.load_global(p.offset(x, at, 16), 4)
            kind = self.kinds["gamma"]
            gamma = load_eight(p.offset(self.gmem.gamma, at, 8 * BYTES[kind]), kind)
            asked.append((piece, inside, floats(words), gamma))
        for _, inside, values, _ in asked:
            squares = functools.reduce(lambda sum_, v: p.fma(v, v, sum_), values, p.cf(0.0))
            total = total + p.where(inside, squares, 0.0)
        total = p.over_lanes(total)
        at = smem.squares + warp * 4
        p.when(lane < 1, lambda: p.store_shared(at, [total]))
        p.barrier()
        sums = [p.load_float(smem.squares, 4 * w) for w in range(WARPS)]
        mean = functools.reduce(operator.add, sums) * (1.0 / plan.d)
        factor = p.rsqrt(mean + self.static.eps)
        for piece, inside, values, gamma in asked:
            pairs = zip(values, gamma, strict=True)
            words = packed([v * factor * g for v, g in pairs])

            def store(piece=piece, words=words) -> None:
                p.store_shared(smem.y + piece * 16, words)
                out = p.offset(p.offset(self.gmem.y, token, 2 * plan.d), piece, 16)
                p.when(rank < 1, lambda: p.store_global(out, words))

            p.when(inside, store)
        p.barrier()

    def load(self, task: Value, lane: Value, first: Value) -> list[tuple]:
        """A lane's words of a part of a row: (are they the row's, or None, if they must be; their
        place in it; the words)."""
        plan = self.plan
        row, part = task // plan.parts, task % plan.parts
        expert = p.minimum(first + row, plan.n - 1)
        w = p.offset(self.gmem.router, expert, 2 * plan.d)
        begin, loaded = part * (32 * plan.per_part), []
        for i in range(plan.per_part):
            piece = begin + (lane + 32 * i)
            at = p.minimum(piece, plan.pieces - 1)
            words = p.load_global(p.offset(w, at, 16), 4)
            is_whole = plan.pieces == 32 * plan.per_part * plan.parts
            loaded.append((None if is_whole else piece < plan.pieces, at, words))
        return loaded

    def load_bias(self, name: str, chooses: Value, lane: Value) -> list[Value]:
        """The words of a bias of the lane's experts, where the choice is made."""
        plan, bias = self.plan, getattr(self.gmem, name)
        if bias is None:
            return []

        def load() -> list[Value]:
            experts = (p.minimum(lane + 32 * i, plan.n - 1) for i in range(plan.per_lane))
            return [load_word(bias, expert, self.kinds[name]) for expert in experts]

        return p.choose(chooses, load, [p.ci(0)] * plan.per_lane)

    def multiply(self, task: Value, lane: Value, rank: Value, loaded: list) -> None:
        """The sum of a part of a row, to block 0."""
        sums = [p.cf(0.0)] * 4
        for inside, at, words in loaded:
            ys = p.load_shared(self.smem.y + at * 16, 4)
            for i, (a, b) in enumerate(zip(floats(ys), floats(words), strict=True)):
                a = a if inside is None else p.where(inside, a, 0.0)
                sums[i % 4] = p.fma(a, b, sums[i % 4])
        total = sums[0] + sums[1] + (sums[2] + sums[3])
        total = p.over_lanes(total)
        is_one = (lane < 1) & (task < self.plan.tasks)
        at = rank * self.plan.tasks + task
        to = p.peer_address(self.smem.sums + at * SENT, 0)
        barrier = p.peer_address(self.smem.arrival, 0)
        p.when(is_one, lambda: p.send_peer(to, [total, total], barrier))

    def logits(self, lane: Value, bias: Sequence[Value]) -> list[Value]:
        """The lane's: of experts lane, lane + 32 and so on; -inf behind the last."""
        plan, found = self.plan, []
        p.barrier_wait(self.smem.arrival, p.ci(0))
        for i in range(plan.per_lane):
            expert = lane + 32 * i
            here = p.minimum(expert, plan.n - 1)
            # A row's parts lie side by side, and rows in the order of experts.
            at = self.smem.sums + here * (SENT * plan.parts)
            parts = [p.load_float(at, SENT * part) for part in range(plan.parts)]
            value = functools.reduce(operator.add, parts)
            if bias:
                value = value + as_float(bias[i], self.kinds["bias"])
            found.append(p.where(expert < plan.n, value, p.cf(float("-inf"))))
        return found

    def choose(
        self, token: Value, lane: Value, bias: Sequence[Value], choice_bias: Sequence[Value]
    ) -> None:
        logits = self.logits(lane, bias)
        choose = self.by_sigmoids if self.static.sigmoid else self.by_softmax
        index, mine, total = choose(lane, logits, choice_bias)
        weight = p.divide(mine, total) * self.static.scale

        def store() -> None:
            at = token * self.static.k + lane
            p.store_global(p.offset(self.gmem.experts, at, 4), index)
            p.store_global(p.offset(self.gmem.weights, at, 4), weight)

        p.when(lane < self.static.k, store)

    def by_softmax(self, lane: Value, logits: list[Value], _: Sequence[Value]) -> Chosen:
        best, chosen = largest(logits, lane, self.plan.n, self.static.k)

        def power(value: Value) -> Value:
            return p.exp2((value - best[0]) * LOG2E)

        powers = [power(v) for v in best]
        if self.static.normalize:
            total = functools.reduce(operator.add, powers)
        else:
            total = p.over_lanes(functools.reduce(operator.add, [power(v) for v in logits]))
        return Chosen(of_lane(lane, chosen), of_lane(lane, powers), total)

    def by_sigmoids(self, lane: Value, logits: list[Value], choice_bias: Sequence[Value]) -> Chosen:
        scores = [p.divide(1.0, p.exp2(v * -LOG2E) + 1.0) for v in logits]
        biases = [as_float(word, self.kinds["choice_bias"]) for word in choice_bias]
        by = [a + b for a, b in zip(scores, biases, strict=True)] if biases else scores
        _, chosen = largest(by, lane, self.plan.n, self.static.k)
        index, mine = of_lane(lane, chosen), p.cf(0.0)
        for i, score in enumerate(scores):
            mine = p.where(p.equal(index >> 5, i), p.shuffle_from(score, index & 31), mine)
        total = p.cf(1.0)
        if self.static.normalize:
            total = p.over_lanes(p.where(lane < self.static.k, mine, 0.0))
            total = total + LEAST
        return Chosen(index, mine, total)
