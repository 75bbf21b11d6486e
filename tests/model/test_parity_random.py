"""Models with options drawn at random, saved, loaded, beside transformers live, of every family.

Bound: 1e-4 of the largest logit in float32; 64 greedy tokens are the same.  A draw whose answer
has two nearly equal best logits is drawn again: there the order of additions decides.  So is a draw
whose logits move by 1e-3 of the largest in transformers if its weights move by 1e-5 of each: with
random weights a third of Zamba2's draws and a fifth of Gemma 4's do, and few of other families.
"""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.config import config_from_hf, config_to_hf
from jaxllama.config import ModelConfig
from tests.helpers import parity_cases, random_dense, random_options
from tests.helpers.cases import on_demand
from tests.helpers.seeded import seeded_params

torch, transformers = on_demand("torch"), on_demand("transformers")

PROMPT, NEW, ROWS = 20, 64, 2
BOUND, APART = 1e-4, 1e-5
NOISE, MOVED, TRIES = 1e-5, 1e-3, 12
# Options of each family, beside SIZES: a list is one of its values, drawn with the others.
SIZES: dict[str, list[Any]] = {
    "vocab_size": [64],
    "hidden_size": [32],
    "intermediate_size": [24, 48],
    "num_hidden_layers": [1, 2, 3],
    "num_attention_heads": [4, 8],
    "num_key_value_heads": [1, 2, 4],
    "head_dim": [8, 16],
    "max_position_embeddings": [128],
    "rms_norm_eps": [1e-5, 1e-6, 1e-3],
    "rope_theta": [1e4, 150000.0],
    "tie_word_embeddings": [True, False],
    "bos_token_id": [1],
    "eos_token_id": [None],
}
_COUNT, _ACTIVE, _WIDTH = [4, 6, 8], [1, 2, 3, 4], [16, 24, 40]
_FLAG = [True, False]
_QWEN = {
    "num_experts": _COUNT,
    "num_experts_per_tok": _ACTIVE,
    "moe_intermediate_size": _WIDTH,
    "norm_topk_prob": _FLAG,
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [[], [0]],
}
_DELTA = {
    "num_hidden_layers": [4],
    "linear_num_value_heads": [4],
    "linear_num_key_heads": [2, 4],
    "linear_key_head_dim": [8],
    "linear_value_head_dim": [8, 12],
    "head_dim": [16],
    "shared_expert_intermediate_size": _WIDTH,
}
_SIGMOID = {
    "moe_intermediate_size": _WIDTH,
    "routed_scaling_factor": [1.0, 1.5],
    "first_k_dense_replace": [0, 1],
    "num_hidden_layers": [2, 3],
}
FAMILIES: dict[str, dict[str, list[Any]]] = {
    "gpt_oss": {
        "num_local_experts": _COUNT,
        "num_experts_per_tok": _ACTIVE,
        "sliding_window": [3, 9, 40],
        "swiglu_limit": [0.3, 7.0],
        "attention_bias": _FLAG,
        "rope_parameters": [
            {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": factor,
                "truncate": False,
                "original_max_position_embeddings": 32,
            }
            for factor in (4.0, 32.0)
        ],
    },
    "mixtral": {
        "num_local_experts": _COUNT,
        "num_experts_per_tok": _ACTIVE,
        "sliding_window": [None, 9],
    },
    "olmoe": {
        "num_experts": _COUNT,
        "num_experts_per_tok": _ACTIVE,
        "norm_topk_prob": _FLAG,
        "attention_bias": _FLAG,
    },
    "qwen2_moe": {
        **_QWEN,
        "shared_expert_intermediate_size": _WIDTH,
        "qkv_bias": _FLAG,
        "use_sliding_window": _FLAG,
        "sliding_window": [9],
        "max_window_layers": [1, 3],
    },
    "qwen3_moe": {
        **_QWEN,
        "attention_bias": _FLAG,
        "use_sliding_window": _FLAG,
        "sliding_window": [9],
    },
    "qwen3_next": {**_QWEN, **_DELTA, "attention_bias": _FLAG},
    "qwen3_5_moe_text": {
        "num_experts": _COUNT,
        "num_experts_per_tok": _ACTIVE,
        "moe_intermediate_size": _WIDTH,
        "intermediate_size": [24],
        **_DELTA,
    },
    "granitemoe": {
        "num_local_experts": _COUNT,
        "num_experts_per_tok": _ACTIVE,
        "embedding_multiplier": [1.0, 12.0],
        "logits_scaling": [1.0, 8.0],
        "residual_multiplier": [1.0, 0.22],
        "attention_multiplier": [0.0625, 0.3],
        "attention_bias": _FLAG,
    },
    "glm4_moe": {
        **_SIGMOID,
        "n_routed_experts": [8],
        "num_experts_per_tok": _ACTIVE,
        "n_shared_experts": [1, 2],
        "n_group": [1, 2, 4],
        "topk_group": [1],
        "norm_topk_prob": _FLAG,
        "use_qk_norm": _FLAG,
        "attention_bias": _FLAG,
        "head_dim": [16],
    },
    "kimi_linear": {
        **_SIGMOID,
        "num_hidden_layers": [3],
        "rope_theta": [1e4],  # which no layer reads
        "tie_word_embeddings": [False],  # transformers' class has its own head in any case
        "num_attention_heads": [4],
        "num_key_value_heads": [4],
        "num_experts": [8],
        "num_experts_per_token": _ACTIVE,
        "num_shared_experts": [1, 2],
        "num_expert_group": [1, 2],
        "topk_group": [1],
        "kv_lora_rank": [16],
        "qk_nope_head_dim": [12],
        "qk_rope_head_dim": [4],
        "v_head_dim": [12],
        "linear_head_dim": [8],
        "linear_num_heads": [4],
        "layer_types": [["linear_attention", "full_attention", "linear_attention"]],
    },
    "ernie4_5_moe": {
        "moe_num_experts": _COUNT,
        "moe_k": _ACTIVE,
        "moe_num_shared_experts": [0, 1, 2],
        "moe_intermediate_size": _WIDTH,
        "num_hidden_layers": [3],
        "moe_layer_interval": [1, 2],
        "moe_layer_start_index": [0, 1],
        "moe_layer_end_index": [-1, 1],
    },
    "phimoe": {
        "num_local_experts": _COUNT,
        "num_experts_per_tok": [2],
        "router_jitter_noise": [0.01, 0.3],
        "attention_bias": _FLAG,
        "lm_head_bias": _FLAG,
        "tie_word_embeddings": [False],
        "sliding_window": [None, 9],
    },
}

FAMILIES |= random_options.FAMILIES | random_dense.FAMILIES
# Classes of transformers that know no other width of a head.
DIVIDED = ("olmoe", "qwen2_moe", "granitemoe", *random_options.DIVIDED, *random_dense.DIVIDED)


def drawn(family: str, seed: int) -> ModelConfig:
    """The config of a draw of the family's options."""
    draw = random.Random(f"{family} {seed}")
    options = SIZES | FAMILIES[family]
    config = {key: draw.choice(values) for key, values in options.items()}
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        config["num_key_value_heads"] = 1
    if "n_group" in config:  # a token chooses among the experts of some groups
        per_group = config["n_routed_experts"] // config["n_group"]
        least = -(-config["num_experts_per_tok"] // per_group)
        config["topk_group"] = max(config["topk_group"], least)
    # transformers' adapters of k and v are as wide as q's.
    has_adapters = config.get("use_shared_attention_adapter", False)
    if family in random_options.UNGROUPED or has_adapters:
        config["num_key_value_heads"] = config["num_attention_heads"]
    config[parity_cases.EPS.get(family, "rms_norm_eps")] = config.pop("rms_norm_eps")
    if family == "internlm3":  # transformers' class has one switch for all biases
        config["qkv_bias"] = config["bias"]
    if family in DIVIDED:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return config_from_hf({"model_type": family, **config}, "tiny")


def answer(tokens: np.ndarray, path) -> Any:
    """transformers' (logits of the whole rows, greedy tokens, how far noise in its weights moves
    these logits) behind the prompts ``tokens``."""
    model = parity_cases.their_model(path)
    prompt = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False
        )
        logits = model(whole).logits
        seeded = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=seeded))
        moved = (model(whole).logits - logits).abs().max() / logits.abs().max()
    return logits.numpy(), whole.numpy().astype(np.int32), float(moved)


def has_ties(logits: np.ndarray) -> bool:
    best = np.sort(logits[:, PROMPT - 1 : -1], axis=-1)[..., -2:]
    return bool((best[..., 1] - best[..., 0]).min() < APART * np.abs(logits).max())


def check(family: str, seed: int, folder) -> None:
    for again in range(TRIES):
        cfg = drawn(family, seed + 1000 * again)
        params = seeded_params(cfg, seed=1000 * again + seed)
        tokens = np.random.default_rng(seed + again).integers(0, cfg.vocab_size, (ROWS, PROMPT))
        path = hf.save(folder / f"{seed}-{again}", cfg, params)
        theirs = parity_cases.for_transformers(cfg)
        same = path if theirs == cfg else hf.save(path / "theirs", theirs, params)
        want, whole, moved = answer(tokens, same)
        if not has_ties(want) and moved < MOVED:
            break
    else:
        raise AssertionError(f"{family} {seed}: rounding decides {TRIES} answers")
    lengths = np.full(ROWS, whole.shape[1], np.int32)
    cfg, params = hf.load(path)
    got = np.asarray(jl.logits(cfg, jax.device_put(params), whole, lengths))
    assert np.abs(got - want).max() <= BOUND * np.abs(want).max()
    assert got[:, PROMPT - 1 : -1].argmax(-1).tolist() == whole[:, PROMPT:].tolist()


@pytest.mark.parametrize("family", random_options.FAMILIES | random_dense.FAMILIES)
def test_the_config_of_a_draw_goes_there_and_back(family):
    for seed in range(3):
        cfg = drawn(family, seed)
        again = config_from_hf(config_to_hf(cfg), "tiny")
        assert again.replace(stored=cfg.stored) == cfg


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_drawn_models(family, part, tmp_path):
    for seed in range(10 * part, 10 * part + 10):
        check(family, seed, tmp_path)
        jax.clear_caches()
