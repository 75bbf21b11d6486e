"""PTX instructions of the attention and cache kernels, beside those in ``mosaic``.

Values are MLIR scalars (f32, i32, i64), as there; everything runs while a kernel is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf

from pallas_kernels.mosaic import Value, ci, f32, i32, i64, ptx


def load_shared(base: Value, n: int, at: int, kind: str = "b32") -> list[Value]:
    """n (1, 2, 4) words or floats."""
    result = f32() if kind == "f32" else i32()
    if n == 1:
        return [ptx(f"ld.shared.{kind} $0, [$1+{at}];", base, results=result)]
    outs = ",".join(f"${i}" for i in range(n))
    return list(ptx(f"ld.shared.v{n}.{kind} {{{outs}}}, [${n}+{at}];", base, results=[result] * n))


def load_words(base: Value, n: int, at: int = 0, kind: str = "b32", cache: str = "") -> list[Value]:
    """n (1, 2, 4) words or floats of device memory; cache ".nc" where no thread writes them."""
    result = f32() if kind == "f32" else i32()
    if n == 1:
        return [ptx(f"ld.global{cache}.{kind} $0, [$1+{at}];", base, results=result)]
    outs = ",".join(f"${i}" for i in range(n))
    code = f"ld.global{cache}.v{n}.{kind} {{{outs}}}, [${n}+{at}];"
    return list(ptx(code, base, results=[result] * n))


def store_words(base: Value, values: Sequence[Value], at: int = 0) -> None:
    """1, 2 or 4 words, or floats, to device memory."""
    kind = "f32" if values[0].type == f32() else "b32"
    if len(values) == 1:
        ptx(f"st.global.{kind} [$0+{at}], $1;", base, values[0])
        return
    names = ",".join(f"${i + 1}" for i in range(len(values)))
    ptx(f"st.global.v{len(values)}.{kind} [$0+{at}], {{{names}}};", base, *values)


def load_half(base: Value, at: int = 0) -> Value:
    """16 bits of device memory that no thread writes, in the low half of a word."""
    code = f"{{ .reg .b16 h; ld.global.nc.u16 h, [$1+{at}]; cvt.u32.u16 $0, h; }}"
    return ptx(code, base, results=i32())


def store_shared(base: Value, values: Sequence[Value], at: int = 0) -> None:
    """1, 2 or 4 floats."""
    if len(values) == 1:
        ptx(f"st.shared.f32 [$0+{at}], $1;", base, values[0])
        return
    names = ",".join(f"${i + 1}" for i in range(len(values)))
    ptx(f"st.shared.v{len(values)}.f32 [$0+{at}], {{{names}}};", base, *values)


def bits(x: Value) -> Value:
    """The word that an f32 is."""
    return arith.bitcast(i32(), x)


def from_bits(word: Value) -> Value:
    """The f32 that a word is."""
    return arith.bitcast(f32(), word)


def store_byte(base: Value, word: Value) -> None:
    ptx("{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b8 [$0], h; }", base, word)


def offset_rows(base: Value, index: Value, stride: int) -> Value:
    """``base + index * stride`` in one wide multiply-add; index is a non-negative i32."""
    return ptx(f"mad.wide.u32 $0, $1, {stride}, $2;", index, base, results=i64(), volatile=False)


def exp2(x: Value) -> Value:
    return ptx("ex2.approx.ftz.f32 $0, $1;", x, results=f32(), volatile=False)


def log2(x: Value) -> Value:
    return ptx("lg2.approx.ftz.f32 $0, $1;", x, results=f32(), volatile=False)


def divide(a: Value, b: Value) -> Value:
    return ptx("div.rn.f32 $0, $1, $2;", a, b, results=f32(), volatile=False)


def maximum(a: Value, b: Value) -> Value:
    return ptx("max.f32 $0, $1, $2;", a, b, results=f32(), volatile=False)


def minimum(a: Value, b: Value) -> Value:
    return ptx("min.f32 $0, $1, $2;", a, b, results=f32(), volatile=False)


def absolute(a: Value) -> Value:
    return ptx("abs.f32 $0, $1;", a, results=f32(), volatile=False)


def shuffle_xor(x: Value, lanes: int) -> Value:
    code = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 31, -1;"
    return ptx(code, x, results=x.type, convergent=True)


def transpose_8x8(word: Value) -> Value:
    """The warp's 8x8 matrix of 16-bit words, two per lane, transposed."""
    code = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return ptx(code, word, results=i32(), volatile=False, convergent=True)


def pack(low: Value, high: Value, kind: str) -> Value:
    """Two f32 rounded to a pair of 16-bit floats."""
    return ptx(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", low, high, results=i32(), volatile=False)


def mul_pairs(a: Value, b: Value, kind: str) -> Value:
    """Element-wise product of pairs of 16-bit floats."""
    op = {"bf16": "mul.rn.bf16x2", "f16": "mul.rn.f16x2"}[kind]
    return ptx(f"{op} $0, $1, $2;", a, b, results=i32(), volatile=False)


def select_bits(a: Value, mask: int, c: Value) -> Value:
    """``(a & mask) | c``."""
    code = "lop3.b32 $0, $1, $2, $3, 0xea;"
    return ptx(code, a, ci(mask), c, results=i32(), volatile=False)


def below(a: Value, b: Value) -> Value:
    """Signed ``a < b``."""
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def at_most(a: Value, b: Value) -> Value:
    """Signed ``a <= b``."""
    return arith.cmpi(arith.CmpIPredicate.sle, a, b)


def smaller(a: Value, b: Value) -> Value:
    return arith.minsi(a, b)


def larger(a: Value, b: Value) -> Value:
    return arith.maxsi(a, b)


def loop(
    start: Value, stop: Value, step: Value, carry: Sequence[Value], body: Callable
) -> list[Value]:
    """``for i in range(start, stop, step): carry = body(i, carry)``."""
    op = scf.ForOp(start, stop, step, list(carry))
    with ir.InsertionPoint(op.body):
        out = body(op.induction_variable, list(op.inner_iter_args))
        scf.yield_(list(out))
    return list(op.results)


def copy_bulk(to: Value, source: Value, size: int, barrier: Value) -> None:
    """``size`` contiguous bytes (a multiple of 16) to shared memory by the copy engine, counted by
    ``barrier``."""
    ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], "
        f"{size}, [$2];",
        to, source, barrier,
    )  # fmt: skip


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
        barrier, parity, convergent=True,
    )  # fmt: skip


def equal(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def no(condition: Value) -> Value:
    return arith.xori(condition, arith.cmpi(arith.CmpIPredicate.eq, ci(0), ci(0)))


def choose(condition: Value, body: Callable, otherwise: Sequence[Value]) -> list[Value]:
    """``body()`` if condition, else the values that are there."""
    op = scf.IfOp(condition, [x.type for x in otherwise], has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.yield_(list(body()))
    with ir.InsertionPoint(op.else_block):
        scf.yield_(list(otherwise))
    return list(op.results)


def cluster_arrive() -> None:
    """Says no more than that this thread is here."""
    ptx("barrier.cluster.arrive.relaxed.aligned;", convergent=True)


def cluster_wait() -> None:
    """Until every thread of the cluster has arrived."""
    ptx("barrier.cluster.wait.acquire.aligned;", convergent=True)


def peer_address(shared: Value, rank: Value) -> Value:
    """The cluster address of the same place in another block's shared memory."""
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", shared, rank, results=i32(), volatile=False)


def send_peer(to: Value, values: Sequence[Value], barrier: Value, at: int = 0) -> None:
    """2 or 4 floats to a ``peer_address``, counted by a barrier of the same block."""
    n = len(values)
    names = ",".join(f"${i + 2}" for i in range(n))
    ptx(
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes.v{n}.f32 "
        f"[$0+{at}], {{{names}}}, [$1];",
        to, barrier, *values,
    )  # fmt: skip


def warp_barrier() -> None:
    ptx("bar.warp.sync -1;", convergent=True)
