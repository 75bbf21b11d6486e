"""The GGUF container: a bounded walk over header, metadata and tensor table, and views of the data.

``GGUFFile(path)`` maps the file and checks every length, count, type and offset against the
existing bytes before it uses them. So a damaged file gives one JaxLlamaError that names the file
and the field, and costs no more memory than the file's size. Values are decoded only on request: a
vocabulary is skipped by its strings' lengths.

The ``gguf`` package's ``GGUFReader`` is not used. It trusts the lengths that it reads, so a damaged
count loops for hours or wraps around. It also builds a numpy view for each string, which takes 1.8
s for SmolLM2 instead of 0.01 s here.

A model may be split over files ``NAME-00001-of-00003.gguf``; the first of them stands for all. It
has the metadata, and each file has tensors of its own.

Source: the GGUF specification, versions 2 and 3 (little-endian); llama.cpp's ``gguf-split``. Left
out: version 1, big-endian files, arrays of arrays, writing.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import itertools
import math
import mmap
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from jaxllama import files
from jaxllama.checkpoints.gguf.types import BLOCKS, TensorType
from jaxllama.errors import JaxLlamaError

# GGUF's value types: number on disk -> struct code. 8 is a string, 9 an array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
# The values of tokenizer.ggml.model in a file without a tokenizer.
NO_VOCABULARY = ("none", "no_vocab")
_MAX_DIMS = 4
# Numbers of entries that a large file could have, and no model has.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_STRINGS = 1 << 22  # of one array
_REQUIRED: Any = object()


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table. ``shape`` is in numpy's order, ``[out, in]`` for a matrix."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # from the start of the file
    nbytes: int
    part: int = 0  # which of a split model's files has it

    @property
    def row_bytes(self) -> int:
        block, size = BLOCKS[self.type]
        return self.shape[-1] // block * size


@dataclasses.dataclass(frozen=True)
class _Value:
    kind: int  # value type, of the elements if it is an array
    count: int | None  # None for a value that is not an array
    offset: int  # offset of the value, or of the first element


@contextlib.contextmanager
def opened(source: str | Path | GGUFFile) -> Generator[GGUFFile]:
    """Yield the file of a path and close it afterwards; a file that is open already stays open."""
    if isinstance(source, GGUFFile):
        yield source
        return
    with GGUFFile(source) as file:
        yield file


class GGUFFile:
    """An open GGUF file: ``metadata`` keys, ``tensors`` by name.  Use as a context manager.

    Raises JaxLlamaError naming the file and the field for anything that is not a whole, valid
    GGUF file.

    part: 0 for a file that is opened by its name; a split model's other files have their number.
    """

    def __init__(self, path: str | Path, part: int = 0):
        self.path = Path(path)
        self._parts: list[GGUFFile] = [self]
        try:
            with files.opened(self.path) as file:
                self.size = file.seek(0, 2)
                if self.size < 24:
                    raise self.error("header", f"the file has {self.size} bytes, a header has 24")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise JaxLlamaError(f"{self.path}: {error.strerror or error}") from None
        try:
            self._walk()
            self._check_part(part)
            if part == 0:
                self._open_parts()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for part in self._parts[1:]:
            part.close()
        try:
            self._map.close()
        except BufferError:  # a caller still holds a view, and the map is freed with the view
            pass

    def error(self, field: str, why: str) -> JaxLlamaError:
        """Return an error of one line, even if a damaged file has an odd name."""
        line = f"GGUF {field[:200]}: {why[:500]}".encode("unicode_escape").decode()
        return JaxLlamaError(f"{self.path}: {line}")

    # Metadata

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def keys(self) -> list[str]:
        return list(self._values)

    def string(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._scalar(key, default)
        if value is not default and not isinstance(value, str):
            raise self.error(key, f"expected a string, found {value!r}")
        return value

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._scalar(key, default)
        if value is not default and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.error(key, f"expected an integer, found {value!r}")
        return value

    def boolean(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._scalar(key, default)
        if value is not default and not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {value!r}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a float.

        A float32 is read as the shortest decimal that rounds to it (1e-05, not 9.99e-06), which is
        the value in the model's config.json.
        """
        value = self._scalar(key, default)
        if value is default:
            return value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(key, f"expected a number, found {value!r}")
        if not math.isfinite(value):
            raise self.error(key, f"{value} is not a finite number")
        return float(str(np.float32(value))) if self._values[key].kind == 6 else float(value)

    def value(self, key: str) -> float | int | bool:
        """Return a number or a truth value by its type: config.json distinguishes 4 from 4.0."""
        kind = self._values[key].kind if key in self._values else None
        if kind in (6, 12):
            return self.number(key)
        return self.boolean(key) if kind == 7 else self.integer(key)

    def is_array(self, key: str) -> bool:
        return key in self._values and self._values[key].count is not None

    def length(self, key: str) -> int:
        """Return the number of entries of an array."""
        return self._array(key).count or 0

    def strings(self, key: str) -> list[str]:
        """Return an array of strings."""
        value = self._array(key)
        if value.kind != _STRING:
            raise self.error(key, "expected an array of strings")
        assert value.count is not None
        ends = self._spans_of[key]
        first = ends[0] if ends else 0
        if ends and ends[-1] - first > files.TOKENIZER:
            raise self.error(key, f"more than {files.TOKENIZER} bytes")
        # slicing bytes is faster than slicing a map
        data = self._map[first : ends[-1] if ends else 0]
        try:
            return [
                data[start - first : stop - first].decode()
                for start, stop in zip(ends[::2], ends[1::2], strict=True)
            ]
        except UnicodeDecodeError:
            raise self.error(key, "a string is not UTF-8") from None

    def array(self, key: str) -> np.ndarray:
        """Return a copy of an array of numbers."""
        value = self._array(key)
        if value.kind == _STRING:
            raise self.error(key, "expected an array of numbers")
        assert value.count is not None
        dtype = np.dtype("<" + _SCALARS[value.kind])
        return np.frombuffer(self._map, dtype, value.count, value.offset).copy()

    def _array(self, key: str) -> _Value:
        if key not in self._values:
            raise self.error(key, "the key is missing")
        value = self._values[key]
        if value.count is None:
            raise self.error(key, "expected an array")
        return value

    def _scalar(self, key: str, default: Any) -> Any:
        if key not in self._values:
            if default is _REQUIRED:
                raise self.error(key, "the key is missing")
            return default
        value = self._values[key]
        if value.count is not None:
            raise self.error(key, "expected one value, found an array")
        if value.kind == _STRING:
            (length,) = struct.unpack_from("<Q", self._map, value.offset)
            return self._text(value.offset + 8, value.offset + 8 + length, key)
        (result,) = struct.unpack_from("<" + _SCALARS[value.kind], self._map, value.offset)
        return result

    def _text(self, start: int, stop: int, field: str) -> str:
        if stop - start > files.TEMPLATE:
            raise self.error(field, f"a string of {stop - start} bytes")
        try:
            return self._map[start:stop].decode()
        except UnicodeDecodeError:
            raise self.error(field, "a string is not UTF-8") from None

    # Tensor data

    def rows(self, info: GGUFTensor) -> np.ndarray:
        """Return the stored bytes as a read-only uint8 view ``[rows, row_bytes]``."""
        data = np.frombuffer(self._parts[info.part]._map, np.uint8, info.nbytes, info.offset)
        return data.reshape(-1, info.row_bytes)

    def release(self, info: GGUFTensor, first: int = 0, rows: int | None = None) -> None:
        """Let the system drop the pages of a tensor, or of some rows.

        Dropped pages do not count as memory in use.
        """
        start = info.offset + first * info.row_bytes
        stop = info.offset + info.nbytes if rows is None else start + rows * info.row_bytes
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self._parts[info.part]._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    # Split models

    @property
    def stem(self) -> str:
        """The file's name without its end, and a split model's without the number."""
        count = self.integer("split.count", 1)
        return self.path.name.removesuffix(".gguf").removesuffix(f"-00001-of-{count:05d}")

    def _check_part(self, part: int) -> None:
        number = self.integer("split.no", 0)
        if number != part:
            hint = "" if part else "; name the first file, which has 00001 in its name"
            raise self.error("split.no", f"{number} is not {part}{hint}")

    def _open_parts(self) -> None:
        """Open a split model's other files, and add their tensors."""
        count = self.integer("split.count", 1)
        if count <= 1:
            return
        end = f"-00001-of-{count:05d}.gguf"
        if not self.path.name.endswith(end):
            raise self.error("split.count", f"{count}, but the name does not end with {end}")
        stem = self.path.name.removesuffix(end)
        for number in range(1, count):
            name = f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"
            part = GGUFFile(self.path.with_name(name), number)
            self._parts.append(part)
            for name, info in part.tensors.items():
                if name in self.tensors:
                    raise part.error(f"tensor {name!r}", "is in an earlier file of the model too")
                self.tensors[name] = dataclasses.replace(info, part=number)
        total = self.integer("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise self.error("split.tensors.count", f"{total}, but there are {len(self.tensors)}")

    # The walk

    def _walk(self) -> None:
        self._at = 4
        if self._map[:4] != b"GGUF":
            raise self.error("magic", f"{self._map[:4]!r} is not b'GGUF'")
        version = self._unpack("I", "version")
        if version not in (2, 3):
            hint = " (a big-endian file?)" if version & 0xFFFF == 0 and version else ""
            raise self.error("version", f"{version} is not 2 or 3{hint}")
        n_tensors = self._unpack("Q", "tensor_count")
        n_keys = self._unpack("Q", "kv_count")
        # The shortest entries: name length, type, one byte; name length, n_dims, type, offset.
        self._fits(n_keys, 13, "kv_count", _MAX_KEYS)
        self._fits(n_tensors, 24, "tensor_count", _MAX_TENSORS)
        self._values: dict[str, _Value] = {}
        # For arrays of strings: start and stop of each string, one after the other.
        self._spans_of: dict[str, array.array[int]] = {}
        for index in range(n_keys):
            key = self._name(f"key {index} of {n_keys}", self._values)
            self._values[key] = self._value(key)
        table = [self._tensor(index, n_tensors) for index in range(n_tensors)]

        alignment = self.integer("general.alignment", 32)
        if alignment <= 0 or alignment & (alignment - 1):
            raise self.error("general.alignment", f"{alignment} is not a power of two")
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for info in table:
            if info.name in self.tensors:
                raise self.error(f"tensor {info.name!r}", "is in the table twice")
            offset = info.offset + start
            if info.offset % alignment:
                raise self.error(
                    f"tensor {info.name!r}",
                    f"offset {info.offset} is not a multiple of {alignment}",
                )
            if offset + info.nbytes > self.size:
                raise self.error(
                    f"tensor {info.name!r}",
                    f"its data would end at byte {offset + info.nbytes}, "
                    f"but the file has {self.size} (truncated?)",
                )
            self.tensors[info.name] = dataclasses.replace(info, offset=offset)
        # Shared bytes would let a small file describe a large model.
        in_order = sorted(self.tensors.values(), key=lambda info: info.offset)
        for before, after in itertools.pairwise(in_order):
            if before.offset + before.nbytes > after.offset:
                raise self.error(f"tensor {after.name!r}", f"overlaps tensor {before.name!r}")

    def _tensor(self, index: int, total: int) -> GGUFTensor:
        name = self._name(f"tensor {index} of {total}", ())
        field = f"tensor {name!r}"
        n_dims = self._unpack("I", f"{field} n_dims")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self.error(f"{field} n_dims", f"{n_dims} is not in 1..{_MAX_DIMS}")
        dims = [self._unpack("Q", f"{field} dims") for _ in range(n_dims)]
        number = self._unpack("I", f"{field} type")
        try:
            kind = TensorType(number)
            block, size = BLOCKS[kind]
        except (ValueError, KeyError):
            raise self.error(f"{field} type", f"{number} is not a known type") from None
        offset = self._unpack("Q", f"{field} offset")
        if min(dims) == 0:
            raise self.error(f"{field} dims", f"{dims} has a zero")
        if dims[0] % block:
            raise self.error(
                f"{field} dims", f"rows of {dims[0]} are not whole {kind.name} blocks of {block}"
            )
        nbytes = math.prod(dims) // block * size
        return GGUFTensor(name, tuple(reversed(dims)), kind, offset, nbytes)

    def _value(self, key: str) -> _Value:
        """Return where a value is, and move past it."""
        kind = self._unpack("I", f"{key} (type)")
        count = None
        if kind == _ARRAY:
            kind = self._unpack("I", f"{key} (array type)")
            count = self._unpack("Q", f"{key} (array length)")
            if kind == _ARRAY:
                raise self.error(key, "arrays of arrays are not supported")
        value = _Value(kind, count, self._at)
        if kind == _STRING:
            self._fits(1 if count is None else count, 8, key, _MAX_STRINGS)
            ends = self._spans(value, key)
            self._at = ends[-1] if ends else self._at
            if count is not None:
                self._spans_of[key] = ends
        elif kind in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[kind]) * (1 if count is None else count)
            self._fits(1, width, key)
            self._at += width
        else:
            raise self.error(f"{key} (type)", f"{kind} is not a known value type")
        return value

    def _spans(self, value: _Value, key: str) -> array.array[int]:
        """Return the file offsets of all strings of ``value``: start, stop, start, stop, ..."""
        short = self._short_spans(value)
        if short is not None:
            return short
        ends: list[int] = []
        at, size = value.offset, self.size
        unpack, buffer = struct.Struct("<Q").unpack_from, self._map
        for index in range(1 if value.count is None else value.count):
            start = at + 8
            if start > size:
                raise self.error(key, f"string {index} is beyond the end of the file (truncated?)")
            (length,) = unpack(buffer, at)
            at = start + length
            if at > size:
                raise self.error(
                    key, f"string {index} has length {length}, more than is left of the file"
                )
            ends += start, at
        return array.array("Q", ends)

    def _short_spans(self, value: _Value) -> array.array[int] | None:
        """Return ``_spans`` of strings of 1 to 255 bytes without a loop; most vocabularies have
        these.

        The length of such a string is a nonzero byte before seven zero bytes. All such places are
        found at once, and each must follow from the one before. Returns None if they do not, or if
        there are few strings.
        """
        count = value.count or 0
        data = np.frombuffer(
            self._map, np.uint8, min(self.size - value.offset, 32 * count), value.offset
        )
        if count < 1000 or len(data) < 8:
            return None
        zero = data == 0
        runs = zero[1:]
        for width in (1, 2, 3):  # widths of 2, 4 and 7 bytes
            runs = runs[:-width] & runs[width:]
        places = np.flatnonzero(runs > zero[: len(runs)])[:count]
        stops = places + 8 + data[places]
        follow = len(places) == count and places[0] == 0 and (places[1:] == stops[:-1]).all()
        if not follow or value.offset + stops[-1] > self.size:
            return None
        both = np.stack((places + 8, stops), axis=1).astype(np.uint64) + np.uint64(value.offset)
        return array.array("Q", both.tobytes())

    def _name(self, field: str, taken: Any) -> str:
        length = self._unpack("Q", f"{field} (name length)")
        self._fits(length, 1, f"{field} (name length)")
        name = self._text(self._at, self._at + length, f"{field} (name)")
        self._at += length
        if name in taken:
            raise self.error(f"{field} (name)", f"{name!r} is there twice")
        return name

    def _unpack(self, code: str, field: str) -> int:
        width = struct.calcsize("<" + code)
        self._fits(1, width, field)
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += width
        return value

    def _fits(self, count: int, width: int, field: str, most: int | None = None) -> None:
        left = self.size - self._at
        if count * width > left:
            raise self.error(
                field,
                f"{count} x {width} bytes are announced, but {left} are left (truncated?)",
            )
        if most is not None and count > most:
            raise self.error(field, f"{count} is more than the {most} that are supported")
