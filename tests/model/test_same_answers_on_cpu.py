"""On a CPU with weights in the handlers' layout an answer has the same bits, however it was made.

Activations are rounded to 8 bits, so a difference of 1e-7 between two forms of one sum would flip
codes: every form has to add in one order.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.language_model import LanguageModel
from pallas_kernels.cpu import prepare_tree
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow
from tests.helpers.models import FAMILIES, params_of

# As files have them (groups of 16 with zeros), and the schemes of ``--quantize``.
SCHEMES = ("w4a16-g16-zero", "w8a8", *slow("w8a16", "w4a16", "w4a8", "fp8"))
LENGTHS = (1, 2, 9, 23)


@functools.cache
def model(scheme: str, **changes) -> LanguageModel:
    cfg = FAMILIES["gqa"].replace(head_dim=32, d_ff=64, vocab_size=96, **changes)
    params = jl.quantize_params(params_of(cfg), scheme)
    return LanguageModel(cfg, prepare_tree(params), None)


def prompts_of(lm: LanguageModel) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, lm.config.vocab_size, n).tolist() for n in LENGTHS]


def prefilled(lm: LanguageModel, prompts: list[list[int]], chunk: int | None, dtype: str):
    """(logits, keys and values of each row's tokens) of the prompts as one padded batch."""
    width = max(map(len, prompts))
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = as_jax([len(prompt) for prompt in prompts], jnp.int32)
    cache = jl.init_cache(lm.config, len(prompts), width + chunk if chunk else width, dtype=dtype)
    logits, cache = jl.prefill(lm.config, lm.params, tokens, lengths, cache, chunk=chunk)
    written = [
        np.asarray(array[row, : len(prompt)])
        for layer in cache.layers
        for array in (layer.k, layer.v)
        for row, prompt in enumerate(prompts)
    ]
    return np.asarray(logits), written


def same(got, want) -> None:
    for one, other in zip(got[1], want[1], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_prompt_in_one_piece_is_its_tokens_one_by_one(scheme):
    """A chunk of one token is a decode step's form."""
    lm = model(scheme, n_layers=1)
    prompts = prompts_of(lm)[-2:]
    same(*(prefilled(lm, prompts, chunk, "float32") for chunk in (1, None)))


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 7}, *slow({"qk_norm": "head"}, {"qkv_bias": True})]
)
def test_so_it_is_in_other_families(changes):
    lm = model("w8a16", n_layers=1, **changes)
    prompts = prompts_of(lm)
    same(*(prefilled(lm, prompts, chunk, "bfloat16") for chunk in (1, None)))


def test_a_float_head_has_a_row_s_bits_in_any_batch():
    """Schemes with 8-bit activations leave a tied head in floats."""
    lm = model("w8a8", n_layers=1, tie_embeddings=True)
    prompts = prompts_of(lm)
    logits, _ = prefilled(lm, prompts, None, "float32")
    np.testing.assert_array_equal(prefilled(lm, prompts[-1:], None, "float32")[0][0], logits[-1])


@functools.cache
def answers() -> list[tuple[list[int], list[float]]]:
    lm = model("w8a16")
    return [(out.tokens, out.logprobs) for out in lm.generate(prompts_of(lm), 8)]


@pytest.mark.parametrize("chunk", [3, *slow(1)])
def test_generate_cuts_prompts_anywhere(chunk):
    lm = model("w8a16")
    found = lm.generate(prompts_of(lm), 8, chunk=chunk)
    assert [(out.tokens, out.logprobs) for out in found] == answers()


def test_a_row_alone_is_a_row_of_a_batch():
    lm = model("w8a16")
    found = [lm.generate([prompt], 8)[0] for prompt in prompts_of(lm)[2:]]
    assert [(out.tokens, out.logprobs) for out in found] == answers()[2:]


@pytest.mark.parametrize("slots", [4, *slow(1)])
def test_the_engine_has_generate_s_bits(slots):
    lm = model("w8a16")
    assert through_engine(lm, prompts_of(lm), 8, slots, 64) == answers()


def through_engine(lm: LanguageModel, prompts, n_new: int, slots: int, max_len: int):
    """[(tokens, logprobs)] of an engine that holds ``slots`` of the requests at once."""
    engine = Engine(lm, max_slots=slots, max_len=max_len)
    events: list[list] = [[] for _ in prompts]
    for i, (prompt, told) in enumerate(zip(prompts, events, strict=True)):
        engine.submit(Request(str(i), tuple(prompt), n_new), told.append)
    while engine.step():
        pass
    return [
        ([t for event in told for t in event.tokens], [p for e in told for p in e.logprobs])
        for told in events
    ]


TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "List three reasons to walk in the mountains:",
    "2 + 2 =",
    "The quick brown fox",
    "In 1969, the first",
    "My favourite book is",
    "To bake bread you need",
    "A short poem about the moon:\n",
    "The law of gravity",
    "import numpy as np\n",
    "Q: Who wrote Hamlet?\nA:",
    "Dear Sir or Madam,",
    "The weather today",
    "Photosynthesis is the process by which",
    "Once, a robot",
    "The three primary colours",
    "In the year 2050",
    "Translate to French: good morning",
    "A list of fruits:",
    "The Roman empire",
    "He said that",
)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "w8a16", "w4a16", "w8a8", "w4a8", "fp8-block"])
def test_the_demo_model_s_answers_to_24_prompts(scheme):
    """40 greedy tokens each: in chunks, in one batch, of drafts, of engines."""
    lm = jl.load("smollm2-135m", quantize=scheme)
    lm = LanguageModel(lm.config, prepare_tree(lm.params), lm.tokenizer)
    prompts = [lm.tokenizer.encode(text) for text in TEXTS]
    prompts[::8] = [(prompt * 99)[:250] for prompt in prompts[::8]]  # more than one part of keys

    def by(**options):
        return [(out.tokens, out.logprobs) for out in lm.generate(prompts, 40, **options)]

    want = [(out.tokens, out.logprobs) for p in prompts for out in lm.generate([p], 40)]
    for options in ({}, {"chunk": 1}, {"chunk": 3}, {"draft": "ngram"}):
        assert by(**options) == want, options
    for slots in (1, 4):
        assert through_engine(lm, prompts, 40, slots, 512) == want, slots
