"""What one decode step costs, read off the compiled program, the cache and the machine.

    program = compile_decode(cfg, params, state, sampling, stop_ids)    the loop, ahead of time
    program.kernels_per_step, .nbytes, .compile_seconds, .from_cache
    cache_bytes_per_step(cfg, cache, held)                              bytes a step must move
    held_cache(cfg, batch, max_len, dtype, held)                        a cache that is already long
    memory_bandwidth()                                                  what this machine reaches

``kernels_per_step`` counts the instructions in the body of the compiled loop that launch work: each
fusion, library or Pallas call, copy and bare operation once, of a nested loop its body once, and
nothing for tuples, constants and bitcasts.  On a GPU a fusion is one kernel; a library call may
launch more than one, which only a trace shows (``jaxllama bench --trace``).
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllama import generation
from jaxllama.config import ModelConfig
from jaxllama.model.cache import Cache, KVCache, cache_shardings, init_cache
from jaxllama.sampling import SamplingParams
from pallas_kernels.qtensor import tree_bytes

_NOISE = 4099  # numbers that a cache is filled with, over and over; a prime, so no row repeats one
_BANDWIDTH_BYTES = {"cpu": 1 << 28}  # larger than any last-level cache
_NO_WORK = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "async-done",
     "copy-done", "fusion-done", "partition-id", "replica-id")
)  # fmt: skip
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"\b(?:to_apply|calls|body|called_computations)=\{?%?([\w.\-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")


@dataclasses.dataclass(frozen=True)
class DecodeProgram:
    """The compiled decode loop: call it as ``generation.advance`` without the config."""

    compiled: jax.stages.Compiled
    compile_seconds: float
    from_cache: bool

    def __call__(
        self,
        params: generation.Params,
        state: generation.GenerateState,
        sampling: SamplingParams,
        stop_ids: jax.Array,
        until: int,
    ) -> generation.GenerateState:
        return self.compiled(params, state, sampling, stop_ids, np.int32(until))

    @property
    def kernels_per_step(self) -> int:
        return count_loop_kernels(self.compiled.as_text())

    @property
    def nbytes(self) -> int | None:
        """Peak bytes of the device while it runs: weights, cache and temporaries; None where the
        compiler does not say."""
        stats = self.compiled.memory_analysis()
        if stats is None:
            return None
        held = stats.argument_size_in_bytes + stats.output_size_in_bytes
        return held - stats.alias_size_in_bytes + stats.temp_size_in_bytes


def compile_decode(
    cfg: ModelConfig,
    params: generation.Params,
    state: generation.GenerateState,
    sampling: SamplingParams,
    stop_ids: jax.Array,
) -> DecodeProgram:
    """Compile ``generation.advance`` for these arguments, which are not touched.

    ``compile_seconds`` has tracing in it; ``from_cache`` says whether the program was read from
    jax's persistent cache.
    """
    events: list[str] = []

    def listen(event: str, **_: Any) -> None:
        events.append(event)

    jax.monitoring.register_event_listener(listen)
    begun = time.perf_counter()
    try:
        loop = generation.loop_for(params)
        lowered = loop.lower(cfg, params, state, sampling, stop_ids, np.int32(1))
        compiled = lowered.compile()
    finally:
        seconds = time.perf_counter() - begun
        jax.monitoring.unregister_event_listener(listen)
    return DecodeProgram(compiled, seconds, "/jax/compilation_cache/cache_hits" in events)


def count_loop_kernels(text: str) -> int:
    """Kernels in the body of the first ``while`` of a compiled program's text; 0 without one."""
    entry, computations = _read_program(text)
    for opcode, called in _walk(entry, computations):
        if opcode == "while":
            return sum(_kernels(inner, computations) for inner in called)
    return 0


Instruction = tuple[str, list[str]]  # opcode, names of the computations it calls


def _read_program(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    """(name of the entry, its instructions by computation)."""
    entry, computations, current = "", {}, None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append((match[1], _CALLED.findall(line)))
    return entry, computations


def _walk(name: str, computations: dict[str, list[Instruction]]) -> list[Instruction]:
    """The instructions of a computation, those of plain calls (which group kernels) in place."""
    found: list[Instruction] = []
    for opcode, called in computations.get(name, []):
        if opcode == "call":
            for inner in called:
                found += _walk(inner, computations)
        else:
            found.append((opcode, called))
    return found


def _kernels(name: str, computations: dict[str, list[Instruction]]) -> int:
    count = 0
    for opcode, called in _walk(name, computations):
        if opcode == "while":
            count += sum(_kernels(inner, computations) for inner in called)
        elif opcode not in _NO_WORK:
            count += 1
    return count


# Bytes


def cache_bytes_per_step(cfg: ModelConfig, cache: Cache, held: int) -> int:
    """Bytes of cache that a step must move when every row holds ``held`` tokens: keys and values
    that the newest token sees are read, a GLA state is read and written."""
    total = 0
    for index, layer in enumerate(cache.layers):
        nbytes = tree_bytes(layer)
        if isinstance(layer, KVCache):
            seen = min(held, cfg.window_of(index) or held)
            total += nbytes * seen // layer.k.shape[1]
        else:
            total += 2 * nbytes
    return total


def held_cache(
    cfg: ModelConfig,
    batch: int,
    max_len: int,
    dtype: DTypeLike,
    held: int,
    mesh: Mesh | None = None,
) -> Cache:
    """A cache as if ``held`` tokens had gone through it: noise, since zeros can be faster to
    multiply than data.  What it holds means nothing; how long it takes does.  mesh: as for
    ``init_cache``."""

    def make() -> Cache:
        shapes = jax.eval_shape(functools.partial(init_cache, cfg, batch, max_len, dtype))
        layers = jax.tree.map(lambda leaf: _noise(leaf.shape, leaf.dtype.name), shapes.layers)
        return Cache(layers, jnp.full((batch,), held, jnp.int32))

    if mesh is None:
        return make()
    return jax.device_put(make(), cache_shardings(jax.eval_shape(make), mesh))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _noise(shape: tuple[int, ...], dtype: str) -> jax.Array:
    values = jax.random.normal(jax.random.key(0), (_NOISE,), jnp.float32)
    if dtype in ("int8", "int4"):
        step, low, high = (40.0, -128.0, 127.0) if dtype == "int8" else (2.0, -8.0, 7.0)
        values = jnp.clip(jnp.round(values * step), low, high)
    else:
        values = values * 0.1
    return jnp.resize(values, shape).astype(dtype)


@functools.cache
def memory_bandwidth() -> float:
    """Bytes a second that the default device reaches here and now: the better of a copy (read and
    written) and a matrix-vector product (read), of an array no cache holds.  Several turns in one
    program, so that what the host needs to start one does not count."""
    nbytes = _BANDWIDTH_BYTES.get(jax.default_backend(), 1 << 30)
    turns = 1 if jax.default_backend() == "cpu" else 16
    width = 4096
    matrix = jnp.ones((nbytes // (4 * width), width), jnp.float32)
    vector = jnp.ones((width,), jnp.float32)

    @jax.jit
    def product(matrix: jax.Array, vector: jax.Array) -> jax.Array:
        def turn(_: jax.Array, vector: jax.Array) -> jax.Array:
            sums = jnp.sum(matrix * vector, axis=1)
            return vector * jnp.where(sums[0] == 0.0, 2.0, 1.0)

        return lax.fori_loop(0, turns, turn, vector)

    @functools.partial(jax.jit, donate_argnums=0)
    def copy(matrix: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda _, x: x + 1.0, matrix)

    best = 0.0
    for _ in range(4):  # the first compiles
        begun = time.perf_counter()
        jax.block_until_ready(product(matrix, vector))
        best = max(best, turns * nbytes / (time.perf_counter() - begun))
        begun = time.perf_counter()
        matrix = jax.block_until_ready(copy(matrix))
        best = max(best, turns * 2 * nbytes / (time.perf_counter() - begun))
    return best
