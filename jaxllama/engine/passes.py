"""Passes: the engine's part of a decode call, which runs ``decoding.loop`` on its rows.

The engine adds masks of allowed tokens, forced tokens, the likeliest tokens with their
log-probabilities, and rows with different limits.

Sampling: one program contains all features of ``sample``. A ``lax.switch`` runs the features that
some row of the batch needs (``level_of``), so a request with another feature compiles nothing.

On a GPU the loop is one CUDA graph. Operations that a graph cannot contain, such as XLA's sorts and
scans, must stay out of the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import ModelConfig
from jaxllama.decoding import loop
from jaxllama.decoding.drafts import (
    Draft,
    DraftContext,
    Drafted,
    NGram,
    Pace,
    ended,
    next_token,
)
from jaxllama.decoding.gain import DRAFT
from jaxllama.decoding.rows import Fields, Rows
from jaxllama.decoding.sampling import History, Sampling, SamplingParams, log_sum_exp, sample
from jaxllama.decoding.turn import Draw, Inputs, Pass, TurnReport, sampled
from jaxllama.engine.batch import BatchState
from jaxllama.engine.request import MAX_LOGPROBS
from jaxllama.model.decoder import forward, stored_logits
from jaxllama.model.heads import HeadScores
from jaxllama.model.records import Hidden
from jaxllama.model.verification import commit, propose
from jaxllama.typing import Params
from pallas_kernels.fixed_sums import fixed_sums

# Branches of the sampler: greedy, greedy with edited logits, and all features.
_EDITS = ("bias", "penalties")
_LEVELS = ((), _EDITS, (*_EDITS, "draw", "top_k", "top_p", "min_p", "mixed"))


def level_of(requests: Sequence[Sampling], is_masked: bool) -> int:
    """Return the cheapest branch of the sampler that serves all of these requests."""
    if any(row.temperature > 0 for row in requests):
        return len(_LEVELS) - 1
    return int(is_masked or any(row.has_penalties or row.logit_bias for row in requests))


@dataclasses.dataclass(frozen=True)
class CallSizes:
    """The sizes for which a decode call is compiled.

    n, context: numbers of rows and of pages that a row may have. width: largest number of tokens of
    a row. widths: numbers of tokens of a row that a pass may verify: 1, and more where there are
    drafts. A deterministic engine has one. most: longest draft. draft: the source of drafts.
    """

    n: int
    context: int
    width: int
    widths: tuple[int, ...] = (1,)
    most: int = 0
    draft: Draft = NGram()


def run(
    cfg: ModelConfig,
    params: Params,
    slots: BatchState,
    limits: jax.Array,
    orders: jax.Array,
    masks: jax.Array,
    stop_ids: jax.Array,
    draft_params: Params | None,
    sizes: CallSizes,
) -> tuple[BatchState, jax.Array, tuple[jax.Array, jax.Array]]:
    """Run one decode call, see ``slots.decode``.

    limits int32 ``[B]``: largest number of new tokens of each row. orders int32 ``[4]``: the
    sampler's branch, whether the likeliest tokens are wanted, the largest number of passes, and
    how rows draft.
    """
    level, wants_top, steps, how = orders
    width, widths, draft_by = sizes.width, sizes.widths, sizes.draft
    drafts_here, exact = widths[-1] > 1, len(widths) == 1
    most = min(sizes.most, widths[-1] - 1)
    draft_params = draft_by.weights(params, draft_params)
    limits = jnp.minimum(limits, slots.remaining)
    prompted = slots.prompted

    def unfinished(rows: Rows) -> jax.Array:
        fields = rows.fields
        return jnp.any(fields.is_live(limits)) & (fields.step[0] < steps)

    def scores_of(hidden: Hidden) -> jax.Array:
        return stored_logits(cfg, params, hidden.flat())

    def pass_over(rows: Rows, inputs: Inputs) -> Pass:
        before = rows.cache_of(inputs.fields.length)
        if inputs.tokens.shape[1] == 1:
            is_generated = ~(prompted & (inputs.fields.count == 0))[:, None]
            tokens, lengths = inputs.tokens, inputs.lengths
            hidden, after = forward(cfg, params, tokens, lengths, before, sparse=is_generated)
            assert after is not None
            return Pass(lambda: scores_of(hidden), lambda _: after, hidden=hidden)
        hidden, proposal = propose(cfg, params, inputs.tokens, inputs.lengths, before, exact)
        return Pass(
            lambda: scores_of(hidden),
            lambda count: commit(proposal, count, exact),
            hidden=hidden,
        )

    def drafted(rows: Rows) -> tuple[Rows, Drafted]:
        return _draft(
            cfg,
            draft_by,
            draft_params,
            slots.sampling,
            rows,
            limits,
            masks,
            prompted,
            most,
            level,
            how,
        )

    rows = _rows_of(slots, width, draft_by, drafts_here)
    with fixed_sums(cfg.fixed_sums):
        rows, top = loop.run(
            pass_over,
            ended(rows, how) if drafts_here else rows,
            _draw_with(cfg, slots.sampling, masks, level),
            stop_ids,
            unfinished,
            limit=limits,
            drafting=loop.Drafting(drafted, widths, most) if drafts_here else None,
            observe=loop.observer(draft_by, draft_params, drafts_here),
            ignores_stops=slots.ignore_eos,
            collector=loop.Collector(
                _no_top(cfg, slots.size, width), _top_adder(wants_top != 0, drafts_here)
            ),
        )
    fields = rows.fields
    none = jnp.zeros((slots.size,), jnp.int32)
    counts = jnp.stack(
        [
            fields.count,
            none if fields.drafted is None else fields.drafted,
            none if fields.accepted is None else fields.accepted,
        ],
        axis=1,
    )
    written = jnp.concatenate([counts, *rows.written], axis=1)
    return _after(slots, rows, draft_by, drafts_here), written, top


def _rows_of(slots: BatchState, width: int, draft_by: Draft, drafts_here: bool) -> Rows:
    """Return the slots as ``decoding``'s Rows, with none of the call's ``width`` tokens written."""
    cache, drafting = slots.cache, slots.drafting
    none = jnp.zeros((slots.size,), jnp.int32)
    done = (~slots.active).astype(jnp.int32)
    fields, text, kept = Fields(slots.token, done, none, cache.lengths, none), None, None
    if drafting is not None:
        text = drafting.text
        kept = draft_by.state_of(drafting, cache, drafts_here)
    if drafting is not None and drafts_here:
        fields = fields._replace(
            drafted=none,
            accepted=none,
            ask=drafting.pace.tokens,
            wait=drafting.pace.wait,
            pause=drafting.pace.pause,
        )
    return Rows(
        ints=fields.packed(),
        written=jnp.zeros((2, slots.size, width), jnp.int32),
        layers=cache.layers,
        table=cache.table,
        history=slots.history,
        text=text,
        kept=kept,
        parts=cache.parts,
    )


def _after(slots: BatchState, rows: Rows, draft_by: Draft, drafts_here: bool) -> BatchState:
    """Return the slots after a call that ends with ``rows``."""
    fields, drafting = rows.fields, slots.drafting
    has_written = fields.count > 0
    remaining = slots.remaining - fields.count
    last = jnp.maximum(fields.count - 1, 0)[:, None]
    newest = jnp.take_along_axis(rows.written[0], last, axis=1)[:, 0]
    if drafting is not None:
        drafting = drafting._replace(text=rows.text)
        if drafts_here:
            drafting = drafting._replace(pace=Pace(fields.ask, fields.wait, fields.pause))
        drafting = draft_by.to_slots(drafting, rows.kept, fields.length)
    assert rows.history is not None
    return dataclasses.replace(
        slots,
        cache=rows.cache_of(fields.length),
        token=jnp.where(has_written, newest, slots.token),
        prompted=slots.prompted & ~has_written,
        active=slots.active & (fields.done == 0) & ~(has_written & (remaining <= 0)),
        remaining=remaining,
        history=rows.history,
        drafting=drafting,
    )


def _draw_with(
    cfg: ModelConfig, sampling: SamplingParams, masks: jax.Array, level: jax.Array
) -> Draw:
    """Return a Draw that samples, by the sampler's branch, from the tokens that the masks allow."""

    def draw(
        scores: jax.Array, inputs: Inputs, history: History | None
    ) -> tuple[jax.Array, jax.Array]:
        def branch(features: tuple[str, ...]) -> Callable[..., tuple[jax.Array, jax.Array]]:
            params = dataclasses.replace(sampling, features=features)

            def run(scores: jax.Array, seen: History | None) -> tuple[jax.Array, jax.Array]:
                # Within the branch the cast is part of its reductions.
                scores, allowed = scores.astype(jnp.float32), None
                if features:
                    allowed = _allowed(masks, inputs.columns, cfg.vocab_size)
                else:
                    seen = None
                if inputs.draft is not None:
                    return sampled(scores, params, inputs, seen, allowed)
                only = None if allowed is None else allowed[:, 0]
                return sample(scores, params, inputs.positions, seen, only)

            return run

        return lax.switch(level, [branch(features) for features in _LEVELS], scores, history)

    return draw


def _no_top(cfg: ModelConfig, batch: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Return empty buffers of the likeliest tokens and their logprobs, ``[B, width, n]``."""
    shape = batch, width, min(MAX_LOGPROBS, cfg.vocab_size)
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _top_adder(
    wants_top: jax.Array, drafts_here: bool
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return the ``add`` of a Collector, which adds the likeliest tokens of a turn."""

    def add(
        top: tuple[jax.Array, jax.Array], inputs: Inputs, report: TurnReport
    ) -> tuple[jax.Array, jax.Array]:
        # jax keeps a named function's trace, whatever the sums were then.
        likeliest = lambda scores: _likeliest(scores)  # noqa: E731
        found = lax.cond(wants_top, likeliest, _no_likeliest, report.scores)
        row = jnp.arange(report.is_new.shape[0], dtype=jnp.int32)[:, None]

        def put(buffer: jax.Array, news: jax.Array) -> jax.Array:
            news = news.reshape(*report.is_new.shape, buffer.shape[2])
            if not drafts_here:
                return lax.dynamic_update_slice_in_dim(buffer, news, inputs.fields.step[0], axis=1)
            column = jnp.where(report.is_new, inputs.columns, buffer.shape[1])
            return buffer.at[row, column].set(news, mode="drop")

        return put(top[0], found[0]), put(top[1], found[1])

    return add


def _draft(
    cfg: ModelConfig,
    draft_by: Draft,
    draft_params: Params | None,
    sampling: SamplingParams,
    rows: Rows,
    limits: jax.Array,
    masks: jax.Array,
    prompted: jax.Array,
    most: int,
    level: jax.Array,
    how: jax.Array,
) -> tuple[Rows, Drafted]:
    """Return (the rows, whose draft model may have read more of their text; proposals of live
    rows).

    A row may write up to ``limits[B]`` tokens in the call and has written ``count`` of them. It
    proposes as many tokens as its pace asks for. Where the grammar forces tokens, the row proposes
    the forced tokens.
    """
    fields = rows.fields
    is_live = fields.is_live(limits)
    # a prompt's last token attends otherwise than the tokens of its draft
    if cfg.attn_sparsity < 1.0:
        is_live = is_live & ~jnp.any(is_live & prompted & (fields.count == 0))
    room = jnp.minimum(limits - fields.count - 1, most)
    drafts_now = is_live & (fields.wait == 0) & (how == DRAFT)
    wanted = jnp.where(drafts_now, jnp.minimum(fields.ask, room), 0)
    place = jnp.arange(most, dtype=jnp.int32)[None, :]
    forced = _forced(masks, fields.count[:, None] + place, cfg.vocab_size)
    run = jnp.min(jnp.where(forced < 0, place, most), axis=1)
    wanted = jnp.where(run > 0, 0, wanted)
    assert rows.text is not None
    text = rows.text[:, : rows.cache.capacity]
    size, draw = fields.length + 1, _draw_at(level)
    ask = DraftContext(text, size, wanted, most, sampling, rows.history, draw, rows.table)
    found = draft_by.propose(draft_params, rows.kept, ask)
    lengths = jnp.where(is_live, jnp.minimum(run, room), 0)
    draft = Drafted(
        jnp.where(run[:, None] > 0, forced, found.tokens),
        jnp.where(run > 0, lengths, found.lengths),
        None,
    )
    return dataclasses.replace(rows, kept=found.kept), draft


def _draw_at(level: jax.Array) -> Callable[..., jax.Array]:
    """Return ``next_token`` by the sampler's branch."""

    def draw(
        scores: HeadScores, sampling: SamplingParams, positions: jax.Array, history: History
    ) -> jax.Array:
        def branch(features: tuple[str, ...]) -> Callable[..., jax.Array]:
            params = dataclasses.replace(sampling, features=features)
            return lambda logits, history: next_token(
                scores._replace(logits=logits), params, positions, history if features else None
            )

        branches = [branch(features) for features in _LEVELS]
        return lax.switch(level, branches, scores.logits, history)

    return draw


def _likeliest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Take the maximum repeatedly; the first of equal scores is taken. A CUDA graph can contain
    # neither XLA's sort, which ``top_k`` uses, nor the stacking of ``scan``, and a loop without a
    # graph keeps the host waiting.
    scores = scores.astype(jnp.float32)
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
    return tokens, values - log_sum_exp(scores)[:, None]


def _no_likeliest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (scores.shape[0], min(MAX_LOGPROBS, scores.shape[1]))
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _allowed(masks: jax.Array, index: jax.Array, vocab_size: int) -> jax.Array:
    """Return bool ``[B, T, V]``: the tokens allowed at positions ``index[B, T]`` of a call.

    masks: as of ``slots.decode``, the lowest bit first.
    """
    words = -(-vocab_size // 32)
    bits = masks[:, :words, None] >> jnp.arange(32, dtype=jnp.uint32)
    free = (bits & jnp.uint32(1)).astype(bool).reshape(masks.shape[0], 1, -1)[:, :, :vocab_size]
    forced = _forced(masks, index, vocab_size)[:, :, None]
    ids = lax.broadcasted_iota(jnp.int32, (1, 1, vocab_size), 2)
    return jnp.where(forced < 0, free, ids == forced)


def _forced(masks: jax.Array, index: jax.Array, vocab_size: int) -> jax.Array:
    """Return int32 ``[B, T]``: the token forced at positions ``index[B, T]`` of a call, or -1."""
    forced = masks[:, -(-vocab_size // 32) :].astype(jnp.int32) - 1
    found = jnp.take_along_axis(forced, index, axis=1, mode="clip")
    return jnp.where(index < forced.shape[1], found, -1)
