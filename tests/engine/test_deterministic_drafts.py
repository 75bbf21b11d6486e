"""Drafts in a deterministic engine: the bits of the engine without a draft."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from tests.helpers.engine_cases import OPTIONS, PROMPTS, SAMPLINGS, model, written

CASES = [("llama", "ngram"), ("gla", "ngram"), ("mtp", "ngram"), ("mtp", "first"), ("mtp", "mtp")]
CASES += [(family, draft) for family in ("delta", "kda", "kimi") for draft in ("ngram", "first")]


@pytest.mark.parametrize(
    ("family", "draft"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] != "llama")) for case in CASES],
)
def test_tokens_and_logprobs_are_those_without_a_draft_bit_for_bit(family, draft):
    """Each pass verifies 4 tokens of 8 rows, so its products have the 32 rows of every step."""
    lm = dataclasses.replace(model(family), deterministic=True)
    own = lm.first_layers(1) if draft == "first" else draft
    eng = Engine(lm, draft=own, draft_tokens=3, **{**OPTIONS, "cache_tokens": None})
    assert eng.options.sizes == (8,) and eng.options.pass_widths(8) == (4,)
    requests = [
        Request(f"r{i}", PROMPTS[7 - i], 16, SAMPLINGS[i], ignore_eos=True) for i in range(6)
    ]
    plain = Engine(lm, **{**OPTIONS, "cache_tokens": None})
    want = {name: written(events) for name, events in plain.generate(requests).items()}
    for _ in range(2):  # prompts are read, and then known as a whole
        found = eng.generate(requests)
        assert {name: written(events) for name, events in found.items()} == want
    stats = eng.stats()
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens
