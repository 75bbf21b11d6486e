"""Answers that match a JSON schema or a regular expression, for ``jaxllama generate``.

    options(parser), grammar(args) -> Grammar | None
    generate(lm, rows, grammar, ...) -> list[Generation]    in the order of the rows

Grammars belong to the engine (``jaxllama.engine``), so these prompts pass through one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllama.cli import common
from jaxllama.cli.domains import Parser, add_value, filled, text_file
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import Options

if TYPE_CHECKING:
    from jaxllama.decoding.sampling import Sampling
    from jaxllama.engine.request import Grammar
    from jaxllama.language_model import LanguageModel
    from jaxllama.text.rows import Generation

MOST_ROWS = 16  # prompts at once
_EXCLUDED = ("stream", "draft", "policy", "hosts")


def options(sub: Parser) -> None:
    form = sub.add_mutually_exclusive_group()
    add_value(form, "--json-schema", text_file, "FILE", "answers are JSON of this schema")
    add_value(form, "--regex", filled, "REGEX", "answers match this regular expression")


def grammar(args: argparse.Namespace) -> Grammar | None:
    """Return the grammar that was asked for, or None. Refuses options that it excludes."""
    if args.json_schema is None and args.regex is None:
        return None
    from jaxllama.engine.request import Grammar

    option = "--regex" if args.json_schema is None else "--json-schema"
    for name in _EXCLUDED:
        if getattr(args, name, None):
            raise JaxLlamaError(f"{option} and --{name} exclude each other")
    if args.json_schema is None:
        return Grammar("regex", args.regex)
    return Grammar("json_schema", common.read_text(args.json_schema))


def generate(
    lm: LanguageModel,
    rows: Sequence[str | list[int]],
    form: Grammar,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    adapter: str | None,
    engine_options: Options,
) -> list[Generation]:
    """Continue each row with an answer of this form.

    Raises JaxLlamaError for a form that is invalid, and for a row that does not fit.
    """
    from jaxllama.engine.engine import Engine
    from jaxllama.engine.request import Request
    from jaxllama.text.rows import Generation

    prompts = lm.encode(rows)
    longest = max(map(len, prompts)) + max_new_tokens
    slots = min(len(prompts), MOST_ROWS)
    engine = Engine(lm, max_slots=slots, max_len=longest, max_queue=len(prompts), **engine_options)
    requests = [
        Request(
            id=str(index),
            prompt=tuple(prompt),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=tuple(stop),
            grammar=form,
            adapter=adapter,
        )
        for index, prompt in enumerate(prompts)
    ]
    answers: list[Generation] = []
    events = engine.generate(requests)
    for request in requests:
        row_events = events[request.id]
        error = row_events[-1].error
        if error is not None:
            raise error
        answers.append(
            Generation(
                text="".join(event.text for event in row_events),
                tokens=[token for event in row_events for token in event.tokens],
                logprobs=[value for event in row_events for value in event.logprobs],
                finish_reason="stop" if row_events[-1].finish_reason == "stop" else "length",
            )
        )
    return answers
