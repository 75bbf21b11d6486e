"""The memory, barriers and warps of one cluster of blocks, and the order in which its warps go on.

A ``Task`` is some warps that take each step of the program together, each thread a lane of numpy.
Where warps may wait for one another in branches or loops that they do not share, they are tasks of
their own: ``Apart`` says so, and the cluster starts again.  A seeded choice says which task goes on
at each wait, and when each copy in the background ends; wgmma ends when it is waited for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from tests.helpers.emulator.clocks import GRAIN, Clocks, Race

DEVICE = 1 << 40  # addresses of device memory; those of shared memory are small
PEER = 1 << 24  # address of block r's shared memory, as its cluster sees it: (r + 1) * PEER
FIRST = 1024  # address at which a block's shared memory begins
LANES = 32
Run = Generator[bool, None, None]  # whether it waits


class Apart(Exception):
    """These warps part where they may wait for one another: a set of warps for each task."""

    def __init__(self, parts: list[frozenset[int]]):
        super().__init__(parts)
        self.parts = parts


class Deadlock(AssertionError):
    """Every warp waits."""


class Barrier:
    """An mbarrier: ``count`` arrivals and the bytes that were announced end a phase.

    made: its initialisation, an agent's step.
    """

    def __init__(self, count: int, agent: int, name: str, made: tuple[int, int]):
        self.count, self.agent, self.name, self.made = count, agent, name, made
        self.left, self.bytes, self.phase = count, 0, 0
        self.joined = self.released = (np.zeros(0, np.int32),) * 3
        self.waits: dict[int, tuple[int, int]] = {}  # a warp's last wait: the phase, and its clock

    def add(self, clocks: Clocks, arrivals: int, size: int, joined=None) -> None:
        """joined: what the arrivals release."""
        self.left, self.bytes = self.left - arrivals, self.bytes + size
        if joined is not None:
            self.joined = tuple(map(_larger, self.joined, joined))
        if self.left < 0:
            raise Race(f"{self.name}: more arrivals than the {self.count} of a phase")
        if self.left == 0 and self.bytes == 0:
            self.end(clocks)

    def end(self, clocks: Clocks) -> None:
        *_, after = self.joined
        for warp, (phase, clock) in self.waits.items():
            if phase == self.phase - 1 and (len(after) <= warp or after[warp] < clock):
                raise Race(f"{self.name}: a phase may end before {clocks.name(warp)} saw the last")
        self.phase, self.left = self.phase + 1, self.count
        known = np.zeros(self.agent + 1, np.int32)
        known[self.agent] = self.phase
        self.joined = self.released = tuple(_larger(x, known) for x in self.joined)

    def is_over(self, parity: int) -> bool:
        return self.phase % 2 != parity

    def waited(self, clocks: Clocks, warps: np.ndarray) -> None:
        if self.phase:
            clocks.join(warps, *self.released)
            for warp in warps.tolist():
                self.waits[warp] = self.phase - 1, int(clocks.seen[warp, warp])


def _larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (a, b) if len(a) >= len(b) else (b, a)
    out = a.copy()
    out[: len(b)] = np.maximum(out[: len(b)], b)
    return out


class Meeting:
    """A barrier of threads: bar.sync, or a cluster's.  It counts how often all have met."""

    def __init__(self) -> None:
        self.here, self.met = 0, 0
        self.joined = self.released = (np.zeros(0, np.int32),) * 3

    def arrive(self, threads: int, of: int, joined) -> None:
        self.here += threads
        self.joined = tuple(map(_larger, self.joined, joined))
        if self.here > of:
            raise Race(f"{self.here} threads at a barrier of {of}")
        if self.here == of:
            self.here, self.met, self.released = 0, self.met + 1, self.joined


class Flight:
    """A group of wgmma, whose results are there when it has landed."""

    def __init__(self) -> None:
        self.landed = False
        self.issued: list[tuple[np.ndarray, tuple[np.ndarray, ...]]] = []  # warps, what they knew


class InFlight(np.ndarray):
    """Results of wgmma: they may be moved, and only when they have landed may they be used."""

    flights: tuple[Flight, ...] = ()

    def __array_finalize__(self, source: Any) -> None:
        self.flights = getattr(source, "flights", ())

    def land(self) -> np.ndarray:
        if not all(x.landed for x in self.flights):
            raise Race("a result of wgmma is used before it is waited for")
        return self.view(np.ndarray)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        plain = [x.land() if isinstance(x, InFlight) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **named)


def in_flight(x: np.ndarray, flights: tuple[Flight, ...]) -> np.ndarray:
    if all(one.landed for one in flights):
        return x
    out = x.view(InFlight)
    out.flights = flights
    return out


def flights_of(*values: Any) -> tuple[Flight, ...]:
    return sum((x.flights for x in values if isinstance(x, InFlight)), ())


class Machine:
    """A cluster.

    memory: shared memory of the blocks, ``apart`` bytes from one another, then results, then
    operands.  tracked: bytes whose order counts, all but the operands.  owned: which bytes belong
    to an array or to shared memory.
    """

    def __init__(self, memory, tracked, owned, shared, apart, blocks, threads, seed):
        self.bytes, self.tracked, self.owned = memory, tracked, owned
        self.shared, self.apart, self.n_blocks, self.threads = shared, apart, blocks, threads
        self.views = {size: memory.view(f"u{size}") for size in (1, 2, 4)}
        warps = blocks * threads // LANES
        self.clocks = Clocks(warps, -(-warps // 4), -(-tracked // GRAIN))
        self.barriers: dict[int, Barrier] = {}
        self.meetings: dict[Any, Meeting] = {}
        self.choose = random.Random(seed)
        self.copies: list[tuple[int, Callable[[], None]]] = []  # under way: when they end, and how
        self.time = self.changes = 0
        self.overlaps = False  # with the kernel before, until it is waited for
        self.by_warp = False  # warps of a warpgroup may be tasks of their own

    def barrier(self, at: int, warps: np.ndarray) -> Barrier:
        """The mbarrier at a byte, which these warps must know to be initialised."""
        found = self.barriers.get(at)
        if found is None or (self.clocks.seen[warps, found.made[0]] < found.made[1]).any():
            raise Race(f"an mbarrier at byte {at} may be used before it is initialised")
        return found

    def meeting(self, key: Any) -> Meeting:
        return self.meetings.setdefault(key, Meeting())

    def later(self, end: Callable[[], None]) -> None:
        self.copies.append((self.time + self.choose.choice((0, 1, 4, 100)), end))

    def end_copies(self, forced: bool) -> bool:
        """End the copies that are due, or one if ``forced``.  Return whether there were any."""
        due = [i for i, (when, _) in enumerate(self.copies) if when <= self.time]
        if not due and forced and self.copies:
            due = [self.choose.randrange(len(self.copies))]
        ended = [self.copies[i][1] for i in due]
        self.copies = [x for i, x in enumerate(self.copies) if i not in set(due)]
        for end in ended:
            end()
        self.changes += len(ended)
        return bool(ended)

    def run(self, tasks: list[Task], body: Callable[[Task], Run]) -> None:
        runs = {task: body(task) for task in tasks}
        waiting: dict[Task, int] = {}  # the changes when a task found that it has to wait
        favourite = self.choose.choice(tasks)
        while runs:
            self.time += 1
            self.end_copies(forced=False)
            ready = [x for x in runs if waiting.get(x) != self.changes]
            if not ready:
                if not self.end_copies(forced=True):
                    where = "; ".join(f"{x.name} at {x.waits_at}" for x in runs)
                    raise Deadlock(f"every warp waits: {where}")
                continue
            if self.choose.random() < 1 / 16:
                favourite = self.choose.choice(tasks)
            is_ahead = favourite in ready and self.choose.random() < 7 / 8
            task = favourite if is_ahead else self.choose.choice(ready)
            try:
                is_waiting = next(runs[task])
                waiting[task] = self.changes if is_waiting else -1
            except StopIteration:
                task.ended()
                del runs[task]
                self.changes += 1
        while self.end_copies(forced=True):
            pass
        self.check_exit()

    def check_exit(self) -> None:
        """Shared memory goes with its block: other blocks and copies must be through with it."""
        clocks, own = self.clocks, self.threads // LANES
        agents = np.arange(clocks.agents)
        for rank in range(self.n_blocks):
            words = slice(rank * self.apart // GRAIN, (rank + 1) * self.apart // GRAIN)
            warps = np.arange(rank * own, (rank + 1) * own)
            last = clocks.read[words].max(0)
            writer, written = clocks.writer[words], clocks.written[words]
            steps = np.zeros(clocks.agents, np.int32)
            np.maximum.at(steps, writer, written)
            steps[: clocks.readers] = np.maximum(steps[: clocks.readers], last)
            of_others = (agents < clocks.warps) & ~np.isin(agents, warps)
            of_copies = agents >= clocks.inits + clocks.warps
            late = (steps > clocks.seen[warps].max(0)[: clocks.agents]) & (of_others | of_copies)
            if late.any():
                name = clocks.name(int(np.flatnonzero(late)[0]))
                raise Race(f"block {rank} may end before {name} is through with its memory")


class Task:
    """Some warps of a cluster, in step.  lanes: their threads' numbers in the cluster.

    Values are numpy scalars, or arrays of a value for each lane.  A mask says which lanes are
    active; None says all.
    """

    def __init__(self, machine: Machine, warps: list[int], special, tensors, registers_of):
        self.machine, self.clocks = machine, machine.clocks
        self.warps = np.array(warps)
        self.lanes = (self.warps[:, None] * LANES + np.arange(LANES)).reshape(-1)
        self.n, self.warp = len(self.lanes), np.repeat(self.warps, LANES)
        self.rank = self.lanes // machine.threads
        self.special = {name: x[self.lanes] for name, x in special.items()}
        self.index = np.arange(self.n)
        self.every = np.ones(self.n, bool)
        self.base = self.rank * machine.apart - FIRST
        self.products = [Flight()]  # groups of wgmma under way
        self.pending: list[tuple] = []  # cp.async under way
        self.stores: list[tuple] = []  # bulk stores under way, and the steps that they belong to
        self.met: dict[str, list] = {}  # the barriers of threads at which these are
        self.waits_at = "its start"
        self.may_touch = np.full(self.n, not machine.overlaps)
        self.name = f"warps {warps}"
        self.first, self.tensors = np.int64(FIRST), tensors
        self.registers = registers_of(self)

    def touch(self, mask) -> None:
        """Device memory is read or written."""
        if not (self.may_touch if mask is None else self.may_touch[mask]).all():
            raise Race("device memory is read or written before the kernel before has ended")

    # --- values and masks ---

    def full(self, x: Any) -> np.ndarray:
        """An array with an entry for each lane."""
        x = np.asarray(x)
        return x if x.ndim and x.shape[0] == self.n else np.broadcast_to(x, (self.n, *x.shape))

    def active(self, mask) -> np.ndarray:
        return self.index if mask is None else np.flatnonzero(mask)

    def warps_of(self, mask) -> np.ndarray:
        return self.warps if mask is None else np.unique(self.warp[mask])

    def split(self, condition, mask, may_wait: bool):
        """(whether a branch is taken, its mask) for both values of the condition."""
        if np.ndim(condition) == 0:
            return (True, mask, False, None) if condition else (False, None, True, mask)
        yes = condition if mask is None else condition & mask
        if not yes.any():
            return False, None, True, mask
        no = ~condition if mask is None else ~condition & mask
        if not no.any():
            return True, mask, False, None
        if may_wait:
            self.part(yes, no)
        return True, yes, True, no

    def part(self, yes: np.ndarray, no: np.ndarray) -> None:
        """Make tasks of the warpgroups that go different ways, or of the warps if it has to be.

        A warpgroup's warps go one way after the other, so that they multiply together.
        """
        size = 1 if self.machine.by_warp else 4
        ways = np.stack([yes, no]).reshape(2, -1, LANES).any(2)
        groups: dict[tuple, set[int]] = {}
        for unit in np.unique(self.warps // size):
            own = self.warps // size == unit
            kind = tuple(ways[:, own].any(1))
            groups.setdefault(kind, set()).update(self.warps[own].tolist())
        groups.pop((False, False), None)
        if len(groups) > 1:
            raise Apart([frozenset(x) for x in groups.values()])

    def live(self, condition, mask, may_wait: bool):
        """(whether a loop goes on, the mask of its turn)."""
        yes, inner, no, _ = self.split(condition, mask, may_wait)
        return yes, inner if no else mask

    # --- memory ---

    def place(self, address, mask, size: int, space: str, align: int) -> np.ndarray:
        """The bytes at which the active lanes' accesses begin."""
        at = np.asarray(address)
        if at.ndim == 0:
            at = np.full(self.n, at)
        at, base = (at, self.base) if mask is None else (at[mask], self.base[mask])
        at = at.astype(np.int64)
        if not len(at):
            return at
        if (at % align).any():
            raise Race(
                f"an address of {space} memory is no multiple of {align}: {at[at % align > 0][0]}"
            )
        if at[0] >= DEVICE:
            at = at - DEVICE
            if not (self.machine.owned[at] & self.machine.owned[at + size - 1]).all():
                raise Race("an access of device memory lies in no array")
            return at
        peer = at >= PEER
        inside = np.where(peer, at % PEER, at) - FIRST
        if (inside < 0).any() or (inside + size > self.machine.shared).any():
            raise Race(f"an access lies outside of shared memory: byte {inside.max() + FIRST}")
        if peer.any():
            return (at // PEER - 1) * self.machine.apart + inside
        return at + base

    def load(self, address, mask, size: int, dtype: str, space: str = "", shape=()):
        """A value of ``size`` bytes; shape: of a vector.  What races is NaN, or -1."""
        unit = min(size, 4)
        at = self.place(address, mask, size, space, min(size, 16))
        places = (at // unit)[:, None] + np.arange(size // unit)
        raw = self.machine.views[unit][places]
        if len(at) and at[0] < self.machine.tracked:
            races = self.clocks.reads(self.warps_at(mask), places * unit // GRAIN)
            if races is not None:
                raw[races] = ~raw.dtype.type(0)
        if mask is not None:
            own = np.zeros((self.n, raw.shape[1]), raw.dtype)
            own[mask] = raw
            raw = own
        out = np.ascontiguousarray(raw).view(dtype)
        return out.reshape(self.n, *shape) if shape else out[:, 0]

    def store(self, value, address, mask, size: int, space: str = "", dtype=None) -> None:
        unit = min(size, 4)
        at = self.place(address, mask, size, space, min(size, 16))
        if not len(at):
            return
        if at[0] >= self.machine.tracked:
            raise Race("a store to an operand")
        if isinstance(value, InFlight):
            value.land()
        value = self.full(np.asarray(value, dtype))
        value = np.ascontiguousarray(value if mask is None else value[mask])
        raw = value.reshape(len(at), -1).view(f"u{unit}")
        places, memory = (at // unit)[:, None] + np.arange(size // unit), self.machine.views[unit]
        words, same = places * unit // GRAIN, memory[places] == raw
        self.clocks.writes(self.warps_at(mask), words, "a store", same=same)
        memory[places] = raw
        if (memory[places] != raw).any():
            raise Race("threads store different values at one place at once")

    def warps_at(self, mask) -> np.ndarray:
        return self.warp if mask is None else self.warp[mask]

    # --- mbarriers ---

    def each_barrier(self, address, mask):
        """(place, lanes) of each barrier at the lanes' addresses."""
        at = self.place(address, mask, 8, "shared", 8)
        lanes = self.active(mask)
        if len(at) and (at == at[0]).all():
            yield int(at[0]), lanes
            return
        for one in np.unique(at).tolist():
            yield one, lanes[at == one]

    def barrier_init(self, address, count, mask) -> None:
        for at, lanes in self.each_barrier(address, mask):
            assert len(lanes) == 1, "several threads initialise a barrier"
            name = f"the mbarrier at byte {at % self.machine.apart + FIRST}"
            agent, warp = self.clocks.new_agent(f"a copy of {name}"), int(self.warp[lanes[0]])
            made = self.clocks.initialised(warp)
            self.machine.barriers[at] = Barrier(int(self.full(count)[lanes[0]]), agent, name, made)

    def arrive(self, address, mask, count=1, size=0) -> None:
        counts, sizes = self.full(count), self.full(size)
        every = []
        for at, lanes in self.each_barrier(address, mask):
            warps = np.unique(self.warp[lanes])
            joined = self.clocks.released(warps)
            barrier = self.machine.barrier(at, warps)
            barrier.add(self.clocks, int(counts[lanes].sum()), int(sizes[lanes].sum()), joined)
            every.append(warps)
        if every:
            self.clocks.advance(np.unique(np.concatenate(every)))
            self.machine.changes += 1

    def wait(self, address, parity, mask) -> Run:
        self.waits_at = "an mbarrier"
        yield False
        parity = self.full(parity)
        left = [
            (self.machine.barrier(at, self.warp[lanes]), int(p), lanes[parity[lanes] == p])
            for at, lanes in self.each_barrier(address, mask)
            for p in np.unique(parity[lanes])
        ]
        while True:
            still = []
            for barrier, p, lanes in left:
                if barrier.is_over(p):
                    barrier.waited(self.clocks, np.unique(self.warp[lanes]))
                else:
                    still.append((barrier, p, lanes))
            left = still
            if not left:
                return
            self.waits_at = ", ".join(f"{b.name} (phase {b.phase})" for b, *_ in left)
            yield True

    # --- barriers of threads ---

    def meet(self, kind: str, ident, threads, mask) -> Run:
        """bar.sync: of the threads of a block; ident: its number."""
        yield from self.arrive_at(kind, ident, threads, mask)
        yield from self.await_met(kind)

    def arrive_at(self, kind: str, ident, threads, mask, is_release=True) -> Run:
        self.waits_at = kind
        yield False
        lanes = self.active(mask)
        key = self.full(ident)[lanes] + (0 if kind == "cluster" else 1000 * self.rank[lanes])
        threads = self.full(threads)[lanes]
        self.met[kind] = []
        for one in np.unique(key).tolist():
            own = key == one
            warps = np.unique(self.warp[lanes[own]])
            meeting = self.machine.meeting((kind, one))
            self.met[kind].append((meeting, meeting.met, warps))
            joined = self.clocks.released(warps)
            if not is_release:
                published = self.clocks.published[warps].max(0)
                joined = published, published, joined[2]
            meeting.arrive(int(own.sum()), int(threads[own][0]), joined)
        self.clocks.advance(self.warps_of(mask))
        self.machine.changes += 1

    def await_met(self, kind: str) -> Run:
        if not self.met.get(kind):
            raise Race(f"{self.name} wait for a {kind} barrier without an arrival")
        while any(meeting.met == before for meeting, before, _ in self.met[kind]):
            self.waits_at = kind
            yield True
        for meeting, _, warps in self.met[kind]:
            self.clocks.join(warps, *meeting.released)
        self.met[kind] = []

    # --- cp.async: 16 bytes of a thread ---

    def copy_async(self, to, source, mask, size) -> None:
        at, start = self.place(to, mask, 16, "shared", 16), self.place(source, mask, 16, "", 16)
        words, raw = (
            at[:, None] // 4 + np.arange(4),
            self.machine.bytes[start[:, None] + np.arange(16)],
        )
        raw = np.where(np.arange(16) < self.full(size)[self.active(mask)][:, None], raw, 0)
        raw = raw.astype(np.uint8)
        warps = self.warp if mask is None else self.warp[mask]
        self.clocks.check_written(warps, words, False, "cp.async")
        self.clocks.check_read(warps, words, "cp.async")
        agents = self.clocks.copies + warps
        self.clocks.writer[words] = agents[:, None]
        self.clocks.written[words] = self.clocks.steps[agents][:, None] + 1
        self.clocks.by_copy[words] = False
        target = (at[:, None] + np.arange(16)).reshape(-1)
        self.machine.bytes[target] = 0xFF
        self.pending.append((warps, at, raw))

    def land(self) -> None:
        """The copies of cp.async that were begun are there."""
        for _, at, raw in self.pending:
            self.machine.bytes[at[:, None] + np.arange(16)] = raw
        self.pending.clear()

    def copies_commit(self, mask) -> None:
        warps = self.warps_of(mask)
        self.clocks.steps[self.clocks.copies + warps] += 1

    def copies_wait(self, pending: int, mask) -> None:
        warps = self.warps_of(mask)
        agents = self.clocks.copies + warps
        self.clocks.ended(warps, agents, self.clocks.steps[agents] - pending)
        self.land()

    def copies_arrive(self, address, mask) -> None:
        """An arrival when the copies so far are there, and nothing else of the thread."""
        self.land()
        for at, lanes in self.each_barrier(address, mask):
            warps = np.unique(self.warp[lanes])
            agents = self.clocks.copies + warps
            self.clocks.steps[agents] += 1
            known = np.zeros(self.clocks.agents, np.int32)
            known[agents] = self.clocks.steps[agents]
            barrier = self.machine.barrier(at, warps)
            *_, after = self.clocks.released(warps)
            barrier.add(self.clocks, len(lanes), 0, (known, known * 0, after))
        self.machine.changes += 1

    # --- bulk copies: of one thread ---

    def copy_in(
        self, lane: int, source, to: np.ndarray, barrier: int, size: int, what: str
    ) -> None:
        """source: bytes of device memory, -1 where there are none.  to: their places."""
        machine = self.machine
        of = machine.barrier(barrier, self.warp[[lane]])
        words = np.unique(to // GRAIN)
        self.clocks.async_writes(int(self.warp[lane]), words, of.agent, of.phase + 1, what)
        machine.bytes[to] = 0xFF

        def end() -> None:
            machine.bytes[to] = np.where(source < 0, 0, machine.bytes[source])
            of.add(self.clocks, 0, -size)

        machine.later(end)

    def copy_out(self, lane: int, source, to: np.ndarray, what: str, add=None) -> None:
        """Copy bytes of shared memory to device memory.  add: the type of values to be added."""
        machine, warp = self.machine, int(self.warp[lane])
        reader = self.clocks.stores + warp
        self.clocks.async_reads(np.array([warp]), np.unique(source // GRAIN), reader, what)
        if to.min(initial=0) < 0 or (len(to) and to.max() >= machine.tracked):
            raise Race("a bulk store to an operand")

        def end() -> None:
            raw = machine.bytes[source]
            if add is not None:
                raw = (machine.bytes[to].view(add) + raw.view(add)).view(np.uint8)
            machine.bytes[to] = raw

        self.stores.append((self.clocks.steps[reader] + 1, end))

    def stores_commit(self, mask) -> None:
        self.clocks.steps[self.clocks.stores + self.warps_of(mask)] += 1

    def stores_wait(self, pending: int, mask) -> None:
        warps = self.warps_of(mask)
        agents = self.clocks.stores + warps
        steps = self.clocks.steps[agents] - pending
        self.clocks.ended(warps, agents, steps)
        self.land_stores(int(steps.max()))

    def land_stores(self, step: int) -> None:
        due = [end for at, end in self.stores if at <= step]
        self.stores[:] = [x for x in self.stores if x[0] > step]
        for end in due:
            end()

    # --- wgmma: of a warpgroup ---

    def products_commit(self) -> None:
        for group in np.unique(self.warps // 4):
            warps = self.warps[self.warps // 4 == group]
            self.products[-1].issued.append((warps, self.clocks.released(warps)))
        self.clocks.advance(self.warps)
        self.products.append(Flight())
        self.clocks.steps[np.unique(self._product_agents())] += 1

    def _product_agents(self) -> np.ndarray:
        return self.clocks.products + self.warps // 4

    def products_wait(self, pending: int) -> None:
        done = max(len(self.products) - 1 - pending, 0)
        for flight in self.products[:done]:
            flight.landed = True
            for warps, known in flight.issued:  # it ends when all four warps have begun it
                self.clocks.join(warps, *known)
        del self.products[:done]
        agents = self._product_agents()
        self.clocks.ended(self.warps, agents, self.clocks.steps[agents] - pending)

    def ended(self) -> None:
        if len(self.products) > 1:
            raise Race(f"{self.name} end before their wgmma")
        if self.pending:
            raise Race(f"{self.name} end before their cp.async")
        read = self.clocks.stores + self.warps
        if (self.clocks.seen[self.warps, read] < self.clocks.steps[read]).any():
            raise Race(f"{self.name} end before their bulk stores have read shared memory")
        if self.stores and max(at for at, _ in self.stores) > self.clocks.steps[read].max():
            raise Race(f"{self.name} end with bulk stores in no group")
        self.land_stores(1 << 30)
