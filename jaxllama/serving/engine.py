"""Engine: continuous batching of requests over one model.

    engine = Engine(lm, max_slots=16)
    engine.start()                           # a thread that runs step() while there is work
    engine.submit(request, on_event)         # from any thread; Events come on the engine's
    engine.drain(); engine.stop()

or, without a thread, ``submit`` and then ``step`` until it returns False.  A step is: take what
came in, end what is overdue or cancelled, let the scheduler plan, prefill, insert, decode, read.

Contract.  A request's tokens are those that ``lm.generate`` gives it alone, whatever else runs and
in whatever order (up to rounding: other shapes add in other orders).  Every request gets exactly
one Event with a ``finish_reason``, its last.  After ``warm_up`` nothing is compiled.  The same
requests and cancellations at the same steps give the same bits: everything that comes in is written
to ``log``, and ``snapshot`` saves, restores and replays.

What rows have written that go on is put into words and told after the next decode has been handed
to the device, which works meanwhile; what may end an answer is read before anything is planned.

Parameters on a mesh (``parallel``) make an engine on that mesh: a device holds its heads of every
cache.  Left out: several processes behind one engine, beam search, speculative decoding.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.serving.admission import Admission
from jaxllama.serving.grammar import Matcher
from jaxllama.serving.inbox import Inbox
from jaxllama.serving.live import Live, OnEvent
from jaxllama.serving.options import EngineOptions
from jaxllama.serving.output import OutputReader
from jaxllama.serving.request import Event, FinishReason, QueueFull, Request
from jaxllama.serving.runner import Runner
from jaxllama.serving.scheduler import Scheduler, Sequence
from jaxllama.serving.snapshot import RequestLog, Script, load_state, save_state
from jaxllama.serving.stats import Stats, count


class Engine:
    """options: the fields of ``EngineOptions``.  log: a file that everything that comes in is
    appended to.  observe: called as (name, seconds) with "queue" (until admission), "ttft" (until
    the first token), "itl" (between tokens) and "e2e" (until the end)."""

    def __init__(
        self,
        lm: LanguageModel,
        *,
        log: str | Path | None = None,
        observe: Callable[[str, float], None] | None = None,
        **options: Any,
    ) -> None:
        cfg = lm.config
        self.lm = lm
        self.options = EngineOptions(**options).resolve(cfg, lm.dtype)
        self.runner = Runner(cfg, lm.params, self.options)
        self.scheduler = Scheduler(
            max_slots=self.options.max_slots,
            cache_tokens=self.options.cache_tokens,
            chunk=self.options.prefill_chunk,
            token_budget=self.options.token_budget,
            widths=self.options.widths,
            steps_per_call=self.options.steps_per_call,
            lanes=self.options.lanes,
            lookup=self._admit,
        )
        self.admission = Admission(lm, self.options, self.scheduler)
        self._observe = observe or (lambda name, seconds: None)
        self.live: dict[str, Live] = {}
        self._untold: list[Live] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.arrivals = 0
        self.steps = 0
        # What a restored engine or a replay has still to do again, and who listens.
        self.script = Script(())
        self.on_script_event: OnEvent = lambda event: None
        self.log = None if log is None else RequestLog(log, self.options)
        self.compiled = self.runner.compiled_programs()
        self._stats = count(self)
        self._inbox = Inbox()
        self._stepping = threading.RLock()  # steps and snapshots exclude each other
        self._thread: threading.Thread | None = None

    # What comes in, from any thread

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request.  on_event: called on the engine's thread; a request whose listener
        raises is cancelled.

        Raises QueueFull when ``max_queue`` requests wait, EngineClosed when no more are taken,
        JaxLlamaError for a request that can never run or an id in flight.
        """
        entry = request, on_event, self.admission.check(request), time.monotonic()
        waiting = len(self.scheduler.waiting)
        if not self._inbox.submit(request.id, entry, self.options.max_queue - waiting):
            waiting += len(self._inbox)
            raise QueueFull(waiting, self._retry_after(waiting))

    def cancel(self, request_id: str) -> None:
        """End a request; its last Event says "cancelled".  Unknown ids are ignored."""
        self._inbox.cancel(request_id)

    def _retry_after(self, waiting: int) -> float:
        """Seconds until a quarter of the queue is gone, at the pace of what has ended so far."""
        ended, busy = self.counts["ended"], self.counts["busy_ms"] / 1000
        return max(busy / ended * waiting / 4, 1.0) if ended else 1.0

    # Steps

    def step(self) -> bool:
        """Do one step; False if there was nothing to do."""
        with self._stepping:
            began = time.monotonic()
            self._take_inbox()
            if not self.live:
                self.script.expect_end(self.steps)
                self._stats = count(self)
                return False
            if not self.script:
                for sequence, reason in list(self.scheduler.overdue(began)):
                    self._record({"end": sequence.request.id, "reason": reason})
                    self._end(sequence.request.id, reason)
            if self.live:
                self._run()
            self.steps += 1
            self.counts["busy_ms"] += round((time.monotonic() - began) * 1000)
            self._stats = count(self)
            return True

    def _run(self) -> None:
        scheduler, runner = self.scheduler, self.runner
        plan = scheduler.plan()
        for sequence in plan.preempted:
            runner.drop(sequence)
            self.counts["preemptions"] += 1
        runner.fill(plan.fills)
        scheduler.move(runner.fit(scheduler.running, plan.started))
        runner.start(plan.started)
        if not plan.steps:
            self._tell()
            return
        masks = {}
        for slot, sequence in list(scheduler.running.items()):
            matcher = self.live[sequence.request.id].matcher
            if matcher is not None:
                try:
                    masks[slot] = matcher.mask()
                except JaxLlamaError as error:  # too complex a grammar, seen late
                    self._end(sequence.request.id, "error", message=str(error))
        running = dict(scheduler.running)
        decoding = runner.decode(running, masks, plan.steps, plan.wanted)
        try:
            self._tell()
        finally:  # nobody may touch the runner before
            written = decoding.result()
        now = time.monotonic()
        for slot, sequence in running.items():
            if written[slot].tokens:
                live = self.live[sequence.request.id]
                if live.accept(written[slot], now):
                    self._untold.append(live)
                else:
                    self._read(live)

    def _tell(self) -> None:
        untold, self._untold = self._untold, []
        for live in untold:
            self._read(live)

    def _admit(self, sequence: Sequence) -> int:
        cached = self.runner.lookup(sequence)
        if not sequence.output:
            sequence.cached = cached
            self.counts["prefix_hit_tokens"] += cached
            self._observe("queue", time.monotonic() - sequence.submitted)
        return cached

    def _read(self, live: Live) -> None:
        """Hand on what a row has written, if it has not been."""
        if live.unread is None:
            return
        now = live.unread.time
        news = live.read()
        n_tokens = len(news["tokens"])
        is_first = n_tokens == len(live.sequence.output)
        seconds, live.last_time = now - live.last_time, now
        self._observe("ttft" if is_first else "itl", seconds / (1 if is_first else n_tokens))
        self.counts["completion_tokens"] += n_tokens
        if live.reason is None:
            self.emit(live, **news)
        else:
            self._end(live.sequence.request.id, live.reason, **news)

    def emit(self, live: Live, **news: Any) -> None:
        if not live.emit(**news):
            self.cancel(live.sequence.request.id)

    def _end(self, request_id: str, reason: FinishReason, **event: Any) -> None:
        live = self.live.pop(request_id)
        self._read(live)
        self.scheduler.finish(live.sequence)
        self.runner.drop(live.sequence)
        self.counts[f"finished {reason}"] += 1
        self.counts["ended"] += 1
        self._observe("e2e", time.monotonic() - live.sequence.submitted)
        if live.reason is None:
            event["text"] = live.reader.close()
        self.emit(live, finish_reason=reason, **event)
        self._inbox.end(request_id)

    # The inbox, the log and the script of a replay

    def _take_inbox(self) -> None:
        for entry in self.script.at(self.steps):
            if "submit" in entry:
                request = Request.from_json(entry["submit"])
                self._add(
                    request, self.on_script_event, self.admission.check(request), time.monotonic()
                )
            elif entry["end"] in self.live:
                self._end(entry["end"], entry["reason"])
        if self.script:
            return
        for kind, entry in self._inbox.take():
            if kind == "submit":
                if self.log is not None:
                    self.log.write({"step": self.steps, "submit": entry[0].to_json()})
                self._add(*entry)
            elif entry in self.live:
                self._record({"end": entry, "reason": "cancelled"})
                self._end(entry, "cancelled")

    def _add(
        self, request: Request, on_event: OnEvent, matcher: Matcher | None, submitted: float
    ) -> None:
        sequence = Sequence(request, self.arrivals, submitted)
        self.arrivals += 1
        self.counts["prompt_tokens"] += len(request.prompt)
        self.follow(sequence, on_event, matcher)
        self.scheduler.add(sequence)

    def follow(self, sequence: Sequence, on_event: OnEvent, matcher: Matcher | None) -> Live:
        request = sequence.request
        eos = () if request.ignore_eos else self.lm.config.eos_token_ids
        reader = OutputReader(self.lm.tokenizer, eos, request.stop)
        live = Live(sequence, on_event, reader, matcher, sequence.submitted)
        self.live[request.id] = live
        self._inbox.begin(request.id)
        return live

    def _record(self, entry: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write({"step": self.steps, **entry})

    # Convenience

    def generate(self, requests: Iterable[Request]) -> dict[str, list[Event]]:
        """Run requests to their ends on this thread; the events of each."""
        events: dict[str, list[Event]] = {}
        for request in requests:
            self.submit(request, events.setdefault(request.id, []).append)
        while self.step():
            pass
        return events

    def warm_up(self) -> None:
        """Compile every program in every shape; requests in flight are left as they are."""
        with self._stepping:
            self.runner.warm_up()
            self.compiled = self.runner.compiled_programs()
            self._stats = count(self)

    def stats(self) -> Stats:
        """As of the last step; from any thread."""
        waiting = len(self.scheduler.waiting) + len(self._inbox)
        return dataclasses.replace(self._stats, waiting=waiting)

    # The thread

    def start(self) -> None:
        """Warm up and run in a thread of its own."""
        if self._thread is not None:
            raise JaxLlamaError("the engine has been started already")
        self.warm_up()
        self._thread = threading.Thread(target=self._loop, name="jaxllama-engine", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while self._inbox.wait_for_work(lambda: bool(self.live or self.script)):
            try:
                self.step()
            except Exception as error:
                self._fail(error)
                return
            if not self.live:
                self._inbox.wake()

    def _fail(self, error: Exception) -> None:
        """A step that raised has left the device state unknown: everybody is told, and no more is
        taken."""
        message = f"the engine failed: {type(error).__name__}: {error}"
        self._inbox.close(message)
        self._end_all("error", message)

    def _end_all(self, reason: FinishReason, message: str | None = None) -> None:
        with self._stepping:
            for kind, entry in self._inbox.take():
                if kind == "submit":
                    self._add(*entry)
            for request_id in list(self.live):
                self._end(request_id, reason, message=message)
            self._stats = count(self)
        self._inbox.wake()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until those in flight are answered; False if that took
        longer than ``timeout`` seconds."""
        self._inbox.close("the engine is shutting down")
        if self._thread is None:
            while self.step():
                pass
            return True

        return self._inbox.wait_until_idle(self._thread.is_alive, timeout)

    def stop(self) -> None:
        """End the thread; whatever is in flight ends as "cancelled"."""
        self._inbox.close("the engine has stopped")
        self._inbox.stop()
        if self._thread is not None:
            self._thread.join()
        self._end_all("cancelled")
        if self.log is not None:
            self.log.close()

    # Snapshots

    def save(self, path: str | Path) -> None:
        """Write the whole state, between two steps: ``restore`` goes on from there."""
        with self._stepping:
            self._take_inbox()
            self._tell()
            save_state(self, path)

    @classmethod
    def restore(
        cls,
        path: str | Path,
        lm: LanguageModel,
        on_event: OnEvent = lambda event: None,
        *,
        log: str | Path | None = None,
        observe: Callable[[str, float], None] | None = None,
    ) -> Engine:
        """The engine that ``save`` wrote, on the same model.

        on_event: listens to every request in it; first it gets, for each, what was written before.
        log: the request log of that engine; what came in after the snapshot is done again, at the
            same steps, and the log goes on.
        Raises JaxLlamaError if the file is none, or of another model.
        """
        return load_state(path, lm, on_event, log, observe=observe)
