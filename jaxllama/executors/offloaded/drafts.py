"""Drafts of an offloaded model: one pass over the loaded weights verifies several tokens a row.

A pass costs as much as loading its weights, whatever its tokens (SpecExec, arXiv 2406.02532). It
may therefore be as wide as drafts are long. A draft model and its cache are on the device. Drafts
and turns are those of ``jaxllama.decoding``. Each is a program of its own between two walks of
``OffloadRun`` over the units. Drafts do not change the tokens.

Left out: trees, which SpecExec grows; caches that move, whose columns the step stores.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig
from jaxllama.decoding import drafts
from jaxllama.decoding.drafts import Drafted
from jaxllama.decoding.rows import Rows
from jaxllama.decoding.sampling import SamplingParams
from jaxllama.decoding.turn import Pass, drawn_by, finish, start
from jaxllama.executors.offloaded.batch import TokenPiece, Verified
from jaxllama.executors.offloaded.run import OffloadRun
from jaxllama.model import verification
from jaxllama.model.cache import Cache, Proposal
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.records import places_of
from jaxllama.typing import Params, Tree


def advance_drafts(
    run: OffloadRun,
    plan: drafts.DraftPlan,
    draft_params: Params | None,
    stop_ids: jax.Array,
    until: int,
    limit: int,
) -> None:
    """Take turns until every row of the run has ``until`` tokens or has stopped.

    A row may then have up to ``limit`` tokens.
    """
    while True:
        for batch in run.batches:
            batch.live = bool(_is_waiting(batch.rows, until, limit))
        live = {index: run.batches[index] for index in run.active_batches()}
        if not live:
            return
        found: dict[int, Drafted] = {}
        for index, batch in live.items():
            batch.rows, found[index] = _proposed(
                plan, draft_params, batch.rows, batch.sampling, limit
            )
        needed = 1 + max(int(jnp.max(draft.lengths)) for draft in found.values())
        width = next(width for width in plan.widths if width >= needed)
        pieces = {
            index: TokenPiece(*_piece(run.cfg, width, batch.rows, found[index], limit))
            for index, batch in live.items()
        }
        for index, verified in run.verify(pieces, width).items():
            batch = run.batches[index]
            batch.rows, layers = _finished(
                plan,
                width,
                batch.rows,
                found[index],
                verified,
                {layer: batch.caches[layer].load() for layer in verified.tokens},
                batch.sampling,
                stop_ids,
                limit,
                draft_params,
            )
            for layer, cache in layers.items():
                batch.caches[layer].save(cache, None, 0)


@jax.jit
def _is_waiting(rows: Rows, until: int, limit: int) -> jax.Array:
    fields = rows.fields
    return jnp.any(fields.is_live(limit) & (fields.count < until))


_proposed = jax.jit(drafts.propose, static_argnums=0, donate_argnums=2)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _piece(
    cfg: ModelConfig, width: int, rows: Rows, draft: Drafted, limit: int
) -> tuple[Tree, ...]:
    """Return the fields of a pass's TokenPiece: each row's newest token and its draft."""
    inputs = start(rows, draft, width, limit)
    positions, is_new, rope = places_of(cfg, inputs.fields.length, inputs.lengths, width)
    return inputs.tokens.reshape(-1, 1), is_new, positions, rope


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 5))
def _finished(
    plan: drafts.DraftPlan,
    width: int,
    rows: Rows,
    draft: Drafted,
    verified: Verified,
    layers: dict[int, LayerState],
    sampling: SamplingParams,
    stop_ids: jax.Array,
    limit: int,
    draft_params: Params | None,
) -> tuple[Rows, dict[int, LayerState]]:
    """Return the rows after a pass, and the recurrent ``layers`` with the accepted tokens."""
    inputs = start(rows, draft, width, limit)
    cache = Cache(tuple(layers.values()), inputs.fields.length)
    proposal = Proposal(cache, inputs.lengths, tuple(verified.tokens.values()))
    passed = Pass(lambda: verified.scores, lambda count: verification.commit(proposal, count))
    rows, _ = finish(
        rows,
        inputs,
        passed,
        drawn_by(sampling),
        stop_ids,
        adapts_to=plan.most if plan.adaptive else None,
    )
    if plan.draft.reads_hidden:
        assert draft_params is not None
        hidden = verified.output.reshaped(-1, width)
        rows = plan.draft.observe(draft_params, rows, inputs, passed._replace(hidden=hidden))
    after = dict(zip(layers, rows.layers, strict=True))
    return dataclasses.replace(rows, layers=()), after
