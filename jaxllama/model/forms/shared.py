"""Layers that take turns with a few blocks of weights.

    x    = norm(stream | embeddings)                                        [..., 2 D]
    y    = o(attention(qkv x + adapters x))                                 [..., D]
    left = out(down(gate_up norm(y) + adapters norm(y)))

Nothing is added to the stream.  The block hands ``left`` to the next layer (``Stream.handed``),
whose mixer reads norm(stream + left).

Source: Zamba2 (arXiv 2411.15242).  Left out: a mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllama.config import AttentionConfig, LayerConfig, Shared
from jaxllama.errors import JaxLlamaError
from jaxllama.model import linear
from jaxllama.model.forms.sequential import Sequential
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.model.mixers import MIXERS
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.records import At
from jaxllama.typing import Params, Tree
from pallas_kernels.rows.swiglu import swiglu


class SharedBlock(Sequential):
    """The computation of the form."""

    def begin(self, x: jax.Array) -> Stream:
        """Return the stream of embeddings ``x [..., D]``, which it keeps as ``embedded``."""
        return Stream(x, embedded=x)

    def mix(
        self,
        layer: LayerConfig,
        p: Params,
        stream: Stream,
        state: LayerState,
        at: At,
        ops: LayerOps = linear,
    ) -> tuple[Stream, LayerState]:
        """The first half: norm and mixer, or a shared block's attention."""
        if _has_block(layer):
            return _attend(layer, p, stream, state, at, ops)
        return super().mix(layer, p, stream, state, at, ops)

    def read(
        self,
        layer: LayerConfig,
        p: Params,
        stream: Stream,
        weights: Params | Sequence[Params],
        ops: LayerOps = linear,
    ) -> tuple[Tree, Stream]:
        """Return the products of the mixer's input, and the stream."""
        assert isinstance(layer.form, Shared)
        embedded = stream.embedded
        if not layer.form.reads:
            y, after = super().read(layer, p, stream, weights, ops)
            return y, after._replace(embedded=embedded)
        if stream.handed is None:
            raise JaxLlamaError(
                "this layer reads what the block before has left, which is not here"
            )
        both, stream = Stream(stream.total + stream.handed), stream._replace(handed=None)
        return ops.norm_linear(both, p.get("mixer_norm"), weights, layer)[0], stream

    def feed(
        self, layer: LayerConfig, p: Params, stream: Stream, before: Stream, ops: LayerOps = linear
    ) -> Stream:
        """The second half: a shared block's feed-forward; other layers have none."""
        del before
        return _feed(layer, p, stream, ops) if _has_block(layer) else stream


FORM = SharedBlock()


def _has_block(layer: LayerConfig) -> bool:
    return isinstance(layer.form, Shared) and layer.form.block is not None


def _attend(
    layer: LayerConfig, p: Params, stream: Stream, state: LayerState, at: At, ops: LayerOps
) -> tuple[Stream, LayerState]:
    """Return the stream, which hands on the attention's output ``[B, T, D]``, and the state."""
    if stream.embedded is None:
        raise JaxLlamaError("a shared block reads the embeddings, which are not here")
    total, params = stream.total, p["mixer"]
    both = Stream(jnp.concatenate([total, stream.embedded], axis=-1))
    x, _ = linear.norm(both, p["mixer_norm"], layer)
    y = ops.product(x, params["qkv"], total.dtype, layer)
    if "adapter_in" in params:
        y = y + _adapted(layer.mixer, params, x)
    heads, state = MIXERS["attention"].mix.mix(layer, params, y, state, at)
    left = ops.product(heads, params["o"], total.dtype, layer)
    return Stream(total, handed=left, embedded=stream.embedded), state


def _adapted(cfg: AttentionConfig, params: Params, x: jax.Array) -> jax.Array:
    """The adapters of q, k and v, which read the same input."""
    low = jnp.split(linear.linear(x, params["adapter_in"]), 3, axis=-1)
    ends = cfg.n_heads * cfg.head_dim, (cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim
    up = jnp.split(params["adapter_out"]["weight"], ends)
    return jnp.concatenate(
        [linear.linear(part, {"weight": w}) for part, w in zip(low, up, strict=True)], axis=-1
    )


def _feed(layer: LayerConfig, p: Params, stream: Stream, ops: LayerOps) -> Stream:
    """Return the stream, which hands on the block's output ``[B, T, D]``."""
    assert stream.handed is not None
    params, dtype = p["mlp"], stream.x.dtype
    x, _ = linear.norm(Stream(stream.handed), p["mlp_norm"], layer)
    y = ops.product(x, params["gate_up"], dtype, layer)
    y = y + linear.linear(linear.linear(x, params["adapter_in"]), params["adapter_out"])
    y = ops.product(swiglu(y, activation=layer.activation), params["down"], dtype, layer)
    return stream._replace(handed=ops.product(y, params["out"], dtype, layer))
