"""Mixtures of published forms on meshes, beside one device; run by ``test_mixture_mesh``.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python -m tests.helpers.mixture_mesh_child FORM|random|load [MESH ...]

One JSON line a place, first of one device: the tokens of ``generate`` and of an engine, and the
bytes of weights, of experts and of the engine's pages that each device holds.  random: whether
drawn weights are one device's, and the bytes that drawing an expert's weight takes on a device.
load: a device's bytes of a model in FP8 blocks from files, and the host's largest ones.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxllama as jl
from jaxllama.checkpoints.packed import save as packed
from jaxllama.config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.language_model import LanguageModel
from jaxllama.model import shardings
from jaxllama.model.shardings import gather_params, shard_params
from jaxllama.parallel.mesh import make_mesh
from jaxllama.quantization.quantize import quantize_params
from jaxllama.quantization.random_params import _draw, random_params
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
_V3 = dataclasses.replace(_LATENTS.layers[1].experts, d_ff=128, shared=256)
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
        _LATENTS.replace(d_model=256, d_ff=512, experts=_V3, vocab_size=128),
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


def experts_of(params: Params) -> list[Tree]:
    """Return the weights of a tree that are experts'."""
    layers = (layer["mlp"] for name, layer in params.items() if name.startswith("layer_"))
    return [mlp[name] for mlp in layers for name in mlp if name.startswith("experts_")]


def draw(meshes: list[str]) -> None:
    """Random weights of each form on each mesh, beside one device's."""
    cfg, scheme = FORMS["glm-4.7-flash"][0].replace(n_layers=2), "w4a16-g32"
    path = "layer_1", "mlp", "experts_down", "weight"
    key = jax.random.key(0)
    want = jax.device_get(random_params(cfg, key, scheme=scheme))
    kind = str(jax.random.key_impl(key))
    seed = np.asarray(jax.random.key_data(key)), np.uint32(0), kind
    shape = jax.eval_shape(
        lambda: quantize_params({"down": {"weight": jnp.ones((8, 64, 256))}}, scheme)
    )
    like = shape["down"]["weight"]
    for name in meshes:
        mesh = make_mesh(name)
        got = random_params(cfg, key, scheme=scheme, mesh=mesh)
        back = gather_params(cfg, got, mesh.shape["model"])
        same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), want, back)
        memory = _draw.lower(*seed, like, 0.0, 0.02, cfg, mesh, path).compile().memory_analysis()
        line = {
            "place": name,
            "same": all(jax.tree.leaves(same)),
            "experts": held(experts_of(got)),
            "drawing": memory.temp_size_in_bytes + memory.output_size_in_bytes,
        }
        print(json.dumps(line), flush=True)


def load(meshes: list[str]) -> None:
    """A model in FP8 blocks, written to files and read onto each mesh.

    Arrays on CPU devices may be the host's own, so each is copied to memory that is not counted.
    """
    put = shardings.put
    shardings.put = lambda *args: jax.block_until_ready(jnp.copy(put(*args)))
    cfg, scheme = FORMS["deepseek-v3"]
    cfg = cfg.replace(n_layers=12, layer_types=("latent",) * 12, expert_layers=tuple(range(1, 12)))
    params = quantize_params(params_of(cfg), scheme)
    with tempfile.TemporaryDirectory() as folder:
        packed.save(Path(folder), cfg, jax.device_get(params), format="fp8")
        largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
        jl.load(folder, mesh=meshes[0], dtype="float32")  # imports and caches
        for name in meshes:
            tracemalloc.start()
            lm = jl.load(folder, mesh=name, dtype="float32")
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            line = {
                "place": name,
                "experts": held(experts_of(lm.params)),
                "largest": largest,
                "total": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
                "peak": peak,
            }
            print(json.dumps(line), flush=True)


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
        "experts": held(experts_of(params)),
        "pages": held(pages),
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    form, *meshes = sys.argv[1:]
    if form in ("random", "load"):
        draw(meshes) if form == "random" else load(meshes)
        return
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
