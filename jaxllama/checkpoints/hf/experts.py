"""The keys of a mixture of experts in ``config.json`` <-> ``ExpertsConfig``.

    Mixture(...), SigmoidMixture(...), IntervalMixture()    defaults of a family's missing keys
    mixture.fields(read), mixture.to_hf(cfg)                for ``hf.families``

transformers names the number of experts ``num_experts`` or ``num_local_experts``. It has written
both names for one family, so both are read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ExpertsConfig, ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonMapping, JsonObject

Fields = JsonObject
_COUNTS = ("num_experts", "num_local_experts")
# Keys that concern training only.
_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The experts of a family.

    count, active: defaults of the number of experts and of the active ones of a token. count_key:
    the key of the number when a config is written. width_key, width: key and default of an expert's
    width. normalize: default of ``norm_topk_prob``, or the fixed value if has_norm_key is False.
    shared: default width of the shared expert, which has a gate; None for a family without one.
    is_mixed: whether some layers may be dense (``mlp_only_layers``, ``decoder_sparse_step``).
    facts: fields of ``ExpertsConfig`` that are constant in the family.
    same: (key, field, default) of numbers that are copied unchanged.
    """

    count: int
    active: int
    count_key: str = "num_experts"
    width_key: str = "moe_intermediate_size"
    width: int | None = None
    normalize: bool = True
    has_norm_key: bool = False
    shared: int | None = None
    is_mixed: bool = False
    facts: JsonMapping = dataclasses.field(default_factory=JsonObject)
    same: tuple[tuple[str, str, float], ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of ``config.json`` that are read or have no effect."""
        found = (*_COUNTS, "num_experts_per_tok", self.width_key, *_TRAINING)
        found += tuple(key for key, _, _ in self.same)
        found += ("norm_topk_prob",) * self.has_norm_key
        found += ("shared_expert_intermediate_size",) * (self.shared is not None)
        return found + ("mlp_only_layers", "decoder_sparse_step") * self.is_mixed

    def fields(self, read: JsonReader) -> Fields:
        """Return the experts and the layers that have them, or None. Raises JaxLlamaError naming a
        key.
        """
        key = next((key for key in _COUNTS if key in read.config), self.count_key)
        count = (read.natural if self.is_mixed else read.size)(key, self.count)
        layers = self._layers(read) if count else ()
        if not layers:
            return {"experts": None}
        shared: Fields = {}
        if self.shared is not None:
            width = read.natural("shared_expert_intermediate_size", self.shared)
            shared = {"shared": width, "shared_gate": width > 0}
        normalize = self.normalize
        if self.has_norm_key:
            normalize = read.flag("norm_topk_prob", self.normalize)
        active = read.size("num_experts_per_tok", self.active)
        if active > count:
            raise read.error("num_experts_per_tok", f"must not exceed the {count} experts")
        experts = ExpertsConfig(
            n_experts=count,
            n_active=active,
            d_ff=read.size(self.width_key, *(() if self.width is None else (self.width,))),
            normalize=normalize,
            **{**shared, **self.facts},
            **{field: read.number(key, default) for key, field, default in self.same},
        )
        return {"experts": experts, "expert_layers": layers}

    def _layers(self, read: JsonReader) -> tuple[int, ...]:
        n = read.size("num_hidden_layers")
        if not self.is_mixed:
            return tuple(range(n))
        step, dense = read.size("decoder_sparse_step", 1), read.config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(index) is int for index in dense):
            raise read.error("mlp_only_layers", "must be a list of layers")
        return tuple(i for i in range(n) if i not in dense and (i + 1) % step == 0)

    def to_hf(self, cfg: ModelConfig) -> Fields:
        """Return the keys of a config. Raises JaxLlamaError if the family has no dense models."""
        experts = cfg.experts
        if experts is None:
            if not self.is_mixed:
                raise JaxLlamaError("experts = None: this family's layers have them")
            return {self.count_key: 0}
        keys: Fields = {
            self.count_key: experts.n_experts,
            "num_experts_per_tok": experts.n_active,
            self.width_key: experts.d_ff,
        }
        keys |= {key: getattr(experts, field) for key, field, _ in self.same}
        if self.has_norm_key:
            keys["norm_topk_prob"] = experts.normalize
        if self.shared is not None:
            keys["shared_expert_intermediate_size"] = experts.shared
        if self.is_mixed:
            dense = [i for i, layer in enumerate(cfg.layers) if layer.experts is None]
            keys |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
        return keys


@dataclasses.dataclass(frozen=True)
class IntervalMixture:
    """Ernie 4.5's experts, whose router's softmax has a bias that only affects the choice.

    Every ``moe_layer_interval``-th layer from ``moe_layer_start_index`` to ``moe_layer_end_index``
    has them. Its shared experts have no gate and are read as one wide expert.
    """

    keys: tuple[str, ...] = (
        "moe_num_experts",
        "num_experts",
        "moe_k",
        "num_experts_per_tok",
        "moe_num_shared_experts",
        "moe_intermediate_size",
        "moe_layer_interval",
        "moe_layer_start_index",
        "moe_layer_end_index",
        "moe_norm_min",  # a least sum of weights, which no sum falls below
        *_TRAINING,
    )

    def fields(self, read: JsonReader) -> Fields:
        """Return the experts and the layers that have them; None if no layer has experts."""
        n, step = read.size("num_hidden_layers"), read.size("moe_layer_interval", 1)
        first, last = read.natural("moe_layer_start_index", 1), n - 1
        if read.config.get("moe_layer_end_index", -1) != -1:
            last = read.natural("moe_layer_end_index")
        layers = tuple(i for i in range(first, min(last + 1, n)) if (i + 1) % step == 0)
        if not layers:
            return {"experts": None}
        width = read.size("moe_intermediate_size", 1536)
        experts = ExpertsConfig(
            n_experts=read.size("moe_num_experts", read.size("num_experts", 64)),
            n_active=read.size("moe_k", read.size("num_experts_per_tok", 6)),
            d_ff=width,
            choice_bias=True,
            shared=width * read.natural("moe_num_shared_experts", 2),
        )
        return {"experts": experts, "expert_layers": layers}

    def to_hf(self, cfg: ModelConfig) -> Fields:
        """Return the keys of a config. Raises JaxLlamaError for layers that no interval has."""
        experts = cfg.experts
        if experts is None:
            return {"moe_layer_start_index": cfg.n_layers}
        layers = tuple(i for i, layer in enumerate(cfg.layers) if layer.experts is not None)
        first, *others = layers
        step = others[0] - first if others else 1
        last = others[-1] if others else first
        if layers != tuple(i for i in range(first, last + 1) if (i + 1) % step == 0):
            raise JaxLlamaError(
                f"expert_layers = {layers}: this family's config can name only all layers i from "
                "a first to a last one with (i + 1) % interval = 0"
            )
        return {
            "moe_num_experts": experts.n_experts,
            "moe_k": experts.n_active,
            "moe_num_shared_experts": experts.shared // experts.d_ff,
            "moe_intermediate_size": experts.d_ff,
            "moe_layer_interval": step,
            "moe_layer_start_index": first,
            "moe_layer_end_index": last,
        }


# The names of each key; a family's own name comes first.
_ROLES = {
    "count": ("n_routed_experts", "num_local_experts"),
    "active": ("num_experts_per_tok",),
    "normalize": ("norm_topk_prob",),
    "groups": ("n_group",),
    "active_groups": ("topk_group",),
    "shared": ("n_shared_experts",),
}


@dataclasses.dataclass(frozen=True)
class SigmoidMixture:
    """DeepSeek-V3's router (arXiv 2412.19437) as other families use it.

    It has sigmoids, a bias that only affects the choice, and groups of experts. Its shared experts
    have no gate and are read as one wide expert. count, active, width, scale: the defaults. names:
    other names of keys, by role. has_types: whether ``mlp_layer_types`` can name the dense layers;
    otherwise the first ``first_k_dense_replace`` layers are dense. facts: fields of
    ``ExpertsConfig`` that are constant in the family.
    """

    count: int
    active: int
    width: int
    scale: float = 1.0
    names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=JsonObject)
    has_types: bool = False
    facts: JsonMapping = dataclasses.field(default_factory=JsonObject)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of ``config.json`` that are read or have no effect."""
        roles = {**_ROLES, **self.names}
        found = tuple(name for names in roles.values() for name in names)
        found += ("moe_intermediate_size", "routed_scaling_factor", "first_k_dense_replace")
        return found + ("mlp_layer_types",) * self.has_types + _TRAINING

    def _key(self, read: JsonReader, role: str) -> str:
        """Return the name under which the file has the key of this role."""
        names = {**_ROLES, **self.names}[role]
        return next((name for name in names if name in read.config), names[0])

    def fields(self, read: JsonReader) -> Fields:
        """Return the experts and the layers that have them; None if no layer has experts.

        Raises JaxLlamaError, which names the key.
        """
        layers = self._layers(read)
        if not layers:
            return {"experts": None}
        key = functools.partial(self._key, read)
        width, count = read.size("moe_intermediate_size", self.width), key("count")
        options: Fields = {
            "n_experts": read.size(count, self.count),
            "n_active": read.size(key("active"), self.active),
            "d_ff": width,
            "scores": "sigmoid",
            "normalize": read.flag(key("normalize"), True),
            "scale": read.number("routed_scaling_factor", self.scale),
            "choice_bias": True,
            "n_groups": read.size(key("groups"), 1),
            "n_active_groups": read.size(key("active_groups"), 1),
            "shared": width * read.natural(key("shared"), 1),
        }
        experts = ExpertsConfig(**{**options, **self.facts})
        return {"experts": experts, "expert_layers": layers}

    def _layers(self, read: JsonReader) -> tuple[int, ...]:
        n, dense = read.size("num_hidden_layers"), read.natural("first_k_dense_replace", 1)
        kinds = read.config.get("mlp_layer_types") if self.has_types else None
        if kinds is None:
            return tuple(range(min(dense, n), n))
        is_list = isinstance(kinds, list) and len(kinds) == n
        if not is_list or not all(kind in ("dense", "sparse") for kind in kinds):
            raise read.error("mlp_layer_types", f"must be {n} entries of 'dense' and 'sparse'")
        return tuple(index for index, kind in enumerate(kinds) if kind == "sparse")

    def to_hf(self, cfg: ModelConfig) -> Fields:
        """Return the keys of ``config.json`` for a config."""
        experts, roles = cfg.experts, {**_ROLES, **self.names}
        is_sparse = [layer.experts is not None for layer in cfg.layers]
        keys: Fields = {"first_k_dense_replace": is_sparse.count(False)}
        if self.has_types:
            keys["mlp_layer_types"] = [("dense", "sparse")[sparse] for sparse in is_sparse]
        if experts is None:
            return keys
        family_keys = {
            "count": experts.n_experts,
            "active": experts.n_active,
            "normalize": experts.normalize,
            "groups": experts.n_groups,
            "active_groups": experts.n_active_groups,
            "shared": experts.shared // experts.d_ff,
        }
        keys |= {roles[role][0]: value for role, value in family_keys.items()}
        return {
            **keys,
            "moe_intermediate_size": experts.d_ff,
            "routed_scaling_factor": experts.scale,
        }
