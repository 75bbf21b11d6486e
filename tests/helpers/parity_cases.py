"""Tiny random models of every Llama family and option, and transformers' answers for them.

Weights come from ``seeded``; ``reference`` needs torch and transformers and also makes the golden
file that stands in for it elsewhere (``golden/make_llama_golden.py``).
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxllama.checkpoints.hf import load as hf
from jaxllama.config import ModelConfig, RopeConfig
from tests.helpers.seeded import seeded_params

GOLDEN = Path(__file__).parents[1] / "golden" / "llama.npz"
LENGTH, PROMPT, NEW = 80, 24, 64  # tokens scored at once; tokens continued, and by how many
SCORED = np.array([0, 1, 7, 20, 31, 32, 33, 47, 63, 79])  # positions whose logits are kept

_BASE = ModelConfig(
    name="tiny", vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8,
    d_ff=48, norm_eps=1e-5, max_position=128, rope=RopeConfig(theta=10000.0), tie_embeddings=False,
)  # fmt: skip


def _rope(scaling: str, factor: float, **options: Any) -> ModelConfig:
    rope = RopeConfig(10000.0, scaling, factor, **options)  # type: ignore[arg-type]
    longest = int((rope.original_max_position or 32) * factor)
    return _BASE.replace(rope=rope, max_position=max(longest, 32), head_dim=16)


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
    ),  # fmt: skip
    "rope-yarn-amplitude": _rope("yarn", 4.0, original_max_position=16, attention_factor=1.3),
    "embedding-scale": _BASE.replace(embedding_scale=True),
    "ministral": _BASE.replace(sliding_window=5, window_layers=(0, 2), n_layers=3, layer_types=()),
    "qwen2-alternating": _BASE.replace(qkv_bias=True, sliding_window=5, window_layers=(0,)),
}


def params_of(name: str) -> dict[str, Any]:
    return seeded_params(CASES[name], seed=1 + list(CASES).index(name))


def tokens_of(name: str) -> np.ndarray:
    """int32 ``[LENGTH]``; the first PROMPT of them are what is continued."""
    raw = np.random.PCG64(list(CASES).index(name)).random_raw(LENGTH)
    return (raw % np.uint64(CASES[name].vocab_size)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Answer:
    """float32 ``logits[LENGTH, V]`` and the NEW greedy tokens after the prompt."""

    logits: np.ndarray
    greedy: np.ndarray


def reference(name: str) -> Answer:
    """transformers' answer for a model that it loads from the directory that ``hf.save`` wrote."""
    import torch
    import transformers

    cfg, params = CASES[name], params_of(name)
    if cfg.embedding_scale:  # no option there: scale the table itself
        scale = np.float32(cfg.d_model**0.5)
        params["embed"]["weight"] = params["embed"]["weight"] * scale
        cfg = cfg.replace(embedding_scale=False)
    with tempfile.TemporaryDirectory() as folder:
        path = hf.save(Path(folder) / "model", cfg, params)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
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
