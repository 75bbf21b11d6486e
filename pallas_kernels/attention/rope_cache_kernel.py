"""RoPE and the cache write of one token per row on Hopper: one small kernel, the cache in place.

    warp: slot -> its head of q | k | v -> rotate (not v) -> round -> [int4: hadamard -> round]
          -> [extremes of a group, by shuffles] -> q out, or words and scales into the cache

One warp per (row, head) of the N + 2K heads of the fused projection, four warps a block; nothing is
shared.  A lane holds features (2 lane, 2 lane + 1) of each 64 of the first half of a head and their
partners in the second half, so every bit of a feature's number is a bit of the lane's number or of
a register's, and a butterfly of the Walsh-Hadamard transform is a shuffle or two additions.

NOTES.  Floor: a launch; 64 rows of 48 heads of 128 are 0.8 MB.  H200, that shape, one turn of a
jitted loop over the cache, kernel against XLA's fusions and scatters, microseconds: bfloat16 12.0
and 15.5, int8 8.8 and 16.9, int4 8.6 and 16.7 (both before int4 was rotated), float8 12.3 and
18.8.  Neither copies the cache.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic as p
from pallas_kernels import ptx as a
from pallas_kernels.attention.codes import hadamard_of_lanes
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rounding import WORDS

WARPS = 4
_KIND = {"bfloat16": "bf16", "float16": "f16"}


def _write(ctx, *refs, shape, words, groups, kind):
    del ctx
    batch, n, n_kv, h, capacity = shape
    quantized = words in WORDS
    qkv_ref, cos_ref, sin_ref, slots_ref, out_ref = refs[0], refs[1], refs[2], refs[3], refs[-1]
    arrays = 1 + quantized + (words == "int4")  # words, scales, zero points
    k_refs, v_refs = refs[4 : 4 + arrays], refs[4 + arrays : 4 + 2 * arrays]
    heads, half = n + 2 * n_kv, h // 2
    runs = max(1, half // 64)  # of 64 features, two to a lane

    warp, lane = p.shift_right(p.register("tid.x"), 5), arith.andi(p.register("tid.x"), p.ci(31))
    unit = p.minimum(p.add(p.mul(p.register("ctaid.x"), WARPS), warp), batch * heads - 1)
    row, head = arith.divui(unit, p.ci(heads)), arith.remui(unit, p.ci(heads))
    # With heads of 64 the upper lanes repeat the lower: same loads, same stores.
    pair = p.mul(lane if half >= 64 else arith.andi(lane, p.ci(half // 2 - 1)), 2)

    source = p.offset(p.offset(p.address(qkv_ref), unit, 2 * h), pair, 2)
    tables = [p.offset(p.offset(p.address(t), row, 4 * half), pair, 4) for t in (cos_ref, sin_ref)]
    (slot,) = a.load_words(p.offset(p.address(slots_ref), row, 4), 1, cache=".nc")
    raw = [
        a.load_words(source, 1, 2 * (part * half + 64 * r), cache=".nc")[0]
        for part in range(2)
        for r in range(runs)
    ]
    cos, sin = (
        [x for r in range(runs) for x in a.load_words(t, 2, 256 * r, "f32", ".nc")] for t in tables
    )
    x = [f(w, kind) for w in raw for f in (p.widen, p.widen_high)]
    first, second = x[: 2 * runs], x[2 * runs :]
    is_v = arith.cmpi(arith.CmpIPredicate.uge, head, p.ci(n + n_kv))

    def turned(x, c, y, s):
        return arith.addf(arith.mulf(x, c), arith.mulf(y, s))

    def rounded(values):
        """Words of 16-bit pairs."""
        return [a.pack(u, v, kind) for u, v in zip(values[::2], values[1::2], strict=True)]

    negative = [arith.negf(s) for s in sin]
    low = [turned(*t) for t in zip(first, cos, second, negative, strict=True)]
    high = [turned(*t) for t in zip(second, cos, first, sin, strict=True)]
    packed = [
        arith.select(is_v, w, t) for w, t in zip(raw, rounded(low) + rounded(high), strict=True)
    ]

    if words == "int4":
        values = [f(w, kind) for w in packed for f in (p.widen, p.widen_high)]
        packed = rounded(hadamard_of_lanes(values, lane, min(32, h // 4)))

    def feature(i):
        """First feature of word i, beside the lane's own offset."""
        return i // runs * half + 64 * (i % runs)

    def write_query():
        to = p.offset(p.offset(p.address(out_ref), p.add(p.mul(row, n), head), 2 * h), pair, 2)
        for i, word in enumerate(packed):
            a.store_words(to, [word], 2 * feature(i))

    p.when(p.less(head, n), write_query)

    def group_of(i):
        """Of word i: a group is at least 64 features, so a word's lanes lie in one; with heads of
        64 one group holds both halves."""
        return feature(i) * groups // h

    def line(ref, first_head, size):
        """Where this warp's token and kv head lie in a cache of ``size`` bytes per head."""
        base = p.offset(p.address(ref), row, capacity * n_kv * size)
        base = p.offset(base, slot, n_kv * size)
        return p.offset(base, p.add(head, -first_head), size)

    def write_cache(of, first_head):
        if not quantized:
            to = p.offset(line(of[0], first_head, 2 * h), pair, 2)
            for i, word in enumerate(packed):
                a.store_words(to, [word], 2 * feature(i))
            return
        values = [f(w, kind) for w in packed for f in (p.widen, p.widen_high)]
        if words == "int4":
            values = [a.minimum(a.maximum(v, p.cf(-65504.0)), p.cf(65504.0)) for v in values]
        numbers = [
            _numbers([v for i in range(len(packed)) if group_of(i) == s
                      for v in values[2 * i : 2 * i + 2]], words)
            for s in range(groups)
        ]  # fmt: skip
        for at, ref in enumerate(of[1:]):
            size = 2 if words == "int4" else 4
            base = line(ref, first_head, size * groups)

            def write(at=at, size=size, base=base):
                for s in range(groups):
                    x = numbers[s][at]
                    if size == 4:
                        a.store_words(base, [x], 4 * s)
                    else:
                        p.store_global_half(p.offset(base, p.ci(2 * s)), p.narrow(x, "f16"))

            p.when(p.less(lane, 1), write)
        bits = 4 if words == "int4" else 8
        base = line(of[0], first_head, h * bits // 8)
        base = p.offset(base, p.shift_right(p.mul(pair, bits), 3))
        for i in range(len(packed)):
            steps = values[2 * i : 2 * i + 2]
            *_, zero, inverse = numbers[group_of(i)]
            if words == "int4":
                steps = [arith.subf(v, zero) for v in steps]
            steps = [arith.mulf(v, inverse) for v in steps]
            at = feature(i) * bits // 8
            if words == "float8_e4m3fn":
                word = p.ptx(
                    "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }",
                    *steps, results=p.i32(), volatile=False,
                )  # fmt: skip
                p.store_global_half(p.offset(base, p.ci(at)), word)
                continue
            limit = (-128, 127) if words == "int8" else (-8, 7)
            ints = [
                p.ptx("cvt.rni.s32.f32 $0, $1;", v, results=p.i32(), volatile=False) for v in steps
            ]
            ints = [a.larger(a.smaller(v, p.ci(limit[1])), p.ci(limit[0])) for v in ints]
            mask = (1 << bits) - 1
            word = arith.ori(
                arith.andi(ints[0], p.ci(mask)),
                arith.shli(arith.andi(ints[1], p.ci(mask)), p.ci(bits)),
            )
            to = p.offset(base, p.ci(at))
            a.store_byte(to, word) if bits == 4 else p.store_global_half(to, word)

    there = p.less(slot, capacity)
    is_k = arith.andi(p.less(head, n + n_kv), arith.cmpi(arith.CmpIPredicate.uge, head, p.ci(n)))
    p.when(arith.andi(there, is_k), lambda: write_cache(k_refs, n))
    p.when(arith.andi(there, is_v), lambda: write_cache(v_refs, n + n_kv))


def _numbers(values, words):
    """(scale, zero point, inverse scale), float32, of a group of which this lane holds ``values``,
    as ``quantize_kv`` has them."""

    def over_lanes(f, x):
        for lanes in (1, 2, 4, 8, 16):
            x = f(x, a.shuffle_xor(x, lanes))
        return x

    if words == "int4":
        high = over_lanes(a.maximum, functools.reduce(a.maximum, values))
        low = over_lanes(a.minimum, functools.reduce(a.minimum, values))
        scale = _to_float16(arith.mulf(arith.subf(high, low), p.cf(1 / 15)))
        middle = arith.mulf(arith.addf(low, high), p.cf(0.5))
        zero = _to_float16(p.fma(scale, p.cf(0.5), middle))
    else:
        best = over_lanes(a.maximum, functools.reduce(a.maximum, [a.absolute(v) for v in values]))
        scale, zero = a.divide(best, p.cf(WORDS[words][1])), p.cf(0.0)
    some = arith.cmpf(arith.CmpFPredicate.OGT, scale, p.cf(0.0))
    inverse = a.divide(p.cf(1.0), arith.select(some, scale, p.cf(1.0)))
    return scale, zero, arith.select(some, inverse, p.cf(0.0))


def _to_float16(x):
    return p.widen(p.narrow(x, "f16"), "f16")


@jax.jit
def rope_and_write(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, k: jax.Array | QTensor,
    v: jax.Array | QTensor, slots: jax.Array,
) -> tuple[jax.Array, jax.Array | QTensor, jax.Array | QTensor]:  # fmt: skip
    """See ``pallas_kernels.attention.rope_cache``."""
    batch, heads, h = qkv.shape
    _, capacity, n_kv, _ = k.shape
    n = heads - 2 * n_kv
    groups = k.scale.shape[-1] if isinstance(k, QTensor) else 1
    body = functools.partial(
        _write, shape=(batch, n, n_kv, h, capacity), words=jnp.dtype(k.dtype).name,
        groups=groups, kind=_KIND[qkv.dtype.name],
    )  # fmt: skip

    def rope_and_cache_write(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(body)(*refs)

    kernel = plgpu.kernel(
        rope_and_cache_write,
        out_type=jax.ShapeDtypeStruct((batch, n, h), qkv.dtype),
        grid=(-(-batch * heads // WARPS),),
        grid_names=("heads",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    leaves, tree = jax.tree.flatten((k, v))
    in_place = [jax.new_ref(leaf) for leaf in leaves]
    q = kernel(qkv, cos, sin, slots, *in_place)
    k, v = jax.tree.unflatten(tree, [jax.freeze(ref) for ref in in_place])
    return q, k, v
