"""One block's program of ``token_kernel``: some tokens of a value head.

Everything it does is emitted while the kernel is traced.  The state stays in registers from the
first token to the last; q, k and v of all tokens are in shared memory before the first.

``token_kernel`` says who copies, who waits and who writes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pallas_kernels import ptx as p
from pallas_kernels.gated_delta.reference import EPSILON
from pallas_kernels.ptx import LOG2E, Value
from pallas_kernels.rows.fused_parts import floats, layer_address, packed, silu

if TYPE_CHECKING:
    import jax

# An array of a call; inside of the kernel its memref, or its address.
Operand: TypeAlias = "jax.Array | jax.ShapeDtypeStruct | Value"

ROWS = 16  # of the state that a lane holds, four columns of each
COLUMNS = 128  # value channels of a head
_PITCH = 2 * COLUMNS + 4  # floats of a warp's sums: two of every column, then one number


@dataclasses.dataclass(frozen=True)
class DeltaTokenShape:
    """pitches, starts: of qkvz and ba in their rows, in elements.  taps: of the convolution."""

    heads: int
    group: int  # value heads of a key head
    dk: int
    taps: int
    pitches: tuple[int, int] = (0, 0)
    starts: tuple[int, int] = (0, 0)
    eps: float = 0.0
    beta_max: float = 0.0
    gated: bool = False
    tokens: int = 1  # of a row of the state
    kind: str = "bf16"  # of the 16-bit floats

    @property
    def warps(self) -> int:
        return self.dk // ROWS

    @property
    def key_heads(self) -> int:
        return self.heads // self.group

    @property
    def features(self) -> int:
        """Channels of the convolution: q, k and v of all heads."""
        return 2 * self.key_heads * self.dk + self.heads * COLUMNS

    @property
    def scratch(self) -> dict[str, int]:
        """Floats of shared memory: q and k of each token; v, with the sums of squares of 32
        channels of q and k behind it; the warps' sums, which two tokens take turns at."""
        return {
            "table": 2 * self.dk * self.tokens,
            "values": (COLUMNS + self.warps) * self.tokens,
            "sums": min(2, self.tokens) * self.warps * _PITCH,
        }


class DeltaTokenOperands(NamedTuple):
    """Device memory of a call; an array that the call lacks is None."""

    qkvz: Operand | None = None
    ba: Operand | None = None
    conv: Operand | None = None
    a_log: Operand | None = None
    dt: Operand | None = None
    norm: Operand | None = None
    lengths: Operand | None = None
    state: Operand | tuple[Operand, ...] | None = None  # from here on also tuples, of layers
    last: Operand | tuple[Operand, ...] | None = None
    # ``last`` once more, to be read, where its new inputs must not be seen.
    before: Operand | tuple[Operand, ...] | None = None
    k: Operand | tuple[Operand, ...] | None = None
    v: Operand | tuple[Operand, ...] | None = None
    log_decay: Operand | tuple[Operand, ...] | None = None
    beta: Operand | tuple[Operand, ...] | None = None
    read: Operand | tuple[Operand, ...] | None = None
    out: Operand | None = None
    kept: tuple[Operand, ...] | None = (
        None  # (k, v, log_decay, beta, read) to be written; beside them only ``out`` is, then
    )


class Token:
    """``heads``: rows times heads, of a layer.  smem: as ``DeltaTokenShape.scratch`` has it."""

    def __init__(
        self,
        shape: DeltaTokenShape,
        operands: DeltaTokenOperands,
        smem: SimpleNamespace,
        heads: int,
    ):
        self.shape = shape
        self.table, self.values, self.sums = (
            p.shared_address(ref) for ref in (smem.table, smem.values, smem.sums)
        )
        self.thread = p.register("tid.x")
        self.warp, self.lane = self.thread >> 5, self.thread & 31
        self.commits = operands.k is not None
        self.writes = operands.kept is None
        alone = self.commits or shape.group == 1 or operands.before is not None
        self.joined = self.writes and not alone  # a cluster
        head, layer = p.register("clusterid.x" if self.joined else "ctaid.x"), None
        if isinstance(operands.state, tuple):
            layer, head = head // heads, head % heads
        if self.joined:
            self.rank = p.register("cluster_ctarank")
            head = head * shape.group + self.rank
        else:
            self.rank = head % shape.group
        self.whole_head = head
        self.memory = DeltaTokenOperands(*(layer_address(ref, layer) for ref in operands[:-1]))
        self.kept = None
        if operands.kept is not None:
            self.kept = DeltaTokenOperands(
                **dict(zip(_KEPT, map(p.address, operands.kept), strict=True))
            )
        self.row, self.head = head // shape.heads, head % shape.heads
        self.key_head = self.head // shape.group
        keys = shape.key_heads * shape.dk
        # A thread's channel of q or k, and of v.  There are as many channels of q and k as threads.
        # Threads beyond the channels of v repeat the work of others.
        self.is_key = shape.dk - 1 < self.thread
        self.channel = self.thread & (shape.dk - 1)
        of_head = self.key_head * shape.dk + self.channel
        self.feature = of_head + p.where(self.is_key, p.ci(keys), 0)
        self.v_channel = self.thread & (COLUMNS - 1)
        self.v_feature = self.head * COLUMNS + self.v_channel + 2 * keys
        self.column = self.lane * 4

    def of_token(self, token: int):
        """Its row among all rows' tokens."""
        tokens = self.shape.tokens
        return self.row if tokens == 1 else self.row * tokens + token

    def of_head(self, base: Value, token: int, size: int):
        """Address of the head's ``size`` bytes of a token in ``[B, T, H, ...]``."""
        return p.offset(base, self.of_token(token) * self.shape.heads + self.head, size)

    def of_key(self, base: Value, token: int):
        """Address of the thread's key channel in k ``[B, T, Hk, Dk]``."""
        row = self.of_token(token) * self.shape.key_heads + self.key_head
        return p.offset(p.offset(base, row, 2 * self.shape.dk), self.channel, 2)

    def of_read(self, base: Value, token: int, feature: Value):
        """Address in ``[B, T, F]``."""
        return p.offset(p.offset(base, self.of_token(token), 2 * self.shape.features), feature, 2)

    def stream(self, index: int, token: int, column: Value):
        """Address of a column of the token's qkvz (0) or ba (1)."""
        base = p.offset(self.memory[index], self.of_token(token), 2 * self.shape.pitches[index])
        return p.offset(base, column + self.shape.starts[index], 2)

    def load(self, at: Value):
        """A 16-bit float of device memory."""
        return p.widen(p.load_half(at, cache=p.READ_ONLY), self.shape.kind)

    def rounded(self, x: Value):
        return p.widen(p.narrow(x, self.shape.kind), self.shape.kind)

    def run(self) -> None:
        shape, tokens = self.shape, range(self.shape.tokens)
        first = self.warp * ROWS
        state = p.offset(self.memory.state, self.whole_head, 4 * shape.dk * COLUMNS)
        state = p.offset(state, first * COLUMNS + self.column, 4)
        step = 4 * COLUMNS
        rows = [p.load_global(state, 4, step * r, "f32") for r in range(ROWS)]
        length = None
        if self.memory.lengths is not None:
            (length,) = p.load_global(
                p.offset(self.memory.lengths, self.row, 4), 1, cache=p.READ_ONLY
            )
        weight, z = [], [None] * shape.tokens
        if self.commits:
            gates, store = self.taken(length)
        else:
            store = self.convolved()
            if self.joined:
                p.cluster_arrive()  # what was read has been summed up
            gates = [self.gates(t) for t in tokens]
            weight = floats(
                p.load_global(p.offset(self.memory.norm, self.column, 2), 2, cache=p.READ_ONLY),
                shape.kind,
            )
            if shape.gated:
                at = self.head * COLUMNS + self.column + shape.features
                z = [p.load_global(self.stream(0, t, at), 2, cache=p.READ_ONLY) for t in tokens]
        p.barrier()
        if self.kept:
            store()
        for t in tokens:
            rows = self.step(t, rows, first, *gates[t], weight, z[t])
        if not self.writes:
            return
        if self.joined:
            p.cluster_wait()

        def write():
            for r, row in enumerate(rows):
                p.store_global(state, row, step * r)
            store()

        if self.commits:
            write()
        else:
            p.when(0 < length, write)

    def step(
        self,
        t: int,
        rows: list[list[Value]],
        first: Value,
        decay: Value,
        beta: Value,
        weight: list[Value],
        z: Value | None,
    ):
        """The state's rows after a token, whose answer is stored."""
        decayed, keys, sums = self.read(t, rows, first, decay)
        here = self.leave_sums(t, sums)
        p.barrier()  # all warps' sums are there
        at = here + self.column * 4
        v = self.values + self.column * 4 + 4 * (COLUMNS + self.shape.warps) * t
        v = p.load_shared(v, 4, 0, "f32")
        change = [beta * (x - y) for x, y in zip(v, self.total(at, 4), strict=True)]
        if not self.commits:
            finish = functools.partial(self.finish, t, here, change, weight, z)
            p.when(p.equal(self.warp, t % self.shape.warps), finish)
        return [
            [p.fma(key, d, x) for x, d in zip(row, change, strict=True)]
            for row, key in zip(decayed, keys, strict=True)
        ]

    def read(self, t: int, rows: list[list[Value]], first: Value, decay: Value):
        """(the lane's rows of a S, its keys, [the warp's part of k^T a S, of q^T a S, of q k])."""
        shape, zero, scale = self.shape, p.cf(0.0), p.cf(self.shape.dk**-0.5)
        of_q, of_k = None if self.commits else self.length(t, 0), self.length(t, 1)
        seen, asked, both = [zero] * 4, [zero] * 4, zero
        decayed, keys = [], []
        at = self.table + first * 4 + 8 * shape.dk * t
        for r, row in enumerate(rows):
            key = self.rounded(p.load_float(at, 4 * (shape.dk + r)) * of_k)
            row = [decay * x for x in row]
            if not self.commits:
                query = self.rounded(p.load_float(at, 4 * r) * of_q)
                query = query * scale
                asked = [p.fma(query, x, y) for x, y in zip(row, asked, strict=True)]
                both = p.fma(query, key, both)
            seen = [p.fma(key, x, y) for x, y in zip(row, seen, strict=True)]
            decayed.append(row)
            keys.append(key)
        return decayed, keys, (seen, asked, both)

    def leave_sums(self, t: int, sums: tuple[list[Value], list[Value], Value]) -> Value:
        """The warp's sums to shared memory; return where those of all warps begin."""
        seen, asked, both = sums
        here = self.sums + t % 2 * 4 * self.shape.warps * _PITCH
        to = here + self.warp * (4 * _PITCH)
        at = to + self.column * 4
        p.store_shared(at, seen)
        if not self.commits:
            p.store_shared(at, asked, 4 * COLUMNS)
            p.store_shared(to, [both], 8 * COLUMNS)
        return here

    def total(self, at: Value, n: int, offset: int = 0) -> list[Value]:
        """n sums over the warps."""
        places = (offset + 4 * _PITCH * w for w in range(self.shape.warps))
        parts = [p.load_shared(at, n, place, "f32") for place in places]
        return [functools.reduce(operator.add, x) for x in zip(*parts, strict=True)]

    def finish(
        self, t: int, here: Value, change: list[Value], weight: list[Value], z: Value | None
    ) -> None:
        """o = q^T a S + (q k) d of a token, its norm and gate, stored."""
        shape, at = self.shape, here + self.column * 4
        asked, (both,) = self.total(at, 4, 4 * COLUMNS), self.total(here, 1, 8 * COLUMNS)
        o = [self.rounded(p.fma(both, d, x)) for x, d in zip(asked, change, strict=True)]
        squares = p.cf(0.0)
        for x in o:
            squares = p.fma(x, x, squares)
        squares = p.over_lanes(squares)
        factor = p.rsqrt(p.fma(squares, 1.0 / COLUMNS, shape.eps))
        y = [x * factor * w for x, w in zip(o, weight, strict=True)]
        if z is not None:
            y = [x * silu(g) for x, g in zip(y, floats(z, shape.kind), strict=True)]
        to = self.of_head(self.memory.out, t, 2 * COLUMNS)
        p.store_global(p.offset(to, self.column, 2), packed(y, shape.kind))

    def length(self, t: int, index: int):
        """One over it, of q (0) or k (1)."""
        dk, warps = self.shape.dk, self.shape.warps
        at = (COLUMNS + warps) * t + COLUMNS + index * (dk // 32)
        total = p.load_float(self.values, 4 * at)
        for w in range(1, dk // 32):
            total = total + p.load_float(self.values, 4 * (at + w))
        return p.rsqrt(total + EPSILON)

    def put(self, t: int, qk: Value, v: Value) -> None:
        """The thread's channels of a token, and the warp's sum of squares, to shared memory."""
        at = self.table + self.thread * 4
        p.store_shared(at, [qk], 8 * self.shape.dk * t)
        place = 4 * (COLUMNS + self.shape.warps) * t
        p.store_shared(self.values + self.v_channel * 4, [v], place)
        squares = p.over_lanes(qk * qk)
        at = self.values + self.warp * 4
        store = functools.partial(p.store_shared, at, [squares], place + 4 * COLUMNS)
        p.when(self.lane < 1, store)

    def convolved(self) -> Callable[[], None]:
        """Compute q, k and v of all tokens.

        Returns a function that stores the new last inputs, or the draft.
        """
        qk, v = (self.inputs(feature) for feature in (self.feature, self.v_feature))
        of_qk, of_v = (
            self.activated(x, feature) for x, feature in ((qk, self.feature), (v, self.v_feature))
        )
        for t, channels in enumerate(zip(of_qk, of_v, strict=True)):
            self.put(t, *channels)
        if self.kept:
            return lambda: self.keep(qk, v, of_qk, of_v)
        return lambda: self.store_last(qk[1:], v[1:])

    def inputs(self, feature: Value) -> list:
        """A channel's last ones and the tokens', halves of words."""
        shape, size = self.shape, 2 * self.shape.features
        last = self.memory.last if self.memory.before is None else self.memory.before
        last = p.offset(p.offset(last, self.row, size * (shape.taps - 1)), feature, 2)
        old = [p.load_half(last, size * w, cache=p.READ_ONLY) for w in range(shape.taps - 1)]
        if self.commits:
            places = (self.of_read(self.memory.read, t, feature) for t in range(shape.tokens))
        else:
            places = (self.stream(0, t, feature) for t in range(shape.tokens))
        return [*old, *map(p.load_half, places)]

    def activated(self, given: list, feature: Value) -> list:
        """The convolution of each token, and its SiLU."""
        taps = self.shape.taps
        at = p.offset(self.memory.conv, feature, 2 * taps)
        weights, made = floats(p.load_global(at, taps // 2, cache=p.READ_ONLY), self.shape.kind), []
        for t in range(self.shape.tokens):
            y = p.cf(0.0)
            for x, w in zip(given[t : t + taps], weights, strict=True):
                y = p.fma(p.widen(x, self.shape.kind), w, y)
            made.append(self.rounded(silu(y)))
        return made

    def store_last(self, qk: list, v: list) -> None:
        size = 2 * self.shape.features
        base = p.offset(self.memory.last, self.row, size * (self.shape.taps - 1))

        def store(feature, halves):
            at = p.offset(base, feature, 2)
            for w, x in enumerate(halves):
                p.store_global_half(p.offset(at, p.ci(w), size), x)

        p.when(self.rank < 1, lambda: store(self.feature, qk))
        p.when(self.thread < COLUMNS, lambda: store(self.v_feature, v))

    def keep(self, qk: list, v: list, of_qk: list, of_v: list) -> None:
        """Store the operands of ``taken``."""
        kept, before = self.kept, self.shape.taps - 1
        assert kept is not None
        for t in range(self.shape.tokens):
            key = p.narrow(of_qk[t], self.shape.kind)

            def of_key_head(t=t, key=key):
                p.store_global_half(self.of_read(kept.read, t, self.feature), qk[before + t])
                p.when(self.is_key, lambda: p.store_global_half(self.of_key(kept.k, t), key))

            def of_value_head(t=t):
                at = p.offset(self.of_head(kept.v, t, 2 * COLUMNS), self.v_channel, 2)
                p.store_global_half(at, p.narrow(of_v[t], self.shape.kind))
                p.store_global_half(self.of_read(kept.read, t, self.v_feature), v[before + t])

            p.when(self.rank < 1, of_key_head)
            p.when(self.thread < COLUMNS, of_value_head)

    def taken(self, count: Value):
        """Accept ``count`` of the draft's tokens; the others change nothing.

        Returns (decay and beta of each token, a function that stores the last inputs).
        """
        shape, memory, gates = self.shape, self.memory, []
        for t in range(shape.tokens):
            stays = t < count

            def of(x, otherwise=0.0, stays=stays):
                return p.where(stays, x, p.cf(otherwise))

            v = p.offset(self.of_head(memory.v, t, 2 * COLUMNS), self.v_channel, 2)
            k, v = (self.load(at) for at in (self.of_key(memory.k, t), v))
            self.put(t, of(k), of(v))
            g, beta = (
                p.load_global(self.of_head(x, t, 4), 1, 0, "f32", cache=p.READ_ONLY)[0]
                for x in (memory.log_decay, memory.beta)
            )
            gates.append((of(p.exp2(g * LOG2E), 1.0), of(beta)))
        qk, v = (self.inputs(feature) for feature in (self.feature, self.v_feature))

        def last(series):
            new = series[: shape.taps - 1]
            for t in range(1, shape.tokens + 1):
                is_it = p.equal(count, t)
                new = [p.where(is_it, series[t + w], x) for w, x in enumerate(new)]
            return new

        return gates, lambda: self.store_last(last(qk), last(v))

    def gates(self, t: int):
        """(a, beta) of a token, of every thread."""
        shape = self.shape
        b, a = (self.load(self.stream(1, t, self.head + n)) for n in (0, shape.heads))
        rate, dt = (
            self.load(p.offset(x, self.head, 2)) for x in (self.memory.a_log, self.memory.dt)
        )
        one, log2e = p.cf(1.0), p.cf(LOG2E)
        beta = p.divide(shape.beta_max, p.exp2(b * -LOG2E) + one)
        x = (a + dt) * log2e
        away = p.exp2(p.absolute(x) * -1.0)
        softplus = p.maximum(x, 0.0) + p.log2(away + one)  # binary
        rate = p.exp2(rate * log2e) * (-1.0 / LOG2E)
        log_decay = rate * softplus
        if self.kept:
            kept = self.kept

            def keep():
                for base, x in ((kept.log_decay, log_decay), (kept.beta, beta)):
                    p.store_global(self.of_head(base, t, 4), [x])

            p.when(self.thread < 1, keep)
        # From the natural logarithm, so that a token that is kept decays alike.
        return p.exp2(log_decay * log2e), beta


_KEPT = ("k", "v", "log_decay", "beta", "read")
