"""Gain: whether drafts pay, by the measured rates of calls with and without them.

    how = gain.next(kind)              what the next call of this kind does
    gain.took(kind, how, rate)         the tokens a second of a row that it gave

The first calls of a kind draft, and a few wait: their rows draft nothing, but a head reads on.  If
drafting calls have the lower median, drafting ends.  Rows that run then draft no more, so a head
need not read them.  After ``AGAIN`` calls new rows are measured anew.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Hashable

DRAFT, WAIT, OFF = range(3)
AGAIN = 400  # calls


class Gain:
    """The calls of one draft beside one model, of which ``waits`` wait and twice as many draft."""

    def __init__(self, waits: int) -> None:
        self._waits = waits
        self._asked = collections.Counter[Hashable]()
        self._rates = collections.defaultdict[Hashable, dict[int, list[float]]](dict)

    def is_known(self, kind: Hashable) -> bool:
        """Return whether enough calls of this kind have been measured."""
        rates = self._rates[kind]
        drafts, waits = (len(rates.get(how, ())) for how in (DRAFT, WAIT))
        return drafts >= 2 * self._waits and waits >= self._waits

    def pays(self, kind: Hashable) -> bool:
        """Return whether drafts pay, or are not known not to."""
        if not self.is_known(kind):
            return True
        return self.ratio(kind) >= 1

    def ratio(self, kind: Hashable) -> float:
        """Return the rate with drafts over the rate without them."""
        rates = self._rates[kind]
        return statistics.median(rates[DRAFT]) / statistics.median(rates[WAIT])

    def next(self, kind: Hashable) -> int:
        """Return DRAFT, WAIT or OFF for the next call of this kind."""
        if self._asked[kind] >= AGAIN:
            del self._asked[kind], self._rates[kind]
        self._asked[kind] += 1
        if not self.pays(kind):
            return OFF
        drafts = len(self._rates[kind].get(DRAFT, ()))
        return WAIT if drafts >= 2 * self._waits and not self.is_known(kind) else DRAFT

    def took(self, kind: Hashable, how: int, rate: float) -> None:
        """Record a call of this kind."""
        if not self.is_known(kind):
            self._rates[kind].setdefault(how, []).append(rate)
