"""Check what quantization did to a model: every buffer, and the arrays of its decode program.

    buffers(params) -> [{"path", "dtype", "shape", "bytes"}, ...]
    decode_program(cfg, params) -> {"temporary_bytes", "copies", "largest_temporary", ...}

A matmul that turned its weight back into floats would undo the saving. So this module reads the
type of every array that the compiled ``decode_step`` stores (``hlo``). A *copy* is a floating-point
array, wider than the codes, with as many elements as some quantized weight. The result holds for
the backend on which it runs; another compiler may differ.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxllama import generation
from jaxllama.config import ModelConfig
from jaxllama.evaluation.speed.hlo import stored_results
from jaxllama.model.cache import init_cache
from jaxllama.typing import JsonObject, Params
from pallas_kernels.cpu import CpuWeight
from pallas_kernels.qtensor import QTensor, leaves_of

_CAPACITY = 128  # capacity of the cache in that program, in tokens


def buffers(params: Params) -> list[JsonObject]:
    """Return every array of the tree, QTensor parts by name, with its bytes on this device."""
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [
            str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))
            for entry in path
        ]
        rows.append(
            {
                "path": "/".join(names),
                "dtype": leaf.dtype.name,
                "shape": list(leaf.shape),
                "bytes": sum(
                    shard.data.on_device_size_in_bytes() for shard in leaf.addressable_shards
                ),
            }
        )
    return rows


def decode_program(cfg: ModelConfig, params: Params) -> JsonObject:
    """Compile ``decode_step`` for one row and read it; see the module docstring.

    Sizes are in bytes. ``temporary_bytes`` is None if the backend does not report it.
    """
    dtype = params["norm"]["weight"].dtype
    cache = jax.eval_shape(lambda: init_cache(cfg, 1, _CAPACITY, dtype))
    tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = generation.decode_step.lower(cfg, params, tokens, cache).compile()
    stats = compiled.memory_analysis()
    results = stored_results(compiled.as_text() or "")
    leaves = leaves_of(params, QTensor | CpuWeight)
    codes = {math.prod(leaf.shape) for leaf in leaves}
    floats = [row for row in results if row["type"] in ("f16", "bf16", "f32", "f64")]
    copies = [row for row in floats if math.prod(row["shape"]) in codes]
    largest = max(floats, key=_size, default=None)
    return {
        "backend": jax.default_backend(),
        "temporary_bytes": None if stats is None else stats.temp_size_in_bytes,
        "quantized_weights": len(leaves),
        "largest_weight_as_floats": max(codes, default=0) * dtype.itemsize,
        "largest_temporary": None if largest is None else _named(largest),
        "copies": [_named(row) for row in copies],
    }


def _size(row: JsonObject) -> int:
    return math.prod(row["shape"]) * row["bits"] // 8


def _named(row: JsonObject) -> JsonObject:
    return {**{key: row[key] for key in ("name", "type", "shape", "op")}, "bytes": _size(row)}
