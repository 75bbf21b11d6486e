"""Estimate the time of a point from a small piece of its own work.

    measured(experiment, settings) -> Duration

Each function calls the same functions as its workload, with the same shapes and fewer repetitions:
two decode steps, one window of a text, two training steps. The first call compiles, and the second
one gives the time of a repetition. A later run takes the larger programs from jax's cache. Weights
are random, so nothing is fetched. Left out: calibration, and writing results.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.evaluation.perplexity import perplexity
from jaxllama.evaluation.speed.decode import SHORT
from jaxllama.evaluation.speed.harness import Decoding
from jaxllama.experiments import workloads
from jaxllama.experiments.config import Experiment
from jaxllama.experiments.settings import (
    LearnSettings,
    OffloadSettings,
    QualitySettings,
    ServeSettings,
    Settings,
    SpeedSettings,
    TrainSettings,
)
from jaxllama.language_model import LanguageModel
from jaxllama.loading import enable_compilation_cache
from jaxllama.typing import Options, Tree

STEPS = 2  # decode or training steps that are timed
PROMPTS = 20  # of a kind in configs/texts/drafts.jsonl
WARM = 2  # uncounted runs of ``bench.decode`` for each measurement
# options of the speed measurement in "quality"
BENCH: Options = {"prompt_tokens": 16, "runs": 5, "context": SHORT, "chunk": None}


@dataclasses.dataclass(frozen=True)
class Duration:
    """Seconds of a point's first measurement, and of a later one with another seed."""

    first: float
    later: float

    def of(self, seeds: int) -> float:
        """Return the seconds of all measurements of the point."""
        return self.first + (seeds - 1) * self.later


def measured(experiment: Experiment, settings: Settings) -> Duration:
    """Run a piece of the point's work, and extrapolate its time."""
    enable_compilation_cache()
    return _DURATIONS[type(settings)](experiment, settings)


def window_count(tokens: int, window: int) -> int:
    """Return the number of windows in which ``perplexity`` scores this many tokens."""
    return max(1, -(-(tokens - 1) // (window - 1)))


def text_tokens(experiment: Experiment, settings: QualitySettings) -> int:
    """Return the number of tokens of a point's text.

    A byte is a token for random weights. Otherwise four bytes count as a token, as in English. A
    missing text counts as one window.
    """
    path = experiment.find(settings.text)
    of_bytes = settings.model in experiment.models or settings.random
    size = path.stat().st_size // (1 if of_bytes else 4) if path.is_file() else settings.window
    return min(size, settings.max_tokens or size)


def _seconds(call: Callable[[], object]) -> float:
    """Return the wall time of a call, until its arrays are ready."""
    begun = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begun


def _quality(experiment: Experiment, settings: QualitySettings) -> Duration:
    tokens = text_tokens(experiment, settings)
    settings = dataclasses.replace(settings, random=True)
    begun = time.perf_counter()
    lm, reference = workloads.quality_models(experiment, settings, 0)
    jax.block_until_ready((lm.params, reference.params))
    making = time.perf_counter() - begun
    window = min(settings.window, lm.config.max_position)
    text = workloads.read_text(experiment, settings.text)[: 8 * window]
    dtype = workloads.kv_dtype(settings.kv_dtype)
    score = functools.partial(
        perplexity, lm, text, window, reference=reference, kv_dtype=dtype, max_tokens=window
    )
    cold, warm = _seconds(score), _seconds(score)
    scoring = window_count(tokens, window) * warm
    found = Duration(making + max(0.0, cold - warm) + scoring, making + scoring)
    if not settings.decode_tokens:
        return found
    fast = dataclasses.replace(lm, exact=False)
    decoding = _bench(fast, kv_dtype=dtype, new_tokens=settings.decode_tokens, batch=1, **BENCH)
    return Duration(found.first + decoding.first, found.later + decoding.later)


def _speed(experiment: Experiment, settings: SpeedSettings) -> Duration:
    settings = dataclasses.replace(settings, random=True)
    begun = time.perf_counter()
    lm = workloads.speed_model(experiment, settings, 0)
    jax.block_until_ready(lm.params)
    making = time.perf_counter() - begun
    if settings.draft is not None:
        piece = dataclasses.replace(settings, runs=1)
        run = functools.partial(workloads.drafted, experiment, piece, lm, 0, prompts=1)
        cold, warm = _seconds(run), _seconds(run)
        later = making + PROMPTS * settings.runs * warm
        return Duration(max(0.0, cold - warm) + later, later)
    found = _bench(
        lm,
        batch=settings.batch,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        runs=settings.runs,
        context=settings.context,
        kv_dtype=workloads.kv_dtype(settings.kv_dtype),
        chunk=settings.chunk,
    )
    return Duration(making + found.first, making + found.later)


def _bench(
    lm: LanguageModel,
    *,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    runs: int,
    context: int,
    kv_dtype: str | None,
    chunk: int | None,
) -> Duration:
    """Return the time of ``bench.decode.run``.

    It leaves out the memory's rate, which a process measures once.
    """
    decoding = Decoding(lm, batch, kv_dtype, chunk)
    steps = min(STEPS, new_tokens - 1)

    def decode() -> tuple[float, float, float]:
        """Return seconds of a prompt, of compiling the loop for it, and of all decode steps."""
        begun = time.perf_counter()
        state, _ = decoding.prefilled(SHORT, new_tokens, context - SHORT)
        prompt = time.perf_counter() - begun
        compiling = decoding.compile(state).compile_seconds
        return prompt, compiling, decoding.run(state, 1 + steps) / steps * (new_tokens - 1)

    def prefill() -> Tree:
        return decoding.prefilled(prompt_tokens, 1)[0]

    first = _seconds(lambda: decoding.prefilled(SHORT, 1)[0])
    cold, warm = decode(), decode()
    prefills = _seconds(prefill), _seconds(prefill)
    times = runs + WARM
    repeated = times * (warm[0] + warm[2] + prefills[1])
    compiling = sum(cold[:2]) - warm[0] + max(0.0, prefills[0] - prefills[1])
    return Duration(first + compiling + repeated, 2 * warm[0] + warm[1] + repeated)


def _offload(experiment: Experiment, settings: OffloadSettings) -> Duration:
    settings = dataclasses.replace(settings, random=True)
    begun = time.perf_counter()
    lm, prompts = workloads.offload_task(experiment, settings, 0)
    how: Options = {
        "kv_dtype": workloads.kv_dtype(settings.kv_dtype),
        **workloads.drafting(experiment, settings, lm, 0),
    }
    making = time.perf_counter() - begun
    tokens = min(1 + STEPS, settings.new_tokens)

    def generate(new_tokens: int) -> float:
        return _seconds(lambda: lm.generate(prompts, new_tokens, **how))

    cold, prefill, warm = generate(tokens), generate(1), generate(tokens)
    step = max(0.0, warm - prefill) / (tokens - 1)
    later = making + 3 * prefill + 2 * (settings.new_tokens - 1) * step
    return Duration(max(0.0, cold - warm) + later, later)


def _serve(experiment: Experiment, settings: ServeSettings) -> Duration:
    """Return the time from that of as many requests as there are slots."""
    few = min(settings.requests, settings.slots)
    piece = dataclasses.replace(settings, random=True, requests=few)
    begun = time.perf_counter()
    found = workloads.serve(experiment, piece, 0, Path())
    making = time.perf_counter() - begun - found["seconds"]
    seconds = making + 2 * found["seconds"] * settings.requests / few  # the first run compiles
    return Duration(seconds, seconds)


def _train(experiment: Experiment, settings: TrainSettings) -> Duration:
    from jaxllama.training.estimate import estimate
    from jaxllama.training.start import open_data

    with tempfile.TemporaryDirectory() as folder:
        config = workloads.tokenized(experiment, settings, Path(folder))
        seconds = estimate(config, open_data(config)).seconds
    return Duration(seconds, seconds)


def _learn(experiment: Experiment, settings: LearnSettings) -> Duration:
    """Return the time; all seeds are trained at once, so a later seed costs nothing more."""
    from jaxllama.experiments import learning
    from jaxllama.quantization.random_params import random_params

    cfg = workloads.model_config(experiment, settings)
    assert cfg is not None
    text = workloads.learned_text(experiment, settings)
    seeds = experiment.seeds
    begun = time.perf_counter()
    parts = [learning.parts(text, settings, seed) for seed in seeds]
    params = [random_params(cfg, jax.random.key(seed)) for seed in seeds]
    rates = learning.schedule(settings)[:STEPS]
    state = learning.first_state(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *params), rates.shape[1]
    )
    jax.block_until_ready(state)
    rows = learning.together([next(part[0]) for part in parts])
    making = time.perf_counter() - begun

    def train() -> float:
        nonlocal state
        begun = time.perf_counter()
        state, losses = learning.steps(cfg, state, rates, [part[:STEPS] for part in rows])
        jax.block_until_ready((state, losses))
        return time.perf_counter() - begun

    cold, warm = train(), train()
    held = [len(part[0]) for part in parts[0][1:]]
    shapes = {(learning.PART, settings.batch_size)} | {
        part[0].shape[:2] for part in parts[0][1:]
    }  # the program is compiled for each of these shapes
    seconds = making + len(shapes) * max(0.0, cold - warm)
    seconds += (settings.steps + sum(held)) * warm / STEPS
    if text is None:
        chosen = jax.tree.map(lambda leaf: leaf[0, 0], state[0])
        few = min(settings.trials, learning.ROWS)
        for length, calls in (
            (settings.sequence_length, len(settings.facts)),
            (max(settings.distances) + 2 * min(settings.facts), len(settings.distances)),
        ):
            ids = jnp.asarray(np.zeros((few, length)), jnp.int32)
            recall = functools.partial(learning.said_after, cfg, chosen, ids)
            cold, warm = _seconds(recall), _seconds(recall)
            seconds += max(0.0, cold - warm) + len(seeds) * calls * settings.trials / few * warm
    return Duration(seconds, 0.0)


_DURATIONS: dict[type, Callable[..., Duration]] = {
    QualitySettings: _quality,
    SpeedSettings: _speed,
    OffloadSettings: _offload,
    ServeSettings: _serve,
    TrainSettings: _train,
    LearnSettings: _learn,
}
