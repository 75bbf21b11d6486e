"""quantized_matmul against float64 on the same words, in every scheme and form; its kernels' order
of words; what it costs in memory; where it says no."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.shapes import LLAMA_8B
from pallas_kernels import QTensor, explain, quantized_matmul
from pallas_kernels.cards.architecture import TARGET
from pallas_kernels.dispatch import named_plan
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.call import Around, MatmulCall
from pallas_kernels.matmul.few_rows import kernel as few_rows_kernel
from pallas_kernels.matmul.few_rows import plan as planning
from pallas_kernels.matmul.op import product_plan, quantized_matmul_reference
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.rows.swiglu import swiglu
from tests.helpers import warp_emulator
from tests.helpers.arrays import as_jax
from tests.helpers.cases import pairwise
from tests.helpers.few_rows import few_rows, run_tiles
from tests.helpers.matmul_cases import (
    WEIGHTS,
    activations,
    check,
    codes,
    exact,
    extras,
    fused_product,
    lowered,
    newest,
    product,
    shaped,
    weights,
    wide,
)
from tests.helpers.models import relative_error

PAIRS = {"w8a8": "int8", "fp8": "float8_e4m3fn"}
IMPLEMENTATIONS = ["xla", pytest.param("mosaic", marks=pytest.mark.gpu)]


def rows_of_codes(shape, words, seed=0):
    """Codes with a scale a row, as activations and weights of W8A8 and FP8 are."""
    scale = np.random.default_rng(seed + 50).uniform(0.01, 0.03, (shape[0], 1))
    return QTensor(codes(shape, words, seed), as_jax(scale, jnp.float32))


def refused_or(implementation, x, w, **kwargs):
    """quantized_matmul, or a skip with the kernel's own reason."""
    out_dtype = kwargs.get("out_dtype", jnp.float32 if isinstance(x, QTensor) else x.dtype)
    found = product_plan(x, w, out_dtype=out_dtype)
    if implementation == "mosaic" and named_plan(found) is None:
        pytest.skip(found.text)
    call = jax.jit(lambda x, w: quantized_matmul(x, w, implementation=implementation, **kwargs))
    return call(x, w)


# XLA: every scheme once, every dtype and row count once; the kernels: any two of them.
WEIGHT_ONLY = (
    [("xla", name, 5, "float32") for name in WEIGHTS]
    + [("xla", "w4-g128-zero", m, d) for m, d in ((1, "bfloat16"), (70, "float16"))]
    + [
        pytest.param("mosaic", *case.values, marks=pytest.mark.gpu)
        for case in pairwise(list(WEIGHTS), (1, 5, 16, 70), ("bfloat16", "float16"))
    ]
)


@pytest.mark.core
@pytest.mark.parametrize("implementation,name,m,dtype", WEIGHT_ONLY)
def test_weight_only(implementation, name, m, dtype):
    n, k = (432, 512) if implementation == "xla" else (432, 2048)
    w = weights(name, n, k, jnp.float32 if dtype == "float32" else dtype)
    x, bias = activations((m, k), dtype), activations((n,), jnp.float32, 2)
    out = refused_or(implementation, x, w, bias=bias)
    assert out.dtype == x.dtype and out.shape == (m, n)
    check(out, product(x, w, bias), dtype)


BOTH = [
    ("xla", "w8a8", 33, "bfloat16"),
    ("xla", "w8a8", 1, "float32"),
    ("xla", "fp8", 5, "float16"),
]
BOTH += [
    pytest.param("mosaic", *case.values, marks=pytest.mark.gpu)
    for case in pairwise(list(PAIRS), (1, 33, 130), ("bfloat16", "float16", "float32"))
]


@pytest.mark.parametrize("implementation,name,m,out_dtype", BOTH)
def test_both_quantized(implementation, name, m, out_dtype):
    w, x = rows_of_codes((208, 1536), PAIRS[name]), rows_of_codes((m, 1536), PAIRS[name], 3)
    bias = activations((208,), jnp.float32, 2)
    out = refused_or(implementation, x, w, bias=bias, out_dtype=jnp.dtype(out_dtype))
    ref = product(x, w, bias)
    if name == "fp8" and implementation == "mosaic" and out_dtype == "float32":
        out_dtype = "float16"  # the tensor cores' own sum of e4m3 products has about 14 bits
    check(out, ref, out_dtype)


def of_codes(name, shape, is_weight):
    """An operand of W8A8, FP8, FP8 in groups, or W4A8 with int8 or FP8 activations."""
    if name == "fp8-groups":
        return weights("fp8-block", *shape, jnp.float32, is_weight)
    if is_weight and name.startswith("w4"):
        return weights("w4-g128-zero", *shape, jnp.float32)
    words = "float8_e4m3fn" if "fp8" in name else "int8"
    return rows_of_codes(shape, words, is_weight)


# The work after a product of codes: FasterLLaMA's dequantize, bias, residual and SiLU times up.
# Kinds are those of ``extras``, and l for a low-rank term.
AFTER = [
    ("xla", "w8a8", "r", 5, "float16"),
    ("xla", "w8a8", "s", 1, "float32"),
    ("xla", "w8a8", "srl", 5, "float32"),
    ("xla", "fp8", "gr", 5, "bfloat16"),
    ("xla", "fp8-groups", "r", 5, "float32"),
    ("xla", "w4a8", "sr", 5, "bfloat16"),
    ("xla", "w4-fp8", "r", 5, "float32"),
]
AFTER += [
    pytest.param("mosaic", *case.values, "bfloat16", marks=pytest.mark.gpu)
    for case in pairwise(["w8a8", "fp8", "w4a8"], ["r", "s", "gr"], [2, 130])
]


@pytest.mark.parametrize("implementation,name,kinds,m,dtype", AFTER)
def test_what_comes_after_a_product_of_codes(implementation, name, kinds, m, dtype):
    n, k = 208, 512 if implementation == "xla" else 1536
    x, w = of_codes(name, (m, k), False), of_codes(name, (n, k), True)
    given = extras(m, n // 2 if {*"sg"} & {*kinds} else n, k, dtype, kinds)
    bias, term = activations((n,), jnp.float32, 2), None
    want = fused_product(x, w, bias, **given)
    if implementation == "mosaic" and name == "w4a8":  # whose kernel writes 16 bits
        product = wide(quantized_matmul(x, w, bias=bias, out_dtype=dtype, implementation="mosaic"))
        want = fused_product(product, np.eye(n), None, **given)
    if "l" in kinds:
        inner, second = activations((m, 8), jnp.float32, 7), activations((n, 8), jnp.float32, 8)
        term = inner, (second,)
        want = fused_product(x, w, wide(bias) + wide(inner) @ wide(second).T, **given)
    ours = functools.partial(quantized_matmul, implementation=implementation, out_dtype=dtype)
    got = jax.jit(functools.partial(ours, **given))(x, w, bias=bias, low_rank=term)
    assert got.dtype == dtype
    check(got, want, dtype)


def test_codes_take_no_norm():
    x = rows_of_codes((2, 64), "int8")
    with pytest.raises(ValueError, match="a norm comes before x is quantized: rms_norm"):
        quantized_matmul(x, x, norm=(jnp.ones(64), 1e-5))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_int8_sums_are_exact(implementation):
    """With unit scales and float32 out every sum below 2**24 must come back as the integer."""
    k = 2560
    rng = np.random.default_rng(5)
    xq = rng.integers(-128, 128, (33, k)).astype(np.int8)
    wq = rng.integers(-128, 128, (144, k)).astype(np.int8)
    xq[0], wq[0], xq[1], wq[1] = 127, 127, -128, -128  # sums near 4.2e7, multiples of 2**k below
    one = jnp.ones((33, 1), jnp.float32), jnp.ones((144, 1), jnp.float32)
    x, w = QTensor(as_jax(xq), one[0]), QTensor(as_jax(wq), one[1])
    out = np.asarray(refused_or(implementation, x, w, out_dtype=jnp.float32))
    sums = xq.astype(np.int64) @ wq.astype(np.int64).T
    assert (out == sums.astype(np.float32)).all()


HOSTILE = [("xla", group, scale, 2, "float32") for group, scale in ((64, 1e-8), (128, 1e4))]
HOSTILE += [
    pytest.param("mosaic", group, scale, m, "bfloat16", marks=pytest.mark.gpu)
    for group in (64, 128)
    for scale in (1e-8, 1e4)
    for m in (2, 40)
]


@pytest.mark.parametrize("implementation,group,scale,m,dtype", HOSTILE)
def test_hostile_values(implementation, group, scale, m, dtype):
    """Tiny and huge scales, zeros at both ends, rows of zeros, an outlier in x."""
    n, k = 176, 2048
    rng = np.random.default_rng(7)
    q, zero = rng.integers(-8, 8, (n, k)), rng.choice([-8, 7], (n, k // group))
    q[3], q[4], q[5], zero[3] = 0, -8, 7, 0
    scales = scale * rng.uniform(0.5, 2, (n, k // group))
    scales[6] = 0
    w = QTensor(as_jax(q, jnp.int4), as_jax(scales, dtype), as_jax(zero, jnp.int8))
    x = rng.standard_normal((m, k))
    x[0, 17], x[m - 1] = 1e4, 0
    x = as_jax(x, dtype)
    out, ref = np.asarray(refused_or(implementation, x, w)), product(x, w)
    for row in range(m - 1):
        check(out[row], ref[row], dtype)
    assert not out[m - 1].any() and not out[:, [3, 6]].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("m", [3, 70])
def test_a_row_is_bitwise_its_own(implementation, m):
    """Twice the same, and whatever the other rows hold, NaN included."""
    w = weights("w4-g128-zero", 256, 2048, jnp.bfloat16)
    x = activations((m, 2048), jnp.bfloat16)
    call = jax.jit(lambda x, w: quantized_matmul(x, w, implementation=implementation))
    first, again = (wide(call(x, w)) for _ in range(2))
    assert (first == again).all()
    changed = wide(call(x.at[1:].set(jnp.nan), w))
    assert (changed[0] == first[0]).all()
    assert np.isnan(changed[1:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "k,m", [(2688, 3), (8192, 1), (8192, 16), (14336, 1), (14336, 16), (18944, 1), (18944, 4)]
)
def test_long_and_odd_rows_in_the_decode_kernel(k, m):
    """K divided among blocks, or x kept in shared memory; and a row is bitwise its own."""
    w = weights("w4-g128-zero", 2144, k, jnp.bfloat16)  # 134 tiles: some blocks have two
    x = activations((m, k), jnp.bfloat16)
    assert isinstance(planning.tile_plan(MatmulCall.of(x, w, x.dtype)), planning.TilePlan)
    call = jax.jit(lambda x, w: quantized_matmul(x, w, implementation="mosaic"))
    first = call(x, w)
    check(first, product(x, w), "bfloat16")
    other = call(x.at[1:].set(jnp.nan), w)
    for out in (call(x, w)[0], other[0]):
        assert (np.asarray(out, np.float32) == np.asarray(first[0], np.float32)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["w4-g64-zero", "w4-g128-minimum", "w8-row"])
def test_gradients(implementation, name):
    dtype = jnp.float32 if implementation == "xla" else jnp.bfloat16
    w = weights(name, 208, 1024, dtype)
    x, dy = activations((2, 3, 1024), dtype), activations((2, 3, 208), jnp.float32, 4)
    bias = activations((208,), jnp.float32, 2)

    def loss(f):
        def of(x, scale, zero, bias):
            out = f(x, QTensor(w.q, scale, zero), bias=bias)
            return jnp.sum(out.astype(jnp.float32) * dy)

        wanted = (0, 1, 2, 3) if name.endswith("minimum") else (0, 1, 3)
        return jax.jit(jax.grad(of, argnums=wanted))(x, w.scale, w.zero, bias)

    got = loss(lambda *a, **k: quantized_matmul(*a, implementation=implementation, **k))
    for ours, ref in zip(got, loss(quantized_matmul_reference), strict=True):
        check(ours, wide(ref), dtype)


def test_gradients_of_scales_of_two_quantized_operands():
    w, x = rows_of_codes((48, 256), "int8"), rows_of_codes((5, 256), "int8", 3)
    bias, dy = activations((48,), jnp.float32), activations((5, 48), jnp.float32, 4)

    def loss(f):
        def of(sx, sw, bias):
            out = f(QTensor(x.q, sx), QTensor(w.q, sw), bias=bias)
            return jnp.sum(out.astype(jnp.float32) * dy)

        return jax.jit(jax.grad(of, argnums=(0, 1, 2)))(x.scale, w.scale, bias)

    for ours, ref in zip(loss(quantized_matmul), loss(quantized_matmul_reference), strict=True):
        check(ours, wide(ref), "float32")


def test_leading_axes_and_output_dtypes():
    w = weights("w4-g32", 40, 64, jnp.bfloat16)
    x = activations((2, 3, 64), jnp.float32)
    out = quantized_matmul(x, w)
    assert out.dtype == jnp.float32
    check(out, product(x, w), jnp.float32)
    shape = functools.partial(jax.eval_shape, quantized_matmul)
    assert (
        jax.eval_shape(functools.partial(quantized_matmul, out_dtype=jnp.float16), x, w).dtype
        == jnp.float16
    )
    assert shape(x[0, 0], w).shape == (40,)
    for dtype in (jnp.bfloat16, jnp.float32):
        w = QTensor(codes((40, 64), "int8"), jnp.ones((40, 1), dtype))
        assert shape(QTensor(codes((6, 64), "int8"), jnp.ones((6, 1))), w).dtype == dtype


@pytest.mark.parametrize("words", ["int4", "int8"])
def test_cpu_holds_no_dequantized_copy(words):
    n, k = 1536, 512
    w = weights("w4-g32" if words == "int4" else "w8-row", n, k, jnp.float32)
    x = activations((1, k), jnp.float32)
    compiled = jax.jit(quantized_matmul).lower(x, w).compile()
    used = compiled.memory_analysis()
    # int4 is viewed as bytes, for which XLA may keep a copy of the packed words.
    assert used.temp_size_in_bytes < n * k // 2 + 4 * 4 * 192 * k
    check(compiled(x, w), product(x, w), "float32")


@pytest.mark.gpu
def test_gpu_holds_int4_in_half_a_byte():
    n, k = 14336, 4096
    w = weights("w4-g128", n, k, jnp.bfloat16)
    x = activations((1, k), jnp.bfloat16)
    call = jax.jit(lambda x, w: quantized_matmul(x, w, implementation="mosaic"))
    used = call.lower(x, w).compile().memory_analysis()
    assert used.argument_size_in_bytes <= n * k // 2 + n * k // 128 * 2 + 4096 * 2 + 4096
    assert used.temp_size_in_bytes <= 1 << 16
    check(call(x, w), product(x, w), "bfloat16")


# --- the decode kernel's order of words, without a GPU -------------------------------------------


# Fused ones, of more forms of plans, are in test_fused_matmul.
EMULATED = [  # weights, m, K, activations, changes to the plan
    ("w4-g32", 3, 2048, "bfloat16", {}),
    ("w4-g64-zero", 11, 2048, "bfloat16", {}),
    ("w4-g32-minimum", 2, 2048, "bfloat16", {}),
    ("w4-g128-minimum", 1, 2048, "bfloat16", {}),
    ("w4-g256", 9, 4096, "float16", {}),
    ("w4-row", 2, 1024, "float16", {}),
    ("w4-g128", 16, 8192, "bfloat16", {"clusters": 2, "per": 3, "batch": 1}),
    ("w4-g128-zero", 1, 14336, "float16", {"clusters": 1, "per": 5, "batch": 5}),
    ("w4-g128-zero", 2, 2688, "bfloat16", {}),
    ("w4-g32-minimum", 3, 2688, "bfloat16", {"clusters": 2, "per": 3, "batch": 2}),
    ("w8-row", 5, 1728, "float16", {}),
    ("w8-g128", 16, 2048, "float16", {}),
    ("w8-g32", 3, 1024, "bfloat16", {}),
    ("mxfp4", 9, 2048, "bfloat16", {}),
    ("fp8-block", 9, 2048, "bfloat16", {}),
    ("fp8-row", 2, 1024, "float16", {}),
    ("nvfp4", 2, 2688, "bfloat16", {"clusters": 2, "per": 3, "batch": 2}),
]


@pytest.mark.parametrize("name", ["w4-g128-zero", "w4-g32-minimum", "w8-row"])
def test_decode_kernel_emulated_with_float32_scales(name):
    w = weights(name, 80, 2048, jnp.float32)
    x = activations((2, 2048), jnp.bfloat16)
    assert isinstance(planning.tile_plan(MatmulCall.of(x, w, x.dtype)), planning.TilePlan)
    out = run_tiles(x, w, None, jnp.float32)
    # A folded weight is rounded to bf16; otherwise every step is float32.
    check(as_jax(out), product(x, w), "bfloat16" if "g32" in name else "float32")


@pytest.mark.parametrize(
    "name,m,k,dtype,changes", EMULATED, ids=[f"{c[0]}-{c[1]}x{c[2]}-{c[3]}" for c in EMULATED]
)
def test_decode_kernel_emulated(name, m, k, dtype, changes):
    """The kernel's own code, executed instruction by instruction on numpy."""
    w = weights(name, 80, k, dtype)
    x, bias = activations((m, k), dtype), activations((80,), jnp.float32, 2)
    assert isinstance(planning.tile_plan(MatmulCall.of(x, w, x.dtype)), planning.TilePlan)
    out = run_tiles(x, w, bias, dtype, **changes)
    check(as_jax(out), product(x, w, bias), dtype)


@pytest.mark.parametrize("name, m, k", [("w4-g128-zero", 16, 4096), ("w8-row", 9, 8192)])
def test_portable_kernel_emulated(name, m, k, monkeypatch):
    """Before Hopper blocks share K without being a cluster, and XLA adds their sums."""
    monkeypatch.setenv(TARGET, "sm_86")
    w, dtype = weights(name, 80, k, jnp.bfloat16), jnp.bfloat16
    x, bias = activations((m, k), dtype), activations((80,), jnp.float32, 2)
    plan = planning.tile_plan(MatmulCall.of(x, w, x.dtype, bias=bias))
    assert plan.apart and plan.split > 1
    check(run_tiles(x, w, bias, dtype), product(x, w, bias), "bfloat16")


@pytest.mark.parametrize("target, m, k", [("sm_80", 4, 18944), ("sm_120", 20, 2048)])
def test_rows_beyond_a_block_s_are_passes_emulated(target, m, k, monkeypatch):
    monkeypatch.setenv(TARGET, target)
    w, x = weights("w4-g128-zero", 32, k, jnp.bfloat16), activations((m, k), jnp.bfloat16)
    call = MatmulCall.of(x, w, x.dtype)
    division = planning.tile_plan(call).divide(call)
    assert division.m < m
    with few_rows():
        out = few_rows_kernel.matmul(x, w, Around(jnp.dtype(jnp.bfloat16)), division)
    check(out, product(x, w), "bfloat16")


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("words", ["int4", "int8"])
def test_pairs_of_words_meet_their_columns(words, kind, monkeypatch):
    """Every weight is recovered exactly and meets its own column of x."""
    fake = warp_emulator.registers(threads=64)
    monkeypatch.setattr(widen, "p", fake)
    low = {"int4": -8, "int8": -128}[words]
    values = np.arange(low, -low).astype(np.int64)
    values = np.resize(np.concatenate([values, values[::-3]]), (64, 32))
    dtype = {"bf16": jnp.bfloat16, "f16": jnp.float16}[kind]
    x = np.random.default_rng(0).integers(-100, 100, values.shape)
    t = QTensor(as_jax(values, words), jnp.ones((64, 1), dtype))
    weight = StoredWeight.of(t)
    per_word = weight.per_word
    bits = (values & (2**weight.bits - 1)).astype(np.uint64).reshape(64, -1, per_word)
    shifts = np.arange(per_word, dtype=np.uint64) * np.uint64(weight.bits)
    packed = (bits << shifts).sum(-1).astype(np.uint32)
    halves = np.asarray(x, np.float32).astype(dtype).view(np.uint16).astype(np.uint32)
    halves = halves.reshape(64, -1, per_word // 2, 2)
    x_words = halves[..., 0] | halves[..., 1] << 16
    total = np.zeros(64)
    for j in range(packed.shape[1]):
        bias = fake.ci(widen.code_bias(weight, kind))
        pairs = widen.word_pairs(weight, packed[:, j], bias, kind)
        columns = widen.x_pairs(weight, [x_words[:, j, i] for i in range(per_word // 2)])
        for a, b in zip(pairs, columns, strict=True):
            for half in (fake.widen, fake.widen_high):
                total += half(a, kind).astype(np.float64) * half(b, kind).astype(np.float64)
    assert (total == (values * x).sum(-1)).all()


# --- lowering, refusals ---------------------------------------------------------------------------


LOWERED = [  # codes, group, zeros, rows of x: a real shape each
    ("int4", 128, None, 1),
    ("int4", 128, "int8", 16),
    ("int4", 32, "bfloat16", 3),
    ("int8", None, None, 9),
    ("int4", 128, None, 16),
    ("int8", None, None, 1),
]


@newest
@pytest.mark.parametrize(
    "shape,case", list(zip(LLAMA_8B, LOWERED, strict=True)), ids=lambda x: str(x[0])
)
def test_lowers_for_hopper(shape, case):
    (_, n, k), (words, group, zeros, m) = shape, case
    groups = n, k // (group or k)
    zero = None if zeros is None else shaped(groups, zeros)
    w = QTensor(shaped((n, k), words), shaped(groups, jnp.bfloat16), zero)
    call = functools.partial(quantized_matmul, implementation="mosaic")
    text = lowered(call, shaped((m, k), jnp.bfloat16), w)
    assert "mosaic_gpu" in text and "dot_general" not in text


@newest
def test_layers_of_one_shape_share_one_lowering():
    """A model's program holds each kernel once, however many layers call it: lowering a kernel
    takes a third of a second."""

    def two_layers(x, w, u):
        y = quantized_matmul(x, w, implementation="mosaic")
        return quantized_matmul(y, u, implementation="mosaic")

    for m in (1, 64):
        w = QTensor(shaped((1024, 1024), jnp.int8), shaped((1024, 1), jnp.float32))
        text = lowered(two_layers, shaped((m, 1024), jnp.bfloat16), w, w)
        assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_an_activation_behind_the_product(activation):
    """In each of three schemes in turn; bfloat16 is rounded twice."""
    x, bias = activations((3, 64), jnp.float32), activations((40,), jnp.float32, 2)
    w = rows_of_codes((40, 64), "int8", 3)
    given, dtype, bound = {
        "relu": (as_jax(np.asarray(x), jnp.bfloat16), jnp.bfloat16, 1e-2),
        "gelu": (rows_of_codes((3, 64), "int8"), jnp.float32, 1e-6),
    }.get(activation, (x, jnp.float32, 1e-6))
    reference = functools.partial(quantized_matmul_reference, activation=activation)
    want = jax.jit(reference)(given, w, bias=bias)
    call = functools.partial(quantized_matmul, activation=activation, out_dtype=dtype)
    got = jax.jit(call)(given, w, bias=bias)
    assert got.dtype == dtype and relative_error(got, want) < bound
    lines = explain(quantized_matmul, x, w, activation=activation).splitlines()
    assert lines[0].startswith("quantized_matmul ") and lines[1].startswith(f"{activation} float32")


def test_an_activation_beside_what_else_is_fused():
    """Norm, residual, what is pending, a weight of floats, and the derivative."""
    x, w = activations((3, 64), jnp.float32), rows_of_codes((40, 64), "int8", 3)
    ours = functools.partial(quantized_matmul, activation="gelu_tanh")
    normed = functools.partial(quantized_matmul, x, w, norm=(jnp.ones(64), 1e-5), pending=x)
    product = normed()
    got = normed(activation="gelu_tanh", residual=product[0])
    plain = ours(jnp.eye(40), product[0], residual=product[0].T)  # a weight of floats
    np.testing.assert_allclose(got[0], plain.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[1], 2 * np.asarray(x))
    slope = jax.jit(jax.grad(lambda x, w: jnp.sum(ours(x, w) ** 2)))
    assert relative_error(slope(x, w), slope(x, as_jax(exact(w), jnp.float32))) < 1e-5


def test_unknown_activations_are_refused():
    x, w = jnp.ones((1, 64)), rows_of_codes((4, 64), "int8")
    with pytest.raises(ValueError, match="'nonsense' of a product is not one of relu, gelu, gelu_"):
        quantized_matmul(x, w, activation="nonsense")
    for name in ("nonsense", "relu"):
        with pytest.raises(ValueError, match=f"'{name}' of the gate of swiglu is not one of silu"):
            quantized_matmul(x, w, swiglu=True, activation=name)
        with pytest.raises(ValueError, match=f"swiglu: activation '{name}' is not one of silu"):
            swiglu(x, activation=name)


def test_refusals_name_the_fact():
    w = weights("w4-g128", 144, 2048, jnp.bfloat16)
    x = activations((1, 2048), jnp.float32)
    with pytest.raises(NotImplementedError, match="float32"):
        quantized_matmul(x, w, implementation="mosaic")
    with pytest.raises(ValueError, match="is not 'xla'"):
        quantized_matmul(x, w, implementation="triton")
    with pytest.raises(ValueError, match="K is 64 in x"):
        quantized_matmul(x[:, :64], w)
    with pytest.raises(ValueError, match="bias"):
        quantized_matmul(x, w, bias=jnp.zeros(3))
    rows = rows_of_codes((144, 2048), "int8")
    with pytest.raises(ValueError, match="float8_e4m3fn by int8"):
        quantized_matmul(rows_of_codes((1, 2048), "float8_e4m3fn"), rows)
    with pytest.raises(ValueError, match="16 groups"):
        quantized_matmul(rows, weights("w8-g128", 144, 2048, jnp.bfloat16))
