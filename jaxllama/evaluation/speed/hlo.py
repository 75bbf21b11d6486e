"""Read a program that XLA compiled, from its text (``compiled.as_text()``).

    computations(text) -> {name: [Instruction, ...]}, the entry's name
    count_loop_kernels(text)      number of kernels in a turn of the program's loop
    launches(text, loop)          name, bytes and operations of each kernel
    stored_results(text)          every array that the program stores

A kernel is an instruction that launches work: each fusion, library or Pallas call, copy and bare
operation counts once. The body of a nested loop counts once, and tuples, constants and bitcasts do
not count. On a GPU a fusion is one kernel. A library call may launch several, which only a trace
shows (``jaxllama bench --trace``). Nothing is stored inside a fusion, and a view (parameter, tuple,
bitcast) is no result.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from jaxllama.typing import JsonObject

_NO_WORK = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "async-done",
        "copy-done",
        "fusion-done",
        "partition-id",
        "replica-id",
    )
)
_VIEWS = frozenset(("parameter", "get-tuple-element", "bitcast", "constant"))
_BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "f8e4m3fn": 8,
    "f8e5m2": 8,
    "bf16": 16,
    "f16": 16,
    "s16": 16,
    "u16": 16,
    "f32": 32,
    "s32": 32,
    "u32": 32,
    "f64": 64,
    "s64": 64,
    "u64": 64,
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"\b(?:to_apply|calls|body|called_computations)=\{?%?([\w.\-]+)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]\S*")
_NAME = re.compile(r"%([\w.\-]+)")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_HANDLER = re.compile(r'custom_call_target="pallas_kernels\.([A-Za-z]+)_')  # of a CPU
_ALIASED = re.compile(r"\{(\d*)\}: \((\d+), ")
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
# in a fusion these have the same elements
_SAME = frozenset(("bitcast", "convert", "reshape", "copy"))
_CONTROL = frozenset(("while", "call", "conditional", "async-start"))


class Instruction(NamedTuple):
    """An instruction of a computation.

    type: as written, with layout. called: names of the computations that it calls. operands: names,
    or a parameter's number. source: jax's name of it. aliases: (result, operand).
    """

    name: str
    type: str
    opcode: str
    called: list[str]
    operands: list[str] = []
    source: str = ""
    aliases: list[tuple[int, int]] = []


Computations = dict[str, list[Instruction]]


def computations(text: str) -> tuple[Computations, str]:
    """Return (the instructions of each computation, in order; the name of the entry)."""
    found: Computations = {}
    entry, current = "", None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = found.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(_instruction(line, match))
    return found, entry


def _instruction(line: str, match: re.Match[str]) -> Instruction:
    depth, end = 1, match.end()
    while depth and end < len(line):
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
    inside = line[match.end() : end - 1]
    operands = [inside] if match[3] == "parameter" else _NAME.findall(inside)
    source = found[1] if (found := _SOURCE.search(line)) else ""
    if handler := _HANDLER.search(line):
        source = f"{handler[1]}/ffi_call"
    _, _, aliasing = line.partition("output_to_operand_aliasing=")
    aliases = [(int(out or 0), int(of)) for out, of in _ALIASED.findall(aliasing.split("}}")[0])]
    called = _CALLED.findall(line)
    return Instruction(match[1], match[2], match[3], called, operands, source, aliases)


def count_loop_kernels(text: str) -> int:
    """Return the number of kernels in the body of the entry's first ``while``, or 0."""
    program, entry = computations(text)
    return sum(_kernels(inner, program) for inner in _loop(program, entry))


def _loop(program: Computations, entry: str) -> list[str]:
    """Return the computations of the first ``while`` that the entry reaches."""
    return next((step.called for step in _walk(entry, program) if step.opcode == "while"), [])


class Launch(NamedTuple):
    """A kernel of a program.

    op: the instruction's name. kernel: its name in a trace. nbytes: bytes that it must read and
    write. operations: of a product, else 0. bits: width of the product's first operand.
    """

    op: str
    kernel: str
    nbytes: int
    operations: int
    bits: int


def launches(text: str, loop: bool) -> list[Launch]:
    """Return the kernels of the program in order. loop: only those of its first loop.

    Bytes are the bytes of operands and results. If a fusion only slices an operand, or updates a
    result in place, only that part counts. An array that a library or Pallas call updates in place
    (a cache) counts once.
    """
    program, entry = computations(text)
    names = _loop(program, entry) if loop else [entry]
    return [launch for name in names for launch in _launches(name, program)]


def _launches(name: str, program: Computations) -> list[Launch]:
    steps, found = _walk(name, program), []
    types = {step.name: step.type for body in program.values() for step in body}
    for step in steps:
        if step.opcode in _CONTROL:
            found += [launch for inner in step.called for launch in _launches(inner, program)]
        elif step.opcode not in _NO_WORK:
            kernel = step.name.replace(".", "_").replace("-", "_")
            if step.opcode == "custom-call" and step.source.count("/"):
                kernel = step.source.split("/")[-2]
            elif step.opcode == "dot":  # a CPU's, of which the trace says no more
                found_types = (_ARRAY.match(types.get(name, "")) for name in step.operands[:2])
                kernel = "dot " + " by ".join(f"[{match[2]}]" for match in found_types if match)
            found.append(
                Launch(step.name, kernel, _moved(step, types, program), *_product(step, types))
            )
    return found


def _moved(step: Instruction, types: dict[str, str], program: Computations) -> int:
    read = [_type_bytes(types.get(name, "")) for name in step.operands]
    written = _type_bytes(step.type)
    if step.opcode in _SLICES:
        return 2 * written
    if step.opcode == "dynamic-update-slice":
        return 2 * read[1]
    body = program.get(step.called[0]) if step.opcode == "fusion" and step.called else None
    if body is None:
        return sum(read) + written - sum(read[operand] for _, operand in step.aliases)
    users: dict[str, list[Instruction]] = {}
    for inner in body:
        for name in inner.operands:
            users.setdefault(name, []).append(inner)
    inner_steps = {inner.name: inner for inner in body}
    for inner in body:
        if inner.opcode == "parameter":
            part = _touched(inner.name, users)
            at = int(inner.operands[0])
            read[at] = read[at] if part is None else min(part, read[at])
    root = body[-1]
    while root.opcode in _SAME and root.operands[0] in inner_steps:
        root = inner_steps[root.operands[0]]
    if root.opcode == "dynamic-update-slice":
        written = _type_bytes(inner_steps[root.operands[1]].type)
    return sum(read) + written


def _touched(name: str, users: dict[str, list[Instruction]]) -> int | None:
    """Return the bytes that a value's users read if all of them take parts of it, else None."""
    total = 0
    for user in users.get(name, []):
        if user.opcode in _SLICES and user.operands[0] == name:
            total += _type_bytes(user.type)
        elif user.opcode in _SAME:
            part = _touched(user.name, users)
            if part is None:
                return None
            total += part
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
            return None
    return total if users.get(name) else None


def _product(step: Instruction, types: dict[str, str]) -> tuple[int, int]:
    """Return (operations, bits of the first operand) of a product.

    The product is ``[M, K]`` times ``[N, K]``, in a call or bare. Its result is ``[M, N]``, or half
    as many columns for gate and up.
    """
    texts = *(types.get(name, "") for name in step.operands[:2]), step.type.lstrip("(")
    found = [_ARRAY.match(text) for text in texts]
    arrays = [
        (match[1], [int(size) for size in match[2].split(",") if size]) for match in found if match
    ]
    if step.opcode not in ("custom-call", "dot") or [len(x) for _, x in arrays] != [2, 2, 2]:
        return 0, 0
    (kind, (m, k)), (_, (n, other)), (_, (rows, columns)) = arrays
    if (k, m) != (other, rows) or columns not in (n, n // 2):
        return 0, 0
    return 2 * m * n * k, _BITS.get(kind, 0)


def _type_bytes(text: str) -> int:
    """Return the bytes of an array's type, or of all arrays of a tuple's type."""
    total = 0
    for kind, sizes in re.findall(r"(\w+)\[([\d,]*)\]", text):
        total += math.prod(int(size) for size in sizes.split(",") if size) * _BITS.get(kind, 0)
    return total // 8


def _walk(name: str, program: Computations) -> list[Instruction]:
    """Return the instructions of a computation, with the instructions of plain calls in place."""
    found: list[Instruction] = []
    for step in program.get(name, []):
        if step.opcode == "call":
            for inner in step.called:
                found += _walk(inner, program)
        else:
            found.append(step)
    return found


def _kernels(name: str, program: Computations) -> int:
    count = 0
    for step in _walk(name, program):
        if step.opcode == "while":
            count += sum(_kernels(inner, program) for inner in step.called)
        elif step.opcode not in _NO_WORK:
            count += 1
    return count


def stored_results(text: str) -> list[JsonObject]:
    """Return {"name", "type", "bits", "shape", "op"} of every array that the program stores."""
    program, _ = computations(text)
    steps = [step for body in program.values() for step in body]
    fused = {name for step in steps if step.opcode == "fusion" for name in step.called}
    rows = []
    for name, body in program.items():
        for step in [] if name in fused else body:
            match = _ARRAY.fullmatch(step.type)
            if match and step.opcode not in _VIEWS and match[1] in _BITS:
                kind, shape = match[1], [int(size) for size in match[2].split(",") if size]
                rows.append(
                    {
                        "name": step.name,
                        "type": kind,
                        "bits": _BITS[kind],
                        "shape": shape,
                        "op": step.opcode,
                    }
                )
    return rows
