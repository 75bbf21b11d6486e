"""SmolLM2-135M on this CPU: jaxllama and transformers, one after the other, on the same weights.

    python benchmarks/peers/cpu_transformers.py

Prints decode tokens/s (greedy, 64 tokens) and seconds of a 512-token prefill: medians of 5 calls in
a process, then medians over 3 rounds.  Each engine has a process of its own, so that their thread
pools do not meet, and the rounds alternate, so that a machine that changes its speed changes it for
all.  Needs the test extra (torch, transformers).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
LONG = np.random.default_rng(0).integers(100, 49000, (1, 512))
NEW, REPEATS, ROUNDS = 64, 5, 3
ENGINES = {
    "jaxllama float32": "jaxllama",
    "transformers float32": "float32",
    "transformers bfloat16": "bfloat16",
}


def median_seconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def line(name: str, decode: float, prefill: float) -> str:
    return f"{name:24s} decode {decode:6.1f} tokens/s   prefill of 512 {prefill:.3f} s"


def measure_jaxllama(directory: str) -> None:
    import jax
    import jax.numpy as jnp

    import jaxllama as jl

    lm = jl.load(directory)
    endless = jl.LanguageModel(lm.config.replace(eos_token_ids=()), lm.params, None)
    tokens, lengths = jnp.asarray(LONG, jnp.int32), jnp.asarray([512], jnp.int32)

    def prefill() -> None:
        cache = jl.init_cache(lm.config, 1, 576)
        jax.block_until_ready(jl.prefill(lm.config, lm.params, tokens, lengths, cache))

    decode = median_seconds(lambda: endless.generate([PROMPT], NEW))
    print(NEW / decode, median_seconds(prefill))


def measure_transformers(directory: str, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    ids, long = torch.tensor([PROMPT]), torch.tensor(LONG)
    with torch.no_grad():
        decode = median_seconds(
            lambda: model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        )
        prefill = median_seconds(lambda: model(long))
    print(NEW / decode, prefill)


def main() -> None:
    import jaxllama as jl
    from jaxllama.checkpoints.hf import load as hf

    with tempfile.TemporaryDirectory() as parent:
        directory = f"{parent}/smollm2"
        lm = jl.load("smollm2-135m", exact=True)
        hf.save(directory, lm.config, lm.params)
        results: dict[str, list[list[float]]] = {name: [] for name in ENGINES}
        for _ in range(ROUNDS):
            for name, engine in ENGINES.items():
                command = [sys.executable, __file__, engine, directory]
                run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                results[name].append([float(word) for word in run.stdout.split()[-2:]])
                print(line(name, *results[name][-1]), flush=True)
    print("medians")
    for name, runs in results.items():
        print(line(name, *(statistics.median(column) for column in zip(*runs, strict=True))))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "jaxllama":
        measure_jaxllama(sys.argv[2])
    else:
        measure_transformers(sys.argv[2], sys.argv[1])
