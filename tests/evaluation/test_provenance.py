"""The digest beside a score: equal for equal weights, another for any bit that differs."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxllama.evaluation.provenance import provenance, weights_digest
from jaxllama.language_model import LanguageModel
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

CFG = LLAMA.first_layers(1)


def test_a_digest_is_of_every_bit_of_the_weights():
    params = jax.tree.map(np.asarray, seeded_params(CFG))
    first = weights_digest(params)
    assert first is not None and len(first) == 16
    assert weights_digest(jax.tree.map(np.copy, params)) == first
    changed = jax.tree.map(np.copy, params)
    changed["norm"]["weight"].view(np.uint8)[0] ^= 1
    assert weights_digest(changed) != first
    renamed = {**params, "other": params["norm"]}
    del renamed["norm"]
    assert weights_digest(renamed) != first


def test_provenance_has_what_a_score_depends_on():
    lm = LanguageModel(CFG, jax.device_put(seeded_params(CFG)), None)
    found = provenance(lm)
    assert found == provenance(lm)
    assert found["bits"] == {"float32": sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))}
    assert found["versions"]["jax"] == jax.__version__ and found["device"].startswith("cpu")
    fixed = dataclasses.replace(lm, deterministic=True)
    assert provenance(fixed)["digest"] != found["digest"]
    assert provenance(fixed)["weights"] == found["weights"]
