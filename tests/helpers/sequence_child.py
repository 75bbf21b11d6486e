"""Prompts that the devices of a mesh share, beside one device; ``tests.parallel.test_sequence``.

    python -m tests.helpers.sequence_child FAMILY:DATAxMODEL[:KV_DTYPE[:cudnn]] ...
    python -m tests.helpers.sequence_child engine:DATAxMODEL

One JSON line a case: the largest difference of logits and of the cache, as shares of the largest
value, for a prompt of two chunks, in rows of different lengths behind cached tokens.  A KV_DTYPE of
"prompt" is one prompt alone, in float32; "cudnn" is the form for GPUs.  Of engines, whether their
tokens are the same.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama import generation
from jaxllama.config import DeltaConfig
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.language_model import LanguageModel
from jaxllama.model.cache import Cache, init_cache
from jaxllama.model.mixers.attention import chunk
from jaxllama.model.mixers.attention import cudnn as cudnn_attention
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.shardings import fetch, shard_params
from jaxllama.parallel import sequence
from pallas_kernels.qtensor import QTensor, dequantize
from tests.helpers.cudnn_plain import plain
from tests.helpers.models import params_of, tokens_of
from tests.helpers.parallel_child import FAMILIES, WIDE, mesh_of_name, report

sequence.LEAST_TOKENS = 4
ROWS, FIRST, NEXT, CHUNK = 3, 9, 46, 24
CASES = FAMILIES | {
    "gdn": WIDE.replace(
        n_layers=2,
        layer_types=("delta", "delta"),
        delta=DeltaConfig(n_heads=16, n_k_heads=8, d_k=8, d_v=12, norm_eps=1e-5, conv_size=4),
    ),
    "ssm": WIDE.replace(
        n_layers=2,
        layer_types=("ssm", "attention"),
        mixers={"ssm": {"n_heads": 8, "head_dim": 16, "state": 8, "n_groups": 8}},
    ),
    "sinks": WIDE.replace(n_layers=2, attn_sinks=True, sliding_window=11, window_layers=(0,)),
}


def prompts(cfg, params, mesh) -> tuple[np.ndarray, Cache]:
    """(logits of one prompt behind an empty cache, cache)."""
    cache = init_cache(cfg, ROWS, NEXT, "float32", mesh=mesh)
    lengths = jnp.asarray([NEXT, 30, 3], jnp.int32)
    return fetch(generation.prefill(cfg, params, tokens_of(cfg, ROWS, NEXT), lengths, cache))


def run(cfg, params, mesh, kv_dtype: str) -> tuple[np.ndarray, Cache]:
    """(logits of two prompts and a step, cache)."""
    cache = init_cache(cfg, ROWS, FIRST + NEXT + 2, kv_dtype, mesh=mesh)
    tokens = tokens_of(cfg, ROWS, FIRST + NEXT)
    first, rest = tokens[:, :FIRST], tokens[:, FIRST:]
    held, new = jnp.asarray([FIRST, 1, 5], jnp.int32), jnp.asarray([NEXT, 30, 3], jnp.int32)
    a, cache = generation.prefill(cfg, params, first, held, cache)
    b, cache = generation.prefill(cfg, params, rest, new, cache, chunk=CHUNK)
    c, cache = generation.decode_step(cfg, params, tokens[:, 0], cache)
    return np.stack(fetch((a, b, c))), fetch(cache)


def arrays(cache: Cache) -> list[np.ndarray]:
    """The parts of a cache that rows own, as floats."""
    out = []
    for layer in cache.layers:
        for leaf in jax.tree.leaves(layer, is_leaf=lambda leaf: isinstance(leaf, QTensor)):
            if isinstance(leaf, QTensor):
                leaf = dequantize(jax.tree.map(jnp.asarray, leaf))
            leaf = np.asarray(leaf, np.float32)
            if isinstance(layer, KVCache):
                owned = np.arange(leaf.shape[1])[None, :] < np.asarray(cache.lengths)[:, None]
                leaf = np.where(owned[:, :, None, None], leaf, 0)
            elif leaf.ndim == 3:  # inputs of a convolution, which shards of heads regroup
                leaf = np.sort(leaf, axis=-1)
            out.append(leaf)
    return out


def error(want: np.ndarray, got: np.ndarray) -> float:
    if want.shape != got.shape:  # each kv head has copies on a mesh of more devices than heads
        want = np.repeat(want, got.shape[2] // want.shape[2], axis=2)
    return float(np.max(np.abs(want - got)) / np.max(np.abs(want)))


def compare(name: str) -> None:
    family, mesh_name, *rest = name.split(":")
    kv_dtype = rest[0] if rest else "float32"
    if rest[1:] == ["cudnn"]:
        pretend_a_gpu()
    cfg, mesh = CASES[family], mesh_of_name(mesh_name)
    params = params_of(cfg)
    config, on_mesh = shard_params(cfg, jax.device_get(params), mesh)
    if kv_dtype == "prompt":
        want, cache = prompts(cfg, params, None)
        got, other = prompts(config, on_mesh, mesh)
    else:
        want, cache = run(cfg, params, None, kv_dtype)
        got, other = run(config, on_mesh, mesh, kv_dtype)
    assert (np.asarray(cache.lengths) == np.asarray(other.lengths)).all()
    pairs = zip(arrays(cache), arrays(other), strict=True)
    report(
        case=name,
        is_cut=sequence.is_cut(mesh, ROWS, NEXT if kv_dtype == "prompt" else CHUNK),
        logits=error(want, got),
        cache=max(error(*pair) for pair in pairs),
    )


def pretend_a_gpu() -> None:
    """``attention.cudnn.extend`` in float32, in blocks of 16 keys of the past."""
    cudnn_attention._with_log_sum = plain
    cudnn_attention.PAST_TOKENS = 16 * ROWS
    chunk.has_cudnn = lambda *heads: True


def engines(name: str) -> None:
    """An engine with pages on a mesh that cuts each of its prompts' chunks."""
    mesh, cfg = mesh_of_name(name.split(":")[1]), CASES["gqa"]
    params, tokens = params_of(cfg), []
    config, on_mesh = shard_params(cfg, jax.device_get(params), mesh)
    prompts = [tuple(range(3, 45)), (5, 6, 7), tuple(range(60, 20, -1))]
    for lm in (LanguageModel(cfg, params, None), LanguageModel(config, on_mesh, None)):
        engine = Engine(lm, max_slots=4, max_len=64, prefill_chunk=16)
        events = engine.generate([Request(str(i), p, 8) for i, p in enumerate(prompts)])
        tokens.append({key: [t for e in row for t in e.tokens] for key, row in events.items()})
    is_cut = sequence.is_cut(mesh, 2, 16, shares_pages=True)
    report(case=name, is_cut=is_cut, same=tokens[0] == tokens[1], tokens=tokens[0])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        (engines if name.startswith("engine:") else compare)(name)
