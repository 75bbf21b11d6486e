"""What an op is given: types of arrays, checks of operands, and their short text.

    sizes = check("gla", {"q": "float [B, T, H, Dk]", "lengths": "int32 [B] ?"}, q=q, lengths=None)
    brief(value) -> "float32[64, 128]"       size_text(tree) -> "32.8 kB"

``check`` compares operands with a table for each op, once while the op is traced.  An operand's
line is its dtype, its axes and, where it may be None, a question mark.

    dtype   a name; "float" for float32, bfloat16 and float16; another operand, for its dtype;
            "float|QTensor" where a QTensor may stand too
    axes    names, each of one size wherever it occurs, at least 1 with a "+"; "..." for any number
            of leading ones

A QTensor's codes have those axes, and its other parts are what its docstring says.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.rounding import CODES, E4M3, E8M0, NIBBLES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class HasShape(Protocol):
    """An array, a tracer, a ``jax.ShapeDtypeStruct``, numpy's array or a quantized weight."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


class Device(Protocol):
    """A ``jax.Device``, or the abstract device of a mesh for another machine.

    A GPU also has a ``compute_capability``.
    """

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


class TreeDef(Protocol):
    """A ``jax.tree_util.PyTreeDef``, for which jaxlib has no type."""

    @property
    def num_leaves(self) -> int: ...

    def unflatten(self, leaves: Iterable[object]) -> Any: ...

    def flatten_up_to(self, tree: object) -> list[Any]: ...


FLOATS = ("float32", "bfloat16", "float16")
ROW_CODES = ("int8", "float8_e4m3fn")  # of the ops that quantize rows
# Dtypes of scales, by whether the codes are float4 and whether a unit multiplies the scales.
_SCALES = {
    (False, False): FLOATS,
    (False, True): ("int8",),
    (True, False): (*FLOATS, E8M0, E4M3),
    (True, True): (E4M3,),
}
_Sizes = dict[str, tuple[Any, str]]  # by axis: its size, and the operand that it was read off


class Columns(NamedTuple):
    """An operand that is columns of a wider array, ``rows[..., start : start + width]``."""

    rows: jax.Array
    start: int
    width: int

    @classmethod
    def whole(cls, rows: jax.Array) -> Columns:
        """Return all columns of an array."""
        return cls(rows, 0, rows.shape[-1])

    @property
    def value(self) -> jax.Array:
        return self.rows[..., self.start : self.start + self.width]

    def plus(self, bias: jax.Array | None) -> Columns:
        """Return the columns with a bias ``[width]`` added."""
        if bias is None:
            return self
        return Columns.whole(self.value + bias.astype(self.rows.dtype))


class _Line(NamedTuple):
    dtypes: tuple[str, ...]
    quantized: bool
    axes: tuple[str, ...]
    optional: bool


def has_shape(x: object) -> TypeGuard[HasShape]:
    """Return whether x is an array, or a shape and dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def check(op: str, lines: Mapping[str, str], **operands: HasShape | None) -> dict[str, int]:
    """Return the sizes of the axes by name.

    Raises ValueError that names the op and the operand.
    """
    sizes: _Sizes = {}
    for name, text in lines.items():
        line, x = _parsed(text), operands[name]
        if line.optional and x is None:
            continue
        if not has_shape(x):
            raise ValueError(f"{op}: {name} is a {type(x).__name__}, not an array")
        if _is_quantized(x):
            if not line.quantized:
                dtypes = _either(line.dtypes)
                raise ValueError(f"{op}: {name} is a QTensor, not an array of {dtypes}")
            check_parts(op, name, x)
        if (other := operands.get(line.dtypes[0])) is not None:
            _check_same_dtype(op, name, x, line.dtypes[0], other)
        elif not _is_quantized(x):
            _check_dtype(op, name, x, line.dtypes)
        _check_axes(op, name, x.shape, line.axes, sizes)
    return {axis: size for axis, (size, _) in sizes.items()}


def _check_same_dtype(op: str, name: str, x: HasShape, other_name: str, other: HasShape) -> None:
    if x.dtype != other.dtype or _is_quantized(x) != _is_quantized(other):
        raise ValueError(
            f"{op}: {name} is {x.dtype} and {other_name} is {other.dtype}; give them one dtype"
        )


def dtype_name(op: str, what: str, dtype: DTypeLike, names: Sequence[str]) -> str:
    """Return the name of a dtype. Raises ValueError unless it is one of ``names``."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:  # no dtype of numpy's
        name = str(dtype)
    if name not in names:
        raise ValueError(f"{op}: {what} {name!r} is not {_either(names)}")
    return name


class Parts(Protocol):
    """The parts of a QTensor, whose module imports this one."""

    @property
    def q(self) -> jax.Array: ...
    @property
    def scale(self) -> jax.Array: ...
    @property
    def zero(self) -> jax.Array | None: ...
    @property
    def unit(self) -> jax.Array | None: ...
    @property
    def columns(self) -> jax.Array | None: ...
    @property
    def input_scale(self) -> jax.Array | None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> jnp.dtype: ...


def check_parts(op: str, name: str, x: Parts) -> None:
    """Raise ValueError if a QTensor's parts do not fit together."""
    q, scale = x.q, x.scale
    _check_dtype(op, f"{name}.q", q, tuple(CODES))
    kind = q.dtype.name == "float4_e2m1fn", x.unit is not None
    _check_dtype(op, f"{name}.scale", scale, _SCALES[kind])
    if not _are_groups(q, scale):
        raise ValueError(f"{op}: {name}.scale {scale.shape} {_no_groups(name, q)}")
    for part, check_part in _PARTS.items():
        if getattr(x, part) is not None:
            check_part(op, name, x)


def _are_groups(q: jax.Array, scale: jax.Array) -> bool:
    """Whether scales have the codes' axes, the last of which divides the codes' last one."""
    has_axes = q.ndim >= 1 and scale.ndim >= 1 and scale.shape[:-1] == q.shape[:-1]
    return has_axes and scale.shape[-1] >= 1 and q.shape[-1] % scale.shape[-1] == 0


def _no_groups(name: str, q: jax.Array) -> str:
    codes = f"the codes {q.shape} of {name}"
    return f"does not fit {codes}: an axis of groups that divides its last one"


def _check_zero(op: str, name: str, x: Parts) -> None:
    assert x.zero is not None
    _check_dtype(op, f"{name}.q", x.q, tuple(c for c in CODES if c != "float4_e2m1fn"))
    is_int = jnp.issubdtype(x.zero.dtype, jnp.integer)
    dtypes = (x.zero.dtype.name,) if is_int else FLOATS
    _check_array(op, f"{name}.zero", x.zero, dtypes, x.scale.shape)


def _check_unit(op: str, name: str, x: Parts) -> None:
    assert x.unit is not None
    _check_array(op, f"{name}.unit", x.unit, ("float32",), (*x.shape[:-1], 1))
    _check_dtype(op, f"{name}.q", x.q, NIBBLES)
    if x.zero is not None:
        _check_dtype(op, f"{name}.zero", x.zero, ("int8",))


def _check_columns(op: str, name: str, x: Parts) -> None:
    assert x.columns is not None
    _check_array(op, f"{name}.columns", x.columns, ("int32",), x.shape[-1:])


def _check_input_scale(op: str, name: str, x: Parts) -> None:
    assert x.input_scale is not None
    _check_array(op, f"{name}.input_scale", x.input_scale, ("float32",), ())


# The parts that a QTensor may lack, and the check that each fits its codes and scales.
_PARTS = {
    "zero": _check_zero,
    "unit": _check_unit,
    "columns": _check_columns,
    "input_scale": _check_input_scale,
}


def _check_array(
    op: str, name: str, x: jax.Array, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    _check_dtype(op, name, x, dtypes)
    if x.shape != shape:
        raise ValueError(f"{op}: {name} {x.shape} is not {shape}")


def _check_dtype(op: str, name: str, x: HasShape, dtypes: tuple[str, ...]) -> None:
    if x.dtype.name not in dtypes:
        raise ValueError(f"{op}: {name} is {x.dtype}, not {_either(dtypes)}")


def _is_quantized(x: HasShape) -> TypeGuard[Parts]:
    """Whether x is a QTensor."""
    return hasattr(x, "scale")


@functools.cache
def _parsed(line: str) -> _Line:
    dtype, _, rest = line.partition(" [")
    axes, _, mark = rest.partition("]")
    dtype, _, quantized = dtype.partition("|")
    names = tuple(axis.strip() for axis in axes.split(",") if axis.strip())
    return _Line(FLOATS if dtype == "float" else (dtype,), bool(quantized), names, "?" in mark)


def _check_axes(
    op: str, name: str, shape: tuple[int, ...], axes: tuple[str, ...], sizes: _Sizes
) -> None:
    values: tuple[int | tuple[int, ...], ...] = shape
    if axes and axes[0] == "...":
        last = max(len(shape) - len(axes) + 1, 0)
        values = (shape[:last], *shape[last:])
    if len(values) != len(axes):
        raise ValueError(_wanted(op, name, shape, axes))
    for axis, value in zip(axes, values, strict=True):
        size, _ = sizes.setdefault(axis.removesuffix("+"), (value, name))
        if value != size or (value == 0 and axis.endswith("+")):
            wanted = _wanted(op, name, shape, axes)
            raise ValueError(f"{wanted}: {_axis_reason(axis, value, sizes)}")


def _wanted(op: str, name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> str:
    return f"{op}: {name} {shape} is not [{', '.join(axes).replace('+', '')}]"


def _axis_reason(axis: str, value: object, sizes: _Sizes) -> str:
    axis = axis.removesuffix("+")
    size, other = sizes[axis]
    return f"{axis} is 0" if value == size else f"{axis} is {size} in {other}"


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def half_reason(**operands: HasShape) -> str | None:
    """Return why a kernel of 16-bit floats cannot read the operands, or None if it can."""
    first, known = next(iter(operands.items()))
    for name, x in operands.items():
        if x.dtype.name not in ("bfloat16", "float16"):
            return f"{name} is {x.dtype}; the kernel takes bfloat16 and float16"
        if x.dtype != known.dtype:
            return f"{name} is {x.dtype} where {first} is {known.dtype}"
    return None


# --- arrays in a few words, for repr --------------------------------------------------------------


def brief(value: object) -> str:
    """Return a short text of a value.

    An array is its dtype and shape, and equal neighbours of a tuple are counted.  Anything else is
    its ``repr``.
    """
    if not hasattr(value, "_fields") and isinstance(value, tuple):
        runs = [(text, len(list(run))) for text, run in itertools.groupby(map(brief, value))]
        return f"({', '.join(text if n == 1 else f'{n} x {text}' for text, n in runs)})"
    if not has_shape(value) or type(value).__repr__ is short_repr:
        return repr(value)
    return f"{value.dtype.name}[{', '.join(map(str, value.shape))}]"


def short_repr(self: DataclassInstance) -> str:
    """A dataclass of arrays: its fields but those that are None, and all their bytes."""
    fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
    parts = [f"{name}={brief(value)}" for name, value in fields if value is not None]
    return f"{type(self).__name__}({', '.join(filter(None, (*parts, size_text(self))))})"


def size_text(tree: object) -> str:
    """Bytes of a tree on an accelerator, where 4-bit codes lie two to a byte; "" where a leaf is no
    array."""
    leaves = jax.tree.leaves(tree)
    if not all(map(has_shape, leaves)):
        return ""
    size = sum(
        math.prod(leaf.shape) * (1 if leaf.dtype.name in NIBBLES else 2 * leaf.dtype.itemsize) / 2
        for leaf in leaves
    )
    unit, scale = next(
        (entry for entry in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if size >= entry[1]),
        ("bytes", 1),
    )
    return f"{size / scale:.4g} {unit}"
