"""Guarded reading of files that strangers wrote, and writing of files whole or not at all.

    with opened(path) as file: ...          a regular file, or a JaxLlamaError of one line
    read_text(path, TEMPLATE)               its text, up to a size
    read_json(path, SETTINGS)               its JSON object, up to a size, a depth and digits
    parse_json(raw, what)                   the same of bytes
    with whole_file(path) as file: ...      a file that gets its name when it is complete
    with whole_folder(path) as scratch: ... the same of a folder

A pipe, a device or a folder in a file's place is refused before anything is read. So nothing waits
for a writer or reads for ever. Files that a user names as an option (texts, TOML) are the user's
own and may be pipes; they are read elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

# Largest sizes in bytes. The largest files in use are some ten times smaller.
ADAPTER = 4 << 20  # patterns for every layer of the largest models take 100 KB
TEMPLATE = 4 << 20
SETTINGS = 16 << 20  # config.json and the small files beside it
INDEX = 64 << 20  # of 500,000 tensors
TOKENIZER = 256 << 20

DEPTH = 64  # of nested JSON
DIGEST = 16  # hexadecimal digits of a digest
_DIGITS = 40  # of an integer in JSON
SHOWN = 80  # characters of a value in a message


def opened(path: str | Path) -> io.FileIO:
    """Open a regular file for reading, without a buffer.

    Raises JaxLlamaError naming the file if it cannot be opened or is no regular file.
    """
    try:
        # Without O_NONBLOCK the call waits for the writer of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise JaxLlamaError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        why = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "no regular file"
        raise JaxLlamaError(f"{path}: {why}")
    return io.FileIO(descriptor)


@contextlib.contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """Open ``path`` for writing under the name ``part_of(path)``, which an error removes."""
    part = part_of(path)
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 text whole or not at all."""
    with whole_file(path) as file:
        file.write(text.encode())


def part_of(path: Path) -> Path:
    """Return the name of a file that is not complete. A process that was killed leaves it."""
    return path.with_name(f".{path.name}.part")


@contextlib.contextmanager
def whole_folder(path: Path) -> Generator[Path]:
    """Make an empty folder beside ``path``, whose name it then gets. An error removes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        os.replace(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def exists(path: Path) -> bool:
    """Return whether there is anything of this name, whatever its kind.

    False for a name that no file can have.
    """
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read(path: Path, limit: int) -> bytes:
    """Return the bytes of a file. Raises JaxLlamaError if it has more than ``limit``."""
    with io.BufferedReader(opened(path)) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise JaxLlamaError(f"{path}: {size} bytes, at most {limit} are supported")
            return file.read(size)
        except OSError as error:
            raise JaxLlamaError(f"{path}: {error.strerror or error}") from None


def read_text(path: Path, limit: int) -> str:
    """Return the UTF-8 text of a file of at most ``limit`` bytes."""
    try:
        return read(path, limit).decode()
    except UnicodeDecodeError as error:
        raise JaxLlamaError(f"{path}: not UTF-8 text: byte {error.start}") from None


def read_json(path: Path, limit: int) -> JsonObject:
    """Return the JSON object of a file of at most ``limit`` bytes; see ``parse_object``."""
    return parse_object(read(path, limit), str(path))


def parse_object(raw: bytes, what: str) -> JsonObject:
    """Return a JSON object; as ``parse_json``."""
    value = parse_json(raw, what)
    if not isinstance(value, dict):
        raise JaxLlamaError(f"{what}: expected a JSON object, found {type(value).__name__}")
    return value


def parse_json(raw: bytes, what: str) -> object:
    """Return a JSON value.

    Raises
    ------
    JaxLlamaError
        If the text is not JSON or not Unicode, if an object has a key twice, and for more than
        ``DEPTH`` levels or integers of more than 40 digits. The error begins with ``what``.
    """

    def unique(pairs: list[tuple[str, object]]) -> JsonObject:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise JaxLlamaError(f"{what}: the key {short(twice)} is there twice")
        return result

    def integer(digits: str) -> int:
        if len(digits) > _DIGITS:
            raise JaxLlamaError(f"{what}: not JSON: a number of {len(digits)} digits")
        return int(digits)

    try:
        value = json.loads(raw, object_pairs_hook=unique, parse_int=integer)
        if b"\\ud" in raw or b"\\uD" in raw:  # half of a pair would fail wherever it is encoded
            json.dumps(value, ensure_ascii=False).encode()
    except JaxLlamaError:
        raise
    except RecursionError:
        raise JaxLlamaError(f"{what}: not JSON: nested too deeply") from None
    except UnicodeEncodeError:
        raise JaxLlamaError(f"{what}: not JSON: half of a surrogate pair") from None
    except ValueError as error:
        raise JaxLlamaError(f"{what}: not JSON: {one_line(error)}") from None
    _check_depth(value, what)
    return value


def text_digest(text: str) -> str:
    """Return the first ``DIGEST`` hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]


def json_text(value: object, indent: int | None = None) -> str:
    """Return a value as JSON; NaN and infinities, which JSON lacks, become null."""

    def plain(item: object) -> object:
        if isinstance(item, dict):
            return {key: plain(entry) for key, entry in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(entry) for entry in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _check_depth(value: object, what: str) -> None:
    """Raise JaxLlamaError for a value that recursive code could not walk."""
    level = [value]
    for _ in range(DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise JaxLlamaError(f"{what}: not JSON: nested deeper than {DEPTH} levels")


def short(value: object) -> str:
    """Return a value for a message: one line of bounded length."""
    if isinstance(value, str):
        value = value[: 2 * SHOWN]
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def one_line(error: BaseException) -> str:
    """Return an exception's message as one line of bounded length."""
    return " ".join(str(error).split())[:300]
