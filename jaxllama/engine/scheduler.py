"""Scheduler: which requests run, and what the next step of the engine does. No jax.

    waiting     in order of arrival; a step of priority counts as ``AGE`` earlier arrivals, so that
                no request waits for ever; a preempted sequence keeps its place
    loading     admitted, while pages of the prompt come back to the device (``tiers``)
    prefilling  admitted, with a slot and pages; the prompts are partly in the cache
    running     rows that generate tokens in each decode step
    ending      the device was given the last tokens to generate; their slots are free again

``plan`` makes one step: admit requests, hand out chunks of prompts, make room. It does not need the
results of the step before, because it assumes that a row generates as long as it may. Contract:

* Between two decode steps the engine fills one chunk, or several chunks of at most ``token_budget``
tokens together. A chunk counts as wide as its prefill call (``widths``). So neither a long prompt
nor many short ones stall the running rows. Chunks end at multiples of ``chunk``.
* At most ``max_slots`` sequences are admitted. They hold the pages that their tokens take and no
more (``pages``): the prompt's pages at admission, the answer's pages as it is generated. A
hundredth of all pages is reserved for running sequences, unless they cannot use it.
* The order is strict: no request overtakes an earlier one of the same priority. Requests whose
pages come back are the exception: others run meanwhile. A request that begins as one of these waits
for it, and then shares its pages. If a page cannot come back, the request waits again, and what the
tiers lack is prefilled.
* When pages are short, or a more urgent request finds no slot, the last of the least urgent
sequences is preempted. It gives up its pages and waits. Later the part of its prompt and output
that is no longer cached is prefilled again, so its tokens stay the same. Without ``recompute`` only
sequences without output are preempted.
* One sequence alone can always run to its end, because ``check`` refuses requests that cannot. So
there is always progress.

Sources: Orca (OSDI 2022) for iteration-level batching, Sarathi-Serve (arXiv 2403.02310) for chunked
prefill, vLLM (arXiv 2309.06180) for pages and preemption by recomputation.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping

from jaxllama.engine.pages import Held, KVPages, Save
from jaxllama.engine.request import FinishReason, Request
from jaxllama.engine.transfers import Arrived, Load, OnDevice, Transfers
from jaxllama.errors import JaxLlamaError

# Number of later arrivals that a step of priority is worth.
AGE = 1024
# Newcomers leave one page of this many to the running sequences. A newcomer that takes the last
# pages is soon preempted, and its prompt is computed again.
RESERVE = 100


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request in the scheduler.

    order: number of arrival, larger for each newcomer. submitted, admitted: times on the monotonic
    clock; a preempted sequence keeps its first admission. output: tokens generated so far. slot,
    held: the row and the pages of an admitted sequence. filled: number of ``tokens`` that are in
    the cache. cached: number of them that were in the cache at admission. ahead: number of tokens
    that pending decode calls may generate. unsure: number of those that are generated only if
    drafts are accepted. known: for a restricted sequence, number of tokens after ``output`` for
    which the allowed tokens are known. weights: the model's weights at admission, by their number.
    coming: pages for which a waiting sequence waits, as they come back for another one.
    """

    request: Request
    order: int
    submitted: float
    admitted: float = 0.0
    output: list[int] = dataclasses.field(default_factory=list)
    slot: int | None = None
    held: Held = dataclasses.field(default_factory=Held)
    filled: int = 0
    cached: int = 0
    ahead: int = 0
    unsure: int = 0
    known: int = 1
    weights: int = 0
    coming: Load | None = None

    @property
    def prefix_key(self) -> tuple[int, tuple[str | None, str]]:
        """Sequences share cached prefixes only where these are equal.

        A cache that other weights computed is another cache.
        """
        return self.weights, self.request.cache_key

    @property
    def own_slot(self) -> int:
        """Slot of an admitted request."""
        assert self.slot is not None
        return self.slot

    @property
    def tokens(self) -> list[int]:
        return [*self.request.prompt, *self.output]

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def to_fill(self) -> int:
        """Number of tokens to prefill: all but the newest.

        The decode step appends the newest token and samples the next one, so only decode steps
        sample.
        """
        return self.length - 1

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.output)

    def room(self, steps: int) -> int:
        """Return how many of ``steps`` further tokens the request may still generate."""
        return min(steps, self.remaining - (self.ahead - self.unsure))

    @property
    def is_masked(self) -> bool:
        """Whether the allowed next tokens are restricted."""
        request = self.request
        held = (request.grammar, request.allowed_token_ids, request.forced)
        return any(mask is not None for mask in held) or len(self.output) < request.min_tokens

    @property
    def urgency(self) -> tuple[int, int]:
        """Sort key; smaller values go first."""
        return (self.order - AGE * self.request.priority, self.order)


_urgency = operator.attrgetter("urgency")


def _total(short: Iterable[tuple[Sequence, int]]) -> int:
    return sum(count for _, count in short)


@dataclasses.dataclass(frozen=True)
class Fill:
    """Put tokens ``begin .. end - 1`` of a sequence into its cache.

    snapshot: row of the snapshot pool that takes the recurrent state after token ``end - 1``; None
    takes no snapshot.
    """

    sequence: Sequence
    begin: int
    end: int
    snapshot: int | None = None

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Beginning of an admitted sequence that the cache already holds.

    length: its tokens.  snapshot: row of the snapshot pool with the recurrent state after them;
    None starts from an empty state, unless ``state`` is one that came back to the device. That
    state then goes to the snapshot too. copy: a page and the sequence's own one that must be like
    it.
    """

    length: int
    snapshot: int | None
    state: OnDevice | None = None
    copy: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class TurnPlan:
    """One step of the engine.

    The runner gives slots to ``admitted``, runs ``fills`` in order, and then decodes. Each row
    generates up to ``budgets`` tokens in up to ``steps`` passes, and at least one token in each
    pass. preempted: sequences that wait again. started: sequences that are running from now on.
    prefixes: known prefixes of the admitted sequences. Before all of that it copies the pages and
    snapshots of ``saves`` for the tiers, and puts the pages of ``loads`` into place. orphans:
    prefixes of preempted newcomers, whose states go to their snapshots, which others may know.
    """

    preempted: list[Sequence]
    admitted: list[Sequence]
    fills: list[Fill]
    started: list[Sequence]
    budgets: dict[Sequence, int]
    steps: int
    prefixes: dict[Sequence, Prefix] = dataclasses.field(default_factory=dict)
    saves: tuple[list[Save], list[Save]] = dataclasses.field(default_factory=lambda: ([], []))
    loads: list[Arrived] = dataclasses.field(default_factory=list)
    orphans: list[Prefix] = dataclasses.field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        """Whether the device has nothing to do."""
        work = self.prefixes, self.fills, self.budgets, *self.saves, self.loads, self.orphans
        return not any(work)

    def unsure(self, sequence: Sequence) -> int:
        """Return the number of tokens that the sequence generates only if drafts are accepted."""
        return max(self.budgets[sequence] - self.steps, 0)

    def settle(self, sequence: Sequence) -> None:
        """Subtract the sequence's budget from its pending tokens; the step's results are known."""
        sequence.ahead -= self.budgets[sequence]
        sequence.unsure -= self.unsure(sequence)


class Scheduler:
    """Decides what each step of an engine does.

    may_share: returns how many tokens of a sequence others may begin with, once they are cached.
    reach: returns the largest number of tokens that each of ``rows`` rows generates in a step.
    transfers: copies between the device and the tiers of ``pages``, if there are any.
    first_slot: of ``max_slots`` consecutive ones.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        pages: KVPages,
        chunk: int,
        token_budget: int,
        widths: tuple[int, ...] = (),
        steps_per_call: int = 1,
        recompute: bool = True,
        may_share: Callable[[Sequence], int] = lambda sequence: sequence.to_fill,
        reach: Callable[[int], int] = lambda rows: 1,
        transfers: Transfers | None = None,
        first_slot: int = 0,
    ) -> None:
        self.max_slots, self.pages, self.pools = max_slots, pages, [pages]
        self._slots = range(first_slot, first_slot + max_slots)
        self.most_prompts = max_slots  # prompts of which the next plan may read tokens
        self.chunk, self.token_budget, self.widths = chunk, token_budget, widths
        self.steps_per_call, self.recompute = steps_per_call, recompute
        self._may_share, self._reach = may_share, reach
        self._transfers = transfers
        self.waiting: list[Sequence] = []
        self.loading: dict[Sequence, Load] = {}
        self.prefilling: list[Sequence] = []
        self.running: dict[int, Sequence] = {}
        self.ending: list[Sequence] = []
        self.weights = 0  # number of times that the model's weights were replaced
        self._newest = -1

    # State

    @property
    def in_flight(self) -> list[Sequence]:
        return [*self.waiting, *self.admitted, *self.ending]

    @property
    def admitted(self) -> list[Sequence]:
        return [*self.loading, *self.prefilling, *self.running.values()]

    @property
    def n_admitted(self) -> int:
        return len(self.loading) + len(self.prefilling) + len(self.running)

    @property
    def n_in_use(self) -> int:
        """Number of sequences that have a slot or wait for one."""
        return len(self.waiting) + self.n_admitted

    # Requests come and go

    def check(self, request: Request) -> None:
        """Raise JaxLlamaError if the request could never run to its end."""
        total, room = len(request.prompt) + request.max_new_tokens, self.pages.count
        if self.pages.need(total) > room:
            raise JaxLlamaError(
                f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones exceed "
                f"the cache of {room * self.pages.size} tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a newcomer."""
        self.check(sequence.request)
        if sequence.order <= self._newest:
            raise JaxLlamaError(
                f"request {sequence.request.id!r} is number {sequence.order}, after number "
                f"{self._newest}: newcomers must be numbered by arrival"
            )
        self._newest = sequence.order
        self.take(sequence)
        if self.pages.tiers is not None and self.n_admitted >= self.max_slots:
            self.pages.tiers.prefetch(self.pages.missing(*self._wanted(sequence)))

    def take(self, sequence: Sequence) -> None:
        """Let a sequence wait here, whatever its number."""
        bisect.insort(self.waiting, sequence, key=_urgency)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, in whatever state it is, and free its slot and pages."""
        if sequence in self.ending:
            self.ending.remove(sequence)
            sequence.filled = sequence.to_fill
        elif sequence.slot is None:
            self.waiting.remove(sequence)
            return
        elif sequence in self.loading:
            self.loading.pop(sequence).cancel()
        elif sequence in self.prefilling:
            self.prefilling.remove(sequence)
        else:
            del self.running[sequence.slot]
            sequence.filled = sequence.to_fill
        self._publish(sequence, sequence.filled)
        self.pages.release(sequence.held)
        sequence.slot, sequence.filled = None, 0

    def _published(self, fill: Fill) -> Fill:
        """Publish the fill's pages, and return the fill with its snapshot's row.

        Later plans may begin with these pages, because the device fills them before it runs those
        plans.
        """
        sequence, end = fill.sequence, fill.end
        self._publish(sequence, end)
        most = self._may_share(sequence)
        if end > most:
            return fill
        # The tiers get the last snapshot alone: it is large beside the pages between two of them.
        is_last = end + self.pages.unit > most
        snapshot = self.pages.snapshot(sequence.held, end, saves=is_last)
        return dataclasses.replace(fill, snapshot=snapshot)

    def _publish(self, sequence: Sequence, end: int) -> None:
        shared = self._shared(sequence, end)
        is_whole = len(shared) == len(sequence.request.prompt) - 1
        self.pages.publish(sequence.held, shared, sequence.prefix_key, is_whole=is_whole)

    def _shared(self, sequence: Sequence, end: int) -> list[int]:
        """Return those of the first ``end`` tokens that others may begin with."""
        return sequence.tokens[: min(end, self._may_share(sequence))]

    def overdue(self, now: float) -> Iterable[tuple[Sequence, FinishReason]]:
        """Yield the sequences whose deadline has passed."""
        for sequence in self.in_flight:
            deadline = sequence.request.deadline
            if deadline is not None and now - sequence.submitted >= deadline:
                yield sequence, "deadline"

    # One step

    def plan(self) -> TurnPlan:
        self._preempted: list[Sequence] = []
        self._orphans: list[Prefix] = []
        self._newcomers: dict[Sequence, Prefix] = {}
        self._retire()
        saves, loads = self.saves(), self._arrived()
        # Number of missing pages for one more token of each sequence; kept up to date below.
        self._next = _total(self._short(1))
        while self._next > self.pages.available:
            self._preempt(self.admitted)
        fills, started, is_more = self._fill()
        steps = 1 if is_more else self.steps_per_call
        reach = self._reach(len(self.running))
        budgets = self._budgets(steps * reach)
        while max(steps, reach) > 1 and not self._has_pages(budgets):
            reach, steps = 1, steps if reach > 1 else 1
            budgets = self._budgets(steps)
        most = max(budgets.values(), default=0)
        plan = TurnPlan(
            self._preempted,
            list(self._newcomers),
            fills,
            started,
            budgets,
            min(steps, most),
            self._newcomers,
            saves,
            loads,
            self._orphans,
        )
        for sequence, budget in budgets.items():
            self.pages.grow(sequence.held, self._growth(sequence, budget))
            sequence.ahead += budget
            sequence.unsure += plan.unsure(sequence)
        # Publishing may take idle pages, so it follows all growth.
        return dataclasses.replace(plan, fills=[self._published(fill) for fill in plan.fills])

    def places(self, request: Request) -> Mapping[str, int]:
        """Return where the known tokens of a request's prompt are, as ``KVPages.places``."""
        return self.pages.places(*self._wanted(Sequence(request, -1, 0.0)))

    @property
    def has_unsaved(self) -> bool:
        """Whether ``saves`` will return something, now or later."""
        return self.pages.has_unsaved

    def saves(self) -> tuple[list[Save], list[Save]]:
        """Return pages and snapshots that the device copies for the tiers before the next plan."""
        if self._transfers is None:
            return [], []
        return self.pages.unsaved(*self._transfers.room())

    def _arrived(self) -> list[Arrived]:
        """Return the pages that have come back, and admit the sequences that have all of them.

        While rows run, a plan puts one large block of pages into place: the rows hardly wait then.
        """
        if self._transfers is None:
            return []
        arrived = self._transfers.take(1 if self.running else None)
        for sequence, load in list(self.loading.items()):
            if not load.is_done:
                continue
            del self.loading[sequence]
            tokens = load.n_good * self.pages.size
            self.pages.publish(sequence.held, self._shared(sequence, tokens), sequence.prefix_key)
            if load.is_damaged:
                self.pages.release(sequence.held)
                sequence.slot = None
                self.take(sequence)
                continue
            snapshot = None
            if load.state is not None:
                snapshot = self.pages.snapshot(sequence.held, tokens, saves=False)
            self._start(sequence, Prefix(tokens, snapshot, load.state))
        return arrived

    def _has_pages(self, budgets: dict[Sequence, int]) -> bool:
        most = max(budgets.values(), default=0)
        return _total(self._short(most)) <= self.pages.available

    def _retire(self) -> None:
        """Move the rows whose last tokens are scheduled from ``running`` to ``ending``."""
        for sequence in [some for some in self.running.values() if some.room(1) <= 0]:
            del self.running[sequence.own_slot]
            sequence.slot = None
            self.ending.append(sequence)

    def _budgets(self, steps: int) -> dict[Sequence, int]:
        """Return the largest number of tokens for each running row.

        For a restricted row the host determines the allowed tokens. Beyond the known ones the row
        waits until its results have been read.
        """
        return {
            sequence: room
            for sequence in self.running.values()
            if not (sequence.is_masked and sequence.unsure)
            and (room := sequence.room(self._allowed(sequence, steps))) > 0
        }

    def _allowed(self, sequence: Sequence, steps: int) -> int:
        return min(steps, sequence.known - sequence.ahead) if sequence.is_masked else steps

    def _growth(self, sequence: Sequence, steps: int) -> int:
        """Return the number of pages that the sequence lacks for ``steps`` more tokens."""
        most = len(sequence.request.prompt) + sequence.request.max_new_tokens
        after = min(sequence.length + sequence.ahead + sequence.room(steps), most)
        return max(self.pages.need(after) - len(sequence.held.pages), 0)

    def _short(self, steps: int) -> list[tuple[Sequence, int]]:
        """Return (sequence, missing pages) of those that lack pages for ``steps`` more tokens."""
        size = self.pages.size
        return [
            (sequence, self._growth(sequence, steps))
            for sequence in self.admitted
            if sequence.length + sequence.ahead + steps > len(sequence.held.pages) * size
        ]

    @property
    def n_prompts(self) -> int:
        """Number of prompts that a plan may read tokens of."""
        n_free = self.max_slots - self.n_admitted
        return len(self.prefilling) + min(len(self.waiting), n_free)

    def _fill(self) -> tuple[list[Fill], list[Sequence], bool]:
        """Hand out the token budget in order of urgency.

        Returns (fills, sequences whose prompt is complete, whether the budget was too small).
        """
        budget = self.token_budget
        fills: list[Fill] = []
        started: list[Sequence] = []
        began = sorted(self.prefilling, key=_urgency)
        every = heapq.merge(began, list(self.waiting), key=_urgency)
        for sequence in itertools.islice(every, self.most_prompts):
            if sequence in self._preempted:
                break
            if sequence.slot is None:
                # Its known prefix is not determined before it is admitted.
                if fills and self._cost(self._next_fill(sequence)) > budget:
                    return fills, started, True
                if self.n_admitted >= self.max_slots and not self._victims(sequence):
                    break
                if self._is_coming(sequence):
                    continue
                if not self._admit(sequence):
                    break
                if sequence in self.loading:
                    continue
            while sequence.filled < sequence.to_fill:
                fill = self._next_fill(sequence)
                if fills and self._cost(fill) > budget:
                    return fills, started, True
                fills.append(fill)
                budget -= self._cost(fill)
                sequence.filled = fill.end
            self.prefilling.remove(sequence)
            self.running[sequence.own_slot] = sequence
            started.append(sequence)
        return fills, started, False

    def _next_fill(self, sequence: Sequence) -> Fill:
        border = (sequence.filled // self.chunk + 1) * self.chunk
        return Fill(sequence, sequence.filled, min(border, sequence.to_fill))

    def _cost(self, fill: Fill) -> int:
        return next((width for width in self.widths if width >= fill.size), fill.size)

    def _admit(self, sequence: Sequence) -> bool:
        """Move a sequence from waiting to prefilling.

        Less urgent sequences are preempted if that gives it a slot and pages. Returns False if it
        does not fit.
        """
        self._begin(sequence)
        if not self._has_room(sequence):
            victims = self._victims(sequence)
            if not victims or not self._has_room(sequence, without=victims):
                self.pages.release(sequence.held)
                return False
            while not self._has_room(sequence):
                self._preempt(victims)
                victims = [v for v in victims if v not in self._preempted]
            self.pages.release(sequence.held)
            self._begin(sequence)  # the prefix may be longer now, with the pages of the preempted
        held = sequence.held
        known = len(held.pages)
        self.waiting.remove(sequence)
        self.pages.grow(held, self._growth(sequence, 0))
        taken = {other.slot for other in self.admitted}
        sequence.slot = next(slot for slot in self._slots if slot not in taken)
        self._next += self._growth(sequence, 1)
        if held.missing is None:
            state = held.nodes[-1].state if held.nodes else None
            prefix = Prefix(known * self.pages.size, state)
            if held.source is not None:
                length = len(sequence.request.prompt) - 1
                prefix = Prefix(length, None, copy=(held.source, held.pages[known]))
            self._start(sequence, prefix)
        else:
            assert self._transfers is not None
            self.loading[sequence] = self._transfers.begin(held, known)
        return True

    def _victims(self, sequence: Sequence) -> list[Sequence]:
        """Return the admitted sequences that may be preempted for this one."""
        return [
            other
            for other in self.admitted
            if other.request.priority < sequence.request.priority
            and other.urgency > sequence.urgency
            and (self.recompute or not (other.output or other.ahead))
        ]

    def _start(self, sequence: Sequence, prefix: Prefix) -> None:
        """Let an admitted sequence prefill what follows its known prefix."""
        sequence.filled = prefix.length
        if not sequence.output:
            sequence.cached = sequence.filled
        self.prefilling.append(sequence)
        self._newcomers[sequence] = prefix

    def _is_coming(self, sequence: Sequence) -> bool:
        """Whether pages with which the sequence begins come back for another sequence."""
        if sequence.coming is not None and not sequence.coming.is_done:
            return True
        sequence.coming = None
        if self.loading:
            keys = set(self.pages.missing(*self._wanted(sequence)))
            loads = self.loading.values()
            sequence.coming = next((load for load in loads if not keys.isdisjoint(load.keys)), None)
        return sequence.coming is not None

    def _begin(self, sequence: Sequence) -> None:
        sequence.held = self.pages.begin(*self._wanted(sequence))

    def _wanted(self, sequence: Sequence) -> tuple[list[int], tuple[int, tuple[str | None, str]]]:
        """Return the tokens that the cache may know, and their key under the weights of now."""
        sequence.weights = self.weights
        return self._shared(sequence, sequence.to_fill), sequence.prefix_key

    def _has_room(self, sequence: Sequence, without: Collection[Sequence] = ()) -> bool:
        # Each sequence may generate one more token before the scheduler can react.
        need = self._next - sum(self._growth(other, 1) for other in without)
        need += self._growth(sequence, 1)
        others = self.n_admitted - len(without)
        available = self.pages.available + self.pages.gain(other.held for other in without)
        if others >= self.max_slots or need > available:
            return False
        if not others or need + self.pages.count // RESERVE <= available:
            return True
        stay = [sequence, *(other for other in self.admitted if other not in without)]
        return sum(self._growth(sequence, sequence.remaining) for sequence in stay) <= available

    def _preempt(self, victims: list[Sequence]) -> None:
        """Move the least urgent of ``victims`` back to waiting."""
        victim = max(victims, key=lambda sequence: sequence.urgency)
        self._next -= self._growth(victim, 1)
        prefix = self._newcomers.pop(victim, None)
        if prefix is not None and prefix.state is not None:
            assert self._transfers is not None
            if prefix.snapshot is None:
                self._transfers.placed()  # nobody will use the state
            else:
                self._orphans.append(prefix)
        self.finish(victim)
        self._preempted.append(victim)
        self.take(victim)
