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

Left out: several processes or GPUs behind one engine, beam search, speculative decoding.
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
from jaxllama.serving import slots as device
from jaxllama.serving.grammar import GrammarCompiler, Matcher
from jaxllama.serving.live import Live, OnEvent
from jaxllama.serving.options import EngineOptions
from jaxllama.serving.output import OutputReader
from jaxllama.serving.request import Event, FinishReason, QueueFull, Request
from jaxllama.serving.runner import Runner, compiled_programs
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
            steps_per_call=self.options.steps_per_call,
            lanes=self.options.lanes,
            lookup=self._admit,
        )
        self._grammars = GrammarCompiler(lm.tokenizer, cfg.vocab_size, cfg.eos_token_ids)
        self._observe = observe or (lambda name, seconds: None)
        self.live: dict[str, Live] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.arrivals = 0
        self.steps = 0
        # What a restored engine or a replay has still to do again, and who listens.
        self.script = Script(())
        self.on_script_event: OnEvent = lambda event: None
        self.log = None if log is None else RequestLog(log, self.options)
        self.compiled = compiled_programs()
        self._stats = count(self)
        # Guards the inbox and the ids; steps and snapshots exclude each other by _stepping.
        self._inbox_lock = threading.Condition()
        self._stepping = threading.RLock()
        self._inbox: collections.deque[tuple[str, Any]] = collections.deque()
        self._ids: set[str] = set()
        self._closed: str | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    # What comes in, from any thread

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request.  on_event: called on the engine's thread; a request whose listener
        raises is cancelled.

        Raises QueueFull when ``max_queue`` requests wait, JaxLlamaError for a request that can
        never run, an id in flight, or an engine that takes no more.
        """
        matcher = self._check(request)
        with self._inbox_lock:
            if self._closed is not None:
                raise JaxLlamaError(self._closed)
            if request.id in self._ids:
                raise JaxLlamaError(f"request id {request.id!r} is in flight already")
            waiting = len(self.scheduler.waiting) + len(self._inbox)
            if waiting >= self.options.max_queue:
                raise QueueFull(waiting, self._retry_after(waiting))
            self._ids.add(request.id)
            self._inbox.append(("submit", (request, on_event, matcher, time.monotonic())))
            self._inbox_lock.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request; its last Event says "cancelled".  Unknown ids are ignored."""
        with self._inbox_lock:
            if request_id in self._ids:
                self._inbox.append(("cancel", request_id))
                self._inbox_lock.notify_all()

    def _check(self, request: Request) -> Matcher | None:
        cfg, n_prompt = self.lm.config, len(request.prompt)
        for token in request.prompt:
            if not 0 <= token < cfg.vocab_size:
                raise JaxLlamaError(
                    f"token id {token} is outside the vocabulary of {cfg.vocab_size}"
                )
        if n_prompt + request.max_new_tokens > self.options.max_len:
            raise JaxLlamaError(
                f"{n_prompt} prompt tokens and {request.max_new_tokens} new ones exceed the "
                f"engine's limit of {self.options.max_len}"
            )
        if request.stop and self.lm.tokenizer is None:
            raise JaxLlamaError(f"stop strings need a tokenizer, and {cfg.name} has none")
        self.scheduler.check(request)
        device.check_sampling(request.sampling, cfg.vocab_size)
        return None if request.grammar is None else self._grammars.matcher(request.grammar)

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
        for sequence in plan.started:
            runner.start(sequence)
        if not plan.steps:
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
        drawn = runner.decode(running, masks, plan.steps, plan.is_contended)
        now = time.monotonic()
        for slot, sequence in running.items():
            self._read(self.live[sequence.request.id], drawn, slot, now)

    def _admit(self, sequence: Sequence) -> int:
        cached = self.runner.lookup(sequence)
        if not sequence.output:
            sequence.cached = cached
            self.counts["prefix_hit_tokens"] += cached
            self._observe("queue", time.monotonic() - sequence.submitted)
        return cached

    def _read(self, live: Live, drawn: device.Drawn, slot: int, now: float) -> None:
        """Hand on what a row has written."""
        is_first = not live.sequence.output
        news = live.read(drawn, slot)
        if news is None:
            return
        n_tokens = len(news["tokens"])
        seconds, live.last_time = now - live.last_time, now
        self._observe("ttft" if is_first else "itl", seconds / (1 if is_first else n_tokens))
        self.counts["completion_tokens"] += n_tokens
        if live.reason is None:
            self._emit(live, **news)
        else:
            self._end(live.sequence.request.id, live.reason, **news)

    def _emit(self, live: Live, **news: Any) -> None:
        if not live.emit(**news):
            self.cancel(live.sequence.request.id)

    def _end(self, request_id: str, reason: FinishReason, **event: Any) -> None:
        live = self.live.pop(request_id)
        self.scheduler.finish(live.sequence)
        self.runner.drop(live.sequence)
        self.counts[f"finished {reason}"] += 1
        self.counts["ended"] += 1
        self._observe("e2e", time.monotonic() - live.sequence.submitted)
        if live.reason is None:
            event["text"] = live.reader.close()
        self._emit(live, finish_reason=reason, **event)
        with self._inbox_lock:
            self._ids.discard(request_id)

    # The inbox, the log and the script of a replay

    def _take_inbox(self) -> None:
        for entry in self.script.at(self.steps):
            if "submit" in entry:
                request = Request.from_json(entry["submit"])
                self._add(request, self.on_script_event, self._check(request), time.monotonic())
            elif entry["end"] in self.live:
                self._end(entry["end"], entry["reason"])
        if self.script:
            return
        with self._inbox_lock:
            taken, self._inbox = self._inbox, collections.deque()
        for kind, entry in taken:
            if kind == "submit":
                self._record({"submit": entry[0].to_json()})
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
        self._follow(sequence, on_event, matcher)
        self.scheduler.add(sequence)

    def _follow(self, sequence: Sequence, on_event: OnEvent, matcher: Matcher | None) -> Live:
        request = sequence.request
        eos = () if request.ignore_eos else self.lm.config.eos_token_ids
        reader = OutputReader(self.lm.tokenizer, eos, request.stop)
        live = Live(sequence, on_event, reader, matcher, sequence.submitted)
        self.live[request.id] = live
        with self._inbox_lock:
            self._ids.add(request.id)
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
            self.compiled = compiled_programs()
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
        while True:
            with self._inbox_lock:
                while not (self._stopping or self._inbox or self.live or self.script):
                    self._inbox_lock.wait()
                if self._stopping:
                    return
            try:
                self.step()
            except Exception as error:
                self._fail(error)
                return
            if not self.live:
                with self._inbox_lock:
                    self._inbox_lock.notify_all()

    def _fail(self, error: Exception) -> None:
        """A step that raised has left the device state unknown: everybody is told, and no more is
        taken."""
        message = f"the engine failed: {type(error).__name__}: {error}"
        self._close(message)
        self._end_all("error", message)

    def _close(self, reason: str) -> None:
        with self._inbox_lock:
            self._closed = self._closed or reason
            self._inbox_lock.notify_all()

    def _end_all(self, reason: FinishReason, message: str | None = None) -> None:
        with self._stepping:
            with self._inbox_lock:
                taken, self._inbox = self._inbox, collections.deque()
            for kind, entry in taken:
                if kind == "submit":
                    self._add(*entry)
            for request_id in list(self.live):
                self._end(request_id, reason, message=message)
            self._stats = count(self)
        with self._inbox_lock:
            self._inbox_lock.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until those in flight are answered; False if that took
        longer than ``timeout`` seconds."""
        self._close("the engine is shutting down")
        if self._thread is None:
            while self.step():
                pass
            return True

        def is_idle() -> bool:
            alive = self._thread is not None and self._thread.is_alive()
            return not alive or not (self._ids or self._inbox)

        with self._inbox_lock:
            return self._inbox_lock.wait_for(is_idle, timeout)

    def stop(self) -> None:
        """End the thread; whatever is in flight ends as "cancelled"."""
        self._close("the engine has stopped")
        with self._inbox_lock:
            self._stopping = True
            self._inbox_lock.notify_all()
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

    def revive(self, entry: dict[str, Any], on_event: OnEvent) -> Sequence:
        """A snapshot's entry of one request, back where it was."""
        request = Request.from_json(entry["request"])
        sequence = Sequence(
            request, entry["order"], time.monotonic(), list(entry["output"]), None,
            entry["filled"], entry["cached"],
        )  # fmt: skip
        live = self._follow(sequence, on_event, self._check(request))
        live.logprobs += entry["logprobs"]
        _, text = live.reader.read(sequence.output)
        if live.matcher is not None:
            live.matcher.read(sequence.output)
        self.scheduler.put(sequence, entry["slot"], entry["is_prefilling"])
        if sequence.output:
            self._emit(
                live,
                tokens=tuple(sequence.output),
                text=text,
                logprobs=tuple(live.logprobs),
            )
        return sequence
