"""Journal: what has come in, on disk, so that it can be done again; the one thing of serving that
outlives its process.

    journal.accept(id, kind, at, body)      before anything is done about it
    journal.finish(id, answer)              an answer's JSON, or an error's
    journal.unfinished() -> [Entry, ...]    what a killed server still owes, oldest first
    journal.find(id, kind) -> answer | ""   whole, owed; None: never heard of
    journal.history() -> [Entry, ...]       what an engine has taken, in order

No caches and no tokens are written down: they follow from what came in.  Two write a journal:

* ``serve --state DIR``, every body under its id until it is answered.  Bodies carry their seed, and
  a row's tokens depend on nothing but its request, so a restarted server that runs them again
  finishes the same tokens.  The newest ``KEPT`` answers stay.
* ``Engine(lm, state=DIR)``, its options, then every arrival and every end that came from outside,
  at the step that took it (a deadline when it strikes, so no clock is needed).  ``Engine.restore``
  takes them again at the same steps: the same bits, on the same machine.

Contract.  SQLite in write-ahead mode: what ``accept`` returned from survives kill -9 (a loss of
power may take the last moments), and half a line is no line.  One process at a time.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

from jaxllama.errors import JaxLlamaError

KEPT = 10_000


@dataclasses.dataclass(frozen=True)
class Entry:
    """id: what its answer is found by; None for an engine's, which are never answered.  at: the
    engine's step, or of a body the time in seconds."""

    id: str | None
    kind: str
    at: int
    body: str


class Journal:
    """The one in ``folder``.  Raises JaxLlamaError when the folder cannot be used."""

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

    def accept(self, id: str | None, kind: str, at: int, body: str) -> None:
        self._db.execute(
            "INSERT INTO calls (id, kind, created, body) VALUES (?, ?, ?, ?)", (id, kind, at, body)
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

    def unfinished(self) -> list[Entry]:
        return self._entries("id IS NOT NULL AND answer IS NULL")

    def history(self) -> list[Entry]:
        return self._entries("id IS NULL")

    def _entries(self, which: str) -> list[Entry]:
        query = f"SELECT id, kind, created, body FROM calls WHERE {which} ORDER BY number"
        return [Entry(*row) for row in self._db.execute(query)]

    def find(self, id: str, kind: str | None = None) -> str | None:
        """The answer; "" while it is owed; None for an unknown id."""
        row = self._db.execute(
            "SELECT coalesce(answer, '') FROM calls WHERE id = ? AND kind = coalesce(?, kind)",
            (id, kind),
        ).fetchone()
        return None if row is None else row[0]

    def close(self) -> None:
        self._db.close()
