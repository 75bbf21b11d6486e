"""W4A8: int4 weights times activations in 8 bits: the grid in two levels, the XLA form and the
unpacking anywhere, the kernel lowered at real shapes, and on a GPU its values."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dequantize, quantize
from pallas_kernels.dispatch import Reason
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.call import Around, MatmulCall
from pallas_kernels.matmul.many_rows import kernel, unpack
from pallas_kernels.matmul.many_rows import plan as planning
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rounding import multiples
from tests.helpers import warp_emulator
from tests.helpers.arrays import as_jax
from tests.helpers.cases import pairwise
from tests.helpers.matmul_cases import error, exact, lowered, newest, product, shaped
from tests.helpers.matmul_cases import wide as floats
from tests.kernels.matmul.test_quantized_matmul_prefill import BF16, F32, I4, I8, LLAMA

F8 = jnp.float8_e4m3fn


@pytest.fixture
def emulated():
    with contextlib.ExitStack() as patches:
        yield patches


def operands(m, n, k, *, zeros=True, levels=2, codes="int8", group=128, seed=0):
    """Any codes; scales in two levels so that (q - zero) * scale is int8."""
    rng = np.random.default_rng(seed)
    shape, one = (n, k // group), levels == 1
    scale = rng.uniform(0.01, 0.03, shape) if one else rng.integers(1, 9 if zeros else 16, shape)
    w = QTensor(
        as_jax(rng.integers(-8, 8, (n, k)), I4),
        as_jax(scale, BF16 if one else I8),
        as_jax(rng.integers(-8, 8, shape), I8) if zeros else None,
        unit=None if one else as_jax(rng.uniform(0.001, 0.003, (n, 1)), F32),
    )
    x = np.clip(rng.normal(0, 45, (m, k)), -127, 127)
    x = as_jax(np.round(x) if codes == "int8" else x, codes)
    x = QTensor(x, as_jax(rng.uniform(0.01, 0.03, (m, 1)), F32))
    return x, w, as_jax(rng.normal(size=n), BF16)


@pytest.mark.parametrize("zeros", [False, True])
def test_scales_in_two_levels(zeros):
    """Weights are int8 whatever the code; kept scales stay; the error hardly grows."""
    rng = np.random.default_rng(1)
    w = rng.normal(size=(64, 512)) * np.exp(rng.normal(0, 0.7, (64, 1)))
    w[5], w[6, :128] = 0, 0
    w = as_jax(w, F32)
    made = jax.jit(
        functools.partial(quantize, dtype="int4", group_size=128, symmetric=not zeros),
        static_argnames="scale_dtype",
    )
    t, one = made(w, scale_dtype="int8"), made(w)
    assert t.scale.dtype == jnp.int8 and t.unit.shape == (64, 1) and t.unit.dtype == F32
    below = 8 if t.zero is None else floats(t.zero) + 8
    assert (below * floats(t.scale) <= 128).all() and ((15 - below) * floats(t.scale) <= 127).all()
    np.testing.assert_allclose(dequantize(t), exact(t), rtol=1e-6)
    assert not exact(t)[5].any() and not exact(t)[6, :128].any()
    assert (floats(t.scale)[6, 1:] > 0).all() and (floats(t.scale)[5] == 0).all()
    again = multiples(t.in_one_level.scale, t.zero)
    np.testing.assert_array_equal(again[0], t.scale)
    np.testing.assert_allclose(again[1], t.unit, rtol=1e-6)
    errors = [np.mean((exact(v) - floats(w)) ** 2) for v in (t, one)]
    assert errors[0] < 1.05 * errors[1]
    rows = t.rows(as_jax([3, 1]))
    np.testing.assert_array_equal(exact(rows), exact(t)[[3, 1]])


@pytest.mark.core
@pytest.mark.parametrize(
    "codes,levels,m,n,k,group,zeros",
    [
        ("int8", 2, 3, 24, 512, 128, True),
        ("int8", 2, 1, 17, 192, 64, False),
        ("int8", 1, 1, 17, 192, 64, True),
        ("int8", 1, 3, 24, 512, 128, False),
        ("float8_e4m3fn", 1, 3, 24, 512, 128, True),
        ("float8_e4m3fn", 1, 1, 17, 192, 64, False),
    ],
)
def test_the_xla_form(m, n, k, group, codes, levels, zeros):
    """int8 sums are exact; what is left is float32's rounding of scales."""
    x, w, bias = operands(m, n, k, zeros=zeros, levels=levels, codes=codes, group=group)
    call = functools.partial(quantized_matmul, out_dtype=F32, implementation="xla")
    out = jax.jit(call)(x, w, bias=bias)
    assert error(out, product(x, w, bias)) < (2e-7 if levels == 2 else 1e-6)
    rows = [np.asarray(part) for part in (x.q, x.scale)]
    rows = [as_jax(np.stack([part, part[::-1]])) for part in rows]
    both = jax.jit(jax.vmap(lambda q, s: call(QTensor(q, s), w)))(*rows)
    np.testing.assert_allclose(both[1], both[0][::-1], rtol=1e-6)
    floating = jax.jit(call)(as_jax(exact(x), F32), w)
    np.testing.assert_allclose(floating, product(x, w), rtol=1e-3, atol=1e-3)


def test_gradients_reach_the_scales():
    x, w, _ = operands(2, 16, 256)

    def total(scale, unit):
        parts = dataclasses.replace(x, scale=scale), dataclasses.replace(w, unit=unit)
        return quantized_matmul(*parts, out_dtype=F32).sum()

    dscale, dunit = jax.jit(jax.grad(total, argnums=(0, 1)))(x.scale, w.unit)
    out = product(x, w)
    np.testing.assert_allclose(dscale[:, 0], out.sum(1) / floats(x.scale)[:, 0], rtol=1e-4)
    np.testing.assert_allclose(dunit[:, 0], out.sum(0) / floats(w.unit)[:, 0], rtol=1e-4)


def test_parts_that_do_not_fit_are_named():
    x, w, _ = operands(2, 16, 256)
    with pytest.raises(ValueError, match="w.unit is missing|not float32"):
        quantized_matmul(x, dataclasses.replace(w, unit=None))
    with pytest.raises(ValueError, match="w.unit"):
        quantized_matmul(x, dataclasses.replace(w, unit=w.unit[:3]))
    floating = jnp.ones(w.scale.shape, F32)
    with pytest.raises(ValueError, match="integer zeros"):
        quantized_matmul(x, QTensor(w.q, floating, floating))
    eight = QTensor(jnp.ones((2, 256), F8), x.scale), QTensor(jnp.ones((16, 256), I8), w.unit)
    with pytest.raises(ValueError, match="float8_e4m3fn by int8"):
        quantized_matmul(*eight)


ZEROS = (None, *range(-8, 8))


@pytest.fixture
def codes_of_half_words(emulated):
    """(two half words of packed codes, the codes); the unpacking runs on the emulator."""
    emulated.enter_context(warp_emulator.running_on(warp_emulator.Block(4096, 0), unpack))
    halves = np.random.default_rng(0).integers(0, 1 << 16, (2, 4096)).astype(np.uint32)
    codes = np.stack([halves >> np.uint32(4 * i) & np.uint32(15) for i in range(4)], -1)
    codes = np.concatenate(list(codes.astype(np.int64)), 1)  # [4096, 8], of both words
    return halves, np.where(codes > 7, codes - 16, codes)


def bytes_of(halves, make, zero, dtype, *more):
    held = None if zero is None else np.full(4096, zero & 0xFFFFFFFF, np.uint32)
    with np.errstate(over="ignore"):
        made = unpack.eight(*halves, make(held, *more))
    return np.concatenate([word.view(np.dtype(dtype)).reshape(-1, 4) for word in made], 1)


@pytest.mark.core
def test_every_code_unpacks_to_its_byte(codes_of_half_words):
    """All codes with all multiples and zeros that a grid has, in 32-bit words on numpy."""
    halves, codes = codes_of_half_words
    for zero in ZEROS:
        shift = 0 if zero is None else zero
        scale, held = jnp.ones((1, 1)), None if zero is None else jnp.full((1, 1), zero, jnp.int8)
        most = int(multiples(scale, held)[0][0, 0])
        for multiple in range(most + 1):
            factor = np.full(4096, multiple, np.uint32)
            got = bytes_of(halves, unpack.multiplied, zero, I8, factor)
            np.testing.assert_array_equal(got, (codes - shift) * multiple)


def test_every_code_unpacks_to_a_step(codes_of_half_words):
    """Code less zero, as int8 and as e4m3."""
    halves, codes = codes_of_half_words
    for zero in (*ZEROS, 8):
        steps = codes - (zero or 0)
        got = bytes_of(halves, unpack.multiplied, zero, I8)
        np.testing.assert_array_equal(got, steps)
        got = bytes_of(halves, unpack.signed, zero, F8).astype(np.float32)
        np.testing.assert_array_equal(got, steps * unpack.E4M3_STEP)


def test_every_byte_is_two_floats(emulated):
    """For the 16-bit operand: exact, and rounded once by the scale."""
    emulated.enter_context(warp_emulator.running_on(warp_emulator.Block(256, 0), unpack))
    byte, scale = np.arange(256, dtype=np.uint32), np.float32(as_jax(0.0137, BF16))
    scales = np.full((256, 2), scale).astype(np.dtype(BF16)).view(np.uint32)[:, 0]
    codes = np.stack([byte & 15, byte >> 4], 1).astype(np.int64)
    for zero in ZEROS:
        held = None if zero is None else np.full(256, zero & 0xFFFFFFFF, np.uint32)
        with np.errstate(over="ignore"):
            made = unpack.pair(byte, scales, unpack.below_of(held), None)
        steps = np.where(codes > 7, codes - 16, codes) - (zero or 0)
        got = made.view(np.uint16).view(np.dtype(BF16)).reshape(256, 2)
        np.testing.assert_array_equal(got, (steps * scale).astype(np.dtype(BF16)))


@pytest.mark.parametrize("kind", ["e8m0", "e4m3"])
def test_every_byte_is_two_float4_codes_with_every_scale(kind, emulated):
    """Exact: the products of codes and scales, and 2^-32."""
    emulated.enter_context(warp_emulator.running_on(warp_emulator.Block(256, 0), widen))
    byte = np.arange(256, dtype=np.uint32)
    values = np.stack([byte & 15, byte >> 4], 1).astype(np.uint8)
    values = values.view(np.dtype(jnp.float4_e2m1fn)).astype(np.float32)
    dtype = jnp.float8_e8m0fnu if kind == "e8m0" else jnp.float8_e4m3fn
    factor_of = widen.e8m0_factor if kind == "e8m0" else widen.e4m3_factor
    for code in range(60, 161) if kind == "e8m0" else range(127):
        scale = np.uint8(code).view(np.dtype(dtype)).astype(np.float32)
        factor = factor_of(np.full(256, code, np.uint32))
        selector = np.full(256, widen.FLOAT4_BYTE + 0x1111, np.uint32)
        made = widen.p.mul_pairs(widen.float4_neighbours(byte << 8, selector), factor)
        got = made.view(np.uint16).view(np.dtype(BF16)).reshape(256, 2).astype(np.float32)
        np.testing.assert_array_equal(got * np.float32(widen.FLOAT4_REST), values * scale)
    # The scales of 64 columns in one word.
    word = np.random.default_rng(0).integers(60, 127, (4, 256), dtype=np.uint32)
    together = word[0] | word[1] << 8 | word[2] << 16 | word[3] << 24
    for one, got in zip(word, widen.factors_of_64(kind, together), strict=False):
        np.testing.assert_array_equal(got, factor_of(one))


def test_every_float8_code_is_its_float(emulated):
    emulated.enter_context(warp_emulator.running_on(warp_emulator.Block(256, 0), widen))
    code = np.arange(256, dtype=np.uint32)
    finite = (code & 127) != 127
    want = code.astype(np.uint8).view(np.dtype(jnp.float8_e4m3fn)).astype(np.float32)
    for kind, dtype in (("bf16", BF16), ("f16", jnp.float16)):
        # Bytes 3 and 1, with their signs.
        made = widen.float8_pair(code << 24 | code[::-1] << 8, 0x91B3, kind)
        got = made.view(np.uint16).view(np.dtype(dtype)).reshape(256, 2).astype(np.float32)
        np.testing.assert_array_equal(got[finite, 0], want[finite])
        np.testing.assert_array_equal(got[finite[::-1], 1], want[::-1][finite[::-1]])


def call_of(m, n, k, *, levels=2, codes=I8, group=128, zeros=True, out=BF16):
    groups = n, k // group
    unit = shaped((n, 1), F32) if levels == 2 else None
    scale = shaped(groups, I8 if levels == 2 else BF16)
    w = QTensor(shaped((n, k), I4), scale, shaped(groups, I8) if zeros else None, unit=unit)
    x = QTensor(shaped((m, k), codes), shaped((m, 1), F32))
    return x, w, MatmulCall.of(x, w, out)


@newest
@pytest.mark.parametrize(
    "n,k,m,levels,codes",
    [
        (*LLAMA[0], 1, 2, I8),
        (*LLAMA[1], 64, 1, I8),
        (*LLAMA[2], 256, 1, F8),
        (*LLAMA[4], 8191, 2, F8),
        (*LLAMA[5], 8191, 2, I8),
    ],
)
def test_lowers_at_real_shapes(n, k, m, levels, codes):
    x, w, call = call_of(m, n, k, levels=levels, codes=codes, zeros=m != 64)
    plan = planning.int4_plan(call)
    assert plan.block == (256 if m <= 64 and levels == 2 and codes == I8 else planning.CODES_K)
    tile = plan.divide(call)
    assert "mosaic_gpu" in lowered(lambda x, w: kernel.matmul(x, w, Around(BF16), tile), x, w)


def test_calls_without_an_operand_of_8_bits():
    def found(*args, **more):
        return planning.int4_plan(call_of(*args, **more)[2])

    assert found(64, 64, 2048).block == 256
    assert found(65, 64, 2048).block == planning.CODES_K
    for more in ({"levels": 1}, {"codes": F8}, {"codes": F8, "levels": 1}):
        assert found(64, 64, 2048, **more).block == planning.CODES_K
    # In bfloat16: groups that no slot holds, rows of scales that are no box.
    for k, more in ((2048, {"group": 64}), (1024, {"levels": 1})):
        assert found(64, 64, k, **more).block == planning.BLOCK_K
    for args, more, fact in (
        ((64, 60, 2048), {}, "N = 60"),
        ((64, 64, 1024), {}, "8 groups, not"),
        ((64, 64, 2048), {"out": F32}, "float32"),
    ):
        reason = found(*args, **more)
        assert isinstance(reason, Reason) and fact in reason.text


def test_a_tile_for_each_shape():
    """Rows of w in a tile, and parts of K: those that were measured to be shortest."""
    shapes = (14336, 4096), (28672, 4096), (4096, 14336), (4096, 4096)
    plans = [planning.int4_plan(call_of(64, n, k)[2]) for n, k in shapes]
    assert [(plan.rows, plan.split) for plan in plans] == [(128, 1), (256, 1), (64, 2), (64, 2)]
    few = planning.int4_plan(call_of(32, *shapes[0])[2])
    assert (plans[0].parts, few.parts, few.rows) == (1, 2, 128)
    assert all(plan.block == 256 for plan in plans)
    # Scales of all groups of a row, for 256 rows twice, would leave no room for three slots.
    assert planning.int4_plan(call_of(64, 28672, 32768)[2]).rows == 64


@pytest.mark.gpu
@pytest.mark.parametrize(
    "m,n,k,levels,codes",
    pairwise(
        [1, 17, 64, 100, 300, 2048],
        [(4096, 4096), (1000, 2048), (4096, 14336), (14336, 2048), (28672, 2048)],
        [(2, "int8"), (1, "int8"), (1, F8.__name__), (2, F8.__name__)],
    ),
)
def test_values_on_the_gpu(m, n, k, levels, codes):
    for zeros in (False, True):
        x, w, bias = operands(m, n, k, zeros=zeros, levels=levels, codes=codes, seed=m)
        call = jax.jit(
            lambda x, w, b: quantized_matmul(x, w, bias=b, out_dtype=BF16, implementation="mosaic")
        )
        first = call(x, w, bias)
        assert error(first, product(x, w, bias)) < 2.5e-3
        assert (first == call(x, w, bias)).all()
