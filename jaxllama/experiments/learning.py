"""The workload "learn": train a model on a text, or on looking facts up, for a number of steps.

    learn(cfg, text | None, settings, seeds) -> [{result: number | [numbers] | None}], one a seed

A model of bytes is trained at several learning rates and from several seeds at once. ``jax.vmap``
makes this one program, and all rates of a seed share the first weights and the batches. For each
seed the rate with the lowest loss on a held-out part of the text is chosen. The results are those
of the chosen rate on another held-out part.

Without a text the model learns to recall (multi-query associative recall, arXiv 2312.04927). A row
begins with facts, each a key and its value. After them every key occurs once more, at a random
place among random bytes, and only the values there count. ``recall`` is the share of these values
that are the likeliest of all 256 bytes. Recall is measured by the number of ``facts``
in a row of the training length. It is also measured by ``distance`` with the fewest facts, in rows
that may be longer than in training. Chance is 1/112.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.experiments.settings import LearnSettings
from jaxllama.model.cache import init_cache
from jaxllama.model.decoder import head, softcap
from jaxllama.model.flops import parameters
from jaxllama.model.stacked import hidden_states, stack_layers
from jaxllama.quantization.random_params import random_params
from jaxllama.training.config import DataConfig, OptimizerConfig, TrainConfig
from jaxllama.training.data import TokenFile
from jaxllama.training.optimizer import learning_rate, optimizer
from jaxllama.typing import JsonObject, Params, Tree

VOCABULARY = 256
SYMBOLS = 112  # number of keys, and of values
KEYS, VALUES = VOCABULARY - 2 * SYMBOLS, VOCABULARY - SYMBOLS  # the first byte of each
PART = 20  # steps in one program
ROWS = 32  # rows that are read at once in recall

# uint8 [..., B, T + 1], and bool [..., B, T]: the counted positions
Rows = tuple[np.ndarray, np.ndarray]
Parts = tuple[Iterator[Rows], Rows, Rows]  # for training, for choosing a rate, for the results


def learn(
    cfg: ModelConfig, text: bytes | None, settings: LearnSettings, seeds: Sequence[int]
) -> list[JsonObject]:
    """Return the results of each seed.

    cfg: config of a model of bytes. Raises JaxLlamaError for a text that is too short.
    """
    of_seeds, *held = zip(*(parts(text, settings, seed) for seed in seeds), strict=True)
    rates = schedule(settings)
    params = [random_params(cfg, jax.random.key(seed)) for seed in seeds]
    state = first_state(jax.tree.map(lambda *leaves: jnp.stack(leaves), *params), rates.shape[1])
    losses, seconds = [], []
    for at, part in zip(range(0, settings.steps, PART), zip(*of_seeds, strict=True), strict=True):
        started = time.perf_counter()
        state, of_part = steps(cfg, state, rates[at : at + PART], together(part))
        losses.append(np.asarray(of_part))
        seconds.append((time.perf_counter() - started) / PART)
    held_losses = []
    for part in map(together, held):  # a rate of 0 computes the losses and changes nothing
        state, of_part = steps(cfg, state, jnp.zeros((len(part[0]), rates.shape[1])), part)
        held_losses.append(np.mean(of_part, axis=0))
    tokens = settings.batch_size * settings.sequence_length
    models = len(seeds) * rates.shape[1]
    of_all = {
        "parameters": parameters(cfg),
        "tokens": [tokens * (step + 1) for step in range(settings.steps)],
        "tokens_per_second": tokens * models / statistics.median(seconds[1:] or seconds),
        "state_kilobytes": init_cache(cfg, 1, max(settings.distances), jnp.float32).nbytes / 1e3,
    }
    results = []
    for i, (to_choose, to_report) in enumerate(zip(*held_losses, strict=True)):
        best = int(np.nanargmin(to_choose))
        recall: list[Tree] = [None, None]
        if text is None:
            chosen = jax.tree.map(lambda leaf, i=i, best=best: leaf[i, best], state[0])
            recall = [by(cfg, chosen, settings) for by in (recalled_of, recalled_over)]
        results.append(
            of_all
            | {
                "learning_rate": settings.learning_rates[best],
                "held_loss": float(to_report[best]),
                "held_losses": [float(loss) for loss in to_report],
                "recall_of_facts": recall[0],
                "recall": recall[1],
                "mean_recall": None if recall[0] is None else statistics.mean(recall[0]),
                "loss": [float(loss) for loss in np.concatenate(losses)[:, i, best]],
            }
        )
    return results


def together(parts: Sequence[Rows]) -> Rows:
    """Stack the parts of all seeds, each ``[steps, ...]``, to ``[steps, seeds, ...]``."""
    rows, counted = zip(*parts, strict=True)
    return np.stack(rows, axis=1), np.stack(counted, axis=1)


def parts(text: bytes | None, settings: LearnSettings, seed: int) -> Parts:
    return _of_facts(settings, seed) if text is None else _of_text(text, settings, seed)


def _of_text(text: bytes, settings: LearnSettings, seed: int) -> Parts:
    train, tuning, test = split(text, settings)
    shape = settings.batch_size, settings.sequence_length

    def part(at: int) -> Rows:
        return _all(np.stack([train.batch(at + step, *shape, seed) for step in range(PART)]))

    batches = map(part, range(0, settings.steps, PART))
    return batches, _windows(tuning, settings), _windows(test, settings)


def _of_facts(settings: LearnSettings, seed: int) -> Parts:
    rng = np.random.default_rng((seed, 1))
    shape = PART, settings.batch_size

    def part() -> Rows:
        counts = rng.choice(settings.facts, math.prod(shape))
        rows, counted = fact_rows(counts, settings.sequence_length, rng)
        return rows.reshape(*shape, -1), counted.reshape(*shape, -1)

    tuning, test = part(), part()
    return (part() for _ in range(settings.steps // PART)), tuning, test


def fact_rows(counts: np.ndarray, length: int, rng: np.random.Generator) -> Rows:
    """Return rows with ``counts[N]`` facts each, in which every key is asked for once.

    A row has ``length`` + 1 bytes.
    """
    number, most = len(counts), max(counts)
    rows = rng.integers(KEYS, size=(number, length + 1), dtype=np.uint8)
    counted = np.zeros((number, length), bool)
    keys = np.argsort(rng.random((number, SYMBOLS)), axis=1)[:, :most] + KEYS
    values = rng.integers(VALUES, VOCABULARY, keys.shape)
    places = rng.random((number, length // 2))
    places[np.arange(length // 2) < counts[:, None]] = 2  # last, because the facts stand there
    asked = 2 * np.argsort(places, axis=1)[:, :most]
    row, fact = np.nonzero(np.arange(most) < counts[:, None])
    for at in (2 * fact, asked[row, fact]):
        rows[row, at], rows[row, at + 1] = keys[row, fact], values[row, fact]
    counted[row, asked[row, fact]] = True
    return rows, counted


def recalled_of(cfg: ModelConfig, params: Params, settings: LearnSettings) -> list[float]:
    """Return the share of values recalled in rows of each of ``settings.facts``."""
    rng = np.random.default_rng(0)
    shares = []
    for facts in settings.facts:
        counts = np.full(settings.trials, facts)
        rows, counted = fact_rows(counts, settings.sequence_length, rng)
        said = np.asarray(said_after(cfg, params, jnp.asarray(rows[:, :-1], jnp.int32)))
        shares.append(float(np.mean((said == rows[:, 1:])[counted])))
    return shares


def recalled_over(cfg: ModelConfig, params: Params, settings: LearnSettings) -> list[float]:
    """Return the share of values recalled at each of ``settings.distances``, in bytes."""
    rng = np.random.default_rng(0)
    facts, trials = min(settings.facts), settings.trials
    shares = []
    for distance in settings.distances:
        rows, _ = fact_rows(np.full(trials, facts), 4 * facts, rng)
        length = max(settings.distances) + 2 * facts
        more = rng.integers(KEYS, size=(trials, length))
        more[:, : 2 * facts] = rows[:, : 2 * facts]
        # The last fact if the distance goes past all facts only from there.
        asked = facts - 1 if distance < 2 * facts else rng.integers(facts)
        at = max(2 * asked + distance, 2 * facts)
        more[:, at] = more[:, 2 * asked]
        said = np.asarray(said_after(cfg, params, jnp.asarray(more, jnp.int32)))
        shares.append(float(np.mean(said[:, at] == more[:, 2 * asked + 1])))
    return shares


def split(text: bytes, settings: LearnSettings) -> tuple[TokenFile, TokenFile, TokenFile]:
    """Return (training part, part for choosing a rate, part for the results)."""
    ids = np.frombuffer(text, np.uint8)
    file = TokenFile(Path(), ids, VOCABULARY, "")
    need = settings.sequence_length + 1
    if settings.held_tokens < need or len(ids) < 3 * settings.held_tokens:
        raise JaxLlamaError(
            f"held_tokens = {settings.held_tokens}: must be at least {need}, one row, and "
            f"at most a third of the text's {len(ids)} bytes"
        )
    rest, reported_on = file.split(settings.held_tokens)
    train, chosen_on = rest.split(settings.held_tokens)
    return train, chosen_on, reported_on


@functools.partial(jax.jit, static_argnums=0)
def said_after(cfg: ModelConfig, params: Params, rows: jax.Array) -> jax.Array:
    """Return the likeliest byte after each byte of ``rows[N, T]``."""

    def probability(row: jax.Array) -> jax.Array:
        x = _hidden_states(cfg, params, row[None])[0]
        return jnp.argmax(softcap(x @ head(params)["weight"].T, cfg.logit_softcap), axis=-1)

    return jax.lax.map(probability, rows, batch_size=ROWS)


def schedule(settings: LearnSettings) -> jax.Array:
    """Return the rates, float32 ``[steps, rates]``: a tenth of the steps rises, then a cosine."""
    config = _config(settings.steps, warmup_steps=settings.steps // 10)
    shares = learning_rate(config, jnp.arange(settings.steps))
    return shares[:, None] * jnp.asarray(settings.learning_rates, jnp.float32)


def _rule() -> optax.GradientTransformation:
    """Return Adam with a learning rate of 1; its changes are proportional to the rate."""
    return optimizer(_config(1, final_share=1.0))


def _config(count: int, **options: Any) -> TrainConfig:
    """Return a config with the options that the optimizer reads."""
    return TrainConfig(
        data=DataConfig("unused"),
        steps=count,
        batch_size=1,
        sequence_length=1,
        learning_rate=1.0,
        init_from="",
        optimizer=OptimizerConfig(**options),
    )


@functools.partial(jax.jit, static_argnums=1)
def first_state(params: Params, rates: int) -> Tree:
    """Return the state of ``steps`` for ``params [seeds, ...]``, with moments for each rate."""
    at_all_rates = jax.vmap(lambda p, _: (p, _rule().init(p)), in_axes=(None, 0))
    return jax.vmap(at_all_rates, in_axes=(0, None))(params, jnp.arange(rates))


def _hidden_states(cfg: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Return ``model.stacked.hidden_states`` with layers of one kind as one loop.

    Small models take longer to compile than to train.
    """
    return hidden_states(cfg, stack_layers(cfg, params), tokens, jnp.dtype(jnp.float32))


def mean_loss(logits: jax.Array, wanted: jax.Array, counted: jax.Array) -> jax.Array:
    """Return the cross entropy over the ``counted[B, T]`` positions of ``wanted[B, T]``."""
    lost = optax.softmax_cross_entropy_with_integer_labels(logits, wanted.astype(jnp.int32))
    return jnp.mean(lost, where=counted)


def _loss(cfg: ModelConfig, params: Params, rows: jax.Array, counted: jax.Array) -> jax.Array:
    x = _hidden_states(cfg, params, rows[:, :-1].astype(jnp.int32))
    return mean_loss(softcap(x @ head(params)["weight"].T, cfg.logit_softcap), rows[:, 1:], counted)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def steps(cfg: ModelConfig, state: Tree, rates: jax.Array, batches: Rows) -> tuple[Tree, jax.Array]:
    """Train for some steps.

    rates: ``[steps, rates]``. batches: ``[steps, seeds, B, T + 1]``. Returns (state, losses
    ``[steps, seeds, rates]``).
    """

    def step(state: Tree, rate: jax.Array, rows: Rows) -> tuple[Tree, jax.Array]:
        params, moments = state
        loss, gradients = jax.value_and_grad(functools.partial(_loss, cfg))(params, *rows)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            changes, moments = _rule().update(gradients, moments, params)
        changes = jax.tree.map(lambda change: rate * change, changes)
        return (optax.apply_updates(params, changes), moments), loss

    at_all = jax.vmap(jax.vmap(step, in_axes=(0, 0, None)), in_axes=(0, None, 0))
    return jax.lax.scan(lambda state, now: at_all(state, *now), state, (rates, batches))


def _windows(part: TokenFile, settings: LearnSettings) -> Rows:
    """Return the whole windows of a held-out part, in batches no larger than training's."""
    count = part.windows(settings.sequence_length)
    size = min(count, settings.batch_size)
    rows = [part.window(i, settings.sequence_length) for i in range(count // size * size)]
    return _all(np.stack(rows).reshape(-1, size, settings.sequence_length + 1))


def _all(rows: np.ndarray) -> Rows:
    return rows, np.ones((*rows.shape[:-1], rows.shape[-1] - 1), bool)
