"""Register-level building blocks of the GLA kernels: a few PTX instructions as Python functions.

Everything here runs while a kernel is traced, inside ``plgpu.inline_mgpu``, and works on MLIR
values: f32 scalars, and i32 words that hold a bf16 pair (low half first).  Leaves out anything that
Pallas itself can say: copies, barriers and the wgmma of the state pass stay in Pallas.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.mosaic import LOG2E as LOG2E

utils = mgpu.utils
Value = ir.Value


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def f32() -> ir.Type:
    return ir.F32Type.get()


def ci(value: int) -> Value:
    return utils.c(value, i32())


def cf(value: float) -> Value:
    return utils.c(float(value), f32())


def thread_in_warpgroup() -> Value:
    """0..127.  Read anew where it is used: addresses computed from it are then not carried, and
    spilled, through a whole persistent loop."""
    thread = utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=i32(), has_side_effects=True)
    return arith.andi(thread, ci(127))


def address(ref: Value) -> Value:
    """The 32-bit shared-memory address of a memref."""
    pointer = utils.memref_ptr(ref)
    wide = llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)
    return arith.trunci(i32(), wide)


def global_address(ref: Value) -> Value:
    """The 64-bit address of a memref in device memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def add(*terms: Value | int) -> Value:
    total = None
    constant = 0
    for term in terms:
        if isinstance(term, int):
            constant += term
        else:
            total = term if total is None else arith.addi(total, term)
    if total is None:
        return ci(constant)
    return arith.addi(total, ci(constant)) if constant else total


def load_words(addr: Value, n: int, offset: int = 0) -> list[Value]:
    """n (1, 2, 4) 32-bit words of shared memory, as i32."""
    suffix = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[n]
    outs = ",".join(f"${i}" for i in range(n))
    outs = outs if n == 1 else "{" + outs + "}"
    result = utils.inline_ptx(
        f"ld.shared.{suffix} {outs}, [${n}+{offset}];",
        addr,
        result_types=[i32()] * n,
        has_side_effects=True,
    )
    return list(result)


def load_floats(addr: Value, n: int, offset: int = 0) -> list[Value]:
    suffix = {1: "f32", 2: "v2.f32", 4: "v4.f32"}[n]
    outs = ",".join(f"${i}" for i in range(n))
    outs = outs if n == 1 else "{" + outs + "}"
    result = utils.inline_ptx(
        f"ld.shared.{suffix} {outs}, [${n}+{offset}];",
        addr,
        result_types=[f32()] * n,
        has_side_effects=True,
    )
    return list(result)


def store_words(addr: Value, words: Sequence[Value], offset: int = 0) -> None:
    """1, 2 or 4 words (i32 or f32) to shared memory."""
    n = len(words)
    kind = "f32" if words[0].type == f32() else "b32"
    suffix = {1: kind, 2: f"v2.{kind}", 4: f"v4.{kind}"}[n]
    ins = ",".join(f"${i + 1}" for i in range(n))
    ins = ins if n == 1 else "{" + ins + "}"
    utils.inline_ptx(
        f"st.shared.{suffix} [$0+{offset}], {ins};", addr, *words, has_side_effects=True
    )


def store_floats_global(addr: Value, values: Sequence[Value], offset: int = 0) -> None:
    n = len(values)
    suffix = {1: "f32", 2: "v2.f32", 4: "v4.f32"}[n]
    ins = ",".join(f"${i + 1}" for i in range(n))
    ins = ins if n == 1 else "{" + ins + "}"
    utils.inline_ptx(
        f"st.global.{suffix} [$0+{offset}], {ins};", addr, *values, has_side_effects=True
    )


def load_matrices(addr: Value, offset: int = 0) -> list[Value]:
    """ldmatrix.x4: four 8x8 bf16 tiles, one word of each per lane, from 32 row addresses."""
    return list(
        utils.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];",
            addr,
            result_types=[i32()] * 4,
            has_side_effects=True,
            convergent=True,
        )
    )


def load_matrices_transposed(addr: Value, offset: int = 0) -> list[Value]:
    """ldmatrix.x4.trans: as ``load_matrices``, every 8x8 tile transposed on the way."""
    return list(
        utils.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];",
            addr,
            result_types=[i32()] * 4,
            has_side_effects=True,
            convergent=True,
        )
    )


def store_matrices_transposed(addr: Value, words: Sequence[Value], offset: int = 0) -> None:
    """stmatrix.x4.trans: the inverse of ``load_matrices_transposed``."""
    utils.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0+{offset}], {{$1,$2,$3,$4}};",
        addr,
        *words,
        has_side_effects=True,
        convergent=True,
    )


def fma(a: Value, b: Value, c: Value) -> Value:
    return utils.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", a, b, c, result_types=f32())


def exp2(x: Value) -> Value:
    """2**x, one instruction; exp2(-inf) is 0."""
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", x, result_types=f32())


def pack(low: Value, high: Value) -> Value:
    """Two f32 rounded to a bf16 pair."""
    return utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, result_types=i32())


def unpack(word: Value) -> tuple[Value, Value]:
    low = arith.bitcast(f32(), arith.shli(word, ci(16)))
    high = arith.bitcast(f32(), arith.andi(word, ci(-65536)))
    return low, high


def mul_pairs(a: Value, b: Value) -> Value:
    """Element-wise product of two bf16 pairs."""
    return utils.inline_ptx("mul.rn.bf16x2 $0, $1, $2;", a, b, result_types=i32())


def mul(a: Value, b: Value) -> Value:
    return arith.mulf(a, b)


def select(condition: Value, a: Value, b: Value) -> Value:
    return arith.select(condition, a, b)


def shuffle_xor(x: Value, lanes: int) -> Value:
    """The value of the lane whose number differs by xor."""
    kind = x.type
    return utils.inline_ptx(
        f"shfl.sync.bfly.b32 $0, $1, {lanes}, 31, -1;",
        x,
        result_types=kind,
        has_side_effects=True,
        convergent=True,
    )


def mma(acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """acc[16, 8] += a[16, 16] b[16, 8] for one warp (mma.m16n8k16, bf16 into f32)."""
    return list(
        utils.inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            *a,
            *b,
            *acc,
            result_types=[f32()] * 4,
            convergent=True,
        )
    )


def bit(x: Value, k: int) -> Value:
    """Whether bit k of x is set."""
    mask = (1 << k) if k < 31 else -(1 << 31)
    return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(x, ci(mask)), ci(0))
