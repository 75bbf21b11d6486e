"""Speculative decoding: a draft of the next tokens, verified by the model in one pass.

    plan  = Plan.of(draft, draft_tokens, deterministic)
    state = begin(plan, draft_params, tokens, lengths, generated, capacity)     behind a prefill
    state = advance(cfg, plan, params, draft_params, state, sampling, stop_ids, until, limit)

Contract: the tokens are those without it.  Every position of a draft is sampled by the model's own
logits, penalties and bias, with the key that its position has anyway, and a drafted token stays
where it is that token; so no distribution is corrected and none changes (arXiv 2211.17192 does; a
draft that samples with the same keys agrees as often: Daliri et al., arXiv 2408.07978).  Logprobs
are the model's.  What differs is what another batch size would change: roundings.

Drafts are pure functions on the device.  ``NGram`` finds what followed the last tokens when they
stood in the text before (prompt lookup); ``ModelDraft`` is a smaller model with the same
vocabulary, whose cache holds accepted tokens only: each turn it reads those that it has not seen,
at once, and goes on from there in a copy of what it would have to take back.

A turn is draft, verify, commit, in one ``lax.while_loop``; the pass is as wide as the longest draft
of a row needs, of a few compiled widths.  With ``draft_tokens`` 0 each row asks for what pays: four
times as many after a draft of which a token stayed, half after one of which none did, and after the
last of those none for 2, 4, 8, ... 64 turns; and ``NGram`` proposes few where it is unsure.

``proposed``, ``read``, ``settled`` are its parts for who runs the pass otherwise (``offload``);
``in_width``, ``verdict`` and ``sampled`` those that the serving engine's loop has of it.

Left out: trees; sampling rules that are not by position.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama import compiler_options
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.generation import GenerateState, Params, fill_rows, prefill_chunk, verify
from jaxllama.model import decoder
from jaxllama.model.cache import Cache, init_cache
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.records import Hidden
from jaxllama.parallel.mesh import mesh_of
from jaxllama.sampling import History, SamplingParams, sample, whole
from pallas_kernels.brief import short_repr

MOST = 15  # drafted tokens of a pass
ADAPTIVE = 7  # the most that a row asks for where it adapts
FEW = 3  # drafted tokens where little speaks for them
_LONGEST_PAUSE = 64  # turns
_CATCH_UP = 32  # tokens that a draft reads at once behind a pause
Carry = TypeVar("Carry")


# Drafts


class Drafted(NamedTuple):
    """tokens int32 ``[B, most]``, of which ``lengths[B]`` are there; what the draft keeps."""

    tokens: jax.Array
    lengths: jax.Array
    kept: Any


class DraftContext(NamedTuple):
    """What a draft may look at: text int32 ``[B, L]``, of which ``size[B]`` tokens are there; how
    many are ``wanted[B]``, at most ``most``; how the model samples them, and what is called as
    ``sample`` for it."""

    text: jax.Array
    size: jax.Array
    wanted: jax.Array
    most: int
    sampling: SamplingParams
    history: History | None
    draw: Callable[..., tuple[jax.Array, jax.Array]] = sample


@dataclasses.dataclass(frozen=True)
class NGram:
    """What followed the longest suffix of the text, of up to ``longest`` and at least ``least``
    tokens, where it stood last.  Where that is so near that the text ends, it goes round.

    unsure: behind a suffix of just ``least`` tokens it proposes at most ``FEW``.
    """

    longest: int = 8
    least: int = 2
    unsure: bool = False

    def begin(self, *_: Any) -> None:
        """It keeps nothing but the text."""

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
    """What a model of this config would sample with the same keys, of the ``vocab_size`` tokens
    that the verifying one has.  It keeps a cache."""

    cfg: ModelConfig
    vocab_size: int

    def begin(self, params: Params, tokens: jax.Array, lengths: jax.Array, capacity: int) -> Cache:
        """The cache behind prompts ``tokens[B, T]``, ``lengths[B]``."""
        dtype, mesh = decoder.activation_dtype(params), mesh_of(params)
        cache = init_cache(self.cfg, tokens.shape[0], capacity, dtype, mesh=mesh)
        chunk = prefill_chunk(*tokens.shape)
        return fill_rows(self.cfg, params, self._known(tokens), lengths, cache, chunk=chunk)[1]

    def fill(
        self,
        params: Params,
        tokens: jax.Array,
        lengths: jax.Array,
        cache: Cache,
        totals: jax.Array,
        *,
        fresh: bool,
    ) -> Cache:
        """The cache with a prompt's next tokens, as ``decoder.forward`` takes them."""
        tokens = self._known(tokens)
        cache = decoder.forward(self.cfg, params, tokens, lengths, cache, totals, fresh=fresh)[1]
        assert cache is not None
        return cache

    def propose(self, params: Params, kept: Cache, ask: DraftContext) -> Drafted:
        """Nothing is computed where nobody wants a draft."""
        none = jnp.zeros((ask.size.shape[0], ask.most), jnp.int32)
        # A loop of one round is a choice that copies no cache.
        tokens, kept, _ = lax.while_loop(
            lambda carry: carry[2],
            lambda carry: (*self._proposed(params, carry[0], carry[1], ask), jnp.bool_(False)),
            (none, kept, jnp.any(ask.wanted > 0)),
        )
        return Drafted(tokens, ask.wanted, kept)

    def _proposed(
        self, params: Params, none: jax.Array, kept: Cache, ask: DraftContext
    ) -> tuple[jax.Array, Cache]:
        kept, hidden = self._read(params, kept, ask)
        most = jnp.max(ask.wanted)

        def drafted(
            tokens: jax.Array, index: Any, hidden: Hidden, history: History | None
        ) -> tuple[jax.Array, History | None]:
            scores = self._scores(params, hidden)
            token, _ = ask.draw(scores, ask.sampling, ask.size + index, history)
            tokens = lax.dynamic_update_slice_in_dim(tokens, token[:, None], index, axis=1)
            return tokens, None if history is None else history.add(token)

        def one_more(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            index, tokens, cache, history = carry
            newest = lax.dynamic_index_in_dim(tokens, index - 1, 1)
            goes_on = (index < ask.wanted).astype(jnp.int32)
            newest = self._known(newest)
            hidden, cache = decoder.forward(self.cfg, params, newest, goes_on, cache, sparse=True)
            tokens, history = drafted(tokens, index, hidden[:, 0], history)
            return index + 1, tokens, cache, history

        tokens, history = drafted(none, jnp.int32(0), hidden, ask.history)
        carry = jnp.int32(1), tokens, kept, history
        _, tokens, after, _ = lax.while_loop(lambda carry: carry[0] < most, one_more, carry)
        # Keys and values past the length are dead; a recurrent state has to be the old one.
        layers = tuple(
            new if isinstance(new, KVCache) else old
            for new, old in zip(after.layers, kept.layers, strict=True)
        )
        return tokens, Cache(layers, kept.lengths, kept.table)

    def _read(self, params: Params, cache: Cache, ask: DraftContext) -> tuple[Cache, Hidden]:
        """(the cache with what the text has more, the last token's hidden state ``[B, D]``), of
        the rows that want a draft."""

        def missing(cache: Cache) -> jax.Array:
            return jnp.where(ask.wanted > 0, ask.size - cache.lengths, 0)

        def read(width: int, carry: tuple[Cache, Hidden]) -> tuple[Cache, Hidden]:
            cache, last = carry
            place = jnp.arange(width, dtype=jnp.int32)[None, :]
            new = jnp.minimum(missing(cache), width)
            index = jnp.minimum(cache.lengths[:, None] + place, ask.text.shape[1] - 1)
            tokens = self._known(jnp.take_along_axis(ask.text, index, axis=1))
            hidden, proposal = decoder.propose(self.cfg, params, tokens, new, cache)
            return decoder.commit(proposal, new), hidden.last(new, last)

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
        """Tokens as this model may read them: tables are padded to different sizes."""
        return jnp.minimum(tokens, self.cfg.vocab_size - 1)

    def _scores(self, params: Params, hidden: Hidden) -> jax.Array:
        """Logits ``[B, vocab_size]``."""
        scores = decoder.logits(self.cfg, params, hidden)[:, : self.vocab_size]
        more = self.vocab_size - scores.shape[1]
        return jnp.pad(scores, ((0, 0), (0, more)), constant_values=-jnp.inf) if more else scores


# What runs


@dataclasses.dataclass(frozen=True)
class DraftPlan:
    """Who drafts, at most how many tokens, and the widths of a pass; adaptive: or fewer; exact: in
    the shapes of a decode step of as many rows as a pass has tokens."""

    draft: Any
    most: int
    widths: tuple[int, ...]
    adaptive: bool
    exact: bool = False

    @classmethod
    def of(cls, draft: Any, draft_tokens: int, deterministic: bool = False) -> DraftPlan:
        """draft_tokens: 0 to 15, 0 adapts.  deterministic: one width, a power of two, so that a
        pass of 32 tokens is whole rows.  Raises JaxLlamaError naming the key."""
        if not 0 <= whole("draft_tokens", draft_tokens) <= MOST:
            raise JaxLlamaError(f"draft_tokens = {draft_tokens}: must be from 0 (adapts) to {MOST}")
        most, adaptive = draft_tokens or ADAPTIVE, draft_tokens == 0
        if deterministic:
            widths = (1 << most.bit_length(),)
        else:
            widths = (1, 4, 8) if adaptive else (1, most + 1)
        return cls(draft, most, widths, adaptive, deterministic)


class Pace(NamedTuple):
    """What a row asks for, int32 ``[B]`` each: tokens of its next draft; turns until that; how
    long its last pause was."""

    tokens: jax.Array
    wait: jax.Array
    pause: jax.Array

    def after(self, drafted: jax.Array, accepted: jax.Array, most: int) -> Pace:
        is_wrong = accepted == 0
        tokens = jnp.where(is_wrong, self.tokens // 2, jnp.minimum(4 * self.tokens, most))
        pauses = tokens == 0
        pause = jnp.where(pauses, jnp.minimum(2 * self.pause, _LONGEST_PAUSE), self.pause)
        tried = Pace(
            jnp.maximum(tokens, 1), jnp.where(pauses, pause, 0), jnp.where(is_wrong, pause, 1)
        )
        waited = self._replace(wait=jnp.maximum(self.wait - 1, 0))
        return Pace(*(jnp.where(drafted > 0, *pair) for pair in zip(tried, waited, strict=True)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the loop carries and leaves, of B rows.

    text int32 ``[B, T + room]``: prompt and answer, one behind the other; prompt: the lengths of
    prompts; logprobs float32 ``[B, room]``, counts, done, history: as ``GenerateState``'s.
    drafted, accepted int32 ``[B]``: tokens so far.  kept: what the draft keeps.
    """

    text: jax.Array
    prompt: jax.Array
    logprobs: jax.Array
    counts: jax.Array
    done: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    pace: Pace
    cache: Cache
    history: History | None
    kept: Any

    __repr__ = short_repr

    def is_live(self, limit: jax.Array | int) -> jax.Array:
        """bool ``[B]``: rows that want more tokens, up to ``limit``."""
        return ~self.done & (self.counts < limit)

    @property
    def tokens(self) -> jax.Array:
        """int32 ``[B, room]``, of which the first ``counts[b]`` are there."""
        return _answers(self.text, self.prompt, self.logprobs.shape[1])


@functools.partial(jax.jit, static_argnums=2)
def _answers(text: jax.Array, prompt: jax.Array, room: int) -> jax.Array:
    index = prompt[:, None] + jnp.arange(room, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(text, index, axis=1)


def begin(
    plan: DraftPlan,
    draft_params: Params | None,
    tokens: jax.Array,
    lengths: jax.Array,
    generated: GenerateState,
    capacity: int,
) -> State:
    """From ``generation.start``'s state and its prompts; capacity: of the cache."""
    kept = plan.draft.begin(draft_params, tokens, lengths, capacity)
    # Donated arrays of their own, each.
    drafted, accepted, *pace = (jnp.full_like(lengths, value) for value in (0, 0, plan.most, 0, 1))
    return State(
        _text(tokens, lengths, generated.tokens),
        lengths,
        generated.logprobs,
        generated.counts,
        generated.done,
        drafted,
        accepted,
        Pace(*pace),
        generated.cache,
        generated.history,
        kept,
    )


@jax.jit
def _text(tokens: jax.Array, lengths: jax.Array, new: jax.Array) -> jax.Array:
    text = jnp.pad(tokens, ((0, 0), (0, new.shape[1])))
    return text.at[jnp.arange(text.shape[0]), lengths].set(new[:, 0])


_LOOP = {"static_argnums": (0, 1), "donate_argnums": 4}


@functools.partial(jax.jit, **_LOOP)
def advance(
    cfg: ModelConfig,
    plan: DraftPlan,
    params: Params,
    draft_params: Params | None,
    state: State,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    until: jax.Array | int,
    limit: jax.Array | int,
) -> State:
    """Run turns until every row has ``until`` tokens or has stopped; a row may be further then, up
    to ``limit``."""

    def unfinished(state: State) -> jax.Array:
        return jnp.any(state.is_live(limit) & (state.counts < until))

    def turn(state: State) -> State:
        state, draft = proposed(plan, draft_params, state, sampling, limit)
        needed = jnp.max(draft.lengths) + 1

        def one_pass(width: int, state: State) -> State:
            live = state.is_live(limit).astype(jnp.int32)
            inputs, count = read(state, draft, width), live * (1 + draft.lengths)
            if width == 1:  # a plain step, whose kernels are fewer: nothing of it is taken back
                hidden, cache = decoder.forward(cfg, params, inputs, live, state.cache, sparse=True)
                scores = decoder.logits(cfg, params, hidden[:, 0])[:, None]
                state, _ = settled(plan, state, draft, scores, live, sampling, stop_ids)
                return dataclasses.replace(state, cache=cache)
            scores, proposal = verify(cfg, params, inputs, count, state.cache, plan.exact)
            state, new = settled(plan, state, draft, scores, live, sampling, stop_ids)
            return dataclasses.replace(state, cache=decoder.commit(proposal, new, plan.exact))

        return in_width(plan.widths, needed, one_pass, state)

    return lax.while_loop(unfinished, turn, state)


def proposed(
    plan: DraftPlan,
    draft_params: Params | None,
    state: State,
    sampling: SamplingParams,
    limit: jax.Array | int,
) -> tuple[State, Drafted]:
    """(the state with what the draft keeps, what live rows propose)."""
    room = jnp.where(state.is_live(limit), limit - state.counts - 1, 0)
    wanted = jnp.where(state.pace.wait > 0, 0, jnp.minimum(state.pace.tokens, room))
    ask = DraftContext(
        state.text, state.prompt + state.counts, wanted, plan.most, sampling, state.history
    )
    draft = plan.draft.propose(draft_params, state.kept, ask)
    return dataclasses.replace(state, kept=draft.kept), draft


def read(state: State, draft: Drafted, width: int) -> jax.Array:
    """What a pass reads, int32 ``[B, width]``: each row's newest token and its draft."""
    size = (state.prompt + state.counts)[:, None]
    newest = jnp.take_along_axis(state.text, size - 1, axis=1)
    return jnp.concatenate([newest, following(draft, width)[:, :-1]], axis=1)


def following(draft: Drafted, width: int) -> jax.Array:
    """What should follow each token that a pass reads."""
    return jnp.pad(draft.tokens, ((0, 0), (0, 1)))[:, :width]


def in_width(
    widths: tuple[int, ...], needed: jax.Array, run: Callable[[int, Carry], Carry], carry: Carry
) -> Carry:
    """``run(width, carry)`` with the least of ``widths`` that is at least ``needed``."""
    if len(widths) == 1:
        return run(widths[0], carry)
    # A loop of one round is a choice that copies no cache.
    once, least = (carry, jnp.bool_(True)), 0
    for width in widths:
        is_it = (least < needed) & (needed <= width)
        once = lax.while_loop(
            lambda once, is_it=is_it: once[1] & is_it,
            lambda once, width=width: (run(width, once[0]), jnp.bool_(False)),
            once,
        )
        least = width
    return once[0]


def settled(
    plan: DraftPlan,
    state: State,
    draft: Drafted,
    scores: jax.Array,
    live: jax.Array,
    sampling: SamplingParams,
    stop_ids: jax.Array,
) -> tuple[State, jax.Array]:
    """What a pass that gave ``scores [B, T, V]`` brings: every row that is ``live`` (1 or 0) gets a
    token, and one for each token of its draft up to the first that is not the model's.  (The state,
    whose cache is to take so many of the tokens read; how many, ``[B]``.)"""
    width = scores.shape[1]
    rows, place = jnp.arange(live.shape[0])[:, None], jnp.arange(width, dtype=jnp.int32)[None, :]
    size, drafted = (state.prompt + state.counts)[:, None], following(draft, width)
    tokens, logprobs = sampled(scores, sampling, size + place, drafted, state.history)

    stops = jnp.any(tokens[:, :, None] == stop_ids, axis=2)
    new, accepted, ends = verdict(tokens, drafted, draft.lengths, stops, live)
    is_new = place < new[:, None]
    history = None if state.history is None else state.history.add(tokens, is_new)
    written = jnp.where(is_new, size + place, state.text.shape[1])
    counted = jnp.where(is_new, state.counts[:, None] + place, state.logprobs.shape[1])
    count = live * draft.lengths
    after = dataclasses.replace(
        state,
        text=state.text.at[rows, written].set(tokens, mode="drop"),
        logprobs=state.logprobs.at[rows, counted].set(logprobs, mode="drop"),
        counts=state.counts + new,
        done=state.done | ends,
        drafted=state.drafted + count,
        accepted=state.accepted + jnp.minimum(accepted, new),
        pace=state.pace.after(count, accepted, plan.most) if plan.adaptive else state.pace,
        history=history,
    )
    return after, new


def verdict(
    tokens: jax.Array, drafted: jax.Array, lengths: jax.Array, stops: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What becomes of rows whose next tokens would be ``tokens[B, T]`` where ``drafted``'s first
    ``lengths[B]`` were proposed, if they are ``live`` (1 or 0): (how many they get, how many drafts
    were right, whether the last they get is one that ``stops[B, T]``)."""
    width = tokens.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    is_right = (tokens == drafted) & (place < lengths[:, None])
    accepted = live * jnp.min(jnp.where(is_right, width, place), axis=1)
    first_stop = jnp.min(jnp.where(stops, place, width), axis=1)
    new = live * jnp.minimum(accepted, first_stop) + live
    return new, accepted, first_stop < new


def sampled(
    scores: jax.Array,
    sampling: SamplingParams,
    positions: jax.Array,
    drafted: jax.Array,
    history: History | None,
    allowed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(tokens, logprobs) ``[B, T]`` of ``scores [B, T, V]``, each position with the history that it
    has where the drafted tokens before it are right; allowed bool ``[B, T, V]``: ``sample``'s."""
    batch, width, vocab = scores.shape
    if history is not None:
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
    tokens, logprobs = sample(
        scores.reshape(-1, vocab), sampling, positions.reshape(-1), history, allowed
    )
    return tokens.reshape(batch, width), logprobs.reshape(batch, width)


def loop_for(params: Params) -> Any:
    """``advance``, compiled as suits the devices that (concrete) parameters are on."""
    return compiler_options.compiled_for(advance, mesh_of(params), **_LOOP)
