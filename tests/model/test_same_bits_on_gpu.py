"""On one GPU with ``deterministic=True`` an answer has the same bits, however it was made."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.language_model import LanguageModel
from tests.helpers.models import LLAMA, params_of
from tests.model.test_same_answers_on_cpu import through_engine


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
@pytest.mark.parametrize("way", ["chunk=1", "chunk=3", "chunk=None", "batch", "engine"])
def test_a_deterministic_answer_has_the_same_bits(scheme, way):
    """``way`` against one prompt at a time without chunks."""
    cfg = LLAMA.replace(
        d_model=512, n_heads=8, n_kv_heads=2, head_dim=64, d_ff=1024, vocab_size=1024
    )
    params = jl.quantize_params(params_of(cfg, dtype=jnp.bfloat16), scheme)
    lm = LanguageModel(cfg, params, None, deterministic=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 1024, n).tolist() for n in (5, 40, 200, 17)]
    want = [(out.tokens, out.logprobs) for p in prompts for out in lm.generate([p], 40)]
    if way == "engine":
        found = through_engine(lm, prompts, 40, slots=32, max_len=512)
    elif way == "batch":
        found = [(out.tokens, out.logprobs) for out in lm.generate(prompts, 40)]
    else:
        chunk = None if way.endswith("None") else int(way[-1])
        found = [
            (out.tokens, out.logprobs) for p in prompts for out in lm.generate([p], 40, chunk=chunk)
        ]
    assert found == want
