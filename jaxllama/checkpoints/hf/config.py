"""``config.json`` <-> ModelConfig, for every family of ``hf.families``.

``hf.rope`` reads RoPE, ``hf.fla`` flash-linear-attention's models, and ``hf.gla_paper`` those of
GLA's authors. A missing key has the default of transformers. An unsupported value that would change
the computation is a JaxLlamaError naming the key. Keys that the family's class in transformers
ignores give one warning. ``check_preset`` compares a preset with a checkpoint's config.

Left out: mixtures of experts of other families, encoders, sequence classifiers.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxllama.checkpoints.hf.common import COMMON
from jaxllama.checkpoints.hf.families import FAMILIES, family_of, stored_name
from jaxllama.checkpoints.hf.family import ACTIVATIONS, Family
from jaxllama.checkpoints.hf.fla import (
    MODELS,
    PAPER,
    config_from_fla,
    config_to_fla,
    model_of,
)
from jaxllama.checkpoints.hf.gla_paper import config_from_paper, config_to_paper
from jaxllama.checkpoints.hf.refused import HEADS, REFUSED, TEXT_TYPES, WRAPPERS
from jaxllama.checkpoints.hf.rope import rope_scaling, ropes, usable_context
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import UNGATED, CheckpointForm, ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.mixers import MIXERS
from jaxllama.typing import JsonMapping, JsonObject

if TYPE_CHECKING:
    from jaxllama.decoding.sampling import Sampling

_ARCHITECTURES = {
    name: kind for kind, family in reversed(FAMILIES.items()) for name in family.architectures
} | {model.architecture: kind for kind, model in MODELS.items()}
CLASSIFIER = "ForSequenceClassification"
# Keys in which null has a meaning of its own.
_NULLABLE = (
    "head_dim",
    "num_key_value_heads",
    "bos_token_id",
    "eos_token_id",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope_parameters",
    "q_lora_rank",
    "scale_depth",
    "dim_model_base",
    "mamba_d_ssm",
    "attention_value_scale",
)
_KEYS = frozenset(
    """
    architectures model_type quantization_config compression_config vocab_size hidden_size
    intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings original_max_position_embeddings rope_theta rope_scaling
    rope_parameters partial_rotary_factor tie_word_embeddings bos_token_id eos_token_id
    """.split()
)
# Keys that can change the computation of any family, with the supported value.
_FIXED: dict[str, tuple[object, ...]] = {"is_causal": (True,), "per_layer_config": (None, {})}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Bounds what a damaged file can make us build before its tensors are checked.
_MAX_LAYERS = 4096
_OF_IMAGES = re.compile("vision|image|video")  # keys of a multimodal config


def config_from_hf(
    config: JsonMapping, name: str, generation: JsonMapping | None = None
) -> ModelConfig:
    """Return the ModelConfig of a parsed ``config.json``; for a multimodal model its text
    decoder's.

    Parameters
    ----------
    config : mapping
        The parsed file.
    name : str
        Name of the model.
    generation : mapping or None
        A parsed ``generation_config.json``, whose token ids take precedence.

    Raises
    ------
    JaxLlamaError
        Naming the key and its value.
    """
    config = text_config(config)
    is_paper = config.get("model_type") in ("gla", "transformer") and "n_head" in config
    kind = PAPER if is_paper else _model_type(config)
    ids = {key: (generation or {}).get(key) for key in ("bos_token_id", "eos_token_id")}
    config = {**config, **{key: value for key, value in ids.items() if value is not None}}
    if kind in MODELS:
        return config_from_fla(config, name, kind)
    if kind == PAPER:
        return config_from_paper(config, name)
    family = FAMILIES[kind]
    config = family.shared(config)
    windowed = () if family.window == "none" else ("sliding_window", "layer_types")
    windowed += ("use_sliding_window", "max_window_layers") if family.window == "use" else ()
    known = (
        *_KEYS,
        family.eps,
        family.activation,
        *family.all_keys,
        *family.defaults,
        *windowed,
        *(key for key, _, _ in family.same),
    )
    fixed = {key: values for key, values in _FIXED.items() if key not in family.keys}
    JsonReader(config).check_keys(name, kind, known, {**fixed, **family.fixed})
    given = {k: v for k, v in config.items() if v is not None or k in _NULLABLE}
    read = JsonReader({**COMMON, **family.defaults, **given})
    if family.derived is not None:
        missing = {k: v for k, v in family.derived(read).items() if read.config.get(k) is None}
        read = JsonReader({**read.config, **missing})
    d_model = read.size("hidden_size")
    n_heads = read.size("num_attention_heads")
    n_layers = read.size("num_hidden_layers", limit=_MAX_LAYERS)
    key = family.turning or "head_dim"
    if read.config.get(key) is None and d_model % n_heads:
        raise read.error("num_attention_heads", f"must divide hidden_size ({d_model})")
    head_dim = read.size(key, d_model // n_heads)
    activation = read.text(family.activation, "silu")
    is_gated = family.facts.get("gated_mlp", True) and "inner_norms" not in family.facts
    known_ones = [name for name in ACTIVATIONS if not (is_gated and name in UNGATED)]
    if activation not in known_ones:
        raise read.error(family.activation, f"not supported; supported: {', '.join(known_ones)}")
    max_position = read.size("max_position_embeddings")
    rope, window_rope = ropes(kind, read, head_dim, max_position)
    if family.turning:
        rope = dataclasses.replace(rope, rotary_dim=head_dim)
    window, window_layers = _window(family, read, n_layers)
    slides = set(window_layers or range(n_layers) if window else ())
    nope: set[int] = set()
    if family.is_nope is not None:
        nope = {i for i in range(n_layers) if family.is_nope(i, read, i in slides)}
    stored, fields = _stored_of(kind, family.translated(read))
    eos, bos = read.token_ids("eos_token_id", None), read.token_ids("bos_token_id", None)
    found: JsonObject = {
        "name": name,
        "vocab_size": read.size("vocab_size"),
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": read.size("num_key_value_heads", n_heads),
        "head_dim": head_dim,
        "d_ff": read.size("intermediate_size"),
        "norm_eps": read.number(family.eps),
        "max_position": usable_context(rope, max_position),
        "rope": rope,
        "window_rope": window_rope if slides else None,
        "nope_layers": tuple(sorted(nope)),
        "tie_embeddings": has_no_head(config) or read.flag("tie_word_embeddings", False),
        "sliding_window": window,
        "window_layers": window_layers,
        "activation": ACTIVATIONS[activation],
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": eos,
        "stored": stored,
    }
    return ModelConfig.of(**{**found, **fields, **family.facts})


def _stored_of(family: str, fields: JsonMapping) -> tuple[CheckpointForm, Mapping[str, Any]]:
    """Split fields by path into (``CheckpointForm``, the fields of ModelConfig)."""
    stored = {key[7:]: value for key, value in fields.items() if key.startswith("stored.")}
    rest = {key: value for key, value in fields.items() if not key.startswith("stored.")}
    name = stored_name(family)
    return CheckpointForm(family=name, **FAMILIES[family].stored, **stored), rest


def text_config(config: JsonMapping) -> JsonMapping:
    """Return the text decoder's part of a multimodal config.json; other configs as they are."""
    text, kind = config.get("text_config"), config.get("model_type")
    wrapped = WRAPPERS.get(kind) if isinstance(kind, str) else None
    if wrapped and text is None and "vision_config" in config:  # its keys stand beside the others
        alone = {key: config[key] for key in config if not _OF_IMAGES.search(key)}
        return _with_plain_rope({**alone, "model_type": wrapped})
    if not isinstance(text, Mapping):
        return config
    kind = text.get("model_type")
    kind = TEXT_TYPES.get(kind, kind) if isinstance(kind, str) else ""
    if kind not in FAMILIES:
        return config
    around = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
    found = {**{key: config[key] for key in around if key in config}, **text, "model_type": kind}
    # transformers ties by the outer value; weights with a head of their own untie it.
    found |= {"tie_word_embeddings": True} if config.get("tie_word_embeddings") else {}
    return _with_plain_rope(found)


def _with_plain_rope(config: JsonMapping) -> JsonMapping:
    """Return the config without the sections of M-RoPE (arXiv 2409.12191), whose three positions
    are the same number in text."""
    found = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = found.get(key)
        if isinstance(scaling, Mapping) and "mrope_section" in scaling:
            kept = {k: v for k, v in scaling.items() if not k.startswith("mrope")}
            found[key] = {k: "default" if v == "mrope" else v for k, v in kept.items()}
    return found


def config_to_hf(cfg: ModelConfig, dtype: str | None = None) -> JsonObject:
    """Return the ``config.json`` that transformers (4 and 5) reads as ``cfg``.

    dtype: name of the weights' dtype, for ``torch_dtype``. Raises JaxLlamaError naming an option
    that no supported architecture has.
    """
    if model_of(cfg) is not None:
        return config_to_fla(cfg)
    if cfg.stored.family == PAPER:
        return config_to_paper(cfg)
    kind = family_of(cfg)
    family = FAMILIES[kind]
    result: JsonObject = {
        "architectures": [family.architectures[0]],
        "model_type": kind,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        family.activation: next(hf for hf, ours in ACTIVATIONS.items() if ours == cfg.activation),
        family.eps: cfg.norm_eps,
        "max_position_embeddings": cfg.max_position,
        "rope_theta": cfg.rope.theta,
        "rope_scaling": rope_scaling(cfg.rope, cfg.head_dim),
        "tie_word_embeddings": cfg.tie_embeddings,
        "pad_token_id": None,  # some classes have a default that a small vocabulary lacks
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": _id_or_ids(cfg.eos_token_ids),
    }
    is_partial = bool(cfg.rope.rotary_dim) and not family.turning
    if is_partial or "partial_rotary_factor" in family.defaults:
        turning = cfg.rope.rotary_dim or cfg.head_dim
        result["partial_rotary_factor"] = turning / cfg.head_dim
    if cfg.rope.scaling == "dynamic":
        result["max_position_embeddings"] = cfg.rope.original_max_position
    if cfg.rope.scaling == "longrope":
        result["original_max_position_embeddings"] = cfg.rope.original_max_position
    if family.is_local:
        local = cfg.window_rope or cfg.rope
        widths = cfg.head_dim if cfg.full is None else cfg.full.head_dim, cfg.head_dim
        result |= {"rope_local_base_freq": local.theta} if family.writes_local_theta else {}
        result["rope_parameters"] = {
            name: {
                "rope_type": "default",
                **(rope_scaling(rope, width) or {}),
                "rope_theta": rope.theta,
            }
            for name, rope, width in zip(_LAYER_TYPES, (cfg.rope, local), widths, strict=True)
        }
    for key, path, _ in family.same:
        first, _, rest = path.partition(".")
        value = getattr(cfg, first)
        result[key] = getattr(value, rest) if rest else value
    if family.window != "none":
        result["sliding_window"] = cfg.sliding_window
        if cfg.window_layers or not isinstance(family.window, str):
            slides = (layer.window is not None for layer in cfg.layers)
            result["layer_types"] = [_LAYER_TYPES[is_sliding] for is_sliding in slides]
    if family.window == "use":
        result["use_sliding_window"] = cfg.sliding_window is not None
        # For versions of transformers before layer_types.
        result["max_window_layers"] = min(cfg.window_layers, default=0)
    if len(cfg.nope_layers) == cfg.n_layers:
        del result["rope_theta"], result["rope_scaling"]
    if family.rope_key == "rope_parameters":
        result["rope_parameters"] = {
            "rope_type": "default",
            **(result.pop("rope_scaling") or {}),
            "rope_theta": result.pop("rope_theta"),
        }
    result = family.renamed(result | family.written(cfg))
    _check_way_back(cfg, result, kind)
    return result if dtype is None else {**result, "torch_dtype": dtype}


def _check_way_back(cfg: ModelConfig, config: JsonObject, kind: str) -> None:
    """Raise JaxLlamaError naming a field for which the family has no key."""
    for key, value, other in differences(cfg, config_from_hf(config, cfg.name), 1e-9):
        if key != "attn_sparsity":
            raise JaxLlamaError(
                f"{key} = {value!r}: no class of transformers has it ({kind}: {other!r})"
            )


def differences(
    cfg: ModelConfig, other: ModelConfig, tolerance: float
) -> Iterator[tuple[str, object, object]]:
    """Yield (flat key, ``cfg``'s value, the other's) of the fields in which two configs differ.

    tolerance: relative difference of numbers that counts as none.
    """
    theirs = _flat(other)
    for key, value in _flat(cfg).items():
        found = theirs.get(key)
        near = False
        if isinstance(value, float) and isinstance(found, int | float):
            near = math.isclose(value, found, rel_tol=tolerance)
        if value != found and not near:
            yield key, value, found


def generation_config(cfg: ModelConfig, sampling: Sampling | None = None) -> JsonObject:
    """Return ``generation_config.json``: the tokens that end a text, and the sampling."""
    ids = {"bos_token_id": cfg.bos_token_id, "eos_token_id": _id_or_ids(cfg.eos_token_ids)}
    ids = {key: value for key, value in ids.items() if value is not None}
    if sampling is None:
        return {"_from_model_config": True, **ids}
    keys: JsonObject = {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        keys |= {key: getattr(sampling, key) for key in ("temperature", "top_k", "top_p", "min_p")}
    return {**ids, **keys, "repetition_penalty": sampling.repetition_penalty}


_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_of(generation: JsonMapping) -> Sampling | None:
    """Return the sampling of a parsed ``generation_config.json``; None if it has none.

    Without ``do_sample`` the sampling is greedy, as in transformers. A missing step is skipped,
    while transformers keeps the 50 likeliest tokens if ``top_k`` is missing. Raises JaxLlamaError
    naming the key.
    """
    from jaxllama.decoding.sampling import Sampling  # imports jax

    read = JsonReader(generation)
    if all(generation.get(key) is None for key in _SAMPLING):
        return None
    penalty = read.number("repetition_penalty", 1.0)
    if not read.flag("do_sample", False):
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        temperature=read.number("temperature", 1.0),
        top_k=read.natural("top_k", 0),
        top_p=read.number("top_p", 1.0),
        min_p=read.number("min_p", 0.0),
        repetition_penalty=penalty,
    )


# Fields that are not properties of the weights: a name, options of a run, ids that fine-tuning
# changes.
_FREE = (
    "name",
    "attn_sparsity",
    "embedding_scale",
    "bos_token_id",
    "eos_token_ids",
    "mtp_layers",
)


def check_preset(preset: ModelConfig, checkpoint: ModelConfig) -> ModelConfig:
    """Return the preset with the checkpoint's token ids.

    Raises JaxLlamaError for the first other key in which the two differ, with both values.
    """
    ours, theirs = _flat(preset), _flat(checkpoint)
    for key in ours | theirs:
        if key not in _FREE and ours.get(key) != theirs.get(key):
            raise JaxLlamaError(
                f"{key}: preset {preset.name!r} says {ours.get(key)!r}, "
                f"the checkpoint {checkpoint.name!r} says {theirs.get(key)!r}"
            )
    return preset.replace(
        bos_token_id=checkpoint.bos_token_id, eos_token_ids=checkpoint.eos_token_ids
    )


def _flat(cfg: ModelConfig) -> JsonObject:
    """Return all options by flat key, those of ``mixers`` with their defaults."""
    found: JsonObject = {}
    for key, value in dataclasses.asdict(cfg.flat).items():
        if key == "mixers":
            found |= {f"mixers.{kind}": _options(cfg, kind, options) for kind, options in value}
        elif isinstance(value, dict):
            found |= {f"{key}.{name}": inner_value for name, inner_value in value.items()}
        else:
            found[key] = value
    return found


def _options(cfg: ModelConfig, kind: str, options: object) -> object:
    layer = next((layer for layer in cfg.layers if layer.kind == kind), None)
    of = getattr(MIXERS[kind].parameters, "options", None) if kind in MIXERS else None
    return options if of is None or layer is None else of(layer)


def _model_type(config: JsonMapping) -> str:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise JsonReader(config).error("architectures", "expected a list")
    kind = config.get("model_type")
    if not isinstance(kind, str | None):
        raise JsonReader(config).error("model_type", "expected a string")
    names = [decoder_of(name) if isinstance(name, str) else None for name in architectures]
    if not all(name in _ARCHITECTURES for name in names):
        raise JsonReader(config).error("architectures", _why_not(config, str(kind)))
    if kind is None and architectures:
        kind = _ARCHITECTURES[str(names[0])]
    kind = TEXT_TYPES.get(kind, kind) if kind is not None else None
    if kind is None or kind not in {**FAMILIES, **MODELS}:
        raise JsonReader({"model_type": kind}).error("model_type", _why_not(config, str(kind)))
    return kind


def decoder_of(architecture: str) -> str:
    """Return the language model's class of a bare decoder (``Qwen3Model``) or a classifier."""
    for ending in (CLASSIFIER, "Model"):
        name = architecture.removesuffix(ending) + "ForCausalLM"
        if architecture.endswith(ending) and name in _ARCHITECTURES:
            return name
    return architecture


def has_no_head(config: JsonMapping) -> bool:
    """Return whether a config.json is of a bare decoder or a classifier, without a head."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return any(decoder_of(str(name)) != name for name in names)


def _why_not(config: JsonMapping, kind: str) -> str:
    """Return why a model is not supported, with the nearest supported ones."""
    supported = tuple({**FAMILIES, **MODELS})
    what, architectures = "not supported", config.get("architectures") or ()
    if any(name in HEADS for name in architectures):
        return "a head that drafts for a model: name its folder as the draft (jl.load_drafter)"
    is_decoder = all(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    if kind in REFUSED:
        what = f"not supported: {REFUSED[kind]}"
    elif _has_experts(config, kind):
        what = "a mixture of experts, which is not supported"
    if config.get("is_encoder_decoder") or not is_decoder:
        what = "no decoder-only language model"
    if any(config[key] and key.endswith(("vision_config", "audio_config")) for key in config):
        what = "a multimodal model whose text model is not supported"
    near = [name for name in difflib.get_close_matches(kind, supported, 3, 0.4) if name != kind]
    nearest = f"; nearest: {', '.join(near)}" if near else ""
    return f"{what}; supported: {', '.join(supported)}{nearest}"


def _has_experts(config: JsonMapping, kind: str) -> bool:
    """Return whether a config is of a mixture of experts.

    Dense models of such families keep the keys, with a false flag or zero experts. The family's
    name decides if no key does.
    """
    flags = [config[key] for key in ("is_moe", "enable_moe_block") if key in config]
    counts = [config[key] for key in _EXPERT_COUNTS if key in config]
    return any(flags or counts or ["moe" in kind])


def _window(family: Family, read: JsonReader, n_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Return (sliding window, the layers that have it).

    transformers reads "mistral" with layer_types as ministral; without them ministral is mistral.
    """
    if family.window == "none":
        return None, ()
    window = None
    has_switch = family.window == "use" or "use_sliding_window" in family.keys
    is_on = not has_switch or read.flag("use_sliding_window", False)
    if is_on and read.config.get("sliding_window") is not None:
        window = read.size("sliding_window")
    types = read.config.get("layer_types")
    if types is None:
        first = read.natural("max_window_layers", 28) if window and family.window == "use" else 0
        pattern = family.window if callable(family.window) else lambda i, _: i >= first
        types = [_LAYER_TYPES[bool(window and pattern(i, read))] for i in range(n_layers)]
    known = (*_LAYER_TYPES, *("linear_attention",) * ("layer_types" in family.keys))
    ok = isinstance(types, list) and len(types) == n_layers
    if not ok or not all(entry in known for entry in types):
        raise read.error("layer_types", f"must be {n_layers} entries of {known}")
    layers = tuple(index for index, entry in enumerate(types) if entry == "sliding_attention")
    if layers and window is None:
        raise read.error("layer_types", "'sliding_attention' without a sliding_window")
    return (window, layers) if layers else (None, ())


def _id_or_ids(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)
