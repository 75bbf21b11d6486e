"""Object files of x86-64 Linux, placed in this process's memory without LLVM.

    load(data) -> Image | None     None if this loader does not know the file or the machine.

LLVM's shared library takes 0.1 s of CPU time to load and 100 MB of resident memory.  A process that
only runs handlers which an earlier one has compiled does without it.  The format is that of the
System V ABI's x86-64 supplement.  Sections that the code reads or runs come first, then, from a
page's begin, those that it writes.  The first part becomes executable and read-only before the
function returns.  Left out: unwind tables, because no handler throws, and thread-local storage.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import platform
import sys

import numpy as np

_HEADER = np.dtype(
    [
        ("ident", "S16"),
        ("type", "<u2"),
        ("machine", "<u2"),
        ("version", "<u4"),
        ("entry", "<u8"),
        ("segments", "<u8"),
        ("sections", "<u8"),
        ("flags", "<u4"),
        ("size", "<u2"),
        ("segment_size", "<u2"),
        ("segment_count", "<u2"),
        ("section_size", "<u2"),
        ("section_count", "<u2"),
        ("names", "<u2"),
    ]
)
_SECTION = np.dtype(
    [
        ("name", "<u4"),
        ("type", "<u4"),
        ("flags", "<u8"),
        ("address", "<u8"),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("link", "<u4"),
        ("info", "<u4"),
        ("alignment", "<u8"),
        ("entry_size", "<u8"),
    ]
)
_SYMBOL = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("section", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)
_RELOCATION = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
_X86_64 = 62
_OBJECT = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
# Types of sections.
_SYMBOLS, _RELOCATIONS, _NO_BITS, _UNWIND = 2, 4, 8, 0x70000001
_WRITTEN, _ALLOCATED = 1, 2  # flags of sections
_UNDEFINED, _RESERVED = 0, 0xFF00  # numbers of sections
_ABSOLUTE, _RELATIVE = 1, 24  # relocations of 64 bits: to a symbol, and from the place to a symbol


@dataclasses.dataclass(frozen=True)
class Image:
    """Machine code.  symbols: name -> address.  memory: holds the code while it is kept."""

    symbols: dict[str, int]
    memory: mmap.mmap


def load(data: bytes) -> Image | None:
    """Return the object file's code, ready to be called, or None.

    It is None outside of x86-64 Linux, for an unknown relocation or symbol in the file, and if the
    system refuses executable memory.  ``data`` must come from a compiler: offsets are not checked.
    """
    is_linux = (sys.platform, platform.machine()) == ("linux", "x86_64")
    if not is_linux or not data.startswith(_OBJECT):
        return None
    header = np.frombuffer(data, _HEADER, 1)[0]
    if header["machine"] != _X86_64:
        return None
    sections = np.frombuffer(data, _SECTION, header["section_count"], int(header["sections"]))
    offsets, written, size = _placed(sections)
    memory = mmap.mmap(-1, size)
    image = np.frombuffer(memory, np.uint8)
    base = image.ctypes.data
    for index, offset in offsets.items():
        section = sections[index]
        if section["type"] != _NO_BITS:
            begin, length = int(section["offset"]), int(section["size"])
            image[offset : offset + length] = np.frombuffer(data, np.uint8, length, begin)
    [table] = [section for section in sections if section["type"] == _SYMBOLS]
    symbols = np.frombuffer(data, _SYMBOL, table["size"] // _SYMBOL.itemsize, int(table["offset"]))
    names = data[int(sections[table["link"]]["offset"]) :]
    addresses: list[int | None] = []
    exported: dict[str, int] = {}
    for symbol in symbols:
        number, start = int(symbol["section"]), int(symbol["name"])
        name = names[start : names.index(b"\0", start)].decode()
        address = _outside(name) if number == _UNDEFINED else None
        if number in offsets:
            address = base + offsets[number] + int(symbol["value"])
            exported[name] = address
        addresses.append(address)
    for section in sections:
        if section["type"] != _RELOCATIONS or int(section["info"]) not in offsets:
            continue
        count = section["size"] // _RELOCATION.itemsize
        for one in np.frombuffer(data, _RELOCATION, count, int(section["offset"])):
            target, kind = addresses[one["symbol"]], one["type"]
            if target is None or kind not in (_ABSOLUTE, _RELATIVE):
                return None
            place = offsets[int(section["info"])] + int(one["offset"])
            value = target + int(one["addend"]) - (base + place if kind == _RELATIVE else 0)
            image[place : place + 8] = np.frombuffer(
                (value % 2**64).to_bytes(8, "little"), np.uint8
            )
    executable = mmap.PROT_READ | mmap.PROT_EXEC
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(base), ctypes.c_size_t(written), executable):
        return None
    return Image(exported, memory)


def _placed(sections: np.ndarray) -> tuple[dict[int, int], int, int]:
    """Where each section lies in the image, by its number.

    Returns the offsets, the offset of the first section that the code writes, and the image's size,
    in bytes.
    """
    offsets, at, written = {}, 0, 0
    for is_written in (False, True):
        for index, section in enumerate(sections):
            flags = int(section["flags"])
            if not flags & _ALLOCATED or section["type"] == _UNWIND:
                continue
            if bool(flags & _WRITTEN) == is_written:
                alignment = max(int(section["alignment"]), 1)
                offsets[index] = at = -(-at // alignment) * alignment
                at += int(section["size"])
        at = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        written = written or at
    return offsets, written, at


def _outside(name: str) -> int | None:
    """The address of a function of the C library, which this process has loaded."""
    if not name:
        return None
    try:
        return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    except AttributeError:
        return None
