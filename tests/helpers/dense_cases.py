"""Tiny models of most families of ``hf.families``.

``parity_cases`` adds them to its own: (model type, case, what its config.json says besides sizes).
"""

from __future__ import annotations

from typing import Any

EPS = {
    **dict.fromkeys(("nemotron", "lfm2", "lfm2_moe"), "norm_eps"),
    **dict.fromkeys(("jais2", "phi", "gpt_neox"), "layer_norm_eps"),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo"), "layer_norm_epsilon"),
    **dict.fromkeys(("gptj", "falcon", "nemotron_h"), "layer_norm_epsilon"),
    "starcoder2": "norm_epsilon",
    **dict.fromkeys(("cohere2_moe", "dbrx"), "layer_norm_eps"),
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
}
_DIVIDED = {"head_dim": 8}  # the classes know no other width than hidden_size / heads
DEFAULT = (
    "hunyuan_v1_dense",
    "ministral3",
    "gpt_neo",
    "deepseek_v3",
    "nanochat",
    "gemma4_text",
    "gemma4_text-experts",
    "bitnet",
    "mimo_v2_flash",
    "muse_glimmer_text",
)  # one of each mechanism that no other case has
_SIGMOID = {
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
}
_ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
_MHA = {"head_dim": 8, "num_key_value_heads": 4}
_RANKS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
_LATENT = {**_SIGMOID, **_RANKS, "num_hidden_layers": 3, "n_routed_experts": 8}
_INDEXED = {
    **_LATENT,
    "first_k_dense_replace": 1,
    "index_n_heads": 32,  # with few heads several scores are 0, and equal
    "index_head_dim": 16,
    "index_topk": 12,
}
_MSCALE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
_FALCON = {
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
}
_ZAMBA = {
    "head_dim": 16,  # of both halves of the input
    "num_key_value_heads": 4,
    "hidden_act": "gelu",
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "mamba_d_state": 12,
    "adapter_rank": 6,
    "tie_word_embeddings": True,
}
_DBRX = {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 3}
_DBRX |= {"moe_normalize_expert_weights": 1.0}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA4 = {
    "sliding_window": 9,
    "global_head_dim": 16,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 3.0,
    "layer_types": [_SLIDING, _FULL],
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        _FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000.0,
        },
    },
}
GAP: tuple[str, str, dict[str, Any]] = ("", "", {})  # takes a position, which is a case's seed
FAMILY_CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gemma", "", {"tie_word_embeddings": True, "head_dim": 16}),
    ("gemma", "gelu", {"hidden_act": "gelu", "attention_bias": True}),
    (
        "vaultgemma",
        "",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    ("arcee", "", {}),
    ("arcee", "bias", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("nemotron", "", {}),
    ("nemotron", "bias", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("jais2", "", {}),
    ("starcoder2", "", {"sliding_window": 9, **_DIVIDED}),
    ("starcoder2", "no-bias", {"use_bias": False, "tie_word_embeddings": True, **_DIVIDED}),
    ("apertus", "", {"attention_bias": True}),
    ("hunyuan_v1_dense", "", {}),
    (
        "hunyuan_v1_dense",
        "alpha",
        {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}, "head_dim": 16},
    ),
    (
        "ministral3",
        "",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        },
    ),
    ("exaone", "", {"attention_bias": True}),
    ("exaone4", "", {"sliding_window": 9, "sliding_window_pattern": 2}),
    ("exaone4", "full", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("iquestcoder", "", {}),
    ("hyperclovax", "", {**_GRANITE, **_DIVIDED}),
    ("hyperclovax", "no-post-norm", {"use_post_norm": False, "mlp_bias": True, **_DIVIDED}),
    (
        "granite_swa",
        "",
        {**_GRANITE, "sliding_window": 9, "layer_rope_theta": [0.0, 10000.0], **_DIVIDED},
    ),
    ("olmo", "", {}),
    (
        "olmo_hybrid",
        "",
        {
            "num_hidden_layers": 3,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **_DIVIDED,
        },
    ),
    (
        "olmo_hybrid",
        "no-positions",
        {
            "num_hidden_layers": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            **_DIVIDED,
        },
    ),
    (
        "lfm2",
        "",
        {
            "num_hidden_layers": 3,
            "block_multiple_of": 16,
            "layer_types": ["conv", "full_attention", "conv"],
            **_DIVIDED,
        },
    ),
    ("gpt2", "", _MHA),
    *[GAP] * 1,
    ("gpt_bigcode", "", {**_DIVIDED, "num_key_value_heads": 1}),
    ("gpt_bigcode", "heads", {**_MHA, "multi_query": False}),
    ("gpt_neo", "", {**_MHA, "window_size": 9}),
    ("opt", "", {**_MHA, "tie_word_embeddings": True}),
    ("opt", "no-bias", {**_MHA, "enable_bias": False, "activation_function": "gelu"}),
    *[GAP] * 2,
    ("gptj", "", {**_MHA, "rotary_dim": 4}),
    *[GAP] * 1,
    ("gpt_neox", "", {**_MHA, "rotary_pct": 0.5}),
    (
        "gpt_neox",
        "serial",
        {
            **_MHA,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rotary_pct": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    ("phi", "", {}),
    ("falcon", "", {**_DIVIDED}),
    ("falcon", "heads", {**_MHA, "multi_query": False, "parallel_attn": False, "bias": True}),
    (
        "falcon",
        "new",
        {**_DIVIDED, "new_decoder_architecture": True, "tie_word_embeddings": True},
    ),
    (
        "falcon",
        "new-one-norm",
        {**_DIVIDED, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ),
    (
        "dots1",
        "",
        {
            **_SIGMOID,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "sliding_window": 9,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    (
        "exaone_moe",
        "",
        {**_SIGMOID, "num_experts": 8, "sliding_window": 9, "sliding_window_pattern": 2},
    ),
    ("flex_olmo", "", {"num_experts": 6, "num_experts_per_tok": 3, **_DIVIDED}),
    ("solar_open", "", {**_SIGMOID, "n_routed_experts": 8, "norm_topk_prob": False}),
    ("sarvam_moe", "", {**_SIGMOID, "num_experts": 8, "num_shared_experts": 2}),
    ("sarvam_moe", "plain", {**_SIGMOID, "num_experts": 8, "use_qk_norm": False}),
    (
        "granitemoeshared",
        "",
        {**_GRANITE, **_DIVIDED, "num_local_experts": 6, "shared_intermediate_size": 40},
    ),
    (
        "granitemoe_swa",
        "",
        {
            **_GRANITE,
            **_DIVIDED,
            "num_local_experts": 6,
            "shared_intermediate_size": 0,
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
    ),
    ("hunyuan_v1_moe", "", {"num_experts": 6, "moe_topk": [3, 3]}),
    (
        "lfm2_moe",
        "",
        {
            **_SIGMOID,
            **_DIVIDED,
            "num_experts": 8,
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
            "tie_word_embeddings": True,
        },
    ),
    (
        "minimax_m2",
        "",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "head_dim": 16,
            "rotary_dim": 8,
        },
    ),
    (
        "hy_v3",
        "",
        {
            "moe_intermediate_size": 24,
            "num_experts_per_tok": 3,
            "router_scaling_factor": 1.5,
            "num_experts": 8,
            "num_shared_experts": 2,
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "attention_bias": True,
        },
    ),
    (
        "deepseek_v2",
        "",
        {
            **_LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "rope_parameters": _MSCALE,
        },
    ),
    (
        "deepseek_v2",
        "groups",
        {
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
        },
    ),
    (
        "deepseek_v3",
        "",
        {
            **_LATENT,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": _MSCALE,
            "attention_bias": True,
        },
    ),
    (
        "deepseek_v3",
        "halves",
        {
            **_LATENT,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 3,
            "rope_interleave": False,
            "q_lora_rank": None,
        },
    ),
    ("glm4_moe_lite", "", {**_LATENT, "v_head_dim": 16}),
    ("sarvam_mla", "", {**_LATENT, "q_lora_rank": None, "first_k_dense_replace": 1}),
    ("axk1", "", {**_LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}),
    ("youtu", "", _RANKS),
    ("minicpm3", "", {**_RANKS, "v_head_dim": 8, "tie_word_embeddings": True}),
    ("minicpm3", "unscaled", {**_RANKS, "scale_emb": 1, "scale_depth": None, "q_lora_rank": None}),
    (
        "aria_text",
        "",
        {"moe_num_experts": 6, "moe_topk": 3, "intermediate_size": 24, "attention_bias": True},
    ),
    ("apertus1p5_text", "", {}),
    (
        "mellum",
        "",
        {
            **_ROUTED,
            "num_experts": 6,
            "num_hidden_layers": 3,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    (
        "flint",
        "",
        {
            **_ROUTED,
            "num_experts": 6,
            "num_hidden_layers": 4,
            "mlp_only_layers": [0],
            "shared_expert_intermediate_size": 40,
            "sliding_window": 9,
        },
    ),
    (
        "kolibri1",
        "",
        {
            **_ROUTED,
            "num_experts": 6,
            "shared_expert_intermediate_size": 40,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    (
        "afmoe",
        "",
        {
            "moe_intermediate_size": 24,
            "num_experts_per_tok": 3,
            "route_scale": 1.5,
            "num_experts": 8,
            "num_dense_layers": 1,
            "num_hidden_layers": 3,
            "global_attn_every_n_layers": 2,
            "sliding_window": 9,
            "mup_enabled": True,
        },
    ),
    (
        "cohere2_moe",
        "",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "intermediate_size": 24,
            "prefix_dense_intermediate_size": 40,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "sliding_window_pattern": 2,
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
    ),
    (
        "cohere2_moe",
        "sigmoid",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "rms_norm_eps": 1e-5,
            "intermediate_size": 24,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
        },
    ),
    ("nanochat", "", {"head_dim": 16}),
    *[GAP] * 1,
    (
        "falcon_h1",
        "",
        {
            **_FALCON,
            "num_hidden_layers": 2,
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.5,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.24,
            "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.4],
            "mlp_multipliers": [0.8, 0.6],
        },
    ),
    (
        "falcon_h1",
        "bias",
        {
            **_FALCON,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "attention_in_multiplier": 1.2,
            "ssm_in_multiplier": 0.8,
            "key_multiplier": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    (
        "gemma4_text",
        "",
        {
            **_GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 64,
        },
    ),
    (
        "gemma4_text",
        "experts",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 64,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
    ),
    (
        "gemma4_unified_text",
        "",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
        },
    ),
    *[GAP] * 15,
    ("olmo", "clip", {"clip_qkv": 0.5, "tie_word_embeddings": True}),
    *[GAP] * 2,
    ("bitnet", "", _DIVIDED),
    ("bitnet", "silu", {**_DIVIDED, "hidden_act": "silu", "attention_bias": True}),
    (
        "nemotron_h",
        "experts",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]
            + ["linear_attention", "mlp"],
            "num_hidden_layers": 6,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 12,
            "n_groups": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "n_group": 2,
            "topk_group": 1,
            "mlp_bias": True,
        },
    ),
    (
        "zamba2",
        "",
        {
            **_ZAMBA,
            "num_hidden_layers": 5,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention"]
            + ["hybrid"],
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        },
    ),
    (
        "zamba2",
        "bias",
        {
            **_ZAMBA,
            "num_hidden_layers": 3,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "add_bias_linear": True,
            "num_key_value_heads": 2,
        },
    ),
    ("internlm3", "", {"head_dim": 16}),
    ("internlm3", "bias", {"qkv_bias": True, "bias": True, "tie_word_embeddings": True}),
    ("minicpm", "", {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}),
    ("minicpm", "unscaled", {"tie_word_embeddings": True, "scale_depth": None}),
    *[GAP] * 2,
    (
        "lara_mini",
        "",
        {
            **_ROUTED,
            "num_hidden_layers": 5,
            "num_experts": 6,
            "shared_expert_intermediate_size": 40,
            "sliding_window": 9,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        },
    ),
    (
        "dbrx",
        "",
        {**_DIVIDED, "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5}, "ffn_config": _DBRX},
    ),
    (
        "dbrx",
        "unnormalized",
        {
            **_DIVIDED,
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 1000.0},
            "ffn_config": {**_DBRX, "moe_normalize_expert_weights": None},
        },
    ),
    ("deepseek_v32", "", {**_INDEXED, "n_group": 2, "topk_group": 1, "rope_parameters": _MSCALE}),
    ("glm_moe_dsa", "", {**_INDEXED, "v_head_dim": 16}),
    (
        "mistral4",
        "",
        {
            **_LATENT,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_MSCALE, "llama_4_scaling_beta": 0.3},
        },
    ),
    (
        "muse_glimmer_text",
        "",
        {
            "num_hidden_layers": 5,
            "sliding_window": 9,
            "post_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    (
        "qwen3_vl_moe_text",
        "",
        {
            **_ROUTED,
            "num_experts": 6,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    (
        "mimo_v2_flash",
        "",
        {
            **_SIGMOID,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "attention_bias": True,
        },
    ),
)
# Families without a class in transformers, and a family whose class computes the same. None: there
# is no such family, and a test of their own compares them with their authors' code.
ORACLES: dict[str, str | None] = {"minicpm": "granite"}
# Text decoders that have no class of their own, with a small vision part for the class that does.
WRAPPED: dict[str, Any] = {
    "muse_glimmer_text": {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    },
    "qwen3_vl_moe_text": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
    },
}
NAMES = tuple(f"{kind}{f'-{case}' if case else ''}" for kind, case, _ in FAMILY_CASES if kind)
# Cases whose directory transformers does not write: it has no class, or, for OLMo Hybrid, it writes
# the convolutions in three equal parts, which are not q, k and v.
UNWRITTEN = (
    *("olmo_hybrid", "internlm3", "internlm3-bias"),
    *(name for name in NAMES if name.partition("-")[0] in {**ORACLES, **WRAPPED}),
)
