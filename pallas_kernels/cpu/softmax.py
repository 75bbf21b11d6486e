"""The order in which every attention handler adds: a query's bits depend on nothing else.

    part:   ``PART`` keys from a multiple of ``PART`` on, whatever the query sees
    block:  ``BLOCK`` keys of a part.  In turn ``weigh`` gives exp(score - largest so far), and what
            was summed before fades by exp(largest before - largest so far)
    join:   the parts' sums, in turn, by the same rule

``cpu.attention`` (few query tokens, parts shared among threads) and ``cpu.prefill`` (many) call
these two functions.  A key that a query does not see has weight 0.  A block or part without keys
changes no sum.  So a query's result is the same in a step, a prompt, a padded prompt and a batch.

A score is 16 sums, each over every 16th feature in turn, added by halves (``Emitter.sums``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pallas_kernels.cpu.cache import LANES

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value

PART = 256
BLOCK = 64


def weigh(
    e: Emitter, scores: Sequence[Value], first: Value, end: Value, top: Value, total: Value
) -> tuple[list[Value], Value, Value, Value]:
    """Return (weights, fade, top, total) of a block for one query.

    scores: the block's, as vectors.  first, end: i64, the keys of the block that the query sees.
    top: the largest score of the part so far, in every lane; -inf before there is one.
    total: the weights' sum so far, lane by lane.  fade: of all that was summed before.
    """
    b, none = e.b, e.floats(float("-inf"))
    seen = []
    for i, score in enumerate(scores):
        start = e.i64(LANES * i)
        score = b.select(e.lanes_below(end - start), score, none)
        seen.append(b.select(e.lanes_below(first - start), none, score))
    largest = seen[0]
    for score in seen[1:]:
        largest = e.larger(score, largest)
    new_top = e.larger(e.splat(e.largest(largest)), top)
    base = _base(e, new_top)
    fade = e.exp(top - base)
    total, weights = total * fade, []
    for score in seen:
        hidden = b.fcmp_ordered("==", score, none)
        weight = b.select(hidden, e.floats(0.0), e.exp(score - base))
        weights.append(weight)
        total = total + weight
    return weights, fade, new_top, total


def join(e: Emitter, before: Sequence[Value], part: Sequence[Value]) -> list[Value]:
    """Return [top, total, *sums] of the parts ``before``, in turn, and one more.

    Each is [top, total, *sums]; top and total are the same in every lane.
    """
    top = e.larger(part[0], before[0])
    base = _base(e, top)
    fade, share = e.exp(before[0] - base), e.exp(part[0] - base)
    pairs = zip(before[1:], part[1:], strict=True)
    return [top, *(e.fma(share, new, fade * old) for old, new in pairs)]


def _base(e: Emitter, top: Value) -> Value:
    """Return the number that is subtracted from scores: ``top``, or 0 where no key was seen."""
    none = e.b.fcmp_ordered("==", top, e.floats(float("-inf")))
    return e.b.select(none, e.floats(0.0), top)
