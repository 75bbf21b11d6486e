"""Messages between a front end and the engine's process: msgpack structs, one frame each.

    encode(message) -> bytes             a whole frame: 4 bytes of length, then the msgpack
    Frames(decoder).feed(data) -> [message, ...]    the messages that the bytes complete
    refusal(error) -> Refused, error(refused) -> Exception      exceptions as messages

Token ids, logprobs and prepared requests cross the socket; text never does. A front end numbers its
requests. Each question has a ``call`` number, and its answer carries the same number.

The structs are arrays on the wire, and their first element (msgspec's tag) identifies the class.
Both ends have the same version and user, so nothing here is validated against a foreign client.
"""

from __future__ import annotations

import logging
import struct
from typing import Any

import msgspec

from jaxllama.engine.journal import JournalUnavailable
from jaxllama.engine.request import (
    EngineClosed,
    EngineFailed,
    FinishReason,
    QueueFull,
    RequestTimes,
)
from jaxllama.engine.stats import EngineStats
from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api.schemas import ApiError

_log = logging.getLogger("jaxllama.serving")


class IdTaken(JaxLlamaError):
    """An answer with this id exists or is in progress."""


class IpcMessage(msgspec.Struct, array_like=True, gc=False):
    pass


# From a front end to the engine


class Accepted(IpcMessage):
    """A body for the journal: its kind, time and JSON text, seed included.

    owner: key of the client that may read the answer.
    """

    kind: str
    at: int
    body: str
    owner: str = ""


class Submit(IpcMessage, tag=0):
    """All requests of one body under ``id``, numbered from ``first`` on; all are queued or none.

    owner: the key whose limits count their tokens. is_known: the body is in the journal
    already. The answer is None.
    """

    call: int
    id: str
    first: int
    requests: list[Any]
    owner: str
    entry: Accepted | None
    is_known: bool


class End(IpcMessage, tag=1):
    """The end of a request. kept: for the reason "stop", the number of its tokens in the text."""

    number: int
    reason: FinishReason
    kept: int


class Finish(IpcMessage, tag=2):
    """The answer of a body for the journal. None: there is no answer; the next server makes it."""

    id: str
    answer: str | None


class HubRequest(IpcMessage, tag=3):
    """A question to the hub. ``Hub.asked`` implements the names."""

    call: int
    name: str
    arguments: list[Any]


class ServedRequest(IpcMessage, tag=4):
    """A finished HTTP request, for the metrics and the key's limits.

    seconds: its duration. tokens: of forward passes beside the engine.
    """

    path: str
    method: str
    status: int
    seconds: float
    owner: str = ""
    tokens: int = 0


class Ready(IpcMessage, tag=5):
    """The front end accepts connections."""


class Pong(IpcMessage, tag=6):
    """The answer to ``Ping``: the front end's event loop runs."""


# From the engine to a front end


class RowEvent(msgspec.Struct, array_like=True, gc=False):
    """The new tokens of a request: an Event without its text. error: for the reason "error".
    times: the Event's, on a last piece.
    """

    number: int
    tokens: list[int]
    logprobs: list[float] = []
    top_logprobs: list[list[tuple[int, float]]] = []
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: Refused | None = None
    times: RequestTimes | None = None


class TextPiece(RowEvent):
    """A RowEvent in its front end, with the text that became certain.

    index: of its choice. stop_text: the stop string that ended the text.
    """

    text: str = ""
    index: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stop_text: str | None = None


class Refused(IpcMessage, tag=1):
    """An exception: its kind in ``_KINDS``, its text, and QueueFull's time."""

    kind: str
    text: str
    retry_after: float = 0.0
    call: int = 0


class StepNews(IpcMessage, tag=0):
    """The new tokens of all rows after one step."""

    rows: list[RowEvent]


class Received(IpcMessage, tag=0):
    """``StepNews`` as a front end decodes it."""

    rows: list[TextPiece]


class Reply(IpcMessage, tag=2):
    call: int
    value: Any


class Welcome(IpcMessage, tag=3):
    """The setup of a front end (``front_end.FrontEndSetup``), pickled."""

    setup: bytes


class Failed(IpcMessage, tag=4):
    """The engine has failed and does nothing any more."""

    reason: str


class EngineReport(IpcMessage, tag=6):
    """A replica's figures.

    replica: its name, which no other one has. times: (name, seconds) pairs for ``Metrics.observe``
    since the last report. failure: why the replica has to be replaced, or None.
    """

    replica: str
    stats: EngineStats
    times: list[tuple[str, float]]
    failure: str | None


class Drain(IpcMessage, tag=5):
    """Answer the requests in flight, take no more, and end."""


class Trouble(IpcMessage, tag=7):
    """Why the journal cannot be written; None: it can be written again."""

    reason: str | None


class Adapters(IpcMessage, tag=9):
    """The adapters that were loaded at run time: each one's id in the engine, by its name."""

    loaded: dict[str, str]


class Ping(IpcMessage, tag=8):
    """A sign of life; the front end answers with ``Pong``.

    stalled: ``Engine.stalled``.
    """

    stalled: str | None = None


FromFrontEnd = Submit | End | Finish | HubRequest | ServedRequest | Ready | Pong
FromEngine = (
    Received | Refused | Reply | Welcome | Failed | Drain | EngineReport | Trouble | Ping | Adapters
)

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
    for kind in (QueueFull, EngineClosed, IdTaken, JournalUnavailable, JaxLlamaError, EngineFailed)
}


def refusal(error: Exception, call: int = 0) -> Refused:
    """Return an exception as a message.

    An exception of another kind is logged here, where its traceback is, and sent as an internal
    error.
    """
    for name, kind in _KINDS.items():
        if isinstance(error, kind):
            return Refused(name, str(error), getattr(error, "retry_after", 0.0), call)
    _log.error("an error of ours", exc_info=error)
    return Refused("", "internal error: the server's log has the reason", call=call)


def error(refused: Refused) -> Exception:
    if refused.kind == "QueueFull":
        return QueueFull(refused.text, refused.retry_after)
    kind = _KINDS.get(refused.kind)
    return ApiError(500, refused.text) if kind is None else kind(refused.text)
