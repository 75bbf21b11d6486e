"""A layer with a further input, from tables by token (per-layer embeddings), and a scale.

    i = (norm(project(x)) / sqrt(D) + sqrt(P) table[token]) / sqrt(2)        [L, P] of each token
    stream += norm(out(act(gate(stream)) * i[layer]))                        behind a feed-forward
    stream *= scale                                                          a stored number

x is the token's embedding.  ``inputs`` computes i for all layers, once a call.  The table is whole
on every device of a mesh.  Layers may have the scale alone.

Source: Gemma 3n and 4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllama.config import Inputs, LayerConfig, ModelConfig
from jaxllama.model import linear
from jaxllama.model.elementwise import activated
from jaxllama.model.forms.sequential import Sequential
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.model.records import At
from jaxllama.typing import Params
from pallas_kernels.cpu import CpuWeight
from pallas_kernels.fixed_sums import rounded
from pallas_kernels.qtensor import QTensor, dequantize
from pallas_kernels.rows.rms_norm import rms_norm


class LayerInputs(Sequential):
    """The computation of the form."""

    def inputs(
        self, cfg: ModelConfig, params: Params, tokens: jax.Array, x: jax.Array
    ) -> jax.Array | None:
        """Return the inputs ``[B, T, L, P]`` of tokens ``[B, T]`` with embeddings ``x [B, T, D]``;
        None without tables."""
        form = cfg.layers[0].form
        assert isinstance(form, Inputs)
        tables = form.tables
        if tables is None:
            return None
        p = params["inputs"]
        weight, shape = p["table"]["weight"], (*tokens.shape, tables.n_layers, tables.width)
        if isinstance(weight, QTensor | CpuWeight):
            rows = dequantize(weight.rows(tokens), x.dtype)
        else:
            rows = weight[tokens].astype(x.dtype)
        projected = linear.linear(x, p["project"]) * jnp.asarray(cfg.d_model**-0.5, x.dtype)
        projected = rms_norm(projected.reshape(shape), p["norm"]["weight"], cfg.norm.eps)
        scale = jnp.asarray(tables.width**0.5, x.dtype)
        return (rounded(projected) + rounded(rows.reshape(shape) * scale)) * jnp.asarray(
            0.5**0.5, x.dtype
        )

    def finish(
        self, layer: LayerConfig, p: Params, stream: Stream, at: At | None, ops: LayerOps = linear
    ) -> Stream:
        """Add the layer's input ``at.inputs [B, T, P]``, then multiply by the layer's scale."""
        if "inputs" in p:
            assert at is not None and at.inputs is not None
            x, params = stream.total, p["inputs"]
            gate = activated(ops.product(x, params["gate"], x.dtype, layer), layer.activation)
            y = ops.product(gate * at.inputs.astype(x.dtype), params["out"], x.dtype, layer)
            stream = Stream(x, linear.norm(Stream(y), params["norm"], layer)[0])
        if "scale" not in p:
            return stream
        return Stream(rounded(stream.total * p["scale"]["weight"].astype(stream.x.dtype)))


FORM = LayerInputs()
