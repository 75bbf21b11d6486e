"""PTX and MLIR's integers and floats as Python functions, for code inside ``launch.inline``.

Arithmetic, comparisons and operations on bits are Python's operators (``operators``).

Everything runs while a kernel is traced.  Values are MLIR scalars: f32; i32 words, which hold
integers, a pair of 16-bit floats (the low half first) or packed codes; i64 addresses of device
memory, i32 addresses of shared memory; i1 conditions.  ``at`` is a number of bytes.

The instructions are those of the architecture that the kernel is for (``device.gpu()``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import jax
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels import operators
from pallas_kernels.device import gpu as device
from pallas_kernels.jax_internals import arith, gpu, ir, llvm, scf

Value = ir.Value
operators.install()
LOG2E = 1.4426950408889634
# Pairs of bfloat16.
_BF16_ONES, _BF16_MINUS_ONES, _BF16_MINUS_ZEROS = 0x3F803F80, 0xBF80BF80, 0x80008000


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    return ir.F32Type.get()


def ci(value: int) -> Value:
    """An i32 constant; bit patterns above 2**31 are wrapped."""
    return mgpu.utils.c(value - (1 << 32) if value >= 1 << 31 else value, i32())


def opaque(value: int) -> Value:
    """An i32 constant that the compiler does not know: a loop up to it is not unrolled."""
    return ptx(f"mov.u32 $0, {value};", results=i32())


def cf(value: float) -> Value:
    return mgpu.utils.c(float(value), f32())


def type_of(value: Value) -> ir.Type:
    return value.type


def ptx(code: str, *args: Value, results=None, volatile: bool = True, convergent: bool = False):
    return mgpu.utils.inline_ptx(
        code, *args, result_types=results, has_side_effects=volatile, convergent=convergent
    )


def _i32(code: str, *args: Value) -> Value:
    return ptx(code, *args, results=i32(), volatile=False)


def _f32(code: str, *args: Value) -> Value:
    return ptx(code, *args, results=f32(), volatile=False)


def _vector(kind: str, n: int, first: int) -> tuple[str, str]:
    names = ",".join(f"${first + i}" for i in range(n))
    return (kind, names) if n == 1 else (f"v{n}.{kind}", "{" + names + "}")


# --- Where a thread is, and addresses ---


def register(name: str, volatile: bool = False) -> Value:
    """A special 32-bit register such as ``%tid.x``.  volatile: read anew where it is used, so that
    what is computed from it is not carried, and spilled, through a whole loop."""
    return ptx(f"mov.u32 $0, %{name};", results=i32(), volatile=volatile)


def address(ref: Value) -> Value:
    """The i64 address of a memref in device memory."""
    return llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(ref))


def shared_address(ref: Value) -> Value:
    """The i32 address of a memref in shared memory."""
    return arith.trunci(i32(), address(ref))


def offset(base: Value, index: Value, stride: int = 1) -> Value:
    """``base + index * stride`` for an i64 base and a non-negative i32 index."""
    wide = arith.extui(i64(), index)
    if stride != 1:
        wide = wide * stride
    return base + wide


def offset_rows(base: Value, index: Value, stride: int) -> Value:
    """The same in one wide multiply-add."""
    code = f"mad.wide.u32 $0, $1, {stride}, $2;"
    return ptx(code, index, base, results=i64(), volatile=False)


# --- Integers and conditions ---


# A number among the arguments has the type of the other.


def below(a: Value | int, b: Value | int) -> Value:
    """Signed ``a < b``."""
    return arith.cmpi(arith.CmpIPredicate.slt, *_alike(a, b))


def at_most(a: Value | int, b: Value | int) -> Value:
    """Signed ``a <= b``."""
    return arith.cmpi(arith.CmpIPredicate.sle, *_alike(a, b))


def equal(a: Value, b: Value | float) -> Value:
    """Return a == b of integers, or of floats: then false for NaN."""
    b = operators.like(b, a)
    if type_of(a) == f32():
        return arith.cmpf(arith.CmpFPredicate.OEQ, a, b)
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def unequal(a: Value, b: Value | float) -> Value:
    """Return a != b of floats, false for NaN."""
    return arith.cmpf(arith.CmpFPredicate.ONE, a, operators.like(b, a))


def where(condition: Value, a: Value | float, b: Value | float) -> Value:
    """Return a where the condition holds, b elsewhere."""
    return arith.select(condition, *_alike(a, b))


def _alike(a: Value | float, b: Value | float) -> tuple[Value, Value]:
    """Return both as values, of which one at most is a number."""
    a = operators.like(a, b)
    return a, operators.like(b, a)


def unsigned(x: Value) -> Value:
    """Return a condition (as 0 or 1) or a shorter word as an i32, without its sign."""
    return arith.extui(i32(), x)


def signed(x: Value) -> Value:
    """Return a shorter integer as an i32, with its sign."""
    return arith.extsi(i32(), x)


def bit(x: Value, k: int) -> Value:
    """Whether bit k of x is set."""
    return arith.cmpi(arith.CmpIPredicate.ne, x & (1 << k), ci(0))


def smaller(a: Value, b: Value | int) -> Value:
    """Return the smaller of two signed i32."""
    return arith.minsi(*_alike(a, b))


def larger(a: Value, b: Value | int) -> Value:
    """Return the larger of two signed i32."""
    return arith.maxsi(*_alike(a, b))


def and_xor(word: Value, mask: int, flip: int) -> Value:
    """``(word & mask) ^ flip`` as one LOP3 (left alone, the compiler makes it two)."""
    return _i32("lop3.b32 $0, $1, $2, $3, 0x6a;", word, ci(mask), ci(flip))


def select_bits(a: Value, mask: int, c: Value) -> Value:
    """``(a & mask) | c``."""
    return _i32("lop3.b32 $0, $1, $2, $3, 0xea;", a, ci(mask), c)


def merge_bits(a: Value, mask: int, c: Value) -> Value:
    """``(a & mask) | (c & ~mask)``."""
    return _i32("lop3.b32 $0, $1, $2, $3, 0xe2;", a, ci(mask), c)


def permute(a: Value, b: Value, selector: int | Value) -> Value:
    """PRMT: four bytes picked from the eight of a (0..3) and b (4..7); 8 + i is i's sign."""
    if isinstance(selector, int):
        return _i32(f"prmt.b32 $0, $1, $2, {selector};", a, b)
    return _i32("prmt.b32 $0, $1, $2, $3;", a, b, selector)


# --- Floats ---


def bits(x: Value) -> Value:
    """The word that an f32 is."""
    return arith.bitcast(i32(), x)


def from_bits(word: Value) -> Value:
    """The f32 that a word is."""
    return arith.bitcast(f32(), word)


def minimum(a: Value, b: Value | float) -> Value:
    """Return the smaller of two f32, or of an unsigned i32 and a Python integer."""
    if isinstance(b, int):
        return arith.minui(a, ci(b))
    return _f32("min.f32 $0, $1, $2;", *_alike(a, b))


def maximum(a: Value, b: Value | float) -> Value:
    """Return the larger of two f32."""
    return _f32("max.f32 $0, $1, $2;", *_alike(a, b))


def absolute(a: Value) -> Value:
    return _f32("abs.f32 $0, $1;", a)


def fma(a: Value, b: Value | float, c: Value | float) -> Value:
    """Return ``a b + c`` of f32, rounded once."""
    return _f32("fma.rn.f32 $0, $1, $2, $3;", a, operators.like(b, a), operators.like(c, a))


def divide(a: Value | float, b: Value | float) -> Value:
    """Return a / b of f32, rounded to the nearest."""
    return _f32("div.rn.f32 $0, $1, $2;", *_alike(a, b))


def reciprocal(x: Value) -> Value:
    """1 / x to one unit in the last place.  ``divide`` is a call of a function where nvJitLink
    assembles (jax >= 0.12), beside which ptxas waits for every wgmma (its message C7509)."""
    return _f32("rcp.approx.ftz.f32 $0, $1;", x)


def rsqrt(value: Value) -> Value:
    return _f32("rsqrt.approx.f32 $0, $1;", value)


def exp2(x: Value) -> Value:
    """2**x, one instruction; exp2(-inf) is 0."""
    return _f32("ex2.approx.ftz.f32 $0, $1;", x)


def log2(x: Value) -> Value:
    return _f32("lg2.approx.ftz.f32 $0, $1;", x)


def to_integer(x: Value) -> Value:
    """f32 to the nearest i32, ties to even."""
    return _i32("cvt.rni.s32.f32 $0, $1;", x)


def to_float(x: Value) -> Value:
    """A signed i32 as f32."""
    return _f32("cvt.rn.f32.s32 $0, $1;", x)


def to_e4m3(low: Value, high: Value) -> Value:
    """Two f32 as FP8, saturated, in the low half of a word."""
    if not device().float8:
        return _byte_e4m3(low) | (_byte_e4m3(high) << 8)
    code = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }"
    return _i32(code, low, high)


def to_e4m3_word(values: Sequence[Value]) -> Value:
    """Four f32 as FP8, saturated."""
    if not device().float8:
        return permute(to_e4m3(*values[:2]), to_e4m3(*values[2:]), 0x5410)
    half = "cvt.rn.satfinite.e4m3x2.f32"
    code = f"{{ .reg .b16 l, h; {half} l, $2, $1; {half} h, $4, $3; mov.b32 $0, {{l, h}}; }}"
    return _i32(code, *values)


def from_e4m3(half: Value) -> list[Value]:
    """The two f32 of the FP8 in the low half of a word."""
    if not device().float8:
        return [_float_e4m3(half), _float_e4m3(half >> 8)]
    code = "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 $0, h; }"
    word = _i32(code, half)
    return [widen(word, "f16"), widen_high(word, "f16")]


def _byte_e4m3(x: Value) -> Value:
    """An f32 as FP8, saturated, by integer arithmetic.

    From 2^-6 on the exponent's bias changes, and the mantissa is rounded to 3 bits, ties to even.
    Below, 2^14 is added, whose last place is 2^-9, that of FP8's subnormal numbers.
    """
    word = bits(absolute(x))
    is_nan = ci(0x7F800000) < word
    size = minimum(absolute(x), cf(448.0))
    word = bits(size)
    even = (word >> 20) & 1
    normal = (word + even + (0x7FFFF - (120 << 23))) >> 20
    small = bits(size + 16384.0) - bits(cf(16384.0))
    code = where(word < (121 << 23), small, normal)
    code = where(is_nan, ci(0x7F), code)
    return code | ((bits(x) >> 24) & 0x80)


def _float_e4m3(word: Value) -> Value:
    """The f32 of the FP8 in the low byte of a word: the bits at a float16's places, times 2^8."""
    moved = (word & 0x7F) << 7
    value = widen(moved, "f16") * 256.0
    value = where(equal(word & 0x7F, 0x7F), cf(float("nan")), value)
    return from_bits(bits(value) | ((word & 0x80) << 24))


# --- 16-bit floats: kind is "bf16" or "f16" ---


def widen(half: Value, kind: str = "bf16") -> Value:
    """The f32 value of the 16-bit float in the low half of a word."""
    if kind == "bf16":
        return from_bits(half << 16)
    return _f32("{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.f32.f16 $0, h; }", half)


def widen_high(word: Value, kind: str = "bf16") -> Value:
    """The f32 value of the 16-bit float in the high half of a word."""
    if kind == "bf16":
        return from_bits(word & 0xFFFF0000)
    return widen(word >> 16, kind)


def narrow(value: Value, kind: str) -> Value:
    """f32 rounded to a 16-bit float, in the low half of a word."""
    return _i32(f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $1; cvt.u32.u16 $0, h; }}", value)


def pack(low: Value, high: Value, kind: str = "bf16") -> Value:
    """Two f32 rounded to a pair."""
    return _i32(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", low, high)


def _has_pairs(kind: str) -> bool:
    """Whether pairs of the kind have instructions of their own; else a multiply-add, which rounds
    once as well, computes the same."""
    return kind == "f16" or device().pair_arithmetic


def add_pairs(a: Value, b: Value, kind: str = "bf16") -> Value:
    if not _has_pairs(kind):
        return fma_pairs(a, ci(_BF16_ONES), b, kind)
    return _i32(f"add.rn.{kind}x2 $0, $1, $2;", a, b)


def sub_pairs(a: Value, b: Value, kind: str = "bf16") -> Value:
    if not _has_pairs(kind):
        return fma_pairs(b, ci(_BF16_MINUS_ONES), a, kind)
    return _i32(f"sub.rn.{kind}x2 $0, $1, $2;", a, b)


def mul_pairs(a: Value, b: Value, kind: str = "bf16") -> Value:
    if not _has_pairs(kind):
        return fma_pairs(a, b, ci(_BF16_MINUS_ZEROS), kind)  # -0 keeps the sign of a zero
    return _i32(f"mul.rn.{kind}x2 $0, $1, $2;", a, b)


def fma_pairs(a: Value, b: Value, c: Value, kind: str = "bf16") -> Value:
    """a * b + c, rounded once."""
    return _i32(f"fma.rn.{kind}x2 $0, $1, $2, $3;", a, b, c)


def mma(
    acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value], kind: str = "bf16"
) -> list[Value]:
    """acc[16, 8] += a[16, 16] b[16, 8] of one warp, 16-bit floats into f32."""
    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return list(ptx(code, *a, *b, *acc, results=[f32()] * 4, volatile=False, convergent=True))


def mma_int8(acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """acc[16, 8] += a[16, 32] b[32, 8] of one warp, int8 into int32."""
    code = (
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return list(ptx(code, *a, *b, *acc, results=[i32()] * 4, volatile=False, convergent=True))


# --- Other lanes of the warp ---


def shuffle_xor(x: Value, lanes: int) -> Value:
    """The value of the lane whose number differs by xor."""
    code = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 31, -1;"
    return ptx(code, x, results=type_of(x), convergent=True)


WARP = 16, 8, 4, 2, 1


def over_lanes(
    x: Value, lanes: Sequence[int] = WARP, f: Callable[[Value, Value], Value] = operator.add
) -> Value:
    """The sum, or ``f``, over the lanes whose numbers differ by xor of some of ``lanes``."""
    for distance in lanes:
        x = f(x, shuffle_xor(x, distance))
    return x


def shuffle_up(x: Value, lanes: int) -> Value:
    """Return the value of the lane this many below; the first lanes keep their own values."""
    code = f"shfl.sync.up.b32 $0, $1, {lanes}, 0, -1;"
    return ptx(code, x, results=type_of(x), convergent=True)


def shuffle_from(x: Value, lane: Value | int) -> Value:
    """One lane's value."""
    if isinstance(lane, int):
        code = f"shfl.sync.idx.b32 $0, $1, {lane}, 31, -1;"
        return ptx(code, x, results=type_of(x), convergent=True)
    code = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
    return ptx(code, x, lane, results=type_of(x), convergent=True)


def warp_largest(word: Value) -> Value:
    """Return the largest of the warp's unsigned words, in each lane."""
    return ptx("redux.sync.max.u32 $0, $1, -1;", word, results=i32(), convergent=True)


def warp_smallest(word: Value) -> Value:
    """Return the smallest of the warp's unsigned words, in each lane."""
    return ptx("redux.sync.min.u32 $0, $1, -1;", word, results=i32(), convergent=True)


def any_lane(condition: Value) -> Value:
    """Whether it holds in a lane of the warp."""
    word = ptx(
        "{ .reg .pred q; setp.ne.u32 q, $1, 0; vote.sync.any.pred q, q, 0xffffffff; "
        "selp.u32 $0, 1, 0, q; }",
        unsigned(condition),
        results=i32(),
        convergent=True,
    )
    return bit(word, 0)


def transpose_8x8(word: Value) -> Value:
    """The warp's 8x8 matrix of 16-bit words, two per lane, transposed."""
    code = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return ptx(code, word, results=i32(), volatile=False, convergent=True)


def load_matrices(base: Value, at: int = 0, transposed: bool = False) -> list[Value]:
    """ldmatrix.x4: four 8x8 tiles of 16-bit floats, one word of each per lane, from 32 addresses of
    rows in shared memory; every tile transposed on the way if so asked."""
    trans = ".trans" if transposed else ""
    code = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0,$1,$2,$3}}, [$4+{at}];"
    return list(ptx(code, base, results=[i32()] * 4, convergent=True))


def _store_matrices(kind: str, base: Value, words: Sequence[Value], at: int) -> None:
    code = f"stmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 [$0+{at}], {{$1,$2,$3,$4}};"
    ptx(code, base, *words, convergent=True)


def store_matrices(base: Value, words: Sequence[Value], at: int = 0) -> None:
    """The inverse of ``load_matrices``."""
    _store_matrices("", base, words, at)


def store_matrices_transposed(base: Value, words: Sequence[Value], at: int = 0) -> None:
    """The inverse of ``load_matrices(transposed=True)``."""
    _store_matrices(".trans", base, words, at)


# --- Memory ---


def _load(space: str, base: Value, n: int, at: int, kind: str) -> list[Value]:
    if n > 4:
        return [x for i in range(0, n, 4) for x in _load(space, base, 4, at + 4 * i, kind)]
    result, (kind, outs) = f32() if kind == "f32" else i32(), _vector(kind, n, 0)
    return list(ptx(f"ld.{space}.{kind} {outs}, [${n}+{at}];", base, results=[result] * n))


def _store(space: str, base: Value, values: Sequence[Value], at: int) -> None:
    for i in range(0, len(values), 4):
        some = values[i : i + 4]
        kind, names = _vector("f32" if type_of(some[0]) == f32() else "b32", len(some), 1)
        ptx(f"st.{space}.{kind} [$0+{at + 4 * i}], {names};", base, *some)


READ_ONLY = ".nc"  # the path of constants


def load_global(base: Value, n: int, at: int = 0, kind: str = "b32", cache: str = ""):
    """n (1, 2, or a multiple of 4) words, or "f32"; cache: ``READ_ONLY`` where no thread writes
    them during the kernel, and no kernel before that is waited for did (``await_kernel``)."""
    return _load(f"global{cache}", base, n, at, kind)


def store_global(base: Value, values: Value | Sequence[Value], at: int = 0) -> None:
    """A word or float, or 1, 2, or a multiple of 4 of them at ``at``."""
    if isinstance(values, Value):
        ptx(f"st.global.{'f32' if type_of(values) == f32() else 'b32'} [$0], $1;", base, values)
    else:
        _store("global", base, values, at)


def store_four(base: Value, words: Sequence[Value], condition: Value, at: int = 0) -> None:
    """Store 16 bytes at ``base + at`` where the condition holds, without a branch."""
    kind = "f32" if type_of(words[0]) == f32() else "b32"
    test = "{ .reg .pred q; setp.ne.u32 q, $5, 0; "
    code = f"{test}@q st.global.v4.{kind} [$0+{at}], {{$1, $2, $3, $4}}; }}"
    ptx(code, base, *words, unsigned(condition))


def load_address(base: Value, at: int = 0) -> Value:
    """Load an i64 address from a table that no kernel writes; allowed before ``await_kernel``."""
    return ptx(f"ld.global.nc.b64 $0, [$1+{at}];", base, results=i64())


def load_posted(base: Value, at: int = 0) -> list[Value]:
    """Load 4 words that other devices may write during the kernel."""
    code = f"ld.volatile.global.v4.b32 {{$0,$1,$2,$3}}, [$4+{at}];"
    return list(ptx(code, base, results=[i32()] * 4))


def await_posted(words: Sequence[Value], base: Value, empty: int, at: int = 0) -> list[Value]:
    """Load 4 words again until none of them is ``empty``.

    words: the result of ``load_posted``.
    """
    tests = [f"setp.eq.u32 q, a, {empty};"]
    tests += [f"setp.eq.or.u32 q, {word}, {empty}, q;" for word in "bcd"]
    code = (
        "{ .reg .pred q; .reg .b32 a, b, c, d; "
        "mov.b32 a, $4; mov.b32 b, $5; mov.b32 c, $6; mov.b32 d, $7; bra test; "
        f"again: ld.volatile.global.v4.b32 {{a,b,c,d}}, [$8+{at}]; "
        f"test: {' '.join(tests)} @q bra again; "
        "mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d; }"
    )
    return list(ptx(code, *words, base, results=[i32()] * 4, convergent=True))


def await_turn(base: Value, turn: Value, at: int) -> None:
    """Load a word that the host writes until it is ``turn``; 2^28 times (8 minutes), then trap.

    What the host has written before it, is read after it.
    """
    code = (
        "{ .reg .pred q; .reg .b32 a, n; mov.b32 n, 0; "
        f"again: ld.acquire.sys.global.b32 a, [$0+{at}]; setp.ne.b32 q, a, $1; "
        "@q nanosleep.u32 100; add.u32 n, n, 1; setp.lt.and.u32 q, n, 268435456, q; @q bra again; "
        "setp.ne.b32 q, a, $1; @q trap; }"
    )
    ptx(code, base, turn, convergent=True)


def post(base: Value, value: Value, at: int = 0) -> None:
    """Store an f32 in device memory, perhaps another device's, that a kernel there polls."""
    ptx(f"st.relaxed.sys.global.f32 [$0+{at}], $1;", base, value)


def load_half(base: Value, at: int = 0, cache: str = "") -> Value:
    """Load 16 bits of device memory into the low half of a word; cache: as in ``load_global``."""
    code = f"{{ .reg .b16 h; ld.global{cache}.u16 h, [$1+{at}]; cvt.u32.u16 $0, h; }}"
    return ptx(code, base, results=i32())


def load_signed_byte(base: Value, at: int = 0, cache: str = "") -> Value:
    """Load 8 bits of device memory as an i32; cache: as in ``load_global``."""
    code = f"{{ .reg .b16 h; ld.global{cache}.s8 h, [$1+{at}]; cvt.s32.s16 $0, h; }}"
    return ptx(code, base, results=i32())


def store_global_half(base: Value, half: Value) -> None:
    """The low 16 bits of a word."""
    ptx("{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }", base, half)


def store_byte(base: Value, word: Value) -> None:
    ptx("{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b8 [$0], h; }", base, word)


def load_shared(base: Value, n: int, at: int = 0, kind: str = "b32") -> list[Value]:
    """n (1, 2, or a multiple of 4) words, or "f32"."""
    return _load("shared", base, n, at, kind)


def store_shared(base: Value, values: Sequence[Value], at: int = 0) -> None:
    """1, 2, or a multiple of 4 words or floats."""
    _store("shared", base, values, at)


def store_shared_if(condition: Value, base: Value, value: Value, at: int = 0) -> None:
    """A float, in the threads where the condition holds, without a branch."""
    code = f"{{ .reg .pred q; setp.ne.u32 q, $2, 0; @q st.shared.f32 [$0+{at}], $1; }}"
    ptx(code, base, value, unsigned(condition))


def add_shared(base: Value, value: Value) -> Value:
    """Add to a word of shared memory, atomically; return what it was."""
    return ptx("atom.shared.add.u32 $0, [$1], $2;", base, value, results=i32())


def load_float(base: Value, at: int = 0) -> Value:
    """One f32 of shared memory."""
    return load_shared(base, 1, at, "f32")[0]


def load_shared_narrow(base: Value, kind: str, at: int = 0) -> Value:
    """One u8, s8 or u16 of shared memory, widened to i32."""
    wide = "s32.s16" if kind == "s8" else "u32.u16"
    code = f"{{ .reg .b16 h; ld.shared.{kind} h, [$1+{at}]; cvt.{wide} $0, h; }}"
    return ptx(code, base, results=i32())


# --- Control ---


def when(condition: Value, body: Callable[[], object]) -> None:
    """``if condition: body()`` for a body without results."""
    op = scf.IfOp(condition)
    with ir.InsertionPoint(op.then_block):
        body()
        scf.yield_([])


def choose(condition: Value, body: Callable, otherwise: Sequence[Value]) -> list[Value]:
    """``body()`` if condition, else the values that are there."""
    op = scf.IfOp(condition, [type_of(x) for x in otherwise], has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.yield_(list(body()))
    with ir.InsertionPoint(op.else_block):
        scf.yield_(list(otherwise))
    return list(op.results)


def loop(
    start: Value | int, stop: Value | int, step: Value | int, carry: Sequence[Value], body: Callable
) -> list[Value]:
    """``for i in range(start, stop, step): carry = body(i, carry)``."""
    bounds = [ci(x) if isinstance(x, int) else x for x in (start, stop, step)]
    op = scf.ForOp(*bounds, list(carry))
    with ir.InsertionPoint(op.body):
        out = body(op.induction_variable, list(op.inner_iter_args))
        scf.yield_(list(out))
    return list(op.results)


def barrier() -> None:
    """All threads of the block."""
    gpu.barrier()


def warpgroup_barrier() -> None:
    """All threads of the warpgroup."""
    mgpu.utils.warpgroup_barrier()


def warp_barrier() -> None:
    """All threads of the warp; shared memory written before is visible after."""
    ptx("bar.warp.sync -1;", convergent=True)


# --- The kernel before this one ---


def _overlaps() -> bool:
    """Whether a kernel may begin before the one before it has ended."""
    return jax.__version_info__ >= (0, 12) and device().dependent_launch


def await_kernel() -> None:
    """By all threads: until the kernel before has ended; then the one behind may begin.

    A kernel that calls it begins while the one before still runs (programmatic dependent launch,
    from jax 0.12 and Hopper on; before, it begins behind it, and this is nothing).  So before it a
    kernel writes nothing and reads nothing, weights neither, which may have been computed just now:
    it may ask L2 for them (``prefetch``).  Behind it, what other kernels write is not read through
    the path of constants (``READ_ONLY``): the lines there may be older.
    """
    if not _overlaps():
        return
    ptx("griddepcontrol.wait;")
    ptx("griddepcontrol.launch_dependents;")
    owner = ir.InsertionPoint.current.block.owner
    while owner.parent is not None:
        owner = owner.parent
    owner.attributes["mosaic_gpu.uses_pdl"] = ir.UnitAttr.get()


def prefetch_line(at: Value) -> None:
    """Ask L1 for the line at an address of device memory."""
    ptx("prefetch.global.L1 [$0];", at)


def prefetch(at: Value, size: int) -> None:
    """Asks L2 for ``size`` contiguous bytes of device memory, where there is an ``await_kernel`` to
    wait at; both multiples of 16."""
    if not _overlaps():
        return
    ptx(f"cp.async.bulk.prefetch.L2.global [$0], {size};", at)


# --- Copies into shared memory, and the barriers that count them ---


def copy_async(
    to: Value,
    source: Value,
    at: int,
    from_at: int = 0,
    size: Value | None = None,
    *,
    line: bool = False,
) -> None:
    """16 bytes from device memory to shared memory, past L1, in the open group of copies.

    size: how many of the 16 are read; the rest is zeros.  line: L2 fetches the whole line of 128
    bytes, of which other copies read the rest.
    """
    ahead = ".L2::128B" if line else ""
    code = f"cp.async.cg.shared.global{ahead} [$0+{at}], [$1+{from_at}], 16"
    if size is None:
        ptx(f"{code};", to, source)
    else:
        ptx(f"{code}, $2;", to, source, size)


def copies_commit() -> None:
    """Close this thread's group of copies."""
    ptx("cp.async.commit_group;")


def copies_wait(pending: int) -> None:
    """Until at most ``pending`` of this thread's groups are under way."""
    ptx(f"cp.async.wait_group {pending};")


def copies_arrive(barrier: Value) -> None:
    """Arrive on a barrier, one of the arrivals that it counts, when the copies that this thread has
    begun are there."""
    ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", barrier)


def copy_bulk(to: Value, source: Value, size: int, barrier: Value, at: int | None = None) -> None:
    """``size`` contiguous bytes (a multiple of 16) to shared memory by the copy engine, counted by
    ``barrier``."""
    to_place = "[$0]" if at is None else f"[$0+{at}]"
    ptx(
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes {to_place}, [$1], "
        f"{size}, [$2];",
        to,
        source,
        barrier,
    )


def barrier_init(barrier: Value, arrivals: int) -> None:
    ptx(f"mbarrier.init.shared.b64 [$0], {arrivals};", barrier)


def barriers_ready() -> None:
    """Make initialised barriers visible to the copy engine; a block barrier must follow."""
    ptx("fence.mbarrier_init.release.cluster;")


def barrier_expect(barrier: Value, size: int) -> None:
    """Arrive, and say that ``size`` bytes will come."""
    ptx(f"mbarrier.arrive.expect_tx.shared.b64 _, [$0], {size};", barrier)


def barrier_arrive(barrier: Value) -> None:
    ptx("mbarrier.arrive.shared.b64 _, [$0];", barrier)


def barrier_wait(barrier: Value, parity: Value) -> None:
    """Until the phase of that parity is over."""
    ptx(
        "{ .reg .pred q; again: mbarrier.try_wait.parity.shared.b64 q, [$0], $1; "
        "@q bra done; bra again; done: }",
        barrier,
        parity,
        convergent=True,
    )


# --- The other blocks of a cluster ---


def cluster_arrive(order: str = "relaxed") -> None:
    """Says that this thread is here; "release": and what it has written."""
    ptx(f"barrier.cluster.arrive.{order}.aligned;", convergent=True)


def cluster_wait() -> None:
    """Until every thread of the cluster has arrived."""
    ptx("barrier.cluster.wait.acquire.aligned;", convergent=True)


def cluster_barrier() -> None:
    """All threads of all blocks of the cluster; shared memory written before is visible after."""
    cluster_arrive("release")
    cluster_wait()


def peer_address(shared: Value, rank: Value | int) -> Value:
    """The cluster address of the same place in another block's shared memory."""
    rank = ci(rank) if isinstance(rank, int) else rank
    return _i32("mapa.shared::cluster.u32 $0, $1, $2;", shared, rank)


def load_peer(base: Value, at: int = 0) -> Value:
    return ptx(f"ld.shared::cluster.f32 $0, [$1+{at}];", base, results=f32())


def send_peer(to: Value, values: Sequence[Value], barrier: Value, at: int = 0) -> None:
    """2 or 4 floats to a ``peer_address``, counted by a barrier of the same block."""
    kind, names = _vector("f32", len(values), 2)
    code = f"st.async.shared::cluster.mbarrier::complete_tx::bytes.{kind} [$0+{at}], {names}, [$1];"
    ptx(code, to, barrier, *values)
