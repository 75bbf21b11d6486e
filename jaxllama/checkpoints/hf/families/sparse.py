"""Further families with experts, whose tensors or keys differ from Mixtral's and Qwen's."""

from __future__ import annotations

import dataclasses

from jaxllama.checkpoints.hf.experts import Mixture, SigmoidMixture
from jaxllama.checkpoints.hf.families.dense import granite_nope, granite_thetas, has_nope
from jaxllama.checkpoints.hf.families.hybrid import CONV_KEYS
from jaxllama.checkpoints.hf.family import (
    BIAS,
    GRANITE_KEYS,
    GRANITE_SCALES,
    QKV_BIAS,
    Family,
    Fields,
    Keys,
    every,
)
from jaxllama.checkpoints.hf.names import GRANITE, LFM2, MIXTRAL, OLMO, SHARED
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ExpertsConfig, ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.experts.parameters import ExpertNames
from jaxllama.model.names import Names

_GRANITE_SHARED_TENSORS = Names(
    gate_up=("input_linear",),
    down="output_linear",
    mixers={"experts": dataclasses.replace(GRANITE, shared="shared_mlp.", is_shared_outside=True)},
)
_LFM2_EXPERTS_TENSORS = ExpertNames(
    "feed_forward.", gate_up=("w1", "w3"), down="w2", choice_bias="expert_bias"
)

_GRANITE_EXPERTS = Mixture(8, 2, "num_local_experts", "intermediate_size")
_FLEX_EXPERTS = Mixture(7, 5, width_key="intermediate_size", normalize=False, has_norm_key=True)
_HUNYUAN_EXPERTS = Mixture(1, 1, width_key="intermediate_size")
_DOTS_EXPERTS = SigmoidMixture(128, 6, width=1408)
_SOLAR_EXPERTS = SigmoidMixture(128, 8, width=1280)
_SARVAM_EXPERTS = SigmoidMixture(
    128,
    6,
    width=1024,
    scale=2.5,
    names={
        "count": ("num_experts", "n_routed_experts", "num_local_experts"),
        "shared": ("num_shared_experts", "n_shared_experts"),
    },
)
_COUNTS = {
    "count": ("num_experts", "num_local_experts"),
    "shared": ("num_shared_experts", "n_shared_experts"),
}
_EXAONE_EXPERTS = SigmoidMixture(64, 8, width=1024, scale=2.5, names=_COUNTS, has_types=True)
_LFM2_EXPERTS = SigmoidMixture(32, 4, width=1792, names={"count": ("num_experts",)})
_MINIMAX_EXPERTS = SigmoidMixture(
    256, 8, width=1536, names={"count": ("num_local_experts", "num_experts")}
)
_HY_EXPERTS = SigmoidMixture(192, 8, width=1536, scale=2.826, names=_COUNTS, has_types=True)


def _granite_shared(read: JsonReader) -> Fields:
    """Return Granite's experts with the one of every token, which has no gate."""
    experts = _GRANITE_EXPERTS.fields(read)["experts"]
    shared = read.natural("shared_intermediate_size", 0)
    return {"experts": dataclasses.replace(experts, shared=shared)}


def _granite_shared_to_hf(cfg: ModelConfig) -> Fields:
    assert cfg.experts is not None  # _GRANITE_EXPERTS raises an error
    return {"shared_intermediate_size": cfg.experts.shared}


_GRANITE_PARTS = (
    GRANITE_KEYS,
    _GRANITE_EXPERTS,
    Keys(("shared_intermediate_size",), _granite_shared, _granite_shared_to_hf),
)


def _hunyuan(read: JsonReader) -> Fields:
    """Return the fields.  Published files have a number for each layer, which must be one."""
    config = dict(read.config)
    for key in ("num_experts", "num_experts_per_tok"):
        values = config.get(key)
        if isinstance(values, list):
            if not values or any(value != values[0] for value in values):
                raise read.error(key, "numbers that differ between layers are not supported")
            config[key] = values[0]
    experts = _HUNYUAN_EXPERTS.fields(JsonReader(config, read.prefix))["experts"]
    return {"experts": dataclasses.replace(experts, shared=experts.d_ff)}


def _of_experts(mixture: SigmoidMixture, read: JsonReader) -> Fields:
    """Return the fields of a family without a dense layer: no other width exists."""
    experts = mixture.fields(read)["experts"]
    if experts is None:
        raise read.error("first_k_dense_replace", "leaves no layer with experts")
    return {"d_ff": experts.d_ff}


def _moe_width(read: JsonReader) -> Fields:
    return {"intermediate_size": read.size("moe_intermediate_size", 1280)}


def _minimax_derived(read: JsonReader) -> Fields:
    share = read.size("rotary_dim", read.size("head_dim")) / read.size("head_dim")
    return {**_moe_width(read), "partial_rotary_factor": share}


def _aria(read: JsonReader) -> Fields:
    """Return the fields.  The shared experts, which have no gate, are one wide expert."""
    width = read.size("intermediate_size", 4096)
    experts = ExpertsConfig(
        n_experts=read.size("moe_num_experts", 8),
        n_active=read.size("moe_topk", 2),
        d_ff=width,
        shared=width * read.natural("moe_num_shared_experts", 2),
    )
    return {"experts": experts}


def _aria_to_hf(cfg: ModelConfig) -> Fields:
    """Return the experts' keys of a config. Raises JaxLlamaError for a model without experts."""
    experts = cfg.experts
    if experts is None:
        raise JaxLlamaError("experts = None: this family's layers have them")
    return {
        "intermediate_size": experts.d_ff,
        "moe_num_experts": experts.n_experts,
        "moe_topk": experts.n_active,
        "moe_num_shared_experts": experts.shared // experts.d_ff,
    }


FAMILIES: dict[str, Family] = {
    "aria_text": Family(
        ("AriaTextForCausalLM",),
        keys=("moe_num_experts", "moe_topk", "moe_num_shared_experts"),
        same=BIAS,
        fields=_aria,
        to_hf=_aria_to_hf,
        fixed={"hidden_act": ("silu",), "mlp_bias": (False, None)},
        tensors=Names(
            mixers={
                "experts": dataclasses.replace(
                    SHARED,
                    router="router",
                    fused=("experts.fc1.weight", "experts.fc2.weight"),
                    is_fused=True,
                    is_transposed=True,
                )
            }
        ),
    ),
    "dots1": Family(
        ("Dots1ForCausalLM",),
        defaults={"norm_topk_prob": False, "first_k_dense_replace": 0},
        keys=("max_window_layers",),
        same=BIAS,
        parts=(_DOTS_EXPERTS,),
        facts={"qk_norm": "head"},
        window=lambda i, read: i >= read.natural("max_window_layers", 62),
        tensors=Names(mixers={"experts": SHARED}),
    ),
    "exaone_moe": Family(
        ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        keys=("sliding_window_pattern", "num_nextn_predict_layers"),
        parts=(_EXAONE_EXPERTS,),
        facts={"qk_norm": "head"},
        window=every(4),
        is_nope=has_nope,
        unused=("mtp.",),
        tensors=Names(
            mixers={"experts": dataclasses.replace(SHARED, choice_bias="e_score_correction_bias")}
        ),
    ),
    "flex_olmo": Family(
        ("FlexOlmoForCausalLM",),
        same=BIAS,
        parts=(_FLEX_EXPERTS,),
        facts={"pre_norms": False, "post_norms": True, "qk_norm": "full"},
        tensors=OLMO,
    ),
    "solar_open": Family(
        ("SolarOpenForCausalLM",),
        defaults={"partial_rotary_factor": 1.0, "first_k_dense_replace": 0},
        keys=("use_qk_norm",),
        same=(QKV_BIAS,),
        parts=(_SOLAR_EXPERTS,),
        fields=lambda read: _of_experts(_SOLAR_EXPERTS, read),
        derived=_moe_width,
        tensors=Names(mixers={"experts": SHARED}),
    ),
    "sarvam_moe": Family(
        ("SarvamMoEForCausalLM",),
        keys=("use_qk_norm", "num_nextn_predict_layers", "num_mtp_layers"),
        same=(QKV_BIAS,),
        parts=(_SARVAM_EXPERTS,),
        fields=lambda read: {"qk_norm": "head" if read.flag("use_qk_norm", True) else "none"},
        to_hf=lambda cfg: {"use_qk_norm": cfg.qk_norm == "head"},
        others={"use_qkv_bias": "attention_bias"},
        tensors=Names(
            embed="model.word_embeddings",
            mixer="attention.",
            qkv=("query_key_value",),
            q_norm="query_layernorm",
            k_norm="key_layernorm",
            o="dense",
            mixers={"experts": dataclasses.replace(SHARED, choice_bias="gate.expert_bias")},
        ),
    ),
    "granitemoeshared": Family(
        ("GraniteMoeSharedForCausalLM",),
        same=GRANITE_SCALES,
        parts=_GRANITE_PARTS,
        tensors=_GRANITE_SHARED_TENSORS,
    ),
    "granitemoe_swa": Family(
        ("GraniteMoeSWAForCausalLM",),
        keys=("layer_rope_theta",),
        same=GRANITE_SCALES,
        parts=_GRANITE_PARTS,
        to_hf=granite_thetas,
        facts={"attn_sinks": True},
        window=lambda i, read: i % 4 != 0,
        is_nope=granite_nope,
        tensors=dataclasses.replace(
            _GRANITE_SHARED_TENSORS,
            mixers={
                "experts": ExpertNames(
                    "block_sparse_moe.",
                    router="router",
                    is_fused=True,
                    shared="shared_mlp.",
                    is_shared_outside=True,
                )
            },
        ),
    ),
    "hunyuan_v1_moe": Family(
        ("HunYuanMoEV1ForCausalLM",),
        keys=(
            "eod_token_id",
            "moe_intermediate_size",
            "num_shared_expert",
            "use_mixed_mlp_moe",
            "use_qk_norm",
            *_HUNYUAN_EXPERTS.keys,
        ),
        same=BIAS,
        fields=_hunyuan,
        to_hf=_HUNYUAN_EXPERTS.to_hf,
        facts={"qk_norm": "head", "qk_norm_last": True},
        names={"num_experts_per_tok": "moe_topk"},
        tensors=Names(
            q_norm="query_layernorm",
            k_norm="key_layernorm",
            mixers={"experts": ExpertNames(router="gate.wg", shared="shared_mlp.")},
        ),
    ),
    "hy_v3": Family(
        ("HYV3ForCausalLM",),
        keys=("enable_moe_fp32_combine",),
        same=BIAS,
        parts=(_HY_EXPERTS,),
        fixed={"mlp_bias": (False, None)},
        facts={"qk_norm": "head"},
        names={"routed_scaling_factor": "router_scaling_factor"},
        unused=("model.layers.{n_layers}.",),
        tensors=Names(
            mixers={
                "experts": ExpertNames(
                    router="router.gate", shared="shared_mlp.", choice_bias="expert_bias"
                )
            }
        ),
    ),
    "lfm2_moe": Family(
        ("Lfm2MoeForCausalLM",),
        defaults={"first_k_dense_replace": 2, "n_shared_experts": 0},
        parts=(CONV_KEYS, _LFM2_EXPERTS),
        fixed={"conv_bias": (False, None), "use_expert_bias": (True, None)},
        facts={"qk_norm": "head"},
        eps="norm_eps",
        names={"first_k_dense_replace": "num_dense_layers"},
        others={"tie_embedding": "tie_word_embeddings"},
        tensors=dataclasses.replace(LFM2, mixers={"experts": _LFM2_EXPERTS_TENSORS}),
    ),
    "minimax_m2": Family(
        ("MiniMaxM2ForCausalLM",),
        defaults={"partial_rotary_factor": None, "first_k_dense_replace": 0, "n_shared_experts": 0},
        keys=("rotary_dim", "use_qk_norm", "qk_norm_type", "scoring_func"),
        parts=(_MINIMAX_EXPERTS,),
        fields=lambda read: _of_experts(_MINIMAX_EXPERTS, read),
        facts={"qk_norm": "full"},
        names={"moe_intermediate_size": "intermediate_size"},
        derived=_minimax_derived,
        tensors=Names(
            mixers={"experts": dataclasses.replace(MIXTRAL, choice_bias="e_score_correction_bias")}
        ),
    ),
}
