"""The product of one row on Hopper, ``x[K] w[N, K]^T``, and what stands around it.

w is bfloat16, int8 with one scale a row, or int4 in groups of 128, in the plain layout; x is
bfloat16.  A warp reads 512 bytes of one row of w that lie side by side with every instruction, into
registers, and multiplies them there: one row needs no tile in shared memory.

Who does what.  A block of 16 warps per SM.  A warp has one or two rows of w at a time (with SwiGLU
a row of gate and its row of up), neighbouring warps neighbouring rows, so that all SMs read from
one place of w.

    all      x and the norm's weight, then the first words of w -> registers  (``ask_x``, ``words``)
    all      x times that weight -> shared memory; sum of x's squares; barrier           (``x``)
    warp     per group of 4 loads: the next group -> registers, multiply this one     (``group``)
    warp     sum over lanes; lane 0: what is fused, one rounding, store              (``finish``)

Numerics.  Float32, in an order that depends on K alone; the norm's factor and an int8 row's scale
meet the sum.  x times the norm's weight stays float32; beside int4 it is rounded once to bfloat16,
and a group's exact sum is scaled.

Floor: w's bytes at 4.3 TB/s.  On an H200, us [floor]: 28672 x 4096 with norm and SwiGLU bfloat16
54.2 [54.6], int8 29.0 [27.3], int4 16.3 [14.5].  The other shapes and what was tried:
``matmul/NOTES.md``; ``python -m pallas_kernels.bench.matmul quantized_matmul --tokens 1``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic as p
from pallas_kernels import ptx as a
from pallas_kernels.fused_parts import floats, rounded_sum, silu
from pallas_kernels.matmul.few_rows.plan import WARPS, RowPlan
from pallas_kernels.matmul.few_rows.row_products import Floats, Nibbles
from pallas_kernels.matmul.few_rows.scheme import KIND, Scheme
from pallas_kernels.qtensor import QTensor

_STREAMED = ".nc.L1::no_allocate"


class Kernel:
    """One block's program.  Everything it does is emitted while the kernel is traced.

    given: device memory of x, w, scale, bias, gamma, residual, pending, the result and x with what
    was pending; None for what there is not.  shared: x and what the warps have summed of its
    squares.
    """

    def __init__(self, plan: RowPlan, scheme: Scheme, given: dict, shared, *, swiglu, kinds, eps):
        self.plan, self.scheme = plan, scheme
        self.swiglu, self.kinds, self.eps = swiglu, kinds, eps
        self.at = {name: None if r is None else p.address(r) for name, r in given.items()}
        self.xs, self.squares = (p.shared_address(r) for r in shared)
        self.thread = p.register("tid.x")
        self.warp = p.shift_right(self.thread, 5)
        self.lane = arith.andi(self.thread, p.ci(31))
        # Neighbouring warps of a block have neighbouring rows.
        self.first = p.add(p.mul(p.register("ctaid.x"), WARPS), self.warp)
        self.stride = plan.blocks * WARPS
        self.row_bytes = 16 * 32 * plan.chunks
        # Rows of w of a unit: side by side, or one of gate and one of up.
        self.apart = plan.units if swiglu else 1
        self.w_mine = p.offset(self.at["w"], self.lane, 16)
        self.in_groups = plan.bits == 4
        self.product = (Nibbles if self.in_groups else Floats)(self)

    def rows_of(self, unit):
        """The unit's rows of w."""
        row = unit if self.swiglu else p.mul(unit, self.plan.rows)
        return [row, p.add(row, self.apart)][: self.plan.rows]

    def words(self, unit, group):
        """What a lane needs of these chunks of the unit's rows: 4 words of each, and with groups of
        columns the scale of its own."""
        out = []
        rows = self.rows_of(unit)
        places = [p.offset(self.w_mine, row, self.row_bytes) for row in rows]
        scales = [self.product.scales_of(row) for row in rows] if self.in_groups else []
        for chunk in group:
            for place in places:
                out += a.load_words(place, 4, 512 * chunk, cache=_STREAMED)
            out += [self.product.scale(at, chunk) for at in scales]
        return out

    # --- x ---

    def ask_x(self, early: bool):
        """8 values a thread of x and of the norm's weight, those that are asked for before the
        first words of w, or the others: [(piece, is it one, x, gamma, pending)]."""
        pieces = self.plan.k // 8
        threads = 32 * WARPS
        rounds = range(0, pieces, threads)
        at_once = 4 if self.at["gamma"] is None else 2
        asked = []
        for first in rounds[:at_once] if early else rounds[at_once:]:
            piece = p.add(self.thread, first)
            inside = None
            if first + threads > pieces:
                inside, piece = p.less(piece, pieces), p.minimum(piece, pieces - 1)
            words = a.load_words(p.offset(self.at["x"], piece, 16), 4)
            gamma = None if self.at["gamma"] is None else self.gamma(piece)
            pending = None if self.at["pending"] is None else self.pending(piece)
            asked.append((piece, inside, words, gamma, pending))
        return asked

    def x(self, asked) -> None:
        """x times the norm's weight to shared memory, and the warps' sums of x's squares."""
        total = p.cf(0.0)
        for piece, inside, words, gamma, pending in [*asked, *self.ask_x(early=False)]:
            if pending is not None:
                words = self.store_total(piece, words, pending)
            values = floats(words)
            if gamma is not None:
                squares = total
                for v in values:
                    squares = p.fma(v, v, squares)
                total = squares if inside is None else arith.select(inside, squares, total)
                values = [arith.mulf(v, g) for v, g in zip(values, gamma, strict=True)]
            store = functools.partial(self.product.store_x, piece, values)
            if inside is None:
                store()
            else:
                p.when(inside, store)
        if self.at["gamma"] is not None:
            for distance in (16, 8, 4, 2, 1):
                total = arith.addf(total, a.shuffle_xor(total, distance))
            at = p.add(self.squares, p.mul(self.warp, 4))
            p.when(p.less(self.lane, 1), lambda: p.store_shared(at, total))

    def pending(self, piece):
        """8 floats of what is to be added to x."""
        at = p.offset(self.at["pending"], piece, 32)
        return a.load_words(at, 4, kind="f32") + a.load_words(at, 4, 16, kind="f32")

    def store_total(self, piece, words, pending):
        """8 values of x with what was pending, rounded: words, which the first block stores."""
        words = rounded_sum(words, pending)
        at = p.offset(self.at["total"], piece, 16)
        p.when(p.less(p.register("ctaid.x"), 1), lambda: a.store_words(at, words))
        return words

    def gamma(self, piece):
        if self.kinds["gamma"] == "f32":
            at = p.offset(self.at["gamma"], piece, 32)
            return a.load_words(at, 4, kind="f32") + a.load_words(at, 4, 16, kind="f32")
        return floats(a.load_words(p.offset(self.at["gamma"], piece, 16), 4))

    def norm_factor(self):
        total = p.load_shared(self.squares)
        for w in range(1, WARPS):
            total = arith.addf(total, p.load_shared(self.squares, 4 * w))
        return p.rsqrt(p.fma(total, p.cf(1.0 / self.plan.k), p.cf(self.eps)))

    # --- what is fused ---

    def fused(self, unit):
        """What ``finish`` needs of device memory, asked for before the product."""
        names = [name for name in ("scale", "bias", "residual") if self.at[name] is not None]
        if self.in_groups:
            names.remove("scale")
        rows = self.rows_of(unit)
        return {name: [self.number(name, row) for row in rows] for name in names}

    def number(self, name, index):
        kind = self.kinds[name]
        if kind == "f32":
            return a.load_words(p.offset(self.at[name], index, 4), 1, kind="f32")[0]
        return p.widen(a.load_half(p.offset(self.at[name], index, 2)), kind)

    def finish(self, unit, sums, asked) -> None:
        totals = self.product.totals(sums)
        for distance in (16, 8, 4, 2, 1):
            totals = [arith.addf(t, a.shuffle_xor(t, distance)) for t in totals]

        def store():
            values = totals
            if self.at["gamma"] is not None:
                values = [arith.mulf(v, self.factor) for v in values]
            if "scale" in asked:
                values = [arith.mulf(v, s) for v, s in zip(values, asked["scale"], strict=True)]
            if "bias" in asked:
                values = [arith.addf(v, b) for v, b in zip(values, asked["bias"], strict=True)]
            if self.swiglu:
                gate, up = values
                values = [arith.mulf(silu(gate), up)]
            if "residual" in asked:
                values = [arith.addf(v, r) for v, r in zip(values, asked["residual"], strict=True)]
            kind = self.kinds["out"]
            first = p.mul(unit, len(values))
            for i, value in enumerate(values):
                at = p.offset(self.at["out"], p.add(first, i), 4 if kind == "f32" else 2)
                if kind == "f32":
                    a.store_words(at, [value])
                else:
                    p.store_global_half(at, p.narrow(value, kind))

        p.when(p.less(self.lane, 1), store)

    def run(self) -> None:
        plan, groups = self.plan, self.plan.groups
        asked = self.ask_x(early=True)
        ready = self.words(p.minimum(self.first, plan.units - 1), groups[0])
        self.x(asked)
        p.barrier()
        self.factor = None if self.at["gamma"] is None else self.norm_factor()

        def product(unit, ready, later=None):
            """later: the warp's next unit."""
            asked = self.fused(unit)
            sums = self.product.nothing()
            for i, group in enumerate(groups):
                now = ready
                if i + 1 < len(groups):
                    ready = self.words(unit, groups[i + 1])
                elif later is not None:
                    ready = self.words(later, groups[0])
                sums = self.product.group(group, now, sums)
            self.finish(unit, sums, asked)
            return ready

        def step(i, ready):
            unit = p.add(p.mul(i, self.stride), self.first)
            later = p.add(unit, self.stride)
            # A warp without another unit reads its first one again, and stores nothing of it.
            later = arith.select(p.less(later, plan.units), later, self.first)
            return product(unit, ready, later)

        if plan.rounds > 1:
            ready = a.loop(p.ci(0), p.ci(plan.rounds - 1), p.ci(1), ready, step)
        last = p.add(self.first, self.stride * (plan.rounds - 1))
        p.when(p.less(last, plan.units), lambda: product(last, ready))


@functools.partial(jax.jit, static_argnames=("out_dtype", "eps", "swiglu", "plan"))
def matmul(
    x: jax.Array,
    w: jax.Array | QTensor,
    *,
    bias: jax.Array | None = None,
    out_dtype,
    gamma: jax.Array | None = None,
    eps: float | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    pending: jax.Array | None = None,
    plan: RowPlan,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """x [1, K] bf16, w [N, K] -> [1, N]; ``plan`` says what else is asked of them.
    gamma [K], eps: of a norm of x; residual: of the result's shape and dtype.  pending [1, K] f32:
    to be added to x before the norm; the result is then a pair, with the sum."""
    scheme = Scheme.of(w, "bf16")
    q, scale = (w.q, w.scale) if isinstance(w, QTensor) else (w, None)
    bias = None if bias is None else bias.astype(jnp.float32)
    given = {"x": x, "w": q, "scale": scale, "bias": bias, "gamma": gamma, "residual": residual}
    given["pending"] = pending
    kinds = {name: KIND[v.dtype.name] for name, v in given.items() if v is not None and name != "w"}
    kinds["out"] = KIND[jnp.dtype(out_dtype).name]
    present = [name for name, v in given.items() if v is not None]
    outs = {"out": jax.ShapeDtypeStruct((1, w.shape[0] // (2 if swiglu else 1)), out_dtype)}
    if pending is not None:
        outs["total"] = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def emit(ctx, *refs):
        del ctx
        memory = dict.fromkeys(given) | dict(zip([*present, *outs], refs, strict=False))
        shared = refs[len(present) + len(outs) :]
        Kernel(plan, scheme, memory, shared, swiglu=swiglu, kinds=kinds, eps=eps).run()

    def quantized_matmul_row(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(emit)(*refs)

    kernel = plgpu.kernel(
        quantized_matmul_row,
        out_type=outs["out"] if pending is None else tuple(outs.values()),
        grid=(plan.blocks,),
        grid_names=("rows",),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((size // 4,), jnp.float32) for size in plan.scratch_sizes(normed=True)
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return kernel(*[given[name] for name in present])
