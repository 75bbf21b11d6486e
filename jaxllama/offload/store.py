"""Store: trees of arrays split by rows over device memory, pinned host memory and disk.

    stored = store.put(tree, shares)       store.get(stored) -> the same tree on the device

Contract: ``get`` gives the bits that were put.  A leaf of two axes or more becomes a ``Stored`` of
up to three pieces; vectors (norms, biases) stay on the device, where they are needed whole and cost
nothing.  Pieces are immutable: to change a tensor, put it again and ``free`` the old one.

Pinned host memory is jax's memory kind "pinned_host", which CPUs have too, so the code that runs on
a GPU is the code that the tests run.  int4 words travel and rest packed, two to a byte.

Source: FlexGen's TorchMixedDevice (arXiv 2303.06865), which splits at head or batch borders; rows
make any percentage exact.  Left out: more than one device.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxllama.errors import JaxLlamaError
from jaxllama.offload.disk import DiskFile, Extent
from jaxllama.offload.policy import Shares
from jaxllama.offload.schedule import LANES
from pallas_kernels.qtensor import packed_bytes

Leaf = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """One tensor: the row ranges ``[rows, columns]`` of each tier, or None where it has none."""

    shape: tuple[int, ...]
    dtype: np.dtype
    device: jax.Array | None
    host: jax.Array | None
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


def is_stored(leaf: Any) -> bool:
    return isinstance(leaf, Stored)


def moves(tree: Any) -> bool:
    """Whether getting the tree moves anything."""
    return any(is_stored(x) and x.moves for x in jax.tree.leaves(tree, is_leaf=is_stored))


def wait(tree: Any) -> Any:
    """The tree, when its transfers are done."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_stored):
        parts = (leaf.device, leaf.host) if is_stored(leaf) else leaf
        jax.block_until_ready(parts)
    return tree


class Store:
    """See the module docstring.  directory: where the disk's share goes, made when needed."""

    def __init__(self, directory: str | Path, device: jax.Device | None = None) -> None:
        self.device = jax.devices()[0] if device is None else device
        self.on_device = SingleDeviceSharding(self.device, memory_kind="device")
        self.on_host = SingleDeviceSharding(self.device, memory_kind="pinned_host")
        self._directory = directory
        self._disk: DiskFile | None = None
        self._lock = threading.Lock()
        self.lanes = {name: ThreadPoolExecutor(1, f"offload-{name}") for name in LANES}

    @property
    def disk(self) -> DiskFile:
        with self._lock:
            if self._disk is None:
                self._disk = DiskFile(self._directory)
            return self._disk

    def put(self, tree: Any, shares: Shares) -> Any:
        """A tree with a Stored for every leaf of two axes or more.  Raises JaxLlamaError when the
        disk has no room."""
        return jax.tree.map(lambda leaf: self._put(leaf, shares), tree)

    def get(self, tree: Any, known: dict[int, jax.Array] | None = None) -> Any:
        """The tree on the device; transfers may still be under way.

        known: arrays by the id of their Stored, which are taken from there.
        Raises JaxLlamaError when the disk's data is not what was written.
        """

        def one(leaf: Any) -> jax.Array:
            if not is_stored(leaf):
                return leaf
            found = None if known is None else known.get(id(leaf))
            return self._get(leaf) if found is None else found

        return jax.tree.map(one, tree, is_leaf=is_stored)

    def free(self, tree: Any) -> None:
        """The disk's part of the tree may be written over."""
        for leaf in jax.tree.leaves(tree, is_leaf=is_stored):
            if is_stored(leaf) and leaf.disk is not None:
                self.disk.free(leaf.disk)

    def _put(self, leaf: Leaf, shares: Shares) -> Stored | jax.Array:
        if leaf.ndim < 2:
            return jax.device_put(leaf, self.on_device)
        dtype = np.dtype(leaf.dtype)
        rows, columns = math.prod(leaf.shape[:-1]), leaf.shape[-1]
        counts = shares.rows(rows)
        if counts[0] == rows:
            device = jax.device_put(leaf, self.on_device).reshape(rows, columns)
            return Stored(leaf.shape, dtype, device, None, None)
        flat = leaf.reshape(rows, columns)
        first, second = counts[0], counts[0] + counts[1]
        device = jax.device_put(flat[:first], self.on_device) if first else None
        if dtype == jnp.int4:
            assert columns % 2 == 0, leaf.shape
            flat = _pack(jnp.asarray(flat))
        host = disk = None
        if counts[1]:
            host = jax.device_put(flat[first:second], self.on_host)
        if counts[2]:
            disk = self.disk.write(np.asarray(flat[second:]))
        return Stored(leaf.shape, dtype, device, host, disk)

    def _get(self, stored: Stored) -> jax.Array:
        parts = [] if stored.device is None else [stored.device]
        for piece in (stored.host, stored.disk):
            if piece is None:
                continue
            source = self.disk.read(piece) if isinstance(piece, Extent) else piece
            part = jax.device_put(source, self.on_device)
            parts.append(_unpack(part) if stored.dtype == jnp.int4 else part)
        whole = parts[0] if len(parts) == 1 else _join(parts)
        return whole if whole.shape == stored.shape else whole.reshape(stored.shape)


class Rows:
    """An embedding table that never visits the device: host memory and disk, read by row."""

    def __init__(self, store: Store, table: np.ndarray, shares: Shares) -> None:
        # What would be on the device is in host memory: a step reads one row a token.
        self.shape, self.dtype, self._store = table.shape, table.dtype, store
        kept = table.shape[0] - shares.rows(table.shape[0])[2]
        self._host = np.array(table[:kept])
        self._disk = store.disk.write(table[kept:]) if kept < table.shape[0] else None

    @property
    def nbytes(self) -> tuple[int, int, int]:
        return 0, self._host.nbytes, 0 if self._disk is None else self._disk.nbytes

    def lookup(self, tokens: np.ndarray) -> jax.Array:
        """``table[tokens]`` on the device."""
        ids = np.asarray(tokens).reshape(-1)
        out = np.empty((len(ids), self.shape[1]), self.dtype)
        on_disk = ids >= len(self._host)
        out[~on_disk] = self._host[ids[~on_disk]]
        if self._disk is not None and on_disk.any():
            out[on_disk] = self._store.disk.read_rows(self._disk, ids[on_disk] - len(self._host))
        out = out.reshape(*np.shape(tokens), self.shape[1])
        return jax.device_put(out, self._store.on_device)


@jax.jit
def _join(parts: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(parts)


@jax.jit
def _pack(words: jax.Array) -> jax.Array:
    """int4 ``[rows, columns]`` to int8 ``[rows, columns / 2]``, the same bits."""
    rows, columns = words.shape
    return lax.bitcast_convert_type(words.reshape(rows, columns // 2, 2), jnp.int8)


@jax.jit
def _unpack(packed: jax.Array) -> jax.Array:
    words = lax.bitcast_convert_type(packed, jnp.int4)
    return words.reshape(packed.shape[0], 2 * packed.shape[1])


def available_memory() -> int | None:
    """Bytes of memory that the system can give, where it says so (Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return int(found.split()[1]) * 1024


def check_host_memory(nbytes: int) -> None:
    """Raises JaxLlamaError if the system does not have that much to give; where it does not say,
    the allocation itself fails."""
    available = available_memory()
    if available is not None and nbytes > available:
        raise JaxLlamaError(
            f"policy: {nbytes / 1e9:.2f} GB of host memory are needed and {available / 1e9:.2f} GB "
            "are available: put more on the disk, or use fewer or smaller batches"
        )
