"""``quantized_matmul`` by the CPU's handler, against a float64 oracle on the same codes.

TOLERANCE is the error of its float32 sums; that of rounding x to 8 bits is ROUNDING, apart.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import explain, quantized_matmul
from pallas_kernels.cpu import jit
from pallas_kernels.cpu.matmul import HELD_ROWS, Matmul
from pallas_kernels.cpu.target import TARGETS, VARIABLE
from pallas_kernels.qtensor import QTensor
from tests.helpers.arrays import as_jax
from tests.helpers.cases import each_once
from tests.helpers.cpu_cases import (
    SCHEMES,
    GuardedPages,
    by_hand,
    error,
    floats,
    native,
    oracle,
    prepared,
    program_of,
    said_with_avx2,
    same_bits_under_load,
    values,
    weight,
)

TOLERANCE = 1e-6
ROUNDING = 2e-2


def run(x, w, **options):
    """Of numpy's arrays, by the handler or not at all."""
    return np.asarray(quantized_matmul(as_jax(x), jax.device_put(w), **options))


@pytest.mark.parametrize(("scheme", "rows"), each_once(list(SCHEMES), [1, 3, 11], pytest.mark.core))
def test_the_product_is_the_oracles(scheme, rows):
    w, x = weight(scheme, 40, 256), floats(rows, 256)
    found = run(x, prepared(w), implementation="cpu")
    assert error(found, oracle(x, w)) < TOLERANCE
    assert error(found, x @ values(w).T) < ROUNDING
    if rows == 1:
        assert error(run(x, w, implementation="xla"), x @ values(w).T) < TOLERANCE


@pytest.mark.parametrize("target", native(), ids=lambda t: t.name)
@pytest.mark.parametrize(
    ("scheme", "rows"),
    [("q4_1", 1), ("int8 rows", 2), ("gptq", 8), ("nvfp4", 5), ("fp8 blocks", 7)],
)
def test_every_target_of_this_machine_computes_it(scheme, rows, target):
    w, x = weight(scheme, 33, 128), floats(rows, 128)
    assert error(by_hand(x, prepared(w), on=target), oracle(x, w)) < TOLERANCE


def test_codes_and_scales_that_are_both_float8():
    """Files may have them, of which ``quantized_matmul`` takes none."""
    w, x = weight("fp8 groups", 32, 64), floats(3, 64)
    w = dataclasses.replace(w, scale=np.asarray(w.scale, jnp.float8_e4m3fn))
    assert error(by_hand(x, prepared(w)), oracle(x, w)) < TOLERANCE


@pytest.mark.parametrize(
    ("one", "bits"), each_once(TARGETS, [4, 8]), ids=lambda x: getattr(x, "name", x)
)
def test_every_target_compiles_it(bits, one):
    """NEON's code is read here; ``test_arm_emulated`` runs it."""
    codes = f"int{bits}"
    program = Matmul(codes, 32, 32, "float16", None, False, one.rows, norm=True, swiglu=True)
    assembly = jit.build(program, one, assembly=True)
    wanted = {
        "avx512vnni": "vpdpbusd",
        "avxvnni": "{vex}\tvpdpbusd",
        "avx2": "vpmaddubsw",
        "neon": "sdot",
    }[one.name]
    # A block of 32 columns is 8 of a vector of 64 bytes; gate and up are two products.
    registers = {"avx512vnni": 1, "avxvnni": 2, "avx2": 2, "neon": 4}[one.name]
    assert assembly.count(wanted) == 2 * 8 * registers * one.rows
    assert ("zmm" in assembly) == (one.name == "avx512vnni")
    if bits == 4:
        float4 = dataclasses.replace(program, codes="float4_e2m1fn", scale="float8_e8m0fnu")
        shuffle = "tbl" if one.name == "neon" else "vpshufb"
        assert jit.build(float4, one, assembly=True).count(shuffle) >= 2 * 8 * registers


def test_shapes_of_any_size():
    """Rows, tiles and blocks that are not whole."""
    rng = np.random.default_rng(5)
    for case in range(40):
        scheme = rng.choice(["int8 rows", "int4 rows", "q4_0", "q6_k", "fp8 rows", "fp8 groups"])
        group = SCHEMES[scheme][1]
        n, k = (int(v) for v in rng.integers(1, 90, 2))
        k = k if group == 0 else group * (1 + k % 5)
        rows = int(rng.choice([1, 2, 3, 5, 8, 9, 17]))
        w, x = weight(scheme, n, k, seed=case), floats(rows, k, seed=case)
        found = by_hand(x, prepared(w), threads=int(rng.integers(1, 4)))
        assert error(found, oracle(x, w)) < TOLERANCE, (scheme, rows, n, k)


@pytest.mark.parametrize("target", native(), ids=lambda t: t.name)
def test_nothing_is_read_or_written_behind_an_array(target):
    """Each operand and result ends where a page begins that nobody may touch."""
    rng = np.random.default_rng(7)
    for scheme in ("int8 rows", "q4_1", "int4 rows", "q6_k", "nvfp4", "fp8 rows"):
        for rows in (1, 3, 9):
            group = SCHEMES[scheme][1]
            n, k = int(rng.integers(1, 70)), 2 * group or int(rng.integers(1, 70))
            w, x = weight(scheme, n, k), floats(rows, k)
            pages = GuardedPages()
            found = by_hand(x, prepared(w), threads=2, on=target, place=pages.place)
            np.testing.assert_array_equal(found, by_hand(x, prepared(w), on=target))
            assert error(found, oracle(x, w)) < TOLERANCE


def test_a_guarded_page_is_one():
    """The test above would end the process: this one sees that it would."""
    child = (
        "import numpy as np; from tests.helpers.cpu_cases import GuardedPages\n"
        "a = GuardedPages().place(np.zeros(3, np.uint8))\n"
        "print(np.lib.stride_tricks.as_strided(a, (4,))[3])"
    )
    done = subprocess.run([sys.executable, "-c", child], capture_output=True)
    assert done.returncode < 0 and not done.stdout


@pytest.mark.parametrize(("scheme", "rows"), [("q4_1", 1), ("int8 rows", 12), ("fp8 blocks", 3)])
def test_bits_are_equal_for_any_number_of_threads(scheme, rows):
    w, x = prepared(weight(scheme, 1500, 256)), floats(rows, 256)
    alone = by_hand(x, w)
    for threads in (0, 2, 8, 65):
        np.testing.assert_array_equal(by_hand(x, w, threads), alone)
    np.testing.assert_array_equal(run(x, w), alone)


@pytest.mark.parametrize("scheme", ["q4_1", "int8 rows", "gptq", "fp8 blocks"])
def test_a_rows_bits_do_not_depend_on_its_neighbours(scheme):
    w, x = prepared(weight(scheme, 48, 256)), floats(11, 256)
    x[4], x[7] = np.nan, 0.0
    found = run(x, w)
    assert np.isnan(found[4]).all() and not found[7].any()
    for r in (0, 3, 5, 10):
        assert np.isfinite(found[r]).all()
        np.testing.assert_array_equal(run(x[r : r + 1], w)[0], found[r])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e-42, 3e38])
def test_extreme_values_stay_in_their_row(value):
    w, x = prepared(weight("q4_0", 32, 64)), floats(2, 64)
    x[0, 5] = value
    found = run(x, w)
    assert np.isfinite(found[0]).all() == (value == 1e-42)
    np.testing.assert_array_equal(found[1], run(x[1:], w)[0])


@pytest.mark.parametrize(
    ("scheme", "rows"), [("q4_0", 12), ("q4_1", 1), ("int8 rows", 12), ("gptq", 1)]
)
def test_an_infinity_comes_out_with_the_sign_of_its_weight(scheme, rows):
    """As in XLA's form, or as NaN where a weight's zero point is added as a sum of its own."""
    w, x = weight(scheme, 32, 256), floats(rows, 256)
    by_xla = jax.jit(lambda x: quantized_matmul(x, w, implementation="xla"))
    for value in (np.inf, -np.inf):
        x[0, 5] = value
        want, found = np.asarray(by_xla(x))[0], run(x, prepared(w))[0]
        is_nan = np.isnan(found)
        assert not np.isfinite(found).any()
        np.testing.assert_array_equal(found[~is_nan], want[~is_nan])
        if w.zero is None:
            np.testing.assert_array_equal(is_nan, np.isnan(want))


FUSED = [
    {},
    {"norm"},
    {"bias"},
    {"residual"},
    {"swiglu"},
    {"norm", "swiglu"},
    {"norm", "bias", "swiglu", "residual"},
]


@pytest.mark.parametrize(
    ("fused", "rows"),
    each_once(FUSED, [5, 1]),
    ids=lambda x: " ".join(sorted(x)) or "alone" if isinstance(x, set | dict) else str(x),
)
def test_what_stands_around_the_product_is_inside(rows, fused):
    n, k = 64, 96
    w, x = weight("q4_1", n, k), floats(rows, k)
    out = n // 2 if "swiglu" in fused else n
    options, shapes = {}, {}
    if "norm" in fused:
        options["norm"] = as_jax(floats(k, seed=2)), 1e-5
    for name, shape in (("bias", (n,)), ("residual", (rows, out))):
        if name in fused:
            options[name] = shapes[name] = as_jax(floats(*shape, seed=3))
    options["swiglu"] = "swiglu" in fused
    assert "cpu, quantized_matmul_cpu" in explain(quantized_matmul, x, prepared(w), **options)
    found = run(x, prepared(w), **options)
    y = x.astype(np.float64)
    if "norm" in fused:
        gamma, eps = options["norm"]
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + eps) * np.asarray(gamma)
    y = oracle(y.astype(np.float32), w)
    y = y + np.asarray(shapes["bias"], np.float64) if "bias" in fused else y
    if "swiglu" in fused:
        gate, up = np.split(y, 2, axis=-1)
        y = gate / (1 + np.exp(-gate)) * up
    y = y + np.asarray(shapes["residual"], np.float64) if "residual" in fused else y
    # A code of x may round the other way after a norm in float32.
    assert error(found, y) < (2e-3 if "norm" in fused else 2 * TOLERANCE)


def test_a_bias_behind_a_tail_of_rows():
    w, x, bias = weight("q8_0", 21, 64), floats(2, 64), floats(21, seed=4)
    assert error(run(x, prepared(w), bias=as_jax(bias)), oracle(x, w) + bias) < TOLERANCE


def test_columns_in_another_order_and_leading_axes():
    w, x = weight("gptq", 32, 256), floats(6, 256)
    order = np.random.default_rng(3).permutation(256).astype(np.int32)
    shuffled = dataclasses.replace(w, columns=order)
    found = run(x.reshape(2, 3, 256), prepared(shuffled), out_dtype=jnp.bfloat16)
    assert found.shape == (2, 3, 32) and found.dtype == jnp.bfloat16
    plain = run(x[:, order], prepared(w), out_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(found.reshape(6, 32), plain)
    gamma = jnp.ones(256), 1e-5
    assert error(run(x, prepared(shuffled), norm=gamma), run(x, shuffled, norm=gamma)) < ROUNDING


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activations_of_16_bits(dtype):
    w, x = weight("q4_0", 32, 64), as_jax(floats(3, 64)).astype(dtype)
    found = quantized_matmul(x, jax.device_put(prepared(w)))
    assert found.dtype == x.dtype
    wanted = oracle(np.asarray(x.astype(jnp.float32)), w)
    assert error(np.asarray(found.astype(jnp.float32)), wanted) < 5e-3


def test_transformations():
    w = weight("q4_1", 32, 64)
    known, x = jax.device_put(prepared(w)), as_jax(floats(4, 64))
    slope = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(quantized_matmul(x, w) * 0.1))))
    plain = quantized_matmul(x, known)
    np.testing.assert_array_equal(jax.jit(quantized_matmul)(x, known), plain)
    mapped = jax.vmap(quantized_matmul, in_axes=(0, None))(x[:, None], known)
    np.testing.assert_array_equal(mapped[:, 0], plain)

    def layer(x, w):
        y = quantized_matmul(x, w)
        return jnp.concatenate([y, y], axis=-1) * 1e-2, y

    both = jax.tree.map(lambda a: jnp.stack([a, a]), known)
    _, scanned = jax.jit(lambda x, w: jax.lax.scan(layer, x, w))(x, both)
    np.testing.assert_array_equal(scanned[0], plain)
    stacked = jax.vmap(quantized_matmul, in_axes=(None, 0))(x, both)
    np.testing.assert_array_equal(stacked[1], plain)

    # The derivative is the exact weight's, at the rounded product.
    exact = slope(x, jax.device_put(w))
    assert error(slope(x, known), np.asarray(exact, np.float64)) < 5 * ROUNDING
    out, tangent = jax.jvp(lambda x: quantized_matmul(x, known), (x,), (x,))
    np.testing.assert_array_equal(out, plain)
    assert error(tangent, np.asarray(quantized_matmul(x, jax.device_put(w)))) < 1e-5


def test_the_choice_is_the_weights():
    w, x = jax.device_put(weight("q4_1", 32, 64)), as_jax(floats(1, 64))
    known = jax.device_put(prepared(weight("q4_1", 32, 64)))
    said = explain(quantized_matmul, x, known)
    assert f"cpu, quantized_matmul_cpu, {jit.host().name}, Matmul(codes='int4'" in said
    assert "xla (the operands are on 'cpu', not an NVIDIA GPU)" in explain(quantized_matmul, x, w)
    with pytest.raises(NotImplementedError, match="no CPU handler for this call: w is not in the"):
        quantized_matmul(x, w, implementation="cpu")
    with pytest.raises(NotImplementedError, match="no Mosaic kernel for this call: w is in the"):
        quantized_matmul(x, known, implementation="mosaic")
    with pytest.raises(ValueError, match="implementation 'gpu' is not 'xla', 'mosaic', 'cpu'"):
        quantized_matmul(x, known, implementation="gpu")
    exact = quantized_matmul(x, known, implementation="xla")
    np.testing.assert_array_equal(exact, quantized_matmul(x, w))
    assert quantized_matmul(jnp.zeros((0, 64)), known).shape == (0, 32)
    with pytest.raises(ValueError, match="64 in x"):
        quantized_matmul(x, jax.device_put(prepared(weight("q4_1", 32, 96))))


def test_without_handlers_xla_takes_it_and_says_why(monkeypatch):
    w, x = jax.device_put(weight("q4_0", 32, 64)), as_jax(floats(1, 64))
    known = jax.device_put(prepared(weight("q4_0", 32, 64)))
    monkeypatch.setenv(VARIABLE, "off")
    assert f"xla ({VARIABLE}=off)" in explain(quantized_matmul, x, known)
    np.testing.assert_array_equal(quantized_matmul(x, known), quantized_matmul(x, w))
    norm = jnp.ones(64), 1e-5
    fused = quantized_matmul(x, known, norm=norm)
    np.testing.assert_array_equal(fused, quantized_matmul(x, w, norm=norm))


def test_xla_runs_avx2_where_it_is_asked_for():
    child = (
        "import jax, numpy as np; from pallas_kernels import explain, quantized_matmul\n"
        "from tests.helpers.cpu_cases import *\n"
        "w, x = weight('q4_1', 70, 256), floats(3, 256)\n"
        "known = jax.device_put(prepared(w))\n"
        "found = np.asarray(jax.jit(quantized_matmul)(x, known))\n"
        "print(explain(quantized_matmul, x, known), error(found, oracle(x, w)) < 1e-6)"
    )
    said = said_with_avx2(child)
    assert f"cpu, quantized_matmul_cpu, {native()[-1].name}" in said
    assert said.strip().endswith("True")


def _under_load(calls: int) -> None:
    x = [floats(1 + i % 3, 256, seed=i) for i in range(6)]
    w = jax.device_put(prepared(weight("q4_1", 1024, 256)))
    f = jax.jit(quantized_matmul)
    same_bits_under_load(calls, [functools.partial(f, v, w) for v in x])


def test_bits_are_equal_under_load():
    _under_load(40)


@pytest.mark.slow
def test_bits_are_equal_under_long_load():
    _under_load(1500)


def test_rows_choose_the_programs():
    """No more rows share a vector than registers hold, or than AVX2 passes by what it holds."""
    w = prepared(weight("q4_0", 32, 64))
    rows = [program_of(floats(r, 64), w).rows for r in (1, 2, 3, 8, 100)]
    most = jit.host().rows
    many = [HELD_ROWS] * 2 if jit.host().name == "avx2" else [min(8, most)] * 2
    assert rows == [1, min(2, most), min(4, most), *many]


@pytest.mark.parametrize("scheme", ["q4_0", "q4_1", "int4 rows", "gptq", "fp8 blocks"])
@pytest.mark.parametrize("rows", [HELD_ROWS - 1, 2 * HELD_ROWS + 5])
def test_rows_beside_codes_in_registers_have_the_bits_of_a_row_alone(scheme, rows, monkeypatch):
    """AVX2's many rows: sums that go through memory, in both halves of a tile."""
    monkeypatch.setenv(VARIABLE, "avx2")
    if jit.unavailable():
        pytest.skip("this CPU has no AVX2")
    w, x = prepared(weight(scheme, 40, 256)), floats(rows, 256)
    assert program_of(x, w).rows == (4 if scheme == "fp8 blocks" else HELD_ROWS)
    found = by_hand(x, w, threads=2)
    for r in (0, 1, HELD_ROWS // 2, rows - 1):
        np.testing.assert_array_equal(by_hand(x[r : r + 1], w)[0], found[r])


def test_a_prepared_weight_is_not_for_quantized_activations():
    w = prepared(weight("int8 rows", 32, 64))
    with pytest.raises(ValueError, match="a quantized x goes with a quantized w"):
        quantized_matmul(QTensor(jnp.ones((1, 64), jnp.int8), jnp.ones((1, 1))), jax.device_put(w))


@pytest.mark.parametrize("group", [48, 160, 256])
def test_groups_of_other_widths(group):
    rng = np.random.default_rng(0)
    q = rng.integers(-8, 8, (33, 2 * group)).astype(jnp.int4)
    scale, zero = floats(33, 2), rng.integers(-8, 8, (33, 2)).astype(np.int8)
    w, x = QTensor(q, scale, zero), floats(3, 2 * group)
    assert error(run(x, prepared(w), implementation="cpu"), oracle(x, w)) < TOLERANCE
