"""One call on its way: the events of its requests become an answer, whole or streamed.

    run = Run(kind, call, stream, fields, finish)
    await run.whole()              the answer object; ApiError when a row or the engine fails
    ChunkStream(run, body)         an ASGI response that sends it as it is made

Contract.  ``finish(id, answer)`` is called once, when the end is certain: answered, failed, or left
by its client (then the rows are cancelled).  answer is None when the engine was stopped meanwhile:
then it is still owed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from json.encoder import encode_basestring
from typing import Any

from starlette.types import Receive, Scope, Send

from jaxllama.serving.engine.request import Event
from jaxllama.serving.http import answers
from jaxllama.serving.http.bodies import Chat, Completion
from jaxllama.serving.http.calls import Call
from jaxllama.serving.http.dispatcher import Stream
from jaxllama.serving.http.logprobs import TextOffsets
from jaxllama.serving.http.middleware import (
    CLIENT_GONE,
    ClientGone,
    api_error,
    unless_disconnected,
)
from jaxllama.serving.http.schemas import (
    ApiError,
    ChatObject,
    CompletionObject,
    ErrorObject,
    Usage,
    to_json,
)
from jaxllama.serving.http.tool_formats import Part

Outcome = CompletionObject | ChatObject | ErrorObject
Finish = Callable[[str, Callable[[], Outcome] | None], None]


class Run:
    """One call on its way: follows the events, keeps the answer, and reports its end once."""

    def __init__(
        self, kind: str, call: Call, stream: Stream, fields: dict[str, Any], finish: Finish
    ) -> None:
        self.kind, self.call, self._stream, self._finish = kind, call, stream, finish
        self._answer, self._fields, self._ended = answers.Answer(call), fields, False

    async def events(self) -> AsyncGenerator[tuple[int, Event]]:
        """(choice, event) until all is said.  ApiError when a row ends with an error, or the engine
        fails or is stopped."""
        try:
            async for event in self._stream:
                if event.finish_reason == "error" and event.error is not None:
                    error = api_error(event.error)
                    self._end(error.body, str(error))
                    raise error
                if event.finish_reason == "cancelled":  # not by us: the engine has been stopped
                    self._end(None, "stopped")
                    raise ApiError(503, "the server is stopping", code="stopping", retry_after=1)
                index = self._answer.add(event)
                if self._stream.is_over:
                    total = self.usage()
                    self._fields.update(
                        prompt_tokens=total.prompt_tokens, completion_tokens=total.completion_tokens
                    )
                    self._end(self._whole, "answered")
                yield index, event
        finally:
            self._stream.close()

    async def whole(self) -> CompletionObject | ChatObject:
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self._whole()

    def abandon(self) -> None:
        """Nobody waits any more; nothing if all was said already."""
        self._stream.close()
        self._end(ApiError(CLIENT_GONE, "the client left", code="cancelled").body, "client gone")

    def usage(self) -> Usage:
        empty = Event("")
        last = [events[-1] if events else empty for events in self._answer.events]
        return answers.usage(self.call, last)

    def _whole(self) -> CompletionObject | ChatObject:
        build = answers.completion if self.kind == "completion" else answers.chat
        return build(self.call, self._answer)

    def _end(self, answer: Callable[[], Outcome] | None, outcome: str) -> None:
        if not self._ended:
            self._ended = True
            self._fields.update(id=self.call.id, outcome=outcome)
            self._finish(self.call.id, answer)


class EventStream:
    """A streamed answer, as an ASGI response: server-sent events (``_pieces``), and ``_failure``
    when the engine fails midway."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            headers = [
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                async with contextlib.aclosing(self._pieces()) as pieces:
                    async for piece in pieces:
                        await _send_piece(send, piece)
            except ApiError as error:
                await _send_piece(send, self._failure(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_disconnected(receive, write())
        except ClientGone:
            self._run.abandon()

    def _pieces(self) -> AsyncGenerator[bytes]:
        raise NotImplementedError

    def _failure(self, error: ApiError) -> bytes:
        return _data(to_json(error.body()))


class ChunkStream(EventStream):
    """Of completions and chats: one chunk an event, ``[DONE]`` at the end, an error object instead
    when the engine fails midway."""

    def __init__(self, run: Run, body: Completion | Chat) -> None:
        super().__init__(run)
        options = body.stream_options
        self._running_usage = bool(options and options.continuous_usage_stats)
        self._usage = self._running_usage or bool(options and options.include_usage)

    async def _pieces(self) -> AsyncGenerator[bytes]:
        run, call = self._run, self._run.call
        is_chat = run.kind == "chat"
        offsets = [TextOffsets(call) for _ in call.requests]
        for index in range(len(call.requests)):
            if is_chat:
                yield _data(to_json(answers.chat_role(call, index)))
            elif call.echoes:
                yield _data(to_json(answers.completion_echo(call, index, offsets[index])))
        writers = [self._writer(index, offsets[index]) for index in range(len(call.requests))]
        async with contextlib.aclosing(run.events()) as events:
            async for index, event in events:
                for line in writers[index](event):
                    yield _data(line)
        if self._usage:
            build = answers.chat_usage if is_chat else answers.completion_usage
            yield _data(to_json(build(call, run.usage())))
        yield _data(b"[DONE]")

    def _writer(self, index: int, offsets: TextOffsets) -> Callable[[Event], Iterable[bytes]]:
        """The function from a choice's events to lines.  Those of a plain stream differ in nothing
        but the text, so they are put together from the two halves of one around it."""
        run, call = self._run, self._run.call
        if call.reading is not None:
            return self._reading_writer(index)

        def write(event: Event) -> bytes:
            total = run.usage() if self._running_usage else None
            if run.kind == "chat":
                return to_json(answers.chat_chunk(call, index, event, total))
            return to_json(answers.completion_chunk(call, index, event, offsets, total))

        detailed = call.requests[index].logprobs is not None or call.shows_ids
        if self._running_usage or detailed:
            return lambda event: (write(event),)
        before, after = write(Event("", text="\0")).split(_quoted("\0"))

        def write_plain(event: Event) -> tuple[bytes]:
            line = write(event) if event.finish_reason else before + _quoted(event.text) + after
            return (line,)

        return write_plain

    def _reading_writer(self, index: int) -> Callable[[Event], Iterable[bytes]]:
        """The same of a choice whose text is read."""
        run, call = self._run, self._run.call
        chunks = answers.ChatChunks(call, index)
        is_plain = not self._running_usage and call.requests[index].logprobs is None
        halves = {
            kind: to_json(chunks.of(Part(kind, "\0"))).split(_quoted("\0"))
            for kind in ("content", "reasoning")
        }

        def write_part(part: Part) -> bytes:
            if part.kind not in halves:
                return to_json(chunks.of(part))
            before, after = halves[part.kind]
            return before + _quoted(part.text) + after

        def write(event: Event) -> list[bytes]:
            if is_plain and event.finish_reason is None:
                return [write_part(part) for part in chunks.parts(event)]
            total = run.usage() if self._running_usage else None
            return [to_json(chunk) for chunk in chunks(event, total)]

        return write


def _quoted(text: str) -> bytes:
    """``to_json`` of a string, in a third of the time."""
    return encode_basestring(text).encode()


def _data(line: bytes) -> bytes:
    return b"data: %b\n\n" % line


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
