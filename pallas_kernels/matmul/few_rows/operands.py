"""The operands of a kernel of few rows, and the work on them that both programs share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from pallas_kernels import ptx as p
from pallas_kernels.experts.gate import ClampedGate
from pallas_kernels.matmul.few_rows.posted import Posts
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.ptx import Value
from pallas_kernels.rows.fused_parts import floats, gated, rounded_sum

BYTES = {"bf16": 2, "f16": 2, "f32": 4}


@dataclasses.dataclass(frozen=True)
class FewRowsOperands:
    """Addresses in device memory, None for what a call does not have, and what they hold.

    weight, n, k: how w [n, k] is stored.  zero: for float4 it is the address of w's unit.
    """

    weight: StoredWeight
    n: int
    k: int
    kinds: Mapping[str, str]
    eps: float | None
    swiglu: bool
    x: Value
    w: Value
    out: Value
    scale: Value | None = None
    zero: Value | None = None
    bias: Value | None = None
    gamma: Value | None = None
    residual: Value | None = None
    pending: Value | None = None
    total: Value | None = None
    activation: str | ClampedGate = "silu"  # of the gate
    post: Value | None = None  # the sum's table, of a product that posts
    posted: Value | None = None  # that of the sum that is pending
    posts: Posts | None = None

    @classmethod
    def of(cls, memory: Mapping[str, Value | None], **facts) -> FewRowsOperands:
        """memory: references, by name."""
        return cls(**{k: None if r is None else p.address(r) for k, r in memory.items()}, **facts)

    # --- before the product ---

    def prefetch(self, thread: Value) -> None:
        """Asks for the norm's weight, which all blocks read."""
        if self.gamma is not None:
            size = BYTES[self.kinds["gamma"]] * self.k
            p.when(thread < 1, lambda: p.prefetch(self.gamma, size))

    def eight(self, name: str, at: Value) -> list[Value]:
        """Load 8 neighbouring values of gamma or of the pending term, as floats."""
        return load_eight(at, self.kinds[name])

    def store_total(
        self,
        words: Sequence[Value],
        pending: Sequence[Value],
        place: Callable,
        block: Callable,
        is_x: Value | None = None,
    ) -> list[Value]:
        """8 values of x with what was pending, rounded, as words: block 0 stores them at
        ``place(total)``.  is_x: whether they are values of x; None where all are."""
        words = rounded_sum(words, pending)
        at, stores = place(self.total), block() < 1
        stores = stores if is_x is None else stores & is_x
        p.when(stores, lambda: p.store_global(at, words))
        return words

    def factor(self, squares: Value) -> Value:
        """The norm's, of a row with this sum of squares."""
        return p.rsqrt(p.fma(squares, 1.0 / self.k, self.eps))

    # --- behind it ---

    def finish(
        self,
        sums: Sequence[Value],
        *,
        factor: Value | None,
        scales: Iterable[Value] | None = None,
        biases: Iterable[Value] | None = None,
        residual: Iterable[Value] | None = None,
    ) -> list[Value]:
        """Results of neighbouring rows of w or, with SwiGLU, of a row of gate and its row of up."""
        values = list(sums)
        if factor is not None:
            values = [v * factor for v in values]
        if scales is not None:
            values = [v * s for v, s in zip(values, scales, strict=True)]
        if biases is not None:
            values = [v + b for v, b in zip(values, biases, strict=True)]
        if self.swiglu:
            gate, up = values
            values = [gated(self.activation, gate, up)]
        if residual is not None:
            values = [v + r for v, r in zip(values, residual, strict=True)]
        return values

    def store(self, index: Value, value: Value) -> None:
        """The only rounding."""
        kind = self.kinds["out"]
        at = p.offset(self.out, index, BYTES[kind])
        if kind == "f32":
            p.store_global(at, [value])
        else:
            p.store_global_half(at, p.narrow(value, kind))


def load_number(base: Value, index: Value, kind: str) -> Value:
    """Load one value of an array of floats."""
    return as_float(load_word(base, index, kind), kind)


def load_word(base: Value, index: Value, kind: str) -> Value:
    """Load one value of an array of floats as a word, for ``as_float``."""
    at = p.offset(base, index, BYTES[kind])
    return p.load_global(at, 1)[0] if kind == "f32" else p.load_half(at)


def as_float(word: Value, kind: str) -> Value:
    """Return the f32 value of a word of ``load_word``."""
    return p.from_bits(word) if kind == "f32" else p.widen(word, kind)


def load_eight(at: Value, kind: str) -> list[Value]:
    """Load 8 neighbouring values of an array of floats."""
    if kind != "f32":
        return floats(p.load_global(at, 4), kind)
    return p.load_global(at, 8, kind="f32")


def add_squares(total: Value, values: Sequence[Value], inside: Callable[[], Value] | None) -> Value:
    """inside: whether the values are a row's; None where all are."""
    squares = total
    for v in values:
        squares = p.fma(v, v, squares)
    return squares if inside is None else p.where(inside(), squares, total)


def lane_sums(values: Sequence[Value], lanes: int = 32) -> list[Value]:
    """Sums over so many neighbouring lanes, in each of them."""
    values = list(values)
    for distance in (16, 8, 4, 2, 1):
        if distance < lanes:
            values = [v + p.shuffle_xor(v, distance) for v in values]
    return values
