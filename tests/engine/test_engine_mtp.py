"""Engines in which the checkpoint's own head drafts: each request has its tokens without it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllama.engine.request import Event, Grammar, Request
from tests.helpers.engine_cases import (
    REPEATING,
    SAMPLINGS,
    check_answer,
    engine,
    run_schedule,
    search,
    written,
)
from tests.helpers.mtp_cases import drafts_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines_of_one_size")]
CALL = Grammar("regex", r'\{"f":"(get|set)","x":[0-9]{1,2}\}')
TOGETHER = 20  # conversations at once, of which four run


def talk(number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(system prompt and question, the tool's result) of a conversation."""
    rng = np.random.default_rng(number)
    system = np.random.default_rng(10_000 + number % 5).integers(32, 127, 33)
    question = rng.integers(32, 127, rng.integers(1, 7))
    return (*system.tolist(), *question.tolist()), tuple(rng.integers(48, 58, 3).tolist())


def converse(first: int, count: int) -> list[int]:
    """Return how many tokens the cache knew of each conversation's second prompt.

    Each begins with one of a few system prompts.  The first answer is a call of a tool, which a
    grammar forces; the tool's result and a second answer follow.
    """
    eng, texts, requests = engine("mtp", draft="mtp", draft_tokens=3), {}, []
    events: dict[str, list[Event]] = {}
    for turn, grammar in enumerate((CALL, None)):
        requests = []
        for number in range(first, first + count):
            prompt, result = talk(number)
            prompt = texts[number] + result if turn else prompt
            sampling = SAMPLINGS[number % 5]
            name = f"t{number}-{turn}"
            requests.append(Request(name, prompt, 24 - 8 * turn, sampling, grammar=grammar))
        events = eng.generate(requests)
        for number, request in enumerate(requests, first):
            check_answer("mtp", request, events[request.id], 1e-4)
            answer = tuple(written(events[request.id])[0])
            texts[number] = request.prompt + answer
            if grammar is not None:
                assert bytes(answer[:6]) == b'{"f":"' and events[request.id][-1].finish_reason
    return [events[request.id][-1].cached_tokens for request in requests]


def test_tokens_are_those_of_the_request_alone():
    """Preempted and cancelled rows, and prefixes that begin with a snapshot, in one engine.

    Requests alone draft and accept what the head, read anew at each turn, would have them.  The
    second and third begin with a known prefix, whose entries the head's cache must have, too.
    """
    eng = engine("mtp", draft="mtp", draft_tokens=3)
    run_schedule("mtp", eng, REPEATING)
    assert eng.stats().preemptions > 0
    prompt = tuple(np.random.default_rng(99).integers(3, 97, 40).tolist())
    for index, tail in enumerate([(5,), (5,), (6, 7)]):
        request = Request(f"p{index}", prompt + tail, 24, ignore_eos=True)
        before = eng.stats()
        events = eng.generate([request])[request.id]
        check_answer("mtp", request, events, 1e-4)
        assert events[-1].cached_tokens == (32 if index else 0)
        after = eng.stats()
        drafted = after.drafted_tokens - before.drafted_tokens
        accepted = after.accepted_tokens - before.accepted_tokens
        answer, _ = written(events)
        # An answer's first token is drawn in the first turn, before which the head knows nothing.
        known = drafts_of(request.prompt, answer, 3, written=1, adapts=True)
        assert (drafted, accepted) == known and accepted > 0


def test_tokens_are_those_of_the_request_alone_in_many_schedules():
    search("mtp", 300, draft="mtp", draft_tokens=3)
    stats = engine("mtp", draft="mtp", draft_tokens=3).stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("count", [4, 1000])
def test_conversations_with_tools_have_the_tokens_of_each_request_alone(count):
    """The second prompt of a conversation without others begins with 32 tokens of the first."""
    before = engine("mtp", draft="mtp", draft_tokens=3).stats()
    for first in range(0, count, TOGETHER):
        converse(first, min(TOGETHER, count - first))
    assert converse(count, 1) == [32]
    after = engine("mtp", draft="mtp", draft_tokens=3).stats()
    drafted = after.drafted_tokens - before.drafted_tokens
    assert 0 < after.accepted_tokens - before.accepted_tokens < drafted
