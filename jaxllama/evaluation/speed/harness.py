"""What the measurements share: a clock, this machine's rates, and a decode loop in parts.

timed(call, *arguments) -> (what it returned, ready; seconds)
median(measure, runs, warm)                           of what a measurement gives, run by run
memory_bandwidth(), matmul_rate()                     what this machine reaches, here and now
Decoding(lm, batch, kv_dtype, chunk)                  greedy, by ``generation``'s own loop
bytes_per_step(lm), cache_bytes_per_step(...)         bytes that a decode step must move
held_cache(cfg, batch, max_len, dtype, held)          a cache that is already long
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.decoding.forward import Params, prefill_chunk
from jaxllama.decoding.rows import Fields, Report, Rows
from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.evaluation.speed.hlo import count_loop_kernels
from jaxllama.executors import resident
from jaxllama.language_model import LanguageModel
from jaxllama.loading import default_dtype
from jaxllama.model.cache import Cache, cache_shardings, init_cache
from jaxllama.model.mixers.attention.state import KVCache
from pallas_kernels.qtensor import tree_bytes

_NOISE = 4099  # numbers that a cache is filled with, over and over; a prime, so no row repeats one
_BANDWIDTH_BYTES = {"cpu": 1 << 28}  # larger than any last-level cache


# The clock


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What ``call`` returns, once its arrays are ready, and the seconds until then."""
    begun = time.perf_counter()
    out = jax.block_until_ready(call(*arguments))
    return out, time.perf_counter() - begun


def median(measure: Callable[[], Any], runs: int, warm: int) -> Any:
    """Of ``runs`` results (numbers, or tuples of them: each its own) after ``warm`` that do not
    count: the first compiles, and the next may still fill allocators and caches."""
    return np.median([measure() for _ in range(warm + runs)][warm:], axis=0).tolist()


# The machine


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
        _, seconds = timed(product, matrix, vector)
        best = max(best, turns * nbytes / seconds)
        matrix, seconds = timed(copy, matrix)
        best = max(best, turns * 2 * nbytes / seconds)
    return best


@functools.cache
def matmul_rate() -> float:
    """Operations a second of a large product in the default dtype."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((size, size), default_dtype())
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / min(timed(product, x)[1] for _ in range(4))  # the first compiles


# The loop


@dataclasses.dataclass(frozen=True)
class DecodeProgram:
    """The compiled decode loop: call it as ``resident.advance`` without the config.

    ``compile_seconds`` has tracing in it; ``from_cache`` says whether the program was read from
    jax's persistent cache.
    """

    compiled: jax.stages.Compiled
    compile_seconds: float
    from_cache: bool

    def __call__(
        self,
        params: Params,
        state: Rows,
        sampling: SamplingParams,
        stop_ids: jax.Array,
        until: int,
    ) -> tuple[Rows, Report]:
        return self.compiled(params, state, sampling, stop_ids, np.int32(until))

    @property
    def kernels_per_step(self) -> int:
        return count_loop_kernels(self.compiled.as_text() or "")

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
    params: Params,
    state: Rows,
    sampling: SamplingParams,
    stop_ids: jax.Array,
) -> DecodeProgram:
    """Compile ``resident.advance`` for these arguments, which are not touched."""
    events: list[str] = []

    def listen(event: str, **_: Any) -> None:
        events.append(event)

    def compiled() -> jax.stages.Compiled:
        loop = resident.loop_for(params)
        return loop.lower(cfg, params, state, sampling, stop_ids, np.int32(1)).compile()

    jax.monitoring.register_event_listener(listen)
    try:
        program, seconds = timed(compiled)
    finally:
        jax.monitoring.unregister_event_listener(listen)
    return DecodeProgram(program, seconds, "/jax/compilation_cache/cache_hits" in events)


class Decoding:
    """Greedy decoding of ``batch`` rows that stops at no token, so every run does the same work.

    A state comes from a prompt (``prefilled``) or from none (``begun``), and is used up by one
    ``run``.  The loop is jitted, or the program that ``compile`` made of it.
    """

    def __init__(
        self,
        lm: LanguageModel,
        batch: int,
        kv_dtype: DTypeLike | None = None,
        chunk: int | None = None,
    ) -> None:
        self.lm, self.batch, self.chunk = lm, batch, chunk
        self.kv_dtype = lm.dtype if kv_dtype is None else kv_dtype
        sampling = SamplingParams.stack([Sampling()] * batch, lm.config.vocab_size)
        self.sampling, self.stop_ids = self._everywhere((sampling, jnp.zeros((0,), jnp.int32)))
        self._loop: Callable[..., Any] = functools.partial(resident.loop_for(lm.params), lm.config)

    def _everywhere(self, tree: Any) -> Any:
        """Where the loop wants them: a call would copy each from the first device."""
        if self.lm.mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(self.lm.mesh, PartitionSpec()))

    def prefilled(self, prompt: int, room: int, held: int = 0) -> tuple[Rows, float]:
        """The state behind ``held`` tokens and a random prompt, its first new token among the
        ``room``, and the seconds from the prompt on the device to there."""
        arguments, fixed = self._start(prompt, room, held)
        jax.block_until_ready(arguments)
        return timed(functools.partial(resident.start, self.lm.config, **fixed), *arguments)

    def prefill_text(self, prompt: int) -> str:
        """What XLA compiles of ``prefilled(prompt, 1)``."""
        arguments, fixed = self._start(prompt, 1, 0)
        start: Any = resident.start
        lowered = start.lower(self.lm.config, *arguments, **fixed)
        return lowered.compile().as_text() or ""

    def _start(self, prompt: int, room: int, held: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What ``resident.start`` is called with behind the config."""
        cfg = self.lm.config
        ids = np.random.default_rng(0).integers(0, cfg.vocab_size, (self.batch, prompt))
        tokens = jnp.asarray(ids, jnp.int32)
        lengths = jnp.full((self.batch,), prompt, jnp.int32)
        cache = held_cache(cfg, self.batch, held + prompt + room, self.kv_dtype, held, self.lm.mesh)
        chunk = self.chunk or prefill_chunk(self.batch, prompt)
        held = cache.layers, cache.lengths
        arguments = self.lm.params, tokens, lengths, *held, self.sampling, self.stop_ids
        return arguments, {"max_new_tokens": room, "chunk": chunk}

    def begun(self, room: int) -> Rows:
        """One token a row and an empty cache: a prompt's program would cost a compilation."""
        cache = init_cache(self.lm.config, self.batch, room, self.kv_dtype, mesh=self.lm.mesh)
        one = jnp.ones((self.batch,), jnp.int32)
        none = jnp.zeros_like(one)
        ints = Fields(one, none, one, none, one).packed()
        written = jnp.zeros((2, self.batch, room + 1), jnp.int32)
        ints, written = self._everywhere((ints, written))
        return jax.block_until_ready(Rows(ints, written, cache.layers))

    def compile(self, state: Rows) -> DecodeProgram:
        """Ahead of time, for states like this one; from now on ``run`` calls it."""
        self._loop = program = compile_decode(
            self.lm.config, self.lm.params, state, self.sampling, self.stop_ids
        )
        return program

    def run(self, state: Rows, until: int) -> float:
        """Seconds until ``until`` tokens are written in all."""
        arguments = self.lm.params, state, self.sampling, self.stop_ids, np.int32(until)
        return timed(self._loop, *arguments)[1]

    def trace(self, folder: str | Path, state: Rows, until: int) -> None:
        """The same under jax's profiler."""
        with jax.profiler.trace(str(folder)):
            self.run(state, until)


# Bytes


def bytes_per_step(lm: LanguageModel) -> int:
    """Bytes of weights that one decode step reads."""
    return tree_bytes(read_in_step(lm))


def read_in_step(lm: LanguageModel) -> Params:
    """The parameters that one decode step reads: all, but of the embedding only the rows of its
    tokens, unless it is the head as well."""
    if lm.config.tie_embeddings:
        return lm.params
    return {name: tree for name, tree in lm.params.items() if name != "embed"}


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
