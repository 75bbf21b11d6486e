"""rms_norm, swiglu and quantize_tokens against float64: values, the residual's rounding, quantized
rows, gradients; the Mosaic kernel lowered on any machine and, on a Hopper GPU, against all of it.

Bounds: 2^-22 relative for float32 arithmetic, 2^-8 for one rounding to bfloat16 (half a step, the
sum before it is exact to float32).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import QTensor, quantize, rms_norm, swiglu
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import named_plan
from pallas_kernels.rows import kernel, one_row
from pallas_kernels.rows import plan as planning
from pallas_kernels.rows.activations import gelu_tanh
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from tests.helpers import warp_emulator
from tests.helpers.arrays import as_jax
from tests.helpers.cases import pairwise
from tests.helpers.matmul_cases import exact as dense
from tests.helpers.matmul_cases import lowered, newest, shaped, wide

BOUND = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-10}
dtypes = pytest.mark.parametrize("dtype", BOUND)


def normal(shape, dtype="float32", seed=0):
    return as_jax(np.random.default_rng(seed).standard_normal(shape), dtype)


def jitted(op, **static):
    return jax.jit(functools.partial(op, **static))


def norm64(x, weight, eps):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def silu64(x):
    return x / (1 + np.exp(-x))


@pytest.mark.core
@pytest.mark.parametrize(
    ("dtype", "width"),
    [("float32", 1), ("bfloat16", 64), ("float16", 576), ("float32", 576), ("bfloat16", 16384)],
)
def test_rms_norm_is_the_float64_norm(dtype, width):
    x, weight = normal((3, 5, width), dtype), normal((width,), dtype, 1)
    got = jitted(rms_norm, eps=1e-5)(x, weight)
    assert got.dtype == x.dtype
    want = norm64(x, weight, 1e-5)
    assert np.max(np.abs(np.asarray(got, np.float64) - want)) <= BOUND[dtype] * np.abs(want).max()


@dtypes
def test_the_residual_is_rounded_before_it_is_normalised(dtype):
    x, residual = normal((7, 64), dtype), normal((7, 64), dtype, 1)
    weight = normal((64,), dtype, 2)
    got, total = rms_norm(x, weight, 1e-6, residual=residual)  # one jitted program may round less
    np.testing.assert_array_equal(total, np.asarray(x) + np.asarray(residual))
    np.testing.assert_array_equal(got, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("words", ["int8", "float8_e4m3fn"])
def test_quantized_rows_are_within_half_a_step(words):
    x = np.array(normal((9, 128)))
    x[4], x[5] = 0, x[5] * 1e6
    x = as_jax(x)
    weight = normal((128,), seed=1)
    got = jitted(rms_norm, eps=1e-5, quantize=words)(x, weight)
    assert isinstance(got, QTensor) and got.dtype == words and got.scale.shape == (9, 1)
    want = norm64(x, weight, 1e-5)
    step = np.asarray(got.scale) / 2 if words == "int8" else np.abs(want) * 2.0**-4 + 1e-3
    assert (np.abs(dense(got) - want) <= step * 1.001).all()
    assert np.asarray(got.scale)[4, 0] == 0 and not wide(got.q)[4].any()


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0])
def test_eps_at_its_extremes(eps):
    x, weight = as_jax(1e-3 * np.asarray(normal((4, 32)))), jnp.ones((32,))
    want = norm64(x, weight, eps)
    np.testing.assert_allclose(jitted(rms_norm, eps=eps)(x, weight), want, rtol=2e-6)


def test_a_row_of_zeros_stays_zeros():
    assert not np.asarray(jitted(rms_norm, eps=1e-5)(jnp.zeros((2, 8)), jnp.ones((8,)))).any()


@pytest.mark.core
@dtypes
def test_swiglu_is_the_float64_gate(dtype):
    x = as_jax(4 * np.asarray(normal((3, 5, 2 * 48))), dtype)
    got = jitted(swiglu)(x)
    gate, up = np.split(np.asarray(x, np.float64), 2, axis=-1)
    want = silu64(gate) * up
    assert got.dtype == x.dtype
    assert np.max(np.abs(np.asarray(got, np.float64) - want)) <= BOUND[dtype] * np.abs(want).max()


def test_swiglu_quantized_rows_are_within_half_a_step():
    x = np.array(normal((6, 2 * 64)))
    x[2] = 0
    x = as_jax(x)
    got = jitted(swiglu, quantize="int8")(x)
    gate, up = np.split(np.asarray(x, np.float64), 2, axis=-1)
    scale = np.asarray(got.scale)
    assert (np.abs(dense(got) - silu64(gate) * up) <= scale / 2 * 1.001).all() and scale[2, 0] == 0


def test_gradients_against_float64_differences():
    x, weight = normal((2, 12)), normal((12,), seed=1)
    toward = np.asarray(normal((2, 12), seed=2), np.float64)
    d_x, d_weight = jax.jit(
        jax.grad(
            lambda x, w: jnp.sum(rms_norm(x, w, 1e-3) * toward.astype(np.float32)), argnums=(0, 1)
        )
    )(x, weight)

    def slope(function, at):
        at, out = np.asarray(at, np.float64), np.zeros(at.shape)
        for index in np.ndindex(*at.shape):
            up, down = at.copy(), at.copy()
            up[index] += 1e-6
            down[index] -= 1e-6
            out[index] = (function(up) - function(down)) / 2e-6
        return out

    np.testing.assert_allclose(
        d_x, slope(lambda a: np.sum(norm64(a, weight, 1e-3) * toward), x), atol=1e-5
    )
    np.testing.assert_allclose(
        d_weight, slope(lambda a: np.sum(norm64(x, a, 1e-3) * toward), weight), atol=1e-5
    )
    d_gate = jax.jit(jax.grad(lambda a: jnp.sum(swiglu(a) * toward[:, :6].astype(np.float32))))(x)

    def loss(a):
        gate, up = np.split(a, 2, axis=-1)
        return np.sum(silu64(gate) * up * toward[:, :6])

    np.testing.assert_allclose(d_gate, slope(loss, x), atol=1e-5)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"weight \(7,\)"):
        rms_norm(jnp.zeros((2, 8)), jnp.ones((7,)), 1e-5)
    with pytest.raises(ValueError, match="residual is bfloat16"):
        rms_norm(jnp.zeros((2, 8)), jnp.ones((8,)), 1e-5, residual=jnp.zeros((2, 8), jnp.bfloat16))
    with pytest.raises(ValueError, match="not gate and up"):
        swiglu(jnp.zeros((2, 7)))


def test_tokens_are_quantized_as_qtensor_says():
    x = np.array(normal((5, 96), "bfloat16"))
    x[2] = 0
    got = jitted(quantize_tokens)(x)
    want = jitted(quantize, dtype="int8", scale_dtype=jnp.float32)(x)
    np.testing.assert_array_equal(got.q, want.q)
    np.testing.assert_array_equal(got.scale, want.scale)
    with pytest.raises(ValueError, match="int4"):
        quantize_tokens(as_jax(x), "int4")


def test_gradients_with_a_residual_and_in_half_precision():
    x, residual = normal((3, 16), "bfloat16"), normal((3, 16), "bfloat16", 1)
    weight = normal((16,), seed=2)

    def loss(function):
        def value(x, residual, weight):
            y, total = function(x, residual, weight)
            return jnp.sum(y.astype(jnp.float32) ** 2) + jnp.sum(total.astype(jnp.float32))

        return jax.jit(jax.grad(value, argnums=(0, 1, 2)))(x, residual, weight)

    def plain(x, residual, weight):
        total = x + residual
        s = total.astype(jnp.float32)
        y = s * jax.lax.rsqrt(jnp.mean(s * s, -1, keepdims=True) + 1e-5) * weight
        return y.astype(x.dtype), total

    got = loss(lambda x, r, w: rms_norm(x, w, 1e-5, residual=r))
    for mine, theirs in zip(got, loss(plain), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(
            np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=2e-2, atol=2e-2
        )


def test_words_have_no_gradient_and_scales_have_theirs():
    x = normal((2, 8), "bfloat16")
    got = jax.jit(jax.grad(lambda x: jnp.sum(quantize_tokens(x).scale)))(x)
    peak = np.argmax(np.abs(np.asarray(x, np.float32)), -1)
    want = np.zeros((2, 8))
    for row, column in enumerate(peak):
        want[row, column] = np.sign(wide(x)[row, column]) / 127
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=1e-4)


# The Mosaic kernel ----------------------------------------------------------------------------

CALLS = {
    "norm": lambda x, r, w, **kw: rms_norm(x, w, 1e-5, **kw),
    "residual": lambda x, r, w, **kw: rms_norm(x, w, 1e-5, residual=r, **kw),
    "gate": lambda x, r, w, **kw: swiglu(x, **kw),
    "tokens": lambda x, r, w, *, quantize, **kw: quantize_tokens(x, quantize, **kw),
}
calls = pytest.mark.parametrize("call", CALLS)


@newest
@calls
def test_the_kernel_lowers_for_cuda(call):
    """To words of both kinds, and a norm also to floats."""
    x, weight = shaped((3, 5, 1040), jnp.bfloat16), shaped((1040,), jnp.bfloat16)
    out = {"norm": None, "residual": "float8_e4m3fn", "gate": "int8", "tokens": "float8_e4m3fn"}
    f = functools.partial(CALLS[call], quantize=out[call], implementation="mosaic")
    assert "mosaic_gpu" in lowered(f, x, x, weight)


WAYS = {  # rows, width; whether a cluster shares a row, and whether rows pass through a ring
    "a cluster": (4, 4096, True, False),
    "a block": (4, 1000, False, False),
    "a ring": (1500, 1000, False, True),  # and chunks beyond the row
    "rows too long for a ring": (1500, 32768, False, False),
}


def gate_plan(rows, width):
    found = planning.plan("gate", jax.ShapeDtypeStruct((rows, 2 * width), jnp.bfloat16), "int8")
    return named_plan(found)


@newest
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_the_gate_lowers(way):
    rows, width, cluster, ring = WAYS[way]
    plan = gate_plan(rows, width)
    assert (plan.split > 1, plan.ring > 0) == (cluster, ring)
    text = lowered(
        lambda x: swiglu(x, quantize="int8", implementation="mosaic"),
        shaped((rows, 2 * width), jnp.bfloat16),
    )
    assert "mosaic_gpu" in text


def test_any_plan_fits_and_has_every_column():
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows, width = int(2 ** rng.uniform(0, 13)), 8 * int(2 ** rng.uniform(0, 12))
        for form in ("norm", "gate", "copy"):
            x = shaped((rows, width * (2 if form == "gate" else 1)), jnp.bfloat16)
            plan = named_plan(planning.plan(form, x, "int8"))
            assert plan.threads % 128 == 0 < plan.threads <= 1024
            assert width % (8 * plan.split) == 0
            of_an_sm = plan.blocks // gpu().sms
            assert plan.ring * plan.op.row_bytes * of_an_sm < 227 * 1024
            assert of_an_sm * plan.threads <= 2048


def test_a_given_scale_leaves_a_thread_of_a_gate_two_chunks():
    for rows, ring in ((1500, True), (512, False)):
        x = shaped((rows, 28672), jnp.bfloat16)
        found = planning.plan("gate", x, "int8", given=True)
        assert (found.ring > 0) == ring and (ring or found.threads == 896)
    assert planning.plan("gate", x, "int8").threads == 256
    for rows in (1, 33, 64):
        found = planning.plan("gate", shaped((rows, 28672), jnp.bfloat16), "int8", given=True)
        assert f"XLA is as fast for {rows} rows" in found.text
    assert isinstance(planning.plan("copy", x, "int8", given=True), planning.RowsPlan)


def test_narrow_rows_are_left_to_xla():
    narrow, wide = (jax.ShapeDtypeStruct((2, n), jnp.bfloat16) for n in (512, 1024))
    found = planning.plan("copy", narrow, "int8")
    assert "XLA is as fast" in found.text and found.plan.threads == 128
    assert isinstance(planning.plan("copy", wide, "int8"), planning.RowsPlan)


def test_calls_without_a_kernel_say_why():
    for message, call, shape, dtype in (
        ("rows of float32", rms_norm, (2, 16), "float32"),
        ("width 12", quantize_tokens, (2, 12), "bfloat16"),
        ("element-wise", swiglu, (2, 16), "bfloat16"),
    ):
        args = (jnp.ones((16,)), 1e-5) if call is rms_norm else ()
        with pytest.raises(NotImplementedError, match=message):
            call(jnp.ones(shape, dtype), *args, implementation="mosaic")


def exact(call, x, r, w):
    """The float64 row that is quantized, and the rounded sum."""
    x = np.asarray(x, np.float64)
    if call == "gate":
        gate, up = np.split(x, 2, axis=-1)
        with np.errstate(over="ignore"):
            return silu64(gate) * up
    return x if call == "tokens" else norm64(x, w, 1e-5)


def rows_for(call, rows, width, dtype, seed=0):
    x = normal((rows, width * (2 if call == "gate" else 1)), dtype, seed)
    r = normal(x.shape, dtype, seed + 1)
    if rows > 2:  # a row of zeros, a row of huge values, a tiny one
        big = 1e4 if dtype == "float16" else 1e17
        if call == "gate":
            big = 100.0
        x = x.at[0].set(0).at[1].mul(big).at[2].mul(1e-3)
        r = r.at[0].set(0)
    return x, r, normal((width,), "float32", seed + 2).astype(dtype)


ROWS = [
    (1, 64, "float16"),
    (7, 576, "bfloat16"),
    (64, 4096, "bfloat16"),
    (33, 1000, "float16"),
    (3, 14336, "bfloat16"),
    (1100, 4096, "bfloat16"),
    (5, 16384, "bfloat16"),
    (2049, 1000, "bfloat16"),
    (1100, 14336, "bfloat16"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width", "dtype", "call", "words"),
    pairwise(ROWS, list(CALLS), ["int8", "float8_e4m3fn"]),
)
def test_the_kernel_is_the_float64_rows(call, words, rows, width, dtype):
    x, r, w = rows_for(call, rows, width, dtype)
    f = jax.jit(lambda x, r, w: CALLS[call](x, r, w, quantize=words, implementation="mosaic"))
    g = jax.jit(lambda x, r, w: CALLS[call](x, r, w, quantize=words, implementation="xla"))
    got, again, want = f(x, r, w), f(x, r, w), g(x, r, w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    if call == "residual":
        np.testing.assert_array_equal(
            np.asarray(got[1], np.float32), np.asarray(want[1], np.float32)
        )
        x, got, want = want[1], got[0], want[0]
    y = exact(call, x, r, w)
    scale = np.asarray(got.scale, np.float64)
    qmax = 127.0 if words == "int8" else 448.0
    np.testing.assert_allclose(scale, np.abs(y).max(-1, keepdims=True) / qmax, rtol=4e-6)
    steps = y / np.where(scale > 0, scale, 1)
    q = np.asarray(got.q, np.float64)
    reference = np.asarray(want.q, np.float64)
    half = 0.5 if words == "int8" else np.abs(steps) * 2.0**-4 + 2.0**-10
    assert (np.abs(q - steps) <= half + 1e-4 * np.abs(steps)).all()
    # Where words differ from the reference's, float64 is as near to either: a tie, to float32; in
    # fp8 to float16, through which the reference's cast may go.
    apart = np.abs(np.abs(q - steps) - np.abs(reference - steps))
    tie = 1e-4 if words == "int8" else 2.0**-10
    assert (apart <= tie * np.abs(steps) + 1e-6)[q != reference].all()
    assert (q != reference).mean() < 0.02
    if rows > 2:
        assert scale[0] == 0 and not q[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1.0])
def test_the_kernel_without_words(dtype, eps):
    for rows, width in ((1, 64), (9, 4096), (200, 1000)):
        x, r, w = normal((rows, width), dtype), normal((rows, width), dtype, 1), normal((width,))
        want = norm64(x, w, eps)
        got = rms_norm(x, w, eps, implementation="mosaic")
        assert got.dtype == x.dtype
        limit = BOUND[dtype] * np.abs(want).max()
        assert np.max(np.abs(np.asarray(got, np.float64) - want)) <= limit
        wide = rms_norm(x, w, eps, out_dtype=jnp.float32, implementation="mosaic")
        np.testing.assert_allclose(wide, want, rtol=2e-6, atol=1e-6)
        both = rms_norm(x, w, eps, residual=r, implementation="mosaic")
        np.testing.assert_array_equal(
            np.asarray(both[1], np.float32), np.asarray(x + r, np.float32)
        )
        slope = jax.grad(
            lambda x, w, i: jnp.sum(rms_norm(x, w, eps, implementation=i).astype(jnp.float32)),
            argnums=(0, 1),
        )
        for mine, theirs in zip(slope(x, w, "mosaic"), slope(x, w, "xla"), strict=True):
            np.testing.assert_array_equal(
                np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
            )


def within(x, words):
    """The codes of x in steps: clipped, and to nearest."""
    ends = {"int8": (-128, 127), "float8_e4m3fn": (-448, 448)}[words]
    return np.clip(x, *ends)


@pytest.mark.parametrize("words", ["int8", "float8_e4m3fn"])
def test_a_norm_in_codes_of_a_given_scale(words):
    x, residual = normal((9, 128), "bfloat16"), normal((9, 128), "bfloat16", 1)
    weight, scale = normal((128,), "bfloat16", 2), jnp.float32(0.01 if words == "int8" else 0.003)
    # One jitted program may round less.
    got, total = rms_norm(x, weight, 1e-5, residual=residual, quantize=words, scale=scale)
    np.testing.assert_array_equal(got.scale, np.full((9, 1), scale))
    steps = norm64(total, weight, 1e-5) / float(scale)
    assert (np.abs(steps) > within(steps, words)).any()  # some are clipped
    half = 0.5 if words == "int8" else np.maximum(np.abs(within(steps, words)) / 16, 2.0**-10)
    assert (np.abs(wide(got.q) - within(steps, words)) <= 1.001 * half).all()
    with pytest.raises(ValueError, match="scale without quantize"):
        rms_norm(x, weight, 1e-5, scale=scale)


@newest
@calls
@pytest.mark.parametrize(("words", "width"), [("int8", 1024), ("float8_e4m3fn", 4096)])
def test_the_kernel_takes_a_given_scale(call, words, width):
    """Emulated, beside XLA's form: equal but where a value lies between two codes.  Of the wide
    gate a cluster has a row."""
    x, r, w = rows_for(call, 3, width, "bfloat16")
    x = x.at[1].set(x[2])
    given = {"scale": jnp.float32(0.01), "quantize": words}
    assert (gate_plan(3, width).split > 1) == (width == 4096)
    want = CALLS[call](x, r, w, **given, implementation="xla")
    with warp_emulator.emulated(kernel, one_row):
        got = CALLS[call](x, r, w, **given, implementation="mosaic")
    if call == "residual":
        np.testing.assert_array_equal(got[1], want[1])
        got, want = got[0], want[0]
    np.testing.assert_array_equal(got.scale, want.scale)
    steps, codes = np.abs(wide(got.q) - wide(want.q)), np.abs(wide(want.q))
    assert (steps > 0).mean() < 0.005 and (steps <= codes / 7 + 1).all()


@pytest.mark.gpu
@calls
@pytest.mark.parametrize("words", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("rows", "width"), [(8, 4096), (64, 14336), (1500, 4096)])
def test_a_given_scale_on_the_gpu(call, words, rows, width):
    x, r, w = rows_for(call, rows, width, "bfloat16")
    given = {"scale": jnp.float32(0.01), "quantize": words}
    got, want = (
        jax.jit(functools.partial(CALLS[call], implementation=way, **given))(x, r, w)
        for way in ("mosaic", "xla")
    )
    if call == "residual":
        got, want = got[0], want[0]
    steps, codes = np.abs(wide(got.q) - wide(want.q)), np.abs(wide(want.q))
    assert (steps > 0).mean() < 0.005 and (steps <= codes / 7 + 1).all()


def test_gelu_keeps_its_digits_where_it_is_near_zero():
    x = np.linspace(-4.5, 4.5, 91, dtype=np.float32)
    wide = x.astype(np.float64)
    u = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    got = jax.jit(gelu_tanh)(x)
    np.testing.assert_allclose(got, 0.5 * wide * (1 + np.tanh(u)), rtol=4e-6)
