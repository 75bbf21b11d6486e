"""The front end's benchmark: every token is counted once, and the parts are a part of it."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn")

from benchmarks import front_end

CASES = {case.name: case for case in front_end.CASES}


def test_tokens_are_counted_as_they_were_written():
    case = CASES["chat, 4 tokens a step"]
    result = front_end.measure(case, streams=4, seconds=0.1)
    assert result.tokens > 0 and result.tokens % (4 * case.per_step) == 0
    assert result.chunks * case.per_step == result.tokens
    assert 0 <= result.system_us <= result.us + 10_000 / result.tokens  # the kernel's tick


def test_parts_are_timed_one_by_one():
    parts = front_end.parts(CASES["chat, logprobs"], streams=4)
    assert all(0 <= us < 1000 for us in parts.values())
    assert parts["JSON"] > 0 and parts["detokenizing"] > 0
