"""Families whose layers are of several kinds: OLMo Hybrid, Lara Mini and LFM2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxllama.checkpoints.hf.experts import Mixture
from jaxllama.checkpoints.hf.family import (
    BIAS,
    DELTA_KEYS,
    Family,
    Fields,
    Keys,
    delta_config,
    delta_of,
    delta_to_hf,
)
from jaxllama.checkpoints.hf.names import LFM2, OLMO
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.experts.parameters import ExpertNames
from jaxllama.model.mixers.delta import parameters as delta
from jaxllama.model.mixers.short_conv.parameters import options
from jaxllama.model.names import Names


def _has_no_theta(index: int, read: JsonReader, slides: bool) -> bool:
    """Return whether a file says that no layer has positions (OLMo Hybrid)."""
    del index, slides
    scaling = read.config.get("rope_parameters")
    return isinstance(scaling, Mapping) and scaling.get("rope_theta") is None


def _olmo_hybrid(read: JsonReader) -> Fields:
    n, kinds = read.size("num_hidden_layers"), ("linear_attention", "full_attention")
    types = read.config.get("layer_types")
    if types is None:
        types = [kinds[i % 4 == 3] for i in range(n)]
        types = types if kinds[1] in types else [*types[:-1], kinds[1]]
    if not isinstance(types, list) or len(types) != n or not all(x in kinds for x in types):
        raise read.error("layer_types", f"must be {n} entries of {kinds}")
    heads = read.size("num_attention_heads")
    n_k_heads = read.size("linear_num_key_heads", heads)
    d_k = read.size("linear_key_head_dim", int(0.75 * read.size("hidden_size") / n_k_heads))
    sizes = delta_config(read, heads, n_k_heads, d_k, 2 * d_k, 1e-5)
    beta_max = 2.0 if read.flag("linear_allow_neg_eigval", True) else 1.0
    return {
        "layer_types": tuple("attention" if kind == kinds[1] else "delta" for kind in types),
        "post_norm_layers": tuple(i for i, kind in enumerate(types) if kind == kinds[1]),
        "delta": dataclasses.replace(sizes, beta_max=beta_max),
    }


def _olmo_hybrid_to_hf(cfg: ModelConfig) -> Fields:
    kinds = {"attention": "full_attention", "delta": "linear_attention"}
    keys: Fields = {
        "layer_types": [kinds[kind] for kind in cfg.layer_types],
        **delta_to_hf(cfg),
        "linear_allow_neg_eigval": delta_of(cfg).beta_max == 2.0,
    }
    if len(cfg.nope_layers) == cfg.n_layers:
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    return keys


_LARA_KINDS = ("linear_attention", "sliding_attention", "full_attention")
_LARA_PATTERN = tuple(_LARA_KINDS[i] for i in (0, 1, 0, 2, 1))
_LARA_EXPERTS = Mixture(
    128, 4, width=512, has_norm_key=True, shared=512, facts={"shared_gate": False}
)


def _lara_types(read: JsonReader) -> Fields:
    """Return the kinds of Lara Mini's layers, if a file leaves them out, and an expert's width."""
    n = read.size("num_hidden_layers")
    return {
        "layer_types": [_LARA_PATTERN[i % 5] for i in range(n)],
        "intermediate_size": read.size("moe_intermediate_size", 512),
    }


def _lara(read: JsonReader) -> Fields:
    types = read.config["layer_types"]
    return {
        "layer_types": tuple("delta" if kind == _LARA_KINDS[0] else "attention" for kind in types),
        "delta": delta_config(read, 16, 8, 128, 128, read.number("rms_norm_eps")),
        "d_ff": read.size("moe_intermediate_size", 512),
    }


def _lara_to_hf(cfg: ModelConfig) -> Fields:
    kinds = [_LARA_KINDS[2 - (layer.window is not None)] for layer in cfg.layers]
    return {
        "layer_types": [
            _LARA_KINDS[0] if kind == "delta" else kinds[i]
            for i, kind in enumerate(cfg.layer_types)
        ],
        **delta_to_hf(cfg),
    }


def _inner_width(read: JsonReader) -> int:
    """Return the feed-forward's width of LFM2, which is computed from the file's."""
    width = read.size("intermediate_size")
    if not read.flag("block_auto_adjust_ff_dim", True):
        return width
    width, factor = int(2 * width / 3), read.number("block_ffn_dim_multiplier", None)
    if factor is None:
        return width
    step = read.size("block_multiple_of", 256)
    return step * -(-int(factor * width) // step)


def _conv_layers(read: JsonReader) -> Fields:
    """Return the fields of LFM2's layers: attention, and short convolutions."""
    n, types = read.size("num_hidden_layers"), read.config.get("layer_types")
    if types is None:
        full = read.config.get("full_attn_idxs")
        full = range(n) if full is None else full
        if not isinstance(full, list | range):
            raise read.error("full_attn_idxs", "must be a list of layers")
        types = ["full_attention" if i in full else "conv" for i in range(n)]
    kinds = {"full_attention": "attention", "conv": "short_conv"}
    if not isinstance(types, list) or len(types) != n or not all(x in (*kinds,) for x in types):
        raise read.error("layer_types", f"must be {n} entries of {tuple(kinds)}")
    options = {"width": read.size("hidden_size"), "taps": read.size("conv_L_cache", 3)}
    return {
        "layer_types": tuple(kinds[kind] for kind in types),
        "mixers": {"short_conv": options},
    }


def _conv_to_hf(cfg: ModelConfig) -> Fields:
    """Return the keys of LFM2's layers.  Raises JaxLlamaError where there is no convolution."""
    layer = next((candidate for candidate in cfg.layers if candidate.kind == "short_conv"), None)
    if layer is None:
        raise JaxLlamaError("mixers.short_conv: this family's layers have it")
    kinds = {"attention": "full_attention", "short_conv": "conv"}
    return {
        "layer_types": [kinds[kind] for kind in cfg.layer_types],
        "conv_L_cache": options(layer).taps,
    }


CONV_KEYS = Keys(("layer_types", "conv_L_cache"), _conv_layers, _conv_to_hf)

FAMILIES: dict[str, Family] = {
    "olmo_hybrid": Family(
        ("OlmoHybridForCausalLM",),
        keys=(
            "layer_types",
            *DELTA_KEYS,
            "linear_allow_neg_eigval",
            "linear_a_log_min",
            "linear_a_log_max",
            "linear_dt_min",
            "linear_dt_max",
            "linear_dt_init_floor",
        ),
        same=BIAS,
        fields=_olmo_hybrid,
        to_hf=_olmo_hybrid_to_hf,
        fixed={"linear_use_gate": (True, None)},
        unused=("mtp",),
        facts={"qk_norm": "full"},
        is_nope=_has_no_theta,
        tensors=dataclasses.replace(
            OLMO,
            other_norms={
                "input_layernorm": "attention_layer_norm",
                "post_attention_layernorm": "feedforward_layer_norm",
            },
            mixers={"delta": dataclasses.replace(delta.FLA, mixer="linear_attn.")},
        ),
    ),
    "lara_mini": Family(
        ("LaraMiniForCausalLM",),
        keys=("layer_types", *DELTA_KEYS),
        same=BIAS,
        parts=(_LARA_EXPERTS,),
        fields=_lara,
        to_hf=_lara_to_hf,
        facts={"qk_norm": "head"},
        window=lambda i, read: False,
        is_nope=lambda i, read, slides: not slides,
        derived=_lara_types,
        absent=("intermediate_size",),
        tensors=Names(
            mixers={
                "delta": delta.DeltaNames(
                    inputs=(("in_proj", 4),),
                    gates=(("in_proj", 2),),
                    norm="out_norm",
                    is_joined=True,
                ),
                "experts": ExpertNames(is_fused=True),
            }
        ),
    ),
    "lfm2": Family(
        ("Lfm2ForCausalLM",),
        keys=(
            "full_attn_idxs",
            "block_auto_adjust_ff_dim",
            "block_ffn_dim_multiplier",
            "block_multiple_of",
            "block_dim",
            "block_mlp_init_scale",
            "block_norm_eps",
            "block_out_init_scale",
            "block_use_swiglu",
            "block_use_xavier_init",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "use_pos_enc",
            "num_heads",
        ),
        parts=(CONV_KEYS,),
        fields=lambda read: {"d_ff": _inner_width(read)},
        to_hf=lambda cfg: {"block_auto_adjust_ff_dim": False},
        fixed={"conv_bias": (False, None)},
        facts={"qk_norm": "head"},
        eps="norm_eps",
        others={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
        tensors=LFM2,
    ),
}
