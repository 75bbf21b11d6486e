"""A gated short convolution: the mixer of LFM2's convolution layers.

    b, c, x = products of the layer's input
    y_t     = c_t * sum_w weight[w] (b x)_{t - W + 1 + w}        a feature by itself
    out     = o(y)

A row's state is the last ``W - 1`` products b x.  The layer has no positions.  The products around
the convolution are kernels.  XLA fuses everything between them into one loop.

Source: LFM2 (arXiv 2511.23404); transformers' ``lfm2`` has the parameters' names.  This folder is
also the example of a mixer: ``examples/new_layer.py`` runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllama.config import LayerConfig
from jaxllama.model.mixers.common import QUANTIZED_CACHE
from jaxllama.model.mixers.recurrent import convolve, last_inputs
from jaxllama.model.mixers.short_conv.parameters import options
from jaxllama.model.records import At, Draft
from jaxllama.parallel.mesh import MODEL_AXIS, RowAxis
from jaxllama.typing import Params, Tree
from pallas_kernels.operands import Columns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShortConvState:
    """last: the inputs that the next tokens' convolution reads, ``[B, W - 1, features]``."""

    last: jax.Array

    def specs(self, rows: RowAxis) -> ShortConvState:
        """How it is split on a mesh."""
        of_last: Tree = P(rows, None, MODEL_AXIS)
        return ShortConvState(of_last)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShortConvTokens:
    """read: the convolution's inputs of T tokens of a draft, ``[B, T, features]``."""

    kind: ClassVar[str] = "short_conv"
    read: jax.Array


def init_state(
    layer: LayerConfig, rows: int, length: int, width: int, dtype: str
) -> ShortConvState:
    """Return the state before any token; it does not grow with a row's ``length``."""
    del length, width
    settings = options(layer)
    dtype = "float32" if dtype in QUANTIZED_CACHE else dtype
    return ShortConvState(jnp.zeros((rows, settings.taps - 1, settings.width), dtype))


def inputs(layer: LayerConfig, p: Params) -> list[Params]:
    """Return the weights that multiply the layer's input."""
    del layer
    return [p["bcx"]]


def mix(
    layer: LayerConfig,
    p: Params,
    projected: Sequence[Columns],
    state: ShortConvState | None,
    at: At,
) -> tuple[jax.Array, ShortConvState | ShortConvTokens | None]:
    """Return (y ``[B, T, n]``, the new state; of a draft, the inputs that ``commit`` reads).

    projected: the product of ``inputs``, ``[B, T, 3 n]``: b, c, x.  The convolution reads a row's
    tokens side by side, and a draft's tokens are rows of their own (``at.by_row``).
    """
    del layer
    b, c, x = jnp.split(projected[0].value, 3, axis=-1)
    read = at.by_row(b * x)
    past = None if state is None else state.last
    sums, last = convolve(read, p["conv"]["weight"], past, at)
    y = (c.astype(jnp.float32) * sums.reshape(c.shape)).astype(c.dtype)
    if isinstance(at, Draft):
        return y, ShortConvTokens(read)
    return y, None if state is None else ShortConvState(last)


def commit(
    states: Sequence[ShortConvState],
    tokens: Sequence[ShortConvTokens],
    count: jax.Array,
    exact: bool,
) -> Iterator[ShortConvState]:
    """Yield each layer's state after the first ``count[B]`` of a draft's tokens."""
    del exact
    for state, of in zip(states, tokens, strict=True):
        yield ShortConvState(last_inputs(state.last, of.read, count))
