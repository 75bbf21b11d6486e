"""A layer whose two sublayers stand one behind the other, as in Llama.

    stream += o(mixer(norm(stream)))
    stream += down(silu(gate(norm(stream))) * up(norm(stream)))        or experts, or nothing

A layer's config says whether norms stand before the sublayers, behind them, or both.  Its
parameters have no entry for a norm that it lacks.  The other forms are kinds of this one.

Source: Llama (arXiv 2302.13971).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.model import linear
from jaxllama.model.elementwise import activated
from jaxllama.model.experts.feed import feed_experts
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.model.mixers import MIXERS
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.records import At
from jaxllama.typing import Params, Tree


class Sequential:
    """The computation of the form."""

    def begin(self, x: jax.Array) -> Stream:
        """Return the stream of embeddings ``x [..., D]``."""
        return Stream(x)

    def inputs(
        self, cfg: ModelConfig, params: Params, tokens: jax.Array, x: jax.Array
    ) -> jax.Array | None:
        """Return what the layers read beside the stream, ``[B, T, L, P]``, or None."""
        return None

    def mix(
        self,
        layer: LayerConfig,
        p: Params,
        stream: Stream,
        state: LayerState,
        at: At,
        ops: LayerOps = linear,
    ) -> tuple[Stream, LayerState]:
        """Compute the first half: norm, mixer and its output's product.

        A first layer adds its learned positions to the embeddings, or applies their norm.

        Parameters
        ----------
        layer, p
            The layer's record and its parameters.
        stream
            The residual stream ``[B, T, D]`` before the layer.
        state
            What the mixer keeps of earlier tokens. None without a cache.
        at
            The places of the tokens.
        ops
            The functions for norms and products.

        Returns
        -------
        (Stream, LayerState)
            The stream with the mixer's output, and the mixer's state behind these tokens. The
            stream's ``handed`` and ``embedded`` are those that ``read`` returned.
        """
        mixer, params = MIXERS[layer.kind].mix, p["mixer"]
        if layer.learned_positions is not None or layer.embed_norm:
            stream = _embedded(layer, p, stream, at)
        y, stream = self.read(layer, p, stream, mixer.inputs(layer, params), ops)
        heads, state = mixer.mix(layer, params, y, state, at)
        after = ops.linear_add(heads, params["o"], stream, layer, p.get("mixer_out_norm"))
        return after._replace(handed=stream.handed, embedded=stream.embedded), state

    def read(
        self,
        layer: LayerConfig,
        p: Params,
        stream: Stream,
        weights: Params | Sequence[Params],
        ops: LayerOps = linear,
    ) -> tuple[Tree, Stream]:
        """Return the products of the mixer's input, and the stream."""
        return ops.norm_linear(stream, p.get("mixer_norm"), weights, layer)

    def feed(
        self, layer: LayerConfig, p: Params, stream: Stream, before: Stream, ops: LayerOps = linear
    ) -> Stream:
        """Compute the second half: norm and feed-forward, or experts, or nothing without them.

        before: the stream without the mixer's part.
        """
        if layer.feed is None:
            return stream
        if layer.experts is not None:
            return feed_experts(layer, p, stream, ops, None)
        y, stream = inner(layer, p["mlp"], stream, p.get("mlp_norm"), ops)
        return ops.linear_add(y, p["mlp"]["down"], stream, layer, p.get("mlp_out_norm"))

    def finish(
        self, layer: LayerConfig, p: Params, stream: Stream, at: At | None, ops: LayerOps = linear
    ) -> Stream:
        """Return the stream after both halves, unchanged."""
        return stream


FORM = Sequential()


def inner(
    layer: LayerConfig, p: Params, stream: Stream, norm: Params | None, ops: LayerOps = linear
) -> tuple[linear.Input, Stream]:
    """Return (what the last product of the feed-forward ``p`` reads, the stream)."""
    feed = layer.feed
    assert feed is not None
    if feed.gated_mlp and feed.inner_norms:
        y, stream = ops.norm_linear(stream, norm, p["gate_up"], layer)
        gate, up = jnp.split(y, 2, axis=-1)
        return _inner_norm(layer, p, activated(gate, feed.activation) * up), stream
    if feed.gated_mlp:
        return ops.norm_linear(stream, norm, p["gate_up"], layer, into=p["down"])
    y, stream = ops.norm_linear(stream, norm, p["up"], layer)
    scalars = p["xielu"]["weight"] if feed.activation == "xielu" else None
    return _inner_norm(layer, p, activated(y, feed.activation, scalars)), stream


def _inner_norm(layer: LayerConfig, p: Params, x: jax.Array) -> jax.Array:
    """The input of the last product, with its norm if it has one."""
    return linear.norm(Stream(x), p["inner_norm"], layer)[0] if "inner_norm" in p else x


def _embedded(layer: LayerConfig, p: Params, stream: Stream, at: At) -> Stream:
    """The embeddings as a first layer reads them: with the learned vectors of their positions, and
    their norm."""
    if layer.learned_positions is not None:
        table, places = p["positions"]["weight"], at.positions + layer.learned_positions
        vectors = table[jnp.clip(places, 0, table.shape[0] - 1)]
        stream = Stream(stream.total + vectors.astype(stream.x.dtype))
    return Stream(linear.norm(stream, p["embed_norm"], layer)[0]) if layer.embed_norm else stream
