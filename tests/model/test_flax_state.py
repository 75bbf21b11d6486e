"""Quantized trees and caches through flax's serialization."""

from __future__ import annotations

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.model import flax_state
from pallas_kernels.cpu import prepare_tree
from pallas_kernels.qtensor import QTensor, RowBlocks, quantize
from tests.helpers.arrays import as_jax
from tests.helpers.models import FAMILIES, params_of

flax_state.register()  # of a program that imports flax first and loads no model
CFG = FAMILIES["hybrid"]
W = as_jax(np.random.default_rng(0).standard_normal((32, 64)), jnp.float32)
# Made in the test, because every worker collects the cases and one of them runs them.
TREES = {
    "weights of 4 bits": lambda: {"w": quantize(W, "int4", group_size=32, symmetric=False)},
    "two levels": lambda: {"w": quantize(W, "int4", group_size=32, scale_dtype="int8")},
    "float8": lambda: {"w": quantize(W, "float8_e4m3fn")},
    "rows of several kinds": lambda: {"w": RowBlocks((quantize(W, "int8"), W))},
    "a CPU's layout": lambda: prepare_tree({"w": {"weight": quantize(W, "int8")}}),
    "a model": lambda: jl.quantize_params(params_of(CFG), "w8a8"),
    "a cache": lambda: jl.init_cache(CFG, 1, 4),
    "a cache of 8 bits": lambda: jl.init_cache(CFG, 1, 4, "float8_e4m3fn"),
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back_from_bytes(name):
    tree = TREES[name]()
    empty = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree))(tree)
    got = flax.serialization.from_bytes(empty, flax.serialization.to_bytes(tree))
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(tree), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_tree_of_other_shapes_is_not_taken():
    state = flax.serialization.to_state_dict({"w": quantize(W, "int8")})
    with pytest.raises(ValueError, match="keys"):
        flax.serialization.from_state_dict({"v": quantize(W, "int8")}, state)
    assert isinstance(
        flax.serialization.from_state_dict({"w": quantize(W, "int8")}, state)["w"], QTensor
    )


def test_scales_of_rows_do_not_pass_for_those_of_blocks():
    q, scale = np.ones((128, 256), "float8_e4m3fn"), np.ones((128, 2), np.float32)
    target = {"w": QTensor(q, scale, blocked=128)}
    for saved, has_blocks in ((2 * scale, True), (np.arange(256.0).reshape(128, 2), False)):
        state = flax.serialization.to_state_dict({"w": QTensor(q, saved.astype(np.float32))})
        assert flax.serialization.from_state_dict(target, state)["w"].has_blocks is has_blocks
