"""Products of 17 to 256 rows by the warp's own instructions: ``mma.sync`` and ``cp.async``.

    out[m, n] = sum_k x[m, k] a[n, k] + bias[n]        x: its codes times the row's scale
    a = (q - zero) scale,  with floating zeros q scale + zero        q: the codes of w [N, K]

    x int8          x  w int8           W8A8: int32 sums, exact
    x bf16 | f16    x  w int4 | int8    weight-only, float32 sums
    x bf16          x  w float8_e4m3fn | float4_e2m1fn         fp8-block, mxfp4, nvfp4

It is for GPUs without wgmma: Ampere, Ada, Blackwell.  One design serves all three: a block has a
tile of x's rows by w's rows, and a ring of steps of K in shared memory.  A warp has 32 rows of w
and all rows of x in the tile, so that a block widens each code once.

    all:    copies of the first steps | (wait for a step, barrier, copies of a later one, mma) ...
    warp:   32 rows of w: codes -> registers, widened, scaled | each 8 rows of x: load, 4 mma ...
    end:    warps that share K add up in shared memory | scales, bias, one rounding, store

Copies: every thread copies its own pieces of x and w by cp.async, ``stages`` - 1 steps ahead.  A
lane loads scales and zeros of groups into registers, a step ahead; those of whole rows at the end.
Waits: each step all threads wait for their own copies, then meet at one block barrier.  It says
that the step's slot is full, and that the slot before has been read and may be refilled.  Warps
that share K meet at two more barriers at the end (``MidBlock.exchange``).
Writes: the lanes of the warps that finish sums store 4 neighbouring outputs of a row at a time.

Where few rows of w would leave multiprocessors idle, blocks share K (``parts``).  Each writes its
sums, and XLA adds, scales and rounds them.  int32 sums are added as such, so W8A8 stays exact.

Scales that vary along K multiply the weights, rounded once to bfloat16, as in ``many_rows``.

Floor: bytes of w once, or 2 M N K operations at the rate of mma.sync, whichever is longer.
Command: ``python -m benchmarks.kernels.mid_rows``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.launch import launch
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows.kernel import kinds_of, parts_of
from pallas_kernels.matmul.mid_rows.mid_program import MidBlock
from pallas_kernels.matmul.mid_rows.plan import MidStep, MidTile
from pallas_kernels.matmul.widen import FLOAT4_REST
from pallas_kernels.qtensor import QTensor


@functools.partial(jax.jit, static_argnames=("out_dtype", "tile"))
def matmul(
    x: jax.Array | QTensor, w: QTensor, bias: jax.Array | None, out_dtype: jnp.dtype, tile: MidTile
) -> jax.Array:
    """Return the product [M, N] of x [M, K] and w [N, K]; ``plan`` has the conditions.

    x is a QTensor of int8 with a scale a row, or in bfloat16 or float16.  bias: [N].
    """
    (m, k), n = x.shape, w.shape[0]
    step = MidStep.of(MatmulCall.of(x, w, out_dtype))
    scale_x = x.scale.astype(jnp.float32) if isinstance(x, QTensor) else None
    parts = parts_of(w)
    inputs = {
        "x": x.q if isinstance(x, QTensor) else x,
        "w": parts["w"],
        "scale": parts["scale"],
        "zero": w.zero,
        "unit": w.unit,
        "scale_x": scale_x,
        "bias": bias,
    }
    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    if tile.parts > 1:
        out = jax.ShapeDtypeStruct((tile.parts, m, n), jnp.int32 if step.exact else jnp.float32)
    kinds = kinds_of({**inputs, "out": out})

    def body(gmem, smem):
        MidBlock(tile, step, (m, n, k), kinds, gmem, smem).run()

    (sums,) = launch(
        body,
        inputs,
        {"out": out},
        name=tile.kernel,
        grid=tile.blocks(m, n),
        warpgroups=tile.warps // 4,
        scratch={"ring": tile.shared_bytes(step) // 4},
        registers=True,
    )
    if tile.parts == 1:
        return sums
    total = functools.reduce(jnp.add, sums).astype(jnp.float32)
    if step.w.float4:
        total = total * (FLOAT4_REST if w.unit is None else w.unit[:, 0] * FLOAT4_REST)
    elif not step.folds:
        scale = w.scale[:, 0].astype(jnp.float32)
        total = total * (scale if scale_x is None else scale_x * scale)
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    return total.astype(out_dtype)
