"""Engines of models with gated delta layers: every request's tokens are those it gets alone.

``test_engine_state`` has one of these families by default.
"""

from __future__ import annotations

import pytest

from tests.helpers.engine_cases import DELTA_FAMILIES, engine, search

pytestmark = pytest.mark.usefixtures("engines_of_one_size")
SCHEDULES = 300  # random ones


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "ngram", "first"])
@pytest.mark.parametrize("family", DELTA_FAMILIES)
def test_tokens_are_those_of_the_request_alone_in_many_schedules(family, draft):
    search(family, SCHEDULES, draft=draft)
    stats = engine(family, draft=draft).stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    # The first layer of a model of one layer is the model, and right.
    assert draft is None or 0 < stats.accepted_tokens <= stats.drafted_tokens
