"""Memory in each GPU of a mesh into which the other GPUs store their parts of a sum.

    tables = sum_tables(mesh, width, n_sums)     one for each sum of a decode step; None: not here

A sum of one row has 16 KB, so its time is that of starting a collective.  ``pallas_kernels`` has
products that store their part in the other GPUs' memory and products that wait for all parts
(``matmul.sums``).  jax has no name for such memory inside a program, so a table carries addresses:
those of arrays which this module keeps as long as the process lives.

Left out: several processes, and GPUs without access to each other's memory.
"""

from __future__ import annotations

import ctypes
import functools
import itertools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllama.parallel.mesh import MODEL_AXIS
from pallas_kernels.matmul.call import EMPTY
from pallas_kernels.matmul.sums import SLOTS, tables


def sum_tables(mesh: Mesh, width: int, n_sums: int) -> tuple[jax.Array, ...] | None:
    """Return the tables of the sums of rows of ``width`` values, int32 ``[peers, peers + 2, 2]``.

    Each is split over "model".  The result is None where the devices cannot store into each other's
    memory, or the number of sums does not suit the mailboxes.

    All programs of a mesh and width share the mailboxes, and each runs whole steps.
    """
    if n_sums % SLOTS or not n_sums or mesh.size != mesh.shape[MODEL_AXIS]:
        return None
    if not _have_access(mesh):
        return None
    return _tables(mesh, width, n_sums)


@functools.cache
def _tables(mesh: Mesh, width: int, n_sums: int) -> tuple[jax.Array, ...]:
    addresses = [box.unsafe_buffer_pointer() for box in _mailboxes(mesh, width)]
    place = NamedSharding(mesh, P(MODEL_AXIS))
    return tuple(jax.device_put(table, place) for table in tables(addresses, width, n_sums))


@functools.cache
def _mailboxes(mesh: Mesh, width: int) -> tuple[jax.Array, ...]:
    empty = np.full((SLOTS, mesh.size, width), EMPTY, np.uint32)
    return jax.block_until_ready(
        tuple(jax.device_put(empty, device) for device in mesh.devices.flat)
    )


@functools.cache
def _have_access(mesh: Mesh) -> bool:
    """Return whether the mesh's devices are GPUs of this process with access to each other.

    XLA grants the access to all pairs of devices that can have it.
    """
    devices = list(mesh.devices.flat)
    if any(device.platform not in ("gpu", "cuda") for device in devices):
        return False
    if len({device.process_index for device in devices}) > 1:
        return False
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False

    def can(device: int, peer: int) -> bool:
        answer = ctypes.c_int(0)
        return cuda.cuDeviceCanAccessPeer(ctypes.byref(answer), device, peer) == 0 and (
            answer.value == 1
        )

    numbers = [device.local_hardware_id for device in devices]
    return all(can(*pair) for pair in itertools.permutations(numbers, 2))
