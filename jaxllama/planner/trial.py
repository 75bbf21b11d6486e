"""Models and runs with random numbers, for measurements of offloading.

    random_model(cfg, dtype, policy, scheme) -> model        any layers
    repeated_model(cfg, dtype, policy, scheme) -> model      layers that are copies of one
    start_run(model, rows, task, kv_dtype) -> run            a block of the task, not yet begun
    timed_step(run) -> seconds                               its prefill, or one token a row
    with Watch(look) as watch: ...; watch.most               the largest number of bytes meanwhile

A model's numbers repeat, because only its speed and its memory matter.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.executors.executor import Call
from jaxllama.executors.offloaded.executor import offloaded
from jaxllama.executors.offloaded.run import OffloadRun
from jaxllama.language_model import LanguageModel
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from jaxllama.planner.accounting import unit_shapes, weight_shapes
from jaxllama.planner.cost import PlannerSettings, Task
from jaxllama.planner.fitting import moving
from jaxllama.typing import Params, ParamsDict, Tree
from pallas_kernels.qtensor import QTensor

_NOISE = (1 << 20) + 7  # numbers; a prime, so that no two rows of a weight are alike

Tell = Callable[[str, object], None]  # called with a finding's name and value


def repeated_model(
    cfg: ModelConfig, dtype: DTypeLike, policy: Policy, scheme: str | None = None
) -> LanguageModel:
    """Return a model whose layers, all of one kind, hold copies of one layer's random bytes."""
    place = Placement(policy, dtype, scheme)
    shapes = weight_shapes(cfg, dtype, place.scheme)
    params: dict[tuple[str, ...], ParamsDict] = {}
    layers = [name for name in shapes if name.startswith("layer_")]
    for name in [name for name in shapes if name not in layers] + layers[:1]:
        for path, shape in flatten_dict(shapes[name]).items():
            drawn = random_tree(shape)  # one at a time, to keep the memory's peak low
            for target in layers if name in layers else [name]:
                params[target, *path] = place((target, *path), drawn)
            del drawn
    return place.model(cfg, unflatten_dict(params), None)


def random_model(
    cfg: ModelConfig, dtype: DTypeLike, policy: Policy, scheme: str | None = None
) -> LanguageModel:
    """Return a model with random weights."""
    place = Placement(policy, dtype, scheme)
    shapes = flatten_dict(weight_shapes(cfg, dtype, place.scheme))
    params = {path: place(path, random_tree(shape)) for path, shape in shapes.items()}
    return place.model(cfg, unflatten_dict(params), None)


def random_expert(weights: Tree) -> Tree:
    """Return one expert of random numbers, ``[1, ...]``, for the shapes ``[E, ...]`` of all."""

    def first(leaf: Tree) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(np.asarray, random_tree(jax.tree.map(first, weights)))


def random_tree(shapes: Tree) -> Tree:
    """Return random arrays for a tree of shapes.

    numpy makes them: compiling a program for each shape would take longer than running it.
    """
    noise = np.random.default_rng(0).integers(-128, 128, _NOISE, np.int8)

    def drawn(leaf: Tree) -> Tree:
        if not isinstance(leaf, QTensor):
            return _draw(noise, leaf.shape, jnp.dtype(leaf.dtype))
        found = jax.tree.map(drawn, dataclasses.replace(leaf, zero=None))
        # Zero points lie within the codes: the CPU's handlers read no others.
        source = noise >> 4 if leaf.dtype == jnp.int4 else noise
        zero = leaf.zero
        zero = None if zero is None else _draw(source, zero.shape, jnp.dtype(zero.dtype))
        return dataclasses.replace(found, zero=zero)

    return jax.tree.map(drawn, shapes, is_leaf=lambda leaf: isinstance(leaf, QTensor))


def _draw(noise: np.ndarray, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Return an array that repeats the same random numbers, or ones if it has one dimension."""
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    if dtype == jnp.int8:
        values = noise
    elif dtype == jnp.int4:
        values = noise >> 4
    elif dtype.name == "float4_e2m1fn":
        values = noise.astype(np.float32) * (2.0 / 74)
    elif dtype.name == "float8_e8m0fnu":
        values = np.full(1, 2.0**-6, np.float32)
    else:
        values = noise.astype(np.float32) * (0.02 / 74)
    return jnp.asarray(np.resize(values.astype(dtype), shape))


def spread_routes(params: Params, cfg: ModelConfig) -> Params:
    """Return the parameters with routers that choose all experts about equally often.

    The embedding becomes so large that what layers add vanishes, so a token decides its own
    experts: layers of random int4 codes add thousands each, alike for all tokens. The logits of the
    routers have a deviation of 1.
    """
    params, keys = dict(params), jax.random.split(jax.random.key(0), cfg.n_layers + 1)
    dtype = params["norm"]["weight"].dtype
    table = jax.random.normal(keys[-1], (cfg.vocab_size, cfg.d_model), dtype)
    size = min(2.0**40, float(jnp.finfo(dtype).max) / 16)
    params["embed"] = {"weight": table * size}
    for index, key in enumerate(keys[:-1]):
        layer = params[f"layer_{index}"]
        if (experts := cfg.layers[index].experts) is None:
            continue
        router = layer["mlp"]["router"]
        drawn = jax.random.normal(key, (experts.n_experts, cfg.d_model), dtype)
        drawn = drawn * cfg.d_model**-0.5
        mlp = {**layer["mlp"], "router": {**router, "weight": drawn.astype(dtype)}}
        params[f"layer_{index}"] = {**layer, "mlp": mlp}
    return params


def streamed_bytes(cfg: ModelConfig, policy: Policy, settings: PlannerSettings) -> float:
    """Return the bytes of weights that one step loads, without experts that lie one by one."""
    dtype, singly = jnp.dtype(settings.dtype).name, bool(policy.experts)
    shapes = unit_shapes(cfg, dtype, settings.scheme, policy.sep_layer, singly)
    units = [tree for unit, tree in shapes if unit.kind != "embed"]
    return sum(sum(moving(tree, policy.weights)[:2]) for tree in units)


def start_run(lm: LanguageModel, rows: int, task: Task, kv_dtype: DTypeLike) -> OffloadRun:
    """Return a run of ``rows`` random prompts of the task."""
    chunk = offloaded(lm.executor).policy.prefill_batch_size or task.chunk
    return random_run(lm, rows, task.prompt, task.new, task.capacity, kv_dtype, chunk)


def random_run(
    lm: LanguageModel,
    rows: int,
    prompt: int,
    room: int,
    capacity: int,
    kv_dtype: DTypeLike,
    chunk: int,
    sampling: Sampling = Sampling(),  # noqa: B008
) -> OffloadRun:
    """Return a run of random prompts without stop tokens, by default a greedy one.

    room, capacity, kv_dtype, chunk: as for ``Call``.
    """
    tokens = np.random.default_rng(0).integers(0, lm.config.vocab_size, (rows, prompt))
    return given_run(lm, tokens, room, capacity, kv_dtype, chunk, sampling)


def given_run(
    lm: LanguageModel,
    tokens: np.ndarray,
    room: int,
    capacity: int,
    kv_dtype: DTypeLike,
    chunk: int,
    sampling: Sampling = Sampling(),  # noqa: B008
) -> OffloadRun:
    """Return a run of prompts ``tokens [B, T]``; the rest is as for ``random_run``."""
    rows, prompt = tokens.shape
    row_sampling = [dataclasses.replace(sampling, seed=row) for row in range(rows)]
    call = Call(
        jnp.asarray(tokens, jnp.int32),
        jnp.full((rows,), prompt, jnp.int32),
        SamplingParams.stack(row_sampling, lm.config.vocab_size),
        jnp.zeros((0,), jnp.int32),
        capacity=capacity,
        room=room,
        limit=room,
        kv_dtype=kv_dtype,
        chunk=chunk,
    )
    return offloaded(lm.executor).run(lm.config, lm.params, call)


def timed_step(run: OffloadRun) -> float:
    begin = time.perf_counter()
    run.step()
    run.end_rows()
    return time.perf_counter() - begin


class Watch:
    """A thread that calls ``look()`` for bytes every few milliseconds."""

    def __init__(self, look: Callable[[], int]) -> None:
        self._look, self.most = look, look()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._end.wait(0.005):
            self.most = max(self.most, self._look())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
