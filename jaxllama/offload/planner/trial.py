"""Models and runs of random numbers, for whatever measures offloading.

repeated_model(cfg, dtype, policy, scheme) -> model      layers that are copies of one
start_run(model, rows, task, kv_dtype) -> run            a block of the task, not begun
timed_step(run) -> seconds                               its prefill, or one token a row
with Watch(look) as watch: ...; watch.most               the most of something meanwhile
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from jaxllama.config import ModelConfig
from jaxllama.offload.loading import Placement
from jaxllama.offload.model import OffloadedModel
from jaxllama.offload.planner.accounting import unit_shapes, weight_shapes
from jaxllama.offload.planner.cost import Settings, Task
from jaxllama.offload.planner.fitting import moving
from jaxllama.offload.policy import Policy
from jaxllama.offload.run import Run
from jaxllama.sampling import Sampling, SamplingParams

Tell = Callable[[str, Any], None]  # of a finding: its name, its value


def repeated_model(
    cfg: ModelConfig, dtype: Any, policy: Policy, scheme: str | None = None
) -> OffloadedModel:
    """A model whose layers, all of one kind, hold copies of one layer's random bytes."""
    place = Placement(policy, dtype, scheme)
    shapes = weight_shapes(cfg, dtype, place.scheme)
    params: dict[tuple[str, ...], Any] = {}
    layers = [name for name in shapes if name.startswith("layer_")]
    for name in [name for name in shapes if name not in layers] + layers[:1]:
        for path, shape in flatten_dict(shapes[name]).items():
            drawn = random_tree(shape)  # one at a time, so that it is no peak of the memory
            for target in layers if name in layers else [name]:
                params[target, *path] = place((target, *path), drawn)
            del drawn
    return place.model(cfg, unflatten_dict(params), None)


def random_tree(shapes: Any) -> Any:
    """Random arrays of a tree of shapes."""
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [_draw(key, x.shape, x.dtype.name) for key, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    if dtype == "int4":
        codes = _random_bytes(key, (*shape[:-1], shape[-1] // 2))
        return lax.bitcast_convert_type(codes, jnp.int4).reshape(shape)
    return (_random_bytes(key, shape).astype(jnp.float32) * (0.02 / 74)).astype(dtype)


def _random_bytes(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """int8; the first rows over and over, so that drawing takes no memory to speak of."""
    rows, rest = min(shape[0], 1024), shape[1:]
    bits = lax.bitcast_convert_type(jax.random.bits(key, (rows, *rest), jnp.uint8), jnp.int8)
    turns = -(-shape[0] // rows)
    return jnp.tile(bits, (turns, *(1,) * len(rest)))[: shape[0]]


def streamed_bytes(cfg: ModelConfig, policy: Policy, settings: Settings) -> float:
    """Bytes of weights that one step loads."""
    shapes = unit_shapes(cfg, jnp.dtype(settings.dtype).name, settings.scheme, policy.sep_layer)
    units = [tree for unit, tree in shapes if unit.kind != "embed"]
    return sum(sum(moving(tree, policy.weights)[:2]) for tree in units)


def start_run(lm: OffloadedModel, rows: int, task: Task, kv_dtype: Any) -> Run:
    """``rows`` random prompts of the task."""
    chunk = lm.policy.prefill_batch_size or task.chunk
    return random_run(lm, rows, task.prompt, task.new, task.capacity, kv_dtype, chunk)


def random_run(
    lm: OffloadedModel,
    rows: int,
    prompt: int,
    room: int,
    capacity: int,
    kv_dtype: Any,
    chunk: int,
) -> Run:
    """Greedy, without stop tokens; the others are ``Run``'s."""
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, lm.config.vocab_size, (rows, prompt)), jnp.int32)
    sampling = SamplingParams.stack([Sampling()] * rows, lm.config.vocab_size)
    return Run(
        lm, tokens, jnp.full((rows,), prompt, jnp.int32), sampling, jnp.zeros((0,), jnp.int32),
        room=room, limit=room, capacity=capacity, kv_dtype=kv_dtype, chunk=chunk,
    )  # fmt: skip


def timed_step(run: Run) -> float:
    begin = time.perf_counter()
    run.step()
    run.end_rows()
    return time.perf_counter() - begin


class Watch:
    """Asks ``look()`` for bytes every few milliseconds."""

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

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._thread.join()
