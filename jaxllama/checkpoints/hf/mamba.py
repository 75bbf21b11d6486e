"""The keys of Mamba-2 layers in ``config.json`` <-> the options of the mixer ``ssm``.

    MambaKeys(...)                    a family's keys of the sizes
    keys.fields(read), keys.to_hf(cfg)    for ``hf.families``
    mamba_layers, nemotron_layers     which layers are Mamba-2

transformers has renamed kinds of layers ("mamba" became "linear_attention"); both names are read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ExpertsConfig, ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.mixers.ssm.parameters import SSMOptions, options
from jaxllama.typing import JsonObject

Fields = JsonObject
_KINDS = {
    "linear_attention": "ssm",
    "mamba": "ssm",
    "mamba2": "ssm",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
_PATTERN = {"M": "ssm", "*": "attention", "-": "mlp", "E": "moe"}
# Keys of the training's start and of kernels.
INERT = (
    "chunk_size",
    "expand",
    "mamba_chunk_size",
    "mamba_dt_init_floor",
    "mamba_dt_max",
    "mamba_dt_min",
    "mamba_expand",
    "mamba_hidden_act",
    "mamba_ssm_cache_dtype",
    "num_logits_to_keep",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
    "use_mamba_kernels",
    "z_loss_coefficient",
)


@dataclasses.dataclass(frozen=True)
class MambaKeys:
    """A family's keys of a Mamba-2 layer, with the defaults of missing ones.

    expand: the key of the heads' width over the model's.  eps: the key of the norm's epsilon.
    least: the key of the least dt, where it is one by itself; else both bounds are
    ``time_step_limit``.
    """

    n_heads: tuple[str, int] = ("mamba_n_heads", 128)
    head_dim: tuple[str, int | None] = ("mamba_d_head", None)
    state: tuple[str, int] = ("mamba_d_state", 256)
    n_groups: tuple[str, int] = ("mamba_n_groups", 1)
    taps: tuple[str, int] = ("mamba_d_conv", 4)
    conv_bias: tuple[str, bool] = ("mamba_conv_bias", True)
    bias: tuple[str, bool] = ("mamba_proj_bias", False)
    expand: str = "mamba_expand"
    eps: str = "rms_norm_eps"
    least: tuple[str, float] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that are read or have no effect."""
        sizes = self.n_heads, self.head_dim, self.state, self.n_groups, self.taps
        flags = self.conv_bias, self.bias
        return (*(key for key, _ in (*sizes, *flags)), "time_step_limit", *INERT)

    def fields(
        self, read: JsonReader, norm: Literal["gate_first", "norm_first", "none"] = "gate_first"
    ) -> Fields:
        """Return ``{"mixers": ...}``.  Raises JaxLlamaError naming a key."""
        n_heads = read.size(*self.n_heads)
        key, width = self.head_dim
        if width is None and read.config.get(key) in (None, "auto"):
            whole = read.size("mamba_expand", 2) * read.size("hidden_size")
            if whole % n_heads:
                raise read.error(self.n_heads[0], f"must divide the {whole} features of the heads")
            head_dim = whole // n_heads
        else:
            head_dim = read.size(key, width)
        least, largest = _bounds(read)
        if self.least is not None:
            least, largest = read.number(*self.least), None
        groups = read.size(*self.n_groups)
        if n_heads % groups:
            raise read.error(self.n_groups[0], f"must divide the {n_heads} heads")
        ssm = SSMOptions(
            n_heads=n_heads,
            head_dim=head_dim,
            state=read.size(*self.state),
            n_groups=groups,
            taps=read.size(*self.taps),
            norm_eps=read.number(self.eps),
            least_step=least,
            largest_step=largest,
            conv_bias=read.flag(*self.conv_bias),
            bias=read.flag(*self.bias),
            norm=norm,
        )
        return {"mixers": {"ssm": dataclasses.asdict(ssm)}}

    def to_hf(self, cfg: ModelConfig) -> Fields:
        """Return the keys of a config."""
        ssm = options_of(cfg)
        keys: Fields = {
            self.n_heads[0]: ssm.n_heads,
            self.head_dim[0]: ssm.head_dim,
            self.state[0]: ssm.state,
            self.n_groups[0]: ssm.n_groups,
            self.taps[0]: ssm.taps,
            self.conv_bias[0]: ssm.conv_bias,
            self.bias[0]: ssm.bias,
        }
        if ssm.width % cfg.d_model == 0:  # else no class of transformers has it
            keys[self.expand] = ssm.width // cfg.d_model
        if self.least is not None:
            return keys | {self.least[0]: ssm.least_step}
        if (ssm.least_step, ssm.largest_step) == (0.0, None):
            return keys  # as it is without the key; JSON has no infinity
        largest = 1e30 if ssm.largest_step is None else ssm.largest_step
        return keys | {"time_step_limit": [ssm.least_step, largest]}


def options_of(cfg: ModelConfig) -> SSMOptions:
    """Return the options.  Raises JaxLlamaError where a model has none."""
    found = next((layer for layer in cfg.layers if layer.kind == "ssm"), None)
    if found is None:
        raise JaxLlamaError("mixers.ssm: this family's layers have it")
    return options(found)


def _bounds(read: JsonReader) -> tuple[float, float | None]:
    """Return (least, largest dt); the largest is None where the file has infinity."""
    value = read.config.get("time_step_limit")
    if value is None:
        return 0.0, None
    pair = [_number(bound) for bound in value] if isinstance(value, list | tuple) else []
    least, largest = pair if len(pair) == 2 else (None, None)
    if least is None or largest is None or not 0 <= least <= largest:
        raise read.error("time_step_limit", "expected two numbers, the smaller first")
    return least, None if largest >= 1e30 else largest


def _number(value: object) -> float | None:
    """Return a number; transformers writes infinity as ``{"__float__": "Infinity"}``."""
    if isinstance(value, Mapping):
        value = math.inf if value.get("__float__") == "Infinity" else None
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def mamba_layers(read: JsonReader) -> tuple[str, ...]:
    """Return ModelConfig's layer_types; a model without the key has Mamba-2 layers only."""
    n = read.size("num_hidden_layers")
    types = read.config.get("layer_types") or read.config.get("layers_block_type")
    if types is None:
        return ("ssm",) * n
    types = types if isinstance(types, list) else [types]
    found = [_KINDS.get(kind) if isinstance(kind, str) else None for kind in types]
    if len(found) != n or not set(found) <= {"ssm", "attention"}:
        raise read.error("layer_types", f"must be {n} entries of linear_attention, full_attention")
    return tuple(map(str, found))


def indexed_layers(read: JsonReader) -> tuple[str, ...]:
    """Return ModelConfig's layer_types of a config that lists its layers of attention."""
    n, full = read.size("num_hidden_layers"), read.config.get("attn_layer_indices") or []
    if not isinstance(full, list) or not all(type(i) is int and 0 <= i < n for i in full):
        raise read.error("attn_layer_indices", "must be a list of layers")
    return tuple("attention" if i in full else "ssm" for i in range(n))


def nemotron_layers(read: JsonReader) -> Fields:
    """Return the fields of Nemotron-H's layers, each of which is a mixer or a feed-forward: ours
    are a mixer with the feed-forward behind it, if there is one."""
    key = "layers_block_type"
    if read.config.get("hybrid_override_pattern") is not None:
        key = "hybrid_override_pattern"
        kinds = [_PATTERN.get(letter) for letter in read.text(key, "")]
    else:
        types = read.config.get(key) or read.config.get("layer_types")
        if not isinstance(types, list):
            raise read.error(key, "expected a list of kinds of layers")
        kinds = [_KINDS.get(kind) if isinstance(kind, str) else None for kind in types]
    mixers: list[str] = []
    fed: set[int] = set()
    sparse: list[int] = []
    for kind in kinds:
        if kind is None:
            raise read.error(key, "has an unknown kind of layer")
        if kind not in ("mlp", "moe"):
            mixers.append(kind)
        elif len(mixers) - 1 in fed or not mixers:
            raise read.error(key, "a feed-forward must stand behind attention or Mamba-2")
        else:
            fed.add(len(mixers) - 1)
            sparse += [len(mixers) - 1] * (kind == "moe")
    n = len(mixers)
    if not n:
        raise read.error(key, "has no layers")
    return {
        "n_layers": n,
        "layer_types": tuple(mixers),
        "bare_layers": tuple(i for i in range(n) if i not in fed),
        "nope_layers": tuple(range(n)),
        "experts": _nemotron_experts(read) if sparse else None,
        "expert_layers": tuple(sparse),
    }


def _nemotron_experts(read: JsonReader) -> ExpertsConfig:
    """Return the options of experts without a gate, and of the shared one beside them."""
    return ExpertsConfig(
        n_experts=read.size("n_routed_experts", 8),
        n_active=read.size("num_experts_per_tok", 2),
        d_ff=read.size("moe_intermediate_size", 7688),
        scores="sigmoid",
        normalize=read.flag("norm_topk_prob", True),
        scale=read.number("routed_scaling_factor", 1.0),
        choice_bias=True,
        n_groups=read.size("n_group", 1),
        n_active_groups=read.size("topk_group", 1),
        shared=read.size("moe_shared_expert_intermediate_size", 7688),
        shared_bias=read.flag("mlp_bias", False),
    )


def nemotron_to_hf(cfg: ModelConfig) -> Fields:
    """Return the keys of the layers."""
    types: list[str] = []
    for index, kind in enumerate(cfg.layer_types):
        types.append("full_attention" if kind == "attention" else "linear_attention")
        layer = cfg.layers[index]
        if layer.feed is not None:
            types.append("mlp" if layer.experts is None else "moe")
    keys: JsonObject = {"layers_block_type": types, "num_hidden_layers": len(types)}
    if (experts := cfg.experts) is None:
        return keys
    return keys | {
        "n_routed_experts": experts.n_experts,
        "num_experts_per_tok": experts.n_active,
        "moe_intermediate_size": experts.d_ff,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.n_groups,
        "topk_group": experts.n_active_groups,
        "moe_shared_expert_intermediate_size": experts.shared,
    }
