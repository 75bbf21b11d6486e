"""Options of the families of ``dense_cases`` to draw at random: a list is one key's values.

``test_parity_random`` draws them beside the sizes that all families share.
"""

from __future__ import annotations

from typing import Any

_FLAG = [True, False]
_BIAS = {"attention_bias": _FLAG}
_BIASES = {**_BIAS, "mlp_bias": _FLAG}
_SCALES = {
    "embedding_multiplier": [1.0, 12.0],
    "logits_scaling": [1.0, 8.0],
    "residual_multiplier": [1.0, 0.22],
    "attention_multiplier": [0.0625, 0.3],
}
_EXPERTS = {"num_experts_per_tok": [1, 2, 3]}
_SIGMOID = {
    **_EXPERTS,
    "moe_intermediate_size": [16, 24],
    "routed_scaling_factor": [1.0, 1.5],
    "norm_topk_prob": _FLAG,
}
_LEARNED = {"rope_theta": [10000.0]}  # which no layer reads
_GPT2 = {**_LEARNED, "activation_function": ["gelu_new", "gelu", "relu"]}
_THETAS = {"num_hidden_layers": [2], "layer_rope_theta": [None, [0.0, 1e4]], "rope_theta": [1e4]}
_CONV = {
    "num_hidden_layers": [3],
    "conv_L_cache": [2, 3, 4],
    "layer_types": [["conv", "full_attention", "conv"], ["full_attention", "conv", "conv"]],
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
}
_LATENT = {
    **_BIAS,
    "kv_lora_rank": [8, 16],
    "q_lora_rank": [None, 12],
    "qk_nope_head_dim": [6, 12],
    "qk_rope_head_dim": [4, 8],
    "v_head_dim": [6, 10],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 1e4},
        {**_YARN, "factor": 4.0},
        {**_YARN, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    ],
}
_TYPES = ("sliding_attention", "full_attention")
_GEMMA4 = {
    **_BIAS,
    "num_hidden_layers": [5],
    "layer_types": [
        [_TYPES[i] for i in order] for order in ((0, 1, 0, 0, 1), (1, 0, 0, 1, 1), (0, 1, 1, 0, 1))
    ],
    "sliding_window": [3, 9],
    "global_head_dim": [8, 16, 24],
    "attention_k_eq_v": _FLAG,
    "num_global_key_value_heads": [None, 1, 2],
    "final_logit_softcapping": [None, 3.0],
    "rope_parameters": [
        {
            _TYPES[0]: {"rope_type": "default", "rope_theta": 100.0},
            _TYPES[1]: {
                "rope_type": "proportional",
                "partial_rotary_factor": share,
                "rope_theta": theta,
            },
        }
        for share, theta in ((0.25, 1000.0), (0.5, 100.0), (1.0, 100.0))
    ],
}
_ORDER = {"rope_interleave": _FLAG}
_GROUPS = {
    **_LATENT,
    **_SIGMOID,
    "n_routed_experts": [8],
    "n_shared_experts": [1, 2],
    "n_group": [2, 4],
    "topk_group": [1, 2],
    "first_k_dense_replace": [0, 1],
    "num_experts_per_tok": [1, 2],
}
_INDEXED = {
    **_GROUPS,
    "q_lora_rank": [8, 12],
    "qk_rope_head_dim": [4],
    "index_n_heads": [24, 32],  # with few heads several scores are 0, and equal
    "index_head_dim": [8, 16],
    "index_topk": [4, 7, 20],
}
_MINICPM = {
    "scale_emb": [1, 12],
    "scale_depth": [None, 1.4],
    "dim_model_base": [None, 16],
}
FAMILIES: dict[str, dict[str, list[Any]]] = {
    "gemma": {**_BIAS, "hidden_act": ["gelu", "gelu_pytorch_tanh", "silu"]},
    "vaultgemma": {
        **_BIAS,
        "sliding_window": [3, 9],
        "query_pre_attn_scalar": [8, 16],
        "attn_logit_softcapping": [None, 2.0],
        "final_logit_softcapping": [None, 3.0],
    },
    "arcee": {**_BIASES, "hidden_act": ["relu2", "silu", "gelu"]},
    "nemotron": {**_BIASES, "partial_rotary_factor": [0.25, 0.5, 1.0], "head_dim": [8, 16]},
    "jais2": _BIASES,
    "starcoder2": {"use_bias": _FLAG, "sliding_window": [None, 3, 9]},
    "apertus": {**_BIAS, "hidden_act": ["xielu", "relu2"]},
    "hunyuan_v1_dense": _BIAS,
    "ministral3": {
        "sliding_window": [None, 9],
        "rope_parameters": [
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": factor,
                "original_max_position_embeddings": first,
                "llama_4_scaling_beta": beta,
            }
            for factor, first, beta in ((4.0, 16, 0.3), (8.0, 16, 0.1), (2.0, 40, 0.5))
        ],
    },
    "exaone": _BIASES,
    "exaone4": {"sliding_window": [3, 9], "sliding_window_pattern": [2, 3]},
    "iquestcoder": _BIASES,
    "hyperclovax": {**_SCALES, "mlp_bias": _FLAG, "use_post_norm": _FLAG},
    "granite_swa": {**_SCALES, **_THETAS, **_BIASES, "sliding_window": [3, 9]},
    "olmo": {**_BIAS, "clip_qkv": [None, 0.3, 1.0]},
    "olmo_hybrid": {
        "num_hidden_layers": [3],
        "num_attention_heads": [4],
        "num_key_value_heads": [2, 4],
        "linear_num_value_heads": [4],
        "linear_num_key_heads": [4],
        "linear_key_head_dim": [8],
        "linear_value_head_dim": [8, 12],
        "linear_allow_neg_eigval": _FLAG,
        "layer_types": [
            ["linear_attention", "full_attention", "linear_attention"],
            ["full_attention", "linear_attention", "full_attention"],
        ],
    },
    "falcon_h1": {
        **_BIASES,
        "num_hidden_layers": [1, 2],
        "mamba_d_ssm": [48],
        "mamba_n_heads": [6],
        "mamba_d_head": [8, "auto"],
        "mamba_n_groups": [1, 2, 3],
        "mamba_d_state": [8, 12],
        "mamba_d_conv": [2, 4],
        "mamba_conv_bias": _FLAG,
        "mamba_proj_bias": _FLAG,
        "projectors_bias": _FLAG,
        "mamba_rms_norm": _FLAG,
        "mamba_norm_before_gate": _FLAG,
        "embedding_multiplier": [1.0, 2.5],
        "lm_head_multiplier": [1.0, 0.5],
        "key_multiplier": [1.0, 0.3],
        "attention_in_multiplier": [1.0, 1.5],
        "attention_out_multiplier": [1.0, 0.7],
        "ssm_in_multiplier": [1.0, 1.25],
        "ssm_out_multiplier": [1.0, 0.3],
        "ssm_multipliers": [None, [0.35, 0.25, 0.18, 0.5, 0.4]],
        "mlp_multipliers": [None, [0.8, 0.6]],
    },
    "zamba2": {
        **_LEARNED,
        "tie_word_embeddings": [True],
        "num_attention_heads": [4],
        "head_dim": [16],
        "num_hidden_layers": [4],
        "layers_block_type": [
            ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            ["hybrid", "hybrid", "hybrid", "linear_attention"],
        ],
        "num_mem_blocks": [1, 2],
        "adapter_rank": [4, 8],
        "use_shared_attention_adapter": _FLAG,
        "use_mem_rope": _FLAG,
        "add_bias_linear": _FLAG,
        "n_mamba_heads": [4, 8],
        "mamba_ngroups": [1, 2],
        "mamba_d_state": [8, 12],
        "mamba_d_conv": [2, 4],
        "hidden_act": ["gelu", "silu"],
    },
    "lfm2": {**_CONV, "block_auto_adjust_ff_dim": _FLAG, "block_multiple_of": [8, 16]},
    "gpt2": _GPT2,
    "gpt_bigcode": {**_GPT2, "multi_query": _FLAG},
    "gpt_neo": {**_GPT2, "window_size": [3, 9], "num_hidden_layers": [2, 4]},
    "opt": {**_LEARNED, "enable_bias": _FLAG, "activation_function": ["relu", "gelu"]},
    "gptj": {
        "rotary_dim": [2, 4],
        "tie_word_embeddings": [False],
        "rope_theta": [10000.0],
        "activation_function": ["gelu_new", "relu"],
    },
    "gpt_neox": {
        "rotary_pct": [0.5, 1.0],
        "use_parallel_residual": _FLAG,
        "attention_bias": _FLAG,
        "hidden_act": ["gelu", "gelu_fast", "relu"],
    },
    "lara_mini": {
        **_BIAS,
        **_EXPERTS,
        "num_experts": [6],
        "moe_intermediate_size": [16, 24],
        "norm_topk_prob": _FLAG,
        "shared_expert_intermediate_size": [16, 40],
        "sliding_window": [3, 9],
        "linear_num_value_heads": [4],
        "linear_num_key_heads": [2, 4],
        "linear_key_head_dim": [8],
        "linear_value_head_dim": [8, 12],
        "linear_conv_kernel_dim": [2, 4],
        "num_hidden_layers": [3],
        "layer_types": [
            ["linear_attention", "sliding_attention", "full_attention"],
            ["sliding_attention", "linear_attention", "linear_attention"],
        ],
    },
    "dbrx": {
        "tie_word_embeddings": [False],
        "rms_norm_eps": [1e-5],
        "rope_theta": [None],
        "attn_config": [
            {"kv_n_heads": heads, "clip_qkv": limit, "rope_theta": theta}
            for heads, limit, theta in ((1, 99.0, 1e4), (2, 0.3, 500.0), (4, 1.0, 1e4))
        ],
        "ffn_config": [
            {
                "ffn_hidden_size": width,
                "moe_num_experts": count,
                "moe_top_k": active,
                "moe_normalize_expert_weights": power,
            }
            for width, count, active, power in (
                (16, 4, 1, None),
                (24, 6, 2, 1.0),
                (24, 6, 3, None),
                (40, 8, 4, 1.0),
            )
        ],
    },
    "phi": {"tie_word_embeddings": [False], "partial_rotary_factor": [0.5, 1.0]},
    "falcon": {
        "bias": _FLAG,
        "new_decoder_architecture": _FLAG,
        "multi_query": _FLAG,
        "activation": ["gelu", "relu"],
    },
    "dots1": {
        **_BIAS,
        **_SIGMOID,
        "n_routed_experts": [8],
        "n_shared_experts": [1, 2],
        "first_k_dense_replace": [0, 1],
        "sliding_window": [None, 9],
        "max_window_layers": [0, 1],
    },
    "exaone_moe": {
        **_SIGMOID,
        "num_experts": [8],
        "sliding_window": [3, 9],
        "sliding_window_pattern": [2, 3],
    },
    "flex_olmo": {**_BIAS, **_EXPERTS, "num_experts": [4, 6], "norm_topk_prob": _FLAG},
    "solar_open": {**_BIAS, **_SIGMOID, "n_routed_experts": [8], "n_shared_experts": [1, 2]},
    "sarvam_moe": {**_BIAS, **_SIGMOID, "num_experts": [8], "use_qk_norm": _FLAG},
    "granitemoeshared": {
        **_SCALES,
        **_BIAS,
        "num_local_experts": [4, 6],
        "shared_intermediate_size": [0, 40],
    },
    "granitemoe_swa": {
        **_SCALES,
        **_THETAS,
        "num_local_experts": [4, 6],
        "shared_intermediate_size": [0, 40],
        "sliding_window": [3, 9],
    },
    "hunyuan_v1_moe": {**_BIAS, "num_experts": [4, 6], "moe_topk": [1, 2, 3]},
    "hy_v3": {
        **_BIAS,
        **_EXPERTS,
        "moe_intermediate_size": [16, 24],
        "router_scaling_factor": [1.0, 1.5],
        "num_experts": [8],
        "num_shared_experts": [1, 2],
        "num_hidden_layers": [2, 3],
    },
    "lfm2_moe": {**_CONV, **_SIGMOID, "num_experts": [8], "num_dense_layers": [1, 2]},
    "nanochat": {
        **_BIAS,
        "hidden_act": ["relu2", "gelu"],
        "final_logit_softcapping": [None, 3.0, 15.0],
    },
    "aria_text": {**_BIAS, "moe_num_experts": [4, 6], "moe_topk": [1, 2, 3]},
    "apertus1p5_text": {**_BIAS, "hidden_act": ["xielu", "relu2"]},
    "mellum": {
        **_BIAS,
        **_EXPERTS,
        "num_experts": [6],
        "moe_intermediate_size": [16, 24],
        "norm_topk_prob": _FLAG,
        "num_hidden_layers": [2],
        "sliding_window": [3, 9],
        "layer_types": [
            ["sliding_attention", "full_attention"],
            ["full_attention", "full_attention"],
        ],
        "mlp_layer_types": [["sparse", "dense"], ["sparse", "sparse"]],
    },
    "flint": {
        **_BIAS,
        **_EXPERTS,
        "num_experts": [6],
        "moe_intermediate_size": [16, 24],
        "norm_topk_prob": _FLAG,
        "num_hidden_layers": [4, 5],
        "mlp_only_layers": [[0], [1]],
        "shared_expert_intermediate_size": [16, 40],
        "sliding_window": [3, 9],
    },
    "kolibri1": {
        **_EXPERTS,
        "num_experts": [6],
        "moe_intermediate_size": [16, 24],
        "norm_topk_prob": _FLAG,
        "num_hidden_layers": [2],
        "shared_expert_intermediate_size": [16, 40],
        "sliding_window": [3, 9],
        "layer_types": [
            ["sliding_attention", "full_attention"],
            ["full_attention", "sliding_attention"],
        ],
    },
    "afmoe": {
        **_EXPERTS,
        "num_experts": [6],
        "moe_intermediate_size": [16, 24],
        "route_scale": [1.0, 1.5],
        "num_dense_layers": [0, 1],
        "num_hidden_layers": [2, 3],
        "global_attn_every_n_layers": [2, 3],
        "sliding_window": [3, 9],
        "mup_enabled": _FLAG,
    },
    "cohere2_moe": {
        **_BIAS,
        **_EXPERTS,
        "num_experts": [6],
        "num_shared_experts": [0, 1, 2],
        "shared_expert_combination_strategy": ["sum", "average"],
        "expert_selection_fn": ["sigmoid", "softmax"],
        "norm_topk_prob": _FLAG,
        "num_hidden_layers": [3],
        "first_k_dense_replace": [0, 1],
        "prefix_dense_sliding_window_pattern": [1, 2],
        "prefix_dense_intermediate_size": [None, 40],
        "sliding_window": [3, 9],
        "sliding_window_pattern": [2, 3],
    },
    "deepseek_v2": {
        **_GROUPS,
        "topk_method": ["greedy", "group_limited_greedy"],
        "norm_topk_prob": [False],
    },
    "deepseek_v3": {**_GROUPS, **_ORDER},
    "sarvam_mla": {**_GROUPS, **_ORDER},
    "axk1": {**_GROUPS, **_ORDER, "q_lora_rank": [12]},
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": {**_INDEXED, "topk_group": [1]},
    "glm4_moe_lite": {**_GROUPS, **_ORDER, "topk_group": [1]},
    "youtu": {**_LATENT, **_ORDER},
    "minicpm": {**_BIAS, **_MINICPM},
    "minicpm3": {**_LATENT, **_MINICPM},
    "muse_glimmer_text": {
        "num_hidden_layers": [4, 6],
        "sliding_window": [3, 9],
        "post_norm_eps": [1e-8, 1e-2],
        "qk_scale_factor": [1.0, 3.87],
        "output_multiplier": [0.2, 1.0],
        "final_logit_softcapping": [3.0, 20.0],
    },
    "qwen3_vl_moe_text": {
        **_BIAS,
        **_EXPERTS,
        "num_experts": [4, 6],
        "moe_intermediate_size": [24, 40],  # 16: square matrices, whose order is not seen
        "decoder_sparse_step": [1, 2],
        "mlp_only_layers": [[], [0]],
    },
    "mimo_v2_flash": {
        **_BIAS,
        **_SIGMOID,
        "n_routed_experts": [8],
        "n_group": [1, 2, 4],
        "topk_group": [1],
        "num_key_value_heads": [1, 2],
        "head_dim": [24, 36],
        "v_head_dim": [6, 16, 24],
        "attention_value_scale": [None, 0.707],
        "num_hidden_layers": [3],
        "sliding_window": [3, 9],
        "layer_types": [
            [_TYPES[i] for i in order] for order in ((1, 0, 0), (0, 1, 0), (1, 1, 1), (0, 0, 0))
        ],
        "mlp_layer_types": [["dense", "sparse", "sparse"], ["sparse"] * 3],
        "rope_parameters": [
            {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
                for kind, theta in zip(_TYPES, thetas, strict=True)
            }
            for thetas in ((1e4, 5e6), (1e4, 1e4))
        ],
    },
    "minimax_m2": {
        **_EXPERTS,
        "num_local_experts": [8],
        "head_dim": [16],
        "rotary_dim": [8, 16],
    },
    "gemma4_text": {
        **_GEMMA4,
        "num_kv_shared_layers": [0, 1, 2, 3],
        "use_double_wide_mlp": _FLAG,
        "hidden_size_per_layer_input": [4, 6],  # without it transformers shares no keys
        "vocab_size_per_layer_input": [64],
        "enable_moe_block": _FLAG,
        "num_experts": [4, 6],
        "top_k_experts": [1, 3],
        "moe_intermediate_size": [16, 24],
    },
    "bitnet": {**_BIAS, "hidden_act": ["relu2", "silu"]},
    "gemma4_unified_text": {**_GEMMA4, "num_kv_shared_layers": [0]},
}
# Families whose classes know no other width of a head than hidden_size / num_attention_heads.
DIVIDED = (
    "starcoder2",
    "hyperclovax",
    "granite_swa",
    "olmo_hybrid",
    "lfm2",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "opt",
    "gptj",
    "gpt_neox",
    "bitnet",
    "dbrx",
    "falcon",
    "flex_olmo",
    "granitemoeshared",
    "granitemoe_swa",
    "lfm2_moe",
    "olmo",
    "phi",
)
# Families without groups of q heads that share k and v.
UNGROUPED = (
    *("gpt2", "gpt_neo", "opt", "gptj", "gpt_neox"),
    *("deepseek_v2", "deepseek_v3", "sarvam_mla", "axk1", "glm4_moe_lite", "youtu", "minicpm3"),
    *("deepseek_v32", "glm_moe_dsa"),
)
