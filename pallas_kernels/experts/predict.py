"""Predicted microseconds of the forms of a grouped product on an accelerator.

Bytes over the device's rates, plus a start for each kernel, from ``device.gpu``.
"""

from __future__ import annotations

import math
from typing import Any

from pallas_kernels.device import gpu
from pallas_kernels.experts.blocks import most_blocks
from pallas_kernels.qtensor import QTensor, tree_bytes

_LEAST_ROWS, _MOST_ROWS = 16, 512  # of a block on an accelerator


def block_rows(n_pairs: int, n_experts: int) -> int:
    """Rows of a block on an accelerator: the power of two at an expert's mean number of pairs."""
    mean = max(1, n_pairs // n_experts)
    return min(_MOST_ROWS, max(_LEAST_ROWS, 1 << (mean - 1).bit_length()))


def shortest_form(w: Any, n_pairs: int) -> Any:
    """The form with the shortest predicted time, of a weight ``[E, out, in]`` and so many pairs."""
    return min(("gather", "blocks"), key=lambda form: form_us(form, w, n_pairs))


def form_us(form: str, w: Any, n_pairs: int) -> float:
    """Predicted microseconds of a form of the product."""
    device, (n_experts, out, width) = gpu(), w.shape
    stored = tree_bytes(w) / n_experts  # of one expert
    if form == "gather":
        return device.costs["xla row float"].start + 1e6 * n_pairs * stored / device.sum_rate
    size = block_rows(n_pairs, n_experts)
    copied = 2 * 2 * out * width if isinstance(w, QTensor) else 0
    moved = 1e6 * (stored + copied) / device.copy_rate
    multiplied = 1e6 * 2 * size * out * width / device.product_rates["bfloat16"]
    start = device.costs["xla float"].start + device.costs["between kernels"].start
    return most_blocks(n_pairs, n_experts, size) * (start + math.hypot(moved, multiplied))
