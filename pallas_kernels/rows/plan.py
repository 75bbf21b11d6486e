"""What the row-wise kernel is asked for, as plain data: the operation, the launch, the kinds of
elements.  Nothing here needs Pallas, so that calls which end in XLA do not import it."""

from __future__ import annotations

import dataclasses

SMS = 132
QMAX = {"s8": 127.0, "e4m3": 448.0}
KIND = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "int8": "s8",
    "float8_e4m3fn": "e4m3",
}
BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s8": 1, "e4m3": 1}


@dataclasses.dataclass(frozen=True)
class Op:
    """What is computed; kinds are those of ``KIND``."""

    form: str  # "norm", "gate", "copy"
    width: int  # of the result
    x: str
    out: str
    weight: str | None = None
    residual: bool = False
    eps: float = 0.0

    @property
    def row_bytes(self) -> int:
        """Of one row of x."""
        return 2 * self.width * (2 if self.form == "gate" else 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """threads: of a block.  split: blocks of a cluster, side by side in a row.  ring: rows in
    shared memory, 0 for none; then ``blocks`` of them take turns at all rows."""

    threads: int
    split: int = 1
    ring: int = 0
    blocks: int = 0
