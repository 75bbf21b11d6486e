"""The parameters of a mixture of experts, in the place of a layer's ``mlp``.

    router            weight [E, D], bias [E], choice_bias [E]
    experts_gate_up   weight [E, 2F, D], bias [E, 2F]        gate, then up
    experts_down      weight [E, D, F], bias [E, D]
    gate_up, down     the shared expert's, as a dense layer's
    shared_gate       weight [1, D]

A checkpoint stores the experts one by one, or all experts of a layer in one tensor ``[E, ...]``.
Either gives the same array here.  This file imports no jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TypeAlias

import numpy as np

from jaxllama.config import ExpertsConfig, ModelConfig
from jaxllama.model.names import Names
from jaxllama.model.param import Param, Path, TensorSource, fused, one, written


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Names of the tensors in a checkpoint, behind the layer's name and ``prefix``.

    router: the router.  expert: prefix of an expert, formatted with its index.
    gate_up, down: an expert's matrices, behind ``expert``.
    fused: (gate and up, down) tensors of all experts, which a file may have instead.
    is_fused: whether to assume ``fused`` when the file's tensor names are not known.
    shared, shared_gate: prefix of the shared expert, and its gate.
    choice_bias: bias that is added to scores only to choose experts.
    """

    prefix: str = "mlp."
    router: str = "gate"
    expert: str = "experts.{}."
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    is_fused: bool = False
    shared: str = "shared_expert."
    shared_gate: str = "shared_expert_gate"
    choice_bias: str = "gate.e_score_correction_bias"


def table(
    cfg: ModelConfig, layer: str, names: Names, present: Collection[str]
) -> dict[Path, Param]:
    """Return the parameters of a layer with experts, in the order of the forward pass."""
    assert cfg.experts is not None
    own, options, d = names.of("experts", ExpertNames()), cfg.experts, cfg.d_model
    prefix, residual = f"{layer}{own.prefix}", cfg.stored.residual
    n = options.n_experts
    rows: dict[Path, Param] = {("router", "weight"): one(f"{prefix}{own.router}.weight", n, d)}
    if options.router_bias:
        rows["router", "bias"] = one(f"{prefix}{own.router}.bias", n, std=0.0)
    if options.choice_bias:
        rows["router", "choice_bias"] = one(
            f"{prefix}{own.choice_bias}", n, std=0.0, is_float32=True
        )
    rows |= _experts(options, d, prefix, own, present, residual)
    if options.shared:
        shared = f"{prefix}{own.shared}"
        parts = [(f"{shared}{name}", options.shared, {}) for name in names.gate_up]
        rows |= fused("gate_up", parts, d, False)
        rows |= written("down", f"{shared}{names.down}", d, options.shared, False, residual)
    if options.shared_gate:
        rows["shared_gate", "weight"] = one(f"{prefix}{own.shared_gate}.weight", 1, d)
    return rows


def _experts(
    options: ExpertsConfig,
    d: int,
    prefix: str,
    own: ExpertNames,
    present: Collection[str],
    residual: float,
) -> dict[Path, Param]:
    n, width = options.n_experts, options.d_ff
    assert not options.bias, "no family has biases of experts yet"
    shapes = (n, 2 * width, d), (n, d, width)
    gate_up, down = (f"{prefix}{name}" for name in own.fused)
    if gate_up in present or (own.is_fused and not present):
        sources = [TensorSource(gate_up, shapes[0])], [TensorSource(down, shapes[1], residual)]
    else:
        experts = [f"{prefix}{own.expert.format(index)}" for index in range(n)]
        sources = (
            [
                TensorSource(f"{expert}{name}.weight", (width, d))
                for expert in experts
                for name in own.gate_up
            ],
            [
                TensorSource(f"{expert}{own.down}.weight", (d, width), residual)
                for expert in experts
            ],
        )
    return {
        ("experts_gate_up", "weight"): Param(tuple(sources[0]), shapes[0]),
        ("experts_down", "weight"): Param(tuple(sources[1]), shapes[1]),
    }


Site: TypeAlias = tuple[tuple[str, ...], str, tuple[int, int] | None, np.ndarray]


def sites(options: ExpertsConfig, model: np.ndarray) -> tuple[Site, ...]:
    """(readers, source, rows, channels) of each input of the feed-forward's weights.

    The router reads the same norm as the experts, so no scale can be absorbed before them.
    """
    beside = ("mlp/gate_up",) if options.shared else ()
    found: tuple[Site, ...] = (
        (("mlp/experts_gate_up", *beside), "", None, model),
        (("mlp/experts_down",), "", None, np.arange(options.d_ff)),
    )
    if options.shared:
        width = options.shared
        found += ((("mlp/down",), "mlp/gate_up", (width, 2 * width), np.arange(width)),)
    return found
