"""Schemas that are not strict: what the library can enforce of them, and a note of the rest.

    enforceable(schema) -> (schema, notes)

The library (llguidance) knows keywords that it ignores, and limits that it cannot turn into an
automaton: a pattern with a look-ahead, bounds of 64 bits, lengths of many digits. A schema with
such a limit loses it. An invalid or unsatisfiable schema stays as it is, and the engine refuses it.
The library's work is not bounded here: ``grammar_process.enforceable`` does it under limits.
"""

from __future__ import annotations

import json
from typing import Any

from jaxllama.typing import JsonObject

MOST_NOTES = 16
# The keywords that limit values of a type, the ones that are dropped first at the end.
_LIMITS = {
    "string": ("format", "minLength", "maxLength", "pattern"),
    "number": ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
_IMPOSSIBLE = "Unsatisfiable schema"


def enforceable(schema: JsonObject) -> tuple[JsonObject, tuple[str, ...]]:
    """Return (the schema without the limits that the library lacks, notes of what is ignored)."""
    is_refused, notes = _checked(schema)
    if is_refused and not notes[0].startswith(_IMPOSSIBLE):
        for drops_all in (False, True):  # limits may be too much only together
            smaller, dropped = _smaller(schema, drops_all)
            is_refused, notes = _checked(smaller)
            if not is_refused:
                schema, notes = smaller, [*dropped, *notes]
                break
    shortened = () if is_refused else (" ".join(note.split())[:200] for note in notes[:MOST_NOTES])
    return schema, tuple(shortened)


def lenient(schema: JsonObject) -> JsonObject:
    """Return a schema whose unknown keywords the library ignores."""
    return {**schema, "x-guidance": {"whitespace_flexible": False, "lenient": True}}


def _checked(schema: JsonObject) -> tuple[bool, list[str]]:
    """Return (whether the library refuses a schema, the library's messages)."""
    try:
        from llguidance import LLMatcher
    except ImportError:  # the engine reports it
        return False, []
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(lenient(schema)))
        return LLMatcher.validate_grammar_with_warnings(grammar)
    except ValueError as error:
        return True, [str(error)]


def _smaller(value: Any, drops_all: bool) -> tuple[Any, list[str]]:
    """Return a part of a schema without the limits that the library lacks, and notes of those.

    drops_all: no limit stays.
    """
    if isinstance(value, list):
        parts = [_smaller(item, drops_all) for item in value]
        return [part for part, _ in parts], [note for _, notes in parts for note in notes]
    if not isinstance(value, dict):
        return value, []
    schema: JsonObject = dict(value)
    dropped = [key for kind, keys in _LIMITS.items() for key in _bad(schema, kind, keys, drops_all)]
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        dropped += ["$ref"]  # nothing is fetched
    notes = [f"Unsupported {key}: {_short(schema.pop(key))}" for key in dropped]
    named = schema.get("patternProperties")
    if isinstance(named, dict):
        bad = [text for text in named if drops_all or _checked({"pattern": text})[0]]
        notes += [f"Unsupported pattern: {text}" for text in bad]
        schema["patternProperties"] = {k: part for k, part in named.items() if k not in bad}
    for key, item in schema.items():
        if key not in ("enum", "const", "default", "examples"):
            schema[key], more = _smaller(item, drops_all)
            notes += more
    return schema, notes


def _bad(schema: JsonObject, kind: str, keys: tuple[str, ...], drops_all: bool) -> list[str]:
    """Return the limits of a type that a schema has and the library lacks, alone or together."""
    given = {key: schema[key] for key in keys if _is_limit(key, schema.get(key))}
    if not given or drops_all:
        return list(given)
    kind = "integer" if kind == "number" and schema.get("type") == "integer" else kind
    bad = [key for key, value in given.items() if _checked({"type": kind, key: value})[0]]
    kept = {key: value for key, value in given.items() if key not in bad}
    while kept:
        is_refused, [*why] = _checked({"type": kind, **kept})
        if not is_refused or why[0].startswith(_IMPOSSIBLE):
            break
        bad.append(kept.popitem()[0])
    return bad


def _is_limit(key: str, value: object) -> bool:
    """Return whether a value is a limit, and not a property of that name or something invalid."""
    if key in ("format", "pattern"):
        return isinstance(value, str)
    kinds = int if key.endswith(("Length", "Items", "Properties")) else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
