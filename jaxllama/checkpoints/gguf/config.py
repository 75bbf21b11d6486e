"""Read a GGUF file's metadata into a ModelConfig.

``read_config(path)`` is the whole interface. Source: the GGUF specification's keys and llama.cpp's
conversion rules. Every key of the architecture is read, known to have no effect, or an error that
names it. Errors too: architectures that are not in ``gguf.architectures``, other mixtures,
sizes that differ between layers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxllama.checkpoints.gguf.architectures import ARCHITECTURES, GGUFArchitecture
from jaxllama.checkpoints.gguf.file import GGUFFile, opened
from jaxllama.checkpoints.gguf.rope import rope_keys
from jaxllama.checkpoints.gguf.tokenizer import ends_by_spelling, token_types
from jaxllama.checkpoints.hf.config import config_from_hf
from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

# Metadata of every architecture -> config.json.
KEYS = {
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
SHARED = "expert_shared_feed_forward_length"
_RECURRENT = "attention.recurrent_layers"
_TURNING = "rope.dimension_count"
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
    SHARED,  # read by name, or the count and the experts' width say it
)


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
    sizes = _sizes(file, name, arch)
    mtp_layers = _mtp_layers(file, name, arch)
    sizes["num_hidden_layers"] -= mtp_layers
    window = file.integer(f"{name}.attention.sliding_window", None) if arch.windowed else None
    if arch.needs_window and not window:  # the window also decides which layers have positions
        raise file.error(f"{name}.attention.sliding_window", f"{window} is not a window")
    kind = arch.windowed if window and arch.windowed else arch.family
    if has_experts and arch.mixture is not None:
        kind = arch.mixture
        if arch.shared_mixture and file.integer(f"{name}.{SHARED}", 0):
            kind = arch.shared_mixture
    config: JsonObject = {"model_type": kind, **sizes, **_window(file, name, kind, window, sizes)}
    config |= {} if arch.more is None else arch.more(sizes)
    for key, theirs in arch.keys.items():
        if f"{name}.{key}" in file:
            config[theirs] = file.value(f"{name}.{key}")
    if arch.mixer:
        config |= _MIXERS[arch.mixer](file, name, config)
    if has_experts:
        found = {theirs: f"{name}.{key}" for key, theirs in arch.experts.items()}
        config |= {theirs: file.value(key) for theirs, key in found.items() if key in file}
    config |= {} if arch.read is None else arch.read(file.tensors)
    eps = "rms_epsilon" if FAMILIES[kind].eps in ("rms_norm_eps", "norm_eps") else "epsilon"
    config[FAMILIES[kind].eps] = file.number(f"{name}.attention.layer_norm_{eps}")
    config |= rope_keys(file, name, kind, sizes)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        scaling |= arch.rope
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
    width = "linear_value_head_dim"
    heads = config.get("linear_num_value_heads")
    found: JsonObject = {width: _of_each(file, name, heads, width, config)}
    key, n = f"{name}.{_RECURRENT}", config["num_hidden_layers"]
    if key in file:
        layers = file.array(key)[:n].tolist()
        if len(layers) != n:
            raise file.error(key, f"has {len(layers)} entries for {n} layers")
        found["layer_types"] = ["linear_attention" if x else "full_attention" for x in layers]
    return found


def _latent(file: GGUFFile, name: str, config: JsonObject) -> JsonObject:
    """Return the parts of a key's width, and which layers are recurrent: those without kv heads.

    The file counts one kv head, the latent; the model's keys and values have all heads.
    """
    d_rope, heads = config["head_dim"], config["num_attention_heads"]
    key = f"{name}.attention.key_length_mla"
    width = file.integer(key)
    if width <= d_rope:
        raise file.error(key, f"{width} must exceed the {d_rope} features that {_TURNING} names")
    return {
        "qk_rope_head_dim": d_rope,
        "qk_nope_head_dim": width - d_rope,
        "linear_num_heads": heads,
        "layer_types": _layers_with_heads(file, name, config, {0, 1, heads}),
    }


def _ssm(file: GGUFFile, name: str, config: JsonObject) -> JsonObject:
    """Return the width of a Mamba-2 head, which layers these are, and whether attention turns."""
    has_bias = "blk.0.ssm_conv1d.bias" in file.tensors or "blk.1.ssm_conv1d.bias" in file.tensors
    turns = file.boolean(f"{name}.rope.scaling.finetuned", True)
    return {
        "mamba_d_head": _of_each(file, name, config.get("mamba_n_heads"), "mamba_d_head", config),
        "mamba_conv_bias": has_bias,
        "layer_types": _layers_with_heads(file, name, config, {0, config["num_key_value_heads"]}),
        "position_embedding_type": "rope" if turns else None,
    }


def _short_conv(file: GGUFFile, name: str, config: JsonObject) -> JsonObject:
    """Return which layers are short convolutions."""
    kinds = _layers_with_heads(file, name, config, {0, config["num_key_value_heads"]})
    return {"layer_types": ["conv" if kind == "linear_attention" else kind for kind in kinds]}


_MIXERS = {"delta": _delta, "latent": _latent, "ssm": _ssm, "short_conv": _short_conv}


def _of_each(file: GGUFFile, name: str, heads: int | None, key: str, config: JsonObject) -> int:
    """Return the width of a head, of which the file has the sum over the heads."""
    inner = config.get(key)
    if not heads or not inner or inner % heads:
        raise file.error(f"{name}.ssm.inner_size", f"{inner} is not a width of {heads} heads each")
    return inner // heads


def _layers_with_heads(file: GGUFFile, name: str, config: JsonObject, known: set[int]) -> list[str]:
    """Return the kinds of the layers: those without kv heads are recurrent."""
    key, n = f"{name}.attention.head_count_kv", config["num_hidden_layers"]
    counts = file.array(key)[:n].tolist()
    if len(counts) != n or not set(counts) <= known:
        raise file.error(key, f"{counts} is not one of {sorted(known)} for each of {n} layers")
    return ["full_attention" if x else "linear_attention" for x in counts]


def _check_keys(file: GGUFFile, name: str, arch: GGUFArchitecture) -> None:
    """Check all keys, so that none is ignored silently."""
    rope = [f"rope.scaling.{key}" for key in _ROPE_KEYS]
    window = _WINDOW_KEYS if arch.windowed else ()
    known = {
        *KEYS,
        *window,
        *arch.keys,
        *arch.experts,
        *rope,
        *_INERT,
        *((_RECURRENT,) if arch.mixer == "delta" else ()),
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
    finetuned = f"{name}.rope.scaling.finetuned"
    if arch.has_still and not file.boolean(finetuned, True):
        raise file.error(finetuned, "a model without positions is not supported")


def _sizes(file: GGUFFile, name: str, arch: GGUFArchitecture) -> JsonObject:
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
    is_latent = arch.mixer == "latent"
    head_dim = file.integer(f"{name}.attention.key_length", d_model // n_heads)
    if is_latent:  # key_length is that of the latent
        head_dim = file.integer(f"{name}.{_TURNING}")
    values = file.integer(f"{name}.attention.value_length", head_dim)
    if values != head_dim and not is_latent:
        raise file.error(
            f"{name}.attention.value_length", f"{values} differs from the head's {head_dim}"
        )
    n_kv_heads = n_heads
    if arch.mixer in ("ssm", "short_conv"):  # layers without attention have none
        n_kv_heads = int(file.array(f"{name}.attention.head_count_kv").max(initial=0))
    elif not is_latent:
        n_kv_heads = _per_layer(file, f"{name}.attention.head_count_kv", n_heads)
    is_dense = f"{name}.feed_forward_length" in file
    width = "feed_forward_length" if is_dense else "expert_feed_forward_length"
    return {
        "vocab_size": vocab_size,
        "hidden_size": d_model,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": _per_layer(file, f"{name}.{width}"),
        "max_position_embeddings": file.integer(f"{name}.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.integer("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": list(eos_ids(file)),
    }


def eos_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the ids that end a generation: end of sequence, of turn, of message, of text.

    The file's keys come first, then tokens with the spelling of an end.
    """
    keys = (f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))
    ids = [file.integer(key) for key in keys if key in file]
    if "tokenizer.ggml.tokens" in file:
        tokens = file.strings("tokenizer.ggml.tokens")
        ids += ends_by_spelling(tokens, token_types(file, len(tokens)))
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
    if FAMILIES[kind].window == "none" or (window is None and ARCHITECTURES[name].may_lack_window):
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


def _in_their_words(error: str, name: str, arch: GGUFArchitecture) -> str:
    """Rephrase an error about a key of config.json in terms of the file's metadata."""
    for key, theirs in {**KEYS, **_WINDOW_KEYS, **arch.keys}.items():
        if error.startswith(f"{theirs} = "):
            return f"{name}.{key}{error.removeprefix(theirs)}"
    return error
