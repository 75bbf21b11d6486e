"""The server's answers: the objects of OpenAI's API as dataclasses.

    to_json(value) -> bytes         the only serialization, by pydantic's serializer of the type

``answers`` makes these objects, and ``http.openapi`` derives its response schemas from them.
``bodies`` has the requests.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, dataclass_transform

from pydantic import ConfigDict, TypeAdapter
from starlette.responses import Response

T = TypeVar("T")
FinishReason = Literal["stop", "length", "tool_calls"]


class Schema:
    """Base of the answers. Every key is written, so every key is required in the schemas."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(json_schema_serialization_defaults_required=True)


@dataclass_transform()
def schema(cls: type[T]) -> type[T]:
    return dataclasses.dataclass(slots=True)(cls)


@schema
class PromptDetails(Schema):
    cached_tokens: int


@schema
class Usage(Schema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


@schema
class CompletionLogprobs(Schema):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


@schema
class CompletionChoice(Schema):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


@schema
class PromptLogprob(Schema):
    logprob: float | None
    rank: int | None
    decoded_token: str


# The prompt's tokens: each with the likeliest tokens, by id. The first token has no entry.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


@schema
class DetailedChoice(CompletionChoice):
    """A choice with the fields that are sent on request only."""

    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


@schema
class CompletionObject(Schema):
    """A whole answer, or a chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[DetailedChoice | CompletionChoice]
    usage: Usage | None
    warnings: list[str] | None = None


@schema
class TopLogprob(Schema):
    token: str
    logprob: float | None
    bytes: list[int]


@schema
class TokenLogprob(Schema):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@schema
class ChatLogprobs(Schema):
    content: list[TokenLogprob]
    refusal: None = None


@schema
class FunctionCalled(Schema):
    name: str
    arguments: str


@schema
class ToolCalled(Schema):
    id: str
    type: Literal["function"]
    function: FunctionCalled


@schema
class ChatMessage(Schema):
    """The assistant's message. content is None if there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCalled] | None = None


@schema
class ChatChoice(Schema):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


@schema
class DetailedChatChoice(ChatChoice):
    """A choice with the fields that are sent on request only."""

    token_ids: list[int] | None = None


@schema
class ChatObject(Schema):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[DetailedChatChoice | ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    warnings: list[str] | None = None


@schema
class Opening(Schema):
    """The delta of a choice's first chunk."""

    role: Literal["assistant"]
    content: Literal[""]


@schema
class Delta(Schema):
    content: str


@schema
class ReasoningDelta(Schema):
    reasoning_content: str


@schema
class ToolCallStart(Schema):
    """The first piece of a call."""

    index: int
    id: str
    type: Literal["function"]
    function: FunctionCalled


@schema
class Arguments(Schema):
    arguments: str


@schema
class ToolCallGoesOn(Schema):
    index: int
    function: Arguments


@schema
class ToolCallDelta(Schema):
    tool_calls: list[ToolCallStart | ToolCallGoesOn]


@schema
class ChatChunkChoice(Schema):
    index: int
    delta: Opening | Delta | ReasoningDelta | ToolCallDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


@schema
class DetailedChunkChoice(ChatChunkChoice):
    """A choice with fields that are sent on request; the first chunk has prompt_token_ids."""

    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


@schema
class ChatChunk(Schema):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[DetailedChunkChoice | ChatChunkChoice]
    usage: Usage | None


@schema
class NotedChatChunk(ChatChunk):
    """A first chunk with warnings."""

    warnings: list[str] | None = None


@schema
class EmbeddingItem(Schema):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@schema
class EmbeddingUsage(Schema):
    prompt_tokens: int
    total_tokens: int


@schema
class EmbeddingList(Schema):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


@schema
class ModelObject(Schema):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    chat: bool


@schema
class ModelList(Schema):
    object: Literal["list"]
    data: list[ModelObject]


@schema
class Page(Schema):
    """A part of a list, with the ids of its ends."""

    object: Literal["list"]
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


@schema
class Tokens(Schema):
    tokens: list[int]
    count: int
    max_model_len: int


@schema
class Text(Schema):
    prompt: str


@schema
class Version(Schema):
    version: str


@schema
class Health(Schema):
    status: str


@schema
class ErrorDetail(Schema):
    message: str
    type: str
    param: str | None
    code: str | None


@schema
class ErrorObject(Schema):
    error: ErrorDetail


class ApiError(Exception):
    """An error as an answer: HTTP status and OpenAI's error object."""

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

    @staticmethod
    def at(param: str, reason: str, code: str = "invalid_value", status: int = 400) -> ApiError:
        """Return an error whose message begins with the name of the field."""
        return ApiError(status, f"{param}: {reason}", param=param, code=code)

    @staticmethod
    def unsupported(param: str, reason: str) -> ApiError:
        return ApiError.at(param, reason, "unsupported")

    def body(self) -> ErrorObject:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return ErrorObject(ErrorDetail(str(self), kind, self.param, self.code))


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_json(value: object) -> bytes:
    """Return the JSON of one of these objects, or of the values that they consist of."""
    return _adapter(type(value)).dump_json(value)


def respond(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")
