"""``x[R, K]`` times a prepared weight, in its own codes: the handler of ``quantized_matmul``.

    xq, xs = x in int8 by blocks of 32 columns (or 16)          phase 1, by rows
    y[r, n] = sum over groups g of scale[n, g] (sum over g's blocks of xs[r] (w - zero)[n] . xq[r])
                                                                phase 2, by runs of tiles

Products are of integers and exact.  Each block's sum becomes float32 and is added in the order of
K.  So the result depends neither on the threads nor on other rows.  The only rounding is that of
x, to 1/254 of the largest value in its block, as in llama.cpp's Q8 blocks.  An RMSNorm before the
product and a bias, SwiGLU and residual after it are in float32.  Phase 1 sums each group of x; a
zero point is multiplied by that sum.

Up to 8 rows of x share each unpacked vector of w.  More rows go through a run of w in turns, while
the run stays in the L2 cache.  One row reads w at the rate of memory.

float4_e2m1fn codes become twice their values plus 12 by a table in a register, and then go the same
way.  Scales of 8-bit floats stay a byte each.  A weight's ``unit`` multiplies its rows' sums.

float8_e4m3fn codes become float32 in registers.  Beside them x is not rounded, and the products are
added in float32, those of even and odd columns apart.

Leaves out: x in codes, and reordered columns together with a norm. Also a pending residual, a gate
with an activation other than SiLU, and a gate whose halves are not whole tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import jit
from pallas_kernels.cpu.handler import CpuPlan, Phase, Program
from pallas_kernels.cpu.weight import TILE, CpuWeight, WeightForm, block_size
from pallas_kernels.dispatch import Reason
from pallas_kernels.rounding import E4M3, E8M0, NIBBLES

if TYPE_CHECKING:
    from llvmlite import ir

    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.frame import CallFrame
    from pallas_kernels.cpu.target import Target
    from pallas_kernels.matmul.call import MatmulCall

RUN_BYTES = 1 << 16  # about the largest number of bytes of w in a chunk
RUNS = 16  # chunks at least, where there are so many tiles
ALONE_BYTES = 1 << 15  # bytes of w that are not worth another thread
# Distance of the prefetch in bytes.  With one row it takes int4 from 70 to 93% of the rate at which
# one thread reads memory, and int8 from 88 to 97%.  With 4 and 8 rows SmolLM2's products take 26%
# and 16% less time.  Distances of 2 to 8 KB are alike; 512 rows show no difference.
AHEAD = 4096
# AVX2 has only 16 registers.  So sums of many rows lie in the first-level cache, beside codes of w
# that are unpacked once for HELD_ROWS rows.  Four rows at a time share each load of the codes.
HELD_ROWS, AT_ONCE, LEAST_HELD = 64, 4, 4
_LARGEST = 3.4028234663852886e38  # finite float32
_SUMS = TILE * 4  # bytes of a row's
PREPARED_ROWS = 4  # of x in a chunk of the first phase, where there are many
# Twice the values of float4_e2m1fn's codes, plus an offset, since a dot product takes unsigned w.
FLOAT4_OFFSET = 12
FLOAT4_TABLE = [FLOAT4_OFFSET + sign * v for sign in (1, -1) for v in (0, 1, 2, 3, 4, 6, 8, 12)]


class MatmulPlan(CpuPlan):
    kernel = "quantized_matmul_cpu"


def plan(call: MatmulCall) -> CpuPlan | Reason:
    """The handler's plan, or why it has none."""
    w = call.w
    if not isinstance(w, CpuWeight):
        return Reason("w is not in the handler's layout, which pallas_kernels.cpu.prepare gives it")
    if reason := jit.unavailable():
        return reason
    if len(w.shape) != 2:
        return Reason(f"w {w.shape} is not [N, K]")
    if w.columns is not None:
        return Reason("columns in another order are not fused")
    if call.pending is not None:
        return Reason("what is pending is added before")
    if call.swiglu and call.activation != "silu":
        return Reason(f"the gate's {call.activation} is not fused")
    if call.swiglu and call.n % (2 * TILE):
        return Reason(f"the {call.n} rows of gate and up are not whole tiles of {TILE} each")
    target = jit.host()
    program = Matmul.of(
        w,
        shared_rows(call.m, w.form, target),
        norm=call.norm is not None,
        bias=call.bias,
        swiglu=call.swiglu,
        residual=call.residual is not None,
    )
    return MatmulPlan(program, target.name)


def shared_rows(m: int, form: WeightForm, target: Target) -> int:
    """How many of m rows of x share a vector of w that is unpacked."""
    if target.name == "avx2" and form.dtype == "int4" and m >= LEAST_HELD:
        return HELD_ROWS
    return rows_in_registers(m, form, target)


def rows_in_registers(m: int, form: WeightForm, target: Target) -> int:
    """The same where sums lie in registers."""
    most = max(target.rows, 4) if form.dtype == E4M3 else target.rows  # in halves of a tile
    return next(r for r in (1, 2, 4, 8) if r >= min(m, most))


def run(
    call: MatmulCall,
    plan: CpuPlan,
    x: jax.Array,
    w: CpuWeight,
    bias: jax.Array | None,
    gamma: jax.Array | None,
    residual: jax.Array | None,
) -> jax.Array:
    """x ``[R, K]`` -> ``[R, N]`` of the call's dtype."""
    program = plan.program
    fused = [v.astype(jnp.float32) for v in (gamma, bias, residual) if v is not None]
    operands = x.astype(jnp.float32), *program.parts_of(w), *fused
    fixed = {"eps": np.float32(call.eps)} if program.norm else {}
    results = program.results_of(w, call.m)
    y, _ = jax.ffi.ffi_call(jit.name_of(plan), results)(*operands, **fixed)
    return y.astype(call.out)


@dataclasses.dataclass(frozen=True)
class Matmul(Program):
    """codes, scale, zero: dtypes.  block: columns of x that share a scale.  group: of w; 0 for one
    scale a row.  minimum: the zero is beside code + 8.  rows: of x that share an unpacked vector of
    w.  unit: rows' sums have a factor, an operand behind zero.
    """

    codes: str
    block: int
    group: int
    scale: str
    zero: str | None
    minimum: bool
    rows: int
    norm: bool = False
    bias: bool = False
    swiglu: bool = False
    residual: bool = False
    unit: bool = False

    @classmethod
    def of(cls, w: CpuWeight, rows: int, **more: bool) -> Self:
        """The program of a weight ``[..., N, K]``.  more: further fields."""
        return cls(
            codes=w.form.dtype,
            block=block_size(w.shape[-1], w.groups),
            group=w.group_size if w.groups > 1 else 0,
            scale=w.scale.dtype.name,
            zero=None if w.zero is None else w.zero.dtype.name,
            minimum=w.form.minimum,
            rows=rows,
            unit=w.form.has_unit,
            **more,
        )

    @property
    def bits(self) -> int:
        return 4 if self.codes in NIBBLES else 8

    @property
    def is_float4(self) -> bool:
        return self.codes == "float4_e2m1fn"

    @property
    def is_float8(self) -> bool:
        return self.codes == E4M3

    @property
    def x_bytes(self) -> int:
        """Of a number of x in the scratch array."""
        return 4 if self.is_float8 else 1

    def parts_of(self, w: CpuWeight) -> list[jax.Array]:
        """The weight's arrays, as operands."""
        return [v for v in (w.q, w.scale, w.zero, w.unit if self.unit else None) if v is not None]

    def results_of(self, w: CpuWeight, rows: int) -> list[jax.ShapeDtypeStruct]:
        """The result of so many rows of x, and the scratch array."""
        n = w.form.n // 2 if self.swiglu else w.form.n
        numbers = 0 if self.is_float8 else 8 * (w.padded_k // self.block) + 4 * w.groups
        size = rows * (self.x_bytes * w.padded_k + numbers)
        return [
            jax.ShapeDtypeStruct((rows, n), jnp.float32),
            jax.ShapeDtypeStruct((size,), jnp.uint8),
        ]

    n_results = 2

    @property
    def fused(self) -> int:
        """The first operand that is neither x nor w."""
        return 3 + (self.zero is not None) + self.unit

    @property
    def x_factor(self) -> float:
        """The factor of x that undoes float4 codes' doubling and the scaling of 8-bit floats."""
        return (0.5 if self.is_float4 else 1.0) * 2.0 ** (8 * (self.codes, self.scale).count(E4M3))

    @property
    def arguments(self) -> int:
        return self.fused + self.norm + self.bias + self.residual

    def phases(self, target: Target) -> Sequence[Phase]:
        def rounded(e: Emitter, call: CallFrame, i: Value) -> None:
            Round(self, e, call).chunk(i)

        def multiplied(e: Emitter, call: CallFrame, i: Value) -> None:
            TilesOfRows(self, e, call).chunk(i)

        def row_runs(e: Emitter, call: CallFrame) -> Value:
            rows = call.argument_dim(0, 0)
            many = rows > 8
            return e.b.select(many, e.divide_up(rows, PREPARED_ROWS), e.i64(1))

        def tile_runs(e: Emitter, call: CallFrame) -> Value:
            body = TilesOfRows(self, e, call)
            return (body.tiles + body.run - 1) // body.run

        return [Phase(row_runs, rounded), Phase(tile_runs, multiplied)]


class Body:
    """The sizes (i64) and addresses that both phases read from the call."""

    def __init__(self, program: Matmul, e: Emitter, call: CallFrame) -> None:
        self.p, self.e, self.call = program, e, call
        self.x = call.argument(0)
        self.n_rows, self.k = (call.argument_dim(0, axis) for axis in (0, 1))
        self.tile_bytes = call.argument_dim(1, 1)
        self.padded_k = self.tile_bytes // (TILE * program.bits // 8)
        self.blocks = self.padded_k // program.block
        self.groups = call.argument_dim(2, 1)
        # The scratch array: codes, their scales, initial values of sums, sums of groups.  Beside
        # float8 it is x, of four columns the second and the third exchanged.
        self.codes = call.result(1)
        self.x_scales = e.at(self.codes, self.n_rows * self.padded_k)
        by_block = self.n_rows * self.blocks * 4
        self.presets = e.at(self.x_scales, by_block)
        self.group_sums = e.at(self.presets, by_block)

    @property
    def offset(self) -> int:
        """The amount by which the multiplied bytes of w exceed its codes."""
        if self.p.is_float4:
            return FLOAT4_OFFSET
        kept = 8 if self.p.bits == 4 and not self.p.minimum and self.p.zero != "int8" else 0
        return kept + self.e.code_offset(self.p.bits)

    @property
    def blocks_of_group(self) -> Value:
        return self.e.i64(self.p.group // self.p.block) if self.p.group else self.blocks


class Round(Body):
    """Rows of x to codes, scales, presets and sums."""

    def chunk(self, i: Value) -> None:
        e, b = self.e, self.e.b
        many = self.n_rows > 8
        first = i * PREPARED_ROWS
        end = e.least(first + PREPARED_ROWS, self.n_rows)
        e.loop(b.select(many, end, self.n_rows), self.row, start=first)

    def source(self, r: Value) -> Value:
        """The row of x that is row r of the codes."""
        return r

    def row(self, r: Value) -> None:
        e, b = self.e, self.e.b
        x = e.at(self.x, self.source(r) * self.k * 4)
        by_block = r * self.blocks * 4
        codes = e.at(self.codes, r * self.padded_k * self.p.x_bytes)
        x_scales, presets = (e.at(v, by_block) for v in (self.x_scales, self.presets))
        by_group = r * self.groups * 4
        group_sums = e.at(self.group_sums, by_group)
        factor = None
        if self.p.norm:
            factor = norm_factor(e, x, self.k, self.call.attribute(0, e.F32))
        gamma = self.call.argument(self.p.fused) if self.p.norm else None

        def group(g: Value) -> None:
            start = g * self.blocks_of_group

            def block(j: Value, total: Value) -> list[Value]:
                j = start + j
                at = j * self.p.block
                values = []
                for lane in range(0, self.p.block, TILE):
                    column = at + lane
                    value = self._load(x, column)
                    if factor is not None:
                        weight = self._load(gamma, column)
                        value = value * e.splat(factor) * weight
                    values.append(value)
                if self.p.is_float8:
                    self._store_floats(values, e.at(codes, at * 4))
                    return [total]
                scale, total_codes = self._store(values, e.at(codes, at))
                word = j * 4
                e.store(scale, x_scales, word)
                e.store(total_codes * -self.offset, presets, word)
                return [e.fma(scale, b.sitofp(total_codes, e.F32), total)]

            (total,) = e.loop(self.blocks_of_group, block, [e.f32(0.0)])
            if self.p.zero is not None:
                e.store(total, group_sums, g * 4)

        e.loop(self.groups, group)

    def _load(self, pointer: Value, column: Value) -> Value:
        """16 columns.  Groups hold whole blocks; one group may end inside of one."""
        e, at = self.e, self.e.at(pointer, self.e.b.mul(column, self.e.i64(4)))
        if self.p.group:
            return e.load(at, e.vector(e.F32))
        return e.load_part(at, self.k - column)

    def _store_floats(self, values: list[Value], pointer: Value) -> None:
        e = self.e
        order = [four + i for four in range(0, TILE, 4) for i in (0, 2, 1, 3)]
        for i, value in enumerate(values):
            e.store(e.pick(value, value, order) * self.p.x_factor, pointer, 4 * TILE * i)

    def _store(self, values: list[Value], codes: Value) -> tuple[Value, Value]:
        """(the scale, the sum of the codes)."""
        e, b = self.e, self.e.b
        largest = e.max_magnitude(values)
        # So small that 127 / largest is infinite, or NaN: codes 0, and the scale as it is.
        normal = b.fcmp_ordered(">", largest, e.f32(1e-36))
        inverse = b.select(normal, b.fdiv(e.f32(127.0), largest), e.f32(0.0))
        # An infinity is code 127 or -127 of an infinite scale, and the numbers beside it are 0.
        is_finite = b.fcmp_ordered("<=", largest, e.f32(_LARGEST))
        inverse = b.select(is_finite, inverse, e.f32(127.0 / _LARGEST))
        high, low = e.floats(127.0), e.floats(-127.0)
        total = None
        for i, value in enumerate(values):
            value = value * e.splat(inverse)
            value = b.select(b.fcmp_ordered("<", value, high), value, high)
            value = b.select(b.fcmp_ordered(">", value, low), value, low)
            code = e.round_to_i32(value)
            e.store(b.trunc(code, e.vector(e.I8)), codes, TILE * i)
            total = code if total is None else total + code
        return largest * (self.p.x_factor / 127), e.sum(total)


def norm_factor(e: Emitter, x: Value, k: Value, eps: Value) -> Value:
    """1 / sqrt(mean of the squares of k floats + eps)."""
    b = e.b

    def squares(i: Value, *sums: Value) -> list[Value]:
        parts = [e.load(x, e.vector(e.F32), (i + TILE * j) * 4) for j in range(4)]
        return [e.fma(v, v, s) for v, s in zip(parts, sums, strict=True)]

    whole = k & (-4 * TILE)
    sums = e.loop(whole, squares, [e.floats(0.0)] * 4, step=4 * TILE)

    def rest(i: Value, total: Value) -> list[Value]:
        v = e.load_part(e.at(x, i * 4), k - i)
        return [e.fma(v, v, total)]

    (tail,) = e.loop(k, rest, [e.floats(0.0)], start=whole, step=TILE)
    total = sums[0] + sums[1] + (sums[2] + sums[3]) + tail
    mean = b.fdiv(e.sum(total), b.sitofp(k, e.F32))
    return b.fdiv(e.f32(1.0), e.sqrt(mean + eps))


class TilesOfRows(Body):
    """A run of tiles times all rows."""

    def __init__(self, program: Matmul, e: Emitter, call: CallFrame) -> None:
        super().__init__(program, e, call)
        b = e.b
        self.q = self.part(1)
        self.all_tiles = self.count_tiles()
        self.tiles = self.all_tiles // 2 if program.swiglu else self.all_tiles
        per_tile = self.tile_bytes * 2 if program.swiglu else self.tile_bytes
        run = e.least(RUN_BYTES // per_tile, self.tiles // RUNS)
        run = b.select(run > 1, run, e.i64(1))
        small = self.tiles * per_tile < ALONE_BYTES
        self.run = b.select(small, self.tiles, run)

    def part(self, argument: int) -> Value:
        """The address of a part of w."""
        return self.call.argument(argument)

    def count_tiles(self) -> Value:
        """The tiles that a row of x meets."""
        return self.call.argument_dim(1, 0)

    def chunk(self, i: Value) -> None:
        e, rows = self.e, self.p.rows
        first = i * self.run
        end = e.least(first + self.run, self.tiles)
        if rows == HELD_ROWS:
            self._held_chunk(first, end)
            return

        def some_rows(r: Value) -> None:
            # The last ones stand in for rows that there are not: they compute and store it again.
            last = self.n_rows - 1
            each = [e.least(r + j, last) for j in range(rows)]
            e.loop(end, lambda tile: self.tile(tile, each), start=first)

        e.loop(self.n_rows, some_rows, step=rows)

    def tile(self, tile: Value, rows: list[Value]) -> None:
        p = self.p
        sums, up = self.products(tile, rows), None
        if p.swiglu:
            up = self.products(tile + self.tiles, rows)
        self.store(tile, rows, sums, up)

    def store(
        self, tile: Value, rows: list[Value], sums: list[Value], up: list[Value] | None
    ) -> None:
        """Rows of a tile's results, of the products (the gate's and up's, if there are two)."""
        e, p = self.e, self.p
        sums = self._biased(sums, tile)
        if up is None:
            sums = [self.activated(total, None) for total in sums]
        else:
            up = self._biased(up, tile + self.tiles)
            sums = [self.activated(g, u) for g, u in zip(sums, up, strict=True)]
        column = tile * TILE
        n = self.call.result_dim(0, 1)
        count = n - column
        for r, total in zip(rows, sums, strict=True):
            at = (self.target(r) * n + column) * 4
            if p.residual:
                added = e.at(self.call.argument(p.arguments - 1), at)
                total = e.load_part(added, count) + total
            e.store_part(total, e.at(self.call.result(0), at), count)

    def activated(self, gate: Value, up: Value | None) -> Value:
        return gate if up is None else silu(self.e, gate) * up

    def target(self, r: Value) -> Value:
        """The row of the result that is row r of the codes."""
        return r

    def bias(self) -> tuple[Value, Value]:
        """Where the bias lies, and its size."""
        at = self.p.fused + self.p.norm
        return self.call.argument(at), self.call.argument_dim(at, 0)

    def _biased(self, sums: list[Value], tile: Value) -> list[Value]:
        if not self.p.bias:
            return sums
        e = self.e
        column = tile * TILE
        pointer, n = self.bias()
        pointer = e.at(pointer, column * 4)
        bias = e.load_part(pointer, n - column)
        return [total + bias for total in sums]

    def _held_chunk(self, first: Value, end: Value) -> None:
        """The same for many rows on AVX2: codes are unpacked to memory, and sums lie there too.
        Every number is computed as ``products`` does it, so it has the same bits."""
        e, p = self.e, self.p
        sums = [e.room(HELD_ROWS * _SUMS) for _ in range(1 + p.swiglu)]
        held = _Held(e.room(p.block * TILE), e.room(HELD_ROWS * _SUMS))

        def some_rows(start: Value) -> None:
            count = e.least(e.i64(HELD_ROWS), self.n_rows - start)

            def tile(tile: Value) -> None:
                self._held_products(tile, start, count, sums[0], held)
                if p.swiglu:
                    self._held_products(tile + self.tiles, start, count, sums[1], held)

                def row(j: Value) -> None:
                    found = [self._sums(s, j) for s in sums]
                    self.store(tile, [start + j], found[:1], found[1:] or None)

                e.loop(count, row)

            e.loop(end, tile, start=first)

        e.loop(self.n_rows, some_rows, step=HELD_ROWS)

    def _sums(self, pointer: Value, row: Value) -> Value:
        at = self.e.b.mul(row, self.e.i64(_SUMS))
        return self.e.load(pointer, self.e.vector(self.e.F32), at, align=64)

    def _held_products(
        self, tile: Value, start: Value, count: Value, totals: Value, held: _Held
    ) -> None:
        """16 outputs of ``count`` rows from ``start`` on, into ``totals[HELD_ROWS, 16]``."""
        e, p = self.e, self.p
        q = e.at(self.q, tile * self.tile_bytes)
        first_group = tile * self.groups
        blocks, last = self.blocks_of_group, count - 1

        def put(value: Value, pointer: Value, row: Value) -> None:
            e.store(value, pointer, row * _SUMS, align=64)

        def each(body: Callable[[list[Value]], None]) -> None:
            """Run the body for four rows at a time; the last row replaces rows that do not exist.

            All four are read before one is written.  So the last row is computed again, and its
            sum is not added twice.
            """
            e.loop(
                count, lambda j: body([e.least(j + i, last) for i in range(AT_ONCE)]), step=AT_ONCE
            )

        def group(g: Value) -> None:
            at = (first_group + g) * TILE
            scale = self._numbers(2, p.scale, at)
            zero = None if p.zero is None else self._numbers(3, p.zero, at)

            def add(rows: list[Value], sums: list[Value]) -> None:
                """A group's sums to the rows' totals."""
                made = []
                before = [self._sums(totals, j) for j in rows]
                for j, found, total in zip(rows, sums, before, strict=True):
                    place = self.group_sums, (start + j) * self.groups + g
                    made.append(self._scaled(found, total, scale, zero, *place))
                for j, total in zip(rows, made, strict=True):
                    put(total, totals, j)

            def only_block(rows: list[Value]) -> None:
                zeros = [e.floats(0.0)] * AT_ONCE
                add(rows, self._held_block(held.codes, g, start, rows, zeros))

            def block(i: Value) -> None:
                self._unpack(q, i, held.codes)

                def some(rows: list[Value]) -> None:
                    before = [self._sums(held.parts, j) for j in rows]
                    found = self._held_block(held.codes, i, start, rows, before)
                    for j, part in zip(rows, found, strict=True):
                        put(part, held.parts, j)

                each(some)

            if p.group == p.block:
                self._unpack(q, g, held.codes)
                each(only_block)
                return
            e.loop(count, lambda j: put(e.floats(0.0), held.parts, j))
            e.loop((g + 1) * blocks, block, start=g * blocks)
            each(lambda rows: add(rows, [self._sums(held.parts, j) for j in rows]))

        e.loop(count, lambda j: put(e.floats(0.0), totals, j))
        e.loop(self.groups, group)

    def _unpack(self, q: Value, block: Value, codes: Value) -> None:
        """A block's codes of 16 outputs, a byte each, 4 columns behind the other."""
        e, p = self.e, self.p
        size = p.block * TILE * p.bits // 8
        at = e.at(q, block * size)
        low = e.splat(e.i32(0x0F0F0F0F))
        for unit in range(0, size, 64):
            e.prefetch(at, unit + AHEAD)
            word = e.load(at, e.vector(e.I32), unit)
            e.store(word & low, codes, 2 * unit, align=64)
            high = word >> 4
            e.store(high & low, codes, 2 * unit + 64, align=64)

    def _held_block(
        self, codes: Value, block: Value, start: Value, rows: list[Value], before: list[Value]
    ) -> list[Value]:
        """``before`` + the sums of a block that is unpacked, of rows from ``start`` on."""
        e, b, p = self.e, self.e.b, self.p
        column = block * p.block
        rows = [start + j for j in rows]
        xs = [e.at(self.codes, r * self.padded_k + column) for r in rows]
        sums: list[list[Value]] = [[] for _ in rows]
        for four in range(p.block // 4):
            halves = [e.load(codes, e.vector(e.I8, 32), 64 * four + at, align=32) for at in (0, 32)]
            for i, x in enumerate(xs):
                word = e.splat(e.load(x, e.I32, 4 * four), TILE // 2)
                word = b.bitcast(word, e.vector(e.I8, 32))
                found = [e.products_of_pairs(half, word) for half in halves]
                if four > 0:
                    found = [s + f for s, f in zip(sums[i], found, strict=True)]
                sums[i] = found
        made = []
        for r, parts, total in zip(rows, sums, before, strict=True):
            index = r * self.blocks + block
            found = e.join(*(e.sums_of_pairs(part) for part in parts))
            if self.offset:
                found = found + e.splat(self._word(self.presets, index, e.I32))
            found = b.sitofp(found, e.vector(e.F32))
            made.append(e.fma(found, e.splat(self._word(self.x_scales, index)), total))
        return made

    def products(self, tile: Value, rows: list[Value]) -> list[Value]:
        """16 outputs of each row."""
        e, p = self.e, self.p
        q = e.at(self.q, tile * self.tile_bytes)
        first_group = tile * self.groups
        of_rows = []
        for r in rows:
            by_block = r * self.blocks * 4
            by_group = r * self.groups * 4
            of_rows.append(
                _Row(
                    e.at(self.codes, r * self.padded_k * p.x_bytes),
                    e.at(self.x_scales, by_block),
                    e.at(self.presets, by_block),
                    e.at(self.group_sums, by_group),
                )
            )

        def group(g: Value, *totals: Value) -> list[Value]:
            at = (first_group + g) * TILE
            scale = self._numbers(2, p.scale, at)
            sums = self._group_sums(q, g, of_rows)
            made = []
            zero = None if p.zero is None else self._numbers(3, p.zero, at)
            for row, found, total in zip(of_rows, sums, totals, strict=True):
                made.append(self._scaled(found, total, scale, zero, row.group_sums, g))
            return made

        sums = e.loop(self.groups, group, [e.floats(0.0)] * len(rows))
        if not p.unit:
            return sums
        first = tile * TILE
        left = self.call.argument_dim(p.fused - 1, 0) - first
        unit = e.load_part(e.at(self.part(p.fused - 1), first * 4), left)
        return [total * unit for total in sums]

    def _scaled(
        self,
        found: Value,
        total: Value,
        scale: Value,
        zero: Value | None,
        x_sums: Value,
        index: Value,
    ) -> Value:
        """A row's total with a group's sum ``found``.  x_sums, index: where the sum of x is."""
        e = self.e
        if zero is not None:
            x_sum = e.splat(self._word(x_sums, index))
            if self.p.zero == "int8":
                found = e.fma(e.b.fneg(zero), x_sum, found)
            else:
                total = e.fma(zero, x_sum, total)
        return e.fma(scale, found, total)

    def _group_sums(self, q: Value, g: Value, rows: list[_Row]) -> list[Value]:
        """Return each row's sum over group g of w's codes times x, with x's scales applied."""
        e, count = self.e, self.p.group // self.p.block
        if self.p.is_float8:
            # A row's sums are two vectors of 16, for more than two of which AVX2 and NEON have no
            # registers.
            if len(rows) <= 2 or e.target.rows == 8:
                return self._float8_sums(q, g, rows, 0, TILE)
            halves = [self._float8_sums(q, g, rows, first, 8) for first in (0, 8)]
            return [e.join(a, b) for a, b in zip(*halves, strict=True)]
        zeros = [e.floats(0.0)] * len(rows)
        if 0 < count <= 4:
            sums, first = zeros, g * count
            for j in range(count):
                sums = self._block(q, first + j, rows, sums)
            return sums
        first = g * self.blocks_of_group
        many = self.blocks_of_group
        return e.loop(many, lambda j, *s: self._block(q, first + j, rows, list(s)), zeros)

    def _float8_sums(
        self, q: Value, g: Value, rows: list[_Row], first: int, count: int
    ) -> list[Value]:
        """Each row's sums over group g for ``count`` of the tile's outputs, from ``first`` on.

        Two sums of an output lie side by side until the group ends.
        """
        e = self.e
        many = self.blocks // self.groups  # no constant, so that LLVM does not unroll the loop

        def block(j: Value, *sums: Value) -> list[Value]:
            made = list(sums)
            column = (g * many + j) * self.p.block
            at = e.at(q, column * TILE)
            for four in range(self.p.block // 4):
                e.prefetch(at, 64 * four + AHEAD)
                codes = e.load(at, e.vector(e.I8, 4 * count), 64 * four + 4 * first)
                pairs = e.float8_pairs(codes)
                for i, row in enumerate(rows):
                    x = e.at(row.codes, column * 4)
                    for k, pair in enumerate(pairs):
                        two = e.splat(e.load(x, e.I64, 16 * four + 8 * k), count)
                        two = e.b.bitcast(two, e.vector(e.F32, 2 * count))
                        made[i] = e.fma(pair, two, made[i])
            return made

        sums = e.loop(many, block, [e.splat(e.f32(0.0), 2 * count)] * len(rows))
        even, odd = range(0, 2 * count, 2), range(1, 2 * count, 2)
        return [e.pick(v, v, even) + e.pick(v, v, odd) for v in sums]

    def _block(self, q: Value, block: Value, rows: list[_Row], sums: list[Value]) -> list[Value]:
        e, b, p = self.e, self.e.b, self.p
        column = block * p.block
        at = e.at(q, column * (TILE * p.bits // 8))
        codes: list[Value] = []
        low = e.splat(e.i32(0x0F0F0F0F))
        for unit in range(0, p.block * TILE * p.bits // 8, 64):
            e.prefetch(at, unit + AHEAD)
            if p.bits == 8:
                codes.append(e.load(at, e.vector(e.I8, 64), unit))
                continue
            word = e.load(at, e.vector(e.I32), unit)
            high = word >> 4
            halves = [b.bitcast(v & low, e.vector(e.I8, 64)) for v in (word, high)]
            codes += [e.lookup(FLOAT4_TABLE, v) for v in halves] if p.is_float4 else halves
        largest = max(FLOAT4_TABLE) if p.is_float4 else 15
        made = []
        for row, total in zip(rows, sums, strict=True):
            fours = (e.load(e.at(row.codes, column), e.I32, 4 * i) for i in range(len(codes)))
            xs = (b.bitcast(e.splat(v), e.vector(e.I8, 64)) for v in fours)
            start = e.splat(self._word(row.presets, block, e.I32) if self.offset else e.i32(0))
            found = e.dots(start, list(zip(codes, xs, strict=True)), p.bits, largest=largest)
            found = b.sitofp(found, e.vector(e.F32))
            made.append(e.fma(found, e.splat(self._word(row.x_scales, block)), total))
        return made

    def _word(self, pointer: Value, index: Value, kind: ir.Type | None = None) -> Value:
        return self.e.load(pointer, kind or self.e.F32, self.e.b.mul(index, self.e.i64(4)))

    def _numbers(self, argument: int, dtype: str, index: Value) -> Value:
        """Scales or zeros as float32; of float8_e4m3fn 2^-8 times them."""
        e = self.e
        if dtype in (E4M3, E8M0):
            byte = e.load(self.part(argument), e.vector(e.I8, TILE), index)
            return e.widen_float8(byte, dtype)
        kind = {"float32": e.F32, "float16": e.F16, "bfloat16": e.I16, "int8": e.I8}
        size = np.dtype(jnp.dtype(dtype)).itemsize
        at = index * size
        return e.widen(e.load(self.part(argument), e.vector(kind[dtype], TILE), at))


@dataclasses.dataclass(frozen=True)
class _Held:
    """codes: of a tile's block, unpacked.  parts ``[HELD_ROWS, 16]``: of a group's sums."""

    codes: Value
    parts: Value


@dataclasses.dataclass(frozen=True)
class _Row:
    """Where one row of x is."""

    codes: Value
    x_scales: Value
    presets: Value
    group_sums: Value


def silu(e: Emitter, gate: Value, factor: float = 1.0) -> Value:
    """gate times the logistic function of ``factor * gate``."""
    power = e.exp(gate * -factor)
    return e.b.fdiv(gate, power + 1.0)
