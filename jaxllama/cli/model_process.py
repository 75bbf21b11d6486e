"""The process of one model of ``serve_models``: ``jaxllama serve`` that ends with its server.

Its standard input is a pipe from the server.  The end of the pipe is the end of the server.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from jaxllama.cli.main import main


def _follow() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_follow, daemon=True).start()
    sys.exit(main(["serve", *sys.argv[1:]]))
