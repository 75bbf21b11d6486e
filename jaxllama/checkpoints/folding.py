"""Convert a checkpoint's tensors to the values of parameters, and back
(``model.param.TensorSource``).

The conversion applies multipliers, offsets, and the order of the rows that RoPE rotates. It is
computed in float32 with one cast at the end. For quantized rows the codes keep their values, and
scales and floating-point zeros take the multiplier.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from jaxllama.model.param import Stacked, TensorSource
from jaxllama.typing import JsonObject, Tree

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor


def fold(source: TensorSource, value: Tree) -> Tree:
    """Return a tensor (an array, or a QTensor of ``source.shape``) as rows of its parameter."""
    if isinstance(source.turned, Stacked) and isinstance(value, np.ndarray):
        return _stacked(source, value, inverse=False)
    return _moved(value, source.row_order(), source.factor(_axes(value)), source.offset)


def fold_rows(source: TensorSource, value: np.ndarray) -> np.ndarray:
    """``fold`` of an array that has a value or a row for each row of the tensor, as an adapter's
    second factor ``[out, r]`` has."""
    moved = _moved(value, source.row_order(), source.factor(value.ndim), 0.0)
    assert isinstance(moved, np.ndarray)
    return moved


def unfold_rows(source: TensorSource, value: np.ndarray) -> np.ndarray:
    """The inverse of ``fold_rows``."""
    moved = _moved(value, source.row_order(inverse=True), 1.0 / source.factor(value.ndim), 0.0)
    assert isinstance(moved, np.ndarray)
    return moved


def unfold(source: TensorSource, value: Tree) -> Tree:
    """The inverse of ``fold``."""
    if isinstance(source.turned, Stacked) and isinstance(value, np.ndarray):
        return _stacked(source, value, inverse=True)
    order, factor = source.row_order(inverse=True), source.factor(_axes(value))
    return _moved(value, order, 1.0 / factor, -source.offset / source.scale)


def _axes(value: Tree) -> int:
    return value.ndim if isinstance(value, np.ndarray) else 2


def _stacked(source: TensorSource, value: np.ndarray, inverse: bool) -> np.ndarray:
    """``fold`` and its inverse of all experts' matrices."""
    scale = np.float32(1.0 / source.scale if inverse else source.scale)
    if source.is_transposed and not inverse:
        value = value.swapaxes(-1, -2)
    order = source.row_order(inverse)
    assert order is not None
    value = value.reshape(source.n_rows, -1)[order].reshape(source.shape)
    if scale != 1.0:
        value = (value.astype(np.float32) * scale).astype(value.dtype)
    return value.swapaxes(-1, -2) if source.is_transposed and inverse else value


def _moved(value: Tree, order: np.ndarray | None, factor: np.ndarray, offset: float) -> Tree:
    is_whole = bool(np.all(factor == 1.0))
    if isinstance(value, np.ndarray):
        value = value if order is None else value[order]
        if is_whole and offset == 0.0:
            return value
        out = value.astype(np.float32) * factor + np.float32(offset)
        return out.astype(value.dtype)
    assert offset == 0.0, "only norms have offsets, and they are never quantized"
    moved = value if order is None else value.rows(order)
    moved = moved if is_whole else _times(moved, factor)
    return moved.found_blocks() if value.has_blocks else moved


def _times(w: QTensor, factor: np.ndarray) -> QTensor:
    if w.unit is not None:
        assert np.ndim(factor) == 0, "one unit for all rows"
        return dataclasses.replace(w, unit=w.unit * factor)
    changes: JsonObject = {"scale": np.asarray(w.scale, np.float32) * factor, "blocked": None}
    if w.zero is not None and not np.issubdtype(np.dtype(w.zero.dtype), np.integer):
        changes["zero"] = np.asarray(w.zero, np.float32) * factor
    return dataclasses.replace(w, **changes)
