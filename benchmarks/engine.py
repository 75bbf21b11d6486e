"""Tokens a second of the engine with a fixed number of requests in flight.

    python -m benchmarks.engine --prompt 128 --new 128 [--in-flight 512] [--seconds 30]

Steady state: a request that ends is followed by the next one.  The first requests ask for lengths
spread over 1 to ``--new``, so the rows are anywhere in their answers.  The clock starts when all of
these have ended, and counts every token that the engine hands out.  Prompts are random tokens, and
no prefix is shared.  One line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import numpy as np

import jaxllama as jl
from jaxllama.progress import working


class Load:
    """Requests that follow one another, ``in_flight`` at a time."""

    def __init__(self, engine: jl.Engine, prompt: int, new: int, in_flight: int) -> None:
        self.engine, self.prompt, self.new, self.in_flight = engine, prompt, new, in_flight
        self.tokens = self.ended = self._asked = 0
        self._draw = np.random.default_rng(0)

    def begin(self) -> None:
        """Submit the first requests, whose lengths are spread evenly."""
        for index in range(self.in_flight):
            self._ask(1 + index * self.new // self.in_flight)

    def _ask(self, new: int) -> None:
        vocabulary = self.engine.lm.config.vocab_size
        prompt = tuple(self._draw.integers(0, vocabulary, self.prompt).tolist())
        request = jl.Request(f"r{self._asked}", prompt, new, ignore_eos=True)
        self._asked += 1
        self.engine.submit(request, self._on_event)

    def _on_event(self, event: Any) -> None:
        self.tokens += len(event.tokens)
        if event.finish_reason is not None:
            self.ended += 1
            self._ask(self.new)


def run(engine: jl.Engine, prompt: int, new: int, in_flight: int, seconds: float) -> dict[str, Any]:
    """Return the rate of an engine that is warm.

    Parameters
    ----------
    engine
        An engine without a thread of its own, with room for ``in_flight`` requests.
    prompt, new
        Tokens of a prompt and of an answer.
    in_flight
        Requests at a time.
    seconds
        Length of the measurement.
    """
    load = Load(engine, prompt, new, in_flight)
    load.begin()
    while load.ended < in_flight:
        engine.step()
    tokens, ended, steps = load.tokens, load.ended, engine.steps
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        engine.step()
    took = time.perf_counter() - begun
    return {
        "tokens_per_second": (load.tokens - tokens) / took,
        "requests_per_second": (load.ended - ended) / took,
        "prompt_tokens_per_second": (load.ended - ended) * prompt / took,
        "step_seconds": took / max(engine.steps - steps, 1),
        "preemptions": engine.stats().preemptions,
        "seconds": took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="a preset; weights are random")
    parser.add_argument("--quantize", default="w8a8", help="a scheme, or none")
    parser.add_argument("--kv-dtype", default="int8")
    parser.add_argument("--mesh", help="as model=2; the default is one device")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--in-flight", type=int, default=512, help="requests at a time")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--memory-share", type=float, default=0.9)
    parser.add_argument("--steps-per-call", type=int)
    parser.add_argument("--prefill-chunk", type=int)
    parser.add_argument("--token-budget", type=int)
    args = parser.parse_args()
    scheme = None if args.quantize == "none" else args.quantize
    lm = jl.load(args.model, quantize=scheme, mesh=args.mesh, random=True)
    engine = jl.Engine(
        lm,
        max_slots=args.in_flight,
        max_len=args.prompt + args.new,
        kv_dtype=args.kv_dtype,
        memory_share=args.memory_share,
        prefix_cache=False,
        steps_per_call=args.steps_per_call,
        prefill_chunk=args.prefill_chunk,
        token_budget=args.token_budget,
        max_queue=2 * args.in_flight,
    )
    begun = time.perf_counter()
    with working("compiling"):
        engine.warm_up()
    warm = time.perf_counter() - begun
    with working("measuring"):
        report = run(engine, args.prompt, args.new, args.in_flight, args.seconds)
    about = {
        "model": args.model,
        "quantize": scheme,
        "kv_dtype": engine.options.kv_dtype,
        "prompt": args.prompt,
        "new": args.new,
        "in_flight": args.in_flight,
        "mesh": None if lm.mesh is None else dict(lm.mesh.shape),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "warm_up_seconds": warm,
    }
    print(json.dumps({**about, **report}))


if __name__ == "__main__":
    main()
