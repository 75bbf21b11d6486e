"""Norm, gate and per-token quantize on Hopper: one kernel that reads every row once.

    norm   t = s * weight,  s = x (+ residual),  f = rsqrt(mean(s^2) + eps)     y = t * f
    gate   t = gate / (1 + exp(-gate)) * up                                     y = t
    copy   t = x                                                                y = t

    int8, fp8:  scale = max|y| / qmax,  codes = round(t * (f / scale)),  or a given scale

of each row: x, s, t, y and codes [width], f and scale one number.
max|y| is f * max|t|.  So one pass over a row in registers gives both the sum of squares and the
largest value, and one barrier joins them.  There are three ways to run it (``RowsPlan``):

    a block a row       load | t, sums | barrier | factor | codes          hardware schedules rows
    persistent, ring    bulk copies of the next rows in flight meanwhile: the barrier that joins
                        the sums of a row also says that its slot is free
    a cluster a row     few wide rows: each block has a part of the columns, and each warp reads
                        the sums of all warps of all blocks, one a lane, after one cluster barrier

Copies: a thread loads its own chunks of 8 columns into registers.  With a ring thread 0 copies
whole rows to shared memory by bulk copies, and loads come from there.
Waits: where warps join a sum or a largest value, all threads meet at one barrier a row.  With a
cluster, this is the barrier of all its blocks.  With a ring all threads wait first for the row on
its slot's barrier; thread 0 refills the slot behind the row's barrier, which a ring always has.
Writes: a thread stores its chunks of results and of x + residual; thread 0 stores the row's scale.

Floor: bytes counted once, at 4.2 TB/s; one row takes a launch and one round trip to memory, about
1.1 us.  Result, one H200: 8192 x 4096 bfloat16 to int8 24.6 us (floor 24.0), with the residual 57.7
(55.9), the gate at 8192 x 2 x 14336 139 (140).  The table, and attempts: docs/lab/rows.md.
Command: ``python -m benchmarks.kernels.rows``.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import ir, scf
from pallas_kernels.launch import launch
from pallas_kernels.rows.inner import Inner, padded_ranks
from pallas_kernels.rows.one_row import RowShare
from pallas_kernels.rows.plan import KIND, RowsPlan


def _one_row(gmem, smem, *, plan: RowsPlan) -> None:
    """A block, or a cluster, of one row."""
    row = p.register("clusterid.x" if plan.split > 1 else "ctaid.x")
    rows = RowShare(gmem, smem, plan)
    p.await_kernel()
    # x goes first: it comes from device memory, the weight mostly from L2.
    words = rows.load(row)
    inner = None if plan.op.adapters is None else Inner(rows, row)
    rows.row(row, words, rows.load_weight(), p.ci(0), inner=inner)
    if plan.split > 1 and rows.joins:
        p.cluster_wait()


class _Ring:
    """A persistent block: bulk copies of the next rows are in flight while it computes one."""

    def __init__(self, gmem, smem, *, plan: RowsPlan, n_rows: int):
        self.plan, self.n_rows = plan, n_rows
        self.rows = RowShare(gmem, smem, plan)
        self.block, self.is_first = p.register("ctaid.x"), self.rows.thread < 1
        # One barrier per slot.
        self.full = self.rows.partial + 16 * (plan.threads // 32)
        self.sources = [self.rows.x_start] + [self.rows.residual_start] * plan.op.residual
        self.slot_bytes = plan.op.row_bytes * len(self.sources)

    def run(self) -> None:
        plan, rows = self.plan, self.rows
        p.when(self.is_first, self.initialise)
        p.await_kernel()
        for i in range(plan.ring):
            slot = rows.ring + i * self.slot_bytes
            row = self.block + i * plan.blocks
            self.copy(row, slot, self.full + 8 * i)
        weight = rows.load_weight()
        p.barrier()
        mine = self.n_rows - 1 + plan.blocks - self.block
        count = mine // plan.blocks
        loop = scf.ForOp(p.ci(0), count, p.ci(1), [self.block, p.ci(0), p.ci(0), p.ci(0)])
        with ir.InsertionPoint(loop.body):
            scf.yield_(self.one_row(weight, *loop.inner_iter_args))

    def initialise(self) -> None:
        for i in range(self.plan.ring):
            p.ptx(f"mbarrier.init.shared.b64 [$0+{8 * i}], 1;", self.full)
        p.barriers_ready()
        p.ptx("fence.proxy.async.shared::cta;")

    def copy(self, row: p.Value, slot: p.Value, barrier: p.Value) -> None:
        """Start the copies of a row, if there is one."""
        row_bytes = self.plan.op.row_bytes

        def start() -> None:
            p.barrier_expect(barrier, self.slot_bytes)
            for i, source in enumerate(self.sources):
                p.copy_bulk(
                    slot, p.offset(source, row, row_bytes), row_bytes, barrier, i * row_bytes
                )

        p.when(self.is_first & (row < self.n_rows), start)

    def one_row(self, weight, row, turn, index, phase) -> list[p.Value]:
        """Wait for a slot, compute its row, refill it; (row, turn, slot, phase) of the next."""
        plan, rows = self.plan, self.rows
        barrier = self.full + index * 8
        slot = rows.ring + index * self.slot_bytes
        p.ptx(
            "{ .reg .pred q; again: mbarrier.try_wait.parity.shared.b64 q, [$0], $1; "
            "@q bra done; bra again; done: }",
            barrier,
            phase,
        )
        after = row + plan.ring * plan.blocks
        words = rows.load_shared(slot)
        rows.row(row, words, weight, turn, lambda: self.copy(after, slot, barrier))
        moved = index + 1
        wrap = p.equal(moved, plan.ring)
        return [row + plan.blocks, turn ^ 1, p.where(wrap, 0, moved), phase ^ p.unsigned(wrap)]


def run(
    plan: RowsPlan,
    x: jax.Array,
    residual: jax.Array | None = None,
    weight: jax.Array | None = None,
    first: jax.Array | None = None,
    adapter: jax.Array | None = None,
    given: jax.Array | None = None,
) -> list[jax.Array]:
    """Return a plan's out ``[..., width]``, then the scales that it finds ``[..., 1]``, with a
    residual the sum ``[..., width]``, and with adapters the inner products ``[..., sources * n *
    rank]``.

    x: ``[..., width]``, of a gate ``[..., 2 * width]``.  residual: ``[..., width]``.  weight:
    ``[width]``.  first: the first factors of n adapters, ``[n, sources, rank, width]``, and
    adapter: that of each row, int32 ``[...]``.  given: the codes' scale, a float32 scalar.
    """
    lead, rows = x.shape[:-1], x.reshape(-1, x.shape[-1])
    if residual is not None:
        residual = residual.reshape(rows.shape)
    if adapter is not None:
        adapter = adapter.reshape(-1)
    out = _run(plan, rows, residual, weight, first, adapter, given)
    return [jnp.reshape(a, (*lead, a.shape[-1])) for a in out]


@functools.partial(jax.jit, static_argnames="plan")
def _run(
    plan: RowsPlan,
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array | None,
    first: jax.Array | None,
    adapter: jax.Array | None,
    given: jax.Array | None,
) -> list[jax.Array]:
    """Run the kernel on x [rows, width]; operands as in ``run``, without leading axes."""
    op, rows = plan.op, x.shape[0]
    dtype = {kind: name for name, kind in KIND.items()}[op.out]
    spec, warps, adapted = jax.ShapeDtypeStruct, plan.threads // 32, op.adapters is not None
    outs = {
        "out": spec((rows, op.width), jnp.dtype(dtype)),
        "scale": spec((rows, 1), jnp.float32) if op.finds_scales else None,
        "sum": spec((rows, op.width), x.dtype) if op.residual else None,
        "inner": spec((rows, math.prod(op.adapters)), x.dtype) if adapted else None,
    }
    # A thread past the end of the last row reads up to a chunk per thread more.
    words = plan.ring * x.shape[1] * (1 + op.residual) + 8 * plan.threads

    def body(gmem, smem) -> None:
        if plan.ring:
            _Ring(gmem, smem, plan=plan, n_rows=rows).run()
        else:
            _one_row(gmem, smem, plan=plan)

    inputs = {"x": x, "residual": residual, "weight": weight, "first": first, "adapter": adapter}
    results = launch(
        body,
        inputs | {"given": None if given is None else given.reshape(1)},
        outs,
        name=f"{'residual_' * op.residual}{op.form}_to_{op.out}{'_adapted' * bool(op.adapters)}",
        grid=min(plan.blocks, rows) if plan.ring else rows,
        cluster=plan.split,
        warpgroups=plan.threads // 128,
        scratch={
            "partial": plgpu.SMEM((2 * warps + plan.ring, 2), jnp.float32),
            "inner_sums": (plgpu.SMEM((warps, padded_ranks(op)), jnp.float32) if adapted else None),
            "ring": plgpu.SMEM((words,), x.dtype) if plan.ring else None,
        },
        registers=True,
    )
    return [result for result in results if result is not None]
