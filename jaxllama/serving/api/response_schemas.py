"""The objects of /v1/responses, as dataclasses (``schemas`` has the other objects)."""

from __future__ import annotations

from typing import Literal

from jaxllama.serving.api.schemas import Page, Schema, TokenLogprob, schema
from jaxllama.typing import JsonObject

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


@schema
class OutputText(Schema):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[TokenLogprob]


@schema
class ReasoningPart(Schema):
    type: Literal["reasoning_text"]
    text: str


@schema
class ReasoningItem(Schema):
    id: str
    type: Literal["reasoning"]
    summary: list[None]
    content: list[ReasoningPart]
    status: Status


@schema
class MessageItem(Schema):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: Status


@schema
class FunctionCallItem(Schema):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


@schema
class IncompleteDetails(Schema):
    reason: Literal["max_output_tokens"]


@schema
class ResponseError(Schema):
    code: Literal["server_error"]
    message: str


@schema
class InputDetails(Schema):
    cached_tokens: int


@schema
class OutputDetails(Schema):
    reasoning_tokens: int


@schema
class ResponseUsage(Schema):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


@schema
class ResponseObject(Schema):
    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[ReasoningItem | MessageItem | FunctionCallItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: JsonObject
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]
    warnings: list[str] | None = None
    background: bool = False
    top_logprobs: int = 0


@schema
class InputItemList(Page):
    data: list[JsonObject]


@schema
class InputTokens(Schema):
    object: Literal["response.input_tokens"]
    input_tokens: int


@schema
class ResponseDeleted(Schema):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
