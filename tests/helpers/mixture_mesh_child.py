"""Mixtures of published forms on meshes, beside one device; run by ``test_mixture_mesh``.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python -m tests.helpers.mixture_mesh_child FORM [MESH ...]

One JSON line a place, first of one device: the tokens of ``generate`` and of an engine, and the
bytes of weights and of the engine's pages that each device holds.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import jax

from jaxllama.config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.language_model import LanguageModel
from jaxllama.model.shardings import shard_params
from jaxllama.parallel.mesh import make_mesh
from jaxllama.quantization.quantize import quantize_params
from jaxllama.typing import Params, Tree
from tests.helpers.models import LATENT, LLAMA, params_of

_LATENTS = LATENT.replace(
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    head_dim=32,
    d_ff=128,
    rope=RopeConfig(theta=10000.0, rotary_dim=8),
    latent=LatentConfig(kv_rank=32, d_nope=24, d_rope=8, d_v=16, q_rank=32),
    expert_layers=(1,),
    experts=ExpertsConfig(8, 2, 32, scores="sigmoid", choice_bias=True, scale=1.8, shared=32),
)
V3 = dataclasses.replace(_LATENTS.layers[1].experts, d_ff=128, shared=256)
_SINKS = LLAMA.replace(
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=32,
    qkv_bias=True,
    o_bias=True,
    attn_sinks=True,
    sliding_window=7,
    window_layers=(0,),
    experts=ExpertsConfig(8, 2, 32, router_bias=True, bias=True, gate_limit=7.0),
)
FORMS: dict[str, tuple[ModelConfig, str | None]] = {
    "glm-4.7-flash": (_LATENTS, None),
    "gpt-oss": (_SINKS, "mxfp4"),
    "deepseek-v3": (
        _LATENTS.replace(d_model=256, d_ff=512, experts=V3, vocab_size=128),
        "fp8-block",
    ),
}
PROMPTS = [[3 + (7 * row + 5 * i) % 90 for i in range(2 + 3 * row)] for row in range(8)]
NEW = 8


def held(tree: Tree) -> dict[int, int]:
    """Return the bytes of a tree on each device."""
    found: dict[int, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
    return found


def report(cfg: ModelConfig, params: Params, place: str) -> None:
    lm = LanguageModel(cfg, params, None, exact=True)
    answers = lm.generate(PROMPTS, max_new_tokens=NEW)
    engine = Engine(lm, max_slots=8, max_len=64, prefill_chunk=16, cache_tokens=512)
    requests = [Request(str(i), tuple(prompt), NEW) for i, prompt in enumerate(PROMPTS)]
    events = engine.generate(requests)
    pages = engine.runner.slots.cache.layers
    line = {
        "place": place,
        "generate": [answer.tokens for answer in answers],
        "engine": [[t for event in events[r.id] for t in event.tokens] for r in requests],
        "weights": held(params),
        "pages": held(pages),
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    form, *meshes = sys.argv[1:]
    cfg, scheme = FORMS[form]
    cfg = cfg.replace(eos_token_ids=())
    params = params_of(cfg)
    if scheme is not None:
        params = quantize_params(params, scheme)
    report(cfg, params, "one")
    for mesh in meshes:
        report(*shard_params(cfg, jax.device_get(params), make_mesh(mesh)), mesh)


if __name__ == "__main__":
    main()
