"""Scheduler: which requests run, and what the next step of the engine does.  No jax.

    waiting     by priority, then by arrival; a preempted sequence keeps its place of arrival
    prefilling  whose prompt is partly in the cache, at most ``lanes`` of them between two steps
    running     one slot each, one new token each per decode step

``plan`` makes one step: end what is over, admit, hand out chunks of prompts, make room.  Contract:

* Between two decode steps one chunk, or several of together no more than ``token_budget`` tokens,
  each counted as wide as its prefill call (``widths``): a long prompt, or many short ones, never
  stall running rows.  Chunks end at multiples of ``chunk``.
* At most ``max_slots`` sequences are admitted, and together they hold at most ``cache_tokens``.
* Strict order: nobody overtakes an earlier request of the same priority.
* When the cache is short, or a more urgent request finds no slot, the last of the least urgent
  sequences is preempted: it gives up its cache and waits; later its prompt and what it wrote are
  prefilled again, so its tokens are the same.
  Without ``recompute`` only those are preempted that have written nothing.
* One sequence alone can always run to its end (``check`` refuses what cannot): there is progress.

Sources: Orca (OSDI 2022) for iteration-level batching, Sarathi-Serve (arXiv 2403.02310) for
chunked prefill, vLLM (arXiv 2309.06180) for preemption by recomputation.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import operator
from collections.abc import Callable, Collection, Iterable

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.engine.request import FinishReason, Request


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request on its way.

    order: of arrival, each newcomer's larger than any before it.  output: tokens written so far.
    slot: its row while running.  filled: tokens of ``tokens`` that are in the cache.  cached: of
    those, how many the prefix cache gave at first.
    """

    request: Request
    order: int
    submitted: float
    output: list[int] = dataclasses.field(default_factory=list)
    slot: int | None = None
    filled: int = 0
    cached: int = 0

    @property
    def tokens(self) -> list[int]:
        return [*self.request.prompt, *self.output]

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def to_fill(self) -> int:
        """Prefill stops short of the newest token: the decode step appends it and draws the next,
        so there is one place where tokens are drawn."""
        return self.length - 1

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.output)

    @property
    def is_masked(self) -> bool:
        """Whether its next token is restricted."""
        request = self.request
        return request.grammar is not None or len(self.output) < request.min_tokens

    @property
    def urgency(self) -> tuple[int, int]:
        """Smaller goes first."""
        return (-self.request.priority, self.order)


_urgency = operator.attrgetter("urgency")


@dataclasses.dataclass(frozen=True)
class Fill:
    """Tokens ``begin .. end - 1`` of a sequence are to be put into its cache."""

    sequence: Sequence
    begin: int
    end: int

    @property
    def completes(self) -> bool:
        return self.end == self.sequence.to_fill


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step: forget the caches of ``preempted``, run ``fills`` in order, move ``started``
    sequences into their slots, then decode up to ``steps`` tokens a row.  wanted: so many wait for
    a slot, and when as many rows have ended, or as many as are prefilled at once, it stops."""

    preempted: list[Sequence]
    fills: list[Fill]
    started: list[Sequence]
    steps: int
    wanted: int


class Scheduler:
    """lookup(sequence) -> tokens of its prompt that the prefix cache holds, called once when it is
    admitted."""

    def __init__(
        self,
        *,
        max_slots: int,
        cache_tokens: int,
        chunk: int,
        token_budget: int,
        widths: tuple[int, ...] = (),
        steps_per_call: int = 1,
        lanes: int = 2,
        recompute: bool = True,
        lookup: Callable[[Sequence], int] = lambda sequence: 0,
    ) -> None:
        self.max_slots, self.cache_tokens = max_slots, cache_tokens
        self.chunk, self.token_budget, self.widths = chunk, token_budget, widths
        self.steps_per_call, self.lanes = steps_per_call, lanes
        self.recompute = recompute
        self._lookup = lookup
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.running: dict[int, Sequence] = {}
        self._newest = -1

    # What is there

    @property
    def in_flight(self) -> list[Sequence]:
        return [*self.waiting, *self.admitted]

    @property
    def admitted(self) -> list[Sequence]:
        return [*self.prefilling, *self.running.values()]

    @property
    def n_admitted(self) -> int:
        return len(self.prefilling) + len(self.running)

    @property
    def used_tokens(self) -> int:
        """Cache that is promised: a sequence's tokens so far and the one being written."""
        return sum(sequence.length for sequence in self.admitted)

    # What comes and goes

    def check(self, request: Request) -> None:
        """JaxLlamaError if the request could never run to its end."""
        total = len(request.prompt) + request.max_new_tokens
        if total > self.cache_tokens:
            raise JaxLlamaError(
                f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones exceed "
                f"the cache of {self.cache_tokens} tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a newcomer."""
        self.check(sequence.request)
        # An earlier one that came later would wait for a lane of those that wait for it.
        if sequence.order <= self._newest:
            raise JaxLlamaError(
                f"request {sequence.request.id!r} is number {sequence.order}, after number "
                f"{self._newest}: newcomers must be numbered by arrival"
            )
        self._newest = sequence.order
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_urgency)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its slot is free."""
        if sequence.slot is not None:
            del self.running[sequence.slot]
            sequence.slot = None
        elif sequence in self.prefilling:
            self.prefilling.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def overdue(self, now: float) -> Iterable[tuple[Sequence, FinishReason]]:
        """Sequences whose deadline has passed."""
        for sequence in self.in_flight:
            deadline = sequence.request.deadline
            if deadline is not None and now - sequence.submitted >= deadline:
                yield sequence, "deadline"

    def move(self, slots: dict[int, int]) -> None:
        """Running sequences go from slot to slot, as in {old: new}."""
        self.running = {slots[slot]: sequence for slot, sequence in self.running.items()}
        for slot, sequence in self.running.items():
            sequence.slot = slot

    # One step

    def plan(self) -> Plan:
        self._preempted: list[Sequence] = []
        self._used = self.used_tokens  # kept up to date below: summing costs what rows there are
        self._make_room()
        fills, started, is_more = self._fill()
        steps = min(self.steps_per_call, self._longest())
        # A constrained row's mask comes from the host, after every token.
        is_masked = any(sequence.is_masked for sequence in self.running.values())
        if is_more or is_masked or not self._fits(steps):
            steps = min(steps, 1)
        return Plan(self._preempted, fills, started, steps, len(self.waiting))

    def _longest(self) -> int:
        """How many tokens some running row may still write."""
        return max((sequence.remaining for sequence in self.running.values()), default=0)

    def _fits(self, steps: int) -> bool:
        """Can every admitted sequence write so many more tokens?"""
        if self._used + steps * self.n_admitted <= self.cache_tokens:
            return True
        growth = sum(min(steps, sequence.remaining) for sequence in self.admitted)
        return self._used + growth <= self.cache_tokens

    def _make_room(self) -> None:
        while not self._fits(1):
            self._preempt(self.admitted)

    def _fill(self) -> tuple[list[Fill], list[Sequence], bool]:
        """Hand out the token budget in order of urgency: (chunks, whose prompt is complete, whether
        the budget was too small)."""
        budget = self.token_budget
        fills: list[Fill] = []
        started: list[Sequence] = []
        began = sorted(self.prefilling, key=_urgency)
        for sequence in heapq.merge(began, list(self.waiting), key=_urgency):
            if sequence in self._preempted:
                break
            if sequence not in self.prefilling:
                # What the prefix cache has of it is not known yet.
                if fills and self._cost(self._next_fill(sequence)) > budget:
                    return fills, started, True
                if not self._admit(sequence):
                    break
            while sequence.filled < sequence.to_fill:
                fill = self._next_fill(sequence)
                if fills and self._cost(fill) > budget:
                    return fills, started, True
                fills.append(fill)
                budget -= self._cost(fill)
                sequence.filled = fill.end
            self._start(sequence)
            started.append(sequence)
        return fills, started, False

    def _next_fill(self, sequence: Sequence) -> Fill:
        border = (sequence.filled // self.chunk + 1) * self.chunk
        return Fill(sequence, sequence.filled, min(border, sequence.to_fill))

    def _cost(self, fill: Fill) -> int:
        size = fill.end - fill.begin
        return next((width for width in self.widths if width >= size), size)

    def _admit(self, sequence: Sequence) -> bool:
        """From waiting to prefilling, if there is a lane, a slot and cache, or if less urgent
        sequences have them."""
        if not self._has_room(sequence):
            priority = sequence.request.priority
            victims = [
                other
                for other in self.admitted
                if other.request.priority < priority and (self.recompute or not other.output)
            ]
            if not victims or not self._has_room(sequence, without=victims):
                return False
            while not self._has_room(sequence):
                in_lanes = len(self.prefilling) >= self.lanes
                self._preempt([v for v in victims if not in_lanes or v in self.prefilling])
                victims = [v for v in victims if v not in self._preempted]
        self.waiting.remove(sequence)
        self.prefilling.append(sequence)
        self._used += sequence.length
        sequence.filled = self._lookup(sequence)
        return True

    def _has_room(self, sequence: Sequence, without: Collection[Sequence] = ()) -> bool:
        n_others = self.n_admitted - len(without)
        # Everybody may write one more token before anything else can be done about it.
        need = self._used - sum(other.length for other in without) + n_others + sequence.length + 1
        lanes = sum(other not in without for other in self.prefilling)
        return lanes < self.lanes and n_others < self.max_slots and need <= self.cache_tokens

    def _start(self, sequence: Sequence) -> None:
        self.prefilling.remove(sequence)
        sequence.slot = next(slot for slot in range(self.max_slots) if slot not in self.running)
        self.running[sequence.slot] = sequence

    def _preempt(self, victims: list[Sequence]) -> None:
        """Send the least urgent of ``victims`` back to waiting."""
        victim = max(victims, key=lambda sequence: sequence.urgency)
        self.finish(victim)
        self._used -= victim.length
        victim.filled = 0
        self._preempted.append(victim)
        self._queue(victim)
