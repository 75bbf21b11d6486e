"""Checks of a product's operands beyond their dtypes and axes.

Each function raises ValueError that names the operand and the fact. The table of dtypes and axes
stands in ``matmul.op``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.weight import CpuWeight
from pallas_kernels.qtensor import QTensor


def check_codes(x: QTensor, w: jax.Array | QTensor | CpuWeight, has_norm: bool) -> None:
    """Raise ValueError for a quantized x that no scheme multiplies by w, or that has a norm."""
    if has_norm:
        raise ValueError(
            "quantized_matmul: a norm comes before x is quantized: rms_norm(x, weight, eps, "
            "quantize=...) gives the codes"
        )
    if not isinstance(w, QTensor):
        raise ValueError("quantized_matmul: a quantized x goes with a quantized w")
    pair = (jnp.dtype(x.dtype).name, jnp.dtype(w.dtype).name)
    if pair[0] not in ("int8", "float8_e4m3fn") or pair[1] not in (pair[0], "int4"):
        raise ValueError(
            f"quantized_matmul: no scheme multiplies {pair[0]} by {pair[1]} codes, x by w"
        )
    if x.columns is not None:
        raise ValueError("quantized_matmul: a quantized x has its columns in order")
    if pair == ("float8_e4m3fn", "float8_e4m3fn") and x.scale.shape[-1] > 1:
        groups = x.scale.shape[-1], w.scale.shape[-1]
        if groups[0] != groups[1]:
            raise ValueError(
                f"quantized_matmul: x has {groups[0]} groups of scales, and w {groups[1]}"
            )
        return
    for name, t in (("x", x), ("w", w)):
        if t.dtype == jnp.int4:
            if t.zero is not None and not jnp.issubdtype(t.zero.dtype, jnp.integer):
                raise ValueError("quantized_matmul: with a quantized x, w needs integer zeros")
        elif t.scale.shape[-1] != 1 or t.zero is not None:
            raise ValueError(
                f"quantized_matmul: with a quantized x, {name} needs one scale per row and no "
                f"zeros, not {t.scale.shape[-1]} groups"
                + (" with zeros" if t.zero is not None else "")
            )


def check_low_rank(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor | CpuWeight,
    inner: jax.Array,
    second: tuple[jax.Array, ...],
) -> None:
    """Raise ValueError for a low-rank term that does not fit the product."""
    op, ranks = "quantized_matmul", second[0].shape[-1]
    if not isinstance(x, QTensor):
        raise ValueError(f"{op}: low_rank goes with a quantized x")
    shape = (*x.shape[:-1], len(second) * ranks)
    fits = all(b.ndim == 2 and b.shape[1] == ranks and b.dtype == inner.dtype for b in second)
    if not fits or inner.shape != shape or sum(b.shape[0] for b in second) != w.shape[0]:
        raise ValueError(
            f"{op}: low_rank {inner.shape} and {[b.shape for b in second]} do not fit x {x.shape} "
            f"and w {w.shape}"
        )
