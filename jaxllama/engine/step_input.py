"""The input of an engine's step: the requests that it takes and ends (``lockstep`` repeats it)."""

from __future__ import annotations

from typing import NamedTuple

from jaxllama.engine.request import FinishReason, Request


class Submitted(NamedTuple):
    """A request that a step takes. with_text: as for ``Engine.submit``."""

    request: Request
    with_text: bool


class Ended(NamedTuple):
    """A request that a step ends from outside."""

    id: str
    reason: FinishReason


class StepInput(NamedTuple):
    """The input of a step. number: of the steps before it. entries: in the order of taking."""

    number: int
    entries: tuple[Submitted | Ended, ...]
