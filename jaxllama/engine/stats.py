"""EngineStats: an engine's figures at the end of its last step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxllama.engine.divided import AnyScheduler
from jaxllama.engine.options import ResolvedOptions
from jaxllama.engine.tiers import Tiers


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """An engine's present state, and its totals since it was created.

    programs_missing: programs that a thread still compiles; a larger one serves until then.

    pages_used: pages held by running requests. pages_known: pages that new requests may begin with.
    finished: number of requests by finish reason. compilations: programs compiled since the
    warm-up. accepted_tokens: the drafted tokens that the model accepted.

    host_tier, disk_tier: the prefixes that have left the device. bytes: what they take. hits: pages
    and states that were found there, and hit_bytes their bytes. tier_lost: pages that left the
    device without a copy.
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
    host_tier_bytes: int = 0
    host_tier_hits: int = 0
    host_tier_hit_bytes: int = 0
    disk_tier_bytes: int = 0
    disk_tier_hits: int = 0
    disk_tier_hit_bytes: int = 0
    tier_lost: int = 0
    programs_missing: int = 0

    @property
    def cache_share(self) -> float:
        """Share of the cache in use; 0 where no engine runs."""
        return self.cache_tokens / self.cache_capacity if self.cache_capacity else 0.0


def count(
    scheduler: AnyScheduler,
    options: ResolvedOptions,
    counts: Mapping[str, int],
    steps: int,
    compilations: int,
) -> EngineStats:
    pools = scheduler.pools
    used, tiers = sum(pool.used for pool in pools), pools[0].tiers
    return EngineStats(
        waiting=len(scheduler.waiting),
        prefilling=len(scheduler.prefilling),
        running=len(scheduler.running),
        max_slots=options.max_slots,
        cache_tokens=used * pools[0].size,
        cache_capacity=options.cache_tokens,
        pages=sum(pool.count for pool in pools),
        pages_used=used,
        pages_known=sum(pool.known for pool in pools),
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
        **({} if tiers is None else _tiers(tiers)),
    )


def _tiers(tiers: Tiers) -> dict[str, int]:
    return {
        "host_tier_bytes": tiers.host_used,
        "host_tier_hits": tiers.counts.host_hits,
        "host_tier_hit_bytes": tiers.counts.host_hit_bytes,
        "disk_tier_bytes": 0 if tiers.files is None else tiers.files.nbytes,
        "disk_tier_hits": tiers.counts.disk_hits,
        "disk_tier_hit_bytes": tiers.counts.disk_hit_bytes,
        "tier_lost": tiers.counts.lost,
    }
