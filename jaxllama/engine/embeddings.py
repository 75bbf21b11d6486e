"""Embeddings: the mean of a text's final hidden states, scaled to length 1.

    Embedder(lm)(row) -> float32[D]

The hidden states are the decoder's after its last norm, the mean is over all tokens, special ones
included, in float32.  A model that was trained to embed does this better; of a generative one it is
the plain choice.  A row is the unit of work, so that bodies take turns and can be cancelled between
two.  It is padded to a power of two: few programs, each compiled when a length first needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.generation import Params
from jaxllama.language_model import LanguageModel
from jaxllama.model.decoder import final_norm, forward

SMALLEST = 64


class Embedder:
    """See the module docstring."""

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
    # The mean's direction is the sum's.
    return total / jnp.maximum(jnp.linalg.norm(total), jnp.float32(1e-20))
