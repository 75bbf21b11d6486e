"""Quantized weights and caches for ``flax.serialization``.

flax serializes the types that are registered with it.  ``register`` registers ours, and does
nothing before flax has been imported, which takes a third of a second.  ``module`` (which imports
flax), ``load`` and ``quantize_params`` call it.  A program that imports flax after all of these
calls ``register`` itself.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.model.cache import Cache
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.mixers.recurrent import RecurrentState
from jaxllama.typing import ArrayOrNumpy, ParamsDict, Tree
from pallas_kernels.cpu.weight import CpuWeight
from pallas_kernels.qtensor import QTensor, RowBlocks

Stored = QTensor | RowBlocks | CpuWeight | Cache | KVCache | RecurrentState

# numpy has no names for these, by which flax stores a dtype.
_STORED_AS = {
    "int4": np.int8,
    "float8_e4m3fn": np.uint8,
    "float4_e2m1fn": np.uint8,
    "float8_e8m0fnu": np.uint8,
}


def register() -> None:
    """Let flax, where it is imported, serialize trees with QTensors and caches."""
    if "flax.serialization" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    from flax import serialization

    def to_state(value: Stored) -> ParamsDict:
        return {
            name: serialization.to_state_dict(_stored(getattr(value, name)))
            for name in _array_fields(value)
        }

    def from_state(target: Stored, state: ParamsDict) -> Stored:
        parts = {}
        for name in _array_fields(target):
            old = getattr(target, name)
            new = serialization.from_state_dict(_stored(old), state[name], name=name)
            parts[name] = _restored(new, old)
        found = dataclasses.replace(target, **parts)
        return found.found_blocks() if isinstance(found, QTensor) and found.has_blocks else found

    for kind in (QTensor, RowBlocks, CpuWeight, Cache, KVCache, RecurrentState):
        serialization.register_serialization_state(kind, to_state, from_state)


def _array_fields(value: Stored) -> list[str]:
    fields = dataclasses.fields(value)
    return [field.name for field in fields if not field.metadata.get("static")]


def _stored(value: Tree) -> Tree:
    """An array as flax can store it, anything else as it is."""
    stored = _STORED_AS.get(jnp.dtype(value.dtype).name) if _is_array(value) else None
    if stored is None:
        return value
    codes = np.asarray(value)
    return codes.astype(stored) if codes.dtype.name == "int4" else codes.view(stored)


def _restored(value: Tree, like: Tree) -> Tree:
    """The inverse of ``_stored``, of ``like``'s dtype."""
    if not _is_array(like) or jnp.dtype(like.dtype).name not in _STORED_AS:
        return value
    codes = np.asarray(value)
    is_int4 = like.dtype == jnp.int4
    return jnp.asarray(codes.astype(like.dtype) if is_int4 else codes.view(like.dtype))


def _is_array(value: object) -> TypeGuard[ArrayOrNumpy]:
    return isinstance(value, np.ndarray | jax.Array)
