"""Training steps: adapters of an 8B model on one GPU, and whole models, in FP8 or on several.

    python -m benchmarks.training adapters --base w4a16 --rows 1 --remat     QLoRA; none: LoRA
    python -m benchmarks.training full --products both --curve 80            GLA-1.3B, FP8 and not
    python -m benchmarks.training full --model llama-3.1-8b --devices 4 --rows 4 --remat
    python -m benchmarks.training full --model llama-3.1-8b --stages 4 --microbatches 16 --remat

Random weights.  Each part prints a line of JSON for everything that it measured, as it comes.
Give each a process of its own, with XLA_PYTHON_CLIENT_PREALLOCATE=false, for its peak of memory.
``--small``: tiny models, for a CPU.  MFU counts ``model.flops``: 6 N T of full training, 4 N T of
adapters, heads and attention too (of packed rows only what a segment sees), recomputation not.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllama.config import ModelConfig, load_config
from jaxllama.model.flops import flops_per_token, peak_flops
from jaxllama.model.stacked import stack_layers
from jaxllama.parallel.mesh import make_mesh, make_stages
from jaxllama.quantization.random_params import param_shapes, random_params
from jaxllama.training.adapters import first_adapters
from jaxllama.training.batch import Batch
from jaxllama.training.config import OptimizerConfig, TrainConfig
from jaxllama.training.passes import placed, sharding
from jaxllama.training.start import TrainingSetup
from jaxllama.training.step import State, init_state, update
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
    begins = np.full((1, rows, 16), -1, np.int32)
    squares = 0
    for row, places in zip(segments[0], begins[0], strict=True):
        begin, number = 0, 1
        while begin < length + 1:
            end = min(begin + int(draw.integers(segment // 2, 2 * segment)), length + 1)
            row[begin:end] = number
            places[number - 1] = begin
            squares += (end - begin) ** 2
            begin, number = end, number + 1
    weights = (draw.random((1, rows, length)) < 0.5).astype(np.float32)
    batch = Batch(tokens, segments, weights / weights.mean(), begins=begins)
    return batch, squares / tokens.size


def adapters(args: argparse.Namespace) -> None:
    """Measure steps of LoRA at an 8B model's shape, in packed rows of 2,048 tokens."""
    base = None if args.base == "none" else args.base
    rows, remat, small, steps = args.rows, args.remat, args.small, args.steps
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
        scan=not args.unrolled,
    )
    setup = TrainingSetup(config, cfg)
    begun = time.perf_counter()
    params = random_params(cfg, jax.random.key(0), jnp.bfloat16, base)
    fixed = params if args.unrolled else stack_layers(cfg, params, release=True)
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
        "unrolled": args.unrolled,
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


# Whole models


def text_tokens() -> np.ndarray:
    """Return the bytes of this repository's texts and programs as tokens."""
    root = Path(__file__).parents[1]
    names = sorted(name for kind in ("*.md", "*.py", "*.txt") for name in root.rglob(kind))
    parts = [np.frombuffer(name.read_bytes(), np.uint8) for name in names]
    return np.concatenate(parts).astype(np.int32)


def full(args: argparse.Namespace, products: Literal["fp8"] | None) -> None:
    """Measure steps of full training, and with ``--curve`` the losses of that many steps."""
    cfg, length = model_of(args.model, args.small), 64 if args.small else 2048
    micro, curve = args.microbatches, args.curve
    config = TrainConfig(
        data=DataConfig(tokens="none"),
        steps=max(curve, 1000),
        batch_size=args.rows * micro,
        microbatches=micro,
        sequence_length=length,
        learning_rate=3e-4 if curve else 1e-5,
        optimizer=OptimizerConfig(warmup_steps=20),
        model=cfg,
        dtype="bfloat16",
        products=products,
        remat=args.remat,
        scan=not args.unrolled,
        fsdp=args.devices > 1 and args.stages == 1,
    )
    setup = TrainingSetup(config, cfg)
    devices, mesh = args.devices, None
    if args.stages > 1:
        devices = args.devices * args.stages
        mesh = make_stages(f"data={args.devices},stage={args.stages}")
    elif devices > 1:
        mesh = make_mesh(f"data={devices}")
    state = first_state(setup, mesh)
    about = {
        "part": "full",
        "model": cfg.name,
        "products": products or config.dtype,
        "devices": devices,
        "stages": args.stages,
        "microbatches": micro,
        "tokens_a_step": config.batch_size * length,
        "remat": args.remat,
        "unrolled": args.unrolled,
        "device_bytes": sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)),
    }
    draw, tokens = np.random.default_rng(0), text_tokens()

    def batch() -> jax.Array:
        starts = draw.integers(0, len(tokens) - length - 1, config.batch_size)
        rows = np.stack([tokens[start : start + length + 1] for start in starts])
        return jax.device_put(rows.reshape(micro, -1, length + 1), sharding(mesh, 1))

    begun = time.perf_counter()
    losses: list[jax.Array] = []
    timed = args.steps + 2
    for step in range(max(curve, timed)):
        if step == 2:
            jax.block_until_ready(state)
            begun = time.perf_counter()
        state, metrics = update(setup, state, None, batch())
        losses.append(metrics["loss"])
        if step == 0:
            jax.block_until_ready(state)
            about["compile_seconds"] = time.perf_counter() - begun
        if step == timed - 1:
            jax.block_until_ready(state)
            seconds = (time.perf_counter() - begun) / args.steps
            rate, peak = config.batch_size * length / seconds, peak_flops()
            mfu = None
            if peak is not None:
                mfu = rate * flops_per_token(cfg, length) / (peak * devices)
            ends = [float(losses[0]), float(losses[-1])]
            say(**about, step_seconds=seconds, tokens_per_second=rate, mfu=mfu, losses=ends)
    if curve:
        found = [round(float(loss), 4) for loss in losses]
        kept = found[:: max(len(found) // 40, 1)]
        say(**about, curve=kept, mean_of_last_20=float(np.mean(found[-20:])))


def first_state(setup: TrainingSetup, mesh: Mesh | None) -> State:
    """Return a state of random weights, which is drawn where it lies: layer after layer alike."""
    cfg = setup.model
    shapes = jax.eval_shape(lambda: init_state(setup, random_shapes(cfg)))
    where = placed(setup, shapes, mesh)
    paths = jax.tree_util.tree_leaves_with_path(shapes)
    leaves = []
    for number, ((keys, leaf), place) in enumerate(zip(paths, jax.tree.leaves(where), strict=True)):
        is_weight = getattr(keys[0], "key", None) == "params"
        is_matrix = leaf.ndim >= 2 and getattr(keys[-2], "key", "").find("norm") < 0

        def make(
            key: jax.Array, like: Any = leaf, kind: tuple[bool, bool] = (is_weight, is_matrix)
        ):
            if not kind[0]:
                return jnp.zeros(like.shape, like.dtype)
            if not kind[1]:
                return jnp.ones(like.shape, like.dtype)
            return 0.02 * jax.random.normal(key, like.shape, like.dtype)

        made = jax.jit(make, out_shardings=place)(jax.random.fold_in(jax.random.key(0), number))
        leaves.append(jax.block_until_ready(made))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def random_shapes(cfg: ModelConfig) -> Any:
    """Return a tree of zeros in the parameters' shapes, for ``eval_shape``."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), param_shapes(cfg))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.training", allow_abbrev=False)
    parser.add_argument("part", choices=("adapters", "full"))
    parser.add_argument("--small", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--base", default="w4a16", help="scheme of the frozen weights, or none")
    parser.add_argument("--rows", type=int, default=1, help="rows of a microbatch")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--unrolled", action="store_true", help="layers are no loop")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--model", default="gla-1.3b", help="of full training; random weights")
    parser.add_argument("--products", default="none", choices=("none", "fp8", "both"))
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="that share the rows")
    parser.add_argument("--stages", type=int, default=1, help="that share the layers, of each row")
    parser.add_argument("--curve", type=int, default=0, help="steps of the curve of losses")
    args = parser.parse_args(argv)
    if args.part == "adapters":
        adapters(args)
        return
    kinds: dict[str, tuple[Literal["fp8"] | None, ...]] = {
        "none": (None,),
        "fp8": ("fp8",),
        "both": ("fp8", None),
    }
    for products in kinds[args.products]:
        full(args, products)


if __name__ == "__main__":
    main()
