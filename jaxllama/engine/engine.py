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
request the same bits whatever runs beside it, with any number of slots. They are the bits of
``lm.generate``, but for what ``docs/concepts/same-bits.md`` names.

Every request gets exactly one Event with a ``finish_reason``, its last. An error in a request's own
text, grammar or listener ends only that request, with the reason "error". An error in a step ends
the engine: every listener gets ``EngineFailed``, and ``failure`` holds the reason. After
``warm_up`` nothing is compiled. The same requests and cancellations at the same steps then give the
same bits. Before that a larger program may serve, which a GPU may round otherwise. Drafts whose
length the engine chooses end by measured times, and a pass of several tokens may round otherwise,
too.

The engine hands step k + 1 to the device before it reads the tokens of step k. It decodes step k to
text and calls the listeners while the device works. A row that ends on the device (stop tokens,
limits) decodes no further. A row that the host ends (stop strings, cancellations) generates one
more step, which is not read. A row under a grammar waits for its own results where the grammar
leaves a choice.

Parameters on a mesh (``parallel``) make an engine on that mesh: each device holds its heads of
every cache, or rows of its own (``divided``). On a mesh of several processes each has an engine
(``lockstep``). An offloaded model (``offload``) runs in ``blocks``. Left out: beam search.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from jaxllama.engine.adapters import AdapterSlots
from jaxllama.engine.admission import Admission
from jaxllama.engine.delivery import Delivery
from jaxllama.engine.grammar import Matcher
from jaxllama.engine.held import HeldModel
from jaxllama.engine.inbox import Inbox
from jaxllama.engine.options import checked_names
from jaxllama.engine.output import OnEvent, RequestOutput
from jaxllama.engine.parts import parts_of
from jaxllama.engine.request import EngineFailed, Event, FinishReason, QueueFull, Request
from jaxllama.engine.runner import Runner, Running
from jaxllama.engine.scheduler import Sequence, TurnPlan
from jaxllama.engine.stats import EngineStats, count
from jaxllama.engine.step_input import Ended, StepInput, Submitted
from jaxllama.engine.weights import replaced
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.model.eagle3 import Drafter
from jaxllama.typing import Params

_log = logging.getLogger("jaxllama.serving")
# Seconds that listeners wait at most, so that the next step reaches the device first.
HAND_OVER = 0.005
# Seconds of one step after which the engine counts as stalled. A step may compile a program. One of
# an offloaded model may read all weights from a disk, for many rows.
STALLED, STALLED_OFFLOADED = 600.0, 3600.0
IDLE = 0.01  # seconds to wait for pages that come back, if the device has nothing else to do
RECLAIM = 1.0  # seconds to wait for the end of a step, after which the step has freed slots itself


Source = str | LanguageModel | Drafter
Draft = Source | Callable[[LanguageModel], Source] | None


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
    draft : str, LanguageModel, Drafter or callable, optional
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
    on_step
        Called before each step with its input, on the engine's thread (``engine.lockstep``).

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
        self.failure: str | None = None
        self.on_step: Callable[[StepInput], None] | None = None
        draft = draft(lm) if callable(draft) else draft
        self.options, self.scheduler, self.runner = parts_of(lm, draft, options)
        self.adapters = self.runner.adapters if isinstance(self.runner, Runner) else None
        self._transfers = self.runner.transfers if isinstance(self.runner, Runner) else None
        self.admission = Admission(lm, self.options, self.scheduler, self.adapters)
        self._decoding: tuple[TurnPlan, Running] | None = None
        self.counts: collections.Counter[str] = collections.Counter()
        self._inbox = Inbox()
        observe = observe or (lambda name, seconds: None)
        parts = self.scheduler, self.runner, self._inbox, self.counts, observe
        self._delivery = Delivery(lm, *parts)
        self._held = HeldModel(lm, self.scheduler, self.runner)
        self.arrivals = 0  # requests so far
        self.steps = 0
        self.compiled = self.runner.compiled_programs()
        self._stats = self._count()
        self._stepping = threading.RLock()
        self._is_warm = False
        self._thread: threading.Thread | None = None
        self._step_began: float | None = None  # by the engine's thread; None between steps
        self._listeners: list[Callable[[], None]] = []

    @property
    def lm(self) -> LanguageModel:
        """The model with the weights of now."""
        return self._held.lm

    @property
    def asleep(self) -> bool:
        """Whether the engine sleeps."""
        return self._held.asleep

    @property
    def live(self) -> dict[str, RequestOutput]:
        """The requests in flight, by id."""
        return self._delivery.live

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
        self._check_awake()
        entry = request, on_event, self.admission.check(request), time.monotonic(), with_text
        queued = self.scheduler.waiting
        if not self._inbox.submit(request.id, entry, queued, self.options.max_queue):
            waiting = self._inbox.waiting(queued)
            raise QueueFull.of(waiting, self._retry_after(waiting))

    def _check_awake(self) -> None:
        if self.asleep:
            raise JaxLlamaError("the engine sleeps: wake it first")

    def explain(self, request: Request) -> str:
        """Return a sentence on where the beginning of a request's prompt is now.

        Parameters
        ----------
        request : Request
            A request that need not be submitted.

        Returns
        -------
        str
            Numbers of the prompt's tokens on the device, in host memory and on disk, and of those
            that are computed.
        """
        with self._stepping:
            found = self.scheduler.places(request)
        n_prompt = len(request.prompt)
        return (
            f"{n_prompt} prompt tokens: {found['device']} on the device, {found['host']} in host "
            f"memory, {found['disk']} on disk, {n_prompt - sum(found.values())} to compute"
        )

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
        self._held.resident_runner("update_params")
        lm = replaced(self.lm, params)
        with self._stepping:
            self._held.hold(lm)

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
        self._held.resident_runner("sleep")
        with self._stepping:
            if self.asleep:
                raise JaxLlamaError("the engine sleeps already")
            if self.live or len(self._inbox):
                raise JaxLlamaError("sleep: requests are in flight")
            while self._save_rest():
                pass
            self._held.sleep(weights)

    def wake(self) -> None:
        """Take requests again, behind an empty cache; nothing is compiled.

        Raises
        ------
        JaxLlamaError
            If the engine does not sleep, or its weights were dropped and not replaced.
        """
        with self._stepping:
            self._held.wake()

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

    @property
    def stalled(self) -> str | None:
        """Why the engine's thread counts as hung, or None; may be read from any thread.

        A step then takes more than ten minutes, or an hour if the model is offloaded.
        """
        began = self._step_began
        seconds = 0.0 if began is None else time.monotonic() - began
        most = STALLED if self.lm.executor.on_device else STALLED_OFFLOADED
        if seconds <= most:
            return None
        return f"the engine hangs: its step has not ended for {seconds:.0f} s"

    # Steps

    def step(self) -> bool:
        """Run one step of the engine, and return False if there was nothing to do."""
        with self._stepping:
            began = time.monotonic()
            taken = self._take_inbox()
            self._free_adapters()
            overdue = list(self.scheduler.overdue(began))
            if self.on_step is not None:
                ends = [Ended(sequence.request.id, reason) for sequence, reason in overdue]
                self.on_step(StepInput(self.steps, (*taken, *ends)))
            for sequence, reason in overdue:
                self._delivery.end_from_outside(sequence.request.id, reason)
            if not self.live:
                is_saving = self._save_rest()
                self._stats = self._count()
                self._told()
                return bool(overdue) or is_saving
            self._run()
            self.steps += 1
            self.counts["busy_ms"] += round((time.monotonic() - began) * 1000)
            self._stats = self._count()
            self._told()
            return True

    def _run(self) -> None:
        scheduler = self.scheduler
        self._delivery.look_ahead()
        plan = scheduler.plan()
        self.counts["preemptions"] += len(plan.preempted)
        self._delivery.admit(plan.admitted)
        masks = self._delivery.masks(plan)
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
        if self._transfers is not None and plan.is_idle:
            self._transfers.wait(IDLE)

    def _save_rest(self) -> bool:
        """Copy pages for the tiers while no request runs, and return whether there were some."""
        if self._transfers is None or self.asleep:
            return False
        saves = self.scheduler.saves()
        if any(saves):
            assert isinstance(self.runner, Runner)
            self.runner.save(saves)
        elif self.scheduler.has_unsaved:
            self._transfers.wait(IDLE)
        return self.scheduler.has_unsaved

    def _take(self, plan: TurnPlan, running: Running) -> None:
        """Wait for a step's results and read them, while the next step runs."""
        drawn = running.drawn.result()
        if drawn is None:
            return
        self._delivery.deliver(plan, self.runner.read(drawn))

    # Input, taken by a step

    def _take_inbox(self) -> list[Submitted | Ended]:
        """Take the requests and ends that wait, and return them."""
        taken: list[Submitted | Ended] = []
        for kind, entry in self._inbox.take():
            if kind == "submit":
                taken.append(Submitted(entry[0], entry[-1]))
                self._add(*entry)
            elif entry[0] in self.live:
                taken.append(Ended(*entry))
                self._delivery.end_from_outside(*entry)
        return taken

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
        live = self._delivery.follow(sequence, on_event, matcher, with_text)
        try:
            self._check_awake()  # it may have gone to sleep since the request was submitted
            if request.begun and self._recomputes:
                live.to_skip = len(request.begun)
            elif request.begun:
                live.begin(request.begun)
            if self.adapters is not None:
                self.adapters.number(request.adapter)
            self.scheduler.add(sequence)
        except JaxLlamaError as error:  # the request could run when it was submitted
            self._delivery.tell_end(live, "error", error=error)

    @property
    def _recomputes(self) -> bool:
        """Whether the tokens of ``Request.begun`` are generated again.

        A block's rows begin with their prompts, and a deterministic model prefills tokens in other
        programs than those that generate them.
        """
        return self.options.deterministic or not isinstance(self.runner, Runner)

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
        try:
            for request in requests:
                while self._inbox.waiting(self.scheduler.waiting) >= self.options.max_queue:
                    self.step()
                heard: list[Event] = []
                self.submit(request, heard.append)
                events[request.id] = heard
        except BaseException:
            for id in events:
                self.cancel(id)
            self.step()
            raise
        while self.step():
            pass
        return events

    def warm_up(self) -> None:
        """Compile every program in every shape. Requests in flight stay as they are."""
        with self._stepping:
            self.runner.warm_up()
            self._is_warm = True
            self.compiled = self.runner.compiled_programs()
            self._stats = self._count()

    def warm_up_behind(self) -> None:
        """Compile the programs of a first request; a thread compiles the others.

        The thread yields to requests. Until a program exists, the next larger one that does serves
        in its place. A request waits for its own program only if there is none.
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
        return dataclasses.replace(
            self._stats,
            waiting=self._inbox.waiting(self.scheduler.waiting),
            programs_missing=self.runner.missing_programs,
        )

    # The thread

    def start(self) -> None:
        """Compile the programs of a first request, then start the engine's thread.

        Raises JaxLlamaError if it has been started already.
        """
        if self._thread is not None:
            raise JaxLlamaError("the engine has been started already")
        if not self._is_warm:
            self.warm_up_behind()
        self._thread = threading.Thread(target=self._loop, name="jaxllama-engine", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while self._inbox.wait_for_work(lambda: bool(self.live or self.scheduler.has_unsaved)):
            self._step_began = time.monotonic()
            try:
                self.step()
            except BaseException as error:  # a library's panic is not an Exception
                self._fail(error)
                return
            finally:
                self._step_began = None
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
                    self._delivery.follow(sequence, on_event, matcher, with_text)
            for live in list(self.live.values()):
                self._delivery.tell_end(live, "error", error=EngineFailed(self.failure))
            self._told()
        self._inbox.wake()

    def _end_all(self) -> None:
        with self._stepping:
            for kind, entry in self._inbox.take():
                if kind == "submit":
                    self._add(*entry)
            for request_id in list(self.live):
                self._delivery.end(request_id, "cancelled")
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
        if self._thread is not None:
            self._thread.join()
        if self.failure is None:
            self._end_all()
            while self._save_rest():
                pass
        self.runner.stop()
