"""Chat templates: messages to a prompt, by the Jinja template that a checkpoint carries.

``render`` runs the template in jinja2's immutable sandbox with what templates written for
transformers expect: ``raise_exception``, ``strftime_now``, a plain ``tojson``, loop controls, the
``generation`` block, and whitespace trimmed around blocks.  Templates come with downloaded weights;
the sandbox keeps them from the interpreter's insides, not from taking long.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxllama.errors import JaxLlamaError


def render(template: str, variables: dict[str, Any], source: str) -> str:
    """The prompt.  Raises JaxLlamaError naming ``source`` when the template is broken, refuses the
    messages (``raise_exception``) or asks for what the sandbox does not give."""
    try:
        return _compile(template).render(**variables)
    # A template is a foreign program: besides Jinja's own errors it can raise whatever its
    # expressions do, TypeError for one.
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise JaxLlamaError(f"{source}: chat template: {why[:500]}") from None


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; here it
    renders as its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Any] = {"raise_exception": _raise, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which prompts must not have."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
