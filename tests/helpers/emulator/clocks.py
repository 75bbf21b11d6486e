"""Which accesses of memory happen before which: the clocks of a cluster's warps and async copies.

An access is a race with an earlier one if no chain of barriers orders them, whatever order they
had in this run.  So one run finds the races of all orders in which its warps and copies may go.
What a warp reads in a race is NaN, or -1: it may read what it does not use.  Two writes that race,
and a race with a copy or a product in the background, are errors.

Agents are the warps, and what reads or writes for them in the background: a warpgroup's wgmma, a
warp's bulk stores, its cp.async, and each mbarrier for the copies that it counts.  ``seen[w, a]``
is how many of agent a's steps are known to have ended when warp w goes on.  ``fenced`` says the
same of steps that the asynchronous proxy sees: plain stores after a fence.  ``after[w, a]`` says
which steps came before, whether or not their stores are visible.
"""

from __future__ import annotations

import numpy as np

GRAIN = 4  # bytes that have one clock


class Race(AssertionError):
    """Two accesses of the same memory, of which no barrier puts one first."""


class Clocks:
    """Clocks of the warps, and of the words of memory.

    Agents that are no warps count their steps: a warpgroup's wgmma, and a warp's bulk stores, its
    cp.async and its initialisations of barriers; then the barriers' copies.

    warps: of the cluster.  groups: warpgroups of the cluster.  words: of ``GRAIN`` bytes.
    """

    def __init__(self, warps: int, groups: int, words: int):
        self.warps = warps
        self.products, self.stores = warps, warps + groups
        self.readers = self.stores + warps
        self.copies = self.readers
        self.inits = self.copies + warps
        self.agents = self.inits + warps
        self.seen = np.zeros((warps, self.agents + 64), np.int32)
        self.fenced = np.zeros_like(self.seen)
        self.published, self.after = np.zeros_like(self.seen), np.zeros_like(self.seen)
        self.advance(np.arange(warps))
        self.steps = np.zeros(self.agents, np.int32)  # of the agents that are no warps
        self.writer = np.zeros(words, np.int32)
        self.written = np.zeros(words, np.int32)
        self.by_copy = np.zeros(words, bool)
        self.by_atomic = np.zeros(words, bool)
        self.read = np.zeros((words, self.readers), np.int32)
        self.names: dict[int, str] = {}
        # Reads (a warp, a word, the warp's clock) that a later store may overtake: those that this
        # run has found, and those that a run before has, which give anything now.
        self.late: set[tuple[int, int, int]] = set()
        self.doubtful: set[tuple[int, int, int]] = set()

    def new_agent(self, name: str) -> int:
        """An agent for a barrier's copies."""
        if self.agents == self.seen.shape[1]:
            more = np.zeros((self.warps, 64), np.int32)
            for name in ("seen", "fenced", "after", "published"):
                setattr(self, name, np.hstack([getattr(self, name), more]))
        self.names[self.agents] = name
        self.agents += 1
        return self.agents - 1

    def own(self, warps: np.ndarray) -> np.ndarray:
        return self.seen[warps, warps]

    def advance(self, warps: np.ndarray) -> None:
        """What the warps do from here on is not part of what they have released."""
        self.seen[warps, warps] += 1
        self.after[warps, warps] = self.seen[warps, warps]

    # --- accesses: warps [n], words [n, k] ---

    def known(self, warps, words, is_async: bool = False) -> np.ndarray:
        """Which of the words were written before, as the warps know."""
        writer, at, column = self.writer[words], self.written[words], warps[:, None]
        known = at <= self.seen[column, writer]
        if is_async:
            known &= self.by_copy[words] | (at <= self.fenced[column, writer])
        return known

    def check_written(self, warps, words, is_async: bool, what: str, also=False) -> None:
        """also: which words may have been written by others meanwhile."""
        known = self.known(warps, words, is_async) | also
        if not known.all():
            i, j = np.argwhere(~known)[0]
            word = words[i, j]
            writer, at = self.writer[word], self.written[word]
            how = "wrote" if at > self.seen[warps[i], writer] else "wrote, unfenced,"
            self._fail(what, warps[i], word, writer, how)

    def check_read(self, warps, words, what: str, also=False) -> None:
        """Note the reads that may come after this store, or raise if a copy's or a product's may.

        also: which words may be read meanwhile.
        """
        known = self.read[words] <= self.seen[warps][:, None, : self.readers]
        known |= np.asarray(also)[..., None]
        if known.all():
            return
        for i, j, reader in np.argwhere(~known):
            word = int(words[i, j])
            if reader >= self.warps:
                self._fail(what, warps[i], word, reader, "reads")
            self.late.add((int(reader), word, int(self.read[word, reader])))

    def reads(self, warps, words) -> np.ndarray | None:
        """Which words are as no barrier says: a read of them may give anything.  None: no word."""
        known = self.known(warps, words)
        column = np.broadcast_to(warps[:, None], words.shape)
        if self.doubtful:
            for i, j in np.argwhere(np.isin(words, [word for _, word, _ in self.doubtful])):
                warp = int(column[i, j])
                key = warp, int(words[i, j]), int(self.seen[warp, warp])
                known[i, j] &= key not in self.doubtful
        if known.all():
            self.read[words, column] = self.own(warps)[:, None]
            return None
        self.read[words[known], column[known]] = self.own(column[known])
        return ~known

    def async_reads(self, warps, words, reader: int, what: str) -> None:
        """words: [k], of which all these warps must know.  reader: the agent, in its next step."""
        words = np.broadcast_to(words, (len(warps), len(words)))
        self.check_written(warps, words, True, what)
        self.read[words[0], reader] = self.steps[reader] + 1

    def writes(self, warps, words, what: str, is_atomic: bool = False, same=False) -> None:
        """same: which of the words stay as they are: such a store races with nothing."""
        together = self.by_atomic[words] if is_atomic else False
        self.check_written(warps, words, False, what, same | together)
        self.check_read(warps, words, what, same)
        self.writer[words], self.written[words] = warps[:, None], self.own(warps)[:, None]
        self.by_copy[words], self.by_atomic[words] = False, is_atomic

    def async_writes(self, warp: int, words, writer: int, step: int, what: str) -> None:
        """words: [k].  writer: the agent whose step it is."""
        warps, words = np.array([warp]), words[None]
        self.check_written(warps, words, True, what)
        self.check_read(warps, words, what)
        self.writer[words], self.written[words] = writer, step
        self.by_copy[words], self.by_atomic[words] = True, False

    def _fail(self, what: str, warp: int, word: int, other: int, how: str) -> None:
        raise Race(
            f"{what} of warp {warp}, byte {word * GRAIN}: {self.name(other)} {how} it, and no "
            "barrier says which is first"
        )

    def name(self, agent: int) -> str:
        for kind, first in (
            ("the initialisation by warp", self.inits),
            ("cp.async of warp", self.copies),
            ("a bulk store of warp", self.stores),
            ("wgmma of warpgroup", self.products),
        ):
            if agent >= first:
                return self.names.get(agent, f"{kind} {agent - first}")
        return f"warp {agent}"

    # --- order ---

    def join(self, warps: np.ndarray, *known: np.ndarray) -> None:
        """The warps know what they have waited for."""
        for own, other in zip((self.seen, self.fenced, self.after), known, strict=True):
            own[warps, : len(other)] = np.maximum(own[warps, : len(other)], other)

    def released(self, warps: np.ndarray) -> tuple[np.ndarray, ...]:
        """What the warps together know, for whom waits for them."""
        return tuple(own[warps].max(0) for own in (self.seen, self.fenced, self.after))

    def initialised(self, warp: int) -> tuple[int, int]:
        """A warp has initialised a barrier: (the agent, its step)."""
        agent = self.inits + warp
        self.steps[agent] += 1
        self.seen[warp, agent] = self.steps[agent]
        return agent, int(self.steps[agent])

    def publish(self, warps: np.ndarray) -> None:
        """A fence for initialised barriers, which a relaxed arrival releases then."""
        inits = slice(self.inits, self.inits + self.warps)
        self.published[warps, inits] = self.seen[warps, inits]

    def fence(self, warps: np.ndarray) -> None:
        self.fenced[warps] = np.maximum(self.fenced[warps], self.seen[warps])

    def ended(self, warps: np.ndarray, agents: np.ndarray, step: np.ndarray) -> None:
        """The warps have waited for steps of their agents."""
        self.seen[warps, agents] = np.maximum(self.seen[warps, agents], step)
