"""A model in a screen of text, for ``repr``: facts, then one line for every kind of parameter."""

from __future__ import annotations

import re

import jax

from jaxllama.config import ModelConfig
from jaxllama.typing import Leaf, Params
from pallas_kernels.cpu import CpuWeight
from pallas_kernels.operands import brief, size_text
from pallas_kernels.qtensor import QTensor, RowBlocks

_QUANTIZED = QTensor | RowBlocks | CpuWeight
SCREEN = 20  # lines of parameters


def is_quantized(leaf: object) -> bool:
    """Return whether a node of a parameter tree is one quantized parameter."""
    return isinstance(leaf, _QUANTIZED)


def summary(name: str, cfg: ModelConfig, params: Params, *more: str | None) -> str:
    """Return the text of a model.

    name: of the class that prints. more: further facts; None is left out.
    """
    facts = [
        cfg.name,
        f"{cfg.n_layers} layers",
        f"vocabulary {cfg.vocab_size}",
        f"context {cfg.max_position}",
        size_text(params),
        *more,
    ]
    lines = [
        f"  {count} x {kind} {text}" if count > 1 else f"  {kind} {text}"
        for (kind, text), count in _kinds(params).items()
    ]
    if len(lines) > SCREEN:
        lines[SCREEN:] = [f"  and {len(lines) - SCREEN} more kinds of parameters"]
    return "\n".join([f"{name}({', '.join(filter(None, facts))})", *lines])


def _kinds(params: Params) -> dict[tuple[str, str], int]:
    """Return the number of parameters of each path without its layer's number, and form."""
    kinds: dict[tuple[str, str], int] = {}
    leaf: Leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        dotted = ".".join(str(getattr(entry, "key", entry)) for entry in path)
        kind = re.sub(r"layer_\d+", "layer_*", dotted), brief(leaf)
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds
