"""The rule of ``strict`` schemas: every object forbids further properties.

Without ``additionalProperties: false`` an answer may have any property that the schema does not
name, so the schema would not hold it to anything strict. OpenAI's and Anthropic's APIs refuse such
a schema too. Left out: OpenAI's rule that every property is required.
"""

from __future__ import annotations

from typing import Any

from jaxllama.serving.api.schemas import ApiError
from jaxllama.typing import JsonObject

# Keywords whose value is a schema or a list of schemas, and those whose values are named schemas.
_SCHEMAS = (
    *("additionalProperties", "items", "prefixItems", "anyOf", "allOf", "oneOf"),
    *("if", "then", "else"),
)
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def check_strict(schema: JsonObject, param: str) -> None:
    """Raise ApiError 400 that names the first object that allows further properties.

    param: the path of the schema in the body.
    """
    waiting: list[tuple[str, Any]] = [(param, schema)]
    while waiting:
        place, node = waiting.pop()
        if not isinstance(node, dict):
            continue
        kind = node.get("type")
        is_object = kind == "object" or "properties" in node
        is_object |= isinstance(kind, list) and "object" in kind
        if is_object and node.get("additionalProperties") is not False:
            raise ApiError(
                400,
                f"{place}: an object of a strict schema needs additionalProperties: false",
                param=param,
                code="invalid_json_schema",
            )
        found: list[tuple[str, Any]] = []
        for key in _SCHEMAS:
            value = node.get(key)
            if isinstance(value, list):
                found += [(f"{place}.{key}[{index}]", part) for index, part in enumerate(value)]
            else:
                found.append((f"{place}.{key}", value))
        for key in _NAMED:
            value = node.get(key)
            if isinstance(value, dict):
                found += [(f"{place}.{key}.{name}", part) for name, part in value.items()]
        waiting += reversed(found)
