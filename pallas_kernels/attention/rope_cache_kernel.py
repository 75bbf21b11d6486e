"""RoPE and the cache write of one token per row on Hopper: one small kernel, the cache in place.

    warp: slot -> its head of q | k | v -> rotate (not v) -> round -> [int4: hadamard -> round]
          -> [extremes of a group, by shuffles] -> q out, or words and scales into the cache

One warp per (row, head) of the N + 2K heads of the fused projection, four warps a block; nothing is
shared.  A lane holds features (2 lane, 2 lane + 1) of each 64 of the first half of a head and their
partners in the second half, so every bit of a feature's number is a bit of the lane's number or of
a register's, and a butterfly of the Walsh-Hadamard transform is a shuffle or two additions.

Floor: a launch; 64 rows of 48 heads of 128 are 0.8 MB.  Result, one H200, that shape, microseconds
(XLA): bfloat16 12.0 (15.5), int8 8.8 (16.9); NOTES.md.  Command: ``python -m
pallas_kernels.bench.attention``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels import ptx as p
from pallas_kernels.attention.blockwise import capacity_of
from pallas_kernels.attention.codes import hadamard_of_lanes
from pallas_kernels.attention.pages import Pages, Paging
from pallas_kernels.fused_parts import floats, packed
from pallas_kernels.launch import in_place, launch
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rounding import CODES

WARPS = 4
_KIND = {"bfloat16": "bf16", "float16": "f16"}


def _write(*refs, shape, paging, dtype, groups, kind):
    batch, n, n_kv, h, capacity = shape
    quantized = dtype in CODES
    (qkv_ref, cos_ref, sin_ref, slots_ref), rest, out_ref = refs[:4], list(refs[4:-1]), refs[-1]
    pages_ref = [rest.pop(0)] if paging else []
    arrays = 1 + quantized + (dtype == "int4")  # codes, scales, zero points
    k_refs, v_refs = rest[:arrays], rest[arrays:]
    heads, half = n + 2 * n_kv, h // 2
    runs = max(1, half // 64)  # of 64 features, two to a lane

    warp, lane = p.shift_right(p.register("tid.x"), 5), p.masked(p.register("tid.x"), 31)
    unit = p.minimum(p.add(p.mul(p.register("ctaid.x"), WARPS), warp), batch * heads - 1)
    row, head = arith.divui(unit, p.ci(heads)), arith.remui(unit, p.ci(heads))
    # With heads of 64 the upper lanes repeat the lower: same loads, same stores.
    pair = p.mul(lane if half >= 64 else p.masked(lane, half // 2 - 1), 2)

    source = p.offset(p.offset(p.address(qkv_ref), unit, 2 * h), pair, 2)
    tables = [p.offset(p.offset(p.address(t), row, 4 * half), pair, 4) for t in (cos_ref, sin_ref)]
    (slot,) = p.load_global(p.offset(p.address(slots_ref), row, 4), 1)
    pages = Pages(*pages_ref, row, paging) if paging else None
    entry = pages.entry(slot) if pages else None
    raw = [
        p.load_global(source, 1, 2 * (part * half + 64 * r))[0]
        for part in range(2)
        for r in range(runs)
    ]
    cos, sin = (
        [x for r in range(runs) for x in p.load_global(t, 2, 256 * r, "f32")] for t in tables
    )
    x = floats(raw, kind)
    first, second = x[: 2 * runs], x[2 * runs :]
    is_v = arith.cmpi(arith.CmpIPredicate.uge, head, p.ci(n + n_kv))

    def turned(x, c, y, s):
        return arith.addf(arith.mulf(x, c), arith.mulf(y, s))

    negative = [arith.negf(s) for s in sin]
    low = [turned(*t) for t in zip(first, cos, second, negative, strict=True)]
    high = [turned(*t) for t in zip(second, cos, first, sin, strict=True)]
    turned_words = packed(low, kind) + packed(high, kind)
    words = [arith.select(is_v, w, t) for w, t in zip(raw, turned_words, strict=True)]

    if dtype == "int4":
        values = hadamard_of_lanes(floats(words, kind), lane, min(32, h // 4))
        words = packed(values, kind)

    def feature(i):
        """First feature of word i, beside the lane's own offset."""
        return i // runs * half + 64 * (i % runs)

    def write_query():
        to = p.offset(p.offset(p.address(out_ref), p.add(p.mul(row, n), head), 2 * h), pair, 2)
        for i, word in enumerate(words):
            p.store_global(to, [word], 2 * feature(i))

    p.when(p.less(head, n), write_query)

    def group_of(i):
        """Of word i: a group is at least 64 features, so a word's lanes lie in one; with heads of
        64 one group holds both halves."""
        return feature(i) * groups // h

    def line(ref, first_head, size):
        """Where this warp's token and kv head lie in a cache of ``size`` bytes per head."""
        base, token = p.address(ref), slot
        if pages:
            token = p.add(slot, pages.shift(slot, entry))
        else:
            base = p.offset(base, row, capacity * n_kv * size)
        base = p.offset(base, token, n_kv * size)
        return p.offset(base, p.add(head, -first_head), size)

    def write_cache(of, first_head):
        if not quantized:
            to = p.offset(line(of[0], first_head, 2 * h), pair, 2)
            for i, word in enumerate(words):
                p.store_global(to, [word], 2 * feature(i))
            return
        values = floats(words, kind)
        if dtype == "int4":
            values = [p.minimum(p.maximum(v, p.cf(-65504.0)), p.cf(65504.0)) for v in values]
        numbers = [
            _numbers([v for i in range(len(words)) if group_of(i) == s
                      for v in values[2 * i : 2 * i + 2]], dtype)
            for s in range(groups)
        ]  # fmt: skip
        for at, ref in enumerate(of[1:]):
            size = 2 if dtype == "int4" else 4
            base = line(ref, first_head, size * groups)

            def write(at=at, size=size, base=base):
                for s in range(groups):
                    x = numbers[s][at]
                    if size == 4:
                        p.store_global(base, [x], 4 * s)
                    else:
                        p.store_global_half(p.offset(base, p.ci(2 * s)), p.narrow(x, "f16"))

            p.when(p.less(lane, 1), write)
        bits = 4 if dtype == "int4" else 8
        base = line(of[0], first_head, h * bits // 8)
        base = p.offset(base, p.shift_right(p.mul(pair, bits), 3))
        for i in range(len(words)):
            steps = values[2 * i : 2 * i + 2]
            *_, zero, inverse = numbers[group_of(i)]
            if dtype == "int4":
                steps = [arith.subf(v, zero) for v in steps]
            steps = [arith.mulf(v, inverse) for v in steps]
            at = feature(i) * bits // 8
            if dtype == "float8_e4m3fn":
                word = p.ptx(
                    "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }",
                    *steps, results=p.i32(), volatile=False,
                )  # fmt: skip
                p.store_global_half(p.offset(base, p.ci(at)), word)
                continue
            limit = (-128, 127) if dtype == "int8" else (-8, 7)
            ints = [
                p.ptx("cvt.rni.s32.f32 $0, $1;", v, results=p.i32(), volatile=False) for v in steps
            ]
            ints = [p.larger(p.smaller(v, p.ci(limit[1])), p.ci(limit[0])) for v in ints]
            mask = (1 << bits) - 1
            word = arith.ori(
                p.masked(ints[0], mask),
                p.shift_left(p.masked(ints[1], mask), bits),
            )
            to = p.offset(base, p.ci(at))
            p.store_byte(to, word) if bits == 4 else p.store_global_half(to, word)

    there = p.less(slot, capacity)
    if pages:
        there = arith.andi(there, pages.holds(entry))
    is_k = arith.andi(p.less(head, n + n_kv), arith.cmpi(arith.CmpIPredicate.uge, head, p.ci(n)))
    p.when(arith.andi(there, is_k), lambda: write_cache(k_refs, n))
    p.when(arith.andi(there, is_v), lambda: write_cache(v_refs, n + n_kv))


def _numbers(values, dtype):
    """(scale, zero point, inverse scale), float32, of a group of which this lane holds ``values``,
    as ``quantize_kv`` has them."""

    def over_lanes(f, x):
        for lanes in (1, 2, 4, 8, 16):
            x = f(x, p.shuffle_xor(x, lanes))
        return x

    if dtype == "int4":
        high = over_lanes(p.maximum, functools.reduce(p.maximum, values))
        low = over_lanes(p.minimum, functools.reduce(p.minimum, values))
        scale = _to_float16(arith.mulf(arith.subf(high, low), p.cf(1 / 15)))
        middle = arith.mulf(arith.addf(low, high), p.cf(0.5))
        zero = _to_float16(p.fma(scale, p.cf(0.5), middle))
    else:
        best = over_lanes(p.maximum, functools.reduce(p.maximum, [p.absolute(v) for v in values]))
        scale, zero = p.divide(best, p.cf(CODES[dtype][1])), p.cf(0.0)
    some = arith.cmpf(arith.CmpFPredicate.OGT, scale, p.cf(0.0))
    inverse = p.divide(p.cf(1.0), arith.select(some, scale, p.cf(1.0)))
    return scale, zero, arith.select(some, inverse, p.cf(0.0))


def _to_float16(x):
    return p.widen(p.narrow(x, "f16"), "f16")


@jax.jit
def rope_and_write(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, k: jax.Array | QTensor,
    v: jax.Array | QTensor, slots: jax.Array, table: jax.Array | None,
) -> tuple[jax.Array, jax.Array | QTensor, jax.Array | QTensor]:  # fmt: skip
    """See ``pallas_kernels.attention.rope_cache``."""
    batch, heads, h = qkv.shape
    capacity, n_kv = capacity_of(k, table), k.shape[2]
    n = heads - 2 * n_kv
    groups = k.scale.shape[-1] if isinstance(k, QTensor) else 1
    body = functools.partial(
        _write, shape=(batch, n, n_kv, h, capacity), paging=Paging.of(k, table),
        dtype=jnp.dtype(k.dtype).name, groups=groups, kind=_KIND[qkv.dtype.name],
    )  # fmt: skip

    def run(cache):
        return launch(
            body, (qkv, cos, sin, slots, table, *jax.tree.leaves(cache)),
            jax.ShapeDtypeStruct((batch, n, h), qkv.dtype), name="rope_and_cache_write",
            grid=-(-batch * heads // WARPS), registers=True,
        )  # fmt: skip

    q, cache = in_place(run, (k, v))
    return q, *cache
