"""The layout of a prepared weight: its inverse to the bit, its rows, what has none."""

from __future__ import annotations

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.checkpoints.gguf import codes
from jaxllama.checkpoints.gguf.types import BLOCKS, TensorType
from jaxllama.checkpoints.packed.module import fuse
from pallas_kernels.cpu import (
    CpuWeight,
    from_blocks,
    pages,
    prepare,
    prepare_tree,
    restore,
    restore_tree,
)
from pallas_kernels.dispatch import Reason
from pallas_kernels.qtensor import QTensor, RowBlocks, dequantize, quantize
from tests.helpers.arrays import as_jax
from tests.helpers.cases import each_once
from tests.helpers.cpu_cases import SCHEMES, prepared, values, weight

SHAPES = [(16, 128), (40, 256), (2049, 128)]


def _same(a: QTensor, b: QTensor) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        x, y = (np.asarray(v) for v in (x, y))
        if "float" in x.dtype.name:
            x, y = (v.view(f"i{v.dtype.itemsize}") for v in (x, y))
        np.testing.assert_array_equal(x.astype(np.int32), y.astype(np.int32))


@pytest.mark.parametrize(
    ("scheme", "shape"),
    each_once(list(SCHEMES), [(shape,) for shape in SHAPES], pytest.mark.core),
    ids=str,
)
def test_restore_is_the_inverse_to_the_bit(scheme, shape):
    w = weight(scheme, *shape)
    found = prepared(w)
    assert isinstance(found.q, np.ndarray) and found.shape == shape and found.dtype == w.q.dtype
    assert found.group_size == w.group_size
    assert all(leaf.ctypes.data % 64 == 0 for leaf in jax.tree.leaves(found))
    by_program = jax.jit(restore)
    _same(by_program(jax.device_put(found)), w)
    _same(by_program(prepared(jax.device_put(w))), w)


@pytest.mark.parametrize("k", [1, 7, 33, 130])
@pytest.mark.parametrize("scheme", ["int8 rows", "int4 rows"])
def test_one_scale_a_row_goes_with_any_number_of_columns(scheme, k):
    w = weight(scheme, 21, k)
    _same(restore(prepared(w)), w)


def test_what_files_say_in_16_bits_stays_in_16_bits():
    """Q4_1 comes as d and m + 8 d in float32; d and m are what is kept."""
    found = prepared(weight("q4_1", 32, 64))
    assert found.form.minimum and found.zero is not None
    assert (found.scale.dtype, found.zero.dtype) == (np.float16, np.float16)
    assert found.nbytes == 32 * 64 * 5 // 8  # 4 bits, and 32 bits to a group of 32
    assert prepared(weight("q4_k", 32, 64)).scale.dtype == np.float32


def test_scales_that_are_not_finite_come_back():
    w = weight("q4_1", 16, 64)
    scale = np.array(w.scale, np.float32)
    scale[0, 0], scale[1, 0], scale[2, 0] = np.nan, np.inf, 1e30
    w = dataclasses.replace(w, scale=scale)
    _same(restore(prepared(w)), w)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_are_the_tables(scheme):
    w = weight(scheme, 50, 128)
    table = jax.device_put(prepared(w))
    tokens = as_jax(np.array([[0, 49, 17], [3, 16, 31]], np.int32))
    found = jax.jit(lambda t, i: dequantize(t.rows(i)))(table, tokens)
    np.testing.assert_allclose(found, values(w)[np.asarray(tokens)], rtol=1e-6, atol=1e-6)


def test_the_rest_of_a_qtensor_is_kept():
    w = weight("int8 rows", 16, 64)
    columns = np.arange(64, dtype=np.int32)[::-1].copy()
    w = dataclasses.replace(
        w, columns=columns, activations="int8", input_scale=np.ones((), np.float32)
    )
    _same(restore(prepared(w)), w)


def test_a_tree_goes_there_and_back():
    blocks = RowBlocks((weight("q4_0", 16, 64), np.ones((16, 64), np.float32)))
    fp8 = quantize(jnp.ones((128, 128)), "fp8-block")
    params = {"a": {"weight": weight("q8_0", 32, 64)}, "b": blocks, "c": np.ones(3), "d": fp8}
    params["e"] = narrow = ones("int8", 16, 64, groups=8)
    found = prepare_tree(params)
    assert isinstance(found["a"]["weight"], CpuWeight)
    assert isinstance(found["b"].blocks[0], CpuWeight)
    assert found["e"] is narrow and found["c"] is params["c"]
    back = restore_tree(found)
    _same(back["a"]["weight"], params["a"]["weight"])
    _same(back["b"].blocks[0], blocks.blocks[0])
    _same(back["d"], fp8)


@pytest.mark.parametrize("put", [np.asarray, jnp.asarray])
def test_large_float_arrays_move_to_large_pages(put):
    count = pages.PAGE // 4
    tree = {
        "large": put(np.arange(count, dtype=np.float32)),
        "ids": put(np.ones(count, np.int32)),
    }
    found = prepare_tree(tree)
    assert found["large"] is not tree["large"] and found["ids"] is tree["ids"]
    assert type(found["large"]) is type(tree["large"])
    np.testing.assert_array_equal(found["large"], tree["large"])


def ones(dtype: str, *shape: int, groups: int = 1) -> QTensor:
    codes = np.ones(shape).astype(jnp.dtype(dtype))
    return QTensor(codes, np.ones((*shape[:-1], groups), np.float32))


@pytest.mark.parametrize(
    "w, said",
    [
        (ones("float8_e5m2", 16, 64), "codes of float8_e5m2"),
        (
            dataclasses.replace(weight("q4_1", 16, 64), scale=np.ones((16, 2), jnp.float8_e4m3fn)),
            "floating zero points beside scales of 8 bits",
        ),
        (QTensor(np.full((16, 64), np.nan, jnp.float8_e4m3fn), np.ones((16, 1))), "or NaN beside"),
        (ones("int8", 16, 64, groups=8), "groups of 8 columns"),
        (ones("int8", 2, 2, 16, 64), r"w \(2, 2, 16, 64\) is not \[N, K\]"),
        (ones("int8", 2, 8, 64), "experts of 8 rows, not a multiple of 16"),
        (
            dataclasses.replace(weight("gptq", 16, 128), zero=np.full((16, 1), 126, np.int8)),
            "zero points outside of -8 to 119",
        ),
    ],
)
def test_what_has_no_form_says_why(w, said):
    found = prepare(w)
    assert isinstance(found, Reason)
    assert re.search(said, found.text), found.text


def test_a_stack_of_weights_is_a_weight_with_a_leading_axis():
    one = jax.device_put(prepared(weight("q4_1", 40, 64)))
    both = jax.tree.map(lambda a: as_jax(np.stack([a, a])), one)
    assert both.shape == (2, 40, 64) and both.ndim == 3 and both.size == 2 * 40 * 64
    _same(jax.tree.map(lambda a: np.asarray(a)[1], jax.jit(restore)(both)), restore(one))


@pytest.mark.parametrize("large", [True, False], ids=["2 MB", "as numpy"])
def test_arrays_for_weights_do_not_overlap(large, monkeypatch):
    """Small ones share a region, from several threads; large ones have their own."""
    monkeypatch.setattr(pages, "REGION", 2 * pages.PAGE)
    monkeypatch.setattr(pages, "_shared", None)
    if not large:  # a system that has none

        def refused(size):
            raise OSError("no such pages")

        monkeypatch.setattr(pages, "_Region", refused)
    sizes = [1, 63, 64, 65, 100_000, pages.PAGE, 3 * pages.PAGE + 5] * 4

    def filled(item):
        index, size = item
        made = pages.empty((size,), np.uint8)
        made[:] = index
        return made

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(filled, enumerate(sizes)))
    for index, (made, size) in enumerate(zip(found, sizes, strict=True)):
        assert made.shape == (size,) and made.ctypes.data % 64 == 0
        assert (made == index).all()
    assert pages.empty((0, 4), np.float32).shape == (0, 4)
    assert pages.empty((3, 5), np.float16).dtype == np.float16


def test_jax_takes_a_prepared_weight_without_a_copy():
    w = prepared(weight("q4_0", 64, 64))
    assert jax.device_put(w.q).unsafe_buffer_pointer() == w.q.ctypes.data


def _blocks(kind: TensorType, n: int, groups: int) -> np.ndarray:
    """Random blocks of a file's type, with small scales."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (n, groups, BLOCKS[kind][1]), dtype=np.uint8)
    for at in (0, 2) if kind == TensorType.Q4_1 else (0,):
        numbers = rng.normal(0, 0.02, (n, groups, 1)).astype(np.float16)
        raw[..., at : at + 2] = numbers.view(np.uint8)
    return raw


def _through_words(kind: TensorType, raw: np.ndarray) -> QTensor:
    words = codes.empty(kind, len(raw), 32 * raw.shape[1])
    words.fill(slice(0, len(raw)), raw.reshape(len(raw), -1))
    return fuse([words.to_qtensor()])


FILE_TYPES = {"Q4_0": (4, False), "Q4_1": (4, True), "Q8_0": (8, False)}


@pytest.mark.parametrize("shape", [(16, 1), (40, 18), (2100, 3)], ids=str)
@pytest.mark.parametrize("name", FILE_TYPES)
def test_blocks_of_a_file_are_laid_out_as_their_qtensor(name, shape):
    kind = TensorType[name]
    raw = _blocks(kind, *shape)
    if kind == TensorType.Q4_1:
        raw[0, 0, 2:4] = 0, 0x80  # a minimum of -0
    want, got = prepare(_through_words(kind, raw)), from_blocks(raw, *FILE_TYPES[name])
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def test_a_zero_that_is_0_everywhere_is_dropped_from_blocks_too():
    raw = _blocks(TensorType.Q4_1, 32, 2)
    scale = raw[..., :2].copy().view(np.float16)
    raw[..., 2:4] = (scale * np.float16(-8)).view(np.uint8)
    got = from_blocks(raw, 4, True)
    assert got.zero is None and _through_words(TensorType.Q4_1, raw).zero is None
    assert got.form == prepare(_through_words(TensorType.Q4_1, raw)).form


@pytest.mark.parametrize(("scale", "minimum"), [(np.inf, 0), (0.5, np.nan), (6e-8, 60000)], ids=str)
def test_blocks_without_an_exact_zero_are_left_to_the_qtensor(scale, minimum):
    raw = _blocks(TensorType.Q4_1, 32, 2)
    raw[3, 1, :4] = np.array([scale, minimum], np.float16).view(np.uint8)
    assert from_blocks(raw, 4, True) is None
