"""API keys with limits of their own: the file of ``--api-keys-file`` and the count of its use.

    read(path) -> tuple[ApiKey, ...]
    quotas = Quotas(keys); quotas.admit(owner) -> Refusal | None; quotas.used(owner, tokens)

The file is TOML:

    [[key]]
    name = "search"                  # appears in the log
    key = "a long random text"
    requests_per_minute = 600        # optional, as is the next
    tokens_per_minute = 200000       # prompt and answer together

Both limits are token buckets that hold one minute's worth. A request takes one from the first. An
answer's tokens leave the second when it has ended, so the bucket may fall below zero; the key waits
until it is above zero again. One object in the engine's process counts for all front ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxllama.errors import JaxLlamaError

_FIELDS = ("name", "key", "requests_per_minute", "tokens_per_minute")
LIMITS = ("requests_per_minute", "tokens_per_minute")


@dataclasses.dataclass(frozen=True)
class ApiKey:
    """A key and its limits; None is no limit."""

    key: str = dataclasses.field(repr=False)
    name: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    @property
    def owner(self) -> str:
        return owner_of(self.key.encode())

    @property
    def is_limited(self) -> bool:
        return any(getattr(self, limit) is not None for limit in LIMITS)


def owner_of(key: bytes) -> str:
    """Return the digest that names a key wherever the key itself must not appear."""
    return hashlib.sha256(key).hexdigest()[:32]


def is_plain(key: str) -> bool:
    """Return whether a key can stand in a header: printable ASCII without spaces around it."""
    return bool(key) and key.isascii() and key.isprintable() and key.strip() == key


def read(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file. Raises JaxLlamaError naming the entry, never the key itself."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise JaxLlamaError(f"{path}: {reason}") from None
    entries = table.pop("key", None)
    if table or not isinstance(entries, list) or not entries:
        raise JaxLlamaError(f"{path}: expected one or more [[key]] tables and nothing else")
    keys = tuple(_read(path, number, entry) for number, entry in enumerate(entries, start=1))
    if len({key.key for key in keys}) < len(keys) or len({key.name for key in keys}) < len(keys):
        raise JaxLlamaError(f"{path}: a key or a name is there twice")
    return keys


def _read(path: Path, number: int, entry: Any) -> ApiKey:
    where = f"{path}: [[key]] number {number}"
    if not isinstance(entry, dict) or not entry.keys() <= set(_FIELDS):
        unknown = sorted(set(entry) - set(_FIELDS)) if isinstance(entry, dict) else entry
        raise JaxLlamaError(f"{where}: unknown {unknown}; known: {', '.join(_FIELDS)}")
    for field in ("name", "key"):
        if not isinstance(entry.get(field), str) or not is_plain(entry[field]):
            raise JaxLlamaError(f"{where}: {field}: must be printable ASCII, no spaces around it")
    for field in LIMITS:
        value = entry.get(field, 1)
        if type(value) is not int or value < 1:
            raise JaxLlamaError(f"{where}: {field} = {value!r}: must be a whole number above 0")
    return ApiKey(**entry)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The limit that refuses a request. seconds: until the next one may be accepted."""

    limit: str
    value: int
    seconds: float


class Bucket:
    """A token bucket that fills in a minute."""

    def __init__(self, size: int, now: float) -> None:
        self.size, self.level, self._then = size, float(size), now

    def missing(self, least: float, now: float) -> float:
        """Return the seconds until the level is at least ``least``."""
        rate = self.size / 60
        self.level = min(self.size, self.level + (now - self._then) * rate)
        self._then = now
        return max(0.0, (least - self.level) / rate)


class Quotas:
    """Counts each key's use; the module docstring has the rule."""

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, dict[str, Bucket]] = {
            key.owner: {
                limit: Bucket(size, clock())
                for limit in LIMITS
                if (size := getattr(key, limit)) is not None
            }
            for key in keys
        }

    def admit(self, owner: str) -> Refusal | None:
        """Take a request from its key's bucket, or return the limit that refuses it."""
        buckets, now = self._buckets.get(owner, {}), self._clock()
        for limit, bucket in buckets.items():
            seconds = bucket.missing(1, now)
            if seconds > 0:
                return Refusal(limit, bucket.size, seconds)
        if (requests := buckets.get(LIMITS[0])) is not None:
            requests.level -= 1
        return None

    def used(self, owner: str, tokens: int) -> None:
        """Take an answer's tokens from its key's bucket."""
        if (bucket := self._buckets.get(owner, {}).get(LIMITS[1])) is not None:
            bucket.missing(0, self._clock())
            bucket.level -= tokens
