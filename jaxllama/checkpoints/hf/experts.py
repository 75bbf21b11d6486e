"""The keys of a mixture of experts in ``config.json`` <-> ``ExpertsConfig``.

    Mixture(count=, active=, ...)                  the defaults of a family's missing keys
    mixture.fields(read), mixture.to_hf(cfg)       for ``hf.families``

transformers names the number of experts ``num_experts`` or ``num_local_experts``. It has written
both names for one family, so both are read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ExpertsConfig, ModelConfig
from jaxllama.errors import JaxLlamaError

Fields = dict[str, Any]
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

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of ``config.json`` that are read or have no effect."""
        found = (*_COUNTS, "num_experts_per_tok", self.width_key, *_TRAINING)
        found += ("norm_topk_prob",) * self.has_norm_key
        found += ("shared_expert_intermediate_size",) * (self.shared is not None)
        return found + ("mlp_only_layers", "decoder_sparse_step") * self.is_mixed

    def fields(self, read: JsonReader) -> Fields:
        """Return ``{"experts": ...}``, None if no layer has experts. Raises JaxLlamaError naming a
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
            layers=layers,
            **shared,
        )
        return {"experts": experts}

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
        if self.has_norm_key:
            keys["norm_topk_prob"] = experts.normalize
        if self.shared is not None:
            keys["shared_expert_intermediate_size"] = experts.shared
        if self.is_mixed:
            dense = [i for i in range(cfg.n_layers) if cfg.experts_of(i) is None]
            keys |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
        return keys
