"""The parameters of a mixture of experts, in the place of a layer's ``mlp``.

    router            weight [E, D], bias [E], choice_bias [E], expert_scale [E]
    experts_gate_up   weight [E, 2F, D], bias [E, 2F]        gate, then up; without a gate [E, F, D]
    experts_down      weight [E, D, F], bias [E, D]
    gate_up, down     the shared expert's, as a dense layer's; without a gate up, down
    shared_gate       weight [1, D]
    norm, router_norm, out_norm, shared_norm    weight [D]: norms of the inputs of experts and
                      router and of both outputs, where the shared expert is beside the others

A checkpoint stores the experts one by one, or all experts of a layer in one tensor ``[E, ...]``.
Either gives the same array here.  This file imports no jax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import TypeAlias

import numpy as np

from jaxllama.config import ExpertsConfig, LayerConfig
from jaxllama.model.names import Source
from jaxllama.model.param import (
    Param,
    Path,
    Stacked,
    TensorSource,
    fused,
    piece_name,
    tensor,
    transposed,
    written,
)


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Names of the tensors in a checkpoint, behind the layer's name and ``prefix``.

      router: the router.  expert: prefix of an expert, formatted with its index.
      gate_up, down: an expert's matrices, behind ``expert``.
      fused: (gate and up, down) tensors of all experts, which a file may have instead.
      is_fused: whether to assume ``fused`` when the file's tensor names are not known.
      alternates: the fused tensors have every matrix as [in, out], and gate and up take turns
    is_transposed: every matrix of the fused tensors is [in, out].
    fused_bias: ending of the biases of fused tensors.
    is_apart: gate_up and down are tensors of all experts (GGUF), the gate's before the other's, or
    ``gate_up`` is one tensor with an expert's gate before its up.
    in_rows: ``gate_up`` and ``down`` are matrices, with ``d_ff`` rows of each expert.
      shared, shared_gate: prefix of the shared expert, and its gate.  shared_parts: the shared
      expert's own gate, up and down, where they are not a dense layer's.
      is_shared_outside: the shared expert's tensors lie outside of ``prefix``.
      choice_bias: bias that is added to scores only to choose experts.  is_matrix: it is [1, E].
      is_bias_outside: that bias lies outside of ``prefix``.  expert_scale: factors of the
      experts' weights.  norms: of ``norm``, ``router_norm``, ``out_norm`` and ``shared_norm``.
      may_lack_bias: files may leave the choice's bias out, which stands for zeros.
    """

    prefix: str = "mlp."
    router: str = "gate"
    expert: str = "experts.{}."
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    is_fused: bool = False
    alternates: bool = False
    is_transposed: bool = False
    fused_bias: str = "_bias"
    is_apart: bool = False
    in_rows: bool = False
    shared: str = "shared_expert."
    shared_parts: tuple[str, str, str] | None = None
    shared_gate: str = "shared_expert_gate"
    choice_bias: str = "gate.e_score_correction_bias"
    is_matrix: bool = False
    is_shared_outside: bool = False
    is_bias_outside: bool = False
    expert_scale: str = "router.per_expert_scale"
    norms: tuple[str, str, str, str] = (
        "pre_feedforward_layernorm_2.weight",
        "router.scale",
        "post_feedforward_layernorm_2.weight",
        "post_feedforward_layernorm_1.weight",
    )
    may_lack_bias: bool = False


_NORMS = ("norm", "router_norm", "out_norm", "shared_norm")


def table(layer: LayerConfig, outer: str, source: Source) -> dict[Path, Param]:
    """Return the parameters of a layer's experts, in the order of the forward pass.

    outer: prefix of the layer's tensors.
    """
    feed, options, present = layer.feed, layer.experts, source.present
    assert feed is not None and options is not None
    names, d, residual = source.names, layer.d_model, source.residual(layer)
    expert_names = names.of("experts", ExpertNames())
    prefix = f"{outer}{expert_names.prefix}"
    n = options.n_experts
    rows: dict[Path, Param] = {
        ("router", "weight"): tensor(f"{prefix}{expert_names.router}.weight", n, d)
    }
    if options.router_bias:
        rows["router", "bias"] = tensor(f"{prefix}{expert_names.router}.bias", n, std=0.0)
    if options.choice_bias:
        name = f"{outer if expert_names.is_bias_outside else prefix}{expert_names.choice_bias}"
        bias = TensorSource(name, (1, n) if expert_names.is_matrix else (n,))
        lacks = expert_names.may_lack_bias and bool(present) and bias.name not in present
        sources = () if lacks else (bias,)
        rows["router", "choice_bias"] = Param(sources, (n,), std=0.0, is_float32=True)
    if options.shared_norms:
        name = f"{prefix}{expert_names.expert_scale}"
        rows["router", "expert_scale"] = tensor(name, n, mean=1.0, std=0.0)
        for path, name in zip(_NORMS, expert_names.norms, strict=True):
            scale = d**-0.5 if path == "router_norm" else 1.0
            fold = {"scale": scale}
            rows[path, "weight"] = tensor(f"{prefix}{name}", d, mean=scale, std=0.0, fold=fold)
    halves = 1 + feed.gated_mlp
    rows |= _experts(options, d, prefix, expert_names, present, residual, halves)
    if options.shared:
        shared = f"{outer if expert_names.is_shared_outside else prefix}{expert_names.shared}"
        *gate_up, down = expert_names.shared_parts or (*names.gate_up, names.down)
        gate_up = gate_up[-halves:]
        width = halves * options.shared // len(gate_up)
        parts = [(f"{shared}{name}", width, {}) for name in gate_up]
        first, has_bias = "gate_up" if feed.gated_mlp else "up", options.shared_bias
        rows |= fused(first, parts, d, has_bias)
        scale = residual * source.stored.shared
        rows |= written("down", f"{shared}{down}", d, options.shared, has_bias, scale)
    if options.shared_gate:
        gate = TensorSource(
            f"{prefix}{expert_names.shared_gate}.weight", (d,) if expert_names.is_apart else (1, d)
        )
        rows["shared_gate", "weight"] = Param((gate,), (1, d))
    return rows


def _experts(
    options: ExpertsConfig,
    d: int,
    prefix: str,
    expert_names: ExpertNames,
    present: Collection[str],
    residual: float,
    halves: int,
) -> dict[Path, Param]:
    """The products with experts; halves: 2 where the first one has a gate and up."""
    n, width = options.n_experts // options.shards, options.d_ff
    gate_up, down = (f"{prefix}{name}" for name in expert_names.fused)
    own_up = expert_names.gate_up[-halves:]
    is_fused = any(name.startswith(gate_up) for name in present)
    if expert_names.is_apart:
        up, out = [f"{prefix}{name}" for name in own_up], f"{prefix}{expert_names.down}"
        high = halves * width // len(up)
        weights = (
            [TensorSource(f"{name}.weight", (n, high, d)) for name in up],
            [TensorSource(f"{out}.weight", (n, d, width), residual)],
        )
        biases = (
            [TensorSource(f"{name}.bias", (n, high)) for name in up],
            [TensorSource(f"{out}.bias", (n, d), residual)],
        )
    elif is_fused or (expert_names.is_fused and not present):
        alternates, turned = (
            expert_names.alternates,
            expert_names.alternates or expert_names.is_transposed,
        )
        inner, outer = (
            Stacked(n, halves * width, alternates, turned),
            Stacked(n, d, False, turned),
        )
        of_bias = Stacked(n, halves * width, alternates)
        weights = (
            [TensorSource(gate_up, (n, halves * width, d), turned=inner if turned else None)],
            [TensorSource(down, (n, d, width), residual, turned=outer if turned else None)],
        )
        biases = (
            [
                TensorSource(
                    f"{gate_up}{expert_names.fused_bias}",
                    (n, halves * width),
                    turned=of_bias if alternates else None,
                )
            ],
            [TensorSource(f"{down}{expert_names.fused_bias}", (n, d), residual)],
        )
    elif expert_names.in_rows:
        of_name = [
            functools.partial(piece_name, f"{prefix}{name}")
            for name in (*own_up, expert_names.down)
        ]
        starts, total, order = range(0, n * width, width), n * width, transposed(d)
        weights = (
            [TensorSource(name(at, total), (width, d)) for at in starts for name in of_name[:-1]],
            [TensorSource(of_name[-1](at, total), (d, width), residual, **order) for at in starts],
        )
        biases = ([], [])
    else:
        experts = [f"{prefix}{expert_names.expert.format(index)}" for index in range(n)]
        up = [f"{expert}{name}" for expert in experts for name in own_up]
        out = [f"{expert}{expert_names.down}" for expert in experts]
        weights = (
            [TensorSource(f"{name}.weight", (width, d)) for name in up],
            [TensorSource(f"{name}.weight", (d, width), residual) for name in out],
        )
        biases = (
            [TensorSource(f"{name}.bias", (width,)) for name in up],
            [TensorSource(f"{name}.bias", (d,), residual) for name in out],
        )
    rows: dict[Path, Param] = {}
    for index, name in enumerate(("experts_gate_up", "experts_down")):
        high = (halves * width, d)[index]
        rows[name, "weight"] = Param(tuple(weights[index]), (n, high, (d, width)[index]))
        if options.bias:
            rows[name, "bias"] = Param(tuple(biases[index]), (n, high), std=0.0)
    return rows


Site: TypeAlias = tuple[tuple[str, ...], str, tuple[int, int] | None, np.ndarray]


def sites(options: ExpertsConfig, model: np.ndarray, is_gated: bool) -> tuple[Site, ...]:
    """(readers, source, rows, channels) of each input of the feed-forward's weights.

    The router reads the same norm as the experts, so no scale can be absorbed before them.
    """
    first = "mlp/gate_up" if is_gated else "mlp/up"
    dense = (first,) if options.shared and not options.shared_norms else ()
    found: tuple[Site, ...] = (
        (("mlp/experts_gate_up", *dense), "", None, model),
        (("mlp/experts_down",), "", None, np.arange(options.d_ff)),
    )
    if options.shared_norms:
        found += (((first,), "", None, model),)
    if options.shared:
        width = options.shared
        source, rows = (first, (width, 2 * width)) if is_gated else ("", None)
        found += ((("mlp/down",), source, rows, np.arange(width)),)
    return found
