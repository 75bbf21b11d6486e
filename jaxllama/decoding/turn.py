"""Turn: one step of decoding, as two pure functions over ``Rows``.

    inputs       = start(rows, draft)                     what the pass over the model reads
    passed       = forward(rows, inputs)                  a Pass; an executor's part
    rows, report = finish(rows, inputs, passed, draw, stop_ids)

Plain decoding is a draft of zero tokens (None): each row that is live gets one token.  With a draft
a row gets another for each token of the draft, up to the first that differs from the model's own
(arXiv 2211.17192).  Sampling goes by position, so no distribution is corrected, and none changes.

``generate``, drafts, the serving engine and offloading run these two.  ``loop.run`` loops over
turns on the device.  An executor that runs layer by layer from the host has its own loop there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.decoding.drafts import Drafted, Pace
from jaxllama.decoding.rows import Fields, Rows, bits_of
from jaxllama.decoding.sampling import History, SamplingParams, sample
from jaxllama.model.cache import Cache
from jaxllama.model.records import Hidden
from pallas_kernels.fixed_sums import fixed_sums


class Inputs(NamedTuple):
    """The beginning of a turn.

    tokens int32 ``[B, T]``: each row's newest token and its draft, of which ``lengths[B]`` count.
    live int32 ``[B]``: 1 for a row that gets tokens.
    positions int32 ``[B]``, or ``[B, T]`` with a draft: places in the text of the tokens to come.
    fields: of the rows before the turn.
    draft: None for none.
    limited: whether a row that is not done may have reached its limit; it then gets no token.
    """

    tokens: jax.Array
    lengths: jax.Array
    live: jax.Array
    positions: jax.Array
    fields: Fields
    draft: Drafted | None
    limited: bool

    @property
    def columns(self) -> jax.Array:
        """Return int32 ``[B, T]``: columns of the tokens to come among the written ones."""
        return self.fields.count[:, None] + _places(self.tokens.shape[1])


class Pass(NamedTuple):
    """The result of a pass over the model.

    scores: returns the logits ``[B T, V]``: float32, or 16-bit floats if the Draw casts them.
    commit: takes ``count[B]`` and returns the cache with the first ``count`` tokens of each row.
    greedy: one kernel that finishes a greedy step; it maps ``Rows``' (ints, written) to their new
        values.  None if there is no such kernel for the call.
    hidden: the hidden states ``[B, T, D]`` of the tokens read, for drafts that read them.
    """

    scores: Callable[[], jax.Array]
    commit: Callable[[jax.Array], Cache]
    greedy: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None
    hidden: Hidden | None = None


class TurnReport(NamedTuple):
    """The parts of a turn's result that ``Rows`` does not keep.

    scores: the pass's logits ``[B T, V]``; is_new bool ``[B, T]``: the tokens that were added.
    """

    scores: jax.Array
    is_new: jax.Array


Forward = Callable[[Rows, Inputs], Pass]
# (tokens, logprobs) of logits, each of the shape of ``Inputs.positions``.
Draw = Callable[[jax.Array, Inputs, History | None], tuple[jax.Array, jax.Array]]


def start(
    rows: Rows,
    draft: Drafted | None = None,
    width: int = 1,
    limit: jax.Array | int | None = None,
) -> Inputs:
    """The inputs of a turn's pass.

    width: number of tokens that the pass reads of each row.
    limit: number of written tokens at which a row stops, for all rows or one a row; None: no limit.
    """
    fields, limited = rows.fields, limit is not None
    live = fields.is_live(limit).astype(jnp.int32) if limited else 1 - fields.done
    newest = fields.newest[:, None]
    if draft is None:
        return Inputs(newest, live, live, fields.length + 1, fields, None, limited)
    tokens = jnp.concatenate([newest, draft.following(width)[:, :-1]], axis=1)
    positions = fields.length[:, None] + 1 + _places(width)
    lengths = live * (1 + draft.lengths)
    return Inputs(tokens, lengths, live, positions, fields, draft, limited)


def finish(
    rows: Rows,
    inputs: Inputs,
    passed: Pass,
    draw: Draw,
    stop_ids: jax.Array,
    *,
    ignores_stops: jax.Array | None = None,
    adapts_to: int | None = None,
) -> tuple[Rows, TurnReport | None]:
    """Sample from a pass and return the rows with their new tokens; rows not live do not change.

    stop_ids int32 ``[stops]`` end a row, unless ``ignores_stops[B]`` (bool) says otherwise.
    adapts_to: longest draft of a row whose drafts adapt their length; None for a fixed length.
    The report is None if ``passed.greedy`` finished the step.
    """
    if passed.greedy is not None:
        cache = passed.commit(inputs.live)
        ints, written = passed.greedy(rows.ints, rows.written)
        return dataclasses.replace(rows, ints=ints, written=written, layers=cache.layers), None
    is_stop = _stop_test(stop_ids, ignores_stops)
    if inputs.draft is None:
        return _one(rows, inputs, passed, draw, is_stop)
    return _several(rows, inputs, inputs.draft, passed, draw, is_stop, adapts_to)


def append(
    rows: Rows, scores: jax.Array, draw: Draw, stop_ids: jax.Array
) -> tuple[Rows, TurnReport | None]:
    """``finish`` for logits of tokens that are already in the cache, such as a prompt's."""
    fields = rows.fields
    live = 1 - fields.done
    inputs = Inputs(fields.newest[:, None], live, live, fields.length, fields, None, False)
    passed = Pass(lambda: scores, lambda _: rows.cache_of(fields.length))
    return finish(rows, inputs, passed, draw, stop_ids)


def drawn_by(sampling: SamplingParams, fixed: bool = False) -> Draw:
    """Return ``sample`` with these parameters; fixed: as ``ModelConfig.fixed_sums``."""

    def draw(
        scores: jax.Array, inputs: Inputs, history: History | None
    ) -> tuple[jax.Array, jax.Array]:
        with fixed_sums(fixed):
            if inputs.draft is None:
                return sample(scores, sampling, inputs.positions, history)
            return sampled(scores, sampling, inputs, history)

    return draw


def _one(
    rows: Rows,
    inputs: Inputs,
    passed: Pass,
    draw: Draw,
    is_stop: Callable[[jax.Array], jax.Array],
) -> tuple[Rows, TurnReport]:
    """One token for each live row, written at column ``step``, which all rows share."""
    fields, live = inputs.fields, inputs.live
    cache, scores = passed.commit(live), passed.scores()
    tokens, logprobs = draw(scores, inputs, rows.history)
    new = jnp.where(live > 0, jnp.stack([tokens, bits_of(logprobs)]), 0)  # [2, B]
    ends = is_stop(tokens)
    if inputs.limited:
        ends &= live > 0
    step = fields.step
    after = fields._replace(
        newest=new[0],
        done=fields.done | ends.astype(jnp.int32),
        count=fields.count + live,
        length=cache.lengths,
        step=step + 1,
    )
    history, text = rows.history, rows.text
    if text is not None:
        place = jnp.where(live > 0, inputs.positions, text.shape[1])
        text = text.at[jnp.arange(text.shape[0]), place].set(tokens, mode="drop")
    kept = dataclasses.replace(
        rows,
        ints=after.packed(),
        written=lax.dynamic_update_slice_in_dim(rows.written, new[:, :, None], step[0], axis=2),
        layers=cache.layers,
        history=None if history is None else history.add(tokens, live > 0),
        text=text,
    )
    return kept, TurnReport(scores, (live > 0)[:, None])


def _several(
    rows: Rows,
    inputs: Inputs,
    draft: Drafted,
    passed: Pass,
    draw: Draw,
    is_stop: Callable[[jax.Array], jax.Array],
    adapts_to: int | None,
) -> tuple[Rows, TurnReport]:
    """The accepted tokens of each live row's draft, and one token more."""
    fields, live, text = inputs.fields, inputs.live, rows.text
    assert text is not None
    batch, width = inputs.tokens.shape
    scores = passed.scores()
    tokens, logprobs = draw(scores, inputs, rows.history)
    stops = is_stop(tokens)
    new, accepted, ends = verdict(tokens, draft.following(width), draft.lengths, stops, live)
    cache = passed.commit(new)
    is_new = _places(width) < new[:, None]
    drafted = live * draft.lengths
    last = jnp.take_along_axis(tokens, jnp.maximum(new - 1, 0)[:, None], axis=1)[:, 0]
    pace = Pace(fields.ask, fields.wait, fields.pause)
    if adapts_to is not None:
        pace = pace.after(drafted, accepted, adapts_to)
    after = Fields(
        newest=jnp.where(live > 0, last, fields.newest),
        done=fields.done | ends.astype(jnp.int32),
        count=fields.count + new,
        length=cache.lengths,
        step=fields.step + 1,
        drafted=fields.drafted + drafted,
        accepted=fields.accepted + jnp.minimum(accepted, new),
        ask=pace.tokens,
        wait=pace.wait,
        pause=pace.pause,
    )
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    place = jnp.where(is_new, inputs.positions, text.shape[1])
    column = jnp.where(is_new, inputs.columns, rows.written.shape[2])
    news = jnp.stack([tokens, bits_of(logprobs)])
    kept = dataclasses.replace(
        rows,
        ints=after.packed(),
        written=rows.written.at[:, row, column].set(news, mode="drop"),
        layers=cache.layers,
        history=None if rows.history is None else rows.history.add(tokens, is_new),
        text=text.at[row, place].set(tokens, mode="drop"),
    )
    return kept, TurnReport(scores, is_new)


def _stop_test(
    stop_ids: jax.Array, ignores_stops: jax.Array | None
) -> Callable[[jax.Array], jax.Array]:
    """A function that says which of tokens ``[B]`` or ``[B, T]`` end their row."""

    def is_stop(tokens: jax.Array) -> jax.Array:
        found = jnp.any(tokens[..., None] == stop_ids, axis=-1)
        if ignores_stops is None:
            return found
        return found & ~ignores_stops.reshape(-1, *(1,) * (tokens.ndim - 1))

    return is_stop


def verdict(
    tokens: jax.Array, drafted: jax.Array, lengths: jax.Array, stops: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return three arrays ``[B]``: new tokens, correct drafted tokens, and whether the row stops.

    The first two are numbers. A row stops if the last token that it gets is a stop token.

    tokens: the model's own tokens ``[B, T]``.
    drafted: the proposal ``[B, T]``, of which the first ``lengths[B]`` tokens exist.
    stops: bool ``[B, T]``.
    live: 1 or 0.
    """
    width = tokens.shape[1]
    place = _places(width)
    is_right = (tokens == drafted) & (place < lengths[:, None])
    accepted = live * jnp.min(jnp.where(is_right, width, place), axis=1)
    first_stop = jnp.min(jnp.where(stops, place, width), axis=1)
    new = live * jnp.minimum(accepted, first_stop) + live
    return new, accepted, first_stop < new


def sampled(
    scores: jax.Array,
    sampling: SamplingParams,
    inputs: Inputs,
    history: History | None,
    allowed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(tokens, logprobs) ``[B, T]`` of ``scores [B T, V]``.

    The history of a position assumes that the drafted tokens before it are accepted.
    allowed: bool ``[B, T, V]``, as for ``sample``.
    """
    assert inputs.draft is not None
    batch, width = inputs.tokens.shape
    vocab = scores.shape[1]
    if history is not None:
        drafted = inputs.draft.following(width)
        counts, seen = [history.counts], history
        for index in range(width - 1):
            seen = seen.add(drafted[:, index])
            counts.append(seen.counts)
        history = History(
            jnp.repeat(history.prompt, width, axis=0), jnp.stack(counts, 1).reshape(-1, vocab)
        )
    sampling = jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=0), sampling)
    if allowed is not None:
        allowed = allowed.reshape(-1, vocab)
    tokens, logprobs = sample(scores, sampling, inputs.positions.reshape(-1), history, allowed)
    return tokens.reshape(batch, width), logprobs.reshape(batch, width)


def _places(width: int) -> jax.Array:
    return jnp.arange(width, dtype=jnp.int32)[None, :]
