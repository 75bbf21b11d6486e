"""quantize_params: one transform of the parameter tree, by round-to-nearest, for every scheme.

A scheme names the weights' and the activations' width.  Weight-only schemes keep activations in
float; "w8a8" and "fp8" also quantize them per token, inside the matmul's input.

    w8a16   int8 weights, one scale per output channel
    w4a16   int4 weights, one scale per group of 128 inputs (the widest of 128, 64, 32 that divides)
    w8a8    w8a16's weights, activations int8 with one scale per token
    fp8     float8_e4m3fn both, scales as in w8a8

The matmuls of the layers and an untied head are quantized; embeddings, norms, biases and the small
gate projections of GLA stay as they are.  What rounding costs is measured, not assumed: see the
README's table.  Calibrated methods (AWQ, GPTQ, SmoothQuant) are not here yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllama.errors import JaxLlamaError
from pallas_kernels.qtensor import QTensor, quantize

SCHEMES = ("w8a16", "w4a16", "w8a8", "fp8")
# Parents of a "weight" that is a matmul; "head" counts only because a tied head has no such entry.
_MATMULS = frozenset(("qkv", "q", "k", "v", "g", "o", "gate_up", "down", "head"))


def quantize_params(params: Mapping[str, Any], scheme: str) -> dict[str, Any]:
    """The tree with every matmul weight replaced by a QTensor; weights already quantized stay.

    Raises JaxLlamaError for an unknown scheme, or naming a weight no group size divides.
    """
    if scheme not in SCHEMES:
        raise JaxLlamaError(f"scheme {scheme!r} is not one of {', '.join(SCHEMES)}")

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        keys = [getattr(key, "key", key) for key in path]
        is_matmul = len(keys) >= 2 and keys[-1] == "weight" and keys[-2] in _MATMULS
        if isinstance(leaf, QTensor) or not is_matmul:
            return leaf
        return _quantize_weight(leaf, scheme, "/".join(keys))

    return jax.tree_util.tree_map_with_path(
        one, dict(params), is_leaf=lambda leaf: isinstance(leaf, QTensor)
    )


def _quantize_weight(weight: jax.Array, scheme: str, name: str) -> QTensor:
    if scheme != "w4a16":
        dtype = "float8_e4m3fn" if scheme == "fp8" else "int8"
        words = _quantize(weight, dtype=dtype, group_size=None, scale_dtype=jnp.float32)
        return dataclasses.replace(words, activations=None if scheme == "w8a16" else dtype)
    width = weight.shape[-1]
    group = next((group for group in (128, 64, 32) if width % group == 0), None)
    if group is None:
        raise JaxLlamaError(f"{name}: no group of 128, 64 or 32 divides its {width} inputs")
    return _quantize(weight, dtype="int4", group_size=group)


_quantize = jax.jit(quantize, static_argnames=("dtype", "group_size", "scale_dtype"))
