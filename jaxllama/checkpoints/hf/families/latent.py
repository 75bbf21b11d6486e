"""Families of attention from latents (MLA).

    KEYS     the keys that all of them share, and Kimi-Linear's

Their ``head_dim`` in config.json, which some files have, is not the width of a key: that is
``qk_nope_head_dim + qk_rope_head_dim``.  With YaRN the scores have a further multiplier, which q's
weight takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from jaxllama.checkpoints.hf.experts import SigmoidMixture
from jaxllama.checkpoints.hf.family import BIAS, MINICPM_KEYS, Family, Fields, Keys
from jaxllama.checkpoints.hf.names import SHARED
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import IndexerConfig, LatentConfig, ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.names import Names

TURNING = "qk_rope_head_dim"
_ORDER = ("rope_interleave", "stored.interleaved", True)


def _latent(read: JsonReader) -> Fields:
    """Return ``latent``, ``head_dim`` and the multiplier of q.

    Raises JaxLlamaError, which names the key.
    """
    latent = LatentConfig(
        kv_rank=read.size("kv_lora_rank"),
        d_nope=read.size("qk_nope_head_dim"),
        d_rope=read.size(TURNING),
        d_v=read.size("v_head_dim"),
        q_rank=None if read.config.get("q_lora_rank") is None else read.size("q_lora_rank"),
    )
    return {
        "latent": latent,
        "head_dim": latent.d_nope + latent.d_rope,
        "stored.query": _score_scale(read),
    }


def _score_scale(read: JsonReader) -> float:
    """Return the square of DeepSeek's mscale of YaRN, which multiplies scores."""
    scaling = read.config.get("rope_scaling") or read.config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        return 1.0  # an error elsewhere
    reader = JsonReader(scaling, "rope_scaling.")
    if reader.text("rope_type", reader.text("type", "default")) == "default":
        return 1.0
    times, factor = reader.number("mscale_all_dim", 0.0), reader.number("factor", 1.0)
    return (0.1 * times * math.log(factor) + 1.0) ** 2 if times and factor > 1 else 1.0


def _latent_to_hf(cfg: ModelConfig) -> Fields:
    latent = cfg.latent
    if latent is None:
        raise JaxLlamaError("latent = None: this family's attention has it")
    return {
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": latent.d_nope,
        TURNING: latent.d_rope,
        "v_head_dim": latent.d_v,
        "head_dim": latent.d_rope,
    }


KEYS = Keys(
    (
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        TURNING,
        "v_head_dim",
        "qk_head_dim",
        "q_head_dim",
    ),
    _latent,
    _latent_to_hf,
)


def _with_indexer(interleaved: bool) -> Callable[[JsonReader], Fields]:
    def fields(read: JsonReader) -> Fields:
        for key, kind in (("indexer_types", "full"), ("layer_types", "indexed_attention")):
            said = read.config.get(key) or []
            if not isinstance(said, list) or any(one != kind for one in said):
                raise read.error(key, f"must be {kind!r} for each layer")
        for key, value in (("index_topk_freq", 1), ("index_topk_pattern", None)):
            if read.config.get(key, value) != value:
                raise read.error(key, f"must be {value}: layers do not share an indexer's choice")
        indexer = IndexerConfig(
            n_heads=read.size("index_n_heads"),
            head_dim=read.size("index_head_dim"),
            top_k=read.size("index_topk"),
            interleaved=interleaved,
        )
        latent = dataclasses.replace(_latent(read)["latent"], indexer=indexer)
        return {"latent": latent, "stored.interleaved": True}

    return fields


def _with_indexer_to_hf(cfg: ModelConfig) -> Fields:
    latent = cfg.latent
    if latent is None or latent.indexer is None:
        raise JaxLlamaError("latent.indexer = None: this family's attention has it")
    indexer = latent.indexer
    return {
        "index_n_heads": indexer.n_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.top_k,
    }


_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
_V2_EXPERTS = SigmoidMixture(
    64,
    6,
    width=1407,
    names={"count": _COUNTS},
    facts={"scores": "softmax", "normalize": False, "choice_bias": False, "group_best": 1},
)
_V3_EXPERTS = SigmoidMixture(256, 8, width=2048, scale=2.5)
_V32_EXPERTS = SigmoidMixture(256, 8, width=2048, scale=2.5, has_types=True)
_GLM_EXPERTS = SigmoidMixture(64, 4, width=1536, scale=1.8, has_types=True)
_MISTRAL4_EXPERTS = SigmoidMixture(
    128, 4, width=2048, facts={"scores": "softmax", "choice_bias": False}
)
_AXK_EXPERTS = SigmoidMixture(
    192, 8, width=2048, scale=2.5, has_types=True, facts={"out_norm": True}
)
_SARVAM_EXPERTS = SigmoidMixture(
    128,
    8,
    width=2048,
    scale=2.5,
    names={
        "count": _COUNTS,
        "shared": ("n_shared_experts", "num_shared_experts"),
    },
)
_METHODS = ("greedy", "group_limited_greedy")


def _v2(read: JsonReader) -> Fields:
    """Return the fields. The router is a softmax, and a group's score is its best expert's."""
    method = read.text("topk_method", "greedy")
    if method not in _METHODS:
        raise read.error("topk_method", f"must be one of {', '.join(_METHODS)}")
    experts = _V2_EXPERTS.fields(read)["experts"]
    if experts is not None and method == _METHODS[0]:
        experts = dataclasses.replace(experts, n_groups=1, n_active_groups=1)
    return {"experts": experts}


def _v2_to_hf(cfg: ModelConfig) -> Fields:
    has_groups = cfg.experts is not None and cfg.experts.n_groups > 1
    return {"topk_method": _METHODS[has_groups], "norm_topk_prob": False}


_RANKS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    TURNING: 64,
    "v_head_dim": 128,
}
_V3_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
_DEEPSEEK_V3 = Family(
    ("DeepseekV3ForCausalLM",),
    defaults={"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
    keys=(*_V3_KEYS, "topk_method", "scoring_func", "moe_layer_freq"),
    same=(*BIAS, _ORDER),
    parts=(KEYS, _V3_EXPERTS),
    fixed={"scoring_func": ("sigmoid", None), "moe_layer_freq": (1, None)},
    turning=TURNING,
    unused=("model.layers.{n_layers}.",),
    tensors=Names(mixers={"experts": SHARED}),
)
_INDEX_SHARED = ("indexer_types", "index_topk_freq", "index_topk_pattern", "layer_types")
_INDEX_KEYS = ("index_n_heads", "index_head_dim", "index_topk")
_DEEPSEEK_V32 = dataclasses.replace(
    _DEEPSEEK_V3,
    architectures=("DeepseekV32ForCausalLM",),
    keys=(*_DEEPSEEK_V3.keys, *_INDEX_KEYS, *_INDEX_SHARED, "rope_interleave"),
    same=BIAS,
    parts=(KEYS, _V32_EXPERTS),
    fields=_with_indexer(interleaved=False),
    to_hf=_with_indexer_to_hf,
)
FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        ("DeepseekV2ForCausalLM",),
        defaults={"n_shared_experts": 2, "first_k_dense_replace": 0},
        keys=("topk_method", "scoring_func", "moe_layer_freq"),
        same=BIAS,
        parts=(KEYS, _V2_EXPERTS),
        fields=_v2,
        to_hf=_v2_to_hf,
        fixed={
            "norm_topk_prob": (False, None),
            "mlp_bias": (False, None),
            "scoring_func": ("softmax", None),
            "moe_layer_freq": (1, None),
        },
        stored={"interleaved": True},
        turning=TURNING,
        tensors=Names(mixers={"experts": SHARED}),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V32,
    "glm_moe_dsa": dataclasses.replace(
        _DEEPSEEK_V32,
        architectures=("GlmMoeDsaForCausalLM",),
        defaults={"first_k_dense_replace": 3},
        fields=_with_indexer(interleaved=True),
    ),
    "sarvam_mla": dataclasses.replace(
        _DEEPSEEK_V3,
        architectures=("DeepseekV3ForCausalLM", "SarvamMLAForCausalLM"),
        defaults={"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        keys=_V3_KEYS,
        parts=(KEYS, _SARVAM_EXPERTS),
        fixed={},
        rope_kinds={"deepseek_yarn": "yarn"},
    ),
    "axk1": dataclasses.replace(
        _DEEPSEEK_V3,
        architectures=("AXK1ForCausalLM",),
        defaults={"n_group": 8, "topk_group": 4, "first_k_dense_replace": 1},
        keys=(*_V3_KEYS, "moe_layer_freq"),
        parts=(KEYS, _AXK_EXPERTS),
        fixed={"moe_layer_freq": (1, None)},
        tensors=Names(mixers={"experts": dataclasses.replace(SHARED, may_lack_bias=True)}),
    ),
    "glm4_moe_lite": Family(
        ("Glm4MoeLiteForCausalLM",),
        keys=_V3_KEYS,
        same=(*BIAS, _ORDER),
        parts=(KEYS, _GLM_EXPERTS),
        turning=TURNING,
        unused=("model.layers.{n_layers}.",),
        tensors=Names(mixers={"experts": SHARED}),
    ),
    "mistral4": dataclasses.replace(
        _DEEPSEEK_V3,
        architectures=("Mistral4ForCausalLM",),
        defaults={"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
        keys=_V3_KEYS,
        parts=(KEYS, _MISTRAL4_EXPERTS),
        fixed={},
        unused=(),
        tensors=Names(mixers={"experts": dataclasses.replace(SHARED, is_fused=True)}),
    ),
    "youtu": Family(
        ("YoutuForCausalLM",),
        keys=("embedding_initializer_range",),
        same=(*BIAS, _ORDER),
        parts=(KEYS,),
        turning=TURNING,
    ),
    "minicpm3": Family(
        ("MiniCPM3ForCausalLM",),
        defaults={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        same=BIAS,
        parts=(KEYS, MINICPM_KEYS),
        fixed={"mlp_bias": (False, None)},
        turning=TURNING,
        derived=lambda read: {
            "v_head_dim": read.size("hidden_size") // read.size("num_attention_heads")
        },
    ),
}
