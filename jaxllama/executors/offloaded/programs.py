"""The jitted programs of each unit of an offloaded model.

They are the functions that ``model.decoder.forward`` consists of. A model run unit by unit
therefore gives the bits of the whole program (``executor`` states the exceptions). Equal layers
share one compilation.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.model import decoder, records
from jaxllama.model.cache import LayerState
from jaxllama.model.forms import FORMS
from jaxllama.model.linear import Stream
from jaxllama.model.records import Draft, Hidden, new_tokens
from jaxllama.model.rope import Ropes
from jaxllama.offload.store import RowTable, Store
from jaxllama.offload.units import Kind
from jaxllama.typing import Params, Tree

Rope = Ropes | None

positions_of = jax.jit(records.positions_of, static_argnums=(0, 3))
head_logits = jax.jit(decoder.logits, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def embed(cfg: ModelConfig, dtype: jnp.dtype, weights: Tree, tokens: jax.Array) -> Stream:
    return decoder.first_stream(cfg, decoder.embed_tokens(cfg, weights, tokens, dtype))


@functools.partial(jax.jit, static_argnums=(0, 1))
def embed_rows(cfg: ModelConfig, dtype: jnp.dtype, rows: jax.Array) -> Stream:
    """Return ``embed`` of rows that were already looked up."""
    return decoder.first_stream(cfg, decoder.scale_embedded(cfg, rows.astype(dtype)))


def embed_tokens(store: Store, cfg: ModelConfig, params: Params, tokens: jax.Array) -> Stream:
    """Return the stream of ``tokens [B, T]``, wherever the table is stored."""
    table, dtype = params["embed"]["weight"], decoder.activation_dtype(params)
    if isinstance(table, RowTable):
        return embed_rows(cfg, dtype, table.lookup(jax.device_get(tokens)))
    weights = store.get({"embed": params["embed"]})
    return embed(cfg, dtype, weights, tokens)


def _run_layer(
    layer: LayerConfig,
    part: Kind,
    weights: Tree,
    stream: Stream,
    state: LayerState | None,
    positions: jax.Array,
    lengths: jax.Array,
    rope: Rope,
    *,
    sparse: bool = False,
    drafted: int | None = None,
) -> tuple[Stream, LayerState]:
    """Run a layer or one of its halves.

    sparse, drafted: the kind of ``model.records`` that describes the tokens.
    """
    form = FORMS[layer.form.name]
    if part == "feed":
        return form.finish(layer, weights, form.feed(layer, weights, stream, stream), None), None
    run = form.mix if part == "mix" else decoder.block
    if drafted is None:
        at = new_tokens(positions, lengths, rope, sparse, cached=state is not None)
    else:
        at = Draft(positions, lengths, rope, drafted)
    return run(layer, weights, stream, state, at)


_layer_program = functools.partial(
    jax.jit, static_argnums=(0, 1), static_argnames=("sparse", "drafted")
)
run_layer = _layer_program(_run_layer, donate_argnums=4)
# The same for a state that must stay: verifying a draft returns the tokens that it would take.
verify_layer = _layer_program(_run_layer)


@jax.jit
def last_hidden(
    stream: Stream, n_new: jax.Array, last: Hidden | None, taps: jax.Array | None = None
) -> Hidden:
    """Return ``Hidden.last`` of the last layer's output; taps: as ``Hidden`` has them."""
    return Hidden(stream.total, taps).last(n_new, last)


@functools.partial(jax.jit, static_argnums=0)
def all_logits(cfg: ModelConfig, weights: Tree, stream: Stream) -> jax.Array:
    """Return float32 logits ``[B, T, V]`` of every position."""
    return decoder.logits(cfg, weights, Hidden(stream.total))
