"""A layer whose block of weights several layers share (Zamba2).

    x    = norm(stream | embeddings)                                        [..., 2 D]
    y    = o(attention(qkv x + adapters x))                                 [..., D]
    left = out(down(gate_up norm(y) + adapters norm(y)))

Nothing is added to the stream.  ``left`` stands beside it, and the next layer's mixer reads
norm(stream + left).  ``decoder.mix_half`` and ``feed_half`` call these two halves.

Source: arXiv 2411.15242.  Left out: a mesh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model import linear
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.model.mixers import MIXERS
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.records import At
from jaxllama.typing import Params
from pallas_kernels.rows.swiglu import gate


def attend(
    cfg: ModelConfig, p: Params, stream: Stream, state: LayerState, at: At, ops: LayerOps
) -> tuple[Stream, LayerState]:
    """Return the stream with the attention's output beside it, and the state."""
    if stream.embedded is None:
        raise JaxLlamaError("a shared block reads the embeddings, which are not beside the stream")
    total, own = stream.total, p["mixer"]
    both = Stream(jnp.concatenate([total, stream.embedded], axis=-1))
    x, _ = linear.norm(both, p["mixer_norm"], cfg)
    y = ops.product(x, own["qkv"], total.dtype, cfg)
    if "adapter_in" in own:
        y = y + _adapted(cfg, own, x)
    heads, state = MIXERS["attention"].mix.mix(cfg, own, y, state, at)
    left = ops.product(heads, own["o"], total.dtype, cfg)
    return Stream(total, beside=left, embedded=stream.embedded), state


def _adapted(cfg: ModelConfig, own: Params, x: jax.Array) -> jax.Array:
    """The adapters of q, k and v, which read the same input."""
    low = jnp.split(linear.linear(x, own["adapter_in"]), 3, axis=-1)
    ends = cfg.n_heads * cfg.head_dim, (cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim
    up = jnp.split(own["adapter_out"]["weight"], ends)
    return jnp.concatenate(
        [linear.linear(part, {"weight": w}) for part, w in zip(low, up, strict=True)], axis=-1
    )


def feed(cfg: ModelConfig, p: Params, stream: Stream, ops: LayerOps) -> Stream:
    """Return the stream with the block's output beside it."""
    assert stream.beside is not None
    own, dtype = p["mlp"], stream.x.dtype
    x, _ = linear.norm(Stream(stream.beside), p["mlp_norm"], cfg)
    y = ops.product(x, own["gate_up"], dtype, cfg)
    y = y + linear.linear(linear.linear(x, own["adapter_in"]), own["adapter_out"])
    y = ops.product(gate(y, cfg.activation), own["down"], dtype, cfg)
    return stream._replace(beside=ops.product(y, own["out"], dtype, cfg))
