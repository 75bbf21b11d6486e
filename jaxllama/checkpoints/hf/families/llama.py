"""Llama, and the families of the companies whose models most people run.

They are Mistral, Qwen, Gemma, Granite, OLMo, GLM, Cohere, Phi, Kimi Linear and their like. The
files beside this one have the families of one kind of layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxllama.checkpoints.hf import mamba
from jaxllama.checkpoints.hf.experts import IntervalMixture, Mixture, SigmoidMixture
from jaxllama.checkpoints.hf.families import latent
from jaxllama.checkpoints.hf.family import (
    BIAS,
    DELTA_KEYS,
    GEMMA_KEYS,
    GRANITE_KEYS,
    GRANITE_SCALES,
    MLP_BIAS,
    MTP,
    QKV_BIAS,
    Family,
    Fields,
    delta_config,
    delta_of,
    delta_to_hf,
    every,
)
from jaxllama.checkpoints.hf.names import GEMMA, GRANITE, MIXTRAL, OLMO, SHARED
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import DeltaConfig, ModelConfig
from jaxllama.model.experts.parameters import ExpertNames
from jaxllama.model.mixers.delta import parameters as delta
from jaxllama.model.mixers.ssm import parameters as ssm
from jaxllama.model.names import Names

_QWEN_NEXT_TENSORS = delta.DeltaNames(
    inputs=(("in_proj_qkvz", 4),),
    gates=(("in_proj_ba", 2),),
    grouped=("in_proj_qkvz", "in_proj_ba"),
)
_KIMI_TENSORS = dataclasses.replace(
    delta.FLA,
    mixer="self_attn.",
    low_rank=(("f_a_proj", "f_b_proj"), ("g_a_proj", "g_b_proj")),
    rate=(1, 1, -1, 1),
)
_KIMI_EXPERTS_TENSORS = dataclasses.replace(MIXTRAL, shared="shared_experts.")
_ERNIE_TENSORS = ExpertNames(
    shared="shared_experts.", choice_bias="moe_statics.e_score_correction_bias", is_matrix=True
)
_NEMOTRON_TENSORS = ExpertNames(
    "mixer.", fused=("experts.up_proj", "experts.down_proj"), shared="shared_experts."
)
_MAMBA_TENSORS = Names(
    embed="backbone.embeddings",
    layer="backbone.layers.{}",
    mixer_norm="norm",
    norm="backbone.norm_f",
    mixers={"ssm": ssm.SSMNames(mixer="mixer.")},
)
_GPT_OSS_TENSORS = ExpertNames(router="router", is_fused=True, alternates=True)


def _mamba2(read: JsonReader) -> Fields:
    n = read.size("num_hidden_layers")
    found = _MAMBA2.fields(read)
    ssm = found["mixers"]["ssm"]
    return {
        **found,
        "layer_types": ("ssm",) * n,
        "bare_layers": tuple(range(n)),
        "head_dim": ssm["head_dim"],
        "d_ff": ssm["n_heads"] * ssm["head_dim"],  # no layer has one
    }


def _granite_hybrid(read: JsonReader) -> Fields:
    """Return the fields of a Granite 4 hybrid.

    Without routed experts the shared expert is the layer's dense feed-forward.
    """
    experts = _HYBRID_EXPERTS.fields(read)
    shared = read.size("shared_intermediate_size", 1024)
    if experts["experts"] is None:
        experts["d_ff"] = shared
    else:
        experts["experts"] = dataclasses.replace(experts["experts"], shared=shared)
    return {**experts, "layer_types": mamba.mamba_layers(read)}


def _granite_hybrid_to_hf(cfg: ModelConfig) -> Fields:
    experts = cfg.experts
    keys = {"num_local_experts": 0} if experts is None else _HYBRID_EXPERTS.to_hf(cfg)
    for name in ("mlp_only_layers", "decoder_sparse_step"):
        keys.pop(name, None)
    return {
        **keys,
        "shared_intermediate_size": cfg.d_ff if experts is None else experts.shared,
        "layer_types": [_LINEAR[kind == "ssm"] for kind in cfg.layer_types],
        "position_embedding_type": None if cfg.nope_layers else "rope",
    }


def _phimoe_to_hf(cfg: ModelConfig) -> Fields:
    """Return the keys of a config; its longrope names the amplitude twice."""
    keys, rope = _PHI_EXPERTS.to_hf(cfg), cfg.rope
    if rope.scaling == "longrope":
        keys["rope_scaling"] = {
            "rope_type": "longrope",
            "original_max_position_embeddings": rope.original_max_position,
            "short_factor": list(rope.short_factor),
            "long_factor": list(rope.long_factor),
            "short_mscale": rope.attention_factor,
            "long_mscale": rope.attention_factor,
        }
        keys["original_max_position_embeddings"] = rope.original_max_position
    return keys


def _smollm3_nope(index: int, read: JsonReader, slides: bool = False) -> bool:
    layers = read.config.get("no_rope_layers")
    if layers is None:
        return (index + 1) % read.size("no_rope_layer_interval", 4) == 0
    n = read.size("num_hidden_layers")
    if not isinstance(layers, list) or len(layers) != n or not all(x in (0, 1) for x in layers):
        raise read.error("no_rope_layers", f"must be {n} entries of 0 and 1")
    return not layers[index]


_LINEAR = ("full_attention", "linear_attention")


def _linear_layers(read: JsonReader, full: str = "attention") -> tuple[str, ...]:
    """Return ModelConfig's layer_types; without the key every fourth layer is ``full``."""
    n, types = read.size("num_hidden_layers"), read.config.get("layer_types")
    if types is None:
        every = read.size("full_attention_interval", 4)
        types = [_LINEAR[bool((i + 1) % every)] for i in range(n)]
    if not isinstance(types, list) or len(types) != n or not all(x in _LINEAR for x in types):
        raise read.error("layer_types", f"must be {n} entries of {_LINEAR}")
    return tuple(full if kind == _LINEAR[0] else "delta" for kind in types)


_MTP_LAYERS = "mtp_num_hidden_layers"


def _qwen_delta(read: JsonReader) -> Fields:
    return {
        "layer_types": _linear_layers(read),
        "delta": delta_config(read, 32, 16, 128, 128, read.number("rms_norm_eps")),
        "mtp_layers": int(bool(read.config.get(_MTP_LAYERS))),
    }


_NEXT_EXPERTS = Mixture(
    512, 10, width=512, normalize=True, has_norm_key=True, shared=512, is_mixed=True
)
_QWEN35_EXPERTS = Mixture(256, 8, width=512, shared=512)


def _qwen_delta_to_hf(cfg: ModelConfig) -> Fields:
    return {
        "layer_types": [_LINEAR[kind == "delta"] for kind in cfg.layer_types],
        **delta_to_hf(cfg),
        **({_MTP_LAYERS: cfg.mtp_layers} if cfg.mtp_layers else {}),
    }


def _kimi_layers(read: JsonReader) -> tuple[str, ...]:
    n, linear = (
        read.size("num_hidden_layers"),
        read.config.get("linear_attn_config") or {},
    )
    if read.config.get("layer_types") is not None:
        return _linear_layers(read, "latent")
    full = linear.get("full_attn_layers") if isinstance(linear, Mapping) else None
    if full is None:
        full = range(5, n + 1, 4)  # layers are counted from 1
    if not isinstance(full, list | range) or not all(type(i) is int for i in full):
        raise read.error("linear_attn_config", "full_attn_layers must be a list of layers")
    return tuple("latent" if i + 1 in full else "delta" for i in range(n))


def _kimi(read: JsonReader) -> Fields:
    linear = read.config.get("linear_attn_config") or {}
    linear = JsonReader(linear if isinstance(linear, Mapping) else {}, "linear_attn_config.")
    width = linear.size("head_dim", read.size("linear_head_dim", 128))
    heads = linear.size("num_heads", read.size("linear_num_heads", 32))
    delta = DeltaConfig(
        n_heads=heads,
        n_k_heads=heads,
        d_k=width,
        d_v=width,
        norm_eps=read.number("rms_norm_eps"),
        conv_size=linear.size("short_conv_kernel_size", read.size("linear_conv_kernel_dim", 4)),
        decay="channel",
        gate="low_rank",
        gate_activation="sigmoid",
    )
    context = {}
    if read.config.get("model_max_length") is not None:
        context["max_position"] = read.size("model_max_length")
    return {
        "layer_types": _kimi_layers(read),
        "delta": delta,
        **context,
    }


def _kimi_to_hf(cfg: ModelConfig) -> Fields:
    delta = delta_of(cfg)
    return {
        "layer_types": [_LINEAR[kind == "delta"] for kind in cfg.layer_types],
        "linear_head_dim": delta.d_k,
        "linear_num_heads": delta.n_heads,
        "linear_conv_kernel_dim": delta.conv_size,
    }


_KIMI_EXPERTS = SigmoidMixture(
    256,
    8,
    width=1024,
    scale=2.446,
    names={
        "count": ("num_experts", "num_local_experts"),
        "active": ("num_experts_per_token", "num_experts_per_tok"),
        "normalize": ("moe_renormalize", "norm_topk_prob"),
        "groups": ("num_expert_group", "n_group"),
        "shared": ("num_shared_experts", "n_shared_experts"),
    },
    has_types=True,
)
_GLM_EXPERTS = SigmoidMixture(128, 8, width=1408)
_QWEN_DELTA = Family(
    architectures=("Qwen3_5ForCausalLM",),
    keys=(
        "layer_types",
        "full_attention_interval",
        *DELTA_KEYS,
        _MTP_LAYERS,
    ),
    same=BIAS,
    fields=_qwen_delta,
    to_hf=_qwen_delta_to_hf,
    fixed={"attn_output_gate": (True, None)},
    facts={"qk_norm": "head", "attn_gate": True},
    stored={"norm_offset": 1.0},
    unused=(MTP,),
    tensors=Names(mixers={"delta": delta.DeltaNames()}),
)
_COHERE = {"norm": "layer", "parallel_block": True}
_GEMMA = {"embedding_scale": True, "post_norms": True}
_LOGIT_CAP = ("final_logit_softcapping", "logit_softcap", None)
_MIXTRAL_EXPERTS = Mixture(8, 2, "num_local_experts", "intermediate_size")
_OLMOE_EXPERTS = Mixture(64, 8, width_key="intermediate_size", normalize=False, has_norm_key=True)
_QWEN2_EXPERTS = Mixture(
    60, 4, width=1408, normalize=False, has_norm_key=True, shared=5632, is_mixed=True
)
_QWEN3_EXPERTS = Mixture(128, 8, width=768, normalize=False, has_norm_key=True, is_mixed=True)
_GPT_OSS_EXPERTS = Mixture(
    128,
    4,
    "num_local_experts",
    "intermediate_size",
    facts={"router_bias": True, "bias": True},
    same=(("swiglu_limit", "gate_limit", 7.0), ("swiglu_alpha", "gate_alpha", 1.702)),
)
_PHI_EXPERTS = Mixture(
    16,
    2,
    "num_local_experts",
    "intermediate_size",
    normalize=False,
    facts={"scores": "sparsemixer"},
    same=(("router_jitter_noise", "jitter", 0.01),),
)
_ERNIE_EXPERTS = IntervalMixture()
_GRANITE_EXPERTS = Mixture(8, 2, "num_local_experts", "intermediate_size")
_MAMBA = mamba.MambaKeys()
_MAMBA2 = mamba.MambaKeys(
    n_heads=("num_heads", 128),
    head_dim=("head_dim", 64),
    state=("state_size", 128),
    n_groups=("n_groups", 8),
    taps=("conv_kernel", 4),
    conv_bias=("use_conv_bias", True),
    bias=("use_bias", False),
    expand="expand",
    eps="layer_norm_epsilon",
)
_NEMOTRON_H = dataclasses.replace(
    _MAMBA2,
    n_heads=("mamba_num_heads", 128),
    head_dim=("mamba_head_dim", 64),
    state=("ssm_state_size", 128),
    least=("time_step_min", 0.001),
)
_HYBRID_EXPERTS = dataclasses.replace(_GRANITE_EXPERTS, is_mixed=True)
_GLM = Family(
    architectures=("GlmForCausalLM",),
    defaults={"eos_token_id": [151329, 151336, 151338]},
    same=(QKV_BIAS,),
    stored={"interleaved": True},
    tensors=Names(gate_up=("gate_up_proj",)),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        ("LlamaForCausalLM", "LLaMAForCausalLM"),  # the second: the first converted Llama 1 files
        same=(*BIAS, *MLP_BIAS),
    ),
    "mistral": Family(("MistralForCausalLM",), window="all"),
    "ministral": Family(("MinistralForCausalLM",), window="all"),
    "qwen2": Family(("Qwen2ForCausalLM",), window="use", facts={"qkv_bias": True}),
    "qwen3": Family(("Qwen3ForCausalLM",), same=BIAS, window="use", facts={"qk_norm": "head"}),
    "mixtral": Family(
        ("MixtralForCausalLM",),
        parts=(_MIXTRAL_EXPERTS,),
        window="all",
        tensors=Names(mixers={"experts": MIXTRAL}),
    ),
    "olmoe": Family(
        ("OlmoeForCausalLM",),
        same=BIAS,
        parts=(_OLMOE_EXPERTS,),
        fixed={"clip_qkv": (None,), "sliding_window": (None,)},
        facts={"qk_norm": "full"},
    ),
    "qwen2_moe": Family(
        ("Qwen2MoeForCausalLM",),
        keys=("use_sliding_window", "max_window_layers"),
        same=(("qkv_bias", "qkv_bias", True),),
        parts=(_QWEN2_EXPERTS,),
        to_hf=lambda cfg: {"use_sliding_window": cfg.sliding_window is not None},
        window=lambda i, read: (
            read.flag("use_sliding_window", False)
            and i % 2 == 0
            and i < read.natural("max_window_layers", 28)
        ),
    ),
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",),
        keys=("use_sliding_window", "max_window_layers"),
        same=BIAS,
        parts=(_QWEN3_EXPERTS,),
        to_hf=lambda cfg: {"use_sliding_window": cfg.sliding_window is not None},
        window=lambda i, read: read.flag("use_sliding_window", False),
        facts={"qk_norm": "head"},
    ),
    "qwen3_5_text": _QWEN_DELTA,
    "qwen3_next": dataclasses.replace(
        _QWEN_DELTA,
        architectures=("Qwen3NextForCausalLM",),
        parts=(_NEXT_EXPERTS,),
        tensors=Names(mixers={"delta": _QWEN_NEXT_TENSORS}),
    ),
    "qwen3_5_moe_text": dataclasses.replace(
        _QWEN_DELTA,
        architectures=("Qwen3_5MoeForCausalLM",),
        # No layer has a feed-forward of this width.
        defaults={"intermediate_size": 512},
        parts=(_QWEN35_EXPERTS,),
        # Every layer has experts; there is no other feed-forward width.
        fields=lambda read: {**_qwen_delta(read), "d_ff": read.size("moe_intermediate_size", 512)},
    ),
    "kimi_linear": Family(
        ("KimiLinearForCausalLM",),
        keys=(
            "layer_types",
            "linear_attn_config",
            "linear_head_dim",
            "linear_num_heads",
            "linear_conv_kernel_dim",
            "model_max_length",
            "use_grouped_topk",
            "moe_layer_freq",
            "num_nextn_predict_layers",
        ),
        same=BIAS,
        parts=(_KIMI_EXPERTS, latent.KEYS),
        fields=_kimi,
        to_hf=_kimi_to_hf,
        fixed={
            "mla_use_nope": (True, None),
            "moe_router_activation_func": ("sigmoid", None),
        },
        is_nope=lambda *_: True,
        tensors=Names(
            mixers={"delta": _KIMI_TENSORS, "experts": _KIMI_EXPERTS_TENSORS},
            other_mlp="block_sparse_moe.",
        ),
    ),
    "phi3": Family(
        ("Phi3ForCausalLM",),
        window="all",
        fixed={"attention_bias": (False, None), "mlp_bias": (False, None)},
        rope_kinds={"su": "longrope", "yarn": "longrope"},  # older names
        tensors=Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    ),
    "cwm": Family(
        ("CwmForCausalLM",),
        defaults={"eos_token_id": [128001, 128008, 128009]},
        same=MLP_BIAS,
        window=lambda i, read: bool(i % 4),
        # Its class wants a number, also if no layer slides.
        to_hf=lambda cfg: {"sliding_window": cfg.sliding_window or 8192},
    ),
    "smollm3": Family(
        ("SmolLM3ForCausalLM",),
        keys=("use_sliding_window", "no_rope_layers", "no_rope_layer_interval"),
        same=(*BIAS, *MLP_BIAS),
        window=lambda i, read: read.flag("use_sliding_window", False) and _smollm3_nope(i, read),
        to_hf=lambda cfg: {
            "no_rope_layers": [int(i not in cfg.nope_layers) for i in range(cfg.n_layers)],
            "use_sliding_window": cfg.sliding_window is not None,
        },
        is_nope=_smollm3_nope,
    ),
    "granite": Family(
        ("GraniteForCausalLM",), same=(*GRANITE_SCALES, *MLP_BIAS), parts=(GRANITE_KEYS,)
    ),
    "granitemoe": Family(
        ("GraniteMoeForCausalLM",),
        same=GRANITE_SCALES,
        parts=(GRANITE_KEYS, _GRANITE_EXPERTS),
        tensors=Names(mixers={"experts": GRANITE}),
    ),
    "mamba2": Family(
        ("Mamba2ForCausalLM",),
        defaults={"num_attention_heads": 1, "intermediate_size": 1},
        keys=_MAMBA2.keys,
        fields=_mamba2,
        to_hf=_MAMBA2.to_hf,
        fixed={"hidden_act": ("silu", None)},
        eps="layer_norm_epsilon",
        is_nope=lambda *_: True,
        tensors=_MAMBA_TENSORS,
    ),
    "bamba": Family(
        ("BambaForCausalLM",),
        keys=("attn_layer_indices", "attn_rotary_emb", "layer_types", "layers_block_type"),
        same=(*BIAS, *MLP_BIAS),
        parts=(_MAMBA,),
        fields=lambda read: {"layer_types": mamba.indexed_layers(read)},
        to_hf=lambda cfg: {
            "attn_layer_indices": [i for i, k in enumerate(cfg.layer_types) if k == "attention"]
        },
        fixed={"partial_rotary_factor": (0.5, None)},  # whatever a file says, in transformers
        tensors=Names(
            mlp_norm="pre_ff_layernorm", mlp="feed_forward.", norm="model.final_layernorm"
        ),
    ),
    "granitemoehybrid": Family(
        ("GraniteMoeHybridForCausalLM",),
        keys=(
            "shared_intermediate_size",
            "layer_types",
            "layers_block_type",
            "position_embedding_type",
            "init_method",
            "normalization_function",
            *_HYBRID_EXPERTS.keys,
        ),
        same=GRANITE_SCALES,
        parts=(GRANITE_KEYS, _MAMBA),
        fields=_granite_hybrid,
        to_hf=_granite_hybrid_to_hf,
        fixed={"mamba_proj_bias": (False, None)},
        is_nope=lambda i, read, slides: read.config.get("position_embedding_type") != "rope",
        tensors=Names(
            mlp="shared_mlp.",
            gate_up=("input_linear",),
            down="output_linear",
            mixers={
                "experts": dataclasses.replace(
                    GRANITE, shared="shared_mlp.", is_shared_outside=True
                )
            },
        ),
    ),
    "nemotron_h": Family(
        ("NemotronHForCausalLM",),
        defaults={"num_hidden_layers": 1},
        keys=(
            "mamba_proj_bias",  # which no class reads
            "hybrid_override_pattern",
            "layers_block_type",
            "layer_types",
            "attention_head_dim",
            "mtp_layers_block_type",
            "mtp_hybrid_override_pattern",
            "num_nextn_predict_layers",
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_overlap",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "output_router_logits",
            "routed_scaling_factor",
            "topk_group",
        ),
        same=MLP_BIAS,
        parts=(_NEMOTRON_H,),
        fields=mamba.nemotron_layers,
        to_hf=mamba.nemotron_to_hf,
        # transformers reads attention_bias, and has no biases
        fixed={
            "sliding_window": (None,),
            "moe_latent_size": (None,),
        },
        facts={"gated_mlp": False},
        eps="layer_norm_epsilon",
        activation="mlp_hidden_act",
        others={"num_local_experts": "n_routed_experts"},
        unused=("mtp",),
        tensors=dataclasses.replace(
            _MAMBA_TENSORS,
            mlp_norm="norm",
            mlp="mixer.",
            is_halved=True,
            mixer="mixer.",
            mixers={**_MAMBA_TENSORS.mixers, "experts": _NEMOTRON_TENSORS},
        ),
    ),
    "gpt_oss": Family(
        ("GptOssForCausalLM",),
        keys=("initial_context_length", "experts_per_token"),
        same=BIAS,
        parts=(_GPT_OSS_EXPERTS,),
        facts={"attn_sinks": True},
        window=lambda i, read: bool((i + 1) % 2),
        has_mxfp4=True,
        tensors=Names(mixers={"experts": _GPT_OSS_TENSORS}),
    ),
    "seed_oss": Family(
        ("SeedOssForCausalLM",), same=(QKV_BIAS, ("attention_out_bias", "o_bias", False), *MLP_BIAS)
    ),
    "ernie4_5": Family(
        ("Ernie4_5ForCausalLM",),
        same=tuple(("use_bias", field, False) for field in ("qkv_bias", "o_bias", "mlp_bias")),
        stored={"interleaved": True},
    ),
    "ernie4_5_moe": Family(
        ("Ernie4_5_MoeForCausalLM",),
        keys=("num_nextn_predict_layers",),
        parts=(_ERNIE_EXPERTS,),
        fixed={"use_bias": (False, None)},
        stored={"interleaved": True},
        unused=("model.mtp_",),
        tensors=Names(mixers={"experts": _ERNIE_TENSORS}),
    ),
    "phimoe": Family(
        ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        keys=("input_jitter_noise",),
        same=(*BIAS, ("lm_head_bias", "head_bias", False)),
        parts=(_PHI_EXPERTS,),
        to_hf=_phimoe_to_hf,
        window="all",
        facts={"norm": "layer", "norm_bias": True},
        amplitude=("short_mscale", "long_mscale"),
        tensors=Names(mixers={"experts": MIXTRAL}),
    ),
    "helium": Family(
        ("HeliumForCausalLM",), same=(QKV_BIAS, *MLP_BIAS), stored={"interleaved": True}
    ),
    "olmo2": Family(
        ("Olmo2ForCausalLM",),
        same=BIAS,
        facts={"pre_norms": False, "post_norms": True, "qk_norm": "full"},
        tensors=OLMO,
    ),
    "olmo3": Family(
        ("Olmo3ForCausalLM",),
        same=BIAS,
        window=lambda i, read: bool((i + 1) % 4),
        is_local=True,
        facts={"pre_norms": False, "post_norms": True, "qk_norm": "full"},
        tensors=OLMO,
    ),
    "gemma2": Family(
        ("Gemma2ForCausalLM",),
        keys=("hidden_act",),
        same=(*BIAS, ("attn_logit_softcapping", "attn_softcap", None), _LOGIT_CAP),
        parts=(GEMMA_KEYS,),
        fixed={"use_bidirectional_attention": (None, False)},
        facts=_GEMMA,
        stored={"norm_offset": 1.0},
        activation="hidden_activation",
        window=lambda i, read: bool((i + 1) % 2),
        tensors=GEMMA,
    ),
    "gemma3_text": Family(
        ("Gemma3ForCausalLM",),
        defaults={"rope_local_base_freq": 10000.0, "rope_parameters": None},
        keys=("hidden_act", "sliding_window_pattern"),
        same=(*BIAS, _LOGIT_CAP),  # transformers reads attn_logit_softcapping, and caps nothing
        parts=(GEMMA_KEYS,),
        fixed={"use_bidirectional_attention": (None, False)},
        facts={**_GEMMA, "qk_norm": "head"},
        stored={"norm_offset": 1.0},
        activation="hidden_activation",
        window=every(6),
        is_local=True,
        writes_local_theta=True,
        tensors=GEMMA,
    ),
    "glm": _GLM,
    "glm4": dataclasses.replace(
        _GLM, architectures=("Glm4ForCausalLM",), facts={"post_norms": True}
    ),
    "glm4_moe": Family(
        ("Glm4MoeForCausalLM",),
        keys=("use_qk_norm", "num_nextn_predict_layers", "num_mtp_layers"),
        same=(QKV_BIAS,),
        parts=(_GLM_EXPERTS,),
        fields=lambda read: {"qk_norm": "head" if read.flag("use_qk_norm", False) else "none"},
        to_hf=lambda cfg: {"use_qk_norm": cfg.qk_norm == "head"},
        unused=("model.layers.{n_layers}.",),  # a draft of several tokens
        tensors=Names(mixers={"experts": SHARED}),
    ),
    "stablelm": Family(
        ("StableLmForCausalLM",),
        same=(
            ("use_qkv_bias", "qkv_bias", False),
            ("use_parallel_residual", "parallel_block", False),
        ),
        fixed={"qk_layernorm": (False, None)},
        facts={"norm": "layer", "norm_bias": True},
        eps="layer_norm_eps",
    ),
    "cohere": Family(
        ("CohereForCausalLM",),
        same=(*BIAS, ("logit_scale", "stored.logits", 0.0625)),
        fixed={"use_qk_norm": (False, None)},
        facts=_COHERE,
        stored={"interleaved": True},
        eps="layer_norm_eps",
    ),
    "cohere2": Family(
        ("Cohere2ForCausalLM",),
        keys=(
            "sliding_window_pattern",
            "order_of_interleaved_layers",
            "rotary_pct",
            "use_embedding_sharing",
            "use_gated_activation",
            "use_parallel_block",
            "use_parallel_embedding",
            "position_embedding_type",
        ),
        same=(*BIAS, ("logit_scale", "stored.logits", 0.0625)),
        fixed={"use_qk_norm": (False, None)},
        facts=_COHERE,
        stored={"interleaved": True},
        eps="layer_norm_eps",
        window=every(4),
        is_nope=lambda i, read, slides: not slides,
    ),
    "internlm3": Family(
        ("InternLM3ForCausalLM",),
        same=(
            ("qkv_bias", "qkv_bias", False),
            ("bias", "o_bias", False),
            ("bias", "mlp_bias", False),
        ),
        others={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    ),
}
