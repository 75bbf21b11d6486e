"""Experts that a kernel reads from pinned host memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.offload.experts import layout_of, pack
from jaxllama.offload.store import Store
from pallas_kernels import dispatch, quantize
from pallas_kernels.cpu import CpuWeight, prepare_tree
from pallas_kernels.experts import fetch, fetch_kernel
from tests.helpers.warp_emulator import emulated

FIRST = 128  # where the emulator lays the first operand
SCHEMES = {
    "mxfp4": {"dtype": "mxfp4"},
    "nvfp4": {"dtype": "nvfp4"},
    "int4": {"dtype": "int4", "group_size": 32},
    "int4 zeros": {"dtype": "int4", "group_size": 32, "symmetric": False},
    "int8": {"dtype": "int8", "group_size": 32},
    "fp8": {"dtype": "float8_e4m3fn", "group_size": 32},
    "float32": None,
}


def experts_of(scheme: str, shape=(3, 32, 64)):
    """Return (weight, the CPU's layout, its offsets, each expert's bytes)."""
    weight = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    if SCHEMES[scheme] is not None:
        weight = quantize(weight, **SCHEMES[scheme])
    laid = prepare_tree(jax.tree.map(np.asarray, weight))
    assert isinstance(laid, CpuWeight) or scheme == "float32"
    parts, structure = jax.tree.flatten(laid)
    layout = layout_of(parts, structure, "gpu")
    packed = [
        pack(layout, [np.asarray(part)[expert : expert + 1] for part in parts])
        for expert in range(shape[0])
    ]
    shapes = [jax.ShapeDtypeStruct((1, *part.shape[1:]), part.dtype) for part in parts]
    offsets = [leaf.offset for leaf in layout.leaves]
    return weight, structure.unflatten(shapes), offsets, packed


def assert_equal_experts(found, weight, order: list[int]) -> None:
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(weight), strict=True):
        assert got.dtype == want.dtype
        got, want = np.asarray(got)[: len(order)], np.asarray(want)[order]
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_that_the_host_reads_is_as_it_was(tmp_path, scheme):
    weight, like, offsets, packed = experts_of(scheme)
    pinned = {expert: Store(tmp_path).pin(data) for expert, data in enumerate(packed)}
    table = jnp.asarray(fetch.addresses_of(pinned, 3))
    found = fetch.fetched_weight(table, jnp.asarray([2, 0, 3]), like, offsets)
    assert_equal_experts(found, weight, [2, 0])
    factor = jax.tree.leaves(found)[0 if scheme == "float32" else 1]
    assert not np.asarray(factor)[2].view(np.uint8).any()  # no expert: scales of 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernel_copies_and_lays_out_the_listed_experts(monkeypatch, scheme):
    """The experts' bytes stand in the table, behind the addresses."""
    weight, like, offsets, packed = experts_of(scheme)
    data = np.concatenate(packed).view(np.uint64)
    places = FIRST + 8 * (4 + np.arange(3) * len(packed[0]) // 8)
    table = np.concatenate([places.astype(np.uint64), np.zeros(1, np.uint64), data])
    monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)
    with emulated(fetch_kernel):
        found = fetch.fetched_weight(
            jnp.asarray(table.view(np.int32).reshape(-1, 2)),
            jnp.asarray([2, 0, -1], jnp.int32),
            like,
            offsets,
        )
    assert_equal_experts(found, weight, [2, 0])
