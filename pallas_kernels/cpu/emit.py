"""The language of the handlers: LLVM's IR with vectors of 16 lanes, and the few operations that
differ between targets.

An ``Emitter`` appends to one function.  Vectors have 16 lanes of whatever type: one register of
AVX-512, two of AVX2, four of NEON.  Pointers are bytes; an offset is in bytes.  LLVM does not fuse
or reorder operations.  A multiply-add is emitted only by ``fma``, and sums keep the order in which
they are written.  So any number of threads gives the same bits.

``dots`` is the one operation with different code on each target: sums of four products of 8-bit
integers.  Its docstring lists the operands that it accepts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.target import Target

Value = Any  # of llvmlite, which has no types
LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, PTR = ir.HalfType(), ir.FloatType(), ir.PointerType()
# 1.5 * 2^23: added to a float below 2^22 it leaves the nearest integer in the lowest bits.
_MAGIC = 12582912.0


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def _builder_of(value: ir.values.Value) -> ir.IRBuilder:
    """Return the builder of the function that a value belongs to."""
    place = value.parent
    function = place.parent if isinstance(place, ir.Block) else place
    return function.emitted_by


def _constant_like(value: ir.values.Value, number: float) -> ir.Constant:
    """Return a number, in each lane of a vector, as a constant of the value's type."""
    kind = value.type
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _install_operators() -> None:
    """Give LLVM's values the operators of Python.

    Integers are unsigned under ``//``, ``%`` and ``>>``, signed under ``<`` and ``>``.  A Python
    number is a constant of the other operand's type.
    """

    def binary(integers: str, floats: str | None = None, *order: str, swapped: bool = False):
        def method(a: Value, b: Value):
            if isinstance(b, int | float):
                b = _constant_like(a, b)
            elif not isinstance(b, ir.values.Value):
                return NotImplemented
            builder = _builder_of(b if isinstance(a, ir.Constant) else a)
            element = getattr(a.type, "element", a.type)
            name = floats if floats is not None and element == F32 else integers
            return getattr(builder, name)(*order, *((b, a) if swapped else (a, b)))

        return method

    for name, integers, floats in (
        ("add", "add", "fadd"),
        ("sub", "sub", "fsub"),
        ("mul", "mul", "fmul"),
        ("floordiv", "udiv", None),
        ("mod", "urem", None),
        ("and", "and_", None),
        ("or", "or_", None),
        ("xor", "xor", None),
        ("lshift", "shl", None),
        ("rshift", "lshr", None),
    ):
        setattr(ir.values.Value, f"__{name}__", binary(integers, floats))
        setattr(ir.values.Value, f"__r{name}__", binary(integers, floats, swapped=True))
    for name, order in (("lt", "<"), ("gt", ">"), ("le", "<="), ("ge", ">=")):
        setattr(ir.values.Value, f"__{name}__", binary("icmp_signed", None, order))


_install_operators()


class Emitter:
    """Appends to the function whose builder it has.  Types are its attributes, so that a program
    need not import llvmlite."""

    I1, I8, I16, I32, I64, F16, F32, PTR = I1, I8, I16, I32, I64, F16, F32, PTR
    vector = staticmethod(vector)

    def __init__(self, builder: ir.IRBuilder, target: Target) -> None:
        self.b = builder
        builder.function.emitted_by = builder  # whom the operators of its values ask
        self.target = target

    # --- values -----------------------------------------------------------------------------

    def i32(self, value: int) -> Value:
        return ir.Constant(I32, value)

    def i64(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def f32(self, value: float) -> Value:
        return ir.Constant(F32, value)

    def gather(self, values: Sequence[Value]) -> Value:
        """A vector of these."""
        made = ir.Constant(vector(values[0].type, len(values)), ir.Undefined)
        for lane, value in enumerate(values):
            made = self.b.insert_element(made, value, self.i32(lane))
        return made

    def splat(self, value: Value, lanes: int = LANES) -> Value:
        """One value in every lane."""
        if isinstance(value, ir.Constant):
            return ir.Constant(vector(value.type, lanes), [value.constant] * lanes)
        one = ir.Constant(vector(value.type, lanes), ir.Undefined)
        one = self.b.insert_element(one, value, self.i32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(vector(I32, lanes), [0] * lanes))

    def floats(self, value: float) -> Value:
        return self.splat(self.f32(value))

    def lanes(self, value: Value, first: int, count: int) -> Value:
        """Lanes of a vector."""
        return self.pick(value, value, range(first, first + count))

    def join(self, a: Value, b: Value) -> Value:
        """Two vectors one behind the other."""
        return self.pick(a, b, range(2 * a.type.count))

    def pick(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes of two vectors, those of b after those of a."""
        return self.b.shuffle_vector(a, b, ir.Constant(vector(I32, len(lanes)), list(lanes)))

    def call(self, name: str, result: ir.Type, *args: Value) -> Value:
        """An intrinsic or an outer function, declared where it is not."""
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [a.type for a in args])
            function = ir.Function(module, kind, name)
        return self.b.call(function, args)

    def call_at(self, pointer: Value, kind: ir.Type, *args: Value) -> Value:
        """A call of a function by its address."""
        # Through an integer, because llvmlite reads the function's type off the pointer's.
        function = self.b.inttoptr(self.b.ptrtoint(pointer, I64), kind.as_pointer())
        return self.b.call(function, args)

    def _same(self, name: str, *args: Value) -> Value:
        """An intrinsic over vectors of floats or a float."""
        kind = args[0].type
        suffix = "f32" if kind == F32 else f"v{kind.count}f32"
        return self.call(f"llvm.{name}.{suffix}", kind, *args)

    # --- floats -----------------------------------------------------------------------------

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a b + c, rounded once."""
        return self._same("fma", a, b, c)

    def sqrt(self, a: Value) -> Value:
        return self._same("sqrt", a)

    def widen(self, value: Value) -> Value:
        """float16, bfloat16 (as 16-bit integers) or 8-bit integers as float32, exactly."""
        element = value.type.element
        kind = vector(F32, value.type.count)
        if element == F32:
            return value
        if element == F16:
            return self.b.fpext(value, kind)
        if element == I8:
            return self.b.sitofp(self.b.sext(value, vector(I32, value.type.count)), kind)
        wide = self.b.zext(value, vector(I32, value.type.count))
        shift = ir.Constant(wide.type, [16] * value.type.count)
        return self.b.bitcast(wide << shift, kind)

    def widen_float8(self, value: Value, dtype: str) -> Value:
        """Bytes of non-negative 8-bit floats as float32: float8_e8m0fnu, or 2^-8 times e4m3fn."""
        count = value.type.count
        if dtype == "float8_e8m0fnu":  # the exponent's field; 2^-127 becomes 0
            wide = self.b.zext(value, vector(I32, count))
            return self.b.bitcast(wide << 23, vector(F32, count))
        wide = self.b.zext(value, vector(I16, count))
        shift = ir.Constant(wide.type, [7] * count)
        return self.widen(self.b.bitcast(wide << shift, vector(F16, count)))

    def float8_pairs(self, value: Value) -> list[Value]:
        """Bytes of float8_e4m3fn, four of each row, as 2^-8 times them in float32.

        Two vectors: of each row the first and third number, and the second and fourth.
        """
        b, count = self.b, value.type.count // 2
        kind = vector(I16, count)
        one, mask = ir.Constant(kind, [1] * count), ir.Constant(kind, [0xBF80] * count)
        words = b.bitcast(value, kind)
        # A float16 has one bit more in its exponent, which is above the others and stays 0.
        found = [b.ashr(v, one) & mask for v in (words << 8, words)]
        return [b.fpext(b.bitcast(v, vector(F16, count)), vector(F32, count)) for v in found]

    def narrow(self, value: Value, dtype: str) -> Value:
        """A vector of float32 in float32, float16 or bfloat16 (as 16-bit integers), to nearest."""
        if dtype == "float32":
            return value
        count = value.type.count
        if dtype == "float16":
            return self.b.fptrunc(value, vector(F16, count))
        b, bits = self.b, self.b.bitcast(value, vector(I32, count))
        shift = self.splat(self.i32(16), count)
        high = bits >> shift
        odd = high & 1
        near = (bits + odd + 0x7FFF) >> shift
        quiet = high | 0x40
        near = b.select(b.fcmp_unordered("uno", value, value), quiet, near)
        return b.trunc(near, vector(I16, count))

    def round_to_i32(self, value: Value) -> Value:
        """Round floats below 2^22 to the nearest integer, ties to even; NaN gives any integer."""
        shifted = value + _MAGIC
        bits = self.b.bitcast(shifted, vector(I32))
        return bits - 0x4B400000

    def exp(self, x: Value) -> Value:
        """e^x of a vector within 2 ulp; 2^-126 and 2^127 at least and at most; NaN of NaN.

        Cephes' expf: x = n ln 2 + r, a polynomial of r, n added to the exponent.
        """
        b = self.b
        x = b.select(b.fcmp_ordered("<", x, self.floats(-87.3)), self.floats(-87.3), x)
        x = b.select(b.fcmp_ordered(">", x, self.floats(88.0)), self.floats(88.0), x)
        shifted = self.fma(x, self.floats(1.44269504088896341), self.floats(_MAGIC))
        n = shifted - _MAGIC
        r = self.fma(n, self.floats(-0.693359375), x)
        r = self.fma(n, self.floats(2.12194440e-4), r)
        p = self.floats(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
            p = self.fma(p, r, self.floats(c))
        p = self.fma(p, r * r, r + 1.0)
        power = b.bitcast(shifted, vector(I32)) << 23
        return b.bitcast(b.bitcast(p, vector(I32)) + power, vector(F32))

    def larger(self, a: Value, b: Value) -> Value:
        """Return the larger of two floats or of each pair of lanes; a NaN in ``a`` is dropped."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def largest(self, value: Value) -> Value:
        """Return the largest lane of a vector; NaN may be dropped."""
        return self._fold(value, self.larger)

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """Transpose 16 vectors: result i holds lane i of every vector."""
        found, width = list(rows), LANES // 2
        while width:  # swaps the blocks of so many lanes off the diagonal
            first = [LANES + j - width if j & width else j for j in range(LANES)]
            second = [LANES + j if j & width else j + width for j in range(LANES)]
            made = list(found)
            for i in (i for i in range(LANES) if not i & width):
                a, b = found[i], found[i + width]
                made[i], made[i + width] = self.pick(a, b, first), self.pick(a, b, second)
            found, width = made, width // 2
        return found

    def sums(self, values: Sequence[Value]) -> Value:
        """Lane i is the sum of the lanes of the i-th of 16 vectors of floats."""
        found, width = list(values), LANES // 2
        while width:
            half = len(found) // 2
            runs = [range(i, i + width) for i in range(0, LANES, 2 * width)]
            low = [i for run in runs for start in (0, LANES) for i in (j + start for j in run)]
            high = [i + width for i in low]
            pairs = zip(found[:half], found[half:], strict=True)
            found = [self.pick(a, b, low) + self.pick(a, b, high) for a, b in pairs]
            width //= 2
        return found[0]

    def sum(self, value: Value) -> Value:
        """Return the sum of a vector's lanes, added by halves: one order on every target."""
        add = self.b.fadd if value.type.element == F32 else self.b.add
        return self._fold(value, add)

    def max_magnitude(self, values: Sequence[Value]) -> Value:
        """The largest magnitude in vectors of floats; NaN where there is one."""
        b = self.b
        mask = self.splat(self.i32(0x7FFFFFFF))

        def larger(x: Value, y: Value) -> Value:  # bits of non-negative floats order as they do
            return b.select(x > y, x, y)

        found = None
        for value in values:
            bits = b.bitcast(value, vector(I32)) & mask
            found = bits if found is None else larger(found, bits)
        return b.bitcast(self._fold(found, larger), F32)

    def _fold(self, value: Value, join: Callable[[Value, Value], Value]) -> Value:
        count = value.type.count
        while count > 1:
            count //= 2
            value = join(self.lanes(value, 0, count), self.lanes(value, count, count))
        return self.b.extract_element(value, self.i32(0))

    # --- memory -----------------------------------------------------------------------------

    def room(self, size: int) -> Value:
        """So many bytes of the stack, from a multiple of 64 on, until the function returns."""
        with self.b.goto_entry_block():
            made = self.b.alloca(ir.ArrayType(I8, size))
            made.align = 64
            return self.opaque(made)

    def opaque(self, pointer: Value) -> Value:
        """llvmlite gives a pointer to a variable a type of what lies there; this one has none."""
        return self.b.inttoptr(self.b.ptrtoint(pointer, I64), PTR)

    def at(self, pointer: Value, offset: Value | int) -> Value:
        """The pointer some bytes on."""
        offset = self.i64(offset) if isinstance(offset, int) else offset
        return self.b.gep(pointer, [offset], source_etype=I8)

    def load(self, pointer: Value, kind: ir.Type, offset: Value | int = 0, align: int = 1) -> Value:
        value = self.b.load(self.at(pointer, offset), typ=kind)
        value.align = align
        return value

    def store(self, value: Value, pointer: Value, offset: Value | int = 0, align: int = 1) -> None:
        self.b.store(value, self.at(pointer, offset), align=align)

    def load_part(self, pointer: Value, count: Value) -> Value:
        """The first ``count`` floats (i64; all 16 from there on), zeros behind.  No byte behind
        them is touched."""
        zeros = ir.Constant(vector(F32), [0.0] * LANES)
        args = pointer, self.i32(1), self.lanes_below(count), zeros
        return self.call("llvm.masked.load.v16f32.p0", vector(F32), *args)

    def store_part(self, value: Value, pointer: Value, count: Value) -> None:
        """The first ``count`` floats."""
        args = value, pointer, self.i32(1), self.lanes_below(count)
        self.call("llvm.masked.store.v16f32.p0", ir.VoidType(), *args)

    def lanes_below(self, count: Value) -> Value:
        """A mask of the lanes below an i64."""
        lane = ir.Constant(vector(I64), list(range(LANES)))
        return lane < self.splat(count)

    def prefetch(self, pointer: Value, offset: Value | int = 0) -> None:
        """The line there into the second-level cache, to be read soon; any address will do."""
        args = self.at(pointer, offset), self.i32(0), self.i32(2), self.i32(1)
        self.call("llvm.prefetch.p0", ir.VoidType(), *args)

    # --- control ----------------------------------------------------------------------------

    def loop(
        self,
        count: Value | int,
        body: Callable[..., Sequence[Value] | None],
        carried: Sequence[Value] = (),
        start: Value | int = 0,
        step: int = 1,
    ) -> list[Value]:
        """``carried = body(i, *carried)`` for i (i64) from start below count; may run zero times.
        Returns what is carried at the end."""
        b = self.b
        first, end = (self.i64(v) if isinstance(v, int) else v for v in (start, count))
        before = b.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(first, before)
        phis = [b.phi(value.type) for value in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        b.cbranch(i < end, inside, after)
        b.position_at_end(inside)
        made = body(i, *phis) or ()
        last = b.block
        for phi, value in zip(phis, made, strict=True):
            phi.add_incoming(value, last)
        i.add_incoming(i + step, last)
        b.branch(head)
        b.position_at_end(after)
        return phis

    @contextlib.contextmanager
    def when(self, condition: Value, likely: bool | None = None) -> Iterator[None]:
        with self.b.if_then(condition, likely=likely):
            yield

    def least(self, a: Value, b: Value) -> Value:
        """Return the smaller of two signed i64."""
        return self.b.select(a < b, a, b)

    def limited(self, value: Value, end: Value) -> Value:
        """i64 between 0 and ``end``."""
        value = self.least(value, end)
        return self.b.select(value < 0, self.i64(0), value)

    def divide_up(self, a: Value, b: int) -> Value:
        """i64, neither negative."""
        return (a + (b - 1)) // b

    # --- dot products of 8-bit integers ---------------------------------------------------------

    def lookup(self, table: Sequence[int], index: Value) -> Value:
        """64 bytes of a table of 16; index: 64 bytes, 0..15."""
        name, lanes = {
            "avx512vnni": ("llvm.x86.avx512.pshuf.b.512", 64),
            "avxvnni": ("llvm.x86.avx2.pshuf.b", 32),
            "avx2": ("llvm.x86.avx2.pshuf.b", 32),
            "neon": ("llvm.aarch64.neon.tbl1.v16i8", 16),
        }[self.target.name]
        values = ir.Constant(vector(I8, lanes), [*table] * (lanes // 16))
        parts = [
            self.call(name, values.type, values, self.lanes(index, first, lanes))
            for first in range(0, 64, lanes)
        ]
        return self._joined(parts)

    def _joined(self, parts: Sequence[Value]) -> Value:
        """Vectors one behind the other; 2, 4 or 8 of them, or one."""
        while len(parts) > 1:
            parts = [self.join(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def code_offset(self, bits: int) -> int:
        """Return the offset that ``dots`` adds to each code.

        The caller subtracts the offset times the sum of x.
        """
        return 128 if bits == 8 and "vnni" in self.target.name else 0

    def raised(self, w: Value, bits: int) -> Value:
        """Return codes with ``code_offset`` added, for ``dots(..., raised=True)``."""
        return self._unsigned(w, bits) if self.code_offset(bits) else w

    def dots(
        self,
        acc: Value,
        pairs: Sequence[tuple[Value, Value]],
        bits: int,
        raised: bool = False,
        largest: int = 15,
    ) -> Value:
        """acc (i32 in 16 lanes) + the sum over pairs (w, x) of lane l's four products
        ``(w[4 l + i] + code_offset) x[4 l + i]``: 64 bytes each.

        w: of 8 bits signed codes, -128..127; of 4 bits unsigned ones, 0..largest.  x: -127..127.
        """
        if raised and self.code_offset(bits):
            bits = 0  # nothing more to add
        if self.target.name == "avx2":
            return self._avx2(acc, pairs, bits, largest)
        part = {"avx512vnni": self._vnni512, "avxvnni": self._vnni256, "neon": self._neon}[
            self.target.name
        ]
        return part(acc, pairs, bits)

    def _vnni512(self, acc: Value, pairs: Sequence[tuple[Value, Value]], bits: int) -> Value:
        # Codes of 4 bits take two chains, since each sum has a latency of five cycles.  Two chains
        # gained nothing for int8.
        chains = [acc, self.splat(self.i32(0))] if bits == 4 and len(pairs) > 1 else [acc]
        for i, (w, x) in enumerate(pairs):
            args = (self.b.bitcast(v, vector(I32)) for v in (self._unsigned(w, bits), x))
            own = i % len(chains)
            chains[own] = self.call("llvm.x86.avx512.vpdpbusd.512", acc.type, chains[own], *args)
        return chains[0] if len(chains) == 1 else self.b.add(*chains)

    def _unsigned(self, w: Value, bits: int) -> Value:
        return w ^ ir.Constant(w.type, [-128] * 64) if bits == 8 else w

    def _parts(self, acc: Value, lanes: int, one: Callable[[Value, int], Value]) -> Value:
        """``one(part of acc, its first lane)`` for parts of some lanes, joined."""
        return self._joined([one(self.lanes(acc, i, lanes), i) for i in range(0, LANES, lanes)])

    def _vnni256(self, acc: Value, pairs: Sequence[tuple[Value, Value]], bits: int) -> Value:
        def one(part: Value, first: int) -> Value:
            for w, x in pairs:
                half = (self.lanes(v, 4 * first, 32) for v in (self._unsigned(w, bits), x))
                args = (self.b.bitcast(v, vector(I32, 8)) for v in half)
                part = self.call("llvm.x86.avx512.vpdpbusd.256", part.type, part, *args)
            return part

        return self._parts(acc, 8, one)

    def _avx2(
        self, acc: Value, pairs: Sequence[tuple[Value, Value]], bits: int, largest: int
    ) -> Value:
        """vpmaddubsw saturates at 16 bits: 8 pairs of products of codes up to 15 stay below, 5 of
        codes up to 24, and one of 8-bit codes where the code's sign goes to x: 2 * 128 * 127."""

        def sixteen(w: Value, x: Value) -> Value:
            if bits == 8:
                x = self.call("llvm.x86.avx2.psign.b", x.type, x, w)
                w = self.call("llvm.abs.v32i8", w.type, w, ir.Constant(I1, 0))
            return self.products_of_pairs(w, x)

        def one(part: Value, first: int) -> Value:
            at_once = 32767 // (2 * 127 * largest) if bits == 4 else 1
            for start in range(0, len(pairs), at_once):
                total = None
                for w, x in pairs[start : start + at_once]:
                    found = sixteen(self.lanes(w, 4 * first, 32), self.lanes(x, 4 * first, 32))
                    total = found if total is None else total + found
                part = part + self.sums_of_pairs(total)
            return part

        return self._parts(acc, 8, one)

    def products_of_pairs(self, w: Value, x: Value) -> Value:
        """AVX2: 16 sums of two products in 16 bits, of unsigned w and signed x (32 bytes each)."""
        return self.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), w, x)

    def sums_of_pairs(self, value: Value) -> Value:
        """AVX2: 8 sums of two neighbours of 16 bits."""
        ones = ir.Constant(vector(I16, 16), [1] * 16)
        return self.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), value, ones)

    def _neon(self, acc: Value, pairs: Sequence[tuple[Value, Value]], bits: int) -> Value:
        def one(part: Value, first: int) -> Value:
            for w, x in pairs:
                args = (self.lanes(v, 4 * first, 16) for v in (w, x))
                part = self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", part.type, part, *args)
            return part

        return self._parts(acc, 4, one)
