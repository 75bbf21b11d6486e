"""A ModelConfig as a GGUF file's metadata: the way back of ``config`` and ``rope``.

    name = architecture_of(cfg)
    keys = metadata(name, cfg)        key -> value        tables = rope_tensors(cfg)

The tables of ``architectures`` and ``config`` are read in the other direction. ``check_way_back``
compares what the reader finds in the written file, so a model is written exactly if the keys can
state it. Left out: hybrid models.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxllama.checkpoints.gguf.architectures import ARCHITECTURES, SOFTMAX, GGUFArchitecture
from jaxllama.checkpoints.gguf.config import KEYS, SHARED
from jaxllama.checkpoints.hf.config import config_to_hf, differences
from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.config import ModelConfig, RopeConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

# Fields that fine-tuning changes, or that the reader takes from the vocabulary too.
_FREE = ("name", "attn_sparsity", "bos_token_id", "eos_token_ids")


def architecture_of(cfg: ModelConfig) -> str:
    """Return the ``general.architecture`` of a model. Raises JaxLlamaError if there is none."""
    family = config_to_hf(cfg)["model_type"]
    written = {name: arch for name, arch in ARCHITECTURES.items() if not arch.mixer}
    for name, arch in written.items():
        kinds = arch.family, arch.windowed, arch.patterned, arch.mixture, arch.shared_mixture
        if family in kinds:
            return name
    raise JaxLlamaError(
        f"format 'gguf': model_type {family!r} is not written; written: {', '.join(written)}"
    )


def check_peer(name: str, cfg: ModelConfig) -> None:
    """Raise JaxLlamaError for a model whose file llama.cpp would refuse."""
    arch = ARCHITECTURES[name]
    lacks = [f"{part}_bias" for part in ("o", "mlp") if part not in arch.biases]
    lack = next((field for field in lacks if getattr(cfg, field) and not cfg.experts), None)
    if arch.tied is not None and cfg.tie_embeddings != arch.tied:
        lack = "head apart from the embedding (head=none)" if arch.tied else "tied head"
    if not arch.has_groups and cfg.n_kv_heads < cfg.n_heads:
        lack = "kv heads that several query heads share"
    has_experts = [layer.experts is not None for layer in cfg.layers]
    if has_experts != sorted(has_experts):
        lack = "dense layer behind one with experts"
    if lack is not None:
        raise JaxLlamaError(f"format 'gguf': llama.cpp's {name!r} has no {lack}")


def metadata(name: str, cfg: ModelConfig) -> JsonObject:
    """Return the metadata of a model, without the tokenizer's.

    An int is a uint32 of the file, a float a float32.
    """
    arch, config = ARCHITECTURES[name], config_to_hf(cfg)
    family = FAMILIES[config["model_type"]]
    config = {**config, **family.shared(config)}
    tables = {**KEYS, **arch.keys, **(arch.experts if cfg.experts else {})}
    keys: JsonObject = {
        theirs: config[ours] for theirs, ours in tables.items() if config.get(ours) is not None
    }
    eps = "rms_epsilon" if family.eps in ("rms_norm_eps", "norm_eps") else "epsilon"
    keys |= {f"attention.layer_norm_{eps}": cfg.norm_eps, "vocab_size": cfg.vocab_size}
    keys |= {"attention.value_length": cfg.head_dim, **_rope(cfg)}
    keys |= _windows(cfg, arch)
    if cfg.experts is not None and arch.gating != SOFTMAX:
        keys["expert_gating_func"] = arch.gating
    if SHARED in keys and not keys[SHARED]:
        del keys[SHARED]
    found: JsonObject = {f"{name}.{key}": value for key, value in keys.items()}
    return {"general.name": cfg.name, **found}


def _windows(cfg: ModelConfig, arch: GGUFArchitecture) -> JsonObject:
    """Return the keys of a sliding window; 0 says that there is none."""
    if arch.windowed is None:
        return {}
    key = "attention.sliding_window"
    if cfg.sliding_window is None:
        return {key: 0} if arch.may_lack_window else {}
    slides = [layer.window is not None for layer in cfg.layers]
    return {key: cfg.sliding_window, **({} if all(slides) else {f"{key}_pattern": slides})}


def _rope(cfg: ModelConfig) -> JsonObject:
    """Return the keys of positions: frequencies, how many features turn, and a scaling."""
    rope, local = cfg.rope, cfg.window_rope
    keys: JsonObject = {
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": rope.rotary_dim or cfg.head_dim,
    }
    if local is not None:
        keys["rope.freq_base_swa"] = float(local.theta)
    if rope.scaling == "longrope":
        amplitude = rope.attention_factor or _usual_amplitude(cfg)
        keys["rope.scaling.attn_factor"] = float(amplitude)
    if rope.scaling in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": float(rope.factor)}
    if rope.scaling in ("longrope", "yarn"):
        keys["rope.scaling.original_context_length"] = rope.original_max_position
    if rope.scaling == "yarn":
        keys["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        keys["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    return keys


def _usual_amplitude(cfg: ModelConfig) -> float:
    """Return longrope's own multiplier of cos and sin."""
    original = cfg.rope.original_max_position or cfg.max_position
    growth = cfg.max_position / original
    return math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0


def rope_tensors(cfg: ModelConfig) -> dict[str, np.ndarray]:
    """Return the tensors of positions: each frequency's divisor, float32 ``[turning / 2]``."""
    rope, found = cfg.rope, {}
    if rope.scaling == "longrope":
        found = {
            "rope_factors_long.weight": rope.long_factor,
            "rope_factors_short.weight": rope.short_factor,
        }
    elif rope.scaling == "llama3":
        found = {"rope_freqs.weight": _llama3_divisors(rope, rope.rotary_dim or cfg.head_dim)}
    return {name: np.asarray(values, np.float32) for name, values in found.items()}


def _llama3_divisors(rope: RopeConfig, turning: int) -> np.ndarray:
    inv_freq = np.float64(rope.theta) ** (-np.arange(turning // 2) / (turning // 2))
    turns = (rope.original_max_position or 0) * inv_freq / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return 1.0 / (keep + (1.0 - keep) / rope.factor)


def check_way_back(cfg: ModelConfig, found: ModelConfig) -> None:
    """Raise JaxLlamaError naming a field that differs in the config of the written file.

    Numbers are equal up to float32, which the file has.
    """
    if cfg.rope.scaling == "longrope" and cfg.rope.attention_factor is None:
        rope = dataclasses.replace(cfg.rope, attention_factor=_usual_amplitude(cfg))
        cfg = cfg.replace(rope=rope)
    for key, ours, theirs in differences(cfg, found, 1e-6):
        if key not in _FREE:
            raise JaxLlamaError(
                f"format 'gguf' cannot state {key} = {ours!r}: a reader would find {theirs!r}"
            )
    missing = set(cfg.eos_token_ids) - set(found.eos_token_ids)
    if missing:
        raise JaxLlamaError(
            f"eos_token_ids = {cfg.eos_token_ids}: a GGUF file names three, not {sorted(missing)}"
        )
