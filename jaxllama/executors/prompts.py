"""The programs of a resident model that read prompts and write each row's first new token.

    rows = start(cfg, params, prompts, layers, held, ...)                       one program
    rows = start_in_pieces(cfg, params, prompts, cache, ..., chunk, on_prompt)  several

They donate the cache's layers, unless the call is traced. A draft that reads hidden states
(``decoding.heads``) reads those of the prompts here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import ModelConfig
from jaxllama.decoding.forward import check_room, donated, fill_hidden, int32_ids, scores_of
from jaxllama.decoding.heads import HeadDraft, HeadState
from jaxllama.decoding.rows import Rows
from jaxllama.decoding.sampling import History, SamplingParams
from jaxllama.decoding.turn import append, drawn_by
from jaxllama.executors.executor import Alone
from jaxllama.model import decoder, verification
from jaxllama.model.cache import Cache, LayerState
from jaxllama.model.lora import ROWS, for_rows
from jaxllama.model.records import Hidden
from jaxllama.typing import Params, Tree


class PromptBatch(NamedTuple):
    """Prompts ``tokens[B, T]`` of ``lengths[B]``, how to sample after them, and the stop tokens."""

    tokens: jax.Array
    lengths: jax.Array
    sampling: SamplingParams
    stop_ids: jax.Array


def _prefill_alone(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    alone: Alone,
    head: HeadDraft | None = None,
    state: HeadState | None = None,
    draft_params: Params | None = None,
) -> tuple[jax.Array, Hidden, Cache, HeadState | None]:
    """Fill an empty cache like ``fill_rows``, in shapes that do not depend on the batch.

    The prompts without their last tokens are read one row after the other. One decode step of all
    rows reads the last tokens. Rows of length 0 cost nothing.

    head, state, draft_params: as for ``start``.
    Returns (logits ``[B, V]``, hidden states of the last tokens ``[B, D]``, cache, state).
    """
    # A last piece may be wider than what is left, and a head reads one token more.
    padded = jnp.pad(tokens, ((0, 0), (0, alone.last + 1)))

    def prefill_row(row: tuple[Tree, ...]) -> tuple[Cache, HeadState | None]:
        tokens, length, adapter, cache, state = jax.tree.map(lambda leaf: leaf[None], row)
        row_params = params if adapter is None else for_rows(params, adapter)

        def read(
            states: tuple[Cache, HeadState | None],
            first: jax.Array | int,
            width: int,
            fresh: bool = False,
        ) -> tuple[Cache, HeadState | None]:
            cache, state = states
            piece = lax.dynamic_slice_in_dim(tokens, first, width, axis=1)
            n_new = jnp.clip(length - 1 - first, 0, width)
            hidden, after = decoder.forward(
                cfg, row_params, piece, n_new, cache, length, fresh=fresh
            )
            assert after is not None
            if head is not None:
                assert state is not None and draft_params is not None
                following = lax.dynamic_slice_in_dim(tokens, first + 1, width, axis=1)
                state = head.read_prompt(draft_params, state, following, hidden, n_new, fresh=fresh)
            return after, state

        states: tuple[Cache, HeadState | None] = cache, state
        whole = jnp.int32(0)
        if alone.piece:
            whole = (length[0] - 1) // alone.piece
            states = read(states, 0, alone.piece, fresh=True)
            states = lax.fori_loop(
                1,
                whole,
                lambda index, states: read(states, index * alone.piece, alone.piece),
                states,
            )
        if alone.last:
            states = read(states, whole * alone.piece, alone.last, fresh=not alone.piece)
        return jax.tree.map(lambda leaf: leaf[0], states)

    rows = padded, lengths, params.get(ROWS), cache, state
    cache, state = lax.map(
        lambda row: lax.cond(row[1] > 0, prefill_row, lambda row: row[3:], row), rows
    )
    newest = jnp.take_along_axis(tokens, jnp.maximum(lengths - 1, 0)[:, None], axis=1)
    live, width = (lengths > 0).astype(jnp.int32), alone.rows // tokens.shape[0]
    if width == 1:
        hidden, after = decoder.forward(cfg, params, newest, live, cache)
        return scores_of(cfg, params, hidden[:, 0], cache, live), hidden[:, 0], after, state
    # Fewer rows, each with a draft, have a decode step's shapes if their tokens are verified.
    newest = jnp.pad(newest, ((0, 0), (0, width - 1)))
    hidden, proposal = verification.propose(
        cfg, params, newest, live, cache, exact=True, sparse=False
    )
    scores = decoder.logits(cfg, params, hidden.flat())[::width]
    return scores, hidden[:, 0], verification.commit(proposal, live, exact=True), state


# How ``start`` is jitted, beside its donated cache: ``compiler_options.compiled_with``.
START = {
    "static_argnums": 0,
    "static_argnames": ("max_new_tokens", "chunk", "alone", "head", "fresh"),
}


@donated(3, **START)
def start(
    cfg: ModelConfig,
    params: Params,
    prompts: PromptBatch,
    layers: tuple[LayerState, ...],
    held: jax.Array,
    state: HeadState | None = None,
    draft_params: Params | None = None,
    *,
    max_new_tokens: int,
    chunk: int | None = None,
    alone: Alone | None = None,
    head: HeadDraft | None = None,
    fresh: bool = False,
) -> Rows:
    """Run the prefill and write the first new token, in rows with room for ``max_new_tokens``.

    A row of length 0 is empty and done from the beginning.

    layers, held: the cache's layers and lengths. The lengths are in ``Rows.ints`` afterwards, so
        their own array is not donated.
    alone: shapes in which the rows of an empty cache are read, whatever the batch and ``chunk``.
    head, state, draft_params: a draft that reads hidden states; its state, which becomes
        ``Rows.kept``; and its parameters.
    fresh: whether the cache is empty.
    """
    cache = Cache(layers, held)
    tokens, lengths = int32_ids(prompts.tokens, prompts.lengths)
    if alone is not None:
        scores, last, cache, state = _prefill_alone(
            cfg, params, tokens, lengths, cache, alone, head, state, draft_params
        )
    else:
        check_room(cache, tokens.shape[1], "tokens")
        read = None
        if head is not None and draft_params is not None:
            read = functools.partial(head.read_prompt, draft_params)
        last, after, state = fill_hidden(
            cfg, params, tokens, lengths, cache, chunk, read, state, fresh=fresh
        )
        scores, cache = scores_of(cfg, params, last, cache, lengths), after
    prompts = prompts._replace(tokens=tokens, lengths=lengths)
    rows = _first_token(cfg, prompts, scores, cache, max_new_tokens)
    if head is None or state is None or draft_params is None:
        return rows
    return head.begin_answer(draft_params, rows, state, last, lengths)


def start_in_pieces(
    cfg: ModelConfig,
    params: Params,
    prompts: PromptBatch,
    cache: Cache,
    *,
    max_new_tokens: int,
    chunk: int,
    on_prompt: Callable[[int, int], None],
    head: HeadDraft | None = None,
    state: HeadState | None = None,
    draft_params: Params | None = None,
) -> Rows:
    """Run ``start`` with one call of a program for every ``chunk`` tokens of a row.

    on_prompt: called after each call as (tokens read, tokens of the longest prompt).
    """
    check_room(cache, prompts.tokens.shape[1], "tokens")
    tokens, lengths = int32_ids(prompts.tokens, prompts.lengths)
    total, longest = cache.lengths + lengths, int(jax.device_get(lengths).max())
    last = Hidden.zeros(cfg, tokens.shape[:1], decoder.activation_dtype(params))
    for first in range(0, longest, chunk):
        piece = tokens[:, first : first + chunk + 1]
        piece = jnp.pad(piece, ((0, 0), (0, chunk + 1 - piece.shape[1])))
        n_new = jnp.clip(lengths - first, 0, chunk)
        n_known = jnp.clip(lengths - 1 - first, 0, chunk)
        last, cache, state = _piece(
            cfg,
            params,
            piece,
            n_new,
            cache,
            total,
            last,
            state,
            n_known,
            draft_params,
            head=head,
        )
        jax.block_until_ready(last)
        on_prompt(min(first + chunk, longest), longest)
    return _after_pieces(
        cfg,
        params,
        prompts._replace(tokens=tokens, lengths=lengths),
        cache.layers,
        cache.lengths,
        total,
        last,
        state,
        draft_params,
        max_new_tokens=max_new_tokens,
        head=head,
    )


@functools.partial(jax.jit, static_argnums=0, static_argnames="head", donate_argnums=(4, 6, 7))
def _piece(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    total: jax.Array,
    last: Hidden,
    state: HeadState | None,
    known: jax.Array,
    draft_params: Params | None,
    *,
    head: HeadDraft | None = None,
) -> tuple[Hidden, Cache, HeadState | None]:
    """Read a piece of every row's prompt.

    tokens: ``[B, chunk + 1]``; the last column is the beginning of the next piece.
    last: ``[B, D]``: the hidden state of each row's last token so far.
    known: ``[B]``: tokens of the piece that have a successor in the prompt.
    """
    hidden, cache = decoder.forward(cfg, params, tokens[:, :-1], lengths, cache, total)
    if head is not None and state is not None:
        assert draft_params is not None
        state = head.read_prompt(draft_params, state, tokens[:, 1:], hidden, known)
    return hidden.last(lengths, last), cache, state


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("max_new_tokens", "head"), donate_argnums=3
)
def _after_pieces(
    cfg: ModelConfig,
    params: Params,
    prompts: PromptBatch,
    layers: tuple[LayerState, ...],
    held: jax.Array,
    total: jax.Array,
    last: Hidden,
    state: HeadState | None,
    draft_params: Params | None,
    *,
    max_new_tokens: int,
    head: HeadDraft | None = None,
) -> Rows:
    lengths = prompts.lengths
    before, cache = Cache(layers, total - lengths), Cache(layers, held)
    scores = scores_of(cfg, params, last, before, lengths)
    rows = _first_token(cfg, prompts, scores, cache, max_new_tokens)
    if head is None or state is None or draft_params is None:
        return rows
    return head.begin_answer(draft_params, rows, state, last, lengths)


def _first_token(
    cfg: ModelConfig, prompts: PromptBatch, scores: jax.Array, cache: Cache, max_new_tokens: int
) -> Rows:
    """Return the rows after prompts whose last tokens have the logits ``scores [B, V]``."""
    tokens, lengths, sampling, stop_ids = prompts
    history = History.of_prompt(tokens, lengths, cfg.vocab_size) if sampling.penalties else None
    rows = Rows.empty(lengths, cache, max_new_tokens, history)
    return append(rows, scores, drawn_by(sampling, cfg.fixed_sums), stop_ids)[0]
