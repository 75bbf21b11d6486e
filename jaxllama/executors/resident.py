"""Resident: the executor with all parameters on one device or a mesh, and its programs.

    rows         = start(cfg, params, tokens, lengths, layers, held, sampling, stop_ids, ...)
    rows, report = advance(cfg, params, rows, sampling, stop_ids, until)
    rows, report = advance_drafts(cfg, plan, params, draft_params, rows, ..., until, limit)

One program holds the prefill, the forward pass and the two ends of a turn (``decoding.turn``). It
donates the cache's layers, or the rows, unless the call is traced. It never donates the report.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllama import compiler_options
from jaxllama.config import ModelConfig
from jaxllama.decoding import drafts, loop
from jaxllama.decoding.forward import (
    all_logits,
    check_room,
    donated,
    fill_hidden,
    int32_ids,
    prefill_chunk,
    scores_of,
    verify,
)
from jaxllama.decoding.mtp import MTPDraft, MTPState
from jaxllama.decoding.rows import Report, Rows
from jaxllama.decoding.sampling import History, SamplingParams
from jaxllama.decoding.turn import Inputs, Pass, append, drawn_by
from jaxllama.executors.executor import Alone, Call, Executor, RowsDecoder
from jaxllama.kept import signature
from jaxllama.model import decoder, verification
from jaxllama.model.cache import Cache, LayerState, init_cache
from jaxllama.model.cpu_layout import lay_out
from jaxllama.model.lora import ROWS, for_rows
from jaxllama.model.records import Hidden
from jaxllama.model.shardings import gather_params
from jaxllama.parallel.collectives import MODEL_AXIS
from jaxllama.parallel.mesh import mesh_of, traced_mesh
from jaxllama.typing import Jitted, Params, Tree
from pallas_kernels.rows import greedy


@dataclasses.dataclass(frozen=True)
class Resident:
    """The executor with all parameters on one device, or split over the devices of ``mesh``.

    Both cases use the same programs: jax splits them by the placement of their arguments.
    """

    mesh: Mesh | None = None
    on_device: ClassVar[bool] = True
    runs_ahead: ClassVar[bool] = True

    @property
    def block_size(self) -> int | None:
        return None

    def with_params(self, params: Params) -> Executor:
        return Resident(mesh_of(params) if params else None)

    def laid_out(self, params: Params) -> Params:
        return lay_out(params)

    def whole(self, cfg: ModelConfig, params: Params) -> Params:
        if self.mesh is None:
            return params
        return gather_params(cfg, params, self.mesh.shape[MODEL_AXIS])

    def cache_options(
        self, kv_dtype: DTypeLike | None, chunk: int | None, dtype: DTypeLike | None
    ) -> tuple[Any, int | None]:
        return dtype if kv_dtype is None else kv_dtype, chunk

    def check_drafts(self, deterministic: bool) -> None:
        """Accept any draft: a pass can verify it."""

    def begin(self, cfg: ModelConfig, params: Params, call: Call) -> RowsDecoder:
        return ResidentDecoding(cfg, params, call, self._prefilled(cfg, params, call))

    def _prefilled(self, cfg: ModelConfig, params: Params, call: Call) -> Rows:
        """Return the rows after their prompts and first tokens."""
        tokens, lengths = call.tokens, call.lengths
        batch, width = tokens.shape
        chunk = None if call.alone else call.chunk or prefill_chunk(batch, width, self.mesh)
        new_cache = functools.partial(
            init_cache, cfg, batch, call.capacity, call.kv_dtype, mesh=self.mesh
        )
        asked = call.sampling, call.stop_ids
        mtp, state = None, None
        if call.drafting is not None and isinstance(call.drafting.plan.draft, MTPDraft):
            mtp = call.drafting.plan.draft
            state = mtp.begin(params, batch, call.capacity)
        if call.on_prompt is not None and chunk is not None and chunk < width:
            return start_in_pieces(
                cfg,
                params,
                tokens,
                lengths,
                new_cache(),
                *asked,
                max_new_tokens=call.room,
                chunk=chunk,
                on_prompt=call.on_prompt,
                mtp=mtp,
                state=state,
            )
        if mtp is not None:
            cache = new_cache()
            return start(
                cfg,
                params,
                tokens,
                lengths,
                cache.layers,
                cache.lengths,
                *asked,
                state,
                max_new_tokens=call.room,
                alone=call.alone,
                chunk=chunk,
                mtp=mtp,
            )
        if call.kept is None:
            cache = new_cache()
        else:
            key = "cache", repr(new_cache.args[1:])
            cache = call.kept.programs.call(key, jax.jit(new_cache), cfg=None)
        return _run(
            call,
            "start",
            start,
            cfg,
            (params, tokens, lengths, cache.layers, cache.lengths, *asked),
            {"max_new_tokens": call.room, "alone": call.alone, "chunk": chunk},
        )

    def logits(
        self, cfg: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        return all_logits(cfg, params, tokens, lengths)

    def states(
        self,
        cfg: ModelConfig,
        params: Params,
        tokens: jax.Array,
        lengths: jax.Array,
        kv_dtype: DTypeLike | None = None,
    ) -> tuple[Hidden, Params]:
        cache = None
        if kv_dtype is not None:
            batch, width = tokens.shape
            cache = init_cache(cfg, batch, width, kv_dtype, mesh=self.mesh)
        return _states(cfg, params, tokens, lengths, cache), params


@functools.partial(jax.jit, static_argnums=0)
def _states(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache | None,
) -> Hidden:
    return decoder.forward(cfg, params, tokens, lengths, cache, sparse=cache is not None)[0]


class ResidentDecoding:
    """The rows of a resident model. ``advance`` donates their arrays to the next rows."""

    def __init__(self, cfg: ModelConfig, params: Params, call: Call, rows: Rows) -> None:
        self._cfg, self._params, self._call = cfg, params, call
        self._rows = rows
        if call.drafting is not None:
            plan, draft_params = call.drafting
            prompts = call.tokens, call.lengths
            self._rows = drafts.begin(plan, draft_params, *prompts, rows, call.capacity)

    @property
    def report(self) -> Report:
        return self._rows.report

    def advance(self, until: int) -> Report:
        call = self._call
        rest = self._rows, call.sampling, call.stop_ids, np.int32(until)
        if call.drafting is None:
            loop = loop_for(self._params)
            self._rows, report = _run(call, "advance", loop, self._cfg, (self._params, *rest))
            return report
        plan, draft_params = call.drafting
        self._rows, report = draft_loop_for(self._params)(
            self._cfg, plan, self._params, draft_params, *rest, np.int32(call.limit)
        )
        return report

    def end(self, rows: np.ndarray) -> None:
        self._rows = self._rows.ended(rows)


def _run(
    call: Call,
    name: str,
    program: Jitted,
    cfg: ModelConfig,
    arguments: tuple[Tree, ...],
    static: Mapping[str, object] = MappingProxyType({}),
) -> Tree:
    """Return ``program(cfg, *arguments, **static)``, from an earlier process's compiled program if
    kept.
    """
    if call.kept is None:
        return program(cfg, *arguments, **static)
    key = name, call.kept.signature, signature(arguments[1:]), dict(static)
    return call.kept.programs.call(key, program, arguments, cfg, static)


def _prefill_alone(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    alone: Alone,
    mtp: MTPDraft | None = None,
    state: MTPState | None = None,
) -> tuple[jax.Array, Hidden, Cache, MTPState | None]:
    """Fill an empty cache like ``fill_rows``, in shapes that do not depend on the batch.

    The prompts without their last tokens are read one row after the other. One decode step of all
    rows reads the last tokens. Rows of length 0 cost nothing.

    mtp, state: as for ``start``.
    Returns (logits ``[B, V]``, hidden states of the last tokens ``[B, D]``, cache, state).
    """
    width = max(sum(alone.widths), tokens.shape[1])
    padded = jnp.pad(tokens, ((0, 0), (0, width + 1 - tokens.shape[1])))
    firsts = np.cumsum([0, *alone.widths]).tolist()

    def one(row: tuple[Tree, ...]) -> tuple[Cache, MTPState | None]:
        tokens, length, adapter, cache, state = jax.tree.map(lambda leaf: leaf[None], row)
        own = params if adapter is None else for_rows(params, adapter)

        def read(
            states: tuple[Cache, MTPState | None],
            first: jax.Array | int,
            width: int,
            fresh: bool = False,
        ) -> tuple[Cache, MTPState | None]:
            cache, state = states
            piece = lax.dynamic_slice_in_dim(tokens, first, width, axis=1)
            n_new = jnp.clip(length - 1 - first, 0, width)
            hidden, after = decoder.forward(cfg, own, piece, n_new, cache, length, fresh=fresh)
            assert after is not None
            if mtp is not None:
                assert state is not None
                following = lax.dynamic_slice_in_dim(tokens, first + 1, width, axis=1)
                state = mtp.read_prompt(params, state, following, hidden, n_new, fresh=fresh)
            return after, state

        states: tuple[Cache, MTPState | None] = cache, state
        if alone.widths:
            states = read(states, 0, alone.widths[0], fresh=True)
        if len(alone.widths) > 2:  # all but the first and the last have the same width
            middle = lambda states, first: (read(states, first, alone.widths[1]), None)  # noqa: E731
            states, _ = lax.scan(middle, states, jnp.asarray(firsts[1:-2], jnp.int32))
        if len(alone.widths) > 1:
            states = read(states, firsts[-2], alone.widths[-1])
        return jax.tree.map(lambda leaf: leaf[0], states)

    rows = padded, lengths, params.get(ROWS), cache, state
    cache, state = lax.map(lambda row: lax.cond(row[1] > 0, one, lambda row: row[3:], row), rows)
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


@donated(4, static_argnums=0, static_argnames=("max_new_tokens", "chunk", "alone", "mtp"))
def start(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    layers: tuple[LayerState, ...],
    held: jax.Array,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    state: MTPState | None = None,
    *,
    max_new_tokens: int,
    chunk: int | None = None,
    alone: Alone | None = None,
    mtp: MTPDraft | None = None,
) -> Rows:
    """Run the prefill and write the first new token, in rows with room for ``max_new_tokens``.

    A row of length 0 is empty and done from the beginning.

    layers, held: the cache's layers and lengths. The lengths are in ``Rows.ints`` afterwards, so
        their own array is not donated.
    alone: shapes in which the rows of an empty cache are read, whatever the batch and ``chunk``.
    mtp, state: a draft that reads hidden states, and its state, which becomes ``Rows.kept``.
    """
    cache = Cache(layers, held)
    tokens, lengths = int32_ids(tokens, lengths)
    if alone is not None:
        scores, last, cache, state = _prefill_alone(
            cfg, params, tokens, lengths, cache, alone, mtp, state
        )
    else:
        check_room(cache, tokens.shape[1], "tokens")
        read = None if mtp is None else functools.partial(mtp.read_prompt, params)
        last, after, state = fill_hidden(cfg, params, tokens, lengths, cache, chunk, read, state)
        scores, cache = scores_of(cfg, params, last, cache, lengths), after
    rows = _first_token(cfg, tokens, lengths, scores, cache, sampling, stop_ids, max_new_tokens)
    if mtp is None or state is None:
        return rows
    return mtp.begin_answer(params, rows, state, last, lengths)


def start_in_pieces(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    *,
    max_new_tokens: int,
    chunk: int,
    on_prompt: Callable[[int, int], None],
    mtp: MTPDraft | None = None,
    state: MTPState | None = None,
) -> Rows:
    """Run ``start`` with one call of a program for every ``chunk`` tokens of a row.

    on_prompt: called after each call as (tokens read, tokens of the longest prompt).
    """
    check_room(cache, tokens.shape[1], "tokens")
    tokens, lengths = int32_ids(tokens, lengths)
    total, longest = cache.lengths + lengths, int(jax.device_get(lengths).max())
    last = Hidden(jnp.zeros((tokens.shape[0], cfg.d_model), decoder.activation_dtype(params)))
    for first in range(0, longest, chunk):
        piece = tokens[:, first : first + chunk + 1]
        piece = jnp.pad(piece, ((0, 0), (0, chunk + 1 - piece.shape[1])))
        n_new = jnp.clip(lengths - first, 0, chunk)
        n_known = jnp.clip(lengths - 1 - first, 0, chunk)
        last, cache, state = _piece(
            cfg, params, piece, n_new, cache, total, last, state, n_known, mtp=mtp
        )
        jax.block_until_ready(last)
        on_prompt(min(first + chunk, longest), longest)
    return _after_pieces(
        cfg,
        params,
        tokens,
        lengths,
        cache.layers,
        cache.lengths,
        total,
        last,
        sampling,
        stop_ids,
        state,
        max_new_tokens=max_new_tokens,
        mtp=mtp,
    )


@functools.partial(jax.jit, static_argnums=0, static_argnames="mtp", donate_argnums=(4, 6, 7))
def _piece(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    total: jax.Array,
    last: Hidden,
    state: MTPState | None,
    known: jax.Array,
    *,
    mtp: MTPDraft | None = None,
) -> tuple[Hidden, Cache, MTPState | None]:
    """Read a piece of every row's prompt.

    tokens: ``[B, chunk + 1]``; the last column is the beginning of the next piece.
    last: ``[B, D]``: the hidden state of each row's last token so far.
    known: ``[B]``: tokens of the piece that have a successor in the prompt.
    """
    hidden, cache = decoder.forward(cfg, params, tokens[:, :-1], lengths, cache, total)
    if mtp is not None and state is not None:
        state = mtp.read_prompt(params, state, tokens[:, 1:], hidden, known)
    return hidden.last(lengths, last), cache, state


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("max_new_tokens", "mtp"), donate_argnums=4
)
def _after_pieces(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    layers: tuple[LayerState, ...],
    held: jax.Array,
    total: jax.Array,
    last: Hidden,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    state: MTPState | None,
    *,
    max_new_tokens: int,
    mtp: MTPDraft | None = None,
) -> Rows:
    before, cache = Cache(layers, total - lengths), Cache(layers, held)
    scores = scores_of(cfg, params, last, before, lengths)
    rows = _first_token(cfg, tokens, lengths, scores, cache, sampling, stop_ids, max_new_tokens)
    if mtp is None or state is None:
        return rows
    return mtp.begin_answer(params, rows, state, last, lengths)


def _first_token(
    cfg: ModelConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    scores: jax.Array,
    cache: Cache,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    max_new_tokens: int,
) -> Rows:
    """Return the rows after prompts whose last tokens have the logits ``scores [B, V]``."""
    history = History.of_prompt(tokens, lengths, cfg.vocab_size) if sampling.penalties else None
    rows = Rows.empty(lengths, cache, max_new_tokens, history)
    return append(rows, scores, drawn_by(sampling), stop_ids)[0]


_LOOP = {"static_argnums": 0, "donate_argnums": 2}


@donated(2, static_argnums=0)
def advance(
    cfg: ModelConfig,
    params: Params,
    rows: Rows,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    until: jax.Array | int,
) -> tuple[Rows, Report]:
    """Run the loop until each row has ``until`` tokens or every row has stopped."""
    until = jnp.minimum(until, rows.written.shape[2])

    def unfinished(rows: Rows) -> jax.Array:
        fields = rows.fields
        return jnp.any((fields.done == 0) & (fields.step < until))

    stops = None if sampling.features else stop_ids
    one_token = functools.partial(_one_token, cfg, params, stops)
    rows, _ = loop.run(one_token, rows, drawn_by(sampling), stop_ids, unfinished)
    return rows, rows.copied_report()


def _one_token(
    cfg: ModelConfig, params: Params, greedy_stops: jax.Array | None, rows: Rows, inputs: Inputs
) -> Pass:
    """Return the pass of plain decoding.

    greedy_stops: the stop tokens if every row is greedy; else None.
    """
    before = rows.cache_of(inputs.fields.length)
    hidden, after = decoder.forward(cfg, params, inputs.tokens, inputs.lengths, before, sparse=True)
    plan = None if greedy_stops is None else _own_end(cfg, params, hidden, greedy_stops)

    def in_one_kernel(ints: jax.Array, written: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert greedy_stops is not None  # else there is no plan
        product = decoder.head_product(cfg, params, hidden[:, 0])
        return greedy.append_greedy(
            product, ints, written, greedy_stops, capacity=before.capacity, planned=plan
        )

    return Pass(
        scores=lambda: scores_of(cfg, params, hidden[:, 0], before, inputs.live),
        commit=lambda _: after,
        greedy=None if plan is None else in_one_kernel,
        hidden=hidden,
    )


def _own_end(
    cfg: ModelConfig, params: Params, hidden: Hidden, stop_ids: jax.Array
) -> greedy.GreedyPlan | None:
    """Return the plan of the kernel that ends a greedy step after the head, or None if there is
    none.
    """
    logits = jax.ShapeDtypeStruct((hidden.x.shape[0], cfg.vocab_size), hidden.x.dtype)
    is_plain = cfg.logit_softcap is None and traced_mesh(params) is None
    return greedy.own_append(logits, stop_ids) if is_plain else None


_DRAFT_LOOP = {"static_argnums": (0, 1), "donate_argnums": 4}


@functools.partial(jax.jit, **_DRAFT_LOOP)
def advance_drafts(
    cfg: ModelConfig,
    plan: drafts.DraftPlan,
    params: Params,
    draft_params: Params | None,
    rows: Rows,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    until: jax.Array | int,
    limit: jax.Array | int,
) -> tuple[Rows, Report]:
    """Take turns until every row has ``until`` tokens or has stopped. A row may then have up to
    ``limit``.
    """

    def unfinished(rows: Rows) -> jax.Array:
        fields = rows.fields
        return jnp.any(fields.is_live(limit) & (fields.count < until))

    def pass_over(rows: Rows, inputs: Inputs) -> Pass:
        if inputs.tokens.shape[1] == 1:  # a plain step has fewer kernels; nothing is taken back
            return _one_token(cfg, params, None, rows, inputs)
        before = rows.cache_of(inputs.fields.length)
        scores, proposal = verify(cfg, params, inputs.tokens, inputs.lengths, before, plan.exact)
        return Pass(
            scores=lambda: scores.reshape(-1, scores.shape[2]),
            commit=lambda count: verification.commit(proposal, count, plan.exact),
            hidden=proposal.hidden,
        )

    observe = None
    if isinstance(plan.draft, MTPDraft):
        draft_params = params
        observe = functools.partial(plan.draft.observe, params)
    drafting = loop.Drafting(
        propose=lambda rows: drafts.propose(plan, draft_params, rows, sampling, limit),
        widths=plan.widths,
        adapts_to=plan.most if plan.adaptive else None,
    )
    rows, _ = loop.run(
        pass_over,
        rows,
        drawn_by(sampling),
        stop_ids,
        unfinished,
        limit=limit,
        drafting=drafting,
        observe=observe,
    )
    return rows, rows.copied_report()


def loop_for(params: Params) -> Callable[..., tuple[Rows, Report]]:
    """Return ``advance``, compiled with the options for the devices of (concrete) parameters."""
    return compiler_options.compiled_for(advance, mesh_of(params), **_LOOP)


def draft_loop_for(params: Params) -> Callable[..., tuple[Rows, Report]]:
    """Return ``advance_drafts``, compiled with the options for the devices of the parameters."""
    return compiler_options.compiled_for(advance_drafts, mesh_of(params), **_DRAFT_LOOP)
