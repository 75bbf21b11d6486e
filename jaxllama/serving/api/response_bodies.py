"""The body of POST /v1/responses, and its translation to a Chat.

    Responses                                   the body
    to_chat(body, earlier) -> (Chat, messages)  earlier: messages of ``previous_response_id``

``messages`` is the conversation so far without the instructions, which hold for one response only.
Items that are not messages join the assistant's message. A function_call becomes one of its calls,
reasoning its ``reasoning_content``. A function_call_output becomes a message of the tool.

Tools other than functions are dropped. Refused with an error: images and files, ``conversation``,
stored prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from jaxllama.serving.api.bodies import (
    FIRST_ERROR,
    Chat,
    FunctionCall,
    Lenient,
    Limit,
    Message,
    OnlyFunctions,
    OpenAIFields,
    SamplingFields,
    Strict,
    ToolCall,
    ToolName,
    explain,
)
from jaxllama.serving.api.schemas import ApiError
from jaxllama.typing import JsonObject


class InputText(Lenient):
    type: Literal["input_text", "output_text", "text"]
    text: str


Parts = Annotated[list[InputText], FIRST_ERROR]


class InputMessage(Lenient):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts


class InputCall(Lenient):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputResult(Lenient):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningText(Lenient):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Lenient):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], FIRST_ERROR] | None = None


Item = InputMessage | InputCall | InputResult | InputReasoning
Items = Annotated[list[Item], Field(min_length=1, max_length=4096), FIRST_ERROR]


class FunctionTool(Strict):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: JsonObject | None = Field(None, alias="schema")


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: str | None = None  # without effect


class Responses(OpenAIFields):
    """Body of POST /v1/responses.  null is the default everywhere."""

    endpoint = "/v1/responses"
    hints = {
        **dict.fromkeys(
            ("max_tokens", "max_completion_tokens", "n_predict"), "send max_output_tokens"
        ),
        "response_format": "send text.format",
        "messages": "send input",
        "prompt": "send input",
        "logprobs": 'send include: ["message.output_text.logprobs"]',
    }
    model: str
    input: str | Items
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Limit | None = None
    text: TextOptions | None = None
    tools: (
        Annotated[list[FunctionTool], Field(max_length=128), FIRST_ERROR, OnlyFunctions] | None
    ) = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    # Extensions, as for chat
    chat_template_kwargs: JsonObject | None = None
    enable_thinking: bool | None = None
    background: bool | None = None
    include: Annotated[list[str], FIRST_ERROR] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # Refused, unless the value has no effect.
    conversation: str | JsonObject | None = None
    image: JsonObject | None = None
    moderation: JsonObject | None = None
    prompt: JsonObject | None = None
    # Without effect: these fields concern OpenAI's own service or its own tools, or are hints.
    access_programs: Any = None
    background_options: JsonObject | None = None
    context_management: Any = None
    max_tool_calls: int | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: str | None = None
    reasoning: JsonObject | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def input_items(self, id: str) -> list[JsonObject]:
        """Return the body's own items as OpenAI lists them.  id: of the response."""
        said: Any = [{"role": "user", "content": self.input}]
        if not isinstance(self.input, str):
            said = [item.model_dump(exclude_none=True) for item in self.input]
        suffix = id.removeprefix("resp_")
        for number, item in enumerate(said):
            kind = item.setdefault("type", "message")
            item.setdefault("id", f"{_ITEM_IDS[kind]}_{suffix}_in{number}")
            if isinstance(item.get("content"), str):
                text = "output_text" if item["role"] == "assistant" else "input_text"
                item["content"] = [{"type": text, "text": item["content"]}]
            if kind != "reasoning":
                item.setdefault("status", "completed")
        return said


LOGPROBS = "message.output_text.logprobs"
_ITEM_IDS = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def _check_fields(body: Responses) -> None:
    if body.top_logprobs and not body.has_logprobs:
        message = f'top_logprobs: needs include: ["{LOGPROBS}"]'
        raise ApiError(400, message, param="top_logprobs", code="invalid_value")
    if not body.background:
        return
    if body.stream:
        raise ApiError.unsupported("background", "a response in the background is not streamed")
    if body.store is False:
        message = "background: needs store, as its client comes back for the response"
        raise ApiError(400, message, param="store", code="invalid_value")


_SHARED = (
    *SamplingFields.model_fields,
    *("model", "parallel_tool_calls", "chat_template_kwargs", "enable_thinking"),
    *("bad_words", "allowed_token_ids", "truncate_prompt_tokens"),
    *("include_stop_str_in_output", "grammar"),
)
_ABSENT = {
    "conversation": "send previous_response_id instead",
    "image": "only text is written",
    "moderation": "nothing here moderates",
    "prompt": "no prompts are stored here",
}


def to_chat(body: Responses, earlier: Sequence[Message]) -> tuple[Chat, list[Message]]:
    """Return the Chat and the conversation so far. Raises ApiError 400 for unsupported fields."""
    for key, reason in _ABSENT.items():
        if getattr(body, key):
            raise ApiError(400, f"{key}: {reason}", param=key, code="unsupported")
    _check_fields(body)
    messages = [*earlier]
    if isinstance(body.input, str):
        add_items(messages, [InputMessage(role="user", content=body.input)])
    else:
        add_items(messages, body.input)
    opening = [Message(role="system", content=body.instructions)] if body.instructions else []
    form = body.text.format if body.text else None
    asked: JsonObject = {
        **{name: getattr(body, name) for name in _SHARED},
        "messages": [*opening, *messages],
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": _choice(body.tool_choice),
        "response_format": _format(form) if form else None,
        "logprobs": body.has_logprobs or None,
        "top_logprobs": body.top_logprobs if body.has_logprobs else None,
    }
    try:
        chat = Chat(**asked)
    except ValidationError as error:  # the items contain no message, or too many
        raise explain(error) from None
    return chat.with_notes(body.notes), messages


def add_items(messages: list[Message], items: Sequence[Item]) -> None:
    """Append the items to ``messages``; existing messages are not modified."""
    thought: str | None = None
    for item in items:
        if isinstance(item, InputReasoning):
            thought = "".join(part.text for part in item.content or ()) or None
        elif isinstance(item, InputResult):
            said = _text(item.output)
            messages.append(Message(role="tool", content=said, tool_call_id=item.call_id))
        elif isinstance(item, InputMessage):
            text = _text(item.content)
            messages.append(Message(role=item.role, content=text, reasoning_content=thought))
            thought = None
        else:
            function = FunctionCall(name=item.name, arguments=item.arguments)
            call = ToolCall(id=item.call_id, function=function)
            last = messages[-1] if messages else None
            if last is None or last.role != "assistant" or thought is not None:
                last = Message(role="assistant", reasoning_content=thought)
                messages.append(last)
                thought = None
            more = {"tool_calls": [*(last.tool_calls or ()), call]}
            messages[-1] = last.model_copy(update=more)


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(tool: FunctionTool) -> JsonObject:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


def _choice(choice: str | JsonObject | None) -> str | JsonObject | None:
    """Return a tool choice in chat's format; chat refuses invalid ones."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    tools = choice.get("tools")
    if choice.get("type") == "allowed_tools" and isinstance(tools, list):
        named = [_choice(tool) if isinstance(tool, dict) else tool for tool in tools]
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": named},
        }
    return choice


def _format(form: TextFormat) -> JsonObject:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema_ is None:
        message = "text.format.schema: is required"
        raise ApiError(400, message, param="text", code="missing_parameter")
    return {"type": "json_schema", "json_schema": {"schema": form.schema_, "strict": form.strict}}
