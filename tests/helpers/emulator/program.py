"""A lowered Mosaic kernel as a Python program over numpy.

The kernel's MLIR module is written out as one Python function: an SSA value is a local variable, a
region is a branch or a loop, and a place where a warp may wait is a ``yield``.  So this runs what
Mosaic made of a kernel, with the barriers and copies that Mosaic added.

A value is a numpy scalar where all lanes have the same, else an array with an entry for each lane.
A vector has its elements on the last axis.  A reference to memory is ``(address, offset, shape,
strides)``, in elements.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import passmanager

from pallas_kernels.jax_internals import ir
from tests.helpers.emulator import asm
from tests.helpers.emulator.machine import LANES, Task, flights_of, in_flight

_DYNAMIC = -(1 << 63)
_DYNAMIC_INDEX = -(1 << 31)
DTYPES = {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "f8E8M0FNU": np.dtype(ml_dtypes.float8_e8m0fnu),
    "i1": np.dtype(bool),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "index": np.dtype(np.int64),
}


class Tensor(NamedTuple):
    """A descriptor of bulk copies.  kind: Mosaic's number of the type.  size: bytes of a value."""

    address: int
    kind: int
    bits: int
    size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    swizzle: int
    window: tuple[int, ...]


_BITS = {0: 4, 1: 8, 2: 16, 3: 32, 4: 64, 5: 16, 6: 32, 7: 16, 9: 32, 10: 64}


def tensor_of(address, kind, shape, strides, swizzle, window) -> Tensor:
    kind, bits = int(kind), _BITS[int(kind)]
    shape, strides, window = ([int(x) for x in values] for values in (shape, strides, window))
    if bits == 4:  # in pairs
        shape[-1], window[-1] = shape[-1] // 2, window[-1] // 2
        strides = [x // 2 for x in strides[:-1]] + [1]
    swizzle = {0: 16, 1: 32, 2: 64, 3: 128}.get(int(swizzle), int(swizzle))
    lists = tuple(shape), tuple(strides), tuple(window)
    return Tensor(int(address), kind, bits, max(bits // 8, 1), *lists[:2], swizzle, lists[2])


class Type(NamedTuple):
    """dtype: None for a pointer, a structure or a reference.  n: elements of a vector, else 0."""

    dtype: np.dtype | None
    n: int = 0
    bits: int = 64


@functools.cache
def type_of(text: str) -> Type:
    found = re.fullmatch(r"vector<(\d+)x(\w+)>", text)
    if found:
        inner = type_of(found[2])
        return Type(inner.dtype, int(found[1]), inner.bits)
    if text in DTYPES:
        bits = 1 if text == "i1" else DTYPES[text].itemsize * 8
        return Type(DTYPES[text], 0, bits)
    if text.startswith("!llvm.ptr"):
        return Type(DTYPES["i64"], 0, 64)
    if text in ("i4", "f4E2M1FN"):
        return Type(DTYPES["i8"], 0, 4)
    return Type(None)


@functools.cache
def memref_type(text: str) -> tuple[tuple[int, ...], tuple[int, ...] | None, int]:
    """(shape, strides or None where they are contiguous, bits of an element)."""
    inner = re.fullmatch(r"memref<(.*)>", text)[1]
    parts = re.match(r"((?:[\d?]+x)*)([A-Za-z]\w*)(.*)", inner)
    shape = tuple(-1 if x == "?" else int(x) for x in parts[1].split("x")[:-1])
    strides = re.search(r"strided<\[([^]]*)\]", parts[3])
    steps = None
    if strides:
        steps = tuple(-1 if x == "?" else int(x) for x in strides[1].split(", ") if x)
    else:
        steps, n = (), 1
        for size in reversed(shape):
            steps, n = (n, *steps), n * size
    return shape, steps, max(type_of(parts[2]).bits, 4)


# --- what the program calls ---


def unsigned(x):
    x = np.asarray(x) if not isinstance(x, np.generic) else x
    return x.view(f"u{x.dtype.itemsize}")


def signed(x):
    return x.view(f"i{x.dtype.itemsize}")


def choose(condition, a, b, is_vector: bool = False):
    if np.ndim(condition) == 0:
        return a if condition else b
    return np.where(condition[:, None] if is_vector else condition, a, b)


def merge(yes, no, condition, a, b, is_vector: bool):
    """A branch's result.  yes, no: whether the branches were taken."""
    if not no or a is b:
        return a
    if not yes:
        return b
    return np.where(condition[:, None] if is_vector else condition, a, b)


def kept(mask, is_all: bool, new, old, is_vector: bool):
    """A value that a loop carries: the lanes that left keep theirs."""
    if is_all or new is old:
        return new
    return np.where(mask[:, None] if is_vector else mask, new, old)


def recast(x, dtype, n: int, from_vector: bool):
    """The same bits as another type; n: its elements, 0 for no vector."""
    x = x if isinstance(x, np.ndarray) else np.asarray(x)
    x = x if from_vector else x[..., None]
    if not x.flags.c_contiguous:
        x = in_flight(np.ascontiguousarray(x), flights_of(x))
    out = x.view(dtype)
    return out if n else out[..., 0]


def nibbles(x):
    """Signed values of 4 bits, each in a byte."""
    raw = x.view(np.uint8)
    return np.stack([raw << 4, raw & 0xF0], -1).view(np.int8).reshape(*x.shape[:-1], -1) >> 4


def paired(x):
    raw = x.view(np.uint8)
    return (raw[..., ::2] & 15 | raw[..., 1::2] << 4).view(np.int8)


def joined(a, b):
    shape = np.broadcast_shapes(np.shape(a)[:-1], np.shape(b)[:-1])
    out = np.concatenate([np.broadcast_to(x, (*shape, np.shape(x)[-1])) for x in (a, b)], -1)
    return in_flight(out, flights_of(a, b))


def stack(*parts):
    shape = np.broadcast_shapes(*(np.shape(x) for x in parts))
    out = np.stack([np.broadcast_to(x, shape) for x in parts], -1)
    return in_flight(out, flights_of(*parts))


def inserted(vector, x, i):
    shape = np.broadcast_shapes(np.shape(vector)[:-1], np.shape(x))
    out = np.array(np.broadcast_to(vector, (*shape, np.shape(vector)[-1])))
    out[..., int(i)] = x
    return in_flight(out, flights_of(vector, x))


def set_field(value, field, place):
    out = list(value)
    out[place[0]] = field if len(place) == 1 else set_field(out[place[0]], field, place[1:])
    return tuple(out)


def get_field(value, place):
    for i in place:
        value = value[i]
    return value


def divide_signed(a, b):
    wide = np.trunc(np.asarray(a, np.float64) / b)
    return wide.astype(np.asarray(a).dtype)[()]


def remainder_signed(a, b):
    return np.fmod(a, b)


def shuffle(t: Task, x, offset, kind: str):
    x, offset = t.full(x), t.full(offset).astype(np.int64)
    lane = t.index ^ offset if kind == "bfly" else (t.index & -LANES) | offset
    out = x[lane]
    return out[0] if out.dtype != object and kind == "idx" and (out == out[0]).all() else out


def elected(t: Task, mask):
    active = (t.every if mask is None else mask).reshape(-1, LANES)
    first = np.zeros_like(active)
    first[np.arange(len(active)), active.argmax(1)] = active.any(1)
    return first.reshape(-1)


def at_element(ref, index, bits: int):
    """The address of an element of a reference."""
    address, offset, _, strides = ref
    for i, stride in zip(index, strides, strict=True):
        offset = offset + i * stride
    return address + offset * bits // 8


def ordered(predicate: int, a, b):
    names = {1: np.equal, 2: np.greater, 3: np.greater_equal, 4: np.less, 5: np.less_equal}
    if predicate in names:
        return names[predicate](a, b)
    if predicate == 6:
        return np.not_equal(a, b) & ~np.isnan(a) & ~np.isnan(b)
    raise NotImplementedError(f"the comparison {predicate}")


HELPERS = {
    function.__name__: function
    for function in (
        unsigned,
        signed,
        choose,
        merge,
        kept,
        recast,
        nibbles,
        paired,
        joined,
        stack,
        inserted,
        set_field,
        get_field,
        divide_signed,
        remainder_signed,
        shuffle,
        elected,
        at_element,
        ordered,
        tensor_of,
    )
} | {"np": np, "asm": asm}


# --- writing it ---


class Writer:
    """Writes a module's function, line by line."""

    def __init__(self, change: Callable[[int, str, str], str]):
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.names: dict[Any, str] = {}
        self.depth, self.change = 0, change
        self.syncs: list[str] = []  # the operations that order others, each with its number

    def line(self, text: str) -> None:
        self.lines.append(" " * self.depth + text)

    def name(self, value: Any) -> str:
        if value not in self.names:
            self.names[value] = f"v{len(self.names)}"
        return self.names[value]

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def block(self, block: Any) -> list[str]:
        """Write a block's operations; return what its end yields."""
        for op in block.operations:
            op = op.operation
            kind = op.name
            if kind in ("scf.yield", "func.return", "gpu.terminator", "scf.condition"):
                return [self.name(x) for x in op.operands]
            try:
                self.operation(kind, op)
            except (KeyError, TypeError) as error:
                raise NotImplementedError(f"{kind}: {error!r} in {str(op)[:300]}") from error
        return []

    def operation(self, kind: str, op: Any) -> None:
        args = [self.name(x) for x in op.operands]
        outs = [self.name(x) for x in op.results]
        if kind == "llvm.inline_asm":
            return self.inline(op, args, outs)
        function = _WRITERS.get(kind)
        if function is not None:
            return function(self, op, args, outs)
        form = _FORMS.get(kind)
        if form is None:
            raise NotImplementedError(f"no meaning for the operation {kind}")
        text = form(op, args) if callable(form) else form.format(*args)
        if kind in _SYNCS:
            return self.sync(kind, text)
        self.line(f"{', '.join(outs)} = {text}" if outs else text)
        return None

    def sync(self, kind: str, text: str) -> None:
        """An operation that orders others, which ``change`` may write anew."""
        number = len(self.syncs)
        self.syncs.append(kind)
        self.line(self.change(number, kind, text))

    def inline(self, op: Any, args: list[str], outs: list[str]) -> None:
        code = op.attributes["asm_string"].value
        ways = [x for x in op.attributes["constraints"].value.split(",") if x]
        n = sum(x.startswith("=") for x in ways)
        tied = [int(x) for x in ways[n:] if x.isdigit()]
        given = []
        for value, x, way in zip(op.operands, args, ways[n:], strict=True):
            way = ways[int(way)][1:] if way.isdigit() else way
            moved = "" if "wgmma.mma" not in code and code else ", False"
            given.append(f"asm.argument(t, {x}, {way!r}, {_is_vector(value)}{moved})")
        for pattern, name in _WAITS:
            if re.search(pattern, code):
                call = f"asm.{name}(t, {code!r}, ({_join(given)}), m)"
                return self.sync(code, f"yield from {call}")
        call = f"asm.execute(t, {code!r}, {tied}, {n}, ({_join(given)}), m)"
        if not n:
            if _ORDERS.search(code):
                return self.sync(code, call)
            return self.line(call)
        kinds = str(op.results[0].type)
        fields = re.fullmatch(r"!llvm.struct<\((.*)\)>", kinds)
        kinds = fields[1].split(", ") if fields else [kinds]
        named = [(type_of(x).dtype.name, type_of(x).n > 0) for x in kinds]
        self.line(f"{outs[0]} = asm.results({call}, {named}, {bool(fields)})")
        return None

    # --- regions ---

    def may_wait(self, op: Any) -> bool:
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    inner = inner.operation
                    name = inner.name
                    if name.endswith(("gpu.barrier", "try_wait.parity")):
                        return True
                    if name.endswith("inline_asm"):
                        text = inner.attributes["asm_string"].value
                        if re.search(r"bar\.sync|try_wait|cluster\.wait", text):
                            return True
                    if len(inner.regions) and self.may_wait(inner):
                        return True
        return False

    def branch(self, flag: str, mask: str, block: Any) -> list[str]:
        """Write ``if flag:`` and a block under a mask."""
        self.line(f"if {flag}:")
        self.depth += 1
        self.line(f"m = {mask}")
        results = self.block(block)
        return results


_WAITS = (
    ("mbarrier.try_wait", "await_mbarrier"),
    (r"bar\.sync", "meet"),
    (r"barrier\.cluster\.arrive", "arrive_in_cluster"),
    (r"barrier\.cluster\.wait", "await_cluster"),
)
_ORDERS = re.compile(
    r"mbarrier\.(?:init|arrive)|wait_group|fence\.proxy|commit_group|griddepcontrol\.wait"
)


def _join(parts: list[str]) -> str:
    return "".join(f"{x}, " for x in parts)


def _is_vector(value: Any) -> bool:
    return type_of(str(value.type)).n > 0


def _write_if(w: Writer, op, args, outs) -> None:
    n, may_wait = len(w.lines), w.may_wait(op)
    yes, yes_mask, no, no_mask, outer = (f"{x}{n}" for x in ("y", "ym", "n", "nm", "m"))
    w.line(f"{outer} = m")
    w.line(f"{yes}, {yes_mask}, {no}, {no_mask} = t.split({args[0]}, m, {may_wait})")
    for out in outs:
        w.line(f"a{out} = b{out} = None")
    for flag, mask, region, prefix in ((yes, yes_mask, 0, "a"), (no, no_mask, 1, "b")):
        if region >= len(op.regions) or not len(op.regions[region].blocks):
            continue
        results = w.branch(flag, mask, op.regions[region].blocks[0])
        for out, value in zip(outs, results, strict=True):
            w.line(f"{prefix}{out} = {value}")
        w.depth -= 1
    w.line(f"m = {outer}")
    for out, value in zip(outs, op.results, strict=True):
        vector = _is_vector(value)
        w.line(f"{out} = merge({yes}, {no}, {args[0]}, a{out}, b{out}, {vector})")


def _write_switch(w: Writer, op, args, outs) -> None:
    """Branches one after the other: the first region is the default."""
    n, may_wait = len(w.lines), w.may_wait(op)
    cases = list(ir.DenseI64ArrayAttr(op.attributes["cases"]))
    rest, outer = f"r{n}", f"m{n}"
    w.line(f"{outer} = m")
    w.line(f"{rest} = np.bool_(True)")
    for out in outs:
        w.line(f"{out} = None")
    for i, case in [*enumerate(cases, 1), (0, None)]:
        condition = f"k{n}_{i}"
        test = rest if case is None else f"({args[0]} == {case})"
        w.line(f"{condition} = {test}")
        if case is not None:
            w.line(f"{rest} = {rest} & ~{condition}")
        w.line(f"y{n}, ym{n}, _, _ = t.split({condition}, {outer}, {may_wait})")
        results = w.branch(f"y{n}", f"ym{n}", op.regions[i].blocks[0])
        for out, result, value in zip(outs, results, op.results, strict=True):
            vector = _is_vector(value)
            w.line(
                f"{out} = {result} if {out} is None else "
                f"choose({condition}, {result}, {out}, {vector})"
            )
        w.line("pass")
        w.depth -= 1
    w.line(f"m = {outer}")


def _write_for(w: Writer, op, args, outs) -> None:
    n, may_wait = len(w.lines), w.may_wait(op)
    block = op.regions[0].blocks[0]
    index, *carried = [w.name(x) for x in block.arguments]
    outer = f"m{n}"
    w.line(f"{outer} = m")
    w.line(f"{index} = {args[0]}")
    for name, first in zip(carried, args[3:], strict=True):
        w.line(f"{name} = {first}")
    w.line("while True:")
    w.depth += 1
    w.line(f"g{n}, i{n} = t.live({index} < {args[1]}, m, {may_wait})")
    w.line(f"if not g{n}: break")
    w.line(f"w{n} = i{n} is {outer}")
    w.line(f"m = i{n}")
    results = w.block(block)
    w.line(f"m = i{n}")
    new = [
        f"kept(m, w{n}, {result}, {name}, {_is_vector(x)})"
        for result, name, x in zip(results, carried, op.results, strict=True)
    ]
    if carried:
        w.line(f"{', '.join(carried)}, = {', '.join(new)},")
    w.line(f"{index} = {index} + {args[2]}")
    w.depth -= 1
    w.line(f"m = {outer}")
    for out, name in zip(outs, carried, strict=True):
        w.line(f"{out} = {name}")


def _write_while(w: Writer, op, args, outs) -> None:
    n, may_wait = len(w.lines), w.may_wait(op)
    before, after = op.regions[0].blocks[0], op.regions[1].blocks[0]
    outer = f"m{n}"
    carried = [w.name(x) for x in before.arguments]
    handed = [w.name(x) for x in after.arguments]
    w.line(f"{outer} = m")
    for name, first in zip(carried, args, strict=True):
        w.line(f"{name} = {first}")
    for out in outs:
        w.line(f"{out} = None")
    w.line("while True:")
    w.depth += 1
    condition, *values = w.block(before)
    w.line(f"g{n}, i{n} = t.live({condition}, m, {may_wait})")
    w.line(f"w{n} = {outs[0] if outs else None} is None or m is {outer}")
    for out, value, x in zip(outs, values, op.results, strict=True):
        w.line(f"{out} = kept(m, w{n}, {value}, {out}, {_is_vector(x)})")
    w.line(f"if not g{n}: break")
    w.line(f"m = i{n}")
    for name, value in zip(handed, values, strict=True):
        w.line(f"{name} = {value}")
    results = w.block(after)
    w.line(f"m = i{n}")
    if carried:
        w.line(f"{', '.join(carried)}, = {', '.join(results)},")
    w.depth -= 1
    w.line(f"m = {outer}")


def _write_launch(w: Writer, op, args, outs) -> None:
    """The kernel's body as a function of its own."""
    block = op.regions[0].blocks[0]
    w.line(f"facts = tuple(map(int, ({', '.join(args[1:])},)))")
    w.line("def device(t):")
    w.depth += 1
    w.line("m = None")
    w.line("if False: yield")
    w.block(block)
    w.depth -= 1
    w.line("return facts, device")


def _write_call(w: Writer, op, args, outs) -> None:
    callee = str(op.attributes["callee"])
    if callee != "@mosaic_gpu_init_tma_desc":
        raise NotImplementedError(f"a call of {callee}")
    desc, base, kind, rank, shape, strides, swizzle, window = args
    lists = ", ".join(f"h.words({x}, {rank})" for x in (shape, strides))
    w.line(
        f"h.tensors[int({desc})] = tensor_of({base}, {kind}, {lists}, {swizzle}, "
        f"h.words({window}, {rank}))"
    )


def _write_constant(w: Writer, op, args, outs) -> None:
    attribute, kind = op.attributes["value"], type_of(str(op.results[0].type))
    text = str(attribute)
    if kind.n or kind.dtype is None:
        raise NotImplementedError(f"a constant {text}")
    if kind.dtype == bool:
        value = text.startswith(("true", "1"))
    elif isinstance(attribute, ir.FloatAttr):
        value = ir.FloatAttr(attribute).value
    else:
        value = ir.IntegerAttr(attribute).value
        bits = kind.bits
        value = (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
    w.names[op.results[0]] = w.constant(kind.dtype.type(value))


def _write_alloca(w: Writer, op, args, outs) -> None:
    shape, strides, _ = memref_type(str(op.results[0].type))
    if w.depth > 1:  # a variable of each thread
        if shape:
            raise NotImplementedError(f"a local array {op.results[0].type}")
        return w.line(f"{outs[0]} = np.int32(0)")
    return w.line(f"{outs[0]} = (h.new({int(np.prod(shape))}), np.int64(0), {shape}, {strides})")


def _write_reinterpret(w: Writer, op, args, outs) -> None:
    static = [list(ir.DenseI64ArrayAttr(op.attributes[f"static_{x}"])) for x in _PLACES]
    rest = iter(args[1:])
    offset, shape, strides = ([x if x != _DYNAMIC else next(rest) for x in xs] for xs in static)
    w.line(
        f"{outs[0]} = ({args[0]}[0], {offset[0]} + np.int64(0), {_tuple(shape)}, {_tuple(strides)})"
    )


_PLACES = "offsets", "sizes", "strides"


def _tuple(values) -> str:
    return "(" + "".join(f"{x}, " for x in values) + ")"


def _write_subview(w: Writer, op, args, outs) -> None:
    static = [list(ir.DenseI64ArrayAttr(op.attributes[f"static_{x}"])) for x in _PLACES]
    rest = iter(args[1:])
    offset, shape, steps = ([x if x != _DYNAMIC else next(rest) for x in xs] for xs in static)
    source = args[0]
    terms = [f"{x} * {source}[3][{i}]" for i, x in enumerate(offset) if x != 0]
    kept_shape, _, _ = memref_type(str(op.results[0].type))
    axes, left = [], list(kept_shape)
    for i, size in enumerate(shape):  # axes of size 1 may go
        dropped = len(shape) - i - len(left)
        if (
            left
            and (size == left[0] or not isinstance(size, int))
            and not (size == 1 and dropped > 0 and left[0] != 1)
        ):
            axes.append(i)
            left.pop(0)
    assert not left, (shape, kept_shape)
    strides = [f"{source}[3][{i}]" + ("" if steps[i] == 1 else f" * {steps[i]}") for i in axes]
    moved = " + ".join([f"{source}[1]", *terms])
    w.line(
        f"{outs[0]} = ({source}[0], {moved}, {_tuple(shape[i] for i in axes)}, {_tuple(strides)})"
    )


def _write_transpose(w: Writer, op, args, outs) -> None:
    order = re.search(r"-> \(([^)]*)\)", str(op.attributes["permutation"]))[1]
    axes = [int(x.strip()[1:]) for x in order.split(",")]
    source = args[0]
    shape, strides = (_tuple(f"{source}[{i}][{a}]" for a in axes) for i in (2, 3))
    w.line(f"{outs[0]} = ({source}[0], {source}[1], {shape}, {strides})")


def _write_reshape(w: Writer, op, args, outs) -> None:
    shape, strides, _ = memref_type(str(op.results[0].type))
    if -1 in shape + strides:
        raise NotImplementedError("a reshape with unknown strides")
    w.line(f"{outs[0]} = ({args[0]}[0], {args[0]}[1], {shape}, {strides})")


def _write_view(w: Writer, op, args, outs) -> None:
    shape, strides, _ = memref_type(str(op.results[0].type))
    w.line(f"{outs[0]} = ({args[0]}[0] + {args[1]}, np.int64(0), {shape}, {strides})")


def _write_metadata(w: Writer, op, args, outs) -> None:
    source, rank = args[0], (len(outs) - 2) // 2
    w.line(f"{outs[0]} = ({source}[0], np.int64(0), (), ())")
    w.line(f"{outs[1]} = {source}[1]")
    for i in range(rank):
        w.line(f"{outs[2 + i]} = np.int64({source}[2][{i}])")
        w.line(f"{outs[2 + rank + i]} = np.int64({source}[3][{i}])")


def _write_cast(w: Writer, op, args, outs) -> None:
    """Between a reference and LLVM's structure of it."""
    given, wanted = str(op.operands[0].type), str(op.results[0].type)
    x = args[0]
    if given.startswith("memref"):
        w.line(f"{outs[0]} = ({x}[0], {x}[0], {x}[1], {x}[2], {x}[3])")
    elif wanted.startswith("memref"):
        w.line(f"{outs[0]} = ({x}[1], {x}[2], {x}[3], {x}[4])")
    else:
        w.line(f"{outs[0]} = {x}")


def _write_undef(w: Writer, op, args, outs) -> None:
    text = str(op.results[0].type)
    kind = type_of(text)
    if kind.n:
        value: Any = np.zeros(kind.n, kind.dtype)
    elif text.startswith("!llvm.struct"):
        found = re.fullmatch(r"!llvm.struct<\((.*)\)>", text)[1]
        sizes = [re.match(r"array<(\d+)", x) for x in found.split(", ")]
        value = tuple((None,) * int(x[1]) if x else None for x in sizes)
    else:
        value = None
    w.names[op.results[0]] = w.constant(value)


def _bytes(kind: Type) -> int:
    return max(kind.n, 1) * kind.bits // 8


def _write_load(w: Writer, op, args, outs) -> None:
    text = str(op.results[0].type)
    if text.startswith("!llvm.array"):  # the descriptors, which go by their address
        return w.line(f"{outs[0]} = {args[0]}")
    host = w.depth <= 1
    if host:
        return w.line(f"{outs[0]} = h.words({args[0]}, 1)[0]")
    return _loaded(w, outs[0], args[0], type_of(text), _space(op.operands[0]))


def _loaded(w: Writer, out: str, at: str, kind: Type, space: str) -> None:
    dtype = w.constant(kind.dtype)
    shape = f"({kind.n},)" if kind.n else "()"
    if not space:
        w.line("t.touch(m)")
    w.line(f"{out} = t.load({at}, m, {_bytes(kind)}, {dtype}, {space!r}, {shape})")


def _space(value: Any) -> str:
    text = str(value.type)
    is_shared = text == "!llvm.ptr<3>" or "workgroup" in text
    return "shared" if is_shared else ""


def _stored(w: Writer, value: str, at: str, kind: Type, space: str) -> None:
    if not space:
        w.line("t.touch(m)")
    dtype = w.constant(kind.dtype)
    w.line(f"t.store({value}, {at}, m, {_bytes(kind)}, {space!r}, {dtype})")


def _write_store(w: Writer, op, args, outs) -> None:
    kind = type_of(str(op.operands[0].type))
    _stored(w, args[0], args[1], kind, _space(op.operands[1]))


def _is_local(value: Any) -> bool:
    owner = getattr(value.owner, "name", "")
    return owner.endswith("memref.alloca")


def _write_memref_load(w: Writer, op, args, outs) -> None:
    if w.depth > 1 and _is_local(op.operands[0]):
        return w.line(f"{outs[0]} = {args[0]}")
    _, _, bits = memref_type(str(op.operands[0].type))
    at = f"at_element({args[0]}, {_tuple(args[1:])}, {bits})"
    _loaded(w, outs[0], at, type_of(str(op.results[0].type)), _space(op.operands[0]))


def _write_memref_store(w: Writer, op, args, outs) -> None:
    if w.depth > 1 and _is_local(op.operands[1]):
        return w.line(f"{args[1]} = kept(m, m is None, {args[0]}, {args[1]}, False)")
    _, _, bits = memref_type(str(op.operands[1].type))
    at = f"at_element({args[1]}, {_tuple(args[2:])}, {bits})"
    if w.depth <= 1:
        return w.line(f"h.set({at}, {args[0]})")
    return _stored(w, args[0], at, type_of(str(op.operands[0].type)), _space(op.operands[1]))


def _write_pointer(w: Writer, op, args, outs) -> None:
    kind = str(ir.TypeAttr(op.attributes["elem_type"]).value)
    size = 8 if kind == "!llvm.ptr" else _bytes(type_of(kind))
    raw = list(ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"]))
    [index] = [args[1] if x == _DYNAMIC_INDEX else str(x) for x in raw]
    if index == "0":
        return w.line(f"{outs[0]} = {args[0]}")
    wide = index if raw[0] != _DYNAMIC_INDEX else f"{index}.astype(np.int64)"
    return w.line(f"{outs[0]} = {args[0]} + {wide} * {size}")


def _write_alloc(w: Writer, op, args, outs) -> None:
    w.line(f"{outs[0]} = h.new({1 << 10})")


def _write_ldmatrix(w: Writer, op, args, outs) -> None:
    n = ir.IntegerAttr(op.attributes["num"]).value
    turned = "col" in str(op.attributes["layout"])
    w.line(
        f"{outs[0]} = tuple(x.view(np.int32) for x in "
        f"asm.load_matrices(t, m, {args[0]}, {n}, {turned}))"
    )


def _write_stmatrix(w: Writer, op, args, outs) -> None:
    turned = "col" in str(op.attributes["layout"])
    w.line(f"asm.store_matrices(t, m, {args[0]}, [{', '.join(args[1:])}], {turned})")


def _write_shuffle_vector(w: Writer, op, args, outs) -> None:
    order = list(ir.DenseI64ArrayAttr(op.attributes["mask"]))
    w.line(f"{outs[0]} = joined({args[0]}, {args[1]})[..., {order}]")


def _write_slice(w: Writer, op, args, outs) -> None:
    first, size = (ir.IntegerAttr(list(op.attributes[x])[0]).value for x in ("offsets", "sizes"))
    w.line(f"{outs[0]} = {args[0]}[..., {first}:{first + size}]")


def _write_broadcast(w: Writer, op, args, outs) -> None:
    n = type_of(str(op.results[0].type)).n
    given = "" if _is_vector(op.operands[0]) else "[..., None]"
    w.line(f"{outs[0]} = np.repeat(np.asarray({args[0]}){given}, {n}, -1)")


def _position(op, name="position") -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[name]))


def _recast(op, args) -> str:
    given, wanted = (type_of(str(x.type)) for x in (op.operands[0], op.results[0]))
    if given.dtype is None or wanted.dtype is None:
        raise NotImplementedError(f"a cast of {op.operands[0].type}")
    if given.bits == 4 and given.n:
        args = [f"paired({args[0]})"]
        given = Type(DTYPES["i8"], given.n // 2, 8)
    if wanted.bits == 4 and wanted.n:
        return f"nibbles(recast({args[0]}, np.dtype('int8'), {wanted.n // 2}, {given.n > 0}))"
    name = f"np.dtype('{wanted.dtype.name}')"
    return f"recast({args[0]}, {name}, {wanted.n}, {given.n > 0})"


def _convert(op, args) -> str:
    wanted = type_of(str(op.results[0].type))
    return f"np.asarray({args[0]}).astype('{wanted.dtype.name}')[()]"


def _extend(op, args) -> str:
    """Unsigned."""
    given, wanted = (type_of(str(x.type)) for x in (op.operands[0], op.results[0]))
    if given.dtype == bool:
        return _convert(op, args)
    return f"np.asarray(unsigned({args[0]})).astype('{wanted.dtype.name}')[()]"


_COMPARE = "== != < <= > >= < <= > >=".split()


def _compare(op, args) -> str:
    predicate = ir.IntegerAttr(op.attributes["predicate"]).value
    a, b = args if predicate < 6 else [f"unsigned({x})" for x in args]
    return f"{a} {_COMPARE[predicate]} {b}"


def _by_dimension(prefix: str):
    def form(op, args):
        return f"t.special['{prefix}.{str(op.attributes['dimension'])[-2]}']"

    return form


def _signs(form: str):
    """A form of unsigned operands with a signed result."""
    return lambda op, args: "signed(" + form.format(*(f"unsigned({x})" for x in args)) + ")"


def _pick(op, args) -> str:
    each = _is_vector(op.operands[0])  # a condition for each element
    return f"choose({', '.join(args)}, {_is_vector(op.operands[1]) and not each})"


def _tensor_store(op, args) -> str:
    n = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))[2]
    desc, source, rest, *pred = *args[:2], args[2 : 2 + n], *args[2 + n :]
    mask = f"asm.and_mask(t, m, {pred[0]})" if pred else "m"
    return f"asm.store_tensor(t, {mask}, {desc}, {source}, [{', '.join(rest)}])"


_FORMS: dict[str, Any] = {
    "arith.addi": "{} + {}",
    "arith.subi": "{} - {}",
    "arith.muli": "{} * {}",
    "arith.andi": "{} & {}",
    "arith.ori": "{} | {}",
    "arith.xori": "{} ^ {}",
    "arith.shli": "{} << {}",
    "arith.shrui": _signs("({} >> {})"),
    "arith.divui": _signs("({} // {})"),
    "arith.remui": _signs("({} % {})"),
    "arith.minui": _signs("np.minimum({}, {})"),
    "arith.maxui": _signs("np.maximum({}, {})"),
    "arith.minsi": "np.minimum({}, {})",
    "arith.maxsi": "np.maximum({}, {})",
    "arith.divsi": "divide_signed({}, {})",
    "arith.remsi": "remainder_signed({}, {})",
    "arith.cmpi": _compare,
    "arith.cmpf": lambda op, a: (
        f"ordered({ir.IntegerAttr(op.attributes['predicate']).value}, {a[0]}, {a[1]})"
    ),
    "arith.select": _pick,
    "arith.addf": "{} + {}",
    "arith.subf": "{} - {}",
    "arith.mulf": "{} * {}",
    "arith.divf": "{} / {}",
    "arith.negf": "-{}",
    "arith.extf": _convert,
    "arith.truncf": _convert,
    "arith.sitofp": _convert,
    "arith.extsi": _convert,
    "arith.trunci": _convert,
    "arith.index_cast": _convert,
    "arith.index_castui": _extend,
    "arith.extui": _extend,
    "arith.bitcast": _recast,
    "vector.bitcast": _recast,
    "llvm.bitcast": _recast,
    "math.exp": "np.exp({})",
    "math.rsqrt": "(1 / np.sqrt({})).astype(np.float32)",
    "llvm.add": "{} + {}",
    "llvm.mul": "{} * {}",
    "llvm.and": "{} & {}",
    "llvm.or": "{} | {}",
    "llvm.lshr": _signs("({} >> {})"),
    "llvm.udiv": _signs("({} // {})"),
    "llvm.ptrtoint": _convert,
    "llvm.inttoptr": "np.asarray({}).astype(np.int64)[()]",
    "llvm.extractvalue": lambda op, a: f"get_field({a[0]}, {_position(op)})",
    "llvm.insertvalue": lambda op, a: f"set_field({a[0]}, {a[1]}, {_position(op)})",
    "llvm.insertelement": "inserted({}, {}, {})",
    "llvm.extractelement": "{}[..., int({})]",
    "vector.extract": lambda op, a: f"{a[0]}[..., {_position(op, 'static_position')[0]}]",
    "vector.insert": lambda op, a: (
        f"inserted({a[1]}, {a[0]}, {_position(op, 'static_position')[0]})"
    ),
    "vector.from_elements": lambda op, a: f"stack({', '.join(a)})",
    "gpu.thread_id": _by_dimension("tid"),
    "gpu.block_dim": _by_dimension("ntid"),
    "gpu.block_id": _by_dimension("ctaid"),
    "gpu.cluster_block_id": _by_dimension("cluster_ctaid"),
    "gpu.cluster_dim_blocks": _by_dimension("cluster_nctaid"),
    "gpu.dynamic_shared_memory": lambda op, a: "(t.first, np.int64(0), (-1,), (1,))",
    "nvvm.elect.sync": lambda op, a: "elected(t, m)",
    "nvvm.shfl.sync": lambda op, a: (
        f"shuffle(t, {a[1]}, {a[2]}, '{'bfly' if 'bfly' in str(op.attributes['kind']) else 'idx'}')"
    ),
    "gpu.barrier": lambda op, a: "yield from t.meet('bar.sync', 0, t.machine.threads, m)",
    "nvvm.mbarrier.init": lambda op, a: (
        f"t.barrier_init({a[0]}, {a[1]}, asm.and_mask(t, m, {a[2]}))"
    ),
    "nvvm.mbarrier.try_wait.parity": lambda op, a: f"yield from t.wait({a[0]}, {a[1]}, m)",
    "nvvm.mbarrier.arrive.nocomplete": lambda op, a: f"t.arrive({a[0]}, m, {a[1]})",
    "nvvm.bar.warp.sync": lambda op, a: "pass",
    "nvvm.wgmma.fence.aligned": lambda op, a: "pass",
    "nvvm.fence.proxy": lambda op, a: "t.clocks.fence(t.warps_of(m))",
    "nvvm.cp.async.bulk.commit.group": lambda op, a: "t.stores_commit(m)",
    "nvvm.cp.async.bulk.wait_group": lambda op, a: (
        f"t.stores_wait({ir.IntegerAttr(op.attributes['group']).value}, m)"
    ),
    "nvvm.cp.async.bulk.tensor.global.shared.cta": _tensor_store,
}
_SYNCS = {
    "gpu.barrier",
    "nvvm.mbarrier.init",
    "nvvm.mbarrier.try_wait.parity",
    "nvvm.mbarrier.arrive.nocomplete",
    "nvvm.fence.proxy",
    "nvvm.cp.async.bulk.wait_group",
}
_WRITERS: dict[str, Callable[[Writer, Any, list[str], list[str]], None]] = {
    "scf.if": _write_if,
    "scf.index_switch": _write_switch,
    "scf.for": _write_for,
    "scf.while": _write_while,
    "gpu.launch": _write_launch,
    "func.call": _write_call,
    "arith.constant": _write_constant,
    "llvm.mlir.constant": _write_constant,
    "memref.alloca": _write_alloca,
    "memref.reinterpret_cast": _write_reinterpret,
    "memref.subview": _write_subview,
    "memref.transpose": _write_transpose,
    "memref.expand_shape": _write_reshape,
    "memref.collapse_shape": _write_reshape,
    "memref.view": _write_view,
    "memref.extract_strided_metadata": _write_metadata,
    "builtin.unrealized_conversion_cast": _write_cast,
    "llvm.mlir.undef": _write_undef,
    "llvm.load": _write_load,
    "llvm.store": _write_store,
    "memref.load": _write_memref_load,
    "vector.load": _write_memref_load,
    "memref.store": _write_memref_store,
    "vector.store": _write_memref_store,
    "llvm.getelementptr": _write_pointer,
    "llvm.alloca": _write_alloc,
    "nvvm.ldmatrix": _write_ldmatrix,
    "nvvm.stmatrix": _write_stmatrix,
    "vector.shuffle": _write_shuffle_vector,
    "vector.extract_strided_slice": _write_slice,
    "vector.broadcast": _write_broadcast,
}


# --- running it ---


class Host:
    """What a kernel's host code writes: the descriptors of its bulk copies."""

    def __init__(self, buffers: list[int]):
        self.cells: dict[int, Any] = {8 * i: np.int64(x) for i, x in enumerate(buffers)}
        self.tensors: dict[int, Tensor] = {}
        self.end = 1 << 20

    def new(self, size: int) -> Any:
        self.end += 1 << 16
        return np.int64(self.end)

    def set(self, at: Any, value: Any) -> None:
        self.cells[int(at)] = value

    def words(self, at: Any, n: Any) -> list[Any]:
        return [self.cells[int(at) + 8 * i] for i in range(int(n))]


Change = Callable[[int, str, str], str]


def _same(number: int, kind: str, text: str) -> str:
    return text


class Program:
    """A module as a function.  syncs: its operations that order others, by their numbers."""

    def __init__(self, bytecode: bytes, change: Change = _same):
        context = mlir.make_ir_context()
        context.allow_unregistered_dialects = True  # until it is plain again
        writer = Writer(change)
        with context:
            module = ir.Module.parse(bytecode)
            plain = "builtin.module(mosaic_gpu-serde{serialize=false})"
            passmanager.PassManager.parse(plain, context).run(module.operation)
            [main] = [
                op.operation
                for op in module.body.operations
                if op.operation.name == "func.func" and len(op.regions[0].blocks)
            ]
            block = main.regions[0].blocks[0]
            self.overlaps = "mosaic_gpu.uses_pdl" in module.operation.attributes
            self.name = ir.StringAttr(main.attributes["sym_name"]).value
            token, buffers = [writer.name(x) for x in block.arguments]
            writer.line("def main(h):")
            writer.depth = 1
            writer.line(f"{token} = {buffers} = np.int64(0)")
            writer.block(block)
        self.text, self.syncs = "\n".join(writer.lines), writer.syncs
        names = dict(HELPERS) | writer.constants
        exec(compile(self.text, f"<{self.name}>", "exec"), names)
        self.main = names["main"]
        # The warps of each task, and whether those of a warpgroup part, once it is known.
        self.parts: list[frozenset[int]] | None = None
        self.by_warp = False
