"""One engine in several processes: the first takes requests, and the others repeat its steps.

    engine.on_step = send                    in the first process, before ``engine.start()``
    follow(engine, step)                     in each other process, for each step in order

Contract. A mesh over several hosts needs the same programs in the same order in all processes. The
requests, and the steps that take them, decide everything that an engine does. So the others only
need to know those (``StepInput``, picklable). Each process has an engine of the same model and
options, whose programs are all compiled (``warm_up``). The first process alone looks at deadlines,
and names the requests that it ends.

Left out: passes beside the engine, adapters and weights that change while it runs.
"""

from __future__ import annotations

import dataclasses

from jaxllama.engine.engine import Engine
from jaxllama.engine.step_input import StepInput, Submitted
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import Options

UNLIMITED = {"max_queue": 1 << 30}  # the first process alone refuses requests


def follower_options(options: Options) -> Options:
    """Return the options of the other processes' engines."""
    return {**options, **UNLIMITED}


def follow(engine: Engine, step: StepInput) -> None:
    """Repeat a step of the first process. Raises JaxLlamaError for a step out of order."""
    if step.number != engine.steps:
        raise JaxLlamaError(f"step {step.number} of the first process, and {engine.steps} here")
    for entry in step.entries:
        if isinstance(entry, Submitted):
            request = dataclasses.replace(entry.request, deadline=None)
            engine.submit(request, lambda event: None, with_text=entry.with_text)
        else:
            engine.end(entry.id, entry.reason)
    engine.step()
