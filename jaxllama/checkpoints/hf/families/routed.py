"""Families of experts with routers, windows or gates of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxllama.checkpoints.hf.experts import Mixture, SigmoidMixture
from jaxllama.checkpoints.hf.family import BIAS, Family, Fields, every
from jaxllama.checkpoints.hf.names import SHARED
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ExpertsConfig, ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.experts.parameters import ExpertNames
from jaxllama.model.names import Names

_MELLUM_EXPERTS = Mixture(64, 8, "num_local_experts", width=896, has_norm_key=True)
# Sigmoids choose experts, and the shared one has no gate.
_SIGMOIDS = {"scores": "sigmoid", "shared_gate": False}
_FLINT_EXPERTS = Mixture(
    256, 6, width=512, has_norm_key=True, shared=1024, is_mixed=True, facts=_SIGMOIDS
)
_KOLIBRI_EXPERTS = Mixture(
    384,
    6,
    width=512,
    normalize=False,
    has_norm_key=True,
    shared=512,
    facts={**_SIGMOIDS, "choice_bias": True, "choice_by_logits": True},
)
_AFMOE_EXPERTS = SigmoidMixture(
    64,
    6,
    width=1408,
    names={
        "count": ("num_experts", "num_local_experts"),
        "shared": ("num_shared_experts", "n_shared_experts"),
    },
)
_COHERE_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "num_shared_experts",
    "shared_expert_combination_strategy",
    "expert_selection_fn",
    "norm_topk_prob",
    "mlp_layer_types",
    "first_k_dense_replace",
    "prefix_dense_intermediate_size",
    "prefix_dense_sliding_window_pattern",
    "sliding_window_pattern",
    "rms_norm_eps",
    "output_router_logits",
)


def _is_sparse(read: JsonReader, default: list[str]) -> list[bool]:
    """Return which layers have experts, by ``mlp_layer_types``."""
    kinds, n = read.config.get("mlp_layer_types") or default, read.size("num_hidden_layers")
    is_list = isinstance(kinds, list) and len(kinds) == n
    if not is_list or not all(kind in ("dense", "sparse") for kind in kinds):
        raise read.error("mlp_layer_types", f"must be {n} entries of 'dense' and 'sparse'")
    return [kind == "sparse" for kind in kinds]


def _kinds_to_hf(cfg: ModelConfig) -> list[str]:
    return ["dense" if layer.experts is None else "sparse" for layer in cfg.layers]


def _mellum(read: JsonReader) -> Fields:
    sparse = _is_sparse(read, ["sparse"] * read.size("num_hidden_layers"))
    experts = _MELLUM_EXPERTS.fields(read)["experts"]
    layers = tuple(index for index, is_sparse in enumerate(sparse) if is_sparse)
    return {"experts": experts, "expert_layers": layers} if layers else {"experts": None}


def _mellum_to_hf(cfg: ModelConfig) -> Fields:
    keys = {} if cfg.experts is None else _MELLUM_EXPERTS.to_hf(cfg)
    return {**keys, "mlp_layer_types": _kinds_to_hf(cfg)}


def _kolibri_width(read: JsonReader) -> int:
    return read.size("moe_intermediate_size", 512)


def _flint_window(index: int, read: JsonReader) -> bool:
    is_last = index == read.size("num_hidden_layers") - 1
    return not (index < 2 or index % 4 == 1 or is_last)


def _is_full(index: int, read: JsonReader, slides: bool) -> bool:
    """Only layers with a window have positions."""
    del index, read
    return not slides


def _is_full_of_some(index: int, read: JsonReader, slides: bool) -> bool:
    del index
    return read.config.get("sliding_window") is not None and not slides


def _first_dense(read: JsonReader) -> list[str]:
    n, dense = read.size("num_hidden_layers"), read.natural("first_k_dense_replace", 0)
    return ["dense" if index < dense else "sparse" for index in range(n)]


def _cohere(read: JsonReader) -> Fields:
    """Return the fields.  An average with the shared experts is half of either."""
    sparse, width = _is_sparse(read, _first_dense(read)), read.size("intermediate_size")
    scores, shared = read.text("expert_selection_fn", "softmax"), read.natural("num_shared_experts")
    if scores not in ("softmax", "sigmoid"):
        raise read.error("expert_selection_fn", "must be 'softmax' or 'sigmoid'")
    way = read.text("shared_expert_combination_strategy", "average")
    if way not in ("sum", "average"):
        raise read.error("shared_expert_combination_strategy", "must be 'sum' or 'average'")
    share = 0.5 if shared and way == "average" else 1.0
    layers = tuple(index for index, is_sparse in enumerate(sparse) if is_sparse)
    experts = ExpertsConfig(
        n_experts=read.size("num_experts"),
        n_active=read.size("num_experts_per_tok"),
        d_ff=width,
        scores="sigmoid" if scores == "sigmoid" else "softmax",
        normalize=scores == "softmax" or read.flag("norm_topk_prob", True),
        scale=share,
        shared=width * shared,
    )
    found: Fields = {
        "experts": experts if layers else None,
        "expert_layers": layers,
        "d_ff": read.size("prefix_dense_intermediate_size", width),
        "stored.shared": share,
    }
    eps = read.number("rms_norm_eps", None)
    return found | ({"norm": "layer"} if eps is None else {"norm": "rms", "norm_eps": eps})


def _cohere_nope(index: int, read: JsonReader, slides: bool) -> bool:
    has_prefix = read.size("prefix_dense_sliding_window_pattern", 1) == 1
    return not slides and (_is_sparse(read, _first_dense(read))[index] or not has_prefix)


def _cohere_window(index: int, read: JsonReader) -> bool:
    dense = read.natural("first_k_dense_replace", 0)
    if index < dense:
        return bool((index + 1) % read.size("prefix_dense_sliding_window_pattern", 1))
    return bool((index - dense + 1) % read.size("sliding_window_pattern", 4))


def _cohere_to_hf(cfg: ModelConfig) -> Fields:
    experts = cfg.experts
    if experts is None:
        raise JaxLlamaError("experts = None: this family's layers have them")
    turning = any(
        layer.experts is None and layer.window is None and layer.mixer.rope.rotary_dim != 0
        for layer in cfg.layers
    )
    return {
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.n_active,
        "num_shared_experts": experts.shared // experts.d_ff,
        "shared_expert_combination_strategy": "average" if cfg.stored.shared == 0.5 else "sum",
        "expert_selection_fn": experts.scores,
        "norm_topk_prob": experts.normalize,
        "intermediate_size": experts.d_ff,
        "prefix_dense_intermediate_size": cfg.d_ff,
        "prefix_dense_sliding_window_pattern": 1 if turning else 2,
        "mlp_layer_types": _kinds_to_hf(cfg),
        "layer_norm_eps": cfg.norm_eps,
        "rms_norm_eps": cfg.norm_eps if cfg.norm.kind == "rms" else None,
    }


def _part(read: JsonReader, key: str) -> JsonReader:
    """Return the reader of an object within a config.json."""
    section = read.config.get(key) or {}
    if not isinstance(section, Mapping):
        raise read.error(key, "must be an object")
    return JsonReader({name: part for name, part in section.items() if part is not None}, f"{key}.")


def _dbrx_sizes(read: JsonReader) -> Fields:
    """Return what a file says in the parts of attention and experts."""
    attention, feed = _part(read, "attn_config"), _part(read, "ffn_config")
    return {
        "num_key_value_heads": attention.size("kv_n_heads", 1),
        "intermediate_size": feed.size("ffn_hidden_size", 3584),
        "rope_theta": attention.number("rope_theta", 10000.0),
    }


def _dbrx(read: JsonReader) -> Fields:
    attention, feed = _part(read, "attn_config"), _part(read, "ffn_config")
    power = feed.number("moe_normalize_expert_weights", None)
    if power not in (None, 1.0):
        raise read.error("ffn_config", "moe_normalize_expert_weights must be 1 or null")
    if (feed.config.get("ffn_act_fn") or {"name": "silu"}) != {"name": "silu"}:
        raise read.error("ffn_config", "ffn_act_fn must be silu")
    experts = ExpertsConfig(
        n_experts=feed.size("moe_num_experts", 4),
        n_active=feed.size("moe_top_k", 1),
        d_ff=feed.size("ffn_hidden_size", 3584),
        normalize=power is not None,
    )
    limit = attention.number("clip_qkv", None)
    return {"experts": experts, "d_ff": experts.d_ff, "qkv_limit": limit}


def _dbrx_to_hf(cfg: ModelConfig) -> Fields:
    experts = cfg.experts
    if experts is None:
        raise JaxLlamaError("experts = None: this family's layers have them")
    theta = cfg.rope.theta
    return {
        "rope_theta": theta,
        "attn_config": {
            "kv_n_heads": cfg.n_kv_heads,
            "clip_qkv": cfg.qkv_limit,
            "rope_theta": theta,
        },
        "ffn_config": {
            "ffn_hidden_size": experts.d_ff,
            "moe_num_experts": experts.n_experts,
            "moe_top_k": experts.n_active,
            "moe_normalize_expert_weights": 1.0 if experts.normalize else None,
        },
    }


FAMILIES: dict[str, Family] = {
    "dbrx": Family(
        ("DbrxForCausalLM",),
        defaults={"rope_theta": None, "layer_norm_eps": 1e-05},
        keys=("attn_config", "ffn_config", "output_router_logits", "resid_pdrop", "emb_pdrop"),
        fields=_dbrx,
        to_hf=_dbrx_to_hf,
        fixed={"tie_word_embeddings": (False, None)},
        facts={"norm": "layer"},
        eps="layer_norm_eps",
        names={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
        },
        derived=_dbrx_sizes,
        absent=("num_key_value_heads", "head_dim", "intermediate_size", "hidden_act"),
        tensors=Names(
            embed="transformer.wte",
            layer="transformer.blocks.{}",
            mixer_norm="norm_attn_norm.norm_1",
            mixer="norm_attn_norm.attn.",
            mlp_norm="norm_attn_norm.norm_2",
            norm="transformer.norm_f",
            qkv=("Wqkv",),
            o="out_proj",
            mixers={
                "experts": ExpertNames(
                    "ffn.",
                    router="router.layer",
                    gate_up=("experts.mlp.w1", "experts.mlp.v1"),
                    down="experts.mlp.w2",
                    in_rows=True,
                )
            },
        ),
    ),
    "mellum": Family(
        ("MellumForCausalLM",),
        defaults={"rope_theta": 10000.0},
        keys=(
            "mlp_layer_types",
            "num_mtp_layers",
            "num_nextn_predict_layers",
            "mtp_layer_types",
            "mtp_mlp_layer_types",
            *_MELLUM_EXPERTS.keys,
        ),
        same=BIAS,
        fields=_mellum,
        to_hf=_mellum_to_hf,
        facts={"qk_norm": "head"},
        window=lambda i, read: False,
        is_local=True,
        absent=("rope_theta", "rope_scaling"),  # read beside rope_parameters, these replace it
        unused=("mtp.",),
    ),
    "flint": Family(
        ("FlintForCausalLM",),
        defaults={"mlp_only_layers": [0, 1]},
        same=BIAS,
        parts=(_FLINT_EXPERTS,),
        facts={"qk_norm": "head", "attn_sinks": True},
        window=_flint_window,
        is_nope=_is_full,
        tensors=Names(sinks="softmax_offset"),
    ),
    "kolibri1": Family(
        ("Kolibri1ForCausalLM",),
        parts=(_KOLIBRI_EXPERTS,),
        fields=lambda read: {"d_ff": _kolibri_width(read)},  # every layer has experts
        facts={"qk_norm": "head", "post_norms": True},
        window=every(5),
        is_nope=_is_full_of_some,
        derived=lambda read: {"intermediate_size": _kolibri_width(read)},
        absent=("intermediate_size",),
        tensors=Names(
            mixer_out_norm="post_attn_norm",
            mlp_out_norm="post_ffn_norm",
            mixers={
                "experts": dataclasses.replace(
                    SHARED, choice_bias="moe.router.expert_bias", is_bias_outside=True
                )
            },
        ),
    ),
    "afmoe": Family(
        ("AfmoeForCausalLM",),
        keys=("global_attn_every_n_layers",),
        same=(*BIAS, ("mup_enabled", "embedding_scale", False)),
        parts=(_AFMOE_EXPERTS,),
        fixed={"score_func": ("sigmoid", None), "attention_bias": (False, None)},
        facts={"qk_norm": "head", "post_norms": True, "attn_gate": True},
        window=lambda i, read: bool((i + 1) % read.size("global_attn_every_n_layers", 4)),
        is_nope=_is_full,
        names={"routed_scaling_factor": "route_scale", "first_k_dense_replace": "num_dense_layers"},
        tensors=Names(
            gate="gate_proj",
            mixer_out_norm="post_attention_layernorm",
            mlp_norm="pre_mlp_layernorm",
            mixers={
                "experts": dataclasses.replace(
                    SHARED, router="router.gate", choice_bias="expert_bias"
                )
            },
        ),
    ),
    "cohere2_moe": Family(
        ("Cohere2MoeForCausalLM",),
        defaults={"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0},
        keys=_COHERE_KEYS,
        same=(*BIAS, ("logit_scale", "stored.logits", 0.0625)),
        fields=_cohere,
        to_hf=_cohere_to_hf,
        facts={"parallel_block": True},
        stored={"interleaved": True},
        eps="layer_norm_eps",
        window=_cohere_window,
        is_nope=_cohere_nope,
        tensors=Names(mixers={"experts": SHARED}),
    ),
}
