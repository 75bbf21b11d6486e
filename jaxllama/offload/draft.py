"""Drafts of an offloaded model: one pass over what streams verifies several tokens a row.

    drafting = OffloadedDrafting(plan, draft_params)      what ``LanguageModel.drafting`` gives
    state = drafting.begin(tokens, lengths, block_state, capacity)
    state = drafting.advance(lm, state, sampling, stop_ids, until, limit)

A pass costs what its weights cost to load, whatever its tokens (SpecExec, arXiv 2406.02532), so it
may be as wide as drafts are long.  The draft, a model too, lies on the device with the cache.
Drafts and verdicts are ``jaxllama.speculative``'s, here a program each between two walks of
``OffloadRun`` over the units.  The tokens are those without a draft.

Left out: trees, which SpecExec grows; a cache that moves, whose columns are stored by the step.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama import speculative
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.generation import Params
from jaxllama.model import decoder
from jaxllama.model.cache import Cache, Proposal
from jaxllama.offload.policy import Policy
from jaxllama.offload.run import OffloadRun, TokenPiece
from jaxllama.sampling import SamplingParams
from jaxllama.speculative import Drafted, State


@dataclasses.dataclass(frozen=True)
class DraftState:
    """What ``LanguageModel`` reads of a loop with drafts, ``[B, room]`` and ``[B]``; its run, and
    the state of each of its batches."""

    tokens: np.ndarray
    logprobs: np.ndarray
    counts: np.ndarray
    done: Any
    drafted: np.ndarray
    accepted: np.ndarray
    run: OffloadRun
    parts: list[State]


def check(policy: Policy) -> None:
    """Raises JaxLlamaError for a policy under which a pass is one token a row."""
    if policy.cache.device < 100 or policy.cpu_attention:
        raise JaxLlamaError("policy: a draft needs the whole cache on the device, attention too")


@dataclasses.dataclass(frozen=True)
class OffloadedDrafting:
    """Who drafts, with the parameters of a model that does."""

    plan: speculative.DraftPlan
    params: Params | None

    def begin(self, tokens: jax.Array, lengths: jax.Array, state: Any, capacity: int) -> DraftState:
        run: OffloadRun = state.run
        parts = [
            speculative.begin(self.plan, self.params, *prompts[:2], batch.state, capacity)
            for batch, prompts in zip(run.batches, run.cut(tokens, lengths), strict=True)
        ]
        return _joined(run, parts)

    def advance(
        self,
        lm: Any,
        state: DraftState,
        sampling: SamplingParams,
        stop_ids: jax.Array,
        until: int,
        limit: int,
    ) -> DraftState:
        run, plan = state.run, self.plan
        parts = _with_done(run, state)
        while True:
            waiting = [bool(_is_waiting(part, until, limit)) for part in parts]
            if not any(waiting):
                return _joined(run, parts)
            drafts = {}
            for index, batch in enumerate(run.batches):
                batch.live = waiting[index]
                if batch.live:
                    parts[index], drafts[index] = _proposed(
                        plan, self.params, parts[index], batch.sampling, limit
                    )
            needed = 1 + max(int(jnp.max(draft.lengths)) for draft in drafts.values())
            width = next(width for width in plan.widths if width >= needed)
            pieces = {
                index: TokenPiece(*_piece(run.cfg, width, parts[index], draft, limit))
                for index, draft in drafts.items()
            }
            for index, (scores, tokens) in run.verify(pieces, width).items():
                batch = run.batches[index]
                parts[index], layers = _settled(
                    plan,
                    width,
                    parts[index],
                    drafts[index],
                    scores,
                    tokens,
                    {layer: batch.caches[layer].load() for layer in tokens},
                    batch.sampling,
                    stop_ids,
                    limit,
                )
                for layer, cache in layers.items():
                    batch.caches[layer].save(cache, None, 0)


def _with_done(run: OffloadRun, state: DraftState) -> list[State]:
    """The batches' states, where rows have ended that the caller wants to."""
    done = np.ones((len(state.parts), state.parts[0].done.shape[0]), bool)
    done.reshape(-1)[: run.rows] = state.done
    return [
        dataclasses.replace(part, done=jnp.asarray(own))
        for part, own in zip(state.parts, done, strict=True)
    ]


def _joined(run: OffloadRun, parts: list[State]) -> DraftState:
    joined = run.joined(
        [
            (part.tokens, part.logprobs, part.counts, part.done, part.drafted, part.accepted)
            for part in parts
        ]
    )
    return DraftState(*joined, run, parts)


@jax.jit
def _is_waiting(state: State, until: int, limit: int) -> jax.Array:
    return jnp.any(state.is_live(limit) & (state.counts < until))


_proposed = jax.jit(speculative.proposed, static_argnums=0, donate_argnums=2)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _piece(
    cfg: ModelConfig, width: int, state: State, draft: Drafted, limit: int
) -> tuple[Any, ...]:
    """The fields of the Piece that a pass reads: a token a row, ``width`` of them one row's."""
    count = state.is_live(limit).astype(jnp.int32) * (1 + draft.lengths)
    positions, is_new, rope = decoder.places_of(cfg, state.cache.lengths, count, width)
    return speculative.read(state, draft, width).reshape(-1, 1), is_new, positions, rope


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 6))
def _settled(
    plan: speculative.DraftPlan,
    width: int,
    state: State,
    draft: Drafted,
    scores: jax.Array,
    tokens: dict[int, Any],
    layers: dict[int, Any],
    sampling: SamplingParams,
    stop_ids: jax.Array,
    limit: int,
) -> tuple[State, dict[int, Any]]:
    """(the state with what the pass brings, the recurrent ``layers`` with what of their ``tokens``
    stays)."""
    live = state.is_live(limit).astype(jnp.int32)
    scores = scores.reshape(live.shape[0], width, -1)
    state, new = speculative.settled(plan, state, draft, scores, live, sampling, stop_ids)
    cache = Cache(tuple(layers.values()), state.cache.lengths)
    proposal = Proposal(cache, live * (1 + draft.lengths), tuple(tokens.values()))
    after = decoder.commit(proposal, new)
    state = dataclasses.replace(state, cache=Cache((), after.lengths))
    return state, dict(zip(layers, after.layers, strict=True))
