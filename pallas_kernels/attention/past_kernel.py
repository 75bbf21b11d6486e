"""Many new tokens over a quantized past on Hopper: int8 scores, 16-bit values.

    out = softmax(q k^T) v,   q k^T = (codes of q) (codes of k)^T sq[t] sk[s],   keys 0 .. n - 1

Contract.  q int8 ``[B, T, N, H]``, and sq float32 ``[B, N, T]``, which holds the softmax's scale
and log2 e too.  k int8 ``[B, S, K, H]`` and sk float32 ``[B, K, S]``.  v 16-bit ``[B, S, K, H]``,
zeros from key n on.  n int32 ``[B]``, at least 1.  The result is (out ``[B, T, N, H]``, the
logarithm of the sum of exponentials float32 ``[B, N, T]``).  128 divides T and S; H is 64 or 128.

    ask scores i, values i-1 | TMA k, sk of i+2, v of i+1 | softmax i | values i-1 | weights i | ...

A block has 128 queries of one head, 64 to each of two warpgroups.  Both ask for the next tile's
scores and this one's values together, and take exponentials while the tensor cores multiply
(FlashAttention-3, arXiv 2407.08608; ``past_registers``).  The first warpgroup starts the copies of
k, sk and v, and waits for both to have read their places.  A third warpgroup that only copies would
leave a thread 168 registers on jax >= 0.12, too few by 64.  int8 scores (SageAttention, arXiv
2410.02367) take half the time of 16-bit ones, and keys are the cache's own codes.  Tiles go from
the last, which may be ragged, to the first.

Copies: warpgroup 0 copies tiles of k, sk and v by TMA for both (``load_keys``, ``load_values``).
Each warpgroup copies its own queries and their scales.
Waits: on ``q_full`` once; on ``k_full`` and ``v_full`` of a slot by both.  Both arrive at
``k_empty`` and ``v_empty``; warpgroup 0 waits there before it refills (``refill``).  A warpgroup
waits for its products in ``softmax`` (the scores), ``fade`` and, for the last, ``finish`` (all).
Writes: a warpgroup stores its outputs and logarithms by TMA from shared memory (``write``).

Result, one H200, 32/8 heads of 128, 32768 queries and keys: 25.6 ms, 687 TFLOP/s, where cuDNN over
the same floats takes 30.2 (583).  Attempts: docs/lab/attention.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.past_registers import KEYS, ROWS, Tile, tiling, zeros
from pallas_kernels.launch import launch

STAGES = 3


def _slot(i):
    return lax.rem(i, jnp.asarray(STAGES, i.dtype))


class _Past:
    """The program of a warpgroup: 64 queries of a head over all keys of a row."""

    def __init__(self, gmem, smem, barrier, *, team: int, tile: Tile):
        self.gmem, self.smem, self.barrier, self.tile = gmem, smem, barrier, tile
        self.warpgroup, self.head, self.row = (
            lax.axis_index(axis) for axis in ("warpgroup", "head", "row")
        )
        self.kv_head, self.n = self.head // team, gmem.n_keys[self.row]
        self.steps = (self.n + KEYS - 1) // KEYS

    def run(self) -> None:
        pl.when(self.warpgroup == 0)(self.fill_ring)
        first = pl.ds(lax.axis_index("tile") * 2 * ROWS + self.warpgroup * ROWS, ROWS)
        carry = self.first_tile(first)
        one = jnp.asarray(1, self.steps.dtype)
        self.write(first, *lax.fori_loop(one, self.steps, self.next_tile, carry))

    # --- copies ---

    def fill_ring(self) -> None:
        @pl.loop(0, jnp.minimum(STAGES, self.steps))
        def begin(i):
            self.load_keys(i)
            self.load_values(i)

    def keys_of(self, i):
        return pl.ds((self.steps - 1 - i) * KEYS, KEYS)

    def load_keys(self, i) -> None:
        gmem, smem, at, keys = self.gmem, self.smem, _slot(i), self.keys_of(i)
        full = self.barrier.k_full.at[at]
        plgpu.copy_gmem_to_smem(gmem.k.at[self.row, keys, self.kv_head], smem.k.at[at], full)
        plgpu.copy_gmem_to_smem(gmem.sk.at[self.row, self.kv_head, keys], smem.sk.at[at], full)

    def load_values(self, i) -> None:
        at, keys = _slot(i), self.keys_of(i)
        source = self.gmem.v.at[self.row, keys, self.kv_head]
        plgpu.copy_gmem_to_smem(source, self.smem.v.at[at], self.barrier.v_full.at[at])

    def refill(self, load, empty, i) -> None:
        """The place of the i-th tile, which both warpgroups have read, for one ``STAGES`` on."""

        @pl.when((self.warpgroup == 0) & (i >= 0) & (i + STAGES < self.steps))
        def _():
            plgpu.barrier_wait(empty.at[_slot(i)])
            load(i + STAGES)

    # --- scores, softmax, values ---

    def first_tile(self, rows):
        """The queries, and the weights of the first tile; (means, weights, state)."""
        gmem, smem, barrier, own = self.gmem, self.smem, self.barrier, self.warpgroup
        full = barrier.q_full.at[own]
        plgpu.copy_gmem_to_smem(gmem.q.at[self.row, rows, self.head], smem.q.at[own], full)
        plgpu.copy_gmem_to_smem(gmem.sq.at[self.row, self.head, rows], smem.sq.at[own], full)
        plgpu.barrier_wait(full)
        self.factor = self.tile.factors()(smem.sq.at[own])
        means, state = zeros(self.tile.h)

        plgpu.barrier_wait(barrier.k_full.at[0])
        scores = self.tile.ask_scores()(smem.q.at[own], smem.k.at[0])
        left = jnp.full((128,), self.n - (self.steps - 1) * KEYS, jnp.int32)
        left = plgpu.layout_cast(left, plgpu.Layout.WG_SPLAT((128,)))
        softmax = self.tile.softmax(0, ragged=True)
        x, state, _ = softmax(scores, smem.sk.at[0], state, self.factor, left)
        plgpu.barrier_arrive(barrier.k_empty.at[0])
        plgpu.barrier_wait(barrier.v_full.at[0])
        return means, self.tile.weights()(x), state

    def next_tile(self, i, carry):
        means, weights, state = carry
        smem, barrier, tile = self.smem, self.barrier, self.tile
        at, last = _slot(i), _slot(i - 1)
        plgpu.barrier_wait(barrier.k_full.at[at])
        scores, means = tile.ask_both()(
            smem.q.at[self.warpgroup], smem.k.at[at], smem.v.at[last], weights, means
        )
        self.refill(self.load_keys, barrier.k_empty, i - 1)
        self.refill(self.load_values, barrier.v_empty, i - 2)
        x, state, fade = tile.softmax(1)(scores, smem.sk.at[at], state, self.factor)
        plgpu.barrier_arrive(barrier.k_empty.at[at])
        # Waited for already here: ptxas moves no exponential below this branch, and without one
        # moves the wait for the values above them.
        plgpu.barrier_wait(barrier.v_full.at[at])
        means = tile.fade()(means, fade)
        plgpu.barrier_arrive(barrier.v_empty.at[last])
        return means, tile.weights()(x), state

    def write(self, rows, means, weights, state) -> None:
        gmem, smem, own = self.gmem, self.smem, self.warpgroup
        values = smem.v.at[_slot(self.steps - 1)]
        means = self.tile.ask_values()(values, weights, means)
        out = self.tile.finish()(means, state, smem.log.at[own])
        smem.out[own] = out.astype(gmem.out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.out.at[own], gmem.out.at[self.row, rows, self.head])
        plgpu.copy_smem_to_gmem(smem.log.at[own], gmem.log.at[self.row, self.head, rows])
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
    tile = Tile(h, "bf16" if v.dtype == jnp.bfloat16 else "f16")
    of_two = functools.partial(plgpu.Barrier, num_arrivals=2)

    out, log = launch(
        functools.partial(_Past, team=n // k.shape[2], tile=tile),
        {"q": q, "sq": sq, "k": k, "sk": sk, "v": v, "n_keys": n_keys},
        {
            "out": jax.ShapeDtypeStruct(q.shape, v.dtype),
            "log": jax.ShapeDtypeStruct((batch, n, width), jnp.float32),
        },
        name="attend_past_int8",
        grid={"head": n, "tile": width // (2 * ROWS), "row": batch},
        warpgroups=2,
        scratch={
            "q": _tiles(2, ROWS, h, dtype=jnp.int8),
            "k": _tiles(STAGES, KEYS, h, dtype=jnp.int8),
            "v": _tiles(STAGES, KEYS, h, dtype=v.dtype),
            "out": _tiles(2, ROWS, h, dtype=v.dtype),
            "sq": plgpu.SMEM((2, ROWS), jnp.float32),
            "sk": plgpu.SMEM((STAGES, KEYS), jnp.float32),
            "log": plgpu.SMEM((2, ROWS), jnp.float32),
            "q_full": of_two(num_barriers=2),
            "k_full": of_two(num_barriers=STAGES),
            "v_full": plgpu.Barrier(num_barriers=STAGES),
            "k_empty": of_two(num_barriers=STAGES),
            "v_empty": of_two(num_barriers=STAGES),
        },
        approx_math=True,
    )
    return out, log
