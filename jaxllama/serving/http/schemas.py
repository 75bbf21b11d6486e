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

FinishReason = Literal["stop", "length", "tool_calls"]


class _Schema:
    """Nothing is left out on the wire, so every key is required in the schemas."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(json_schema_serialization_defaults_required=True)


_schema = dataclasses.dataclass(slots=True)


@_schema
class PromptDetails(_Schema):
    cached_tokens: int


@_schema
class Usage(_Schema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


@_schema
class CompletionLogprobs(_Schema):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


@_schema
class CompletionChoice(_Schema):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


@_schema
class PromptLogprob(_Schema):
    logprob: float | None
    rank: int | None
    decoded_token: str


# A prompt's tokens: the token itself and the likeliest ones, by id.  The first has none.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


@_schema
class DetailedChoice(CompletionChoice):
    """With what only those get who ask for it."""

    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


@_schema
class CompletionObject(_Schema):
    """A whole answer, or a chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[DetailedChoice | CompletionChoice]
    usage: Usage | None


@_schema
class TopLogprob(_Schema):
    token: str
    logprob: float | None
    bytes: list[int]


@_schema
class TokenLogprob(_Schema):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@_schema
class ChatLogprobs(_Schema):
    content: list[TokenLogprob]
    refusal: None = None


@_schema
class FunctionCalled(_Schema):
    name: str
    arguments: str


@_schema
class ToolCalled(_Schema):
    id: str
    type: Literal["function"]
    function: FunctionCalled


@_schema
class ChatMessage(_Schema):
    """content is None where there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCalled] | None = None


@_schema
class ChatChoice(_Schema):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


@_schema
class ChatObject(_Schema):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


@_schema
class Opening(_Schema):
    """The delta of a choice's first chunk."""

    role: Literal["assistant"]
    content: Literal[""]


@_schema
class Delta(_Schema):
    content: str


@_schema
class ReasoningDelta(_Schema):
    reasoning_content: str


@_schema
class ToolCallStart(_Schema):
    """The first piece of a call."""

    index: int
    id: str
    type: Literal["function"]
    function: FunctionCalled


@_schema
class Arguments(_Schema):
    arguments: str


@_schema
class ToolCallGoesOn(_Schema):
    index: int
    function: Arguments


@_schema
class ToolCallDelta(_Schema):
    tool_calls: list[ToolCallStart | ToolCallGoesOn]


@_schema
class ChatChunkChoice(_Schema):
    index: int
    delta: Opening | Delta | ReasoningDelta | ToolCallDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


@_schema
class ChatChunk(_Schema):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None


Status = Literal["in_progress", "completed", "incomplete"]


@_schema
class OutputText(_Schema):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[None]


@_schema
class ReasoningPart(_Schema):
    type: Literal["reasoning_text"]
    text: str


@_schema
class ReasoningItem(_Schema):
    id: str
    type: Literal["reasoning"]
    summary: list[None]
    content: list[ReasoningPart]
    status: Status


@_schema
class MessageItem(_Schema):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: Status


@_schema
class FunctionCallItem(_Schema):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


@_schema
class IncompleteDetails(_Schema):
    reason: Literal["max_output_tokens"]


@_schema
class InputDetails(_Schema):
    cached_tokens: int


@_schema
class OutputDetails(_Schema):
    reasoning_tokens: int


@_schema
class ResponseUsage(_Schema):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


@_schema
class ResponseObject(_Schema):
    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[ReasoningItem | MessageItem | FunctionCallItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]


@_schema
class ResponseDeleted(_Schema):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


@_schema
class EmbeddingItem(_Schema):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@_schema
class EmbeddingUsage(_Schema):
    prompt_tokens: int
    total_tokens: int


@_schema
class EmbeddingList(_Schema):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


@_schema
class ModelObject(_Schema):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    chat: bool


@_schema
class ModelList(_Schema):
    object: Literal["list"]
    data: list[ModelObject]


@_schema
class Tokens(_Schema):
    tokens: list[int]
    count: int
    max_model_len: int


@_schema
class Text(_Schema):
    prompt: str


@_schema
class Version(_Schema):
    version: str


@_schema
class Health(_Schema):
    status: str


@_schema
class ErrorDetail(_Schema):
    message: str
    type: str
    param: str | None
    code: str | None


@_schema
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
