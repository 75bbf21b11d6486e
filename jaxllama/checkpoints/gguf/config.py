"""Read a GGUF file's metadata into a ModelConfig.

``read_config(path)`` is the whole interface. Source: the GGUF specification's keys and llama.cpp's
conversion rules. Every key of the architecture is read, known to have no effect, or an error that
names it. Errors too: architectures that are not in ``gguf.architectures``, other mixtures,
sizes that differ between layers.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from jaxllama.checkpoints.gguf.architectures import ARCHITECTURES, GGUFArchitecture
from jaxllama.checkpoints.gguf.file import GGUFFile, GGUFTensor, opened
from jaxllama.checkpoints.gguf.types import TensorType
from jaxllama.checkpoints.hf.config import config_from_hf
from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

# Metadata of every architecture -> config.json.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.key_length": "head_dim",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "partial_rotary_factor",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
}
_WINDOW_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "layer_types",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_ROPE_KEYS = (
    "type",
    "factor",
    "original_context_length",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "attn_factor",
    "yarn_attn_factor",
)
_SHARED = "expert_shared_feed_forward_length"
_RECURRENT = "attention.recurrent_layers"
# Keys that change the computation, with the supported value. ``_INERT`` has the keys that are read
# by name or have no effect.
_FIXED: JsonObject = {
    "expert_used_count": 0,
    "attention.causal": True,
    "pooling_type": 0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.temperature_scale": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
_INERT = (
    "vocab_size",
    "tensor_data_layout",
    "expert_count",
    "attention.value_length",
    "rope.scale_linear",
    "rope.scaling.finetuned",
    "use_parallel_residual",
    "rope.dimension_sections",  # axes of an image's positions, which are alike in a text
    _SHARED,  # read by name, or the count and the experts' width say it
)
# The constants of the rope factors in circulation (Llama 3.1 and 3.2).
_LLAMA3 = {
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read_config(path: str | Path | GGUFFile) -> ModelConfig:
    """Return the ModelConfig of a GGUF file, which may be open.

    The vocabulary is the number of the embedding's rows. The head is tied if ``output.weight`` is
    absent. The model has the biases that the file has, and the name is ``general.name``. ``stored``
    describes the family's Hugging Face form. Raises JaxLlamaError naming the file and the key for a
    damaged file and for unsupported models.
    """
    with opened(path) as file:
        try:
            return _config(file)
        except JaxLlamaError as error:
            if str(error).startswith(f"{file.path}:"):
                raise
            raise JaxLlamaError(f"{file.path}: {error}") from None


def _config(file: GGUFFile) -> ModelConfig:
    name = file.string("general.architecture")
    if name not in ARCHITECTURES:
        raise file.error(
            "general.architecture",
            f"{name!r} is not supported; supported: {', '.join(ARCHITECTURES)}",
        )
    arch = ARCHITECTURES[name]
    has_experts = file.integer(f"{name}.expert_count", 0) > 0
    if has_experts and arch.mixture is None:
        raise file.error(f"{name}.expert_count", "a mixture of experts, which is not supported")
    _check_keys(file, name, arch)
    sizes = _sizes(file, name)
    mtp_layers = _mtp_layers(file, name, arch)
    sizes["num_hidden_layers"] -= mtp_layers
    window = file.integer(f"{name}.attention.sliding_window", None) if arch.windowed else None
    if name == "cohere2" and not window:  # the window also decides which layers have positions
        raise file.error(f"{name}.attention.sliding_window", f"{window} is not a window")
    kind = arch.windowed if window and arch.windowed else arch.family
    if has_experts and arch.mixture is not None:
        kind = arch.mixture
        if file.integer(f"{name}.{_SHARED}", 0) and kind == "granitemoe":
            kind = "granitemoeshared"
    config: JsonObject = {"model_type": kind, **sizes, **_window(file, name, kind, window, sizes)}
    config |= {} if arch.more is None else arch.more(sizes)
    for key, theirs in arch.keys.items():
        if f"{name}.{key}" in file:
            config[theirs] = file.value(f"{name}.{key}")
    if "ssm.group_count" in arch.keys:
        config |= _delta(file, name, config)
    if has_experts:
        found = {theirs: f"{name}.{key}" for key, theirs in arch.experts.items()}
        config |= {theirs: file.value(key) for theirs, key in found.items() if key in file}
    if name == "glm4moe":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    if name == "stablelm":  # its key is True even if config.json had no value
        config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in file.tensors
    eps = "rms_epsilon" if FAMILIES[kind].eps == "rms_norm_eps" else "epsilon"
    config[FAMILIES[kind].eps] = file.number(f"{name}.attention.layer_norm_{eps}")
    config |= _rope(file, name, kind, sizes)
    scaling = config.get("rope_scaling")
    if name == "gpt-oss" and isinstance(scaling, dict):
        scaling["truncate"] = False  # as the model has it, which no key says
    try:
        cfg = config_from_hf(config, file.string("general.name", file.stem))
    except JaxLlamaError as error:
        raise JaxLlamaError(_in_their_words(str(error), name, arch)) from None

    def has(*tensors: str) -> bool:
        return any(f"blk.0.{tensor}.bias" in file.tensors for tensor in tensors)

    return cfg.replace(
        qkv_bias=has("attn_q", "attn_qkv"),
        o_bias=has("attn_output"),
        mlp_bias=has("ffn_up"),
        head_bias="output.bias" in file.tensors,
        mtp_layers=0 if arch.ignores_mtp else mtp_layers,
    )


def _mtp_layers(file: GGUFFile, name: str, arch: GGUFArchitecture) -> int:
    """Return how many of the file's last layers are heads for multi-token prediction."""
    key = f"{name}.nextn_predict_layers"
    count = file.integer(key, 0)
    if arch.ignores_mtp and count >= 0:
        return count
    if count not in ((0, 1) if arch.has_mtp else (0,)):
        raise file.error(key, f"{count} is not supported (only {1 if arch.has_mtp else 0})")
    return count


def _delta(file: GGUFFile, name: str, config: JsonObject) -> JsonObject:
    """Return the width of a value head, of which the file has the sum over the heads, and which
    layers are recurrent, if the file lists them.
    """
    heads, inner = config.get("linear_num_value_heads"), config.get("linear_value_head_dim")
    if not heads or not inner or inner % heads:
        raise file.error(f"{name}.ssm.inner_size", f"{inner} is not a width of {heads} heads each")
    found: JsonObject = {"linear_value_head_dim": inner // heads}
    key, n = f"{name}.{_RECURRENT}", config["num_hidden_layers"]
    if key in file:
        layers = file.array(key)[:n].tolist()
        if len(layers) != n:
            raise file.error(key, f"has {len(layers)} entries for {n} layers")
        found["layer_types"] = ["linear_attention" if x else "full_attention" for x in layers]
    return found


def _check_keys(file: GGUFFile, name: str, arch: GGUFArchitecture) -> None:
    """Check all keys, so that none is ignored silently."""
    rope = [f"rope.scaling.{key}" for key in _ROPE_KEYS]
    window = _WINDOW_KEYS if arch.windowed else ()
    known = {
        *_KEYS,
        *window,
        *arch.keys,
        *arch.experts,
        *rope,
        *_INERT,
        *((_RECURRENT,) if "ssm.group_count" in arch.keys else ()),
        "nextn_predict_layers",
    }
    for key in file.keys:
        prefix, _, rest = key.partition(".")
        if prefix != name or rest in known:
            continue
        fixed = {**_FIXED, "expert_gating_func": arch.gating}
        if rest not in fixed:
            raise file.error(key, f"is not a key of {name!r} that is known")
        value = fixed[rest]
        found = file.boolean(key) if isinstance(value, bool) else file.number(key)
        if found != value:
            raise file.error(key, f"{found} is not supported (only {value})")
    finetuned = f"{name}.rope.scaling.finetuned"  # Granite's switch for positions
    if name == "granite" and not file.boolean(finetuned, True):
        raise file.error(finetuned, "a model without positions is not supported")


def _sizes(file: GGUFFile, name: str) -> JsonObject:
    """Return the keys that every config.json has."""
    embed = file.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise file.error("tensor 'token_embd.weight'", "is missing or not a matrix")
    vocab_size, d_model = embed.shape
    stated = file.integer(f"{name}.embedding_length")
    if stated != d_model:
        raise file.error(
            f"{name}.embedding_length", f"{stated}, but token_embd.weight has rows of {d_model}"
        )
    n_layers = file.integer(f"{name}.block_count")
    if not 0 < n_layers <= len(file.tensors):
        raise file.error(f"{name}.block_count", f"{n_layers} layers in {len(file.tensors)} tensors")
    n_heads = _per_layer(file, f"{name}.attention.head_count")
    if n_heads <= 0:
        raise file.error(f"{name}.attention.head_count", f"{n_heads} must be positive")
    head_dim = file.integer(f"{name}.attention.key_length", d_model // n_heads)
    values = file.integer(f"{name}.attention.value_length", head_dim)
    if values != head_dim:
        raise file.error(
            f"{name}.attention.value_length", f"{values} differs from the head's {head_dim}"
        )
    is_dense = f"{name}.feed_forward_length" in file
    width = "feed_forward_length" if is_dense else "expert_feed_forward_length"
    return {
        "vocab_size": vocab_size,
        "hidden_size": d_model,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": _per_layer(file, f"{name}.attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "intermediate_size": _per_layer(file, f"{name}.{width}"),
        "max_position_embeddings": file.integer(f"{name}.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.integer("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": list(eos_ids(file)),
    }


def eos_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the ids that end a generation: end of sequence, end of turn, end of message."""
    keys = (f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))
    ids = [file.integer(key) for key in keys if key in file]
    return tuple(dict.fromkeys(ids))


def _per_layer(file: GGUFFile, key: str, default: int | None = None) -> int:
    """Return an integer that a file may repeat for every layer."""
    if not file.is_array(key):
        return file.integer(key) if default is None else file.integer(key, default)
    values = np.unique(file.array(key)).tolist()
    if len(values) != 1 or not isinstance(values[0], int):
        raise file.error(key, f"differs between layers ({values}), which is not supported")
    return values[0]


def _window(
    file: GGUFFile, name: str, kind: str, window: int | None, sizes: JsonObject
) -> JsonObject:
    """Return the keys of a sliding window.

    A window of 0 means none, and so does a missing key, except for Gemma 2.
    """
    if FAMILIES[kind].window == "none" or (window is None and name == "gemma2"):
        return {}
    result: JsonObject = {"sliding_window": window or None}
    if FAMILIES[kind].window == "use":
        result |= {"use_sliding_window": bool(window), "max_window_layers": 0}
    key, n = f"{name}.attention.sliding_window_pattern", sizes["num_hidden_layers"]
    if key not in file or not window:
        return result
    if file.is_array(key):  # llama.cpp's are as long as the layers, or longer
        slides = file.array(key)[:n].tolist()
    else:  # all layers except each every-th one slide
        every = file.integer(key)
        slides = [every <= 0 or (index + 1) % every != 0 for index in range(n)]
    return {
        **result,
        "layer_types": ["sliding_attention" if x else "full_attention" for x in slides],
    }


def _rope(file: GGUFFile, name: str, kind: str, sizes: JsonObject) -> JsonObject:
    """Return the keys of RoPE, with a table for each kind of layer if the family has two."""
    head_dim, family = sizes["head_dim"], FAMILIES[kind]
    theta = file.number(f"{name}.rope.freq_base", 10000.0)
    turning = file.integer(f"{name}.rope.dimension_count", head_dim)
    result: JsonObject = {"rope_theta": theta}
    if "partial_rotary_factor" in family.defaults:
        result["partial_rotary_factor"] = turning / head_dim if head_dim else 1.0
    elif turning != head_dim:
        raise file.error(
            f"{name}.rope.dimension_count", f"{turning} differs from the head's {head_dim}"
        )
    scaling = _scaling(file, name, theta, turning, sizes["max_position_embeddings"])
    if "original_max_position_embeddings" in scaling:
        original = scaling["original_max_position_embeddings"]
        result["original_max_position_embeddings"] = original
    key = f"{name}.rope.freq_base_swa"
    local = file.number(key, 10000.0 if name == "gemma3" else theta)
    if not family.is_local:
        if key in file and local != theta:
            raise file.error(key, f"{local} differs from {name}.rope.freq_base ({theta})")
        return result | ({"rope_scaling": scaling} if scaling else {})
    return result | {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **scaling, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    }


def _scaling(file: GGUFFile, name: str, theta: float, turning: int, context: int) -> JsonObject:
    prefix = f"{name}.rope.scaling"
    factor = file.number(f"{prefix}.factor", 1.0)
    kind = file.string(f"{prefix}.type", "none" if factor == 1.0 else "linear")
    if kind == "none" and file.number(f"{name}.rope.scale_linear", 1.0) != 1.0:
        kind, factor = "linear", file.number(f"{name}.rope.scale_linear")
    trained = file.integer(f"{prefix}.original_context_length", context)
    tables = [f"rope_factors_{which}.weight" for which in ("long", "short")]
    if any(table in file.tensors for table in tables):
        if kind not in ("none", "longrope") or "rope_freqs.weight" in file.tensors:
            raise file.error(f"tensor {tables[0]!r}", f"beside {kind!r} scaling or rope_freqs")
        long, short = (_factors(file, table, turning).tolist() for table in tables)
        found: JsonObject = {
            "rope_type": "longrope",
            "original_max_position_embeddings": trained,
            "long_factor": long,
            "short_factor": short,
        }
        key = f"{prefix}.attn_factor"
        names = ("short_mscale", "long_mscale") if name == "phimoe" else ("attention_factor",)
        return found | (dict.fromkeys(names, file.number(key)) if key in file else {})
    for key, neutral in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0)):
        key = f"{prefix}.{key}"
        own = 0.1 * math.log(max(factor, 1.0)) + 1.0  # yarn's own rule gives this value
        value = file.number(key, neutral)
        if value != neutral and not (kind == "yarn" and math.isclose(value, own, rel_tol=1e-5)):
            raise file.error(key, f"{value} is not supported (only {neutral})")
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise file.error(f"{prefix}.type", f"{kind!r} beside rope_freqs.weight")
        return _llama3_rope(file, _factors(file, "rope_freqs.weight", turning), theta)
    if kind == "none":
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        why = "without its tensors of factors" if kind == "longrope" else "is not none, linear"
        raise file.error(f"{prefix}.type", f"{kind!r} {why} or yarn")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
        "beta_fast": file.number(f"{prefix}.yarn_beta_fast", 32.0),
        "beta_slow": file.number(f"{prefix}.yarn_beta_slow", 1.0),
    }


def _factors(file: GGUFFile, name: str, turning: int) -> np.ndarray:
    """Return a tensor with the divisor of each frequency, float64 ``[turning / 2]``."""
    info: GGUFTensor | None = file.tensors.get(name)
    if info is None:
        raise file.error(f"tensor {name!r}", "is missing")
    if info.shape != (turning // 2,) or info.type != TensorType.F32:
        raise file.error(
            f"tensor {name!r}", f"{info.type.name} {info.shape}; expected F32 ({turning // 2},)"
        )
    found = file.rows(info).view("<f4")[0]
    # the shortest decimals that round to these values
    return np.array([str(x) for x in found], np.float64)


def _llama3_rope(file: GGUFFile, divisors: np.ndarray, theta: float) -> JsonObject:
    """Find the llama3 rule that gives ``rope_freqs.weight``, which holds each frequency's divisor.

    The file does not have the rule's constants. Those of Llama 3.1 and 3.2 are tried with the
    factor that the slowest frequency implies, and must reproduce the tensor.
    """
    if (divisors == 1.0).all():
        return {}
    with np.errstate(all="ignore"):  # invalid values become NaN and fail the comparison
        inv_freq = np.float64(theta) ** (-np.arange(len(divisors)) / len(divisors))
        turns = _LLAMA3["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        # 1 / divisor = keep + (1 - keep) / factor, solved for the slowest frequency.
        factor = float(np.round((1.0 - keep[-1]) / (1.0 / divisors[-1] - keep[-1]), 3))
        expected = 1.0 / (keep + (1.0 - keep) / np.float64(factor))
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise file.error(
            "tensor 'rope_freqs.weight'",
            "is not Llama 3.1's rule (original context 8192, factors 1 and 4): not supported",
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _in_their_words(error: str, name: str, arch: GGUFArchitecture) -> str:
    """Rephrase an error about a key of config.json in terms of the file's metadata."""
    for key, theirs in {**_KEYS, **_WINDOW_KEYS, **arch.keys}.items():
        if error.startswith(f"{theirs} = "):
            return f"{name}.{key}{error.removeprefix(theirs)}"
    return error
