"""The units in which a model runs.

    units_of(cfg, sep_layer) -> [embed, layer or (mix, feed), ..., head]
    in_spans(units, kind) -> units, of which layers of one kind that stand together are spans

A unit is the part of the model whose weights are on the device together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Literal

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.cache import check_has_keys
from jaxllama.offload.policy import Policy
from jaxllama.typing import Params, ParamsDict

Kind = Literal["embed", "layer", "mix", "feed", "span", "head"]
# Most layers of a span.  The host updates a span's CUDA graph while the one before it runs: 731 us
# a layer in spans of 1, 610 of 2, 579 of 4, 702 of 12 (H200).  Nothing runs beside the first, so
# the spans of the first ``SPAN`` layers are half as long.
SPAN = 4
_HALVES = {
    "mix": ("positions", "embed_norm", "mixer_norm", "mixer", "mixer_out_norm"),
    "feed": ("mlp_norm", "mlp", "mlp_out_norm", "scale"),
}


@dataclasses.dataclass(frozen=True)
class ModelUnit:
    """One part of the model; ``layer`` is -1 for embed and head.

    count: of a span's layers, of which ``layer`` is the first.
    """

    kind: Kind
    layer: int = -1
    count: int = 1

    @property
    def has_cache(self) -> bool:
        return self.kind in ("layer", "mix", "span")

    @property
    def layers(self) -> list[ModelUnit]:
        """A span's layers."""
        return [ModelUnit("layer", self.layer + index) for index in range(self.count)]

    def weights(self, params: Params) -> ParamsDict:
        """Return this unit's part of the parameter tree."""
        if self.kind == "embed":
            return {"embed": params["embed"]}
        if self.kind == "head":
            table = "head" if "head" in params else "embed"
            return {"norm": params["norm"], table: params[table]}
        layer = params[f"layer_{self.layer}"]
        return {name: layer[name] for name in _HALVES.get(self.kind, tuple(layer)) if name in layer}

    def __str__(self) -> str:
        return self.kind if self.layer < 0 else f"{self.kind}_{self.layer}"


def check_halves(cfg: ModelConfig, policy: Policy) -> None:
    """Raise JaxLlamaError for a policy that the model cannot run under."""
    check_has_keys(
        cfg,
        **{
            "policy: attn_sparsity": cfg.attn_sparsity < 1,
            "policy: cpu_attention": policy.cpu_attention,
            "policy: compress_cache": policy.compress_cache,
        },
    )
    is_parallel = any(layer.form.name == "parallel" for layer in cfg.layers)
    for name, halves in (
        ("sep_layer", policy.sep_layer),
        ("cpu_attention", policy.cpu_attention),
        ("attn_sparsity", cfg.attn_sparsity < 1),
        ("experts", bool(policy.experts)),
    ):
        if is_parallel and halves:
            raise JaxLlamaError(f"policy: {name}: the sublayers of {cfg.name} run in parallel")
    if cfg.needs_model:
        raise JaxLlamaError(
            f"policy: {cfg.name} runs on one device or a mesh only: {cfg.needs_model}"
        )
    first = cfg.layers[0]
    has_more = first.embed_norm or first.learned_positions is not None
    changes_late = any(
        getattr(layer.mixer, "qk_norm_last", False)
        or any(rope.query_beta for rope, _ in layer.ropes)
        for layer in cfg.layers
    )
    for name, by_token in (
        ("cpu_attention", policy.cpu_attention),
        ("attn_sparsity", cfg.attn_sparsity < 1),
    ):
        if has_more and by_token:
            raise JaxLlamaError(
                f"policy: {name}: {cfg.name} adds positions to its embeddings, or norms them"
            )
        if changes_late and by_token:
            raise JaxLlamaError(
                f"policy: {name}: {cfg.name} norms q and k behind RoPE, or scales q by position"
            )
    if policy.experts and cfg.experts is None:
        raise JaxLlamaError(f"policy: experts: {cfg.name} is no mixture of experts")


def units_of(cfg: ModelConfig, sep_layer: bool) -> list[ModelUnit]:
    kinds: tuple[Kind, ...] = ("mix", "feed") if sep_layer else ("layer",)
    layers = [ModelUnit(kind, index) for index in range(cfg.n_layers) for kind in kinds]
    return [ModelUnit("embed"), *layers, ModelUnit("head")]


def in_spans(
    units: list[ModelUnit], kind: Callable[[ModelUnit], Hashable | None]
) -> list[ModelUnit]:
    """Return the units, of which up to ``SPAN`` layers of one kind that follow each other are one.

    kind: None for a unit that stays alone.
    """
    found: list[ModelUnit] = []
    before: Hashable | None = None
    for unit in units:
        own = kind(unit) if unit.kind == "layer" else None
        if own is not None:
            last = found[-1] if found and own == before else None
            if last is not None and last.count < (SPAN // 2 if last.layer < SPAN else SPAN):
                found[-1] = dataclasses.replace(last, count=last.count + 1)
                continue
            unit = ModelUnit("span", unit.layer)
        found.append(unit)
        before = own
    return found
