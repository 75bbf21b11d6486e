"""The command line.  ``run`` is the process that ``jaxllama`` starts; ``main.main`` is one command.

This module imports little, so that Ctrl-C is handled from the first milliseconds on.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130  # as a shell has it: 128 + SIGINT


def run() -> NoReturn:
    """Run one command and end the process.

    Ctrl-C ends it with one line and status 130.  While a module is imported the process ends at
    once: C++ modules that are half initialized, and callbacks that swallow exceptions, could
    otherwise crash it or let it go on.  At any other time KeyboardInterrupt is raised, so that what
    was begun is taken back.  The interpreter is not torn down after that: threads of XLA still run.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupted)
    sys.unraisablehook = _unraisable
    try:
        from jaxllama.cli.main import main

        status = main()
    except KeyboardInterrupt:  # once more, while the first one was handled
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if status == INTERRUPTED:
        _leave()
    sys.exit(status)


def _interrupted(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(unraisable: Any) -> None:
    """An exception that Python would print and forget."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _leave()
    sys.__unraisablehook__(unraisable)


def _leave() -> NoReturn:
    try:
        sys.stdout.flush()
        os.write(2, b"interrupted\n")
    except (OSError, RuntimeError, ValueError):  # a closed pipe, or a stream that was being written
        pass
    os._exit(INTERRUPTED)
