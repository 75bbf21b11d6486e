"""One step's rows: tokens, and for packed conversations segments and weights of the loss."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllama.typing import ArrayOrNumpy


class Batch(NamedTuple):
    """Rows of T + 1 tokens, each of which predicts the next one T times.

    tokens : int32 ``[..., T + 1]``
    segments : int32 ``[..., T + 1]`` or None
        Where several sequences lie in a row: equal numbers are one sequence, 0 is padding.
    weights : float32 ``[..., T]`` or None
        Weight of each prediction in the loss; their mean over a step is 1. None: all are 1.
    labels : float32 ``[..., K]`` or None
        Weights of K pairs of segments (``training.preference``); ``weights`` are then 0 or 1.
    reference : float32 ``[..., K, 2]`` or None
        Log-probabilities of the pairs' answers under the first model.
    begins : int32 ``[..., M]`` or None
        Where the row's segments begin, the padding's too, then -1: a kernel skips what no token
        sees. None: it masks that.
    prompts : int32 ``[..., 1]`` or None
        Tokens of each row's prompt, if the forward pass has the engine's bits (``served``).
    """

    tokens: ArrayOrNumpy
    segments: ArrayOrNumpy | None = None
    weights: ArrayOrNumpy | None = None
    labels: ArrayOrNumpy | None = None
    reference: ArrayOrNumpy | None = None
    begins: ArrayOrNumpy | None = None
    prompts: ArrayOrNumpy | None = None

    @classmethod
    def of(cls, rows: Batch | ArrayOrNumpy) -> Batch:
        """Return ``rows``, which may be the tokens alone."""
        return rows if isinstance(rows, Batch) else cls(rows)

    @property
    def inputs(self) -> jax.Array:
        """``[..., T]``: the tokens that the model reads."""
        return jnp.asarray(self.tokens[..., :-1])

    @property
    def targets(self) -> jax.Array:
        """``[..., T]``: the tokens that it predicts."""
        return jnp.asarray(self.tokens[..., 1:])

    @property
    def input_segments(self) -> jax.Array | None:
        """``[..., T]``: segments of the inputs."""
        return None if self.segments is None else jnp.asarray(self.segments[..., :-1])

    @property
    def input_begins(self) -> jax.Array | None:
        """``[..., M]``: where segments of the inputs begin."""
        if self.begins is None:
            return None
        begins = jnp.asarray(self.begins)
        return jnp.where(begins < self.tokens.shape[-1] - 1, begins, jnp.int32(-1))
