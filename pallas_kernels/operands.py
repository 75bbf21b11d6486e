"""What the operands of an op have to be: a table for each op, checked once while it is traced.

    sizes = check("gla", {"q": "float [B, T, H, Dk]", "lengths": "int32 [B] ?"}, q=q, lengths=None)

An operand's line is its dtype, its axes and, where it may be None, a question mark.

    dtype   a name; "float" for float32, bfloat16 and float16; another operand, for its dtype;
            "float|QTensor" where a QTensor may stand too
    axes    names, each of one size wherever it occurs, at least 1 with a "+"; "..." for any number
            of leading ones

A QTensor's codes have those axes, and its other parts are what its docstring says.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.rounding import CODES

FLOATS = ("float32", "bfloat16", "float16")


class _Line(NamedTuple):
    dtypes: tuple[str, ...]
    quantized: bool
    axes: tuple[str, ...]
    optional: bool


def check(op: str, lines: Mapping[str, str], **operands: Any) -> dict[str, Any]:
    """The sizes of the axes by name.  Raises ValueError that names the op and the operand."""
    sizes: dict[str, tuple[Any, str]] = {}
    for name, line in lines.items():
        dtypes, quantized, axes, optional = _parsed(line)
        x = operands[name]
        if optional and x is None:
            continue
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise ValueError(f"{op}: {name} is a {type(x).__name__}, not an array")
        if _is_quantized(x):
            if not quantized:
                raise ValueError(f"{op}: {name} is a QTensor, not an array of {_either(dtypes)}")
            check_parts(op, name, x)
        if dtypes[0] in operands:
            other = operands[dtypes[0]]
            if x.dtype != other.dtype or _is_quantized(x) != _is_quantized(other):
                raise ValueError(
                    f"{op}: {name} is {x.dtype} and {dtypes[0]} is {other.dtype}; "
                    "give them one dtype"
                )
        elif not _is_quantized(x):
            _check_dtype(op, name, x, dtypes)
        _check_axes(op, name, x.shape, axes, sizes)
    return {axis: size for axis, (size, _) in sizes.items()}


def check_parts(op: str, name: str, x: Any) -> None:
    """ValueError where a QTensor's parts do not fit together."""
    _check_dtype(op, f"{name}.q", x.q, tuple(CODES))
    _check_dtype(op, f"{name}.scale", x.scale, FLOATS if x.unit is None else ("int8",))
    *lead, k = x.shape if x.ndim else (0,)
    groups = x.scale.shape[-1] if x.scale.ndim else 0
    if x.ndim < 1 or x.scale.shape[:-1] != tuple(lead) or groups < 1 or k % groups:
        raise ValueError(
            f"{op}: {name}.scale {x.scale.shape} does not fit the codes {x.shape} of "
            f"{name}: an axis of groups that divides its last one"
        )
    if x.zero is not None:
        is_int = jnp.issubdtype(x.zero.dtype, jnp.integer)
        dtypes = (x.zero.dtype.name,) if is_int else FLOATS
        _check_array(op, f"{name}.zero", x.zero, dtypes, x.scale.shape)
    if x.unit is not None:
        _check_array(op, f"{name}.unit", x.unit, ("float32",), (*lead, 1))
        _check_dtype(op, f"{name}.q", x.q, ("int4",))
        if x.zero is not None:
            _check_dtype(op, f"{name}.zero", x.zero, ("int8",))
    if x.columns is not None:
        _check_array(op, f"{name}.columns", x.columns, ("int32",), (k,))
    if x.input_scale is not None:
        _check_array(op, f"{name}.input_scale", x.input_scale, ("float32",), ())


def _check_array(
    op: str, name: str, x: Any, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    _check_dtype(op, name, x, dtypes)
    if x.shape != shape:
        raise ValueError(f"{op}: {name} {x.shape} is not {shape}")


def _check_dtype(op: str, name: str, x: Any, dtypes: tuple[str, ...]) -> None:
    if x.dtype.name not in dtypes:
        raise ValueError(f"{op}: {name} is {x.dtype}, not {_either(dtypes)}")


def _is_quantized(x: Any) -> bool:
    """A QTensor; its module imports this one."""
    return hasattr(x, "scale")


@functools.cache
def _parsed(line: str) -> _Line:
    dtype, _, rest = line.partition(" [")
    axes, _, mark = rest.partition("]")
    dtype, _, quantized = dtype.partition("|")
    names = tuple(axis.strip() for axis in axes.split(",") if axis.strip())
    return _Line(FLOATS if dtype == "float" else (dtype,), bool(quantized), names, "?" in mark)


def _check_axes(
    op: str,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    sizes: dict[str, tuple[Any, str]],
) -> None:
    wanted = f"[{', '.join(axes).replace('+', '')}]"
    values: tuple[Any, ...] = shape
    if axes and axes[0] == "...":
        last = len(shape) - len(axes) + 1
        values = (shape[: max(last, 0)], *shape[max(last, 0) :])
    if len(values) != len(axes):
        raise ValueError(f"{op}: {name} {shape} is not {wanted}")
    for axis, value in zip(axes, values, strict=True):
        size, other = sizes.setdefault(axis.removesuffix("+"), (value, name))
        if value != size:
            raise ValueError(
                f"{op}: {name} {shape} is not {wanted}: "
                f"{axis.removesuffix('+')} is {size} in {other}"
            )
        if axis.endswith("+") and value == 0:
            raise ValueError(f"{op}: {name} {shape} is not {wanted}: {axis[:-1]} is 0")


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def half_reason(**operands: Any) -> str | None:
    """What a kernel of 16-bit floats cannot read: others, or two kinds of them at once."""
    first, known = next(iter(operands.items()))
    for name, x in operands.items():
        if x.dtype.name not in ("bfloat16", "float16"):
            return f"{name} is {x.dtype}; the kernel takes bfloat16 and float16"
        if x.dtype != known.dtype:
            return f"{name} is {x.dtype} where {first} is {known.dtype}"
    return None
