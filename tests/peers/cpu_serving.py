"""Two ratios of the serving engine on this machine: 16 clients against one, and continuous against
static batching.  Run as ``python tests/peers/cpu_serving.py [--model smollm2-135m]``.

A client sends its next request when the last is answered.  The mixed-length load has log-normal
answer lengths (sigma 1.5); static batching is ``lm.generate`` on 16 requests at a time, which ends
with the longest.  Wall time and CPU time are printed: on a busy machine the second is the
steadier one.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import jaxllama as jl
from jaxllama.serving.request import Request


def timed(work) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def prompts(rng: np.random.Generator, n: int, length: int) -> list[tuple[int, ...]]:
    return [tuple(rng.integers(100, 40000, length).tolist()) for _ in range(n)]


def clients(engine: jl.Engine, n_clients: int, n_each: int, n_new: int) -> None:
    rng = np.random.default_rng(0)
    work = prompts(rng, n_clients * n_each, 32)
    seconds: list[tuple[float, float]] = []

    def serve() -> None:
        pending = list(enumerate(work))

        def next_request(event=None) -> None:
            if pending and (event is None or event.finish_reason):
                index, prompt = pending.pop()
                request = Request(f"c{index}", prompt, n_new, ignore_eos=True)
                engine.submit(request, next_request)

        for _ in range(n_clients):
            next_request()
        while engine.step():
            pass

    seconds.append(timed(serve))
    wall, cpu = seconds[0]
    total = n_clients * n_each * n_new
    print(
        f"{n_clients:3d} clients: {total} tokens, {total / wall:7.1f} tokens/s, "
        f"{total / cpu:7.1f} tokens per CPU second",
        flush=True,
    )


def mixed(engine: jl.Engine, lm: jl.LanguageModel, n: int, median: float) -> None:
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(np.log(median), 1.5, n).round(), 1, 40 * median)
    lengths = lengths.astype(int).tolist()
    work = prompts(rng, n, 32)
    before = engine.stats().steps
    requests = [
        Request(f"m{index}", prompt, new, ignore_eos=True)
        for index, (prompt, new) in enumerate(zip(work, lengths, strict=True))
    ]
    wall, cpu = timed(lambda: engine.generate(requests))
    steps = engine.stats().steps - before
    print(f"continuous: {steps} steps, {wall:.1f} s, {cpu:.1f} CPU s", flush=True)

    batches = range(0, n, 16)
    static_steps = sum(max(lengths[begin : begin + 16]) for begin in batches)

    def static() -> None:
        for begin in batches:
            rows = [list(prompt) for prompt in work[begin : begin + 16]]
            # No stop tokens: every answer has its given length.
            lm.generate(rows, max(lengths[begin : begin + 16]))

    static_wall, static_cpu = timed(static)
    print(
        f"static: {static_steps} steps, {static_wall:.1f} s, {static_cpu:.1f} CPU s\n"
        f"continuous / static: {static_steps / steps:.2f}x steps, {static_wall / wall:.2f}x time, "
        f"{static_cpu / cpu:.2f}x CPU time",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new", type=int, default=48, help="tokens a client asks for")
    parser.add_argument("--median", type=float, default=16.0)
    args = parser.parse_args()
    lm = jl.load(args.model)
    lm = jl.LanguageModel(lm.config.replace(eos_token_ids=()), lm.params, lm.tokenizer)
    engine = jl.Engine(lm, max_slots=16, max_len=512, steps_per_call=1, max_queue=1000)
    print("warm-up: {:.1f} s, {:.1f} CPU s".format(*timed(engine.warm_up)), flush=True)
    for n_clients, n_each in ((1, 3), (16, 2), (1, 3), (16, 2)):
        clients(engine, n_clients, n_each, args.new)
    mixed(engine, lm, args.requests, args.median)
    print(engine.stats())


if __name__ == "__main__":
    main()
