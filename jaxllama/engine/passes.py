"""Passes: the loop of a decode call, on rows of ``slots.BatchState``.

A pass over the model gives every row that may still write one token and, where drafts are made
(``jaxllama.speculative``), one for each of its draft that was right.  No pass is wider than some
row's draft needs, so where nobody drafts it is a plain step.

Sampling: all features of ``sample`` are compiled into one program and a ``lax.switch`` runs what
some row of the batch needs (``level_of``), so a request with another feature compiles nothing.

On a GPU the loop is one CUDA graph, which nothing in it may prevent: XLA's sorts and scans do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import ModelConfig
from jaxllama.engine.request import MAX_LOGPROBS
from jaxllama.model.cache import Cache
from jaxllama.model.decoder import commit, forward, logits, propose
from jaxllama.sampling import History, Sampling, SamplingParams, sample
from jaxllama.speculative import (
    DraftContext,
    Drafted,
    ModelDraft,
    NGram,
    following,
    in_width,
    sampled,
    verdict,
)

if TYPE_CHECKING:
    from jaxllama.engine.slots import BatchState

Params = dict[str, Any]
# Branches of the sampler: greedy, greedy with edited logits, everything.
_EDITS = ("bias", "penalties")
_LEVELS = ((), _EDITS, (*_EDITS, "draw", "top_k", "top_p", "min_p", "mixed"))
HIGHEST_LEVEL = len(_LEVELS) - 1  # serves every request


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrawnTokens:
    """What one ``decode`` has written: tokens int32 and logprobs float32 ``[B, width]``, of which
    row b's first ``counts[b]`` are real; how many it drafted and accepted; if asked for, the
    likeliest tokens ``[B, width, n]``."""

    tokens: jax.Array
    logprobs: jax.Array
    counts: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


def level_of(requests: Sequence[Sampling], is_masked: bool) -> int:
    """The cheapest branch of the sampler that serves all of these."""
    if any(row.temperature > 0 for row in requests):
        return HIGHEST_LEVEL
    return int(is_masked or any(row.has_penalties or row.logit_bias for row in requests))


def run(
    cfg: ModelConfig,
    params: Params,
    slots: BatchState,
    limits: jax.Array,
    orders: jax.Array,
    masks: jax.Array,
    stop_ids: jax.Array,
    width: int,
    widths: tuple[int, ...],
    draft_by: NGram | ModelDraft,
    draft_params: Params | None,
) -> tuple[BatchState, jax.Array, tuple[jax.Array, jax.Array]]:
    batch, n_top = slots.size, min(MAX_LOGPROBS, cfg.vocab_size)
    level, wants_top, steps = orders
    wants_top, rows = wants_top != 0, jnp.arange(batch, dtype=jnp.int32)[:, None]
    drafts_here, most, none = len(widths) > 1, widths[-1] - 1, jnp.zeros((batch,), jnp.int32)

    def may_write(slots: BatchState, drawn: DrawnTokens) -> jax.Array:
        return slots.active & (drawn.counts < limits)

    def draw_with(features: tuple[str, ...]) -> Any:
        def draw(
            scores: jax.Array,
            slots: BatchState,
            masks: jax.Array,
            index: jax.Array,
            at: jax.Array,
            drafted: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            params = dataclasses.replace(slots.sampling, features=features)
            history, allowed = None, None
            if features:
                history, allowed = slots.history, _allowed(masks, index, cfg.vocab_size)
            return sampled(scores, params, at, drafted, history, allowed)

        return draw

    branches = [draw_with(features) for features in _LEVELS]

    def unfinished(carry: tuple[jax.Array, BatchState, DrawnTokens]) -> jax.Array:
        step, slots, drawn = carry
        return jnp.any(may_write(slots, drawn)) & (step < steps)

    def one_step(
        carry: tuple[jax.Array, BatchState, DrawnTokens],
    ) -> tuple[jax.Array, BatchState, DrawnTokens]:
        if not drafts_here:
            return one_pass(Drafted(none[:, None], none, None), 1, carry)
        step, slots, drawn = carry
        slots, draft = _draft(
            cfg,
            draft_by,
            draft_params,
            slots,
            may_write(slots, drawn),
            limits,
            masks,
            drawn.counts,
            most,
            level,
        )
        needed = jnp.max(draft.lengths) + 1
        carry = step, slots, drawn
        return in_width(widths, needed, functools.partial(one_pass, draft), carry)

    def one_pass(
        draft: Drafted, n_new: int, carry: tuple[jax.Array, BatchState, DrawnTokens]
    ) -> tuple[jax.Array, BatchState, DrawnTokens]:
        """A token for every live row, and one for each right one of its draft."""
        step, slots, drawn = carry
        live = may_write(slots, drawn).astype(jnp.int32)
        drafted = following(draft, n_new)
        place = jnp.arange(n_new, dtype=jnp.int32)[None, :]
        positions = slots.cache.lengths[:, None] + 1 + place
        proposal, cache = None, slots.cache
        if n_new == 1:
            hidden, cache = forward(
                cfg,
                params,
                slots.token[:, None],
                live,
                slots.cache,
                sparse=~slots.prompted[:, None],
            )
        else:
            inputs = jnp.concatenate([slots.token[:, None], drafted[:, :-1]], axis=1)
            count = live * (1 + draft.lengths)
            hidden, proposal = propose(cfg, params, inputs, count, slots.cache)
        scores = logits(cfg, params, hidden.flat())
        by_place = scores.reshape(batch, n_new, -1)
        index = drawn.counts[:, None] + place  # of the call's tokens
        tokens, logprobs = lax.switch(
            level, branches, by_place, slots, masks, index, positions, drafted
        )
        top = lax.cond(wants_top, _likeliest, _no_likeliest, scores)
        stops = jnp.any(tokens[:, :, None] == stop_ids, axis=2) & ~slots.ignore_eos[:, None]
        new, accepted, ends = verdict(tokens, drafted, draft.lengths, stops, live)
        if proposal is not None:
            cache = commit(proposal, new)
        is_new, remaining = place < new[:, None], slots.remaining - new
        column = jnp.where(is_new, index, width)

        def put(buffer: jax.Array, news: jax.Array) -> jax.Array:
            news = news.reshape(batch, n_new, *buffer.shape[2:])
            if drafts_here:
                return buffer.at[rows, column].set(news, mode="drop")
            return lax.dynamic_update_slice_in_dim(buffer, news, step, axis=1)

        drawn = DrawnTokens(
            tokens=put(drawn.tokens, tokens),
            logprobs=put(drawn.logprobs, logprobs),
            counts=drawn.counts + new,
            drafted=drawn.drafted + live * draft.lengths,
            accepted=drawn.accepted + jnp.minimum(accepted, new),
            top_tokens=put(drawn.top_tokens, top[0]),
            top_logprobs=put(drawn.top_logprobs, top[1]),
        )
        drafting = slots.drafting
        if drafting is not None:
            text = drafting.text
            written = jnp.where(is_new, positions, text.shape[1])
            text, pace = text.at[rows, written].set(tokens, mode="drop"), drafting.pace
            if drafts_here:
                pace = pace.after(live * draft.lengths, accepted, most)
            drafting = drafting._replace(text=text, pace=pace)
        newest = jnp.take_along_axis(tokens, jnp.maximum(new - 1, 0)[:, None], axis=1)[:, 0]
        slots = dataclasses.replace(
            slots,
            cache=cache,
            token=jnp.where(live > 0, newest, slots.token),
            prompted=slots.prompted & (live == 0),
            active=slots.active & ~(ends | ((live > 0) & (remaining <= 0))),
            remaining=remaining,
            history=slots.history.add(tokens, is_new),
            drafting=drafting,
        )
        return step + 1, slots, drawn

    blank = DrawnTokens(
        jnp.zeros((batch, width), jnp.int32),
        jnp.zeros((batch, width), jnp.float32),
        none,
        none,
        none,
        jnp.zeros((batch, width, n_top), jnp.int32),
        jnp.zeros((batch, width, n_top), jnp.float32),
    )
    _, after, drawn = lax.while_loop(unfinished, one_step, (jnp.int32(0), slots, blank))
    bits = lax.bitcast_convert_type(drawn.logprobs, jnp.int32)
    counts = jnp.stack([drawn.counts, drawn.drafted, drawn.accepted], axis=1)
    told = jnp.concatenate([counts, drawn.tokens, bits], axis=1)
    return after, told, (drawn.top_tokens, drawn.top_logprobs)


def _draft(
    cfg: ModelConfig,
    draft_by: NGram | ModelDraft,
    draft_params: Params | None,
    slots: BatchState,
    is_live: jax.Array,
    limits: jax.Array,
    masks: jax.Array,
    counts: jax.Array,
    most: int,
    level: jax.Array,
) -> tuple[BatchState, Drafted]:
    """What live rows propose that have written ``counts[B]`` of a call's up to ``limits[B]``
    tokens: up to ``most``; where tokens are forced, those.  With the slots, whose draft may have
    read more of their text."""
    drafting = slots.drafting
    assert drafting is not None
    pace = drafting.pace
    if cfg.attn_sparsity < 1.0:  # a prompt's last token attends otherwise than those it verifies
        is_live = is_live & ~jnp.any(is_live & slots.prompted)
    room = jnp.minimum(jnp.minimum(limits - counts, slots.remaining) - 1, most)
    wanted = jnp.where(is_live & (pace.wait == 0), jnp.minimum(pace.tokens, room), 0)
    place = jnp.arange(most, dtype=jnp.int32)[None, :]
    forced = _forced(masks, counts[:, None] + place, cfg.vocab_size)
    run = jnp.min(jnp.where(forced < 0, place, most), axis=1)
    wanted = jnp.where(run > 0, 0, wanted)
    text, sampling = drafting.text[:, : slots.cache.capacity], slots.sampling
    ask = DraftContext(text, slots.cache.lengths + 1, wanted, most, sampling, None)
    if isinstance(draft_by, ModelDraft):
        assert draft_params is not None
        ask = ask._replace(history=slots.history, draw=_draw_at(level))
        kept = Cache(drafting.layers, drafting.read, slots.cache.table)
        found = draft_by.propose(draft_params, kept, ask)
        drafting = drafting._replace(layers=found.kept.layers, read=found.kept.lengths)
        slots = dataclasses.replace(slots, drafting=drafting)
    else:
        found = draft_by.propose(None, None, ask)
    lengths = jnp.where(is_live, jnp.minimum(run, room), 0)
    draft = Drafted(
        jnp.where(run[:, None] > 0, forced, found.tokens),
        jnp.where(run > 0, lengths, found.lengths),
        None,
    )
    return slots, draft


def _draw_at(level: jax.Array) -> Any:
    """``sample``, by the sampler's branch."""

    def draw(
        scores: jax.Array, sampling: SamplingParams, positions: jax.Array, history: History
    ) -> tuple[jax.Array, jax.Array]:
        def branch(features: tuple[str, ...]) -> Any:
            params = dataclasses.replace(sampling, features=features)
            return lambda scores, history: sample(
                scores, params, positions, history if features else None
            )

        return lax.switch(level, [branch(features) for features in _LEVELS], scores, history)

    return draw


def _likeliest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    # One after the other, of equals the first: neither XLA's sort, which ``top_k`` is, nor what
    # ``scan`` stacks can be part of a CUDA graph, and a loop that is none keeps the host waiting.
    index = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    value = jnp.full((len(scores), 1), jnp.inf, scores.dtype)
    token = jnp.full((len(scores), 1), -1, jnp.int32)
    found = []
    for _ in range(min(MAX_LOGPROBS, scores.shape[1])):
        is_behind = (scores < value) | ((scores == value) & (index > token))
        left = jnp.where(is_behind, scores, -jnp.inf)
        token = jnp.argmax(left, axis=1, keepdims=True).astype(jnp.int32)
        value = jnp.take_along_axis(scores, token, axis=1)
        found.append((token, value))
    tokens, values = (jnp.concatenate(column, axis=1) for column in zip(*found, strict=True))
    return tokens, values - jax.nn.logsumexp(scores, axis=1, keepdims=True)


def _no_likeliest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (scores.shape[0], min(MAX_LOGPROBS, scores.shape[1]))
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _allowed(masks: jax.Array, index: jax.Array, vocab_size: int) -> jax.Array:
    """bool ``[B, T, V]``: what rows' tokens ``index[B, T]`` of a call may be; masks as of
    ``slots.decode``, the lowest bit first."""
    words = -(-vocab_size // 32)
    bits = masks[:, :words, None] >> jnp.arange(32, dtype=jnp.uint32)
    free = (bits & jnp.uint32(1)).astype(bool).reshape(masks.shape[0], 1, -1)[:, :, :vocab_size]
    forced = _forced(masks, index, vocab_size)[:, :, None]
    ids = lax.broadcasted_iota(jnp.int32, (1, 1, vocab_size), 2)
    return jnp.where(forced < 0, free, ids == forced)


def _forced(masks: jax.Array, index: jax.Array, vocab_size: int) -> jax.Array:
    """int32 ``[B, T]``: what rows' tokens ``index[B, T]`` must be, or -1."""
    forced = masks[:, -(-vocab_size // 32) :].astype(jnp.int32) - 1
    found = jnp.take_along_axis(forced, index, axis=1, mode="clip")
    return jnp.where(index < forced.shape[1], found, -1)
