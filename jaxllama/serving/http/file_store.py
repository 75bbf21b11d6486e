"""The files and batches of clients on disk, for ``/v1/files`` and ``/v1/batches``.

    store = FileStore(folder, bounds)
    store.add(owner, filename, source) -> FileObject          copies the source
    store.create(owner, batch); store.update(id, change)      a batch as its JSON object
    with store.claimed(id) as is_ours: ...                    one process at a time runs a batch

Contract. SQLite has the objects, and a file of its own each object's contents. All front ends of a
server share the folder. An object of another owner counts as missing. A batch's output grows in a
file that becomes visible as the batch ends, in the transaction that ends it. So a killed process
leaves either a batch that another one continues, or a whole result. Only the folder's owner can
read it.

Sizes are bounded by ``Bounds``. Raises ApiError for what a client does wrong, and StoreUnavailable
for a disk that is full or fails; the same call may succeed later. The folder is opened by the first
call, so a server can start on a full disk and answer what needs no files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from pydantic import TypeAdapter

from jaxllama.engine.journal import reason
from jaxllama.serving.api.batch_schemas import (
    OPEN,
    BatchObject,
    FileObject,
    RequestCounts,
)
from jaxllama.serving.api.schemas import ApiError, to_json

_BATCH = TypeAdapter(BatchObject)
INDEX = "index.sqlite"
RETRY_SECONDS = 5  # after which a client tries again if the disk failed
_BUSY_SECONDS = 5.0  # in which another front end's transaction ends
WINDOW_SECONDS = 24 * 3600
Row = TypeVar("Row")
_TABLES = """
CREATE TABLE IF NOT EXISTS files (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE,
    owner TEXT, bytes INTEGER, created INTEGER, filename TEXT, purpose TEXT);
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE,
    owner TEXT, status TEXT, record TEXT, input TEXT, output TEXT, errors TEXT);
CREATE INDEX IF NOT EXISTS open_batches ON batches (status);
"""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Largest sizes, for all owners together.

    file_bytes: of an uploaded file. total_bytes: of all files. files: their number. lines: of a
    batch. open_batches: number of batches that have not ended. uploading: number of uploaded files
    of the largest size that a front end receives at once, half of them of one owner.
    """

    file_bytes: int = 200 * 2**20
    total_bytes: int = 4 * 2**30
    files: int = 10_000
    lines: int = 50_000
    open_batches: int = 100
    uploading: int = 4


class StoreUnavailable(ApiError):
    """The disk cannot be read or written, for example because it is full."""

    def __init__(self, error: Exception, folder: Path) -> None:
        self.reason = reason(error, folder / INDEX)
        message = f"the server's disk for files cannot be used: {self.reason}"
        super().__init__(503, message, code="state_unavailable", retry_after=RETRY_SECONDS)


@dataclasses.dataclass(frozen=True)
class StoredBatch:
    """A batch with its owner, and the ids that its files have or will have."""

    number: int
    owner: str
    batch: BatchObject
    input_id: str
    output_id: str
    error_id: str


class FileStore:
    """The store in ``folder``; any thread may call it."""

    def __init__(self, folder: str | Path, bounds: Bounds | None = None) -> None:
        self._folder, self.bounds = Path(folder) / "files", bounds or Bounds()
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._claims: int | None = None
        self._claimed: set[int] = set()
        self._is_closed = False

    def check(self) -> None:
        """Open the folder. Raises StoreUnavailable if that fails."""
        with self._using():
            pass

    def close(self) -> None:
        """Close the store after the call that another thread may be in; later calls raise."""
        with self._lock:
            self._is_closed = True
            if self._database is not None:
                self._database.close()
            if self._claims is not None:
                os.close(self._claims)

    @contextlib.contextmanager
    def _disk(self) -> Generator[None]:
        """Raise StoreUnavailable for an error of the disk."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise StoreUnavailable(error, self._folder) from None

    @contextlib.contextmanager
    def _using(self) -> Generator[sqlite3.Connection]:
        """Yield the database, for one thread at a time."""
        with self._lock, self._disk():
            if self._is_closed:
                raise OSError("the server is stopping")
            if self._database is None or self._claims is None:
                self._database, self._claims = self._opened()
            yield self._database

    def _opened(self) -> tuple[sqlite3.Connection, int]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            database = sqlite3.connect(
                self._folder / INDEX,
                isolation_level=None,
                check_same_thread=False,
                timeout=_BUSY_SECONDS,
            )
            stack.callback(database.close)
            (self._folder / INDEX).chmod(0o600)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(_TABLES)
            claims = os.open(self._folder / "claims", os.O_RDWR | os.O_CREAT, 0o600)
            stack.pop_all()
        return database, claims

    @contextlib.contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        with self._using() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # SQLite ends one itself if the disk is full
                    db.execute("ROLLBACK")
                raise

    # Files

    def path(self, id: str) -> Path:
        """Return the path of a file's contents; ``id`` is one that the store made."""
        return self._folder / id

    def add(self, owner: str, filename: str, source: BinaryIO) -> FileObject:
        """Copy a file into the store. Raises ApiError 413 if there is no room for it."""
        id, part = _new("file-"), self._folder / f"{_new('part-')}"
        try:
            with self._disk(), open(part, "xb", opener=_private) as target:
                shutil.copyfileobj(source, target)
                size = target.tell()
            with self._transaction() as db:
                [n_files] = db.execute("SELECT count(*) FROM files").fetchone()
                if self._used(db) + size > self.bounds.total_bytes or n_files >= self.bounds.files:
                    message = "the server's room for files is used up: delete some of them"
                    raise ApiError(413, message, param="file", code="storage_full")
                added = self._insert(db, id, owner, size, filename, "batch")
                os.replace(part, self.path(id))
            return added
        except BaseException:
            with contextlib.suppress(OSError):
                self.path(id).unlink(missing_ok=True)
            raise
        finally:
            with self._disk():
                part.unlink(missing_ok=True)

    def has_room(self, size: int) -> bool:
        """Return whether files of ``size`` more bytes fit."""
        with self._using() as db:
            return self._used(db) + size <= self.bounds.total_bytes

    def _used(self, db: sqlite3.Connection) -> int:
        return db.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()[0]

    def _insert(
        self,
        db: sqlite3.Connection,
        id: str,
        owner: str,
        size: int,
        filename: str,
        purpose: Literal["batch", "batch_output"],
    ) -> FileObject:
        now = int(time.time())
        db.execute(
            "INSERT INTO files (id, owner, bytes, created, filename, purpose) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (id, owner, size, now, filename, purpose),
        )
        return FileObject(id, "file", size, now, filename, purpose, "processed")

    def file(self, id: str, owner: str) -> FileObject | None:
        with self._using() as db:
            row = db.execute(
                "SELECT id, bytes, created, filename, purpose FROM files "
                "WHERE id = ? AND owner = ?",
                (id, owner),
            ).fetchone()
        return None if row is None else _file(row)

    def files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, ascending: bool
    ) -> tuple[list[FileObject], bool]:
        """Return a page of an owner's files, and whether there are more.

        after: id of the last file of the page before. Raises ApiError 400 if there is no such file.
        """
        where, values = ("", []) if purpose is None else (" AND purpose = ?", [purpose])
        columns = "id, bytes, created, filename, purpose"
        rows = self._page("files", columns, owner, where, values, after, limit, ascending)
        return [_file(row) for row in rows[:limit]], len(rows) > limit

    def delete(self, id: str, owner: str) -> bool:
        """Delete a file; return whether it existed. Raises ApiError 409 if a batch reads it."""
        with self._transaction() as db:
            reading = db.execute(
                f"SELECT id FROM batches WHERE input = ? AND status IN ({_marks(OPEN)})",
                (id, *OPEN),
            ).fetchone()
            if reading is not None:
                message = f"the batch {reading[0]} reads this file: cancel it first"
                raise ApiError(409, message, param="file_id", code="file_in_use")
            gone = db.execute("DELETE FROM files WHERE id = ? AND owner = ?", (id, owner))
            if gone.rowcount:
                self.path(id).unlink(missing_ok=True)
        return gone.rowcount > 0

    # Batches

    def create(
        self, owner: str, endpoint: str, input_id: str, metadata: dict[str, str] | None
    ) -> BatchObject:
        """Store a new batch. Raises ApiError for a missing file or too many batches."""
        now = int(time.time())
        batch = BatchObject(
            id=_new("batch_"),
            object="batch",
            endpoint=endpoint,
            errors=None,
            input_file_id=input_id,
            completion_window="24h",
            status="validating",
            output_file_id=None,
            error_file_id=None,
            created_at=now,
            in_progress_at=None,
            expires_at=now + WINDOW_SECONDS,
            finalizing_at=None,
            completed_at=None,
            failed_at=None,
            expired_at=None,
            cancelling_at=None,
            cancelled_at=None,
            request_counts=RequestCounts(0, 0, 0),
            metadata=metadata,
        )
        with self._transaction() as db:
            found = db.execute(
                "SELECT 1 FROM files WHERE id = ? AND owner = ? AND purpose = 'batch'",
                (input_id, owner),
            ).fetchone()
            if found is None:
                message = f"input_file_id: no file {input_id!r} with the purpose batch"
                raise ApiError(404, message, param="input_file_id", code="not_found")
            [n_open] = db.execute(
                f"SELECT count(*) FROM batches WHERE status IN ({_marks(OPEN)})", OPEN
            ).fetchone()
            if n_open >= self.bounds.open_batches:
                message = f"{n_open} batches have not ended yet: come again later"
                raise ApiError(429, message, code="too_many_batches", retry_after=60)
            values = owner, batch.status, to_json(batch).decode()
            files = input_id, _new("file-"), _new("file-")
            db.execute(
                "INSERT INTO batches (id, owner, status, record, input, output, errors) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (batch.id, *values, *files),
            )
        return batch

    def batch(self, id: str, owner: str | None = None) -> StoredBatch | None:
        """Return a batch; of any owner if ``owner`` is None."""
        with self._using() as db:
            row = db.execute(
                "SELECT number, owner, record, input, output, errors FROM batches WHERE id = ?",
                (id,),
            ).fetchone()
        if row is None or (owner is not None and row[1] != owner):
            return None
        return StoredBatch(row[0], row[1], _BATCH.validate_json(row[2]), *row[3:])

    def batches(self, owner: str, after: str | None, limit: int) -> tuple[list[BatchObject], bool]:
        """Return a page of an owner's batches, the newest first, as ``files`` does."""
        rows = self._page("batches", "record", owner, "", [], after, limit, False)
        return [_BATCH.validate_json(row[0]) for row in rows[:limit]], len(rows) > limit

    def open(self) -> list[tuple[str, str]]:
        """Return (id, owner) of the batches that have not ended, the oldest first."""
        with self._using() as db:
            query = f"SELECT id, owner FROM batches WHERE status IN ({_marks(OPEN)})"
            return db.execute(f"{query} ORDER BY number", OPEN).fetchall()

    def update(self, id: str, change: Callable[[BatchObject], None]) -> BatchObject:
        """Change a batch in one transaction, and return it."""
        with self._transaction() as db:
            return self._change(db, id, change)

    def end(self, id: str, change: Callable[[BatchObject], None]) -> BatchObject:
        """Change a batch for the last time, and show its output files that are not empty."""
        stored = self.batch(id)
        assert stored is not None
        with self._transaction() as db:
            batch = self._change(db, id, change)
            for kind, file in (("output", stored.output_id), ("error", stored.error_id)):
                path = self.path(file)
                size = path.stat().st_size if path.exists() else 0
                if size:
                    self._insert(db, file, stored.owner, size, f"{id}_{kind}.jsonl", "batch_output")
                    setattr(batch, f"{kind}_file_id", file)
                else:
                    path.unlink(missing_ok=True)
            self._write(db, batch)
        return batch

    def _change(
        self, db: sqlite3.Connection, id: str, change: Callable[[BatchObject], None]
    ) -> BatchObject:
        [record] = db.execute("SELECT record FROM batches WHERE id = ?", (id,)).fetchone()
        batch = _BATCH.validate_json(record)
        change(batch)
        self._write(db, batch)
        return batch

    def _write(self, db: sqlite3.Connection, batch: BatchObject) -> None:
        db.execute(
            "UPDATE batches SET status = ?, record = ? WHERE id = ?",
            (batch.status, to_json(batch).decode(), batch.id),
        )

    @contextlib.contextmanager
    def claimed(self, stored: StoredBatch) -> Generator[bool]:
        """Hold a batch; yields False if another process, or this one, holds it already.

        The system lets go of it when the process ends, however it ends.
        """
        number = stored.number
        with self._using():
            is_ours = number not in self._claimed and self._lock_byte(number)
            if is_ours:
                self._claimed.add(number)
        try:
            yield is_ours
        finally:
            if is_ours:
                with self._lock:
                    self._claimed.discard(number)
                    if not self._is_closed and self._claims is not None:
                        fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, number)

    def _lock_byte(self, number: int) -> bool:
        assert self._claims is not None
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError:
            return False
        return True

    def _page(
        self,
        table: str,
        columns: str,
        owner: str,
        where: str,
        values: list[Any],
        after: str | None,
        limit: int,
        ascending: bool,
    ) -> list[Any]:
        """Return at most ``limit`` + 1 rows of an owner behind the row ``after``."""
        with self._using() as db:
            if after is not None:
                found = db.execute(
                    f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (after, owner)
                ).fetchone()
                if found is None:
                    raise ApiError.at("after", f"nothing with the id {after!r}")
                where += f" AND number {'>' if ascending else '<'} ?"
                values = [*values, found[0]]
            order = "ASC" if ascending else "DESC"
            return db.execute(
                f"SELECT {columns} FROM {table} WHERE owner = ?{where} "
                f"ORDER BY number {order} LIMIT ?",
                (owner, *values, limit + 1),
            ).fetchall()


def _file(row: tuple[Any, ...]) -> FileObject:
    id, size, created, filename, purpose = row
    return FileObject(id, "file", size, created, filename, purpose, "processed")


def _new(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def _marks(values: tuple[str, ...]) -> str:
    return ", ".join("?" * len(values))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
