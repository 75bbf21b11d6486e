"""The digest beside a score: equal for equal weights, another for any bit that differs."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxllama.evaluation.provenance import provenance, weights_digest
from jaxllama.executors.resident import Resident
from jaxllama.language_model import LanguageModel
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

CFG = LLAMA.first_layers(1)


def test_a_digest_is_of_every_bit_of_the_weights():
    def digest(params):
        return weights_digest(Resident().leaves(params))

    params = jax.tree.map(np.asarray, seeded_params(CFG))
    first = digest(params)
    assert first is not None and len(first) == 16
    assert digest(jax.tree.map(np.copy, params)) == first
    changed = jax.tree.map(np.copy, params)
    changed["norm"]["weight"].view(np.uint8)[0] ^= 1
    assert digest(changed) != first
    renamed = {**params, "other": params["norm"]}
    del renamed["norm"]
    assert digest(renamed) != first


def test_provenance_has_what_a_score_depends_on():
    lm = LanguageModel(CFG, jax.device_put(seeded_params(CFG)), None)
    found = provenance(lm)
    assert found == provenance(lm)
    assert found["bits"] == {"float32": sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))}
    assert found["versions"]["jax"] == jax.__version__ and found["device"].startswith("cpu")
    fixed = dataclasses.replace(lm, deterministic=True)
    assert provenance(fixed)["digest"] != found["digest"]
    assert provenance(fixed)["weights"] == found["weights"]
    reads = dataclasses.replace(lm, tokenizer=Tokenizer.byte_level())
    assert provenance(reads)["digest"] != found["digest"]


def test_the_digest_is_of_all_that_changes_a_score(tmp_path):
    """Each option of loading and of an evaluation gives another digest."""
    cfg = CFG.replace(d_model=64, d_ff=64, head_dim=16)
    params = seeded_params(cfg)
    lm = LanguageModel(cfg, jax.device_put(params), None, exact=True)

    def offloaded(policy: str, scheme: str | None = None, weights=params):
        place = Placement(Policy.parse(policy), np.float32, scheme, directory=tmp_path, exact=True)
        return place.model(cfg, place.tree(jax.tree.map(np.asarray, weights)), None)

    other = jax.tree.map(np.copy, jax.device_get(params))
    other["layer_0"]["mlp"]["down"]["weight"][5, 7] += 1
    base = "0 100 100 0 100 0"
    found = {
        "resident": provenance(lm),
        "int4 cache": provenance(lm, "int4"),
        "fp8 cache": provenance(lm, "fp8"),
        "sparse": provenance(dataclasses.replace(lm, config=cfg.replace(attn_sparsity=0.5))),
        "window": provenance(lm, window=64),
        "text": provenance(lm, texts=["a"]),
        "policy": provenance(offloaded(base)),
        "other weights": provenance(offloaded(base, weights=other)),
        "quantized": provenance(offloaded(base, "w8a16")),
        "compressed": provenance(offloaded(f"{base} compress_weight=true")),
        "compressed cache": provenance(offloaded(f"{base} compress_cache=true")),
        "cpu attention": provenance(offloaded("0 100 0 100 100 0 cpu_attention=true")),
    }
    digests = [facts["digest"] for facts in found.values()]
    assert len(set(digests)) == len(found)
    assert found["policy"]["weights"] == found["resident"]["weights"]
    assert provenance(offloaded("0 50 100 0 100 0"))["weights"] == found["policy"]["weights"]
    assert found["compressed cache"]["kv_dtype"] == provenance(lm, "int4")["kv_dtype"] == "int4"
    assert provenance(lm, "fp8") == provenance(lm, "float8_e4m3fn")
