"""Blocks: an offloaded model under the same engine, a block of rows at a time.

    options   = options_of(lm, {...})      the options of ``Engine`` that a block supports
    scheduler = BlockScheduler(lm, options)
    runner    = BlockRunner(lm, options)

Weights cross to the device once a step for all rows of a block (FlexGen's zig-zag, ``offload``). So
rows should run together. A block takes the shape (``BlockShape``) of the most urgent waiting
request. It takes waiting requests that fit this shape, up to the number that the policy computes at
once. Before a block begins, the scheduler waits up to ``GATHER`` seconds for more requests. A step
writes one token a row.

A waiting request takes the place of a row that has ended or was cancelled. The next step reads its
prompt and writes its first token in the pass of the other rows' step. A request that does not fit
the block's shape lets none overtake it. So the block comes to its end, and the next one has the
shape of that request.

Contract: as the engine's. Some options are refused by name: constraints that change a row's logits
while it runs (grammars, least lengths), alternatives of tokens, and the sizes of a paged cache. So
is a deterministic model: a block's shape follows from the request that began it.
Programs are compiled when a shape first occurs.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.engine.options import EngineOptions, ResolvedOptions
from jaxllama.engine.pages import KVPages
from jaxllama.engine.request import Request
from jaxllama.engine.runner import Running, Written
from jaxllama.engine.scheduler import Scheduler, Sequence, TurnPlan
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.executor import Call
from jaxllama.executors.offloaded import programs as units
from jaxllama.executors.offloaded.batch import append_token
from jaxllama.executors.offloaded.executor import offloaded
from jaxllama.executors.offloaded.room import check_host
from jaxllama.executors.offloaded.run import OffloadRun
from jaxllama.language_model import LanguageModel
from jaxllama.model.lora import for_rows
from jaxllama.text.rows import pad_rows, shapes_of, short
from jaxllama.typing import Jitted, Options, Tree

GATHER = 0.05
PAGE = 64  # unit of tokens in which the cache's use is counted
OPTIONS = ("max_len", "kv_dtype", "prefill_chunk", "max_queue")


def options_of(lm: LanguageModel, asked: Options) -> ResolvedOptions:
    """Return the resolved options. Raises JaxLlamaError naming an option that blocks lack."""
    executor, cfg = offloaded(lm.executor), lm.config
    policy = executor.policy
    if lm.deterministic:
        raise JaxLlamaError(
            "deterministic = True: the request that begins a block decides the shapes of all its "
            "rows: load the model without, or call generate"
        )
    for name, value in asked.items():
        if name not in OPTIONS and value is not None:
            why = "an engine of an offloaded model has no such option; leave it out"
            if name == "draft":
                why = (
                    "rows join the block of an offloaded model one by one, and drafts begin with "
                    "all of them: leave it out, or call generate(draft=)"
                )
            elif name == "max_slots":
                why = (
                    f"with a policy the slots are the {policy.block_size} rows of its block: "
                    "set gpu_batch_size and num_gpu_batches there"
                )
            raise JaxLlamaError(f"{name} = {short(value)}: {why}")
    options = EngineOptions(**asked)
    kv_dtype, chunk = executor.cache_options(cfg, options.kv_dtype, options.prefill_chunk, lm.dtype)
    options.check_context(cfg)
    max_len = options.max_len or cfg.max_position
    return ResolvedOptions(
        max_slots=policy.block_size,
        max_len=max_len,
        kv_dtype=jnp.dtype(kv_dtype).name,
        cache_tokens=policy.block_size * -(-max_len // PAGE) * PAGE,
        memory_share=options.memory_share,
        page_size=PAGE,
        prefix_cache=False,
        prefill_chunk=chunk,
        prefill_rows=policy.block_size,
        token_budget=policy.block_size * max_len,
        max_queue=options.max_queue,
        steps_per_call=1,
        deterministic=False,
        snapshots=0,
        draft=None,
        draft_tokens=0,
    )


class BlockShape(NamedTuple):
    """The properties that all rows of a block share.

    capacity: number of tokens that the cache holds of a row. ignores_eos: whether rows go on past
    the model's stop tokens.
    """

    capacity: int
    ignores_eos: bool

    @classmethod
    def of(cls, request: Request) -> BlockShape:
        _, capacity, _ = shapes_of([request.prompt], request.max_new_tokens)
        return cls(capacity, request.ignore_eos)

    def fits(self, request: Request) -> bool:
        """Whether a row of such a block can serve the request."""
        shape = BlockShape.of(request)
        return shape.capacity <= self.capacity and shape.ignores_eos == self.ignores_eos


class BlockScheduler(Scheduler):
    """Decides which requests begin a block and which join it."""

    def __init__(self, lm: LanguageModel, options: ResolvedOptions) -> None:
        super().__init__(
            max_slots=options.max_slots,
            pages=KVPages(options.pages, PAGE, share=False),
            chunk=options.prefill_chunk,
            token_budget=options.token_budget,
        )
        self._lm, self._options = lm, options
        self._shape: BlockShape | None = None  # of the running block

    def check(self, request: Request) -> None:
        refused = {
            "grammar": request.grammar is not None,
            "allowed_token_ids": request.allowed_token_ids is not None,
            "forced": request.forced is not None,
            "min_tokens": request.min_tokens > 0,
            "logprobs": bool(request.logprobs),
        }
        for name in filter(refused.__getitem__, refused):
            value = getattr(request, name)
            what = "no alternatives are kept" if name == "logprobs" else "no logits are masked"
            raise JaxLlamaError(f"{name} = {short(value)}: the model is offloaded, where {what}")
        width, capacity, _ = shapes_of([request.prompt], request.max_new_tokens)
        check_host(
            self._lm.config,
            offloaded(self._lm.executor).policy,
            (self.max_slots, width),
            capacity,
            self._options.kv_dtype,
            self._lm.dtype,
        )

    def plan(self) -> TurnPlan:
        self._retire()
        newcomers = []
        for sequence in self._joining() if self.running else self._block():
            pages = self.pages.need(sequence.length + sequence.remaining)
            if len(self.running) == self.max_slots or pages > self.pages.available:
                break
            slot = next(slot for slot in range(self.max_slots) if slot not in self.running)
            self.waiting.remove(sequence)
            self.running[slot], sequence.slot = sequence, slot
            self.pages.grow(sequence.held, pages)
            newcomers.append(sequence)
        budgets = {sequence: 1 for sequence in self.running.values()}
        for sequence in budgets:
            sequence.ahead += 1
        return TurnPlan([], newcomers, [], newcomers, budgets, 1)

    def _block(self) -> list[Sequence]:
        """Return the requests that begin now; an empty list while others may still come."""
        if not self.waiting:
            return []
        self._shape = BlockShape.of(self.waiting[0].request)
        fitting = [candidate for candidate in self.waiting if self._shape.fits(candidate.request)]
        first = min(sequence.submitted for sequence in fitting)
        if len(fitting) < self.max_slots and time.monotonic() < first + GATHER:
            time.sleep(GATHER / 10)
            return []
        return fitting

    def _joining(self) -> list[Sequence]:
        """Return the requests that may join; no request overtakes one that does not fit."""
        shape = self._shape
        assert shape is not None
        return list(itertools.takewhile(lambda waiting: shape.fits(waiting.request), self.waiting))


class BlockRunner:
    """Runs each plan as one step of its block, in a thread of its own."""

    def __init__(self, lm: LanguageModel, options: ResolvedOptions) -> None:
        self._lm, self.options = lm, options
        # The request of each row; None for a row that has ended.
        self._requests: list[Request | None] = [None] * options.max_slots
        self._run: OffloadRun | None = None
        self._thread = ThreadPoolExecutor(1, "jaxllama-blocks")

    def run(self, plan: TurnPlan, masks: Mapping[Sequence, object]) -> Running:
        """Queue one step of the block.  masks is empty: ``BlockScheduler.check`` refuses masks."""
        handed = threading.Event()
        handed.set()  # no caller waits for a device
        rows = {sequence: sequence.own_slot for sequence in plan.budgets}
        drawn: Future[Tree] = self._thread.submit(self._do, plan.admitted, rows)
        return Running(drawn, handed)

    def _do(
        self, newcomers: list[Sequence], rows: dict[Sequence, int]
    ) -> dict[Sequence, Written] | None:
        """Return the tokens of a step; rows: those of all sequences that take part."""
        if not rows:
            return None
        goes_on = [row for sequence, row in rows.items() if sequence not in newcomers]
        left = np.ones(len(self._requests), bool)
        left[goes_on] = False
        for row in np.flatnonzero(left):
            self._requests[row] = None
        for sequence in newcomers:
            self._requests[rows[sequence]] = sequence.request
        prompts = [rows[sequence] for sequence in newcomers]
        if not goes_on:
            self._run = None  # frees its memory for the next block
            self._run = self._begin(newcomers[0].request, prompts)
        else:
            assert self._run is not None
            self._run.end_rows(left)
            self._run.forget_written()
            if prompts:
                self._run.join(*self._batch(prompts))
        if self._run.active_batches():
            self._run.step()
        return self._written(self._run, rows)

    def _begin(self, first: Request, rows: list[int]) -> OffloadRun:
        """Return a block in the shape of the request ``first``, which begins with these rows."""
        lm, shape = self._lm, BlockShape.of(first)
        tokens, lengths, sampling, adapters = self._batch(rows)
        stop_ids = () if shape.ignores_eos else lm.config.eos_token_ids
        call = Call(
            tokens,
            lengths,
            sampling,
            jnp.asarray(np.array(stop_ids, np.int32)),
            capacity=shape.capacity,
            room=1,
            limit=sys.maxsize,
            kv_dtype=self.options.kv_dtype,
            chunk=self.options.prefill_chunk,
        )
        params = lm.params if adapters is None else for_rows(lm.params, adapters)
        return offloaded(lm.executor).run(lm.config, params, call)

    def _batch(
        self, rows: list[int]
    ) -> tuple[jax.Array, jax.Array, SamplingParams, jax.Array | None]:
        """Return tokens ``[B, T]`` and lengths ``[B]`` of the prompts of ``rows``, and sampling and
        adapters of all rows.  The other rows have length 0."""
        lm = self._lm
        prompts = [
            () if request is None or row not in rows else request.prompt
            for row, request in enumerate(self._requests)
        ]
        sampling = [Sampling() if row is None else row.sampling for row in self._requests]
        adapters = None
        if lm.adapters:
            names = [None if row is None else row.adapter for row in self._requests]
            adapters = jnp.asarray([lm.adapter_number(name) for name in names], jnp.int32)
        return *pad_rows(prompts), SamplingParams.stack(sampling, lm.config.vocab_size), adapters

    def _written(self, run: OffloadRun, rows: dict[Sequence, int]) -> dict[Sequence, Written]:
        report = run.report
        written = {}
        for sequence, row in rows.items():
            new = slice(report.counts[row])
            tokens, logprobs = report.tokens[row, new], report.logprobs[row, new]
            written[sequence] = Written(tokens.tolist(), logprobs.tolist())
        return written

    def read(self, drawn: Tree) -> dict[Sequence, Written]:
        return drawn

    def drop(self, sequence: Sequence) -> None:
        """Do nothing: the row stays idle, because no plan names it."""

    def wait(self) -> None:
        self._thread.submit(lambda: None).result()

    missing_programs = 0

    def compiled_programs(self) -> int:
        programs: tuple[Jitted, ...] = (
            units.run_layer,
            units.embed,
            units.last_hidden,
            units.head_logits,
            append_token,
        )
        return sum(program._cache_size() for program in programs)

    def warm_up(self) -> None:
        """Do nothing: the shapes follow from the requests."""

    def warm_up_behind(self, is_busy: Callable[[], bool]) -> None:
        """Do nothing, as ``warm_up``."""

    def stop(self) -> None:
        """Do nothing: no thread compiles."""
