"""Unpacking of int4 codes to the operand that wgmma takes from registers: int8, e4m3 or bfloat16.

int8.  Codes are multiplied exactly:

    a = (q - zero) * multiple        with  -128 <= a <= 127  for every code (``rounding.multiples``)

The arithmetic is in 32 bits, four bytes at a time.  With u = q + 8 in 0..15, each byte computes
``u * multiple + (128 - (zero + 8) * multiple)``, which is a + 128 in 0..255.  No byte carries into
the next, even if intermediate values wrap.  Flipping each byte's top bit gives a.  8 weights take
12 instructions; in the order of ``matmul.interleave``, where a word's low nibbles are one word of
the operand and its high nibbles another, 8.

e4m3.  The bytes 0..16 mean their number times 2^-9, subnormals and the first two binades alike.  So
the difference of code and zero is a magnitude with a sign bit, four bytes at a time, for zeros from
-8 to 8.  Weights are not multiplied; the scale multiplies a group's sum.

A thread's four columns of wgmma's 8-bit operand are 2 bytes of codes; a quad's are 8 bytes in a row
of 64, or of half a row of 128.  A swizzle as wide as the row spreads the warp's eight rows over all
banks, so lanes exchange nothing.

bfloat16.  A thread has two of eight columns of wgmma's 16-bit operand, which are one byte of codes.
That byte times 0x1001 has one code at the low end of each half word.  Under a constant exponent the
half word is 136 + q.  136 + zero is subtracted exactly, so a zero point from -8 to 119 costs
nothing.  The product with the scale is rounded once.

float4_e2m1fn to bfloat16.  A byte's two codes go to where their fields are bfloat16's
(``widen``).  One multiplication by the scale, exact, makes the pair.  A thread may load
the 16 bytes of which its quad has four each; PRMT then takes its own.

float8_e4m3fn to bfloat16.  A thread's two columns are two bytes, whose fields go to the lower end
of bfloat16's exponent (``widen``).  The value is exact, and its product with the scale is
rounded once.

Copies: none from device memory; a thread loads codes from the ring, scales and zeros from the ring
or from a tile's vectors.
Waits: none; the caller has waited for the slot and for the vectors.
Writes: none; the operand stays in registers.

Sources: QServe (arXiv 2405.04532) for scales in two levels, LiquidGEMM (2509.01229) for the
arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith, ir, memref, vector
from pallas_kernels.launch import REF, inline
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.ptx import Value

_LOW, _EIGHTS, _SIGNS = 0x0F0F0F0F, 0x08080808, 0x80808080
_ONES, _SIXTEENS = 0x01010101, 0x10101010
E4M3_STEP = 2.0**-9  # what the byte 1 is as e4m3
_PITCH = 64  # bytes of a row of codes
Widen = Callable[[Value], Value]
_PAIR = 0x000F000F
_BIASED = 0x43084308  # bfloat16's 136, twice: 128 + (q ^ 8) is 136 + q


@dataclasses.dataclass(frozen=True)
class FragmentRows:
    """Where the 64 rows of wgmma's register operand lie in shared memory.

    Warp w's first eight rows begin at ``of_warp * w``, and its other eight ``apart`` rows behind
    them.  Both are multiples of 8, so a swizzle depends on the place among eight alone.
    """

    of_warp: int = 16
    apart: int = 8

    def place(self) -> tuple[Value, Value, Value]:
        """A thread's first row, its place among eight, and the lane's among the row's four."""
        thread = p.register("tid.x") & 127
        in_eight = (thread >> 2) & 7
        row = (thread >> 5) * self.of_warp + in_eight
        return row, in_eight, thread & 3


_IN_ORDER = FragmentRows()


def multiplied(zero: Value | None, multiple: Value | None = None) -> Widen:
    """Four codes + 8 -> int8 (code - zero) * multiple."""
    above = p.ci(8) if zero is None else zero + 8
    above = above if multiple is None else above * multiple
    offset = (128 - above) * _ONES

    def widened(u: Value) -> Value:
        u = u if multiple is None else u * multiple
        return (u + offset) ^ _SIGNS

    return widened


def signed(zero: Value | None) -> Widen:
    """Four codes + 8 -> e4m3 (code - zero) * ``E4M3_STEP``."""
    offset = p.ci(8 * _ONES) if zero is None else (8 - zero) * _ONES

    def widened(u: Value) -> Value:
        v = u + offset  # 16 + code - zero
        negative = p.and_xor(v, _SIXTEENS, _SIXTEENS) >> 4
        # 16 less the low bits: those flipped, and one more
        low = (v & _LOW) ^ (negative * 0x0F)
        return low + negative * 0x81

    return widened


def eight(first: Value, second: Value, widened: Widen) -> list[Value]:
    """The weights of two half words of codes: a word of four each."""
    codes = p.permute(first, second, 0x5410)
    even = widened(p.and_xor(codes, _LOW, _EIGHTS))
    odd = widened(p.and_xor(codes >> 4, _LOW, _EIGHTS))
    return [p.permute(even, odd, 0x5140), p.permute(even, odd, 0x7362)]


def below_of(zero: Value | None) -> Value:
    """136 + zero, twice: as a code, so a zero is a small integer under a constant exponent."""
    return p.ci(_BIASED) if zero is None else zero * 0x10001 + p.ci(_BIASED)


def pair(byte: Value, scale: Value, below: Value, above: Value | None) -> Value:
    """(136 + q - below) * scale + above of a byte's two codes; all but the byte are pairs."""
    code = p.sub_pairs(p.and_xor(byte * 0x1001, _PAIR, _BIASED), below)
    return p.mul_pairs(code, scale) if above is None else p.fma_pairs(code, scale, above)


def row_words(load: Callable[[int, int], Value], widened: Widen) -> list[Value]:
    """A thread's eight words of one row of 128 columns.  load: (chunk of 16 bytes, half of it) ->
    the thread's 2 bytes there."""
    words = []
    for chunk in range(_PITCH // 16):
        words += eight(load(chunk, 0), load(chunk, 1), widened)
    return words


def interleaved_words(words: Sequence[Value], widened: Widen) -> list[Value]:
    """A thread's eight words of one row of 128 columns, of its four words of interleaved codes."""
    nibbles = (part for word in words for part in (word, word >> 4))
    return [widened(p.and_xor(part, _LOW, _EIGHTS)) for part in nibbles]


def to_8_bits(
    dtype, codes, zeros=None, multiples=None, *, piece: int = 0, interleaved: bool = False
) -> jax.Array:
    """``[64, 128]`` in wgmma's layout, of a warpgroup's rows in shared memory: int8 (code - zero) *
    multiple, or e4m3 (code - zero) * ``E4M3_STEP``, which has no multiples.

    codes: bytes ``[64, 64]``, swizzled by 64, or ``[64, 128]``, swizzled by 128, of which ``piece``
    names the half.  zeros, multiples: ``[64]`` int8, strided.  interleaved: the codes are in the
    order of ``matmul.interleave``.
    """
    pitch = codes.shape[-1]

    def words(codes, *vectors):
        row, in_eight, quad = _IN_ORDER.place()
        base = p.shared_address(codes) + row * pitch
        base = base + quad * (4 if interleaved else 2)
        swizzle = in_eight
        if pitch == _PITCH:
            swizzle = (in_eight >> 1) & 3
        chunks = [swizzle ^ (4 * piece + c) for c in range(4)]
        places = [base + chunk * 16 for chunk in chunks]
        rows = []
        for half in range(2):
            at = row + 8 * half
            held = [p.signed(_of_row(v, at)) for v in vectors]
            zero = None if zeros is None else held[0]
            multiple = None if multiples is None else held[-1]
            widened = multiplied(zero, multiple) if dtype == jnp.int8 else signed(zero)

            def load(chunk, part, half=half):
                return p.load_shared_narrow(places[chunk], "u16", 8 * pitch * half + 8 * part)

            if interleaved:
                words = [p.load_shared(place, 1, 8 * pitch * half)[0] for place in places]
                rows.append(interleaved_words(words, widened))
            else:
                rows.append(row_words(load, widened))
        return rows

    refs = [v for v in (codes, zeros, multiples) if v is not None]
    return _fragment(words, refs, dtype, 128)


def to_bfloat16(
    weight: StoredWeight, codes, scales, zeros=None, where=_IN_ORDER, **how
) -> jax.Array:
    """``[64, 64]`` bfloat16 in wgmma's layout, of a warpgroup's rows in shared memory.

    codes: bytes ``[64, 8 bits]``, swizzled by as many as a row has.  scales: those of each group of
    columns, strided: ``[64]`` floats, or bytes of float4; without any the codes alone are widened.
    zeros: of int4, bfloat16 (they are added last) or int8 (taken off the codes).  where: the rows.
    how: as of ``_float4``.
    """
    words = functools.partial(_WORDS[weight.form], weight, where, **how)
    return _fragment(words, [codes, *scales, *([] if zeros is None else [zeros])])


def _fragment(words: Callable, refs: Sequence, dtype=jnp.bfloat16, columns: int = 64) -> jax.Array:
    """wgmma's operand of ``words(*refs)``, a thread's words of its two rows."""
    codes_of_8_bits = dtype != jnp.bfloat16
    layout = plgpu.Layout.WGMMA_8BIT if codes_of_8_bits else plgpu.Layout.WGMMA
    out_type = plgpu.ShapeDtypeStruct((64, columns), dtype, layout=layout)

    @inline(*(REF,) * len(refs), out=out_type)
    def emit(*refs):
        kind = mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))
        rows, is_signed = words(*refs), True if dtype == jnp.int8 else None
        return _operand(rows, layout, (64, columns), kind, is_signed)

    return emit(*refs)


def _nibbles(weight, where, codes, scales, *zeros) -> list[list[Value]]:
    """Words of int4 codes: a thread's are one byte of eight columns."""
    row, in_eight, quad = where.place()
    base = p.shared_address(codes) + row * (_PITCH // 2) + quad
    swizzle = (in_eight >> 2) * 16
    places = [base + (swizzle ^ (16 * c)) for c in range(2)]
    rows = []
    for half in range(2):
        at = row + where.apart * half
        scale, zero, above = _factor(scales, at), None, None
        if weight.int_zero:
            zero = p.signed(_of_row(zeros[0], at))
        elif zeros:
            above = _factor(zeros[0], at)
        below = below_of(zero)
        mine = (
            p.load_shared_narrow(place, "u8", where.apart * (_PITCH // 2) * half + 4 * i)
            for place in places
            for i in range(4)
        )
        rows.append([pair(byte, scale, below, above) for byte in mine])
    return rows


def _float4(
    weight, where, codes, *scales, wide: bool = True, scale_pitch: int | None = None
) -> list[list[Value]]:
    """Words of float4 codes, which lack ``widen.FLOAT4_REST``.

    scales: bytes ``[64]`` of each group, strided.  With ``scale_pitch``, bytes from row to row,
    they are one ``[64, groups]``, of which a row's are one load: the rows lie in one bank.  wide: a
    thread loads all bytes of its quad, which takes fewer instructions and more registers.
    """
    row, in_eight, quad = where.place()
    kind, pitch = weight.scale_kind, _PITCH // 2
    base = p.shared_address(codes) + row * pitch
    base = base if wide else base + quad
    swizzle = (in_eight >> 2) * 16
    places = [base + (swizzle ^ (16 * c)) for c in range(2)]
    mine = quad * 0x1111 + widen.FLOAT4_BYTE if wide else widen.FLOAT4_BYTE

    def words(place, at):
        if wide:
            return p.load_shared(place, 4, at)
        return [p.load_shared_narrow(place, "u8", at + 4 * i) for i in range(4)]

    rows = []
    for half in range(2):
        at = row + where.apart * half
        if scale_pitch is None:
            held = (p.unsigned(_of_row(v, at)) for v in scales)
            factors = [widen.scale_pair(weight, scale, "bf16") for scale in held]
        else:
            place = p.shared_address(scales[0]) + at * scale_pitch
            is_half = kind == "e8m0"
            word = p.load_shared_narrow(place, "u16") if is_half else p.load_shared(place, 1)[0]
            factors = widen.factors_of_64(kind, word)
        each = 8 // len(factors)  # bytes of a thread that share a scale
        held = [word for place in places for word in words(place, where.apart * pitch * half)]
        pairs = [widen.float4_neighbours(word, mine) for word in held]
        rows.append([p.mul_pairs(x, factors[i // each]) for i, x in enumerate(pairs)])
    return rows


def _bytes(weight, where, codes, *scales) -> list[list[Value]]:
    """Words of float8_e4m3fn or int8 codes."""
    row, in_eight, quad = where.place()
    base = p.shared_address(codes) + row * _PITCH + quad * 2
    swizzle = (in_eight >> 1) & 3
    places = [base + (swizzle ^ c) * 16 for c in range(4)]
    rows = []
    for half in range(2):
        factors = [_factor(v, row + where.apart * half) for v in scales]
        words = []
        for place in places:
            for at in (0, 8):
                both = p.load_shared_narrow(place, "u16", where.apart * _PITCH * half + at)
                if weight.float8:
                    pair = widen.float8_pair(both)
                else:
                    pair = widen.int8_pair(p.permute(both, p.ci(0), 0x4140))
                words.append(p.mul_pairs(pair, factors[0]) if factors else pair)
        rows.append(words)
    return rows


def _floats(weight, where, tile) -> list[list[Value]]:
    """Words of bfloat16, as they are."""
    del weight
    row, in_eight, quad = where.place()
    pitch = 2 * _PITCH
    base = p.shared_address(tile) + row * pitch + quad * 4
    places = [base + (in_eight ^ c) * 16 for c in range(8)]
    return [
        [p.load_shared(place, 1, where.apart * pitch * half)[0] for place in places]
        for half in range(2)
    ]


# How a thread's words become bfloat16, by ``StoredWeight.form``.
_WORDS: dict[str, Callable[..., list[list[Value]]]] = {
    "float": _floats,
    "int8": _bytes,
    "float8": _bytes,
    "int4": _nibbles,
    "mxfp4": _float4,
    "nvfp4": _float4,
}


def _of_row(of_rows: Value, row: Value) -> Value:
    return memref.load(of_rows, [arith.index_cast(ir.IndexType.get(), row)])


def _factor(of_rows: Value, row: Value) -> Value:
    """A pair of a row's scale or zero, rounded to bfloat16."""
    value = _of_row(of_rows, row)
    if value.type == p.f32():
        return p.pack(value, value)
    return _twice(value)


def _twice(half: Value) -> Value:
    """A pair of one 16-bit float."""
    word = p.unsigned(arith.bitcast(ir.IntegerType.get_signless(16), half))
    return p.permute(word, word, 0x1010)


def _operand(rows, layout, shape: tuple[int, int], kind: ir.Type, is_signed: bool | None):
    """wgmma's operand of the words of a thread's two rows."""
    out = mgpu.FragmentedArray.splat(
        mgpu.utils.c(0, kind), shape, layout.to_mgpu(), is_signed=is_signed
    )
    registers, of_one = out.registers.copy(), ir.VectorType.get((1,), p.i32())
    for i in range(registers.size):  # columns of 16 bytes, then the rows' halves
        word = vector.broadcast(of_one, rows[i % 2][i // 2])
        place = np.unravel_index(i, registers.shape)
        registers[place] = vector.bitcast(registers[place].type, word)
    return mgpu.FragmentedArray(
        _registers=registers, _layout=layout.to_mgpu(), _is_signed=is_signed
    )
