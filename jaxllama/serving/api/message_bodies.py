"""The body of POST /v1/messages, Anthropic's API, and its translation to a Chat.

    Messages, CountTokens        the bodies
    to_chat(body, template) -> Chat

``tool_use`` becomes a call, ``tool_result`` a message of the tool, ``thinking`` the reasoning of
the assistant's message. A last message of the assistant is continued, as Anthropic's API does.
Without ``thinking`` a template that can switch it off is asked to.

Tools that Anthropic's service runs are dropped, with a note. Refused with an error: images and
files that are no text. Source: Anthropic's API reference.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from jaxllama.serving.api.bodies import (
    FIRST_ERROR,
    Chat,
    FunctionCall,
    Lenient,
    Message,
    OnlyFunctions,
    SamplingFields,
    Stop,
    Strict,
    ToolCall,
    ToolName,
    explain,
)
from jaxllama.serving.api.schemas import ApiError
from jaxllama.typing import JsonObject


class TextBlock(Lenient):
    type: Literal["text"]
    text: str


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: str


class HiddenThinkingBlock(Lenient):
    type: Literal["redacted_thinking"]


class ToolUseBlock(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class TextSource(Lenient):
    type: Literal["text"]
    data: str


class DocumentBlock(Lenient):
    """A document of plain text."""

    type: Literal["document"]
    source: TextSource
    title: str | None = None


Shown = TextBlock | DocumentBlock


class ToolResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[Shown], FIRST_ERROR] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock
    | ThinkingBlock
    | HiddenThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | DocumentBlock,
    Field(discriminator="type"),
]


class Turn(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], FIRST_ERROR]


class ClientTool(Strict):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    # Without effect: hints for Anthropic's service.
    cache_control: JsonObject | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[list[JsonObject], FIRST_ERROR] | None = None
    allowed_callers: Annotated[list[str], FIRST_ERROR] | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Lenient):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: str | None = None  # without effect
    task_budget: JsonObject | None = None  # without effect


class CountTokens(Strict):
    """Body of POST /v1/messages/count_tokens. null is the default everywhere."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096), FIRST_ERROR]
    system: str | Annotated[list[TextBlock], FIRST_ERROR] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=128), FIRST_ERROR, OnlyFunctions] | None = (
        None
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    # Without effect: these fields concern Anthropic's own service.
    cache_control: JsonObject | None = None
    context_management: JsonObject | None = None
    mcp_servers: Annotated[list[JsonObject], FIRST_ERROR] | None = None
    speed: str | None = None


class Messages(CountTokens, SamplingFields):
    """Body of POST /v1/messages."""

    endpoint = "/v1/messages"
    hints = {
        "max_completion_tokens": "send max_tokens",
        "stop": "send stop_sequences",
        "n": "one answer is written",
        "response_format": "send output_config.format",
        "logprobs": "messages have no logprobs: chat completions have",
    }
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[Stop], Field(max_length=16), FIRST_ERROR] | None = None
    # Extensions, as for chat
    chat_template_kwargs: JsonObject | None = None
    # Without effect, as above.
    container: Any = None
    metadata: JsonObject | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: JsonObject | None = None


def to_chat(body: CountTokens, template: str) -> Chat:
    """Return the Chat of a body, without a limit. Raises ApiError 400 for what a chat refuses."""
    messages: list[Message] = []
    if body.system:
        messages.append(Message(role="system", content=_text(body.system)))
    for turn in body.messages:
        _add(messages, turn)
    if not messages:
        raise ApiError.at("messages", "need a text or a tool's result")
    variables = dict(getattr(body, "chat_template_kwargs", None) or {})
    if "enable_thinking" in template:
        thinks = body.thinking is not None and body.thinking.type != "disabled"
        variables.setdefault("enable_thinking", thinks)
    form = body.output_config.format if body.output_config else None
    form = form or body.output_format
    schema = {"schema": form.schema_, "strict": True} if form else None
    last = messages[-1]
    asked: JsonObject = {
        **{name: getattr(body, name, None) for name in SamplingFields.model_fields},
        "model": body.model,
        "messages": messages,
        "stop": getattr(body, "stop_sequences", None),
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "chat_template_kwargs": variables or None,
        "continue_final_message": last.role == "assistant" and not last.tool_calls or None,
        "response_format": {"type": "json_schema", "json_schema": schema} if schema else None,
        **_choice(body.tool_choice if body.tools else None),
    }
    try:
        chat = Chat(**asked)
    except ValidationError as error:
        raise explain(error) from None
    return chat.with_notes(body.notes)


def _add(messages: list[Message], turn: Turn) -> None:
    """Append the messages of a turn: results of tools first, each as a message of its own."""
    blocks = turn.content
    if isinstance(blocks, str):
        messages.append(Message(role=turn.role, content=blocks))
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            said = block.content
            text = said if isinstance(said, str) else _text(said or [])
            messages.append(Message(role="tool", content=text, tool_call_id=block.tool_use_id))
        elif isinstance(block, (TextBlock, DocumentBlock)):
            texts.append(_text([block]))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = FunctionCall(name=block.name, arguments=arguments)
            calls.append(ToolCall(id=block.id, function=function))
    if texts or calls or thoughts:
        messages.append(
            Message(
                role=turn.role,
                content="\n".join(texts) if turn.role != "assistant" else "".join(texts),
                reasoning_content="\n".join(thoughts) or None,
                tool_calls=calls or None,
            )
        )


def _text(content: str | list[TextBlock] | list[Shown]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(b.text if isinstance(b, TextBlock) else b.source.data for b in content)


def _tool(tool: ClientTool) -> JsonObject:
    said: JsonObject = {"description": tool.description, "strict": tool.strict}
    function = {"name": tool.name, "parameters": tool.input_schema, **said}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> JsonObject:
    if choice is None:
        return {}
    kinds: JsonObject = {"auto": "auto", "any": "required", "none": "none"}
    kinds["tool"] = {"type": "function", "function": {"name": choice.name or ""}}
    parallel = False if choice.disable_parallel_tool_use else None
    return {"tool_choice": kinds[choice.type], "parallel_tool_calls": parallel}
