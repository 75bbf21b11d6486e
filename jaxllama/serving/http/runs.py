"""One call on its way: the pieces of its requests become an answer, whole or streamed.

    run = CallRun(kind, call, stream, fields, finish)
    answer = ChunkAnswer(run, body)
    await answer.whole()           the answer object; ApiError when a row or the engine fails
    await answer(*asgi)            sends the answer as it is made

Contract. ``finish(id, answer)`` is called once, when the answer is complete, has failed, or lost
its client. In the last case the rows are cancelled. answer is None if the engine was stopped
meanwhile: the next server then makes the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from jaxllama.serving.api import answers, messages
from jaxllama.serving.api.bodies import Chat, Completion
from jaxllama.serving.api.calls import AcceptedCall
from jaxllama.serving.api.logprobs import TextOffsets, chat_entries
from jaxllama.serving.api.messages import Accepted, IdTaken, TextPiece
from jaxllama.serving.api.reading import PLAIN, answer_reader
from jaxllama.serving.api.schemas import (
    ApiError,
    ChatObject,
    CompletionObject,
    ErrorObject,
    Usage,
    to_json,
)
from jaxllama.serving.http.middleware import (
    CLIENT_GONE,
    ClientGone,
    api_error,
    unless_disconnected,
)
from jaxllama.serving.ipc.link import EngineClient, PieceStream
from jaxllama.serving.tools.parts import AnswerPart
from jaxllama.typing import JsonObject

AGAIN_SECONDS = 0.05
Outcome = CompletionObject | ChatObject | ErrorObject
Result = TypeVar("Result")
Finish = Callable[[str, Callable[[], Outcome] | None], None]


async def submit(
    link: EngineClient,
    call: AcceptedCall,
    owner: str,
    entry: Accepted | None = None,
    is_known: bool = False,
) -> tuple[AcceptedCall, PieceStream]:
    """Submit a call of this owner.

    A call whose id is taken gets another id: clients may reuse a request id. A call
    that only scores the prompt submits no engine request.
    """
    while True:
        requests = call.requests if call.is_written else ()
        try:
            stream = await link.submit(call.id, requests, owner, entry, is_known)
            break
        except IdTaken:
            if is_known:  # the rows belong to a front end that is gone, and will end
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                id = f"{call.id}-{uuid.uuid4().hex}"
                numbered = enumerate(call.requests)
                named = (dataclasses.replace(r, id=f"{id}/{index}") for index, r in numbered)
                call = dataclasses.replace(call, id=id, requests=tuple(named))
    if not call.is_written:
        ends = [
            TextPiece(0, [], finish_reason="length", index=i, prompt_tokens=len(r.prompt))
            for i, r in enumerate(call.requests)
        ]
        stream.end(ends)
    return call, stream


class CallRun:
    """One call on its way: follows the pieces, keeps the answer, and reports its end once.

    kind: "completion" or "chat", whose objects it makes; None for other APIs, which make their own.
    kept: whether the whole answer is needed at the end.
    """

    def __init__(
        self,
        kind: str | None,
        call: AcceptedCall,
        stream: PieceStream,
        fields: JsonObject,
        finish: Finish | None = None,
        kept: bool = True,
    ) -> None:
        self.kind, self.call, self._stream, self._finish = kind, call, stream, finish
        self._answer, self._fields, self._ended = answers.PartialAnswer(call, kept), fields, False

    async def events(self) -> AsyncGenerator[list[TextPiece]]:
        """Yield lists of pieces, one piece for each choice, until the answer is complete.

        Raises ApiError when a row ends with an error, or the engine fails or is stopped.
        """
        try:
            async for pieces in self._stream:
                for piece in pieces:
                    if piece.finish_reason is not None:
                        self._check(piece)
                        if piece.times is not None:
                            self._fields.setdefault("times", piece.times)
                    self._answer.add(piece)
                if self._stream.is_over:
                    total = self.usage()
                    self._fields.update(
                        prompt_tokens=total.prompt_tokens, completion_tokens=total.completion_tokens
                    )
                    self._end(self._whole, "answered")
                yield pieces
        finally:
            self._stream.close()

    def _check(self, piece: TextPiece) -> None:
        if piece.error is not None:
            error = api_error(messages.error(piece.error))
            self._end(error.body, str(error))
            raise error
        if piece.finish_reason == "cancelled":  # not by this server: the engine has been stopped
            self._end(None, "stopped")
            raise ApiError(503, "the server is stopping", code="stopping", retry_after=1)

    async def whole(self) -> CompletionObject | ChatObject:
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self._whole()

    async def until_left(self, receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the work's result. If the client leaves, abandon the call and raise ClientGone."""
        try:
            return await unless_disconnected(receive, work)
        except ClientGone:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Cancel the call, because its client has left; does nothing after the end."""
        self._stream.close()
        self._end(ApiError(CLIENT_GONE, "the client left", code="cancelled").body, "client gone")

    def usage(self) -> Usage:
        return answers.usage(self.call, self._answer.last)

    def _whole(self) -> CompletionObject | ChatObject:
        build = answers.completion if self.kind == "completion" else answers.chat
        return build(self.call, self._answer)

    def _end(self, answer: Callable[[], Outcome] | None, outcome: str) -> None:
        if not self._ended:
            self._ended = True
            self._fields.update(id=self.call.id, outcome=outcome)
            if self._finish is not None:
                self._finish(self.call.id, answer)


class Answer:
    """An API's answer: ``whole`` as an object, or as an ASGI response of server-sent events.

    Subclasses implement ``whole`` and ``_pieces``. They may override ``_failure``, the event for an
    engine that fails midway.
    """

    media_type = b"text/event-stream"

    def __init__(self, run: CallRun) -> None:
        self.run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            headers = [
                (b"content-type", self.media_type),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                async with contextlib.aclosing(self._pieces()) as pieces:
                    async for piece in pieces:
                        if piece:
                            await _send_piece(send, piece)
            except ApiError as error:
                await _send_piece(send, self._failure(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with contextlib.suppress(ClientGone):
            await self.run.until_left(receive, write())

    async def whole(self) -> Any:
        """Return the whole answer. Raises ApiError when a row or the engine fails."""
        raise NotImplementedError

    def _pieces(self) -> AsyncGenerator[bytes]:
        raise NotImplementedError

    def _failure(self, error: ApiError) -> bytes:
        return _data(to_json(error.body()))


class EventAnswer(Answer):
    """An answer of events, for the APIs that split a text into parts.

    Subclasses implement ``_read``, the events of a piece, and ``_whole``. They may override
    ``_first`` and ``_last``, the events around them, and ``_written``, the bytes of one.
    """

    def __init__(self, run: CallRun) -> None:
        super().__init__(run)
        self._reader = answer_reader(run.call.reading or PLAIN)

    def _read(self, piece: TextPiece) -> list[JsonObject]:
        raise NotImplementedError

    async def _whole(self) -> Any:
        """Return the whole answer, when all pieces have been read."""
        raise NotImplementedError

    def _first(self) -> list[JsonObject]:
        return []

    def _last(self, answer: Any) -> list[JsonObject]:
        return []

    def _written(self, event: JsonObject) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event))

    async def whole(self) -> Any:
        async with contextlib.aclosing(self.run.events()) as events:
            async for pieces in events:
                for piece in pieces:
                    self._read(piece)
        return await self._whole()

    async def _pieces(self) -> AsyncGenerator[bytes]:
        yield b"".join(map(self._written, self._first()))
        async with contextlib.aclosing(self.run.events()) as events:
            async for pieces in events:
                read = (event for piece in pieces for event in self._read(piece))
                yield b"".join(map(self._written, read))
        yield b"".join(map(self._written, self._last(await self._whole())))


class ChunkAnswer(Answer):
    """A completion or a chat. Streamed, each event is a chunk, and ``[DONE]`` ends them.

    If the engine fails midway, an error object takes the place of ``[DONE]``.
    """

    def __init__(self, run: CallRun, body: Completion | Chat) -> None:
        super().__init__(run)
        options = body.stream_options
        self._running_usage = bool(options and options.continuous_usage_stats)
        self._usage = self._running_usage or bool(options and options.include_usage)

    async def whole(self) -> CompletionObject | ChatObject:
        return await self.run.whole()

    async def _pieces(self) -> AsyncGenerator[bytes]:
        run, call = self.run, self.run.call
        is_chat = run.kind == "chat"
        offsets = [TextOffsets(call) for _ in call.requests]
        opening: list[bytes] = []
        for index in range(len(call.requests)):
            if is_chat:
                opening.append(_data(to_json(answers.chat_role(call, index))))
            elif call.echoes:
                echo = answers.completion_echo(call, index, offsets[index])
                opening.append(_data(to_json(echo)))
        if opening:
            yield b"".join(opening)
        writers = [self._writer(index, offsets[index]) for index in range(len(call.requests))]
        async with contextlib.aclosing(run.events()) as events:
            async for pieces in events:
                written = [writers[piece.index](piece) for piece in pieces]
                yield written[0] if len(written) == 1 else b"".join(written)
        if self._usage:
            yield _data(to_json(answers.usage_chunk(call, is_chat, run.usage())))
        yield _data(b"[DONE]")

    def _writer(self, index: int, offsets: TextOffsets) -> Callable[[TextPiece], bytes]:
        """Return the function from a choice's pieces to the bytes of its chunks.

        The chunks of a stream differ only in the text, and the chunks of a chat also in logprobs.
        So one chunk is split into the parts around its text, and each further chunk is joined from
        them.
        """
        run, call = self.run, self.run.call
        if call.reading is not None:
            return self._reading_writer(index)

        def write(piece: TextPiece) -> bytes:
            total = run.usage() if self._running_usage else None
            if run.kind == "chat":
                return _data(to_json(answers.chat_chunk(call, index, piece, total)))
            return _data(to_json(answers.completion_chunk(call, index, piece, offsets, total)))

        scored = call.requests[index].logprobs is not None
        if self._running_usage or call.shows_ids or (scored and run.kind == "completion"):
            return write
        before, after = write(TextPiece(0, [], text="\0")).split(_quoted("\0"))
        middle, after = after.split(b"[]") if scored else (b"", after)

        def write_plain(piece: TextPiece) -> bytes:
            if piece.finish_reason:
                return write(piece)
            if scored:
                entries = chat_entries(call, index, piece)
                return b"%b%b%b[%b]%b" % (before, _quoted(piece.text), middle, entries, after)
            return before + _quoted(piece.text) + after

        return write_plain

    def _reading_writer(self, index: int) -> Callable[[TextPiece], bytes]:
        """Return the same function for a choice whose text is split into parts."""
        run, call = self.run, self.run.call
        chunks = answers.ChatChunks(call, index)
        has_details = call.shows_ids or call.requests[index].logprobs is not None
        is_plain = not (self._running_usage or has_details)
        halves = {
            kind: _data(to_json(chunks.of(AnswerPart(kind, "\0")))).split(_quoted("\0"))
            for kind in ("content", "reasoning")
        }

        def write_part(part: AnswerPart) -> bytes:
            if part.kind not in halves:
                return _data(to_json(chunks.of(part)))
            before, after = halves[part.kind]
            return before + _quoted(part.text) + after

        def write(piece: TextPiece) -> bytes:
            if is_plain and piece.finish_reason is None:
                return b"".join([write_part(part) for part in chunks.parts(piece)])
            total = run.usage() if self._running_usage else None
            return b"".join([_data(to_json(chunk)) for chunk in chunks(piece, total)])

        return write


_quoted = msgspec.json.Encoder().encode  # the JSON of a string, as ``to_json`` writes it


def _data(line: bytes) -> bytes:
    return b"data: %b\n\n" % line


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
