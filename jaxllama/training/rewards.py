"""Rewards that a program can verify, and a caller's own.

    reward = reward_of(config.reward)
    reward("The sum is 46.", {"prompt": "12+34=", "answer": "46"})      a float

A built-in reward is 1 for a right answer and 0 for any other. ``reward_of`` finds wrong settings
before the first step. A line that lacks what its reward reads raises JaxLlamaError naming the key.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import math
import operator
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from jaxllama import extras
from jaxllama.errors import JaxLlamaError
from jaxllama.training.tuning import RewardConfig
from jaxllama.typing import JsonObject

Reward = Callable[[str, JsonObject], float]

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?|-?\.\d+")
# An expression of a data file may not take the program's time.
_LONGEST_EXPRESSION = 1000


def reward_of(config: RewardConfig) -> Reward:
    """Return the function of (answer, line) that a configuration names.

    Raises JaxLlamaError for a pattern, schema or function that is wrong or not there.
    """
    if config.kind == "exact":
        return _exact
    if config.kind == "arithmetic":
        return _arithmetic
    if config.kind == "regex":
        assert config.pattern is not None
        try:
            return functools.partial(_regex, re.compile(config.pattern, re.DOTALL))
        except re.error as error:
            raise JaxLlamaError(f"reward.pattern = {config.pattern!r}: {error}") from None
    if config.kind == "json_schema":
        whole = None if config.schema is None else _schema_file(config.schema)
        return functools.partial(_json_schema, whole)
    assert config.function is not None
    return functools.partial(_own, config.function, _function(config.function))


def _needed(line: JsonObject, key: str) -> object:
    if key not in line:
        raise JaxLlamaError(f"the line of {str(line.get('prompt'))[:60]!r} has no {key!r}")
    return line[key]


def _exact(answer: str, line: JsonObject) -> float:
    return float(answer.strip() == str(_needed(line, "answer")).strip())


def _regex(pattern: re.Pattern[str], answer: str, line: JsonObject) -> float:
    found = pattern.search(answer)
    if found is None or not pattern.groups:
        return float(found is not None)
    return float((found[1] or "").strip() == str(_needed(line, "answer")).strip())


def _arithmetic(answer: str, line: JsonObject) -> float:
    numbers = _NUMBER.findall(answer)
    value = _value(str(_needed(line, "answer")))
    try:
        return float(bool(numbers) and Fraction(numbers[-1].replace(",", "")) == value)
    except ValueError:  # more digits than Python reads
        return 0.0


def _value(expression: str) -> Fraction:
    """Return the exact value of a number or of a sum, product or power of numbers."""
    try:
        if len(expression) > _LONGEST_EXPRESSION:
            raise ValueError("too long")
        tree = ast.parse(expression.replace(",", "").strip(), mode="eval").body
        return _evaluated(tree, expression.replace(",", "").strip())
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        raise JaxLlamaError(f"answer = {expression[:60]!r}: no arithmetic: {error}") from None


_OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _evaluated(tree: ast.expr, text: str) -> Fraction:
    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        return Fraction(ast.get_source_segment(text, tree) or "")
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_evaluated(tree.operand, text)
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATIONS:
        left, right = _evaluated(tree.left, text), _evaluated(tree.right, text)
        return _OPERATIONS[type(tree.op)](left, right)
    raise ValueError("expected numbers, + - * / and parentheses")


def _validators():
    try:
        import jsonschema.validators
    except ImportError:
        raise extras.missing("jsonschema", "reward.kind = 'json_schema'") from None
    return jsonschema


def _schema_file(path: str) -> JsonObject:
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise JaxLlamaError(f"reward.schema = {path!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise JaxLlamaError(f"reward.schema = {path!r}: not JSON: {error}") from None
    return _checked_schema(schema, f"reward.schema = {path!r}")


def _checked_schema(schema: object, where: str) -> JsonObject:
    library = _validators()
    if not isinstance(schema, dict):
        raise JaxLlamaError(f"{where}: expected an object")
    try:
        library.validators.validator_for(schema).check_schema(schema)
    except library.SchemaError as error:
        raise JaxLlamaError(f"{where}: {error.message}") from None
    return schema


def _json_schema(whole: JsonObject | None, answer: str, line: JsonObject) -> float:
    schema = _checked_schema(_needed(line, "schema"), "schema") if whole is None else whole
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return 0.0
    return float(_validators().validators.validator_for(schema)(schema).is_valid(value))


def _function(name: str) -> Callable[[str, JsonObject], object]:
    """Return the function "module:function"; modules of the working directory are found too."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise JaxLlamaError(f'reward.function = {name!r}: expected "module:function"')
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise JaxLlamaError(f"reward.function = {name!r}: {error}") from None
    if not callable(function):
        raise JaxLlamaError(f"reward.function = {name!r}: not a function")
    return function


def _own(
    name: str, function: Callable[[str, JsonObject], object], answer: str, line: JsonObject
) -> float:
    value = function(answer, line)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise JaxLlamaError(f"reward.function = {name!r}: returned {value!r}, not a finite number")
    return float(value)
