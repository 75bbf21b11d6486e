"""ExpertTensor: a weight ``[E, out, in]`` whose experts lie one by one on the device or elsewhere.

    tensor = put_experts(store, leaf, place)        leaf: array, QTensor or CpuWeight
    unpack(tensor.layout, data[n, bytes])           the experts of packed bytes; runs in a program
    tensor.stored(store, expert) -> uint8 [bytes]   an expert's bytes, to be loaded
    tensor.on_cpu(store, expert) -> leaves          an expert where it lies, for the CPU's programs

An expert's parts (codes, scales, zeros) stand behind each other in one array of bytes, so a load is
one copy. In host memory this array is pinned, and a program of the CPU reads it in place. The CPU's
layout of a quantized weight (``CpuWeight``) is kept as it is; on an accelerator ``unpack`` returns
it as a QTensor.

Contract: the device holds only the experts of ``place.device``, stacked in that order as ``hot``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllama.errors import JaxLlamaError
from jaxllama.offload.disk import Extent
from jaxllama.offload.expert_places import ExpertPlace
from jaxllama.offload.store import Store
from jaxllama.typing import Tree
from pallas_kernels.cpu import restore_tree
from pallas_kernels.experts.fetch import addresses_of, fetched_weight
from pallas_kernels.qtensor import packed_bytes
from pallas_kernels.rounding import NIBBLES

ALIGN = 64  # bytes: XLA's CPU client reads arrays in place from such addresses


class PackedLeaf(NamedTuple):
    """One part of an expert: ``[1, ...]``, at ``offset`` of its bytes."""

    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return packed_bytes(math.prod(self.shape), self.dtype)


class ExpertLayout(NamedTuple):
    """How the bytes of an expert become a weight ``[1, out, in]``.

    restores: whether the device reads QTensors and not the CPU's layout.
    """

    structure: Any
    leaves: tuple[PackedLeaf, ...]
    nbytes: int
    restores: bool


class HotSlots(NamedTuple):
    """Which experts are on the device.

    experts: int32 ``[H]``.  slots: int32 ``[E + 1]``: each expert's place among them, or H if it
    has none, as has the index E.
    """

    experts: jax.Array
    slots: jax.Array

    @classmethod
    def of(cls, store: Store, n_experts: int, place: ExpertPlace) -> HotSlots:
        slots = np.full(n_experts + 1, len(place.device), np.int32)
        slots[list(place.device)] = np.arange(len(place.device))
        on_device = np.asarray(place.device, np.int32)
        return cls(*(jax.device_put(x, store.on_device) for x in (on_device, slots)))


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertTensor:
    """The experts of one product of a layer; the module docstring has the contract.

    host: packed experts in pinned memory.  disk: packed experts on disk.
    addresses: int32 ``[E, 2]`` on the device, of the experts in pinned memory, if a kernel there
        reads it and no expert is on disk.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    layout: ExpertLayout
    hot: Tree | None
    held: HotSlots
    place: ExpertPlace
    host: dict[int, jax.Array]
    disk: dict[int, Extent]
    views: dict[int, tuple[jax.Array, ...]]  # of ``host``, on the CPU, if it computes experts
    addresses: jax.Array | None = None

    @property
    def nbytes(self) -> tuple[int, int, int]:
        """Bytes on the device, in host memory and on disk."""
        hot = 0 if self.hot is None else sum(map(_bytes, jax.tree.leaves(self.hot)))
        size = self.layout.nbytes
        return hot, size * len(self.host), size * len(self.disk)

    @property
    def is_whole(self) -> bool:
        """Whether the device holds all experts."""
        return not self.host and not self.disk

    def stored(self, store: Store, expert: int) -> jax.Array | np.ndarray:
        """Return an expert's bytes where they lie, or as they are read from disk."""
        piece = self.host.get(expert)
        return store.disk.read(self.disk[expert]) if piece is None else piece

    def on_cpu(self, store: Store, expert: int) -> tuple[jax.Array, ...]:
        """Return an expert's leaves on the CPU, codes of 4 bits as int8 ``[bytes]``."""
        if expert in self.views:
            return self.views[expert]
        return _leaves_on_cpu(self.layout, store.disk.read(self.disk[expert]))


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertBias:
    """Biases ``[E, out]`` of all experts, on the device and for the CPU."""

    device: jax.Array
    host: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.device.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.device.dtype)


def _bytes(leaf: jax.Array) -> int:
    return packed_bytes(leaf.size, leaf.dtype)


def put_experts(
    store: Store, leaf: Tree, place: ExpertPlace, computes: bool = False
) -> ExpertTensor:
    """Return the experts of ``leaf [E, out, in]``, stored where ``place`` says.

    computes: whether the CPU computes experts of the host.

    Raises JaxLlamaError if pinned memory or the disk has no room.
    """
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    parts, structure = jax.tree.flatten(leaf)
    layout = layout_of(parts, structure, store.device.platform)
    arrays = [np.asarray(part) for part in parts]

    def packed(expert: int) -> np.ndarray:
        return pack(layout, [array[expert : expert + 1] for array in arrays])

    hot = None
    if place.device:
        hot = stacked(store, layout, [packed(expert) for expert in place.device])
    host = {expert: store.pin(packed(expert)) for expert in place.host}
    disk = {expert: store.disk.write(packed(expert)) for expert in place.disk}
    held = HotSlots.of(store, shape[0], place)
    views = views_of(layout, host) if computes else {}
    addresses = None if disk else fetched_from(store, host, shape[0])
    return ExpertTensor(shape, dtype, layout, hot, held, place, host, disk, views, addresses)


def fetched_from(store: Store, host: Mapping[int, jax.Array], n_experts: int) -> jax.Array | None:
    """Return the addresses of pinned experts for a kernel, if one runs on the store's device."""
    if not store.fetches or not host:
        return None
    return jax.device_put(addresses_of(host, n_experts), store.on_device)


def views_of(
    layout: ExpertLayout, host: Mapping[int, jax.Array]
) -> dict[int, tuple[jax.Array, ...]]:
    """Return the leaves of pinned experts for the CPU's programs, without a copy.

    They are made once, because making them takes as long as computing a token's expert.
    """
    return {expert: _leaves_on_cpu(layout, host_view(piece)) for expert, piece in host.items()}


def layout_of(parts: Sequence[Any], structure: Any, platform: str) -> ExpertLayout:
    """Return the layout of experts with these parts ``[E, ...]``, arrays or shapes.

    platform: the device's.
    """
    leaves, offset = [], 0
    for part in parts:
        leaves.append(PackedLeaf((1, *part.shape[1:]), jnp.dtype(part.dtype).name, offset))
        offset += -(-leaves[-1].nbytes // ALIGN) * ALIGN
    return ExpertLayout(structure, tuple(leaves), offset, platform != "cpu")


def stacked(store: Store, layout: ExpertLayout, experts: Sequence[np.ndarray]) -> Tree:
    """Return packed experts on the device, as one weight ``[n, out, in]``."""
    return _unpack(layout, jax.device_put(np.stack(experts), store.on_device))


def pack(layout: ExpertLayout, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the bytes of one expert, whose parts are ``[1, ...]``."""
    out = np.zeros(layout.nbytes, np.uint8)
    for leaf, part in zip(layout.leaves, parts, strict=True):
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        if leaf.dtype in NIBBLES:  # numpy holds a code a byte, of which the upper bits are anything
            flat = flat[::2] & 15 | flat[1::2] << 4
        out[leaf.offset : leaf.offset + leaf.nbytes] = flat
    return out


def unpack(layout: ExpertLayout, data: jax.Array) -> Tree:
    """Return experts ``[n, out, in]`` of packed bytes ``data [n, bytes]``."""
    parts = []
    for leaf in layout.leaves:
        leaf_bytes = lax.slice_in_dim(data, leaf.offset, leaf.offset + leaf.nbytes, axis=1)
        parts.append(_of_bytes(leaf_bytes, leaf))
    weight = layout.structure.unflatten(parts)
    return restore_tree(weight) if layout.restores else weight


_unpack = jax.jit(unpack, static_argnums=0)


def fetched(layout: ExpertLayout, addresses: jax.Array, experts: jax.Array) -> Tree:
    """Return ``experts [n]``, which the device reads from pinned memory, as ``[n, out, in]``.

    addresses: of ``ExpertTensor``.  An index behind the last expert gives zeros.
    """
    shapes = [jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in layout.leaves]
    like, offsets = layout.structure.unflatten(shapes), [leaf.offset for leaf in layout.leaves]
    return fetched_weight(addresses, experts, like, offsets, layout.restores)


def unpack_on_cpu(layout: ExpertLayout, leaves: Sequence[jax.Array]) -> Tree:
    """Return the expert ``[1, out, in]`` of ``ExpertTensor.on_cpu``, in a program of the CPU."""
    parts = [
        _of_bytes(leaf_bytes.reshape(1, -1), leaf) if leaf.dtype in NIBBLES else leaf_bytes
        for leaf_bytes, leaf in zip(leaves, layout.leaves, strict=True)
    ]
    return layout.structure.unflatten(parts)


def _of_bytes(leaf_bytes: jax.Array, leaf: PackedLeaf) -> jax.Array:
    dtype = jnp.dtype(leaf.dtype)
    if leaf.dtype in NIBBLES:
        leaf_bytes = lax.bitcast_convert_type(lax.bitcast_convert_type(leaf_bytes, jnp.int8), dtype)
    elif dtype.itemsize > 1:
        leaf_bytes = leaf_bytes.reshape(leaf_bytes.shape[0], -1, dtype.itemsize)
        leaf_bytes = lax.bitcast_convert_type(leaf_bytes, dtype)
    else:
        leaf_bytes = lax.bitcast_convert_type(leaf_bytes, dtype)
    return leaf_bytes.reshape(leaf_bytes.shape[0], *leaf.shape[1:])


def host_view(pinned: jax.Array) -> np.ndarray:
    """Return the bytes of an array in pinned host memory, without a copy.

    The caller keeps the array. Raises JaxLlamaError if this jax gives no address.
    """
    try:
        address = pinned.unsafe_buffer_pointer()
    except (AttributeError, jax.errors.JaxRuntimeError) as error:
        raise JaxLlamaError(
            f"policy: cpu_expert: this jax gives no address of pinned memory: {error}"
        ) from None
    return np.ctypeslib.as_array((ctypes.c_uint8 * pinned.nbytes).from_address(address))


def _leaves_on_cpu(layout: ExpertLayout, data: np.ndarray) -> tuple[jax.Array, ...]:
    found = []
    for leaf in layout.leaves:
        leaf_bytes = data[leaf.offset : leaf.offset + leaf.nbytes]
        if leaf.dtype in NIBBLES:
            leaf_bytes = leaf_bytes.view(np.int8)
        else:
            leaf_bytes = leaf_bytes.view(jnp.dtype(leaf.dtype)).reshape(leaf.shape)
        found.append(leaf_bytes)
    return tuple(jax.device_put(found, jax.devices("cpu")[0]))
