"""EngineStats: an engine's figures at the end of its last step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxllama.engine.options import ResolvedOptions
from jaxllama.engine.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """An engine's present state, and its totals since it was created.

    pages_used: pages held by running requests. pages_known: pages that new requests may begin with.
    finished: number of requests by finish reason. compilations: programs compiled since the
    warm-up. accepted_tokens: the drafted tokens that the model accepted.
    """

    waiting: int
    prefilling: int
    running: int
    max_slots: int
    cache_tokens: int
    cache_capacity: int
    pages: int
    pages_used: int
    pages_known: int
    prefix_hit_tokens: int
    prompt_tokens: int
    completion_tokens: int
    finished: dict[str, int]
    preemptions: int
    steps: int
    compilations: int
    drafted_tokens: int
    accepted_tokens: int


def count(
    scheduler: Scheduler,
    options: ResolvedOptions,
    counts: Mapping[str, int],
    steps: int,
    compilations: int,
) -> EngineStats:
    pages = scheduler.pages
    return EngineStats(
        waiting=len(scheduler.waiting),
        prefilling=len(scheduler.prefilling),
        running=len(scheduler.running),
        max_slots=options.max_slots,
        cache_tokens=pages.used * pages.size,
        cache_capacity=options.cache_tokens,
        pages=pages.count,
        pages_used=pages.used,
        pages_known=pages.known,
        prefix_hit_tokens=counts["prefix_hit_tokens"],
        prompt_tokens=counts["prompt_tokens"],
        completion_tokens=counts["completion_tokens"],
        finished={
            key.removeprefix("finished "): number
            for key, number in counts.items()
            if key.startswith("finished ")
        },
        preemptions=counts["preemptions"],
        steps=steps,
        compilations=compilations,
        drafted_tokens=counts["drafted_tokens"],
        accepted_tokens=counts["accepted_tokens"],
    )
