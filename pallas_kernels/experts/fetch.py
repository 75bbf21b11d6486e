"""Experts from pinned host memory, chosen on the device: no host waits for the choice.

    addresses_of(pieces) -> int32 [E, 2]                   of pinned arrays, 0 where there is none
    fetch(addresses, experts[G], leaves) -> arrays [G, bytes / 4] int32 or [G, bytes] uint8
    fetched_weight(addresses, experts[G], like, offsets) -> weight [G, out, in]

A GPU reads pinned host memory by the host's own addresses (CUDA's unified addressing). So a kernel
copies the experts that a router has just chosen, in the program that computes with them, at the
link's rate. A transfer begun by the host waits until the host has read the choice. The caller keeps
the pinned arrays while programs that read them run.

An expert's parts (codes, scales, zeros) lie behind each other in its bytes. A weight in the layout
of the CPU's handlers (``cpu.weight``) becomes rows on the way. XLA takes 0.19 ms on an H200 to lay
out 13 MB of it, beside 0.29 ms for the link.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.cpu.weight import TILE, CpuWeight, restore
from pallas_kernels.experts.fetch_layout import FetchedLeaf, fetched_leaves
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rounding import NIBBLES


def addresses_of(pieces: Mapping[int, jax.Array], n_experts: int) -> np.ndarray:
    """Return the addresses of pinned arrays as words, low before high: int32 ``[E, 2]``."""
    found = np.zeros(n_experts, np.uint64)
    for expert, piece in pieces.items():
        found[expert] = piece.unsafe_buffer_pointer()
    return found.view(np.int32).reshape(n_experts, 2)


def fetch(
    addresses: jax.Array, experts: jax.Array, leaves: Sequence[FetchedLeaf]
) -> list[jax.Array]:
    """Return the parts of ``experts [G]``, each as ``FetchedLeaf.like`` says.

    addresses: int32 ``[E, 2]``, as ``addresses_of`` returns them.
    An index below 0 or behind the last expert reads nothing; its floats are zeros. Any other must
    have an address.
    Where the kernel does not run, the host reads its memory in a callback.
    """
    out = [leaf.like(experts.shape[0]) for leaf in leaves]
    if dispatch.hopper_reason() is None:
        from pallas_kernels.experts import fetch_kernel

        return fetch_kernel.fetch(addresses, experts, leaves, out)
    found = []
    for leaf, like in zip(leaves, out, strict=True):
        raw = jax.ShapeDtypeStruct((experts.shape[0], leaf.nbytes), jnp.uint8)
        data = jax.pure_callback(_copied, raw, addresses, experts, leaf.offset, leaf.nbytes)
        found.append(_in_rows(data, leaf).reshape(like.shape))
    return found


def _copied(
    addresses: np.ndarray, experts: np.ndarray, offset: np.ndarray, nbytes: np.ndarray
) -> np.ndarray:
    found = np.zeros((len(experts), int(nbytes)), np.uint8)
    own = np.ascontiguousarray(addresses).view(np.uint64).reshape(-1)
    for row, expert in zip(found, np.asarray(experts), strict=True):
        if 0 <= expert < len(own):
            ctypes.memmove(row.ctypes.data, int(own[expert]) + int(offset), row.nbytes)
    return found


def _in_rows(data: jax.Array, leaf: FetchedLeaf) -> jax.Array:
    """The kernel's result in jax.numpy, of ``data [G, nbytes]``."""
    if leaf.item == 1:
        return data.reshape(len(data), -1, leaf.units, TILE).swapaxes(2, 3)
    words = lax.bitcast_convert_type(data.reshape(len(data), -1, 4), jnp.uint32)
    if leaf.item == 4:
        words = words.reshape(len(data), -1, leaf.units, TILE).swapaxes(2, 3)
    if leaf.is_nibbles:
        places = [4 * (2 * (i % 4) + i // 4) for i in range(8)]  # of column i, in bits
        parts = [(words >> at & 15) << 4 * i for i, at in enumerate(places)]
        words = sum(parts[1:], parts[0]) ^ jnp.uint32(leaf.flip)
    return lax.bitcast_convert_type(words, jnp.int32)


def fetched_weight(
    addresses: jax.Array,
    experts: jax.Array,
    like: Any,
    offsets: Sequence[int],
    restores: bool = True,
) -> Any:
    """Return the weight of ``experts [G]``, ``[G, out, in]``.

    like, offsets, restores: as for ``fetched_leaves``.
    """
    parts, structure = jax.tree.flatten(like)
    leaves = fetched_leaves(like, offsets, restores)
    found = [
        _typed(data, part) if not leaf.item else data
        for data, part, leaf in zip(fetch(addresses, experts, leaves), parts, leaves, strict=True)
    ]
    weight = structure.unflatten(found)
    if not (restores and isinstance(like, CpuWeight)):
        return weight
    if not leaves[0].item:
        return restore(weight)
    form, count = like.form, experts.shape[0]
    q = lax.bitcast_convert_type(weight.q, jnp.dtype(form.dtype)).reshape(count, form.n, form.k)
    if leaves[1].item:
        scale = lax.bitcast_convert_type(weight.scale, jnp.dtype(form.scale))
        scale = scale.reshape(count, form.n, like.groups)
        return QTensor(q, scale, None, form.activations, weight.columns, weight.input_scale)
    return restore(weight, q)


def _typed(data: jax.Array, part: Any) -> jax.Array:
    """Words ``[G, words]`` as an array like ``part [1, ...]``, without what fills its end."""
    dtype, count = jnp.dtype(part.dtype), math.prod(part.shape)
    per_word = 8 if dtype.name in NIBBLES else 4 // dtype.itemsize
    if per_word == 0:
        data = data.reshape(len(data), -1, dtype.itemsize // 4)
        own = lax.bitcast_convert_type(data, dtype)
    else:
        own = lax.bitcast_convert_type(data, dtype).reshape(len(data), -1)
    return own[:, :count].reshape(len(data), *part.shape[1:])
