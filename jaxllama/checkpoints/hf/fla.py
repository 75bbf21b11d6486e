"""flash-linear-attention's models: config.json <-> ModelConfig.

The module covers ``GLAForCausalLM``, ``LinearAttentionForCausalLM``, ``GatedDeltaNetForCausalLM``,
``KDAForCausalLM`` and ``DeltaNetForCausalLM``, with their ``attn`` layers (hybrids). It also covers
models of the library's layer ``SimpleGatedLinearAttention``, for which the library has no class;
they are called ``simple_gla`` here. A checkpoint writes the norm of a head's output under one of
two names. Old ones fuse the feed-forward's gate and up into one tensor. So ``param_table`` receives
the names of the file's tensors. The layer's low-rank width (16) and ``gate_logit_normalizer`` (16)
are not in the library's config: these are its layer's defaults.

Left out: feature maps with parameters, value gates, attention residuals, more than one ``attn``
specification, and Kimi Delta Attention with more value heads than key heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import (
    CheckpointForm,
    DeltaConfig,
    FeatureMap,
    GLAConfig,
    ModelConfig,
    RopeConfig,
)
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonMapping, JsonObject

_LOW_RANK, _NORMALIZER = 16, 16.0
_THETA = 10000.0
PAPER = "gla_paper"  # the family of ``hf.gla_paper``
# Keys that are read in every config.json.
_KEYS = frozenset(
    """
    architectures model_type quantization_config compression_config vocab_size hidden_size
    intermediate_size hidden_ratio num_hidden_layers num_heads use_short_conv conv_size norm_eps
    max_position_embeddings attn tie_word_embeddings bos_token_id eos_token_id
    """.split()
)
# Keys that select an implementation of the same computation.
_SAME = (
    "attn_mode",
    "fuse_norm",
    "fuse_swiglu",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "use_l2warp",
)
# Options of other families, with the values that these models have.
PLAIN = (
    ("norm", "rms"),
    ("norm_bias", False),
    ("pre_norms", True),
    ("post_norms", False),
    ("qk_norm", "none"),
    ("parallel_block", False),
    ("activation", "silu"),
    ("attn_softcap", None),
    ("logit_softcap", None),
    ("window_rope", None),
    ("nope_layers", ()),
    ("attn_gate", False),
    ("gated_mlp", True),
    ("bare_layers", ()),
    ("norm_weight", True),
    ("post_norm_layers", ()),
    ("qk_norm_last", False),
    ("parallel_norms", False),
    ("learned_positions", None),
)
# Options that change the computation, with the only supported value.
_FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("swish", "silu"),
    "attnres_block_size": (None,),
}
Fields = JsonObject


@dataclasses.dataclass(frozen=True)
class _Model:
    """A model type of the library.

    layer: the kind of our layer. n_heads, n_layers: defaults. fields, to_fla: translate the mixer's
    keys to fields of ModelConfig, and back. fixed: as ``_FIXED``.
    """

    architecture: str
    layer: str
    n_heads: int
    n_layers: int
    keys: tuple[str, ...]
    fields: Callable[[JsonReader, int], Fields]
    to_fla: Callable[[ModelConfig], Fields]
    fixed: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)


# The library's feature maps without parameters; the first name of a map is the one written.
_ACTIVATIONS: dict[str | None, FeatureMap] = {
    None: "none",
    "relu": "relu",
    "sqrelu": "sqrelu",
    "sigmoid": "sigmoid",
    "logsigmoid": "logsigmoid",
    "swish": "silu",
    "silu": "silu",
    "gelu": "gelu_tanh",
}
_KERNELS: dict[str | None, FeatureMap] = {"elu": "elu", "relu": "relu", "identity": "none"}


def _linear(
    read: JsonReader,
    n_heads: int,
    expand_k: float,
    maps: Mapping[str | None, FeatureMap],
    **facts: Any,
) -> Fields:
    """Return the options that GLA, simple GLA and linear attention share.

    expand_k: its default.  maps: feature maps by their names in the file; the first is the default.
    facts: further fields of GLAConfig.
    """
    name = read.config.get("feature_map", next(iter(maps)))
    if not isinstance(name, str | None) or name not in maps:
        known = ", ".join(map(repr, maps))
        raise read.error("feature_map", f"only {known} are supported")
    gla = GLAConfig(
        n_heads=n_heads,
        n_kv_heads=read.size("num_kv_heads", n_heads),
        expand_k=read.positive("expand_k", expand_k),
        expand_v=read.positive("expand_v", 1.0),
        gate_low_rank_dim=_LOW_RANK,
        gate_logit_normalizer=_NORMALIZER,
        norm_eps=read.number("norm_eps", 1e-6),
        feature_map=maps[name],
        norm_weight=read.flag("elementwise_affine", True),
        **facts,
    )
    return {"gla": gla}


def _gla(read: JsonReader, n_heads: int) -> Fields:
    return _linear(
        read,
        n_heads,
        0.5,
        _ACTIVATIONS,
        clamp_min=read.number("clamp_min", None),
        use_short_conv=read.flag("use_short_conv", False),
        conv_size=read.size("conv_size", 4),
        use_output_gate=read.flag("use_output_gate", True),
    )


def _simple_gla(read: JsonReader, n_heads: int) -> Fields:
    return _linear(
        read,
        n_heads,
        1.0,
        _ACTIVATIONS,
        decay="head",
        use_short_conv=read.flag("use_short_conv", True),
        conv_size=read.size("conv_size", 4),
    )


def _linear_attn(read: JsonReader, n_heads: int) -> Fields:
    if read.config.get("feature_map") is None:
        raise read.error("feature_map", "means 'elementwise_product', which is not supported")
    return _linear(
        read,
        n_heads,
        1.0,
        _KERNELS,
        decay="none",
        use_output_gate=False,
        normalizer=read.flag("norm_feature_map", False),
    )


def _gla_to_fla(cfg: ModelConfig) -> Fields:
    gla, kind = cfg.gla, model_of(cfg)
    assert gla is not None and kind is not None
    maps = _KERNELS if kind == "linear_attn" else _ACTIVATIONS
    names = {ours: name for name, ours in reversed(maps.items())}
    result = {
        **{key: value for key, value in dataclasses.asdict(gla).items() if key != "decay"},
        "num_heads": gla.n_heads,
        "num_kv_heads": gla.n_kv_heads,
        "norm_eps": cfg.norm_eps,
        "feature_map": names.get(gla.feature_map, gla.feature_map),
        "elementwise_affine": gla.norm_weight,
        "norm_feature_map": gla.normalizer,
    }
    result = {key: value for key, value in result.items() if key in (*_KEYS, *MODELS[kind].keys)}
    read = dataclasses.asdict(MODELS[kind].fields(JsonReader(result), gla.n_heads)["gla"])
    only(
        f"flash-linear-attention's {kind}",
        ((f"gla.{key}", getattr(gla, key), have) for key, have in read.items()),
    )
    return result


def _delta(
    read: JsonReader, n_heads: int, v_heads: int, d_k: int, d_v: float, **facts: Any
) -> Fields:
    if d_v != int(d_v) or d_v < 1:
        raise read.error("expand_v", f"heads of values of {d_v:g} features")
    has_conv = read.flag("use_short_conv", True)
    delta = DeltaConfig(
        n_heads=v_heads,
        n_k_heads=n_heads,
        d_k=d_k,
        d_v=int(d_v),
        norm_eps=read.number("norm_eps", 1e-6),
        conv_size=read.size("conv_size", 4) if has_conv else 0,
        beta_max=2.0 if read.flag("allow_neg_eigval", False) else 1.0,
        **facts,
    )
    return {"delta": delta}


def _gated_delta_net(read: JsonReader, n_heads: int) -> Fields:
    d_k, v_heads = read.size("head_dim", 256), read.size("num_v_heads", n_heads)
    gate = "full" if read.flag("use_gate", True) else "none"
    return _delta(read, n_heads, v_heads, d_k, d_k * read.positive("expand_v", 2.0), gate=gate)


def _kda(read: JsonReader, n_heads: int) -> Fields:
    d_k = read.size("head_dim", 128)
    if read.size("num_v_heads", n_heads) != n_heads:
        raise read.error("num_v_heads", f"only num_heads ({n_heads}) is supported")
    return _delta(
        read,
        n_heads,
        n_heads,
        d_k,
        d_k * read.positive("expand_v", 1.0),
        decay="channel",
        gate="low_rank",
        gate_bias=True,
        gate_activation="sigmoid",
    )


def _delta_net(read: JsonReader, n_heads: int) -> Fields:
    width = read.size("hidden_size", 2048)
    d_k = width * read.positive("expand_k", 1.0) / n_heads
    if d_k != int(d_k):
        raise read.error("expand_k", f"heads of keys of {d_k:g} features")
    gate = "full" if read.flag("use_gate", False) else "none"
    d_v = width * read.positive("expand_v", 1.0) / n_heads
    return _delta(read, n_heads, n_heads, int(d_k), d_v, decay="none", gate=gate)


def _delta_to_fla(cfg: ModelConfig) -> Fields:
    delta, kind = cfg.delta, cfg.stored.family
    assert delta is not None
    result = {
        "num_heads": delta.n_k_heads,
        "use_short_conv": delta.conv_size > 0,
        "conv_size": delta.conv_size or 4,
        "allow_neg_eigval": delta.beta_max != 1.0,
        "norm_eps": cfg.norm_eps,
    }
    if kind == "delta_net":
        result |= {"hidden_size": cfg.d_model}
        result |= {
            f"expand_{x}": delta.n_k_heads * getattr(delta, f"d_{x}") / cfg.d_model for x in "kv"
        }
    else:
        result |= {
            "head_dim": delta.d_k,
            "expand_v": delta.d_v / delta.d_k,
            "num_v_heads": delta.n_heads,
        }
    result |= {} if kind == "kda" else {"use_gate": delta.gate == "full"}
    read = dataclasses.asdict(MODELS[kind].fields(JsonReader(result), delta.n_k_heads)["delta"])
    only(
        f"flash-linear-attention's {kind}",
        ((f"delta.{key}", getattr(delta, key), have) for key, have in read.items()),
    )
    return result


_GLA_KEYS = ("num_kv_heads", "expand_k", "expand_v", "feature_map", "elementwise_affine")
_DELTA_FIXED = {"conv_bias": (False,), "elementwise_affine": (True,)}
_DELTA_KEYS = ("expand_v", "allow_neg_eigval", "head_dim", "num_v_heads")
MODELS = {
    "gla": _Model(
        "GLAForCausalLM",
        "gla",
        4,
        24,
        (*_GLA_KEYS, "clamp_min", "use_output_gate"),
        _gla,
        _gla_to_fla,
        {"use_gk": (True,), "use_gv": (False,)},
    ),
    "simple_gla": _Model(
        "SimpleGLAForCausalLM",
        "gla",
        4,
        24,
        _GLA_KEYS,
        _simple_gla,
        _gla_to_fla,
        {"conv_bias": (False,), "gate_fn": ("swish", "silu")},
    ),
    "linear_attn": _Model(
        "LinearAttentionForCausalLM",
        "gla",
        4,
        24,
        (*_GLA_KEYS, "norm_feature_map", "tie_feature_map_qk"),
        _linear_attn,
        _gla_to_fla,
        {"norm_q": (False,), "norm_k": (False,)},
    ),
    "gated_deltanet": _Model(
        "GatedDeltaNetForCausalLM",
        "delta",
        6,
        21,
        (*_DELTA_KEYS, "use_gate"),
        _gated_delta_net,
        _delta_to_fla,
        _DELTA_FIXED,
    ),
    "kda": _Model(
        "KDAForCausalLM",
        "delta",
        16,
        24,
        _DELTA_KEYS,
        _kda,
        _delta_to_fla,
        {**_DELTA_FIXED, "safe_gate": (False,), "lower_bound": (None,)},
    ),
    "delta_net": _Model(
        "DeltaNetForCausalLM",
        "delta",
        16,
        24,
        ("expand_k", "use_gate", *_DELTA_KEYS[:2]),
        _delta_net,
        _delta_to_fla,
        {
            **_DELTA_FIXED,
            "use_beta": (True,),
            "use_output_norm": (True,),
            "qk_norm": ("l2",),
            "qk_activation": ("silu",),
        },
    ),
}


def model_of(cfg: ModelConfig) -> str | None:
    """Return the key of a config in ``MODELS``; None for models of other libraries."""
    if cfg.stored.family in MODELS:
        return cfg.stored.family
    return "gla" if "gla" in cfg.layer_types and cfg.stored.family != PAPER else None


def config_from_fla(config: JsonMapping, name: str, kind: str = "gla") -> ModelConfig:
    """Return the ModelConfig of a parsed ``config.json`` with a model type of ``MODELS``.

    Raises JaxLlamaError naming the key and its value.
    """
    read, model = JsonReader(config), MODELS[kind]
    read.check_keys(name, kind, (*_KEYS, *_SAME, *model.keys), {**_FIXED, **model.fixed})
    d_model = read.size("hidden_size", 2048)
    n_layers = read.size("num_hidden_layers", model.n_layers, limit=4096)
    n_heads = read.size("num_heads", model.n_heads)
    attn = _attention(config, n_layers)
    a_heads, a_kv_heads = n_heads, n_heads
    window, theta, qkv_bias = None, _THETA, False
    layers: list[int] = []
    if attn is not None:
        spec = JsonReader(attn, "attn.")
        layers = list(attn["layers"])
        a_heads = spec.size("num_heads")
        a_kv_heads = spec.size("num_kv_heads", a_heads)
        window = None if attn.get("window_size") is None else spec.size("window_size")
        theta = spec.positive("rope_theta", _THETA)
        qkv_bias = spec.flag("qkv_bias", False)
        if d_model % a_heads:
            raise spec.error("num_heads", f"must divide hidden_size ({d_model})")
    head_dim = d_model // a_heads
    if not layers:  # unused, but it must be valid
        head_dim = max(2, head_dim - head_dim % 2)
    bos = read.token_ids("bos_token_id", 1)
    max_position = read.size("max_position_embeddings", 2048)
    kinds: Any = tuple("attention" if i in layers else model.layer for i in range(n_layers))
    return ModelConfig.of(
        name=name,
        vocab_size=read.size("vocab_size", 32000),
        d_model=d_model,
        n_layers=n_layers,
        n_heads=a_heads,
        n_kv_heads=a_kv_heads,
        head_dim=head_dim,
        d_ff=swiglu_width(read, d_model),
        norm_eps=read.number("norm_eps", 1e-6),
        max_position=max_position,
        rope=RopeConfig(theta),
        tie_embeddings=read.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        sliding_window=window,
        layer_types=kinds,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=read.token_ids("eos_token_id", 2),
        stored=_stored(kind),
        **model.fields(read, n_heads),
    )


def _stored(kind: str) -> CheckpointForm:
    return CheckpointForm() if kind == "gla" else CheckpointForm(family=kind)


def only(whose: str, facts: Any) -> None:
    """Raise JaxLlamaError for a value that these models lack.

    facts: (key, value, the only supported value).
    """
    for key, value, have in facts:
        if value != have:
            raise JaxLlamaError(f"{key} = {value!r}: {whose} models only have {have!r}")


def swiglu_width(read: JsonReader, d_model: int) -> int:
    """Return the given width.

    Its default is 2/3 of ``hidden_ratio * d_model``, rounded up to a multiple of 256.
    """
    if read.config.get("intermediate_size") is not None:
        return read.size("intermediate_size")
    width = int(d_model * read.size("hidden_ratio", 4) * 2 / 3)
    return -(-width // 256) * 256


def _attention(config: JsonMapping, n_layers: int) -> JsonMapping | None:
    attn = config.get("attn")
    if isinstance(attn, list) and len(attn) <= 1:
        attn = attn[0] if attn else None
    if attn is None:
        return None
    read = JsonReader(config)
    if not isinstance(attn, Mapping):
        raise read.error("attn", "expected one object, or a list of one")
    layers = attn.get("layers")
    indices = layers if isinstance(layers, list) else [None]
    ok = all(type(i) is int and 0 <= i < n_layers for i in indices)
    if not ok or len(set(indices)) < len(indices):
        raise JsonReader(attn, "attn.").error(
            "layers", f"expected a list of different layers, each below {n_layers}"
        )
    return attn


def config_to_fla(cfg: ModelConfig) -> JsonObject:
    """Return the ``config.json`` that flash-linear-attention reads as ``cfg``, one of ``MODELS``.

    Raises JaxLlamaError naming an option that its models lack.
    """
    kind = model_of(cfg)
    assert kind is not None
    model = MODELS[kind]
    attention = [i for i, layer in enumerate(cfg.layer_types) if layer == "attention"]
    mixer = model.to_fla(cfg)
    heads = cfg.n_heads * cfg.head_dim if attention else cfg.d_model
    only(
        f"flash-linear-attention's {kind}",
        (
            ("embedding_scale", cfg.embedding_scale, False),
            ("o_bias", cfg.o_bias, False),
            ("mlp_bias", cfg.mlp_bias, False),
            ("rope.scaling", cfg.rope.scaling, "none"),
            ("n_heads * head_dim", heads, cfg.d_model),
            ("window_layers", cfg.window_layers, ()),
            *((key, getattr(cfg.flat, key), have) for key, have in PLAIN),
            ("stored", cfg.stored, _stored(kind)),
        ),
    )
    attn = None
    if attention:
        attn = {
            "layers": attention,
            "num_heads": cfg.n_heads,
            "num_kv_heads": cfg.n_kv_heads,
            "qkv_bias": cfg.qkv_bias,
            "window_size": cfg.sliding_window,
            "rope_theta": cfg.rope.theta,
        }
    eos = cfg.eos_token_ids
    return {
        "architectures": [model.architecture],
        "model_type": kind,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.n_layers,
        **mixer,
        "hidden_act": "swish",
        "norm_eps": cfg.norm_eps,
        "max_position_embeddings": cfg.max_position,
        "attn": attn,
        "tie_word_embeddings": cfg.tie_embeddings,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
    }
