"""The layer of an EAGLE-3 head, whose mixer reads a token's embedding beside the stream.

    x       = norm(embedded) | norm(stream)              [..., 2 D]
    stream += o(attention(qkv x));  stream += down(silu(gate(norm(stream))) * up(norm(stream)))

``Eagle.norm_residual`` puts norm(stream) in the stream's place first.

Source: EAGLE-3 (arXiv 2503.01840, section 3) and its published code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from jaxllama.config import Eagle, LayerConfig
from jaxllama.model import linear
from jaxllama.model.forms.sequential import Sequential
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.typing import Params, Tree


class EagleLayer(Sequential):
    """The computation of the form."""

    def read(
        self,
        layer: LayerConfig,
        p: Params,
        stream: Stream,
        weights: Params | Sequence[Params],
        ops: LayerOps = linear,
    ) -> tuple[Tree, Stream]:
        """Return the products of the mixer's input, and the stream."""
        assert isinstance(layer.form, Eagle) and stream.embedded is not None
        assert isinstance(weights, Mapping)
        total = stream.total
        embedded, _ = linear.norm(Stream(stream.embedded), p["embedded_norm"], layer)
        normed, _ = linear.norm(Stream(total), p["mixer_norm"], layer)
        both = jnp.concatenate([embedded, normed], axis=-1)
        y = ops.product(both, weights, total.dtype, layer)
        return y, Stream(normed if layer.form.norm_residual else total)


FORM = EagleLayer()
