"""QTensor: a quantized array as a pytree node (codes, scales), and the way to floats and back.

Invariants, for the logical array ``w[..., K]`` (weights are ``[out, in]``: K is the contraction):

* ``q[..., K]`` holds the codes: int8, int4 (signed, -8..7), float8_e4m3fn or float4_e2m1fn
  (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives).
* ``scale[..., n_groups]`` is floating; group ``g`` covers ``K // n_groups`` consecutive columns.
  ``n_groups == 1`` is one scale for a whole row: per output channel of a weight, per token of an
  activation.
* ``unit[..., 1]`` (float32, or None) multiplies the scales of a row: scales in two levels.  The
  scales are int8 beside int4 codes, so that (q - zero) * scale is int8, and a product with int8
  codes exact.  They are float8_e4m3fn beside float4_e2m1fn codes.
* ``zero`` has the shape of ``scale`` or is None.  Its dtype says which of the two affine forms the
  format uses, so that either imports without rounding:
  integer  ``w = (q - zero) * scale``   (AWQ, GPTQ: unsigned codes are stored as ``code - 8``),
  floating ``w = q * scale + zero``     (GGUF Q4_1, Q5_1: a minimum beside the scale).
* ``activations`` is static: the dtype to which products with this weight quantize the other operand
  (W8A8, FP8, W4A8), or None for a weight-only scheme.  Each token has its own scale, unless
  ``input_scale`` (float32 scalar) is present: then that is the scale of every token.
* ``blocked`` is static: the rows of w where each 128 of them, from the first, share their scales
  (FP8's blocks), or None where nobody knows.  It says nothing about an array with another
  number of rows, so parts of a weight need not forget it.
* ``columns`` (int32 ``[K]``, or None for the identity) maps each column of ``q`` to its column of
  w.  The groups of GPTQ's act-order are not consecutive in w, so columns are stored sorted by
  group.  A matmul takes its other operand's features in that order; ``dequantize`` undoes it.
* ``interleaved`` is static: whether ``columns`` are those of ``matmul.interleave``, which a kernel
  reads without moving x.  It is a note: whoever does not know it takes ``columns``.

A row of zeros has codes 0, and dequantizes to zeros.  Its scale is 0, or 1 in float8_e8m0fnu, which
has no 0.

The named formats of ``quantize`` are these:

    mxfp4      float4_e2m1fn codes, a float8_e8m0fnu scale (a power of two) for 32 columns
    nvfp4      float4_e2m1fn codes, a float8_e4m3fn scale for 16 columns; ``unit`` is the tensor's
               float32 scale, once a row, so that weights with other scales can share an array
    fp8-block  float8_e4m3fn codes, one scale for 128 x 128 weights, which each of the rows repeats

Sources: LLM.int8 (arXiv 2208.07339) for absmax rows; AWQ (2306.00978) and GPTQ (2210.17323) for
grouped codes with zero points; GGUF for minima; QServe (2405.04532) for scales in two levels; the
OCP Microscaling specification (v1.0) for MXFP4; NVIDIA's TensorRT documentation for NVFP4;
DeepSeek-V3 (2412.19437) for blocks of FP8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.operands import FLOATS, check, check_parts, dtype_name, short_repr
from pallas_kernels.rounding import (
    CODES,
    E4M3,
    FORMATS,
    NIBBLES,
    codes,
    format_blocks,
    format_group,
    format_scales,
    grid,
    multiples,
    whole_scale,
)

FLOAT4 = jnp.dtype("float4_e2m1fn")
BLOCK_ROWS = FORMATS["fp8-block"].rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """An array ``[..., K]`` as codes and scales; weights are ``[out, in]``.

    Parameters
    ----------
    q : int8, int4, float8_e4m3fn or float4_e2m1fn [..., K]
        The codes.
    scale : float [..., n_groups]
        ``K // n_groups`` consecutive columns share a scale. A weight with one scale a row has
        ``[out, 1]``. Scales of int8 and float8_e4m3fn multiply ``unit``.
    zero : [..., n_groups], optional
        Integer: ``w = (q - zero) * scale``. Floating: ``w = q * scale + zero``.
    activations : str, optional
        Dtype to which a product quantizes the other operand. None for weight-only schemes.
    columns : int32 [K], optional
        Column of w that each column of ``q`` is, where they are stored in another order.
    input_scale : float32 scalar, optional
        Scale of every token of the other operand, with ``activations``. For tokens' codes: the one
        scale of all of them, which ``scale`` repeats.
    unit : float32 [..., 1], optional
        Factor of a row's int8 or float8_e4m3fn scales.
    blocked : int, optional
        The rows of w, a multiple of 128, each 128 of which share their scales. Pass None if
        rows are permuted or scaled one by one.
    interleaved : bool
        Whether ``columns`` are those of ``matmul.interleave.interleaved``.

    Notes
    -----
    The constructor checks nothing. ``dequantize`` and the ops raise ValueError naming the part that
    does not fit. ``pallas_kernels.quantize`` makes a QTensor of floats.
    """

    q: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None
    activations: str | None = dataclasses.field(default=None, metadata={"static": True})
    columns: jax.Array | None = None
    input_scale: jax.Array | None = None
    unit: jax.Array | None = None
    blocked: int | None = dataclasses.field(default=None, metadata={"static": True})
    interleaved: bool = dataclasses.field(default=False, metadata={"static": True})

    if TYPE_CHECKING:
        # While a checkpoint is read or saved, the parts are numpy arrays in the host's memory.
        def __init__(
            self,
            q: jax.Array | np.ndarray,
            scale: jax.Array | np.ndarray,
            zero: jax.Array | np.ndarray | None = None,
            activations: str | None = None,
            columns: jax.Array | np.ndarray | None = None,
            input_scale: jax.Array | np.ndarray | None = None,
            unit: jax.Array | np.ndarray | None = None,
            blocked: int | None = None,
            interleaved: bool = False,
        ) -> None: ...

    __repr__ = short_repr

    @classmethod
    def on_grid(
        cls, q: jax.Array, scale: jax.Array, zero: jax.Array | None, scale_dtype: DTypeLike
    ) -> QTensor:
        """Return a QTensor of the results of ``rounding.grid`` and ``rounding.codes``.

        Scales ``[..., n_groups]`` become int8 multiples of a unit if ``scale_dtype`` is int8.
        """
        if jnp.dtype(scale_dtype) != jnp.int8:
            return cls(q, scale, zero)
        multiple, unit = multiples(scale, zero)
        return cls(q, multiple, zero, unit=unit)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.q.shape

    @property
    def ndim(self) -> int:
        return self.q.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """The codes' dtype."""
        return self.q.dtype

    @property
    def group_size(self) -> int:
        """Columns that share one scale."""
        return self.q.shape[-1] // self.scale.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes on an accelerator, where 4-bit codes lie two to a byte."""
        return tree_bytes(self)

    @property
    def has_blocks(self) -> bool:
        """Whether each 128 rows are known to share their scales."""
        return self.blocked is not None and self.q.shape[-2:-1] == (self.blocked,)

    @property
    def has_input_groups(self) -> bool:
        """Whether its input is quantized in its own groups of columns: FP8 in blocks."""
        return self.dtype == jnp.float8_e4m3fn and self.scale.shape[-1] > 1

    def rows(self, index: jax.Array | np.ndarray | slice) -> QTensor:
        """Return the QTensor with its leading axes indexed: rows of a weight, or a slice."""
        zero, unit = (None if v is None else v[index] for v in (self.zero, self.unit))
        parts = {"q": self.q[index], "scale": self.scale[index], "zero": zero, "unit": unit}
        return dataclasses.replace(self, **parts, blocked=None)

    def found_blocks(self) -> QTensor:
        """Return the same, with ``blocked`` as its scales, which are in memory, are."""
        rows = self.q.shape[-2] if self.q.ndim > 1 else 0
        blocked = None
        if (
            self.q.dtype.name == E4M3
            and rows
            and rows % BLOCK_ROWS == 0
            and self.scale.shape[-1] > 1
        ):
            scale = np.asarray(self.scale)
            by_block = scale.reshape(*scale.shape[:-2], -1, BLOCK_ROWS, scale.shape[-1])
            blocked = rows if (by_block == by_block[..., :1, :]).all() else None
        return dataclasses.replace(self, blocked=blocked)

    def floats(self, dtype: DTypeLike) -> jax.Array:
        """Return the floats ``[..., K]`` that the codes stand for, in the codes' order of columns.

        They are computed in float32 and cast once. Unlike ``dequantize`` it checks nothing.
        """
        group = self.q.shape[-1] // self.scale.shape[-1]
        x = self.q.astype(jnp.float32).reshape(*self.scale.shape, group)
        scale = self.scale.astype(jnp.float32)[..., None]
        if self.zero is None:
            x = x * scale
        elif jnp.issubdtype(self.zero.dtype, jnp.integer):
            x = (x - self.zero.astype(jnp.float32)[..., None]) * scale
        else:
            x = x * scale + self.zero.astype(jnp.float32)[..., None]
        if self.unit is not None:
            x = x * self.unit.astype(jnp.float32)[..., None]
        return x.reshape(self.q.shape).astype(dtype)

    @property
    def in_one_level(self) -> QTensor:
        """The same with floating scales."""
        return self if self.unit is None else self._in_one_level(self.unit)

    def _in_one_level(self, unit: jax.Array) -> QTensor:
        scale = self.scale.astype(unit.dtype) * unit
        return dataclasses.replace(self, scale=scale, unit=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """A weight ``[out, in]`` in blocks of rows that are stored differently.

    A checkpoint may give the members of a fused weight (q, k and v; gate and up) codes of other
    widths, groups or column orders, or leave one in floats.  The product is the blocks' products,
    one after the other, so nothing has to be rounded to a common form.
    """

    blocks: tuple[jax.Array | QTensor, ...]

    __repr__ = short_repr

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(block.shape[0] for block in self.blocks), *self.blocks[0].shape[1:])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return tree_bytes(self)


def packed_bytes(size: int, dtype: DTypeLike) -> int:
    """Bytes of ``size`` elements on an accelerator, where 4-bit codes lie two to a byte."""
    dtype = jnp.dtype(dtype)
    return -(-size // 2) if dtype.name in NIBBLES else size * dtype.itemsize


def tree_bytes(tree: object) -> int:
    """Bytes of a tree of arrays, or of their shapes, on an accelerator."""
    return sum(packed_bytes(leaf.size, leaf.dtype) for leaf in jax.tree.leaves(tree))


def quantize(
    w: jax.Array,
    dtype: DTypeLike = "int8",
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    scale_dtype: DTypeLike | None = None,
) -> QTensor:
    """Return ``w`` rounded to the nearest codes, with scales along the last axis.

    Parameters
    ----------
    w : float [..., K]
        The array, such as a weight ``[out, in]``.
    dtype : data-type or str
        Dtype of the codes ("int8", "int4" or "float8_e4m3fn"), or a format: "mxfp4", "nvfp4" or
        "fp8-block".
    group_size : int, optional
        Number of columns that share a scale; it divides K. The default is K, or the format's own.
    symmetric : bool
        False adds an integer zero point to each group (int8 and int4 only).
    scale_dtype : data-type, optional
        Float dtype of the scales; w's by default. int8, for int4 codes, makes scales of two levels
        (``QTensor.unit``).

    Returns
    -------
    QTensor
        Codes ``[..., K]``, scales ``[..., K / group_size]``, and zeros of the scales' shape.

    Raises
    ------
    ValueError
        For an unknown dtype, a group that does not divide K, or an option that a format fixes. Also
        if ``w`` is not floating or has no columns.

    Notes
    -----
    A float scale is rounded up to its dtype before the codes are computed, so the error is at most
    half a step. Scales of two levels are rounded to nearest, so the ends of a group may be clipped.

    A format's tensor scale covers the last two axes; each expert of ``[E, out, in]`` has its own.

    The function is plain jax.numpy and takes every transformation. Gradients reach w through the
    scales only, and through 8-bit floats.
    """
    check("quantize", {"w": "float [..., K+]"}, w=w)
    if isinstance(dtype, str) and dtype in FORMATS:
        return _quantize_format(w, dtype, group_size, symmetric, scale_dtype)
    known = [name for name in CODES if name != "float4_e2m1fn"]
    name = dtype_name("quantize", "dtype", dtype, (*known, *FORMATS))
    k = w.shape[-1]
    group_size = k if group_size is None else group_size
    if group_size <= 0 or k % group_size:
        raise ValueError(f"quantize: group_size {group_size} does not divide the last axis ({k})")
    if not symmetric and name == "float8_e4m3fn":
        raise ValueError("quantize: float8_e4m3fn has no zero points; use symmetric=True")
    scale_dtype = w.dtype if scale_dtype is None else scale_dtype
    allowed = (*FLOATS, "int8") if name == "int4" else FLOATS
    scale_dtype = jnp.dtype(dtype_name("quantize", "scale_dtype", scale_dtype, allowed))
    scale, zero = grid(w, name, group_size, not symmetric, scale_dtype=scale_dtype)
    return QTensor.on_grid(codes(w, scale, zero, name), scale, zero, scale_dtype)


def _quantize_format(
    w: jax.Array,
    name: str,
    group_size: int | None,
    symmetric: bool,
    scale_dtype: DTypeLike | None,
) -> QTensor:
    """Return ``quantize`` to a named format, whose group and scales are fixed."""
    group = format_group(name, w.shape[-1])
    if group_size not in (None, group, FORMATS[name].group):
        raise ValueError(f"quantize: {name} has groups of {group}, not {group_size}")
    if not symmetric:
        raise ValueError(f"quantize: {name} has no zero points; use symmetric=True")
    if scale_dtype is not None and name != "fp8-block":
        raise ValueError(f"quantize: the scales of {name} have a dtype of their own")
    scale_dtype = w.dtype if scale_dtype is None else scale_dtype
    scale, unit = format_scales(w, name, dtype_name("quantize", "scale_dtype", scale_dtype, FLOATS))
    q = codes(w, whole_scale(scale, unit), None, FORMATS[name].codes)
    return QTensor(q, scale, unit=unit, blocked=format_blocks(name, w.shape))


def dequantize(w: QTensor, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return the floats that ``w`` stands for, computed in float32 and cast once.

    Parameters
    ----------
    w : QTensor [..., K]
        The codes and scales.
    dtype : data-type
        float32, bfloat16 or float16.

    Returns
    -------
    Array [..., K]
        The floats, with the columns in their original order.

    Raises
    ------
    ValueError
        Names the part of ``w`` that does not fit the others, or a dtype that is no float.

    Notes
    -----
    The function is plain jax.numpy and takes every transformation. Scales, floating zeros and 8-bit
    floats have gradients.
    """
    check_parts("dequantize", "w", w)
    dtype_name("dequantize", "dtype", dtype, FLOATS)
    x = w.floats(dtype)
    return x if w.columns is None else jnp.take(x, jnp.argsort(w.columns), axis=-1, mode="clip")


def map_weights(one: Callable[[Any], Any], params: Any, kinds: type | UnionType) -> Any:
    """Return a tree of parameters with ``one`` of each leaf, and of each block of RowBlocks.

    kinds: of leaves that are trees themselves, such as QTensor.
    """

    def leaf(value: Any) -> Any:
        return (
            RowBlocks(tuple(map(one, value.blocks))) if isinstance(value, RowBlocks) else one(value)
        )

    return jax.tree.map(leaf, params, is_leaf=lambda value: isinstance(value, kinds | RowBlocks))


def leaves_of(params: Any, kinds: type | UnionType) -> list[Any]:
    """Return a tree's leaves of these kinds, which may be trees themselves, such as QTensor."""

    def is_one(leaf: object) -> bool:
        return isinstance(leaf, kinds)

    return [leaf for leaf in jax.tree.leaves(params, is_leaf=is_one) if is_one(leaf)]


def of_one_scale(codes: jax.Array, scale: jax.Array) -> QTensor:
    """Tokens' codes that all have one float32 scale."""
    rows = jnp.broadcast_to(scale, (*codes.shape[:-1], 1))
    return QTensor(codes, rows, input_scale=scale)


@overload
def take_columns(x: jax.Array, columns: jax.Array) -> jax.Array: ...
@overload
def take_columns(x: QTensor, columns: jax.Array) -> QTensor: ...
def take_columns(x: jax.Array | QTensor, columns: jax.Array) -> jax.Array | QTensor:
    """Columns of ``x[..., K]`` in another order; of a QTensor with one scale a row, its codes'."""
    if isinstance(x, QTensor):
        return dataclasses.replace(x, q=take_columns(x.q, columns))
    # "clip" because jnp's own answer to a wrong index, NaN, costs a pass; loaders check them.
    return jnp.take(x, columns, axis=-1, mode="clip")


def stacked(weights: Sequence[jax.Array | QTensor]) -> jax.ShapeDtypeStruct | QTensor:
    """The shapes of the one weight that these are the rows of, one after the other."""
    rows = sum(w.shape[0] for w in weights)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), weights[0]
    )
