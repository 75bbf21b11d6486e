"""Drafts: a guess of the next tokens, which the model verifies in one pass.

    plan = DraftPlan.of(draft, draft_tokens, deterministic)
    rows = begin(plan, draft_params, tokens, lengths, rows, capacity)      after a prefill
    rows, draft = propose(plan, draft_params, rows, sampling, limit)       before each pass

The tokens are those without a draft.  The model samples every position of a draft
by its own logits, penalties and bias, with the key of that position.  A drafted token stays where
it is the sampled one.  So no distribution is corrected and none changes (arXiv 2211.17192 corrects
them; a draft that samples with the same keys agrees as often: Daliri et al., arXiv 2408.07978).
Log-probabilities are the model's.  Roundings may differ as with another batch size.

Drafts are pure functions on the device.  ``NGram`` finds the tokens that followed the last ones
when they stood in the text before (prompt lookup).  ``heads.HeadDraft`` is a head that reads the
model's hidden states.  ``ModelDraft`` is a smaller model with the same vocabulary, whose cache
holds accepted tokens only.  Each turn it reads the tokens that it has not seen, at once.  The new
tokens of the draft change copies of its recurrent states, so a rejected token leaves no trace.

With ``draft_tokens`` 0 each row adapts the length of its drafts.  A draft with an accepted token
makes the next one up to four times as long, and a draft without one half as long.  A row whose
draft of one token fails asks for none for 2 turns.  The pause doubles with each further failure, up
to 64 turns, and a success ends the doubling.  ``NGram`` proposes few tokens where it is unsure.
Where measured calls with drafts are slower than those without, rows end drafting (``gain``).

Left out: trees; sampling rules that are not by position.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import ModelConfig
from jaxllama.decoding import gain
from jaxllama.decoding.forward import fill_rows, prefill_chunk
from jaxllama.decoding.rows import Rows
from jaxllama.decoding.sampling import History, SamplingParams, sample, whole
from jaxllama.errors import JaxLlamaError
from jaxllama.model import decoder, verification
from jaxllama.model.cache import Cache, LayerState, init_cache
from jaxllama.model.heads import HeadScores
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.records import Hidden
from jaxllama.parallel.mesh import mesh_of
from jaxllama.typing import Params, Tree

_Carry = tuple[jax.Array, Hidden, Cache, History | None]  # of a chain, tokens first
MOST = 15  # drafted tokens of a pass
ADAPTIVE = 7  # most drafted tokens of a row that adapts
FEW = 3  # most drafted tokens after a match that is short
_LONGEST_PAUSE = 64  # turns
_CATCH_UP = 32  # tokens that a draft model reads at once after a pause


class Drafted(NamedTuple):
    """Proposals: tokens int32 ``[B, most]``, of which row b's first ``lengths[b]`` are proposed.

    kept: the draft's own state for its next call.
    """

    tokens: jax.Array
    lengths: jax.Array
    kept: Tree

    def following(self, width: int) -> jax.Array:
        """Proposed successor of each of the ``width`` tokens that a pass reads, ``[B, width]``.

        Zeros follow the proposed tokens.
        """
        missing = max(width - self.tokens.shape[1], 0)
        return jnp.pad(self.tokens, ((0, 0), (0, missing)))[:, :width]


def next_token(
    scores: HeadScores, sampling: SamplingParams, positions: jax.Array, history: History | None
) -> jax.Array:
    """Return the token of each row, int32 ``[B]``; all but ``scores`` as for ``sample``.

    The likeliest token of all rows does not need the whole vocabulary.
    """
    if sampling.features or scores.ids is None:
        return sample(scores.whole, sampling, positions, history)[0]
    return scores.ids[sample(scores.logits, sampling, positions, history)[0]]


class DraftContext(NamedTuple):
    """The inputs of a draft.

    text: int32 ``[B, L]``: prompt and answer, ``size[B]`` tokens of each row.
    wanted: int32 ``[B]``: number of tokens to propose, at most ``most``.
    sampling, history: the model's own.
    draw: called as ``next_token``.
    table: the places of the rows' pages, where the draft's cache has the model's.
    """

    text: jax.Array
    size: jax.Array
    wanted: jax.Array
    most: int
    sampling: SamplingParams
    history: History | None
    draw: Callable[..., jax.Array] = next_token
    table: jax.Array | None = None

    @property
    def none(self) -> jax.Array:
        """Proposals without a token, int32 ``[B, most]``."""
        return jnp.zeros((self.size.shape[0], self.most), jnp.int32)


def chain(
    length: int | jax.Array,
    ask: DraftContext,
    hidden: Hidden,
    cache: Cache,
    scores: Callable[[Hidden], HeadScores],
    forward: Callable[[jax.Array, Hidden, jax.Array, Cache], tuple[Hidden, Cache]],
) -> tuple[jax.Array, Cache]:
    """Sample ``length`` tokens of each row, each from the state after the one before.

    length: an int needs no loop, which costs kernels on a GPU; an array has one body to compile.
    hidden: ``[B, D]``: states for the first token.
    forward: reads tokens ``[B, 1]`` with the states ``[B, 1, D]`` before them, in the rows that
        want more; returns (their states, the cache).
    Returns (proposals ``[B, most]``, the cache with what ``forward`` added).
    """

    def sampled(index: int | jax.Array, carry: _Carry) -> _Carry:
        tokens, hidden, cache, history = carry
        token = ask.draw(scores(hidden), ask.sampling, ask.size + index, history)
        tokens = lax.dynamic_update_slice_in_dim(tokens, token[:, None], index, axis=1)
        return tokens, hidden, cache, None if history is None else history.add(token)

    def one_more(index: jax.Array, carry: _Carry) -> _Carry:
        tokens, hidden, cache, history = carry
        newest = lax.dynamic_slice_in_dim(tokens, index - 1, 1, axis=1)
        goes_on = (index < ask.wanted).astype(jnp.int32)
        read, cache = forward(newest, hidden.reshaped(-1, 1), goes_on, cache)
        return sampled(index, (tokens, read[:, 0], cache, history))

    first = sampled(0, (ask.none, hidden, cache, ask.history))
    is_known = isinstance(length, int)
    tokens, _, cache, _ = lax.fori_loop(1, length, one_more, first, unroll=is_known or None)
    return tokens, cache


class Pace(NamedTuple):
    """How many tokens each row asks for, and when; int32 ``[B]`` each.

    tokens: length of the next draft, 0 for a row that has ended drafting.  wait: turns until then.
    pause: turns of the last pause.
    """

    tokens: jax.Array
    wait: jax.Array
    pause: jax.Array

    def after(self, drafted: jax.Array, accepted: jax.Array, most: int) -> Pace:
        """The pace after a turn; the module docstring has the rule.

        drafted, accepted: int32 ``[B]``; a row that drafted nothing only waits.
        most: longest draft.
        """
        is_wrong = accepted == 0
        tokens = jnp.where(is_wrong, self.tokens // 2, jnp.minimum(4 * self.tokens, most))
        pauses = tokens == 0
        pause = jnp.where(pauses, jnp.minimum(2 * self.pause, _LONGEST_PAUSE), self.pause)
        tried = Pace(
            jnp.maximum(tokens, 1), jnp.where(pauses, pause, 0), jnp.where(is_wrong, pause, 1)
        )
        waited = self._replace(wait=jnp.maximum(self.wait - 1, 0))
        return Pace(*(jnp.where(drafted > 0, *pair) for pair in zip(tried, waited, strict=True)))


class SlotDrafts(NamedTuple):
    """State of drafting in an engine, with one row for each slot.

    text int32 ``[B, L]``: prompt and answer, up to the newest token. pace: number of tokens that
    each row asks for. read int32 ``[B]``: number of tokens of the text that a draft model has in
    its cache. layers: the draft model's layer states, present only inside a decode call. last: the
    hidden state ``[B, D]`` from which a head drafts; ``read`` is -1 where there is none yet.
    """

    text: jax.Array
    pace: Pace
    read: jax.Array
    layers: tuple[LayerState, ...] = ()
    last: jax.Array | None = None


class PromptPart(NamedTuple):
    """The next tokens of prompts, ``[R, T]``, of which ``lengths[R]`` count.

    totals: int32 ``[R]``: lengths of the whole prompts.
    hidden: ``[R, T, D]``: the model's states for the tokens.
    following: int32 ``[R]``: the token after the valid ones.
    fresh: whether the rows are empty.
    """

    tokens: jax.Array
    lengths: jax.Array
    totals: jax.Array
    hidden: Hidden
    following: jax.Array
    fresh: bool


class Draft(Protocol):
    """A source of drafts: ``NGram``, ``ModelDraft`` or ``heads.HeadDraft``. No loop asks which.

    reads_hidden: whether it reads the hidden states of each pass, by ``observe(params, rows,
    inputs, passed)``.
    counts_read: whether its cache may hold fewer tokens than the model's.
    taps: layers of the model before which it reads the states, ``ModelConfig.taps``.
    """

    reads_hidden: ClassVar[bool]
    counts_read: ClassVar[bool]

    @property
    def taps(self) -> tuple[int, ...]: ...

    def weights(self, model: Params, draft: Params | None) -> Params | None:
        """Return its parameters, of the model's and those given for a draft."""
        ...

    def fill(self, params: Any, cache: Cache, part: PromptPart) -> Cache:
        """Return the cache with the part of the prompts."""
        ...

    def propose(self, params: Any, kept: Any, ask: DraftContext) -> Drafted:
        """Draft up to ``ask.wanted`` tokens for each row."""
        ...

    def state_of(self, slots: SlotDrafts, cache: Cache, drafts_here: bool) -> Tree:
        """Return the state for a call over slots, whose model has ``cache``."""
        ...

    def to_slots(self, slots: SlotDrafts, kept: Any, length: jax.Array) -> SlotDrafts:
        """Return the slots with the state after such a call."""
        ...


@dataclasses.dataclass(frozen=True)
class NGram:
    """Proposes the tokens that followed an earlier occurrence of the text's last tokens.

    The match is the longest suffix of the text, of ``least`` to ``longest`` tokens, that occurs
    earlier in the text.  The latest occurrence counts.  If the match is so close to the end that
    too few tokens follow it, the proposal repeats from the match.

    unsure: after a match of just ``least`` tokens it proposes at most ``FEW``.
    """

    longest: int = 8
    least: int = 2
    unsure: bool = False
    reads_hidden: ClassVar[bool] = False
    counts_read: ClassVar[bool] = False

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def begin(self, *_: object) -> None:
        """Return None: an n-gram draft has no state."""

    def weights(self, model: Params, draft: Params | None) -> None:
        """Return None, for the same reason."""

    def fill(self, params: None, cache: Cache, part: PromptPart) -> Cache:
        """Return the cache as it is."""
        return cache

    def state_of(self, slots: SlotDrafts, cache: Cache, drafts_here: bool) -> None:
        """Return None."""

    def to_slots(self, slots: SlotDrafts, kept: None, length: jax.Array) -> SlotDrafts:
        """Return the slots as they are."""
        return slots

    def propose(self, params: None, kept: None, ask: DraftContext) -> Drafted:
        text, size = ask.text, ask.size[:, None]
        width = text.shape[1]
        place = jnp.arange(width, dtype=jnp.int32)[None, :]
        alike, run = jnp.ones(text.shape, bool), jnp.zeros(text.shape, jnp.int32)
        for back in range(self.longest):
            token = jnp.take_along_axis(text, jnp.maximum(size - 1 - back, 0), axis=1)
            before = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, :width]
            alike &= (before == token) & (back < size)
            run += alike.astype(jnp.int32)
        is_match = (run >= self.least) & (place < size - 1)
        best = jnp.max(jnp.where(is_match, run * width + place, -1), axis=1, keepdims=True)
        end = best % width
        ahead = jnp.arange(ask.most, dtype=jnp.int32)[None, :]
        follows = end + 1 + ahead % jnp.maximum(size - 1 - end, 1)
        tokens = jnp.take_along_axis(text, jnp.minimum(follows, width - 1), axis=1)
        wanted = jnp.where(best[:, 0] >= 0, ask.wanted, 0)
        if self.unsure:
            is_short = best[:, 0] < (self.least + 1) * width
            wanted = jnp.where(is_short, jnp.minimum(wanted, FEW), wanted)
        return Drafted(tokens, wanted, None)


@dataclasses.dataclass(frozen=True)
class ModelDraft:
    """Proposes the tokens that a model of this config samples with the same keys.

    It samples among the ``vocab_size`` tokens of the verifying model.  Its state is a cache.
    """

    cfg: ModelConfig
    vocab_size: int
    reads_hidden: ClassVar[bool] = False
    counts_read: ClassVar[bool] = True

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def begin(self, params: Params, tokens: jax.Array, lengths: jax.Array, capacity: int) -> Cache:
        """The cache after prompts ``tokens[B, T]`` of ``lengths[B]`` tokens."""
        dtype, mesh = decoder.activation_dtype(params), mesh_of(params)
        cache = init_cache(self.cfg, tokens.shape[0], capacity, dtype, mesh=mesh)
        rows, width = tokens.shape
        chunk = prefill_chunk(rows, width, mesh)
        return fill_rows(self.cfg, params, self._known(tokens), lengths, cache, chunk=chunk)[1]

    def weights(self, model: Params, draft: Params | None) -> Params | None:
        """Return the draft's own."""
        return draft

    def fill(self, params: Params, cache: Cache, part: PromptPart) -> Cache:
        """Return the cache with a prompt's next tokens, as ``decoding.forward`` takes them."""
        tokens = self._known(part.tokens)
        lengths, totals, fresh = part.lengths, part.totals, part.fresh
        _, after = decoder.forward(self.cfg, params, tokens, lengths, cache, totals, fresh=fresh)
        assert after is not None
        return after

    def state_of(self, slots: SlotDrafts, cache: Cache, drafts_here: bool) -> Cache | None:
        """Return the cache of the draft's layers, without the table of pages."""
        return Cache(slots.layers, slots.read) if drafts_here else None

    def to_slots(self, slots: SlotDrafts, kept: Cache | None, length: jax.Array) -> SlotDrafts:
        """Return the slots with the cache's layers and lengths."""
        return slots if kept is None else slots._replace(layers=kept.layers, read=kept.lengths)

    def propose(self, params: Params, kept: Cache, ask: DraftContext) -> Drafted:
        """Draft ``ask.wanted`` tokens for each row; if no row wants any, the model does not run."""
        cache = kept if ask.table is None else dataclasses.replace(kept, table=ask.table)
        # A loop of at most one iteration, because lax.cond would copy the cache.
        tokens, cache, _ = lax.while_loop(
            lambda carry: carry[2],
            lambda carry: (*self._proposed(params, carry[1], ask), jnp.bool_(False)),
            (ask.none, cache, jnp.any(ask.wanted > 0)),
        )
        return Drafted(tokens, ask.wanted, dataclasses.replace(cache, table=kept.table))

    def _proposed(self, params: Params, kept: Cache, ask: DraftContext) -> tuple[jax.Array, Cache]:
        kept, hidden = self._read(params, kept, ask)
        tokens, after = chain(
            jnp.max(ask.wanted),
            ask,
            hidden,
            kept,
            lambda hidden: HeadScores(decoder.logits(self.cfg, params, hidden), self.vocab_size),
            lambda tokens, _, lengths, cache: decoder.forward(
                self.cfg, params, self._known(tokens), lengths, cache, sparse=True
            ),
        )
        # Keys and values past the length are never read.  A recurrent state must be the old one.
        layers = tuple(
            new if isinstance(new, KVCache) else old
            for new, old in zip(after.layers, kept.layers, strict=True)
        )
        return tokens, Cache(layers, kept.lengths, kept.table)

    def _read(self, params: Params, cache: Cache, ask: DraftContext) -> tuple[Cache, Hidden]:
        """Read the tokens of the text that the cache lacks, in rows that want a draft.

        Returns (cache, hidden state ``[B, D]`` of each row's last token).
        """

        def missing(cache: Cache) -> jax.Array:
            return jnp.where(ask.wanted > 0, ask.size - cache.lengths, 0)

        def read(width: int, carry: tuple[Cache, Hidden]) -> tuple[Cache, Hidden]:
            cache, last = carry
            place = jnp.arange(width, dtype=jnp.int32)[None, :]
            new = jnp.minimum(missing(cache), width)
            index = jnp.minimum(cache.lengths[:, None] + place, ask.text.shape[1] - 1)
            tokens = self._known(jnp.take_along_axis(ask.text, index, axis=1))
            hidden, proposal = verification.propose(self.cfg, params, tokens, new, cache)
            return verification.commit(proposal, new), hidden.last(new, last)

        blank = jnp.zeros((cache.batch, self.cfg.d_model), decoder.activation_dtype(params))
        carry, usual = (cache, Hidden(blank)), ask.most + 1
        for width, enough in ((_CATCH_UP, usual), (usual, 0)):
            carry = lax.while_loop(
                lambda carry, enough=enough: jnp.any(missing(carry[0]) > enough),
                functools.partial(read, width),
                carry,
            )
        return carry

    def _known(self, tokens: jax.Array) -> jax.Array:
        """Tokens clamped to this model's vocabulary, whose padding may differ from the other's."""
        return jnp.minimum(tokens, self.cfg.vocab_size - 1)


@dataclasses.dataclass(frozen=True)
class DraftPlan:
    """How a loop drafts.

    draft: a ``Draft``.
    most: largest number of tokens in a proposal.
    widths: numbers of tokens of a row for which a pass is compiled.
    adaptive: whether a row may ask for fewer than ``most`` tokens.
    exact: a pass over n tokens has the shapes of a decode step over n rows.
    """

    draft: Any
    most: int
    widths: tuple[int, ...]
    adaptive: bool
    exact: bool = False

    @classmethod
    def of(cls, draft: Any, draft_tokens: int, deterministic: bool = False) -> DraftPlan:
        """The plan for a draft.  Raises JaxLlamaError naming the key.

        draft_tokens: 0 to 15; 0 adapts.
        deterministic: all passes have one width, a power of two, so that 32 tokens are whole rows.
        """
        if not 0 <= whole("draft_tokens", draft_tokens) <= MOST:
            raise JaxLlamaError(f"draft_tokens = {draft_tokens}: must be from 0 (adapts) to {MOST}")
        most, adaptive = draft_tokens or ADAPTIVE, draft_tokens == 0
        if deterministic:
            widths = (1 << most.bit_length(),)
        else:
            widths = (1, 4, 8) if adaptive else (1, most + 1)
        return cls(draft, most, widths, adaptive, deterministic)


def ended(rows: Rows, how: jax.Array | int) -> Rows:
    """Return the rows of a call, which end drafting if ``how`` is ``gain.OFF``."""
    fields = rows.fields
    after = fields._replace(ask=jnp.where(how == gain.OFF, 0, fields.ask))
    return dataclasses.replace(rows, ints=after.packed())


def begin(
    plan: DraftPlan,
    draft_params: Params | None,
    tokens: jax.Array,
    lengths: jax.Array,
    rows: Rows,
    capacity: int,
) -> Rows:
    """Add to ``rows`` the text, counters and state that drafts need, after a prefill.

    tokens ``[B, T]``, lengths ``[B]``: the prompts.
    capacity: tokens of a row that the draft's cache holds.
    A draft that reads hidden states has read the prompts in the prefill.
    """
    ints, text = _with_drafts(plan.most, rows.ints, rows.written, tokens, lengths)
    rows = dataclasses.replace(rows, ints=ints, text=text)
    if plan.draft.reads_hidden:
        return rows
    return dataclasses.replace(rows, kept=plan.draft.begin(draft_params, tokens, lengths, capacity))


@functools.partial(jax.jit, static_argnums=0)
def _with_drafts(
    most: int, ints: jax.Array, written: jax.Array, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return ``Rows.ints`` with the drafts' fields, and the text of prompts and first tokens."""
    more = [jnp.full_like(lengths, value) for value in (0, 0, most, 0, 1)]
    text = jnp.pad(tokens, ((0, 0), (0, written.shape[2])))
    text = text.at[jnp.arange(text.shape[0]), lengths].set(written[0, :, 0])
    return jnp.concatenate([ints, jnp.stack(more)]), text


def propose(
    plan: DraftPlan,
    draft_params: Params | None,
    rows: Rows,
    sampling: SamplingParams,
    limit: jax.Array | int,
    how: jax.Array | int = gain.DRAFT,
) -> tuple[Rows, Drafted]:
    """(rows with the draft's new state, proposals of the live rows).

    limit: number of written tokens at which a row stops.  A proposal never goes past it.
    how: of ``gain``: only DRAFT proposes tokens.
    """
    fields = rows.fields
    room = jnp.where(fields.is_live(limit), limit - fields.count - 1, 0)
    wanted = jnp.where((fields.wait > 0) | (how != gain.DRAFT), 0, jnp.minimum(fields.ask, room))
    assert rows.text is not None
    ask = DraftContext(rows.text, fields.length + 1, wanted, plan.most, sampling, rows.history)
    draft = plan.draft.propose(draft_params, rows.kept, ask)
    return dataclasses.replace(rows, kept=draft.kept), draft
