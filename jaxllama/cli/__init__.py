"""The command line. ``run`` is the process that ``jaxllama`` starts; ``main.main`` runs one
command.

This module imports little, so that Ctrl-C is handled from the first milliseconds on.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # the shell's convention: 128 + SIGINT


def run() -> NoReturn:
    """Run one command and end the process.

    Ctrl-C ends it with one line and status 130. While a module is imported, the process ends at
    once. Otherwise half initialized C++ modules could crash it, and callbacks that swallow
    exceptions could let it go on. At any other time KeyboardInterrupt is raised, so that unfinished
    work is undone. The interpreter is not torn down after that, because threads of XLA still run.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupted)
    sys.unraisablehook = _unraisable
    try:
        from jaxllama.cli.main import main

        status = main()
    except KeyboardInterrupt:  # a second Ctrl-C while the first one was handled
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


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Handle an exception that Python would print and ignore."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _leave()
    sys.__unraisablehook__(unraisable)


def _leave() -> NoReturn:
    try:
        sys.stdout.flush()
        os.write(2, b"interrupted\n")
    # a closed pipe, or an interrupted write to the stream
    except (OSError, RuntimeError, ValueError):
        pass
    os._exit(INTERRUPTED)
