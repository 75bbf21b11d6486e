"""Families of dense decoders that differ from Llama by norms, activations, biases and multipliers.

``gpt`` has the families of GPT-2's and GPT-NeoX's line, ``hybrid`` those with several kinds of
layers, ``sparse`` those with experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxllama.checkpoints.hf.family import (
    BIAS,
    GEMMA_KEYS,
    GRANITE_KEYS,
    GRANITE_SCALES,
    MINICPM_KEYS,
    MLP_BIAS,
    Family,
    Fields,
    every,
    head_scale,
)
from jaxllama.checkpoints.hf.names import OLMO
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ModelConfig
from jaxllama.model.names import Names

_APERTUS_TENSORS = Names(mixer_norm="attention_layernorm", mlp_norm="feedforward_layernorm")

_LAYER_NORM = {"norm": "layer", "norm_bias": True}
_OLMO_NORMS = {"pre_norms": False, "post_norms": True}
_USE_BIAS = tuple(("use_bias", field, True) for field in ("qkv_bias", "o_bias", "mlp_bias"))


def _first_gemma(read: JsonReader) -> Fields:
    """Return the activation: "gelu" means the tanh form in Gemma's first files."""
    return {"activation": "gelu_tanh"} if read.config.get("hidden_act") == "gelu" else {}


def has_nope(index: int, read: JsonReader, slides: bool) -> bool:
    """Return whether an EXAONE 4 layer has no positions: a full one beside sliding ones."""
    del index
    return read.config.get("sliding_window") is not None and not slides


def _hyperclovax(read: JsonReader) -> Fields:
    is_default = read.config.get("attention_multiplier") is None
    return {
        "stored.query": 1.0 if is_default else head_scale(read, "attention_multiplier", 1.0),
        "stored.logits": read.positive("logits_scaling", 1.0),
        "post_norms": read.flag("use_post_norm", True),
    }


def _hyperclovax_to_hf(cfg: ModelConfig) -> Fields:
    return {
        "attention_multiplier": cfg.stored.query / cfg.head_dim**0.5,
        "logits_scaling": cfg.stored.logits,
        "use_post_norm": cfg.post_norms,
    }


def granite_nope(index: int, read: JsonReader, slides: bool) -> bool:
    """Return whether a layer's theta is 0 or null, which means no positions.

    Raises JaxLlamaError where layers have different thetas.
    """
    del slides
    thetas = read.config.get("layer_rope_theta")
    if thetas is None:
        return False
    n = read.size("num_hidden_layers")
    if not isinstance(thetas, list) or len(thetas) != n:
        raise read.error("layer_rope_theta", f"must be {n} entries")
    scaling = read.config.get("rope_parameters")
    theta = scaling.get("rope_theta") if isinstance(scaling, Mapping) else None
    theta = read.number("rope_theta") if theta is None else theta
    if any(value and value != theta for value in thetas):
        raise read.error("layer_rope_theta", f"a theta other than {theta} is not supported")
    return not thetas[index]


def granite_thetas(cfg: ModelConfig) -> Fields:
    """Return the key that ``granite_nope`` reads."""
    thetas = [0.0 if i in cfg.nope_layers else cfg.rope.theta for i in range(cfg.n_layers)]
    return {"layer_rope_theta": thetas, "rope_theta": cfg.rope.theta, "rope_scaling": None}


_BITNET = Family(("BitNetForCausalLM",), same=BIAS, facts={"inner_norms": True})
_APERTUS = Family(
    ("ApertusForCausalLM",),
    keys=("qk_norm", "post_norm", "mlp_bias"),
    same=BIAS,
    facts={"gated_mlp": False, "qk_norm": "head"},
    tensors=_APERTUS_TENSORS,
)
FAMILIES: dict[str, Family] = {
    "bitnet": _BITNET,
    "gemma": Family(
        ("GemmaForCausalLM",),
        keys=("hidden_activation",),
        same=BIAS,
        fields=_first_gemma,
        fixed={"use_bidirectional_attention": (None, False)},
        facts={"embedding_scale": True},
        stored={"norm_offset": 1.0},
    ),
    "vaultgemma": Family(
        ("VaultGemmaForCausalLM",),
        keys=("hidden_act",),
        same=(
            *BIAS,
            ("attn_logit_softcapping", "attn_softcap", None),
            ("final_logit_softcapping", "logit_softcap", None),
        ),
        parts=(GEMMA_KEYS,),
        facts={"embedding_scale": True},
        stored={"norm_offset": 1.0},
        activation="hidden_activation",
        window=lambda i, read: bool((i + 1) % 2),
        tensors=Names(mlp_norm="pre_feedforward_layernorm"),
    ),
    "arcee": Family(("ArceeForCausalLM",), same=(*BIAS, *MLP_BIAS), facts={"gated_mlp": False}),
    "minicpm": Family(
        ("MiniCPMForCausalLM",),
        defaults={
            "tie_word_embeddings": True,
            "scale_emb": 1,
            "scale_depth": 1,
            "dim_model_base": 1,
        },
        keys=("mup_denominator",),
        same=BIAS,
        parts=(MINICPM_KEYS,),
        fixed={"sparse_config": (None,)},  # attention to chosen blocks (InfLLM)
    ),
    "nemotron": Family(
        ("NemotronForCausalLM",),
        same=(*BIAS, *MLP_BIAS),
        facts={**_LAYER_NORM, "gated_mlp": False},
        stored={"norm_offset": 1.0},
        eps="norm_eps",
    ),
    "jais2": Family(
        ("Jais2ForCausalLM",),
        same=(
            ("attention_bias", "qkv_bias", True),
            ("attention_bias", "o_bias", True),
            ("mlp_bias", "mlp_bias", True),
        ),
        facts={**_LAYER_NORM, "gated_mlp": False},
        eps="layer_norm_eps",
    ),
    "starcoder2": Family(
        ("Starcoder2ForCausalLM",),
        keys=("embedding_dropout", "activation_function", "layer_norm_epsilon", "mlp_type"),
        same=_USE_BIAS,
        fixed={"norm_type": ("layer_norm", None)},
        facts={**_LAYER_NORM, "gated_mlp": False},
        eps="norm_epsilon",
        window="all",
        tensors=Names(gate_up=("c_fc",), down="c_proj"),
    ),
    "apertus": _APERTUS,
    "apertus1p5_text": dataclasses.replace(
        _APERTUS,
        architectures=("Apertus1p5TextForCausalLM",),
        fixed={"output_vocab_size": (None,)},  # a head of fewer tokens than the embedding
    ),
    "hunyuan_v1_dense": Family(
        ("HunYuanDenseV1ForCausalLM",),
        keys=("use_qk_norm", "eod_token_id"),
        same=BIAS,
        facts={"qk_norm": "head", "qk_norm_last": True},
        tensors=Names(q_norm="query_layernorm", k_norm="key_layernorm"),
    ),
    "ministral3": Family(
        ("Ministral3ForCausalLM",),
        defaults={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
        window="all",
        rope_key="rope_parameters",  # whose default is another one
    ),
    "exaone": Family(
        ("ExaoneForCausalLM",),
        same=(*BIAS, *MLP_BIAS),
        names={
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        tensors=Names(
            embed="transformer.wte",
            layer="transformer.h.{}",
            mixer_norm="ln_1",
            mixer="attn.attention.",
            mlp_norm="ln_2",
            norm="transformer.ln_f",
            gate_up=("c_fc_0", "c_fc_1"),
            down="c_proj",
            o="out_proj",
        ),
    ),
    "exaone4": Family(
        ("Exaone4ForCausalLM",),
        keys=("sliding_window_pattern",),
        facts={**_OLMO_NORMS, "qk_norm": "head"},
        window=every(4),
        is_nope=has_nope,
        tensors=OLMO,
    ),
    "iquestcoder": Family(
        ("IQuestCoderForCausalLM",),
        same=(*BIAS, *MLP_BIAS),
        fixed={"clip_qkv": (None,), "use_sliding_window": (False, None)},
    ),
    "hyperclovax": Family(
        ("HyperCLOVAXForCausalLM",),
        keys=("attention_multiplier", "logits_scaling", "use_post_norm"),
        same=(*GRANITE_SCALES, *MLP_BIAS),
        fields=_hyperclovax,
        to_hf=_hyperclovax_to_hf,
        tensors=Names(mixer_out_norm="post_norm1", mlp_out_norm="post_norm2"),
    ),
    "granite_swa": Family(
        ("GraniteSWAForCausalLM",),
        keys=("layer_rope_theta",),
        same=(*GRANITE_SCALES, *MLP_BIAS),
        parts=(GRANITE_KEYS,),
        to_hf=granite_thetas,
        facts={"attn_sinks": True},
        window=lambda i, read: i % 4 != 0,
        is_nope=granite_nope,
    ),
    "olmo": Family(
        ("OlmoForCausalLM",),
        same=(*BIAS, ("clip_qkv", "qkv_limit", None)),
        facts={"norm": "layer", "norm_weight": False, "norm_eps": 1e-5},
    ),
}
