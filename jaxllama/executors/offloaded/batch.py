"""The rows of an offloaded run that one program computes, and the programs of a turn's ends.

    rows = joined(rows, lengths, history)                    rows begin
    piece = TokenPiece(*next_piece(cfg, capacity, rows))     each row's newest token
    rows = append_token(fixed, rows, new, scores, ...)       each row's next token

``run`` takes the pieces through the layers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig
from jaxllama.decoding.heads import HeadDraft, HeadState
from jaxllama.decoding.rows import Fields, Rows
from jaxllama.decoding.sampling import History, SamplingParams
from jaxllama.decoding.turn import append, drawn_by, start
from jaxllama.executors.offloaded import programs
from jaxllama.executors.offloaded.cpu_attention import SplitCache
from jaxllama.executors.offloaded.layer_cache import LayerCache
from jaxllama.executors.offloaded.programs import Rope
from jaxllama.model.cache import LayerState
from jaxllama.model.records import Hidden
from jaxllama.typing import Params, Tree


@dataclasses.dataclass(frozen=True)
class TokenPiece:
    """Tokens ``[B, T]`` that pass through the model at once, of which ``lengths[B]`` are valid.

    slots: the place in the cache of one token a row, if it has one.
    of_prompt: whether the tokens are a part of prompts.
    """

    tokens: jax.Array
    lengths: jax.Array
    positions: jax.Array
    rope: Rope
    slots: jax.Array | None = None
    of_prompt: bool = False


class Verified(NamedTuple):
    """The results of a pass of ``width`` tokens a row.

    scores: ``[B width, V]``.  tokens: what recurrent states may take, by layer.
    output: ``[B width, 1, D]``: the hidden states.
    """

    scores: jax.Array
    tokens: dict[int, LayerState]
    output: Hidden


@dataclasses.dataclass
class OffloadedBatch:
    """The rows that one program computes, with their layers' states in ``caches``.

    prompts: pieces of the next step, if rows join.
    joining: bool ``[B]``: rows of this step that find the state of another row; None in a new
        batch.
    adapters: int32 ``[B]``: each row's LoRA adapter (``model.lora``); None if no row has one.
    hidden: hidden states of each piece, possibly stored.
    drafted: width of a pass that verifies drafts.
    scores: logits of that pass, ``[B width, V]``.
    tokens: tokens of that pass that recurrent states may take, by layer.
    output: hidden states of that pass, or of the prompts' last tokens.
    taps: states of each piece before the layers of ``cfg.taps``.
    head: state of a head that drafts.
    """

    rows: Rows
    sampling: SamplingParams
    caches: dict[int, LayerCache | SplitCache]
    pieces: list[TokenPiece] = dataclasses.field(default_factory=list)
    prompts: list[TokenPiece] = dataclasses.field(default_factory=list)
    joining: jax.Array | None = None
    adapters: jax.Array | None = None
    hidden: Tree = None
    live: bool = False  # a row still wants tokens
    is_used: bool = False  # rows have been in it
    drafted: int | None = None
    scores: jax.Array | None = None
    tokens: dict[int, LayerState] = dataclasses.field(default_factory=dict)
    output: Hidden | None = None
    taps: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    head: HeadState | None = None

    @property
    def reads_prompts(self) -> bool:
        return self.pieces[-1].of_prompt

    @property
    def adapters_of_tokens(self) -> jax.Array:
        """The adapters of a pass's rows, of which a draft has one a token."""
        assert self.adapters is not None
        return jnp.repeat(self.adapters, self.drafted) if self.drafted else self.adapters


@functools.partial(jax.jit, donate_argnums=0)
def joined(rows: Rows, lengths: jax.Array, history: History | None) -> Rows:
    """Return the rows, of which those with ``lengths[B] > 0`` begin anew.

    history: history of the new rows' prompts; None if no row has penalties.
    """
    is_new = lengths > 0
    fields = rows.fields
    first_four = (jnp.where(is_new, 0, field) for field in fields[:4])
    fields = fields._replace(**dict(zip(Fields._fields, first_four, strict=False)))
    if history is not None and rows.history is not None:
        history = _chosen(is_new, history, rows.history)
    return dataclasses.replace(rows, ints=fields.packed(), history=history)


@functools.partial(jax.jit, donate_argnums=0)
def cleared(state: LayerState, empty: LayerState, rows: jax.Array) -> LayerState:
    """The state, empty in ``rows[B]`` (bool)."""
    return _chosen(rows, empty, state)


def _chosen(rows: jax.Array, first: Tree, other: Tree) -> Tree:
    """The tree of ``first`` in ``rows[B]`` (bool), and of ``other`` elsewhere."""
    return jax.tree.map(
        lambda a, b: jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b), first, other
    )


@functools.partial(jax.jit, donate_argnums=0)
def without_written(rows: Rows) -> Rows:
    """Return the rows without the written tokens of their report."""
    fields = rows.fields
    blank = jnp.zeros_like(fields.count)
    return dataclasses.replace(rows, ints=fields._replace(count=blank, step=blank).packed())


@functools.partial(jax.jit, static_argnums=(0, 1))
def next_piece(cfg: ModelConfig, capacity: int, rows: Rows) -> tuple[Tree, ...]:
    """Return the fields of a decode step's TokenPiece: each row's newest token."""
    inputs = start(rows)
    first, lengths = inputs.fields.length, inputs.lengths
    positions, rope = programs.positions_of(cfg, first, first + lengths, 1)
    return inputs.tokens, lengths, positions, rope, jnp.where(lengths > 0, first, capacity)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def append_token(
    fixed: bool,
    rows: Rows,
    new: list[jax.Array],
    scores: jax.Array,
    sampling: SamplingParams,
    stop_ids: jax.Array,
) -> Rows:
    """Return the rows with the token that follows ``scores [B, V]``.

    fixed: as for ``drawn_by``.
    new: numbers of tokens ``[B]`` that each piece has added to the caches.
    """
    fields = rows.fields
    fields = fields._replace(length=fields.length + sum(new))
    rows = dataclasses.replace(rows, ints=fields.packed())
    return append(rows, scores, drawn_by(sampling, fixed), stop_ids)[0]


def read_prompts(
    draft: HeadDraft,
    params: Params,
    state: HeadState,
    pieces: list[TokenPiece],
    hidden: list[Hidden],
) -> HeadState:
    """Return the state of a head after the prompts' pieces, whose states are ``hidden``.

    The last token of a prompt has no successor yet, and is left out.
    """
    total: jax.Array = sum(piece.lengths for piece in pieces)  # type: ignore[assignment]
    seen = jnp.zeros_like(total)
    for index, (piece, x) in enumerate(zip(pieces, hidden, strict=True)):
        # Behind the last piece any token will do: ``known`` leaves it out.
        begin = pieces[index + 1].tokens[:, :1] if index + 1 < len(pieces) else piece.tokens[:, :1]
        following = jnp.concatenate([piece.tokens[:, 1:], begin], axis=1)
        known = jnp.clip(total - 1 - seen, 0, piece.lengths)
        state = _read_prompt(draft, params, state, following, x, known)
        seen = seen + piece.lengths
    return state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read_prompt(
    draft: HeadDraft,
    params: Params,
    state: HeadState,
    following: jax.Array,
    hidden: Hidden,
    lengths: jax.Array,
) -> HeadState:
    return draft.read_prompt(params, state, following, hidden, lengths)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def begin_answer(
    draft: HeadDraft, params: Params, rows: Rows, state: HeadState, last: Hidden, lengths: jax.Array
) -> Rows:
    """``HeadDraft.begin_answer``, as one program."""
    return draft.begin_answer(params, rows, state, last, lengths)
