"""Lockstep: another process's engine repeats the steps, so that it has the same tokens."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from jaxllama.engine.engine import Engine
from jaxllama.engine.lockstep import StepInput, follow, follower_options
from jaxllama.engine.request import Event, Request
from jaxllama.errors import JaxLlamaError
from tests.helpers.engine_cases import OPTIONS, PROMPTS, SAMPLINGS, engine, model


@pytest.mark.slow
def test_a_follower_does_the_steps_of_the_first(monkeypatch):
    """Requests at any step, preempted, ended from outside and by their deadlines."""
    first, other = engine("llama"), Engine(model("llama"), **follower_options(OPTIONS))
    steps: list[bytes] = []
    taken: dict[str, list[int]] = {}
    told: dict[str, list[Event]] = {}
    submit = other.submit

    def listen(request: Request, _, *, with_text: bool) -> None:
        assert request.deadline is None
        taken[request.id] = []
        submit(request, lambda event: taken[event.id].extend(event.tokens), with_text=with_text)

    monkeypatch.setattr(other, "submit", listen)
    monkeypatch.setattr(other, "steps", first.steps)
    monkeypatch.setattr(first, "on_step", lambda step: steps.append(pickle.dumps(step)))
    preemptions = first.stats().preemptions
    draw = np.random.default_rng(5)
    waiting = [
        Request(f"{i}", PROMPTS[i % len(PROMPTS)], 20, SAMPLINGS[i % 5], priority=int(i % 3))
        for i in range(14)
    ]
    waiting[3] = dataclasses.replace(waiting[3], deadline=1e-6)
    while waiting or first.live or len(first._inbox):
        for request in waiting[: int(draw.integers(0, 3))]:
            told[request.id] = []
            first.submit(request, told[request.id].append)
            waiting.remove(request)
        if first.live and draw.random() < 0.1:
            first.cancel(next(iter(first.live)))
        first.step()
        while steps:
            follow(other, pickle.loads(steps.pop(0)))
        assert list(other.live) == list(first.live)
    assert first.stats().preemptions > preemptions
    assert {events[-1].finish_reason for events in told.values()} >= {"length", "deadline"}
    for id, events in told.items():
        assert taken[id] == [token for event in events for token in event.tokens]
    with pytest.raises(JaxLlamaError, match="step 7 of the first process"):
        follow(other, StepInput(7, ()))
