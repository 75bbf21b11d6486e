"""Plants races: a kernel's barriers, arrivals, waits and fences, one of them left out or changed.

A lowered kernel has some dozens of operations that order others, numbered as in
``Program.syncs``.  ``planted`` changes one of them while the kernel is written out.
"""

from __future__ import annotations

import re

from tests.helpers.emulator.program import Change

_COUNT = re.compile(r"(barrier_init\(\w+, \w+|mbarrier\.init\.shared\.b64 \[\$0\], \d+)")
_PARITY = re.compile(r"(t\.wait\(\w+, )(\w+)(, m\))|(await_mbarrier\(.*?, \()(.*?\), )(.*)(, \), m\))")


def _counts(text: str, more: int) -> str | None:
    changed = re.sub(r"(barrier_init\(\w+, \w+)", rf"\1 + {more}", text)
    inline = re.search(r"(mbarrier\.init\.shared\.b64 \[\$0\], )(\d+)", text)
    if inline:
        changed = text.replace(inline[0], f"{inline[1]}{int(inline[2]) + more}")
    return None if changed == text else changed


def _other_phase(text: str) -> str | None:
    changed = re.sub(r"(t\.wait\(\w+, )(\w+)(, m\))", r"\g<1>1 - \2\3", text)
    changed = re.sub(r"(asm\.await_mbarrier\(.*, )(asm\.argument\(.*?\))(, \), m\))", r"\1\2 ^ 1\3", changed)
    return None if changed == text else changed


WAYS = {
    "left out": lambda text: "pass",
    "one arrival more": lambda text: _counts(text, 1),
    "one arrival less": lambda text: _counts(text, -1),
    "the other phase": _other_phase,
}


def ways_of(text: str) -> list[str]:
    """How an operation, as it is written out, may be wrong."""
    if ".init" in text or "barrier_init" in text:
        return ["one arrival more", "one arrival less"]
    return [way for way in ("left out", "the other phase") if WAYS[way](text) is not None]


def planted(program: int, number: int, way: str) -> Change:
    """A change of the ``number``-th operation of the ``program``-th kernel that is launched."""
    begun = -1

    def change(own: int, kind: str, text: str) -> str | None:
        nonlocal begun
        begun += own == 0
        if (begun, own) != (program, number):
            return text
        changed = WAYS[way](text)
        assert changed is not None, f"{way} is no fault of {kind}: {text}"
        return changed

    return change


def recorded(found: list[list[str]]) -> Change:
    """No change; ``found`` gets the operations of each kernel, as they are written out."""

    def change(own: int, kind: str, text: str) -> str | None:
        if own == 0:
            found.append([])
        found[-1].append(text)
        return text

    return change
