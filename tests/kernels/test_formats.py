"""MXFP4, NVFP4 and FP8 in blocks: scales and codes against numpy, and the products of each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.experts import xla as experts_xla
from pallas_kernels.experts.op import grouped_matmul
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.matmul.predict import forms
from pallas_kernels.matmul.weight_only import BY_FORM
from pallas_kernels.qtensor import QTensor, dequantize, quantize
from tests.helpers.cases import slow
from tests.helpers.matmul_cases import check, exact, product, wide

FORMATS = ("mxfp4", "nvfp4", "fp8-block")
FP4 = ml_dtypes.float4_e2m1fn
FP8 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
E, N, K = 3, 48, 320


def _oracle(w: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(codes, scales, unit) of float32 ``w[N, K]``, by ml_dtypes' roundings."""
    n, k = w.shape
    if name == "fp8-block":
        scale = np.empty((n, k // 64), np.float32)
        for row in range(0, n, 128):
            for column in range(0, k, 128):
                block = w[row : row + 128, column : column + 128]
                peak = np.abs(block).max() * np.float32(1 / 448)
                scale[row : row + 128, column // 64 : column // 64 + 2] = peak
        whole, codes, unit = scale, FP8, None
    else:
        group = 32 if name == "mxfp4" else 16
        peaks = np.abs(w.reshape(n, -1, group)).max(-1)
        if name == "mxfp4":
            # The power of two that makes the largest magnitude less than 7.
            powers = 2.0 ** np.arange(-126, 128)
            found = powers[np.argmax(peaks[..., None] / powers < 7, axis=-1)]
            scale, unit = np.where(peaks == 0, 1.0, found).astype(E8M0), None
            whole = scale.astype(np.float32)
        else:
            divisor = np.float32(6 * 448) / peaks.max()
            unit = np.full((n, 1), np.float32(1) / divisor, np.float32)
            scale = (peaks * np.float32(1 / 6) * divisor).astype(FP8)
            whole = scale.astype(np.float32) * unit
        codes = FP4
    groups = w.reshape(n, whole.shape[1], -1)
    with np.errstate(divide="ignore"):
        steps = groups * np.where(whole > 0, np.float32(1) / whole, np.float32(0))[..., None]
    top = np.float32(ml_dtypes.finfo(codes).max)
    return np.clip(steps, -top, top).astype(codes).reshape(n, k), scale, unit


def _weights(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.core
@pytest.mark.parametrize("name", FORMATS)
def test_scales_and_codes_are_numpy_s(name) -> None:
    """Each expert by itself, groups of zeros, ties, and weights that scales hardly reach."""
    w = _weights((2, 136, K))
    w[1] *= 100
    w[:, 3, 64:128] = 0
    w[:, 5] *= 1e4
    w[:, 7] *= 1e-4  # under NVFP4's smallest scale
    w[:, 9, :32] = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6.99] * 4)  # at scale 1

    @jax.jit
    def both(w):
        t = quantize(w, name)
        return t, dequantize(t)

    got, floats = both(w)
    assert got.shape == w.shape and got.nbytes < w.nbytes / 3
    for index in range(2):
        codes, scale, unit = _oracle(w[index], name)
        t = got.rows(index)
        assert t.dtype == codes.dtype and t.scale.dtype == scale.dtype
        np.testing.assert_array_equal(np.asarray(t.scale), scale)
        # XLA's cast to float8 may round to float16 first.
        off = np.asarray(t.q).view(np.uint8).astype(int) - codes.view(np.uint8)
        assert np.abs(off).max() <= (name == "fp8-block") and np.mean(off != 0) < 1e-3
        assert (unit is None) == (t.unit is None)
        if unit is not None:
            np.testing.assert_array_equal(t.unit, unit)
        q = np.asarray(t.q).astype(np.float32).reshape(*scale.shape, -1)
        want = (q * scale.astype(np.float32)[..., None]).reshape(codes.shape)
        np.testing.assert_array_equal(floats[index], want if unit is None else want * unit)


def test_all_codes_with_all_scales_dequantize_exactly() -> None:
    q = np.repeat(np.arange(16, dtype=np.uint8)[None], 256, axis=0).view(FP4)
    scale = np.arange(256, dtype=np.uint8)[:, None].view(E8M0)
    got = np.asarray(jax.jit(dequantize)(QTensor(jnp.asarray(q), jnp.asarray(scale))))
    assert np.isnan(got[255]).all()
    # Below the smallest normal float32, and above the largest, nothing is promised.
    at = slice(3, 252)
    want = q[at].astype(np.float32) * scale[at].astype(np.float32)
    np.testing.assert_array_equal(got[at], want)


def _tensor(w: np.ndarray, name: str) -> QTensor:
    """numpy's QTensor of ``w[..., N, K]``."""
    parts = [_oracle(row, name) for row in w.reshape(-1, *w.shape[-2:])]
    q, scale, unit = (
        None if one[0] is None else np.stack(one).reshape(*w.shape[:-1], -1)
        for one in zip(*parts, strict=True)
    )
    return jax.tree.map(jnp.asarray, QTensor(q, scale, unit=unit))


@pytest.mark.core
@pytest.mark.parametrize("name", FORMATS)
def test_products_and_their_gradients(name) -> None:
    w, x, dy = _tensor(_weights((N, K)), name), _weights((3, K), 1), _weights((3, N), 2)

    @jax.jit
    def both(x, w, dy):
        out, pull = jax.vjp(quantized_matmul, x, w)
        return out, *pull(dy)

    out, dx, dw = both(x, w, dy)
    check(out, product(x, w), jnp.float32)
    check(dx, dy.astype(np.float64) @ exact(w), jnp.float32)
    by_code = (dy.astype(np.float64).T @ x).reshape(*w.scale.shape, -1)
    by_code = np.sum(by_code * wide(w.q).reshape(by_code.shape), axis=-1)
    if name == "nvfp4":
        check(dw.unit, np.sum(by_code * wide(w.scale), axis=-1, keepdims=True), jnp.float32)
    elif name == "fp8-block":
        check(dw.scale, by_code, jnp.float32)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_the_forms_of_an_accelerator(name) -> None:
    w = dataclasses.replace(_tensor(_weights((N, K)), name), unit=None)
    assert forms(w.q, w.group_size) == ("words", "sums", "copy")
    pairs = (_weights((1, K), 1), _weights((3, K), 2))
    run = jax.jit(lambda x, w: [form(x, w.scale, None, w.q) for form in BY_FORM.values()])
    for x in pairs:
        for got in run(x, w):
            check(got, product(x, w), jnp.float32)


@pytest.mark.parametrize("name", ["nvfp4", *slow("mxfp4")])
def test_grouped_products_and_their_gradients(name) -> None:
    w, x, dy = _tensor(_weights((E, N, K)), name), _weights((4, K), 1), _weights((4, 2, N), 2)
    experts = np.asarray([[0, 2], [1, 0], [2, 1], [2, 0]], np.int32)

    @jax.jit
    def run(x, w, dy):
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, experts), x, w)
        plain = dataclasses.replace(w, unit=None)
        how = {"fan": 2, "size": 4, "dtype": jnp.float32}
        pairs = jnp.asarray(experts).reshape(-1)
        each = [form(x, plain, pairs, **how) for form in experts_xla.BY_FORM.values()]
        return out, *pull(dy), each

    out, dx, dw, each = run(x, w, dy)
    chosen, unit = exact(w)[experts], 1.0 if w.unit is None else wide(w.unit)[experts][..., 0]
    want = np.einsum("ti,tkoi->tko", x.astype(np.float64), chosen)
    check(out, want, jnp.float32)
    check(dx, np.einsum("tko,tkoi->ti", dy.astype(np.float64), chosen), jnp.float32)
    for got in each:
        check(got.reshape(want.shape), want / unit, jnp.float32)
    if name == "nvfp4":
        by_row = dy.astype(np.float64) * want / unit
        d_unit = [np.sum(by_row[experts == index], axis=0) for index in range(E)]
        check(dw.unit[..., 0], np.stack(d_unit), jnp.float32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "mxfp4", "group_size": 16}, "mxfp4 has groups of 32, not 16"),
        ({"dtype": "nvfp4", "symmetric": False}, "nvfp4 has no zero points"),
        ({"dtype": "mxfp4", "scale_dtype": "float32"}, "have a dtype of their own"),
        ({"dtype": "float4_e2m1fn"}, "is not int8, int4, float8_e4m3fn, mxfp4"),
        ({"dtype": "fp8-block", "scale_dtype": "int8"}, "scale_dtype"),
    ],
)
def test_options_that_a_format_fixes_are_refused(changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        quantize(np.zeros((4, 64), np.float32), **changes)
    with pytest.raises(ValueError, match="groups of 32 do not divide the last axis"):
        quantize(np.zeros((4, 48), np.float32), "mxfp4")


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_without_rows_has_a_format(name) -> None:
    assert quantize(np.zeros((0, 64), np.float32), name).shape == (0, 64)


def test_parts_that_do_not_fit_are_named() -> None:
    w = _tensor(np.ones((4, 64), np.float32), "nvfp4")
    with pytest.raises(ValueError, match=r"w.scale is bfloat16, not float8_e4m3fn"):
        dequantize(dataclasses.replace(w, scale=np.zeros((4, 4), jnp.bfloat16)))
    zero = np.zeros(w.scale.shape, np.int8)
    with pytest.raises(ValueError, match=r"w.q is float4_e2m1fn, not int8"):
        dequantize(QTensor(w.q, w.scale, zero))
