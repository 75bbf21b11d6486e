"""One call on its way: the events of its requests become an answer, whole or streamed.

    run = Run(kind, call, stream, fields, finish)
    await run.whole()              the answer object; ApiError when the engine fails or is stopped
    EventStream(run, body)         an ASGI response that sends it as it is made

Contract.  ``finish(id, answer)`` is called once, when the end is certain: answered, failed, or left
by its client (then the rows are cancelled).  answer is None when the engine was stopped meanwhile:
then it is still owed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from jaxllama.serving import responses
from jaxllama.serving.dispatcher import Stream
from jaxllama.serving.gate import CLIENT_GONE, ClientGone, json_line, unless_disconnected
from jaxllama.serving.openai_api import Call
from jaxllama.serving.request import Event
from jaxllama.serving.request_bodies import ApiError, Chat, Completion

Finish = Callable[[str, Callable[[], dict[str, Any]] | None], None]


class Run:
    """One call on its way: follows the events, keeps the answer, and reports its end once."""

    def __init__(
        self, kind: str, call: Call, stream: Stream, fields: dict[str, Any], finish: Finish
    ) -> None:
        self.kind, self.call, self._stream, self._finish = kind, call, stream, finish
        self._answer, self._fields, self._ended = responses.Answer(call), fields, False

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(choice, event) until all is said.  ApiError when the engine fails or is stopped."""
        try:
            async for event in self._stream:
                if event.finish_reason == "error":
                    message = event.message or "the engine failed"
                    error = ApiError(500, message, code="engine_failed")
                    self._end(error.body, str(error))
                    raise error
                if event.finish_reason == "cancelled":  # not by us: the engine has been stopped
                    self._end(None, "stopped")
                    raise ApiError(503, "the server is stopping", code="stopping", retry_after=1)
                index = self._answer.add(event)
                if self._stream.is_over:
                    total = self.usage()
                    for key in ("prompt_tokens", "completion_tokens"):
                        self._fields[key] = total[key]
                    self._end(self._whole, "answered")
                yield index, event
        finally:
            self._stream.close()

    async def whole(self) -> dict[str, Any]:
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self._whole()

    def abandon(self) -> None:
        """Nobody waits any more; nothing if all was said already."""
        self._stream.close()
        self._end(ApiError(CLIENT_GONE, "the client left", code="cancelled").body, "client gone")

    def usage(self) -> responses.Usage:
        empty = Event("")
        last = [events[-1] if events else empty for events in self._answer.events]
        return responses.usage(self.call, last)

    def _whole(self) -> dict[str, Any]:
        build = responses.completion if self.kind == "completion" else responses.chat
        return build(self.call, self._answer)

    def _end(self, answer: Callable[[], dict[str, Any]] | None, outcome: str) -> None:
        if not self._ended:
            self._ended = True
            self._fields.update(id=self.call.id, outcome=outcome)
            self._finish(self.call.id, answer)


class EventStream:
    """A streamed answer, as an ASGI response: one chunk an event, ``[DONE]`` at the end, an error
    object instead when the engine fails midway."""

    def __init__(self, run: Run, body: Completion | Chat) -> None:
        self._run = run
        options = body.stream_options
        self._running_usage = bool(options and options.continuous_usage_stats)
        self._usage = self._running_usage or bool(options and options.include_usage)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            headers = [
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                async with contextlib.aclosing(self._lines()) as lines:
                    async for line in lines:
                        await _send_data(send, line)
                await _send_data(send, "[DONE]")
            except ApiError as error:
                await _send_data(send, json_line(error.body()))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_disconnected(receive, write())
        except ClientGone:
            self._run.abandon()

    async def _lines(self) -> AsyncIterator[str]:
        run, call = self._run, self._run.call
        is_chat = run.kind == "chat"
        for index in range(len(call.requests)):
            if is_chat:
                yield json_line(responses.chat_role(call, index))
            elif call.echoes:
                yield json_line(responses.completion_echo(call, index))
        writers = [self._writer(index) for index in range(len(call.requests))]
        async with contextlib.aclosing(run.events()) as events:
            async for index, event in events:
                yield writers[index](event)
        if self._usage:
            build = responses.chat_usage if is_chat else responses.completion_usage
            yield json_line(build(call, run.usage()))

    def _writer(self, index: int) -> Callable[[Event], str]:
        """The function from a choice's events to lines.  Those of a plain stream differ in nothing
        but the text, so they are put together from the two halves of one around it."""
        run, call = self._run, self._run.call
        offsets = responses.TextOffsets(call)

        def write(event: Event) -> str:
            total = run.usage() if self._running_usage else None
            if run.kind == "chat":
                return json_line(responses.chat_chunk(call, index, event, total))
            return json_line(responses.completion_chunk(call, index, event, offsets, total))

        if self._running_usage or call.requests[index].logprobs is not None:
            return write
        before, after = write(Event("", text="\0")).split(json_line("\0"))

        def write_plain(event: Event) -> str:
            return write(event) if event.finish_reason else before + json_line(event.text) + after

        return write_plain


async def _send_data(send: Send, text: str) -> None:
    data = f"data: {text}\n\n".encode()
    await send({"type": "http.response.body", "body": data, "more_body": True})
