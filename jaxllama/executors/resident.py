"""Resident: the executor with all parameters on one device or a mesh, and its loops.

    rows, report = advance(cfg, params, rows, sampling, stop_ids, until)
    rows, report = advance_drafts(cfg, plan, params, draft_params, rows, ..., until, limit)

One program holds the forward pass and the two ends of a turn (``decoding.turn``). It donates the
rows, unless the call is traced. It never donates the report. ``prompts`` has the programs that read
prompts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllama import compiler_options
from jaxllama.config import ModelConfig
from jaxllama.decoding import drafts, gain, loop
from jaxllama.decoding.forward import (
    all_logits,
    donated,
    prefill_chunk,
    scores_of,
    verify,
)
from jaxllama.decoding.rows import Report, Rows
from jaxllama.decoding.sampling import SamplingParams
from jaxllama.decoding.turn import Inputs, Pass, drawn_by
from jaxllama.executors.executor import Call, Executor, KeptCalls, RowsDecoder
from jaxllama.executors.posting import posting
from jaxllama.executors.prompts import START, PromptBatch, start, start_in_pieces
from jaxllama.kept import Wanted, signature
from jaxllama.model import decoder, verification
from jaxllama.model.cache import Cache, cache_dtype_name, check_has_keys, init_cache
from jaxllama.model.layout import lay_out
from jaxllama.model.records import Hidden
from jaxllama.model.shardings import gather_params
from jaxllama.parallel.collectives import MODEL_AXIS
from jaxllama.parallel.mesh import mesh_of, traced_mesh
from jaxllama.typing import ArrayOrNumpy, Params, Tree
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

    @property
    def arrangement(self) -> str | None:
        if self.mesh is None:
            return None
        return "mesh " + ",".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())

    def leaves(self, params: Params) -> Iterator[tuple[str, ArrayOrNumpy]]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            yield jax.tree_util.keystr(path), leaf

    def cache_options(
        self,
        cfg: ModelConfig,
        kv_dtype: DTypeLike | None,
        chunk: int | None,
        dtype: DTypeLike | None,
    ) -> tuple[Any, int | None]:
        check_has_keys(cfg, kv_dtype=kv_dtype)
        return dtype if kv_dtype is None else cache_dtype_name(kv_dtype), chunk

    def check_drafts(self, deterministic: bool) -> None:
        """Accept any draft: a pass can verify it."""

    def begin(self, cfg: ModelConfig, params: Params, call: Call) -> RowsDecoder:
        if call.drafting is not None:
            plan, draft_params, _ = call.drafting
            cfg = cfg.replace(taps=plan.draft.taps)
            source = call.drafting._replace(params=plan.draft.weights(params, draft_params))
            call = dataclasses.replace(call, drafting=source)
        return ResidentDecoding(cfg, params, call, self._prefilled(cfg, params, call))

    def _prefilled(self, cfg: ModelConfig, params: Params, call: Call) -> Rows:
        """Return the rows after their prompts and first tokens."""
        batch, width = call.tokens.shape
        chunk = None if call.alone else call.chunk or prefill_chunk(batch, width, self.mesh)
        new_cache = functools.partial(
            init_cache, cfg, batch, call.capacity, call.kv_dtype, mesh=self.mesh
        )
        prompts = PromptBatch(call.tokens, call.lengths, call.sampling, call.stop_ids)
        begin = start
        if self.mesh is None:  # as an engine compiles its prompts
            options = compiler_options.of_fusions(cfg.fixed_sums)
            begin = compiler_options.compiled_with(options, start, donate_argnums=3, **START)
        head, state, draft_params = None, None, None
        if call.drafting is not None and call.drafting.plan.draft.reads_hidden:
            plan, draft_params, _ = call.drafting
            head = plan.draft
            state = head.begin(draft_params, batch, call.capacity)
        if call.on_prompt is not None and chunk is not None and chunk < width:
            return start_in_pieces(
                cfg,
                params,
                prompts,
                new_cache(),
                max_new_tokens=call.room,
                chunk=chunk,
                on_prompt=call.on_prompt,
                head=head,
                state=state,
                draft_params=draft_params,
            )
        # A program that knows it compiles in half of the time. On a CPU prompts keep the bits of an
        # offloaded model's, which are read behind a cache.
        fresh = jax.default_backend() != "cpu"
        if head is not None:
            cache = new_cache()
            return begin(
                cfg,
                params,
                prompts,
                cache.layers,
                cache.lengths,
                state,
                draft_params,
                max_new_tokens=call.room,
                alone=call.alone,
                chunk=chunk,
                head=head,
                fresh=fresh,
            )
        if call.kept is None:
            cache = new_cache()
        else:
            key = "cache", repr(new_cache.args[1:])
            cache = call.kept.programs.call(key, Wanted(jax.jit(new_cache), ()))
        arguments = params, prompts, cache.layers, cache.lengths
        static = {"max_new_tokens": call.room, "alone": call.alone, "chunk": chunk, "fresh": fresh}
        first = Wanted(begin, arguments, cfg, static)
        if call.kept is not None and call.room > 1:
            rows = call.kept.programs.begin(_key(call.kept, "start", first), first)
            if rows is not None:  # two threads compile both programs
                rest = rows, call.sampling, call.stop_ids, np.int32(0)
                then = Wanted(loop_for(cfg, params), (params, *rest), cfg)
                call.kept.programs.begin(_key(call.kept, "advance", then), then)
        return _run(call, "start", first)

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
        """Return hidden states and the parameters (``Executor.states``)."""
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
    """Return the hidden states ``[B, T, D]``; through a cache, V is read sparsely as in decode."""
    return decoder.forward(cfg, params, tokens, lengths, cache, sparse=cache is not None)[0]


class ResidentDecoding:
    """The rows of a resident model. ``advance`` donates their arrays to the next rows."""

    def __init__(self, cfg: ModelConfig, params: Params, call: Call, rows: Rows) -> None:
        self._cfg, self._params, self._call = cfg, params, call
        self._rows = rows
        if call.drafting is None:
            self._params = posting(cfg, params, rows.written.shape[1])
        else:
            plan, draft_params, _ = call.drafting
            prompts = call.tokens, call.lengths
            self._rows = drafts.begin(plan, draft_params, *prompts, rows, call.capacity)

    @property
    def report(self) -> Report:
        return self._rows.report

    def advance(self, until: int, how: int = gain.DRAFT) -> Report:
        call = self._call
        rest = self._rows, call.sampling, call.stop_ids, np.int32(until)
        if call.drafting is None:
            wanted = Wanted(loop_for(self._cfg, self._params), (self._params, *rest), self._cfg)
            self._rows, report = _run(call, "advance", wanted)
            return report
        plan, draft_params, _ = call.drafting
        self._rows, report = draft_loop_for(self._cfg, self._params)(
            self._cfg, plan, self._params, draft_params, *rest, np.int32(call.limit), np.int32(how)
        )
        return report

    def end(self, rows: np.ndarray) -> None:
        self._rows = self._rows.ended(rows)


def _run(call: Call, name: str, wanted: Wanted) -> Tree:
    """Run a program: an earlier process's compiled one, if it is kept."""
    if call.kept is None:
        return wanted.run()
    return call.kept.programs.call(_key(call.kept, name, wanted), wanted)


def _key(kept: KeptCalls, name: str, wanted: Wanted) -> object:
    """Return the key of a program whose first argument are the model's parameters."""
    return name, kept.signature, signature(wanted.arguments[1:]), wanted.cfg, dict(wanted.static)


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
    rows, _ = loop.run(one_token, rows, drawn_by(sampling, cfg.fixed_sums), stop_ids, unfinished)
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
    how: jax.Array | int = gain.DRAFT,
) -> tuple[Rows, Report]:
    """Take turns until every row has ``until`` tokens or has stopped. A row may then have up to
    ``limit``. how: of ``decoding.gain``.
    """
    rows = drafts.ended(rows, how) if plan.adaptive else rows

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

    drafting = loop.Drafting(
        propose=lambda rows: drafts.propose(plan, draft_params, rows, sampling, limit, how),
        widths=plan.widths,
        adapts_to=plan.most if plan.adaptive else None,
    )
    rows, _ = loop.run(
        pass_over,
        rows,
        drawn_by(sampling, cfg.fixed_sums),
        stop_ids,
        unfinished,
        limit=limit,
        drafting=drafting,
        observe=loop.observer(plan.draft, draft_params, plan.adaptive),
    )
    return rows, rows.copied_report()


def loop_for(cfg: ModelConfig, params: Params) -> Callable[..., tuple[Rows, Report]]:
    """Return ``advance``, compiled with the options for the devices of (concrete) parameters."""
    return compiler_options.compiled_for(advance, mesh_of(params), cfg.fixed_sums, **_LOOP)


def draft_loop_for(cfg: ModelConfig, params: Params) -> Callable[..., tuple[Rows, Report]]:
    """Return ``advance_drafts``, compiled with the options for the devices of the parameters."""
    return compiler_options.compiled_for(
        advance_drafts, mesh_of(params), cfg.fixed_sums, **_DRAFT_LOOP
    )
