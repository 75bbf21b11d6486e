"""How a recurrence's kernels take a call: the operands that they accept, padding, and segments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu
from pallas_kernels.fixed_sums import planned_rows

WIDTHS = 64, 128, 256, 512  # of keys
VALUE_BLOCK = 128  # value channels of a block: two warpgroups of 64


@dataclasses.dataclass(frozen=True)
class ScanPlan:
    """segments: parts of a row that are scanned side by side."""

    kernel: ClassVar[str]
    segments: int

    def representative(self) -> ScanPlan:
        return dataclasses.replace(self, segments=min(self.segments, 2))

    def __str__(self) -> str:
        return f"{self.segments} segments a row"


def planned_batch(batch: int, length: int) -> int:
    """Return the number of rows for which a call of ``batch`` rows of ``length`` tokens is planned.

    With ``fixed_sums`` they are those of a block, so a row's segments do not depend on the others.
    """
    return max(planned_rows(batch * length) // max(length, 1), 1)


def segments_for(
    blocks: int, n_chunks: int, microseconds: Callable[[int], float] = lambda n: -n
) -> int:
    """Return the number of segments of a row that takes the least time.

    All segments run in one wave, and each has four chunks at least.

    blocks: of the grid, without segments.  microseconds: time of a call by the number of segments;
    by default as many as possible are the fastest.
    """
    most = max(1, min(gpu().sms // max(1, blocks), n_chunks // 4))
    return min(range(1, most + 1), key=microseconds)


def shapes_reason(q: jax.Array, v: jax.Array, block: int) -> str | None:
    """Return why GLA's kernels cannot take the widths of q and v, or None.

    block: Dv has to be a multiple of it.
    """
    if q.shape[-1] not in WIDTHS:
        return f"q has Dk = {q.shape[-1]}, which is not 64, 128, 256 or 512"
    if v.shape[-1] % block:
        return f"v has Dv = {v.shape[-1]}, not a multiple of {block}"
    return None


def operands_reason(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> str | None:
    """Return why kernels that multiply the state in 16 bits cannot take q, k and v, or None.

    They take bfloat16 only, because float16 ends at 65,504.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != jnp.bfloat16:
            return f"{name} is {x.dtype}, the kernel takes bfloat16"
    return shapes_reason(q, v, block)


def padded(x: jax.Array | None, block: int = VALUE_BLOCK) -> jax.Array | None:
    """Pad x with zero channels to whole blocks; their state is zeros and nothing else reads it."""
    if x is None or x.shape[-1] % block == 0:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
