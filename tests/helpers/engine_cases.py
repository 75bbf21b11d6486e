"""Requests for engines of tiny models, and the oracle of what each of them is answered.

One model a family and one shape of cache, so that engines share their compiled programs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxllama as jl
from jaxllama.config import ModelConfig
from jaxllama.decoding.sampling import History, SamplingParams, sample
from jaxllama.engine.engine import Engine
from jaxllama.engine.grammar import GrammarCompiler
from jaxllama.engine.request import Event, Request
from jaxllama.language_model import LanguageModel
from jaxllama.model.decoder import forward, logits
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers import eagle_cases, mtp_cases
from tests.helpers.arrays import as_jax
from tests.helpers.models import GEMMA4, HYBRIDS, IDENTITIES, INDEXED, LATENT, params_of

MAX_LEN, MAX_NEW = 96, 24
# Pages for fewer tokens than four rows may take, so that rows are preempted.
OPTIONS = {
    "max_slots": 4,
    "max_len": MAX_LEN,
    "prefill_chunk": 16,
    "steps_per_call": 3,
    "cache_tokens": 128,
}
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


# They speak bytes, of which 2 ends. Models have one layer, unless their layers differ.
CONFIGS = {
    name: cfg.replace(vocab_size=256, name=f"tiny-{name}")
    for name, cfg in (
        ("llama", IDENTITIES["gqa"].first_layers(1)),
        ("gla", IDENTITIES["gla-conv-groups"]),
        ("hybrid", IDENTITIES["hybrid"]),
        ("window", IDENTITIES["mqa-window"]),
        ("delta", IDENTITIES["delta"]),
        ("kda", IDENTITIES["kda"]),
        *HYBRIDS.items(),
    )
} | {"mtp": mtp_cases.CONFIG}


# Beside the tests of every family: attention from latents, and keys that layers share.
OTHERS = {
    "latent": LATENT.first_layers(1).replace(vocab_size=256, name="tiny-latent"),
    "indexed": INDEXED.first_layers(1).replace(vocab_size=256, name="tiny-indexed"),
    "gemma4": GEMMA4.replace(vocab_size=256, name="tiny-gemma4"),
    "eagle": eagle_cases.CONFIG,
}
# Families with layers of the gated delta rule, whose cases are slow.
DELTA_FAMILIES = tuple(name for name, cfg in CONFIGS.items() if cfg.delta is not None)
DELTA_ROWS = [pytest.param(name, marks=pytest.mark.slow) for name in DELTA_FAMILIES]


@functools.cache
def model(family: str) -> LanguageModel:
    if family == "mtp":
        return mtp_cases.model()
    cfg = (CONFIGS | OTHERS)[family]
    return LanguageModel(cfg, params_of(cfg), Tokenizer.byte_level())


@functools.cache
def engine(family: str, **options) -> Engine:
    """One for all tests of a family: idle between them, so only its prefix cache is not new.

    draft="first" is a draft of the model's own layers, all but the last.
    """
    if options.get("draft") == "first":
        layers = max((CONFIGS | OTHERS)[family].n_layers - 1, 1)
        options["draft"] = model(family).first_layers(layers)
    return Engine(model(family), **{**OPTIONS, **options})


@functools.partial(jax.jit, static_argnums=0)
def next_token(
    cfg: ModelConfig,
    params: Any,
    sampling: SamplingParams,
    tokens: jax.Array,
    prompted: jax.Array,
    length: jax.Array,
    allowed: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The token behind ``tokens[1, :length]``, and its logprob: all of the text through the model,
    without a cache.  prompted: tokens of the prompt; allowed: bool ``[1, V]``."""
    hidden, _ = forward(cfg, params, tokens, length[None])
    scores = logits(cfg, params, hidden[:, length - 1])
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    history = History.of_prompt(tokens, prompted[None], cfg.vocab_size)
    history = history.add(tokens, (place >= prompted) & (place < length))
    return sample(scores, sampling, length[None], history, allowed)


def alone(family: str, request: Request) -> tuple[list[int], list[float], bool]:
    """The request by itself, token by token, and whether it ended before its limit."""
    same = {"id": "", "logprobs": None, "priority": 0, "deadline": None}
    return _alone(family, dataclasses.replace(request, **same))


@functools.cache
def _alone(family: str, request: Request) -> tuple[list[int], list[float], bool]:
    lm = model(family)
    cfg, stops = lm.config, () if request.ignore_eos else lm.config.eos_token_ids
    sampling = SamplingParams.stack([request.sampling], cfg.vocab_size, 0)
    if sampling.bias_ids is None:
        blank = jnp.full((1, 1), cfg.vocab_size, jnp.int32), jnp.zeros((1, 1), jnp.float32)
        sampling = dataclasses.replace(sampling, bias_ids=blank[0], bias_values=blank[1])
    sampling = dataclasses.replace(sampling, features=ALL)
    matcher = None
    if request.grammar is not None:
        compiler = GrammarCompiler(lm.tokenizer, cfg.vocab_size, cfg.eos_token_ids)
        matcher = compiler.matcher(request.grammar)._matcher
    n_prompt = len(request.prompt)
    text = np.zeros((1, MAX_LEN + MAX_NEW), np.int32)
    text[0, :n_prompt] = request.prompt
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < request.max_new_tokens:
        if matcher is not None and matcher.is_stopped():
            return tokens, logprobs, True
        allowed = np.ones((1, cfg.vocab_size), bool)
        if matcher is not None:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed[0] = np.unpackbits(bits, bitorder="little")[: cfg.vocab_size]
        if len(tokens) < request.min_tokens and allowed.sum() > 1:
            allowed[0, list(cfg.eos_token_ids)] = False
        length = np.int32(n_prompt + len(tokens))
        token, logprob = next_token(
            cfg, lm.params, sampling, text, np.int32(n_prompt), length, allowed
        )
        tokens.append(int(token[0]))
        logprobs.append(float(logprob[0]))
        text[0, length] = tokens[-1]
        if tokens[-1] in stops:
            return tokens, logprobs, True
        if matcher is not None:
            matcher.consume_token(tokens[-1])
    return tokens, logprobs, False


def check_answer(family: str, request: Request, events: list[Event], atol: float = 5e-5) -> None:
    """Token for token what the request gives alone, ended once and for the right reason.

    atol: of logprobs; float32 sums in other orders, 1e-7 of logits of up to ten, through two
    layers.
    """
    tokens, logprobs, stopped = alone(family, request)
    got = [token for event in events for token in event.tokens]
    reasons = [event.finish_reason for event in events]
    assert [reason is None for reason in reasons] == [True] * (len(events) - 1) + [False]
    if reasons[-1] == "cancelled":
        tokens = tokens[: len(got)]
    else:
        assert reasons[-1] == ("stop" if stopped else "length")
    assert got == tokens
    got_logprobs = [value for event in events for value in event.logprobs]
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
            return as_jax(data)

        return jax.tree.map(put, tree)

    eng.runner.wait()
    runner, slots = eng.runner, eng.runner.slots
    taken = {sequence.slot for sequence in eng.scheduler.admitted}
    free = [slot for slot in range(slots.size) if slot not in taken]
    layers = tuple(
        with_nan(layer, runner.pools[0].free if isinstance(layer, KVCache) else free)
        for layer in slots.cache.layers
    )
    runner.slots = dataclasses.replace(
        slots,
        cache=dataclasses.replace(slots.cache, layers=layers),
        snapshots=with_nan(slots.snapshots, runner.pools[0].free_states),
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
# Texts that repeat and texts that do not, one cancelled within a draft, one preempted.
REPEATING = (
    (9, 5, 24, 0, 0, None),
    (3, 6, 23, 0, 0, None),
    (2, 7, 22, 1, 0, None),
    (7, 5, 21, 2, 0, 5),
    (8, 2, 24, 3, 1, None),
    (9, 3, 20, 5, 0, None),
    (0, 6, 24, 14, 0, None),
)
schedules = st.lists(one_request, min_size=1, max_size=8)


def run_schedule(family: str, eng: Engine, schedule) -> None:
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
        # A pass over a draft adds a GLA layer's tokens in chunks.
        atol = 5e-5 if eng.options.draft is None else 1e-4
        check_answer(family, request, events[request.id], atol)


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


def every_way_generates(
    lm: LanguageModel,
    tokens: np.ndarray,
    cuts: tuple[slice, slice, slice] = (slice(6), slice(4), slice(2, 5)),
    new: int = 6,
    max_len: int = 32,
) -> None:
    """Drafts, the engine and offloaded weights give the tokens of ``generate``.

    tokens: int32 ``[2, T]``.  cuts: the prompts, of its first, second and first row.
    """
    prompts = [tokens[row, cut].tolist() for row, cut in zip((0, 1, 0), cuts, strict=True)]
    plain = [one.tokens for one in lm.generate(prompts, max_new_tokens=new)]
    drafted = lm.generate(prompts, max_new_tokens=new, draft="ngram", draft_tokens=2)
    assert [one.tokens for one in drafted] == plain
    engine, found = Engine(lm, max_slots=2, max_len=max_len), {}
    for index, prompt in enumerate(prompts):
        found[str(index)] = []
        request = Request(str(index), prompt, max_new_tokens=new)
        engine.submit(request, lambda event: found[event.id].extend(event.tokens))
    while engine.step():
        pass
    assert [found[str(index)] for index in range(3)] == plain
    place = Placement(Policy.parse("0 50 0 50 0 50"), jnp.float32)
    off = place.model(lm.config, place.tree(jax.tree.map(np.asarray, lm.params)), None)
    assert [one.tokens for one in off.generate(prompts, new)] == plain
