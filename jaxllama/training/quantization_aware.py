"""Quantization-aware training: matmul weights are rounded to a grid in every forward pass.

A weight becomes a ``GridWeight``: the float32 master weight, its scales and its zeros, all of them
trained. ``rounded`` returns the tree of floats that the model multiplies by, with straight-through
gradients (``jaxllama.training.fake_quantize``). ``quantized`` returns the QTensors at the end. The
grid starts as round-to-nearest's. So step 0 equals ``quantize_params`` of w8a16 or w4a16-sym,
without zeros to the last bit.

Left out: quantized activations (w8a8, fp8).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxllama.quantization.quantize import quantize_params
from jaxllama.training.config import QuantizeConfig
from jaxllama.training.fake_quantize import RANGES, fake_quantize, to_qtensor
from jaxllama.typing import Params, Tree
from pallas_kernels.qtensor import QTensor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GridWeight:
    """A weight with its grid, float32.

    w ``[N, K]``, scale ``[N, groups]``, zero: shaped as scale, or None. code_dtype: "int8" or
    "int4".
    """

    w: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    code_dtype: str = dataclasses.field(metadata={"static": True})


def prepare(params: Params, config: QuantizeConfig | None) -> Params:
    """Return the tree to train: floats, with every matmul weight on a grid if there is a config."""
    if config is None:
        return params
    scheme = config.scheme if config.scheme == "w8a16" else f"{config.scheme}-sym"
    # A tied head is trained as the embedding.
    found = quantize_params(params, scheme if "head" in params else f"{scheme},head=none")

    def grid_leaf(grid: jax.Array | QTensor, w: jax.Array) -> jax.Array | GridWeight:
        if not isinstance(grid, QTensor):
            return w
        scale, zero = grid.scale.astype(jnp.float32), None
        if config.zeros:
            groups = w.reshape(*scale.shape, -1)
            low, high = jnp.min(groups, axis=-1), jnp.max(groups, axis=-1)
            zero = (low + high) / 2
            scale = (high - low) / 2 / RANGES[grid.dtype.name][1]
        return GridWeight(w, scale, zero, grid.dtype.name)

    return jax.tree.map(grid_leaf, found, params, is_leaf=lambda leaf: isinstance(leaf, QTensor))


def rounded(params: Params) -> Params:
    """Return floats for the model; grids of stacked layers give stacked weights."""

    def rounded_leaf(grid: GridWeight) -> jax.Array:
        if grid.w.ndim > 2:
            return jax.vmap(rounded_leaf)(grid)
        return fake_quantize(grid.w, grid.scale, grid.zero, grid.code_dtype)

    return _map(rounded_leaf, params)


def quantized(params: Params) -> Params:
    """Return the tree with QTensors in place of grids."""

    def quantized_leaf(grid: GridWeight) -> QTensor:
        if grid.w.ndim > 2:  # experts
            return jax.vmap(quantized_leaf)(grid)
        return to_qtensor(grid.w, grid.scale, grid.zero, grid.code_dtype)

    return _map(quantized_leaf, params)


def _map(change: Callable[[GridWeight], Tree], params: Params) -> Params:
    def mapped(leaf: Tree) -> Tree:
        return change(leaf) if isinstance(leaf, GridWeight) else leaf

    return jax.tree.map(mapped, params, is_leaf=lambda leaf: isinstance(leaf, GridWeight))
