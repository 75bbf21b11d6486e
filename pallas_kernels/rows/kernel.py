"""Norm, gate and per-token quantize on Hopper: one kernel that reads every row once.

    norm   t = s * weight,  s = x (+ residual),  f = rsqrt(mean(s^2) + eps)     y = t * f
    gate   t = gate / (1 + exp(-gate)) * up                                     y = t
    copy   t = x                                                                y = t

    int8, fp8:  scale = max|y| / qmax,  codes = round(t * (f / scale))

max|y| is f * max|t|, so one pass over a row in registers gives both the sum of squares and the
largest value, and one barrier joins them.  Three ways to run it (``RowsPlan``):

    a block a row       load | t, sums | barrier | factor | codes          hardware schedules rows
    persistent, ring    bulk copies of the next rows in flight meanwhile: the barrier that joins
                        the sums of a row also says that its slot is free
    a cluster a row     few wide rows: each block has a part of the columns, and every thread reads
                        the sums of all warps of all blocks after one cluster barrier

Floor: bytes counted once, at 4.2 TB/s; one row a launch and one round trip to memory, about 1.1 us.
Result, one H200: 8192 x 4096 bfloat16 to int8 24.6 us (floor 24.0), with the residual 57.7 (55.9),
the gate at 8192 x 2 x 14336 139 (140); the table, and what was tried, is in NOTES.md.  Command:
``python -m benchmarks.kernels.rows``.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith, ir, scf
from pallas_kernels.launch import launch
from pallas_kernels.rows.inner import Inner, padded_ranks
from pallas_kernels.rows.one_row import RowShare
from pallas_kernels.rows.plan import KIND, QMAX, RowsPlan


def _one_row(*refs, plan: RowsPlan) -> None:
    row = p.register("clusterid.x" if plan.split > 1 else "ctaid.x")
    rows = RowShare(refs, plan)
    p.await_kernel()
    # x goes first: it comes from device memory, the weight mostly from L2.
    words = rows.load(row)
    inner = None if plan.op.adapters is None else Inner(rows, row)
    rows.row(row, words, rows.load_weight(), p.ci(0), inner=inner)
    if plan.split > 1:
        p.cluster_wait()


def _ring_rows(*refs, plan: RowsPlan, n_rows: int) -> None:
    op = plan.op
    rows = RowShare(refs, plan)
    block, is_first = p.register("ctaid.x"), p.less(rows.thread, 1)
    full = p.add(rows.partial, 16 * (plan.threads // 32))  # one barrier per slot
    sources = [rows.x_start] + [rows.residual_start] * op.residual
    slot_bytes = op.row_bytes * len(sources)

    def copy(row: p.Value, slot: p.Value, barrier: p.Value) -> None:
        def body():
            p.barrier_expect(barrier, slot_bytes)
            for i, source in enumerate(sources):
                row_at = p.offset(source, row, op.row_bytes)
                p.copy_bulk(slot, row_at, op.row_bytes, barrier, i * op.row_bytes)

        p.when(arith.andi(is_first, p.less(row, n_rows)), body)

    def start():
        for i in range(plan.ring):
            p.ptx(f"mbarrier.init.shared.b64 [$0+{8 * i}], 1;", full)
        p.barriers_ready()
        p.ptx("fence.proxy.async.shared::cta;")

    p.when(is_first, start)
    p.await_kernel()
    for i in range(plan.ring):
        slot = p.add(rows.ring, i * slot_bytes)
        copy(p.add(block, i * plan.blocks), slot, p.add(full, 8 * i))
    weight = rows.load_weight()
    p.barrier()
    mine = arith.subi(p.ci(n_rows - 1 + plan.blocks), block)
    count = arith.divui(mine, p.ci(plan.blocks))
    loop = scf.ForOp(p.ci(0), count, p.ci(1), [block, p.ci(0), p.ci(0), p.ci(0)])
    with ir.InsertionPoint(loop.body):
        row, turn, index, phase = loop.inner_iter_args
        barrier = p.add(full, p.mul(index, 8))
        slot = p.add(rows.ring, p.mul(index, slot_bytes))
        p.ptx(
            "{ .reg .pred q; again: mbarrier.try_wait.parity.shared.b64 q, [$0], $1; "
            "@q bra done; bra again; done: }",
            barrier,
            phase,
        )
        after = p.add(row, plan.ring * plan.blocks)
        rows.row(row, rows.load_shared(slot), weight, turn, lambda: copy(after, slot, barrier))
        moved = p.add(index, 1)
        wrap = p.equal(moved, plan.ring)
        scf.yield_(
            [
                p.add(row, plan.blocks),
                arith.xori(turn, p.ci(1)),
                arith.select(wrap, p.ci(0), moved),
                arith.xori(phase, arith.extui(p.i32(), wrap)),
            ]
        )


@functools.partial(jax.jit, static_argnames="plan")
def run(
    plan: RowsPlan,
    x: jax.Array,
    residual: jax.Array | None = None,
    weight: jax.Array | None = None,
    first: jax.Array | None = None,
    adapter: jax.Array | None = None,
) -> list[jax.Array]:
    """x ``[rows, width]``, of a gate ``[rows, 2 * width]`` -> [out ``[rows, width]``, scale
    ``[rows, 1]`` if out is quantized, sum ``[rows, width]`` if there is a residual, inner products
    ``[rows, sources * n * rank]`` with the first factors ``[n, sources, rank, width]`` of row's
    adapter int32 ``[rows]``]."""
    op, rows = plan.op, x.shape[0]
    dtype = {kind: name for name, kind in KIND.items()}[op.out]
    outs = [jax.ShapeDtypeStruct((rows, op.width), jnp.dtype(dtype))]
    if op.out in QMAX:
        outs.append(jax.ShapeDtypeStruct((rows, 1), jnp.float32))
    if op.residual:
        outs.append(jax.ShapeDtypeStruct((rows, op.width), x.dtype))
    if op.adapters is not None:
        outs.append(jax.ShapeDtypeStruct((rows, math.prod(op.adapters)), x.dtype))
    scratch = [plgpu.SMEM((2 * (plan.threads // 32) + plan.ring, 2), jnp.float32)]
    if op.adapters is not None:
        scratch.append(plgpu.SMEM((plan.threads // 32, padded_ranks(op)), jnp.float32))
    body = functools.partial(_one_row, plan=plan)
    if plan.ring:
        # A thread past the end of the last row reads up to a chunk per thread more.
        words = plan.ring * x.shape[1] * (1 + op.residual) + 8 * plan.threads
        scratch.append(plgpu.SMEM((words,), x.dtype))
        body = functools.partial(_ring_rows, plan=plan, n_rows=rows)
    return launch(
        body,
        (x, residual, weight, first, adapter),
        outs,
        name=f"{'residual_' * op.residual}{op.form}_to_{op.out}{'_adapted' * bool(op.adapters)}",
        grid=min(plan.blocks, rows) if plan.ring else rows,
        cluster=plan.split,
        warpgroups=plan.threads // 128,
        scratch=scratch,
        registers=True,
    )
