"""Blocks: an offloaded model under the same engine, a block of rows at a time.

    options   = options_of(lm, {...})      the options of ``Engine`` that a block supports
    scheduler = BlockScheduler(lm, options)
    runner    = BlockRunner(lm, options)

Weights cross to the device once a step for all rows of a block (FlexGen's zig-zag, ``offload``). So
rows should begin and run together. A block takes the shape (``BlockShape``) of the most urgent
waiting request, and as many waiting requests of that shape as the policy computes at once. The next
block begins when the last row has ended. Before a block begins, the scheduler waits up to
``GATHER`` seconds for more requests. A step writes one token a row; rows that ended earlier stay
idle.

Contract: as the engine's. Some options are refused by name: constraints that change a row's logits
while it runs (grammars, least lengths), alternatives of tokens, and the sizes of a paged cache.
Programs are compiled when a shape first occurs.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

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
from jaxllama.executors.offloaded import run as offload_run
from jaxllama.executors.offloaded.executor import offloaded
from jaxllama.executors.offloaded.room import check_host
from jaxllama.executors.offloaded.run import OffloadRun
from jaxllama.language_model import LanguageModel
from jaxllama.text.rows import pad_rows, shapes_of

GATHER = 0.05
PAGE = 64  # unit of tokens in which the cache's use is counted
OPTIONS = ("max_len", "kv_dtype", "prefill_chunk", "max_queue")


def options_of(lm: LanguageModel, asked: dict[str, Any]) -> ResolvedOptions:
    """Return the resolved options. Raises JaxLlamaError naming an option that blocks lack."""
    executor, cfg = offloaded(lm.executor), lm.config
    policy = executor.policy
    for name, value in asked.items():
        if name not in OPTIONS and value is not None:
            rows = f"{policy.block_size} rows of a block" if name == "max_slots" else "blocks"
            raise JaxLlamaError(f"{name} = {value!r}: the policy has {rows}, and no such option")
    options = EngineOptions(**asked)
    kv_dtype, chunk = executor.cache_options(options.kv_dtype, options.prefill_chunk, lm.dtype)
    max_len = options.max_len or cfg.max_position
    if max_len > cfg.max_position:
        raise JaxLlamaError(f"max_len = {max_len}: {cfg.name} has a context of {cfg.max_position}")
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

    width, capacity, room: lengths of prompt, cache and answer, in tokens. ignores_eos: whether rows
    go on past the model's stop tokens.
    """

    width: int
    capacity: int
    room: int
    ignores_eos: bool

    @classmethod
    def of(cls, request: Request) -> BlockShape:
        shapes = shapes_of([request.prompt], request.max_new_tokens)
        return cls(*shapes, request.ignore_eos)


class BlockScheduler(Scheduler):
    """Decides which requests are in the running block and which in the next."""

    def __init__(self, lm: LanguageModel, options: ResolvedOptions) -> None:
        super().__init__(
            max_slots=options.max_slots,
            pages=KVPages(options.pages, PAGE, share=False),
            chunk=options.prefill_chunk,
            token_budget=options.token_budget,
        )
        self._lm, self._options = lm, options

    def check(self, request: Request) -> None:
        refused = {
            "grammar": request.grammar is not None,
            "allowed_token_ids": request.allowed_token_ids is not None,
            "min_tokens": request.min_tokens > 0,
            "logprobs": bool(request.logprobs),
        }
        for name in filter(refused.__getitem__, refused):
            value = getattr(request, name)
            what = "no alternatives are kept" if name == "logprobs" else "no logits are masked"
            raise JaxLlamaError(f"{name} = {value!r}: the model is offloaded, where {what}")
        shape = BlockShape.of(request)
        check_host(
            self._lm.config,
            offloaded(self._lm.executor).policy,
            (self.max_slots, shape.width),
            shape.capacity,
            self._options.kv_dtype,
            self._lm.dtype,
        )

    def plan(self) -> TurnPlan:
        self._retire()
        newcomers = [] if self.running else self._block()
        for slot, sequence in enumerate(newcomers):
            self.waiting.remove(sequence)
            self.running[slot], sequence.slot = sequence, slot
            self.pages.grow(sequence.held, self.pages.need(sequence.length + sequence.remaining))
        budgets = {sequence: 1 for sequence in self.running.values()}
        for sequence in budgets:
            sequence.ahead += 1
        return TurnPlan([], newcomers, [], newcomers, budgets, 1)

    def _block(self) -> list[Sequence]:
        """Return the requests that begin now; an empty list while others may still come."""
        if not self.waiting:
            return []
        shape = BlockShape.of(self.waiting[0].request)
        alike = [one for one in self.waiting if BlockShape.of(one.request) == shape]
        first = min(sequence.submitted for sequence in alike)
        if len(alike) < self.max_slots and time.monotonic() < first + GATHER:
            time.sleep(GATHER / 10)
            return []
        return alike[: self.max_slots]


class BlockRunner:
    """Runs each plan as one step of its block, in a thread of its own."""

    def __init__(self, lm: LanguageModel, options: ResolvedOptions) -> None:
        self._lm, self.options = lm, options
        self._rows: dict[Sequence, int] = {}
        self._run: OffloadRun | None = None
        self._told = np.zeros(0, int)  # number of each row's tokens that were handed on
        self._thread = ThreadPoolExecutor(1, "jaxllama-blocks")

    def run(self, plan: TurnPlan, masks: Any) -> Running:
        """Queue one step of the block.  masks is empty: ``BlockScheduler.check`` refuses masks."""
        handed = threading.Event()
        handed.set()  # no caller waits for a device
        drawn: Future[Any] = self._thread.submit(self._do, plan.admitted, list(plan.budgets))
        return Running(drawn, handed)

    def _do(
        self, newcomers: list[Sequence], wanted: list[Sequence]
    ) -> dict[Sequence, Written] | None:
        if not wanted:
            return None
        if newcomers:
            self._run = None  # frees its memory for the next block
            self._run = self._begin(newcomers)
            self._rows = {sequence: row for row, sequence in enumerate(newcomers)}
            self._told = np.zeros(self._run.rows, int)
            self._run.step()
        else:
            assert self._run is not None
            left = np.ones(self._run.rows, bool)
            left[[self._rows[sequence] for sequence in wanted]] = False
            self._run.end_rows(left)
            if self._run.active_batches():
                self._run.step()
        return self._written(self._run, wanted)

    def _begin(self, newcomers: list[Sequence]) -> OffloadRun:
        lm, executor = self._lm, offloaded(self._lm.executor)
        size = executor.policy.gpu_batch_size
        requests = [sequence.request for sequence in newcomers]
        shape, empty = BlockShape.of(requests[0]), -len(requests) % size
        rows = [request.prompt for request in requests] + [()] * empty
        drawn = [request.sampling for request in requests] + [Sampling()] * empty
        tokens, lengths = pad_rows(rows, shape.width)
        stop_ids = () if shape.ignores_eos else lm.config.eos_token_ids
        call = Call(
            tokens,
            lengths,
            SamplingParams.stack(drawn, lm.config.vocab_size),
            jnp.asarray(np.array(stop_ids, np.int32)),
            capacity=shape.capacity,
            room=shape.room,
            limit=max(request.max_new_tokens for request in requests),
            kv_dtype=self.options.kv_dtype,
            chunk=self.options.prefill_chunk,
        )
        return executor.run(lm.config, lm.params, call)

    def _written(self, run: OffloadRun, wanted: list[Sequence]) -> dict[Sequence, Written]:
        report = run.report
        tokens, logprobs, counts = report.tokens, report.logprobs, report.counts
        before, self._told = self._told, counts
        written = {}
        for sequence in wanted:
            row = self._rows[sequence]
            new = slice(before[row], counts[row])
            written[sequence] = Written(tokens[row, new].tolist(), logprobs[row, new].tolist())
        return written

    def read(self, drawn: Any) -> dict[Sequence, Written]:
        return drawn

    def drop(self, sequence: Sequence) -> None:
        """Do nothing: the row stays idle, because no plan names it."""

    def wait(self) -> None:
        self._thread.submit(lambda: None).result()

    def compiled_programs(self) -> int:
        programs: tuple[Any, ...] = (
            units.run_layer,
            units.embed,
            units.last_hidden,
            units.head_logits,
            offload_run.append_token,
        )
        return sum(program._cache_size() for program in programs)

    def warm_up(self) -> None:
        """Do nothing: the shapes follow from the requests."""

    def warm_up_behind(self, is_busy: Any) -> None:
        """Do nothing, as ``warm_up``."""

    def stop(self) -> None:
        """Do nothing: no thread compiles."""
