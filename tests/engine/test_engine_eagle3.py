"""Engines in which an EAGLE-3 head drafts: each request has its tokens without it."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from tests.helpers.eagle_cases import drafter
from tests.helpers.engine_cases import (
    OPTIONS,
    PROMPTS,
    REPEATING,
    SAMPLINGS,
    check_answer,
    engine,
    model,
    run_schedule,
    search,
    written,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines_of_one_size")]


def test_preempted_and_cancelled_rows_have_the_tokens_of_the_request_alone():
    eng = engine("eagle", draft=drafter(), draft_tokens=3)
    run_schedule("eagle", eng, REPEATING)
    assert eng.stats().preemptions > 0


def test_tokens_are_those_of_the_request_alone():
    """The second request begins with a prefix that the cache, and the head's, knows."""
    eng, prompt = engine("eagle", draft=drafter(), draft_tokens=3), PROMPTS[7]
    for index in range(2):
        request = Request(f"p{index}", prompt, 16, SAMPLINGS[5], ignore_eos=True)
        before = eng.stats()
        events = eng.generate([request])[request.id]
        check_answer("eagle", request, events, 1e-4)
        after = eng.stats()
        assert after.accepted_tokens > before.accepted_tokens
    assert events[-1].cached_tokens > 0


def test_tokens_are_those_of_the_request_alone_in_many_schedules():
    search("eagle", 300, draft=drafter(), draft_tokens=3)
    stats = engine("eagle", draft=drafter(), draft_tokens=3).stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_a_deterministic_engine_has_its_tokens():
    lm = dataclasses.replace(model("eagle"), deterministic=True)
    options = {**OPTIONS, "cache_tokens": None}
    requests = [
        Request(f"r{i}", PROMPTS[7 - i], 16, SAMPLINGS[i], ignore_eos=True) for i in range(6)
    ]
    without = Engine(lm, **options).generate(requests)
    eng = Engine(lm, draft=drafter(), draft_tokens=3, **options)
    for name, events in eng.generate(requests).items():
        assert written(events)[0] == written(without[name])[0]
    assert 0 < eng.stats().accepted_tokens <= eng.stats().drafted_tokens
