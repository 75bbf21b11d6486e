"""Run by test_pipeline in a process of its own, with 8 devices where the tests have one.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python -m tests.helpers.pipeline_child gradients | run

One JSON line per result: the pipeline beside one device.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from jaxllama.parallel.mesh import make_stages
from jaxllama.training import pipeline, step
from jaxllama.training.batch import Batch
from jaxllama.training.passes import first_state, placed, sharding
from jaxllama.training.start import TrainingSetup
from tests.helpers.parallel_child import curves_of, distances, refused, resumed
from tests.helpers.training_cases import byte_model, first_params, rows_of, run_config, token_file

jax.config.update("jax_numpy_dtype_promotion", "strict")

MICROBATCHES, ROWS, LENGTH = 3, 4, 24


def deep(family: str, layers: int):
    """A tiny model whose layers repeat a family's."""
    cfg = byte_model(family)
    return cfg.replace(n_layers=layers, layer_types=(cfg.layer_types * layers)[:layers])


def packed_batch(model) -> Batch:
    """Two segments a row and padding behind them, with weights of other sizes than 1."""
    shape = MICROBATCHES, ROWS, LENGTH + 1
    tokens = rows_of(model, MICROBATCHES * ROWS, LENGTH + 1).reshape(shape)
    draw = np.random.default_rng(0)
    cuts = draw.integers(5, 12, (*shape[:2], 1))
    places = np.arange(LENGTH + 1)
    segments = np.where(places < cuts, 1, np.where(places < cuts + 9, 2, 0)).astype(np.int32)
    weights = draw.random((*shape[:2], LENGTH)).astype(np.float32)
    return Batch(tokens, segments, weights)


def gradients() -> None:
    """Loss and gradients of a step, the held-out loss, and the share of the state of a device."""
    for name, family, layers, more in (
        ("llama", "gqa", 4, {}),
        ("gla", "gla", 4, {"remat": True}),
        ("hybrid", "hybrid", 8, {}),
        ("packed", "gqa", 4, {"remat": True}),
    ):
        model = deep(family, layers).replace(tie_embeddings=name == "packed")
        with tempfile.TemporaryDirectory() as folder:
            config = run_config(
                Path(folder), model, batch_size=12, microbatches=MICROBATCHES, scan=True, **more
            )
        setup = TrainingSetup(config, model)
        batch = packed_batch(model)
        batch = batch if name == "packed" else Batch(batch.tokens)
        own = step.first_weights(setup, jax.device_put(first_params(model)))
        rows = jax.tree.map(lambda leaf: np.swapaxes(leaf, 0, 1), batch)
        want, metrics = jax.jit(functools.partial(step._gradient, setup))(own, None, rows)
        held_out = jax.tree.map(lambda leaf: leaf[0], batch)
        want_mean = float(step.validation_loss(setup, own, held_out))
        for shape in ("stage=4", "data=2,stage=2"):
            mesh = make_stages(shape)
            parts = jax.device_put(own, placed(setup, own, mesh))
            each = step._each(setup, config.remat)
            gradient = jax.jit(functools.partial(pipeline.gradient, setup, each))
            got, found = gradient(parts, jax.device_put(batch, sharding(mesh, 1)))
            off = jax.tree.map(
                lambda a, b: float(np.max(np.abs(a - b)) / np.max(np.abs(a))), want, got
            )
            value = step.validation_loss(setup, parts, jax.device_put(held_out, sharding(mesh, 0)))
            report(
                case=f"{name} {shape}",
                loss=abs(float(found["loss"]) / float(metrics["loss"]) - 1),
                mean=abs(float(value) / want_mean - 1),
                worst=max(jax.tree.leaves(off)),
                share=held(parts) / held(own),
            )


def held(tree) -> int:
    """Bytes of the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def run() -> None:
    """A run on stages that is interrupted, beside one device's: curves, models, refusals."""
    model = deep("gqa", 4)
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        config = run_config(
            room,
            model,
            batch_size=16,
            microbatches=4,
            checkpoint_every=4,
            scan=True,
            keep_best=True,
            data={"tokens": str(token_file(room)), "validation_tokens": 25 * 10},
        )
        runs: dict[str, list[str | None]] = {
            "one": [None],
            "staged": ["stage=4"],
            "again": ["stage=4", "stage=4"],
            "moved": ["data=2,stage=2", "data=2"],
        }
        results = {name: resumed(config, room / name, meshes) for name, meshes in runs.items()}
        models = {
            name: (result.model / "model.safetensors").read_bytes()
            for name, result in results.items()
        }
        refused(
            config,
            room,
            {
                "stage=3": "does not divide the 4 layers",
                "stage=2,model=2": "goes with data=N alone",
                "data=3,stage=2": "does not divide the 4 rows of a microbatch",
                "stage=16": "needs 16 devices",
            },
        )
    curves = {name: curves_of(result) for name, result in results.items()}
    report(
        case="run",
        off=distances(curves),
        same=curves["again"] == curves["staged"] and models["again"] == models["staged"],
    )


def state() -> None:
    """The first state on stages beside the one made on one device, to the bit."""
    model = deep("gla", 4)
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(Path(folder), model, scan=True)
    setup = TrainingSetup(config, model)
    want = step.init_state(setup, jax.device_put(first_params(model)))
    got = first_state(setup, jax.device_put(first_params(model)), make_stages("stage=2"))
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), want, got)
    where = placed(setup, want, make_stages("stage=2"))
    there = jax.tree.map(lambda leaf, place: leaf.sharding == place, got, where)
    report(case="state", same=all(jax.tree.leaves(same)), there=all(jax.tree.leaves(there)))


def report(**result) -> None:
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    for part in sys.argv[1:]:
        {"gradients": gradients, "run": run, "state": state}[part]()
