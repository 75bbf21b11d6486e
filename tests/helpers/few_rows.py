"""The kernels of few rows on numpy."""

from __future__ import annotations

import contextlib
import dataclasses

from pallas_kernels.matmul import widen
from pallas_kernels.matmul.call import Around
from pallas_kernels.matmul.few_rows import (
    block,
    blocks,
    kernel,
    operands,
    posted,
    row,
    row_loops,
    row_x,
    several,
    tile,
    tile_loop,
    tile_x,
)
from pallas_kernels.matmul.few_rows.plan import divide_tiles
from tests.helpers.warp_emulator import emulated

_TILES = block, tile, tile_loop, tile_x


def few_rows() -> contextlib.AbstractContextManager[None]:
    """Within, they compute on concrete arrays."""
    rows = row, row_loops, row_x
    return emulated(blocks, operands, posted, *rows, several, widen, *_TILES)


def run_tiles(
    x,
    w,
    bias,
    out_dtype,
    *,
    norm=None,
    swiglu=False,
    activation="silu",
    residual=None,
    pending=None,
    **changes,
):
    """The tile kernel's; ``changes`` to its plan (clusters, per, batch, depth)."""
    gamma, eps = (None, None) if norm is None else norm
    fused = {"bias": bias is not None, "residual": residual is not None, "pairs": swiglu}
    plan = dataclasses.replace(divide_tiles(x.shape[0], w, **fused), **changes)
    around = Around(out_dtype, bias, gamma, eps, residual, pending, swiglu, activation)
    with few_rows():
        return kernel.matmul(x, w, around, plan)
