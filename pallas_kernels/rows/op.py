"""What the row-wise Mosaic kernel takes, and with how many threads and blocks it is started.

The kernel itself, and what was tried, is in ``rows.kernel``; rms_norm, swiglu and
quantize_tokens come here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, launching
from pallas_kernels.dispatch import choose as dispatch_choose
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rows.plan import KIND, QMAX, SMS, Op, Plan

_HALVES = ("bfloat16", "float16")
MIN_WIDTH, MAX_WIDTH = 1024, 32768
_RING_BYTES = 200 * 1024  # of the 227 KB that a multiprocessor's blocks share


def unsupported(x: jax.Array, width: int, out: str, name: str = "x") -> str | None:
    """Why the kernel does not take rows of x, an operand called ``name``, with a result of
    ``width`` columns of ``out``."""
    if x.dtype.name not in _HALVES:
        return f"{name} has rows of {x.dtype.name}; the kernel reads bfloat16 and float16"
    if out not in KIND:
        return f"a result of {out}"
    if width % 8 or not 8 <= width <= MAX_WIDTH:
        return f"{name} {x.shape}: width {width} is not a multiple of 8 up to {MAX_WIDTH}"
    return None


def choose(
    op: str, implementation: Implementation | None, reason: str | None, width: int, *operands
) -> Implementation:
    """dispatch.choose, with XLA for the widths at which the kernel was never timed against it:
    below MIN_WIDTH most of a block's 128 threads would have nothing to do."""
    if implementation is None and reason is None and width < MIN_WIDTH:
        reason = f"XLA is as fast below {MIN_WIDTH} columns"
    return dispatch_choose(op, implementation, reason, *operands)


def plan(op: Op, rows: int) -> Plan:
    """How the kernel runs; the numbers behind it are in ``rows.kernel``."""
    if op.form != "gate":
        few = rows <= 64 or op.out not in QMAX
        return Plan(_threads(op.width, 2 if few else 4))
    if rows >= 1024:
        threads = _threads(op.width, 2)
        blocks = max(1, 1024 // threads)
        if 2 * blocks * op.row_bytes <= _RING_BYTES:
            return Plan(threads, ring=2, blocks=SMS * blocks)
    if rows <= 32 and op.width >= 4096 and op.width % 32 == 0:
        return Plan(256, split=4)
    return Plan(_threads(op.width, 8))


def _threads(width: int, chunks: int) -> int:
    """Threads of a block, each with ``chunks`` times 8 columns where that makes 128 to 1024."""
    return min(1024, max(128, -(-width // (8 * chunks * 128)) * 128))


def norm(
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    eps: float,
    *,
    quantize: str | None,
    out_dtype: str,
) -> jax.Array | QTensor | tuple[jax.Array | QTensor, jax.Array]:
    """y or, with a residual, (y, sum)."""
    op = Op(
        "norm",
        x.shape[-1],
        KIND[x.dtype.name],
        KIND[quantize or out_dtype],
        KIND[weight.dtype.name],
        residual is not None,
        eps,
    )
    out = _run(op, x, residual, weight)
    y = out[0] if quantize is None else QTensor(out[0], out[1])
    return y if residual is None else (y, out[-1])


def gate(gate_up: jax.Array, *, quantize: str) -> QTensor:
    kinds = KIND[gate_up.dtype.name], KIND[quantize]
    return QTensor(*_run(Op("gate", gate_up.shape[-1] // 2, *kinds), gate_up))


def tokens(x: jax.Array, *, quantize: str) -> QTensor:
    kinds = KIND[x.dtype.name], KIND[quantize]
    return QTensor(*_run(Op("copy", x.shape[-1], *kinds), x))


def _run(op: Op, x, residual=None, weight=None) -> list[jax.Array]:
    lead = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1])
    launching("rowwise_mosaic", lambda: plan(op, rows.shape[0]))
    from pallas_kernels.rows import kernel as rowwise_mosaic

    if residual is not None:
        residual = residual.reshape(rows.shape)
    out = rowwise_mosaic.run(op, plan(op, rows.shape[0]), rows, residual, weight)
    return [jnp.reshape(a, (*lead, a.shape[-1])) for a in out]
