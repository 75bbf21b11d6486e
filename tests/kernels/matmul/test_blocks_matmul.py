"""Products of one normed x with several weights in one kernel, against each alone in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.matmul.blocks import (
    alike,
    blocks_matmul,
    find_plan,
    own_blocks,
    stacked,
)
from pallas_kernels.matmul.few_rows import blocks as kernel
from pallas_kernels.matmul.few_rows.plan import BlocksPlan
from pallas_kernels.qtensor import QTensor, RowBlocks
from tests.helpers.few_rows import few_rows
from tests.kernels.matmul.test_fused_matmul import EPS, expected, hostile, weight
from tests.kernels.matmul.test_quantized_matmul import activations, check

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
newest = pytest.mark.skipif(VERSION < (0, 11, 2), reason="Mosaic kernels need jax >= 0.11.2")
DTYPE = jnp.bfloat16


def case(names, m, k, rows):
    """names: of the weights' forms, one for all or one each."""
    names = [names] * len(rows) if isinstance(names, str) else names
    weights = [
        weight(name, n, k, DTYPE, i) for i, (name, n) in enumerate(zip(names, rows, strict=True))
    ]
    x = activations((m, k), DTYPE, 99)  # a seed that no weight has
    return x, weights, ((1 + 0.2 * activations((k,), jnp.float32, 98)).astype(DTYPE), EPS)


EMULATED = [  # forms, m, K, rows
    ("plain", 1, 1024, (32, 48, 16)),
    ("plain", 3, 2048, (16, 64)),
    ("w4-g128-zero", 1, 2048, (16, 16, 48, 16)),
    (("w4-g128", "w4-g128", "plain"), 2, 2048, (32, 48, 32)),
    (("plain", "w8-row", "w8-row"), 9, 1024, (16, 48, 32)),
]


@newest
@pytest.mark.parametrize("given", EMULATED, ids=str)
def test_the_kernel_s_code_on_numpy(given):
    x, weights, norm = case(*given)
    plan = find_plan(x, weights, norm=norm)
    fixed = {"eps": EPS, "out_dtype": jnp.dtype(DTYPE), "plan": plan}
    with few_rows():
        outs = kernel.matmul(x, alike(weights), norm[0], **fixed)
    want = [expected(x, w, norm=norm) for w in weights]
    check(jnp.concatenate(outs, -1), np.concatenate(want, -1), DTYPE)


def test_blocks_are_shared_out():
    def divide(*weights):
        norm = (shape((2048,), plain), EPS)
        return find_plan(shape((1, 2048), plain), weights, norm=norm).groups

    shape, plain = jax.ShapeDtypeStruct, jnp.bfloat16
    low = shape((16, 2048), plain)
    for n, blocks in ((6144, 131), (132 * 16, 132), (5 * 16, 5)):
        words = QTensor(shape((n, 2048), jnp.int4), shape((n, 16), plain))
        large, small = divide(words, low)
        assert (large.tiles.clusters, small.tiles.clusters) == (blocks, 1)
        assert large.tiles.clusters * large.tiles.per * 16 >= n and small.begin == blocks
    (whole,) = divide(shape((6144, 2048), plain), low)
    assert whole.tiles.clusters == 132 and whole.firsts == [384]


def test_what_is_one_kernel(monkeypatch):
    x, weights, norm = case(("w4-g128", "w4-g128", "plain"), 1, 2048, (96, 16, 32))
    words, _, low = weights
    large = weight("plain", 80, 2048, DTYPE)
    assert [len(group) for group in alike(weights)] == [2, 1]
    assert stacked(weights[:2]).shape == (112, 2048) and stacked(weights[:2]).group_size == 128
    assert isinstance(find_plan(x, weights, norm=norm), BlocksPlan)
    assert "several large weights" in find_plan(x, [words, large], norm=norm).text
    assert "32, 24" in find_plan(x, [low, low[:24]], norm=norm).text
    with pytest.raises(NotImplementedError, match="17 tokens"):
        blocks_matmul(jnp.zeros((17, 2048), DTYPE), weights, norm=norm)
    assert own_blocks(x, weights, norm=norm) is None
    monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)
    assert own_blocks(x, weights, norm=norm) is not None
    assert own_blocks(x, [RowBlocks((words, low)), low], norm=norm) is None


@newest
@pytest.mark.parametrize("words", ["plain", "int4"])
def test_it_lowers_for_cuda_as_one_kernel(words):
    shape, k = jax.ShapeDtypeStruct, 2048
    rows = (1024, 1024, 2048, 2048, 16)
    weights = [shape((n, k), DTYPE) for n in rows]
    if words == "int4":
        weights[:4] = [QTensor(shape((n, k), jnp.int4), shape((n, 16), DTYPE)) for n in rows[:4]]

    def call(x, gamma, weights):
        return [y.value for y in blocks_matmul(x, weights, norm=(gamma, EPS))]

    traced = jax.jit(call).trace(shape((1, 1, k), DTYPE), shape((k,), DTYPE), weights)
    assert [y.shape for y in traced.jaxpr.out_avals] == [(1, 1, n) for n in rows]
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1 and "concatenate" not in text


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, m", [("plain", 1), ("plain", 16), ("w4-g128", 1), ("w4-g128-zero", 3), ("w8-row", 16)]
)
def test_values_on_the_gpu(name, m):
    x, weights, norm = case([name] * 3 + ["plain"], m, 2048, (1024, 1040, 2048, 16))
    x = hostile(x)
    outs, again = (blocks_matmul(x, weights, norm=norm) for _ in range(2))
    for w, out, other in zip(weights, outs, again, strict=True):
        np.testing.assert_array_equal(out.value, other.value)
        for row, want in zip(out.value, expected(x, w, norm=norm), strict=True):
            check(row, want, DTYPE)
