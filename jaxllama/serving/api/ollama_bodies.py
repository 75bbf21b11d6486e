"""Bodies of ollama's /api/chat and /api/generate, and their translation to a Chat or a Completion.

Options that only tune another engine (``num_ctx``, ``num_thread``) have no effect. Refused: images,
templates, and samplers that are not here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from jaxllama.serving.api.bodies import FIRST_ERROR, Chat, Completion, Lenient, Strict, explain
from jaxllama.serving.api.schemas import ApiError
from jaxllama.typing import JsonObject

# Each option's name in OpenAI's bodies.
OPTIONS = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
NO_EFFECT = frozenset(
    "num_ctx num_keep num_batch num_gpu main_gpu num_thread use_mmap use_mlock numa low_vram "
    "repeat_last_n penalize_newline".split()
)
Format = Literal["", "json"] | JsonObject


class OllamaFunction(Lenient):
    name: str
    arguments: JsonObject = {}


class OllamaCall(Lenient):
    function: OllamaFunction


class OllamaMessage(Lenient):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], FIRST_ERROR] | None = None
    tool_name: str | None = None
    images: list[Any] | None = None


class OllamaBody(Strict):
    model: str
    stream: bool = True
    format: Format | None = None
    options: JsonObject | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: Any = None  # without effect: the model stays

    def _shared(self) -> JsonObject:
        """Return the fields that a Chat and a Completion share."""
        asked: JsonObject = {"model": self.model, "stream": self.stream}
        for name, value in (self.options or {}).items():
            if name in OPTIONS:
                asked[OPTIONS[name]] = value
            elif name not in NO_EFFECT and value not in (None, 0, False):
                raise ApiError.unsupported("options", f"{name[:64]!r} is not here")
        if asked.get("max_tokens") in (-1, -2):  # ollama's words for no limit
            del asked["max_tokens"]
        if self.format:
            schema = {"name": "format", "schema": self.format}
            form: JsonObject = {"type": "json_schema", "json_schema": schema}
            asked["response_format"] = {"type": "json_object"} if self.format == "json" else form
        return asked

    def _thinks(self) -> JsonObject:
        if self.think is None:
            return {}
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        return {"enable_thinking": self.think}


class OllamaChat(OllamaBody):
    """Body of POST /api/chat."""

    endpoint = "/api/chat"
    messages: Annotated[list[OllamaMessage], Field(min_length=1, max_length=4096), FIRST_ERROR]
    tools: list[JsonObject] | None = None

    def translated(self) -> Chat:
        """Return the body as a Chat. Raises ApiError 400 for what is not here."""
        messages: list[JsonObject] = []
        n_calls, waiting = 0, list[str]()
        for message in self.messages:
            if message.images:
                raise ApiError.unsupported("messages", "images are not read")
            said: JsonObject = {"role": message.role, "content": message.content}
            if message.thinking:
                said["reasoning_content"] = message.thinking
            if message.tool_calls:
                said["tool_calls"] = []
                for call in message.tool_calls:
                    n_calls += 1
                    waiting.append(f"call_{n_calls}")
                    arguments = json.dumps(call.function.arguments)
                    function = {"name": call.function.name, "arguments": arguments}
                    said["tool_calls"].append({"id": waiting[-1], "function": function})
            if message.role == "tool":  # results follow in the order of the calls
                said["tool_call_id"] = waiting.pop(0) if waiting else "call_0"
                if message.tool_name:
                    said["name"] = message.tool_name
            messages.append(said)
        asked = {**self._shared(), **self._thinks(), "messages": messages}
        return _checked(Chat, {**asked, "tools": self.tools} if self.tools else asked)


class OllamaGenerate(OllamaBody):
    """Body of POST /api/generate."""

    endpoint = "/api/generate"
    prompt: str = Field(min_length=1)
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    template: str | None = None
    context: list[int] | None = None

    def translated(self) -> Chat | Completion:
        """Return a Completion of a raw prompt or before a suffix, and a Chat of other prompts."""
        for name, why in (
            ("images", "images are not read"),
            ("template", "the checkpoint's is used"),
            ("context", "send the conversation to /api/chat"),
        ):
            if getattr(self, name):
                raise ApiError.unsupported(name, why)
        if self.raw or self.suffix:
            asked = {**self._shared(), "prompt": self.prompt, "suffix": self.suffix}
            return _checked(Completion, {"max_tokens": -1, **asked})
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return _checked(Chat, {**self._shared(), **self._thinks(), "messages": messages})


Body = TypeVar("Body", Chat, Completion)


def _checked(kind: type[Body], asked: JsonObject) -> Body:
    try:
        return kind.model_validate_json(json.dumps(asked))
    except ValidationError as error:
        raise explain(error) from None
