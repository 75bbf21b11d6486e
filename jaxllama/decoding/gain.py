"""Gain: whether drafts pay, by the measured rates of calls with and without them.

    how = gain.next()            what the next call does: DRAFT, WAIT or OFF
    gain.took(how, rate)         the tokens a second of a row that it gave

The first calls draft, and then a few wait: their rows draft nothing, but a head reads on.  If the
median of the calls that draft is not ``LEAST`` times as high, drafting ends.  Rows that run then
draft no more, so a head need not read them.  After ``AGAIN`` calls new rows are measured anew.
N-grams are not measured: where they find nothing, they cost next to nothing.
"""

from __future__ import annotations

import statistics

DRAFT, WAIT, OFF = range(3)
AGAIN = 400  # calls
LEAST = 1.1  # ratio that pays; calls that wait bear a part of a draft's costs


class Gain:
    """Calls of one kind, of which ``waits`` wait and twice as many draft before."""

    def __init__(self, waits: int) -> None:
        self._waits, self._calls = waits, 0
        self._rates: dict[int, list[float]] = {DRAFT: [], WAIT: []}

    @property
    def is_known(self) -> bool:
        """Whether enough calls have been measured."""
        return self._has_drafted and len(self._rates[WAIT]) >= self._waits

    @property
    def ratio(self) -> float:
        """The rate with drafts over the rate without, once it is known."""
        return statistics.median(self._rates[DRAFT]) / statistics.median(self._rates[WAIT])

    def next(self) -> int:
        """Return DRAFT, WAIT or OFF for the next call."""
        if self._calls and self._calls % AGAIN == 0:
            self._rates = {DRAFT: [], WAIT: []}
        self._calls += 1
        if self.is_known:
            return DRAFT if self.ratio >= LEAST else OFF
        return WAIT if self._has_drafted else DRAFT

    def took(self, how: int, rate: float) -> None:
        """Record a call."""
        if how in self._rates and not self.is_known:
            self._rates[how].append(rate)

    @property
    def _has_drafted(self) -> bool:
        return len(self._rates[DRAFT]) >= 2 * self._waits
