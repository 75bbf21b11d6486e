"""The models of GLA's own authors (arXiv 2312.06635, 1.3B checkpoint): config.json <-> ModelConfig.

    y = out(LayerNorm(o) * silu(W x + b))        LayerNorm of a head, without parameters

Their config.json has few keys, ``d_model``, ``n_head``, ``n_layer``, under the model types
"transformer" and "gla". Keys of attention have half the values' width and are scaled by the root of
the values' width; loading folds this scale into q. ``use_gk`` = false is a layer without decay.
Left out: gates of values.
"""

from __future__ import annotations

import dataclasses

from jaxllama.checkpoints.hf.fla import PAPER, PLAIN, only, swiglu_width
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import CheckpointForm, GLAConfig, ModelConfig, RopeConfig
from jaxllama.typing import JsonMapping, JsonObject

_EPS = 1e-5
_KEYS = (
    "architectures",
    "model_type",
    "d_model",
    "n_head",
    "n_layer",
    "context_length",
    "vocab_size",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "use_gk",
    "load_from_llama",
)


def config_from_paper(config: JsonMapping, name: str) -> ModelConfig:
    """Return the ModelConfig. Raises JaxLlamaError naming the key and its value."""
    read = JsonReader(config)
    read.check_keys(name, PAPER, _KEYS, {"use_gv": (False,)})
    d_model, n_heads = read.size("d_model", 2048), read.size("n_head", 8)
    n_layers = read.size("n_layer", 24, limit=4096)
    gla = GLAConfig(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        expand_k=0.5,
        expand_v=1.0,
        norm_eps=_EPS,
        decay="channel" if read.flag("use_gk", True) else "none",
        output_norm="layer",
        norm_weight=False,
        gate_bias=True,
    )
    bos = read.token_ids("bos_token_id", 0)
    return ModelConfig.of(
        name=name,
        vocab_size=read.size("vocab_size", 50432),
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=max(2, d_model // n_heads // 2 * 2),  # unused by these layers
        d_ff=swiglu_width(JsonReader({}), d_model),
        norm_eps=_EPS,
        max_position=read.size("context_length", 2048),
        rope=RopeConfig(10000.0),
        tie_embeddings=read.flag("tie_word_embeddings", False),
        layer_types=("gla",) * n_layers,
        gla=gla,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=read.token_ids("eos_token_id", 0),
        stored=CheckpointForm(family=PAPER, query=0.5**0.5),
    )


def config_to_paper(cfg: ModelConfig) -> JsonObject:
    """Return the config.json. Raises JaxLlamaError naming an option that these models lack."""
    gla, eos = cfg.gla, cfg.eos_token_ids
    assert gla is not None
    result = {
        "architectures": ["GLAForCausalLM"],
        "model_type": "gla",
        "vocab_size": cfg.vocab_size,
        "d_model": cfg.d_model,
        "n_head": gla.n_heads,
        "n_layer": cfg.n_layers,
        "use_gk": gla.decay != "none",
        "use_gv": False,
        "context_length": cfg.max_position,
        "tie_word_embeddings": cfg.tie_embeddings,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
    }
    have = config_from_paper(result, cfg.name)
    theirs = dataclasses.asdict(have.gla) if have.gla is not None else {}
    keys = (
        "d_ff",
        "norm_eps",
        "layer_types",
        "embedding_scale",
        "stored",
        *(key for key, _ in PLAIN),
    )
    only(
        "the GLA paper's",
        ((f"gla.{key}", getattr(gla, key), value) for key, value in theirs.items()),
    )
    only(
        "the GLA paper's", ((key, getattr(cfg.flat, key), getattr(have.flat, key)) for key in keys)
    )
    return result
