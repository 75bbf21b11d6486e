"""What LoRA adapters cost a decode step: rows spread over several, beside the base model's step.

    python -m benchmarks.adapters --model llama-3.1-8b --quantize w8a8 --kv-dtype int8 \\
        --batch 64 --adapters 8 --rank 16 --context 1024

Random weights, and random adapters of every product.  One line of JSON: both steps in seconds,
their ratio, kernels and the adapters' bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import jax
import numpy as np

from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.checkpoints.peft import Factors, products
from jaxllama.config import ModelConfig
from jaxllama.evaluation.speed import decode
from jaxllama.language_model import LanguageModel
from jaxllama.loading import load
from jaxllama.model.lora import attach, factors, for_rows
from jaxllama.progress import working
from pallas_kernels.qtensor import tree_bytes


def run(
    lm: LanguageModel, *, adapters: int, rank: int, batch: int, **options: Any
) -> dict[str, Any]:
    """options: of ``decode.run``."""
    params = attach(
        tensor_table(lm.config), lm.params, [_random(lm.config, rank, i) for i in range(adapters)]
    )
    rows = np.arange(batch, dtype=np.int32) % adapters + 1
    adapted = dataclasses.replace(lm, params=for_rows(params, jax.device_put(rows)))
    reports = [decode.run(each, batch=batch, **options) for each in (lm, adapted)]
    base, ours = (batch / report["decode_tokens_per_second"] for report in reports)
    return {
        "model": lm.config.name,
        "device": reports[0]["device"],
        "batch": batch,
        "adapters": adapters,
        "rank": rank,
        "adapter_bytes": tree_bytes(factors(params)),
        "base_step_seconds": base,
        "step_seconds": ours,
        "ratio": ours / base,
        "base_kernels_per_step": reports[0]["kernels_per_step"],
        "kernels_per_step": reports[1]["kernels_per_step"],
    }


def _random(cfg: ModelConfig, rank: int, seed: int) -> Factors:
    draw = np.random.default_rng(seed)
    return {
        source.name: tuple(
            draw.standard_normal(shape, np.float32) * np.float32(0.01)
            for shape in ((rank, source.shape[1]), (source.shape[0], rank))
        )
        for source in products(cfg).values()
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.adapters", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a preset; weights are random")
    parser.add_argument("--dtype", help="of weights and activations")
    parser.add_argument("--quantize", help="a scheme")
    parser.add_argument("--kv-dtype")
    for name, default in (
        ("batch", 64),
        ("adapters", 8),
        ("rank", 16),
        ("context", 1024),
        ("new-tokens", 200),
        ("prompt-tokens", 512),
        ("runs", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args(argv))
    model = (options.pop(name) for name in ("model", "dtype", "quantize"))
    lm = load(*model, random=True, progress=True)
    with working("measuring"):
        print(json.dumps(run(lm, **options)))


if __name__ == "__main__":
    main()
