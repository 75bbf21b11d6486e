"""Python's operators for the values of MLIR, with which the bodies of kernels are written.

    row * heads + head        x < n        lane & 3        -log_decay

Integers are unsigned where it matters: comparisons, ``//``, ``%`` and ``>>``.  Comparisons of
floats are false for NaN.  ``==`` stays Python's own, that of objects (``ptx.equal``).  A Python
number becomes a constant of the other operand's type; ``x + 0``, ``x - 0``, ``x * 1`` and
``x >> 0`` are x.

MLIR's class has no operators of its own, so no other code of the process is affected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.jax_internals import arith, ir  # pyright: ignore[reportPrivateImportUsage]

Value = Any  # MLIR's, whose bindings have no types


@functools.cache
def install() -> None:
    """Give MLIR's values their operators, once."""
    methods: dict[str, Callable[..., Value]] = {"neg": lambda a: arith.negf(a), "invert": _not}
    for name, integers, floats, neutral in (
        ("add", arith.addi, arith.addf, 0),
        ("sub", arith.subi, arith.subf, 0),
        ("mul", arith.muli, arith.mulf, 1),
        ("floordiv", arith.divui, None, None),
        ("mod", arith.remui, None, None),
        ("and", arith.andi, None, None),
        ("or", arith.ori, None, None),
        ("xor", arith.xori, None, None),
        ("lshift", arith.shli, None, None),
        ("rshift", arith.shrui, None, 0),
    ):
        methods[name] = _binary(integers, floats, neutral)
        methods[f"r{name}"] = _binary(integers, floats, swapped=True)
    of_integers, of_floats = arith.CmpIPredicate, arith.CmpFPredicate
    for name, integers, floats in (
        ("lt", of_integers.ult, of_floats.OLT),
        ("gt", of_integers.ugt, of_floats.OGT),
        ("le", of_integers.ule, of_floats.OLE),
        ("ge", of_integers.uge, of_floats.OGE),
    ):
        compared = functools.partial(arith.cmpi, integers), functools.partial(arith.cmpf, floats)
        methods[name] = _binary(*compared)
    for name, method in methods.items():
        setattr(ir.Value, f"__{name}__", method)


def _binary(
    integers: Callable[..., Value],
    floats: Callable[..., Value] | None = None,
    neutral: int | None = None,
    *,
    swapped: bool = False,
) -> Callable[[Value, Value], Value]:
    """Return the method of an operator.  swapped: of a number on the left."""

    def method(a: Value, b: Value) -> Value:
        if not isinstance(b, ir.Value):
            if not isinstance(b, int | float):
                return NotImplemented
            if isinstance(b, int) and b == neutral:
                return a
            b = like(b, a)
        is_float = a.type == ir.F32Type.get()
        operation = floats if floats is not None and is_float else integers
        return operation(b, a) if swapped else operation(a, b)

    return method


def like(number: Value | float, other: Value) -> Value:
    """Return a number as a constant of the other's type, a value as it is."""
    return number if isinstance(number, ir.Value) else _constant(number, other.type)


def _constant(number: float, kind: Any) -> Value:
    """Return a constant; bit patterns of i32 above 2**31 are wrapped."""
    if kind == ir.F32Type.get():
        return mgpu.utils.c(float(number), kind)
    is_word = kind == ir.IntegerType.get_signless(32)
    return mgpu.utils.c(number - (1 << 32) if is_word and number >= 1 << 31 else number, kind)


def _not(condition: Value) -> Value:
    zero = _constant(0, ir.IntegerType.get_signless(32))
    return arith.xori(condition, arith.cmpi(arith.CmpIPredicate.eq, zero, zero))
