"""A GGUF file's metadata as a ModelConfig.

``read_config(path)`` is the whole interface.  Source: the GGUF specification's keys and the rules
by which llama.cpp's conversion writes them.  Not supported, each an error that names the key:
architectures other than "llama" (Llama, Mistral, SmolLM2, TinyLlama) and "qwen2", mixtures of
experts, longrope, rotary over part of a head, sizes that differ between layers, split files.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from jaxllama.checkpoints.gguf.file import GGUFFile, TensorInfo
from jaxllama.config import ModelConfig, RopeConfig
from jaxllama.errors import JaxLlamaError

_ARCHITECTURES = ("llama", "qwen2")
# The constants that rope factors in circulation were made with (Llama 3.1 and 3.2).
_LLAMA3 = {"original_max_position": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read_config(path: str | Path) -> ModelConfig:
    """The model that a GGUF file describes.

    The vocabulary is the embedding's rows, the head is tied when ``output.weight`` is absent, the
    name is ``general.name``.  Raises JaxLlamaError naming the file and the key for a damaged file
    and for what this project does not run.
    """
    with GGUFFile(path) as file:
        try:
            return _config(file)
        except JaxLlamaError as error:
            if str(error).startswith(f"{file.path}:"):
                raise
            raise JaxLlamaError(f"{file.path}: {error}") from None


def _config(file: GGUFFile) -> ModelConfig:
    arch = file.string("general.architecture")
    if arch not in _ARCHITECTURES:
        raise file.error(
            "general.architecture",
            f"{arch!r} is not supported; supported: {', '.join(_ARCHITECTURES)}",
        )
    if file.integer("split.count", 1) > 1:
        raise file.error("split.count", "split files are not supported; merge them first")
    if file.integer(f"{arch}.expert_count", 0):
        raise file.error(f"{arch}.expert_count", "mixtures of experts are not supported")
    embed = file.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise file.error("tensor 'token_embd.weight'", "is missing or not a matrix")
    vocab_size, d_model = embed.shape
    stated = file.integer(f"{arch}.embedding_length")
    if stated != d_model:
        raise file.error(
            f"{arch}.embedding_length", f"{stated}, but token_embd.weight has rows of {d_model}"
        )
    n_layers = file.integer(f"{arch}.block_count")
    if not 0 < n_layers <= len(file.tensors):
        raise file.error(f"{arch}.block_count", f"{n_layers} layers in {len(file.tensors)} tensors")
    n_heads = _per_layer(file, f"{arch}.attention.head_count")
    if n_heads <= 0:
        raise file.error(f"{arch}.attention.head_count", f"{n_heads} must be positive")
    head_dim = file.integer(f"{arch}.attention.key_length", d_model // n_heads)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if file.integer(key, head_dim) != head_dim:
            raise file.error(key, f"{file.integer(key)} differs from the head's {head_dim}")
    return ModelConfig(
        name=file.string("general.name", file.path.stem),
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=_per_layer(file, f"{arch}.attention.head_count_kv", n_heads),
        head_dim=head_dim,
        d_ff=_per_layer(file, f"{arch}.feed_forward_length"),
        norm_eps=file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        max_position=file.integer(f"{arch}.context_length"),
        rope=_rope(file, arch, head_dim),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        sliding_window=file.integer(f"{arch}.attention.sliding_window", 0) or None,
        bos_token_id=file.integer("tokenizer.ggml.bos_token_id", None),
        eos_token_ids=eos_ids(file),
    )


def eos_ids(file: GGUFFile) -> tuple[int, ...]:
    """The ids that end a generation: end of sequence, end of turn, end of message."""
    keys = (f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))
    ids = [file.integer(key) for key in keys if key in file]
    return tuple(dict.fromkeys(ids))


def _per_layer(file: GGUFFile, key: str, default: int | None = None) -> int:
    """An integer that a file may repeat for every layer."""
    if not file.is_array(key):
        return file.integer(key) if default is None else file.integer(key, default)
    values = np.unique(file.array(key)).tolist()
    if len(values) != 1 or not isinstance(values[0], int):
        raise file.error(key, f"differs between layers ({values}), which is not supported")
    return values[0]


def _rope(file: GGUFFile, arch: str, head_dim: int) -> RopeConfig:
    theta = file.number(f"{arch}.rope.freq_base", 10000.0)
    kind = file.string(f"{arch}.rope.scaling.type", "none")
    factor = file.number(f"{arch}.rope.scaling.factor", 1.0)
    if kind == "none" and file.number(f"{arch}.rope.scale_linear", 1.0) != 1.0:
        kind, factor = "linear", file.number(f"{arch}.rope.scale_linear")
    trained = file.integer(
        f"{arch}.rope.scaling.original_context_length", file.integer(f"{arch}.context_length")
    )
    factors = file.tensors.get("rope_freqs.weight")
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise file.error(f"tensor {name!r}", "longrope is not supported")
    if factors is not None:
        if kind != "none":
            raise file.error(f"{arch}.rope.scaling.type", f"{kind!r} beside rope_freqs.weight")
        return _llama3_rope(file, factors, theta, head_dim)
    if kind == "none":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind != "yarn":
        raise file.error(f"{arch}.rope.scaling.type", f"{kind!r} is not none, linear or yarn")
    for key, neutral in (("yarn_log_multiplier", 0.0), ("attn_factor", 1.0),
                         ("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):  # fmt: skip
        key = f"{arch}.rope.scaling.{key}"
        if file.number(key, neutral) != neutral:
            raise file.error(key, f"{file.number(key)} is not supported (only {neutral})")
    return RopeConfig(
        theta, "yarn", factor, original_max_position=trained,
        beta_fast=file.number(f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=file.number(f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
    )  # fmt: skip


def _llama3_rope(file: GGUFFile, info: TensorInfo, theta: float, head_dim: int) -> RopeConfig:
    """The llama3 rule behind ``rope_freqs.weight``, which holds what each frequency is divided by.

    The file does not say the rule's constants; those of Llama 3.1 and 3.2 are tried with the
    factor that the slowest frequency implies, and must give the tensor back.
    """
    field = "tensor 'rope_freqs.weight'"
    if info.shape != (head_dim // 2,) or info.type != GGMLQuantizationType.F32:
        raise file.error(field, f"{info.type.name} {info.shape}; expected F32 ({head_dim // 2},)")
    divisors = file.rows(info).view("<f4")[0].astype(np.float64)
    if (divisors == 1.0).all():
        return RopeConfig(theta)
    with np.errstate(all="ignore"):  # nonsense comes out as NaN and fails the comparison
        inv_freq = np.float64(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
        turns = _LLAMA3["original_max_position"] * inv_freq / (2 * math.pi)
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        # 1 / divisor = keep + (1 - keep) / factor, solved for the slowest frequency.
        factor = float(np.round((1.0 - keep[-1]) / (1.0 / divisors[-1] - keep[-1]), 3))
        expected = 1.0 / (keep + (1.0 - keep) / np.float64(factor))
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise file.error(
            field, "is not Llama 3.1's rule (original context 8192, factors 1 and 4): not supported"
        )
    return RopeConfig(theta, "llama3", factor, **_LLAMA3)
