"""Heads that draft: one layer that reads a model's hidden states, and proposes its next tokens.

    params        = head.weights(model, draft)
    hidden, state = head.forward(params, tokens, before, lengths, state)
    scores        = head.scores(params, hidden)

Entry t of the head's cache belongs to the model's states of token t and to token t + 1.  The head's
own output takes the place of the states for the tokens after that, so one head proposes any number.
``mtp`` is the head that a checkpoint brings, and ``eagle3`` one that is trained beside a model.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.model import decoder
from jaxllama.model.cache import Cache
from jaxllama.model.linear import Stream
from jaxllama.model.records import Draft, Hidden, new_tokens, places_of, positions_of
from jaxllama.typing import Params


class HeadScores(NamedTuple):
    """The scores of next tokens.

    logits: float32 ``[..., n]``.
    vocab_size: of the model that verifies the tokens.
    ids: int32 ``[n]``: the token of each score; None if it is the score's number.
    """

    logits: jax.Array
    vocab_size: int
    ids: jax.Array | None = None

    @property
    def whole(self) -> jax.Array:
        """Float32 logits ``[..., vocab_size]``, which are -inf for tokens without a score."""
        ids, shape = self.ids, (*self.logits.shape[:-1], self.vocab_size)
        if ids is not None:
            return jnp.full(shape, -jnp.inf, self.logits.dtype).at[..., ids].set(self.logits)
        scores = self.logits[..., : self.vocab_size]
        missing = self.vocab_size - scores.shape[-1]
        before = ((0, 0),) * (scores.ndim - 1)
        return jnp.pad(scores, (*before, (0, missing)), constant_values=-jnp.inf)


class Head(Protocol):
    """The interface of a head; an instance is a static argument of programs."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose inputs the head reads; () for the last layer's output."""
        ...

    @property
    def layer_config(self) -> ModelConfig:
        """The config of a model of the head's layer, for its cache."""
        ...

    def weights(self, model: Params, draft: Params | None) -> Params:
        """Return the parameters that the head reads, of the model's and its own."""
        ...

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        before: Hidden,
        lengths: jax.Array,
        cache: Cache,
        *,
        is_own: bool = False,
        is_prompt: bool = False,
        fresh: bool = False,
    ) -> tuple[Hidden, Cache]:
        """Return (hidden states ``[B, T, D]`` for ``logits``, cache) of new tokens.

        tokens: ``[B, T]``; the first ``lengths[B]`` of a row are valid.
        before: ``[B, T, D]``: the hidden states of the token before each of them.
        is_own: ``before`` is this head's, not the model's.
        is_prompt: the tokens are a part of a prompt.  Others are computed as decode steps.
        fresh: as for ``decoder.forward``.
        """
        ...

    def scores(self, params: Params, hidden: Hidden) -> HeadScores:
        """Return the scores of its next tokens after ``hidden [..., D]``."""
        ...


def run_layer(
    layer: LayerConfig,
    p: Params,
    stream: Stream,
    lengths: jax.Array,
    cache: Cache,
    *,
    is_prompt: bool,
    fresh: bool,
) -> tuple[Hidden, Cache]:
    """Run a head's layer on ``stream [B, T, D]``, whose tokens stand behind the cache."""
    (batch, width), start = stream.x.shape[:2], cache.lengths
    if cache.capacity is not None:
        lengths = jnp.minimum(lengths, jnp.maximum(cache.capacity - start, 0))
    if is_prompt or width == 1:
        positions, rope = positions_of(layer, start, start + lengths, width)
        at = new_tokens(positions, lengths, rope, False, cache.table, fresh, cached=True)
    else:
        positions, is_new, rope = places_of(layer, start, lengths, width)
        at = Draft(positions, is_new, rope, width, cache.table, sparse=False)
        stream = jax.tree.map(lambda x: x.reshape(batch * width, 1, -1), stream)
    stream, state = decoder.block(layer, p, stream, cache.layers[0], at)
    hidden = Hidden(stream.total.reshape(batch, width, -1))
    return hidden, dataclasses.replace(cache, layers=(state,), lengths=start + lengths)
