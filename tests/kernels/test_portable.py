"""The instructions that an older target lacks compute the same bits by others, and plans keep to
what the target has.  The portable kernels' values are beside those of the others, emulated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.cards.architecture import ARCHITECTURES, FEATURES, TARGET, nearest
from pallas_kernels.device import card_of, gpu, lacking
from tests.helpers import warp_emulator

NEWEST = jax.__version_info__ >= (0, 11, 2)
newest = pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")


@newest
@pytest.mark.parametrize("name", ["add_pairs", "sub_pairs", "mul_pairs"])
def test_pairs_have_the_same_bits(name, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(2 * 256).astype(jnp.bfloat16) for _ in "xy")
    x[:4], y[:4] = [0.0, -0.0, 0.0, 1.0], [1.0, 2.0, -0.0, 1.0]
    words = [v.view(np.uint32) for v in (x, y)]
    own = getattr(warp_emulator.registers(256), name)(*words)
    monkeypatch.setenv(TARGET, "sm_80")
    portable = getattr(warp_emulator.registers(256), name)(*words)
    np.testing.assert_array_equal(portable, own)


@newest
def test_float8_has_the_same_bits(monkeypatch):
    monkeypatch.setenv(TARGET, "sm_86")
    p = warp_emulator.registers(256)
    codes = np.arange(256, dtype=np.uint32)
    low, high = p.from_e4m3(codes | codes[::-1] << np.uint32(8))
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(low, values)
    np.testing.assert_array_equal(high, values[::-1])
    rng = np.random.default_rng(0)
    near = np.concatenate([values, values * np.float32(1 + 2**-4), rng.standard_normal(256) / 64])
    between = np.sort(values[np.isfinite(values)])
    ties = (between[1:] + between[:-1]) / 2
    given = np.concatenate([near, ties, [1e9, -1e9, 2.0**-11, 0.015624999]]).astype(np.float32)
    for first in range(0, len(given) - 255, 101):
        x = given[first : first + 256]
        want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        both = p.to_e4m3(x, x[::-1].copy())
        np.testing.assert_array_equal(both & np.uint32(255), want & 255)
        np.testing.assert_array_equal(both >> np.uint32(8), want[::-1])


def test_a_target_limits_what_plans_use(monkeypatch):
    assert gpu().arch == "sm_90" and lacking(*FEATURES) == "sm_90 has no tcgen05"
    monkeypatch.setenv(TARGET, "sm_89")
    assert gpu().arch == "sm_89" and gpu().shared_bytes == 99 * 1024
    assert lacking("clusters") == "sm_89 has no clusters"
    monkeypatch.setenv(TARGET, "sm_91")
    with pytest.raises(ValueError, match="JAXLLAMA_TARGET=sm_91 is none of sm_80, "):
        gpu()


def test_a_target_on_a_newer_card_is_what_both_have():
    by_name = {one.name: one for one in ARCHITECTURES}
    both = by_name["sm_90"].limited(by_name["sm_120"])
    assert both.name == "sm_120 on sm_90" and both.shared_bytes == 99 * 1024
    assert both.clusters and both.bulk_copies and not both.wgmma and not both.tcgen05


def test_costs_are_scaled_to_a_card(monkeypatch):
    families = "row int4", "xla float"
    own = [gpu().costs[family] for family in families]
    monkeypatch.setenv(TARGET, "sm_80")
    scaled = [gpu().costs[family] for family in families]
    for x, y in zip(own, scaled, strict=True):
        assert x.start == y.start and x.serial == y.serial
    row, product = scaled
    np.testing.assert_allclose(row.shared[0], 4800 / 2039 / 4.3)  # a copy's microseconds a MB
    # The planner counts the busiest multiprocessor's work; all of them share XLA's product.
    assert row.shared[1] == own[0].shared[1]
    np.testing.assert_allclose(product.shared[1] / own[1].shared[1], 132 / 108)
    assert product.shared[2] == own[1].shared[2]
    assert gpu().costs["experts mosaic int4"].serial == (1.49,)


def test_an_unknown_card_is_the_nearest_below():
    assert nearest("8.9").name == "sm_89" and nearest("11.0").name == "sm_103"
    assert nearest("7.5") is None and nearest("gfx942") is None and nearest("13.0").name == "sm_121"
    card, arch = card_of("NVIDIA Something New", "12.7")
    assert (card.name, arch.name) == ("NVIDIA GB10", "sm_121")
    card, arch = card_of("NVIDIA GeForce RTX 4090", "8.9")
    assert (card.sms, arch.name) == (128, "sm_89")
