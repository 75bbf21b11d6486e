"""An empty cache takes no memory until it is written."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.engine import lazy_zeros

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's madvise")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_zeros_take_memory_as_they_are_written():
    write = jax.jit(lambda x, at: x.at[at].set(1.0), donate_argnums=0)
    shape = jax.ShapeDtypeStruct((64, 2**18), np.float32)
    jax.block_until_ready(write(jnp.zeros(shape.shape), 0))  # compiled
    before = resident()
    array = lazy_zeros.zeros(shape)
    place = array.unsafe_buffer_pointer()
    array = write(array, 5)
    assert array.unsafe_buffer_pointer() == place, "the same memory, donated"
    assert resident() - before < 0.2 * array.nbytes
    found = np.asarray(array)
    assert found[5].min() == 1.0 and not found[:5].any() and not found[6:].any()
    assert not np.asarray(lazy_zeros.zeros(jax.ShapeDtypeStruct((3,), np.int8))).any()
