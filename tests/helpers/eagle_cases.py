"""A tiny model with an EAGLE-3 head in the published layout, and the head's reference.

``write`` makes the folder with names and numbers of its own, and ``proposed`` is the head in numpy,
written from the paper and the published code.  Neither calls jaxllama's loader or head.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jaxllama as jl
from jaxllama.language_model import LanguageModel
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.models import LLAMA, params_of

CONFIG = LLAMA.replace(name="tiny-eagle", vocab_size=256, n_layers=4)
D, HEADS, KV, WIDTH, FF, OWN = 32, 4, 2, 8, 40, 60  # sizes of the head
TAPS = (1, 2, 3)
IDS = 1 + 4 * np.arange(OWN)  # of the head's tokens in the model's vocabulary
JSON = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": D,
    "initializer_range": 0.02,
    "intermediate_size": FF,
    "max_position_embeddings": 4096,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 5000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": CONFIG.vocab_size,
    "draft_vocab_size": OWN,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]},
}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights, and the map of the head's tokens to ``IDS``."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.3) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    layer = {
        "self_attn.q_proj": normal(HEADS * WIDTH, 2 * D),
        "self_attn.k_proj": normal(KV * WIDTH, 2 * D),
        "self_attn.v_proj": normal(KV * WIDTH, 2 * D),
        "self_attn.o_proj": normal(D, HEADS * WIDTH),
        "mlp.gate_proj": normal(FF, D),
        "mlp.up_proj": normal(FF, D),
        "mlp.down_proj": normal(D, FF),
        "hidden_norm": 1 + normal(D),
        "input_layernorm": 1 + normal(D),
        "post_attention_layernorm": 1 + normal(D),
    }
    return {
        "fc.weight": normal(D, 3 * D),
        **{f"midlayer.{name}.weight": value for name, value in layer.items()},
        "norm.weight": 1 + normal(D),
        "lm_head.weight": normal(OWN, D),
        "d2t": IDS - np.arange(OWN),
        "t2d": np.isin(np.arange(CONFIG.vocab_size), IDS),
    }


def write(directory: Path, changes: dict[str, Any] | None = None, seed: int = 0) -> Path:
    """Write the folder; changes: keys of config.json, of which None removes one."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True)
    config = {**JSON, **(changes or {})}
    config = {key: value for key, value in config.items() if value is not None or key in JSON}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors(seed), directory / "model.safetensors")
    return directory


@functools.cache
def model(**options: Any) -> LanguageModel:
    return LanguageModel(CONFIG, params_of(CONFIG), Tokenizer.byte_level(), **options)


@functools.cache
def drafter() -> jl.Drafter:
    with tempfile.TemporaryDirectory() as folder:
        return jl.load_drafter(write(Path(folder) / "draft"), np.float32)


def states(directory: Path, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(the states before ``TAPS`` ``[T, 3 D]``, the embedding ``[V, D]``), of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    with torch.no_grad():
        hidden = model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    embedding = model.get_input_embeddings().weight.detach().numpy()
    return np.concatenate([hidden[tap][0].numpy() for tap in TAPS], axis=1), embedding


def proposed(
    tapped: np.ndarray,
    embedding: np.ndarray,
    tokens: Sequence[int],
    count: int,
    *,
    norm_residual: bool = False,
) -> tuple[np.ndarray, list[int]]:
    """(logits ``[count, OWN]``, the greedy tokens behind ``tokens``).

    tapped: the model's states of all tokens but the last, ``[T - 1, 3 D]``.
    """
    w = {name: value.astype(np.float64) for name, value in tensors().items()}

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    def heads(name: str, x: np.ndarray, n: int) -> np.ndarray:
        return (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).reshape(len(x), n, WIDTH)

    def turned(x: np.ndarray) -> np.ndarray:
        rates = 5000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
        angle = np.tile(np.arange(len(x))[:, None] * rates, 2)[:, None]
        half = WIDTH // 2
        other = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
        return x * np.cos(angle) + other * np.sin(angle)

    stream, following, scores = tapped @ w["fc.weight"].T, list(tokens[1:]), []
    for _ in range(count):
        normed = norm("midlayer.hidden_norm", stream)
        x = np.concatenate([norm("midlayer.input_layernorm", embedding[following]), normed], axis=1)
        q, k, v = (heads(name, x, n) for name, n in (("q", HEADS), ("k", KV), ("v", KV)))
        q, k = turned(q), turned(k)
        k, v = (np.repeat(part, HEADS // KV, axis=1) for part in (k, v))
        weight = np.einsum("thd,shd->hts", q, k) / np.sqrt(WIDTH)
        weight = np.where(np.tri(len(x), dtype=bool), weight, -np.inf)
        weight = np.exp(weight - weight.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", weight, v).reshape(len(x), -1)
        y = (normed if norm_residual else stream) + mixed @ w["midlayer.self_attn.o_proj.weight"].T
        z = norm("midlayer.post_attention_layernorm", y)
        gate = z @ w["midlayer.mlp.gate_proj.weight"].T
        up = z @ w["midlayer.mlp.up_proj.weight"].T
        y = y + (gate / (1 + np.exp(-gate)) * up) @ w["midlayer.mlp.down_proj.weight"].T
        scores.append(norm("norm", y[-1]) @ w["lm_head.weight"].T)
        own = int(scores[-1].argmax())
        following.append(own + int(w["d2t"][own]))
        stream = np.concatenate([stream, y[-1:]])
    return np.stack(scores), following[-count:]
