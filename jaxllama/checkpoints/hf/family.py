"""The type of an entry of the table of families, and the keys that several families share.

``hf.families`` has the table, and this file imports none of its parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import DeltaConfig, ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.names import Names
from jaxllama.typing import JsonMapping, JsonObject

Fields = JsonObject
# The names of activations in config.json, and ours.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
    "relu": "relu",
    "xielu": "xielu",
}


class SharedKeys(Protocol):
    """Keys that several families share, with their meaning in both directions."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of ``config.json`` that are read or have no effect."""
        ...

    def fields(self, read: JsonReader, /) -> Fields:
        """Return fields of ModelConfig. Raises JaxLlamaError naming a key."""
        ...

    def to_hf(self, cfg: ModelConfig, /) -> Fields:
        """Return the keys of a config. Raises JaxLlamaError if no keys have its options."""
        ...


@dataclasses.dataclass(frozen=True)
class Keys:
    """A part that two functions translate."""

    keys: tuple[str, ...]
    fields: Callable[[JsonReader], Fields]
    to_hf: Callable[[ModelConfig], Fields]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    architectures: names in config.json, the present one first. defaults: meaning of a missing key,
    if it differs from ``hf.config.COMMON``. keys: the keys that are read besides the common ones.
    same: (key, path of the field, default) of values that are copied unchanged in both directions.
    parts: keys with their translation. fields, to_hf: translate all other values, and replace those
    of the parts. fixed: keys that change the computation, with the supported values. facts: fields
    that are constant in the family.

    window: "none"; "all" (every layer, if ``sliding_window`` is set); "use" (if also
    ``use_sliding_window``, from layer ``max_window_layers`` on); or a function that replaces a
    missing ``layer_types``, by a layer's index. is_local: whether sliding layers have
    rope_parameters of their own. is_nope: (index, config, slides) -> whether that layer has no
    positions. names: the family's own names of keys that all families share, by the shared name; a
    file may have either, and is written with its own. others: other names of keys in files, with
    the shared name. derived: shared keys that a file may leave out, computed from the others.
    absent: shared keys that the family's class in transformers does not take. unused_endings: of
    tensors that follow from the config. unused: prefixes of tensors that a file may have and the
    model does not use; ``{n_layers}`` in them becomes the number of layers. turning: the key of the
    number of a head's features that RoPE turns, where the rest of a head has another width.
    tensors: names of the files' tensors; None for Llama's. tensors_of: the same of a config and of
    the shapes of a file's tensors, where files differ. rope_kinds: other names of scalings.
    amplitude: the keys of longrope's multiplier; several must be equal. writes_local_theta: whether
    ``rope_local_base_freq`` is written, too. rope_key: the key of RoPE in a file that is written.
    has_mxfp4: whether files may have MXFP4 experts.
    """

    architectures: tuple[str, ...]
    defaults: JsonMapping = dataclasses.field(default_factory=dict)
    keys: tuple[str, ...] = ()
    same: tuple[tuple[str, str, Any], ...] = ()
    parts: tuple[SharedKeys, ...] = ()
    fields: Callable[[JsonReader], Fields] | None = None
    to_hf: Callable[[ModelConfig], Fields] | None = None
    fixed: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    facts: JsonMapping = dataclasses.field(default_factory=dict)
    stored: JsonMapping = dataclasses.field(default_factory=dict)
    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    window: str | Callable[[int, JsonReader], bool] = "none"
    is_local: bool = False
    is_nope: Callable[[int, JsonReader, bool], bool] | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)
    derived: Callable[[JsonReader], Fields] | None = None
    absent: tuple[str, ...] = ()
    unused_endings: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    turning: str = ""
    full_width: Callable[[JsonReader], int] | None = None
    tensors: Names | None = None
    tensors_of: Callable[[ModelConfig, Mapping[str, tuple[int, ...]]], Names] | None = None
    rope_kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    amplitude: tuple[str, ...] = ("attention_factor",)
    writes_local_theta: bool = False
    rope_key: str = "rope_scaling"
    has_mxfp4: bool = False

    @property
    def all_keys(self) -> tuple[str, ...]:
        """The keys that are read besides the common ones."""
        return self.keys + tuple(key for part in self.parts for key in part.keys)

    def translated(self, read: JsonReader) -> Fields:
        """Return the fields of ``same``, ``parts`` and ``fields``."""
        found = {path: _same(read, key, default) for key, path, default in self.same}
        for part in self.parts:
            found |= part.fields(read)
        return found if self.fields is None else found | self.fields(read)

    def written(self, cfg: ModelConfig) -> Fields:
        """Return the keys of ``parts`` and ``to_hf``."""
        found: Fields = {}
        for part in self.parts:
            found |= part.to_hf(cfg)
        return found if self.to_hf is None else found | self.to_hf(cfg)

    def shared(self, config: JsonMapping) -> JsonMapping:
        """Return a config.json under the shared names of its keys."""
        shared = {family_name: name for name, family_name in self.names.items()} | dict(self.others)
        return {shared.get(key, key): value for key, value in config.items()}

    def renamed(self, config: JsonMapping) -> JsonObject:
        """Return a config.json under the family's own names: the inverse of ``shared``."""
        return {
            self.names.get(key, key): value
            for key, value in config.items()
            if key not in self.absent
        }


def _same(read: JsonReader, key: str, default: Any) -> Any:
    if isinstance(default, bool):
        return read.flag(key, default)
    return read.number(key, default)


MTP = "mtp."  # prefix of the tensors of a head for multi-token prediction
BIAS = ("attention_bias", "qkv_bias", False), ("attention_bias", "o_bias", False)
MLP_BIAS = (("mlp_bias", "mlp_bias", False),)
QKV_BIAS = ("attention_bias", "qkv_bias", False)
GRANITE_SCALES = (
    *BIAS,
    ("embedding_multiplier", "stored.embed", 1.0),
    ("residual_multiplier", "stored.residual", 1.0),
)


def every(n: int) -> Callable[[int, JsonReader], bool]:
    """Return a pattern in which all layers slide except each n-th."""
    return lambda i, read: bool((i + 1) % read.size("sliding_window_pattern", n))


def head_scale(read: JsonReader, key: str, default: float) -> float:
    """Return the multiplier of q that turns scores over sqrt(head_dim) into ``key`` times q k."""
    head_dim = read.config.get("head_dim")
    if head_dim is None:
        head_dim = read.size("hidden_size") // read.size("num_attention_heads")
    return read.number(key, default) * head_dim**0.5


def _granite(read: JsonReader) -> Fields:
    """Return the multipliers of Granite's q and logits."""
    return {
        "stored.query": head_scale(read, "attention_multiplier", 1.0),
        "stored.logits": 1.0 / read.positive("logits_scaling", 1.0),
    }


def _granite_to_hf(cfg: ModelConfig) -> Fields:
    return {
        "attention_multiplier": cfg.stored.query / cfg.head_dim**0.5,
        "logits_scaling": 1.0 / cfg.stored.logits,
    }


GRANITE_KEYS = Keys(("attention_multiplier", "logits_scaling"), _granite, _granite_to_hf)


def _gemma(read: JsonReader) -> Fields:
    """Return the multiplier of Gemma's q."""
    scalar = read.size("query_pre_attn_scalar", 256)
    return {"stored.query": (read.size("head_dim") / scalar) ** 0.5}


def _gemma_to_hf(cfg: ModelConfig) -> Fields:
    return {"query_pre_attn_scalar": round(cfg.head_dim / cfg.stored.query**2)}


GEMMA_KEYS = Keys(("query_pre_attn_scalar",), _gemma, _gemma_to_hf)


def _minicpm(read: JsonReader) -> Fields:
    """Return the multipliers of MiniCPM's embeddings, sublayers and logits."""
    n, width = read.size("num_hidden_layers"), read.size("hidden_size")
    return {
        "stored.embed": read.number("scale_emb", 1.0),
        "stored.residual": read.number("scale_depth", n**0.5) / n**0.5,
        "stored.logits": read.size("dim_model_base", width) / width,
    }


def _minicpm_to_hf(cfg: ModelConfig) -> Fields:
    return {
        "scale_emb": cfg.stored.embed,
        "scale_depth": cfg.stored.residual * cfg.n_layers**0.5,
        "dim_model_base": round(cfg.stored.logits * cfg.d_model),
    }


MINICPM_KEYS = Keys(("scale_emb", "scale_depth", "dim_model_base"), _minicpm, _minicpm_to_hf)

DELTA_KEYS = (
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def delta_config(
    read: JsonReader, n_heads: int, n_k_heads: int, d_k: int, d_v: int, norm_eps: float
) -> DeltaConfig:
    """Return the sizes of Gated DeltaNet's layers in ``DELTA_KEYS``; arguments are defaults."""
    return DeltaConfig(
        n_heads=read.size("linear_num_value_heads", n_heads),
        n_k_heads=read.size("linear_num_key_heads", n_k_heads),
        d_k=read.size("linear_key_head_dim", d_k),
        d_v=read.size("linear_value_head_dim", d_v),
        norm_eps=norm_eps,
        conv_size=read.size("linear_conv_kernel_dim", 4),
    )


def delta_of(cfg: ModelConfig) -> DeltaConfig:
    """Return the config of the delta layers. Raises JaxLlamaError if there are none."""
    if cfg.delta is None:
        raise JaxLlamaError("delta = None: this family's layers have it")
    return cfg.delta


def delta_to_hf(cfg: ModelConfig) -> Fields:
    """Return ``DELTA_KEYS``."""
    delta = delta_of(cfg)
    sizes = delta.n_heads, delta.n_k_heads, delta.d_k, delta.d_v, delta.conv_size
    return dict(zip(DELTA_KEYS, sizes, strict=True))
