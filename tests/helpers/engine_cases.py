"""Requests for engines of tiny models, and the oracle of what each of them is answered.

One model a family and one shape of cache, so that engines share their compiled programs.
"""

from __future__ import annotations

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings

import jaxllama as jl
from jaxllama import generation
from jaxllama.language_model import LanguageModel
from jaxllama.model.cache import KVCache
from jaxllama.sampling import SamplingParams
from jaxllama.serving.engine.engine import Engine
from jaxllama.serving.engine.request import Event, Request
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.models import FAMILIES, params_of

MAX_LEN, MAX_NEW = 96, 24
# Pages for fewer tokens than four rows may take, so that rows are preempted.
OPTIONS = {
    "max_slots": 4, "max_len": MAX_LEN, "prefill_chunk": 16, "steps_per_call": 3,
    "cache_tokens": 128,
}  # fmt: skip
ALL = ("draw", "top_k", "top_p", "min_p", "penalties", "bias")
SAMPLINGS = (
    jl.Sampling(),
    jl.Sampling(temperature=1.0, seed=1),
    jl.Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2),
    jl.Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
    jl.Sampling(temperature=0.7, seed=3, repetition_penalty=1.2, logit_bias={5: 3.0}),
    # Texts that repeat, for drafts: one token, two of them at random, three in turn.
    jl.Sampling(logit_bias={5: 50.0}),
    jl.Sampling(temperature=1.0, seed=4, logit_bias={5: 50.0, 6: 48.0}),
    jl.Sampling(frequency_penalty=1.0, logit_bias={5: 50.0, 6: 49.0, 7: 48.0}),
)


# They speak bytes, of which 2 ends.
CONFIGS = {
    name: FAMILIES[family].replace(vocab_size=256, name=f"tiny-{name}")
    for name, family in (
        ("llama", "gqa"), ("gla", "gla-conv-groups"), ("hybrid", "hybrid"), ("window", "mqa-window")
    )
}  # fmt: skip


@functools.cache
def model(family: str) -> LanguageModel:
    cfg = CONFIGS[family]
    return LanguageModel(cfg, params_of(cfg), Tokenizer.byte_level())


@functools.cache
def engine(family: str, **options) -> Engine:
    """One for all tests of a family: idle between them, so only its prefix cache is not new."""
    return Engine(model(family), **{**OPTIONS, **options})


@functools.cache
def alone(
    family: str, prompt: tuple[int, ...], sampling: jl.Sampling, kv_dtype: str = "float32"
) -> tuple[list[int], list[float], bool]:
    """The request by itself through ``generation``: MAX_NEW tokens in one shape, so that one
    program serves every request; a shorter answer is its beginning."""
    lm = model(family)
    params = SamplingParams.stack([sampling], lm.config.vocab_size, 0)
    if params.bias_ids is None:
        blank = jnp.full((1, 1), lm.config.vocab_size, jnp.int32), jnp.zeros((1, 1), jnp.float32)
        params = dataclasses.replace(params, bias_ids=blank[0], bias_values=blank[1])
    params = dataclasses.replace(params, features=ALL)
    tokens = jnp.asarray([[*prompt, *[0] * (MAX_LEN - len(prompt))]], jnp.int32)
    cache = jl.init_cache(lm.config, 1, MAX_LEN + MAX_NEW, dtype=kv_dtype)
    stop_ids = jnp.asarray(lm.config.eos_token_ids, jnp.int32)
    state = generation.start(
        lm.config, lm.params, tokens, jnp.asarray([len(prompt)], jnp.int32), cache, params,
        stop_ids, max_new_tokens=MAX_NEW,
    )  # fmt: skip
    state = generation.advance(lm.config, lm.params, state, params, stop_ids, np.int32(MAX_NEW))
    n = int(state.counts[0])
    stopped = bool(state.done[0])
    return np.asarray(state.tokens)[0, :n].tolist(), np.asarray(state.logprobs)[0, :n], stopped


def check_answer(
    family: str, request: Request, events: list[Event], kv_dtype="float32", drafts: bool = False
) -> None:
    """Token for token what the request gives alone, ended once and for the right reason."""
    tokens, logprobs, stopped = alone(family, request.prompt, request.sampling, kv_dtype)
    tokens = tokens[: request.max_new_tokens]
    got = [token for event in events for token in event.tokens]
    reasons = [event.finish_reason for event in events]
    assert [reason is None for reason in reasons] == [True] * (len(events) - 1) + [False]
    if reasons[-1] == "cancelled":
        tokens = tokens[: len(got)]
    else:
        ended = stopped and len(tokens) == len(alone(family, request.prompt, request.sampling)[0])
        assert reasons[-1] == ("stop" if ended else "length")
    assert got == tokens
    got_logprobs = [value for event in events for value in event.logprobs]
    # float32 sums in other orders: 1e-7 of logits of up to ten, through two layers.  A narrow cache
    # turns such a difference, at a rounding border, into another last bit of a stored number (2**-8
    # of it in bfloat16), one of hundreds that a logit is made of.  A pass over a draft adds a GLA
    # layer's tokens in chunks (test_speculative has the same bound).
    atol = (1e-4 if drafts else 2e-5) if kv_dtype == "float32" else 2e-3
    np.testing.assert_allclose(got_logprobs, logprobs[: len(got)], atol=atol)
    assert events[-1].completion_tokens == len(got)
    assert events[-1].prompt_tokens == len(request.prompt)


def poison(eng: Engine) -> None:
    """NaN into every slot, page and snapshot that is nobody's."""

    def with_nan(tree, rows: list[int]):
        def put(leaf: jax.Array) -> jax.Array:
            data = np.array(leaf)
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                data[rows] = np.nan
            return jnp.asarray(data)

        return jax.tree.map(put, tree)

    eng.runner.wait()
    runner, slots = eng.runner, eng.runner.slots
    taken = {sequence.slot for sequence in eng.scheduler.admitted}
    free = [slot for slot in range(slots.size) if slot not in taken]
    layers = tuple(
        with_nan(layer, runner.pages.free if isinstance(layer, KVCache) else free)
        for layer in slots.cache.layers
    )
    runner.slots = dataclasses.replace(
        slots,
        cache=dataclasses.replace(slots.cache, layers=layers),
        snapshots=with_nan(slots.snapshots, runner.pages.free_states),
    )


PROMPTS = tuple(
    tuple(np.random.default_rng(seed).integers(3, 97, length).tolist())
    for seed, length in enumerate([1, 2, 9, 16, 17, 18, 33, 40, 50])
) + (tuple(np.random.default_rng(7).integers(3, 97, 40).tolist()) + (5, 6, 7),)
one_request = st.tuples(
    st.integers(0, len(PROMPTS) - 1),
    st.integers(0, len(SAMPLINGS) - 1),
    st.integers(1, MAX_NEW),
    st.integers(0, 12),  # the step it arrives at
    st.integers(0, 1),  # priority
    st.one_of(st.none(), st.none(), st.integers(0, 15)),  # the step it is cancelled at
)
schedules = st.lists(one_request, min_size=1, max_size=8)


def run_schedule(family: str, eng: Engine, schedule, kv_dtype: str = "float32") -> None:
    requests = [
        Request(f"r{index}", PROMPTS[prompt], new, SAMPLINGS[sampling], priority=priority)
        for index, (prompt, sampling, new, _, priority, _) in enumerate(schedule)
    ]
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    step, last = 0, max(max(arrival, cancel or 0) for *_, arrival, _, cancel in schedule)
    while step <= last or eng.live:
        for request, (*_, arrival, _, cancel) in zip(requests, schedule, strict=True):
            if arrival == step:
                eng.submit(request, events[request.id].append)
            if cancel == step:
                eng.cancel(request.id)
        poison(eng)
        eng.step()
        step += 1
        assert step < 400
    for request, (*_, arrival, _, cancel) in zip(requests, schedule, strict=True):
        if cancel is not None and cancel < arrival:
            assert events[request.id][-1].finish_reason != "cancelled"
        drafts = eng.options.draft is not None
        check_answer(family, request, events[request.id], kv_dtype, drafts)


def search(family: str, examples: int, **options) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(schedules)
    def every_schedule(schedule) -> None:
        run_schedule(family, engine(family, **options), schedule)

    every_schedule()


def written(events: list[Event]) -> tuple[list[int], list[float]]:
    """Tokens, and logprobs to the last bit."""
    return (
        [token for event in events for token in event.tokens],
        [value for event in events for value in event.logprobs],
    )
