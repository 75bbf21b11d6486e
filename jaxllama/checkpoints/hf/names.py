"""The names of tensors in each family of checkpoints, by ``cfg.stored.family``.

    tensor_table(cfg, present) -> {path: Param}        ``model.params``'s, with the family's names

Families that are not here have Llama's names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from jaxllama.config import ModelConfig
from jaxllama.model.experts.parameters import ExpertNames
from jaxllama.model.mixers.delta import parameters as delta
from jaxllama.model.mixers.gla import parameters as gla
from jaxllama.model.mixers.ssm import parameters as ssm
from jaxllama.model.names import Names
from jaxllama.model.param import Param, Path
from jaxllama.model.params import param_table

LLAMA = Names()
FLA = Names(embed="model.embeddings", mixer_norm="attn_norm", mixer="attn.", mlp_norm="mlp_norm")
_OLMO = Names(mixer_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
_GEMMA = dataclasses.replace(_OLMO, mlp_norm="pre_feedforward_layernorm")
_GEMMA4 = dataclasses.replace(
    _GEMMA,
    mixers={"experts": ExpertNames("", router="router.proj", is_fused=True, shared="mlp.")},
)
_QWEN_NEXT = delta.DeltaNames(
    inputs=(("in_proj_qkvz", 4),),
    gates=(("in_proj_ba", 2),),
    grouped=("in_proj_qkvz", "in_proj_ba"),
)
_KIMI = dataclasses.replace(
    delta.FLA,
    mixer="self_attn.",
    low_rank=(("f_a_proj", "f_b_proj"), ("g_a_proj", "g_b_proj")),
    rate=(1, 1, -1, 1),
)
_MIXTRAL = ExpertNames("block_sparse_moe.", gate_up=("w1", "w3"), down="w2")
_KIMI_EXPERTS = dataclasses.replace(_MIXTRAL, shared="shared_experts.")
_GRANITE = ExpertNames(
    "block_sparse_moe.",
    router="router.layer",
    fused=("input_linear.weight", "output_linear.weight"),
    is_fused=True,
)
_ERNIE = ExpertNames(
    shared="shared_experts.", choice_bias="moe_statics.e_score_correction_bias", is_matrix=True
)
_NEMOTRON = ExpertNames(
    "mixer.",
    fused=("experts.up_proj", "experts.down_proj"),
    shared="shared_experts.",
)
_MAMBA = Names(
    embed="backbone.embeddings",
    layer="backbone.layers.{}",
    mixer_norm="norm",
    norm="backbone.norm_f",
    mixers={"ssm": ssm.SSMNames(mixer="mixer.")},
)
_LFM2 = Names(
    mixer_norm="operator_norm",
    mlp_norm="ffn_norm",
    mlp="feed_forward.",
    norm="model.embedding_norm",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    o="out_proj",
    gate_up=("w1", "w3"),
    down="w2",
)
_GPT2 = Names(
    embed="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}",
    mixer_norm="ln_1",
    mixer="attn.",
    mlp_norm="ln_2",
    norm="transformer.ln_f",
    qkv=("c_attn",),
    o="c_proj",
    gate_up=("c_fc",),
    down="c_proj",
    is_transposed=True,
)
_GPTJ = dataclasses.replace(
    _GPT2,
    qkv=Names.qkv,
    o="out_proj",
    gate_up=("fc_in",),
    down="fc_out",
    is_transposed=False,
)
_NEOX = Names(
    embed="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}",
    mixer="attention.",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("query_key_value",),
    o="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
    is_by_head=True,
)
_OPT = Names(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{}",
    mixer_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    mlp="",
    norm="model.decoder.final_layer_norm",
    o="out_proj",
    gate_up=("fc1",),
    down="fc2",
)


_GRANITE_SHARED = Names(
    gate_up=("input_linear",),
    down="output_linear",
    mixers={"experts": dataclasses.replace(_GRANITE, shared="shared_mlp.", is_beside=True)},
)
_SHARED = ExpertNames(shared="shared_experts.")
_LFM2_EXPERTS = ExpertNames(
    "feed_forward.", gate_up=("w1", "w3"), down="w2", choice_bias="expert_bias"
)
_APERTUS = Names(mixer_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
_GPT_OSS = ExpertNames(router="router", is_fused=True, alternates=True)
# By ``cfg.stored.family``; LLAMA for those that are not here.
FAMILIES = {
    "gla": FLA,
    "simple_gla": FLA,
    "linear_attn": dataclasses.replace(FLA, mixers={"gla": gla.GLANames(norms=("norm",))}),
    "gla_paper": Names(
        embed="transformer.wte",
        layer="transformer.h.{}",
        mixer_norm="ln_1",
        mixer="attn.",
        mlp_norm="ln_2",
        mlp="",
        norm="transformer.ln_f",
        gate_up=("w1", "w3"),
        down="w2",
        o="out_proj",
        mixers={"gla": gla.GLANames(decay="k_gate")},
    ),
    **dict.fromkeys(
        ("gated_deltanet", "kda", "delta_net"),
        dataclasses.replace(FLA, mixers={"delta": delta.FLA}),
    ),
    "kimi_linear": Names(
        mixers={"delta": _KIMI, "experts": _KIMI_EXPERTS}, other_mlp="block_sparse_moe."
    ),
    "glm4_moe": Names(mixers={"experts": _SHARED}),
    "qwen3_5_moe_text": Names(mixers={"delta": delta.DeltaNames()}),
    "qwen3_next": Names(mixers={"delta": _QWEN_NEXT}),
    "lara_mini": Names(
        mixers={
            "delta": delta.DeltaNames(
                inputs=(("in_proj", 4),), gates=(("in_proj", 2),), norm="out_norm", is_joined=True
            ),
            "experts": ExpertNames(is_fused=True),
        }
    ),
    "qwen3_5_text": Names(mixers={"delta": delta.DeltaNames()}),
    "mamba2": _MAMBA,
    "nemotron_h": dataclasses.replace(
        _MAMBA,
        mlp_norm="norm",
        mlp="mixer.",
        is_halved=True,
        mixer="mixer.",
        mixers={**_MAMBA.mixers, "experts": _NEMOTRON},
    ),
    "bamba": Names(mlp_norm="pre_ff_layernorm", mlp="feed_forward.", norm="model.final_layernorm"),
    "falcon_h1": Names(
        mlp_norm="pre_ff_layernorm",
        mlp="feed_forward.",
        norm="model.final_layernorm",
        is_paired=True,
    ),
    "zamba2": Names(
        mlp_norm="pre_ff_layernorm",
        mlp="feed_forward.",
        norm="model.final_layernorm",
        gate_up=("gate_up_proj",),
        shared="shared_transformer.",
        reads=".mamba_decoder",
    ),
    "granitemoehybrid": Names(
        mlp="shared_mlp.",
        gate_up=("input_linear",),
        down="output_linear",
        mixers={"experts": dataclasses.replace(_GRANITE, shared="shared_mlp.", is_beside=True)},
    ),
    "phimoe": Names(mixers={"experts": _MIXTRAL}),
    "ernie4_5_moe": Names(mixers={"experts": _ERNIE}),
    "mixtral": Names(mixers={"experts": _MIXTRAL}),
    "granitemoe": Names(mixers={"experts": _GRANITE}),
    "gpt_oss": Names(mixers={"experts": _GPT_OSS}),
    "phi3": Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    "glm": Names(gate_up=("gate_up_proj",)),
    "glm4": Names(gate_up=("gate_up_proj",)),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "gemma2": _GEMMA,
    "vaultgemma": Names(mlp_norm="pre_feedforward_layernorm"),
    "exaone4": _OLMO,
    "olmo_hybrid": dataclasses.replace(
        _OLMO,
        other_norms={
            "input_layernorm": "attention_layer_norm",
            "post_attention_layernorm": "feedforward_layer_norm",
        },
        mixers={"delta": dataclasses.replace(delta.FLA, mixer="linear_attn.")},
    ),
    "hyperclovax": Names(mixer_out_norm="post_norm1", mlp_out_norm="post_norm2"),
    "starcoder2": Names(gate_up=("c_fc",), down="c_proj"),
    "apertus": _APERTUS,
    "hunyuan_v1_dense": Names(q_norm="query_layernorm", k_norm="key_layernorm"),
    "exaone": Names(
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
    "lfm2": _LFM2,
    "lfm2_moe": dataclasses.replace(_LFM2, mixers={"experts": _LFM2_EXPERTS}),
    **dict.fromkeys(
        ("dots1", "solar_open", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "sarvam_mla"),
        Names(mixers={"experts": _SHARED}),
    ),
    "aria_text": Names(
        mixers={
            "experts": dataclasses.replace(
                _SHARED,
                router="router",
                fused=("experts.fc1.weight", "experts.fc2.weight"),
                is_fused=True,
                is_transposed=True,
            )
        }
    ),
    "apertus1p5_text": _APERTUS,
    "nanochat": Names(gate_up=("fc1",), down="fc2"),
    "flint": Names(sinks="softmax_offset"),
    "kolibri1": Names(
        mixer_out_norm="post_attn_norm",
        mlp_out_norm="post_ffn_norm",
        mixers={
            "experts": dataclasses.replace(
                _SHARED, choice_bias="moe.router.expert_bias", is_bias_beside=True
            )
        },
    ),
    "cohere2_moe": Names(mixers={"experts": _SHARED}),
    "afmoe": Names(
        gate="gate_proj",
        mixer_out_norm="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        mixers={
            "experts": dataclasses.replace(_SHARED, router="router.gate", choice_bias="expert_bias")
        },
    ),
    "axk1": Names(mixers={"experts": dataclasses.replace(_SHARED, may_lack_bias=True)}),
    "exaone_moe": Names(
        mixers={"experts": dataclasses.replace(_SHARED, choice_bias="e_score_correction_bias")}
    ),
    "sarvam_moe": Names(
        embed="model.word_embeddings",
        mixer="attention.",
        qkv=("query_key_value",),
        q_norm="query_layernorm",
        k_norm="key_layernorm",
        o="dense",
        mixers={"experts": dataclasses.replace(_SHARED, choice_bias="gate.expert_bias")},
    ),
    "flex_olmo": _OLMO,
    "granitemoeshared": _GRANITE_SHARED,
    "granitemoe_swa": dataclasses.replace(
        _GRANITE_SHARED,
        mixers={
            "experts": ExpertNames(
                "block_sparse_moe.",
                router="router",
                is_fused=True,
                shared="shared_mlp.",
                is_beside=True,
            )
        },
    ),
    "hy_v3": Names(
        mixers={
            "experts": ExpertNames(
                router="router.gate", shared="shared_mlp.", choice_bias="expert_bias"
            )
        }
    ),
    "hunyuan_v1_moe": Names(
        q_norm="query_layernorm",
        k_norm="key_layernorm",
        mixers={"experts": ExpertNames(router="gate.wg", shared="shared_mlp.")},
    ),
    "minimax_m2": Names(
        mixers={"experts": dataclasses.replace(_MIXTRAL, choice_bias="e_score_correction_bias")}
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": dataclasses.replace(_GPT2, is_transposed=False, is_by_head=True),
    "gpt_neo": dataclasses.replace(
        _GPT2, mixer="attn.attention.", qkv=Names.qkv, o="out_proj", is_transposed=False
    ),
    "gptj": _GPTJ,
    "gpt_neox": _NEOX,
    "opt": _OPT,
    "dbrx": Names(
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
    "phi": Names(o="dense", gate_up=("fc1",), down="fc2", norm="model.final_layernorm"),
    "falcon": dataclasses.replace(
        _NEOX,
        embed="transformer.word_embeddings",
        layer="transformer.h.{}",
        mixer="self_attention.",
        norm="transformer.ln_f",
        head="lm_head",
        parallel_norms=("ln_attn", "ln_mlp"),
    ),
    "gemma3_text": _GEMMA,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
}


def tensor_table(cfg: ModelConfig, present: Collection[str] = ()) -> dict[Path, Param]:
    """Return the parameters of ``cfg`` and the tensors of its family's files.

    present: the names of a file's tensors, if it is at hand.
    """
    default = FLA if "gla" in cfg.layer_types else LLAMA
    return param_table(cfg, present, FAMILIES.get(cfg.stored.family, default))
