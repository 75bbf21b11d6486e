"""Experts' bytes that a kernel reads from pinned host memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.offload.store import Store
from pallas_kernels.experts import fetch, fetch_kernel
from tests.helpers.warp_emulator import emulated

FIRST = 128  # where the emulator lays the first operand


@pytest.mark.parametrize("nbytes", [64, 16 * (fetch_kernel.PIECE + 3)])
def test_the_kernel_copies_the_listed_experts(monkeypatch, nbytes):
    """The table itself is what is copied: an expert's address is a place in it."""
    count = max(8, nbytes // 8 + 32)
    places = FIRST + 16 * (np.arange(count) % 7)
    table = places.astype(np.uint64).view(np.int32).reshape(count, 2)
    listed = np.array([5, 0, count, 2, -1], np.int32)
    with emulated(fetch_kernel):
        monkeypatch.setattr(fetch, "hopper_reason", lambda: None)
        found = fetch.fetch(jnp.asarray(table), jnp.asarray(listed), nbytes)
    memory = np.concatenate([table.reshape(-1).view(np.uint8), np.zeros(4096, np.uint8)])
    for row, expert in zip(np.asarray(found), listed, strict=True):
        if 0 <= expert < count:
            at = int(places[expert]) - FIRST
            np.testing.assert_array_equal(row, memory[at : at + nbytes])


def test_the_host_reads_the_same_bytes(tmp_path):
    store = Store(tmp_path)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (3, 4096), np.uint8)
    pinned = {expert: store.pin(row) for expert, row in zip((4, 1, 2), data, strict=True)}
    table = jnp.asarray(fetch.addresses_of(pinned, 5))
    found = jax.jit(lambda t, e: fetch.fetch(t, e, 4096))(table, jnp.asarray([2, 4, 5]))
    np.testing.assert_array_equal(found[:2], data[[2, 0]])
