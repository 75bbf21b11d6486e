"""Store: trees of arrays split by rows over device memory, pinned host memory and disk.

    stored = store.put(tree, shares)       store.get(stored) -> the same tree on the device
    store.finish(store.begin(stored))      the same in two parts: begin, and wait
    store.take(stored, rows)               only some rows of the part that is not on the device

Contract: ``get`` returns the same bits. A leaf of two axes or more becomes a ``StoredTensor`` of up
to three pieces. Vectors (norms, biases) stay on the device, because they are needed whole and are
small. Pieces are immutable: to change a tensor, put it again and ``free`` the old one.

Pinned host memory is jax's memory kind "pinned_host", which CPUs have too, so the tests run the
same code as a GPU. 4-bit codes are moved and stored packed, two to a byte.

Source: FlexGen's TorchMixedDevice (arXiv 2303.06865), which splits at head or batch borders; rows
make every percentage exact. Left out: more than one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxllama.errors import JaxLlamaError
from jaxllama.offload.disk import DiskFile, Extent
from jaxllama.offload.policy import Shares
from jaxllama.offload.schedule import LANES
from jaxllama.typing import ArrayOrNumpy, Leaf, LocalDevice, Tree
from pallas_kernels.dispatch import hopper_reason
from pallas_kernels.qtensor import packed_bytes
from pallas_kernels.rounding import NIBBLES


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor: the row ranges ``[rows, columns]`` of each tier, or None for an empty tier."""

    shape: tuple[int, ...]
    dtype: np.dtype
    device: jax.Array | None
    host: jax.Array | np.ndarray | None
    disk: Extent | None

    @property
    def nbytes(self) -> tuple[int, int, int]:
        """Bytes on the device, in host memory and on disk."""
        return (
            0 if self.device is None else packed_bytes(self.device.size, self.dtype),
            0 if self.host is None else self.host.nbytes,
            0 if self.disk is None else self.disk.nbytes,
        )

    @property
    def moves(self) -> bool:
        """Whether a part is not on the device."""
        return self.host is not None or self.disk is not None


def is_stored(leaf: object) -> TypeGuard[StoredTensor]:
    return isinstance(leaf, StoredTensor)


def stored_leaves(tree: Tree) -> list[StoredTensor]:
    """Return the stored tensors of a tree."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_stored) if is_stored(leaf)]


def moves(tree: Tree) -> bool:
    """Return whether getting the tree moves anything."""
    return any(leaf.moves for leaf in stored_leaves(tree))


def on_device(tree: Tree) -> int:
    """Return the number of first rows of each tensor that are on the device.

    It is the same for the whole tree.
    """
    [rows] = {
        0 if leaf.device is None else leaf.device.shape[0]
        for leaf in jax.tree.leaves(tree, is_leaf=is_stored)
    }
    return rows


def wait(tree: Tree) -> Tree:
    """Return the tree when its transfers are done."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_stored):
        parts = (leaf.device, leaf.host) if is_stored(leaf) else leaf
        jax.block_until_ready(parts)
    return tree


class Pending:
    """A StoredTensor whose transfers have begun; ``array`` is the whole tensor, made once."""

    def __init__(self, stored: StoredTensor, moved: list[jax.Array]) -> None:
        self._stored, self.moved = stored, moved
        self._whole: jax.Array | None = None

    def array(self) -> jax.Array:
        if self._whole is None:
            stored, moved = self._stored, self.moved
            if stored.dtype.name in NIBBLES:
                moved = [_unpack(part, stored.dtype) for part in moved]
            parts = moved if stored.device is None else [stored.device, *moved]
            whole = parts[0] if len(parts) == 1 else _join(parts)
            self._whole = whole if whole.shape == stored.shape else whole.reshape(stored.shape)
            self.moved = []
        return self._whole


def is_pending(leaf: object) -> TypeGuard[Pending]:
    return isinstance(leaf, Pending)


class Store:
    """Stores trees in three tiers; the module docstring has the contract.

    directory: folder of the disk's share, made when needed.
    """

    def __init__(self, directory: str | Path, device: LocalDevice | None = None) -> None:
        self.device = jax.devices()[0] if device is None else device
        self.on_device = SingleDeviceSharding(self.device, memory_kind="device")
        self.on_host = SingleDeviceSharding(self.device, memory_kind="pinned_host")
        self._directory = directory
        self._disk: DiskFile | None = None
        self._lock = threading.Lock()
        self.lanes = {name: ThreadPoolExecutor(1, f"offload-{name}") for name in LANES}
        # Whether a kernel reads pinned memory (``pallas_kernels.experts.fetch``).
        self.fetches = self.device.platform == "gpu" and hopper_reason() is None

    @property
    def disk(self) -> DiskFile:
        with self._lock:
            if self._disk is None:
                self._disk = DiskFile(self._directory)
            return self._disk

    def put(self, tree: Tree, shares: Shares, *, pinned: bool = True) -> Tree:
        """Return a tree with a StoredTensor for every leaf of two axes or more.

        pinned: False keeps the host's part in memory that ``take`` can read. Raises JaxLlamaError
        when the disk has no room.
        """
        return jax.tree.map(lambda leaf: self._put(leaf, shares, pinned), tree)

    def take(self, tree: Tree, rows: np.ndarray) -> Tree:
        """Return some rows of every StoredTensor on the device, ``[n, columns]``.

        rows: int32 in increasing order, none of them on the device. Rows past the end may hold
        anything. The tree was put with ``pinned=False``.
        """
        rows = rows - on_device(tree)

        def take_leaf(leaf: StoredTensor) -> jax.Array:
            is_packed = leaf.dtype.name in NIBBLES
            width = leaf.shape[-1] // 2 if is_packed else leaf.shape[-1]
            dtype = np.dtype(np.int8) if is_packed else leaf.dtype
            host = np.empty((0, width), dtype) if leaf.host is None else leaf.host
            moved = jax.device_put(_read_rows(self, host, leaf.disk, rows), self.on_device)
            return _unpack(moved, leaf.dtype) if is_packed else moved

        return jax.tree.map(take_leaf, tree, is_leaf=is_stored)

    def get(self, tree: Tree) -> Tree:
        """Return the tree on the device.

        Raises JaxLlamaError when the disk's data is not what was written.
        """
        return self.finish(self.begin(tree))

    def begin(self, tree: Tree, known: dict[int, Pending] | None = None) -> Tree:
        """Begin the transfers; return the tree with a Pending for every StoredTensor.

        known: transfers that have begun already, by the id of the StoredTensor; they are reused.
        Raises JaxLlamaError when the disk's data is not what was written.
        """
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_stored)
        found = dict(known or {})
        missing = [leaf for leaf in leaves if is_stored(leaf) and id(leaf) not in found]
        reads = self._reads([leaf.disk for leaf in missing if leaf.disk is not None])
        for leaf in missing:
            pieces = [] if leaf.host is None else [leaf.host]
            if leaf.disk is not None:
                pieces.append(next(reads))
            moved = [jax.device_put(piece, self.on_device) for piece in pieces]
            found[id(leaf)] = Pending(leaf, moved)
        return treedef.unflatten([found[id(leaf)] if is_stored(leaf) else leaf for leaf in leaves])

    def finish(self, pending: Tree) -> Tree:
        """Return the tree of ``begin`` as arrays.

        Pieces are joined only when all have arrived: a join that waits would delay the computations
        dispatched after it.
        """
        leaves = jax.tree.leaves(pending, is_leaf=is_pending)
        jax.block_until_ready([leaf.moved for leaf in leaves if is_pending(leaf)])
        return jax.tree.map(
            lambda leaf: leaf.array() if is_pending(leaf) else leaf, pending, is_leaf=is_pending
        )

    def _reads(self, extents: Sequence[Extent]) -> Iterator[np.ndarray]:
        """Yield the arrays; the next read runs meanwhile, so the disk is never idle."""
        ahead = None
        for extent in [*extents, None]:
            following = None if extent is None else self.disk.begin(extent)
            if ahead is not None:
                yield ahead()
            ahead = following

    def free(self, tree: Tree) -> None:
        """Allow the disk's part of the tree to be overwritten."""
        for leaf in stored_leaves(tree):
            if leaf.disk is not None:
                self.disk.free(leaf.disk)

    def _put(self, leaf: ArrayOrNumpy, shares: Shares, pinned: bool) -> StoredTensor | jax.Array:
        if leaf.ndim < 2:
            return jax.device_put(leaf, self.on_device)
        dtype = np.dtype(leaf.dtype)
        rows, columns = math.prod(leaf.shape[:-1]), leaf.shape[-1]
        counts = shares.rows(rows)
        if counts[0] == rows:
            device = jax.device_put(leaf, self.on_device).reshape(rows, columns)
            return StoredTensor(leaf.shape, dtype, device, None, None)
        flat = leaf.reshape(rows, columns)
        first, second = counts[0], counts[0] + counts[1]
        device = jax.device_put(flat[:first], self.on_device) if first else None
        if dtype.name in NIBBLES:
            assert columns % 2 == 0, leaf.shape
            flat = _pack(jnp.asarray(flat))
        host = disk = None
        if counts[1]:
            part = flat[first:second]
            host = self.pin(part) if pinned else np.array(part)
        if counts[2]:
            disk = self.disk.write(np.asarray(flat[second:]))
        return StoredTensor(leaf.shape, dtype, device, host, disk)

    def pin(self, piece: Leaf) -> jax.Array:
        """Return a copy in pinned host memory. Raises JaxLlamaError when there is no room."""
        try:
            return jax.block_until_ready(jax.device_put(piece, self.on_host))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise JaxLlamaError(
                f"policy: no room for {piece.nbytes / 1e9:.2f} GB more of pinned host memory: put "
                "more on the disk (on a GPU, XLA pins at most XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, "
                "which jaxllama's commands set and programs of your own do not: 64)"
            ) from None


class RowTable:
    """An embedding table in host memory and on disk, which is read by row."""

    def __init__(self, store: Store, table: np.ndarray, shares: Shares) -> None:
        # The device's share is in host memory too, because a step reads one row a token.
        self.shape, self.dtype, self._store = table.shape, table.dtype, store
        kept = table.shape[0] - shares.rows(table.shape[0])[2]
        self._host = np.array(table[:kept])
        self._disk = store.disk.write(table[kept:]) if kept < table.shape[0] else None

    @property
    def nbytes(self) -> tuple[int, int, int]:
        return 0, self._host.nbytes, 0 if self._disk is None else self._disk.nbytes

    def lookup(self, tokens: np.ndarray) -> jax.Array:
        """Return ``table[tokens]`` on the device."""
        ids = np.asarray(tokens).reshape(-1)
        out = _read_rows(self._store, self._host, self._disk, ids)
        out = out.reshape(*np.shape(tokens), self.shape[1])
        return jax.device_put(out, self._store.on_device)


def _read_rows(
    store: Store, host: ArrayOrNumpy, disk: Extent | None, ids: np.ndarray
) -> np.ndarray:
    """Return rows ``ids`` of a tensor whose first rows are in host memory and the next on disk.

    Rows past its end may hold anything.
    """
    out = np.empty((len(ids), host.shape[1]), host.dtype)
    on_host = ids < len(host)
    out[on_host] = host[ids[on_host]]
    if disk is not None:
        on_disk = ~on_host & (ids < len(host) + disk.shape[0])
        if on_disk.any():
            out[on_disk] = store.disk.read_rows(disk, ids[on_disk] - len(host))
    return out


@jax.jit
def _join(parts: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(parts)


@jax.jit
def _pack(codes: jax.Array) -> jax.Array:
    """Convert 4-bit ``[rows, columns]`` to int8 ``[rows, columns / 2]``, the same bits."""
    rows, columns = codes.shape
    return lax.bitcast_convert_type(codes.reshape(rows, columns // 2, 2), jnp.int8)


@functools.partial(jax.jit, static_argnums=1)
def _unpack(packed: jax.Array, dtype: np.dtype) -> jax.Array:
    codes = lax.bitcast_convert_type(packed, dtype)
    return codes.reshape(packed.shape[0], 2 * packed.shape[1])


def available_memory() -> int | None:
    """Return the bytes of memory that the system can give, if it reports them (Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return int(found.split()[1]) * 1024


def check_host_memory(nbytes: int) -> None:
    """Raise JaxLlamaError if the system has less than ``nbytes`` of memory available.

    If the system does not report its memory, nothing is raised, and the allocation itself may fail.
    """
    available = available_memory()
    if available is not None and nbytes > available:
        raise JaxLlamaError(
            f"policy: {nbytes / 1e9:.2f} GB of host memory are needed and {available / 1e9:.2f} GB "
            "are available: put more on the disk, or use fewer or smaller batches"
        )
