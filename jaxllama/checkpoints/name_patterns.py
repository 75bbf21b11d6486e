"""Patterns of modules' names, as an adapter's author writes them: matched without trust.

    first_fitting(["q_proj", "layers.1.*"], modules, "rank_pattern.") -> [pattern or None, ...]

A pattern is a regular expression for a module's whole name, or for its end after a dot, as in PEFT.
Python's matcher takes exponential time for some patterns, and holds the interpreter meanwhile. So
only patterns of letters, digits and dots are matched here, which almost all adapters have. A
process of its own matches others, with bounds on its time and memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

from jaxllama.errors import JaxLlamaError
from jaxllama.files import one_line, short

MOST = 10_000  # patterns of an adapter; large models have some 1,000 modules
LONGEST = 1000  # letters of one
SECONDS = 1  # of the matching process's CPU time
_MEMORY = 256 << 20  # bytes of its address space
_WAIT = 60  # seconds after which a machine that gives it no time is given up
_PLAIN = re.compile(r"[A-Za-z0-9_.-]*")
_MATCHER = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY}, {_MEMORY}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
patterns, modules = json.load(sys.stdin)
found = [None] * len(modules)
for index, pattern in enumerate(patterns):
    try:
        fits = re.compile(rf"(.*\\.)?({{pattern}})$").match
    except Exception as error:
        sys.exit(json.dumps([index, str(error)]))
    for place, module in enumerate(modules):
        if found[place] is None and fits(module):
            found[place] = index
print(json.dumps(found))
"""


def first_fitting(patterns: list[str], modules: list[str], what: str) -> list[str | None]:
    """Return the first pattern that fits each module, or None.

    Raises JaxLlamaError beginning with ``what`` and the pattern for one that is no regular
    expression, and for patterns that take too long.
    """
    if len(patterns) > MOST:
        raise JaxLlamaError(f"{what}: {len(patterns)} patterns, at most {MOST} are supported")
    for pattern in patterns:
        if len(pattern) > LONGEST:
            raise JaxLlamaError(f"{what}{short(pattern)[1:-1]}: longer than {LONGEST} letters")
    if not all(map(_PLAIN.fullmatch, patterns)):
        return [None if at is None else patterns[at] for at in _matched(patterns, modules, what)]
    left, found = set(modules), dict[str, str]()
    for pattern in patterns:
        fits = re.compile(rf"(.*\.)?({pattern})$").match
        fitting = {module for module in left if fits(module)}
        found.update(dict.fromkeys(fitting, pattern))
        left -= fitting
    return [found.get(module) for module in modules]


def _matched(patterns: list[str], modules: list[str], what: str) -> list[int | None]:
    """Return the index of the first pattern that fits each module, from a process of its own."""
    command = [sys.executable, "-I", "-S", "-c", _MATCHER]
    question = json.dumps([patterns, modules])
    try:
        child = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=_WAIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JaxLlamaError(f"{what}: the patterns cannot be matched: {one_line(error)}") from None
    if child.returncode == 0:
        return json.loads(child.stdout)
    try:
        index, why = json.loads(child.stderr)
    except ValueError:  # killed, or out of memory
        raise JaxLlamaError(
            f"{what}: the patterns take more than {SECONDS} s or {_MEMORY} bytes to match: "
            f"{', '.join(map(short, patterns[:3]))}"
        ) from None
    raise JaxLlamaError(f"{what}{short(patterns[index])[1:-1]}: no regular expression: {why}")
