"""Attention of 1 to 16 query tokens a row over a cache, on Hopper: one pass over the cache's bytes.

    out[b, t, n] = softmax_s(scale * q[b, t, n] . k[b, s, n // G]) v[b, s, n // G]

for s < lengths[b, t]; q, out ``[B, T, N, H]``, k, v ``[B, S, K, H]``, G = N / K.  ``attention.op``
has the contract.

A team of warps takes steps of 16 (or 32) tokens of one row.  Each warp takes one kv head of them.
The G query heads that share it are the narrow side of the mma (``attention.tile``).

    every warp      its share of the team's copies: K 0 | V 0 | K 1 ... into a ring
                    (``attention.ring``)
                    ``step``: wait K | scores, tiles of 16 tokens x 8 heads | release K
                    | running maximum, exp2 | weights transposed in registers
                    | refill the last V | wait V | outputs += V^T weights | release V | refill K
    short rows      the teams of a block, or of a cluster of blocks, take a row's steps in turn
                    (``share_steps``), and the cluster sums their parts (``attention.gather``)
    long rows       a team takes a chunk of tokens (``share_chunks``) and writes its parts to
                    memory, where a second kernel sums them (``attention.merge``); so rows of
                    unequal lengths share the SMs

Copies: each warp of a team copies its share of a step's 8 runs, a lane a run, by bulk copies
(``Ring.fill``).  Before Hopper a warp copies its own head's tokens by cp.async (``WarpRing``).
Scales go through registers to a warp's own shared memory (``Scales``).
Waits: every slot of keys, and every slot of values, has two barriers.  ``full`` counts 8 runs and
their bytes; the team's warps wait there.  ``empty`` counts one arrival a warp of the team; a warp
waits there before it refills its runs.  cp.async needs neither: a warp waits for its own copies.
Writes: a warp leaves its part in shared memory, or in device memory for the second kernel.  With a
cluster, ``Gathering.finish`` sums the parts, and one warp for each query head stores it.

Neither operand is converted or transposed in shared memory.  Sums over features and over tokens may
run in any order, so a lane takes the features that lie side by side in memory.  From K it takes
16 bytes of a token for two k16 steps; from V the same features of four tokens, paired by PRMT.
int8 and float8 become 16-bit floats between the load and the mma.  int4 codes are masked out and
multiplied as they are (``attention.codes``).  K's scales multiply scores, V's multiply weights.
Zero points cost two multiply-adds a score: K's multiply the sum of the query's features, V's are
summed beside the outputs.

``attention.plan`` splits the work by the batch, the capacity and the cache's dtype alone.  Nothing
is added atomically, so a row's bits do not depend on the other rows.  Past a row's end the last
token is copied once more and its scores are -inf.  Teams without a token leave at once.  Where
rows wait for an SM the longest begin first (``longest_first``), so that all SMs end together.

The G query heads of several tokens are T * G query rows.  Each has an end of its own, and with a
window a first key.  A warp takes ``Plan.fuls`` times eight of them over the words that it read
once.  Copies end at the row's longest; a query row that has seen no key yet has a finite maximum.

With a block table (``attention.pages``) steps lie in pages.  The loop carries the table's entries
for the steps that the ring will fetch.  A window's first step begins before it, masked, where a
page's would: rows give the bits that pages do.

Floor: the bytes of K, V and scales at 4.2 TB/s; cuDNN's decode shows that 4.46 can be read.
Result, one H200, 32/8 heads of 128, 64 rows x 8192, microseconds: bfloat16 536 (95% of the floor's
speed; cuDNN 481, XLA 3085), int8 283 (93%), int4 155 (93%); more, and attempts, in
docs/lab/attention.md.  Command: ``python -m benchmarks.kernels.attention``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.codes import Codes
from pallas_kernels.attention.decode_program import DecodeKernel
from pallas_kernels.attention.merge import merge_chunks
from pallas_kernels.attention.operands import Attended, capacity_of
from pallas_kernels.attention.pages import Paging
from pallas_kernels.attention.plan import AttentionPlan, blocks_of, shared_bytes
from pallas_kernels.attention.team_share import DecodeFacts, QueryRows
from pallas_kernels.launch import launch
from pallas_kernels.rows.fused_parts import KIND

# Shared memory of a block, as ``shared_bytes`` has it; the last three where a cluster sums parts.
_SHARED = "ring", "scales", "barriers", "parts", "shares", "arrivals"


@functools.partial(jax.jit, static_argnames=("window", "scale", "plan"))
def decode_attention(
    x: Attended, *, window: int | None, scale: float, plan: AttentionPlan
) -> jax.Array:
    """See ``pallas_kernels.attention.op``; the sinks are float32."""
    q, k, v, lengths, table, sinks = x
    batch, *tokens, n, h = q.shape
    capacity, n_kv = capacity_of(k, table), k.shape[2]
    codes, rows = Codes.of(q, k), QueryRows(*(tokens or [1]), n, n_kv, capacity)
    n = rows.tokens * n
    paging, kind = Paging.of(k, table), KIND[q.dtype.name]
    facts = DecodeFacts(plan, codes, rows, h, paging, window, scale, kind)

    out, stats = jax.ShapeDtypeStruct(q.shape, q.dtype), None
    if not plan.cluster:
        splits = -(-capacity // plan.chunk)
        out = jax.ShapeDtypeStruct((batch, splits, n, h), jnp.float32)
        stats = jax.ShapeDtypeStruct((batch, splits, n, 2), jnp.float32)
    sizes = [size // 4 for size in shared_bytes(plan, n // n_kv, codes)]
    out, stats = launch(
        functools.partial(DecodeKernel, facts=facts),
        {
            "q": q,
            "k": jax.tree.leaves(k),
            "v": jax.tree.leaves(v),
            "lengths": lengths,
            "table": table,
            "sinks": sinks if plan.cluster else None,
            "order": longest_first(lengths, window) if plan.by_length else None,
        },
        {"out": out, "stats": stats},
        name="decode_attention_kernel",
        cluster=plan.cluster,
        warpgroups=plan.warps // 4,
        grid=batch * blocks_of(plan, capacity, n_kv, n // n_kv) // max(plan.cluster, 1),
        scratch=dict(zip(_SHARED, sizes, strict=False)),
        registers=True,
    )
    if plan.cluster:
        return out
    out = merge_chunks(
        out,
        stats,
        lengths,
        sinks,
        capacity=capacity,
        chunk=plan.chunk,
        window=window,
        rotated=codes.zeros,
        out_dtype=q.dtype,
    )
    return out.reshape(q.shape)


def longest_first(lengths: jax.Array, window: int | None) -> jax.Array:
    """Return int32 ``[B]``: the rows by the number of keys that they read, the largest first.

    Blocks start in the order of their numbers, so the last to start have little to do.  Ranks are
    counted, as a CUDA graph cannot contain XLA's sort.

    lengths: int32 ``[B]``, or ``[B, T]``.
    """
    work = lengths if lengths.ndim == 1 else jnp.max(lengths, axis=1)
    work = work if window is None else jnp.minimum(work, window)
    index = jnp.arange(len(work), dtype=jnp.int32)
    is_earlier = (work > work[:, None]) | ((work == work[:, None]) & (index < index[:, None]))
    rank = jnp.sum(is_earlier, axis=1, dtype=jnp.int32)
    return jnp.zeros_like(index).at[rank].set(index, unique_indices=True)
