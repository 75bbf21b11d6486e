"""A gated product between static scales: codes of x in, codes of the next product's input out.

    y = x w^T,   codes of silu(gate) * up   with one scale that is given

On Hopper it is one kernel, the product's own: its epilogue has the sums of a gate and of its up
beside each other.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.device import lacking
from pallas_kernels.dispatch import Implementation, Reason, choose_plan
from pallas_kernels.fixed_sums import planned_rows
from pallas_kernels.matmul.many_rows.plan import PairTile, gated_tile
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.operands import check
from pallas_kernels.qtensor import QTensor, of_one_scale
from pallas_kernels.rows.swiglu import swiglu
from pallas_kernels.transform import Op, chosen

FEW_ROWS = 64  # of one tile
_NAME = "gated_matmul"
_OPERANDS = {"x": "float|QTensor [..., K]", "w": "float|QTensor [2F+, K]", "scale": "float []"}
_E4M3 = "float8_e4m3fn"


def gated_matmul(
    x: QTensor,
    w: QTensor,
    scale: jax.Array,
    *,
    dtype: DTypeLike,
    implementation: Implementation | None = None,
) -> QTensor:
    """Return ``silu(gate) * up`` of ``x w^T`` in x's dtype of codes, with a given scale.

    Parameters
    ----------
    x : QTensor [..., K]
        Rows in codes, as ``quantize_tokens`` makes them.
    w : QTensor [2F, K]
        Rows of gate, then of up, in codes of the same dtype.
    scale : float scalar
        Scale of the result's codes; values beyond their range are clipped.
    dtype : data-type
        Float dtype of what XLA's form stores between its parts. The kernel stores nothing.
    implementation : "xla", "mosaic" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    QTensor [..., F]
        With ``input_scale``.

    Raises
    ------
    ValueError
        Names the operand that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | scales: the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    check(_NAME, _OPERANDS, x=x, w=w, scale=scale)
    if not (isinstance(x, QTensor) and isinstance(w, QTensor)):
        raise ValueError(f"{_NAME}: x and w are codes, not floats")
    if w.shape[0] % 2:
        raise ValueError(f"{_NAME}: the {w.shape[0]} rows of w are not gate and up")
    scale = scale.astype(jnp.float32)
    found = choose_plan(_NAME, implementation, lambda: _plan(x, w), x, w)
    static = jnp.dtype(dtype), found
    return _gated(chosen(found, implementation), static, x, w, scale)


def _plan(x: QTensor, w: QTensor) -> PairTile | Reason:
    rows, (n, k) = planned_rows(math.prod(x.shape[:-1])), w.shape
    if reason := lacking("wgmma"):
        return Reason(reason)
    if not x.dtype == w.dtype == _E4M3:
        return Reason(f"codes of {x.dtype} and {w.dtype}: the kernel multiplies {_E4M3}")
    if x.scale.shape[-1] > 1 or w.scale.shape[-1] > 1 or w.columns is not None:
        return Reason("scales of groups of columns, or columns in another order")
    if not rows:
        return Reason("x has no rows")
    if n % 256 or k % 16:
        return Reason(f"w [{n}, {k}]: N is not a multiple of 256 or K not of 16")
    tile = gated_tile(rows)
    if rows > FEW_ROWS and -rows % (tile.m * tile.cluster) >= tile.m:
        return Reason(
            f"{rows} rows: a block of the last pair has none, and two kernels are faster", tile
        )
    return tile


_Static = tuple[jnp.dtype, PairTile | None]


def _kernel(static: _Static, x: QTensor, w: QTensor, scale: jax.Array) -> QTensor:
    from pallas_kernels.matmul.many_rows.pair import pair_matmul

    tile = static[1]
    assert tile is not None
    rows = math.prod(x.shape[:-1])
    of_x = x.scale.reshape(-1) if x.input_scale is None else x.input_scale.reshape(1)
    scales = of_x, w.scale.reshape(-1).astype(jnp.float32)
    codes, tile = x.q.reshape(rows, x.shape[-1]), tile.in_even_snakes(rows)
    out = pair_matmul(codes, w.q, *scales, None, x.dtype, tile, True, scale_out=scale.reshape(1))
    return of_one_scale(out.reshape(*x.shape[:-1], out.shape[-1]), scale)


def _xla(static: _Static, x: QTensor, w: QTensor, scale: jax.Array) -> QTensor:
    y = quantized_matmul(x, w, out_dtype=static[0])
    return swiglu(y, quantize=x.dtype, scale=scale)


_gated = Op(_NAME, _xla, _kernel)
