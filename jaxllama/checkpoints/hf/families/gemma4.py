"""Gemma 4: layers with and without a window have heads of two widths, and share keys.

The heads of the layers without a window are in ``global_head_dim`` and
``num_global_key_value_heads``, or in ``per_layer_config``, which transformers writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxllama.checkpoints.hf.family import BIAS, Family, Fields
from jaxllama.checkpoints.hf.names import GEMMA
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ExpertsConfig, FullAttentionConfig, LayerInputsConfig, ModelConfig
from jaxllama.model.experts.parameters import ExpertNames

_GEMMA4_TENSORS = dataclasses.replace(
    GEMMA,
    mixers={"experts": ExpertNames("", router="router.proj", is_fused=True, shared="mlp.")},
)

_FULL = "full_attention"


def _slides(index: int, read: JsonReader) -> bool:
    """Return whether a layer slides, without ``layer_types``."""
    return bool((index + 1) % 6) and index + 1 < read.size("num_hidden_layers")


def _full_layers(read: JsonReader) -> list[int]:
    """Return the layers without a window, of which the last layer is one."""
    n, types = read.size("num_hidden_layers"), read.config.get("layer_types")
    if types is None:
        return [i for i in range(n) if not _slides(i, read)]
    if not isinstance(types, list) or not types or types[-1] != _FULL:
        raise read.error("layer_types", f"the last layer must be {_FULL!r}")
    return [i for i, kind in enumerate(types) if kind == _FULL]


def full_heads(read: JsonReader) -> FullAttentionConfig:
    """Return the heads of the layers without a window."""
    width, n_kv = read.size("head_dim"), read.size("num_key_value_heads")
    is_one = read.flag("attention_k_eq_v", False)
    by_layer = read.config.get("per_layer_config")
    if by_layer is None:
        if is_one and read.config.get("num_global_key_value_heads") is not None:
            n_kv = read.size("num_global_key_value_heads")
        return FullAttentionConfig(read.size("global_head_dim", 512), n_kv, is_one)
    if not isinstance(by_layer, Mapping):
        raise read.error("per_layer_config", "expected an object")
    overrides = {str(key).lstrip("0") or "0": value for key, value in by_layer.items()}
    found = [overrides.pop(str(i), {}) for i in _full_layers(read)]
    if overrides or any(x != found[0] for x in found) or not isinstance(found[0], Mapping):
        raise read.error("per_layer_config", f"must be of all {_FULL} layers, and equal")
    reader = JsonReader(found[0], "per_layer_config.")
    heads = reader.size("num_key_value_heads", n_kv)
    return FullAttentionConfig(reader.size("head_dim", width), heads, is_one)


def _gemma4(read: JsonReader) -> Fields:
    layers, full = _full_layers(read), full_heads(read)
    n, head_dim = read.size("num_hidden_layers"), read.size("head_dim")
    has_two = len(layers) < n
    if has_two and full == FullAttentionConfig(head_dim, read.size("num_key_value_heads")):
        heads: Fields = {}
    elif has_two:
        heads = {"full": full}
    else:
        heads = {"head_dim": full.head_dim, "n_kv_heads": full.n_kv_heads, "k_is_v": full.k_is_v}
    shared = read.natural("num_kv_shared_layers", 0)
    if shared and read.flag("use_double_wide_mlp", False):
        heads["shared_kv_d_ff"] = 2 * read.size("intermediate_size")
    if read.config.get("hidden_size_per_layer_input"):
        heads["layer_inputs"] = LayerInputsConfig(
            read.size("hidden_size_per_layer_input"), read.size("vocab_size_per_layer_input"), n
        )
    if read.flag("enable_moe_block", False):
        heads["experts"] = ExpertsConfig(
            read.size("num_experts"),
            read.size("top_k_experts"),
            read.size("moe_intermediate_size"),
            shared=read.size("intermediate_size"),
            shared_norms=True,
        )
    width = heads.get("head_dim", head_dim)
    return {**heads, "shared_kv_layers": shared, "stored.query": width**0.5}


def _gemma4_to_hf(cfg: ModelConfig) -> Fields:
    full = cfg.full or FullAttentionConfig(cfg.head_dim, cfg.n_kv_heads, cfg.k_is_v)
    inputs, experts = cfg.layer_inputs, cfg.experts
    return {
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": full.k_is_v,
        "num_global_key_value_heads": full.n_kv_heads if full.k_is_v else None,
        "num_kv_shared_layers": cfg.shared_kv_layers,
        "use_double_wide_mlp": cfg.shared_kv_d_ff is not None,
        "hidden_size_per_layer_input": 0 if inputs is None else inputs.width,
        "vocab_size_per_layer_input": cfg.vocab_size if inputs is None else inputs.vocab_size,
        "enable_moe_block": experts is not None,
        "num_experts": None if experts is None else experts.n_experts,
        "top_k_experts": None if experts is None else experts.n_active,
        "moe_intermediate_size": None if experts is None else experts.d_ff,
    }


def _unified_to_hf(cfg: ModelConfig) -> Fields:
    keys = _gemma4_to_hf(cfg)
    return {key: keys[key] for key in keys if key not in _NOT_UNIFIED}


_NOT_UNIFIED = (
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "enable_moe_block",
    "num_experts",
    "top_k_experts",
    "moe_intermediate_size",
)
_KEYS = (
    "global_head_dim",
    "num_global_key_value_heads",
    "per_layer_config",
    "attention_k_eq_v",
    "num_kv_shared_layers",
    "use_double_wide_mlp",
)
_FACTS = {
    "embedding_scale": True,
    "post_norms": True,
    "qk_norm": "head",
    "attention_parts": ("value_norm",),
    "layer_scale": True,
}
_FIXED: Mapping[str, tuple[object, ...]] = {
    "use_bidirectional_attention": (None, False, "vision"),
}
# The keys of positions are all in rope_parameters.
_ABSENT = ("partial_rotary_factor", "rope_theta", "rope_scaling")
_CAP = ("final_logit_softcapping", "logit_softcap", None)

_UNIFIED = Family(
    ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    defaults={"rope_local_base_freq": 10000.0},
    keys=_KEYS,
    same=(*BIAS, _CAP),
    fields=_gemma4,
    to_hf=_unified_to_hf,
    fixed=_FIXED,
    facts=_FACTS,
    activation="hidden_activation",
    window=_slides,
    is_local=True,
    full_width=lambda read: full_heads(read).head_dim,
    absent=_ABSENT,
    tensors=_GEMMA4_TENSORS,
)
FAMILIES: dict[str, Family] = {
    "gemma4_text": dataclasses.replace(
        _UNIFIED,
        architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        defaults={"rope_local_base_freq": 10000.0},
        keys=(*_KEYS, *_NOT_UNIFIED),
        to_hf=_gemma4_to_hf,
    ),
    "gemma4_unified_text": _UNIFIED,
}
