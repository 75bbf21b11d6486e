"""flash-linear-attention's ``gla`` models: config.json <-> ModelConfig, and the names of tensors.

Covers ``GLAForCausalLM`` with its ``attn`` layers (hybrids).  A checkpoint writes the norm of a
head's output under one of two names, and old ones fuse the feed-forward's gate and up into one
tensor; ``param_table`` is told which tensors there are.  The layer's low-rank width (16) and
``gate_logit_normalizer`` (16) are not part of that library's config: it uses its layer's defaults.

Left out: feature maps, value gates, norms without weights, attention residuals, more than one
``attn`` specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import GLAConfig, ModelConfig, RopeConfig, Stored
from jaxllama.errors import JaxLlamaError

_LOW_RANK, _NORMALIZER = 16, 16.0
_THETA = 10000.0
# What is read of a config.json.
_KEYS = frozenset(
    """
    architectures model_type quantization_config compression_config vocab_size hidden_size
    intermediate_size hidden_ratio num_hidden_layers num_heads num_kv_heads expand_k expand_v
    clamp_min use_short_conv conv_size use_output_gate norm_eps max_position_embeddings attn
    tie_word_embeddings bos_token_id eos_token_id
    """.split()
)
# How that library computes the same.
_SAME = ("attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy",
         "fuse_linear_cross_entropy", "use_l2warp")  # fmt: skip
# What other families add to a block, as these models have it.
_PLAIN = (
    ("norm", "rms"), ("norm_bias", False), ("pre_norms", True), ("post_norms", False),
    ("qk_norm", "none"), ("parallel_block", False), ("activation", "silu"), ("attn_softcap", None),
    ("logit_softcap", None), ("window_rope", None), ("nope_layers", ()), ("stored", Stored()),
)  # fmt: skip
# Options that change the computation, with the only value that is supported.
_FIXED: dict[str, tuple[Any, ...]] = {
    "feature_map": (None,),
    "hidden_act": ("swish", "silu"),
    "elementwise_affine": (True,),
    "use_gk": (True,),
    "use_gv": (False,),
    "attnres_block_size": (None,),
}


def config_from_fla(config: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a parsed ``config.json`` of model type "gla".

    Raises JaxLlamaError naming the key and its value.
    """
    read = JsonReader(config)
    read.check_keys(name, "gla", (*_KEYS, *_SAME), _FIXED)
    d_model = read.size("hidden_size", 2048)
    n_layers = read.size("num_hidden_layers", 24, limit=4096)
    n_heads = read.size("num_heads", 4)
    eps = read.number("norm_eps", 1e-6)
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
    return ModelConfig(
        name=name,
        vocab_size=read.size("vocab_size", 32000),
        d_model=d_model,
        n_layers=n_layers,
        n_heads=a_heads,
        n_kv_heads=a_kv_heads,
        head_dim=head_dim,
        d_ff=_d_ff(read, d_model),
        norm_eps=eps,
        max_position=max_position,
        rope=RopeConfig(theta),
        tie_embeddings=read.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        sliding_window=window,
        layer_types=tuple("attention" if i in layers else "gla" for i in range(n_layers)),
        gla=GLAConfig(
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
            norm_eps=eps,
        ),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=read.token_ids("eos_token_id", 2),
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
    """The ``config.json`` that flash-linear-attention reads as ``cfg``.

    Raises JaxLlamaError naming the option that its models do not have.
    """
    gla = cfg.gla
    assert gla is not None
    attention = [i for i, kind in enumerate(cfg.layer_types) if kind == "attention"]
    for key, value, only in (
        ("gla.gate_low_rank_dim", gla.gate_low_rank_dim, _LOW_RANK),
        ("gla.gate_logit_normalizer", gla.gate_logit_normalizer, _NORMALIZER),
        ("gla.norm_eps", gla.norm_eps, cfg.norm_eps),
        ("embedding_scale", cfg.embedding_scale, False),
        ("o_bias", cfg.o_bias, False),
        ("mlp_bias", cfg.mlp_bias, False),
        ("rope.scaling", cfg.rope.scaling, "none"),
        ("head_dim", cfg.head_dim * cfg.n_heads if attention else cfg.d_model, cfg.d_model),
        ("window_layers", cfg.window_layers, ()),
        *((key, getattr(cfg, key), only) for key, only in _PLAIN),
    ):
        if value != only:
            raise JaxLlamaError(
                f"{key} = {value!r}: flash-linear-attention's gla models only have {only!r}"
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
        "architectures": ["GLAForCausalLM"],
        "model_type": "gla",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.n_layers,
        "num_heads": gla.n_heads,
        "num_kv_heads": gla.n_kv_heads,
        "expand_k": gla.expand_k,
        "expand_v": gla.expand_v,
        "clamp_min": gla.clamp_min,
        "use_short_conv": gla.use_short_conv,
        "conv_size": gla.conv_size,
        "use_output_gate": gla.use_output_gate,
        "hidden_act": "swish",
        "norm_eps": cfg.norm_eps,
        "max_position_embeddings": cfg.max_position,
        "attn": attn,
        "tie_word_embeddings": cfg.tie_embeddings,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
    }
