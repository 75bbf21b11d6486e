"""Messages in the one form that every chat template gets, whoever sends them.

    normalized(messages, template) -> list of messages
    shown_tools(tools) -> list of tools, or None

Clients, training files and Python callers write the same conversation in different ways.

| given | form |
|---|---|
| ``content`` null or missing | "" |
| a list of text parts | a list if the template shows it, else the joined text |
| a tool's result that is an object | JSON text |
| ``arguments`` as JSON text or an object | an object, or text for a template that needs text |
| ``arguments`` null, missing, "" or "null" | no arguments |
| ``reasoning``, ``thinking``, ``reasoning_content`` | all three, since templates read one of them |
| the role "developer" | "system", unless the template knows the role |
| null keys, empty ``tool_calls`` | left out |
| a tool's result without ``name`` | the name of the function that was called |

Arguments that are no JSON stay text: the template decides. Images and audio are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllama.errors import JaxLlamaError
from jaxllama.files import short
from jaxllama.typing import JsonObject

if TYPE_CHECKING:
    from jaxllama.text.chat.template import ChatTemplate

Messages = Sequence[Mapping[str, object]]
REASONING = ("reasoning_content", "thinking", "reasoning")
_FUNCTION_KEYS = ("name", "description", "parameters")
_TEXT_PARTS = (None, "text", "input_text", "output_text")


def check_messages(messages: Messages) -> None:
    """Raise JaxLlamaError unless these are objects with a role."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise JaxLlamaError(
            f'messages = {short(messages)}: expected a list of {{"role": ..., "content": ...}}'
        )


def normalized(messages: Messages, template: ChatTemplate) -> list[JsonObject]:
    """Return new messages; the module docstring says how they differ.

    Raises JaxLlamaError that names what no template can show.
    """
    check_messages(messages)
    found: list[JsonObject] = []
    names: dict[str, str] = {}  # of the called functions, by the call's id
    for message in messages:
        plain: JsonObject = {key: value for key, value in message.items() if value is not None}
        role = str(plain.get("role"))
        if role == "developer" and not template.knows_developer:
            role = plain["role"] = "system"
        plain["content"] = _content(plain.get("content", ""), role, template)
        thought = next((plain[key] for key in REASONING if key in plain), None)
        if thought is not None:
            plain |= dict.fromkeys(REASONING, thought)
        calls: Any = plain.pop("tool_calls", None)
        if calls:  # templates test whether the key exists
            plain["tool_calls"] = [_call(call, template) for call in _listed(calls, "tool_calls")]
            names |= {str(c.get("id")): c["function"]["name"] for c in plain["tool_calls"]}
        called = plain.get("tool_call_id")
        if role == "tool" and isinstance(called, str) and called in names:
            plain.setdefault("name", names[called])
        found.append(plain)
    return found


def shown_tools(tools: Sequence[object] | None) -> list[object] | None:
    """Return tools as OpenAI's API has them, in its order of keys; None for no tools.

    A function alone becomes a tool. Null keys are left out.
    """
    found: list[object] = []
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and "name" in function:
            keys = dict.fromkeys((*_FUNCTION_KEYS, *function))
            known = {key: function[key] for key in keys if function.get(key) is not None}
            tool = {"type": "function", "function": known}
        found.append(tool)
    return found or None


def content_text(content: object) -> str:
    """Return a message's text; of parts, their texts joined."""
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else _part_text(part) for part in content)
    return content if isinstance(content, str) else ""


def _content(content: object, role: str, template: ChatTemplate) -> object:
    if isinstance(content, list):
        text = content_text(content)  # refuses other parts
        if len(content) > 1 and template.takes_parts(role):
            return [{"type": "text", "text": content_text([part])} for part in content]
        return text
    if isinstance(content, Mapping) and role == "tool":
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise JaxLlamaError(f"content = {str(content)[:60]!r}: expected text or a list of parts")
    return content


def _part_text(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS:
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise JaxLlamaError(f"content: a part of type {str(kind)[:60]!r}: only text is read")
    if not isinstance(text, str):
        raise JaxLlamaError("content: a part of type 'text' needs a text")
    return text


def _call(call: object, template: ChatTemplate) -> JsonObject:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise JaxLlamaError("tool_calls: a call needs a function with a name")
    assert isinstance(call, Mapping)
    arguments = function.get("arguments")
    function_call = {"name": function["name"], "arguments": _arguments(arguments, template)}
    outer = {k: v for k, v in call.items() if v is not None and k not in ("name", "arguments")}
    return {**outer, "type": "function", "function": function_call}


def _arguments(arguments: object, template: ChatTemplate) -> object:
    """Return a call's arguments as the template takes them."""
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        arguments = {}
    is_text = isinstance(arguments, str)
    if is_text and not template.takes_text_arguments:
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    if template.takes_text_arguments and not is_text:
        return json.dumps(arguments, ensure_ascii=False)
    return arguments


def _listed(value: object, key: str) -> list[object]:
    if not isinstance(value, (list, tuple)):
        raise JaxLlamaError(f"{key}: expected a list")
    return list(value)
