"""Drafts that cost more than they give end, by measured rates, and change no token."""

from __future__ import annotations

import pytest

from jaxllama.decoding.gain import AGAIN, DRAFT, OFF, WAIT, Gain
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.language_model import LanguageModel
from tests.helpers.eagle_cases import CONFIG, drafter, model

PROMPT, NEW = [7, 8, 9, 7, 8, 9, 7, 8], 64


@pytest.mark.parametrize(("draft", "number"), [("head", 0), ("head", 3), ("ngram", 0)])
def test_adaptive_drafts_that_cost_are_measured(draft, number) -> None:
    source = model().drafting(drafter() if draft == "head" else draft, number)
    assert source is not None and (source.gains is not None) == ((draft, number) == ("head", 0))


@pytest.mark.parametrize(("rate", "after"), [(3.0, DRAFT), (1.0, OFF)])
def test_calls_draft_then_wait_then_do_what_is_faster(rate, after) -> None:
    """The first measured call compiles; its rate is one of the slowest and does not count."""
    gain, found = Gain(waits=4), list[int]()
    for index in range(AGAIN):
        found.append(gain.next())
        gain.took(found[-1], 0.01 if index == 0 else rate if found[-1] == DRAFT else 2.0)
    assert found[:12] == [DRAFT] * 8 + [WAIT] * 4
    assert set(found[12:]) == {after}
    assert gain.next() == DRAFT


@pytest.fixture
def rates(monkeypatch) -> dict[int, float]:
    """The rates that are recorded instead of the measured ones."""
    found, took = {DRAFT: 1.0, WAIT: 2.0}, Gain.took
    monkeypatch.setattr(Gain, "took", lambda self, how, _: took(self, how, found.get(how, 0.0)))
    return found


def generated(lm: LanguageModel, **options):
    return lm.generate([PROMPT], NEW, **options)[0]


def answered(engine: Engine, name: str):
    [events] = engine.generate([Request(name, PROMPT, NEW, ignore_eos=True)]).values()
    return [token for event in events for token in event.tokens]


def test_generate_ends_drafts_that_cost_time(rates) -> None:
    lm = LanguageModel(CONFIG.replace(eos_token_ids=()), model().params, None)
    want = generated(lm)
    got = [generated(lm, draft=drafter()) for _ in range(4)]
    assert [one.tokens for one in got] == [want.tokens] * 4
    drafted = [one.drafted for one in got]
    assert drafted[0] > 0 and drafted[3] == 0
    rates[DRAFT] = 3.0
    lm.gains.clear()
    got = [generated(lm, draft=drafter()) for _ in range(4)]
    assert [one.tokens for one in got] == [want.tokens] * 4 and got[3].drafted > 0


@pytest.mark.slow
def test_an_engine_ends_drafts_that_cost_time(rates) -> None:
    lm = LanguageModel(CONFIG.replace(eos_token_ids=()), model().params, None)
    options = {"max_slots": 1, "max_len": 96, "cache_tokens": 192, "prefill_chunk": 32}
    want = generated(lm).tokens
    engine = Engine(lm, draft=drafter(), **options)
    drafted = [0]
    for index in range(12):
        assert answered(engine, f"r{index}") == want
        drafted.append(engine.stats().drafted_tokens)
    assert drafted[1] > 0 and drafted[-2] == drafted[-1]
