"""The product of one row: the kernel's code on numpy, and the kernel on the GPU."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cards.architecture import TARGET
from pallas_kernels.dispatch import named_plan
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.call import Around, MatmulCall
from pallas_kernels.matmul.few_rows import kernel
from pallas_kernels.matmul.few_rows import plan as planning
from tests.helpers import warp_emulator
from tests.helpers.arrays import as_jax
from tests.helpers.cases import pairwise
from tests.helpers.few_rows import few_rows
from tests.helpers.matmul_cases import (
    activations,
    check,
    exact,
    extras,
    fused_product,
    newest,
    shaped,
    weight,
    wide,
)

CASES = [  # weights, N, K, fused, changes to the plan
    ("plain", 96, 512, "", {}),
    ("plain", 96, 768, "nr", {"loads": 2}),
    ("plain", 160, 1024, "nsb", {}),
    ("plain", 80, 3584, "n", {}),
    ("plain", 96, 512, "ng", {}),
    ("w8-row", 96, 1024, "nsb", {}),
    ("w8-row", 80, 1536, "nr", {"loads": 4}),
    ("w8-row", 81, 512, "", {}),
    ("w4-g128", 96, 1024, "nsb", {}),
    ("w4-g128", 80, 3072, "nr", {"loads": 4}),
    ("w4-g128", 128, 2048, "", {}),
    ("w4-g128-zero", 96, 2048, "nsb", {}),
    ("w4-g128-zero", 80, 3072, "nr", {"loads": 4}),
    ("w4-g128-zero", 80, 3968, "nr", {}),
    ("w4-g64-zero", 80, 2880, "nr", {"loads": 4}),
    ("w4-g32", 96, 1056, "nsb", {}),
    ("w4-g128-zero", 80, 768, "nr", {}),
    ("w4-g64-zero", 96, 640, "nsb", {}),
    ("mxfp4", 96, 1024, "nsb", {}),
    ("mxfp4", 80, 2880, "nr", {"loads": 4}),
    ("nvfp4", 128, 2048, "", {}),
    ("nvfp4", 80, 1056, "nsb", {}),
    ("fp8-block", 96, 1024, "nsb", {}),
    ("fp8-block", 80, 896, "nr", {"loads": 4}),
]


def case(name, n, k, kinds):
    dtype = jnp.bfloat16
    w, x = weight(name, n, k, dtype), activations((1, k), dtype)
    kind = dtype if name == "mxfp4" else jnp.float32
    bias = activations((n,), kind, 2) if "b" in kinds else None
    given = extras(1, n, k, dtype, kinds, jnp.float32 if k % 1024 else dtype)
    # Normed x stays float32 beside these weights, or becomes float16: closer than bfloat16.
    is_close = name in ("plain", "w8-row", "w4-g128", "w4-g128-zero")
    ref = fused_product(wide(x) if is_close else x, w, bias, **given)
    gamma, eps = given.pop("norm", (None, None))
    return x, w, {"bias": bias, "gamma": gamma, "eps": eps, **given}, ref


@newest
@pytest.mark.parametrize("name,n,k,kinds,changes", CASES, ids=str)
def test_emulated(name, n, k, kinds, changes):
    """In turn with one round of rows, and with one SM for all of them."""
    sms = 1 if (n + k // 256) % 2 else 132
    x, w, given, ref = case(name, n, k, kinds)
    plan = dataclasses.replace(planning.divide_row(w, "swiglu" in given), sms=sms, **changes)
    assert sms == 132 or plan.rounds > 1
    with few_rows():
        out = kernel.matmul(x, w, Around(x.dtype, **given), plan)
    check(out, ref, x.dtype)


@newest
@pytest.mark.parametrize("warps", [8, 24])
def test_a_short_last_round_is_shared_by_all_blocks(warps):
    x, w, given, _ = case("mxfp4", 22 * warps, 1024, "nb")
    plan = dataclasses.replace(planning.divide_row(w), sms=max(1, 3 * warps // 16), warps=warps)
    assert plan.rounds > 1 and plan.is_last_short
    with few_rows():
        apart, shared = (
            kernel.matmul(x, w, Around(x.dtype, **given), one)
            for one in (plan, dataclasses.replace(plan, spread=True))
        )
    np.testing.assert_array_equal(apart, shared)


@newest
def test_the_portable_kernel_emulated(monkeypatch):
    monkeypatch.setenv(TARGET, "sm_80")
    test_emulated("w4-g128-zero", 96, 2048, "nsb", {})


SIZES = [(4096, 4096), (6144, 4096), (4096, 14336), (2144, 2048), (34, 1024), (12288, 8192)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "n,k,name,kinds",
    pairwise(SIZES, ["plain", "w8-row", "w4-g128", "w4-g128-zero"], ["", "nr", "nsb", "ng"]),
)
def test_values_on_the_gpu(n, k, name, kinds):
    x, w, given, ref = case(name, n, k, kinds)
    around, plan = Around(x.dtype, **given), planning.divide_row(w, "swiglu" in given)
    call = jax.jit(lambda x, w, around: kernel.matmul(x, w, around, plan))
    first, again = call(x, w, around), call(x, w, around)
    check(first, ref, x.dtype)
    assert (first == again).all()


@pytest.mark.gpu
@pytest.mark.parametrize("n,k", [(5120, 2880), (34, 1056)])
@pytest.mark.parametrize("name", ["w4-g64-zero", "w4-g32"])
def test_small_groups_on_the_gpu(n, k, name):
    test_values_on_the_gpu(n, k - k % 64 if "64" in name else k, name, "nsb")


@pytest.mark.gpu
@pytest.mark.parametrize("n,k,kinds", [(4096, 11008, "nr"), (5120, 768, "n"), (2048, 640, "")])
@pytest.mark.parametrize("name", ["w4-g128", "w4-g128-zero"])
def test_rows_that_end_inside_a_chunk_on_the_gpu(name, n, k, kinds):
    test_values_on_the_gpu(n, k, name, kinds)


def test_what_it_takes():
    def found(n, k, name, rows=1, dtype=jnp.bfloat16, residual=None, swiglu=False):
        w = jax.tree.map(lambda v: shaped((n, *v.shape[1:]), v.dtype), weight(name, 1, k, dtype))
        if residual is not None:
            residual = shaped((rows, n), residual)
        x = shaped((rows, k), dtype)
        return planning.row_plan(MatmulCall.of(x, w, dtype, residual=residual, swiglu=swiglu))

    def no(*args, **more):
        return found(*args, **more).text

    def left_to_xla(*args):
        return "left to XLA" in no(*args) and named_plan(found(*args)) is not None

    sizes = ("plain", 256), ("w8-row", 512), ("w4-g128", 1024), ("w4-g128-zero", 1024)
    for name, k in sizes:
        assert isinstance(found(64, k, name), planning.RowPlan)
        assert isinstance(found(1 << 17, k, name), planning.RowPlan)
        assert f"multiple of {k}" in no(64, k + 128, name)
    assert isinstance(found(64, 11008, "w4-g128"), planning.RowPlan)  # ends inside a chunk
    for name in ("w4-g128", "w4-g128-zero", "w4-g64-zero", "w4-g32"):  # no tiles for such K
        assert isinstance(found(64, 768, name), planning.RowPlan)
    assert "tiles take K = 1536" in no(64, 1536, "w4-g64-zero")
    assert "2 rows" in no(64, 1024, "plain", rows=2)
    assert "float16" in no(64, 1024, "plain", dtype=jnp.float16)
    assert "zeros of bfloat16" in no(64, 1024, "w4-g128-minimum")
    assert "int4" in no(64, 1024, "w8-g128")
    assert "odd" in no(33, 1024, "w4-g128") and left_to_xla(65, 1024, "w8-row")
    assert "behind SwiGLU" in no(64, 1024, "plain", residual=jnp.bfloat16, swiglu=True)
    assert "float32" in no(64, 1024, "plain", residual=jnp.float32)


@newest
@pytest.mark.parametrize(
    "name,n,k,kinds,dtype",
    [(*CASES[i][:4], (jnp.float32, jnp.bfloat16)[i % 2]) for i in (2, 3, 5, 10)],
)
def test_what_is_pending_is_added_and_stored(name, n, k, kinds, dtype):
    """The same bits as with a sum that was rounded before."""
    x, w, given, _ = case(name, n, k, kinds.replace("r", ""))
    pending = activations((1, k), dtype, 9)
    total = as_jax((wide(x) + wide(pending)).astype(np.float32), x.dtype)
    around, plan = Around(x.dtype, **given), planning.divide_row(w, "s" in kinds)
    with few_rows():
        out, stored = kernel.matmul(x, w, dataclasses.replace(around, pending=pending), plan)
        want = kernel.matmul(total, w, around, plan)
    np.testing.assert_array_equal(stored, total)
    np.testing.assert_array_equal(out, want)


def int4_row(k=2048, n=96, zeros=True, seed=3):
    w = weight("w4-g128-zero" if zeros else "w4-g128", n, k, jnp.bfloat16, seed)
    return w, wide(activations((1, k), jnp.bfloat16, seed)).astype(np.float32)


def product_of_row(x, w, **given):
    with few_rows():
        plan = planning.divide_row(w)
        return kernel.matmul(
            as_jax(x, jnp.bfloat16), w, Around(jnp.dtype("float32"), **given), plan
        )


@newest
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("power", [-110, -40, 15, 90])
def test_int4_beside_x_of_any_size(power, zeros):
    """float16 would be infinite from 65,504 on, and 0 below 6e-8."""
    w, x = int4_row(zeros=zeros)
    factor = np.float32(2.0) ** power
    np.testing.assert_array_equal(product_of_row(x * factor, w), product_of_row(x, w) * factor)


@newest
def test_int4_beside_x_of_very_unlike_sizes():
    """Each 256 columns are as precise as bfloat16 down to 2^-31 of their largest value."""
    w, x = int4_row()
    x *= 2.0 ** np.random.default_rng(0).integers(-28, 3, x.shape)
    x[0, ::512] *= 2.0 ** np.linspace(-60, 90, 4)
    x = wide(as_jax(x, jnp.bfloat16)).astype(np.float32)
    want = wide(x) @ exact(w).T
    size = np.abs(wide(x)) @ np.abs(exact(w)).T
    assert (np.abs(wide(product_of_row(x, w)) - want) <= 1e-6 * size).all()


@newest
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_int4_keeps_values_that_are_not_finite(bad):
    w, x = int4_row()
    x[0, 700] = bad
    assert not np.isfinite(product_of_row(x, w)).any()


def test_half_nibbles_are_exact():
    """Every code less every zero, at each of a word's places."""
    codes, zeros = (v.reshape(-1) for v in np.meshgrid(np.arange(-8, 8), np.arange(-8, 8)))
    shifted = [np.roll(codes, i) for i in range(8)]
    words = sum((v.astype(np.uint32) & 15) << np.uint32(4 * i) for i, v in enumerate(shifted))
    offset = (8 + zeros).astype(np.uint32) * np.uint32(0x00010001)
    with mock.patch.object(widen, "p", warp_emulator.registers(256)):
        pairs = widen.half_nibbles(words, offset)
    for i, pair in enumerate(pairs):
        found = np.ascontiguousarray(pair).view(np.float16).reshape(-1, 2).T
        np.testing.assert_array_equal(found, [shifted[i] - zeros, shifted[i + 4] - zeros])
