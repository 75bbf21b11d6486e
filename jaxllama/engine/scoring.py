"""Logprobs of a prompt's own tokens, for ``echo`` with ``logprobs`` and for ``prompt_logprobs``.

    Scorer(lm)(row, n_top, adapter) -> Scores

One forward pass of the whole row runs beside the engine. As in ``embeddings``, the row is padded to
a power of two, and a program is compiled when its length first occurs. Logits are computed for
``BLOCK`` positions at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllama.config import ModelConfig
from jaxllama.engine.adapters import AdapterSlots
from jaxllama.engine.request import MAX_LOGPROBS
from jaxllama.language_model import LanguageModel
from jaxllama.model.decoder import forward, logits
from jaxllama.model.lora import for_rows
from jaxllama.model.records import Hidden
from jaxllama.typing import Params

SMALLEST = 64
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of a prompt's tokens under the model's own distribution.

    logprobs: natural logarithms. ranks: 1 is the likeliest token. tops: the ``n_top`` likeliest
    (id, logprob) pairs at each position. The first token has no context, so its entries are None.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    ranks: tuple[int | None, ...]
    tops: tuple[tuple[tuple[int, float], ...] | None, ...]


class Scorer:
    """Scores one row of token ids at a time; the module docstring has the definition."""

    def __init__(self, lm: LanguageModel, adapters: AdapterSlots | None = None) -> None:
        """adapters: of a running engine, instead of the model's own."""
        self._lm, self._adapters = lm, adapters

    def __call__(self, row: Sequence[int], n_top: int = 0, adapter: str | None = None) -> Scores:
        lm = self._lm
        width = max(SMALLEST, 1 << (len(row) - 1).bit_length())
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(row)] = row
        targets = np.roll(tokens, -1, axis=1)
        params = lm.params
        if self._adapters:
            params = for_rows(
                self._adapters.params, np.array([self._adapters.number(adapter)], np.int32)
            )
        elif lm.adapters:
            params = for_rows(params, np.array([lm.adapter_number(adapter)], np.int32))
        hidden = _hidden(lm.config, params, tokens, np.array([len(row)], np.int32))
        # Three programs for each width serve every n_top.
        most = min(n_top if n_top < 2 else MAX_LOGPROBS, lm.config.vocab_size)
        blocks = [
            _scores(lm.config, params, hidden, targets, np.int32(begin), most)
            for begin in range(0, len(row) - 1, BLOCK)
        ]
        n = len(row) - 1
        chosen, ranks, top_ids, top_values = (
            [value for block in blocks for value in np.asarray(block[part])[0].tolist()][:n]
            for part in range(4)
        )
        tops = [
            tuple(zip(ids[:n_top], values[:n_top], strict=True))
            for ids, values in zip(top_ids, top_values, strict=True)
        ]
        return Scores(tuple(row), (None, *chosen), (None, *ranks), (None, *tops))


@functools.partial(jax.jit, static_argnums=0)
def _hidden(cfg: ModelConfig, params: Params, tokens: jax.Array, length: jax.Array) -> Hidden:
    return forward(cfg, params, tokens, length)[0]  # [1, T, D]


@functools.partial(jax.jit, static_argnums=(0, 5))
def _scores(
    cfg: ModelConfig,
    params: Params,
    hidden: Hidden,
    targets: jax.Array,
    begin: jax.Array,
    n_top: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Score the positions from ``begin`` on.

    Returns the logprobs ``[1, B]`` and ranks ``[1, B]`` of the targets, and the ids and logprobs
    ``[1, B, n_top]`` of the likeliest tokens.
    """
    size = min(BLOCK, hidden.x.shape[1])
    hidden = Hidden(lax.dynamic_slice_in_dim(hidden.x, begin, size, axis=1))
    targets = lax.dynamic_slice_in_dim(targets, begin, size, axis=1)
    scores = logits(cfg, params, hidden)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(scores, targets[..., None], axis=-1)
    ranks = 1 + jnp.sum(scores > chosen, axis=-1, dtype=jnp.int32)
    values, ids = lax.top_k(scores, n_top)
    return (chosen - total)[..., 0], ranks, ids, values - total
