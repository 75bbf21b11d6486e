"""``jaxllama serve`` with a fault built in: FAULT ARGUMENTS...

step: the engine's fourth step raises.  stall: it does not end, which shows after a second.
embedding: every text takes half a second.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time

from jaxllama.cli.main import main
from jaxllama.engine import engine
from jaxllama.engine.embeddings import Embedder
from jaxllama.engine.runner import Runner
from jaxllama.serving.http import process
from jaxllama.serving.ipc import wire

run, calls = Runner.run, itertools.count()
embed = Embedder.__call__


def break_down(self, *step):
    if next(calls) == 3:
        raise RuntimeError("the device is gone")
    return run(self, *step)


def stall(self, *step):
    if next(calls) == 3:
        threading.Event().wait()
    return run(self, *step)


def take_long(self, row):
    time.sleep(0.5)
    return embed(self, row)


if __name__ == "__main__":
    fault, *words = sys.argv[1:]
    if fault == "step":
        Runner.run = break_down
    elif fault == "stall":
        Runner.run = stall
        engine.STALLED, wire.BEAT, process.STUCK = 1.0, 1.0, 2.0
    else:
        Embedder.__call__ = take_long
    sys.exit(main(words))
