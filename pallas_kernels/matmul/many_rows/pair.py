"""Products of two operands of one dtype on Hopper: W8A8, FP8 and, of few rows, 16-bit floats.

    out[m, n] = acc[m, n] * scale_x[m] * scale_w[n] + low[m, n] + bias[n]      one cast at the end

Contract.  x [M, K] and w [N, K] are both int8 (then acc is int32, exact), e4m3, bfloat16 or
float16.  16 bytes divide a row, 8 divides N, M is any.  Copies past an edge bring zeros, and stores
past an edge are not made.

    _Feeder.copy_tiles     TMA x, w of step i+1 | i+2 | ... | next tile's scales, its step 0 | ...
    _Multiplier 0        wait i | wgmma i | release i-1 | ...      rows   0.. 63 of 128 x 256
    _Multiplier 1        wait i | wgmma i | release i-1 | ...      rows  64..127
    both                 after the last step, finish: acc -> float32 * scales + bias -> smem -> TMA

Copies: one warp of the last warpgroup, by TMA (``_Feeder``).
Waits: multipliers wait on ``full`` for a slot.  They wait on ``vectors_full`` in ``finish``, or
with blocked scales before the first step.  They arrive at ``empty`` of a slot when the next wgmma
runs, with groups when its sum is read, and at ``vectors_empty`` behind ``finish``.  The feeder
waits at both, at ``empty`` for the readers of all blocks that share the slot.  Scales as they are
stored come by ``scales_full`` and are given up at ``scales_empty`` (``groups_program``).  With
``split`` blocks hand sums over by ``peer_full`` and ``peer_empty``.
Writes: each multiplier stores its rows or columns by TMA, through two places of shared memory.

The two blocks of a cluster lie below each other in M, and the weight tile is multicast to both.
The pair reads 256 + 256 rows of K for 256 x 256 outputs.  That keeps L2 ahead of the tensor cores:
they need 32 bytes a cycle and SM so, and 48 without a cluster.

Few rows (a tile of 64) are bound by the bytes of w.  The warpgroups lie side by side in N, and the
blocks of a cluster share x.  With ``split`` each of a cluster's two blocks reads half of K: 64
clusters of 64 rows of w then have as much to do as 128 blocks of 32, and read half of x.  Each
block sends the sums of one warpgroup to the other's shared memory and finishes the other.  With
``swiglu`` a warpgroup has rows of gate and as many of up.

Groups of 128 columns (FP8 blocks) have scales in both operands.  A step's sum is multiplied by both
in float32 before it is added.  With few rows scales stay as they are stored: a ring of their own
has two places, each with the scales of eight steps.  With many rows XLA turns the scales, and a
slot of the ring brings those of its step.  Where 128 rows of w share theirs (``QTensor.blocked``),
one copy a tile brings them, x's come as with few rows, and a thread has at most 6 factors of a
step, not 80.

    out[m, n] = sum over g of acc_g[m, n] * scale_x[g, m] * scale_w[g, n]

A low-rank term (LoRA) is ``inner[M, R] second[N, R]^T``, 16-bit floats into a float32 sum of its
own. It comes through the same ring, behind a tile's last step of K, in slots of 64 ranks.

FP8 sums.  ``promote`` gives the tensor cores a fresh accumulator every few steps of 128 and adds it
to a float32 one in registers.  Two accumulators of 256 columns do not fit 232 registers.  So FP8
tiles have at most 192 columns, and where a thread has 168 registers (``plan``) 160.

Floor: 132 SMs x 8192 op/cycle x ~1.75 GHz = 1890 TOPS.  Result, one H200, K = 4096, N = 14336,
M = 8192, bfloat16 output, bias: int8 1616 to 1625 (XLA's bare int8 dot 1493, with scales 929), e4m3
1461 to 1489; M = 64 takes 18.1 us.  Attempts: ``docs/lab/matmul.md``.  Command:
``python -m benchmarks.kernels.prefill``.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.many_rows import pipeline
from pallas_kernels.matmul.many_rows.groups_program import HELD
from pallas_kernels.matmul.many_rows.pair_program import PairBlock
from pallas_kernels.matmul.many_rows.pipeline import launch_persistent, ring_barriers
from pallas_kernels.matmul.many_rows.plan import BLOCK_BYTES, PairTile
from pallas_kernels.qtensor import BLOCK_ROWS


@functools.partial(jax.jit, static_argnames=("out_dtype", "tile", "swiglu"))
def pair_matmul(
    x: jax.Array,
    w: jax.Array,
    scale_x: jax.Array | None,
    scale_w: jax.Array | None,
    bias: jax.Array | None,
    out_dtype,
    tile: PairTile,
    swiglu: bool = False,
    low_rank: tuple[jax.Array, tuple[jax.Array, ...]] | None = None,
    scale_out: jax.Array | None = None,
) -> jax.Array:
    """Multiply two operands of one dtype; see the module's docstring.

    Parameters
    ----------
    x, w : [M, K], [N, K]
        Both int8, e4m3, bfloat16 or float16.
    scale_x, scale_w : [M] or [1], [N]
        Floats, or both None; [1] is one scale for all rows of x.  For e4m3 in groups of 128
        columns: float32 [K / 128, M] and [K / 128, N], with M and N multiples of 4; in a tile of 64
        rows floats [M, K / 128] and [N, K / 128], whose rows have whole units of 16 bytes.  Where
        128 rows of w share theirs, floats [M, K / 128] and [N / 128, 128, K / 128] with such rows.
    bias : [N] or None
        Floats.
    swiglu : bool
        The rows of w are gate, then up.  Without bias and split; in tiles of more than 64 rows only
        with scales.
    low_rank : (inner [M, S R], S second factors [N_s, R]), optional
        16-bit floats.  The N_s rows of w of source s get ``inner[:, s R : s R + R]`` times its
        factors transposed, added in float32.  Only for one tile of 64 rows whose columns divide
        every N_s, and with scales.
    scale_out : [1], optional
        Needed with ``swiglu`` and scales: of the codes that are returned.

    Returns
    -------
    [M, N], with ``swiglu`` silu(gate) * up [M, N / 2], in out_dtype.
    """
    (m, k), n = x.shape, w.shape[0]
    if swiglu:
        n //= 2
        w = w.reshape(2, n, k) if tile.m == 64 else w
        scale_w = None if scale_w is None else scale_w.reshape(2, n)
    inner, second = (None, ()) if low_rank is None else low_rank
    factor = None
    if scale_x is not None and scale_x.shape == (1,):
        scale_x, factor = None, scale_x
    operands = {
        "x": x,
        "w": w,
        "factor": factor,
        "scale_out": scale_out,
        "scale_x": scale_x,
        "scale_w": scale_w,
        "bias": bias,
        "low": None if inner is None else [inner, *second],
    }
    sources = tuple(b.shape[0] for b in second)
    kind = {"int8": "w8a8", "float8_e4m3fn": "fp8"}.get(x.dtype.name, "plain")
    if scale_x is not None and scale_x.ndim == 2:
        kind = "fp8_block"
    (out,) = launch_persistent(
        functools.partial(PairBlock, tile=tile, swiglu=swiglu, sources=sources, shape=(m, n, k)),
        operands,
        {"out": jax.ShapeDtypeStruct((m, n), out_dtype)},
        name=f"quantized_matmul_{kind}",
        scratch=_scratch(operands, out_dtype, tile, swiglu),
        tile=tile,
    )
    return out


def _scratch(operands, out_dtype, tile: PairTile, swiglu: bool) -> dict:
    """Shared memory of a block, and its barriers."""
    x, w, low = operands["x"], operands["w"], operands["low"]
    scale_x, scale_w, bias = (operands[name] for name in ("scale_x", "scale_w", "bias"))
    by_group = scale_x is not None and scale_x.ndim == 2
    by_block = by_group and scale_w.ndim == 3
    by_step = by_group and not by_block
    n_vectors = sum(v is not None for v in ((bias,) if by_group else (scale_x, scale_w, bias)))
    n_vectors += by_block
    n_vectors += swiglu and scale_w is not None
    more = {} if low is None else {"low": low[0].dtype}
    block_k = BLOCK_BYTES // x.dtype.itemsize
    # Gate and up: of each warpgroup in a tile of few rows, which copies each by itself.
    halves = () if not swiglu else (2, 2) if tile.m == 64 else (2,)
    width = math.gcd(tile.cols // (1 + swiglu), 64 // jnp.dtype(out_dtype).itemsize)
    peer = {}
    if tile.split > 1:
        dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
        sums = pipeline.tiled(dtype, 4 * math.gcd(tile.cols, 32))
        peer = {
            "peer_sums": plgpu.SMEM((64, tile.cols), dtype, transforms=sums),
            "peer_full": plgpu.Barrier(num_arrivals=1),
            "peer_empty": plgpu.ClusterBarrier(
                collective_axes=("part",), num_arrivals=1, num_barriers=2
            ),
        }

    def vector(v, rows):
        if v is None:
            return plgpu.SMEM((32,), jnp.float32)
        in_ring = by_group and v is not bias
        if in_ring and (tile.m == 64 or by_block):  # as they are stored
            return plgpu.SMEM((2, rows, HELD), v.dtype)
        whole_units = -(-rows // 64) * 64  # of 128 bytes
        return plgpu.SMEM((tile.stages if in_ring else 2, whole_units), v.dtype)

    of_w = vector(scale_w, tile.n)
    if by_block:
        last = BLOCK_ROWS - math.gcd(tile.n, BLOCK_ROWS)  # of a block where a tile may begin
        unit = 128 // scale_w.dtype.itemsize
        groups = -(-scale_w.shape[2] // unit) * unit  # of whole units of 128 bytes
        of_w = plgpu.SMEM((2, -(-(last + tile.n) // BLOCK_ROWS), groups), scale_w.dtype)
    if swiglu and scale_w is not None:
        of_w = plgpu.SMEM((2, 2, -(-tile.n // 128) * 64), scale_w.dtype)
    return {
        "x": pipeline.rows_and_tiles((tile.stages, tile.m, block_k), x.dtype, **more),
        "w": pipeline.rows_and_tiles((tile.stages, tile.n, block_k), w.dtype, halves, **more),
        "out": pipeline.rows_and_tiles((2, 2, 64, width), out_dtype),
        "scale_x": vector(scale_x, tile.m),
        "scale_w": of_w,
        "bias": vector(bias, tile.n),
        **ring_barriers(tile.stages, 2 + swiglu + 2 * (by_step and tile.m > 64)),
        "vectors_full": plgpu.Barrier(num_arrivals=max(1, n_vectors), num_barriers=2),
        "scales_full": plgpu.Barrier(num_arrivals=2 - by_block, num_barriers=2),
        "scales_empty": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        # Warpgroups that finish a tile.
        "vectors_empty": plgpu.Barrier(num_arrivals=2 // tile.split, num_barriers=2),
        **peer,
    }
