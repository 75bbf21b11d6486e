"""Options of the families that ``parity_cases`` has itself, to draw as in ``random_options``."""

from __future__ import annotations

from typing import Any

_FLAG = [True, False]
_BIAS = {"attention_bias": _FLAG}
_BIASES = {**_BIAS, "mlp_bias": _FLAG}
_WINDOW = {"use_sliding_window": _FLAG, "sliding_window": [3, 9], "max_window_layers": [0, 1, 2]}
_TYPES = {
    "num_hidden_layers": [2],
    "sliding_window": [3, 9],
    "layer_types": [
        ["sliding_attention", "full_attention"],
        ["full_attention", "sliding_attention"],
    ],
}
_LLAMA3 = [
    {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
    }
    for factor in (8.0, 32.0)
]
_YARN = [
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": factor,
        "original_max_position_embeddings": 32,
    }
    for factor in (4.0, 16.0)
]
_LINEAR = [{"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}]
_DEFAULT = [{"rope_type": "default", "rope_theta": 10000.0}]
_CAPS = {
    "sliding_window": [3, 9],
    "query_pre_attn_scalar": [8, 16],
    "attn_logit_softcapping": [None, 2.0],
    "final_logit_softcapping": [None, 3.0],
}
_SCALES = {
    "embedding_multiplier": [1.0, 12.0],
    "logits_scaling": [1.0, 8.0],
    "residual_multiplier": [1.0, 0.22],
    "attention_multiplier": [0.0625, 0.3],
}
_MIXED = [
    ["linear_attention", "full_attention", "linear_attention"],
    ["full_attention", "linear_attention", "full_attention"],
]
_MAMBA = {
    "num_hidden_layers": [3],
    "mamba_n_heads": [4, 8],
    "mamba_d_head": ["auto"],
    "mamba_d_state": [8, 12],
    "mamba_n_groups": [1, 2, 4],
    "mamba_d_conv": [2, 4],
    "mamba_conv_bias": _FLAG,
}
FAMILIES: dict[str, dict[str, list[Any]]] = {
    "llama": {**_BIASES, "rope_parameters": _DEFAULT + _LINEAR + _LLAMA3 + _YARN},
    "internlm3": {"bias": _FLAG, "rope_parameters": _DEFAULT + _LINEAR},
    "mistral": {"sliding_window": [None, 3, 9], "rope_parameters": _DEFAULT + _YARN},
    "ministral": _TYPES,
    "qwen2": _WINDOW,
    "qwen3": {**_BIAS, **_WINDOW},
    "qwen3_5_text": {
        **_BIAS,
        "num_hidden_layers": [4],
        "linear_num_value_heads": [4],
        "linear_num_key_heads": [2, 4],
        "linear_key_head_dim": [8],
        "linear_value_head_dim": [8, 12],
        "linear_conv_kernel_dim": [2, 4],
        "head_dim": [16],
    },
    "phi3": {"sliding_window": [None, 3, 9], "partial_rotary_factor": [0.5, 1.0]},
    "cwm": {"sliding_window": [3, 9], "rope_parameters": _LLAMA3},
    "smollm3": {
        **_BIASES,
        "no_rope_layer_interval": [2, 3],
        "use_sliding_window": _FLAG,
        "sliding_window": [3, 9],
    },
    "granite": {**_SCALES, **_BIASES},
    "mamba2": {
        "rope_theta": [1e4],  # which no layer reads
        "num_hidden_layers": [1, 2, 3],
        "num_heads": [4],
        "head_dim": [16],
        "expand": [2],
        "state_size": [8, 12],
        "n_groups": [1, 2, 4],
        "conv_kernel": [2, 4],
        "use_bias": _FLAG,
        "use_conv_bias": _FLAG,
    },
    "bamba": {
        **_MAMBA,
        **_BIASES,
        "attn_layer_indices": [[1], [0, 2], [2]],
        "mamba_proj_bias": _FLAG,
    },
    "granitemoehybrid": {
        "rope_theta": [1e4],
        **_SCALES,
        **_MAMBA,
        **_BIAS,
        "num_local_experts": [0, 6],
        "num_experts_per_tok": [1, 2, 3],
        "shared_intermediate_size": [24, 40],
        "position_embedding_type": ["rope", None],
        "layer_types": _MIXED,
    },
    "nemotron_h": {
        "tie_word_embeddings": [False],  # transformers' class has its own head in any case
        "rope_theta": [1e4],
        "mlp_bias": _FLAG,
        "num_hidden_layers": [1],
        "layers_block_type": [
            ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
            ["full_attention", "mlp", "linear_attention", "mlp", "linear_attention"],
            ["linear_attention", "moe", "full_attention", "mlp"],
            ["full_attention", "linear_attention", "moe"],
        ],
        "mamba_num_heads": [4, 8],
        "mamba_head_dim": [8, 16],
        "ssm_state_size": [8, 12],
        "n_groups": [1, 2, 4],
        "conv_kernel": [2, 4],
        "use_conv_bias": _FLAG,
        "use_bias": _FLAG,
        "n_routed_experts": [8],
        "num_experts_per_tok": [1, 2, 3],
        "moe_intermediate_size": [16, 24],
        "moe_shared_expert_intermediate_size": [24, 40],
        "routed_scaling_factor": [1.0, 2.5],
        "norm_topk_prob": _FLAG,
        "n_group": [1, 2],
        "topk_group": [1],
    },
    "seed_oss": {**_BIASES, "attention_out_bias": _FLAG},
    "ernie4_5": {"use_bias": _FLAG},
    "helium": _BIASES,
    "olmo2": {**_BIAS, "rope_parameters": _DEFAULT + _YARN},
    "olmo3": {**_BIAS, **_TYPES, "rope_parameters": _DEFAULT + _YARN},
    "gemma2": {**_BIAS, **_CAPS},
    "gemma3_text": {
        **_BIAS,
        "sliding_window": [3, 9],
        "query_pre_attn_scalar": [8, 16],
        "sliding_window_pattern": [2, 3],
        "rope_local_base_freq": [100.0, 10000.0],
    },
    "glm": {**_BIAS, "partial_rotary_factor": [0.5, 1.0]},
    "glm4": {**_BIAS, "partial_rotary_factor": [0.5, 1.0]},
    "stablelm": {
        "hidden_size": [64],
        "use_parallel_residual": _FLAG,
        "use_qkv_bias": _FLAG,
        "partial_rotary_factor": [0.25, 0.5],
    },
    "cohere": {**_BIAS, "logit_scale": [0.25, 0.5]},
    "cohere2": {
        **_BIAS,
        "logit_scale": [0.25, 0.5],
        "sliding_window": [3, 9],
        "sliding_window_pattern": [2, 3],
    },
}
# Families whose classes know no other width of a head than hidden_size / num_attention_heads.
DIVIDED = ("phi3", "granite", "bamba", "granitemoehybrid", "helium", "stablelm", "cohere")
