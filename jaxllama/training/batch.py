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
    """

    tokens: ArrayOrNumpy
    segments: ArrayOrNumpy | None = None
    weights: ArrayOrNumpy | None = None

    @classmethod
    def of(cls, rows: Batch | ArrayOrNumpy) -> Batch:
        """Return ``rows``, which may be the tokens alone."""
        return rows if isinstance(rows, Batch) else cls(rows)

    @property
    def inputs(self) -> ArrayOrNumpy:
        """``[..., T]``: the tokens that the model reads."""
        return self.tokens[..., :-1]

    @property
    def targets(self) -> ArrayOrNumpy:
        """``[..., T]``: the tokens that it predicts."""
        return self.tokens[..., 1:]

    @property
    def input_segments(self) -> jax.Array | None:
        """``[..., T]``: segments of the inputs."""
        return None if self.segments is None else jnp.asarray(self.segments[..., :-1])
