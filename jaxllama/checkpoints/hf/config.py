"""``config.json`` of the Llama families <-> ModelConfig.

Read: model types llama, mistral, ministral and qwen2 (Llama 1 to 3.2, TinyLlama, SmolLM2, Mistral,
Ministral, Qwen2 and 2.5), RoPE in both spellings (``rope_theta`` + ``rope_scaling``;
``rope_parameters`` of transformers 5).  "gla" goes to ``checkpoints.hf.fla``.  What a file leaves
out means what transformers takes it to mean; a value that would change the computation and is not
supported is a JaxLlamaError naming the key; keys that the family's class in transformers ignores
are one warning.  ``check_preset`` compares a preset with what a checkpoint says of itself.

Left out: MoE, LongRoPE, partial rotary, activations other than SiLU, sequence classifiers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ModelConfig, RopeConfig
from jaxllama.errors import JaxLlamaError

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",  # the first converted Llama 1 files
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Qwen2ForCausalLM": "qwen2",
    "GLAForCausalLM": "gla",
}
# What transformers takes a missing key of that model type to mean; None is "as many as heads".
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": None, "max_position": 2048, "bos": 1, "eos": 2},
    "mistral": {"kv_heads": 8, "max_position": 131072, "bos": 1, "eos": 2},
    "ministral": {"kv_heads": 8, "max_position": 131072, "bos": 1, "eos": 2},
    "qwen2": {"kv_heads": 32, "max_position": 32768, "bos": None, "eos": None},
}
# What is read of a config.json, and what more of some families.
_KEYS = frozenset(
    """
    architectures model_type quantization_config compression_config vocab_size hidden_size
    intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
    rms_norm_eps max_position_embeddings original_max_position_embeddings rope_theta rope_scaling
    rope_parameters partial_rotary_factor tie_word_embeddings bos_token_id eos_token_id
    """.split()
)
_KEYS_OF = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": ("sliding_window", "layer_types"),
    "ministral": ("sliding_window", "layer_types"),
    "qwen2": ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
}
# What transformers lets change the computation of any of them, with the value that is supported.
_FIXED: dict[str, tuple[Any, ...]] = {"is_causal": (True,), "per_layer_config": (None, {})}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_THETA = 10000.0
_EPS = 1e-6
_WINDOW = 4096
# Bounds what a damaged file can make us build before its tensors are looked at.
_MAX_LAYERS = 4096


def config_from_hf(
    config: Mapping[str, Any], name: str, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """ModelConfig of a parsed ``config.json``.

    generation: a parsed ``generation_config.json``, whose token ids go first.
    Raises JaxLlamaError naming the key and its value.
    """
    kind = _model_type(config)
    ids = {key: (generation or {}).get(key) for key in ("bos_token_id", "eos_token_id")}
    config = {**config, **{key: value for key, value in ids.items() if value is not None}}
    if kind == "gla":
        from jaxllama.checkpoints.hf.fla import config_from_fla

        return config_from_fla(config, name)
    defaults, read = _DEFAULTS[kind], JsonReader(config)
    read.check_keys(name, kind, (*_KEYS, *_KEYS_OF[kind]), _FIXED)
    d_model = read.size("hidden_size")
    n_heads = read.size("num_attention_heads")
    n_layers = read.size("num_hidden_layers", limit=_MAX_LAYERS)
    if config.get("head_dim") is None and d_model % n_heads:
        raise read.error("num_attention_heads", f"must divide hidden_size ({d_model})")
    if read.text("hidden_act", "silu") not in ("silu", "swish"):
        raise read.error("hidden_act", "only 'silu' is supported")
    max_position = read.size("max_position_embeddings", defaults["max_position"])
    rope = _rope(config, max_position)
    attention_bias = kind == "llama" and read.flag("attention_bias", False)
    window, window_layers = _window(kind, read, n_layers)
    eos = read.token_ids("eos_token_id", defaults["eos"])
    bos = read.token_ids("bos_token_id", defaults["bos"])
    return ModelConfig(
        name=name,
        vocab_size=read.size("vocab_size"),
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=read.size("num_key_value_heads", defaults["kv_heads"] or n_heads),
        head_dim=read.size("head_dim", d_model // n_heads),
        d_ff=read.size("intermediate_size"),
        norm_eps=read.number("rms_norm_eps", _EPS),
        max_position=_usable_context(rope, max_position),
        rope=rope,
        tie_embeddings=read.flag("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=kind == "llama" and read.flag("mlp_bias", False),
        sliding_window=window,
        window_layers=window_layers,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
    )


def config_to_hf(cfg: ModelConfig, dtype: str | None = None) -> dict[str, Any]:
    """The ``config.json`` that transformers (4 and 5) reads as ``cfg``.

    dtype: name of the weights' dtype, for ``torch_dtype``.
    Raises JaxLlamaError naming the option that no supported architecture has.
    """
    if "gla" in cfg.layer_types:
        from jaxllama.checkpoints.hf.fla import config_to_fla

        return config_to_fla(cfg)
    if cfg.embedding_scale:
        raise JaxLlamaError("embedding_scale = True: no HF architecture of this family has it")
    kind = _hf_model_type(cfg)
    architecture = next(name for name, of in _ARCHITECTURES.items() if of == kind)
    result: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "max_position_embeddings": cfg.max_position,
        "rope_theta": cfg.rope.theta,
        "rope_scaling": _rope_scaling(cfg.rope),
        "tie_word_embeddings": cfg.tie_embeddings,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": _id_or_ids(cfg.eos_token_ids),
    }
    if cfg.rope.scaling == "dynamic":
        result["max_position_embeddings"] = cfg.rope.original_max_position
    if kind == "llama":
        result |= {"attention_bias": cfg.o_bias, "mlp_bias": cfg.mlp_bias}
    else:
        result["sliding_window"] = cfg.sliding_window
        if cfg.window_layers:
            slides = (cfg.window_of(index) is not None for index in range(cfg.n_layers))
            result["layer_types"] = [_LAYER_TYPES[is_sliding] for is_sliding in slides]
    if kind == "qwen2":
        result["use_sliding_window"] = cfg.sliding_window is not None
        # Of transformers before layer_types.
        result["max_window_layers"] = min(cfg.window_layers, default=0)
    return result if dtype is None else {**result, "torch_dtype": dtype}


def generation_config(cfg: ModelConfig) -> dict[str, Any]:
    """``generation_config.json``: where transformers looks for the tokens that end a text."""
    ids = {"bos_token_id": cfg.bos_token_id, "eos_token_id": _id_or_ids(cfg.eos_token_ids)}
    return {"_from_model_config": True, **{k: v for k, v in ids.items() if v is not None}}


# Not facts of the weights: a name, options of this run, and the ids that a fine-tune changes.
_FREE = ("name", "attn_sparsity", "embedding_scale", "bos_token_id", "eos_token_ids")


def check_preset(preset: ModelConfig, checkpoint: ModelConfig) -> ModelConfig:
    """The preset with the checkpoint's token ids, or a JaxLlamaError for the first other key in
    which the two differ, with both values."""
    ours, theirs = _flat(preset), _flat(checkpoint)
    for key in ours | theirs:
        if key not in _FREE and ours.get(key) != theirs.get(key):
            raise JaxLlamaError(
                f"{key}: preset {preset.name!r} says {ours.get(key)!r}, "
                f"the checkpoint {checkpoint.name!r} says {theirs.get(key)!r}"
            )
    return preset.replace(
        bos_token_id=checkpoint.bos_token_id, eos_token_ids=checkpoint.eos_token_ids
    )


def _flat(cfg: ModelConfig) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in dataclasses.asdict(cfg).items():
        result |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {
            key: value
        }  # fmt: skip
    return result


def _model_type(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise JsonReader(config).error("architectures", "expected a list")
    for architecture in architectures:
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            raise JsonReader(config).error(
                "architectures", f"not supported; supported: {', '.join(_ARCHITECTURES)}"
            )
    kind = config.get("model_type")
    if kind is None and architectures:
        kind = _ARCHITECTURES[architectures[0]]
    if kind not in tuple(_ARCHITECTURES.values()):
        supported = ", ".join(dict.fromkeys(_ARCHITECTURES.values()))
        raise JsonReader({"model_type": kind}).error(
            "model_type", f"not supported; supported: {supported}"
        )
    return kind


def _hf_model_type(cfg: ModelConfig) -> str:
    """The architecture whose fixed choices are ``cfg``'s."""
    if cfg.sliding_window is None and cfg.qkv_bias == cfg.o_bias:
        return "llama"
    if cfg.mlp_bias:
        raise JaxLlamaError("mlp_bias = True: only llama has it, without a window, bias q|k|v|o")
    if cfg.o_bias:
        raise JaxLlamaError("o_bias = True: only llama has it, without a window, bias q|k|v|o")
    if cfg.qkv_bias:
        return "qwen2"
    return "ministral" if cfg.window_layers else "mistral"


def _window(kind: str, read: JsonReader, n_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """(sliding window, the layers that have it).  transformers reads "mistral" with layer_types as
    ministral, which without them is mistral."""
    if kind == "llama":
        return None, ()
    window = None
    is_on = kind != "qwen2" or read.flag("use_sliding_window", False)
    if is_on and read.config.get("sliding_window", _WINDOW) is not None:
        window = read.size("sliding_window", _WINDOW)
    types = read.config.get("layer_types")
    if types is None:
        first = read.natural("max_window_layers", 28) if window and kind == "qwen2" else 0
        types = ["sliding_attention" if window and i >= first else "full_attention"
                 for i in range(n_layers)]  # fmt: skip
    ok = isinstance(types, list) and len(types) == n_layers
    if not ok or not all(entry in _LAYER_TYPES for entry in types):
        raise read.error("layer_types", f"must be {n_layers} entries of {_LAYER_TYPES}")
    layers = tuple(index for index, entry in enumerate(types) if entry == "sliding_attention")
    if layers and window is None:
        raise read.error("layer_types", "'sliding_attention' without a sliding_window")
    return (window, layers) if layers else (None, ())


def _rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(key) or {}
    if not isinstance(scaling, Mapping):
        raise JsonReader(config).error(key, "expected an object")
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]
    if nested:  # one entry per kind of layer, as transformers 5 may write it
        if len(nested) < len(scaling) or any(entry != nested[0] for entry in nested):
            raise JsonReader(config).error(key, "RoPE that differs between layers is not supported")
        scaling = nested[0]
    read, top = JsonReader(scaling, f"{key}."), JsonReader(config)
    theta = top.number("rope_theta", _THETA)
    theta = read.number("rope_theta", theta)
    if theta <= 1.0:
        raise (read if scaling.get("rope_theta") else top).error("rope_theta", "must exceed 1")
    for reader in (top, read):
        if reader.number("partial_rotary_factor", 1.0) != 1.0:
            raise reader.error("partial_rotary_factor", "only 1.0 is supported")
    type_key = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = read.text(type_key, "default")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", read.positive("factor"))
    if kind == "dynamic":
        return RopeConfig(theta, "dynamic", read.positive("factor"), max_position)
    if kind not in ("llama3", "yarn"):
        raise read.error(
            type_key, "not supported; supported: default, linear, dynamic, llama3, yarn"
        )
    original_key = "original_max_position_embeddings"
    original = read.size(original_key, max_position)
    original = top.size(original_key, original)
    if kind == "llama3":
        return RopeConfig(
            theta, "llama3", read.positive("factor"), original,
            low_freq_factor=read.positive("low_freq_factor"),
            high_freq_factor=read.positive("high_freq_factor"),
        )  # fmt: skip
    return RopeConfig(
        theta, "yarn", read.positive("factor", max_position / original), original,
        # As in transformers, zero counts as absent here.
        beta_fast=read.number("beta_fast", 32.0) or 32.0,
        beta_slow=read.number("beta_slow", 1.0) or 1.0,
        attention_factor=read.number("attention_factor", None),
        mscale=read.number("mscale", None),
        mscale_all_dim=read.number("mscale_all_dim", None),
        truncate=read.flag("truncate", True),
    )  # fmt: skip


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    result: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        result["original_max_position_embeddings"] = rope.original_max_position
    if rope.scaling == "llama3":
        result["low_freq_factor"] = rope.low_freq_factor
        result["high_freq_factor"] = rope.high_freq_factor
    if rope.scaling == "yarn":
        keys = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        values = {key: getattr(rope, key) for key in keys}
        result |= {key: value for key, value in values.items() if value is not None}
        result |= {} if rope.truncate else {"truncate": False}
    return result


def _usable_context(rope: RopeConfig, max_position: int) -> int:
    """Tokens a model is good for.  Files state the trained context for dynamic and sometimes for
    yarn scaling; the extension is what they were written for."""
    if rope.scaling == "dynamic":
        return int(max_position * rope.factor)
    if rope.scaling == "yarn":
        assert rope.original_max_position is not None
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def _id_or_ids(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)
