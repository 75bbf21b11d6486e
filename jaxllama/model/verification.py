"""Tokens that may not stay: ``propose`` runs them, ``commit`` keeps the first of them.

hidden, proposal = propose(cfg, params, tokens, lengths, cache)
cache            = commit(proposal, count)
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllama.config import ModelConfig
from jaxllama.model.cache import Cache, LayerState, Proposal, proposal_specs
from jaxllama.model.decoder import (
    activation_dtype,
    begin,
    block_of_a_program,
    check,
    walk,
)
from jaxllama.model.lora import ROWS, chosen, for_rows
from jaxllama.model.mixers import MIXERS
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.records import Draft, Hidden, places_of
from jaxllama.model.sharded import over_mesh
from jaxllama.parallel.mesh import traced_mesh
from jaxllama.typing import Params


def propose(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    exact: bool = False,
    sparse: bool = True,
) -> tuple[Hidden, Proposal]:
    """``forward`` of tokens ``[B, T]`` that may not stay -> (hidden states ``[B, T, D]``, what
    ``commit`` makes a cache of).

    They are T decode steps in one: each is a row of every product, as a step of B * T rows has
    them, and sees the tokens before it.  exact: attention and states are in the shapes of such a
    step, too, and so have its bits; dearer where XLA does a CPU's attention.  sparse: whether they
    read the share ``cfg.attn_sparsity`` of the cache's values, as generated tokens do.
    """
    mesh = traced_mesh(params)
    if mesh is not None:
        return over_mesh(
            propose,
            mesh,
            cfg,
            params,
            tokens,
            lengths,
            cache,
            exact=exact,
            sparse=sparse,
            out=lambda rows: (P(rows), proposal_specs(cache, rows)),
        )
    check(cfg, params)
    batch, width = tokens.shape
    if cache.capacity is not None:
        lengths = jnp.minimum(lengths, jnp.maximum(cache.capacity - cache.lengths, 0))
    if ROWS in params:
        params = for_rows(params, jnp.repeat(params[ROWS], width))
    params = chosen(params)
    positions, is_new, rope = places_of(cfg, cache.lengths, lengths, width)
    at = Draft(positions, is_new, rope, width, cache.table, exact, sparse)
    stream, at = begin(cfg, params, tokens.reshape(-1, 1), activation_dtype(params), at)
    stream, states, taps = walk(cfg, params, stream, cache.layers, at, block_of_a_program(cfg))
    hidden = Hidden(stream.total, taps).reshaped(batch, width)
    kept = tuple(None if isinstance(state, KVCache) else state for state in states)
    layers: tuple[LayerState, ...] = tuple(
        state if tokens is None else old
        for state, tokens, old in zip(states, kept, cache.layers, strict=True)
    )
    return hidden, Proposal(dataclasses.replace(cache, layers=layers), lengths, kept)


def commit(proposal: Proposal, count: jax.Array, exact: bool = False) -> Cache:
    """Return the cache with the first ``count[B]`` of the proposed tokens, or all if fewer exist.

    exact: the same value as in the call of ``propose``.
    """
    cache, count = proposal.cache, jnp.clip(count, 0, proposal.new)
    layers: list[LayerState] = list(cache.layers)
    kinds: dict[str, dict[int, LayerState]] = {}
    for index, tokens in enumerate(proposal.tokens):
        if tokens is not None:
            kinds.setdefault(tokens.kind, {})[index] = tokens
    for kind, of in kinds.items():
        before = [layers[index] for index in of]
        states = MIXERS[kind].mix.commit(before, list(of.values()), count, exact)
        for index, state in zip(of, states, strict=True):
            layers[index] = state
    return dataclasses.replace(cache, layers=tuple(layers), lengths=cache.lengths + count)
