"""A front end's side of the engine: submit requests, read their pieces, ask questions.

    link = EngineClient(); link.know(tokenizer, eos_ids)
    link.open(send); link.received(data); link.lost(why)
    stream = await link.submit(id, requests)
    async for pieces in stream: ...            ends after the last piece of every request
    stream.close()                             cancels the unfinished requests
    await link.ask("score", row, ...)          see ``Hub.asked``

Contract. ``submit`` raises what ``Engine.submit`` raises, IdTaken for an id that is in use, and
EngineFailed after the engine has failed. Every piece reaches one stream, and none after ``close``.
The text is made as tokens come, even if its reader is slow, so a stop string ends its request at
once. Waiting pieces of a choice are joined, so a slow reader gets larger pieces and not a longer
queue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxllama.engine.request import EngineFailed, FinishReason, Request
from jaxllama.serving.api import messages
from jaxllama.serving.api.messages import Accepted, TextPiece
from jaxllama.serving.ipc.hub import Hub
from jaxllama.serving.ipc.wire import Exchange
from jaxllama.text.reader import Reader
from jaxllama.text.tokenizer import Tokenizer

SILENCE = 30.0  # seconds without a Ping after which the engine's process counts as hung


@dataclasses.dataclass(slots=True, eq=False)
class RequestInFlight:
    """A request in flight.

    waiting: the piece that its reader has not taken yet. written: number of its tokens so far.
    """

    stream: PieceStream
    index: int
    number: int
    request: Request
    reader: Reader
    waiting: TextPiece | None = None
    written: int = 0

    def read(self, piece: TextPiece) -> int:
        """Fill in a piece's text, and the finish reason if the text ends in it.

        Returns the number of the request's tokens so far.
        """
        tokens = piece.tokens
        if tokens:
            kept, piece.text = self.reader.read(tokens)
            if kept < len(tokens):
                del tokens[kept:], piece.logprobs[kept:], piece.top_logprobs[kept:]
            self.written += kept
        if self.reader.stopped:
            piece.finish_reason = "stop"
        if piece.finish_reason is not None and piece.error is None:
            piece.text += self.reader.close()  # closing may complete a stop string
            if piece.finish_reason == "length" and self.reader.stopped:
                piece.finish_reason = "stop"
        piece.stop_text = self.reader.stop_text
        piece.index, piece.prompt_tokens = self.index, len(self.request.prompt)
        piece.completion_tokens = self.written
        return self.written


class PieceStream:
    """The pieces of some requests, as lists with one piece for each choice."""

    def __init__(self, link: EngineClient) -> None:
        self._link = link
        self._ready: list[RequestInFlight] = []
        self._waiter: asyncio.Future[None] | None = None
        self._open: set[int] = set()
        self._ended: list[TextPiece] = []

    def __aiter__(self) -> PieceStream:
        return self

    async def __anext__(self) -> list[TextPiece]:
        if self._ended:
            ended, self._ended = self._ended, []
            return ended
        while not self._ready:
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        ready, self._ready = self._ready, []
        pieces: list[TextPiece] = []
        for choice in ready:
            assert choice.waiting is not None
            pieces.append(choice.waiting)
            choice.waiting = None
        return pieces

    def put(self, choice: RequestInFlight, piece: TextPiece) -> None:
        if choice.waiting is None:
            choice.waiting = piece
            self._ready.append(choice)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        else:
            choice.waiting = _join(choice.waiting, piece)
        if piece.finish_reason is not None:
            self._open.discard(choice.number)

    @property
    def is_over(self) -> bool:
        """Whether every piece has been handed on."""
        return not (self._open or self._ready or self._ended)

    def end(self, pieces: Sequence[TextPiece]) -> None:
        """Add the last pieces of requests that end without the engine."""
        self._ended = list(pieces)

    def opened(self, number: int) -> None:
        self._open.add(number)

    def close(self) -> None:
        """Cancel the unfinished requests; their later pieces are dropped."""
        for number in self._open:
            self._link.cancel(number)
        self._open.clear()


def _join(first: TextPiece, second: TextPiece) -> TextPiece:
    second.tokens = first.tokens + second.tokens
    second.text = first.text + second.text
    second.logprobs = first.logprobs + second.logprobs
    second.top_logprobs = first.top_logprobs + second.top_logprobs
    return second


class EngineClient(Exchange):
    """A front end's connection to the engine; the module docstring has the interface.

    failure: why the engine does nothing any more, or None. trouble: why the journal cannot be
    written at present, or None. is_lost: whether the engine's process has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tokenizer: Tokenizer | None = None
        self._eos: tuple[int, ...] = ()
        self.failure: str | None = None
        self.trouble: str | None = None
        self.loaded: dict[str, str] = {}  # adapters loaded at run time: id by name
        self.is_lost = False
        self._pinged: float | None = None  # time of the last Ping from the engine's process
        self._stalled: str | None = None  # what that Ping said
        self.on_told: Callable[[Any], None] = lambda message: None
        self._choices: dict[int, RequestInFlight] = {}

    @property
    def standstill(self) -> str | None:
        """Why a restart would help; None if the engine works."""
        if self.failure is None and self._pinged is not None:
            seconds = time.monotonic() - self._pinged
            if seconds > SILENCE:
                return f"the engine's process has given no sign of life for {seconds:.0f} s"
        return self.failure or self._stalled

    @property
    def problem(self) -> str | None:
        """Why the server is not healthy; None if it is."""
        return self.standstill or self.trouble

    def know(self, tokenizer: Tokenizer | None, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._eos = tokenizer, tuple(eos_ids)

    # Incoming messages

    def handle(self, message: Any) -> None:
        match message:
            case messages.Failed():
                self.failure = self.failure or message.reason
            case messages.Trouble():
                self.trouble = message.reason
            case messages.Adapters():
                self.loaded = message.loaded
            case messages.Ping():
                self._pinged, self._stalled = time.monotonic(), message.stalled
                self.tell(messages.Pong())
            case _:
                self.on_told(message)

    def lost(self, reason: str) -> None:
        """Record that nothing comes any more, and fail everything that waits."""
        failure = self.failure = self.failure or reason
        self.is_lost = True
        self.close(lambda: EngineFailed(failure))
        refused = messages.refusal(EngineFailed(failure))
        self.read([TextPiece(n, [], finish_reason="error", error=refused) for n in self._choices])

    def read(self, pieces: Sequence[TextPiece]) -> None:
        for piece in pieces:
            choice = self._choices.get(piece.number)
            if choice is None:
                continue
            was_over = piece.finish_reason is not None
            try:
                written = choice.read(piece)
            except Exception as error:
                piece.finish_reason, piece.error = "error", messages.refusal(error)
                written = 0
            if piece.finish_reason is not None:
                del self._choices[piece.number]
                if piece.error is not None:
                    self.error(piece.error)
                if choice.request.stop or not was_over:
                    self._end(piece.number, piece.finish_reason, written)
            choice.stream.put(choice, piece)

    def error(self, refused: messages.Refused) -> Exception:
        error = super().error(refused)
        if isinstance(error, EngineFailed):
            self.failure = self.failure or str(error)
        return error

    # Outgoing messages

    async def submit(
        self,
        id: str,
        requests: Sequence[Request],
        owner: str = "",
        entry: Accepted | None = None,
        is_known: bool = False,
    ) -> PieceStream:
        """Submit the requests of one body, all or none.

        owner: the key whose limits count their tokens. entry: the body, for the journal. is_known:
        whether the journal has the body already.
        """
        stream = PieceStream(self)
        numbers = [next(self._numbers) for _ in requests]
        for index, (number, request) in enumerate(zip(numbers, requests, strict=True)):
            self._choices[number] = RequestInFlight(
                stream, index, number, request, self._reader(request)
            )
            stream.opened(number)
        first = numbers[0] if numbers else 0
        try:
            await self.call(
                lambda call: messages.Submit(
                    call, id, first, list(requests), owner, entry, is_known
                )
            )
        except asyncio.CancelledError:
            stream.close()
            raise
        except BaseException:  # refused: the engine has taken none of them
            for number in numbers:
                self._choices.pop(number, None)
            raise
        return stream

    def _reader(self, request: Request) -> Reader:
        eos = () if request.ignore_eos else self._eos
        return Reader(
            self._tokenizer,
            (*eos, *request.stop_token_ids),
            request.stop,
            least=request.min_tokens,
            skip_special=request.skip_special_tokens,
            include_stop=request.include_stop,
        )

    def cancel(self, number: int) -> None:
        if self._choices.pop(number, None) is not None:
            self._end(number, "cancelled", 0)

    def _end(self, number: int, reason: FinishReason, kept: int) -> None:
        self.tell(messages.End(number, reason, kept))

    async def ask(self, name: str, *arguments: Any) -> Any:
        return await self.call(lambda call: messages.HubRequest(call, name, list(arguments)))


def local(hub: Hub, tokenizer: Tokenizer | None, eos_ids: Sequence[int]) -> EngineClient:
    """Return a client for a front end in the engine's own process."""
    link = EngineClient()
    link.know(tokenizer, eos_ids)
    link.open(hub.open(link.received).received)
    return link
