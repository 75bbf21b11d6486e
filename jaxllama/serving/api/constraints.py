"""The Grammar that a body's answer must match: output forms, and forced or strict calls of tools.

    form(body) -> AnswerConstraint | None          response_format, structured_outputs, guided_*
    constraint(form, reading, tokenizer) -> Grammar | None      with the text allowed around it

The forms are a JSON schema, any JSON object, a regular expression, one of several texts
(``choice``), a grammar in Lark or GBNF, and ``structural_tag``. A structural tag is free text in
which each trigger is followed by one of several structures. The names are vLLM's.

Reasoning is free, and the form begins after it. With tools, a forced answer consists of calls only.
With tools and a form the answer is either calls or the form. Otherwise the text around calls is
free, and the arguments follow their schema if a function is ``strict``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

from jaxllama.engine.best_effort import lenient
from jaxllama.engine.grammar_process import enforceable
from jaxllama.engine.request import Grammar
from jaxllama.serving.api.bodies import GenerationBody, StructuralTag
from jaxllama.serving.api.reading import Reading
from jaxllama.serving.api.schemas import ApiError
from jaxllama.serving.api.strict import check_strict
from jaxllama.serving.api.tools import Tools
from jaxllama.serving.tools.lark import ANYTHING, LarkRules, quoted, regex_terminal, tight
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import JsonObject


@dataclasses.dataclass(frozen=True)
class AnswerConstraint:
    """A form of output. notes: the parts of a schema that are not enforced."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    notes: tuple[str, ...] = ()
    is_lenient: bool = False

    @property
    def nested(self) -> JsonObject:
        """This form as a nested grammar with the name "form"."""
        if self.kind == "json_schema":
            return {"name": "form", "json_schema": tight(json.loads(self.source), self.is_lenient)}
        source = self.source
        if self.kind == "regex":
            source = f"start: {regex_terminal(source)}"
        return {"name": "form", "lark_grammar": source}


def form(body: GenerationBody) -> AnswerConstraint | None:
    """Return the body's form. Raises ApiError 400 for two forms or an incomplete one."""
    regex, grammar = body.guided_regex, body.guided_grammar
    asked = {
        "response_format": _response_format(body),
        "structured_outputs": _structured(body),
        "guided_json": _json(body.guided_json),
        "guided_regex": None if regex is None else AnswerConstraint("regex", regex),
        "guided_choice": _choice(body.guided_choice),
        "guided_grammar": None if grammar is None else AnswerConstraint("lark", grammar),
        "grammar": None if body.grammar is None else AnswerConstraint("lark", body.grammar),
        "bad_words": _without(body.bad_words),
    }
    found = {key: value for key, value in asked.items() if value is not None}
    if len(found) > 1:
        raise ApiError.at(list(found)[1], f"one form at a time, and {next(iter(found))} is another")
    return next(iter(found.values()), None)


def _response_format(body: GenerationBody) -> AnswerConstraint | None:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return AnswerConstraint("json_schema", '{"type": "object"}')
    if asked.type == "structural_tag":
        if asked.structures is None or asked.triggers is None:
            raise _missing("response_format.structures and triggers", "response_format.structures")
        return _tagged(asked, "response_format")
    if asked.type == "regex" and asked.regex is not None:
        return AnswerConstraint("regex", asked.regex)
    if asked.type == "json_schema" and asked.json_schema is not None:
        if asked.json_schema.strict:
            check_strict(asked.json_schema.schema_, "response_format.json_schema.schema")
            return AnswerConstraint("json_schema", json.dumps(asked.json_schema.schema_))
        # The engine refuses an invalid schema.
        [(schema, notes)] = enforceable([asked.json_schema.schema_])
        return AnswerConstraint("json_schema", json.dumps(lenient(schema)), notes, is_lenient=True)
    raise _missing(f"response_format.{asked.type}", f"response_format.{asked.type}")


def _structured(body: GenerationBody) -> AnswerConstraint | None:
    asked = body.structured_outputs
    if asked is None:
        return None
    tag = asked.structural_tag
    if isinstance(tag, str):
        try:
            tag = StructuralTag.model_validate_json(tag)
        except ValueError:
            reason = "structural_tag needs structures and triggers"
            raise ApiError.at("structured_outputs", reason) from None
    found = [
        value
        for value in (
            _json(asked.json_, "structured_outputs"),
            None if asked.regex is None else AnswerConstraint("regex", asked.regex),
            _choice(asked.choice),
            None if asked.grammar is None else AnswerConstraint("lark", asked.grammar),
            AnswerConstraint("json_schema", '{"type": "object"}') if asked.json_object else None,
            None if tag is None else _tagged(tag, "structured_outputs"),
        )
        if value is not None
    ]
    if len(found) != 1:
        raise ApiError.at("structured_outputs", f"one form at a time, and these are {len(found)}")
    return found[0]


def _json(schema: str | JsonObject | None, param: str = "guided_json") -> AnswerConstraint | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, dict):
            raise ApiError.at(param, "a JSON schema is a JSON object")
    return AnswerConstraint("json_schema", json.dumps(schema))


def _choice(texts: Sequence[str] | None) -> AnswerConstraint | None:
    if texts is None:
        return None
    return AnswerConstraint("lark", "start: " + " | ".join(map(quoted, texts)))


def _without(words: Sequence[str] | None) -> AnswerConstraint | None:
    """Return a form for texts that contain none of the words."""
    if not words:
        return None
    return AnswerConstraint(
        "lark",
        f"start: TEXT\nTEXT: ANY & ~(ANY ({' | '.join(map(quoted, words))}) ANY)\nANY: {ANYTHING}",
    )


def _tagged(asked: Any, param: str) -> AnswerConstraint:
    """Return a form for structural tags. Each structure must begin with one of the triggers."""
    rules = []
    for index, structure in enumerate(asked.structures):
        trigger = next((t for t in asked.triggers if structure.begin.startswith(t)), None)
        if trigger is None:
            raise ApiError.at(param, f"no trigger begins {structure.begin!r}")
        rest = _literal(structure.begin.removeprefix(trigger))
        schema = json.dumps(tight(structure.schema_))
        rules += [
            f"head_{index}[lazy]: TEXT {_literal(trigger)}",
            f"tag_{index}: head_{index} {rest} %json {schema} {_literal(structure.end)}",
        ]
    tags = " | ".join(f"tag_{index}" for index in range(len(asked.structures)))
    return AnswerConstraint(
        "lark", "\n".join([f"start: ({tags})* end", "end: TEXT", *rules, f"TEXT: {ANYTHING}"])
    )


def constraint(
    form: AnswerConstraint | None, reading: Reading, tokenizer: Tokenizer | None
) -> Grammar | None:
    """Return the grammar of an answer, or None if it is free; see the module docstring."""
    tools = reading.tools
    is_strict = tools is not None and any(function.strict for function in tools.functions)
    if form is None and not is_strict and not (tools is not None and tools.is_forced):
        return None
    if form is not None and tools is None and reading.tags is None and reading.opened is None:
        return Grammar(form.kind, form.source)
    assert tokenizer is not None  # a chat model has one
    lark = LarkRules(tokenizer)
    thought = _thought(reading, lark)
    if reading.opened is not None:
        answer = _in_channels(form, tools, lark)
    elif tools is None:
        answer = "@form"
    else:
        answer = _calls(tools, lark)
        if not tools.is_forced:
            answer = f"({answer} | @form)" if form else _among_text(tools, lark)
    source = f"start: {thought} {answer}\n{lark}"
    nested = [form.nested] if form and "@form" in answer else []
    if not nested:
        return Grammar("lark", source)
    return Grammar("lark", json.dumps({"grammars": [{"lark_grammar": source}, *nested]}))


def _in_channels(form: AnswerConstraint | None, tools: Tools | None, lark: LarkRules) -> str:
    """Return the rule of harmony's last message: a call, or the final one."""
    final = lark.literal("<|channel|>final<|message|>")
    if tools is None:
        return f"{final} @form"
    calls = _calls(tools, lark)
    return calls if tools.is_forced else f"({calls} | {final} {'@form' if form else 'TEXT'})"


def _thought(reading: Reading, lark: LarkRules) -> str:
    if reading.opened is not None:
        # The prompt ends with the first message's start.
        begin, start = "<|channel|>analysis<|message|>", "<|start|>assistant"
        lark.up_to("thought", "<|end|>")
        return f"({lark.literal(begin)} thought {lark.literal(start)})?"
    if reading.tags is None:
        return ""
    first, last = reading.tags
    lark.up_to("thought", last)
    lark.add("gap", r"/\n{0,2}/")
    if reading.is_thinking:
        return "thought gap"
    return f"({lark.literal(first)} thought gap)?"


def _calls(tools: Tools, lark: LarkRules) -> str:
    """Add the rules of calls. Returns the name of the rule for one or several calls."""
    form = tools.format
    names: list[str] = []
    for index, function in enumerate(tools.functions):
        schema: JsonObject = {"type": "object", **(function.parameters or {})}
        rule = form.rule(function.name, schema, not function.strict, lark)
        names.append(lark.add(f"call_{index}", rule))
    lark.add("call", " | ".join(names))
    lark.add("one", f"{lark.literal(form.begin)} call {lark.literal(form.end)}")
    return lark.add("calls", f"{lark.literal(form.section[0])} {_some_calls(tools, lark)}")


def _some_calls(tools: Tools, lark: LarkRules, first: str = "one") -> str:
    """Return the text of calls behind a section's beginning. first: the rule of the first call."""
    form = tools.format
    several = not tools.only_one and form.separator is not None
    more = f"({lark.literal(form.separator or '')} one)*" if several else ""
    calls = f"{first} {more}"
    if form.is_list:
        blank = '" "? ' if form.section[0] else ""
        calls = f'{blank}"[" {calls} "]"'
    return f"{calls} {lark.literal(form.section[1])}"


def _among_text(tools: Tools, lark: LarkRules) -> str:
    """Return the rule for free text that may contain calls."""
    form = tools.format
    if not form.mark:
        lark.add("OTHER", r"/[^{\[\s](.|\n)*/")
        return "(calls | OTHER)"
    lark.up_to("head", form.mark)
    lark.add("end", "TEXT")
    if form.section[0]:
        behind = lark.literal(form.section[0].removeprefix(form.mark))
        lark.add("tag", f"head {behind} {_some_calls(tools, lark)}")
        return "(tag | end)"
    behind = lark.literal(form.begin.removeprefix(form.mark))
    lark.add("tag", f"head {behind} call {lark.literal(form.end)}")
    return "(tag | end)" if tools.only_one else "(tag* end)"


def _literal(text: str) -> str:
    return quoted(text) if text else ""


def _missing(what: str, param: str) -> ApiError:
    return ApiError(400, f"{what}: is required", param=param, code="missing_parameter")
