"""What is fused around the decode matmul: norm, residual, SwiGLU, plain weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.shapes import LLAMA_8B
from pallas_kernels import quantized_matmul
from pallas_kernels.matmul import choice
from pallas_kernels.matmul.call import Around, MatmulCall
from pallas_kernels.matmul.few_rows import kernel
from pallas_kernels.matmul.few_rows import plan as planning
from pallas_kernels.matmul.fused import fused_matmul
from pallas_kernels.qtensor import QTensor, RowBlocks
from tests.helpers.arrays import as_jax
from tests.helpers.few_rows import few_rows, run_tiles
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
    wide,
)

# --- the kernel's code on numpy -------------------------------------------------------------------

EMULATED = [  # weights, m, K, fused, changes to the plan
    ("w4-g128", 1, 4096, "n", {}),
    ("w4-g128-zero", 5, 2048, "nr", {"clusters": 1, "per": 5, "batch": 2, "depth": 3}),
    ("w4-g128", 16, 4096, "n", {}),
    ("w4-g128", 3, 2688, "n", {}),
    ("w4-g128", 9, 14336, "nr", {"clusters": 1, "per": 5, "batch": 2}),
    ("w8-row", 4, 1024, "nrb", {}),
    ("w4-g128", 1, 2048, "ns", {}),
    ("w4-g128", 11, 2048, "nsb", {"clusters": 1, "per": 6, "batch": 4}),
    ("w8-row", 2, 14336, "s", {"clusters": 1, "per": 6, "batch": 2}),
    ("plain", 13, 4096, "nr", {}),
    ("w4-g128", 2, 2048, "ng", {}),
    ("plain", 2, 14336, "rb", {"clusters": 2, "per": 3, "batch": 1, "depth": 4}),
    ("plain", 5, 576, "n", {}),
    ("w4-g128", 1, 14336, "nr", {"clusters": 1, "per": 5, "batch": 3}),
    ("plain", 3, 2048, "r", {"clusters": 1, "per": 5, "depth": 9}),
    ("plain", 2, 256, "n", {}),
    ("plain", 4, 1056, "nr", {}),
    ("plain", 3, 18944, "r", {"clusters": 1, "per": 5, "batch": 1}),
]


@pytest.mark.parametrize(
    "name,m,k,kinds,changes",
    [
        pytest.param(*case, marks=pytest.mark.core if i % 4 == 0 else ())
        for i, case in enumerate(EMULATED)
    ],
    ids=[f"{case[0]}-{case[1]}x{case[2]}-{case[3]}" for case in EMULATED],
)
def test_emulated(name, m, k, kinds, changes):
    n, dtype = (96 if {*"sg"} & {*kinds} else 80), jnp.bfloat16
    w, x = weight(name, n, k, dtype), activations((m, k), dtype)
    bias = activations((n,), jnp.float32, 2) if "b" in kinds else None
    given = extras(m, n, k, dtype, kinds, jnp.float32 if m % 2 else dtype)
    ref = fused_product(x, w, bias, **given)
    out = run_tiles(x, w, bias, dtype, **given, **changes)
    check(as_jax(out), ref, dtype)


@pytest.mark.parametrize(
    "name,m,k,kinds,changes",
    [
        ("plain", 1, 4096, "n", {}),
        ("plain", 3, 2048, "ns", {"clusters": 2, "per": 4, "batch": 2}),
        ("plain", 5, 576, "n", {}),
        ("w4-g128", 2, 14336, "n", {"clusters": 2, "per": 3, "batch": 1}),
        ("w8-row", 16, 1024, "ns", {}),
    ],
)
def test_what_is_pending_is_added_and_stored(name, m, k, kinds, changes):
    """The same bits as with a sum that was rounded before."""
    n, dtype = (96 if "s" in kinds else 80), jnp.bfloat16
    w, x = weight(name, n, k, dtype), activations((m, k), dtype)
    pending = activations((m, k), dtype if m % 2 else jnp.float32, 9)
    total = as_jax((wide(x) + wide(pending)).astype(np.float32), dtype)
    given = extras(m, n, k, dtype, kinds)
    run = functools.partial(run_tiles, w=w, bias=None, out_dtype=dtype)
    out, stored = run(x, pending=pending, **given, **changes)
    np.testing.assert_array_equal(stored, np.asarray(total))
    np.testing.assert_array_equal(out, run(total, **given, **changes))


@pytest.mark.parametrize("name,k", [("plain", 1024), ("mxfp4", 2880)])
def test_what_is_pending_of_one_row(name, k):
    """The same bits as of the rounded sum, also where the last read goes past the row's end."""
    w, x = weight(name, 96, k, jnp.bfloat16), activations((1, k), jnp.bfloat16)
    pending = activations((1, k), jnp.float32, 9)
    total = as_jax((wide(x) + wide(pending)).astype(np.float32), jnp.bfloat16)
    given = {"gamma": activations((k,), jnp.bfloat16, 5), "eps": EPS}
    around, plan = Around(jnp.dtype(jnp.bfloat16), **given), planning.divide_row(w)
    with few_rows():
        out, stored = kernel.matmul(x, w, dataclasses.replace(around, pending=pending), plan)
        want = kernel.matmul(total, w, around, plan)
    np.testing.assert_array_equal(stored, np.asarray(total))
    np.testing.assert_array_equal(out, want)


# --- the op ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,kinds", [("w4-g128", "nsb"), ("w4-g128", "r"), ("plain", "g"), ("plain", "nr")]
)
def test_composition(name, kinds):
    """Where no kernel fuses them the parts run one after the other; float32 rounds nowhere."""
    n, k = 96, 512
    w, x = weight(name, n, k, jnp.float32), activations((2, 1, k), jnp.float32)
    bias = activations((n,), jnp.float32, 2) if "b" in kinds else None
    given = extras(2, n, k, jnp.float32, kinds, jnp.float32)
    if "residual" in given:
        given["residual"] = given["residual"][:, None]
    out = jax.jit(lambda x, w: quantized_matmul(x, w, bias=bias, **given))(x, w)
    check(out, fused_product(x, w, bias, **given), "float32")
    assert fused_matmul(x, w, **given) is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_pending_in_a_composition(dtype):
    w, x = weight("plain", 96, 512, jnp.bfloat16), activations((2, 1, 512), jnp.bfloat16)
    pending = activations(x.shape, dtype, 9)
    norm = extras(2, 96, 512, jnp.bfloat16, "n")["norm"]
    call = jax.jit(lambda x, **more: quantized_matmul(x, w, norm=norm, **more))
    out, total = call(x, pending=pending)
    want = as_jax((wide(x) + wide(pending)).astype(np.float32), x.dtype)
    np.testing.assert_array_equal(total, want)
    np.testing.assert_array_equal(out, call(total))
    with pytest.raises(ValueError, match="before a norm"):
        quantized_matmul(x, w, pending=pending)


def test_gradients_of_a_composition():
    n, k = 32, 256
    w, x = weight("plain", n, k, jnp.float32), activations((3, k), jnp.float32)
    given = extras(3, n, k, jnp.float32, "nr", jnp.float32)
    gamma, residual = given["norm"][0], given["residual"]

    def loss(x, w, gamma, residual):
        y = quantized_matmul(x, w, norm=(gamma, EPS), residual=residual)
        return jnp.sum(jnp.sin(y))

    def plainly(x, w, gamma, residual):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * gamma
        return jnp.sum(jnp.sin(jnp.dot(y, w.T, precision="highest") + residual))

    args = x, w, gamma, residual
    ours, theirs = (jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(*args) for f in (loss, plainly))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_refusals():
    w, x = weight("plain", 96, 512, jnp.bfloat16), activations((2, 512), jnp.bfloat16)
    call = lambda **kw: quantized_matmul(x, w, **kw)  # noqa: E731
    with pytest.raises(ValueError, match="norm's weight"):
        call(norm=(jnp.ones(3), EPS))
    with pytest.raises(ValueError, match="residual"):
        call(residual=jnp.ones((2, 96), jnp.float32))
    with pytest.raises(ValueError, match="gate and up"):
        quantized_matmul(x, w[:95], swiglu=True)
    with pytest.raises(NotImplementedError, match="17 tokens"):
        many = jnp.ones((17, 512), jnp.bfloat16)
        quantized_matmul(many, w, norm=(jnp.ones(512), EPS), implementation="mosaic")
    assert fused_matmul(x, RowBlocks((w, w)), swiglu=True) is None

    def no(dtype, w, **fused):
        call = MatmulCall.of(jnp.zeros((1, 512), dtype), w, dtype, **fused)
        return planning.tile_plan(call).text

    half = weight("w4-g128", 96, 512, jnp.float16)
    assert "norm's weight is float16" in no(jnp.float16, half, gamma=jnp.ones(512, jnp.float16))
    assert "float32" in no(jnp.bfloat16, w, residual=jnp.ones((1, 96), jnp.float32))
    assert "multiple of 32" in no(jnp.bfloat16, w[:80], swiglu=True)
    assert "plain weights bfloat16" in no(jnp.float16, w)


@pytest.mark.parametrize("fused", ["gamma", "residual"])
def test_scales_in_two_levels_are_no_part_of_a_fused_product(fused):
    """They become one level before a product of floats, and no planner saw int8 scales."""
    shape, (n, k) = jax.ShapeDtypeStruct, (96, 512)
    codes, scale = shape((n, k), jnp.int4), shape((n, k // 128), jnp.int8)
    w = QTensor(codes, scale, unit=shape((n, 1), jnp.float32))
    around = {"gamma": (k,), "residual": (1, n)}
    more = {fused: shape(around[fused], jnp.bfloat16)}
    call = MatmulCall.of(shape((1, k), jnp.bfloat16), w, jnp.bfloat16, **more)
    assert "scales in two levels" in choice.plan(call).text


LOWERED = {  # codes, rows of x, what is fused
    "qkv": ("int4", 1, "np"),
    "o": ("int8", 9, "r"),
    "gate_up": ("plain", 16, "ns"),
    "down": ("int8", 1, "r"),
}


@newest
@pytest.mark.parametrize("name,n,k", LLAMA_8B[1:5], ids=[s[0] for s in LLAMA_8B[1:5]])
def test_lowers_for_hopper(name, n, k):
    words, m, fused = LOWERED[name]
    w = shaped((n, k), jnp.bfloat16)
    if words != "plain":
        groups = k // 128 if words == "int4" else 1
        w = QTensor(shaped((n, k), words), shaped((n, groups), jnp.bfloat16))
    given = {}
    if "r" in fused:
        given["residual"] = shaped((m, n), jnp.bfloat16)
    if "p" in fused:
        given["pending"] = shaped((m, k), jnp.float32)

    def call(x, w, gamma, given):
        norm = (gamma, EPS) if "n" in fused else None
        how = {"swiglu": "s" in fused, "implementation": "mosaic"}
        return quantized_matmul(x, w, norm=norm, **how, **given)

    text = lowered(call, shaped((m, k), jnp.bfloat16), w, shaped((k,), jnp.bfloat16), given)
    assert text.count("@mosaic_gpu") == 1 and "dot_general" not in text


# --- on a GPU -------------------------------------------------------------------------------------


ON_THE_GPU = [  # weights, m, K, fused
    ("plain", 2, 256, "n"),
    ("plain", 3, 18944, "r"),
    ("plain", 4, 1056, "nr"),
    ("w4-g128", 1, 2048, "nsb"),
    ("w4-g128", 16, 2048, "nr"),
    ("w4-g128", 3, 2688, "n"),
    ("w4-g128", 2, 14336, "nr"),
    ("w4-g128", 5, 14336, "r"),
    ("w4-g128-zero", 5, 2048, "nr"),
    ("w4-g32", 2, 2048, "n"),
    ("w8-row", 1, 2048, "n"),
    ("w8-row", 16, 2048, "nsb"),
    ("w8-row", 1, 14336, "r"),
    ("plain", 1, 2048, "nr"),
    ("plain", 16, 2048, "n"),
    ("plain", 3, 2048, "nsb"),
    ("plain", 2, 2048, "ng"),
    ("plain", 9, 14336, "r"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name,m,k,kinds", ON_THE_GPU, ids=[f"{c[0]}-{c[1]}x{c[2]}-{c[3]}" for c in ON_THE_GPU]
)
def test_values_on_the_gpu(name, m, k, kinds):
    n, dtype = 4320, jnp.bfloat16
    w, x = weight(name, n, k, dtype), hostile(activations((m, k), dtype, m))
    bias = activations((n,), jnp.float32, 2) if "b" in kinds else None
    given = extras(m, n, k, dtype, kinds, jnp.float32 if m == 2 else dtype)
    call = functools.partial(quantized_matmul, x, w, bias=bias, implementation="mosaic")
    out, again = call(**given), call(**given)
    assert (np.asarray(out) == np.asarray(again)).all()
    for row, ref in zip(out, fused_product(x, w, bias, **given), strict=True):
        check(row, ref, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name,m", [("w4-g128", 1), ("w8-row", 16), ("plain", 1), ("plain", 5)])
@pytest.mark.parametrize("pending_dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_pending_on_the_gpu(name, m, pending_dtype):
    n, k, dtype = 4320, 4096, jnp.bfloat16
    w, x = weight(name, n, k, dtype), hostile(activations((m, k), dtype, m))
    pending, norm = activations((m, k), pending_dtype, 9), extras(m, n, k, dtype, "n")["norm"]
    call = functools.partial(quantized_matmul, w=w, norm=norm, implementation="mosaic")
    out, total = call(x, pending=pending)
    want = (x.astype(jnp.float32) + pending.astype(jnp.float32)).astype(dtype)
    assert (np.asarray(total) == np.asarray(want)).all()
    assert (np.asarray(out) == np.asarray(call(total))).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4-g128", "plain"])
def test_a_row_is_bitwise_its_own(name):
    n, k, dtype = 4320, 4096, jnp.bfloat16
    w, x = weight(name, n, k, dtype), activations((8, k), dtype)
    norm = extras(1, n, k, dtype, "n")["norm"]
    run = lambda x: np.asarray(  # noqa: E731
        quantized_matmul(x, w, norm=norm, swiglu=True, implementation="mosaic")
    )
    whole = run(x)
    others = run(x.at[as_jax([0, 1, 2, 4, 5, 6, 7])].multiply(100))
    assert (whole[3] == others[3]).all()
    for m in (2, 3, 5):  # one row has a kernel, and so an order of sums, of its own
        assert (run(x[:m]) == whole[:m]).all()
