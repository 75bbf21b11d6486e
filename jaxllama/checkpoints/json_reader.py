"""Typed look-ups in a parsed JSON object, for configs that other programs wrote.

Null is absent, bounds keep a damaged file from making us build anything huge, and every complaint
is one JaxLlamaError line that names the key and its value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxllama.errors import JaxLlamaError

MAX_SIZE = 1 << 31
_MISSING: Any = object()


class JsonReader:
    """``prefix`` goes before the key in messages: "rope_scaling." for a nested object."""

    def __init__(self, config: Mapping[str, Any], prefix: str = ""):
        self.config, self.prefix = config, prefix

    def error(self, key: str, why: str) -> JaxLlamaError:
        try:
            value = repr(self.config.get(key))
        except ValueError:  # an integer of more digits than Python prints
            value = "(a huge number)"
        value = value if len(value) <= 80 else value[:77] + "..."
        return JaxLlamaError(f"{self.prefix}{key} = {value}: {why}")

    def get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise JaxLlamaError(f"missing key '{self.prefix}{key}'")
        return default

    def size(self, key: str, default: Any = _MISSING, limit: int = MAX_SIZE) -> int:
        value = self.natural(key, default)
        if not 0 < value <= limit:
            raise self.error(key, f"must be between 1 and {limit}")
        return value

    def natural(self, key: str, default: Any = _MISSING) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise self.error(key, f"expected an integer between 0 and {MAX_SIZE}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        value = self.get(key, default)
        if value is None:
            return None
        if type(value) not in (int, float) or abs(value) > 1e30 or not math.isfinite(value):
            raise self.error(key, "expected a finite number")
        return float(value)

    def positive(self, key: str, default: Any = _MISSING) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.error(key, "must be positive")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, "expected true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "expected a string")
        return value

    def token_ids(self, key: str, default: int | None) -> tuple[int, ...]:
        value = self.config.get(key, default)  # null is "none" here, not the default
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and 0 <= item < MAX_SIZE for item in ids):
            raise self.error(key, "expected a token id or a list of them")
        return tuple(ids)
