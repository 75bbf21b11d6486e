"""Vectors and scores of texts: one forward pass of a row, and one vector from its hidden states.

    Embedder(lm)(row) -> float32[D]
    Ranker(lm)(row, ids) -> probabilities of the classes, or of the answers ``ids``

The hidden states are the decoder's output after the last norm. A model that was trained for
embeddings says how they become a vector (``checkpoints.pooling``). For any other model the vector
is the mean over all tokens, special tokens included, scaled to length 1. Sums run in float32.

A classifier's head (``score.weight`` of a ``...ForSequenceClassification`` model) reads the last
token's state: one class gives a sigmoid, several a softmax. Without a head, the next token's logits
of the ids in ``ids`` give a softmax (Qwen3-Reranker's "no" and "yes").

Each call computes one row, so a text has the same bits in any body and order. The server can also
alternate between request bodies and cancel between rows. A row is padded to a power of two: there
are few programs, and each is compiled when its length first occurs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllama.checkpoints.pooling import Pooling
from jaxllama.config import ModelConfig
from jaxllama.language_model import LanguageModel
from jaxllama.model.decoder import final_norm, forward, logits
from jaxllama.model.records import Hidden
from jaxllama.typing import Params

SMALLEST = 64


class Embedder:
    """Embeds one row of token ids at a time; the module docstring has the definition."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm

    def __call__(self, row: Sequence[int]) -> np.ndarray:
        """Return the row's vector, float32 ``[D]``."""
        tokens, length = _padded(row)
        states = _states(self._lm.config, self._lm.params, tokens, length)
        return np.asarray(_pooled(self._lm.pooling or Pooling(), states, length))


class Ranker:
    """Scores one row of token ids at a time; the module docstring has the definition."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm

    def __call__(self, row: Sequence[int], ids: Sequence[int] = ()) -> list[float]:
        """Return the probability of each class, or of each token id if there is no classifier."""
        lm = self._lm
        tokens, length = _padded(row)
        scores = np.asarray(_last_scores(lm.config, lm.params, lm.classifier, tokens, length))
        scores = scores.astype(np.float64)
        if lm.classifier is None:
            scores = scores[list(ids)]
        elif len(scores) == 1:
            return [float(1 / (1 + np.exp(-scores[0])))]
        weights = np.exp(scores - scores.max())
        return (weights / weights.sum()).tolist()


def cut(vector: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
    """Return the first ``dimensions`` numbers, scaled to length 1 again if ``normalize``.

    Source: Matryoshka representations (arXiv 2205.13147).
    """
    if dimensions is None or dimensions >= len(vector):
        return vector
    vector = vector[:dimensions]
    return vector / max(np.linalg.norm(vector), np.float32(1e-20)) if normalize else vector


def _padded(row: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    width = max(SMALLEST, 1 << (len(row) - 1).bit_length())
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(row)] = row
    return tokens, np.array([len(row)], np.int32)


@functools.partial(jax.jit, static_argnums=0)
def _states(cfg: ModelConfig, params: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
    hidden, _ = forward(cfg, params, tokens, length)
    return final_norm(cfg, params, hidden)[0].astype(jnp.float32)  # [T, D]


@functools.partial(jax.jit, static_argnums=0)
def _pooled(pooling: Pooling, states: jax.Array, length: jax.Array) -> jax.Array:
    valid = (jnp.arange(states.shape[0]) < length[0])[:, None]
    if pooling.mode == "last":
        vector = lax.dynamic_index_in_dim(states, length[0] - 1, keepdims=False)
    elif pooling.mode == "cls":
        vector = states[0]
    elif pooling.mode == "max":
        vector = jnp.max(jnp.where(valid, states, -jnp.inf), axis=0)
    else:
        vector = jnp.sum(jnp.where(valid, states, 0.0), axis=0) / length[0].astype(jnp.float32)
    if pooling.normalize:
        vector = vector / jnp.maximum(jnp.linalg.norm(vector), jnp.float32(1e-12))
    return vector


@functools.partial(jax.jit, static_argnums=0)
def _last_scores(
    cfg: ModelConfig,
    params: Params,
    classifier: jax.Array | None,
    tokens: jax.Array,
    length: jax.Array,
) -> jax.Array:
    """Return the classes' or the next token's logits, float32 ``[N]``."""
    hidden, _ = forward(cfg, params, tokens, length)
    last = Hidden(lax.dynamic_slice_in_dim(hidden.x, length[0] - 1, 1, axis=1))  # [1, 1, D]
    if classifier is None:
        return logits(cfg, params, last)[0, 0].astype(jnp.float32)
    state = final_norm(cfg, params, last)[0, 0].astype(jnp.float32)
    return jnp.dot(classifier, state, precision=lax.Precision.HIGHEST)
