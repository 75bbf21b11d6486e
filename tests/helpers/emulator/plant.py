"""Plants races: one of a kernel's barriers, arrivals, waits or fences is left out or changed."""

from __future__ import annotations

import re

from tests.helpers.emulator.program import Change


def _counts(text: str, more: int) -> str:
    changed = re.sub(r"(barrier_init\(\w+, \w+)", rf"\1 + {more}", text)
    inline = re.search(r"(mbarrier\.init\.shared\.b64 \[\$0\], )(\d+)", text)
    return text.replace(inline[0], f"{inline[1]}{int(inline[2]) + more}") if inline else changed


def _other_phase(text: str) -> str:
    changed = re.sub(r"(t\.wait\(\w+, )(\w+)(, m\))", r"\g<1>1 - \2\3", text)
    inline = r"(asm\.await_mbarrier\(.*, )(asm\.argument\(.*?\))(, \), m\))"
    return re.sub(inline, r"\1\2 ^ 1\3", changed)


WAYS = {
    "left out": lambda text: "pass",
    "one arrival more": lambda text: _counts(text, 1),
    "one arrival less": lambda text: _counts(text, -1),
    "the other phase": _other_phase,
}


def planted(place: int, part: str, nth: int, way: str) -> Change:
    """A change of one of a kernel's operations that order others.

    place: of the kernel among those that are launched.  part, nth: the operation, as the program
    calls it, is the nth that has this part.  way: of ``WAYS``.
    """
    begun, count = -1, 0

    def change(number: int, kind: str, text: str) -> str:
        nonlocal begun, count
        begun += number == 0
        if begun != place or part not in text:
            return text
        count += 1
        if count != nth + 1:
            return text
        changed = WAYS[way](text)
        assert changed != text, f"{way} is no fault of {text}"
        return changed

    return change
