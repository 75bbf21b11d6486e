"""A step's queries of latents, and its entries of the cache, in one launch on Hopper.

    q'[b, n]              = up_k[n]^T q_still[b, n] | rope(q_turning[b, n])     bfloat16
    cache[b, slots[b]]    = norm(low[b]) * gamma | rope(key[b])

A head has ``PARTS`` blocks, of 64 latents each.  Lane 8 j + c of warp w has 8 of these columns and
every fourth row of the warp's share of up_k.  One more block writes the entries, a warp for a row.

    block  its part of up_k -> L2 | the kernel before has ended | up_k -> registers
    warp   per row: q times its share; sums over j -> shared memory
    block  barrier; warp b: the sum over warps of row b -> q'; in part 0 RoPE of 64 features too
    block  (the last) warp b: the entry of row b -> registers; norm; RoPE -> the cache

Copies: lanes load up_k, q, the entry and the tables into registers.
Waits: all threads for the kernel before; those of a head's blocks at one block barrier.
Writes: warp b stores row b's part of q', or its entry.  Heads up to a multiple of 8 are zeros.

Floor: up_k's bytes at the rate of a copy.  20 heads of 192 features are 3.9 MB, 1 us on an H200.
"""

from __future__ import annotations

import functools
import operator
from types import SimpleNamespace

import jax

from pallas_kernels import ptx as p
from pallas_kernels.attention.operands import capacity_of
from pallas_kernels.attention.pages import BlockTable, Paging
from pallas_kernels.attention.rope_cache_kernel import CachePlace
from pallas_kernels.latent.plan import LATENT, ROPE, ROWS, WIDTH
from pallas_kernels.latent.step_plan import MOST_ROWS, LatentStep
from pallas_kernels.launch import in_place, launch
from pallas_kernels.matmul.few_rows.kernel import kinds_of
from pallas_kernels.matmul.few_rows.operands import BYTES, load_eight, load_number
from pallas_kernels.ptx import Value
from pallas_kernels.rows.fused_parts import floats, packed

WARPS, PARTS = MOST_ROWS, 8
COLUMNS = LATENT // PARTS


@functools.partial(jax.jit, static_argnames=("start", "eps"))
def heads_and_entries(x: LatentStep, *, start: int, eps: float) -> tuple[jax.Array, jax.Array]:
    """(q' bfloat16 ``[B, N filled up to 8s, 576]``, the cache); see ``latent.step``."""
    batch, n, _ = x.q.shape
    filled = -(-n // ROWS) * ROWS
    operands = {k: v for k, v in x._asdict().items() if k not in ("cache", "lengths")}
    program = functools.partial(
        _Program, x=x, start=start, eps=eps, filled=filled, kinds=kinds_of({"gamma": x.gamma})
    )

    def run(cache: jax.Array) -> jax.Array:
        (q,) = launch(
            program,
            {**operands, "cache": cache},
            {"out": jax.ShapeDtypeStruct((batch, filled, WIDTH), x.q.dtype)},
            name="latent_heads",
            grid=filled * PARTS + 1,
            warpgroups=WARPS // 4,
            scratch={"sums": WARPS * batch * COLUMNS},
            registers=True,
        )
        return q

    return in_place(run, x.cache)


class _Program:
    """One block's program, emitted while the kernel is traced.  x: shapes of the operands."""

    def __init__(self, gmem, smem, *, x: LatentStep, start: int, eps: float, filled: int, kinds):
        self.x, self.start, self.eps, self.kinds = x, start, eps, kinds
        self.batch, self.n, self.width = x.q.shape
        self.filled, self.refs = filled, gmem
        here = {name: None if r is None else p.address(r) for name, r in vars(gmem).items()}
        self.gmem = SimpleNamespace(**here)
        self.sums = p.shared_address(smem.sums)
        thread, block = p.register("tid.x"), p.register("ctaid.x")
        self.thread, self.warp, self.lane = thread, thread >> 5, thread & 31
        self.head, self.part = block // PARTS, block % PARTS
        self.is_entry = self.head >= filled
        # Blocks of filled heads read the last one.
        self.own = p.minimum(self.head, self.n - 1)

    def run(self) -> None:
        share = self.x.still // WARPS
        up = p.offset(self.gmem.up, self.own, 2 * LATENT * self.x.up.shape[1])
        up = p.offset(up, self.part, 2 * COLUMNS)
        for first in range(0, self.x.still, 32 * WARPS):
            row = self.thread + first
            one = functools.partial(p.prefetch, p.offset(up, row, 2 * LATENT), 2 * COLUMNS)
            p.when(row < self.x.still, one)
        p.await_kernel()
        first = self.warp * share + (self.lane >> 3)
        up = p.offset(p.offset(up, first, 2 * LATENT), self.lane & 7, 16)
        loads = range(0, share, 4)
        words = [p.load_global(up, 4, 2 * LATENT * i) for i in loads]
        for row in range(self.batch):
            q = p.offset(self.query(p.ci(row)), first, 2)
            values = [p.widen(p.load_half(q, 2 * i)) for i in loads]
            self.multiply(row, words, values)
        p.barrier()  # all warps' sums are there
        works = self.warp < self.batch
        p.when(works & ~self.is_entry, self.store_query)
        p.when(works & self.is_entry, self.store_entry)

    def query(self, row: Value) -> Value:
        return p.offset(self.gmem.q, row * self.n + self.own, 2 * self.width)

    def multiply(self, row: int, words: list, values: list[Value]) -> None:
        """The warp's sums of a row, over its share of q, to shared memory."""
        sums = [p.cf(0.0)] * 8
        for four, value in zip(words, values, strict=True):
            sums = [p.fma(w, value, s) for w, s in zip(floats(four), sums, strict=True)]
        for distance in (8, 16):
            sums = [s + p.shuffle_xor(s, distance) for s in sums]
        at = self.sums + (self.warp * self.batch + row) * (4 * COLUMNS) + self.lane * 32

        def store() -> None:
            p.store_shared(at, sums[:4])
            p.store_shared(at, sums[4:], 16)

        p.when(self.lane < 8, store)

    def store_query(self) -> None:
        """Two columns a lane; in part 0 a pair of turning features too."""
        at = self.sums + self.warp * (4 * COLUMNS) + self.lane * 8
        parts = [p.load_shared(at, 2, 4 * COLUMNS * self.batch * w, "f32") for w in range(WARPS)]
        pair = [functools.reduce(operator.add, column) for column in zip(*parts, strict=True)]
        is_own = self.head < self.n
        (word,) = packed([p.where(is_own, v, 0.0) for v in pair])
        out = p.offset(self.gmem.out, self.warp * self.filled + self.head, 2 * WIDTH)
        p.store_global(p.offset(p.offset(out, self.part, 2 * COLUMNS), self.lane, 4), [word])

        def turn() -> None:
            source = p.offset(self.query(self.warp), p.ci(2 * self.x.still))
            turned = [p.where(is_own, v, 0.0) for v in self.turned(source)]
            self.store_turned(p.offset(out, p.ci(2 * LATENT)), turned)

        p.when(self.part < 1, turn)

    def turned(self, source: Value) -> list[Value]:
        """A lane's pair of turning features, with RoPE."""
        table = self.warp * (ROPE // 2) + self.lane
        cos, sin = (load_number(v, table, "f32") for v in (self.gmem.cos, self.gmem.sin))
        source = p.offset(source, self.lane, 2)
        first, second = (p.widen(p.load_half(source, at)) for at in (0, ROPE))
        return [first * cos - second * sin, second * cos + first * sin]

    def store_turned(self, to: Value, pair: list[Value]) -> None:
        to = p.offset(to, self.lane, 2)
        for i, value in enumerate(pair):
            p.store_global_half(p.offset(to, p.ci(ROPE * i)), p.narrow(value, "bf16"))

    def store_entry(self) -> None:
        """Row ``warp``'s entry: two runs of 8 latents a lane, and a pair of its key."""
        size, kind = BYTES[self.kinds["gamma"]], self.kinds["gamma"]
        source = p.offset(self.gmem.entry, self.warp, 2 * self.x.entry.shape[-1])
        source = p.offset(source, p.ci(2 * self.start))
        pieces = [self.lane + 32 * i for i in range(LATENT // 256)]
        low = [floats(p.load_global(p.offset(source, piece, 16), 4)) for piece in pieces]
        gamma = [load_eight(p.offset(self.gmem.gamma, piece, 8 * size), kind) for piece in pieces]
        squares = [p.fma(v, v, 0.0) for eight in low for v in eight]
        total = p.over_lanes(functools.reduce(operator.add, squares))
        factor = p.rsqrt(p.fma(total, 1.0 / LATENT, self.eps))
        turned = self.turned(p.offset(source, p.ci(2 * LATENT)))
        (slot,) = p.load_global(p.offset(self.gmem.slots, self.warp, 4), 1)
        paging = Paging.of(self.x.cache, self.x.table)
        pages = BlockTable(self.refs.table, self.warp, paging) if paging else None
        capacity = capacity_of(self.x.cache, self.x.table)
        place = CachePlace(slot, self.warp, 1, capacity, pages)
        to = place.line(p.ci(0))(self.refs.cache, 2 * WIDTH)

        def store() -> None:
            for piece, values, weights in zip(pieces, low, gamma, strict=True):
                pairs = zip(values, weights, strict=True)
                p.store_global(p.offset(to, piece, 16), packed([v * factor * g for v, g in pairs]))
            self.store_turned(p.offset(to, p.ci(2 * LATENT)), turned)

        p.when(place.exists(), store)
