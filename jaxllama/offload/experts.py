"""ExpertTensor: a weight ``[E, out, in]`` whose experts lie one by one on the device or elsewhere.

    tensor = put_experts(store, leaf, place)        leaf: array, QTensor or CpuWeight
    unpack(tensor.layout, data[n, bytes])           the experts of packed bytes; runs in a program
    tensor.stored(store, expert) -> uint8 [bytes]   an expert's bytes, to be loaded
    tensor.on_cpu(store, expert) -> leaves          an expert where it lies, for the CPU's programs

An expert's parts (codes, scales, zeros) stand behind each other in one array of bytes, so a load is
one copy. In host memory this array is pinned, and a program of the CPU reads it in place. The CPU's
layout of a quantized weight (``CpuWeight``) is kept as it is; on an accelerator ``unpack`` returns
it as a QTensor.

The device has slots for some experts, stacked as ``hot``. They hold those of ``place.device`` at
first. ``warmed`` counts how often each expert was chosen of late, and ``kept`` gives an expert that
was loaded the slot of one that was chosen less. Every expert has a copy in host memory or on disk,
so an expert that loses its slot is not moved. If the device has slots for all, they never change.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import threading
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
from pallas_kernels.cpu import CpuWeight, restore_tree
from pallas_kernels.experts.fetch import addresses_of, fetched_weight
from pallas_kernels.qtensor import packed_bytes
from pallas_kernels.rounding import NIBBLES
from pallas_kernels.rows.words import set_rows, words_of

ALIGN = 64  # bytes: XLA's CPU client reads arrays in place from such addresses
DECAY = 0.5 ** (1 / 64)  # of an expert's heat, a token


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

    @property
    def is_of_cpu(self) -> bool:
        """Whether the bytes lie as the CPU's handlers read them."""
        return isinstance(self.structure.unflatten(self.leaves), CpuWeight)


class HotSlots(NamedTuple):
    """Which experts are on the device.

    experts: int32 ``[H]``.  slots: int32 ``[E + 1]``: each expert's place among them, or H if it
    has none, as has the index E.
    heat: float32 ``[E]``: how many tokens have passed each expert, of which an older one counts
        ``DECAY`` less a token; None if the experts on the device stay.
    """

    experts: jax.Array
    slots: jax.Array
    heat: jax.Array | None = None

    @classmethod
    def of(cls, store: Store, n_experts: int, place: ExpertPlace, learns: bool = True) -> HotSlots:
        """Return the slots as ``place`` fills them; learns: other experts may take them."""
        slots = np.full(n_experts + 1, len(place.device), np.int32)
        slots[list(place.device)] = np.arange(len(place.device))
        heat = None
        if learns and 0 < len(place.device) < n_experts:
            shares = np.asarray(place.shares or (0.0,) * n_experts)
            heat = jax.device_put((shares / (1 - DECAY)).astype(np.float32), store.on_device)
        found = np.asarray(place.device, np.int32), slots
        experts, slots = (jax.device_put(x, store.on_device) for x in found)
        return cls(experts, slots, heat)


class HotExperts(NamedTuple):
    """weights: the experts of a layer's two products on the device, ``[H, out, in]``, or None."""

    weights: tuple[Tree, Tree]
    held: HotSlots


def warmed(held: HotSlots, experts: jax.Array) -> HotSlots:
    """Return the slots with the heat after tokens that pass ``experts [T, k]``; E is none."""
    if held.heat is None:
        return held
    n_experts = held.heat.shape[0]
    passed = tokens_of(experts, n_experts).astype(jnp.float32)
    tokens = jnp.sum(experts[:, 0] < n_experts, dtype=jnp.float32)
    return held._replace(heat=held.heat * jnp.float32(DECAY) ** tokens + passed)


def tokens_of(experts: jax.Array, n_experts: int) -> jax.Array:
    """Return how many tokens pass each expert, int32 ``[E]``, in one kernel of a GPU."""
    every = jnp.arange(n_experts, dtype=jnp.int32)
    return jnp.sum(experts.reshape(-1, 1) == every, axis=0, dtype=jnp.int32)


def kept(hot: HotExperts, experts: jax.Array, loaded: tuple[Tree, Tree]) -> HotExperts:
    """Return the slots, of which the coldest have gone to hotter ones of the loaded experts.

    experts: int32 ``[G]``, distinct ones that have no slot; E is none.
    loaded: their weights, ``[G, out, in]``.
    """
    weights, held = hot
    if held.heat is None:
        return hot
    n_experts, n_slots = held.heat.shape[0], held.experts.shape[0]
    heat = jnp.append(held.heat, -1.0)
    # The hottest that comes takes the coldest's place, and so on.
    rank, slot_rank = ranked([heat[experts]])[0], ranked([-heat[held.experts]])[0]
    pairs = rank[:, None] == slot_rank
    places = jnp.sum(jnp.where(pairs, jnp.arange(n_slots), 0), axis=1, dtype=jnp.int32)
    goes = held.experts[places]
    is_hotter = (rank < n_slots) & (heat[experts] > heat[goes])
    to = jnp.where(is_hotter, places, n_slots)
    none = n_experts + 1
    slots = held.slots.at[jnp.where(is_hotter, goes, none)].set(n_slots, mode="drop")
    slots = slots.at[jnp.where(is_hotter, experts, none)].set(places, mode="drop")

    def with_new(own: jax.Array, new: jax.Array) -> jax.Array:
        return set_rows(own, to, words_of(new))

    weights = jax.tree.map(with_new, weights, loaded)
    held = held._replace(experts=held.experts.at[to].set(experts, mode="drop"), slots=slots)
    return HotExperts(weights, held)


def ranked(keys: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the place of each by these keys ``[E]``, the largest first, equal ones in their own
    order, int32 ``[E]``; and ``[E, E]``, whether the second one stands before the first.

    A sort takes a GPU several kernels.
    """
    every = jnp.arange(keys[0].shape[0], dtype=jnp.int32)
    before = every < every[:, None]
    for key in reversed(keys):
        before = (key > key[:, None]) | ((key == key[:, None]) & before)
    return jnp.sum(before, axis=1, dtype=jnp.int32), before


@dataclasses.dataclass(eq=False)
class ExpertTensor:
    """The experts of one product of a layer; the module docstring has the contract.

    hot, held: change as ``kept`` says. A program that takes them holds ``lock``, of the layer's
        first product, until the new ones are here.
    host: packed experts in pinned memory.  disk: packed experts on disk.
    addresses: int32 ``[E, 2]`` on the device, of the experts in pinned memory, if a kernel there
        reads it and no expert is on disk.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    layout: ExpertLayout
    hot: Tree | None
    held: HotSlots
    host: dict[int, jax.Array]
    disk: dict[int, Extent]
    views: dict[int, tuple[jax.Array, ...]]  # of ``host``, on the CPU, if it computes experts
    addresses: jax.Array | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

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

    @functools.cached_property
    def leaf_addresses(self) -> np.ndarray:
        """Addresses of the leaves of all experts in pinned memory: int32 ``[E, leaves, 2]``, low
        words before high ones."""
        starts = addresses_of(self.host, self.shape[0]).view(np.int64)
        offsets = np.array([leaf.offset for leaf in self.layout.leaves], np.int64)
        return (starts + offsets).view(np.int32).reshape(*starts.shape[:1], -1, 2)

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
    store: Store, leaf: Tree, place: ExpertPlace, computes: bool = False, learns: bool = True
) -> ExpertTensor:
    """Return the experts of ``leaf [E, out, in]``, stored where ``place`` says.

    computes: whether the CPU computes experts of the host.
    learns: whether other experts may take the slots of those on the device.

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
    host = {expert: store.pin(packed(expert)) for expert in place.pinned}
    disk = {expert: store.disk.write(packed(expert)) for expert in place.written}
    held = HotSlots.of(store, shape[0], place, learns)
    views = views_of(layout, host) if computes else {}
    addresses = None if disk else fetched_from(store, host, shape[0])
    return ExpertTensor(shape, dtype, layout, hot, held, host, disk, views, addresses)


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
