"""Progress on stderr for work that may take long, and the process's peak memory.

    with working("reading model.safetensors", total_bytes) as bar:
        bar(n_bytes)                 this many more are done
        bar.note("layer 3")          the present part
        bar.say("12 tokens/s")       a line that stays

A terminal shows a bar, and other outputs get lines. Contract: work of less than QUIET seconds
leaves no output. A bar disappears when the work is done. If stderr is no terminal, a line follows
after QUIET seconds and then every EVERY seconds. A thread writes these lines, so they come during
one long call (a compilation) too. Work may be nested: a terminal shows one bar below the other.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

QUIET, EVERY = 2.0, 30.0  # seconds
_UNITS = ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)
_display: Any = None  # the one live rich Progress of this process


def write(line: str) -> None:
    """Write a line to stderr; a program with a log of its own replaces this function."""
    with contextlib.suppress(BrokenPipeError, ValueError):  # the reader has left
        print(line, file=sys.stderr, flush=True)


class Working:
    """The progress of a piece of work; this class shows nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, count: int = 1) -> None:
        """Report that ``count`` more of the total are done."""

    def note(self, text: str) -> None:
        """Show the present part of the work."""

    def say(self, line: str) -> None:
        """Write a line that stays."""

    def close(self) -> None:
        """Stop showing progress; ``working`` calls this at the end."""


@contextlib.contextmanager
def working(
    what: str, total: int | None = None, show: bool = True, *, unit: str = "bytes", done: int = 0
) -> Generator[Working]:
    """Show the progress of the work inside of the ``with`` block.

    Parameters
    ----------
    what : str
        Name of the work.
    total : int or None
        Size of the work in ``unit``; None if unknown.
    show : bool
        False shows nothing.
    unit : str
        "bytes", or the name of any other unit.
    done : int
        Part of the total that is done already.
    """
    kind = Working if not show else _Bar if sys.stderr.isatty() else _Lines
    bar = kind(what, total, unit, done)
    try:
        yield bar
    finally:
        bar.close()


class _Lines(Working):
    def __init__(self, what: str, total: int | None, unit: str, done: int) -> None:
        self._what, self._total, self._unit, self._done = what, total, unit, done
        self._note, self._begun, self._ended = "", time.monotonic(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        wait = QUIET
        while not self._ended.wait(wait):
            self.say(self._line())
            wait = EVERY

    def _line(self) -> str:
        parts = [f"{time.monotonic() - self._begun:.0f} s"]
        if self._total:
            parts.insert(0, _amount(self._done, self._total, self._unit))
        return f"{self._what}: {', '.join(parts)}{self._note and f': {self._note}'}"

    def __call__(self, count: int = 1) -> None:
        self._done += count

    def note(self, text: str) -> None:
        self._note = text

    def say(self, line: str) -> None:
        write(line)

    def close(self) -> None:
        self._ended.set()


def _amount(done: int, total: int, unit: str) -> str:
    if unit != "bytes":
        return f"{done} of {total} {unit}"
    name, size = next((entry for entry in _UNITS if total >= entry[1]), ("bytes", 1))
    return f"{done / size:.3g} of {total / size:.3g} {name}"


class _Bar(Working):
    def __init__(self, what: str, total: int | None, unit: str, done: int) -> None:
        global _display
        self._owns = _display is None
        if self._owns:
            _display = _new_display()
            _display.start()
        self._bar, self._what, self._unit = _display, what, unit
        self._done, self._total = done, total
        self._task = _display.add_task(what, total=total, completed=done, amount="")

    def __call__(self, count: int = 1) -> None:
        self._done += count
        amount = _amount(self._done, self._total, self._unit) if self._total else ""
        self._bar.update(self._task, completed=self._done, amount=amount)

    def note(self, text: str) -> None:
        self._bar.update(self._task, description=f"{self._what}: {text}")

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        global _display
        if self._task in self._bar.task_ids:
            self._bar.remove_task(self._task)
        if self._owns:
            self._bar.stop()
            _display = None


def _new_display() -> Progress:
    # rich takes 0.1 s to import, so only a shown bar imports it.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def peak_rss() -> int:
    """Return the process's peak resident memory in bytes; Linux counts in KiB, macOS in bytes."""
    import resource  # Windows does not have it

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
