"""One GLA step on Hopper, the state updated in place.

    S <- exp(log_decay)[:, None] * S + k v^T        o = scale * q S

A stream over the state: every float is read once, updated in a register, written back to the same
place, and has by then been added to its column of o.  One block of four warps per (row and head,
128 value channels): a warp takes every fourth of Dk / 4 rows of S, 512 contiguous bytes at a time
(16 per lane), a batch of rows in flight; the four partial rows of o meet in shared memory.

    warps: first batch of S in flight | q, k, exp(g) -> smem | barrier
           | per row: a*S + k*v, o += q*S, store | next batch ... | partial o -> smem | barrier | o

NOTES
Floor: 8 bytes per state element at 4.3 TB/s, 62 us at 64 rows x 32 heads x 128 x 128; the vectors
are 1%.  Measured 67 us (4.0 TB/s) with 16 rows of a warp in flight; 8 and 32 make no difference.
The state arrives as a mutable reference, so the kernel's input and output are one buffer.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gla_ptx as p

COLUMNS = 128
BATCH = 16


def _step(ctx, q_ref, k_ref, g_ref, v_ref, state_ref, o_ref, table_ref, sums_ref, *, dk, dv, scale):
    del ctx
    i64 = ir.IntegerType.get_signless(64)

    def wide(x):
        return arith.extui(i64, x)

    def load_global(address, n, offset=0):
        outs = "{" + ",".join(f"${i}" for i in range(n)) + "}"
        return list(
            mgpu.utils.inline_ptx(
                f"ld.global.v{n}.f32 {outs}, [${n}+{offset}];",
                address,
                result_types=[p.f32()] * n,
                has_side_effects=True,
            )
        )

    def load_bf16(address):
        word = mgpu.utils.inline_ptx(
            "{ .reg .b16 h; ld.global.nc.b16 h, [$1]; mov.b32 $0, {h, h}; }",
            address,
            result_types=p.i32(),
            has_side_effects=True,
        )
        return p.unpack(word)[1]

    thread = p.thread_in_warpgroup()
    warp, lane = arith.shrui(thread, p.ci(5)), arith.andi(thread, p.ci(31))
    rows = dk // 4  # of this warp: contiguous
    first = arith.muli(warp, p.ci(rows))
    offset = p.add(arith.muli(first, p.ci(4 * dv)), arith.shli(lane, p.ci(4)))
    state = arith.addi(p.global_address(state_ref), wide(offset))
    batch = min(BATCH, rows)
    pending = [load_global(state, 4, 4 * dv * r) for r in range(batch)]

    table, sums = p.address(table_ref), p.address(sums_ref)
    for base in range(0, dk, 128):
        d = p.add(thread, base)

        def entry(d=d):
            two, four = wide(arith.shli(d, p.ci(1))), wide(arith.shli(d, p.ci(2)))
            q = load_bf16(arith.addi(p.global_address(q_ref), two))
            k = load_bf16(arith.addi(p.global_address(k_ref), two))
            g = mgpu.utils.inline_ptx(
                "ld.global.nc.f32 $0, [$1];",
                arith.addi(p.global_address(g_ref), four),
                result_types=p.f32(),
                has_side_effects=True,
            )
            a = p.exp2(p.mul(g, p.cf(p.LOG2E)))
            words = [a, k, p.mul(q, p.cf(scale)), p.cf(0.0)]
            p.store_words(p.add(table, arith.shli(d, p.ci(4))), words)

        if dk - base >= 128:
            entry()
        else:
            inside = arith.cmpi(arith.CmpIPredicate.ult, thread, p.ci(dk - base))
            with mgpu.when(inside):
                entry()
    v_at = arith.addi(p.global_address(v_ref), wide(arith.shli(lane, p.ci(3))))
    words = mgpu.utils.inline_ptx(
        "ld.global.nc.v2.b32 {$0,$1}, [$2];",
        v_at,
        result_types=[p.i32()] * 2,
        has_side_effects=True,
    )
    v = [x for word in words for x in p.unpack(word)]
    mgpu.utils.warpgroup_barrier()
    out = [p.cf(0.0)] * 4
    entries = p.add(table, arith.shli(first, p.ci(4)))
    fma = functools.partial(
        mgpu.utils.inline_ptx, "fma.rn.f32 $0, $1, $2, $3;", result_types=p.f32()
    )
    for start in range(0, rows, batch):
        current = pending
        pending = [
            load_global(state, 4, 4 * dv * r)
            for r in range(start + batch, min(start + 2 * batch, rows))
        ]
        for i, old in enumerate(current):
            a, k, q, _ = p.load_floats(entries, 4, offset=16 * (start + i))
            new = [fma(a, s, p.mul(k, x)) for s, x in zip(old, v, strict=True)]
            out = [fma(q, s, o) for s, o in zip(new, out, strict=True)]
            p.store_floats_global(state, new, 4 * dv * (start + i))
    p.store_words(p.add(sums, arith.shli(warp, p.ci(9)), arith.shli(lane, p.ci(4))), out)
    mgpu.utils.warpgroup_barrier()
    column = p.add(sums, arith.shli(thread, p.ci(2)))
    total = None
    for w in range(4):
        (x,) = p.load_floats(column, 1, offset=512 * w)
        total = x if total is None else arith.addf(total, x)
    mgpu.utils.inline_ptx(
        "{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }",
        arith.addi(p.global_address(o_ref), wide(arith.shli(thread, p.ci(1)))),
        total,
        has_side_effects=True,
    )


@functools.partial(jax.jit, static_argnames=("scale"))
def gla_step(q, k, v, log_decay, state, scale: float):
    """q, k, log_decay [B, H, Dk], v [B, H, Dv], float32 state [B, H, Dk, Dv] -> (o, state).

    bf16 q, k, v; Dk % 64 == 0, Dv % 128 == 0.  The state is aliased: donate it and no copy is made.
    """
    b, h, dk = q.shape
    dv = v.shape[-1]
    step = functools.partial(_step, dk=dk, dv=dv, scale=float(scale))
    ref = plgpu.RefType()

    def body(q_ref, k_ref, v_ref, g_ref, state_ref, o_ref, table, sums):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        columns = pl.ds(lax.axis_index("values") * COLUMNS, COLUMNS)
        plgpu.inline_mgpu(arg_types=(ref,) * 8)(step)(
            q_ref.at[row, head],
            k_ref.at[row, head],
            g_ref.at[row, head],
            v_ref.at[row, head, columns],
            state_ref.at[row, head, pl.ds(0, dk), columns],
            o_ref.at[row, head, columns],
            table,
            sums,
        )

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((b, h, dv), v.dtype),
        kernel_name="gla_step",
        grid=(dv // COLUMNS, h, b),
        grid_names=("values", "head", "row"),
        scratch_types=[
            plgpu.SMEM((dk, 4), jnp.float32),
            plgpu.SMEM((4, COLUMNS), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    in_place = jax.new_ref(state)
    o = kernel(q, k, v, log_decay, in_place)
    return o, jax.freeze(in_place)
