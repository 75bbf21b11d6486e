"""The workload "learn": what a model learns of a text in so many steps, and how far it recalls.

    learn(experiment, settings, seed, room) -> {result: number | [numbers]}

A model is trained on bytes at several learning rates at once (``jax.vmap``: one program, the same
first weights and batches), and the rate is chosen that is best on a held part of the text; what is
reported is of the chosen one, on another held part.

Into every training row facts are planted: a key of 64 and, behind it, its value of 64, bytes that
no text has.  Each stands once more later in its row, where the value follows from the key
(multi-query associative recall, arXiv 2312.04927).  ``recall`` is the share of values that come
first among all 256 bytes when the key comes again ``distances`` bytes after its fact, behind
``facts`` facts at the beginning of held text; chance is 1/64.  Distances beyond ``sequence_length``
are longer than anything that was trained on.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.experiments.settings import LearnSettings
from jaxllama.generation import Params
from jaxllama.model.cache import init_cache
from jaxllama.model.decoder import block, final_norm, head, layer_config
from jaxllama.model.linear import Stream
from jaxllama.quantization.random_params import random_params
from jaxllama.training.config import DataConfig, OptimizerConfig, TrainConfig
from jaxllama.training.data import TokenFile
from jaxllama.training.flops import parameters
from jaxllama.training.forward import embed
from jaxllama.training.loss import cross_entropy
from jaxllama.training.optimizer import learning_rate, optimizer

VOCABULARY = 256
SYMBOLS = 64  # keys, and values
_KEYS, _VALUES = VOCABULARY - 2 * SYMBOLS, VOCABULARY - SYMBOLS  # the first of each
PART = 20  # steps in one program


def learn(cfg: ModelConfig, text: bytes, settings: LearnSettings, seed: int) -> dict[str, Any]:
    """cfg: of a model of bytes.  Raises JaxLlamaError for a text that is too short."""
    train, chosen_on, reported_on = split(text, settings)
    rng = np.random.default_rng((seed, 1))
    batches = np.stack([
        planted(train.batch(step, settings.batch_size, settings.sequence_length, seed),
                settings.facts, rng)
        for step in range(settings.steps)
    ])  # fmt: skip
    begin = random_params(cfg, jax.random.key(seed))
    rates = schedule(settings)
    state = first_state(begin, rates.shape[1])
    losses, seconds = [], []
    for at in range(0, settings.steps, PART):
        started = time.perf_counter()
        part = jnp.asarray(batches[at : at + PART])
        state, of_part = steps(cfg, state, rates[at : at + PART], part)
        losses.append(np.asarray(of_part))
        seconds.append((time.perf_counter() - started) / PART)
    held = []
    for part in (chosen_on, reported_on):  # a rate of 0 tells the losses and moves nothing
        rows = _windows(part, settings)
        state, of_part = steps(cfg, state, jnp.zeros((len(rows), rates.shape[1])), rows)
        held.append(np.mean(of_part, axis=0))
    best, params = int(np.nanargmin(held[0])), state[0]
    tokens = settings.batch_size * settings.sequence_length
    recall = recalled(cfg, jax.tree.map(lambda leaf: leaf[best], params), reported_on.ids, settings)
    return {
        "parameters": parameters(cfg),
        "learning_rate": settings.learning_rates[best],
        "held_loss": float(held[1][best]),
        "held_losses": [float(loss) for loss in held[1]],
        "distance": list(settings.distances),
        "recall": recall,
        "mean_recall": statistics.mean(recall),
        "tokens": [tokens * (step + 1) for step in range(settings.steps)],
        "loss": [float(loss) for loss in np.concatenate(losses)[:, best]],
        "tokens_per_second": tokens * rates.shape[1] / statistics.median(seconds[1:] or seconds),
        "state_kilobytes": init_cache(cfg, 1, max(settings.distances)).nbytes / 1e3,
    }


def split(text: bytes, settings: LearnSettings) -> tuple[TokenFile, TokenFile, TokenFile]:
    """(what is trained on, what a rate is chosen on, what is reported), bytes below 128."""
    ids = np.frombuffer(text, np.uint8)
    ids = np.where(ids < _KEYS, ids, ord("?")).astype(np.uint8)
    file = TokenFile(Path(), ids, VOCABULARY, "")
    need = max(settings.sequence_length, *settings.distances) + 2 * settings.facts + 2
    if settings.held_tokens < need or len(ids) < 3 * settings.held_tokens:
        raise JaxLlamaError(
            f"held_tokens = {settings.held_tokens}: must be at least {need}, the longest row, and "
            f"at most a third of the text's {len(ids)} bytes"
        )
    rest, reported_on = file.split(settings.held_tokens)
    train, chosen_on = rest.split(settings.held_tokens)
    return train, chosen_on, reported_on


def planted(rows: np.ndarray, facts: int, rng: np.random.Generator) -> np.ndarray:
    """``rows[B, T + 1]`` with ``facts`` facts in each, and each once more behind it: at distances
    from 2 to T, their logarithms uniform."""
    rows = rows.copy()
    places = rows.shape[1] // 2
    for row in rows:
        free = np.ones(places, bool)
        for key in rng.choice(SYMBOLS, facts, replace=False):
            here = rng.choice(np.flatnonzero(free[:-1]))
            after = np.flatnonzero(free[here + 1 :]) + 1
            wanted = np.exp(rng.uniform(0, np.log(places - here)))
            if not after.size:
                continue
            there = here + after[np.argmin(np.abs(after - wanted))]
            free[[here, there]] = False
            fact = _KEYS + key, _VALUES + rng.integers(SYMBOLS)
            for place in (here, there):
                row[2 * place : 2 * place + 2] = fact
    return rows


def recalled(
    cfg: ModelConfig, params: Params, text: np.ndarray, settings: LearnSettings
) -> list[float]:
    """The share of values recalled at each of ``settings.distances``."""
    rng = np.random.default_rng(0)
    facts, trials = settings.facts, settings.trials
    length = max(settings.distances) + 2 * facts + 2
    shares = []
    for distance in settings.distances:
        starts = rng.integers(0, len(text) - length + 1, trials)
        rows = np.stack([text[start : start + length] for start in starts]).astype(np.int32)
        keys = np.stack([rng.choice(SYMBOLS, facts, replace=False) for _ in starts]) + _KEYS
        values = rng.integers(SYMBOLS, size=keys.shape) + _VALUES
        rows[:, : 2 * facts] = np.stack([keys, values], axis=-1).reshape(trials, -1)
        # The last fact of those that are asked for beyond all of them.
        asked = facts - 1 if distance < 2 * facts else rng.integers(facts)
        at = max(2 * asked + distance, 2 * facts)
        rows[:, at] = keys[:, asked]
        said = _said(cfg, params, jnp.asarray(rows), jnp.int32(at))
        shares.append(float(np.mean(np.asarray(said) == values[:, asked])))
    return shares


@functools.partial(jax.jit, static_argnums=0)
def _said(cfg: ModelConfig, params: Params, rows: jax.Array, at: jax.Array) -> jax.Array:
    """The byte that comes first behind position ``at`` of ``rows[N, T]``, row by row."""

    def one(row: jax.Array) -> jax.Array:
        x = _hidden_states(cfg, params, row[None])[0]
        x = jax.lax.dynamic_index_in_dim(x, at, keepdims=False)
        return jnp.argmax(head(params)["weight"] @ x)

    return jax.lax.map(one, rows, batch_size=32)


def schedule(settings: LearnSettings) -> jax.Array:
    """float32 ``[steps, rates]``: a tenth of the steps rises, the rest falls as a cosine."""
    config = _config(settings.steps, warmup_steps=settings.steps // 10)
    shares = learning_rate(config, jnp.arange(settings.steps))
    return shares[:, None] * jnp.asarray(settings.learning_rates, jnp.float32)


def _rule() -> optax.GradientTransformation:
    """Of a learning rate that is always 1: Adam's changes are proportional to it."""
    return optimizer(_config(1, final_share=1.0))


def _config(count: int, **options: Any) -> TrainConfig:
    """What the optimizer reads of one."""
    return TrainConfig(
        data=DataConfig(""), steps=count, batch_size=1, sequence_length=1, learning_rate=1.0,
        init_from="", optimizer=OptimizerConfig(**options),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=1)
def first_state(params: Params, rates: int) -> Any:
    """What ``steps`` takes: the same parameters, and moments, for each rate."""
    return jax.vmap(lambda _: (params, _rule().init(params)))(jnp.arange(rates))


def _hidden_states(cfg: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """``training.forward.hidden_states``, layers that are alike as one loop: small models take
    longer to compile than to train."""
    stream, at = embed(cfg, params, tokens, jnp.dtype(jnp.float32))
    for kind, run in itertools.groupby(range(cfg.n_layers), lambda i: layer_config(cfg, i)):
        layers = jax.tree.map(
            lambda *leaves: jnp.stack(leaves), *(params[f"layer_{i}"] for i in run)
        )

        def layer(x: jax.Array, p: Params, kind: Any = kind) -> tuple[jax.Array, None]:
            return block(*kind, p, Stream(x), None, at)[0].total, None

        stream = Stream(jax.lax.scan(layer, stream.total, layers)[0])
    return final_norm(cfg, params, stream)


def _loss(cfg: ModelConfig, params: Params, rows: jax.Array) -> jax.Array:
    rows = rows.astype(jnp.int32)
    x = _hidden_states(cfg, params, rows[:, :-1])
    return cross_entropy(x, head(params)["weight"], rows[:, 1:])[0]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def steps(
    cfg: ModelConfig, state: Any, rates: jax.Array, batches: jax.Array
) -> tuple[Any, jax.Array]:
    """``batches uint8 [steps, B, T + 1]`` -> (state, losses ``[steps, rates]``)."""

    def one(state: Any, rate: jax.Array, rows: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, gradients = jax.value_and_grad(functools.partial(_loss, cfg))(params, rows)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            changes, moments = _rule().update(gradients, moments, params)
        changes = jax.tree.map(lambda change: rate * change, changes)
        return (optax.apply_updates(params, changes), moments), loss

    at_all_rates = jax.vmap(one, in_axes=(0, 0, None))
    return jax.lax.scan(lambda state, now: at_all_rates(state, *now), state, (rates, batches))


def _windows(part: TokenFile, settings: LearnSettings) -> jax.Array:
    """The whole windows of a held part, in batches that are as large as training's or smaller."""
    count = part.windows(settings.sequence_length)
    size = min(count, settings.batch_size)
    rows = [part.window(i, settings.sequence_length) for i in range(count // size * size)]
    return jnp.asarray(np.stack(rows).reshape(-1, size, settings.sequence_length + 1))
