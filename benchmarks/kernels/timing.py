"""Device time of a call: the one way in which all benches here measure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.mosaic.gpu import profiler


def device_us(
    f: Callable[..., Any], sets: Sequence[tuple], calls: int = 10, only: str = ""
) -> float:
    """Median microseconds of all kernels that one call of f (it is jitted) launches, as CUPTI has
    them.

    sets: operands, which the calls take in turn: more of them than pass the L2 keep it cold.
    only: part of the names of the kernels that count.
    """
    if not isinstance(f, jax.stages.Wrapped | jax.stages.Compiled):
        f = jax.jit(f)
    extension = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    for args in sets:
        jax.block_until_ready(f(*args))
    extension._cupti_init()
    try:
        for i in range(calls):
            last = f(*sets[i % len(sets)])
        jax.block_until_ready(last)
    finally:
        times = extension._cupti_get_timings(True)
    kernels = len(times) // calls
    each = [times[i : i + kernels] for i in range(0, len(times), kernels)]
    return 1e3 * statistics.median(sum(ms for name, ms in call if only in name) for call in each)
