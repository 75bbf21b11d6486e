"""Codes and inner products of rows with LoRA adapters: the XLA form against float64, the kernel on
the emulator (and on a Hopper GPU) against the XLA form, and what has no kernel."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Reason
from pallas_kernels.rows import plan as planning
from pallas_kernels.rows.low_rank import inner_products, quantize_adapted
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.rows.swiglu import swiglu
from tests.helpers import warp_emulator
from tests.helpers.arrays import as_jax
from tests.helpers.cases import each_once

EPS = 1e-5
FORMS = ["norm", "residual", "gate", "copy"]
forms = pytest.mark.parametrize("form", FORMS)


def operands(form, rows, width, n, sources, rank, dtype="bfloat16"):
    rng = np.random.default_rng(rows + width)
    x, residual = (
        as_jax(rng.normal(size=(rows, width * (1 + (form == "gate")))), dtype) for _ in range(2)
    )
    weight = as_jax(rng.normal(size=width) + 1, dtype)
    first = as_jax(rng.normal(size=(n, sources, rank, width)) / width**0.5, dtype)
    adapter = rng.integers(0, n + 1, rows)
    adapter[0], adapter[-1] = 0, n
    adapter = as_jax(adapter, jnp.int32)
    how = {
        "norm": {"norm": (weight, EPS)},
        "residual": {"norm": (weight, EPS), "residual": residual},
        "gate": {"gated": True},
        "copy": {},
    }
    return (x, first, adapter), how[form]


def floats_of(form, x, how):
    """The rows that are quantized, in float64; as the ops have them in the same dtype."""
    x = np.asarray(x, np.float64)
    if form == "gate":
        gate, up = np.split(x, 2, axis=-1)
        return gate / (1 + np.exp(-gate)) * up
    if form == "copy":
        return x
    if form == "residual":
        x = np.asarray(as_jax(x, jnp.bfloat16) + how["residual"], np.float64)
    weight = np.asarray(how["norm"][0], np.float64)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * weight


def expected(y, first, adapter):
    """``inner`` of the rows y in float64."""
    n, sources, rank, _ = first.shape
    out = np.zeros((len(y), sources, n, rank))
    for row, number in enumerate(np.asarray(adapter)):
        if number:
            own = np.asarray(first[number - 1], np.float64)
            out[row, :, number - 1] = np.einsum("k,srk->sr", y[row], own)
    return out.reshape(len(y), -1)


def worst(got, want):
    return np.max(np.abs(np.asarray(got, np.float64) - want)) / np.max(np.abs(want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inner_products_are_each_row_s_own(dtype):
    (x, first, adapter), _ = operands("copy", 6, 64, 3, 2, 5, dtype)
    got = jax.jit(inner_products)(x.reshape(2, 3, 64), first, adapter.reshape(2, 3))
    want = expected(np.asarray(x, np.float64), first, adapter)
    assert got.shape == (2, 3, 30) and got.dtype == dtype
    got = np.asarray(got, np.float64).reshape(6, -1)
    assert worst(got, want) <= (1e-6 if dtype == "float32" else 2.0**-8)
    assert not got[0].any() and not got[want == 0].any()


@forms
def test_codes_are_those_without_adapters(form):
    (x, first, adapter), how = operands(form, 5, 48, 2, 3, 4)
    made = jax.jit(lambda *args: quantize_adapted(*args, "int8", **how))
    q, inner, *total = made(x, first, adapter)
    if form == "gate":
        want = jax.jit(lambda x: swiglu(x, quantize="int8"))(x)
    elif form == "copy":
        want = jax.jit(lambda x: quantize_tokens(x, "int8"))(x)
    else:
        residual = how.get("residual")
        weight, eps = how["norm"]
        want = jax.jit(lambda x: rms_norm(x, weight, eps, residual=residual, quantize="int8"))(x)
        if residual is not None:
            want, sum_ = want
            np.testing.assert_array_equal(total[0].astype("float32"), sum_.astype("float32"))
    np.testing.assert_array_equal(q.q, want.q)
    np.testing.assert_array_equal(q.scale, want.scale)
    assert worst(inner, expected(floats_of(form, x, how), first, adapter)) <= 2.0**-7


def test_operands_that_do_not_fit_are_named():
    (x, first, adapter), _ = operands("copy", 5, 48, 2, 3, 4)
    with pytest.raises(ValueError, match=r"x \(5, 48\) has not the columns of first"):
        quantize_adapted(x, first, adapter, "int8", gated=True)
    with pytest.raises(ValueError, match="adapter is int64|adapter is float32"):
        quantize_adapted(x, first, adapter.astype("float32"), "int8")
    with pytest.raises(ValueError, match="residual goes with a norm"):
        quantize_adapted(x, first, adapter, "int8", residual=x)
    both, norm = jnp.concatenate([x, x], -1), (jnp.ones(48, x.dtype), 1e-5)
    with pytest.raises(ValueError, match="norm and gated exclude"):
        quantize_adapted(both, first, adapter, "int8", norm=norm, gated=True)


def test_calls_without_a_kernel_say_why():
    def plan(rows=64, sources=3, rank=16, dtype=jnp.bfloat16, width=4096):
        first = jax.ShapeDtypeStruct((8, sources, rank, width), dtype)
        x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
        return planning.plan("copy", x, "int8", first=first)

    assert plan().split == 1 and plan().op.adapters == (8, 3, 16)
    assert plan(width=14336).split == 2
    for found, says in (
        (plan(rows=65), "65 rows"),
        (plan(rank=100), "3 x 100 ranks"),
        (plan(dtype=jnp.float32), "adapters of float32"),
    ):
        assert isinstance(found, Reason) and says in found.text


@contextlib.contextmanager
def emulated_rows():
    pytest.importorskip("jax", minversion="0.11.2")
    from pallas_kernels.rows import inner, kernel, one_row

    with warp_emulator.emulated(kernel, one_row, inner):
        yield


@pytest.mark.parametrize(
    ("form", "rows", "width", "n", "sources", "rank"),
    each_once(
        FORMS,
        [
            (3, 2048, 2, 3, 16),  # whole chunks, three steps of ranks
            (2, 1040, 3, 1, 5),  # chunks beyond the row, fewer ranks than a step
            (2, 1032, 2, 2, 12),  # a last step of eight ranks
            (2, 8224, 2, 2, 12),  # two blocks a row, several chunks a thread
        ],
    ),
)
def test_the_kernel_on_the_emulator(form, rows, width, n, sources, rank):
    args, how = operands(form, rows, width, n, sources, rank)
    want = quantize_adapted(*args, "int8", **how, implementation="xla")  # jitted, it rounds less
    with emulated_rows():
        got = quantize_adapted(*args, "int8", **how, implementation="mosaic")
    same_adapted(form, args, how, got, want)


def same_adapted(form, args, how, got, want):
    (x, first, adapter), (q, inner, *total) = args, got
    steps = np.asarray(q.q, np.int32) - np.asarray(want[0].q, np.int32)
    assert np.abs(steps).max() <= 1 and (steps != 0).mean() < 0.02  # ties
    np.testing.assert_allclose(q.scale, want[0].scale, rtol=1e-5)
    exact = expected(floats_of(form, x, how), first, adapter)
    assert worst(inner, exact) <= 2.0**-8
    assert not np.asarray(inner, np.float64)[exact == 0].any()
    for a, b in zip(total, want[2:], strict=True):
        np.testing.assert_array_equal(a.astype("float32"), b.astype("float32"))


@pytest.mark.parametrize("form", ["residual", "gate"])
def test_the_kernel_lowers_for_cuda(form):
    pytest.importorskip("jax", minversion="0.11.2")
    args, how = operands(form, 64, 4096, 8, 3, 16)
    f = jax.jit(lambda *args: quantize_adapted(*args, "int8", **how, implementation="mosaic"))
    assert "mosaic_gpu" in f.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("words", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("rows", "width", "shape"),
    [(64, 4096, (8, 3, 16)), (64, 14336, (8, 1, 16)), (17, 1032, (3, 2, 12)), (1, 1040, (1, 1, 5))],
)
def test_the_kernel_on_a_gpu(form, words, rows, width, shape):
    args, how = operands(form, rows, width, *shape)
    f, g = (
        jax.jit(lambda *args, i=i: quantize_adapted(*args, words, **how, implementation=i))
        for i in ("mosaic", "xla")
    )
    got, again, want = f(*args), f(*args), g(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    if words == "int8":
        return same_adapted(form, args, how, got, want)
    exact = expected(floats_of(form, args[0], how), *args[1:])
    assert worst(got[1], exact) <= 2.0**-8
