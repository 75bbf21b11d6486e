"""The answers of ollama's API, for the OpenAPI document; ``http.ollama`` writes them.

Keys with a default are left out of an answer that has no value for them.
"""

from __future__ import annotations

import dataclasses

from jaxllama.typing import JsonObject


@dataclasses.dataclass
class OllamaCalledFunction:
    name: str
    arguments: JsonObject


@dataclasses.dataclass
class OllamaToolCall:
    function: OllamaCalledFunction


@dataclasses.dataclass
class OllamaAnswerMessage:
    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


@dataclasses.dataclass
class OllamaLine:
    """A whole answer, or a line of a stream. The last line has the counts, and times in ns."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


@dataclasses.dataclass(kw_only=True)
class OllamaChatLine(OllamaLine):
    message: OllamaAnswerMessage


@dataclasses.dataclass(kw_only=True)
class OllamaGenerateLine(OllamaLine):
    response: str
    thinking: str | None = None


@dataclasses.dataclass
class OllamaModel:
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, str]


@dataclasses.dataclass
class OllamaTags:
    models: list[OllamaModel]


@dataclasses.dataclass
class OllamaError:
    error: str
