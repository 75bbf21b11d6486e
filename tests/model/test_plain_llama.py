"""The example of a whole Llama in plain jax.numpy computes the library's logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.examples import plain_llama
from tests.helpers.models import LLAMA, params_of, tokens_of

PROMPT, STEPS = 9, 4


@pytest.mark.parametrize("tied", [False, True])
def test_prefill_and_steps_are_the_librarys(tied):
    """Within 1e-6 of the largest logit, from one parameter tree."""
    cfg = LLAMA.replace(tie_embeddings=tied)
    params = jax.device_put(params_of(cfg))
    tokens = np.asarray(tokens_of(cfg, 2, PROMPT + STEPS))
    ours = jl.init_cache(cfg, 2, PROMPT + STEPS, dtype=jnp.float32)
    lengths = np.full(2, PROMPT, np.int32)
    want, ours = jl.prefill(cfg, params, tokens[:, :PROMPT], lengths, ours)
    plain = plain_llama.new_cache(cfg, 2, PROMPT + STEPS)
    got, plain = plain_llama.prefill(cfg, params, jnp.asarray(tokens[:, :PROMPT]), plain)
    for step in range(STEPS + 1):
        np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
        if step < STEPS:
            token = jnp.asarray(tokens[:, PROMPT + step])
            want, ours = jl.decode_step(cfg, params, token, ours)
            got, plain = plain_llama.decode_step(cfg, params, token, plain)
