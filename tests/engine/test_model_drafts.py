"""Models that draft in the engine: every request's tokens are those it gets without one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.language_model import LanguageModel
from tests.helpers.engine_cases import (
    CONFIGS,
    DELTA_FAMILIES,
    OPTIONS,
    PROMPTS,
    SAMPLINGS,
    model,
    run_schedule,
)

pytestmark = pytest.mark.usefixtures("engines_of_one_size")
# (prompt, sampling, new tokens, step of its arrival, priority, step of its end or None)
SCHEDULE = (
    (8, 0, 24, 0, 0, None),
    (3, 1, 23, 0, 0, None),
    (2, 2, 22, 1, 0, None),
    (6, 3, 21, 2, 0, 5),
    (7, 4, 24, 3, 1, None),
    (8, 1, 20, 5, 0, None),
    (0, 3, 24, 14, 0, None),
    (8, 0, 9, 20, 0, None),
)


def with_head(lm: LanguageModel, change: Callable[[jax.Array], jax.Array]) -> LanguageModel:
    params = dict(lm.params)
    head = "head" if "head" in params else "embed"
    params[head] = {**params[head], "weight": change(params[head]["weight"])}
    return dataclasses.replace(lm, params=params)


def blurred(weight: jax.Array) -> jax.Array:
    """Often right."""
    noise = jax.random.normal(jax.random.key(0), weight.shape)
    return weight + 0.02 * jnp.std(weight) * noise


def drafter(family: str, draft: str) -> LanguageModel:
    lm = model(family)
    if draft == "blurred":
        return with_head(lm, blurred)
    return lm.first_layers(1) if draft == "first" else model(draft)


@functools.cache
def drafting(family: str, draft: str) -> Engine:
    return Engine(model(family), draft=drafter(family, draft), draft_tokens=3, **OPTIONS)


def others(family: str):
    return [
        pytest.param(family, draft, marks=pytest.mark.slow)
        for draft in ("blurred", "first", "llama", "gla", "hybrid", "window")
    ]


@pytest.mark.parametrize(
    ("family", "draft"),
    [case for family in CONFIGS for case in others(family)],
)
def test_a_model_that_drafts_changes_no_tokens(family, draft):
    """Drawn, with penalties and bias, cancelled, preempted, with prefixes that are known.

    A blurred copy is often right. Another model is right by chance, for one token in 256. The model
    itself, which is also the first layer of a model of one layer, is always right.
    """
    eng = drafting(family, draft)
    is_itself = draft == family or (draft == "first" and CONFIGS[family].n_layers == 1)
    for _ in range(2):
        run_schedule(family, eng, SCHEDULE)
    stats = eng.stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    if is_itself:  # a stop token is the first to third of a draft; those after it do not count
        wrong = stats.drafted_tokens - stats.accepted_tokens
        assert 0 <= wrong <= 2 * stats.finished.get("stop", 0) and stats.accepted_tokens > 100
        return
    assert stats.drafted_tokens > stats.accepted_tokens
    if draft in ("blurred", "first"):
        assert stats.accepted_tokens > (60 if draft == "blurred" else 0)


@pytest.mark.slow
def test_a_draft_that_is_the_model_is_right():
    """Preempted rows read all again, and known prefixes are the draft's too."""
    lm = model("llama")
    eng = Engine(lm, draft=lm, draft_tokens=3, **{**OPTIONS, "max_slots": 2, "cache_tokens": 96})
    requests = [
        Request(f"r{i}", prompt, 24, SAMPLINGS[i % 5], ignore_eos=True)
        for i, prompt in enumerate(PROMPTS[3:])
    ]
    eng.generate(requests)
    stats = eng.stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    assert stats.accepted_tokens == stats.drafted_tokens > 50


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gla", *DELTA_FAMILIES])
def test_every_token_of_a_draft_that_is_the_model_is_right(family):
    """Preempted rows read all again, and known prefixes are the draft's too.

    Prompts come back in reverse order: four snapshots hold the states of the newest prefixes alone.
    """
    for options in ({"prefix_cache": False}, {"cache_tokens": None}):
        eng = Engine(model(family), draft=model(family), **{**OPTIONS, **options})
        for name, order in (("a", 1), ("b", -1)):
            requests = [
                Request(f"{name}{i}", prompt, 24, SAMPLINGS[i % 5], ignore_eos=True)
                for i, prompt in enumerate(PROMPTS)
            ]
            eng.generate(requests[::order])
        stats = eng.stats()
        assert (stats.prefix_hit_tokens if "cache_tokens" in options else stats.preemptions) > 0
        assert stats.accepted_tokens == stats.drafted_tokens > 200


@pytest.mark.slow
def test_drafts_that_are_wrong_stop():
    """Of 7, 3 and 1 tokens; then one for each pause, which is twice as long as the one before."""
    wrong = with_head(model("llama"), jnp.negative)
    eng = Engine(model("llama"), draft=wrong, **{**OPTIONS, "max_slots": 1})
    eng.generate([Request("wrong", PROMPTS[5], 48, ignore_eos=True)])
    # Behind 3 tokens without a pause, pauses of 2, 4, 8 and 16.
    assert (eng.stats().drafted_tokens, eng.stats().accepted_tokens) == (7 + 3 + 1 + 4, 0)
