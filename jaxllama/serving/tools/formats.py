"""The table of formats in which models write calls of tools.

    format_of(template) -> CallFormat | None    found by the chat template; None if it is unknown

A format is a row: a ``CallFormat`` with the strings around a call, and a reader. ``json_calls`` has
the formats with JSON, ``markup`` those in tags, ``literals`` those like Python. A new family is a
row in one of them, and a line here. Each format reads an answer's text as it comes, and writes the
rule of a grammar to which a forced or strict call is held.
"""

from __future__ import annotations

from jaxllama.serving.tools import json_calls, literals, markup
from jaxllama.serving.tools.format import CallFormat

FORMATS: tuple[CallFormat, ...] = (  # the first whose marks a template contains
    json_calls.HARMONY,
    json_calls.KIMI,
    markup.DEEPSEEK_V4,
    markup.DEEPSEEK_V32,
    json_calls.DEEPSEEK_V31,
    json_calls.DEEPSEEK_V3,
    markup.MINIMAX,
    json_calls.MINIMAX_M1,
    json_calls.NEMOTRON,
    literals.GEMMA,
    literals.FUNCTION_GEMMA,
    literals.LFM2,
    markup.SEED,
    markup.QWEN,
    markup.GLM_47,
    markup.GLM,
    json_calls.MISTRAL,
    json_calls.MISTRAL_LIST,
    json_calls.HERMES,
    literals.PYTHONIC,
    json_calls.LLAMA3,
)


def format_of(template: str) -> CallFormat | None:
    """Return the first format whose marks a template contains; None for an unknown form."""
    for form in FORMATS:
        is_foreign = any(mark in template for mark in form.foreign)
        if any(mark in template for mark in form.marks) and not is_foreign:
            return form
    return None
