"""An engine without a model, for tests of what is around it: same interface, same threads.

A row's tokens are letters that follow from its prompt and seed; ``hold`` stops the clock, so that a
test decides when rows move.  What was asked and cancelled is kept for the test to see.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import threading
from collections.abc import Callable

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.engine.engine import Stats
from jaxllama.serving.engine.options import EngineOptions
from jaxllama.serving.engine.output import OutputReader
from jaxllama.serving.engine.request import (
    EngineClosed,
    EngineFailed,
    Event,
    FinishReason,
    QueueFull,
    Request,
)
from jaxllama.text.tokenizer import Tokenizer


class FakeEngine:
    def __init__(self, tokenizer: Tokenizer, *, eos: int, max_len: int, max_queue: int = 8) -> None:
        self.options = EngineOptions(max_len=max_len, max_queue=max_queue)
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.finished: collections.Counter[str] = collections.Counter()
        self.break_down = False
        self.failure: str | None = None
        self.closed: str | None = None
        self.pause_at: int | None = None  # tokens after which rows stand still
        self._tokenizer, self._eos = tokenizer, eos
        self._live: dict[str, tuple] = {}
        self._changed = threading.Condition(threading.RLock())
        self._held = self._stopping = False
        self._listeners: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def hold(self, held: bool) -> None:
        with self._changed:
            self._held = held
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, 30)

    def submit(
        self, request: Request, on_event: Callable[[Event], None], *, with_text: bool = True
    ) -> None:
        if request.stop and "refuse me" in request.stop:
            raise JaxLlamaError("refused, as asked")
        with self._changed:
            if self._stopping:
                raise EngineClosed("the engine has stopped")
            if len(self._live) >= self.options.max_queue:
                raise QueueFull(len(self._live), 2.5)
            eos = () if request.ignore_eos else (self._eos,)
            reader = OutputReader(
                self._tokenizer if with_text else None, (*eos, *request.stop_token_ids),
                request.stop if with_text else (),
                least=request.min_tokens, skip_special=request.skip_special_tokens,
                include_stop=request.include_stop,
            )  # fmt: skip
            draw = random.Random(str((request.prompt, request.sampling.seed)))
            self._live[request.id] = (request, on_event, reader, draw, [])
            self.requests.append(request)
            self._changed.notify_all()

    def end(self, id: str, reason: FinishReason) -> None:
        with self._changed:
            if reason == "cancelled":
                self.cancelled.append(id)
            self._finish(id, reason)
            self._changed.notify_all()

    def listen(self, told: Callable[[], None]) -> None:
        self._listeners.append(told)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping, self.closed = True, "the engine has stopped"
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            for id in list(self._live):
                self._finish(id, "cancelled")

    def stats(self) -> Stats:
        n = len(self._live)
        figures = dict.fromkeys((field.name for field in dataclasses.fields(Stats)), 0)
        own = {"running": n, "max_slots": 16, "cache_capacity": 100}
        return Stats(**{**figures, **own, "finished": dict(self.finished)})

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or (self._live and not self._held))
                if self._stopping:
                    return
                for id in list(self._live):
                    self._step(id)

    def _step(self, id: str) -> None:
        request, _, reader, draw, tokens = self._live[id]
        if self.break_down:
            self.failure = self.closed = "the engine failed: as asked"
            self._finish(id, "error", error=EngineFailed(self.failure))
            return
        if len(tokens) == self.pause_at:
            self._changed.wait(0.01)
            return
        token = self._next(request, draw, len(tokens))
        tokens.append(token)
        _, text = reader.read([token])
        logprobs, top = (-draw.random(),), ()
        if request.logprobs:
            top = (tuple((ord("z") - i, -float(i)) for i in range(request.logprobs)),)
        event = {"tokens": (token,), "logprobs": logprobs, "top_logprobs": top}
        if reader.stopped or len(tokens) == request.max_new_tokens:
            reason = "stop" if reader.stopped else "length"
            self._finish(id, reason, text=text + reader.close(), **event)
        else:
            self._emit(id, text=text, **event)

    def _next(self, request: Request, draw: random.Random, index: int) -> int:
        token = draw.choice(b"abcdefghij ")
        return self._eos if index == 40 and not request.ignore_eos else token

    def _finish(self, id: str, reason: str, **event) -> None:
        if id in self._live:
            self.finished[reason] += 1
            self._emit(id, finish_reason=reason, **event)
            del self._live[id]
            self._changed.notify_all()

    def _emit(self, id: str, **event) -> None:
        request, on_event, _, _, tokens = self._live[id]
        n = len(tokens)
        on_event(Event(id, prompt_tokens=len(request.prompt), completion_tokens=n, **event))
        for told in self._listeners:
            told()


class ScriptedEngine(FakeEngine):
    """Every answer is what ``script`` makes of its prompt's text."""

    script: Callable[[str], str] = staticmethod(lambda prompt: "")

    def _next(self, request: Request, draw: random.Random, index: int) -> int:
        prompt = self._tokenizer.decode(request.prompt, skip_special=False)
        tokens = self._tokenizer.encode(self.script(prompt), add_special=False)
        return tokens[index] if index < len(tokens) else self._eos
