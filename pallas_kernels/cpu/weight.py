"""A weight as the CPU's products read it, and the way there and back.

    prepare(QTensor) -> CpuWeight | Reason        runs once, while a model is loaded.
    restore(CpuWeight) -> QTensor                 is its exact inverse.
    prepare_tree(params) -> params                prepares every QTensor that has a form, also
                                                  those in RowBlocks.  It moves large float
                                                  arrays to large pages.

A tile is 16 rows.  A tile stores the first 4 columns of all its rows (64 bytes), then the next 4
columns.  So each of the 16 lanes of a vector sums its own row, and no sum runs across lanes.

int4 codes are stored as code + 8, all other codes as they are.  In 64 bytes of 4-bit codes, columns
``8 j .. 8 j + 3`` are in the low halves and the next four columns in the high halves.  Scales and
zero points lie by tile, group, row, in float16 where that is exact, and 8-bit floats as they are.

Padding has codes 0 and scales 0.  Rows are padded to whole tiles.  The columns of a weight with
one group are padded to whole blocks.  The two levels of a two-level scale are multiplied into one;
``unit`` allows ``restore`` to separate them.  Beside float4_e2m1fn codes the levels stay apart.
One layout serves all targets.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from pallas_kernels.cpu import pages
from pallas_kernels.dispatch import Reason
from pallas_kernels.operands import short_repr
from pallas_kernels.qtensor import FLOAT4, QTensor, map_weights, tree_bytes
from pallas_kernels.rounding import E4M3, E8M0, NIBBLES

Params = TypeVar("Params")  # a tree of parameters
AnyArray = Any  # jax's or numpy's array, or its shape: no type has the methods of all
TILE = 16
_INT4, _FLOAT8 = np.dtype(ml_dtypes.int4), jnp.dtype(E4M3)
_ROWS = 1 << 10  # of a weight that are laid out at a time


@dataclasses.dataclass(frozen=True)
class WeightForm:
    """n, k, dtype: of the weight as a QTensor.  scale, zero: the dtypes that they had there.
    minimum: a floating zero stands beside code + 8, not beside the code.  activations, blocked: the
    QTensor's."""

    n: int
    k: int
    dtype: str
    scale: str
    zero: str | None
    minimum: bool
    activations: str | None
    blocked: int | None = None

    @property
    def bits(self) -> int:
        return 4 if self.dtype in NIBBLES else 8

    @property
    def is_float4(self) -> bool:
        return self.dtype == FLOAT4.name

    @property
    def is_float(self) -> bool:
        """Whether the codes are floats, of 4 bits or 8."""
        return self.dtype in (FLOAT4.name, E4M3)

    @property
    def has_unit(self) -> bool:
        """Whether the weight's ``unit`` multiplies the sums."""
        return self.is_float4 and self.scale == E4M3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CpuWeight:
    """A quantized weight ``[..., n, k]`` in the layout of the module's docstring.

    q ``[..., tiles, bytes]`` uint8; scale, zero ``[..., tiles, groups, 16]``; columns, input_scale
    and unit as a QTensor has them.
    """

    q: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    columns: jax.Array | None
    input_scale: jax.Array | None
    unit: jax.Array | None
    form: WeightForm = dataclasses.field(metadata={"static": True})

    __repr__ = short_repr

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-2], self.form.n, self.form.k)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> jnp.dtype:
        """The codes'."""
        return jnp.dtype(self.form.dtype)

    @property
    def activations(self) -> str | None:
        return self.form.activations

    @property
    def groups(self) -> int:
        return self.scale.shape[-2]

    @property
    def group_size(self) -> int:
        return self.form.k // self.groups

    @property
    def padded_k(self) -> int:
        return self.q.shape[-1] * 8 // (TILE * self.form.bits)

    @property
    def nbytes(self) -> int:
        return tree_bytes(self)

    @property
    def outline(self) -> QTensor:
        """The shapes of the QTensor that this was."""

        def like(last: int, dtype: DTypeLike) -> AnyArray:
            return jax.ShapeDtypeStruct((*self.shape[:-1], last), dtype)

        form = self.form
        zero = None if form.zero is None else like(self.groups, form.zero)
        unit = None if self.unit is None else like(1, self.unit.dtype)
        return QTensor(like(form.k, self.dtype), like(self.groups, form.scale), zero, unit=unit)

    def rows(self, index: jax.Array) -> QTensor:
        """Rows of a table ``[n, k]``, in int8 or float codes; ``dequantize`` makes floats."""
        tile, lane = index // TILE, index % TILE
        form = self.form
        q = _unpacked(self.q.reshape(*self.q.shape[:-1], -1, TILE, 4)[tile, :, lane], form)
        q, scale = q[..., : form.k], self.scale[tile, :, lane]
        if form.is_float:
            unit = self.unit[index] if form.is_float4 and self.unit is not None else None
            return QTensor(_floats(q, form), scale, columns=self.columns, unit=unit)
        zero = None if self.zero is None else self.zero[tile, :, lane]
        if form.bits == 4 and not (form.minimum or (zero is not None and zero.dtype == np.int8)):
            q = q - np.int8(8)
        return QTensor(q, scale, zero, columns=self.columns)


def prepare(w: QTensor) -> CpuWeight | Reason:
    """``w[N, K]``, or experts ``[E, N, K]``, in the handler's layout, or why it has none there.

    numpy's arrays in, numpy's arrays out; anything else comes as jax's arrays.  Needs the values,
    so nothing traced."""
    if reason := _reason(w):
        return Reason(reason)
    arrays = (w.q, w.scale if w.dtype == FLOAT4 else w.in_one_level.scale, w.zero)
    # Experts lie one behind the other, so they are the rows of one weight.
    q, scale, zero = (None if v is None else _rows(np.asarray(v)) for v in arrays)
    assert q is not None and scale is not None
    form, kept_scale, kept_zero = _numbers(w, scale, zero)
    parts: list[AnyArray] = [_packed(q, form, scale.shape[-1])]
    parts += [None if v is None else by_tile(v) for v in (kept_scale, kept_zero)]
    parts.append(None if w.unit is None else _aligned_copy(np.asarray(w.unit)))
    if not isinstance(w.q, np.ndarray):
        parts = [None if v is None else jax.device_put(v) for v in parts]
    q, scale, zero, unit = parts
    if len(w.shape) == 3:
        q, scale = (v.reshape(w.shape[0], -1, *v.shape[1:]) for v in (q, scale))
        zero = None if zero is None else zero.reshape(w.shape[0], -1, *zero.shape[1:])
        form = dataclasses.replace(form, n=w.shape[1])
    return CpuWeight(q, scale, zero, w.columns, w.input_scale, unit, form)


def _rows(v: np.ndarray) -> np.ndarray:
    return v.reshape(-1, v.shape[-1])


def restore(w: CpuWeight, codes: AnyArray | None = None) -> QTensor:
    """The QTensor that was prepared.  Plain jax.numpy (numpy, of numpy's arrays).

    codes: ``[..., n, k]``, where they are in rows already.
    """
    form, lead = w.form, w.scale.shape[:-3]

    def by_row(v: AnyArray) -> AnyArray:
        return v.swapaxes(-1, -2).reshape(*lead, -1, w.groups)[..., : form.n, :]

    q = _codes(w, lead) if codes is None else codes
    scale, zero = by_row(w.scale), None if w.zero is None else by_row(w.zero)
    if form.is_float4:
        return QTensor(q, scale, None, form.activations, w.columns, unit=w.unit)
    if zero is not None and form.zero is not None:
        if form.minimum:
            zero = zero.astype(np.float32) + np.float32(8) * scale.astype(np.float32)
        elif form.bits == 4 and jnp.issubdtype(zero.dtype, jnp.integer):
            zero = zero - np.int8(8)
        zero = zero.astype(form.zero)
    if w.unit is not None:
        scale = scale.astype(np.float32) / w.unit.clip(np.finfo(np.float32).tiny)
        scale = (scale + np.float32(0.5)).astype(np.int8)
    beside = form.activations, w.columns, w.input_scale, w.unit
    return QTensor(q, scale.astype(form.scale), zero, *beside, blocked=form.blocked)


def _codes(w: CpuWeight, lead: tuple[int, ...]) -> AnyArray:
    form = w.form
    q = w.q.reshape(*w.q.shape[:-1], -1, TILE, 4).swapaxes(-2, -3)
    q = _unpacked(q, form).reshape(*lead, -1, w.padded_k)[..., : form.n, : form.k]
    if form.is_float:
        return _floats(q, form)
    return (q - np.int8(8) if form.bits == 4 else q).astype(form.dtype)


def prepare_tree(params: Params) -> Params:
    """A tree of parameters with every QTensor prepared that has a form; others stay.

    Float arrays of at least a large page are copied to large pages: XLA's product with a tied
    embedding of 113 MB takes 8% less time from there.
    """

    def one(leaf: object) -> AnyArray:
        if not isinstance(leaf, QTensor):
            return _on_large_pages(leaf)
        found = prepare(leaf)
        return leaf if isinstance(found, Reason) else found

    return map_weights(one, params, QTensor)


def restore_tree(params: Params) -> Params:
    """A tree of parameters as it was before ``prepare_tree``."""

    def one(leaf: object) -> AnyArray:
        return restore(leaf) if isinstance(leaf, CpuWeight) else leaf

    return map_weights(one, params, CpuWeight)


def block_size(k: int, groups: int) -> int:
    """Columns of x that share a scale: 32, or 16 where w's groups divide no further."""
    return 32 if groups == 1 or k // groups % 32 == 0 else 16


def _reason(w: QTensor) -> str | None:
    if len(w.shape) not in (2, 3) or 0 in w.shape:
        return f"w {w.shape} is not [N, K]"
    if len(w.shape) == 3 and w.shape[1] % TILE:
        return f"w has experts of {w.shape[1]} rows, not a multiple of {TILE}"
    if w.q.dtype not in (_INT4, FLOAT4, _FLOAT8, np.int8):
        known = f"int4, int8, {FLOAT4.name} and {E4M3}"
        return f"w has codes of {w.dtype.name}; the handler reads {known}"
    if w.q.dtype == _FLOAT8 and (w.zero is not None or _has_nan(np.asarray(w.q))):
        return f"w has zero points or NaN beside {E4M3}"
    groups = w.scale.shape[-1]
    if groups > 1 and w.group_size % 16:
        return f"w has groups of {w.group_size} columns, not a multiple of 16"
    if w.zero is not None and np.issubdtype(w.zero.dtype, np.integer):
        low, high = (-8, 119) if w.q.dtype == _INT4 else (-128, 127)
        zero = np.asarray(w.zero)  # jax would compile a program for each shape
        if not low <= int(zero.min()) <= int(zero.max()) <= high:
            return f"w has zero points outside of {low} to {high}"
    if w.scale.dtype.name in (E4M3, E8M0):
        if w.zero is not None and not np.issubdtype(w.zero.dtype, np.integer):
            return "w has floating zero points beside scales of 8 bits"
        least = 255 if w.scale.dtype.name == E8M0 else 127  # the first code that is negative or NaN
        if np.any(np.asarray(w.scale).view(np.uint8) >= least):
            return "w has scales that are negative or NaN"
    return None


def _has_nan(q: np.ndarray) -> bool:
    """Whether there is a NaN among codes of float8_e4m3fn."""
    rows = _rows(q.view(np.uint8))
    parts = (rows[first : first + _ROWS] for first in range(0, len(rows), _ROWS))
    return any(bool(np.any(part & 127 == 127)) for part in parts)


@np.errstate(over="ignore", invalid="ignore")  # scales of a bad file come back as they were
def _numbers(
    w: QTensor, scale: np.ndarray, zero: np.ndarray | None
) -> tuple[WeightForm, np.ndarray, np.ndarray | None]:
    """The form, and scales and zeros as they are kept."""
    minimum, kept = False, zero
    if zero is not None and np.issubdtype(zero.dtype, np.integer):
        kept = zero.astype(np.int8)
        if w.q.dtype == _INT4:
            kept += np.int8(8)
    elif zero is not None:
        kept = zero
        if w.q.dtype == _INT4:
            below = zero.astype(np.float32) - np.float32(8) * scale.astype(np.float32)
            back = (below + np.float32(8) * scale.astype(np.float32)).astype(zero.dtype)
            if minimum := np.array_equal(_bits(back), _bits(zero)):
                kept = below
        kept = _narrow(kept)
    names = w.scale.dtype.name, None if zero is None else zero.dtype.name
    rest = minimum, w.activations, w.blocked
    form = WeightForm(len(scale), w.shape[-1], w.q.dtype.name, *names, *rest)
    return form, scale if names[0] in (E4M3, E8M0) else _narrow(scale), kept


def _bits(v: np.ndarray) -> np.ndarray:
    """So that NaN equals itself, and 0 is not -0."""
    return np.ascontiguousarray(v).view(f"u{v.dtype.itemsize}")


@np.errstate(over="ignore", invalid="ignore")
def _narrow(v: np.ndarray) -> np.ndarray:
    """In float16 where nothing is lost."""
    half = v.astype(np.float16)
    return half if np.array_equal(_bits(half.astype(v.dtype)), _bits(v)) else v


def _on_large_pages(leaf: object) -> object:
    """Copy a large float array to large pages; return any other leaf unchanged."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, np.ndarray | jax.Array):
        return leaf
    if leaf.nbytes < pages.PAGE or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    copy = _aligned_copy(np.asarray(leaf))
    return copy if isinstance(leaf, np.ndarray) else jax.device_put(copy)


def _aligned_copy(v: np.ndarray) -> np.ndarray:
    out = pages.empty(v.shape, v.dtype)
    out[...] = v
    return out


def by_tile(v: np.ndarray) -> np.ndarray:
    """``[N, groups]`` -> ``[tiles, groups, 16]``."""
    n, groups = v.shape
    tiles = -(-n // TILE)
    out = pages.empty((tiles, groups, TILE), v.dtype)
    out[-1] = 0
    whole = n // TILE
    out[:whole] = v[: whole * TILE].reshape(whole, TILE, groups).swapaxes(1, 2)
    if whole < tiles:
        out[-1, :, : n % TILE] = v[whole * TILE :].T
    return out


def _packed(q: np.ndarray, form: WeightForm, groups: int) -> np.ndarray:
    tiles = -(-form.n // TILE)
    block = block_size(form.k, groups)
    k = -(-form.k // block) * block
    out = pages.empty((tiles, k * TILE * form.bits // 8 // 64, TILE), np.uint32)
    for first in range(0, form.n, _ROWS):
        rows = q[first : first + _ROWS].view(np.int8)  # of int4 the upper bits are anything
        count = -(-len(rows) // TILE)
        if rows.shape != (count * TILE, k):
            padded = np.zeros((count * TILE, k), np.int8)
            padded[: len(rows), : form.k] = rows
            rows = padded
        rows = np.ascontiguousarray(rows)
        if form.bits == 4:
            words = _eights(rows.view(np.uint64), form.is_float4).reshape(count, TILE, -1)
        else:
            words = rows.view(np.uint32).reshape(count, TILE, -1)
        out[first // TILE : first // TILE + count] = words.swapaxes(1, 2)
    return out.view(np.uint8).reshape(tiles, -1)


def _eights(v: np.ndarray, is_float4: bool) -> np.ndarray:
    """Eight 4-bit codes, a byte each, int4 as code + 8: the first four in the low halves of the
    lowest four bytes, the next four in their high halves."""
    found = v >> np.uint64(28)
    found &= np.uint64(0xF0F0F0F0)
    found |= v & np.uint64(0x0F0F0F0F)
    if not is_float4:
        found ^= np.uint64(0x88888888)  # of 4 bits, + 8
    return found.astype(np.uint32)


def _unpacked(q: AnyArray, form: WeightForm) -> AnyArray:
    """``[..., units, 4]`` bytes as codes ``[..., columns]``, int8; of 4 bits code + 8."""
    if form.bits == 4:
        stack = np.stack if isinstance(q, np.ndarray) else jnp.stack
        q = stack([q & np.uint8(15), q >> np.uint8(4)], axis=-2)
        return q.astype(np.int8).reshape(*q.shape[:-3], -1)
    q = q.view(np.int8) if isinstance(q, np.ndarray) else jax.lax.bitcast_convert_type(q, np.int8)
    return q.reshape(*q.shape[:-2], -1)


def _floats(q: AnyArray, form: WeightForm) -> AnyArray:
    """int8 (of 4 bits 0..15) as the floats of these bits."""
    dtype = jnp.dtype(form.dtype)
    if isinstance(q, np.ndarray):
        return q.view(dtype)
    return jax.lax.bitcast_convert_type(q.astype(jnp.uint4) if form.is_float4 else q, dtype)
