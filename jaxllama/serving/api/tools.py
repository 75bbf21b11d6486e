"""The meaning of a chat's ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    offered(body, template) -> Tools | None      None if the model is shown no tools

``auto`` lets the model decide, ``required`` demands at least one call, and a function's name
demands that function. ``none`` shows the model no tools. ``allowed_tools`` restricts the calls to
some of the shown tools. The template's ``CallFormat`` says how calls are written.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllama.engine.best_effort import MOST_NOTES
from jaxllama.engine.grammar_process import enforceable
from jaxllama.serving.api.bodies import Chat, Function
from jaxllama.serving.api.schemas import ApiError
from jaxllama.serving.api.strict import check_strict
from jaxllama.serving.tools.format import CallFormat
from jaxllama.serving.tools.formats import format_of
from jaxllama.typing import JsonObject


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a chat.

    shown: all tools, in the form that templates expect. functions: those that may be called.
    is_forced: at least one must be called. only_one: at most one call is allowed. earlier: number
    of calls in the conversation. notes: the parts of schemas that are not enforced.
    """

    shown: tuple[JsonObject, ...]
    functions: tuple[Function, ...]
    is_forced: bool
    only_one: bool
    format: CallFormat
    earlier: int = 0
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> dict[str, JsonObject]:
        """The schema of the arguments of each tool that may be called."""
        return {function.name: function.parameters or {} for function in self.functions}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)


def offered(body: Chat, template: str) -> Tools | None:
    """Return the tools of a chat, or None if the model is shown none.

    Raises ApiError 400 for a template whose form of calls is unknown and for an invalid
    ``tool_choice``. Also for the choice of a tool that does not exist. Raises JaxLlamaError for
    schemas that take too much to read.
    """
    mode, chosen = _choice(body)
    if not body.tools:
        if mode != "auto":
            raise ApiError.at("tool_choice", f"{mode!r} needs tools")
        return None
    functions = {tool.function.name: tool.function for tool in body.tools}
    if len(functions) < len(body.tools):
        raise ApiError.at("tools", "two of them have the same name")
    for index, tool in enumerate(body.tools):
        if tool.function.strict and tool.function.parameters is not None:
            check_strict(tool.function.parameters, f"tools[{index}].function.parameters")
    for name in chosen or ():
        if name not in functions:
            raise ApiError.at("tool_choice", f"no tool is called {name!r}")
    if mode == "none":
        return None
    shown = tuple(tool.model_dump(exclude_none=True) for tool in body.tools)
    allowed = tuple(functions[name] for name in chosen or functions)
    form = format_of(template)
    if form is None:
        message = (
            "tools: the model's chat template calls no functions, or in a form that is not known "
            "here; response_format with a JSON schema works for every model"
        )
        raise ApiError(400, message, param="tools", code="unsupported")
    only_one = body.parallel_tool_calls is False or mode == "function"
    earlier = sum(len(message.tool_calls or ()) for message in body.messages)
    notes: tuple[str, ...] = ()
    if mode != "auto" or any(function.strict for function in allowed):
        allowed, notes = _enforced(allowed)
    return Tools(shown, allowed, mode != "auto", only_one, form, earlier, notes)


def _enforced(functions: tuple[Function, ...]) -> tuple[tuple[Function, ...], tuple[str, ...]]:
    """Return (functions whose schemas can be enforced, notes of the rest)."""
    schemas = {f.name: f.parameters for f in functions if f.parameters and not f.strict}
    found = dict(zip(schemas, enforceable(list(schemas.values())), strict=True))
    notes = [f"{name}: {note}" for name, (_, ignored) in found.items() for note in ignored]
    kept = (
        f.model_copy(update={"parameters": found[f.name][0]}) if f.name in found else f
        for f in functions
    )
    return tuple(kept), tuple(notes[:MOST_NOTES])


def _choice(body: Chat) -> tuple[str, list[str] | None]:
    """Return (auto, none, required or function; the allowed names, None for all)."""
    choice = body.tool_choice
    if choice is None or choice == "none":
        return ("auto", None) if choice is None or not body.tools else ("none", None)
    if choice in ("auto", "required"):
        return str(choice), None
    asked: Any = choice  # a value of any type
    try:
        if asked["type"] == "function":
            return "function", [_name(asked["function"]["name"])]
        if asked["type"] == "allowed_tools":
            allowed = asked["allowed_tools"]
            names = [_name(tool["function"]["name"]) for tool in allowed["tools"]]
            if allowed["mode"] in ("auto", "required") and names:
                return allowed["mode"], names
    except (KeyError, TypeError):
        pass
    raise ApiError.at(
        "tool_choice",
        'allowed are "none", "auto", "required", {"type": "function", "function": {"name": ...}} '
        "and allowed_tools",
    )


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
