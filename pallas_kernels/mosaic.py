"""A few PTX instructions as Python functions, for code inside ``plgpu.inline_mgpu``.

Values are MLIR scalars: f32, and i32 words that hold two 16-bit floats or packed integers.
Everything here runs while a kernel is traced.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu, llvm, scf
from jax.experimental.mosaic import gpu as mgpu

Value = ir.Value
LOG2E = 1.4426950408889634


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    return ir.F32Type.get()


def ci(value: int) -> Value:
    """An i32 constant; bit patterns above 2**31 are wrapped."""
    return mgpu.utils.c(value - (1 << 32) if value >= 1 << 31 else value, i32())


def cf(value: float) -> Value:
    return mgpu.utils.c(float(value), f32())


def ptx(code: str, *args: Value, results=None, volatile: bool = True, convergent: bool = False):
    return mgpu.utils.inline_ptx(
        code, *args, result_types=results, has_side_effects=volatile, convergent=convergent
    )


def register(name: str) -> Value:
    """A special 32-bit register such as ``%tid.x``."""
    return ptx(f"mov.u32 $0, %{name};", results=i32(), volatile=False)


def address(ref: Value) -> Value:
    """The i64 address of a memref in device memory."""
    return llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(ref))


def shared_address(ref: Value) -> Value:
    """The i32 address of a memref in shared memory."""
    return arith.trunci(i32(), address(ref))


def add(*terms: Value | int) -> Value:
    """Sum of i32 values and Python integers."""
    total, constant = None, 0
    for term in terms:
        if isinstance(term, int):
            constant += term
        else:
            total = term if total is None else arith.addi(total, term)
    if total is None:
        return ci(constant)
    return arith.addi(total, ci(constant)) if constant else total


def mul(a: Value, b: int) -> Value:
    return a if b == 1 else arith.muli(a, ci(b))


def offset(base: Value, index: Value, stride: int = 1) -> Value:
    """``base + index * stride`` for an i64 base and a non-negative i32 index."""
    wide = arith.extui(i64(), index)
    if stride != 1:
        wide = arith.muli(wide, mgpu.utils.c(stride, i64()))
    return arith.addi(base, wide)


def minimum(a: Value, b: int) -> Value:
    return arith.minui(a, ci(b))


def less(a: Value, b: Value | int) -> Value:
    b = ci(b) if isinstance(b, int) else b
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def when(condition: Value, body) -> None:
    """``if condition: body()`` for a body without results."""
    op = scf.IfOp(condition)
    with ir.InsertionPoint(op.then_block):
        body()
        scf.yield_([])


def loop(count: int, carry: Sequence[Value], body) -> list[Value]:
    """``for i in range(count): carry = body(i, carry)``; i is an i32 value."""
    op = scf.ForOp(ci(0), ci(count), ci(1), list(carry))
    with ir.InsertionPoint(op.body):
        out = body(op.induction_variable, list(op.inner_iter_args))
        scf.yield_(list(out))
    return list(op.results)


def _vector(kind: str, n: int, first: int) -> tuple[str, str]:
    names = ",".join(f"${first + i}" for i in range(n))
    return (kind, names) if n == 1 else (f"v{n}.{kind}", "{" + names + "}")


def load_global(base: Value, n: int, at: int = 0) -> list[Value]:
    """n (1, 2, 4) words that no thread writes during the kernel."""
    kind, outs = _vector("b32", n, 0)
    code = f"ld.global.nc.{kind} {outs}, [${n}+{at}];"
    return list(ptx(code, base, results=[i32()] * n))


def store_global_half(base: Value, half: Value) -> None:
    """The low 16 bits of a word."""
    ptx("{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }", base, half)


def store_global(base: Value, value: Value) -> None:
    kind = "f32" if value.type == f32() else "b32"
    ptx(f"st.global.{kind} [$0], $1;", base, value)


def copy_async(
    to: Value, source: Value, at: int, from_at: int = 0, size: Value | None = None
) -> None:
    """16 bytes from device memory to shared memory, past L1, in the open group of copies.

    size: how many of the 16 are read; the rest is zeros.
    """
    code = f"cp.async.cg.shared.global [$0+{at}], [$1+{from_at}], 16"
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


def load_shared_words(base: Value, n: int, at: int = 0) -> list[Value]:
    kind, outs = _vector("b32", n, 0)
    code = f"ld.shared.{kind} {outs}, [${n}+{at}];"
    return list(ptx(code, base, results=[i32()] * n))


def store_shared_words(base: Value, words: Sequence[Value], at: int = 0) -> None:
    """1, 2 or 4 words."""
    kind, names = _vector("b32", len(words), 1)
    ptx(f"st.shared.{kind} [$0+{at}], {names};", base, *words)


def load_shared_narrow(base: Value, kind: str, at: int = 0) -> Value:
    """One u8, s8 or u16 of shared memory, widened to i32."""
    wide = "s32.s16" if kind == "s8" else "u32.u16"
    code = f"{{ .reg .b16 h; ld.shared.{kind} h, [$1+{at}]; cvt.{wide} $0, h; }}"
    return ptx(code, base, results=i32())


def load_shared(base: Value, at: int = 0) -> Value:
    return ptx(f"ld.shared.f32 $0, [$1+{at}];", base, results=f32())


def store_shared(base: Value, value: Value, at: int = 0) -> None:
    ptx(f"st.shared.f32 [$0+{at}], $1;", base, value)


def barrier() -> None:
    """All threads of the block."""
    gpu.barrier()


def warp_barrier() -> None:
    """All threads of the warp; shared memory written before is visible after."""
    ptx("bar.warp.sync -1;", convergent=True)


def and_xor(word: Value, mask: int, flip: int) -> Value:
    """``(word & mask) ^ flip`` as one LOP3 (left alone, the compiler makes it two)."""
    code = "lop3.b32 $0, $1, $2, $3, 0x6a;"
    return ptx(code, word, ci(mask), ci(flip), results=i32(), volatile=False)


def shift_right(word: Value, bits: int) -> Value:
    return arith.shrui(word, ci(bits)) if bits else word


def permute(a: Value, b: Value, selector: int) -> Value:
    """PRMT: four bytes picked from the eight of a (0..3) and b (4..7)."""
    return ptx(f"prmt.b32 $0, $1, $2, {selector};", a, b, results=i32(), volatile=False)


def sub_pairs(a: Value, b: Value, kind: str) -> Value:
    """Element-wise a - b of two bf16 or f16 pairs."""
    suffix = {"bf16": "rn.bf16x2", "f16": "rn.f16x2"}[kind]
    return ptx(f"sub.{suffix} $0, $1, $2;", a, b, results=i32(), volatile=False)


def fma(a: Value, b: Value, c: Value) -> Value:
    return ptx("fma.rn.f32 $0, $1, $2, $3;", a, b, c, results=f32(), volatile=False)


def rsqrt(value: Value) -> Value:
    return ptx("rsqrt.approx.f32 $0, $1;", value, results=f32(), volatile=False)


def widen(half: Value, kind: str) -> Value:
    """The f32 value of the 16-bit float in the low half of a word."""
    if kind == "bf16":
        return arith.bitcast(f32(), arith.shli(half, ci(16)))
    code = "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.f32.f16 $0, h; }"
    return ptx(code, half, results=f32(), volatile=False)


def widen_high(word: Value, kind: str) -> Value:
    """The f32 value of the 16-bit float in the high half of a word."""
    if kind == "bf16":
        return arith.bitcast(f32(), arith.andi(word, ci(0xFFFF0000)))
    return widen(shift_right(word, 16), kind)


def narrow(value: Value, kind: str) -> Value:
    """f32 rounded to a 16-bit float, in the low half of a word."""
    code = f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $1; cvt.u32.u16 $0, h; }}"
    return ptx(code, value, results=i32(), volatile=False)


def mma(
    acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value], kind: str = "bf16"
) -> list[Value]:
    """acc[16, 8] += a[16, 16] b[16, 8] of one warp, 16-bit floats into f32."""
    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return list(ptx(code, *a, *b, *acc, results=[f32()] * 4, volatile=False, convergent=True))


def mul_pairs(a: Value, b: Value) -> Value:
    """Element-wise product of two bf16 pairs."""
    return ptx("mul.rn.bf16x2 $0, $1, $2;", a, b, results=i32(), volatile=False)


def fma_pairs(a: Value, b: Value, c: Value) -> Value:
    """Element-wise a * b + c of bf16 pairs, rounded once."""
    return ptx("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, c, results=i32(), volatile=False)


def cluster_barrier() -> None:
    """All threads of all blocks of the cluster; shared memory written before is visible after."""
    ptx("barrier.cluster.arrive.release.aligned;", convergent=True)
    ptx("barrier.cluster.wait.acquire.aligned;", convergent=True)


def peer_address(shared: Value, rank: Value | int) -> Value:
    """The cluster address of the same place in another block's shared memory."""
    rank = ci(rank) if isinstance(rank, int) else rank
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", shared, rank, results=i32(), volatile=False)


def load_peer(base: Value, at: int = 0) -> Value:
    return ptx(f"ld.shared::cluster.f32 $0, [$1+{at}];", base, results=f32())
