"""The jitted programs of each unit of an offloaded model.

They are the functions that ``model.decoder.forward`` is made of, so that a model run unit by unit
gives the bits of the whole program (``executor`` states the exceptions).  Layers that are alike
share one compilation.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig
from jaxllama.decoding.forward import Params
from jaxllama.model import decoder
from jaxllama.model.cache import LayerState
from jaxllama.model.linear import Stream
from jaxllama.model.records import Draft, Hidden, new_tokens
from jaxllama.model.rope import Ropes
from jaxllama.offload.store import RowTable, Store
from jaxllama.offload.units import Kind

Rope = Ropes | None

positions_of = jax.jit(decoder.positions_of, static_argnums=(0, 3))
head_logits = jax.jit(decoder.logits, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def embed(cfg: ModelConfig, dtype: jnp.dtype, weights: Any, tokens: jax.Array) -> Stream:
    return Stream(decoder.embed_tokens(cfg, weights, tokens, dtype))


@functools.partial(jax.jit, static_argnums=(0, 1))
def embed_rows(cfg: ModelConfig, dtype: jnp.dtype, rows: jax.Array) -> Stream:
    """``embed`` of rows that were looked up already."""
    return Stream(decoder.scale_embedded(cfg, rows.astype(dtype)))


def embed_tokens(store: Store, cfg: ModelConfig, params: Params, tokens: jax.Array) -> Stream:
    """The stream of ``tokens [B, T]``, from wherever the table is."""
    table, dtype = params["embed"]["weight"], decoder.activation_dtype(params)
    if isinstance(table, RowTable):
        return embed_rows(cfg, dtype, table.lookup(jax.device_get(tokens)))
    weights = store.get({"embed": params["embed"]})
    return embed(cfg, dtype, weights, tokens)


_LAYER = {"static_argnums": (0, 1, 2), "static_argnames": ("sparse", "drafted")}


@functools.partial(jax.jit, **_LAYER, donate_argnums=5)
def run_layer(
    cfg: ModelConfig,
    kind: str,
    part: Kind,
    weights: Any,
    stream: Stream,
    state: LayerState | None,
    positions: jax.Array,
    lengths: jax.Array,
    rope: Rope,
    *,
    sparse: bool = False,
    drafted: int | None = None,
) -> tuple[Stream, Any]:
    """A layer or one of its halves; ``cfg`` and ``kind`` are ``layer_config``'s, sparse and drafted
    say which record of ``model.records`` the tokens are."""
    if part == "feed":
        return decoder.feed_half(cfg, weights, stream), None
    run = decoder.mix_half if part == "mix" else decoder.block
    if drafted is None:
        at = new_tokens(positions, lengths, rope, sparse, cached=state is not None)
    else:
        at = Draft(positions, lengths, rope, drafted)
    return run(cfg, kind, weights, stream, state, at)


# The same where a state is to stay: what verifies a draft gives the tokens that it would take.
verify_layer = jax.jit(run_layer.__wrapped__, **_LAYER)


@jax.jit
def last_hidden(stream: Stream, n_new: jax.Array, last: Hidden | None) -> Hidden:
    """``Hidden.last`` of what leaves the last layer."""
    return Hidden(stream.total).last(n_new, last)


@functools.partial(jax.jit, static_argnums=0)
def all_logits(cfg: ModelConfig, weights: Any, stream: Stream) -> jax.Array:
    """Float32 logits ``[B, T, V]`` of every position."""
    return decoder.logits(cfg, weights, Hidden(stream.total))
