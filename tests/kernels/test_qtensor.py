"""QTensor's invariants and the round trip between floats and words."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul.op import quantized_matmul, quantized_matmul_reference
from pallas_kernels.qtensor import QTensor, dequantize, quantize
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from tests.helpers.arrays import as_jax
from tests.helpers.cases import each_once
from tests.helpers.matmul_cases import exact, weights, wide
from tests.helpers.models import relative_error

SCHEMES = [
    (dtype, group, symmetric)
    for dtype in ("int4", "int8", "float8_e4m3fn")
    for group in (None, 32, 64)
    for symmetric in (True, False)
    if symmetric or dtype != "float8_e4m3fn"
]


def _weights(rows=24, columns=192, seed=0):
    return as_jax(np.random.default_rng(seed).standard_normal((rows, columns)), jnp.float32)


@pytest.mark.core
@pytest.mark.parametrize("dtype,group,symmetric", SCHEMES)
def test_round_trip_stays_within_half_a_step(dtype, group, symmetric):
    w = _weights()

    @jax.jit
    def there_and_back(w):
        t = quantize(w, dtype, group_size=group, symmetric=symmetric)
        return t, dequantize(t)

    t, back = there_and_back(w)
    assert t.shape == w.shape and t.dtype == jnp.dtype(dtype)
    assert t.group_size == (192 if group is None else group)
    assert t.scale.shape == (24, 192 // t.group_size)
    step = np.repeat(np.asarray(t.scale), t.group_size, axis=1)
    error = np.abs(np.asarray(back) - np.asarray(w))
    if dtype == "float8_e4m3fn":
        # e4m3 has 3 mantissa bits; its smallest step is 2**-9.
        assert (error <= np.maximum(np.abs(np.asarray(w)) / 16, step * 2.0**-10) + 1e-7).all()
    else:
        # With zeros, the zero point is itself rounded by up to half a step.
        assert (error <= step * (0.501 if symmetric else 1.001)).all()
    if not symmetric:
        assert t.zero.dtype == jnp.int8 and t.zero.shape == t.scale.shape


def test_both_forms_of_zero():
    q = as_jax([[-8, 7, 0, 3]], jnp.int4)
    scale = as_jax([[0.5, 2.0]], jnp.float32)
    integer = QTensor(q, scale, as_jax([[-8, 3]], jnp.int8))
    assert dequantize(integer).tolist() == [[0.0, 7.5, -6.0, 0.0]]
    floating = QTensor(q, scale, as_jax([[4.0, -1.0]], jnp.float32))
    assert dequantize(floating).tolist() == [[0.0, 7.5, -1.0, 5.0]]


def test_zero_rows_stay_zero_and_scales_keep_the_dtype():
    w = np.array(_weights()).astype(jnp.bfloat16)
    w[3] = 0
    for symmetric in (True, False):
        make = functools.partial(quantize, dtype="int4", group_size=64, symmetric=symmetric)
        t = jax.jit(make)(w)
        assert t.scale.dtype == jnp.bfloat16
        assert not exact(t)[3].any() and not wide(t.scale)[3].any()
    make = functools.partial(quantize, dtype="int8", scale_dtype=jnp.float32)
    assert jax.eval_shape(make, w).scale.dtype == jnp.float32


def test_bytes_count_int4_as_half():
    w, half = _weights(16, 256), {"group_size": 128, "scale_dtype": jnp.bfloat16}
    t = jax.eval_shape(functools.partial(quantize, dtype="int4", **half), w)
    assert t.nbytes == 16 * 256 // 2 + 16 * 2 * 2
    t = jax.eval_shape(functools.partial(quantize, dtype="int8", symmetric=False), w)
    assert t.nbytes == 16 * 256 + 16 * 4 + 16


def test_is_a_pytree_whose_rows_can_be_gathered():
    t = weights("w4-g32", 24, 192, jnp.float32)
    t = dataclasses.replace(t, zero=as_jax(np.full(t.scale.shape, 3), jnp.int8))
    rows = np.array([5, 0, 5])
    some = jax.jit(lambda t: jax.tree.map(lambda leaf: leaf[rows], t))(t)
    np.testing.assert_array_equal(exact(some), exact(t)[rows])
    assert len(jax.tree.leaves(t)) == 3


@pytest.mark.parametrize(
    "kwargs,message",
    [
        ({"dtype": "int16"}, "int16"),
        ({"dtype": "int4", "group_size": 100}, "does not divide"),
        ({"dtype": "float8_e4m3fn", "symmetric": False}, "no zero points"),
    ],
)
def test_wrong_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        quantize(_weights(), **kwargs)


def test_rows_that_share_scales_are_known_while_they_are_all_there():
    def rounded(n, k, dtype="fp8-block"):
        return jax.eval_shape(functools.partial(quantize, dtype=dtype), jnp.zeros((n, k)))

    w = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), rounded(256, 256))
    assert w.blocked == 256 and w.has_blocks and w.found_blocks().blocked == 256
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), w, w)
    assert stacked.has_blocks and jax.tree.map(lambda leaf: leaf[1], stacked).has_blocks
    assert not w.rows(np.arange(256)[::-1]).has_blocks and not w.rows(slice(0, 128)).has_blocks
    assert not jax.tree.map(lambda leaf: leaf[64:192], w).has_blocks
    # A short block, one group of columns, other formats and rows' own scales are none.
    assert rounded(200, 256).blocked is rounded(256, 128).blocked is None
    assert rounded(256, 256, "nvfp4").blocked is None
    w.scale[3, 1] = 2
    assert w.found_blocks().blocked is None


@pytest.mark.parametrize("words", [None, "int8"])
def test_columns_reorder_the_other_operands_features(words):
    """Act-order: the product, and its gradient, are those of the weight in its own order."""
    rng = np.random.default_rng(0)
    q = rng.integers(-8, 8, (24, 64))
    columns = as_jax(rng.permutation(64), jnp.int32)
    scale = as_jax(rng.uniform(0.5, 2, (24, 1 if words else 4)), jnp.float32)
    w = QTensor(as_jax(q, words or "int4"), scale, columns=columns, activations=words)
    x = as_jax(rng.standard_normal((3, 64)), jnp.float32)
    if words:
        x = jax.jit(quantize, static_argnums=1)(x, words)
        with pytest.raises(ValueError, match="columns in order"):
            quantized_matmul(dataclasses.replace(x, columns=columns), w)
    got = jax.jit(quantized_matmul)(x, w)
    want = jax.jit(quantized_matmul_reference)(x, w)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    if words is None:
        dx = jax.jit(jax.grad(lambda x: quantized_matmul(x, w).sum()))(x)
        dense = np.asarray(jax.jit(dequantize)(w))
        np.testing.assert_allclose(dx[0], dense.sum(0), rtol=1e-5, atol=1e-4)


def test_a_static_scale_clips_and_is_every_rows():
    x = as_jax([[1.0, -3.0, 0.26], [300.0, -300.0, 0.0]], jnp.float32)
    for words, rows in (
        ("int8", [[2, -6, 1], [127, -128, 0]]),
        ("float8_e4m3fn", [[2, -6, 0.5], [448, -448, 0]]),
    ):
        t = quantize_tokens(x, words, scale=jnp.float32(0.5))
        assert t.q.dtype == jnp.dtype(words) and t.scale.tolist() == [[0.5], [0.5]]
        assert t.q.astype(jnp.float32).tolist() == rows


# (dtype, symmetric): of every code, with a group's ends far apart or on one side of zero
GRIDS = [("int8", True), ("int8", False), ("int4", True), ("int4", False), ("float8_e4m3fn", True)]


@pytest.mark.parametrize(
    ("dtype", "symmetric", "scale_dtype"), each_once(GRIDS, ["bfloat16", "float16"])
)
def test_every_code_is_within_half_a_step_of_the_stored_scale(dtype, symmetric, scale_dtype):
    """Rounded in a program as outside of one.  A step of float8 is its own ulp."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((64, 4, 32)) * 10.0 ** rng.integers(-5, 4, (64, 4, 1))
    w = as_jax((rows + np.abs(rows) * (np.arange(64) % 3 - 1)[:, None, None]).reshape(64, 128))
    w = w.astype(jnp.float32)
    make = functools.partial(
        quantize, dtype=dtype, group_size=32, symmetric=symmetric, scale_dtype=scale_dtype
    )
    back = jax.jit(dequantize)
    for t in (make(w), jax.jit(make)(w)):
        assert t.scale.dtype == scale_dtype
        got = wide(back(t))
        step = np.repeat(wide(t.scale), 32, axis=1)
        if dtype == "float8_e4m3fn":
            code = np.maximum(np.abs(np.asarray(w) / step), 2.0**-6)
            step = step * np.exp2(np.floor(np.log2(code)) - 3)
        assert (np.abs(got - np.asarray(w)) <= 0.5001 * step).all()
    # The rounding of the scale passes gradients on.
    slope = jax.jit(jax.grad(lambda w: jnp.sum(make(w).scale.astype(jnp.float32))))(w)
    assert np.count_nonzero(slope) >= w.size // 32


def test_the_largest_weights_are_finite():
    w = as_jax([[3e38, -3e38]], jnp.float32)
    for dtype, symmetric in GRIDS:
        make = functools.partial(quantize, dtype=dtype, symmetric=symmetric, scale_dtype="bfloat16")
        back = jax.jit(dequantize)(jax.jit(make)(w))
        assert relative_error(back, w) < 0.1
