"""An offloaded model for which a head drafts: the resident model's tokens."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllama.config import ModelConfig
from jaxllama.decoding.sampling import Sampling
from jaxllama.language_model import LanguageModel
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from jaxllama.typing import Params
from tests.helpers import eagle_cases
from tests.helpers.cases import slow
from tests.helpers.models import check_same
from tests.helpers.mtp_cases import CONFIG, often_right

NEW = 20


def both(cfg: ModelConfig, params: Params, policy: str, folder: Path):
    """(A resident model, the same one offloaded, prompts for three rows)."""
    place = Placement(Policy.parse(policy), "float32", directory=folder)
    off = place.model(cfg, place.tree(jax.tree.map(np.asarray, params)), None)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 256, length).tolist() for length in (1, 9, 19)]
    return LanguageModel(cfg, params, None), off, prompts


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "0 40 100 0 100 0 gpu_batch_size=2 num_gpu_batches=2",
        *slow(
            "0 100 100 0 0 100 gpu_batch_size=4 sep_layer=true",
            "100 0 100 0 100 0 gpu_batch_size=2 overlap=false",
        ),
    ],
)
def test_the_head_s_drafts_change_no_tokens(policy, tmp_path):
    """Three rows in two batches; their prompts pass in chunks, and half of the proposals is right
    or more."""
    cfg = CONFIG.replace(eos_token_ids=())
    lm, off, prompts = both(cfg, often_right(cfg), policy, tmp_path)
    samplings = [Sampling(), Sampling(temperature=0.8), Sampling(repetition_penalty=1.2)]
    want = lm.generate(prompts, NEW, samplings, seed=3)
    got = off.generate(prompts, NEW, samplings, seed=3, chunk=8, draft="mtp", draft_tokens=3)
    check_same(got, want, 1e-4)
    drafted, accepted = (sum(getattr(one, key) for one in got) for key in ("drafted", "accepted"))
    resident = lm.generate(prompts, NEW, samplings, seed=3, draft="mtp", draft_tokens=3)
    assert drafted // 3 < accepted < drafted
    assert [out.accepted for out in got] == [out.accepted for out in resident]


@pytest.mark.parametrize(
    "policy",
    [
        "0 40 100 0 100 0 gpu_batch_size=2 num_gpu_batches=2",
        *slow("0 100 100 0 0 100 gpu_batch_size=4 sep_layer=true"),
    ],
)
def test_an_eagle3_head_s_drafts_change_no_tokens(policy, tmp_path):
    """Three rows in two batches, whose prompts pass in chunks; the same drafts are right."""
    cfg, params = eagle_cases.CONFIG.replace(eos_token_ids=()), eagle_cases.model().params
    lm, off, prompts = both(cfg, params, policy, tmp_path)
    samplings = [Sampling(), Sampling(temperature=0.8), Sampling(logit_bias={5: 30.0, 9: 29.0})]
    options = {"seed": 3, "draft": eagle_cases.drafter(), "draft_tokens": 3}
    want = lm.generate(prompts, 12, samplings, **options)
    got = off.generate(prompts, 12, samplings, chunk=8, **options)
    check_same(got, want, 1e-4)
    assert [out.accepted for out in got] == [out.accepted for out in want]
    assert 0 < got[2].accepted <= got[2].drafted
