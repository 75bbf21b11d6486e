"""Many new tokens over a quantized past on Hopper: int8 scores, 16-bit values.

    out = softmax(q k^T) v,   q k^T = (codes of q) (codes of k)^T sq[t] sk[s],   keys 0 .. n - 1

Contract: q int8 ``[B, T, N, H]``, sq float32 ``[B, N, T]`` (the softmax's scale and log2 e in it),
k int8 ``[B, S, K, H]``, sk float32 ``[B, K, S]``, v 16-bit ``[B, S, K, H]`` with zeros from key n
on, n int32 ``[B]`` from 1 on -> (out ``[B, T, N, H]``, the logarithm of the sum of exponentials
float32 ``[B, N, T]``).  T and S are multiples of 128, H is 64 or 128.

    feeder    : TMA k, sk, v of step i+2 | ...
    compute 0 : scores i   | softmax i    | values i  | ...
    compute 1 : softmax i-1| values i-1   | scores i  | ...

A block has 128 queries of one head, 64 to a warpgroup; the two pass the tensor cores to each
other, so that one multiplies while the other takes exponentials (FlashAttention-3, arXiv
2407.08608).  int8 scores (SageAttention, arXiv 2410.02367) take half of 16-bit ones' time, and keys
are the cache's own codes; values stay 16-bit floats because 8-bit operands of wgmma cannot be
transposed.

One H200, 32/8 heads of 128, 32768 queries and keys: 27.1 ms, 650 TFLOP/s; cuDNN over the same
floats 30.6 (576) in one run.  What was tried: NOTES.md.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, KEYS, STAGES = 64, 128, 2
_LAYOUT = plgpu.Layout.WGMMA
_ROW, _COLUMN = _LAYOUT.reduce(1), _LAYOUT.reduce(0)


def _along(x, shape, axis):
    return lax.broadcast_in_dim(x, shape, [axis])


def _body(q, sq, k, sk, v, n_keys, out, log, *scratch, team: int, h: int):
    q_sm, k_sm, v_sm, o_sm, sq_sm, sk_sm, log_sm, *barriers = scratch
    q_full, k_full, v_full, k_empty, v_empty, turn = barriers
    wg, head, row = lax.axis_index("wg"), lax.axis_index("head"), lax.axis_index("row")
    kv_head, n = head // team, n_keys[row]
    steps = (n + KEYS - 1) // KEYS

    @pl.when(wg == 2)
    def feed():
        plgpu.set_max_registers(40, action="decrease")

        @plgpu.warp_map
        def of_warp(warp):
            @pl.when(warp == 0)
            def _():
                @pl.loop(0, steps)
                def load(j):
                    at = lax.rem(j, jnp.asarray(STAGES, j.dtype))
                    keys = pl.ds(j * KEYS, KEYS)
                    pl.when(j >= STAGES)(lambda: plgpu.barrier_wait(k_empty.at[at]))
                    plgpu.copy_gmem_to_smem(k.at[row, keys, kv_head], k_sm.at[at], k_full.at[at])
                    plgpu.copy_gmem_to_smem(sk.at[row, kv_head, keys], sk_sm.at[at], k_full.at[at])
                    pl.when(j >= STAGES)(lambda: plgpu.barrier_wait(v_empty.at[at]))
                    plgpu.copy_gmem_to_smem(v.at[row, keys, kv_head], v_sm.at[at], v_full.at[at])

    @pl.when(wg < 2)
    def compute():
        plgpu.set_max_registers(232, action="increase")
        rows = pl.ds(lax.axis_index("tile") * 2 * ROWS + wg * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(q.at[row, rows, head], q_sm.at[wg], q_full.at[wg])
        plgpu.copy_gmem_to_smem(sq.at[row, head, rows], sq_sm.at[wg], q_full.at[wg])
        plgpu.barrier_wait(q_full.at[wg])
        factor = plgpu.load(sq_sm.at[wg], layout=_ROW)

        def pass_on():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def step(j, carry, *, last: bool):
            acc, best, total = carry
            at = lax.rem(j, jnp.asarray(STAGES, j.dtype))
            plgpu.barrier_wait(k_full.at[at])

            def scores(ref):
                plgpu.wgmma(ref, q_sm.at[wg], k_sm.at[at].transpose((1, 0)))
                pass_on()
                plgpu.wgmma_wait(0)
                return plgpu.wgmma_accumulator_load(ref, wait_n=None)

            s = pl.run_scoped(scores, plgpu.ACC((ROWS, KEYS), jnp.int32))
            x = s.astype(jnp.float32)
            x = x * _along(plgpu.load(sk_sm.at[at], layout=_COLUMN), x.shape, 1)
            plgpu.barrier_arrive(k_empty.at[at])
            if last:
                key = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=_LAYOUT) + j * KEYS
                x = jnp.where(key < n, x, -jnp.inf)
            peak = jnp.maximum(best, jnp.max(x, axis=1) * factor)
            fade = jnp.exp2(best - peak)
            p = jnp.exp2(x * _along(factor, x.shape, 0) - _along(peak, x.shape, 0))
            acc = acc * _along(fade, acc.shape, 0)
            total = total * fade + jnp.sum(p, axis=1)
            p = p.astype(v.dtype)
            acc, total, peak, p = lax.optimization_barrier((acc, total, peak, p))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_full.at[at])
            plgpu.barrier_wait(turn)

            def values(ref):
                plgpu.wgmma(ref, p, v_sm.at[at])

            acc = pl.run_state(values)(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(v_empty.at[at])
            return acc, peak, total

        def splat(value, shape, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        carry = (
            splat(0.0, (ROWS, h), _LAYOUT),
            splat(-jnp.inf, (ROWS,), _ROW),
            splat(0.0, (ROWS,), _ROW),
        )
        whole = n // KEYS
        pl.when(wg == 1)(pass_on)
        carry = lax.fori_loop(0, whole, functools.partial(step, last=False), carry)
        carry = lax.fori_loop(whole, steps, functools.partial(step, last=True), carry)
        pl.when(wg == 0)(pass_on)
        acc, peak, total = carry
        o_sm[wg] = (acc / _along(total, acc.shape, 0)).astype(out.dtype)
        log_sm[wg] = peak * math.log(2) + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_sm.at[wg], out.at[row, rows, head])
        plgpu.copy_smem_to_gmem(log_sm.at[wg], log.at[row, head, rows])
        plgpu.wait_smem_to_gmem(0)


def _tiles(*shape, dtype):
    """Shared memory of an operand of wgmma."""
    size = jnp.dtype(dtype).itemsize
    swizzle = min(128, shape[-1] * size)
    transforms = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@jax.jit
def attend(
    q: jax.Array, sq: jax.Array, k: jax.Array, sk: jax.Array, v: jax.Array, n_keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See the module's docstring."""
    batch, width, n, h = q.shape
    pair = functools.partial(plgpu.Barrier, num_arrivals=2)
    return plgpu.kernel(
        functools.partial(_body, team=n // k.shape[2], h=h),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct((batch, n, width), jnp.float32),
        ),
        kernel_name="attend_past_int8",
        grid=(n, width // (2 * ROWS), batch),
        grid_names=("head", "tile", "row"),
        num_threads=3,
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
            pair(),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            approx_math=True,
        ),
    )(q, sq, k, sk, v, n_keys)
