"""Request and Event: what goes into the engine and what comes out of it.

A Request is plain data: it can be written to a log as JSON and replayed (``to_json``,
``from_json``).  Its answer is a series of Events, the last of which, and only the last, has a
``finish_reason``.  ``n`` choices are ``n`` requests with seeds of their own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from jaxllama.decoding.sampling import Sampling
from jaxllama.errors import JaxLlamaError

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
# OpenAI's largest top_logprobs.
MAX_LOGPROBS = 20


class QueueFull(JaxLlamaError):
    """The engine has as many waiting requests as it takes; ``retry_after`` is in seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"the queue is full: {waiting} requests are waiting")
        self.retry_after = retry_after


class EngineClosed(JaxLlamaError):
    """The engine takes no more requests: it is shutting down, has stopped or has failed."""


class EngineFailed(Exception):
    """A step of the engine raised: it does nothing any more.  The message says what."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What the output must match: a JSON schema (its JSON text; "{}" is any JSON), a regular
    expression, or a grammar in llguidance's Lark (several that name each other as its JSON)."""

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

    id: the caller's own, unique among requests in flight.
    prompt: token ids.
    sampling: as for ``LanguageModel.generate``; a seed of None is 0.
    stop: strings that end the text, across token borders too.  stop_token_ids: tokens that end it
        beside the model's own.
    min_tokens: neither of them, nor a stop token, ends the text before so many.
    skip_special_tokens: false writes special tokens out in the text, but for those that end it.
    logprobs: how many alternatives to report per token beside the chosen one's, None for no
        logprobs at all, up to 20.
    allowed_token_ids: no other token is written, None for all.  A stop token that is none of them
        does not end the text.
    include_stop: the text has the stop string, or the stop token's text, at its end.
    priority: larger goes first, and may push out smaller; 1 more is as much as having come 1,024
        requests earlier.
    deadline: seconds from submission after which the request ends with reason "deadline".
    ignore_eos: go on past the model's stop tokens (for benchmarks).
    adapter: one of the model's, as for ``LanguageModel.generate``.
    cache_salt: requests share cached prompt prefixes only with requests that have the same salt.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", tuple(int(token) for token in self.prompt))
        ends = tuple(int(token) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ends)
        if self.allowed_token_ids is not None:
            allowed = tuple(int(token) for token in self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "stop", tuple(self.stop))
        # The engine's thread computes with these: what is none of its kind is known here.
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if isinstance(value, bool | np.integer):
                object.__setattr__(self, name, value := int(value))
            if not isinstance(value, kind):
                raise JaxLlamaError(f"{name} = {value!r}: must be {_named(kind)}")
        if not all(isinstance(text, str) for text in self.stop):
            raise JaxLlamaError(f"stop = {self.stop!r}: must be strings")
        if not self.prompt:
            raise JaxLlamaError("the prompt is empty")
        if self.max_new_tokens < 1:
            raise JaxLlamaError(f"max_new_tokens = {self.max_new_tokens}: must be at least 1")
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise JaxLlamaError(
                f"min_tokens = {self.min_tokens}: must be from 0 to max_new_tokens = "
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

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Request:
        grammar = data["grammar"]
        parts: dict[str, Any] = {
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


@dataclasses.dataclass(frozen=True)
class Event:
    """Some new tokens of one request.

    tokens, logprobs: new ones, a stop token included; logprobs are natural logs under the model's
        own distribution.  top_logprobs: per token, the ``request.logprobs`` likeliest (id,
        logprob), best first; empty unless asked for.
    text: what became certain (complete characters, no part of a stop string); joined over the
        events it is the text of ``LanguageModel.generate``.
    finish_reason: set on the last event only, which may have no tokens.
    error: what went wrong, for "error": a JaxLlamaError where the request asked too much (a grammar
        that turned out too complex), EngineFailed where the engine failed with all its requests,
        else what the request's own text, grammar or listener raised.  message: its text.
    prompt_tokens, cached_tokens, completion_tokens: so far; cached ones are those of the prompt
        that were found in the prefix cache.
    """

    id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def message(self) -> str | None:
        return None if self.error is None else str(self.error)
