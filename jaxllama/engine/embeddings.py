"""Embeddings: the mean of a text's final hidden states, scaled to length 1.

    Embedder(lm)(row) -> float32[D]

The hidden states are the decoder's output after the last norm. The mean runs over all tokens,
special tokens included, in float32. A model trained for embeddings gives better vectors than a
generative model.

Each call embeds one row, so that the server can alternate between request bodies and cancel between
rows. A row is padded to a power of two: there are few programs, and each is compiled when its
length first occurs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.language_model import LanguageModel
from jaxllama.model.decoder import final_norm, forward
from jaxllama.typing import Params

SMALLEST = 64


class Embedder:
    """Embeds one row of token ids at a time; the module docstring has the definition."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm

    def __call__(self, row: Sequence[int]) -> np.ndarray:
        width = max(SMALLEST, 1 << (len(row) - 1).bit_length())
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(row)] = row
        length = np.array([len(row)], np.int32)
        return np.asarray(_pooled(self._lm.config, self._lm.params, tokens, length))


@functools.partial(jax.jit, static_argnums=0)
def _pooled(cfg: ModelConfig, params: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
    hidden, _ = forward(cfg, params, tokens, length)
    states = final_norm(cfg, params, hidden)[0]  # [T, D]
    valid = jnp.arange(tokens.shape[1]) < length[0]
    total = jnp.sum(jnp.where(valid[:, None], states.astype(jnp.float32), 0.0), axis=0)
    # The sum has the mean's direction, and the length is scaled to 1 anyway.
    return total / jnp.maximum(jnp.linalg.norm(total), jnp.float32(1e-20))
