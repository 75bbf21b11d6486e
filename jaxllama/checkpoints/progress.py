"""A progress bar on stderr for work that is counted in bytes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def byte_bar(what: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(n_bytes)``.  With ``show`` false, or a stderr that is no terminal, it does
    nothing: a log file gets no bars."""
    if not show or not sys.stderr.isatty():
        yield lambda count: None
        return
    # rich takes 0.1 s to import; who watches no bar does not wait for it.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
               TransferSpeedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
