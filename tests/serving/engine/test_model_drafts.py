"""Models that draft in the engine: every request's tokens are those it gets without one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.language_model import LanguageModel
from jaxllama.serving.engine.engine import Engine
from jaxllama.serving.engine.request import Event, Request
from tests.helpers.models import FAMILIES, params_of

OPTIONS = {"max_slots": 4, "max_len": 96, "prefill_chunk": 16, "steps_per_call": 3}
SAMPLINGS = (
    jl.Sampling(),
    jl.Sampling(temperature=1.0, seed=1),
    jl.Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2),
    jl.Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
    jl.Sampling(temperature=0.7, seed=3, repetition_penalty=1.2, logit_bias={5: 3.0}),
)
PROMPTS = tuple(
    tuple(np.random.default_rng(seed).integers(3, 97, length).tolist())
    for seed, length in enumerate([1, 2, 9, 16, 17, 33, 40, 50])
)
# (prompt, sampling, new tokens, step of its arrival, priority, step of its end or None)
SCHEDULE = (
    (7, 0, 24, 0, 0, None), (3, 1, 23, 0, 0, None), (2, 2, 22, 1, 0, None), (5, 3, 21, 2, 0, 5),
    (6, 4, 24, 3, 1, None), (7, 1, 20, 5, 0, None), (0, 3, 24, 14, 0, None), (7, 0, 9, 20, 0, None),
)  # fmt: skip
TARGETS = {"llama": "gqa", "gla": "gla-conv-groups", "hybrid": "hybrid", "window": "mqa-window"}


@functools.cache
def model(family: str) -> LanguageModel:
    cfg = FAMILIES[TARGETS[family]]
    return LanguageModel(cfg, params_of(cfg), None)


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
def engine(family: str, draft: str | None, **options) -> Engine:
    by = None if draft is None else drafter(family, draft)
    return Engine(model(family), draft=by, **{**OPTIONS, **options})


def run(eng: Engine, schedule) -> dict[str, list[Event]]:
    requests = [
        Request(f"r{index}", PROMPTS[prompt], new, SAMPLINGS[sampling], priority=priority)
        for index, (prompt, sampling, new, _, priority, _) in enumerate(schedule)
    ]
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    step, last = 0, max(one[3] for one in schedule)
    while step <= last or eng.live:
        for request, (*_, arrival, _, cancel) in zip(requests, schedule, strict=True):
            if arrival == step:
                eng.submit(request, events[request.id].append)
            if cancel == step:
                eng.cancel(request.id)
        eng.step()
        step += 1
    return events


@functools.cache
def plainly(family: str):
    """The schedule's requests, each by itself, without a draft."""
    eng, answers = engine(family, None), {}
    for index, (prompt, sampling, new, *_) in enumerate(SCHEDULE):
        request = Request(f"r{index}", PROMPTS[prompt], new, SAMPLINGS[sampling])
        answers[request.id] = written(eng.generate([request])[request.id])
    return answers


def written(events: list[Event]) -> tuple[list[int], list[float]]:
    return (
        [token for event in events for token in event.tokens],
        [value for event in events for value in event.logprobs],
    )


def check(family: str, eng: Engine) -> None:
    for key, events in run(eng, SCHEDULE).items():
        tokens, logprobs = plainly(family)[key]
        got, values = written(events)
        if events[-1].finish_reason == "cancelled":
            tokens = tokens[: len(got)]
        assert got == tokens
        np.testing.assert_allclose(values, logprobs[: len(got)], atol=1e-4)


def others(family: str):
    return [
        pytest.param(family, draft, marks=pytest.mark.slow)
        for draft in ("blurred", "first", "llama", "gla", "hybrid", "window")
    ]


@pytest.mark.parametrize(
    ("family", "draft"),
    [("hybrid", "blurred"), *(case for family in TARGETS for case in others(family))],
)
def test_a_model_that_drafts_changes_no_tokens(family, draft):
    """Drawn, with penalties and bias, cancelled, preempted, with prefixes that are known; where a
    draft is often right and where it never is."""
    eng = engine(family, draft, cache_tokens=128, draft_tokens=3)
    check(family, eng)
    check(family, eng)
    stats = eng.stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    assert stats.drafted_tokens > stats.accepted_tokens
    assert stats.accepted_tokens > (60 if draft == "blurred" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gla"])
def test_every_token_of_a_draft_that_is_the_model_is_right(family):
    """Preempted rows read all again, and known prefixes are the draft's too."""
    for options in ({"cache_tokens": 96, "prefix_cache": False}, {}):
        eng = Engine(model(family), draft=model(family), **{**OPTIONS, **options})
        for name in "ab":
            eng.generate([
                Request(f"{name}{i}", prompt, 24, SAMPLINGS[i % 5], ignore_eos=True)
                for i, prompt in enumerate(PROMPTS)
            ])  # fmt: skip
        stats = eng.stats()
        assert (stats.preemptions if options else stats.prefix_hit_tokens) > 0
        assert stats.accepted_tokens == stats.drafted_tokens > 200


@pytest.mark.slow
def test_drafts_that_are_wrong_stop():
    """Of 7, 3 and 1 tokens; then one for each pause, which is twice as long as the one before."""
    wrong = with_head(model("llama"), jnp.negative)
    eng = Engine(model("llama"), draft=wrong, **OPTIONS)
    eng.generate([Request("wrong", PROMPTS[5], 48, ignore_eos=True)])
    # Behind 3 tokens without a pause, pauses of 2, 4, 8 and 16.
    assert (eng.stats().drafted_tokens, eng.stats().accepted_tokens) == (7 + 3 + 1 + 4, 0)


@pytest.mark.slow
def test_a_journal_names_its_draft(tmp_path):
    lm, by = model("hybrid"), model("gla")
    requests = [Request(f"s{i}", PROMPTS[i], 12, SAMPLINGS[i % 5]) for i in range(8)]
    first = Engine(lm, draft=by, state=tmp_path, **OPTIONS)
    want = first.generate(requests)
    first.stop()
    for wrong in (None, lm):
        with pytest.raises(jl.JaxLlamaError, match="an engine with another draft"):
            Engine.restore(tmp_path, lm, draft=wrong)
    got: dict[str, list[Event]] = {request.id: [] for request in requests}
    again = Engine.restore(tmp_path, lm, lambda event: got[event.id].append(event), draft=by)
    while again.step():
        pass
    assert {key: written(some) for key, some in got.items()} == {
        key: written(some) for key, some in want.items()
    }
    assert again.stats().drafted_tokens == first.stats().drafted_tokens > 0
