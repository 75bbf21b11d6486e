"""Frozen dataclasses from TOML, with checks whose messages name the key."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

T = typing.TypeVar("T")


def read_toml(path: Path) -> JsonObject:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JaxLlamaError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JaxLlamaError(f"{path}: not a TOML file: {error}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error: which known word is close to ``word``, or "" if none is."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def from_dict(cls: type[T], data: JsonObject, prefix: str = "") -> T:
    """Build a (nested) frozen dataclass, rejecting unknown keys, missing keys and wrong types."""
    hints = _type_hints(cls)
    fields = {field.name: field for field in _own_first(cls)}
    for key in data:
        if key not in fields:
            raise JaxLlamaError(
                f"unknown key {prefix + key!r}; allowed: {', '.join(fields)}{nearest(key, fields)}"
            )
    values = {}
    for key, field in fields.items():
        if key in data:
            values[key] = _convert(hints[key], data[key], prefix + key)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise JaxLlamaError(f"missing key {prefix + key!r}")
    return cls(**values)


def _own_first(cls: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass, those that it inherits last."""
    return sorted(dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__)


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Return ``value`` in the type ``hint``; TOML arrays become tuples."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(arg for arg in args if arg is not type(None)), value, key)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, dict):
            return from_dict(typing.cast(type, hint), value, key + ".")
        if isinstance(value, typing.cast(type, hint)):
            return value
    elif origin is Literal:
        if value in args:
            return value
        raise JaxLlamaError(f"{key} = {value!r}: allowed values are {', '.join(map(str, args))}")
    elif origin is tuple:
        if isinstance(value, dict):
            return frozen(value)
        if isinstance(value, (list, tuple)):
            return tuple(_convert(args[0], item, key) for item in value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise JaxLlamaError(f"{key} = {value!r}: expected {getattr(hint, '__name__', hint)}")


def frozen(value: Any) -> Any:
    """Return a mapping as a sorted tuple of pairs and a list as a tuple, recursively."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), frozen(item)) for key, item in value.items()))
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


@functools.cache
def _type_hints(cls: type) -> JsonObject:
    return typing.get_type_hints(cls)


def check_types(instance: Any, prefix: str = "") -> None:
    """Raise JaxLlamaError for a field of another type; lists become tuples, so it can be hashed."""
    hints = _type_hints(type(instance))
    for field in dataclasses.fields(instance):
        if field.name != "mixers":  # options of kinds that are not known here
            value = _convert(hints[field.name], getattr(instance, field.name), prefix + field.name)
            object.__setattr__(instance, field.name, value)


def require(condition: bool, key: str, value: object, why: str) -> None:
    """Raise JaxLlamaError naming the key and its value unless ``condition``."""
    if not condition:
        raise JaxLlamaError(f"{key} = {value!r}: {why}")


def requirement(config: Any, prefix: str = "") -> Callable[..., None]:
    """Return ``need(condition, key, why, value=...)``, which raises if a condition is false.

    The message of the JaxLlamaError names the field ``key``, its value and the reason.
    """

    def need(condition: bool, key: str, why: str, value: Any = ...) -> None:
        if not condition:
            value = functools.reduce(getattr, key.split("."), config) if value is ... else value
            require(False, prefix + key, value, why)

    return need


def require_all(config: Any, values: Mapping[str, Any], where: str) -> None:
    """Raise JaxLlamaError if a field has another value than ``values`` have. where: when so."""
    for key, want in values.items():
        requirement(config)(getattr(config, key) == want, key, f"must be {want!r} where {where}")


def said_options(record: object) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the options of a record that differ from their defaults."""
    for field in _own_first(type(record)):
        value = getattr(record, field.name)
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        if value != default:
            yield field.name, _said(value)


def _said(value: object) -> str:
    if dataclasses.is_dataclass(value):
        return ", ".join(f"{name} {text}" for name, text in said_options(value))
    if not isinstance(value, tuple):
        return str(value)
    runs = [(item, len(list(same))) for item, same in itertools.groupby(value)]
    text = ", ".join(f"{count} x {item}" if count > 1 else str(item) for item, count in runs)
    return text if len(text) <= 80 else f"{text[:77]}..."
