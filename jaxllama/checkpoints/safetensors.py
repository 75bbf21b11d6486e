"""The safetensors container: a checked header, tensors read into their destination, a writer.

``SafetensorsFile(path)`` checks the header against the existing bytes before it allocates anything.
So a damaged file gives one JaxLlamaError that names the file and the tensor. ``read_into`` fills a
caller's array by positioned reads of at most ``CHUNK`` bytes and converts on the way. It makes no
second copy of a tensor, and it uses no mapping, whose pages would count as memory in use beside the
copy. ``write`` writes one tensor at a time.

Source: the safetensors format (8-byte little-endian header length, JSON header, data without gaps).
The safetensors package reads through a mapping: docs/rooms/checkpoints.md compares both. Left out:
sub-byte dtypes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.files import opened, parse_object, short
from jaxllama.typing import JsonObject

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
CHUNK = 1 << 22  # bytes: large enough for the disk, small enough for the cache
MAX_HEADER = 100_000_000  # bytes, the format's own limit


@dataclasses.dataclass(frozen=True)
class SafetensorsEntry:
    """One entry of the header; ``offset`` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of DTYPES
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open safetensors file: ``tensors`` by name, ``metadata``.  Use as a context manager.

    Raises JaxLlamaError naming the file (and the tensor) unless the file is whole and valid.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = opened(self.path)
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self._read_header()
        except OSError as error:
            self.close()
            raise JaxLlamaError(f"{self.path}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def error(self, why: str) -> JaxLlamaError:
        return JaxLlamaError(f"{self.path}: {why}")

    def read_into(self, info: SafetensorsEntry, out: np.ndarray) -> bool:
        """Fill the contiguous 1-D ``out`` with the tensor, cast to out's dtype.

        Returns whether every value of ``out`` is finite.
        """
        source = DTYPES[info.dtype]
        finite = True
        step = CHUNK // source.itemsize
        scratch = None if out.dtype == source else np.empty(min(step, out.size), source)
        for start in range(0, out.size, step):
            target = out[start : start + step]
            chunk = target if scratch is None else scratch[: target.size]
            self._pread(chunk.view(np.uint8), info.offset + start * source.itemsize, info.name)
            # A number too large for the new dtype becomes inf, which the check below reports.
            with np.errstate(over="ignore", invalid="ignore"):
                if scratch is not None:
                    target[...] = chunk
                finite = finite and bool(np.isfinite(target).all())
        return finite

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor in its own dtype; meant for small ones such as scales."""
        info = self.tensors[name]
        out = np.empty(math.prod(info.shape), DTYPES[info.dtype])
        self._pread(out.view(np.uint8), info.offset, name)
        return out.reshape(info.shape)

    def _pread(self, out: np.ndarray, offset: int, name: str) -> None:
        view = out.data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            except OSError as error:
                raise self.error(f"tensor {short(name)}: {error.strerror or error}") from None
            if count == 0:
                raise self.error(f"tensor {short(name)}: the file ended while it was read")
            done += count

    def _read_header(self) -> None:
        if self.size < 8:
            raise self.error(f"{self.size} bytes are no safetensors file (truncated?)")
        start = np.empty(8, np.uint8)
        self._pread(start, 0, "header length")
        (length,) = struct.unpack("<Q", start.tobytes())
        if length > self.size - 8 or length > MAX_HEADER:
            raise self.error(
                f"the header length is {length}, but the file has {self.size} bytes "
                "(truncated, or no safetensors file?)"
            )
        raw = np.empty(length, np.uint8)
        self._pread(raw, 8, "header")
        header = parse_object(raw.tobytes(), f"{self.path}: header")
        metadata = header.pop("__metadata__", {})
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        data = 8 + length
        self.tensors = {name: self._entry(name, value, data) for name, value in header.items()}
        self._check_layout(data)

    def _entry(self, name: str, value: object, data: int) -> SafetensorsEntry:
        if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
            raise self.error(f"tensor {short(name)}: needs dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self.error(f"tensor {short(name)}: unknown dtype {short(dtype)}")
        if not _naturals(shape) or len(shape) > 32:
            raise self.error(f"tensor {short(name)}: bad shape {short(shape)}")
        if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self.error(f"tensor {short(name)}: bad data_offsets {short(offsets)}")
        begin, end = offsets
        if data + end > self.size:
            raise self.error(
                f"tensor {short(name)}: its data would end at byte {short(data + end)}, "
                f"but the file has {self.size} (truncated?)"
            )
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        if end - begin != nbytes:
            raise self.error(
                f"tensor {short(name)}: {end - begin} bytes of data, "
                f"but {dtype} of shape {short(shape)} needs {short(nbytes)}"
            )
        return SafetensorsEntry(name, tuple(shape), dtype, data + begin, nbytes)

    def _check_layout(self, data: int) -> None:
        at, previous = data, None
        for info in sorted(self.tensors.values(), key=lambda info: (info.offset, info.nbytes)):
            if info.offset < at:
                raise self.error(f"tensor {short(info.name)}: its data overlaps {short(previous)}")
            if info.offset > at:
                raise self.error(
                    f"tensor {short(info.name)}: a gap of {info.offset - at} bytes before"
                )
            at, previous = info.offset + info.nbytes, info.name
        if at != self.size:
            raise self.error(f"{self.size - at} bytes after the last tensor belong to none")


def write(
    path: Path, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]], data: Iterator[np.ndarray]
) -> None:
    """Write a safetensors file.

    Parameters
    ----------
    path : Path
        The file to write.
    tensors : iterable of (str, tuple of int, data-type)
        Name, shape and dtype of each tensor, in file order.
    data : iterator of arrays
        The values of each tensor in turn, contiguous and with as many bytes.

    Raises
    ------
    OSError
        If the disk is full, for example. The incomplete file stays, and the caller removes it.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    at = 0
    tensors = list(tensors)
    for name, shape, dtype in tensors:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(struct.pack("<Q", len(raw)) + raw))
        for _, array in zip(tensors, data, strict=True):
            _write_all(file.fileno(), array.reshape(-1).view(np.uint8).data)
        os.fsync(file.fileno())


def _write_all(fd: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.write(fd, view[done : done + 16 * CHUNK])


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
