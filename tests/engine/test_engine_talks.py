"""Conversations with tools in an engine whose checkpoint's own head drafts.

Each begins with one of a few system prompts, so prefixes are known.  The first answer is a call of
a tool, which a grammar forces; the tool's result and a second answer follow.  Every token is what
the request gives alone: the whole text through the model without a cache, token by token.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxllama.engine.request import Event, Grammar, Request
from tests.helpers.engine_cases import SAMPLINGS, check_answer, engine, written

pytestmark = pytest.mark.usefixtures("engines_of_one_size")
CALL = Grammar("regex", r'\{"f":"(get|set)","x":[0-9]{1,2}\}')
TOGETHER = 20  # conversations at once, of which four run


def talk(number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(system prompt and question, the tool's result) of a conversation."""
    rng = np.random.default_rng(number)
    system = np.random.default_rng(10_000 + number % 5).integers(32, 127, 33)
    question = rng.integers(32, 127, rng.integers(1, 7))
    return (*system.tolist(), *question.tolist()), tuple(rng.integers(48, 58, 3).tolist())


def converse(first: int, count: int) -> None:
    eng, texts = engine("mtp", draft="mtp"), {}
    for turn, grammar in enumerate((CALL, None)):
        requests = []
        for number in range(first, first + count):
            prompt, result = talk(number)
            prompt = texts[number] + result if turn else prompt
            sampling = SAMPLINGS[number % 5]
            name = f"t{number}-{turn}"
            requests.append(Request(name, prompt, 24 - 8 * turn, sampling, grammar=grammar))
        events: dict[str, list[Event]] = eng.generate(requests)
        for number, request in enumerate(requests, first):
            check_answer("mtp", request, events[request.id], 1e-4)
            answer = tuple(written(events[request.id])[0])
            texts[number] = request.prompt + answer
            if grammar is not None:
                assert bytes(answer[:6]) == b'{"f":"' and events[request.id][-1].finish_reason


@pytest.mark.parametrize("count", [4, pytest.param(1000, marks=pytest.mark.slow)])
def test_tokens_are_those_of_each_request_alone(count):
    before = engine("mtp", draft="mtp").stats()
    for first in range(0, count, TOGETHER):
        converse(first, min(TOGETHER, count - first))
    after = engine("mtp", draft="mtp").stats()
    drafted = after.drafted_tokens - before.drafted_tokens
    assert 0 < after.accepted_tokens - before.accepted_tokens < drafted
    assert after.prefix_hit_tokens - before.prefix_hit_tokens > 2 * count
