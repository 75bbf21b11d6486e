"""Further inputs of every layer, from tables of their own (per-layer embeddings, Gemma 3n and 4).

    i = (norm(project(x)) / sqrt(D) + sqrt(P) table[token]) / sqrt(2)        [L, P] of each token
    stream += norm(out(act(gate(stream)) * i[layer]))                        behind a feed-forward

x is the token's embedding.  ``inputs_of`` computes i for all layers, once a call.  ``add`` is a
layer's part.  The table is whole on every device of a mesh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig
from jaxllama.model import linear
from jaxllama.model.elementwise import activated
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.model.records import At
from jaxllama.typing import Params
from pallas_kernels.cpu import CpuWeight
from pallas_kernels.qtensor import QTensor, dequantize
from pallas_kernels.rows.rms_norm import rms_norm


def inputs_of(cfg: ModelConfig, params: Params, tokens: jax.Array, x: jax.Array) -> jax.Array:
    """Return the inputs ``[B, T, L, P]`` of tokens ``[B, T]`` with embeddings ``x [B, T, D]``.

    params: ``layer_input_params.table``'s.
    """
    own, weight = cfg.layer_inputs, params["table"]["weight"]
    assert own is not None
    shape = *tokens.shape, own.n_layers, own.width
    if isinstance(weight, QTensor | CpuWeight):
        rows = dequantize(weight.rows(tokens), x.dtype)
    else:
        rows = weight[tokens].astype(x.dtype)
    made = linear.linear(x, params["project"]) * jnp.asarray(cfg.d_model**-0.5, x.dtype)
    made = rms_norm(made.reshape(shape), params["norm"]["weight"], cfg.norm_eps)
    scale = jnp.asarray(own.width**0.5, x.dtype)
    return (made + rows.reshape(shape) * scale) * jnp.asarray(0.5**0.5, x.dtype)


def add(cfg: ModelConfig, p: Params, stream: Stream, at: At, ops: LayerOps = linear) -> Stream:
    """Return the stream with a layer's input ``at.inputs [B, T, P]``; p: the layer's ``inputs``."""
    assert at.inputs is not None
    x = stream.total
    gate = activated(ops.product(x, p["gate"], x.dtype, cfg), cfg.activation)
    y = ops.product(gate * at.inputs.astype(x.dtype), p["out"], x.dtype, cfg)
    return Stream(x, linear.norm(Stream(y), p["norm"], cfg)[0])
