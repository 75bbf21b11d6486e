"""Files with a checksum, for code that a process loads and runs.

    write(path, data)                 writes the whole file or nothing
    read(path) -> data | None         None if there is no such file.  Raises Damaged if its bytes
                                      were changed.
    keep(path, data, pattern, most)   writes, and removes the oldest files of its folder.

A damaged object file crashes the process that loads it, so its bytes are verified first.  A file is
a mark of 8 bytes, the SHA-256 of the data and the data.  It is flushed to the disk before it gets
its name, so that a power failure leaves no empty file behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

_MARK = b"jlseal1\n"
_HEADER = len(_MARK) + hashlib.sha256().digest_size


class Damaged(ValueError):
    """The bytes of a file are not those that were written."""


def write(path: Path, data: bytes) -> None:
    """Raises OSError; then ``path`` is as it was and nothing else is left in its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(_MARK + hashlib.sha256(data).digest())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read(path: Path) -> bytes | None:
    """Raises Damaged for a file of other bytes than ``write`` wrote."""
    try:
        found = path.read_bytes()
    except OSError:
        return None
    data = found[_HEADER:]
    if found[:_HEADER] != _MARK + hashlib.sha256(data).digest():
        raise Damaged(f"the file is damaged: its {len(found)} bytes do not match their checksum")
    return data


def keep(path: Path, data: bytes, pattern: str, most: int) -> None:
    """Write the file, then remove all but the newest ``most`` of its folder's ``pattern``.

    A folder that cannot be written to is no error: nothing is kept then.
    """
    with contextlib.suppress(OSError):
        write(path, data)
        known = sorted(path.parent.glob(pattern), key=lambda one: one.stat().st_mtime)
        for old in known[:-most]:
            old.unlink()
