"""The row-wise kernel's computation and its division, as plain data.

Nothing here needs Pallas, so calls that end in XLA do not import it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.fixed_sums import planned_rows

QMAX = {"s8": 127.0, "e4m3": 448.0}
KIND = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "int8": "s8",
    "float8_e4m3fn": "e4m3",
}
BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s8": 1, "e4m3": 1}
MAX_WIDTH, MAX_RANKS = 32768, 256
_OTHER_BYTES = 27 * 1024  # of the shared memory beside the ring, at most


@dataclasses.dataclass(frozen=True)
class RowOp:
    """The computation of one call; dtypes are named by the kinds of ``KIND``."""

    form: str  # "norm", "gate", "copy"
    width: int  # of the result
    x: str
    out: str
    weight: str | None = None
    residual: bool = False
    eps: float = 0.0
    adapters: tuple[int, int, int] | None = None  # n, sources, rank: also their inner products
    given: bool = False  # codes have one scale, an operand, instead of one found for each row

    @property
    def finds_scales(self) -> bool:
        """Whether codes have a scale for the row's largest value."""
        return self.out in QMAX and not self.given

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of x."""
        return 2 * self.width * (2 if self.form == "gate" else 1)


@dataclasses.dataclass(frozen=True)
class RowsPlan:
    """threads: of a block.  split: blocks of a cluster, side by side in a row.  ring: rows in
    shared memory, 0 for none; then ``blocks`` of them take turns at all rows."""

    kernel: ClassVar[str] = "rowwise_mosaic"
    op: RowOp = dataclasses.field(repr=False)
    threads: int
    split: int = 1
    ring: int = 0
    blocks: int = dataclasses.field(default=0, repr=False)

    def representative(self) -> RowsPlan:
        return dataclasses.replace(self, op=RowOp(self.op.form, 1024, "bf16", "bf16"))


def plan(
    form: str,
    x: jax.Array,
    out: str,
    weight: jax.Array | None = None,
    residual: jax.Array | None = None,
    eps: float = 0.0,
    *,
    first: jax.Array | None = None,
    given: bool = False,
    name: str = "x",
) -> RowsPlan | Reason:
    """How the kernel computes ``out`` (a dtype) from the rows of x, the operand called ``name``.
    first: of ``low_rank``'s adapters. given: the codes' scale is an operand."""
    width = x.shape[-1] // (2 if form == "gate" else 1)
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return Reason(f"{name} has rows of {x.dtype}; the kernel reads bfloat16 and float16")
    if out not in KIND:
        return Reason(f"a result of {out}")
    if width % 8 or not 8 <= width <= MAX_WIDTH:
        return Reason(f"{name} {x.shape}: width {width} is not a multiple of 8 up to {MAX_WIDTH}")
    scales = None if weight is None else KIND[weight.dtype.name]
    kinds = KIND[x.dtype.name], KIND[out], scales
    op = RowOp(form, width, *kinds, residual is not None, eps, given=given)
    rows = planned_rows(x.size // x.shape[-1])
    card = gpu().rows
    if first is not None:
        if first.dtype != x.dtype:
            return Reason(f"adapters of {first.dtype} and {name} of {x.dtype}")
        if rows > card.adapted_rows:
            return Reason(f"{name} has {rows} rows: up to {card.adapted_rows} read adapters alone")
        if first.shape[1] * first.shape[2] > MAX_RANKS:
            return Reason(f"a row has {first.shape[1]} x {first.shape[2]} ranks, over {MAX_RANKS}")
        op = dataclasses.replace(op, adapters=first.shape[:3])
    found = divided(op, rows)
    if width < card.least_width:
        return Reason(f"XLA is as fast below {card.least_width} columns", found)
    above, most = card.slow_gates
    slower = rows == 1 or (form == "gate" and above < rows <= most)
    if given and form != "norm" and slower:
        return Reason(f"XLA is as fast for {rows} rows in codes of a given scale", found)
    return found


def divided(op: RowOp, rows: int) -> RowsPlan:
    """How the rows are cut; the numbers behind it are in ``docs/lab/rows.md``."""
    card = gpu().rows
    if op.adapters is not None:
        is_wide = op.width > card.split_width and op.width % 16 == 0
        split = 2 if is_wide and gpu().clusters else 1
        return RowsPlan(op, min(256, _threads(op.width // split, 1)), split)
    if op.form != "gate":
        few = rows <= card.few_rows or op.out not in QMAX
        return RowsPlan(op, _threads(op.width, 2 if few else 4))
    if rows >= card.ring_rows and gpu().bulk_copies:
        threads = _threads(op.width, 2)
        blocks = max(1, 1024 // threads)
        if 2 * blocks * op.row_bytes <= gpu().shared_bytes - _OTHER_BYTES:
            return RowsPlan(op, threads, ring=2, blocks=gpu().sms * blocks)
    is_split = rows <= card.split_gate_rows and op.width >= card.split_gate_width
    if is_split and op.width % 32 == 0 and gpu().clusters:
        return RowsPlan(op, 256, split=4)
    # Without a largest value to find, the assembler interleaves all chunks: 8 take 224 registers.
    return RowsPlan(op, _threads(op.width, 2 if op.given else 8))


def _threads(width: int, chunks: int) -> int:
    """Threads of a block, each with ``chunks`` times 8 columns where that makes 128 to 1024."""
    return min(1024, max(128, -(-width // (8 * chunks * 128)) * 128))
