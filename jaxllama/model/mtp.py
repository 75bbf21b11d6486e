"""MTP: the head for multi-token prediction that Qwen3-Next and Qwen3.5 checkpoints carry.

    state         = init_state(cfg, batch, capacity, dtype)              a Cache of one layer
    hidden, state = forward(cfg, params, tokens, before, lengths, state)
    scores        = logits(cfg, params, hidden)

    x = fc(concat(norm(embed(token t + 1)), norm(h_t)));  layer of full attention;  norm;  head

``h_t`` is the model's output for token t behind its final norm.  The head's own output behind its
own norm replaces it for the tokens after that, so one head proposes any number of tokens.  The
embedding and the last product are the model's.  Entry t of the head's cache belongs to h_t and
token t + 1, so it is as long as the model's cache.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2); Qwen3-Next and Qwen3.5 as vLLM runs them
(``qwen3_next_mtp``, ``qwen3_5_mtp``).  transformers has no class for it.  Left out: several layers,
a head with an embedding of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllama.config import ModelConfig
from jaxllama.model import decoder, linear
from jaxllama.model.cache import Cache, cache_specs
from jaxllama.model.linear import Stream
from jaxllama.model.records import Draft, Hidden, new_tokens, places_of, positions_of
from jaxllama.model.sharded import over_mesh
from jaxllama.parallel.mesh import traced_mesh
from jaxllama.typing import Params, Tree

_READ = ("mtp", "embed", "norm", "head")


def head_params(params: Params) -> Params:
    """The parameters that the head reads, without adapters."""

    def bare(node: Tree) -> Tree:
        if not isinstance(node, dict):
            return node
        return {name: bare(part) for name, part in node.items() if name != "lora"}

    return {name: bare(params[name]) for name in _READ if name in params}


def forward(
    cfg: ModelConfig,
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
    before: ``[B, T, D]``: the hidden state of the token before each of them, before a last norm.
    is_own: ``before`` is this head's, not the model's.
    is_prompt: the tokens are a part of a prompt.  Others are computed as decode steps.
    fresh: as for ``decoder.forward``.
    """
    mesh = traced_mesh(params)
    if mesh is not None:
        return over_mesh(
            forward,
            mesh,
            cfg,
            params,
            tokens,
            before,
            lengths,
            cache,
            is_own=is_own,
            is_prompt=is_prompt,
            fresh=fresh,
            out=lambda rows: (P(rows), cache_specs(cache, rows)),
        )
    mtp = params["mtp"]
    layer = cfg.mtp
    assert layer is not None
    (batch, width), start = tokens.shape, cache.lengths
    if cache.capacity is not None:
        lengths = jnp.minimum(lengths, jnp.maximum(cache.capacity - start, 0))
    dtype = decoder.activation_dtype(params)
    embedded = Stream(decoder.embed_tokens(cfg, params, tokens, dtype))
    known = Stream(decoder.final_norm(cfg, mtp if is_own else params, before))
    pair = [
        linear.norm(embedded, mtp["embed_norm"], cfg)[0],
        linear.norm(known, mtp["hidden_norm"], cfg)[0],
    ]
    x = linear.linear(jnp.concatenate(pair, axis=-1), mtp["fc"], dtype)
    if is_prompt or width == 1:
        positions, rope = positions_of(layer, start, start + lengths, width)
        at = new_tokens(positions, lengths, rope, False, cache.table, fresh, cached=True)
    else:
        positions, is_new, rope = places_of(layer, start, lengths, width)
        at = Draft(positions, is_new, rope, width, cache.table, sparse=False)
        x = x.reshape(batch * width, 1, -1)
    stream, state = decoder.block(layer, mtp["layer_0"], Stream(x), cache.layers[0], at)
    hidden = Hidden(stream.total.reshape(batch, width, -1))
    return hidden, Cache((state,), start + lengths, cache.table)


def logits(cfg: ModelConfig, params: Params, hidden: Hidden) -> jax.Array:
    """The head's last norm and the model's last product: ``[..., D]`` to float32 ``[..., V]``."""
    return decoder.logits(cfg, {**params, "norm": params["mtp"]["norm"]}, hidden)
