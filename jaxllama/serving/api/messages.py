"""What a front end and the engine's process tell each other: msgpack structs, one frame each.

    encode(message) -> bytes             a whole frame: 4 bytes of length, then the msgpack
    Frames(decoder).feed(data) -> [message, ...]    those that bytes off a socket complete
    refusal(error) -> Refused, error(refused) -> Exception      exceptions on their way

Token ids, logprobs and prepared requests cross; text never does.  Requests are numbered by their
front end; what it asks has a ``call`` number, and the answer to it the same.

The structs are arrays on the wire, told apart by their first element (msgspec's tags).  Both ends
are of one version and one user: nothing here is checked against a stranger.
"""

from __future__ import annotations

import logging
import struct
from typing import Any, Literal

import msgspec

from jaxllama.engine.journal import JournalUnavailable
from jaxllama.engine.request import EngineClosed, EngineFailed, FinishReason, QueueFull
from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api.schemas import ApiError

_log = logging.getLogger("jaxllama.serving")


class IdTaken(JaxLlamaError):
    """An answer of this id is there or on its way."""


class IpcMessage(msgspec.Struct, array_like=True, gc=False):
    pass


# A front end to the engine


class Accepted(IpcMessage):
    """A body for the journal: its kind, time and JSON text, with its seed.  owner: who may read its
    answer."""

    kind: str
    at: int
    body: str
    owner: str = ""


class Submit(IpcMessage, tag=0):
    """Requests of one body under ``id``, all or none, numbered from ``first`` on.  is_known: it is
    in the journal already.  Answered with None."""

    call: int
    id: str
    first: int
    requests: list[Any]
    entry: Accepted | None
    is_known: bool


class End(IpcMessage, tag=1):
    """kept: how many tokens of it the text has, for "stop"."""

    number: int
    reason: FinishReason
    kept: int


class Finish(IpcMessage, tag=2):
    """A body's answer is certain; None: nobody has it, the next server owes it."""

    id: str
    answer: str | None


class HubRequest(IpcMessage, tag=3):
    """``Hub.asked`` has the names."""

    call: int
    name: Literal["find", "owed", "embed", "score", "metrics", "keep", "recall", "forget"]
    arguments: list[Any]


class ServedRequest(IpcMessage, tag=4):
    """An HTTP request, for the metrics."""

    path: str
    method: str
    status: int
    seconds: float


class Ready(IpcMessage, tag=5):
    """The front end listens."""


class Pong(IpcMessage, tag=6):
    """The answer to ``Ping``: the front end's event loop runs."""


# The engine to a front end


class RowEvent(msgspec.Struct, array_like=True, gc=False):
    """What a request has written: of an Event all but the text.  error: of reason "error"."""

    number: int
    tokens: list[int]
    logprobs: list[float] = []
    top_logprobs: list[list[tuple[int, float]]] = []
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: Refused | None = None


class TextPiece(RowEvent):
    """A Row in its front end, with the text that has become certain; index: of its choice."""

    text: str = ""
    index: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Refused(IpcMessage, tag=1):
    """An exception: of ``_KINDS``, its text, and what QueueFull brings."""

    kind: str
    text: str
    waiting: int = 0
    retry_after: float = 0.0
    call: int = 0


class StepNews(IpcMessage, tag=0):
    """The news of all rows, a step's together."""

    rows: list[RowEvent]


class Received(IpcMessage, tag=0):
    """``StepNews`` as a front end reads it."""

    rows: list[TextPiece]


class Reply(IpcMessage, tag=2):
    call: int
    value: Any


class Welcome(IpcMessage, tag=3):
    """What a front end must know, pickled: ``front_end.FrontEndSetup``."""

    setup: bytes


class Failed(IpcMessage, tag=4):
    """The engine does nothing any more."""

    reason: str


class Report(IpcMessage, tag=6):
    """Of a replica: its engine's figures, what it has observed since the last one, its failure."""

    stats: dict[str, Any]
    times: list[tuple[str, float]]
    failure: str | None


class Drain(IpcMessage, tag=5):
    """Answer what is in flight, take no more, and end."""


class Trouble(IpcMessage, tag=7):
    """Why the journal cannot be written; None: it can be again."""

    reason: str | None


class Ping(IpcMessage, tag=8):
    """The front end answers with ``Pong``."""


FromFrontEnd = Submit | End | Finish | HubRequest | ServedRequest | Ready | Pong
FromEngine = Received | Refused | Reply | Welcome | Failed | Drain | Report | Trouble | Ping

_encoder = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct("<I")


def from_front_end() -> msgspec.msgpack.Decoder[FromFrontEnd]:
    return msgspec.msgpack.Decoder(FromFrontEnd)


def from_engine() -> msgspec.msgpack.Decoder[FromEngine]:
    return msgspec.msgpack.Decoder(FromEngine)


def encode(message: IpcMessage) -> bytes:
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
    return bytes(frame)


class Frames:
    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder, self._held = decoder, bytearray()

    def feed(self, data: bytes) -> list[Any]:
        held, messages, begin = self._held, [], 0
        held += data
        with memoryview(held) as view:
            while len(held) - begin >= _LENGTH.size:
                end = begin + _LENGTH.size + _LENGTH.unpack_from(held, begin)[0]
                if end > len(held):
                    break
                messages.append(self._decoder.decode(view[begin + _LENGTH.size : end]))
                begin = end
        del held[:begin]
        return messages


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        QueueFull,
        EngineClosed,
        IdTaken,
        JournalUnavailable,
        JaxLlamaError,
        EngineFailed,
    )
}


def refusal(error: Exception, call: int = 0) -> Refused:
    """What is none of ours is logged here, where its traceback is."""
    for name, kind in _KINDS.items():
        if isinstance(error, kind):
            more = getattr(error, "waiting", 0), getattr(error, "retry_after", 0.0)
            return Refused(name, str(error), *more, call)
    _log.error("an error of ours", exc_info=error)
    return Refused("", "internal error: the server's log has the reason", call=call)


def error(refused: Refused) -> Exception:
    if refused.kind == "QueueFull":
        return QueueFull(refused.waiting, refused.retry_after)
    kind = _KINDS.get(refused.kind)
    return ApiError(500, refused.text) if kind is None else kind(refused.text)
