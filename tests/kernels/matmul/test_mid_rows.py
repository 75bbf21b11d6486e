"""Products of 17 to 256 rows without wgmma: the kernel's code on numpy, its plans by card, and on a
GPU its values against float64.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cards.architecture import BY_NAME, TARGET
from pallas_kernels.dispatch import Reason
from pallas_kernels.matmul import choice
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.mid_rows import kernel
from pallas_kernels.matmul.mid_rows import plan as planning
from pallas_kernels.matmul.mid_rows.plan import MidTile
from pallas_kernels.qtensor import QTensor
from tests.helpers import instructions, warp_emulator
from tests.helpers.arrays import as_jax
from tests.helpers.cases import pairwise
from tests.helpers.kernel_cases import product as product_case
from tests.helpers.matmul_cases import activations, check, error, newest, product, weights
from tests.helpers.warp_emulator import emulated

LLAMA = ((14336, 4096), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
OTHERS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_100", "sm_103", "sm_120", "sm_121")


def codes(rows, k, seed=0, scale_dtype=jnp.float32) -> QTensor:
    """int8 with a scale a row; the first row has the largest sums."""
    rng = np.random.default_rng(seed)
    q = rng.integers(-127, 128, (rows, k))
    q[0] = 127
    return QTensor(as_jax(q, jnp.int8), as_jax(rng.uniform(0.01, 0.03, (rows, 1)), scale_dtype))


def operands(name, m, n, k, dtype):
    scale_dtype = jnp.float32 if name == "w8a8" else dtype
    bias = activations((n,), jnp.bfloat16, 2)
    if name == "w8a8":
        return codes(m, k, 1), codes(n, k, 2, scale_dtype), bias
    return activations((m, k), dtype), weights(name, n, k, scale_dtype), bias


EMULATED = [  # weights, rows, tile, dtype; the last tiles of x and w are not whole
    ("w4-g128", 33, MidTile(32, 64, 2, 1, 3), "bfloat16"),
    ("w4-g128-zero", 66, MidTile(128, 128, 1, 1, 2), "bfloat16"),
    ("w4-g32", 20, MidTile(32, 64, 2, 1, 2), "bfloat16"),
    ("w4-g64-zero", 20, MidTile(32, 128, 1, 1, 2), "bfloat16"),
    ("w4-g32-minimum", 20, MidTile(32, 64, 2, 1, 4), "bfloat16"),
    ("w4-row", 20, MidTile(32, 64, 2, 1, 2), "float16"),
    ("w8-row", 40, MidTile(64, 128, 2, 4, 3), "bfloat16"),
    ("w8-row", 20, MidTile(32, 64, 2, 1, 5), "float16"),
    ("w8-g32", 20, MidTile(32, 64, 2, 1, 2), "bfloat16"),
    ("mxfp4", 20, MidTile(32, 64, 2, 1, 2), "bfloat16"),
    ("nvfp4", 20, MidTile(32, 128, 2, 2, 2), "bfloat16"),
    ("fp8-block", 20, MidTile(32, 64, 2, 1, 2), "bfloat16"),
    ("fp8-row", 20, MidTile(32, 64, 2, 1, 2), "float16"),
]


@newest
@pytest.mark.parametrize("name, m, tile, dtype", EMULATED, ids=str)
def test_the_kernel_s_code_on_numpy(name, m, tile, dtype, monkeypatch):
    from pallas_kernels.matmul import widen
    from pallas_kernels.matmul.mid_rows import mid_program

    monkeypatch.setenv(TARGET, "sm_80")
    x, w, bias = operands(name, m, 96, 256, dtype)
    with emulated(mid_program, widen):
        y = kernel.matmul(x, w, bias, jnp.dtype(dtype), tile)
    check(y, product(x, w, bias), dtype)


@newest
@pytest.mark.parametrize("parts", [1, 2])
def test_codes_by_codes_are_exact_on_numpy(parts, monkeypatch):
    from pallas_kernels.matmul import widen
    from pallas_kernels.matmul.mid_rows import mid_program

    monkeypatch.setenv(TARGET, "sm_80")
    x, w, _ = operands("w8a8", 33, 96, 2048, "float32")
    with emulated(mid_program, widen):
        y = kernel.matmul(x, w, None, jnp.dtype("float32"), MidTile(32, 64, 2, parts, 3))
    sums = np.asarray(x.q, np.int64) @ np.asarray(w.q, np.int64).T
    want = sums.astype(np.float32) * (np.asarray(x.scale) * np.asarray(w.scale)[:, 0])
    np.testing.assert_array_equal(y, want)


def check_banks(address, size: int, mask) -> None:
    """Lanes that memory serves at a time have different words in different banks, or one word."""
    at_once = min(32, 128 // size)
    words = np.asarray(address)[:, None] // 4 + np.arange(size // 4)
    for words_of, lanes in zip(
        words.reshape(-1, at_once * size // 4), mask.reshape(-1, at_once), strict=True
    ):
        found = np.unique(words_of[np.repeat(lanes, size // 4)])
        assert len(np.unique(found % 32)) == len(found)


@newest
@pytest.mark.parametrize("name", ["w4-g128", "w8-row", "w8a8"])
def test_no_access_of_shared_memory_has_a_bank_conflict(name, monkeypatch):
    from pallas_kernels.matmul import widen
    from pallas_kernels.matmul.mid_rows import mid_program

    sizes = {".v4": 16, ".v2": 8, "ldmatrix": 16, "cp.async": 16}
    watched = "ld.shared", "st.shared", "ldmatrix", "cp.async.cg"
    for instruction, meaning in [*instructions.MEANING.items()]:
        if instruction.startswith(watched):
            size = next((n for part, n in sizes.items() if part in instruction), 4)

            def run(block, address, *rest, meaning=meaning, size=size):
                check_banks(address, size, block.masks[-1])
                return meaning(block, address, *rest)

            monkeypatch.setitem(instructions.MEANING, instruction, run)
    monkeypatch.setenv(TARGET, "sm_80")
    x, w, _ = operands(name, 32, 64, 256, "bfloat16")
    warp_emulator._program.cache_clear()
    try:
        with emulated(mid_program, widen):
            kernel.matmul(x, w, None, jnp.dtype("bfloat16"), MidTile(32, 64, 2, 1, 2))
    finally:
        warp_emulator._program.cache_clear()


@functools.cache
def llama_calls() -> list[MatmulCall]:
    schemes = ("int4", None), ("int8", None), ("int8", "int8")
    return [
        MatmulCall.of(*product_case(m, *given, shape=shape)[1], jnp.bfloat16)
        for shape, m, given in itertools.product(LLAMA, (17, 64, 256), schemes)
    ]


@pytest.mark.parametrize("arch", OTHERS)
def test_every_llama_product_has_a_tile(arch, monkeypatch):
    monkeypatch.setenv(TARGET, arch)
    for call in llama_calls():
        tile, step = planning.plan(call), planning.MidStep.of(call)
        assert isinstance(tile, MidTile), call
        assert tile.shared_bytes(step) < BY_NAME[arch].shared_bytes
        assert tile.warps % 4 == 0 and (call.k // step.columns) % tile.parts == 0
        # A thread copies whole pieces of rows, and no more threads than pieces.
        for rows, pitch in ((tile.tokens, step.x_pitch), (tile.rows, step.w_pitch)):
            assert rows * pitch % (16 * 32 * tile.warps) == 0


def test_the_choice_is_the_shortest_time(monkeypatch):
    call = MatmulCall.of(*product_case(64, "int4")[1], jnp.bfloat16)
    assert planning.plan(call) == Reason("")  # Hopper has kernels of its own
    monkeypatch.setenv(TARGET, "sm_80")
    found = choice.plan(call)
    assert isinstance(found, MidTile) and found.predicted_us < found.xla_us
    few = dataclasses.replace(call, m=16)
    assert planning.plan(few) == planning.plan(dataclasses.replace(call, m=257)) == Reason("")


def test_what_the_kernel_refuses_is_said(monkeypatch):
    monkeypatch.setenv(TARGET, "sm_89")

    def reason(name="w4-g128", n=64, k=512, dtype="bfloat16", out=None):
        x, w, _ = operands(name, 2, n, k, dtype)
        found = planning.plan(dataclasses.replace(MatmulCall.of(x, w, out or dtype), m=64))
        return found.text if isinstance(found, Reason) else None

    assert reason() is None
    assert "N = 40, not a multiple of 32" in reason(n=40)
    assert "K = 192, not a multiple of 128" in reason("w4-g64-zero", k=192)
    assert "x is float16" in reason(dtype="float16")
    assert "would be float32" in reason(out="float32")
    assert reason("w8-row", k=192, out="float32") is None
    assert "int8 codes with zero points" in reason("w8-g64-zero")
    assert reason("mxfp4") is None and "x is float16" in reason("nvfp4", dtype="float16")


ON_GPU = pairwise(
    ["w8a8", *dict.fromkeys(name for name, *_ in EMULATED)],
    (17, 40, 130, 256),
    ((1056, 4096), (480, 5632)),
    ("sm_80", "sm_89"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("name, m, n, k, target", ON_GPU)
def test_values_on_the_gpu(name, m, n, k, target, monkeypatch):
    monkeypatch.setenv(TARGET, target)
    dtype = "float16" if name.endswith("row") and m == 40 else "bfloat16"
    x, w, bias = operands(name, m, n, k, dtype)
    tile = planning.plan(MatmulCall.of(x, w, dtype, bias=bias))
    assert isinstance(tile, MidTile)
    check(kernel.matmul(x, w, bias, jnp.dtype(dtype), tile), product(x, w, bias), dtype)


def some_tiles():
    """A tile of each shape, number of parts and of stages; not all of their combinations."""
    shapes = (64, 2), (128, 1), (128, 2), (256, 1)
    return [
        MidTile(tokens, *shapes[i % 4], (1, 2, 4)[i % 3], (2, 3, 4)[(i + j) % 3])
        for j, tokens in enumerate((32, 64, 128))
        for i in range(4)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4-g128-zero", "w8-row", "w8a8"])
@pytest.mark.parametrize("tile", some_tiles(), ids=str)
def test_every_tile_on_the_gpu(name, tile, monkeypatch):
    monkeypatch.setenv(TARGET, "sm_80")
    m, n, k = 150, 416, 2048
    x, w, bias = operands(name, m, n, k, "bfloat16")
    if tile.shared_bytes(planning.MidStep.of(MatmulCall.of(x, w, jnp.bfloat16))) > 160 * 1024:
        tile = dataclasses.replace(tile, stages=2)
    y = kernel.matmul(x, w, bias, jnp.dtype("bfloat16"), tile)
    check(y, product(x, w, bias), "bfloat16")
    again = kernel.matmul(x, w, bias, jnp.dtype("bfloat16"), tile)
    np.testing.assert_array_equal(y, again)


@pytest.mark.gpu
def test_codes_by_codes_are_exact_on_the_gpu(monkeypatch):
    monkeypatch.setenv(TARGET, "sm_80")
    x, w, _ = operands("w8a8", 64, 4096, 14336, "float32")
    tile = planning.plan(MatmulCall.of(x, w, jnp.float32))
    y = kernel.matmul(x, w, None, jnp.dtype("float32"), tile)
    assert error(y, product(x, w)) < 1e-7
