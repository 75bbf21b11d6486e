"""Many new tokens over a quantized past on Hopper: int8 scores, 16-bit values.

    out = softmax(q k^T) v,   q k^T = (codes of q) (codes of k)^T sq[t] sk[s],   keys 0 .. n - 1

Contract: q int8 ``[B, T, N, H]``, sq float32 ``[B, N, T]`` (the softmax's scale and log2 e in it),
k int8 ``[B, S, K, H]``, sk float32 ``[B, K, S]``, v 16-bit ``[B, S, K, H]`` with zeros from key n
on, n int32 ``[B]`` from 1 on -> (out ``[B, T, N, H]``, the logarithm of the sum of exponentials
float32 ``[B, N, T]``).  T and S are multiples of 128, H is 64 or 128.

    ask scores i, values i-1 | TMA k, sk of i+2, v of i+1 | softmax i | values i-1 | weights i | ...

A block has 128 queries of one head, 64 to each of two warpgroups.  Both ask for the next tile's
scores and this one's values together, and take exponentials while the tensor cores multiply
(FlashAttention-3, arXiv 2407.08608; ``past_registers``).  The first one starts the copies of k, sk
and v, for which it waits until the other one has read their places; jax >= 0.12 gives a thread 168
registers beside a third warpgroup that only copies, too few by 64.  int8 scores
(SageAttention, arXiv 2410.02367) take half of 16-bit ones' time, and keys are the cache's own
codes.  Tiles go from the last, which may be ragged, to the first.

One H200, 32/8 heads of 128, 32768 queries and keys: 25.6 ms, 687 TFLOP/s, where cuDNN over the
same floats takes 30.2 (583).  What was tried: NOTES.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.past_registers import KEYS, ROWS, Tile, tiling, zeros

STAGES = 3


def _body(q, sq, k, sk, v, n_keys, out, log, *scratch, team: int, tile: Tile):
    q_sm, k_sm, v_sm, o_sm, sq_sm, sk_sm, log_sm, *barriers = scratch
    q_full, k_full, v_full, k_empty, v_empty = barriers
    wg, head, row = lax.axis_index("wg"), lax.axis_index("head"), lax.axis_index("row")
    kv_head, n = head // team, n_keys[row]
    steps = (n + KEYS - 1) // KEYS

    def slot(i):
        return lax.rem(i, jnp.asarray(STAGES, i.dtype))

    def load_keys(i):
        at, keys = slot(i), pl.ds((steps - 1 - i) * KEYS, KEYS)
        plgpu.copy_gmem_to_smem(k.at[row, keys, kv_head], k_sm.at[at], k_full.at[at])
        plgpu.copy_gmem_to_smem(sk.at[row, kv_head, keys], sk_sm.at[at], k_full.at[at])

    def load_values(i):
        at, keys = slot(i), pl.ds((steps - 1 - i) * KEYS, KEYS)
        plgpu.copy_gmem_to_smem(v.at[row, keys, kv_head], v_sm.at[at], v_full.at[at])

    def refill(load, empty, i):
        """The place of the i-th tile, which both warpgroups have read, for one ``STAGES`` on."""

        @pl.when((wg == 0) & (i >= 0) & (i + STAGES < steps))
        def _():
            plgpu.barrier_wait(empty.at[slot(i)])
            load(i + STAGES)

    @pl.when(wg == 0)
    def _():
        @pl.loop(0, jnp.minimum(STAGES, steps))
        def begin(i):
            load_keys(i)
            load_values(i)

    rows = pl.ds(lax.axis_index("tile") * 2 * ROWS + wg * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(q.at[row, rows, head], q_sm.at[wg], q_full.at[wg])
    plgpu.copy_gmem_to_smem(sq.at[row, head, rows], sq_sm.at[wg], q_full.at[wg])
    plgpu.barrier_wait(q_full.at[wg])
    factor = tile.factors()(sq_sm.at[wg])
    means, state = zeros(tile.h)

    plgpu.barrier_wait(k_full.at[0])
    scores = tile.ask_scores()(q_sm.at[wg], k_sm.at[0])
    left = plgpu.layout_cast(
        jnp.full((128,), n - (steps - 1) * KEYS, jnp.int32), plgpu.Layout.WG_SPLAT((128,))
    )
    x, state, _ = tile.softmax(0, ragged=True)(scores, sk_sm.at[0], state, factor, left)
    plgpu.barrier_arrive(k_empty.at[0])
    plgpu.barrier_wait(v_full.at[0])
    weights = tile.weights()(x)

    def step(i, carry):
        means, weights, state = carry
        at, last = slot(i), slot(i - 1)
        plgpu.barrier_wait(k_full.at[at])
        scores, means = tile.ask_both()(q_sm.at[wg], k_sm.at[at], v_sm.at[last], weights, means)
        refill(load_keys, k_empty, i - 1)
        refill(load_values, v_empty, i - 2)
        x, state, fade = tile.softmax(1)(scores, sk_sm.at[at], state, factor)
        plgpu.barrier_arrive(k_empty.at[at])
        # Waited for already here: ptxas moves no exponential below this branch, and without one
        # moves the wait for the values above them.
        plgpu.barrier_wait(v_full.at[at])
        means = tile.fade()(means, fade)
        plgpu.barrier_arrive(v_empty.at[last])
        return means, tile.weights()(x), state

    one = jnp.asarray(1, steps.dtype)
    means, weights, state = lax.fori_loop(one, steps, step, (means, weights, state))
    means = tile.ask_values()(v_sm.at[slot(steps - 1)], weights, means)
    o_sm[wg] = tile.finish()(means, state, log_sm.at[wg]).astype(out.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_sm.at[wg], out.at[row, rows, head])
    plgpu.copy_smem_to_gmem(log_sm.at[wg], log.at[row, head, rows])
    plgpu.wait_smem_to_gmem(0)


def _tiles(*shape, dtype):
    """Shared memory of an operand of wgmma."""
    return plgpu.SMEM(shape, dtype, transforms=tiling(shape[-1], dtype))


@jax.jit
def attend(
    q: jax.Array, sq: jax.Array, k: jax.Array, sk: jax.Array, v: jax.Array, n_keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See the module's docstring."""
    batch, width, n, h = q.shape
    pair = functools.partial(plgpu.Barrier, num_arrivals=2)
    return plgpu.kernel(
        functools.partial(
            _body,
            team=n // k.shape[2],
            tile=Tile(h, "bf16" if v.dtype == jnp.bfloat16 else "f16"),
        ),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct((batch, n, width), jnp.float32),
        ),
        kernel_name="attend_past_int8",
        grid=(n, width // (2 * ROWS), batch),
        grid_names=("head", "tile", "row"),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            _tiles(2, ROWS, h, dtype=jnp.int8),
            _tiles(STAGES, KEYS, h, dtype=jnp.int8),
            _tiles(STAGES, KEYS, h, dtype=v.dtype),
            _tiles(2, ROWS, h, dtype=v.dtype),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.SMEM((STAGES, KEYS), jnp.float32),
            plgpu.SMEM((2, ROWS), jnp.float32),
            pair(num_barriers=2),
            pair(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            pair(num_barriers=STAGES),
            pair(num_barriers=STAGES),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            approx_math=True,
        ),
    )(q, sq, k, sk, v, n_keys)
