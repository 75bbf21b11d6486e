"""One block's program of ``step_kernel``: some tokens of a head, a block of its value channels.

Everything it does is emitted while the kernel is traced.  Registers hold a few rows of the state,
each token's v and its o; a row of the state takes all tokens before the next one is looked at, so
that it is read once whatever their number.

``step_kernel`` says who copies, who waits and who writes.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pallas_kernels import ptx as p
from pallas_kernels.gla.head_norm_kernel import finished, norm_factor, squares
from pallas_kernels.ptx import LOG2E, Value
from pallas_kernels.rows.fused_parts import floats, layer_address, packed

if TYPE_CHECKING:
    import jax

# An array of a call; inside of the kernel its memref, or its address.
Operand: TypeAlias = "jax.Array | jax.ShapeDtypeStruct | Value"

BATCH = 16  # loads of 16 bytes that a lane has in flight
_TOGETHER = 4  # tokens whose channels are loaded before any is computed


@dataclasses.dataclass(frozen=True)
class GlaStepShape:
    """``pitches``, ``starts``: of q, k, v (and low, gate) in their rows, in elements."""

    heads: int
    kv_heads: int
    dk: int
    dv: int
    scale: float
    pitches: tuple[int, ...]
    starts: tuple[int, ...]
    columns: int  # value channels of a block, four to a lane
    warps: int
    rank: int = 0
    eps: float = 0.0
    normalizer: float = 1.0
    clamp_min: float | None = None
    tokens: int = 1  # of a row of the state
    kind: str = "bf16"  # of the 16-bit floats
    raw: bool = False  # o is float32

    @property
    def blocks(self) -> int:
        """Blocks of a head."""
        return self.dv // self.columns

    def scratch(self, normed: bool) -> dict[str, int | None]:
        """Floats of shared memory: (decay, k, q) of each token, the warps' sums of o, and where a
        head's blocks are a cluster, a barrier and their sums of squares."""
        exchanged = normed and self.blocks > 1
        return {
            "table": 4 * self.tokens * self.dk,
            "sums": self.tokens * self.warps * self.columns,
            "exchange": 4 + 2 * self.tokens * self.blocks if exchanged else None,
        }


class GlaStepOperands(NamedTuple):
    """Device memory of a call; an array that the call lacks is None.

    k, v, log_decay and state may be tuples with one array for each layer.
    """

    q: Operand | None = None
    k: Operand | tuple[Operand, ...] | None = None
    v: Operand | tuple[Operand, ...] | None = None
    low: Operand | None = None
    gate: Operand | None = None
    log_decay: Operand | tuple[Operand, ...] | None = None
    decay_weight: Operand | None = None
    decay_bias: Operand | None = None
    lengths: Operand | None = None
    norm: Operand | None = None
    state: Operand | tuple[Operand, ...] | None = None
    out: Operand | None = None
    kept: tuple[Operand, ...] | None = (
        None  # (k, v, log_decay) to be written; the state is not, then
    )


class GlaStepLayout:
    """``heads``: rows times heads, of a layer.  smem: as ``GlaStepShape.scratch`` has it."""

    def __init__(
        self, shape: GlaStepShape, operands: GlaStepOperands, smem: SimpleNamespace, heads: int
    ):
        self.shape = shape
        self.table, self.sums = p.shared_address(smem.table), p.shared_address(smem.sums)
        if smem.exchange is not None:
            self.barrier = p.shared_address(smem.exchange)
        self.thread = p.register("tid.x")
        self.warp = self.thread >> 5
        self.lane = self.thread & 31
        self.normed = operands.norm is not None
        if self.normed and shape.blocks > 1:
            head, self.block = p.register("clusterid.x"), p.register("cluster_ctarank")
            self.shares = self.barrier + 16
        else:
            block = p.register("ctaid.x")
            head, self.block = block // shape.blocks, block % shape.blocks
        layer = None
        if isinstance(operands.state, tuple):
            layer, head = head // heads, head % heads
        self.memory = GlaStepOperands(*(layer_address(ref, layer) for ref in operands[:-1]))
        self.kept = tuple(map(p.address, operands.kept or ()))
        self.whole_head = head
        self.row, self.head = head // shape.heads, head % shape.heads
        self.kv_head = self.head // (shape.heads // shape.kv_heads)
        self.lanes = shape.columns // 4  # to a row of the state
        self.part = (self.lane & (self.lanes - 1)) * 4
        self.column = self.block * shape.columns + self.part

    def of_token(self, token: Value | int):
        """Its row among all rows' tokens."""
        tokens = self.shape.tokens
        return self.row if tokens == 1 else self.row * tokens + token

    def of_head(self, base: Value, token: Value | int, size: int):
        """Address of the head's ``size`` bytes of a token in ``[B, T, H, ...]``."""
        return p.offset(base, self.of_token(token) * self.shape.heads + self.head, size)

    def stream(self, index: int, token: Value | int, column: Value):
        """Address of a column of the token's q, k, v, low or gate."""
        base = p.offset(self.memory[index], self.of_token(token), 2 * self.shape.pitches[index])
        return p.offset(base, column + self.shape.starts[index], 2)

    def load_pairs(self, at, n: int):
        """2 n 16-bit floats of device memory as floats."""
        return floats(p.load_global(at, n), self.shape.kind)

    def run(self) -> None:
        shape, exchanges = self.shape, self.normed and self.shape.blocks > 1
        if exchanges:
            self.begin_exchange()
        self.place_rows()
        self.prefetch(shape.dk // shape.warps, self.ahead * self.batch * self.at_once)
        p.await_kernel()
        pending = [self.load_rows(self.batch * i) for i in range(self.ahead)]
        self.load_lengths()
        self.fill_table()
        v = [self.load_v(t) for t in range(shape.tokens)]
        weight, gates = self.load_ends() if self.normed else ([], [])
        p.barrier()  # the table is full
        out = self.advance(pending, v)
        if self.memory.out is None:
            return
        self.leave_sums(out)
        p.barrier()  # all warps' parts of o are there
        if exchanges:
            p.cluster_wait()
        finish = functools.partial(self.finish, weight, gates)
        p.when(self.warp < min(shape.warps, shape.tokens), finish)

    # --- the state's rows -> o ---

    def place_rows(self) -> None:
        """Which rows of the state the lane has, and how many of them are under way at once."""
        shape = self.shape
        self.at_once = 32 // self.lanes  # rows of the state in one load of the warp
        rows = shape.dk // shape.warps  # of this warp: contiguous
        self.first = self.warp * rows + self.lane // self.lanes
        self.rows = rows // self.at_once  # of this lane
        state = p.offset(self.memory.state, self.whole_head, 4 * shape.dk * shape.dv)
        self.state = p.offset(state, self.first * shape.dv + self.column, 4)
        self.ahead = 1 if shape.tokens == 1 else 2  # batches under way
        self.batch = min(BATCH // self.ahead, self.rows)
        self.step = 4 * shape.dv * self.at_once  # bytes between the lane's rows

    def load_rows(self, start: int) -> list[list[Value]]:
        several = range(start, min(start + self.batch, self.rows))
        return [p.load_global(self.state, 4, self.step * r, "f32") for r in several]

    def load_lengths(self) -> None:
        """Whether each token moves the state; None where all do."""
        length = None
        if self.memory.lengths is not None:
            (length,) = p.load_global(p.offset(self.memory.lengths, self.row, 4), 1)
        tokens = range(self.shape.tokens)
        self.moves = [None if length is None else t < length for t in tokens]

    def load_ends(self) -> tuple[list[Value], list[list[Value] | None]]:
        """The norm's weight, and the gates of the tokens that this warp finishes."""
        weight = self.load_pairs(p.offset(self.memory.norm, self.column, 2), 2)
        return weight, [self.load_gate(t) for t in self.finished_here()]

    def advance(self, pending: list[list[list[Value]]], v: list[list[Value]]) -> list[list[Value]]:
        """Each row by all tokens: S <- a S + k v, o += q S; the state is stored at once.

        pending: the first batches of rows.  Returns the lane's part of each token's o.
        """
        shape, tokens = self.shape, range(self.shape.tokens)
        out = [[p.cf(0.0)] * 4 for _ in tokens]
        entries = self.table + self.first * 16
        for start in range(0, self.rows, self.batch):
            current = pending.pop(0)
            pending.append(self.load_rows(start + self.ahead * self.batch))
            for i, row in enumerate(current):
                for t in tokens:
                    at = 16 * (shape.dk * t + self.at_once * (start + i))
                    decay, k, q, _ = p.load_shared(entries, 4, at, "f32")
                    added = [k * x for x in v[t]]
                    row = [p.fma(decay, s, x) for s, x in zip(row, added, strict=True)]
                    if self.memory.out is not None:
                        out[t] = [p.fma(q, s, o) for s, o in zip(row, out[t], strict=True)]
                if not self.kept:
                    p.store_global(self.state, row, self.step * (start + i))
        return out

    def leave_sums(self, out: list[list[Value]]) -> None:
        """The warp's part of each token's o to shared memory."""
        shape = self.shape
        at = self.sums + self.part * 4 + self.warp * (4 * shape.columns)
        for t, values in enumerate(out):
            for distance in (16, 8):
                if distance >= self.lanes:
                    values = [x + p.shuffle_xor(x, distance) for x in values]
            p.store_shared(at, values, 4 * shape.columns * shape.warps * t)

    def finish(self, weight: list[Value], gates: list[list[Value] | None]) -> None:
        """Sum o over the warps, norm and gate it, and store it: of this warp's tokens."""
        shape, here = self.shape, self.finished_here()
        y = [self.total(self.sums + self.part * 4, t) for t in here]
        if self.normed:
            y = self.finished(y, weight, gates)
        for i, (t, values) in enumerate(zip(here, y, strict=True)):
            size = 4 if shape.raw else 2
            words = values if shape.raw else packed(values, shape.kind)
            at = self.of_head(self.memory.out, t, size * shape.dv)
            store = functools.partial(p.store_global, p.offset(at, self.column, size), words)
            p.when(self.is_here(i), store) if i else store()

    def prefetch(self, rows: int, count: int) -> None:
        """Prefetch memory that the previous kernel does not write, before it has ended.

        That is the first ``count`` of the warp's ``rows`` of the state, one a lane, and the decays'
        weights.
        """
        shape = self.shape
        size, pitch = 4 * shape.columns, 4 * shape.dv
        state = p.offset(self.memory.state, self.whole_head, pitch * shape.dk)
        state = p.offset(state, self.block, size)
        state = p.offset(state, self.warp * rows, pitch)
        for start in range(0, min(count, rows), 32):
            row = self.lane + start
            ask = functools.partial(p.prefetch, p.offset(state, row, pitch), size)
            p.when(row < min(count, rows), ask)
        if self.memory.decay_weight is not None:
            first, size = self.kv_head * shape.dk, 2 * shape.rank
            weights = p.offset(self.memory.decay_weight, first, size)
            ask = functools.partial(p.prefetch, weights, size * shape.dk)
            p.when(self.thread < 1, ask)

    def finished_here(self) -> list[Value]:
        """The tokens that this warp finishes, the last one again where there are no more."""
        last = self.shape.tokens - 1
        if last == 0:
            return [p.ci(0)]
        firsts = range(0, self.shape.tokens, self.shape.warps)
        return [p.smaller(self.warp + first, last) for first in firsts]

    def is_here(self, i: int):
        """Is the ``i``th of them one of its own?"""
        return self.warp + i * self.shape.warps < self.shape.tokens

    def load_v(self, t: int):
        """The lane's columns of a token's v."""
        columns = self.kv_head * self.shape.dv + self.column
        words = p.load_global(self.stream(2, t, columns), 2)
        if self.kept:
            at = p.offset(self.of_head(self.kept[1], t, 2 * self.shape.dv), self.column, 2)
            p.when(self.thread < self.lanes, lambda: p.store_global(at, words))
        v = floats(words, self.shape.kind)
        if self.moves[t] is not None:
            v = [p.where(self.moves[t], x, 0.0) for x in v]
        return v

    def load_gate(self, token: Value | int):
        if self.memory.gate is None:
            return None
        columns = self.head * self.shape.dv + self.column
        return self.load_pairs(self.stream(4, token, columns), 2)

    def fill_table(self) -> None:
        """(decay, k, scaled q) of every token's key channels."""
        shape, all_tokens = self.shape, range(self.shape.tokens)

        def entry(d):
            key = self.kv_head * shape.dk + d
            weights = None if self.memory.log_decay is not None else self.decay_weights(key)
            for start in all_tokens[::_TOGETHER]:
                tokens = all_tokens[start : start + _TOGETHER]
                loaded = [self.load_channel(t, d, key) for t in tokens]
                for t, (q, k, low) in zip(tokens, loaded, strict=True):
                    self.store_channel(t, d, q, k, low, weights)

        threads = 32 * shape.warps
        for base in range(0, shape.dk, threads):
            d = self.thread + base
            if shape.dk - base >= threads:
                entry(d)
            else:
                p.when(d < shape.dk, functools.partial(entry, d))

    def load_channel(self, t: int, d: Value, key: Value):
        """Load one channel: (q, k, the low-rank values of the decay or the decay itself)."""
        shape, q = self.shape, None
        if self.memory.q is not None:
            q = p.load_half(self.stream(0, t, self.head * shape.dk + d))
        k = p.load_half(self.stream(1, t, key))
        if self.memory.log_decay is None:
            low = self.stream(3, t, p.ci(0))
            return q, k, [p.load_global(low, 4, 2 * c) for c in range(0, shape.rank, 8)]
        at = self.of_head(self.memory.log_decay, t, 4 * shape.dk)
        return q, k, p.load_global(p.offset(at, d, 4), 1, 0, "f32")[0]

    def store_channel(
        self,
        t: int,
        d: Value,
        q: Value | None,
        k: Value,
        decay: Value | list[list[Value]],
        weights: tuple[Value, list[list[Value]]] | None,
    ) -> None:
        shape, zero = self.shape, p.cf(0.0)
        log_decay = decay if weights is None else self.low_rank_decay(decay, weights)
        if self.kept:

            def keep():
                p.store_global_half(p.offset(self.of_head(self.kept[0], t, 2 * shape.dk), d, 2), k)
                at = p.offset(self.of_head(self.kept[2], t, 4 * shape.dk), d, 4)
                p.store_global(at, [log_decay])

            p.when(self.block < 1, keep)
        # From the natural logarithm also where it was made here: a token that is kept decays alike.
        decay, k = p.exp2(log_decay * LOG2E), p.widen(k, shape.kind)
        if self.moves[t] is not None:
            k = p.where(self.moves[t], k, zero)
            decay = p.where(self.moves[t], decay, 1.0)
        q = zero if q is None else p.widen(q, shape.kind) * shape.scale
        at = self.table + d * 16
        p.store_shared(at, [decay, k, q, zero], 16 * shape.dk * t)

    def decay_weights(self, key: Value):
        """(bias, the row's words)."""
        row = p.offset(self.memory.decay_weight, key, 2 * self.shape.rank)
        bias = p.load_half(p.offset(self.memory.decay_bias, key, 2))
        words = [p.load_global(row, 4, 2 * c) for c in range(0, self.shape.rank, 8)]
        return bias, words

    def low_rank_decay(self, low: list[list[Value]], weights: tuple[Value, list[list[Value]]]):
        """Natural logarithm."""
        shape, (bias, rows) = self.shape, weights
        x = p.widen(bias, shape.kind)
        for words, others in zip(rows, low, strict=True):
            for w, y in zip(*(floats(y, shape.kind) for y in (words, others)), strict=True):
                x = p.fma(w, y, x)
        x = x * LOG2E
        away = p.exp2(p.absolute(x) * -1.0)
        x = p.minimum(x, 0.0) - p.log2(away + 1.0)
        x = x * (1.0 / (LOG2E * shape.normalizer))
        return x if shape.clamp_min is None else p.maximum(x, shape.clamp_min)

    def begin_exchange(self) -> None:
        """Nobody sends before all blocks of the cluster have begun, which ``cluster_wait`` is."""

        def initialise():
            p.barrier_init(self.barrier, 1)
            p.barriers_ready()
            p.barrier_expect(self.barrier, 8 * self.shape.blocks * self.shape.tokens)

        p.when(self.thread < 1, initialise)
        p.cluster_arrive()

    def total(self, mine: Value, token: Value | int):
        """A token's o of the lane's columns, over all warps."""
        at, columns = mine, 4 * self.shape.columns
        if self.shape.tokens > 1:
            at = mine + token * (columns * self.shape.warps)
        total = p.load_shared(at, 4, 0, "f32")
        for w in range(1, self.shape.warps):
            part = p.load_shared(at, 4, columns * w, "f32")
            total = [x + y for x, y in zip(total, part, strict=True)]
        return total

    def finished(
        self, outs: list[list[Value]], weight: list[Value], gates: list[list[Value] | None]
    ):
        """Norm and gate of the lane's columns of this warp's tokens."""
        shape = self.shape
        totals = [squares(o, self.lanes) for o in outs]
        if shape.blocks > 1:
            totals = self.over_blocks(totals)
        return [
            finished(o, norm_factor(total, shape.dv, shape.eps), weight, gate)
            for o, total, gate in zip(outs, totals, gates, strict=True)
        ]

    def over_blocks(self, squares: list[Value]) -> list[Value]:
        """All are sent before any is waited for: they share a barrier."""
        size = 8 * self.shape.blocks
        places = [self.shares + t * size for t in self.finished_here()]

        def send(place, mine):
            to = p.peer_address(place + self.block * 8, self.lane)
            p.send_peer(to, [mine, p.cf(0.0)], p.peer_address(self.barrier, self.lane))

        for i, each in enumerate(zip(places, squares, strict=True)):
            is_sender = self.lane < self.shape.blocks
            if i:
                is_sender = is_sender & self.is_here(i)
            p.when(is_sender, functools.partial(send, *each))
        p.barrier_wait(self.barrier, p.ci(0))
        totals = []
        for place in places:
            total = p.load_float(place)
            for i in range(1, self.shape.blocks):
                total = total + p.load_float(place, 8 * i)
            totals.append(total)
        return totals
