"""verify_step and commit: several decode steps in one, of which some are taken back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.config import RopeConfig
from jaxllama.model.lora import attach, for_rows
from tests.helpers import lora_cases
from tests.helpers.arrays import as_jax
from tests.helpers.models import (
    FAMILIES,
    GEMMA4,
    IDENTITIES,
    INDEXED,
    LATENT,
    LLAMA,
    params_of,
    tokens_of,
)

# Heads as wide as real ones where an int4 cache rotates them: XLA has other code for tiny products.
ONE_LAYER = LLAMA.first_layers(1)
WIDE = ONE_LAYER.replace(head_dim=64)
DYNAMIC = RopeConfig(theta=1e4, scaling="dynamic", factor=4.0, original_max_position=12)
CASES = {
    "gqa": (ONE_LAYER, "float32"),
    "window-caps": (
        IDENTITIES["mqa-window"].replace(attn_softcap=20.0, logit_softcap=30.0),
        "float32",
    ),
    "dynamic-rope-fp8": (ONE_LAYER.replace(rope=DYNAMIC), "float8_e4m3fn"),
    "sparse": (ONE_LAYER.replace(attn_sparsity=0.4), "float32"),
    "gla-conv": (IDENTITIES["gla-conv-groups"], "float32"),
    "hybrid-int8": (FAMILIES["hybrid"], "int8"),
    "delta": (FAMILIES["delta"], "float32"),
    "kda": (IDENTITIES["kda"], "float32"),
    "int4": (WIDE, "int4"),
    "bfloat16": (ONE_LAYER, "bfloat16"),
    "int8": (ONE_LAYER, "int8"),
    "wide": (WIDE, "float32"),
    "wide-int8": (WIDE, "int8"),
    "dynamic-rope": (ONE_LAYER.replace(rope=DYNAMIC), "float32"),
    "softcap": (ONE_LAYER.replace(attn_softcap=20.0, logit_softcap=30.0), "float32"),
    "gla": (IDENTITIES["gla-variant"], "float32"),
    "latent": (LATENT.first_layers(1), "float32"),
    "latent-int8": (LATENT.first_layers(1), "int8"),
    "indexed": (INDEXED.first_layers(1), "float32"),
    "gemma4": (GEMMA4, "float32"),
}
CORE = ("gqa", "delta")
# Each has a mechanism that an earlier case has too, beside another.
SLOW = (
    "window-caps",
    "sparse",
    "gla-conv",
    "bfloat16",
    "int8",
    "wide",
    "wide-int8",
    "dynamic-rope",
    "dynamic-rope-fp8",
    "softcap",
    "gla",
    "hybrid-int8",
    "kda",
    "latent-int8",
    "indexed",
    "gemma4",
)
MARKS = {**dict.fromkeys(CORE, pytest.mark.core), **dict.fromkeys(SLOW, pytest.mark.slow)}
# A convolution is fused with what reads it, and the compiler rounds the two programs differently.
INEXACT = {"gla-conv", "kda"}
BATCH, WIDTH = 3, 4


def prefilled(cfg, params, dtype="float32", capacity=32):
    """Return a cache that holds 12, 9 and 4 tokens."""
    tokens = np.asarray(tokens_of(cfg, BATCH, 12))
    cache = jl.init_cache(cfg, BATCH, capacity, dtype)
    return jl.prefill(cfg, params, tokens, np.asarray([12, 9, 4]), cache)[1]


def repeated(cache):
    """Return WIDTH times the rows: as many as there are tokens to verify, which is what decides
    about the bits."""
    return jax.device_put(jax.tree.map(lambda leaf: np.concatenate([leaf] * WIDTH), cache))


def stepped(cfg, params, tokens, cache) -> tuple[np.ndarray, jl.Cache]:
    """Return the logits ``[B, V]`` of one decode step of the repeated rows, and the cache."""
    scores, cache = jl.decode_step(cfg, params, np.tile(tokens, WIDTH), cache)
    return np.asarray(scores)[:BATCH], cache


def same(case, got, want):
    if case in INEXACT:
        np.testing.assert_allclose(got, want, atol=2e-5)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", [pytest.param(x, marks=MARKS.get(x, ())) for x in CASES])
def test_tokens_verified_at_once_are_decode_steps_bit_for_bit(case):
    cfg, dtype = CASES[case]
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, BATCH, WIDTH + 1, seed=5))
    steps, start = [], prefilled(cfg, params, dtype)
    cache, before = repeated(start), np.asarray(start.lengths)
    for index in range(WIDTH):
        scores, cache = stepped(cfg, params, tokens[:, index], cache)
        steps.append(scores)
    lengths = np.array([4, 3, 1])
    scores, proposal = jl.verify_step(cfg, params, tokens[:, :WIDTH], lengths, start)
    assert scores.shape == (BATCH, WIDTH, cfg.vocab_size) and scores.dtype == jnp.float32
    for row, count in enumerate(lengths):
        same(case, scores[row, :count], np.stack(steps, axis=1)[row, :count])
    accepted = np.array([1, 2, -1])
    cache = jl.commit(proposal, accepted)
    np.testing.assert_array_equal(cache.lengths, before + accepted + 1)
    # What comes next is what came next then: after 2 and 3 tokens, and as if nothing had been.
    following = np.array([tokens[0, 2], tokens[1, 3], tokens[2, 0]])
    scores, _ = stepped(cfg, params, following, repeated(cache))
    for row, index in enumerate((2, 3, 0)):
        same(case, scores[row], steps[index][row])


@pytest.mark.slow
def test_one_token_can_be_verified_and_taken_back():
    cfg = FAMILIES["hybrid"]
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, BATCH, 1, seed=5))
    want, _ = jl.decode_step(cfg, params, tokens[:, 0], prefilled(cfg, params))
    cache = prefilled(cfg, params)
    for accepted in (-1, -1, 0):
        ones = np.ones(BATCH, np.int32)
        scores, proposal = jl.verify_step(cfg, params, tokens, ones, cache)
        np.testing.assert_array_equal(scores[:, 0], want)
        cache = jl.commit(proposal, np.full(BATCH, accepted))
    np.testing.assert_array_equal(cache.lengths, [13, 10, 5])


@pytest.mark.core
def test_what_a_row_has_no_room_for_is_nan_and_not_kept():
    cfg = LLAMA
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, BATCH, WIDTH, seed=5))
    cache = prefilled(cfg, params, capacity=14)
    lengths = np.full(BATCH, WIDTH)
    scores, proposal = jl.verify_step(cfg, params, tokens, lengths, cache)
    is_nan = np.isnan(np.asarray(scores)).all(axis=2)
    np.testing.assert_array_equal(is_nan, np.arange(WIDTH) + np.array([[12], [9], [4]]) >= 14)
    assert not np.isnan(np.asarray(scores)[~is_nan]).any()
    cache = jl.commit(proposal, np.full(BATCH, WIDTH - 1))
    np.testing.assert_array_equal(cache.lengths, [14, 13, 8])


def test_more_tokens_than_the_cache_has_are_refused():
    tokens, cache = tokens_of(LLAMA, 1, 5), jl.init_cache(LLAMA, 1, 4)
    with pytest.raises(jl.JaxLlamaError, match="5 tokens do not fit a cache of max_len 4"):
        jl.verify_step(LLAMA, params_of(LLAMA), tokens, np.asarray([5]), cache)


@pytest.mark.core
def test_nan_past_the_accepted_tokens_reaches_nobody():
    """Of verified tokens one stays, and every place behind it is NaN (or nothing is changed)."""
    cfg, full = LLAMA, np.full(BATCH, WIDTH)
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, BATCH, WIDTH, seed=5))

    def after(poison: bool):
        _, proposal = jl.verify_step(cfg, params, tokens, full, prefilled(cfg, params))
        cache = jl.commit(proposal, 0 * full)
        if poison:
            dead = np.arange(cache.capacity) >= np.asarray(cache.lengths)[:, None]
            spoiled = jax.tree.map(
                lambda leaf: np.where(dead[..., None, None], np.float32(np.nan), leaf),
                cache.layers,
            )
            cache = jax.device_put(jl.Cache(spoiled, cache.lengths))
        return jl.verify_step(cfg, params, tokens, full, cache)[0]

    np.testing.assert_array_equal(after(True), after(False))


def test_rows_keep_their_adapters():
    cfg = ONE_LAYER
    params = attach(
        tensor_table(cfg), params_of(cfg), [lora_cases.factors(cfg, seed) for seed in (1, 2)]
    )
    own, each = (for_rows(params, as_jax([2, 0, 1] * n, jnp.int32)) for n in (1, WIDTH))
    tokens = np.asarray(tokens_of(cfg, BATCH, WIDTH, seed=5))
    start, steps = prefilled(cfg, own), []
    cache = repeated(start)
    for index in range(WIDTH):
        scores, cache = stepped(cfg, each, tokens[:, index], cache)
        steps.append(scores)
    scores, _ = jl.verify_step(cfg, own, tokens, np.full(BATCH, WIDTH), start)
    np.testing.assert_allclose(scores, np.stack(steps, axis=1), atol=1e-5)
