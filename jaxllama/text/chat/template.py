"""Chat templates: from messages to a prompt, by the checkpoint's Jinja template.

    template = chat_template(source, name)        compiled once
    template.render(variables)                    the prompt
    template.takes_text_arguments                 what it accepts, found by rendering small chats

``render`` runs the template in jinja2's immutable sandbox with the functions that templates for
transformers expect: ``raise_exception``, ``strftime_now``, a plain ``tojson``, loop controls, the
``generation`` block, and whitespace trimmed around blocks. Templates come with downloaded weights.
The sandbox keeps them from the interpreter's internals, but does not limit their time.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxllama.errors import JaxLlamaError
from jaxllama.text.chat.prompt_text import MARKS
from jaxllama.typing import JsonObject

# Texts of the small chats, which no template changes.
_ONE, _TWO = "jaxllamaone", "jaxllamatwo"
_CALL_ID = "callcall1"  # Mistral's templates want nine letters and digits
_PARAMETERS = {"type": "object", "properties": {}}
_FUNCTION = {"name": "f", "description": "d", "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _FUNCTION}


class ChatTemplate:
    """A compiled template.

    name: the tokenizer's, for errors. special_tokens: their spellings by role, which are variables.
    """

    def __init__(self, source: str, name: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self.name, self.special_tokens = source, name, special_tokens

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        functions: dict[str, Any] = {"raise_exception": _raise, "strftime_now": _strftime_now}
        environment.globals.update(functions)
        return environment.from_string(self.source)

    def render(self, variables: Mapping[str, object]) -> str:
        """Return the prompt.

        Raises JaxLlamaError when the template is broken, refuses the messages
        (``raise_exception``) or uses something that the sandbox forbids.
        """
        try:
            return self._compiled.render(self.special_tokens, **variables)
        # A template is a foreign program. Besides Jinja's own errors its expressions can raise
        # others, such as TypeError.
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise JaxLlamaError(f"{self.name}: chat template: {why[:500]}") from None

    # What the template accepts

    @functools.cached_property
    def takes_text_arguments(self) -> bool:
        """Whether a call's arguments must be JSON text, because an object breaks the template."""
        as_object = self._shown(_call({_ONE: _TWO}))
        text = json.dumps({_ONE: _TWO})
        has_object = as_object is not None and repr({_ONE: _TWO}) not in as_object
        return not has_object and text in (self._shown(_call(text)) or "")

    def takes_parts(self, role: str) -> bool:
        """Return whether the template shows a list of text parts as it shows their text."""
        return role in self._roles_with_parts

    @functools.cached_property
    def _roles_with_parts(self) -> frozenset[str]:
        parts = [{"type": "text", "text": text} for text in (_ONE, _TWO)]
        found: list[str] = []
        for role in ("system", "user", "assistant", "tool"):
            joined, listed = (self._shown(_chat(role, content)) for content in (_ONE + _TWO, parts))
            if joined is not None and listed is not None and _ONE in joined:
                pattern = re.escape(joined).replace(_ONE + _TWO, rf"{_ONE}\s*{_TWO}")
                found += [role] if re.fullmatch(pattern, listed) else []
        return frozenset(found)

    @functools.cached_property
    def knows_developer(self) -> bool:
        """Whether the template has the role that OpenAI calls "developer"."""
        return re.search(r"""['"]developer['"]""", self.source) is not None

    @functools.cached_property
    def shows_tools(self) -> bool:
        """Whether a prompt with tools differs from one without."""
        chats = [_chat(role, _ONE) for role in ("system", "user")]
        plain = [self._shown(chat) for chat in chats]
        return plain == [None, None] or [self._shown(chat, [_TOOL]) for chat in chats] != plain

    @functools.cached_property
    def shows_calls(self) -> bool:
        """Whether a prompt with an earlier call of a tool differs from one without."""
        arguments = {_ONE: _TWO}
        called = self._shown(
            _call(json.dumps(arguments) if self.takes_text_arguments else arguments)
        )
        return called is None or called != self._shown(_chat("assistant", ""))

    def _shown(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None = None
    ) -> str | None:
        """Return a small chat's prompt; None if the template refuses it."""
        variables = {"messages": messages, "tools": tools, "documents": None}
        try:
            return self.render({**variables, "add_generation_prompt": False})
        except JaxLlamaError:
            return None


@functools.lru_cache(maxsize=16)
def chat_template(
    source: str, name: str, special_tokens: tuple[tuple[str, str], ...] = ()
) -> ChatTemplate:
    """Return a template, compiled once for all tokenizers with the same tokens."""
    return ChatTemplate(source, name, dict(special_tokens))


def _chat(role: str, content: object) -> list[JsonObject]:
    """Return a small chat with a message of this role."""
    question: JsonObject = {"role": "user", "content": "q"}
    message: JsonObject = {"role": role, "content": content}
    if role == "tool":
        return [*_call({}), {**message, "tool_call_id": _CALL_ID, "name": "f"}]
    if role == "user":
        return [message]
    if role == "system":
        return [message, question]
    return [question, message]


def _call(arguments: object) -> list[JsonObject]:
    """Return a small chat with a call of a tool."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


class _Generation(jinja2.ext.Extension):
    """Renders ``{% generation %}...{% endgeneration %}`` as its body, in a scope of its own.

    The block marks the assistant's text for training.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON text. Jinja's own filter escapes HTML, which is wrong in prompts."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Marks of ours stay, since they are taken out of the prompt again.
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[0] in MARKS else json.dumps(match[0])[1:-1]


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
