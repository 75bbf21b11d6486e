"""A file's blocks of 32 codes, in the layout of the CPU's products (``weight``).

    from_blocks(bytes[n, groups, size], bits, has_minimum) -> CpuWeight | None
    stacked(CpuWeight, experts)                            -> CpuWeight [experts, ...]

``prepare`` gives the same bits from a QTensor of these codes.  Most GGUF files hold such blocks
(Q4_0, Q4_1, Q8_0), and a process waits for them before its first text.  So codes of 4 bits are
never unpacked, which takes a fourth of the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pallas_kernels.cpu import pages
from pallas_kernels.cpu.weight import TILE, CpuWeight, WeightForm, by_tile

_AT_ONCE = 1 << 12  # blocks
_ROWS = 1 << 10  # rows in which a zero is searched at a time


def from_blocks(blocks: np.ndarray, bits: int, has_minimum: bool) -> CpuWeight | None:
    """The weight that a file stores in blocks of 32 columns, in the handler's layout.

    Parameters
    ----------
    blocks: uint8 ``[n, groups, bytes]``.  A block is a float16 scale, a float16 minimum if
        ``has_minimum``, and 32 codes.  Byte i of 4-bit codes has column i in its low half and
        column i + 16 in its high half.  A weight is ``(code - 8) * scale``, or
        ``code * scale + minimum``.
    bits: 4, or 8 for signed codes (``code * scale``), which have no minimum.

    Returns
    -------
    None if a scale or a minimum is not finite.  None, too, if ``minimum + 8 * scale``, the zero of
    a QTensor, is not exact in float32.
    """
    n, groups, _ = blocks.shape
    if n % TILE:
        more = np.zeros((-n % TILE, *blocks.shape[1:]), np.uint8)
        more[..., 4 if has_minimum else 2 :] = 0x88 if bits == 4 else 0  # codes 0
        blocks = np.concatenate((blocks, more))
    heads = [blocks[..., at : at + 2].view(np.uint16)[..., 0] for at in range(0, 4, 2)]
    heads = [np.ascontiguousarray(head) for head in heads[: 1 + has_minimum]]
    if any(((head & 0x7C00) == 0x7C00).any() for head in heads):
        return None
    zero = None
    if has_minimum:
        if not _has_exact_zero(heads[0], heads[1]):
            return None
        heads[1][heads[1] == 0x8000] = 0  # -0, as a difference of equal numbers
        rows = (slice(first, first + _ROWS) for first in range(0, n, _ROWS))
        if any(_zero(heads[0][at], heads[1][at], np.float32).any() for at in rows):
            zero = by_tile(heads[1]).view(np.float16)
    q = _tiled(blocks[..., 2 * len(heads) :], bits)
    dtype, zero_dtype = "int4" if bits == 4 else "int8", None if zero is None else "float32"
    form = WeightForm(n, 32 * groups, dtype, "float32", zero_dtype, zero is not None, None)
    scale = by_tile(heads[0]).view(np.float16)
    # numpy's arrays, as a QTensor of a file has.
    return CpuWeight(q, scale, zero, None, None, None, form)  # pyright: ignore[reportArgumentType]


def stacked(w: CpuWeight | None, count: int) -> CpuWeight | None:
    """A weight whose rows are those of ``count`` experts, as the weight ``[count, n, k]``.

    An expert's rows must be whole tiles.  None stays None.
    """
    if w is None:
        return None
    n = w.form.n // count

    def apart(v: np.ndarray | None) -> np.ndarray | None:
        return None if v is None else v.reshape(count, -1, *v.shape[1:])

    parts = {name: apart(getattr(w, name)) for name in ("q", "scale", "zero")}
    return dataclasses.replace(w, **parts, form=dataclasses.replace(w.form, n=n))


def _has_exact_zero(scale: np.ndarray, minimum: np.ndarray) -> bool:
    """Is ``minimum + 8 * scale`` exact in float32?  Both are float16, as uint16.

    The sum of two numbers of 11 bits is exact in 24 bits if their exponents are at most 12 apart.
    Most files pass that test, and then no float is computed.
    """
    exponents = [np.maximum(head >> 10 & 31, 1).astype(np.int8) for head in (scale, minimum)]
    apart = exponents[1] - exponents[0]
    if apart.min() >= 3 - 12 and apart.max() <= 3 + 12:
        return True
    return bool((_zero(scale, minimum, np.float32) == _zero(scale, minimum, np.float64)).all())


def _zero(scale: np.ndarray, minimum: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    floats = (head.view(np.float16).astype(dtype) for head in (minimum, scale))
    return next(floats) + dtype(8) * next(floats)


def _tiled(codes: np.ndarray, bits: int) -> np.ndarray:
    """``from_blocks``'s codes ``[n, groups, bytes]`` as ``CpuWeight.q``.

    Some thousand blocks are handled at a time, in one buffer, so that they stay in the cache.
    """
    n, groups, size = codes.shape
    out = pages.empty((n // TILE, groups, size // 4, TILE), np.uint32)
    step = max(1, _AT_ONCE // groups // TILE) * TILE
    buffer = np.empty((2, 4, min(step, n), groups), np.uint32)
    for first in range(0, n, step):
        rows = codes[first : first + step]
        words = [rows[..., at : at + 4].view(np.uint32)[..., 0] for at in range(0, size, 4)]
        if bits == 4:
            words = _in_order(words, buffer[:, :, : len(rows)])
        tiles = out[first // TILE : (first + step) // TILE]
        for i, word in enumerate(words):
            tiles[:, :, i] = word.reshape(-1, TILE, groups).swapaxes(1, 2)
    return out.view(np.uint8).reshape(n // TILE, -1)


def _in_order(words: Sequence[np.ndarray], buffer: np.ndarray) -> list[np.ndarray]:
    """The layout's words of 4-bit codes, in ``buffer[2, 4, ...]``.

    A file's words have four columns in their low halves, and the four columns 16 behind them in
    their high halves.
    """
    for word, to in zip(words, buffer[1], strict=True):
        to[...] = word
    np.bitwise_and(buffer[1], np.uint32(0x0F0F0F0F), out=buffer[0])
    buffer[1] ^= buffer[0]
    buffer[1] >>= np.uint32(4)
    columns, behind = buffer[:, ::2], buffer[:, 1::2]
    behind <<= np.uint32(4)
    columns |= behind
    return [*columns[0], *columns[1]]
