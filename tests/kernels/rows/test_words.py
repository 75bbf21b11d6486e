"""Records of rows of many arrays: one kernel for all of them, beside XLA's form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.rows import words, words_kernel
from tests.helpers.warp_emulator import emulated

N, PLACES = 5, np.array([3, 2**31 - 1, 0, 5, 4], np.int32)  # two lie past the end
CACHES = {
    "int8": [((16, 2, 128), "int8"), ((16, 2, 1), "float32")] * 3,
    "bfloat16": [((16, 3, 80), "bfloat16")] * 5,
    "float32": [((8, 2, 64), "float32"), ((4, 1, 520), "float32")],
    "int4": [((32, 2, 64), "int4"), ((32, 2, 1), "float16"), ((32, 2, 1), "float16")] * 2,
    "float8": [((16, 2, 128), "float8_e4m3fn"), ((16, 2, 1), "float32")],
    "latent": [((16, 576), "bfloat16"), ((16, 132), "int8")],
    "states": [((4, 64, 64), "float32"), ((3, 48), "bfloat16")],
    "several rounds": [((64, 8, 128), "float32"), ((64, 2), "float16"), ((64, 8, 136), "int8")],
}


def arrays_of(cache: str, seed: int) -> list[jax.Array]:
    draw = np.random.default_rng(seed)
    return [jnp.asarray(draw.integers(-7, 8, (N, *shape)), dtype) for shape, dtype in CACHES[cache]]


@pytest.mark.parametrize("cache", CACHES)
def test_the_kernel_moves_what_xla_moves(monkeypatch, cache):
    arrays, others = arrays_of(cache, 0), arrays_of(cache, 1)
    records = words.gather(others, PLACES)
    expected = words.scatter(arrays, PLACES, records)
    monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)
    monkeypatch.setattr(words_kernel, "PARTS", 2)
    with emulated(words_kernel):
        taken = words.gather(others, jnp.asarray(PLACES))
        found = words.scatter(arrays, jnp.asarray(PLACES), records)
    for place, got, want in zip(PLACES, taken, records, strict=True):
        if place < N:
            np.testing.assert_array_equal(got, want)
    for got, want, before in zip(found, expected, arrays, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(words.words_of(got), words.words_of(want))
        assert (words.words_of(got) != words.words_of(before)).any()


def test_rows_of_odd_sizes_have_no_kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)
    arrays = [jnp.arange(20, dtype=jnp.int8).reshape(5, 4)]
    records = words.gather(arrays, np.array([3]))
    (found,) = words.scatter(arrays, np.array([1]), records)
    np.testing.assert_array_equal(found, np.asarray(arrays[0])[[0, 3, 2, 3, 4]])
