"""Divided: one scheduler for each part of the slots and pages, and their plans as one. No jax.

On a mesh each device, or group of devices, may have rows and pages of its own (``Cache.parts``).
A part's scheduler knows its slots and pages alone. All parts run in the same calls of the device.

A newcomer goes to the part with the fewest requests, and of those to the one that knows most of its
prompt. A waiting request moves to a part with a free slot. Within a part the order is that of
``Scheduler``; between two parts it is not strict.

Left out: drafts and tiers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from jaxllama.engine.pages import Save
from jaxllama.engine.request import FinishReason, Request
from jaxllama.engine.scheduler import Scheduler, TurnPlan
from jaxllama.engine.scheduler import Sequence as Row


class DividedScheduler:
    """The schedulers of all parts, with the methods of one that an engine calls."""

    def __init__(self, parts: Sequence[Scheduler]) -> None:
        self._parts, self._waited = parts, False
        self.pools = [pool for part in parts for pool in part.pools]

    @property
    def waiting(self) -> list[Row]:
        return [row for part in self._parts for row in part.waiting]

    @property
    def prefilling(self) -> list[Row]:
        return [row for part in self._parts for row in part.prefilling]

    @property
    def running(self) -> dict[int, Row]:
        return {slot: row for part in self._parts for slot, row in part.running.items()}

    @property
    def weights(self) -> int:
        return self._parts[0].weights

    @weights.setter
    def weights(self, number: int) -> None:
        for part in self._parts:
            part.weights = number

    def check(self, request: Request) -> None:
        """Raise JaxLlamaError if the request could never run to its end."""
        self._parts[0].check(request)

    def add(self, sequence: Row) -> None:
        """Queue a newcomer."""

        def preference(part: Scheduler) -> tuple[int, int]:
            return part.n_in_use, -part.places(sequence.request)["device"]

        min(self._parts, key=preference).add(sequence)

    def finish(self, sequence: Row) -> None:
        """Remove a sequence, in whatever state it is, and free its slot and pages."""
        next(part for part in self._parts if sequence in part.in_flight).finish(sequence)

    def overdue(self, now: float) -> Iterable[tuple[Row, FinishReason]]:
        """Yield the sequences whose deadline has passed."""
        for part in self._parts:
            yield from part.overdue(now)

    def plan(self) -> TurnPlan:
        """Return the parts' plans as one; a row's budget is that of its own part."""
        self._level()
        # A part without prompts waits for those of another.  So each reads as many as the mean part
        # has, and a lone prompt waits for one plan.
        mean = sum(part.n_prompts for part in self._parts) // len(self._parts)
        most = max(mean, int(self._waited or not self.running))
        self._waited = most == 0
        for part in self._parts:
            part.most_prompts = most
        plans = [part.plan() for part in self._parts]
        whole = plans[0]
        for plan in plans[1:]:
            whole = TurnPlan(
                whole.preempted + plan.preempted,
                whole.admitted + plan.admitted,
                whole.fills + plan.fills,
                whole.started + plan.started,
                whole.budgets | plan.budgets,
                max(whole.steps, plan.steps),
                whole.prefixes | plan.prefixes,
            )
        return whole

    def _level(self) -> None:
        """Move waiting sequences from parts without a free slot to those with one."""
        fullest = max(self._parts, key=lambda part: part.n_in_use)
        emptiest = min(self._parts, key=lambda part: part.n_in_use)
        while fullest.n_in_use > fullest.max_slots and emptiest.n_in_use < emptiest.max_slots:
            if not fullest.waiting:
                return
            emptiest.take(fullest.waiting.pop(0))
            fullest = max(self._parts, key=lambda part: part.n_in_use)
            emptiest = min(self._parts, key=lambda part: part.n_in_use)

    def places(self, request: Request) -> Mapping[str, int]:
        """Return where the known tokens of a request's prompt are, in the part that has most."""
        return max(
            (part.places(request) for part in self._parts), key=lambda found: found["device"]
        )

    @property
    def has_unsaved(self) -> bool:
        return False

    def saves(self) -> tuple[list[Save], list[Save]]:
        return [], []


AnyScheduler: TypeAlias = Scheduler | DividedScheduler
