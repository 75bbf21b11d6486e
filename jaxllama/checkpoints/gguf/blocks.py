"""A parameter's values as a GGUF tensor's blocks: the way back of ``codes``.

    kind_of(w)          the type that holds a QTensor's codes, or Obstacle
    of_codes(w, kind)   QTensor [rows, columns] -> uint8 [rows, row_bytes]
    of_floats(x, kind)  floats [rows, columns] -> uint8 [rows, row_bytes]

Codes are written bit for bit: symmetric int4 as Q4_0, int4 with zeros as Q4_1, int8 as Q8_0, MXFP4
as MXFP4. Scales of wider groups repeat every 32 columns. Scales and minima are float16 in a file;
the minimum of an integer zero point is ``-(zero + 8) * scale``.

Floats are rounded by ``gguf.quants`` and, for the K types, by ``k_quants``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxllama.checkpoints.gguf import k_quants
from jaxllama.checkpoints.gguf.types import BLOCKS, FLOATS
from jaxllama.checkpoints.gguf.types import TensorType as Type
from jaxllama.checkpoints.packed.codes import E8M0, FP4, INT4, INT8
from jaxllama.errors import JaxLlamaError

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor

# Types to which floats can be rounded, and the one for rows that are not whole blocks of the first.
WRITABLE = (
    *FLOATS,
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4),
    *k_quants.KINDS,
)
_NARROWER = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
_GROUP = 32


class Obstacle(JaxLlamaError):
    """Why no type holds a quantized weight."""


def kind_of(w: QTensor) -> Type:
    """Return the type that holds the codes of ``w[..., columns]``; raise Obstacle if none does."""
    words = np.dtype(w.q.dtype)
    if w.activations is not None:
        raise Obstacle(f"it has no {w.activations} activations")
    if w.columns is not None:
        raise Obstacle("it has no act-order (columns)")
    if words == FP4 and np.dtype(w.scale.dtype) == E8M0 and w.group_size == _GROUP:
        return Type.MXFP4
    if words not in (INT4, INT8) or w.unit is not None:
        raise Obstacle(f"it has no {words} codes with {w.scale.dtype} scales")
    if w.group_size % _GROUP:
        raise Obstacle(f"it has no groups of {w.group_size} columns, only multiples of {_GROUP}")
    if words == INT8 and w.zero is not None:
        raise Obstacle("it has no zeros beside int8 codes")
    if w.zero is not None:
        return Type.Q4_1
    return Type.Q4_0 if words == INT4 else Type.Q8_0


def kind_for(kind: Type, columns: int) -> Type:
    """Return the type of floats in rows of ``columns``: ``kind``, or the nearest that fits."""
    kind = kind if columns % BLOCKS[kind][0] == 0 else _NARROWER.get(kind, kind)
    return kind if columns % BLOCKS[kind][0] == 0 else Type.F16


def of_floats(x: np.ndarray, kind: Type) -> np.ndarray:
    """Return floats ``[rows, columns]`` as rows of bytes."""
    if kind in k_quants.KINDS:
        return k_quants.quantize(x.astype(np.float32), kind)
    if kind == Type.F16:
        return np.ascontiguousarray(x.astype(np.float16)).view(np.uint8)
    if kind == Type.F32 or np.dtype(x.dtype).itemsize == 2 == BLOCKS[kind][1]:
        x = x.astype(np.float32) if kind == Type.F32 else x
        return np.ascontiguousarray(x).view(np.uint8)
    import gguf

    rounded = gguf.quants.quantize(x.astype(np.float32), gguf.GGMLQuantizationType(int(kind)))
    return rounded.view(np.uint8)


def of_codes(w: QTensor, kind: Type) -> tuple[np.ndarray, bool]:
    """Return the codes as rows of bytes, and whether float16 holds all scales and minima exactly.

    w: ``[rows, columns]``, in the host's memory. Raises JaxLlamaError for a scale beyond float16.
    """
    q, scale = np.asarray(w.q), np.asarray(w.scale)
    repeats = w.group_size // _GROUP
    blocks = q.reshape(len(q), -1, _GROUP)
    if kind == Type.MXFP4:
        powers = scale.view(np.uint8)[..., None]
        return _joined(powers, _halves(blocks.view(np.uint8))), True
    half, exact = _half(scale.astype(np.float32))
    heads = [half]
    words = blocks.astype(np.int8)
    if w.zero is not None:
        zero, step = np.asarray(w.zero), half.astype(np.float64)
        is_integer = np.issubdtype(zero.dtype, np.integer)
        above = zero.astype(np.float64)
        minimum, is_same = _half(-(above + 8) * step if is_integer else above - 8 * step)
        heads.append(minimum)
        exact &= is_same
    repeated = [np.repeat(head, repeats, axis=1)[..., None].view(np.uint8) for head in heads]
    if kind == Type.Q8_0:
        return _joined(*repeated, words.view(np.uint8)), exact
    return _joined(*repeated, _halves((words + np.int8(8)).view(np.uint8))), exact


@np.errstate(over="ignore")
def _half(values: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return values as float16, and whether they are the same."""
    half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise JaxLlamaError("a scale is not finite in float16, which the format has")
    return half, bool(np.array_equal(half.astype(values.dtype), values))


def _halves(words: np.ndarray) -> np.ndarray:
    """Return words of 4 bits ``[..., 32]`` as bytes: word i below word i + 16."""
    return words[..., :16] & 15 | words[..., 16:] << 4


def _joined(*parts: np.ndarray) -> np.ndarray:
    blocks = np.concatenate(parts, axis=-1)
    return blocks.reshape(len(blocks), -1)
