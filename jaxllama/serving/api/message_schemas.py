"""The objects of /v1/messages, as dataclasses (``schemas`` has the other objects)."""

from __future__ import annotations

from typing import Literal

from jaxllama.serving.api.schemas import ApiError, Schema, schema
from jaxllama.typing import JsonObject

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


@schema
class TextContent(Schema):
    type: Literal["text"]
    text: str
    citations: None = None


@schema
class ThinkingContent(Schema):
    type: Literal["thinking"]
    thinking: str
    signature: str


@schema
class ToolUseContent(Schema):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


ContentBlock = TextContent | ThinkingContent | ToolUseContent


@schema
class MessageUsage(Schema):
    """input_tokens: those that the cache did not have."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


@schema
class MessageObject(Schema):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    warnings: list[str] | None = None


@schema
class TokenCount(Schema):
    input_tokens: int


@schema
class MessageErrorDetail(Schema):
    type: str
    message: str


@schema
class MessageError(Schema):
    type: Literal["error"]
    error: MessageErrorDetail


_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def message_error(error: ApiError) -> MessageError:
    """Return Anthropic's error object."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERRORS.get(error.status, other)
    return MessageError("error", MessageErrorDetail(kind, str(error)))
