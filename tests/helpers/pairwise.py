"""Pairwise sets of a test's cases: the default suite runs them, ``-m slow`` runs the rest.

A test with several ``parametrize`` decorators is a cross product. Most faults depend on one value or
on two values together, so a subset in which every pair of values from two axes occurs once finds
them (Kuhn, Wallace and Gallo, 2004, IEEE Transactions on Software Engineering 30(6)).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

Case = tuple[Hashable, ...]


def pairwise(cases: Sequence[Case]) -> list[int]:
    """Return indices of cases that together hold every pair of values that any case holds.

    cases: one tuple of values for each case, all of the same length. The choice is greedy: the case
    with the most new pairs comes next, the first of several. Cases of one axis are all chosen.
    """
    pairs = [
        {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(case), 2)}
        or {(0, value, 0, value) for value in case}
        for case in cases
    ]
    missing = set().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(pairs[index] & missing), -index))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)
