"""Tiny random models of every Llama family and option, and transformers' answers for them.

Weights come from ``seeded``; ``reference`` needs torch and transformers and also makes the golden
file that stands in for it elsewhere (``golden/make_llama_golden.py``).
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.config import config_from_hf
from jaxllama.config import ModelConfig, RopeConfig
from tests.helpers import dense_cases
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

GOLDEN = Path(__file__).parents[1] / "golden" / "llama.npz"
LENGTH, PROMPT, NEW = 80, 24, 64  # tokens scored at once; tokens continued, and by how many
SCORED = np.array([0, 1, 7, 20, 31, 32, 33, 47, 63, 79])  # positions whose logits are kept

_BASE = LLAMA.replace(vocab_size=64, max_position=128, eos_token_ids=())


def _rope(scaling: str, factor: float, **options: Any) -> ModelConfig:
    rope = RopeConfig(10000.0, scaling, factor, **options)  # type: ignore[arg-type]
    longest = int((rope.original_max_position or 32) * factor)
    return _BASE.replace(rope=rope, max_position=max(longest, 32), head_dim=16)


EPS = {
    **dict.fromkeys(("stablelm", "cohere", "cohere2"), "layer_norm_eps"),
    **dict.fromkeys(("mamba2", "nemotron_h"), "layer_norm_epsilon"),
    **dense_cases.EPS,
}


def _family(kind: str, case: str, **options: Any) -> ModelConfig:
    """The ModelConfig of a tiny config.json of that model type."""
    eps = EPS.get(kind, "rms_norm_eps")
    config = {
        "model_type": kind,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        eps: 1e-5,
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    return config_from_hf({**config, **options}, "tiny")


_LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.2, 2.0, 3.0, 4.0],
}
_LONGROPE = {
    "rope_scaling": _LONG,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_DELTA = {
    "num_hidden_layers": 3,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_SIGMOID = {"moe_intermediate_size": 24, "routed_scaling_factor": 1.5}
_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
}
_MAMBA2 = {
    "num_hidden_layers": 3,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 12,
    "n_groups": 2,
    "expand": 2,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "tie_word_embeddings": True,
    "head_dim": 8,
}
# (model type, case, what its config.json says besides the sizes): every option of each family
FAMILY_CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("qwen3", "", {}),
    (
        "qwen3",
        "window-bias",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    ("phi3", "", {}),
    ("phi3", "window", {"sliding_window": 9}),
    ("phi3", "longrope", _LONGROPE),
    (
        "phi3",
        "partial-longrope",
        {
            **_LONGROPE,
            "original_max_position_embeddings": 96,
            "head_dim": 16,
            "hidden_size": 64,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    ("cwm", "", {"sliding_window": 9, "rope_parameters": _LLAMA3}),
    ("smollm3", "", {"tie_word_embeddings": True, "no_rope_layer_interval": 2}),
    (
        "smollm3",
        "window-bias",
        {
            "no_rope_layers": [0, 1],
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    (
        "granite",
        "",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "tie_word_embeddings": True,
        },
    ),
    (
        "granite",
        "bias",
        {
            "embedding_multiplier": 6.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    ("seed_oss", "", {}),
    ("seed_oss", "bias", {"attention_out_bias": True, "mlp_bias": True}),
    ("ernie4_5", "", {"tie_word_embeddings": True}),
    ("ernie4_5", "bias", {"use_bias": True}),
    ("helium", "", {}),
    ("olmo2", "", {}),
    ("olmo2", "bias-yarn", {"attention_bias": True, "rope_scaling": _YARN}),
    ("olmo3", "", {"sliding_window": 9, "num_hidden_layers": 4}),
    (
        "olmo3",
        "yarn",
        {
            "sliding_window": 9,
            "rope_scaling": _YARN,
            "rope_theta": 500000.0,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    (
        "gemma2",
        "",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    (
        "gemma2",
        "uncapped",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    (
        "gemma3_text",
        "",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 16,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 100.0,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    (
        "gemma3_text",
        "layer-types",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    ("glm", "", {}),
    ("glm4", "", {}),
    ("glm4", "no-bias", {"attention_bias": False, "partial_rotary_factor": 1.0}),
    ("stablelm", "", {"hidden_size": 64, "head_dim": 16}),
    (
        "stablelm",
        "parallel-bias",
        {"hidden_size": 64, "head_dim": 16, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    ("cohere", "", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    ("cohere", "bias", {"logit_scale": 0.5, "attention_bias": True}),
    (
        "cohere2",
        "",
        {
            "sliding_window": 9,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "logit_scale": 0.25,
        },
    ),
    ("cohere2", "pattern", {"sliding_window": 9, "sliding_window_pattern": 2}),
    ("qwen3_next", "", {**_DELTA, "num_experts": 0}),
    (
        "qwen3_next",
        "bias",
        {
            **_DELTA,
            "num_experts": 8,
            "mlp_only_layers": [0, 1, 2],
            "attention_bias": True,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
    ),
    ("qwen3_5_text", "", {**_DELTA, "num_hidden_layers": 4, "layer_types": None}),
    ("qwen3_5_text", "bias", {**_DELTA, "attention_bias": True, "tie_word_embeddings": True}),
    (
        "kimi_linear",
        "",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 4,
            "v_head_dim": 12,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    ("mixtral", "", {"num_local_experts": 4}),
    ("mixtral", "window", {"sliding_window": 9, "num_local_experts": 6, "num_experts_per_tok": 3}),
    ("olmoe", "", {"num_experts": 8, "num_experts_per_tok": 3}),
    (
        "olmoe",
        "normalized-bias",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    ("qwen2_moe", "", {**_MOE, "shared_expert_intermediate_size": 40}),
    (
        "qwen2_moe",
        "mixed",
        {
            **_MOE,
            "shared_expert_intermediate_size": 16,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
    ),
    ("qwen3_moe", "", {**_MOE, "norm_topk_prob": True}),
    (
        "qwen3_moe",
        "mixed-window",
        {
            **_MOE,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    ("qwen3_next", "experts", {**_DELTA, **_MOE, "shared_expert_intermediate_size": 16}),
    (
        "qwen3_next",
        "mixed-experts",
        {
            **_DELTA,
            **_MOE,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    (
        "qwen3_5_moe_text",
        "",
        {
            **_DELTA,
            **_MOE,
            "num_hidden_layers": 4,
            "layer_types": None,
            "intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
        },
    ),
    (
        "granitemoe",
        "",
        {
            "num_local_experts": 6,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "tie_word_embeddings": True,
        },
    ),
    (
        "glm4_moe",
        "",
        {
            **_SIGMOID,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "head_dim": 16,
        },
    ),
    (
        "glm4_moe",
        "groups",
        {
            **_SIGMOID,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 0,
            "head_dim": 16,
        },
    ),
    (
        "kimi_linear",
        "experts",
        {
            **_SIGMOID,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "num_experts": 8,
            "num_experts_per_token": 3,
            "num_shared_experts": 1,
            "num_expert_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 4,
            "v_head_dim": 12,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    (
        "gpt_oss",
        "",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    (
        "ernie4_5_moe",
        "",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 3,
            "moe_layer_interval": 2,
        },
    ),
    (
        "phimoe",
        "",
        {
            "num_local_experts": 6,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
            "original_max_position_embeddings": 96,
            "max_position_embeddings": 256,
            "rope_scaling": {**_LONG, "short_mscale": 1.2, "long_mscale": 1.2},
        },
    ),
    ("mamba2", "", _MAMBA2),
    (
        "mamba2",
        "bias",
        {
            **_MAMBA2,
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 2,
            "tie_word_embeddings": True,
        },
    ),
    ("bamba", "", {**_MAMBA, "attn_layer_indices": [1], "head_dim": 8}),
    (
        "granitemoehybrid",
        "",
        {
            **_GRANITE,
            **_MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    (
        "granitemoehybrid",
        "experts",
        {
            **_GRANITE,
            **_MAMBA,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
    ),
    (
        "nemotron_h",
        "",
        {
            "layers_block_type": ["linear_attention", "mlp", "linear_attention"]
            + ["full_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 12,
            "n_groups": 2,
            "num_hidden_layers": 5,
        },
    ),
    *dense_cases.FAMILY_CASES,
)

CASES: dict[str, ModelConfig] = {
    "llama-mha": _BASE.replace(n_kv_heads=4, norm_eps=1e-6),
    "llama-gqa": _BASE,
    "llama-mqa": _BASE.replace(n_kv_heads=1),
    "llama-wide-heads": _BASE.replace(head_dim=16, rope=RopeConfig(theta=500000.0)),
    "smollm2-tied": _BASE.replace(tie_embeddings=True),
    "llama-attention-bias": _BASE.replace(qkv_bias=True, o_bias=True),
    "llama-mlp-bias": _BASE.replace(mlp_bias=True),
    "mistral-window": _BASE.replace(sliding_window=9),
    "qwen2-bias": _BASE.replace(qkv_bias=True, tie_embeddings=True, norm_eps=1e-6),
    "qwen2-window": _BASE.replace(qkv_bias=True, sliding_window=9),
    "qwen2-late-window": _BASE.replace(
        qkv_bias=True, sliding_window=5, window_layers=(2,), n_layers=3, layer_types=()
    ),
    "rope-llama3": _rope("llama3", 8.0, original_max_position=32),
    "rope-linear": _rope("linear", 4.0),
    "rope-dynamic": _rope("dynamic", 4.0, original_max_position=32),
    "rope-yarn": _rope("yarn", 4.0, original_max_position=32),
    "rope-yarn-options": _rope(
        "yarn",
        8.0,
        original_max_position=32,
        beta_fast=4.0,
        beta_slow=0.5,
        mscale=0.7,
        mscale_all_dim=0.3,
        truncate=False,
    ),
    "rope-yarn-amplitude": _rope("yarn", 4.0, original_max_position=16, attention_factor=1.3),
    "embedding-scale": _BASE.replace(embedding_scale=True),
    "ministral": _BASE.replace(sliding_window=5, window_layers=(0, 2), n_layers=3, layer_types=()),
    "qwen2-alternating": _BASE.replace(qkv_bias=True, sliding_window=5, window_layers=(0,)),
    "llama-gelu": _BASE.replace(activation="gelu"),
} | {
    f"{kind}{f'-{case}' if case else ''}": _family(kind, case, **options)
    for kind, case, options in FAMILY_CASES
    if kind
}
# A case's position is its seed: new cases stand at the end of FAMILY_CASES, so that the golden
# answers of the others stay.
_FAMILY_NAMES = [f"{kind}{f'-{case}' if case else ''}" for kind, case, _ in FAMILY_CASES]
_POSITIONS = [name for name in CASES if name not in _FAMILY_NAMES] + _FAMILY_NAMES


def params_of(name: str) -> dict[str, Any]:
    return seeded_params(CASES[name], seed=1 + _POSITIONS.index(name))


def tokens_of(name: str) -> np.ndarray:
    """int32 ``[LENGTH]``; the first PROMPT of them are what is continued."""
    raw = np.random.PCG64(_POSITIONS.index(name)).random_raw(LENGTH)
    return (raw % np.uint64(CASES[name].vocab_size)).astype(np.int32)


class Golden(dict[str, np.ndarray]):
    """The stored answers; a missing one says how to make it."""

    def __missing__(self, key: str) -> np.ndarray:
        name = key.rpartition("/")[0]
        raise AssertionError(
            f"{GOLDEN.name} has no answer of {name}: run python tests/golden/make_llama_golden.py "
            f"{name} and commit the file (docs/howto/family.md)"
        )


@dataclasses.dataclass(frozen=True)
class Answer:
    """float32 ``logits[LENGTH, V]`` and the NEW greedy tokens after the prompt."""

    logits: np.ndarray
    greedy: np.ndarray


def for_transformers(cfg: ModelConfig) -> ModelConfig:
    """The config as a family whose class transformers has.

    Raises LookupError for a family without one that ``dense_cases.ORACLES`` lacks.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    family = cfg.stored.family
    oracle = dense_cases.ORACLES.get(family)
    if oracle is None:
        if family not in CONFIG_MAPPING_NAMES:
            raise LookupError(
                f"transformers has no class for {family!r}: name a family in dense_cases.ORACLES "
                "whose class computes the same (docs/howto/family.md)"
            )
        return cfg
    return cfg.replace(stored=dataclasses.replace(cfg.stored, family=oracle))


def their_class(path: Path) -> Any:
    """transformers' class of a directory, also one that its automatic classes do not know."""
    import transformers

    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    return getattr(transformers, name, transformers.AutoModelForCausalLM)


def their_model(path: Path) -> Any:
    """transformers' model of a directory, in float32.

    A text decoder whose only class is of a model with images runs inside of that class.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config, made = json.loads((path / "config.json").read_text()), their_class(path)
    vision = dense_cases.WRAPPED.get(config["model_type"])
    if vision is not None:
        shared = {key: config[key] for key in ("tie_word_embeddings",)}
        whole = made.config_class(text_config=config, vision_config=vision, **shared)
        tensors = load_file(path / "model.safetensors")
        inner = {key.replace("model.", "model.language_model.", 1): tensors[key] for key in tensors}
        path = path / "whole"
        whole.save_pretrained(path)
        save_file(inner, path / "model.safetensors", {"format": "pt"})
    return made.from_pretrained(path, dtype=torch.float32)


def reference(name: str) -> Answer:
    """transformers' answer for a model that it loads from the directory that ``hf.save`` wrote."""
    import torch

    cfg, params = CASES[name], params_of(name)
    if (
        cfg.embedding_scale and cfg.stored.family == "llama"
    ):  # no option there: scale the table itself
        scale = np.float32(cfg.d_model**0.5)
        params["embed"]["weight"] = params["embed"]["weight"] * scale
        cfg = cfg.replace(embedding_scale=False)
    with tempfile.TemporaryDirectory() as folder:
        path = hf.save(Path(folder) / "model", for_transformers(cfg), params)
        model = their_model(path)
    tokens = torch.from_numpy(tokens_of(name)[None].astype(np.int64))
    prompt = tokens[:, :PROMPT]
    with torch.no_grad():
        # In this order: a model with dynamic RoPE remembers the longest length it has seen, until
        # it sees one below its trained context.
        logits = model(tokens).logits[0]
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False
        )
    return Answer(logits.numpy(), out[0, PROMPT:].numpy().astype(np.int32))
