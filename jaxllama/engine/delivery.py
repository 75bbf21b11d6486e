"""Requests in flight: their tokens on the way to their listeners, and their ends.

    delivery.follow(sequence, on_event, ...)     a request, from now on
    delivery.masks(plan)                         the allowed next tokens of rows under a grammar
    delivery.deliver(plan, written)              a step's tokens, to text and to the listeners
    delivery.end(id, reason)                     its last event; scheduler and runner drop it

All of it runs on the engine's thread. An error in a request's own text, grammar or listener ends
only that request.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxllama.engine.blocks import BlockRunner
from jaxllama.engine.divided import AnyScheduler
from jaxllama.engine.grammar import Matcher, NextTokens
from jaxllama.engine.inbox import Inbox
from jaxllama.engine.output import OnEvent, RequestOutput
from jaxllama.engine.request import FinishReason
from jaxllama.engine.runner import Runner, Written
from jaxllama.engine.scheduler import Sequence, TurnPlan
from jaxllama.language_model import LanguageModel
from jaxllama.text.reader import Reader


class Delivery:
    """The requests that an engine runs, by id, and what their listeners hear.

    counts: the engine's totals, to which this adds. observe: called with a name and seconds, as
    ``Engine`` describes them.
    """

    def __init__(
        self,
        lm: LanguageModel,
        scheduler: AnyScheduler,
        runner: Runner | BlockRunner,
        inbox: Inbox,
        counts: collections.Counter[str],
        observe: Callable[[str, float], None],
    ) -> None:
        self.live: dict[str, RequestOutput] = {}
        # Not the model, whose weights an engine may free.
        self._tokenizer, self._eos = lm.tokenizer, lm.config.eos_token_ids
        self._scheduler, self._runner, self._inbox = scheduler, runner, inbox
        self._counts, self._observe = counts, observe

    def look_ahead(self) -> None:
        """Update how far ahead the allowed tokens of restricted requests are known."""
        for live in list(self.live.values()):
            if live.matcher is not None:
                try:
                    live.sequence.known = live.matcher.ahead().known
                except Exception as error:
                    live.error = error
                    self.end(live.sequence.request.id, "error")

    def masks(self, plan: TurnPlan) -> dict[Sequence, NextTokens]:
        """Return the allowed next tokens of restricted rows, after those of earlier plans."""
        masks = {}
        for sequence, budget in plan.budgets.items():
            matcher = self.live[sequence.request.id].matcher
            if matcher is not None and sequence.is_masked:
                known, received = matcher.ahead(), sequence.ahead - budget
                masks[sequence] = known._replace(forced=known.forced[received : sequence.ahead])
        return masks

    def deliver(self, plan: TurnPlan, written: Mapping[Sequence, Written]) -> None:
        """Read the tokens of a step that has been computed."""
        now = time.monotonic()
        for sequence in plan.budgets:
            plan.settle(sequence)
            self._counts["drafted_tokens"] += written[sequence].drafted
            self._counts["accepted_tokens"] += written[sequence].accepted
            live = self.live.get(sequence.request.id)
            # The request may have ended meanwhile, and another may have its id.
            if live is not None and live.sequence is sequence and written[sequence].tokens:
                self._read(live, written[sequence], now)

    def admit(self, newcomers: list[Sequence]) -> None:
        """Count the requests that a plan has admitted."""
        now = time.monotonic()
        for sequence in newcomers:
            if not sequence.admitted:
                self._counts["prefix_hit_tokens"] += sequence.cached
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
        if not n_tokens:  # all of them are the listener's already
            if live.reason is not None:  # and the answer has ended among them
                self.end(live.sequence.request.id, live.reason, **news)
            return
        is_first = live.first_time is None
        seconds, live.last_time = now - live.last_time, now
        self._observe("ttft" if is_first else "itl", seconds / (1 if is_first else n_tokens))
        if is_first:
            live.first_time = now
            self._observe("prefill", now - live.sequence.admitted)
        self._counts["completion_tokens"] += n_tokens
        if live.reason is None:
            try:
                live.emit(**news)
            except Exception as error:
                self._blame(live, error)
        else:
            self.end(live.sequence.request.id, live.reason, **news)

    def _blame(self, live: RequestOutput, error: Exception) -> None:
        """Record an exception of the request's own work; the next step ends the request."""
        live.error = error
        self._inbox.end(live.sequence.request.id, "cancelled")

    def end(self, request_id: str, reason: FinishReason, **event: Any) -> None:
        """End a request; event: fields of its last Event."""
        live = self.live[request_id]
        self._scheduler.finish(live.sequence)
        self._runner.drop(live.sequence)
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
        self.tell_end(live, reason, **event)

    def tell_end(self, live: RequestOutput, reason: FinishReason, **event: Any) -> None:
        """Send the last event and forget the request."""
        self._counts[f"finished {reason}"] += 1
        self._counts["ended"] += 1
        with contextlib.suppress(Exception):  # the request has ended, even if its listener raises
            live.emit(finish_reason=reason, **event)
        del self.live[live.sequence.request.id]
        self._inbox.forget(live.sequence.request.id)

    def end_from_outside(self, request_id: str, reason: FinishReason) -> None:
        """End a request for a caller's reason, or for the error that it has met."""
        reason = reason if self.live[request_id].error is None else "error"
        self.end(request_id, reason)

    def follow(
        self, sequence: Sequence, on_event: OnEvent, matcher: Matcher | None, with_text: bool
    ) -> RequestOutput:
        """Return the output of a request that is in flight from now on."""
        request = sequence.request
        eos = () if request.ignore_eos else self._eos
        reader = Reader(
            self._tokenizer if with_text else None,
            (*eos, *request.stop_token_ids),
            request.stop if with_text else (),
            least=request.min_tokens,
            skip_special=request.skip_special_tokens,
            include_stop=request.include_stop,
        )
        live = RequestOutput(sequence, on_event, reader, matcher, sequence.submitted)
        self.live[request.id] = live
        return live
