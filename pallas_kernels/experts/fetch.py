"""Experts' bytes from pinned host memory, chosen on the device: no host waits for the choice.

    addresses_of(pieces) -> int32 [E, 2]                   of pinned arrays, 0 where there is none
    fetch(addresses, experts[G], nbytes) -> uint8 [G, nbytes]

A GPU reads pinned host memory by the host's own addresses (CUDA's unified addressing). So a kernel
copies the experts that a router has just chosen, in the program that computes with them, at the
link's rate. A transfer begun by the host waits until the host has read the choice. The caller keeps
the pinned arrays while programs that read them run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import hopper_reason


def addresses_of(pieces: Mapping[int, jax.Array], n_experts: int) -> np.ndarray:
    """Return the addresses of pinned arrays as words, low before high: int32 ``[E, 2]``."""
    found = np.zeros(n_experts, np.uint64)
    for expert, piece in pieces.items():
        found[expert] = piece.unsafe_buffer_pointer()
    return found.view(np.int32).reshape(n_experts, 2)


def fetch(addresses: jax.Array, experts: jax.Array, nbytes: int) -> jax.Array:
    """Return the bytes of ``experts [G]``, ``uint8 [G, nbytes]``.

    addresses: int32 ``[E, 2]``, as ``addresses_of`` returns them. nbytes: a multiple of 16.
    An index below 0 or behind the last expert reads nothing: its row may hold anything.
    Where the kernel does not run, the host reads its memory in a callback.
    """
    like = jax.ShapeDtypeStruct((experts.shape[0], nbytes), jnp.uint8)
    if hopper_reason() is not None:
        return jax.pure_callback(_copied, like, addresses, experts, nbytes)
    from pallas_kernels.experts import fetch_kernel

    return fetch_kernel.fetch(addresses, experts, like)


def _copied(addresses: np.ndarray, experts: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    found = np.zeros((len(experts), int(nbytes)), np.uint8)
    own = np.ascontiguousarray(addresses).view(np.uint64).reshape(-1)
    for row, expert in zip(found, np.asarray(experts), strict=True):
        if 0 <= expert < len(own):
            ctypes.memmove(row.ctypes.data, int(own[expert]), row.nbytes)
    return found
