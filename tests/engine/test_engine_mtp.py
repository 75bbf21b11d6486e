"""Engines in which the checkpoint's own head drafts: each request has its tokens without it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllama.engine.request import Request
from tests.helpers.engine_cases import (
    REPEATING,
    check_answer,
    engine,
    run_schedule,
    search,
)

pytestmark = pytest.mark.usefixtures("engines_of_one_size")


def test_tokens_are_those_of_the_request_alone():
    """Preempted and cancelled rows, and prefixes that begin with a snapshot, in one engine.

    A third of the proposals is right, in prompts whose beginning was known, too.
    """
    eng = engine("mtp", draft="mtp")
    run_schedule("mtp", eng, REPEATING)
    assert eng.stats().preemptions > 0
    prompt, rates = tuple(np.random.default_rng(99).integers(3, 97, 40).tolist()), []
    for index, tail in enumerate([(5,), (5,), (6, 7)]):
        request = Request(f"p{index}", prompt + tail, 24, ignore_eos=True)
        before = eng.stats()
        events = eng.generate([request])[request.id]
        check_answer("mtp", request, events, 1e-4)
        assert events[-1].cached_tokens == (32 if index else 0)
        after = eng.stats()
        accepted = after.accepted_tokens - before.accepted_tokens
        rates.append(accepted / (after.drafted_tokens - before.drafted_tokens))
    assert rates[0] == rates[1] and min(rates) > 1 / 3


@pytest.mark.slow
def test_tokens_are_those_of_the_request_alone_in_many_schedules():
    search("mtp", 300, draft="mtp")
    stats = engine("mtp", draft="mtp").stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
