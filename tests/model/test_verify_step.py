"""verify_step and commit: several decode steps in one, of which some are taken back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.config import RopeConfig
from jaxllama.model.lora import attach, for_rows
from tests.helpers import lora_cases
from tests.helpers.models import FAMILIES, LLAMA, params_of, tokens_of

# Heads as wide as real ones where an int4 cache rotates them: XLA has other code for tiny products.
WIDE = LLAMA.replace(head_dim=64)
CASES = {
    "gqa": (FAMILIES["gqa"], "float32"),
    "bfloat16": (FAMILIES["gqa"], "bfloat16"),
    "int8": (FAMILIES["gqa"], "int8"),
    "wide": (WIDE, "float32"),
    "wide-int8": (WIDE, "int8"),
    "int4": (WIDE, "int4"),
    "fp8": (FAMILIES["gqa"], "float8_e4m3fn"),
    "window": (FAMILIES["mqa-window"], "float32"),
    "dynamic-rope": (
        LLAMA.replace(rope=RopeConfig(theta=1e4, scaling="dynamic", factor=4.0,
                                                original_max_position=12)), "float32"),
    "softcap": (LLAMA.replace(attn_softcap=20.0, logit_softcap=30.0), "float32"),
    "sparse": (LLAMA.replace(attn_sparsity=0.4), "float32"),
    "gla": (FAMILIES["gla"], "float32"),
    "gla-conv": (FAMILIES["gla-conv-groups"], "float32"),
    "hybrid-int8": (FAMILIES["hybrid"], "int8"),
    "delta": (FAMILIES["delta"], "float32"),
    "kda": (FAMILIES["kda"], "float32"),
}  # fmt: skip
# A convolution is fused with what reads it, and the compiler rounds the two programs differently.
INEXACT = {"gla-conv", "delta", "kda"}
BATCH, WIDTH = 3, 4


def prefilled(cfg, params, dtype="float32", capacity=128):
    tokens = tokens_of(cfg, BATCH, 12)
    cache = jl.init_cache(cfg, BATCH, capacity, dtype)
    return jl.prefill(cfg, params, tokens, jnp.asarray([12, 9, 4]), cache)[1]


def same(case, got, want):
    if case in INEXACT:
        np.testing.assert_allclose(got, want, atol=2e-5)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", CASES)
def test_tokens_verified_at_once_are_decode_steps_bit_for_bit(case):
    cfg, dtype = CASES[case]
    params, tokens = params_of(cfg), tokens_of(cfg, BATCH, WIDTH + 1, seed=5)
    steps, cache = [], prefilled(cfg, params, dtype)
    # As many rows as there are tokens to verify, which is what decides about the bits.
    cache = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * WIDTH), cache)
    for index in range(WIDTH):
        scores, cache = jl.decode_step(cfg, params, jnp.tile(tokens[:, index], WIDTH), cache)
        steps.append(scores[:BATCH])
    lengths = np.array([4, 3, 1])
    start = prefilled(cfg, params, dtype)
    before = np.asarray(start.lengths)
    scores, proposal = jl.verify_step(cfg, params, tokens[:, :WIDTH], jnp.asarray(lengths), start)
    assert scores.shape == (BATCH, WIDTH, cfg.vocab_size) and scores.dtype == jnp.float32
    for row, count in enumerate(lengths):
        want = jnp.stack(steps, axis=1)[row, :count]
        same(case, scores[row, :count], want)
    accepted = np.array([1, 2, -1])
    cache = jl.commit(proposal, jnp.asarray(accepted))
    np.testing.assert_array_equal(cache.lengths, before + accepted + 1)
    # What comes next is what came next then: after 2 and 3 tokens, and as if nothing had been.
    following = jnp.stack([tokens[0, 2], tokens[1, 3], tokens[2, 0]])
    cache = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * WIDTH), cache)
    scores, _ = jl.decode_step(cfg, params, jnp.tile(following, WIDTH), cache)
    for row, index in enumerate((2, 3, 0)):
        same(case, scores[row], steps[index][row])


def test_one_token_can_be_verified_and_taken_back():
    cfg = FAMILIES["hybrid"]
    params, tokens = params_of(cfg), tokens_of(cfg, BATCH, 1, seed=5)
    want, _ = jl.decode_step(cfg, params, tokens[:, 0], prefilled(cfg, params))
    cache = prefilled(cfg, params)
    for accepted in (-1, -1, 0):
        ones = jnp.ones((BATCH,), jnp.int32)
        scores, proposal = jl.verify_step(cfg, params, tokens, ones, cache)
        np.testing.assert_array_equal(scores[:, 0], want)
        cache = jl.commit(proposal, jnp.full((BATCH,), accepted))
    np.testing.assert_array_equal(cache.lengths, [13, 10, 5])


def test_what_a_row_has_no_room_for_is_nan_and_not_kept():
    cfg = FAMILIES["gqa"]
    params, tokens = params_of(cfg), tokens_of(cfg, BATCH, WIDTH, seed=5)
    cache = prefilled(cfg, params, capacity=14)
    lengths = jnp.full((BATCH,), WIDTH)
    scores, proposal = jl.verify_step(cfg, params, tokens, lengths, cache)
    is_nan = np.isnan(np.asarray(scores)).all(axis=2)
    np.testing.assert_array_equal(is_nan, np.arange(WIDTH) + np.array([[12], [9], [4]]) >= 14)
    assert not np.isnan(np.asarray(scores)[~is_nan]).any()
    cache = jl.commit(proposal, jnp.full((BATCH,), WIDTH - 1))
    np.testing.assert_array_equal(cache.lengths, [14, 13, 8])


def test_more_tokens_than_the_cache_has_are_refused():
    cfg = FAMILIES["gqa"]
    tokens, cache = tokens_of(cfg, 1, 5), jl.init_cache(cfg, 1, 4)
    with pytest.raises(jl.JaxLlamaError, match="5 tokens do not fit a cache of max_len 4"):
        jl.verify_step(cfg, params_of(cfg), tokens, jnp.asarray([5]), cache)


def test_nan_past_the_accepted_tokens_reaches_nobody():
    cfg = FAMILIES["gqa"]
    params, tokens = params_of(cfg), tokens_of(cfg, BATCH, WIDTH, seed=5)
    ones = jnp.ones((BATCH,), jnp.int32)

    def after(poison: bool):
        scores, proposal = jl.verify_step(cfg, params, tokens, WIDTH * ones, prefilled(cfg, params))
        cache = jl.commit(proposal, 0 * ones)
        if poison:
            dead = jnp.arange(128)[None, :, None, None] >= cache.lengths[:, None, None, None]
            cache = cache.__class__(
                jax.tree.map(lambda leaf: jnp.where(dead, jnp.nan, leaf), cache.layers),
                cache.lengths,
            )
        return jl.verify_step(cfg, params, tokens, 2 * ones, cache)[0][:, :2]

    np.testing.assert_array_equal(after(True), after(False))


def test_rows_keep_their_adapters():
    cfg = FAMILIES["gqa"]
    params = attach(cfg, params_of(cfg), [lora_cases.factors(cfg, seed) for seed in (1, 2)])
    own, each = (for_rows(params, jnp.asarray([2, 0, 1] * n, jnp.int32)) for n in (1, WIDTH))
    tokens = tokens_of(cfg, BATCH, WIDTH, seed=5)
    cache, steps = prefilled(cfg, own), []
    cache = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * WIDTH), cache)  # as many rows
    for index in range(WIDTH):
        scores, cache = jl.decode_step(cfg, each, jnp.tile(tokens[:, index], WIDTH), cache)
        steps.append(scores[:BATCH])
    lengths = jnp.full((BATCH,), WIDTH)
    scores, _ = jl.verify_step(cfg, own, tokens, lengths, prefilled(cfg, own))
    np.testing.assert_allclose(scores, jnp.stack(steps, axis=1), atol=1e-5)
