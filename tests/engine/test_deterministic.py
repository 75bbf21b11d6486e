"""A deterministic engine: the same bits with any number of slots, and with any mix of options."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

import jaxllama as jl
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.engine.engine import Engine
from jaxllama.engine.options import EngineOptions
from jaxllama.engine.request import Request
from jaxllama.engine.scheduler import Sequence
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.model.lora import attach
from pallas_kernels import fixed_sums
from tests.helpers import lora_cases
from tests.helpers.engine_cases import CONFIGS, OTHERS, SAMPLINGS, model, written
from tests.helpers.models import params_of

SIZES = {"max_len": 128, "steps_per_call": 4}
ROWS = 40  # more than the 32 rows of ``generate``'s program
PIECE = 32  # tokens of a prompt's pieces on a CPU
ADAPTERS = (None, "one", "two")
SMALL = "llama", "w8a8", "int8", True  # family, scheme, cache and whether it has adapters


@functools.cache
def fixed(family: str, scheme: str | None = None, adapted: bool = False) -> LanguageModel:
    """A deterministic model; scheme: of its weights, or a dtype. adapted: has two LoRA adapters."""
    cfg = (CONFIGS | OTHERS)[family].replace(eos_token_ids=())  # as the requests ignore them
    cfg = cfg if scheme is None else cfg.replace(d_ff=64)  # groups of 32 divide it
    params = params_of(cfg, dtype="bfloat16" if scheme == "bfloat16" else "float32")
    if scheme not in (None, "bfloat16"):
        # No group of 4-bit codes divides the heads of qwen3.5.
        params = jl.quantize_params(params, scheme.replace("w4a16", "w4a16,o=w8a16"))
    names = ADAPTERS[1:] if adapted else ()
    if adapted:
        factors = [lora_cases.factors(cfg, seed) for seed in (1, 2)]
        params = attach(tensor_table(cfg), params, factors)
    return LanguageModel(cfg, params, None, deterministic=True, adapters=names)


@functools.cache
def requests(adapted: bool = False) -> tuple[Request, ...]:
    """As many as ``ROWS``; some share their first pieces or all, and prompts have up to four."""
    rng = np.random.default_rng(0)
    start = rng.integers(3, 97, 2 * PIECE).tolist()
    tails = [rng.integers(3, 97, n).tolist() for n in rng.integers(1, 50, ROWS)]
    prompts = [tuple(start[: i % 3 * PIECE] + tail) for i, tail in enumerate(tails)]
    prompts[30:] = prompts[:10]
    names = ADAPTERS if adapted else (None,)
    return tuple(
        Request(
            f"r{i}",
            prompt,
            6,
            SAMPLINGS[i % 5],
            ignore_eos=True,
            priority=i % 2,
            adapter=names[i // 3 % len(names)],
        )
        for i, prompt in enumerate(prompts)
    )


def answers(lm: LanguageModel, asked: tuple[Request, ...], **options) -> dict[str, tuple]:
    engine = Engine(lm, **{**SIZES, **options})
    return {name: written(events) for name, events in engine.generate(list(asked)).items()}


@functools.cache
def wanted(
    family: str, scheme: str | None = None, kv_dtype: str | None = None, adapted: bool = False
) -> dict[str, tuple]:
    """The answers of an engine of 32 slots without anything else."""
    options = {"max_slots": 32, "kv_dtype": kv_dtype, "prefix_cache": False}
    return answers(fixed(family, scheme, adapted), requests(adapted), **options)


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


@dataclasses.dataclass(frozen=True)
class Mix:
    """A model, an engine's options, and the order of the requests that it gets."""

    family: str
    scheme: str | None
    kv_dtype: str | None
    adapted: bool
    options: dict
    order: list[int]

    def check(self) -> None:
        """Assert that the engine gives the plain engine's bits, and so does ``generate``."""
        lm, asked = fixed(self.family, self.scheme, self.adapted), requests(self.adapted)
        want = wanted(self.family, self.scheme, self.kv_dtype, self.adapted)
        found = answers(
            lm, tuple(asked[at] for at in self.order), kv_dtype=self.kv_dtype, **self.options
        )
        assert found == {f"r{at}": want[f"r{at}"] for at in self.order}
        one = asked[self.order[0]]
        given = {"adapter": one.adapter} if self.adapted else {}
        [alone] = lm.generate(
            [list(one.prompt)], 6, sampling=one.sampling, kv_dtype=self.kv_dtype, **given
        )
        assert (alone.tokens, alone.logprobs) == want[one.id]


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    """Any mix of options."""

    def one_of(*values):
        return draw(st.sampled_from(values))

    options = {
        "max_slots": one_of(1, 8, 33, ROWS),
        "max_len": one_of(128, 208),
        "prefill_chunk": one_of(16, 64, 128),
        "prefix_cache": draw(st.booleans()),
        "steps_per_call": one_of(1, 4),
    }
    if draw(st.booleans()):
        options |= {"draft": "ngram", "draft_tokens": one_of(1, 3)}
    if options["prefix_cache"] and draw(st.booleans()):
        options |= {"host_cache_gb": 0.01}
    order = draw(st.permutations(range(ROWS)))[: one_of(3, ROWS)]
    family = one_of("llama", "gla", "qwen3.5")
    return Mix(
        family,
        one_of(None, "bfloat16", "w8a16", "w4a16", "w8a8", "fp8"),
        None if family == "gla" else one_of(None, "int8"),
        draw(st.booleans()),
        options,
        order,
    )


def test_two_mixes_of_options_give_the_same_bits():
    """One with all that an engine may do, and one with the least."""
    options = {
        "max_slots": 8,
        "prefill_chunk": 128,
        "draft": "ngram",
        "draft_tokens": 3,
        "host_cache_gb": 0.01,
    }
    Mix(*SMALL, options, list(range(0, ROWS, 3))).check()
    least = {"max_slots": 1, "prefill_chunk": 16, "prefix_cache": False, "steps_per_call": 1}
    Mix(*SMALL, least, [0, 1, 2]).check()


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(mixes())
def test_any_mix_of_options_gives_the_same_bits(mix):
    mix.check()


def test_a_deterministic_engine_finds_no_prefix_of_others():
    """With chunks as long as its pieces they keep as many tokens, whose bits differ."""
    options = {"max_slots": 2, "prefill_chunk": PIECE, "host_cache_gb": 0.01, **SIZES}
    engines = [Engine(model("gla"), deterministic=on, **options) for on in (True, False, True)]
    tiers = [engine.runner.pools[0].tiers for engine in engines]
    keys = [one.identity.root(0, (None, "")) for one in tiers]
    assert keys[0] == keys[2] != keys[1]
    assert engines[0].options.unit == engines[1].options.unit


def test_a_gpu_has_512_tokens_a_pass(monkeypatch):
    """The refusal says how many rows there may be, and programs begin at 32 tokens."""
    cfg = model("llama").config
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("jaxllama.engine.options.block_rows", lambda: 512)

    def resolved(slots: int, cfg=cfg, **options):
        asked = EngineOptions(slots, deterministic=True, cache_tokens=10**6, max_len=64, **options)
        return asked.resolve(cfg, jax.numpy.bfloat16)

    def sizes(slots: int, **options) -> tuple[int, ...]:
        return resolved(slots, **options).sizes

    assert (resolved(512).prefill_rows, resolved(512).newcomers) == (16, 16)
    # A prefill call has 512 tokens, or up to 2,048 of many prompts.
    assert resolved(512).widths == resolved(1).widths == (32, 128, 512)
    for slots, counts in ((1, [[16], [4], [1]]), (512, [[16], [4, 8, 16], [1, 2, 4]])):
        for some in (resolved(slots), resolved(slots, model("gla").config)):
            assert [some.row_counts(width) for width in (32, 128, 512)] == counts
    assert sizes(4) == (32,) and sizes(512) == (32, 64, 128, 256, 512)
    assert sizes(128, draft="ngram", draft_tokens=3) == (8, 16, 64, 128)
    # As many tokens between two decode steps as 16 prompts in each of two calls have.
    assert resolved(512).token_budget == 2 * 16 * 64
    with pytest.raises(JaxLlamaError, match="max_slots = 513: a deterministic engine computes at"):
        sizes(513)
    with pytest.raises(JaxLlamaError, match="most 512 tokens a pass, 4 of each of 128 rows"):
        sizes(129, draft="ngram", draft_tokens=3)


@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_prompts_are_read_in_the_same_pieces_whatever_the_chunk(chunk):
    """A chunk is a number of pieces between two steps: 84 tokens are 32, 32 and 20."""
    engine = Engine(fixed("llama"), max_slots=4, max_len=2048, prefill_chunk=chunk)
    assert engine.options.widths == (PIECE,) and engine.options.unit == PIECE
    rng = np.random.default_rng(1)
    prompt = tuple(rng.integers(3, 97, 85).tolist())
    engine.scheduler.add(Sequence(Request("r", prompt, 4), 0, 0.0))
    fills = [len(engine.scheduler.plan().fills) for _ in range(3)]
    assert fills == {16: [1, 1, 1], 64: [2, 1, 0], 2048: [3, 0, 0]}[chunk]


@pytest.mark.parametrize(
    "family", ["llama", "gla", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW[1:])]
)
def test_prompts_of_one_call_do_not_know_each_other(family, monkeypatch):
    """Four prompts of up to 32 tokens, in a block of 128 rows as a GPU has one of 512; four of 128
    tokens have four blocks."""
    monkeypatch.setitem(fixed_sums._ROWS, True, 128)
    monkeypatch.setitem(fixed_sums._UNROLLED, True, 4)
    cfg = (CONFIGS | OTHERS)[family]
    cfg = cfg.replace(d_ff=40, vocab_size=128)  # no other test has its programs
    lm = LanguageModel(cfg, params_of(cfg), None, deterministic=True)
    sizes = {"max_slots": 8, "max_len": 272}
    together = Engine(lm, prefix_cache=False, token_budget=512, **sizes)
    alone = Engine(lm, prefix_cache=False, **{**sizes, "max_slots": 1})
    for engine, counts in ((together, [[4], [1, 2, 4]]), (alone, [[4], [1]])):
        assert [engine.options.row_counts(width) for width in engine.options.widths] == counts
    start = tuple(range(128))  # a piece
    few = requests()[:12]
    longer = [dataclasses.replace(one, id=f"{one.id}+", prompt=start + one.prompt) for one in few]
    asked = [*few, *longer[:4]]
    want = [written(events) for events in together.generate(asked).values()]
    assert [written(alone.generate([one])[one.id]) for one in asked] == want
    for chunk in (16, 128):
        engine = Engine(lm, prefill_chunk=chunk, **sizes)
        assert [written(engine.generate([one])[one.id]) for one in asked] == want
        assert engine.stats().prefix_hit_tokens == 3 * len(start)


@pytest.mark.parametrize("chunk", [16, 128])
def test_samples_of_a_prompt_copy_what_the_first_has_read(chunk):
    """Prompts that end within a page, at its end, at the end of a piece, and one of one token."""
    rng = np.random.default_rng(4)
    prompts = [tuple(rng.integers(3, 97, n).tolist()) for n in (1, 9, 17, 33, 41, 49, 65, 70)]
    asked = [
        Request(f"{i} {n}", prompt, 6, SAMPLINGS[(i + n) % 5], ignore_eos=True)
        for n in range(3)
        for i, prompt in enumerate(prompts)
    ]
    lm, sizes = fixed("llama"), {"max_len": 128, "max_slots": 8, "prefill_chunk": chunk}
    want = answers(lm, tuple(asked), prefix_cache=False, **sizes)
    engine = Engine(lm, **sizes)
    found = {name: written(events) for name, events in engine.generate(asked).items()}
    assert found == want
    read = sum(len(prompt) - 1 for prompt in prompts)
    assert engine.stats().prefix_hit_tokens == 2 * read
