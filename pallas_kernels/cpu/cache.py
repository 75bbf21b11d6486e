"""Keys or values in a cache, as the handlers read and write them: one head of one token at a time.

    float32, bfloat16, float16     H numbers
    int8                           H codes and a float32 scale
    int4                           two codes to a byte, and for each group a float16 scale and zero:
                                   x = scale q + zero

A head is vectors of 16 floats.  An int4 head has its 32 even and odd features in two vectors: the
low and the high halves of 16 bytes.  Vectors that meet such a head are permuted by ``as_stored``
first; sums over such heads are permuted back by ``in_order`` at the end.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pallas_kernels.cpu.frame import CallFrame
from pallas_kernels.cpu.handler import Program
from pallas_kernels.dispatch import Reason

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value

LANES = 16
_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}


@dataclasses.dataclass(frozen=True)
class CacheForm:
    """dtype: of the numbers or codes.  heads: of a token.  width: features of a head.  groups: of a
    head that have a scale each."""

    dtype: str
    heads: int
    width: int
    groups: int

    def __str__(self) -> str:
        return f"{self.dtype}_{self.heads}x{self.width}_{self.groups}"

    @property
    def arrays(self) -> int:
        return {"int8": 2, "int4": 3}.get(self.dtype, 1)

    @property
    def vectors(self) -> int:
        return self.width // LANES

    @property
    def bytes(self) -> int:
        """The bytes of one head's numbers or codes, without scales."""
        return self.width * _BITS[self.dtype] // 8


def form_of(name: str, head: tuple[int, ...], groups: int) -> CacheForm | Reason:
    """Return the form of a cache, or why the handlers do not read it.

    name: its dtype.  head: (heads, width).  groups: scales of a head, 0 in a cache of floats.
    """
    heads, width = head
    if name not in _BITS:
        return Reason(f"a cache of {name}; the handler reads {', '.join(_BITS)}")
    whole = 2 * LANES if name == "int4" else LANES
    if width % whole or (groups and width // groups % whole):
        return Reason(f"heads of {width} features; the handler takes multiples of {whole}")
    if name == "int8" and groups != 1:
        return Reason(f"{groups} scales a head; the handler takes one of int8")
    return CacheForm(name, heads, width, groups)


@dataclasses.dataclass(frozen=True)
class AttendForm(Program):
    """What a program of attention over a cache depends on.

    group: query heads to a kv head.  paged: through a table.  new: with RoPE and the write.
    norm: with an RMSNorm of q's and k's heads before RoPE.  sinks: with a sink of each query head.

    Operands: q and lengths (qkv and slots), k, v, table, cos, sin, weights of q's norm and of k's,
    sinks.
    """

    cache: CacheForm
    group: int
    paged: bool
    new: bool = False
    norm: bool = False
    sinks: bool = False

    @property
    def heads(self) -> int:
        return self.group * self.cache.heads

    @property
    def arguments(self) -> int:
        before = 2 + 2 * self.cache.arrays + self.paged
        return before + 2 * self.new + 2 * self.norm + self.sinks


class CachePlaces:
    """Where the tokens of rows are in a cache: rows one behind the other, or pages by a table.

    k, table: the operands' numbers.
    """

    def __init__(self, e: Emitter, call: CallFrame, k: int, table: int | None) -> None:
        self.e, self.paged = e, table is not None
        self.pages, self.page = (call.argument_dim(k, axis) for axis in (0, 1))
        self.capacity = self.page
        if table is not None:
            self.table, self.entries = call.argument(table), call.argument_dim(table, 1)
            self.capacity = self.entries * self.page

    def entry(self, row: Value, token: Value) -> Value:
        """The table's for a token below the capacity (i64)."""
        e, b = self.e, self.e.b
        at = row * self.entries + token // self.page
        return b.sext(e.load(self.table, e.I32, at * 4), e.I64)

    def token(self, row: Value, token: Value) -> Value:
        """A row's token among all of the cache; where the table names no page, of another one."""
        e = self.e
        if self.paged:
            row = e.limited(self.entry(row, token), self.pages - 1)
            token = token % self.page
        return row * self.page + token


class CacheHeads:
    """The arrays of one cache, k or v, in emitted code."""

    def __init__(self, form: CacheForm, e: Emitter, arrays: list[Value]) -> None:
        self.form, self.e = form, e
        self.codes, *self.scales = arrays

    @classmethod
    def of(cls, form: CacheForm, call: CallFrame, first: int) -> CacheHeads:
        """Return the heads whose arrays are the call's operands from number ``first`` on."""
        return cls(form, call.e, [call.argument(first + i) for i in range(form.arrays)])

    def or_else(self, condition: Value, other: CacheHeads) -> CacheHeads:
        """This cache where the condition holds, else another of its form."""
        pairs = zip((self.codes, *self.scales), (other.codes, *other.scales), strict=True)
        return CacheHeads(self.form, self.e, [self.e.b.select(condition, x, y) for x, y in pairs])

    def at(self, token: Value, head: Value) -> Value:
        """Where a head (i64) of a token (i64, of all tokens of the cache) begins."""
        e, f = self.e, self.form
        start = token * (f.heads * f.bytes)
        return e.at(self.codes, start + head * f.bytes)

    def prefetch(self, token: Value, head: Value) -> None:
        for line in range(0, self.form.bytes, 64):
            self.e.prefetch(self.at(token, head), line)

    def prefetch_scales(self, token: Value) -> None:
        """Prefetch the scales of one token of an int8 cache."""
        e = self.e
        start = token * (4 * self.form.heads)
        for line in range(0, 4 * self.form.heads, 64):
            e.prefetch(self.scales[0], start + line)

    def load(self, token: Value, head: Value, first: int, count: int) -> list[Value]:
        """Return the vectors of a head: int8 codes before scaling, int4 in pairs of vectors."""
        e, b, dtype = self.e, self.e.b, self.form.dtype
        at = self.at(token, head)
        if dtype != "int4":
            kind = {"float32": e.F32, "float16": e.F16, "bfloat16": e.I16, "int8": e.I8}[dtype]
            size = LANES * _BITS[dtype] // 8
            return [e.widen(e.load(at, e.vector(kind), size * (first + i))) for i in range(count)]
        made, four = [], e.splat(e.i32(4))
        numbers: dict[int, list[Value]] = {}
        for i in range(first, first + count, 2):
            group = LANES * i * self.form.groups // self.form.width
            if group not in numbers:
                numbers[group] = [e.splat(self._number(n, token, head, group)) for n in (0, 1)]
            both = b.sext(e.load(at, e.vector(e.I8), LANES // 2 * i), e.vector(e.I32))
            high_bits = e.splat(e.i32(28))
            even = b.ashr(both << high_bits, high_bits)
            for codes in (even, b.ashr(both, four)):
                made.append(e.fma(b.sitofp(codes, e.vector(e.F32)), *numbers[group]))
        return made

    def floats(self, token: Value, head: Value, first: int, count: int) -> list[Value]:
        """Vectors of a head, of int8 with their scale."""
        values = self.load(token, head, first, count)
        if self.form.dtype != "int8":
            return values
        scale = self.e.splat(self.scale(token, head))
        return [self.e.b.fmul(v, scale) for v in values]

    def scale(self, token: Value, head: Value) -> Value:
        """Return the scale of a head of an int8 cache."""
        e = self.e
        index = token * self.form.heads + head
        return e.load(self.scales[0], e.F32, index * 4)

    def _number(self, which: int, token: Value, head: Value, group: int) -> Value:
        """The scale (0) or zero (1) of a group of an int4 head."""
        e, f = self.e, self.form
        index = token * f.heads + head
        index = index * f.groups + group
        half = e.load(self.scales[which], e.F16, index * 2)
        return e.b.fpext(half, e.F32)

    def store(self, token: Value, head: Value, values: list[Value]) -> None:
        """A head in natural order, as ``rope_cache.quantize_kv`` rounds it; not of int4."""
        e, b, dtype = self.e, self.e.b, self.form.dtype
        at, size = self.at(token, head), LANES * _BITS[dtype] // 8
        if dtype == "int8":
            scale = b.fdiv(e.max_magnitude(values), e.f32(127.0))
            inverse = b.fdiv(e.f32(1.0), scale)
            inverse = b.select(b.fcmp_ordered(">", scale, e.f32(0.0)), inverse, e.f32(0.0))
            index = token * self.form.heads + head
            e.store(scale, self.scales[0], index * 4)
            codes = (e.round_to_i32(v * e.splat(inverse)) for v in values)
            kept = [b.trunc(c, e.vector(e.I8)) for c in codes]
        else:
            kept = [e.narrow(v, dtype) for v in values]
        for i, value in enumerate(kept):
            e.store(value, at, size * i)

    def as_stored(self, values: list[Value]) -> list[Value]:
        """A head in natural order as ``load`` gives it."""
        return self._reordered(
            values, [[2 * i for i in range(LANES)], [2 * i + 1 for i in range(LANES)]]
        )

    def in_order(self, values: list[Value]) -> list[Value]:
        """The inverse of ``as_stored``."""
        pairs = [i // 2 + i % 2 * LANES for i in range(2 * LANES)]
        return self._reordered(values, [pairs[:LANES], pairs[LANES:]])

    def _reordered(self, values: list[Value], picks: list[list[int]]) -> list[Value]:
        if self.form.dtype != "int4":
            return values
        made = []
        for a, b in zip(values[::2], values[1::2], strict=True):
            made += [self.e.pick(a, b, pick) for pick in picks]
        return made
