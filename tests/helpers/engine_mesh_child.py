"""Run by test_engine_mesh in a process of its own, with 8 devices where the tests have one.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python -m tests.helpers.engine_mesh_child FAMILY MESH ...

One JSON line per engine: first without a mesh, then on each.
"""

from __future__ import annotations

import json
import sys

import jax

from jaxllama.config import DeltaConfig
from jaxllama.decoding.sampling import Sampling
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.language_model import LanguageModel
from jaxllama.model.shardings import shard_params
from jaxllama.parallel import mesh as parallel
from tests.helpers.models import LLAMA, params_of

# 8 heads that share 2 kv heads, which a mesh of 4 repeats; a vocabulary (97) that none divides.
CFG = LLAMA.replace(
    d_model=64, n_layers=1, n_heads=8, n_kv_heads=2, d_ff=128, layer_types=("attention",)
)
DELTA = DeltaConfig(n_heads=16, n_k_heads=8, d_k=8, d_v=8, norm_eps=1e-5)
KDA = DeltaConfig(8, 8, 8, 8, 1e-5, decay="channel", gate="low_rank", gate_activation="sigmoid")
MIXED = CFG.replace(n_layers=2, layer_types=("delta", "attention"), delta=DELTA)
FAMILIES = {
    "gqa": CFG,
    "delta": MIXED.replace(attn_gate=True, qk_norm="head"),
    "kda": MIXED.replace(delta=KDA),
}
REQUESTS = [
    Request("one", (9,), 4),
    Request("short", (5, 6, 7, 8), 6),
    Request("drawn", tuple(range(3, 20)), 6, Sampling(temperature=1.0, seed=3)),
    Request("long", tuple(range(3, 45)), 9),
    Request("again", tuple(range(3, 45)), 9, logprobs=2),
    Request("repeats", (5, 6, 7) * 4, 9, Sampling(logit_bias={6: 50.0})),
]


def report(lm: LanguageModel, draft: str | None = None) -> dict:
    engine = Engine(lm, max_slots=4, max_len=64, prefill_chunk=16, draft=draft)
    engine.warm_up()
    events = engine.generate(REQUESTS)
    again = engine.generate(REQUESTS)  # now with prompts out of the prefix cache
    keys = engine.runner.slots.cache.layers[-1].k
    return {
        "tokens": {
            key: [token for event in [*value, *again[key]] for token in event.tokens]
            for key, value in events.items()
        },
        "cached": sum(value[-1].cached_tokens for value in again.values()),
        "kv_heads": [keys.shape[2], keys.addressable_shards[0].data.shape[2]],
        "pages": keys.addressable_shards[0].data.shape[0],
        "parts": engine.options.parts,
        "lowered": len(engine.runner._programs._keys),
        "devices": len(keys.sharding.device_set),
        "compilations": engine.stats().compilations,
        "accepted": engine.stats().accepted_tokens,
    }


def main() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    family, *meshes = sys.argv[1:]
    cfg = FAMILIES[family].replace(eos_token_ids=())
    params = params_of(cfg)
    print(json.dumps(report(LanguageModel(cfg, params, None))), flush=True)
    for mesh in meshes:
        placed = shard_params(cfg, params, parallel.make_mesh(mesh))
        draft = "ngram" if mesh == "data=2,model=4" else None
        print(json.dumps(report(LanguageModel(*placed, None), draft)), flush=True)


if __name__ == "__main__":
    main()
