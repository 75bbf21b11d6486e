"""What a server has promised: accepted bodies and their answers, on disk (``serve --state DIR``).

    journal.accept(id, kind, created, body)      before anything is sent to the client
    journal.finish(id, answer)                   an answer's JSON, or an error's
    journal.unfinished() -> [Accepted, ...]      what a killed server still owes, oldest first
    journal.find(id, kind) -> answer | "" | None whole, owed, or never heard of

Contract.  SQLite in write-ahead mode: what ``accept`` returned from survives kill -9 (a loss of
power may take the last moments).  Bodies carry their seed, and a row's tokens depend on nothing but
its request, so a restarted server that runs them again finishes the same tokens.  One server at a
time.  The newest ``KEPT`` answers stay.  Left out: half-finished caches, which are computed again.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

from jaxllama.errors import JaxLlamaError

KEPT = 10_000


@dataclasses.dataclass(frozen=True)
class Accepted:
    """A body as it was accepted, its seed written in; kind is "completion" or "chat"."""

    id: str
    kind: str
    created: int
    body: str


class Journal:
    """See the module docstring.  Raises JaxLlamaError when the folder cannot be used."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "journal.sqlite"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=0.1
            )
            # Held until the process ends, however it ends.
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS calls (number INTEGER PRIMARY KEY, id TEXT UNIQUE, "
                "kind TEXT, created INTEGER, body TEXT, answer TEXT)"
            )
            self._db.execute(
                "CREATE INDEX IF NOT EXISTS owed ON calls (number) WHERE answer IS NULL"
            )
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            raise JaxLlamaError(f"--state {folder}: {error}") from None

    def accept(self, id: str, kind: str, created: int, body: str) -> None:
        self._db.execute(
            "INSERT INTO calls (id, kind, created, body) VALUES (?, ?, ?, ?)",
            (id, kind, created, body),
        )

    def finish(self, id: str, answer: str) -> None:
        """The body is no longer needed; old answers make room."""
        self._db.execute(
            "UPDATE calls SET answer = ?, body = '' WHERE id = ? AND answer IS NULL", (answer, id)
        )
        self._db.execute(
            "DELETE FROM calls WHERE answer IS NOT NULL AND number <= "
            "(SELECT max(number) FROM calls) - ?",
            (KEPT,),
        )

    def unfinished(self) -> list[Accepted]:
        rows = self._db.execute(
            "SELECT id, kind, created, body FROM calls WHERE answer IS NULL ORDER BY number"
        )
        return [Accepted(*row) for row in rows]

    def find(self, id: str, kind: str | None = None) -> str | None:
        """The answer; "" while it is owed; None for an unknown id."""
        row = self._db.execute(
            "SELECT coalesce(answer, '') FROM calls WHERE id = ? AND kind = coalesce(?, kind)",
            (id, kind),
        ).fetchone()
        return None if row is None else row[0]

    def close(self) -> None:
        self._db.close()
