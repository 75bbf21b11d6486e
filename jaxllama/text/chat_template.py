"""Chat templates: from messages to a prompt, by the checkpoint's Jinja template.

``render`` runs the template in jinja2's immutable sandbox with the functions that templates for
transformers expect: ``raise_exception``, ``strftime_now``, a plain ``tojson``, loop controls, the
``generation`` block, and whitespace trimmed around blocks. Templates come with downloaded weights.
The sandbox keeps them from the interpreter's internals, but does not limit their time.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxllama.errors import JaxLlamaError


def render(template: str, variables: Mapping[str, object], source: str) -> str:
    """Return the prompt.

    Raises JaxLlamaError naming ``source`` when the template is broken, refuses the messages
    (``raise_exception``) or uses something that the sandbox forbids.
    """
    try:
        return _compile(template).render(**variables)
    # A template is a foreign program. Besides Jinja's own errors its expressions can raise others,
    # such as TypeError.
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise JaxLlamaError(f"{source}: chat template: {why[:500]}") from None


class _Generation(jinja2.ext.Extension):
    """Renders ``{% generation %}...{% endgeneration %}`` as its body.

    The block marks the assistant's text for training.
    """

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
    functions: dict[str, Any] = {
        "raise_exception": _raise,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    return environment.from_string(template)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """Return JSON text. Jinja's own filter escapes HTML, which is wrong in prompts."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
