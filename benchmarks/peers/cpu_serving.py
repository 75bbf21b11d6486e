"""16 clients against one: what the serving engine makes of this machine.  Run as
``python benchmarks/peers/cpu_serving.py [--model smollm2-135m]``.

A client sends its next request when the last is answered.  The two sides take turns in one process,
after a round that is not counted, and medians of the rounds' ratios are printed, in time and in CPU
time: on a busy machine the second is the steadier one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import jaxllama as jl
from jaxllama.engine.request import Request

SLOTS = 16
PROMPT = 32


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the wall, and of the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def prompts(rng: np.random.Generator, n: int) -> list[tuple[int, ...]]:
    return [tuple(rng.integers(100, 40000, PROMPT).tolist()) for _ in range(n)]


def clients(engine: jl.Engine, seed: int, n_clients: int, n_each: int, n_new: int) -> None:
    pending = list(enumerate(prompts(np.random.default_rng(seed), n_clients * n_each)))

    def next_request(event=None) -> None:
        if pending and (event is None or event.finish_reason):
            index, prompt = pending.pop()
            engine.submit(Request(f"c{index}", prompt, n_new, ignore_eos=True), next_request)

    for _ in range(n_clients):
        next_request()
    while engine.step():
        pass


def many_against_one(engine: jl.Engine, n_new: int, rounds: int) -> None:
    ratios = []
    for turn in range(rounds + 1):
        rates = []
        for n_clients, n_each in ((1, 3), (SLOTS, 2)):
            work = lambda: clients(engine, turn, n_clients, n_each, n_new)  # noqa: B023, E731
            rates.append([n_clients * n_each * n_new / seconds for seconds in timed(work)])
        one, many = rates
        print(
            f"1 client {one[0]:.1f} tokens/s, {one[1]:.1f} a CPU second; {SLOTS} clients "
            f"{many[0]:.1f}, {many[1]:.1f}",
            flush=True,
        )
        ratios.append([of_many / of_one for of_one, of_many in zip(one, many, strict=True)])
    tell(f"{SLOTS} clients / 1 client", ratios)


def tell(what: str, ratios: list[list[float]]) -> None:
    wall, cpu = (statistics.median(column) for column in zip(*ratios[1:], strict=True))
    print(f"{what}, medians of {len(ratios) - 1}: {wall:.2f}x in time, {cpu:.2f}x in CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--random", action="store_true", help="random weights of its shape")
    parser.add_argument("--new", type=int, default=48, help="tokens a client asks for")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    lm = jl.load(args.model, random=args.random)
    lm = jl.LanguageModel(lm.config.replace(eos_token_ids=()), lm.params, lm.tokenizer)
    # No prefix cache: later rounds would find the prompts of earlier ones in it.
    engine = jl.Engine(
        lm,
        max_slots=SLOTS,
        max_len=PROMPT + args.new,
        steps_per_call=1,
        max_queue=1000,
        prefix_cache=False,
    )
    print("warm-up: {:.1f} s, {:.1f} CPU s".format(*timed(engine.warm_up)), flush=True)
    many_against_one(engine, args.new, args.rounds)
    print(engine.stats())


if __name__ == "__main__":
    main()
