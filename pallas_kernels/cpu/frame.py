"""XLA's foreign functions as bytes: where a handler finds what (jaxlib's ``xla/ffi/api/c_api.h``).

The struct's layout is the same in version 0.3 (jax 0.10.2) and 0.5 (jax 0.12); within a major
version fields are only appended.

    Frame(e, pointer).argument(0)      emitted code that reads a call
    call(address, arguments, results)  a call made by hand, without XLA: for tests
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

if TYPE_CHECKING:
    from llvmlite import ir

    from pallas_kernels.cpu.emit import Emitter, Value

MAJOR = 0
EXECUTE = 3  # the stage
METADATA = 1  # an extension's type: XLA asks which version a handler was made for
# Offsets in a call frame.
EXTENSION, API, CONTEXT, STAGE = 8, 16, 24, 32
ARGUMENT_COUNT, ARGUMENTS, RESULT_COUNT, RESULTS, ATTRIBUTES = 56, 72, 96, 112, 160
# Offsets in a buffer, and in an attribute that is a number.
DATA, DIMS, SCALAR = 24, 40, 8
# Offsets in the table of API functions.
VERSION, ERROR_CREATE, ERROR_DESTROY, SCHEDULE, NUM_THREADS = 32, 48, 64, 136, 144
INVALID_ARGUMENT = 3


@functools.cache
def version_reason() -> str | None:
    """Return why this jaxlib's foreign function interface is unknown to us, or None."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    try:
        text = header.read_text()
    except OSError as error:
        return f"{header}: {error.strerror}"
    major, minor = (re.search(rf"XLA_FFI_API_{p} (\d+)", text) for p in ("MAJOR", "MINOR"))
    if major is None or minor is None:
        return f"{header} names no version"
    if (int(major[1]), int(minor[1]) >= 3) == (MAJOR, True):
        return None
    return f"jaxlib's FFI is {major[1]}.{minor[1]}; 0.3 and its successors in 0 are known"


class CallFrame:
    """A call frame in emitted code."""

    def __init__(self, e: Emitter, pointer: Value) -> None:
        self.e, self.pointer = e, pointer

    def argument(self, i: int) -> Value:
        """The data of the i-th operand."""
        return self._buffer(ARGUMENTS, i, DATA)

    def result(self, i: int) -> Value:
        return self._buffer(RESULTS, i, DATA)

    def argument_dim(self, i: int, axis: int) -> Value:
        """i64."""
        return self.e.load(self._buffer(ARGUMENTS, i, DIMS), self.e.I64, 8 * axis, align=8)

    def result_dim(self, i: int, axis: int) -> Value:
        return self.e.load(self._buffer(RESULTS, i, DIMS), self.e.I64, 8 * axis, align=8)

    def attribute(self, i: int, kind: ir.Type) -> Value:
        """The i-th attribute in the order of their names, a number of LLVM's type ``kind``."""
        scalar = self._at(self._at(self.pointer, ATTRIBUTES), 8 * i)
        return self.e.load(self._at(scalar, SCALAR), kind, align=4)

    def _buffer(self, which: int, i: int, field: int) -> Value:
        return self._at(self._at(self._at(self.pointer, which), 8 * i), field)

    def _at(self, pointer: Value, offset: int) -> Value:
        return self.e.load(pointer, self.e.PTR, offset, align=8)


# --- a call by hand ------------------------------------------------------------------------------

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64
TYPES = {
    "float32": 11,
    "int8": 2,
    "uint8": 6,
    "int32": 4,
    "float16": 10,
    "bfloat16": 16,
    "float8_e4m3fn": 20,
    "float8_e8m0fnu": 33,
}
_Function = ctypes.CFUNCTYPE(_Pointer, _Pointer)
_Task = ctypes.CFUNCTYPE(None, _Pointer)


def _array(kind: type[_Int], values: Sequence[int]) -> ctypes.Array[_Int]:
    return (kind * max(1, len(values)))(*values)


class _Api:
    """A table of functions whose pool makes a thread for each task, and fails where it has none."""

    def __init__(self, threads: int) -> None:
        self.threads, self.started = threads, []
        self.errors: list[bytes] = []
        self.functions = {
            ERROR_CREATE: _Function(self._create),
            ERROR_DESTROY: _Function(lambda _: None),
            SCHEDULE: _Function(self._schedule),
            NUM_THREADS: _Function(self._num_threads),
        }
        self.table = (_Int * 32)()
        for offset, function in self.functions.items():
            self.table[offset // 8] = ctypes.cast(function, _Pointer).value or 0

    def _create(self, args: int) -> int:
        self.errors.append(
            ctypes.cast(_Pointer.from_address(args + 16), ctypes.c_char_p).value or b""
        )
        return 1

    def _num_threads(self, args: int) -> int:
        _Int.from_address(_Pointer.from_address(args + 24).value or 0).value = self.threads
        return 0 if self.threads else 1

    def _schedule(self, args: int) -> int:
        if self.threads > 64:
            return 1
        task = _Task(_Pointer.from_address(args + 24).value or 0)
        data = _Pointer.from_address(args + 32).value
        thread = threading.Thread(target=task, args=(data,))
        self.started.append(thread)
        thread.start()
        return 0


def call(
    address: int,
    arguments: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    attributes: Mapping[str, np.ndarray] | None = None,
    threads: int = 1,
) -> None:
    """Runs a handler on arrays, which it is given as they lie in memory.

    threads: that the pool says it has; 0 is a pool that fails, above 64 one that takes no task.
    Raises ValueError with the handler's own words where it returns an error.
    """
    with _frame(arguments, results, attributes or {}, _Api(threads)) as (frame, api):
        if _Function(address)(ctypes.addressof(frame)):
            raise ValueError(b"".join(api.errors).decode())


@contextlib.contextmanager
def _frame(
    arguments: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    attributes: Mapping[str, np.ndarray],
    api: _Api,
) -> Generator[tuple[ctypes.Array[_Int], _Api]]:
    keep: list[object] = [api]

    def address(thing: ctypes.Array[_Int]) -> int:
        keep.append(thing)
        return ctypes.addressof(thing)

    def buffers(arrays: Sequence[np.ndarray]) -> tuple[int, int]:
        found = []
        for a in arrays:
            dims = address(_array(_Int, a.shape))
            found.append(
                address(_array(_Int, [48, 0, TYPES[a.dtype.name], a.ctypes.data, a.ndim, dims]))
            )
        return len(found), address(_array(_Int, found))

    scalars = []
    for _, value in sorted(attributes.items()):
        pair = _array(_Int, [TYPES[value.dtype.name], value.ctypes.data])
        scalars.append(address(pair))
    frame = (_Int * 24)()
    frame[API // 8], frame[STAGE // 8] = ctypes.addressof(api.table), EXECUTE
    frame[ARGUMENT_COUNT // 8], frame[ARGUMENTS // 8] = buffers(arguments)
    frame[RESULT_COUNT // 8], frame[RESULTS // 8] = buffers(results)
    frame[ATTRIBUTES // 8] = address(_array(_Int, scalars))
    try:
        yield frame, api
    finally:
        for thread in api.started:
            thread.join()
