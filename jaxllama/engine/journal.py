"""Journal of ``serve --state DIR``: request bodies on disk until they are answered.

    journal.accept(id, kind, at, body)      before work on the body begins
    journal.finish(id, answer)              stores the answer's JSON, or its error's
    journal.unfinished() -> [Entry, ...]    the bodies without an answer, oldest first
    journal.find(id) -> JournalAnswer       None for an unknown id

Caches and tokens are not stored: they follow from the body, which carries its seed. A restarted
server runs the unanswered bodies again and produces the same tokens. The newest ``KEPT`` answers
stay.

Contract. The journal is SQLite in write-ahead mode. An entry survives kill -9 once ``accept`` has
returned; a loss of power may lose the last moments. One process at a time uses a journal. Only the
file's owner may read it, since it holds prompts and answers. A write that the disk refuses raises
JournalUnavailable and changes nothing, so the caller can try again. So does a damaged page, which
stays damaged: ``is_damaged`` says so, and the next start refuses the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
from collections.abc import Generator
from pathlib import Path

from jaxllama.errors import JaxLlamaError

KEPT = 10_000
FILE = "journal.sqlite"


class JournalUnavailable(JaxLlamaError):
    """The journal cannot be used, for example because the disk is full.

    is_damaged: whether trying again is in vain.
    """

    is_damaged = False


@dataclasses.dataclass(frozen=True)
class Entry:
    """A body without an answer. at: time of arrival, in seconds. owner: key of the client that may
    read the answer.
    """

    id: str
    kind: str
    at: int
    body: str
    owner: str = ""


@dataclasses.dataclass(frozen=True)
class JournalAnswer:
    """An answer. text: its JSON, "" while there is no answer yet. kind, owner: as in its Entry."""

    text: str
    kind: str
    owner: str


class Journal:
    """The journal in ``folder``. Raises JaxLlamaError when the folder cannot be used.

    keeps_bodies: whether bodies and all answers stay, so that an answer can be made again.
    """

    def __init__(self, folder: str | Path, keeps_bodies: bool = False) -> None:
        self._keeps_bodies, self.folder = keeps_bodies, str(folder)
        path = Path(folder) / FILE
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(path)
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=0.1
            )
            # SQLite holds this lock until the process ends, however it ends.
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS calls (number INTEGER PRIMARY KEY, id TEXT UNIQUE, "
                "kind TEXT, created INTEGER, body TEXT, answer TEXT, "
                "owner TEXT NOT NULL DEFAULT '')"
            )
            columns = [row[1] for row in self._db.execute("PRAGMA table_info(calls)")]
            if "owner" not in columns:  # a journal of an earlier version
                self._db.execute("ALTER TABLE calls ADD COLUMN owner TEXT NOT NULL DEFAULT ''")
            self._db.execute(
                "CREATE INDEX IF NOT EXISTS owed ON calls (number) WHERE answer IS NULL"
            )
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("COMMIT")
            [found] = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise JaxLlamaError(f"--state {folder}: {_damage(path)}")
        except (OSError, sqlite3.Error) as error:
            raise JaxLlamaError(f"--state {folder}: {reason(error, path)}") from None

    def accept(self, id: str, kind: str, at: int, body: str, owner: str = "") -> None:
        with self._using("written"):
            self._db.execute(
                "INSERT INTO calls (id, kind, created, body, owner) VALUES (?, ?, ?, ?, ?)",
                (id, kind, at, body, owner),
            )

    def finish(self, id: str, answer: str) -> None:
        """Store an answer and drop its body; the oldest answers beyond ``KEPT`` are deleted.

        A journal that keeps bodies drops and deletes nothing. Otherwise a call gets a second number
        when it is answered, since its age counts from its end.
        """
        with self._using("written"):
            renewed = ", body = '', number = (SELECT max(number) + 1 FROM calls)"
            more = "" if self._keeps_bodies else renewed
            self._db.execute(
                f"UPDATE calls SET answer = ?{more} WHERE id = ? AND answer IS NULL", (answer, id)
            )
            if self._keeps_bodies:
                return
            self._db.execute(
                "DELETE FROM calls WHERE answer IS NOT NULL AND number <= "
                "(SELECT max(number) FROM calls) - ?",
                (2 * KEPT,),
            )

    def check_writable(self) -> None:
        """Write one page, as a test that the disk has room for it."""
        with self._using("written"):
            [version] = self._db.execute("PRAGMA user_version").fetchone()
            self._db.execute(f"PRAGMA user_version = {(version + 1) % 2**16}")

    def unfinished(self) -> list[Entry]:
        """Return the bodies without an answer, oldest first."""
        query = (
            "SELECT id, kind, created, body, owner FROM calls "
            "WHERE id IS NOT NULL AND answer IS NULL ORDER BY number"
        )
        with self._using("read"):
            return [Entry(*row) for row in self._db.execute(query)]

    def answered(self) -> Generator[tuple[Entry, str]]:
        """Yield the bodies that were kept with their answers, oldest first."""
        query = (
            "SELECT id, kind, created, body, owner, answer FROM calls "
            "WHERE answer IS NOT NULL AND body != '' ORDER BY number"
        )
        with self._using("read"):
            for *entry, answer in self._db.execute(query):
                yield Entry(*entry), answer

    def find(self, id: str) -> JournalAnswer | None:
        """Return the answer with this id; None for an unknown id."""
        query = "SELECT coalesce(answer, ''), kind, owner FROM calls WHERE id = ?"
        with self._using("read"):
            row = self._db.execute(query, (id,)).fetchone()
        return None if row is None else JournalAnswer(*row)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _using(self, done: str) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as error:
            why = reason(error, Path(self.folder) / FILE)
            unavailable = JournalUnavailable(f"the journal cannot be {done}: {why}")
            unavailable.is_damaged = _code(error) in _DAMAGED
            raise unavailable from None


_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _code(error: Exception) -> int:
    """Return SQLite's code for an error, without its details."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def reason(error: Exception, path: Path) -> str:
    """Return why a database or a file cannot be used, and what to do."""
    if _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another server uses this folder; give each server a folder of its own"
    if _code(error) in _DAMAGED:
        return _damage(path)
    return getattr(error, "strerror", None) or str(error)


def _damage(path: Path) -> str:
    return f"{path} is damaged: restore it, or move it away, and start the server again"


def _make_private(path: Path) -> None:
    """Create the file readable by its owner alone, or remove the rights of other users.

    SQLite gives its companion files (-wal, -shm) the same rights.
    """
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    for file in path.parent.glob(f"{path.name}*"):
        file.chmod(0o600)
