"""On one GPU with ``deterministic=True`` an answer has the same bits, however it was made.

Drafts are left out: with a vocabulary as small as this their logprobs differ by 1e-7.
"""

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
def test_a_deterministic_answer_has_the_same_bits(scheme):
    """Each prompt alone, against itself again, chunks, one batch of all, and engines."""
    cfg = LLAMA.replace(
        d_model=512, n_heads=8, n_kv_heads=2, head_dim=64, d_ff=1024, vocab_size=1024
    )
    params = jl.quantize_params(params_of(cfg, dtype=jnp.bfloat16), scheme)
    lm = LanguageModel(cfg, params, None, deterministic=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 1024, n).tolist() for n in (5, 40, 200, 17, 1)]

    def answers(prompts, **options):
        return [(out.tokens, out.logprobs) for out in lm.generate(prompts, 40, **options)]

    want = [answers([prompt])[0] for prompt in prompts]
    for chunk in (None, 1, 3):
        assert [answers([prompt], chunk=chunk)[0] for prompt in prompts] == want, chunk
    assert answers(prompts) == want
    for slots in (1, 4, 32, 64):
        assert through_engine(lm, prompts, 40, slots=slots, max_len=1024) == want, slots
