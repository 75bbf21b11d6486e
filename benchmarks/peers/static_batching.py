"""Continuous against static batching in time, and how the factor depends on the answers' lengths.
Run as ``python benchmarks/peers/static_batching.py [--model llama-3.2-1b --random --quantize w8a8
--kv-dtype int8 --slots 64 --mean 128 --prompt 128 --requests 768]``.

Static batching takes ``slots`` requests in order of arrival, decodes all of them to the end of the
longest, and only then takes the next.  Both sides run the same prefill program and the same step;
the static side's loop over a batch's steps is one call to the device, which has no gaps.  What rows
that have ended still cost it is their part of the products, not their attention.  All requests are
there at the beginning and the engine's time ends with the last answer, so its last steps, with few
rows, are in it; "waiting" is its rate until the last request had a slot, which is what a server
under load sustains.  "steps": decode steps of static batching over tokens / slots, the least.

Lengths: "uniform" over 1 .. 2 mean - 1, as in Orca (OSDI 2022); "exponential", as in Anyscale's
comparison of 2023; "lognormal" (sigma 1) and "heavy" (sigma 1.5), which is nearer to what chats
look like; each cut at 8 means.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

import jaxllama as jl
from jaxllama.engine import slots as device
from jaxllama.engine.request import Request
from jaxllama.engine.scheduler import Fill, TurnPlan
from jaxllama.engine.scheduler import Sequence as Row

HEAD = """\
                                   continuous, tokens/s        static       static / continuous
lengths        mean  longest  steps  seconds  all waiting   seconds            time  waiting  CPU"""
Answers = TypeVar("Answers")
Draw = Callable[[np.random.Generator, int, int], np.ndarray]
LENGTHS: dict[str, Draw] = {
    "uniform": lambda rng, mean, n: rng.integers(1, 2 * mean, n),
    "exponential": lambda rng, mean, n: rng.exponential(mean, n),
    "lognormal": lambda rng, mean, n: rng.lognormal(np.log(mean) - 1 / 2, 1.0, n),
    "heavy": lambda rng, mean, n: rng.lognormal(np.log(mean) - 9 / 8, 1.5, n),
}


def make_load(cfg: jl.ModelConfig, kind: str, n: int, mean: int, prompt: int) -> list[Request]:
    rng = np.random.default_rng(1)
    lengths = np.clip(LENGTHS[kind](rng, mean, n).round(), 1, 8 * mean).astype(int).tolist()
    low = min(100, cfg.vocab_size // 2)
    return [
        Request(str(index), tuple(rng.integers(low, cfg.vocab_size, prompt).tolist()), length,
                ignore_eos=True)
        for index, length in enumerate(lengths)
    ]  # fmt: skip


def continuous(engine: jl.Engine, load: Sequence[Request]) -> tuple[dict[str, list[int]], float]:
    """The tokens of each request, and tokens a second while requests wait."""
    tokens: dict[str, list[int]] = {request.id: [] for request in load}
    began, rate = time.perf_counter(), 0.0
    for request in load:
        engine.submit(request, lambda event: tokens[event.id].extend(event.tokens))
    while engine.step():
        if engine.scheduler.waiting:
            rate = sum(map(len, tokens.values())) / (time.perf_counter() - began)
    return tokens, rate


def static(engine: jl.Engine, load: Sequence[Request], width: int) -> dict[str, list[int]]:
    """The tokens of each request.  width: most tokens of an answer."""
    runner, slots = engine.runner, engine.options.max_slots
    tokens: dict[str, list[int]] = {}
    for begin in range(0, len(load), slots):
        rows = [Row(request, index, 0.0) for index, request in enumerate(load[begin:][:slots])]
        scheduler = engine.scheduler
        for slot, row in enumerate(rows):
            row.slot = slot
            tokens_of = len(row.request.prompt) + row.request.max_new_tokens
            assert scheduler.pages.grow(row.held, scheduler.pages.need(tokens_of))
        fills = [Fill(row, 0, row.to_fill) for row in rows]
        runner.run(TurnPlan([], rows, fills, rows, {}, 0), {}, scheduler).result()
        orders = np.full((slots, 3 + engine.options.more_pages), device.NOBODY, np.int32)
        orders[: len(rows), 0] = np.arange(len(rows))
        runner.slots, written, _ = device.decode(
            runner.cfg, runner.params, runner.slots,
            device.make_orders(orders, level=0, wants_top=False, wanted=0),
            runner._no_masks[slots], runner._stop_ids, n=slots,
            context=engine.options.row_pages, width=width,
        )  # fmt: skip
        for row in rows:
            scheduler.pages.release(row.held)
            runner.drop(row)
        for row, (n, *numbers) in zip(rows, np.asarray(written).tolist(), strict=False):
            tokens[row.request.id] = numbers[:n]
    return tokens


def timed(work: Callable[[], Answers]) -> tuple[Answers, float, float]:
    """What it returns, its seconds on the wall and of the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    return work(), time.perf_counter() - wall, time.process_time() - cpu


def compare(engine: jl.Engine, load: Sequence[Request], width: int) -> str:
    slots = engine.options.max_slots
    (tokens, rate), seconds, cpu = timed(lambda: continuous(engine, load))
    fixed_tokens, fixed, fixed_cpu = timed(lambda: static(engine, load, width))
    lengths = [request.max_new_tokens for request in load]
    assert [len(tokens[request.id]) for request in load] == lengths
    same = sum(tokens[key] == fixed_tokens[key] for key in tokens)
    steps = sum(max(lengths[begin : begin + slots]) for begin in range(0, len(load), slots))
    total = sum(lengths)
    return (
        f"{total / len(load):6.1f} {max(lengths):8} {steps * slots / total:6.2f}"
        f"{seconds:9.2f} s {total / seconds:6.0f} {rate:7.0f}{fixed:9.2f} s {total / fixed:6.0f}"
        f"{fixed / seconds:8.2f} {rate * fixed / total:8.2f} {fixed_cpu / cpu:8.2f}"
        f"  {same} of {len(load)} answers equal"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--random", action="store_true", help="random weights of its shape")
    parser.add_argument("--quantize")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--max-slots", type=int, default=16)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--mean", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--lengths", default=",".join(LENGTHS))
    parser.add_argument("--prefill-rows", type=int, help="the engine's, as the next")
    parser.add_argument("--steps-per-call", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    lm = jl.load(args.model, quantize=args.quantize, random=args.random)
    engine = jl.Engine(
        lm, max_slots=args.slots, max_len=args.prompt + 8 * args.mean, kv_dtype=args.kv_dtype,
        max_queue=args.requests, prefix_cache=False, prefill_chunk=min(args.prompt, 512),
        prefill_rows=args.prefill_rows, steps_per_call=args.steps_per_call,
    )  # fmt: skip
    engine.warm_up()
    static(engine, make_load(lm.config, "uniform", args.slots, 1, args.prompt), 8 * args.mean)
    print(HEAD)
    for _ in range(args.rounds):
        for kind in args.lengths.split(","):
            load = make_load(lm.config, kind, args.requests, args.mean, args.prompt)
            print(kind.ljust(12), compare(engine, load, 8 * args.mean), flush=True)


if __name__ == "__main__":
    main()
