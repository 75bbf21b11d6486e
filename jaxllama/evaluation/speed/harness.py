"""Shared parts of the measurements: a clock, this machine's rates, and a decode loop in parts.

timed(call, *arguments) -> (its result, ready; seconds)
median(measure, runs, warm)                           median of a measurement's results
memory_bandwidth(), matmul_rate()                     this machine's rates now
Decoding(lm, batch, kv_dtype, chunk)                  greedy, with the executor's own loop
bytes_per_step(lm, rows), cache_bytes_per_step(...)   bytes that a decode step must move
held_cache(cfg, batch, max_len, dtype, held)          a cache that is already long
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.decoding.forward import prefill_chunk
from jaxllama.decoding.rows import Fields, Report, Rows
from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.evaluation.speed.hlo import count_loop_kernels
from jaxllama.executors import prompts, resident
from jaxllama.executors.posting import posting
from jaxllama.language_model import LanguageModel
from jaxllama.loading import default_dtype
from jaxllama.model.cache import Cache, cache_shardings, init_cache
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.typing import Jitted, Options, Params, Tree
from pallas_kernels.qtensor import tree_bytes

# numbers with which a cache is filled repeatedly; a prime, so that no two rows are equal
_NOISE = 4099
_BANDWIDTH_BYTES = {"cpu": 1 << 28}  # larger than any last-level cache


# The clock

Result = TypeVar("Result")


def timed(call: Callable[..., Result], *arguments: Tree) -> tuple[Result, float]:
    """Return the result of ``call``, once its arrays are ready, and the seconds until then."""
    begun = time.perf_counter()
    out = jax.block_until_ready(call(*arguments))
    return out, time.perf_counter() - begun


def median(measure: Callable[[], Tree], runs: int, warm: int) -> Tree:
    """Return the median of ``runs`` results, after ``warm`` runs that do not count.

    A result is a number, or a tuple whose entries have medians of their own. The first run
    compiles, and the next may still fill allocators and caches.
    """
    return np.median([measure() for _ in range(warm + runs)][warm:], axis=0).tolist()


# The machine


@functools.cache
def memory_bandwidth() -> float:
    """Return the bytes a second that the default device reaches now.

    It is the better of a copy (read and written) and a matrix-vector product (read), of an array
    larger than any cache. One program makes several turns, so that the host's work for a start does
    not count.
    """
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
    for _ in range(4):  # the first one compiles
        _, seconds = timed(product, matrix, vector)
        best = max(best, turns * nbytes / seconds)
        matrix, seconds = timed(copy, matrix)
        best = max(best, turns * 2 * nbytes / seconds)
    return best


@functools.cache
def matmul_rate() -> float:
    """Return the operations a second of a large product in the default dtype."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((size, size), default_dtype())
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / min(timed(product, x)[1] for _ in range(4))  # the first compiles


# The loop


@dataclasses.dataclass(frozen=True)
class DecodeProgram:
    """The compiled decode loop, called like ``resident.advance`` without the config.

    compile_seconds: includes tracing. from_cache: whether the program was read from jax's
    persistent cache.
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
        """The device's peak bytes while it runs: weights, cache and temporaries.

        None if the compiler does not report them.
        """
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
    """Compile ``resident.advance`` for these arguments, which stay unchanged."""
    events: list[str] = []

    def listen(event: str, **_: object) -> None:
        events.append(event)

    def compiled() -> jax.stages.Compiled:
        loop: Jitted = resident.loop_for(cfg, params)
        return loop.lower(cfg, params, state, sampling, stop_ids, np.int32(1)).compile()

    jax.monitoring.register_event_listener(listen)
    try:
        program, seconds = timed(compiled)
    finally:
        jax.monitoring.unregister_event_listener(listen)
    return DecodeProgram(program, seconds, "/jax/compilation_cache/cache_hits" in events)


class Decoding:
    """Greedy decoding of ``batch`` rows that stops at no token, so every run does the same work.

    A state comes from a prompt (``prefilled``) or from none (``begun``), and one ``run`` consumes
    it. The loop is jitted, or the program of ``compile``.
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
        self._loop: Callable[..., Tree] = functools.partial(
            resident.loop_for(lm.config, lm.params), lm.config
        )
        self._params = posting(lm.config, lm.params, batch)

    def _everywhere(self, tree: Tree) -> Tree:
        """Place a tree where the loop needs it, so that calls do not copy it."""
        if self.lm.mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(self.lm.mesh, PartitionSpec()))

    def prefilled(self, prompt: int, room: int, held: int = 0) -> tuple[Rows, float]:
        """Prefill a random prompt after ``held`` tokens in the cache.

        Returns (state, seconds). The state has room for ``room`` new tokens, of which the first is
        there. The seconds begin with the prompt on the device.
        """
        arguments, fixed = self._start(prompt, room, held)
        jax.block_until_ready(arguments)
        return timed(functools.partial(prompts.start, self.lm.config, **fixed), *arguments)

    def prefill_text(self, prompt: int) -> str:
        """Return the text of the program of ``prefilled(prompt, 1)``."""
        arguments, fixed = self._start(prompt, 1, 0)
        start: Jitted = prompts.start
        lowered = start.lower(self.lm.config, *arguments, **fixed)
        return lowered.compile().as_text() or ""

    def _start(self, prompt: int, room: int, held: int) -> tuple[tuple[Tree, ...], Options]:
        """Return the arguments of ``prompts.start`` after the config."""
        cfg = self.lm.config
        ids = np.random.default_rng(0).integers(0, cfg.vocab_size, (self.batch, prompt))
        tokens = jnp.asarray(ids, jnp.int32)
        lengths = jnp.full((self.batch,), prompt, jnp.int32)
        cache = held_cache(cfg, self.batch, held + prompt + room, self.kv_dtype, held, self.lm.mesh)
        chunk = self.chunk or prefill_chunk(self.batch, prompt, self.lm.mesh)
        asked = prompts.PromptBatch(tokens, lengths, self.sampling, self.stop_ids)
        arguments = self.lm.params, asked, cache.layers, cache.lengths
        return arguments, {"max_new_tokens": room, "chunk": chunk, "fresh": not held}

    def begun(self, room: int) -> Rows:
        """Return a state with one token a row and an empty cache; no prefill runs.

        The rows' tokens differ, because rows that are alike choose the same experts.
        """
        cache = init_cache(self.lm.config, self.batch, room, self.kv_dtype, mesh=self.lm.mesh)
        ones = jnp.ones((self.batch,), jnp.int32)
        none = jnp.zeros_like(ones)
        newest = jnp.arange(self.batch, dtype=jnp.int32) % self.lm.config.vocab_size
        ints = Fields(newest, none, ones, none, ones).packed()
        written = jnp.zeros((2, self.batch, room + 1), jnp.int32)
        ints, written = self._everywhere((ints, written))
        return jax.block_until_ready(Rows(ints, written, cache.layers))

    def compile(self, state: Rows) -> DecodeProgram:
        """Compile the loop ahead of time for states like this one; ``run`` calls it from now on."""
        self._loop = program = compile_decode(
            self.lm.config, self._params, state, self.sampling, self.stop_ids
        )
        return program

    def run(self, state: Rows, until: int) -> float:
        """Return the seconds until ``until`` tokens are written in all."""
        arguments = self._params, state, self.sampling, self.stop_ids, np.int32(until)
        return timed(self._loop, *arguments)[1]

    def trace(self, folder: str | Path, state: Rows, until: int) -> None:
        """Do a ``run`` under jax's profiler."""
        with jax.profiler.trace(str(folder)):
            self.run(state, until)


# Bytes


def bytes_per_step(lm: LanguageModel, rows: int = 1) -> int:
    """Return the bytes of weights that one decode step of ``rows`` tokens reads.

    A mixture's step reads the experts that some token has chosen. Their number is the mean for
    tokens that choose independently and evenly: ``E (1 - (1 - k / E) ** rows)``.
    """
    total, experts = tree_bytes(read_in_step(lm)), lm.config.experts
    if experts is None:
        return total
    unread = (1 - experts.n_active / experts.n_experts) ** rows
    held = sum(
        tree_bytes(part)
        for name, layer in lm.params.items()
        if name.startswith("layer_")
        for path, part in layer.get("mlp", {}).items()
        if path.startswith("experts_")
    )
    return total - round(unread * held)


def read_in_step(lm: LanguageModel) -> Params:
    """Return the parameters that one decode step reads.

    They exclude an embedding that is not the head: a step reads only the rows of its tokens.
    """
    if lm.config.tie_embeddings:
        return lm.params
    return {name: tree for name, tree in lm.params.items() if name != "embed"}


def cache_bytes_per_step(cfg: ModelConfig, cache: Cache, held: int) -> int:
    """Return the bytes of cache that a step must move when every row holds ``held`` tokens.

    The keys and values that the newest token sees are read; a GLA state is read and written.
    """
    total = 0
    for index, layer in enumerate(cache.layers):
        nbytes = tree_bytes(layer)
        if isinstance(layer, KVCache):
            seen = min(held, cfg.layers[index].window or held)
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
    """Return a cache that holds ``held`` tokens of noise.

    Zeros can be faster to multiply than data, so the cache is not empty. Its contents mean nothing;
    only its speed matters. Rows hold a multiple of 64 tokens, as those of ``generate`` do.
    mesh: as for ``init_cache``.
    """
    width = -(-max_len // 64) * 64

    def make() -> Cache:
        shapes = jax.eval_shape(functools.partial(init_cache, cfg, batch, width, dtype))
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
