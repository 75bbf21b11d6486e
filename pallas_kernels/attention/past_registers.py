"""The registers of one warpgroup of ``past_kernel``, and its products.

Contract: a tile is 64 queries by 128 keys.  With g = lane // 4 and c = lane % 4, a thread holds:

    scores   64 of them in wgmma's order: score 4 t + 2 r + b is row g + 8 r of the warp's 16 rows
             and key 8 t + 2 c + b
    means    as many features, in the same order
    rows     one number for each of its two rows

The registers after a step pass to the next call as a "bundle".  A bundle is a Pallas array whose
element i * 128 + thread is register i of that thread.

The code is PTX because both products of a step are in flight while the softmax runs.
``plgpu.wgmma`` puts a fence between an operand in registers and the products in flight; ptxas then
waits for each instruction (its message C7513).  Here one statement starts both products, and
nothing reads their results before ``_landed``.  The operands of the next products are made after
the wait for these.  This is the order of FlashAttention-3 (arXiv 2407.08608, algorithm 2).

Copies: none; ``past_kernel`` brings operands to shared memory and waits for the copies.
Waits: ``softmax`` waits until at most ``pending`` groups of wgmma run, ``fade`` and ``finish``
until none does.  Until then registers of scores and means must not be read.
Writes: ``finish`` stores logarithms in shared memory; all else stays in registers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import ir, llvm, vector
from pallas_kernels.launch import REF, inline

ROWS, KEYS = 64, 128
_SCORES = KEYS // 2  # a thread's
# What a row's exponentials are taken beside is raised where a score is 8 above it, 2**8 in weights:
# seldom after the first tile, so that the means are seldom multiplied again (FlashAttention-4 does
# so too).
_SLACK = 8.0


def _layout(n: int):
    return plgpu.Layout.WG_STRIDED((n * 128,), vec_size=1)


def _type(n: int, dtype=jnp.float32):
    return plgpu.ShapeDtypeStruct((n * 128,), dtype, layout=_layout(n))


def _bundle(values):
    """f32 or i32 registers as one Pallas array: no instruction, so they may be in flight."""
    kind = ir.VectorType.get((1,), values[0].type)
    registers = np.empty((len(values),), dtype=object)
    registers[:] = [vector.from_elements(kind, [x]) for x in values]
    signed = None if values[0].type == p.f32() else True
    return mgpu.FragmentedArray(
        _registers=registers, _layout=_layout(len(values)).to_mgpu(), _is_signed=signed
    )


def _registers(bundle):
    return [llvm.extractelement(x, p.ci(0)) for x in bundle.registers.flat]


def _statement(code: str, results, args, constraints):
    kinds = llvm.StructType.get_literal(results)
    both = llvm.inline_asm(
        kinds, args, code, ",".join(constraints), asm_dialect=0, has_side_effects=True
    )
    return [llvm.extractvalue(kind, both, [i]) for i, kind in enumerate(results)]


def _landed(values):
    """The same registers, which nothing reads above this place, nor makes below it."""
    n, letter = len(values), "f" if values[0].type == p.f32() else "r"
    tied = [f"={letter}"] * n + [str(i) for i in range(n)]
    return _statement("", [x.type for x in values], values, tied)


def _descriptor(ref, leading: int, stride: int, swizzle: int):
    """wgmma's of an operand in shared memory (PTX ISA, "Matrix Descriptor"): bytes between tiles of
    8 rows along the fast and the slow dimension."""
    word = functools.partial(mgpu.utils.c, ty=p.i64())
    place = (p.address(ref) & word(0x3FFFF)) >> word(4)
    fixed = leading >> 4 << 16 | stride >> 4 << 32 | {128: 1, 64: 2}[swizzle] << 62
    return place | word(fixed - (1 << 64) if fixed >> 63 else fixed)


def _names(first: int, n: int) -> str:
    return "{" + ",".join(f"${i}" for i in range(first, first + n)) + "}"


def tiling(width: int, dtype) -> tuple:
    """The transforms of an operand of wgmma in shared memory."""
    size = jnp.dtype(dtype).itemsize
    swizzle = min(128, width * size)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def _place():
    """(warp, g, c) of a thread."""
    thread = p.register("tid.x") & 127
    lane = thread & 31
    return thread >> 5, lane >> 2, lane & 3


def _of_row(i: int) -> int:
    return i >> 1 & 1


def _over_quad(op, x):
    """A row's value, of the four threads that have its columns."""
    return p.over_lanes(x, (1, 2), op)


def zeros(h: int):
    """Means, and (reference, sum) of each row, before the first tile."""

    @inline(out=(_type(h // 2), _type(4)))
    def call():
        return _bundle([p.cf(0.0)] * (h // 2)), _bundle([p.cf(-math.inf)] * 2 + [p.cf(0.0)] * 2)

    return call()


@dataclasses.dataclass(frozen=True)
class Tile:
    """h: features of a head. kind: "bf16" or "f16", the values' and the weights' type."""

    h: int
    kind: str

    @property
    def _codes(self):
        return plgpu.RefType(tiling(self.h, jnp.int8))

    @property
    def _floats(self):
        return plgpu.RefType(tiling(self.h, jnp.bfloat16))

    def _ask_scores(self, first: int, at: int) -> str:
        """Registers from ``first`` on become the scores of the descriptors ``at`` and after it."""
        code = ""
        for step in range(self.h // 32):
            code += (
                f"add.s64 left, ${at}, {2 * step}; add.s64 right, ${at + 1}, {2 * step};"
                f"wgmma.mma_async.sync.aligned.m64n{KEYS}k32.s32.s8.s8 {_names(first, _SCORES)},"
                f" left, right, {'yes' if step else 'no'};"
            )
        return code + "wgmma.commit_group.sync.aligned;"

    def _ask_values(self, first: int, at: int) -> str:
        """Registers from ``first`` on += weights, from ``at + 1`` on, times the descriptor's."""
        code = ""
        for step in range(KEYS // 16):
            code += (
                f"add.s64 right, ${at}, {2 * self.h * step};"
                f"wgmma.mma_async.sync.aligned.m64n{self.h}k16.f32.{self.kind}.{self.kind}"
                f" {_names(first, self.h // 2)}, {_names(at + 1 + 4 * step, 4)}, right,"
                " yes, 1, 1, 1;"
            )
        return code + "wgmma.commit_group.sync.aligned;"

    def _ask(self, codes, values):
        """codes: (q, k). values: (v, weights, means). One or both -> scores, means in flight."""
        results, constraints, tied, args, code = [], [], [], [], ""
        if codes:
            results += [p.i32()] * _SCORES
            constraints += ["=&r"] * _SCORES
        first = len(results)
        if values:
            args = values[2]
            results += [p.f32()] * len(args)
            constraints += ["=f"] * len(args)
            tied = [str(first + i) for i in range(len(args))]
        at = len(results) + len(args)
        if codes:
            code += self._ask_scores(0, at)
            args, tied = [*args, *codes], [*tied, "l", "l"]
            at += 2
        if values:
            code += self._ask_values(first, at)
            args, tied = [*args, values[0], *values[1]], [*tied, "l", *["r"] * len(values[1])]
        begin = (
            "{ .reg .b64 left, right; .reg .pred yes, no;"
            " setp.eq.u32 yes, 0, 0; setp.ne.u32 no, 0, 0; wgmma.fence.sync.aligned;"
        )
        got = _statement(begin + code + "}", results, args, constraints + tied)
        return got[:first], got[first:]

    def _code_descriptors(self, q, k):
        return [_descriptor(ref, 0, 8 * self.h, self.h) for ref in (q, k)]

    def _value_descriptor(self, v):
        return _descriptor(v, 1024, 16 * self.h, 128)

    def ask_scores(self):
        """(q, k) -> scores in flight."""

        @inline(self._codes, self._codes, out=_type(_SCORES, jnp.int32))
        def call(q, k):
            return _bundle(self._ask(self._code_descriptors(q, k), None)[0])

        return call

    def ask_values(self):
        """(v, weights, means) -> means in flight."""

        @inline(self._floats, _layout(_SCORES // 2), _layout(self.h // 2), out=_type(self.h // 2))
        def call(v, weights, means):
            values = self._value_descriptor(v), _registers(weights), _registers(means)
            return _bundle(self._ask(None, values)[1])

        return call

    def ask_both(self):
        """(q, k, v, weights, means) -> scores and means in flight, the scores ahead."""

        @inline(
            self._codes,
            self._codes,
            self._floats,
            _layout(_SCORES // 2),
            _layout(self.h // 2),
            out=(_type(_SCORES, jnp.int32), _type(self.h // 2)),
        )
        def call(q, k, v, weights, means):
            values = self._value_descriptor(v), _registers(weights), _registers(means)
            scores, means = self._ask(self._code_descriptors(q, k), values)
            return _bundle(scores), _bundle(means)

        return call

    def factors(self):
        """The factors of a thread's two rows, of 64 in shared memory."""

        @inline(REF, out=_type(2))
        def call(factor):
            warp, g, _ = _place()
            at = p.shared_address(factor) + (warp << 6) + (g << 2)
            return _bundle([p.load_float(at, 32 * row) for row in (0, 1)])

        return call

    def softmax(self, pending: int, ragged: bool = False):
        """(scores, key scales, state, factors, [keys]) -> (exponentials, state, what the means fade
        by), when no more than ``pending`` products are in flight.  ragged: of so many keys."""
        keys = [plgpu.Layout.WG_SPLAT((128,))] if ragged else []

        @inline(
            _layout(_SCORES),
            REF,
            _layout(4),
            _layout(2),
            *keys,
            out=(_type(_SCORES), _type(4), _type(2)),
        )
        def call(scores, scale, state, factor, *keys):
            p.ptx(f"wgmma.wait_group.sync.aligned {pending};")
            scores, factor = _landed(_registers(scores)), _registers(factor)
            before, total = _registers(state)[:2], _registers(state)[2:]
            _, _, c = _place()
            column = c << 1
            at = p.shared_address(scale) + (c << 3)
            x = []
            for i, score in enumerate(scores):
                if i % 4 == 0:
                    scales = p.load_shared(at, 2, 8 * i, "f32")
                x.append(p.to_float(score) * scales[i % 2])
                if keys:
                    seen = p.below(column + (2 * (i - i % 4) + i % 2), keys[0].registers.flat[0])
                    x[i] = p.where(seen, x[i], p.cf(-math.inf))
            best, fade = [], []
            for row in (0, 1):
                mine = [y for i, y in enumerate(x) if _of_row(i) == row]
                # Four chains: one would be as slow as an instruction's latency.
                peaks = [functools.reduce(p.maximum, mine[n::4]) for n in range(4)]
                peak = _over_quad(p.maximum, functools.reduce(p.maximum, peaks)) * factor[row]
                is_far = peak > before[row] + _SLACK
                best.append(p.where(is_far, peak, before[row]))
                fade.append(p.exp2(before[row] - best[row]))
            for i, y in enumerate(x):
                row = _of_row(i)
                x[i] = p.exp2(p.fma(y, factor[row], -best[row]))
            for row in (0, 1):
                mine = [y for i, y in enumerate(x) if _of_row(i) == row]
                halves = [functools.reduce(operator.add, mine[n::2]) for n in range(2)]
                total[row] = p.fma(total[row], fade[row], halves[0] + halves[1])
            return _bundle(_landed(x)), _bundle(best + total), _bundle(fade)

        return call

    def weights(self):
        """Exponentials -> the next product's operand, behind ``fade``: it waits for this one's."""

        @inline(_layout(_SCORES), out=_type(_SCORES // 2, jnp.int32))
        def call(x):
            x = _registers(x)
            pairs = zip(x[::2], x[1::2], strict=True)
            return _bundle([p.pack(low, high, self.kind) for low, high in pairs])

        return call

    def fade(self):
        """(means in flight, what they fade by) -> means."""

        @inline(_layout(self.h // 2), _layout(2), out=_type(self.h // 2))
        def call(means, fade):
            p.ptx("wgmma.wait_group.sync.aligned 0;")
            means, fade = _landed(_registers(means)), _registers(fade)
            unlike = [p.unequal(x, 1.0) for x in fade]

            def faded():
                return [x * fade[_of_row(i)] for i, x in enumerate(means)]

            return _bundle(p.choose(p.any_lane(unlike[0] | unlike[1]), faded, means))

        return call

    def finish(self):
        """(means in flight, state, where the logarithms go) -> the means over the sums."""
        out = plgpu.Layout.WGMMA

        @inline(
            _layout(self.h // 2),
            _layout(4),
            REF,
            out=plgpu.ShapeDtypeStruct((ROWS, self.h), jnp.float32, layout=out),
        )
        def call(means, state, log):
            p.ptx("wgmma.wait_group.sync.aligned 0;")
            means, state = _landed(_registers(means)), _registers(state)
            warp, g, c = _place()
            place = p.shared_address(log) + (warp << 6) + (g << 2)
            inverse = []
            for row, (best, part) in enumerate(zip(state[:2], state[2:], strict=True)):
                total = _over_quad(operator.add, part)
                inverse.append(p.reciprocal(total))
                value = (best + p.log2(total)) * math.log(2)
                store = functools.partial(p.store_shared, place, [p.bits(value)], 32 * row)
                p.when(p.equal(c, 0), store)
            means = [x * inverse[_of_row(i)] for i, x in enumerate(means)]
            shape = mgpu.FragmentedArray.splat(p.cf(0.0), (ROWS, self.h), out.to_mgpu())
            registers = np.empty((len(means) // 2,), dtype=object)
            kind, pairs = (
                ir.VectorType.get((2,), p.f32()),
                zip(means[::2], means[1::2], strict=True),
            )
            registers[:] = [vector.from_elements(kind, list(pair)) for pair in pairs]
            return mgpu.FragmentedArray(
                _registers=registers.reshape(shape.registers.shape),
                _layout=shape.layout,
                _is_signed=None,
            )

        return call
