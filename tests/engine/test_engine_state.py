"""Engines of a model with states: tokens, drafts, repeated runs, every cache dtype."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.engine import slots as device
from jaxllama.engine.engine import Engine
from jaxllama.engine.passes import CallSizes
from jaxllama.engine.request import Event, Grammar, Request
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow
from tests.helpers.engine_cases import (
    CONFIGS,
    DELTA_FAMILIES,
    MAX_NEW,
    OPTIONS,
    PROMPTS,
    REPEATING,
    SAMPLINGS,
    check_answer,
    engine,
    model,
    run_schedule,
    search,
    written,
)
from tests.helpers.models import FAMILIES, params_of

FAMILY = "delta"  # a state and pages
pytestmark = pytest.mark.usefixtures("engines_of_one_size")


@pytest.mark.slow
def test_tokens_are_those_of_the_request_alone_without_a_draft():
    search("hybrid", 6)
    assert engine("hybrid").stats().preemptions > 0


def test_tokens_are_those_of_the_request_alone():
    """Drafts, of which parts are rejected, preempted and cancelled rows, and prefixes that begin
    with a snapshot, in one engine."""
    eng = engine(FAMILY, draft="ngram")
    run_schedule(FAMILY, eng, REPEATING)
    search(FAMILY, 4, draft="ngram")
    prompt = tuple(np.random.default_rng(99).integers(3, 97, 40).tolist())
    hits = []
    for index, tail in enumerate([(5,), (5,), (6, 7)]):
        request = Request(f"p{index}", prompt + tail, 12, SAMPLINGS[(0, 5, 6)[index]])
        events = eng.generate([request])[request.id]
        check_answer(FAMILY, request, events, 1e-4)
        hits.append(events[-1].cached_tokens)
    assert hits == [0, 32, 32]
    stats = eng.stats()
    assert stats.preemptions > 0 and 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hybrid", "llama", "gla", "window", *DELTA_FAMILIES])
def test_drafts_change_no_tokens(family):
    """Texts that repeat and texts that do not, alone and together, drawn, with penalties and bias,
    cancelled in the middle of a draft, preempted, ended by their length within one."""
    eng = engine(family, draft="ngram")
    run_schedule(family, eng, REPEATING)
    stats = eng.stats()
    assert stats.preemptions > 0 and 20 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("draft_tokens", [0, 15])
@pytest.mark.parametrize("family", [*CONFIGS])
def test_drafts_change_no_tokens_in_many_schedules(family, draft_tokens):
    drafts = {"draft": "ngram", "draft_tokens": draft_tokens}
    search(family, 40, **drafts)
    stats = engine(family, **drafts).stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens and stats.preemptions > 0


@pytest.mark.core
def test_a_row_whose_drafts_are_right_takes_fewer_steps():
    """Up to a draft and one token a pass.  Drafts that are wrong stop; and what the host masks, as
    ``min_tokens`` does, ends a call where its mask ends."""
    eng, prompt = engine(FAMILY, draft="ngram"), PROMPTS[4]
    calls = {}
    for kind, sampling in (("right", SAMPLINGS[5]), ("wrong", jl.Sampling(temperature=5.0))):
        before = eng.stats()
        request = Request(kind, prompt * 2, MAX_NEW, sampling, ignore_eos=True)
        events = eng.generate([request])[kind]
        calls[kind] = len(events)
        drafted = eng.stats().drafted_tokens - before.drafted_tokens
        accepted = eng.stats().accepted_tokens - before.accepted_tokens
        assert accepted >= 12 if kind == "right" else drafted < 8
    assert calls["right"] <= 4 and calls["wrong"] == MAX_NEW // OPTIONS["steps_per_call"]
    least = Request("least", prompt, 12, SAMPLINGS[5], min_tokens=4, stop_token_ids=(5,))
    events = eng.generate([least])["least"]
    assert [len(event.tokens) for event in events] == [3, 1, 1]
    tokens, _ = written(events)
    assert tokens.index(5) == 4 and events[-1].finish_reason == "stop"
    likely = jl.Sampling(logit_bias={5: 50.0})
    least = Request("few", prompt, 12, likely, allowed_token_ids=(5, 9), min_tokens=2)
    least = dataclasses.replace(least, stop_token_ids=(5,))
    assert written(eng.generate([least])["few"])[0] == [9, 9, 5]
    never = jl.Sampling(logit_bias=dict.fromkeys((7, 8), float("-inf")))
    only = Request("only", prompt, 3, never, allowed_token_ids=(7, 8), ignore_eos=True)
    assert set(written(eng.generate([only])["only"])[0]) <= {7, 8}


def test_likeliest_tokens_and_stop_strings_do_not_see_the_draft():
    plain, drafts = engine(FAMILY), engine(FAMILY, draft="ngram")
    bias = jl.Sampling(temperature=1.0, seed=4, logit_bias={97: 50.0, 98: 48.0})
    top = Request("top", tuple(b"abab"), 20, bias, logprobs=3, ignore_eos=True)
    text = "".join(event.text for event in plain.generate([top])["top"])
    requests = [top, Request("stop", tuple(b"abab"), 20, bias, stop=(text[4:9],))]
    want, got = plain.generate(requests), drafts.generate(requests)
    for key, events in got.items():
        assert "".join(e.text for e in events) == "".join(e.text for e in want[key])
        assert written(events)[0] == written(want[key])[0]
        assert events[-1].finish_reason == want[key][-1].finish_reason
        tops = [
            [pair for e in some for top in e.top_logprobs for pair in top]
            for some in (events, want[key])
        ]
        assert [token for token, _ in tops[0]] == [token for token, _ in tops[1]]
        np.testing.assert_allclose(*([value for _, value in top] for top in tops), atol=2e-5)
    assert want["stop"][-1].finish_reason == "stop"


# Repeated runs


def requests_of(n: int) -> list[Request]:
    return [
        Request(
            f"s{index}",
            PROMPTS[(3 * index) % len(PROMPTS)],
            8 + index % 9,
            SAMPLINGS[index % 8],
            priority=index % 2,
            logprobs=2,
        )
        for index in range(n)
    ]


def run(eng: Engine, requests: list[Request]) -> dict[str, list[Event]]:
    """Run to the end: two requests arrive a step, the third is cancelled."""
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    step = 0
    while True:
        for request in requests[2 * step : 2 * step + 2]:
            eng.submit(request, events[request.id].append)
        if step == 4:
            eng.cancel("s2")
        if not eng.step() and 2 * step >= len(requests):
            break
        step += 1
    return events


def arrays(eng: Engine) -> list[bytes]:
    eng.runner.wait()
    leaves = jax.tree.leaves(eng.runner.slots)
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def test_requests_survive_json():
    request = dataclasses.replace(
        requests_of(5)[4], grammar=Grammar("regex", "a"), stop=("x",), deadline=2.0
    )
    assert request.sampling.logit_bias
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


def told(events: dict[str, list[Event]]) -> dict[str, tuple]:
    return {key: (*written(value), value[-1].finish_reason) for key, value in events.items()}


@pytest.mark.parametrize(
    ("family", "draft"),
    [
        (FAMILY, None),
        (FAMILY, "ngram"),
        *slow(("hybrid", None)),
        *slow(*((family, "ngram") for family in ("hybrid", *DELTA_FAMILIES) if family != FAMILY)),
    ],
)
def test_the_same_requests_at_the_same_steps_give_the_same_bits(family, draft):
    eng, other = (Engine(model(family), draft=draft, **OPTIONS) for _ in range(2))
    events, again = run(eng, requests_of(9)), run(other, requests_of(9))
    assert told(again) == told(events)
    assert again["s2"][-1].finish_reason == "cancelled"
    assert other.steps == eng.steps
    assert arrays(other) == arrays(eng)
    assert other.stats().drafted_tokens == eng.stats().drafted_tokens
    assert (draft is None) == (eng.stats().drafted_tokens == 0)


# Caches

DTYPES = ("float32", "bfloat16", "int8", "int4", "float8_e4m3fn")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_rows_pages_and_snapshots_move_unchanged(dtype):
    """Row 2 of three begins with a snapshot and two pages, and all that is another's keeps its
    bits, in a decode call of its own that takes a third page."""
    cfg, rng = FAMILIES["hybrid"].replace(head_dim=64), np.random.default_rng(1)
    slots = device.empty_slots(cfg, 3, 4, 6, 8, 2, dtype)

    def noise(leaf: jax.Array) -> jax.Array:
        return as_jax(rng.integers(-7, 8, leaf.shape)).astype(jnp.int32).astype(leaf.dtype)

    layers = jax.tree.map(noise, slots.cache.layers)
    cache = dataclasses.replace(slots.cache, layers=layers)
    slots = dataclasses.replace(slots, cache=cache, snapshots=jax.tree.map(noise, slots.snapshots))

    def bits(tree, rows=slice(None)) -> list[bytes]:
        return [np.asarray(leaf)[rows].tobytes() for leaf in jax.tree.leaves(tree)]

    gla, attention = (cfg.layer_types.index(kind) for kind in ("gla", "attention"))
    pages, others = bits(layers[attention]), bits(layers[gla], slice(0, 2))
    known = bits(slots.snapshots, 1)
    newcomer = device.Newcomer(2, [5, 0], 16, 1, jl.Sampling(), [5, 6], [], 4, False)
    rows = device.make_rows([newcomer], 2, 0, 4, cfg.vocab_size)
    slots = device.admit(slots, device.pack(rows))
    assert (
        bits([slots.cache.layers[i] for i, kind in enumerate(cfg.layer_types) if kind == "gla"], 2)
        == known
    )
    orders = device.make_orders(np.array([[2, 0, 2, 3]]), level=0, wants_top=False, steps=2)
    masks = np.zeros((1, -(-cfg.vocab_size // 32) + 2), np.uint32)
    stops, sizes = np.array([2], np.int32), CallSizes(1, 4, width=2)
    slots, *_ = device.decode(cfg, params_of(cfg), slots, orders, masks, stops, sizes=sizes)
    assert slots.cache.table[2].tolist() == [5, 0, 3, device.NOBODY]
    assert slots.cache.lengths.tolist() == [0, 0, 16] and slots.active.tolist() == [False] * 2 + [
        True
    ]
    assert int(slots.token[2]) == 6
    assert bits(slots.cache.layers[attention]) == pages
    assert bits(slots.cache.layers[gla], slice(0, 2)) == others
    assert bits(slots.snapshots, 1) == known


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_cache_dtype_gives_the_tokens_of_the_request_alone(dtype):
    """A rounding border turns sums in another order into another last bit of a stored number (2**-8
    of it in bfloat16), one of hundreds that a logit is made of."""
    eng, lm = engine("hybrid", kv_dtype=dtype), model("hybrid")
    requests = [Request(f"r{i}", PROMPTS[i], 20, SAMPLINGS[i % 5]) for i in range(10)]
    for request, events in zip(requests, eng.generate(requests).values(), strict=True):
        [want] = lm.generate([list(request.prompt)], 20, request.sampling, kv_dtype=dtype)
        tokens, logprobs = written(events)
        assert tokens == list(want.tokens)
        np.testing.assert_allclose(logprobs, want.logprobs, atol=2e-3)
