"""Weights that every machine makes alike, so that golden files hold only inputs and results.

Uniform numbers from PCG64's raw words, whose stream numpy guarantees (its distributions' are not).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllama.checkpoints.hf.tables import tensor_table as param_table
from jaxllama.config import ModelConfig


def uniform(seed: int, size: int) -> np.ndarray:
    """float32 in [-1, 1)."""
    raw = np.random.PCG64(seed).random_raw(size)
    return ((raw >> np.uint64(40)).astype(np.float32) / np.float32(2**23)) - np.float32(1.0)


def seeded_params(cfg: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """A float32 parameter tree: matrices that keep the signal's size, norms around 1, and biases
    large enough that leaving one out shows."""
    params: dict[str, Any] = {}
    shared: dict[tuple[str, ...], np.ndarray] = {}  # of layers that have the same tensors
    for index, (path, spec) in enumerate(param_table(cfg).items()):
        values = uniform(seed * 1000 + index, spec.size).reshape(spec.shape)
        *rooms, leaf = path
        if rooms[-1].endswith(("norm", "scale")):
            values = 1 + np.float32(0.3) * values
        elif leaf == "weight" and rooms[-1] not in ("embed", "head"):
            values = values * np.float32((3.0 / spec.shape[-1]) ** 0.5)
        if spec.is_constant:
            values = np.full(spec.shape, spec.mean, np.float32)
        else:
            values = shared.setdefault(tuple(source.name for source in spec.sources), values)
        room = params
        for key in rooms:
            room = room.setdefault(key, {})
        room[leaf] = values
    return params


def hf_tensors(cfg: ModelConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The same weights under the checkpoint's names."""
    tensors = {}
    for path, spec in param_table(cfg).items():
        leaf: Any = params
        for key in path:
            leaf = leaf[key]
        parts = np.split(leaf.reshape(-1), np.cumsum([s.size for s in spec.sources])[:-1])
        for source, part in zip(spec.sources, parts, strict=True):
            tensors[source.name] = part.reshape(source.shape)
    return tensors
