"""Engines of models with gated delta layers: every request's tokens are those it gets alone.

The other files of this folder have rows of these families too, all of them slow.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxllama.engine.request import Request
from tests.helpers.engine_cases import (
    DELTA_FAMILIES,
    REPEATING,
    SAMPLINGS,
    check_answer,
    engine,
    run_schedule,
    search,
)

pytestmark = pytest.mark.usefixtures("engines_of_one_size")
SCHEDULES = 300  # random ones


@pytest.mark.parametrize("family", ["delta"])
def test_tokens_are_those_of_the_request_alone(family):
    """Drafts, of which parts are rejected, preempted and cancelled rows, and prefixes that begin
    with a snapshot, in one engine."""
    eng = engine(family, draft="ngram")
    run_schedule(family, eng, REPEATING)
    search(family, 5, draft="ngram")
    prompt = tuple(np.random.default_rng(99).integers(3, 97, 40).tolist())
    hits = []
    for index, tail in enumerate([(5,), (5,), (6, 7)]):
        request = Request(f"p{index}", prompt + tail, 12, SAMPLINGS[(0, 5, 6)[index]])
        events = eng.generate([request])[request.id]
        check_answer(family, request, events, 1e-4)
        hits.append(events[-1].cached_tokens)
    assert hits == [0, 32, 32]
    stats = eng.stats()
    assert stats.preemptions > 0 and 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "ngram", "first"])
@pytest.mark.parametrize("family", DELTA_FAMILIES)
def test_tokens_are_those_of_the_request_alone_in_many_schedules(family, draft):
    search(family, SCHEDULES, draft=draft)
    stats = engine(family, draft=draft).stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    # The first layer of a model of one layer is the model, and right.
    assert draft is None or 0 < stats.accepted_tokens <= stats.drafted_tokens
