"""What XLA compiled, read off a program's text (``compiled.as_text()``).

    computations(text) -> {name: [Instruction, ...]}, the entry's name
    count_loop_kernels(text)      kernels a turn of the program's loop launches
    stored_results(text)          every array that it stores

A kernel is an instruction that launches work: each fusion, library or Pallas call, copy and bare
operation counts once, of a nested loop its body once, and nothing for tuples, constants and
bitcasts.  On a GPU a fusion is one kernel; a library call may launch more than one, which only a
trace shows (``jaxllama bench --trace``).  Inside a fusion nothing is stored, and a view (parameter,
tuple, bitcast) is no result.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_NO_WORK = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "async-done",
     "copy-done", "fusion-done", "partition-id", "replica-id")
)  # fmt: skip
_VIEWS = frozenset(("parameter", "get-tuple-element", "bitcast", "constant"))
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "f8e4m3fn": 8, "f8e5m2": 8, "bf16": 16,
         "f16": 16, "s16": 16, "u16": 16, "f32": 32, "s32": 32, "u32": 32, "f64": 64, "s64": 64,
         "u64": 64}  # fmt: skip
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"\b(?:to_apply|calls|body|called_computations)=\{?%?([\w.\-]+)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]\S*")


class Instruction(NamedTuple):
    """type: as it is written, with layout; called: names of the computations it calls."""

    name: str
    type: str
    opcode: str
    called: list[str]


Computations = dict[str, list[Instruction]]


def computations(text: str) -> tuple[Computations, str]:
    """(the instructions of each, in the text's order; the name of the entry)."""
    found: Computations = {}
    entry, current = "", None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = found.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(Instruction(match[1], match[2], match[3], _CALLED.findall(line)))
    return found, entry


def count_loop_kernels(text: str) -> int:
    """Kernels in the body of the first ``while`` that the entry reaches; 0 without one."""
    program, entry = computations(text)
    for step in _walk(entry, program):
        if step.opcode == "while":
            return sum(_kernels(inner, program) for inner in step.called)
    return 0


def _walk(name: str, program: Computations) -> list[Instruction]:
    """The instructions of a computation, those of plain calls (which group kernels) in place."""
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


def stored_results(text: str) -> list[dict[str, Any]]:
    """{"name", "type", "bits", "shape", "op"} of every array that the program stores."""
    program, _ = computations(text)
    steps = [step for body in program.values() for step in body]
    fused = {name for step in steps if step.opcode == "fusion" for name in step.called}
    rows = []
    for name, body in program.items():
        for step in [] if name in fused else body:
            match = _ARRAY.fullmatch(step.type)
            if match and step.opcode not in _VIEWS and match[1] in _BITS:
                kind, shape = match[1], [int(size) for size in match[2].split(",") if size]
                rows.append({"name": step.name, "type": kind, "bits": _BITS[kind], "shape": shape,
                             "op": step.opcode})  # fmt: skip
    return rows
