"""Training on one GPU: adapters of an 8B model.

    python -m benchmarks.training adapters --base w4a16 --rows 1 --remat     QLoRA; none: LoRA

Random weights.  Each part prints a line of JSON for everything that it measured, as it comes.
Give each a process of its own, with XLA_PYTHON_CLIENT_PREALLOCATE=false, for its peak of memory.
``--small``: tiny models, for a CPU.  MFU counts ``model.flops``: 6 N T of full training, 4 N T of
adapters, heads and attention too (of packed rows only what a segment sees), recomputation not.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import ModelConfig, load_config
from jaxllama.model.flops import flops_per_token, peak_flops
from jaxllama.model.stacked import stack_layers
from jaxllama.quantization.random_params import random_params
from jaxllama.training.adapters import first_adapters
from jaxllama.training.batch import Batch
from jaxllama.training.config import TrainConfig
from jaxllama.training.start import TrainingSetup
from jaxllama.training.step import init_state, update
from jaxllama.training.tuning import (
    DataConfig,
    LoraConfig,
)
from pallas_kernels.qtensor import tree_bytes


def say(**figures: Any) -> None:
    """Print a line of figures with the device and its peak of memory."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    about = {"device": device.device_kind, "jax": jax.__version__}
    peak = stats.get("peak_bytes_in_use")
    print(json.dumps({**figures, "peak_bytes": peak, **about}), flush=True)


def model_of(name: str, small: bool) -> ModelConfig:
    """Return a preset; small: with two layers of its kinds and little of everything else."""
    cfg = load_config(name).replace(eos_token_ids=())
    if not small:
        return cfg
    sizes = {"d_model": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "d_ff": 256}
    if cfg.gla is not None:
        return load_config("gla-340m").replace(
            vocab_size=512, n_layers=2, layer_types=("gla",) * 2, d_model=128, d_ff=256
        )
    kinds = cfg.layer_types[:2]
    return cfg.replace(vocab_size=512, n_layers=2, layer_types=kinds, **sizes)


# Adapters


def packed_rows(cfg: ModelConfig, rows: int, length: int, segment: int) -> tuple[Batch, float]:
    """Return a Batch of packed conversations, and the mean length that a token's segment has."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, cfg.vocab_size, (1, rows, length + 1)).astype(np.int32)
    segments = np.zeros_like(tokens)
    squares = 0
    for row in segments[0]:
        begin, number = 0, 1
        while begin < length + 1:
            end = min(begin + int(draw.integers(segment // 2, 2 * segment)), length + 1)
            row[begin:end] = number
            squares += (end - begin) ** 2
            begin, number = end, number + 1
    weights = (draw.random((1, rows, length)) < 0.5).astype(np.float32)
    return Batch(tokens, segments, weights / weights.mean()), squares / tokens.size


def adapters(base: str | None, rows: int, remat: bool, small: bool, steps: int) -> None:
    """Measure steps of LoRA at an 8B model's shape, in packed rows of 2,048 tokens."""
    cfg, length = model_of("llama-3.1-8b", small), 64 if small else 2048
    config = TrainConfig(
        data=DataConfig(conversations="none", tokenizer="bytes"),
        steps=1000,
        batch_size=rows,
        sequence_length=length,
        learning_rate=1e-4,
        model=cfg,
        lora=LoraConfig(16, base=base),
        dtype="bfloat16",
        remat=remat,
        scan=True,
    )
    setup = TrainingSetup(config, cfg)
    begun = time.perf_counter()
    params = random_params(cfg, jax.random.key(0), jnp.bfloat16, base)
    fixed = stack_layers(cfg, params, release=True)
    del params
    lora = config.lora
    assert lora is not None
    state = init_state(setup, jax.device_put(first_adapters(cfg, lora, 0)))
    batch, seen = packed_rows(cfg, rows, length, length // 4)
    batch = jax.device_put(batch)
    jax.block_until_ready((state, fixed))
    about = {
        "part": "adapters",
        "base": base,
        "rows": rows,
        "length": length,
        "remat": remat,
        "frozen_bytes": tree_bytes(fixed),
        "state_bytes": tree_bytes(state),
        "start_seconds": time.perf_counter() - begun,
    }
    say(**about)
    begun = time.perf_counter()
    losses = []
    for step in range(steps + 2):
        if step == 2:
            jax.block_until_ready(state)
            begun = time.perf_counter()
        state, metrics = update(setup, state, fixed, batch)
        losses.append(metrics["loss"])
        if step == 0:
            jax.block_until_ready(state)
            about["compile_seconds"] = time.perf_counter() - begun
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - begun) / steps
    rate, peak = rows * length / seconds, peak_flops()
    flops = flops_per_token(cfg, round(seen), True)
    mfu = None if peak is None else rate * flops / peak
    losses = [float(losses[0]), float(losses[-1])]
    say(**about, step_seconds=seconds, tokens_per_second=rate, mfu=mfu, losses=losses)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.training", allow_abbrev=False)
    parser.add_argument("part", choices=("adapters",))
    parser.add_argument("--small", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--base", default="w4a16", help="scheme of the frozen weights, or none")
    parser.add_argument("--rows", type=int, default=1, help="rows of a step")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    args = parser.parse_args(argv)
    base = None if args.base == "none" else args.base
    adapters(base, args.rows, args.remat, args.small, args.steps)


if __name__ == "__main__":
    main()
