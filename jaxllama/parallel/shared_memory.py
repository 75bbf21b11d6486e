"""Memory of each GPU of a host that the GPUs of all its processes can write to (CUDA IPC).

    seen = shared_memory(devices, nbytes, gather)       seen[me][peer]: addresses, or None: not here

jax has no name for another process's memory.  So each process allocates with the driver, all
processes exchange the handles, and each of its GPUs opens those of the others.  The memory lives as
long as the process.

Left out: several hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllama.typing import LocalDevice

_GRAIN = 1 << 21  # an allocation of whole pages of 2 MB shares no page with another one
_HANDLE, _HOST = 64, 16  # bytes
Gather = Callable[[np.ndarray], np.ndarray]  # [...] of each process -> [processes, ...]


class Handle(ctypes.Structure):
    """The driver's ``CUipcMemHandle``, which it takes by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE)]


class Driver:
    """What this module asks of CUDA's driver.  A call that fails raises OSError with its name."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise OSError(f"{name}: {status}")

    @contextlib.contextmanager
    def _on(self, ordinal: int) -> Generator[None]:
        """Within, calls are for this GPU, in the context that jax uses."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(context))

    def allocate(self, ordinal: int, nbytes: int) -> tuple[int, bytes]:
        """Return (address, handle) of memory whose bits are all 1."""
        address, handle, size = ctypes.c_uint64(), Handle(), -(-nbytes // _GRAIN) * _GRAIN
        with self._on(ordinal):
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0xFF), ctypes.c_size_t(size))
            self._call("cuCtxSynchronize")
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return address.value, bytes(handle)

    def open(self, ordinal: int, handle: bytes) -> int:
        """Return the address at which a GPU sees another process's memory."""
        address, lazy_access = ctypes.c_uint64(), ctypes.c_uint(1)
        with self._on(ordinal):
            own = Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), own, lazy_access)
        return address.value


def shared_memory(
    devices: Sequence[LocalDevice],
    nbytes: int,
    gather: Gather,
    *,
    driver: Callable[[], Driver] = Driver,
    process: int | None = None,
) -> list[list[int] | None] | None:
    """Return the addresses of ``nbytes`` of each device's memory as each device sees them.

    Parameters
    ----------
    devices
        GPUs of several processes. All processes call with the same ones.
    nbytes
        Bytes of each device, which are 0xFF at first.
    gather
        Gives every process the arrays of all.
    driver
        The class of what is asked of the driver.
    process
        This process's index, by default jax's.

    Returns
    -------
    list of list of int, or None
        For each device of this process the address of every device's memory, and None for other
        processes' devices. The whole is None, in all processes, if they are on several hosts or a
        GPU cannot open another one's memory.
    """
    process = jax.process_index() if process is None else process
    mine = [number for number, one in enumerate(devices) if one.process_index == process]
    table = np.zeros((len(devices), _HANDLE + _HOST), np.uint8)
    own: dict[int, int] = {}
    try:
        cuda = driver()
        for number in mine:
            own[number], handle = cuda.allocate(devices[number].local_hardware_id, nbytes)
            table[number] = np.frombuffer(handle + _host(), np.uint8)
    except OSError:
        cuda = None
    everyone = gather(table)
    told = [everyone[one.process_index, number] for number, one in enumerate(devices)]
    seen: list[list[int] | None] = [None] * len(devices)
    works = False
    if cuda is not None and len({row[_HANDLE:].tobytes() for row in told}) == 1:
        handles = [row[:_HANDLE].tobytes() for row in told]
        with contextlib.suppress(OSError):
            for me in mine:
                ordinal = devices[me].local_hardware_id
                seen[me] = [
                    own[number] if number in own else cuda.open(ordinal, handle)
                    for number, handle in enumerate(handles)
                ]
            works = True
    return seen if bool(gather(np.array(works)).all()) else None


def _host() -> bytes:
    """Return what distinguishes this machine's run since it was started from all others."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""))
