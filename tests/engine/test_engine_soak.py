"""Thousands of requests through one engine, started and stopped like a server's."""

from __future__ import annotations

import gc
import random
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Event, QueueFull, Request
from tests.helpers.engine_cases import DELTA_FAMILIES, model

REQUESTS, CLIENTS = 10_000, 8


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "hybrid", *DELTA_FAMILIES])
def test_ten_thousand_requests(family):
    """None lost, none answered twice, nothing compiled, memory flat."""
    eng = Engine(model(family), max_slots=16, max_len=96, prefill_chunk=16, max_queue=64)
    eng.warm_up()  # else a thread still compiles while the first requests run
    ends: dict[str, list[str]] = {}
    tokens: dict[str, int] = {}
    memory: list[int] = []
    started = threading.Event()
    counter = iter(range(REQUESTS))
    counter_lock = threading.Lock()
    compiled: list[str] = []

    def client(number: int) -> None:
        rng = random.Random(number)
        started.wait()
        while True:
            with counter_lock:
                index = next(counter, None)
            if index is None:
                return
            if index % (REQUESTS // 40) == 0:
                memory.append(resident_bytes())
            sampling = (
                jl.Sampling(temperature=1.0, seed=index, top_p=0.9)
                if index % 3 == 0
                else jl.Sampling(repetition_penalty=1.2)
                if index % 7 == 0
                else jl.Sampling()
            )
            prompt = tuple(rng.randrange(3, 97) for _ in range(rng.choice((1, 5, 20, 60))))
            request = Request(
                f"q{index}",
                prompt,
                rng.randrange(1, 16),
                sampling,
                priority=index % 11 == 0,
                logprobs=index % 5 or None,
                deadline=0.001 if index % 50 == 0 else None,
            )
            ended = threading.Event()
            ends[request.id], tokens[request.id] = [], 0

            def on_event(event: Event, ended=ended, breaks=index % 101 == 0) -> None:
                tokens[event.id] += len(event.tokens)
                if event.finish_reason:
                    ends[event.id].append(event.finish_reason)
                    ended.set()
                if breaks:
                    ended.set()
                    raise ConnectionError("the client is gone")

            while True:
                try:
                    eng.submit(request, on_event)
                    break
                except QueueFull:
                    time.sleep(0.005)
            if index % 9 == 0:
                eng.cancel(request.id)
            if index % 3:  # the others leave several in flight
                assert ended.wait(timeout=300)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    eng.start()
    for thread in threads:
        thread.start()
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    started.set()
    for thread in threads:
        thread.join()
    assert eng.drain(timeout=300)
    eng.stop()
    gc.collect()
    assert len(ends) == REQUESTS
    broken = {f"q{index}" for index in range(0, REQUESTS, 101)}
    for key, reasons in ends.items():
        # A listener that raised hears no more; everybody else hears one end.
        assert len(reasons) <= 1 if key in broken else len(reasons) == 1, (key, reasons)
    stats = eng.stats()
    assert sum(stats.finished.values()) == REQUESTS
    assert stats.completion_tokens >= sum(tokens.values())
    assert (stats.waiting, stats.running, stats.prefilling, stats.cache_tokens) == (0, 0, 0, 0)
    assert compiled == [] and stats.compilations == 0
    first, last = np.mean(memory[:4]), np.mean(memory[-4:])
    print(f"memory {first / 2**20:.1f} -> {last / 2**20:.1f} MiB", stats)
    assert last <= 1.05 * first
