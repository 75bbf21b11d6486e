"""Whole models: tokens/s of the decode loop with weights read before the wait and without.

    python -m benchmarks.rings llama-3.2-1b:w4a16 gla-1.3b llama-3.1-8b:w8a8:64:int8

Both loops run in turn in one process.  "rings" has ``settled_weights`` around the loop, as
``resident.advance`` has it; "rows" has not.  Weights are random; the tokens of both are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from typing import Any
from unittest import mock

import jax
import numpy as np

import jaxllama as jl
from jaxllama.evaluation.speed.harness import Decoding, timed
from jaxllama.executors import resident

LOOPS = {"rows": contextlib.nullcontext, "rings": resident.settled_weights}


def run(
    lm: jl.LanguageModel,
    batch: int,
    kv_dtype: str | None,
    context: int,
    new_tokens: int,
    runs: int,
) -> dict[str, Any]:
    """Return tokens/s of both loops, medians, and the share of equal tokens."""
    decoding, programs, kernels = Decoding(lm, batch, kv_dtype), {}, {}
    prompt = min(5, context)

    def begun() -> Any:
        return decoding.prefilled(prompt, new_tokens, context - prompt)[0]

    for name, settled in LOOPS.items():
        jax.clear_caches()
        with mock.patch.object(resident, "settled_weights", settled):
            made = decoding.compile(begun())
        programs[name], kernels[name] = decoding._loop, made.kernels_per_step
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    tokens = {}
    for _ in range(runs + 1):
        for name, program in programs.items():
            arguments = lm.params, begun(), decoding.sampling, decoding.stop_ids
            (rows, _), took = timed(program, *arguments, np.int32(new_tokens))
            seconds[name].append(took)
            tokens[name] = np.asarray(rows.written[0])
    found: dict[str, Any] = {
        name: round(batch * (new_tokens - 1) / statistics.median(times[1:]), 1)
        for name, times in seconds.items()
    }
    found["equal_tokens"] = float(np.mean(tokens["rows"] == tokens["rings"]))
    return found | {"kernels_per_step": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", help="PRESET[:SCHEME[:ROWS[:DTYPE of the cache]]]")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", help="a file for the results")
    args = parser.parse_args()
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for label in args.models:
        model, scheme, rows, kv_dtype = (*label.split(":"), "", "", "")[:4]
        try:
            lm = jl.load(model, quantize=scheme or None, random=True)
            shape = int(rows or 1), kv_dtype or None, args.context, args.new_tokens
            results[label] = run(lm, *shape, args.runs)
        except Exception as error:  # the others are still measured
            results[label] = repr(error)[:300]
        print(f"{label}: {results[label]}", flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
