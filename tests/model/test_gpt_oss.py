"""gpt-oss beyond a text scored at once: steps, drafts, pages, codes, offloading, training.

That it computes what transformers does is in ``test_parity``.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.config import CheckpointForm
from jaxllama.errors import JaxLlamaError
from tests.helpers.engine_cases import every_way_generates
from tests.helpers.models import check_gradients, check_prompt_steps_and_a_draft
from tests.helpers.parity_cases import CASES
from tests.helpers.parity_cases import params_of as parity_params

# Heads of 32 features, which the CPU's handlers take.
CFG = CASES["gpt_oss"].replace(
    head_dim=32, name="tiny", stored=CheckpointForm(family="gpt_oss"), eos_token_ids=()
)


@functools.cache
def model() -> tuple[jl.LanguageModel, np.ndarray, np.ndarray]:
    """(the model, tokens, teacher-forced logits)."""
    from tests.helpers.seeded import seeded_params

    lm = jl.LanguageModel(CFG, jax.device_put(seeded_params(CFG)), None)
    tokens = np.random.default_rng(0).integers(0, CFG.vocab_size, (2, 40)).astype(np.int32)
    return lm, tokens, np.asarray(lm.logits(tokens, np.full(2, 40, np.int32)))


def test_sinks_count() -> None:
    """The golden case's sinks change its logits, and sparse attention with sinks is refused."""
    cfg, params = CASES["gpt_oss"], parity_params("gpt_oss")
    assert np.abs(params["layer_0"]["mixer"]["sinks"]["weight"]).max() > 0.1
    with pytest.raises(JaxLlamaError, match="attn_sparsity = 0.5: must be 1 where .* sinks"):
        cfg.replace(attn_sparsity=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_prompt_steps_and_a_draft_are_the_whole_sequence(dtype) -> None:
    """A ragged prompt in chunks, past the window of 9, then steps, then a draft."""
    lm, tokens, want = model()
    atol = 2e-5 if dtype == "float32" else 0.05 * np.abs(want).max()
    sizes = {"lengths": (25, 14), "n_steps": 2, "n_drafted": 3, "last": (1, 2)}
    check_prompt_steps_and_a_draft(lm, tokens, want, 6, atol, dtype, **sizes)


@pytest.mark.slow
@pytest.mark.usefixtures("engines_of_one_size")
def test_engine_drafts_and_offloading_give_generates_answers() -> None:
    lm, tokens, _ = model()
    every_way_generates(lm, tokens, (slice(20), slice(4), slice(2, 15)), new=12, max_len=48)


@pytest.mark.slow
def test_gradients_reach_every_parameter() -> None:
    lm, tokens, _ = model()
    check_gradients(lm, tokens[:, :12])
