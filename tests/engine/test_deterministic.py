"""A deterministic engine: the same bits with any number of slots, and with any mix of options."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import jaxllama as jl
from jaxllama.engine.engine import Engine
from jaxllama.engine.options import EngineOptions
from jaxllama.engine.request import Request
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from tests.helpers.engine_cases import CONFIGS, OTHERS, SAMPLINGS, model, written
from tests.helpers.models import params_of

SIZES = {"max_len": 64, "prefill_chunk": 16, "steps_per_call": 4}
ROWS = 40  # more than the 32 rows of ``generate``'s program


@functools.cache
def fixed(family: str, scheme: str | None = None) -> LanguageModel:
    """A deterministic model; scheme: of its weights, or a dtype."""
    if scheme is None:
        return dataclasses.replace(model(family), deterministic=True)
    cfg = (CONFIGS | OTHERS)[family].replace(d_ff=64)  # groups of 32 divide it
    params = params_of(cfg, dtype="bfloat16" if scheme == "bfloat16" else "float32")
    if scheme != "bfloat16":
        params = jl.quantize_params(params, scheme)
    return LanguageModel(cfg, params, None, deterministic=True)


@functools.cache
def requests(seed: int = 0) -> tuple[Request, ...]:
    """As many as ``ROWS``, some of which share the first of their pieces."""
    rng = np.random.default_rng(seed)
    start = rng.integers(3, 97, 16).tolist()
    tails = [rng.integers(3, 97, n).tolist() for n in rng.integers(1, 24, ROWS)]
    prompts = [tuple((start if i % 3 else []) + tail) for i, tail in enumerate(tails)]
    return tuple(
        Request(f"r{i}", prompt, 6, SAMPLINGS[i % 5], ignore_eos=True, priority=i % 2)
        for i, prompt in enumerate(prompts)
    )


def answers(lm: LanguageModel, asked: tuple[Request, ...], **options) -> dict[str, tuple]:
    engine = Engine(lm, **{**SIZES, **options})
    return {name: written(events) for name, events in engine.generate(list(asked)).items()}


@functools.cache
def wanted(family: str, scheme: str | None = None, kv_dtype: str | None = None) -> dict[str, tuple]:
    """The answers of an engine of 32 slots without anything else."""
    options = {"max_slots": 32, "kv_dtype": kv_dtype, "prefix_cache": False}
    return answers(fixed(family, scheme), requests(), **options)


SLOW = ["gla", "delta", "kda", "hybrid", "window", "latent", "gemma4", "qwen3.5", "kimi"]


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_more_slots_than_32_give_the_same_bits(family):
    """All rows of one program of 40 rows, and ``generate`` in its program of 32."""
    found = answers(fixed(family), requests(), max_slots=ROWS)
    assert found == wanted(family)
    assert max(len(tokens) for tokens, _ in found.values()) == 6


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["bfloat16", "w8a16", "w4a16", "w8a8", "fp8", "mxfp4"])
def test_schemes_have_the_same_bits_with_any_number_of_slots(scheme):
    want = wanted("llama", scheme)
    assert answers(fixed("llama", scheme), requests(), max_slots=ROWS) == want
    assert answers(fixed("llama", scheme), requests()[3:4], max_slots=1)["r3"] == want["r3"]


@st.composite
def mixes(draw: st.DrawFn) -> tuple[str, str | None, str | None, dict, list[int]]:
    """(family, scheme, kv_dtype, other options, order of the requests)."""
    family = draw(st.sampled_from(["llama", "hybrid", "delta"]))
    scheme = draw(st.sampled_from([None, "w8a8", "w8a16"]))
    kv_dtype = draw(st.sampled_from([None, "int8"]))
    options = {
        "max_slots": draw(st.sampled_from([1, 8, 33, ROWS])),
        "prefix_cache": draw(st.booleans()),
        "steps_per_call": draw(st.sampled_from([1, 4])),
        "token_budget": draw(st.sampled_from([16, 64])),
    }
    if draw(st.booleans()):
        options |= {"draft": "ngram", "draft_tokens": draw(st.sampled_from([1, 3]))}
    if options["prefix_cache"] and draw(st.booleans()):
        options |= {"host_cache_gb": 0.01}
    order = draw(st.permutations(range(ROWS)))
    return family, scheme, kv_dtype, options, order[: draw(st.sampled_from([3, ROWS]))]


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(mixes())
def test_any_mix_of_options_gives_the_same_bits(mix):
    family, scheme, kv_dtype, options, order = mix
    want = wanted(family, scheme, kv_dtype)
    asked = tuple(requests()[index] for index in order)
    found = answers(fixed(family, scheme), asked, kv_dtype=kv_dtype, **options)
    assert found == {request.id: want[request.id] for request in asked}


def test_a_gpu_has_512_tokens_a_pass(monkeypatch):
    """The refusal says how many rows there may be, and programs begin at 32 tokens."""
    cfg = model("llama").config
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("jaxllama.engine.options.block_rows", lambda: 512)

    def sizes(slots: int, **options) -> tuple[int, ...]:
        asked = EngineOptions(slots, deterministic=True, cache_tokens=10**6, max_len=64, **options)
        return asked.resolve(cfg, jax.numpy.bfloat16).sizes

    assert sizes(4) == (32,) and sizes(512) == (32, 64, 128, 256, 384, 512)
    assert sizes(128, draft="ngram", draft_tokens=3) == (8, 16, 64, 128)
    with pytest.raises(JaxLlamaError, match="max_slots = 513: a deterministic engine computes at"):
        sizes(513)
    with pytest.raises(JaxLlamaError, match="most 512 tokens a pass, 4 of each of 128 rows"):
        sizes(129, draft="ngram", draft_tokens=3)
    # A device that has not run such sums has one program, of 32 rows or all slots.
    monkeypatch.setattr("jaxllama.engine.options.fixes_sums", lambda: False)
    assert sizes(4) == (32,) and sizes(513) == (513,)
    assert sizes(8, draft="ngram", draft_tokens=3) == (8,)
    with pytest.raises(JaxLlamaError, match="most 32 tokens a pass, 4 of each of 8 rows"):
        sizes(9, draft="ngram", draft_tokens=3)


def test_prompts_are_read_in_the_same_pieces_whatever_max_len_is():
    """``generate`` reads a prompt of 50 tokens in one piece of 64; so does a small engine."""
    small = EngineOptions(4, max_len=52, deterministic=True)
    options = small.resolve(model("llama").config, jax.numpy.float32)
    assert options.widths == (16, 32, 64) and options.prefill_chunk == 64
    lm, prompt = fixed("llama"), tuple(range(3, 46))
    engine = Engine(lm, max_slots=4, max_len=52)
    [(tokens, logprobs)] = [
        written(events)
        for events in engine.generate([Request("r", prompt, 4, ignore_eos=True)]).values()
    ]
    [alone] = lm.generate([list(prompt)], 4)
    assert (alone.tokens, alone.logprobs) == (list(tokens), list(logprobs))
