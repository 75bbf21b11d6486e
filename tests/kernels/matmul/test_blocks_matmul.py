"""Products of one normed x with several weights in one kernel, against each alone in float64."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.device import sms
from pallas_kernels.matmul.blocks import (
    alike,
    blocks_matmul,
    find_plan,
    own_blocks,
    stacked,
)
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows import blocks as kernel
from pallas_kernels.matmul.few_rows import kernel as few_rows_kernel
from pallas_kernels.matmul.few_rows.blocks_plan import BlocksPlan, Group, divide_blocks
from pallas_kernels.matmul.few_rows.plan import RowDivision, divide_row
from pallas_kernels.qtensor import QTensor, RowBlocks
from tests.helpers.few_rows import few_rows
from tests.helpers.matmul_cases import (
    EPS,
    activations,
    check,
    extras,
    fused_product,
    hostile,
    lowered,
    newest,
    shaped,
    weight,
)

DTYPE = jnp.bfloat16


def case(names, m, k, rows):
    """names: of the weights' forms, one for all or one each."""
    names = [names] * len(rows) if isinstance(names, str) else names
    weights = [
        weight(name, n, k, DTYPE, i) for i, (name, n) in enumerate(zip(names, rows, strict=True))
    ]
    x = activations((m, k), DTYPE, 99)  # a seed that no weight has
    return x, weights, extras(m, 16, k, DTYPE, "n")["norm"]


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
    want = [fused_product(x, w, norm=norm) for w in weights]
    check(np.concatenate(outs, -1), np.concatenate(want, -1), DTYPE)


BY_ROWS = [  # forms, K, rows
    ("plain", 2048, (32, 48, 16)),
    ("w4-g128-zero", 2048, (16, 16, 48, 16)),
    (("w4-g128", "w4-g128", "plain"), 5120, (32, 48, 16)),
    (("w8-row", "w8-row", "plain"), 1024, (16, 64, 32)),
    ("nvfp4", 1024, (16, 32)),
]


@newest
@pytest.mark.parametrize("given", BY_ROWS, ids=str)
def test_one_row_has_the_bits_of_each_product_alone(given):
    names, k, rows = given
    x, weights, (gamma, eps) = case(names, 1, k, rows)
    groups, options = alike(weights), {"eps": EPS, "out_dtype": jnp.dtype(DTYPE)}
    calls = [MatmulCall.of(x, stacked(g), DTYPE, gamma=gamma, eps=eps) for g in groups]
    plan = divide_blocks(calls, [tuple(w.shape[0] for w in g) for g in groups], by_rows=True)
    assert all(isinstance(group.division, RowDivision) for group in plan.groups)
    few = [dataclasses.replace(group.division, sms=1) for group in plan.groups]  # more rounds
    begins = itertools.accumulate((found.blocks for found in few), initial=0)
    numbers = zip((group.rows for group in plan.groups), begins, strict=False)
    plan = BlocksPlan(tuple(map(lambda d, own: Group(d, *own), few, numbers)))
    with few_rows():
        outs = kernel.matmul(x, groups, gamma, **options, plan=plan)
        alone = [
            few_rows_kernel.matmul(x, w, gamma=gamma, **options, plan=divide_row(w))
            for w in weights
        ]
    np.testing.assert_array_equal(np.concatenate(outs, -1), np.concatenate(alone, -1))


@pytest.mark.parametrize("m", [1, 2])
def test_blocks_are_shared_out(m):
    """Every weight's rows have blocks, which follow one another and fit the GPU at once."""
    low = shaped((16, 2048), DTYPE)
    norm = shaped((2048,), DTYPE), EPS
    for n in (6144, 132 * 16, 5 * 16):
        words = QTensor(shaped((n, 2048), jnp.int4), shaped((n, 16), DTYPE))
        for weights in ([words, low], [shaped((n, 2048), DTYPE), low]):
            groups = find_plan(shaped((m, 2048), DTYPE), weights, norm=norm).groups
            begin = 0
            for group in groups:
                assert group.begin == begin
                begin += group.blocks
                division, count = group.division, sum(group.rows)
                if isinstance(division, RowDivision):
                    reached = division.blocks * division.warps * division.rounds
                    assert division.units * division.rows == count <= reached * division.rows
                else:
                    assert division.clusters * division.per * 16 >= count
            # The largest leaves SMs to the others where that costs it no time.
            large, count = groups[0].division, sum(groups[0].rows)
            if isinstance(large, RowDivision):
                assert m == 1 and begin <= sms() * 16 // large.warps
            else:
                assert begin <= sms() or large.clusters == -(-count // 16 // large.per)
            assert sum(sum(group.rows) for group in groups) == n + 16
            assert len(groups) == (2 if weights[0] is words else 1)
            if n == 6144:
                assert isinstance(large, RowDivision) == (m == 1)
    assert groups[0].firsts == [n // (1 if isinstance(large, RowDivision) else 16)]


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
def test_it_lowers_for_cuda_as_one_kernel():
    k, rows = 2048, (1024, 2048, 16)
    weights = [shaped((n, k), DTYPE) for n in rows]
    weights[:2] = [QTensor(shaped((n, k), jnp.int4), shaped((n, 16), DTYPE)) for n in rows[:2]]

    def call(x, gamma, weights):
        return [y.value for y in blocks_matmul(x, weights, norm=(gamma, EPS))]

    given = shaped((1, 1, k), DTYPE), shaped((k,), DTYPE), weights
    assert [y.shape for y in jax.eval_shape(call, *given)] == [(1, 1, n) for n in rows]
    text = lowered(call, *given)
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
        for row, want in zip(out.value, fused_product(x, w, norm=norm), strict=True):
            check(row, want, DTYPE)
