"""What the server answers: the objects of OpenAI's API as dataclasses.

    to_json(value) -> bytes         the one way to the wire, by pydantic's serializer of the type

``answers`` makes them, and the OpenAPI page (``openapi``) takes its response schemas from them.
What clients may ask is ``bodies``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from starlette.responses import Response

FinishReason = Literal["stop", "length"]


class _Schema:
    """Nothing is left out on the wire, so every key is required in the schemas."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(json_schema_serialization_defaults_required=True)


@dataclasses.dataclass(slots=True)
class PromptDetails(_Schema):
    cached_tokens: int


@dataclasses.dataclass(slots=True)
class Usage(_Schema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


@dataclasses.dataclass(slots=True)
class CompletionLogprobs(_Schema):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]] | None
    text_offset: list[int]


@dataclasses.dataclass(slots=True)
class CompletionChoice(_Schema):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(slots=True)
class CompletionObject(_Schema):
    """A whole answer, or a chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None


@dataclasses.dataclass(slots=True)
class TopLogprob(_Schema):
    token: str
    logprob: float | None
    bytes: list[int]


@dataclasses.dataclass(slots=True)
class TokenLogprob(_Schema):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@dataclasses.dataclass(slots=True)
class ChatLogprobs(_Schema):
    content: list[TokenLogprob]
    refusal: None = None


@dataclasses.dataclass(slots=True)
class ChatMessage(_Schema):
    role: Literal["assistant"]
    content: str
    refusal: None = None


@dataclasses.dataclass(slots=True)
class ChatChoice(_Schema):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


@dataclasses.dataclass(slots=True)
class ChatObject(_Schema):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


@dataclasses.dataclass(slots=True)
class Opening(_Schema):
    """The delta of a choice's first chunk."""

    role: Literal["assistant"]
    content: Literal[""]


@dataclasses.dataclass(slots=True)
class Delta(_Schema):
    content: str


@dataclasses.dataclass(slots=True)
class ChatChunkChoice(_Schema):
    index: int
    delta: Delta | Opening
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(slots=True)
class ChatChunk(_Schema):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None


@dataclasses.dataclass(slots=True)
class EmbeddingItem(_Schema):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@dataclasses.dataclass(slots=True)
class EmbeddingUsage(_Schema):
    prompt_tokens: int
    total_tokens: int


@dataclasses.dataclass(slots=True)
class EmbeddingList(_Schema):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


@dataclasses.dataclass(slots=True)
class ModelObject(_Schema):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    chat: bool


@dataclasses.dataclass(slots=True)
class ModelList(_Schema):
    object: Literal["list"]
    data: list[ModelObject]


@dataclasses.dataclass(slots=True)
class Tokens(_Schema):
    tokens: list[int]
    count: int
    max_model_len: int


@dataclasses.dataclass(slots=True)
class Text(_Schema):
    prompt: str


@dataclasses.dataclass(slots=True)
class Health(_Schema):
    status: str


@dataclasses.dataclass(slots=True)
class ErrorDetail(_Schema):
    message: str
    type: str
    param: str | None
    code: str | None


@dataclasses.dataclass(slots=True)
class ErrorObject(_Schema):
    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error: HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> ErrorObject:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return ErrorObject(ErrorDetail(str(self), kind, self.param, self.code))


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_json(value: Any) -> bytes:
    """One of these, or what they are made of."""
    return _adapter(type(value)).dump_json(value)


def respond(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")
