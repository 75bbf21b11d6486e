"""A text for a lowered module that stays the same where only the order of pure arithmetic changes.

    normal(text) -> text

A constant or an operation on numbers becomes the hash of its expression, where it is used.  What
has an effect stays in its order, and its values are numbered anew.
"""

from __future__ import annotations

import hashlib
import itertools
import re

_PURE = re.compile(
    r'\s*(%\w+) = ("stable_mosaic_gpu\.'
    r'(?:arith\.[\w.]+|llvm\.mlir\.constant|llvm\.inline_asm)"\(.*)'
)
_DEFINED = re.compile(r"\s*(%[\w:, %]+) = ")
_VALUE = re.compile(r"%[A-Za-z0-9_]+")
_SWAPS = re.compile(
    r'"stable_mosaic_gpu\.arith\.(addi|muli|addf|mulf|andi|ori|xori)"\((%\w+), (%\w+)\)(.*)'
)


def normal(text: str) -> str:
    """Return the text of a module without the order of its pure arithmetic."""
    names: dict[str, str] = {}
    expressions: dict[str, str] = {}
    lines: list[str] = []
    numbers = itertools.count()

    def named(match: re.Match[str]) -> str:
        value = match[0]
        if value not in expressions and value not in names:
            names[value] = f"%v{next(numbers)}"
        return expressions.get(value) or names[value]

    for line in text.split("\n"):
        found = _PURE.fullmatch(line)
        if found is None or "has_side_effects" in line:
            # Another function may have had a value of this name.
            if defined := _DEFINED.match(line):
                for value in _VALUE.findall(defined[1]):
                    expressions.pop(value, None)
                    names.pop(value, None)
            lines.append(_VALUE.sub(named, line))
            continue
        body = _VALUE.sub(named, found[2])
        if swaps := _SWAPS.fullmatch(found[2]):
            two = sorted(_VALUE.sub(named, value) for value in (swaps[2], swaps[3]))
            body = f"{swaps[1]}({two[0]}, {two[1]}){swaps[4]}"
        expressions[found[1]] = f"<{hashlib.sha256(body.encode()).hexdigest()[:16]}>"
    return "\n".join(lines)
