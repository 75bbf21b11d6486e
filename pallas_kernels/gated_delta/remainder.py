"""The remainder of a float32 beyond its bf16, in four bits.  Both together keep twelve bits.

The integer difference between a number's bits and those of its bf16 lies within half a unit of
bf16's last place.  The four bits say which sixteenth of that unit.  A thread has 32 entries of a
[64, 64] array: four words of codes.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import llvm
from pallas_kernels.launch import REF, inline
from pallas_kernels.recurrence.channels import float_pairs, thread_in_warpgroup, wgmma_array

WORDS = 4 * 128  # of a [64, 64] array
LAYOUT = plgpu.Layout.WG_STRIDED((WORDS,), vec_size=4)  # of a thread's codes
_HALF = 1 << 15  # half a unit of bf16's last place
_WGMMA = plgpu.Layout.WGMMA


def code(value, wide):
    """(value - bf16) in sixteenths of bf16's last place, and 8; ``wide``: the bf16's bits as a
    float32's."""
    left = p.smaller(p.bits(value) - wide, _HALF - 1)
    return (left + _HALF) >> 12


def decoded(word, n: int, wide):
    """The float32 that the n-th code of ``word`` belongs to, but for half a sixteenth."""
    shift = 12 - 4 * n
    moved = word << shift if shift >= 0 else word >> -shift
    return p.from_bits(wide + (moved & 0xF000) + (2048 - _HALF))


def widened(word):
    """A pair of bf16 as the bits of two float32."""
    return word << 16, word & 0xFFFF0000


@inline(REF, _WGMMA, _WGMMA)
def store(to, x, rounded) -> None:
    """The codes of x, float32 [64, 64], given its bf16, to int32 [WORDS] on the device."""
    words = []
    pairs = zip(x.registers.reshape(-1), rounded.registers.reshape(-1), strict=True)
    for i, (pair, half) in enumerate(pairs):
        wide = widened(mgpu.utils.bitcast(half, p.i32()))
        codes = [code(llvm.extractelement(pair, p.ci(e)), wide[e]) for e in range(2)]
        both = codes[0] | (codes[1] << 4)
        if i % 4:
            words[-1] = words[-1] | (both << (8 * (i % 4)))
        else:
            words.append(both)
    p.store_global(p.offset(p.address(to), thread_in_warpgroup(), 16), words)


@inline(LAYOUT, _WGMMA, out=plgpu.ShapeDtypeStruct((64, 64), jnp.float32, layout=_WGMMA))
def joined(codes, rounded):
    """x, to twelve bits, from its bf16 and what ``store`` left."""

    def pairs():
        (own,) = codes.registers.flat
        words = [llvm.extractelement(own, p.ci(n)) for n in range(4)]
        for i, half in enumerate(rounded.registers.reshape(-1)):
            wide = widened(mgpu.utils.bitcast(half, p.i32()))
            yield [decoded(words[i // 4], 2 * (i % 4) + e, wide[e]) for e in range(2)]

    return wgmma_array((64, 64), p.f32(), float_pairs(pairs()))
