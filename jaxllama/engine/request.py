"""Request and Event: what goes into the engine and what comes out of it.

A Request is plain data: it can be written to a log as JSON and replayed (``to_json``,
``from_json``).  Its answer is a series of Events, the last of which, and only the last, has a
``finish_reason``.  ``n`` choices are ``n`` requests with seeds of their own.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from jaxllama.decoding.sampling import Sampling
from jaxllama.errors import JaxLlamaError
from jaxllama.text.rows import short
from jaxllama.typing import JsonObject

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
# OpenAI's largest top_logprobs.
MAX_LOGPROBS = 20


class QueueFull(JaxLlamaError):
    """The engine's queue is full. ``retry_after`` is the suggested wait in seconds."""

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(reason)
        self.retry_after = retry_after

    @classmethod
    def of(cls, waiting: int, retry_after: float) -> QueueFull:
        """Return the error of a queue in which so many requests wait."""
        return cls(f"the queue is full: {waiting} requests are waiting", retry_after)


class EngineClosed(JaxLlamaError):
    """The engine takes no more requests: it is shutting down, has stopped or has failed."""


class EngineFailed(Exception):
    """A step of the engine raised, so the engine has stopped. The message names the error."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A constraint that the output must match.

    source: the text of a JSON schema ("{}" allows any JSON), of a regular expression, or of a
    grammar in llguidance's Lark dialect. Several Lark grammars that refer to each other are given
    as llguidance's JSON.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "lark"):
            raise JaxLlamaError(
                f"grammar kind = {self.kind!r}: allowed are json_schema, regex and lark"
            )


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to be continued.

    Parameters
    ----------
    id : str
        Chosen by the caller; unique among the requests in flight.
    prompt : sequence of int
        Token ids, at least one.
    max_new_tokens : int
        Largest number of tokens that are generated, at least 1.
    sampling : Sampling
        As for ``LanguageModel.generate``. A seed of None is 0.
    stop : sequence of str
        Strings that end the text, also where they span several tokens.
    logprobs : int or None
        Number of alternatives to report for each token, up to 20. None reports no logprobs at all.
    priority : int
        Requests with a larger priority run first and may preempt smaller ones. One step of priority
        is worth arriving 1,024 requests earlier.
    deadline : float or None
        Seconds from submission after which the request ends with the reason "deadline".
    grammar : Grammar or None
        Constraint that the output must match.
    ignore_eos : bool
        Generate past the model's stop tokens (for benchmarks).
    adapter : str or None
        Name of one of the model's adapters, as for ``LanguageModel.generate``.
    stop_token_ids : sequence of int
        Tokens that end the text in addition to the model's own stop tokens.
    min_tokens : int
        Number of tokens before which no stop string and no stop token ends the text.
    skip_special_tokens : bool
        False writes special tokens into the text, except those that end it.
    allowed_token_ids : sequence of int or None
        The only tokens that may be generated; None allows all. A stop token that is not among them
        does not end the text.
    include_stop : bool
        Whether the text ends with the stop string or the stop token's text.
    cache_salt : str
        Requests share cached prompt prefixes only with requests that have the same salt.
    forced : sequence of int or None
        The answer's tokens, which are not drawn: the request only reports their log-probabilities.
        The answer ends with the last of them.
    begun : sequence of int
        First tokens of the answer, from an engine that did not finish it. The Events have only the
        tokens after them. They count toward max_new_tokens and min_tokens.

    Raises
    ------
    JaxLlamaError
        If a field has the wrong type or lies outside its range.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    priority: int = 0
    deadline: float | None = None
    grammar: Grammar | None = None
    ignore_eos: bool = False
    adapter: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop: bool = False
    cache_salt: str = ""
    forced: tuple[int, ...] | None = None
    begun: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "begun", "stop_token_ids", "allowed_token_ids", "forced"):
            value = getattr(self, name)
            if value is not None or name not in ("allowed_token_ids", "forced"):
                object.__setattr__(self, name, _ids(name, value))
        if isinstance(self.stop, str) or not isinstance(self.stop, Iterable):
            raise JaxLlamaError(f"stop = {short(self.stop)}: must be strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        # Wrong types are refused here, because the engine's thread computes with these values.
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if isinstance(value, bool | np.integer):
                object.__setattr__(self, name, value := int(value))
            if not isinstance(value, kind):
                raise JaxLlamaError(f"{name} = {short(value)}: must be {_named(kind)}")
        if not all(isinstance(text, str) for text in self.stop):
            raise JaxLlamaError(f"stop = {short(self.stop)}: must be strings")
        if not self.prompt:
            raise JaxLlamaError("the prompt is empty")
        if self.max_new_tokens < 1:
            raise JaxLlamaError(f"max_new_tokens = {self.max_new_tokens}: must be at least 1")
        if self.forced is not None and len(self.forced) != self.max_new_tokens:
            raise JaxLlamaError(
                f"max_new_tokens = {self.max_new_tokens}: must be the number of forced tokens, "
                f"{len(self.forced)}"
            )
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise JaxLlamaError(
                f"min_tokens = {self.min_tokens}: must be from 0 to max_new_tokens = "
                f"{self.max_new_tokens}"
            )
        if self.begun and self.forced is not None:
            raise JaxLlamaError("forced tokens exclude begun ones")
        if self.begun and len(self.begun) >= self.max_new_tokens:
            raise JaxLlamaError(
                f"begun has {len(self.begun)} tokens: must be fewer than max_new_tokens = "
                f"{self.max_new_tokens}"
            )
        if "" in self.stop:
            raise JaxLlamaError("stop = '': a stop string must not be empty")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise JaxLlamaError(f"logprobs = {self.logprobs}: must be from 0 to {MAX_LOGPROBS}")
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise JaxLlamaError(f"deadline = {self.deadline}: must be a positive number of seconds")

    @property
    def cache_key(self) -> tuple[str | None, str]:
        """Requests with the same key may share cached prompt prefixes."""
        return self.adapter, self.cache_salt

    def to_json(self) -> JsonObject:
        """Return the request as values that the json module writes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: JsonObject) -> Request:
        """Return the request of a result of ``to_json``."""
        grammar = data["grammar"]
        parts: JsonObject = {
            "sampling": Sampling(**data["sampling"]),
            "grammar": None if grammar is None else Grammar(**grammar),
        }
        return cls(**{**data, **parts})


_NONE = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "max_new_tokens": (int,),
    "sampling": (Sampling,),
    "logprobs": (int, _NONE),
    "priority": (int,),
    "deadline": (int, float, _NONE),
    "grammar": (Grammar, _NONE),
    "adapter": (str, _NONE),
    "min_tokens": (int,),
    "cache_salt": (str,),
}


def _named(kinds: tuple[type, ...]) -> str:
    return " or ".join("None" if kind is _NONE else kind.__name__ for kind in kinds)


RequestTimes = tuple[float, float, float, float]


def _ids(name: str, value: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in value)
    except TypeError:
        raise JaxLlamaError(f"{name} = {short(value)}: must be token ids") from None


@dataclasses.dataclass(frozen=True)
class Event:
    """Some new tokens of one request.

    Attributes
    ----------
    id : str
        Id of the request.
    tokens : tuple of int
        The new tokens, a stop token included.
    text : str
        Text that became certain: complete characters that cannot be part of a stop string. The
        texts of all events, joined, are the text of ``LanguageModel.generate``.
    logprobs : tuple of float
        Natural logarithms under the model's own distribution, one for each token.
    top_logprobs : tuple of tuples of (int, float)
        For each token the ``request.logprobs`` likeliest (id, logprob) pairs, best first. Empty if
        the request asked for none.
    finish_reason : str or None
        Set on the last event only, which may have no tokens.
    error : Exception or None
        The failure that ended a request with the reason "error". It is a JaxLlamaError for a
        request that asked too much, for example a grammar that turned out too complex. It is
        EngineFailed when the whole engine failed. Otherwise it is the exception of the request's
        own text, grammar or listener.
    times : tuple of float or None
        On the last event of a request with tokens: when it was submitted and admitted, had its
        first token and ended, in seconds of ``time.monotonic``.
    prompt_tokens, cached_tokens, completion_tokens : int
        Totals so far. Cached tokens are the prompt's tokens that were found in the prefix cache.
    """

    id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    times: RequestTimes | None = dataclasses.field(default=None, compare=False)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def message(self) -> str | None:
        return None if self.error is None else str(self.error)
