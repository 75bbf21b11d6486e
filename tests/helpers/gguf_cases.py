"""GGUF files as llama.cpp's conversion writes them, from the Hugging Face form of a model.

Nothing of the loader's tables is used: names, metadata keys and what is folded are said again, by
``config.json``'s keys.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

from tests.helpers.gguf_parts import halved, joined, linear_attention, of_gpt_oss, of_kimi

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "ministral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm": "chatglm",
    "glm4": "glm4",
    "stablelm": "stablelm",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "qwen3_5_text": "qwen35",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "phimoe": "phimoe",
    "kimi_linear": "kimi-linear",
    "granitemoehybrid": "granitehybrid",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
}
_GRANITE = ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid")
_PERMUTED = ("mixtral", "llama", "mistral", "ministral", "smollm3", *_GRANITE)
_DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b",
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "block_sparse_moe.shared_experts.gate_proj": "ffn_gate_shexp",
    "block_sparse_moe.shared_experts.up_proj": "ffn_up_shexp",
    "block_sparse_moe.shared_experts.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "mlp.gate.e_score_correction_bias": "exp_probs_b",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b",
}
_LAYER = r"model\.layers\.(\d+)\."
_EXPERT = re.compile(
    _LAYER + r"(?:mlp|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(\w+)\.weight"
)
_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}
# Which of the two norms between attention and MLP "post_attention_layernorm" is.
_BEHIND = (
    "gemma2",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "seed_oss",
    "gpt_oss",
    "glm4_moe",
    *_DELTA,
)
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "head_dim": "attention.key_length",
    "num_key_value_heads": "attention.head_count_kv",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "num_shared_experts": "expert_shared_count",
    "num_experts_per_token": "expert_used_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "linear_head_dim": "kda.head_dim",
    "moe_num_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "conv_L_cache": "shortconv.l_cache",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "use_parallel_residual": "use_parallel_residual",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "mtp_num_hidden_layers": "nextn_predict_layers",
}
_ROPE = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write a key of a file's metadata. None leaves it out."""
    add = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    if value is not None:
        add[type(value)](key, value)


def write_gguf(
    path: Path,
    directory: Path,
    kind: Type | None = None,
    split: int = 0,
    is_whole: bool = False,
    **changes: Any,
) -> None:
    """The model of a Hugging Face directory as one file; kind: of matrices whose rows are whole
    blocks; split: tensors of each of several files; is_whole: whether an expert's gate and up,
    Qwen3-Next's q, k, v and z, and what makes Kimi's keys and values, are one tensor, and shapes
    do not begin with 1, as in older files; changes: of its metadata, None leaves a key out."""
    config = json.loads((directory / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    keys = _metadata(config, config["model_type"])
    for key, value in {**{f"{arch}.{k}": v for k, v in keys.items()}, **changes}.items():
        add_key(writer, key, value)
    behind = f"model.layers.{config['num_hidden_layers']}."  # where a head for drafts is
    tensors = {
        name.replace("mtp.layers.0.", behind)
        if ".layers." in name
        else name.replace("mtp.", f"{behind}mtp."): value
        for name, value in load_file(directory / "model.safetensors").items()
    }
    own = of_gpt_oss(tensors)
    if arch == "kimi-linear":
        own |= of_kimi(tensors, config, is_whole)
    stacked = _stacked(tensors)
    split_up = joined(stacked) if is_whole else halved(stacked, config)
    for name, value in {**split_up, **own}.items():
        if not name.startswith("blk."):
            name, value = _tensor(name, value, config)
        value = value[0] if is_whole and len(value) == 1 else value
        is_weight = value.ndim > 1 < len(value) and name.endswith(".weight")
        if kind is None or not is_weight or value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    rope = config.get("rope_scaling") or {}
    for which in ("long", "short"):
        if f"{which}_factor" in rope:
            factors = np.asarray(rope[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors, with those of single experts as one of all under GGUF's name."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        if (one := _EXPERT.fullmatch(name)) is None:
            found[name] = value
            continue
        part = _PARTS.get(one[3], one[3].removesuffix("_proj"))
        experts.setdefault(f"blk.{one[1]}.ffn_{part}_exps.weight", {})[int(one[2])] = value
    return found | {
        name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()
    }


def _metadata(config: dict[str, Any], kind: str) -> dict[str, Any]:
    keys = {_KEYS[k]: v for k, v in config.items() if k in _KEYS and v is not None}
    keys["vocab_size"] = config["vocab_size"]
    keys["attention.value_length"] = config["head_dim"]
    share = config.get("partial_rotary_factor", 1.0)
    keys["rope.dimension_count"] = int(share * config["head_dim"])
    if config.get("sliding_window") and "layer_types" in config:
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        keys["attention.sliding_window_pattern"] = slides
    if kind == "glm4_moe":
        keys |= {"expert_gating_func": 2, "expert_weights_norm": config["norm_topk_prob"]}
    if kind == "kimi_linear":
        has_heads = [int(kind == "full_attention") for kind in config["layer_types"]]
        rank, d_rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        keys |= {
            "expert_gating_func": 2,
            "attention.head_count_kv": has_heads,
            "attention.key_length": rank + d_rope,
            "attention.key_length_mla": config["qk_nope_head_dim"] + d_rope,
        }
        del keys["attention.value_length"]
    if kind in ("granitemoehybrid", "lfm2", "lfm2_moe"):
        kv, kinds = config["num_key_value_heads"], config["layer_types"]
        keys["attention.head_count_kv"] = [kv * (kind == "full_attention") for kind in kinds]
    if kind == "lfm2_moe":
        keys["expert_gating_func"] = 2
        del keys["expert_weights_scale"], keys["expert_shared_count"]
    if kind == "granitemoehybrid":
        keys["ssm.inner_size"] = config["mamba_n_heads"] * config["mamba_d_head"]
        keys["rope.scaling.finetuned"] = config["position_embedding_type"] == "rope"
    if kind in _DELTA:
        heads, n_mtp = config["linear_num_value_heads"], config.get("mtp_num_hidden_layers", 0)
        keys["ssm.inner_size"] = heads * config["linear_value_head_dim"]
        is_recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
        keys["attention.recurrent_layers"] = is_recurrent + [False] * n_mtp
        keys["full_attention_interval"] = 4
        keys["rope.dimension_sections"] = [11, 11, 10, 0]
        keys["block_count"] += n_mtp
    rope = config.get("rope_scaling") or {}
    parameters = config.get("rope_parameters") or {}
    if "sliding_attention" in parameters:
        keys["rope.freq_base_swa"] = float(parameters["sliding_attention"]["rope_theta"])
        rope = {k: v for k, v in parameters["full_attention"].items() if k != "rope_theta"}
    if rope.get("rope_type", "default") == "longrope":
        original = config["original_max_position_embeddings"]
        growth = np.log(config["max_position_embeddings"] / original) / np.log(original)
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + growth))
        keys["rope.scaling.original_context_length"] = original
    elif rope.get("rope_type", "default") != "default":
        keys["rope.scaling.type"] = rope["rope_type"]
        keys |= {f"rope.scaling.{_ROPE[k]}": v for k, v in rope.items() if k in _ROPE}
    return keys


def _tensor(name: str, value: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    kind = config["model_type"]
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        value = value + 1
    if kind in _PERMUTED and (found := re.search(r"\.([qk])_proj\.", name)):
        heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        halves = value.reshape(heads, 2, -1, *value.shape[1:])
        value = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
    if name.endswith(".conv.conv.weight"):
        value = value.squeeze(1)
    if kind in _DELTA:
        name, value = linear_attention(name, value, config)
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        name = f"{name}.bias"
    stem, leaf = name.rsplit(".", 1)
    layer = re.match(r"model\.layers\.(\d+)\.", stem)
    stem = stem[layer.end() :] if layer else stem
    between = "post_attention_norm" if kind in _BEHIND else "ffn_norm"
    if stem.endswith("A_log"):
        return f"blk.{layer[1]}.ssm_a", value
    new = between if stem == "post_attention_layernorm" else _NAMES.get(stem, stem)
    return f"{f'blk.{layer[1]}.' if layer else ''}{new}.{leaf}", value
