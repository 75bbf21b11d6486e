"""Engine: continuous batching of requests over one model.

    engine = Engine(lm, max_slots=16)
    engine.start()                           # a thread that runs step() while there is work
    engine.submit(request, on_event)         # from any thread; Events come on the engine's
    engine.drain(); engine.stop()

Without a thread, call ``submit`` and then ``step`` until it returns False. A step takes the
submitted requests and ends those that are overdue or cancelled. The scheduler then plans, and the
runner executes the plan (admit, fill, decode). Last, the step reads the tokens of the step before.

Contract. A request gets the tokens of ``lm.generate`` for this request alone, whatever else runs
and in whatever order. On a CPU with weights in the handlers' layout they are the same bits.
Elsewhere they are equal up to rounding (``docs/rooms/model.md``). A ``deterministic`` model gives a
request the same bits whatever runs beside it; with up to 32 slots they are the bits of
``lm.generate``.

Every request gets exactly one Event with a ``finish_reason``, its last. An error in a request's own
text, grammar or listener ends only that request, with the reason "error". An error in a step ends
the engine: every listener gets ``EngineFailed``, and ``failure`` holds the reason. After
``warm_up`` nothing is compiled. The same requests and cancellations at the same steps give the same
bits.

The engine hands step k + 1 to the device before it reads the tokens of step k. It decodes step k to
text and calls the listeners while the device works. A row that ends on the device (stop tokens,
limits) decodes no further. A row that the host ends (stop strings, cancellations) generates one
more step, which is not read. A row under a grammar waits for its own results where the grammar
leaves a choice.

Parameters on a mesh (``parallel``) make an engine on that mesh: each device holds its heads of
every cache. An offloaded model (``offload``) runs in ``blocks``. Left out: several processes behind
one engine, beam search.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxllama.engine import blocks
from jaxllama.engine.adapters import AdapterSlots
from jaxllama.engine.admission import Admission
from jaxllama.engine.grammar import Matcher, NextTokens
from jaxllama.engine.inbox import Inbox
from jaxllama.engine.options import EngineOptions, ResolvedOptions, checked_names
from jaxllama.engine.output import OnEvent, RequestOutput
from jaxllama.engine.request import EngineFailed, Event, FinishReason, QueueFull, Request
from jaxllama.engine.runner import Runner, Running, Written
from jaxllama.engine.scheduler import Scheduler, Sequence, TurnPlan
from jaxllama.engine.stats import EngineStats, count
from jaxllama.engine.weights import replaced, with_params, without_weights
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.parallel.mesh import MODEL_AXIS, mesh_of
from jaxllama.text.reader import Reader
from jaxllama.typing import Options, Params

_log = logging.getLogger("jaxllama.serving")
# Seconds that listeners wait at most, so that the next step reaches the device first.
HAND_OVER = 0.005
RECLAIM = 1.0  # seconds to wait for the end of a step, after which the step has freed slots itself


Draft = str | LanguageModel | Callable[[LanguageModel], str | LanguageModel] | None


def _back(leaf: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(leaf, shape.sharding)


def _of_slots(
    lm: LanguageModel, draft: str | LanguageModel | None, asked: Options
) -> tuple[ResolvedOptions, Scheduler, Runner]:
    """Return options, scheduler and runner of a model on a device or a mesh."""
    mesh = mesh_of(lm.params)
    devices = 1 if mesh is None else mesh.shape[MODEL_AXIS]
    drafting = lm.drafting(draft, asked.get("draft_tokens", 0))
    by = draft.config if isinstance(draft, LanguageModel) else draft
    asked = {"deterministic": lm.deterministic, **asked, "draft": by}
    wanted = EngineOptions(**asked)
    if wanted.lora_slots and mesh is not None:
        raise JaxLlamaError("lora_slots: a model on a mesh takes only merged adapters")
    adapters = AdapterSlots(
        lm.config, lm.params, lm.adapters, wanted.lora_slots, wanted.max_lora_rank
    )
    options = wanted.resolve(lm.config, lm.dtype, devices)
    runner = Runner(lm.config, lm.params, options, adapters, drafting)
    scheduler = Scheduler(
        max_slots=options.max_slots,
        pages=runner.pages,
        chunk=options.prefill_chunk,
        token_budget=options.token_budget,
        widths=options.widths,
        steps_per_call=options.steps_per_call,
        recompute=not options.deterministic,
        may_share=runner.may_share,
        reach=lambda rows: options.pass_widths(options.size(rows))[-1],
    )
    return options, scheduler, runner


class Engine:
    """Continuous batching of requests over one model.

    ``start`` begins a thread, and ``submit(request, on_event)`` takes a Request from any thread.
    ``on_event`` gets the request's Events; exactly one of them, the last, has a ``finish_reason``.
    ``drain`` waits for the requests, and ``stop`` ends the thread. Without a thread, ``generate``
    runs requests to their ends, and ``step`` runs one step.

    Parameters
    ----------
    lm : LanguageModel
        The model.
    draft : str, LanguageModel or callable, optional
        Source of drafts, as for ``lm.generate``, or a function of ``lm`` that returns one.
    observe : callable, optional
        Called as ``observe(name, seconds)``. The names are those of Notes.
    **options
        Fields of ``jaxllama.engine.options.EngineOptions``, such as max_slots, max_len and
        kv_dtype.

    Attributes
    ----------
    failure : str or None
        The error that ended the engine; None while it works.
    asleep
        Whether the engine sleeps.

    Raises
    ------
    JaxLlamaError
        If an option is unknown, out of range or contradicts another. Also if an offloaded model
        does not support it, or the model cannot use the draft.

    Notes
    -----
    A request gets the tokens that ``lm.generate`` gives it alone, up to rounding. The module
    ``jaxllama.engine.engine`` has the whole contract.

    Names for ``observe``: "queue" is the time until admission, and "prefill" from there to the
    first token. "ttft" is the time until the first token, and "itl" the time between tokens.
    "decode" is the time from the first token to the end, and "e2e" until the end.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        draft: Draft = None,
        observe: Callable[[str, float], None] | None = None,
        **options: Any,
    ) -> None:
        checked_names(options)
        self.lm = lm
        self.failure: str | None = None
        draft = draft(lm) if callable(draft) else draft
        if lm.executor.block_size is not None:
            options |= {} if draft is None else {"draft": draft}
            self.options = blocks.options_of(lm, options)
            self.scheduler: Scheduler = blocks.BlockScheduler(lm, self.options)
            self.runner: Runner | blocks.BlockRunner = blocks.BlockRunner(lm, self.options)
        else:
            self.options, self.scheduler, self.runner = _of_slots(lm, draft, options)
        self.adapters = self.runner.adapters if isinstance(self.runner, Runner) else None
        self.admission = Admission(lm, self.options, self.scheduler, self.adapters)
        self._observe = observe or (lambda name, seconds: None)
        self.live: dict[str, RequestOutput] = {}
        self._decoding: tuple[TurnPlan, Running] | None = None
        self.counts: collections.Counter[str] = collections.Counter()
        self.arrivals = 0
        self.steps = 0
        self.compiled = self.runner.compiled_programs()
        self._stats = self._count()
        self._inbox = Inbox()
        self._at_rest: Params | None = None
        self.asleep = False
        self._stepping = threading.RLock()
        self._thread: threading.Thread | None = None
        self._listeners: list[Callable[[], None]] = []

    # Input, from any thread

    def submit(self, request: Request, on_event: OnEvent, *, with_text: bool = True) -> None:
        """Queue a request.

        Parameters
        ----------
        request : Request
            The request; its id must differ from all ids in flight.
        on_event : callable
            Called with each Event on the engine's thread. A request whose listener raises ends with
            the reason "error".
        with_text : bool
            False if the listener makes the text itself. It then looks for stop strings and calls
            ``end``.

        Raises
        ------
        QueueFull
            When ``max_queue`` requests wait.
        EngineClosed
            When the engine takes no more requests.
        JaxLlamaError
            For a request that can never run, or whose id is in flight.
        """
        if self.asleep:
            raise JaxLlamaError("the engine sleeps: wake it first")
        waiting = len(self.scheduler.waiting)
        room = self.options.max_queue - waiting
        entry = request, on_event, self.admission.check(request), time.monotonic(), with_text
        if not self._inbox.submit(request.id, entry, room):
            waiting += len(self._inbox)
            raise QueueFull(waiting, self._retry_after(waiting))

    def cancel(self, request_id: str) -> None:
        """End a request; its last Event has the reason "cancelled". Unknown ids are ignored."""
        self.end(request_id, "cancelled")

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request for the caller's reason, "stop" for example. Unknown ids are ignored."""
        self._inbox.end(request_id, reason)

    @property
    def closed(self) -> str | None:
        """Why the engine takes no more requests, or None."""
        return self._inbox.closed

    def load_adapter(self, name: str, path: str | Path) -> str:
        """Read a LoRA adapter while requests run.

        Parameters
        ----------
        name : str
            Beginning of the adapter's id.
        path : str or Path
            A PEFT directory.

        Returns
        -------
        str
            The adapter's id, for ``Request.adapter``.

        Raises
        ------
        JaxLlamaError
            If the engine has no free slot (``lora_slots``), or the directory is wrong.
        """
        slots, runner = self._slots(), self.runner
        assert isinstance(runner, Runner)
        id = slots.load(name, path, self._reclaim)
        runner.params = slots.params
        return id

    def unload_adapter(self, id: str) -> None:
        """Free an adapter's slot as soon as the requests that use it have ended.

        Parameters
        ----------
        id : str
            The id that ``load_adapter`` returned.

        Raises
        ------
        JaxLlamaError
            If there is no such adapter.
        """
        self._slots().unload(id)

    def update_params(self, params: Params) -> None:
        """Replace the model's weights between two steps; no program of the engine is compiled and
        no request ends.

        Requests in flight continue with the new weights, on the cache that the old ones computed.
        Cached prefixes of the old weights are not reused. ``lm`` becomes the model with the new
        weights. A draft that is a model of its own keeps its weights.

        Parameters
        ----------
        params : dict
            Tree of the model's parameters, as ``LanguageModel.params`` before any layout: the same
            paths and shapes, with the factors of the model's adapters, if it has any. Floats are
            cast to the dtype of the weight that they replace, or rounded to its codes, as
            ``jl.quantize_params`` does without a config; a tied head too. Leaves go to the devices
            and the sharding of the leaves that they replace. The arrays stay the caller's, and the
            engine may share them: do not donate them.

        Raises
        ------
        JaxLlamaError
            If a leaf differs in path or shape, for codes that a calibration made, for offloaded
            models, and for engines with ``lora_slots``. The engine then keeps its weights.
        """
        if not isinstance(self.runner, Runner):
            raise JaxLlamaError("update_params: an offloaded model keeps its weights")
        if self.runner.adapters is not None and self.runner.adapters.n_free:
            raise JaxLlamaError("update_params: an engine with lora_slots keeps its weights")
        lm = replaced(self.lm, params)
        with self._stepping:
            self._hold(lm)
            self._at_rest = None

    def _hold(self, lm: LanguageModel) -> None:
        """Run ``lm`` from now on; no prefix of the weights before is found again."""
        assert isinstance(self.runner, Runner)
        self.lm = lm
        self.runner.params = lm.params
        if self.runner.adapters is not None:
            self.runner.adapters.params = lm.params
        self.scheduler.weights += 1

    def sleep(self, weights: Literal["keep", "host", "drop"] = "keep") -> None:
        """Free the device's memory until ``wake``; the compiled programs stay.

        The cache is freed, and its prefixes are forgotten. While it sleeps, the engine refuses
        requests and takes new weights. A draft model keeps its own.

        Parameters
        ----------
        weights : str
            "keep" leaves the weights on the device. "host" moves them to the host's memory.
            "drop" forgets them: ``update_params`` must follow before ``wake``. Weights that the
            caller refers to stay where they are, besides.

        Raises
        ------
        JaxLlamaError
            If requests are in flight, or the engine sleeps, has ``lora_slots`` or an offloaded
            model.
        """
        if weights not in ("keep", "host", "drop"):
            raise JaxLlamaError(f"weights = {weights!r}: allowed are keep, host and drop")
        if not isinstance(self.runner, Runner):
            raise JaxLlamaError("sleep: an offloaded model has its memory on the host already")
        if self.adapters is not None and self.adapters.n_free:
            raise JaxLlamaError("sleep: an engine with lora_slots keeps its weights")
        with self._stepping:
            if self.asleep:
                raise JaxLlamaError("the engine sleeps already")
            if self.live or len(self._inbox):
                raise JaxLlamaError("sleep: requests are in flight")
            self.asleep = True
            self.runner.sleep()
            if weights == "host":
                self._at_rest = jax.device_get(self.lm.params)
            if weights == "keep":
                self.scheduler.weights += 1  # the cached prefixes are gone
            else:
                self._hold(without_weights(self.lm))

    def wake(self) -> None:
        """Take requests again, behind an empty cache; nothing is compiled.

        Raises
        ------
        JaxLlamaError
            If the engine does not sleep, or its weights were dropped and not replaced.
        """
        with self._stepping:
            if not self.asleep or not isinstance(self.runner, Runner):
                raise JaxLlamaError("the engine does not sleep")
            if self._at_rest is not None:
                params = jax.tree.map(_back, self._at_rest, self.lm.params)
                self._hold(with_params(self.lm, params))
                self._at_rest = None
            elif any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(self.lm.params)):
                raise JaxLlamaError("wake: the weights were dropped; update_params gives new ones")
            self.runner.wake()
            self.asleep = False

    def _slots(self) -> AdapterSlots:
        if self.adapters is None or not self.adapters.n_free:
            raise JaxLlamaError("the engine has no slots for adapters: lora_slots is 0")
        return self.adapters

    def _reclaim(self) -> None:
        """Free the slots of unloaded adapters. A busy engine does so in its next step instead."""
        if self._stepping.acquire(timeout=RECLAIM):
            try:
                self._take_inbox()
                self._free_adapters()
            finally:
                self._stepping.release()

    def _free_adapters(self) -> None:
        if self.adapters is not None and self.adapters.has_retired:
            running = (live.sequence.request.adapter for live in self.live.values())
            self.adapters.free({id for id in running if id is not None})

    def _retry_after(self, waiting: int) -> float:
        """Estimate the seconds until a quarter of the queue is gone, at the pace so far."""
        ended, busy = self.counts["ended"], self.counts["busy_ms"] / 1000
        return max(busy / ended * waiting / 4, 1.0) if ended else 1.0

    def listen(self, listener: Callable[[], None]) -> None:
        """Add a callback that the engine's thread calls after a step has sent its events."""
        self._listeners.append(listener)

    def _told(self) -> None:
        for listener in self._listeners:
            listener()

    # Steps

    def step(self) -> bool:
        """Run one step of the engine, and return False if there was nothing to do."""
        with self._stepping:
            began = time.monotonic()
            self._take_inbox()
            self._free_adapters()
            overdue = list(self.scheduler.overdue(began))
            for sequence, reason in overdue:
                self._end_from_outside(sequence.request.id, reason)
            if not self.live:
                self._stats = self._count()
                self._told()
                return bool(overdue)
            self._run()
            self.steps += 1
            self.counts["busy_ms"] += round((time.monotonic() - began) * 1000)
            self._stats = self._count()
            self._told()
            return True

    def _run(self) -> None:
        scheduler = self.scheduler
        self._look_ahead()
        plan = scheduler.plan()
        self.counts["preemptions"] += len(plan.preempted)
        self._admitted(plan.admitted)
        masks = self._masks(plan)
        before = self._decoding
        self._decoding = plan, self.runner.run(plan, masks)
        if before is not None:
            before[1].drawn.exception()  # waits for the step
            # The device waits for the thread that hands it this step. That thread and this one
            # share a lock.
            self._decoding[1].handed.wait(HAND_OVER)
            self._take(*before)
        if not plan.budgets:
            self._told()
            self._take(*self._decoding)
            self._decoding = None

    def _look_ahead(self) -> None:
        """Update how far ahead the allowed tokens of restricted requests are known."""
        for live in list(self.live.values()):
            if live.matcher is not None:
                try:
                    live.sequence.known = live.matcher.ahead().known
                except Exception as error:
                    live.error = error
                    self._end(live.sequence.request.id, "error")

    def _masks(self, plan: TurnPlan) -> dict[Sequence, NextTokens]:
        """Return the allowed next tokens of restricted rows, after those of earlier plans."""
        masks = {}
        for sequence, budget in plan.budgets.items():
            matcher = self.live[sequence.request.id].matcher
            if matcher is not None and sequence.is_masked:
                known, told = matcher.ahead(), sequence.ahead - budget
                masks[sequence] = known._replace(forced=known.forced[told : sequence.ahead])
        return masks

    def _take(self, plan: TurnPlan, running: Running) -> None:
        """Wait for a step's results and read them, while the next step runs."""
        drawn = running.drawn.result()
        if drawn is None:
            return
        written = self.runner.read(drawn)
        now = time.monotonic()
        for sequence in plan.budgets:
            plan.settle(sequence)
            self.counts["drafted_tokens"] += written[sequence].drafted
            self.counts["accepted_tokens"] += written[sequence].accepted
            live = self.live.get(sequence.request.id)
            # The request may have ended meanwhile, and another may have its id.
            if live is not None and live.sequence is sequence and written[sequence].tokens:
                self._read(live, written[sequence], now)

    def _admitted(self, newcomers: list[Sequence]) -> None:
        now = time.monotonic()
        for sequence in newcomers:
            if not sequence.output:
                self.counts["prefix_hit_tokens"] += sequence.cached
                self._observe("queue", now - sequence.submitted)
                sequence.admitted = now

    def _read(self, live: RequestOutput, written: Written, now: float) -> None:
        """Hand a row's new tokens to its listener."""
        if live.error is not None:
            return
        try:
            news = live.read(written)
        except Exception as error:
            self._blame(live, error)
            return
        n_tokens = len(news["tokens"])
        is_first = n_tokens == len(live.sequence.output)
        seconds, live.last_time = now - live.last_time, now
        self._observe("ttft" if is_first else "itl", seconds / (1 if is_first else n_tokens))
        if is_first:
            live.first_time = now
            self._observe("prefill", now - live.sequence.admitted)
        self.counts["completion_tokens"] += n_tokens
        if live.reason is None:
            try:
                live.emit(**news)
            except Exception as error:
                self._blame(live, error)
        else:
            self._end(live.sequence.request.id, live.reason, **news)

    def _blame(self, live: RequestOutput, error: Exception) -> None:
        """Record an exception of the request's own work; the next step ends the request."""
        live.error = error
        self.cancel(live.sequence.request.id)

    def _end(self, request_id: str, reason: FinishReason, **event: Any) -> None:
        live = self.live[request_id]
        self.scheduler.finish(live.sequence)
        self.runner.drop(live.sequence)
        if live.reason is None and live.error is None:
            try:
                event["text"] = live.reader.close()
            except Exception as error:
                live.error = error
        if live.error is not None:
            reason, event = "error", {"error": live.error}
        now, sequence = time.monotonic(), live.sequence
        self._observe("e2e", now - sequence.submitted)
        if live.first_time is not None:
            self._observe("decode", now - live.first_time)
            event["times"] = (sequence.submitted, sequence.admitted, live.first_time, now)
        self._tell_end(live, reason, **event)

    def _tell_end(self, live: RequestOutput, reason: FinishReason, **event: Any) -> None:
        """Send the last event and forget the request."""
        self.counts[f"finished {reason}"] += 1
        self.counts["ended"] += 1
        with contextlib.suppress(Exception):  # the request has ended, even if its listener raises
            live.emit(finish_reason=reason, **event)
        del self.live[live.sequence.request.id]
        self._inbox.forget(live.sequence.request.id)

    # Input, taken by a step

    def _take_inbox(self) -> None:
        for kind, entry in self._inbox.take():
            if kind == "submit":
                self._add(*entry)
            elif entry[0] in self.live:
                self._end_from_outside(*entry)

    def _end_from_outside(self, request_id: str, reason: FinishReason) -> None:
        reason = reason if self.live[request_id].error is None else "error"
        self._end(request_id, reason)

    def _add(
        self,
        request: Request,
        on_event: OnEvent,
        matcher: Matcher | None,
        submitted: float,
        with_text: bool,
    ) -> None:
        sequence = Sequence(request, self.arrivals, submitted)
        self.arrivals += 1
        self.counts["prompt_tokens"] += len(request.prompt)
        live = self._follow(sequence, on_event, matcher, with_text)
        try:
            if self.adapters is not None:
                self.adapters.number(request.adapter)
            self.scheduler.add(sequence)
        except JaxLlamaError as error:  # the request could run when it was submitted
            self._tell_end(live, "error", error=error)

    def _follow(
        self, sequence: Sequence, on_event: OnEvent, matcher: Matcher | None, with_text: bool
    ) -> RequestOutput:
        request = sequence.request
        eos = () if request.ignore_eos else self.lm.config.eos_token_ids
        reader = Reader(
            self.lm.tokenizer if with_text else None,
            (*eos, *request.stop_token_ids),
            request.stop if with_text else (),
            least=request.min_tokens,
            skip_special=request.skip_special_tokens,
            include_stop=request.include_stop,
        )
        live = RequestOutput(sequence, on_event, reader, matcher, sequence.submitted)
        self.live[request.id] = live
        return live

    # Convenience

    def generate(self, requests: Iterable[Request]) -> dict[str, list[Event]]:
        """Run requests to their ends on this thread.

        Parameters
        ----------
        requests : iterable of Request
            The requests, with distinct ids.

        Returns
        -------
        dict of str to list of Event
            The events of each request, by its id.
        """
        events: dict[str, list[Event]] = {}
        for request in requests:
            self.submit(request, events.setdefault(request.id, []).append)
        while self.step():
            pass
        return events

    def warm_up(self) -> None:
        """Compile every program in every shape. Requests in flight stay as they are."""
        with self._stepping:
            self.runner.warm_up()
            self.compiled = self.runner.compiled_programs()
            self._stats = self._count()

    def warm_up_behind(self) -> None:
        """Compile the programs of a first request; a thread compiles the others.

        The thread yields to requests. A request that needs a missing program waits for that program
        only.
        """
        with self._stepping:
            self.runner.warm_up_behind(lambda: bool(self.live or len(self._inbox)))
            self.compiled = self.runner.compiled_programs()
            self._stats = self._count()

    def _count(self) -> EngineStats:
        compilations = self.runner.compiled_programs() - self.compiled
        return count(self.scheduler, self.options, self.counts, self.steps, compilations)

    def stats(self) -> EngineStats:
        """Return the figures as of the last step; may be called from any thread."""
        waiting = len(self.scheduler.waiting) + len(self._inbox)
        return dataclasses.replace(self._stats, waiting=waiting)

    # The thread

    def start(self) -> None:
        """Compile the programs of a first request, then start the engine's thread.

        Raises JaxLlamaError if it has been started already.
        """
        if self._thread is not None:
            raise JaxLlamaError("the engine has been started already")
        self.warm_up_behind()
        self._thread = threading.Thread(target=self._loop, name="jaxllama-engine", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while self._inbox.wait_for_work(lambda: bool(self.live)):
            try:
                self.step()
            except BaseException as error:  # a library's panic is not an Exception
                self._fail(error)
                return
            if not self.live:
                self._inbox.wake()

    def _fail(self, error: BaseException) -> None:
        """End the engine after a step raised.

        The state is unknown then, the scheduler's too. So this only notifies every listener and
        takes no more requests.
        """
        self.failure = f"the engine failed: {type(error).__name__}: {error}"
        _log.error("the engine failed", exc_info=error)
        self._inbox.close(self.failure)
        with self._stepping:
            for kind, entry in self._inbox.take():
                if kind == "submit":
                    request, on_event, matcher, submitted, with_text = entry
                    sequence = Sequence(request, self.arrivals, submitted)
                    self._follow(sequence, on_event, matcher, with_text)
            for live in list(self.live.values()):
                self._tell_end(live, "error", error=EngineFailed(self.failure))
            self._told()
        self._inbox.wake()

    def _end_all(self) -> None:
        with self._stepping:
            for kind, entry in self._inbox.take():
                if kind == "submit":
                    self._add(*entry)
            for request_id in list(self.live):
                self._end(request_id, "cancelled")
            self._stats = self._count()
            self._told()
        self._inbox.wake()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until those in flight are answered.

        Parameters
        ----------
        timeout : float or None
            Largest number of seconds to wait; None waits without a limit.

        Returns
        -------
        bool
            False if the timeout passed first.
        """
        self._inbox.close("the engine is shutting down")
        if self._thread is None:
            while self.step():
                pass
            return True

        return self._inbox.wait_until_idle(self._thread.is_alive, timeout)

    def stop(self) -> None:
        """End the thread; requests in flight end with the reason "cancelled"."""
        self._inbox.close("the engine has stopped")
        self._inbox.stop()
        self.runner.stop()
        if self._thread is not None:
            self._thread.join()
        if self.failure is None:
            self._end_all()
