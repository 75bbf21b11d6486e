"""Log-probabilities of one policy have the same bits: in the engine's form and in the trainer's."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.engine.engine import Engine
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.training.batch import Batch
from jaxllama.training.scores import scores
from tests.helpers.models import FAMILIES, params_of
from tests.helpers.training_cases import rollout_setup

MIXERS = {"attention": "gqa", "gla": "gla", "gdn": "delta", "kda": "kda"}
PROMPTS = [tuple(range(1, 41)), (5, 6, 7), tuple(range(9, 30))]
OPTIONS = {"max_len": 64, "prefill_chunk": 16}


def model(name, deterministic):
    cfg = FAMILIES[MIXERS[name]].replace(eos_token_ids=())
    return LanguageModel(cfg, params_of(cfg), None, deterministic, exact=True)


def some(found, rows):
    """The rollouts of some rows."""
    arrays = (np.asarray(part)[rows] for part in found[:5])
    return jl.Rollouts(*arrays, tuple("" for _ in rows), tuple("length" for _ in rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_the_engine_scores_what_it_sampled_to_the_bit(name):
    """Any rows, in any order, beside others or alone, in an engine with more slots and longer
    chunks, with and without the prefix cache."""
    lm = model(name, True)
    engine = Engine(lm, max_slots=4, **OPTIONS)
    found = jl.rollout(engine, PROMPTS, n=3, max_new_tokens=12, seed=3)
    np.testing.assert_array_equal(jl.rescore(engine, found), found.logprobs)
    other = Engine(lm, max_slots=40, prefix_cache=False, **{**OPTIONS, "prefill_chunk": 64})
    for rows in ([8, 3, 5, 1, 0, 2, 4, 7, 6], [4], [2, 7]):
        want = found.logprobs[rows]
        for one in (engine, other):
            np.testing.assert_array_equal(jl.rescore(one, some(found, rows)), want)
    np.testing.assert_array_equal(
        jl.rollout(other, PROMPTS, n=3, max_new_tokens=12, seed=3).logprobs, found.logprobs
    )


def sequences(cfg):
    rng = np.random.default_rng(0)
    return [rng.integers(1, cfg.vocab_size, n).astype(np.int32) for n in (9, 33, 2, 21, 14, 9, 27)]


def rows_of(parts):
    rows = np.zeros((len(parts), max(map(len, parts))), np.int32)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        *(pytest.param(name, marks=pytest.mark.slow) for name in MIXERS if name[0] != "a"),
    ],
)
def test_the_trainer_scores_a_sequence_to_the_same_bits(name):
    """In any batch and order; taken from packed rows; and equal to whole rows up to rounding."""
    cfg = FAMILIES[MIXERS[name]].replace(eos_token_ids=())
    params, setup, parts = params_of(cfg), rollout_setup(cfg), sequences(cfg)
    logprobs, entropies = scores(setup, params, None, rows_of(parts))
    packed = Batch(
        np.concatenate(parts)[None],
        np.repeat(np.arange(1, len(parts) + 1), list(map(len, parts)))[None],
    )
    unpacked = [packed.tokens[packed.segments == number] for number in (5, 2, 7)]
    order = [4, 1, 6]
    for batch in (unpacked, *([parts[index]] for index in order)):
        again = scores(setup, params, None, rows_of(batch))
        for one, part in enumerate(batch):
            index = next(i for i in order if np.array_equal(parts[i], part))
            n = len(part) - 1
            np.testing.assert_array_equal(again[0][one, :n], logprobs[index, :n])
            np.testing.assert_array_equal(again[1][one, :n], entropies[index, :n])
    lengths = np.array([len(part) for part in parts], np.int32)
    whole = jax.nn.log_softmax(jl.logits(cfg, params, rows_of(parts), lengths))
    whole = np.asarray(whole, np.float64)
    for index, part in enumerate(parts):
        n = len(part) - 1
        want = whole[index, np.arange(n), part[1:]]
        np.testing.assert_allclose(logprobs[index, :n], want, atol=2e-5)
        want = -np.sum(np.exp(whole[index, :n]) * whole[index, :n], -1)
        np.testing.assert_allclose(entropies[index, :n], want, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_the_forms_differ_by_rounding(name, capsys):
    """Without ``deterministic`` the trainer's form is near the engine's; prints how near."""
    lm = model(name, False)
    found = jl.rollout(Engine(lm, max_slots=4, **OPTIONS), PROMPTS, n=4, max_new_tokens=16)
    trained, _ = scores(rollout_setup(lm.config, sequence_length=60), lm.params, None, found.tokens)
    own = found.answers > 0
    difference = (trained[:, : own.shape[1]] - found.logprobs)[own].astype(np.float64)
    kl = np.mean(np.expm1(difference) - difference)
    with capsys.disabled():
        print(f" {name}: gap_max {np.abs(difference).max():.1e}, gap_kl {kl:.1e}")
    assert 0 < np.abs(difference).max() < 2e-5


def test_wrong_forced_tokens():
    from jaxllama.engine.request import Grammar, Request

    with pytest.raises(JaxLlamaError, match="max_new_tokens = 64: must be the number of forced"):
        Request("a", (1,), forced=(1, 2))
    engine = Engine(model("attention", False), max_slots=1, **OPTIONS)
    for options, message in (
        ({"forced": (2, 10**6)}, "forced: expected ids below the vocabulary"),
        ({"forced": (1, 2), "grammar": Grammar("regex", "a")}, "exclude a grammar"),
    ):
        with pytest.raises(JaxLlamaError, match=message):
            engine.submit(Request("a", (1,), 2, **options), print)
