"""The answers that a journal owes its clients, whether it can be written or not.

While the journal cannot be used (a full disk), bodies for it are refused. Answers that could not
be written stay in memory, and writing is tried again every ``RETRY`` seconds, unless the file is
damaged. The next server makes the answers that are still unwritten at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator

from jaxllama.engine.journal import Entry, Journal, JournalAnswer, JournalUnavailable
from jaxllama.serving.api import messages

RETRY = 1.0  # seconds between two attempts to write to a journal that failed
_log = logging.getLogger("jaxllama.serving")


class JournalledAnswers:
    """A journal, or none, on the event loop.

    trouble: why it cannot be used, or None. tell: called with the trouble when that changes.
    """

    def __init__(self, journal: Journal | None, tell: Callable[[str | None], None]) -> None:
        self.trouble: str | None = None
        self._journal, self._tell = journal, tell
        self._unwritten: dict[str, str] = {}  # answers that the journal could not take, by id
        self._retrying: asyncio.TimerHandle | None = None

    def has(self, id: str) -> bool:
        return self._found(id) is not None

    def accept(self, id: str, entry: messages.Accepted) -> bool:
        """Write a body, and return whether there is a journal.

        Raises JournalUnavailable if it cannot be written.
        """
        if self._journal is None:
            return False
        with self._watched():
            self._journal.accept(id, entry.kind, entry.at, entry.body, entry.owner)
        return True

    def finish(self, id: str, answer: str) -> None:
        """Write an answer, now or later."""
        if self._journal is None:
            return
        try:
            self._journal.finish(id, answer)
        except JournalUnavailable as error:
            self._unwritten[id] = answer
            self._failed(error)

    def find(self, id: str, kind: str, owner: str) -> str | None:
        """Return the answer to a body of this kind and owner.

        "" means that there is no answer yet, and None that there is no such body.
        """
        answer = self._found(id)
        if answer is None or (answer.kind, answer.owner) != (kind, owner):
            return None
        return answer.text or self._unwritten.get(id, "")

    def unfinished(self) -> list[Entry]:
        """Return the bodies without an answer; none if the journal cannot be read."""
        entries: list[Entry] = []
        if self._journal is not None:
            with contextlib.suppress(JournalUnavailable), self._watched():
                entries = self._journal.unfinished()
        return [entry for entry in entries if entry.id not in self._unwritten]

    def close(self) -> None:
        """Write what can be written, and close the journal."""
        if self._retrying is not None:
            self._retrying.cancel()
        if self._journal is None:
            return
        try:
            self._write(self._journal)
        except JournalUnavailable as error:
            fields = {"reason": str(error), "answers": len(self._unwritten)}
            _log.error(
                "answers were not written: the next server owes them", extra={"fields": fields}
            )
        self._journal.close()

    def _found(self, id: str) -> JournalAnswer | None:
        if self._journal is None:
            return None
        with self._watched():
            return self._journal.find(id)

    @contextlib.contextmanager
    def _watched(self) -> Generator[None]:
        """Note an error of the journal, which goes on to the caller."""
        try:
            yield
        except JournalUnavailable as error:
            self._failed(error)
            raise

    def _write(self, journal: Journal) -> None:
        for id in list(self._unwritten):
            journal.finish(id, self._unwritten[id])
            del self._unwritten[id]

    def _failed(self, error: JournalUnavailable) -> None:
        """Report the failure once, and try again later."""
        if self.trouble is None:
            self.trouble = str(error)
            _log.error("the journal cannot be used", extra={"fields": {"reason": self.trouble}})
            self._tell(self.trouble)
        if self._retrying is None and not error.is_damaged:
            self._retrying = asyncio.get_running_loop().call_later(RETRY, self._retry)

    def _retry(self) -> None:
        self._retrying = None
        assert self._journal is not None
        try:
            self._journal.check_writable()
            self._write(self._journal)
        except JournalUnavailable as error:
            self._failed(error)
            return
        self.trouble = None
        _log.warning("the journal can be used again")
        self._tell(None)
