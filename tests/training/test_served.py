"""The update's forward pass has the engine's bits, and the trainer's gradients."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.engine.engine import Engine
from jaxllama.language_model import LanguageModel
from jaxllama.training import adapters, samples, step
from jaxllama.training.batch import Batch
from jaxllama.training.sampler import _engine_weights
from tests.helpers.models import FAMILIES, HYBRIDS, LATENT, params_of
from tests.helpers.training_cases import rollout_setup

MODELS = {**FAMILIES, **HYBRIDS, "latent": LATENT}
NEW, LENGTH = 12, 64


def setup_of(cfg, **changes):
    rollout = {"max_new_tokens": NEW, "samples": 4, "deterministic": True}
    return rollout_setup(cfg, sequence_length=LENGTH, rollout=rollout, **changes)


def asked(cfg, count):
    """Prompts of 1 to 52 tokens: none, one or two pieces before the last token."""
    rng = np.random.default_rng(0)
    sizes = [1, 33, LENGTH - NEW, 2, 32, 34, *rng.integers(1, LENGTH - NEW + 1, count)][:count]
    return [tuple(rng.integers(3, cfg.vocab_size, size).tolist()) for size in sizes]


def answered(lm, prompts, adapter=None):
    """A Batch of one microbatch with random weights, and the engine's log-probabilities."""
    engine = Engine(lm, max_slots=8, max_len=LENGTH)
    found = jl.rollout(engine, prompts, max_new_tokens=NEW, seed=3, adapter=adapter)
    tokens = np.zeros((len(prompts), LENGTH + 1), np.int32)
    tokens[:, : found.tokens.shape[1]] = found.tokens
    answers, logprobs = np.zeros((2, len(prompts), LENGTH), np.float32)
    answers[:, : found.answers.shape[1]] = found.answers
    logprobs[:, : found.answers.shape[1]] = found.logprobs
    weights = np.random.default_rng(1).normal(size=answers.shape).astype(np.float32) * answers
    begins = np.array([[len(prompt)] for prompt in prompts], np.int32)
    return Batch(tokens, None, weights, prompts=begins), answers > 0, logprobs


def check(setup, params, fixed, batch, is_answer, want):
    """The engine's bits, the weighted loss of them, and the gradients of the trainer's form."""
    gradient = jax.jit(jax.value_and_grad(step.loss, argnums=1, has_aux=True), static_argnums=0)
    (loss, parts), grads = gradient(setup, params, fixed, batch)
    got = np.asarray(parts["logprobs"])
    np.testing.assert_array_equal(got[is_answer], want[is_answer])
    np.testing.assert_allclose(loss, -np.mean(want * batch.weights), rtol=1e-5)
    assert np.all(np.asarray(parts["entropies"])[is_answer] > 0)
    (free, _), free_grads = gradient(setup, params, fixed, batch._replace(prompts=None))
    np.testing.assert_allclose(loss, free, rtol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(free_grads), strict=True):
        scale = np.max(np.abs(theirs))
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * scale + 1e-9)


@pytest.mark.parametrize(
    ("name", "count", "changes"),
    [
        ("gqa", 6, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gqa", 64, {"scan": True, "remat": True}),
                ("gla", 64, {}),
                ("hybrid", 16, {}),
                ("delta", 8, {}),
                ("kda", 8, {}),
                ("latent", 16, {}),
            )
        ),
    ],
)
def test_the_update_computes_the_engines_log_probabilities(name, count, changes):
    cfg = MODELS[name].replace(eos_token_ids=())
    setup = setup_of(cfg, **changes)
    lm = LanguageModel(cfg, params_of(cfg), None, True, exact=True)
    params = step.first_weights(setup, lm.params)
    check(setup, params, None, *answered(lm, asked(cfg, count)))


@pytest.mark.gpu
def test_float32_masters_have_the_bits_of_a_bfloat16_engine():
    """As the engine casts them, also where a fusion makes them float32 again."""
    cfg = MODELS["gqa"].replace(eos_token_ids=())
    setup = setup_of(cfg, dtype="bfloat16")
    params = step.first_weights(setup, params_of(cfg))
    params = jax.tree.map(lambda x: x + 1e-3 * np.float32(x), params)
    lm = LanguageModel(cfg, _engine_weights("bfloat16", params), None, True, exact=True)
    batch, is_answer, want = answered(lm, asked(cfg, 64))
    _, parts = jax.jit(step.loss, static_argnums=0)(setup, params, None, batch)
    np.testing.assert_array_equal(np.asarray(parts["logprobs"])[is_answer], want[is_answer])


@pytest.mark.slow
def test_adapters_beside_quantized_weights_have_the_engines_bits():
    cfg = MODELS["gqa"].replace(eos_token_ids=())
    setup = setup_of(cfg, lora={"rank": 4, "alpha": 8.0, "base": "w4a16-g16"})
    base = jl.quantize_params(params_of(cfg), "w4a16-g16")
    params = adapters.first_adapters(cfg, setup.config.lora, 0)
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), params)
    lm = samples.model_of(setup, params, base, None, deterministic=True)
    batch = answered(lm, asked(cfg, 8), samples.ADAPTER)
    check(setup, params, base, *batch)
