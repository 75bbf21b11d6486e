"""flash-linear-attention's models: config.json <-> ModelConfig.

Covers ``GLAForCausalLM``, ``GatedDeltaNetForCausalLM``, ``KDAForCausalLM`` and
``DeltaNetForCausalLM`` with their ``attn`` layers (hybrids).  A checkpoint writes the norm of a
head's output under one of two names, and old ones fuse the feed-forward's gate and up into one
tensor; ``param_table`` is told which tensors there are.  The layer's low-rank width (16) and
``gate_logit_normalizer`` (16) are not part of that library's config: it uses its layer's defaults.

Left out: feature maps, value gates, norms without weights, attention residuals, more than one
``attn`` specification; of Kimi Delta Attention more value heads than key heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import DeltaConfig, GLAConfig, ModelConfig, RopeConfig, Stored
from jaxllama.errors import JaxLlamaError

_LOW_RANK, _NORMALIZER = 16, 16.0
_THETA = 10000.0
# What is read of every config.json.
_KEYS = frozenset(
    """
    architectures model_type quantization_config compression_config vocab_size hidden_size
    intermediate_size hidden_ratio num_hidden_layers num_heads use_short_conv conv_size norm_eps
    max_position_embeddings attn tie_word_embeddings bos_token_id eos_token_id
    """.split()
)
# How that library computes the same.
_SAME = ("attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy",
         "fuse_linear_cross_entropy", "use_l2warp")  # fmt: skip
# What other families add to a block, as these models have it.
_PLAIN = (
    ("norm", "rms"), ("norm_bias", False), ("pre_norms", True), ("post_norms", False),
    ("qk_norm", "none"), ("parallel_block", False), ("activation", "silu"), ("attn_softcap", None),
    ("logit_softcap", None), ("window_rope", None), ("nope_layers", ()), ("attn_gate", False),
)  # fmt: skip
# Options that change the computation, with the only value that is supported.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("swish", "silu"),
    "elementwise_affine": (True,),
    "attnres_block_size": (None,),
}
Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Model:
    """layer: ours.  n_heads, n_layers: of a config without them.  fields, to_fla: the mixer's keys
    as fields of ModelConfig, and back.  fixed: as ``_FIXED``."""

    architecture: str
    layer: str
    n_heads: int
    n_layers: int
    keys: tuple[str, ...]
    fields: Callable[[JsonReader, int], Fields]
    to_fla: Callable[[ModelConfig], Fields]
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


def _gla(read: JsonReader, n_heads: int) -> Fields:
    gla = GLAConfig(
        n_heads=n_heads,
        n_kv_heads=read.size("num_kv_heads", n_heads),
        expand_k=read.positive("expand_k", 0.5),
        expand_v=read.positive("expand_v", 1.0),
        gate_low_rank_dim=_LOW_RANK,
        gate_logit_normalizer=_NORMALIZER,
        clamp_min=read.number("clamp_min", None),
        use_short_conv=read.flag("use_short_conv", False),
        conv_size=read.size("conv_size", 4),
        use_output_gate=read.flag("use_output_gate", True),
        norm_eps=read.number("norm_eps", 1e-6),
    )
    return {"gla": gla}


def _gla_to_fla(cfg: ModelConfig) -> Fields:
    gla = cfg.gla
    assert gla is not None
    _only("gla", (("gla.gate_low_rank_dim", gla.gate_low_rank_dim, _LOW_RANK),
                  ("gla.gate_logit_normalizer", gla.gate_logit_normalizer, _NORMALIZER),
                  ("gla.norm_eps", gla.norm_eps, cfg.norm_eps)))  # fmt: skip
    same = ("clamp_min", "use_short_conv", "conv_size", "use_output_gate", "expand_k", "expand_v")
    heads = {"num_heads": gla.n_heads, "num_kv_heads": gla.n_kv_heads}
    return heads | {key: getattr(gla, key) for key in same}


def _delta(read: JsonReader, n_heads: int, v_heads: int, d_k: int, d_v: float, **facts: Any
           ) -> Fields:  # fmt: skip
    if d_v != int(d_v) or d_v < 1:
        raise read.error("expand_v", f"heads of values of {d_v:g} features")
    has_conv = read.flag("use_short_conv", True)
    delta = DeltaConfig(
        n_heads=v_heads, n_k_heads=n_heads, d_k=d_k, d_v=int(d_v),
        norm_eps=read.number("norm_eps", 1e-6),
        conv_size=read.size("conv_size", 4) if has_conv else 0,
        beta_max=2.0 if read.flag("allow_neg_eigval", False) else 1.0,
        **facts,
    )  # fmt: skip
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
        read, n_heads, n_heads, d_k, d_k * read.positive("expand_v", 1.0), decay="channel",
        gate="low_rank", gate_bias=True, gate_activation="sigmoid",
    )  # fmt: skip


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
        result |= {f"expand_{x}": delta.n_k_heads * getattr(delta, f"d_{x}") / cfg.d_model
                   for x in "kv"}  # fmt: skip
    else:
        result |= {"head_dim": delta.d_k, "expand_v": delta.d_v / delta.d_k,
                   "num_v_heads": delta.n_heads}  # fmt: skip
    result |= {} if kind == "kda" else {"use_gate": delta.gate == "full"}
    read = dataclasses.asdict(MODELS[kind].fields(JsonReader(result), delta.n_k_heads)["delta"])
    _only(kind, ((f"delta.{key}", getattr(delta, key), only) for key, only in read.items()))
    return result


_DELTA_KEYS = ("expand_v", "allow_neg_eigval", "head_dim", "num_v_heads")
MODELS = {
    "gla": _Model(
        "GLAForCausalLM", "gla", 4, 24,
        ("num_kv_heads", "expand_k", "expand_v", "clamp_min", "use_output_gate"), _gla, _gla_to_fla,
        {"feature_map": (None,), "use_gk": (True,), "use_gv": (False,)},
    ),
    "gated_deltanet": _Model(
        "GatedDeltaNetForCausalLM", "delta", 6, 21, (*_DELTA_KEYS, "use_gate"), _gated_delta_net,
        _delta_to_fla, {"conv_bias": (False,)},
    ),
    "kda": _Model(
        "KDAForCausalLM", "delta", 16, 24, _DELTA_KEYS, _kda, _delta_to_fla,
        {"conv_bias": (False,), "safe_gate": (False,), "lower_bound": (None,)},
    ),
    "delta_net": _Model(
        "DeltaNetForCausalLM", "delta", 16, 24, ("expand_k", "use_gate", *_DELTA_KEYS[:2]),
        _delta_net, _delta_to_fla,
        {"conv_bias": (False,), "use_beta": (True,), "use_output_norm": (True,), "qk_norm": ("l2",),
         "qk_activation": ("silu",)},
    ),
}  # fmt: skip


def model_of(cfg: ModelConfig) -> str | None:
    """Which of ``MODELS`` a config is; None for those of other libraries."""
    kind = "gla" if "gla" in cfg.layer_types else cfg.stored.family
    return kind if kind in MODELS else None


def config_from_fla(config: Mapping[str, Any], name: str, kind: str = "gla") -> ModelConfig:
    """ModelConfig of a parsed ``config.json`` of a model type of ``MODELS``.

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
    if not layers:  # nothing reads it, but it must be a legal one
        head_dim = max(2, head_dim - head_dim % 2)
    bos = read.token_ids("bos_token_id", 1)
    max_position = read.size("max_position_embeddings", 2048)
    kinds: Any = tuple("attention" if i in layers else model.layer for i in range(n_layers))
    return ModelConfig(
        name=name,
        vocab_size=read.size("vocab_size", 32000),
        d_model=d_model,
        n_layers=n_layers,
        n_heads=a_heads,
        n_kv_heads=a_kv_heads,
        head_dim=head_dim,
        d_ff=_d_ff(read, d_model),
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


def _stored(kind: str) -> Stored:
    return Stored() if kind == "gla" else Stored(family=kind)


def _only(kind: str, facts: Any) -> None:
    for key, value, only in facts:
        if value != only:
            raise JaxLlamaError(
                f"{key} = {value!r}: flash-linear-attention's {kind} models only have {only!r}"
            )


def _d_ff(read: JsonReader, d_model: int) -> int:
    """The stated width, or 2/3 of ``hidden_ratio * d_model`` rounded up to a multiple of 256."""
    if read.config.get("intermediate_size") is not None:
        return read.size("intermediate_size")
    width = int(d_model * read.size("hidden_ratio", 4) * 2 / 3)
    return -(-width // 256) * 256


def _attention(config: Mapping[str, Any], n_layers: int) -> Mapping[str, Any] | None:
    attn = config.get("attn")
    if isinstance(attn, list) and len(attn) <= 1:
        attn = attn[0] if attn else None
    if attn is None:
        return None
    read = JsonReader(config)
    if not isinstance(attn, Mapping):
        raise read.error("attn", "expected one object, or a list of one")
    layers = attn.get("layers")
    ok = isinstance(layers, list) and all(type(i) is int and 0 <= i < n_layers for i in layers)
    if not ok or len(set(layers)) < len(layers):
        raise JsonReader(attn, "attn.").error(
            "layers", f"expected a list of different layers, each below {n_layers}"
        )
    return attn


def config_to_fla(cfg: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` that flash-linear-attention reads as ``cfg``, one of ``MODELS``.

    Raises JaxLlamaError naming the option that its models do not have.
    """
    kind = model_of(cfg)
    assert kind is not None
    model = MODELS[kind]
    attention = [i for i, layer in enumerate(cfg.layer_types) if layer == "attention"]
    mixer = model.to_fla(cfg)
    _only(
        kind,
        (
            ("embedding_scale", cfg.embedding_scale, False),
            ("o_bias", cfg.o_bias, False),
            ("mlp_bias", cfg.mlp_bias, False),
            ("rope.scaling", cfg.rope.scaling, "none"),
            ("head_dim", cfg.head_dim * cfg.n_heads if attention else cfg.d_model, cfg.d_model),
            ("window_layers", cfg.window_layers, ()),
            *((key, getattr(cfg, key), only) for key, only in _PLAIN),
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
