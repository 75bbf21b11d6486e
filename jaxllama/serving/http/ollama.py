"""Ollama's API as a thin table over the same calls: one JSON object a line, as ollama streams.

    POST /api/chat, /api/generate       GET /api/tags, /api/version

Calls of tools are sent whole, in one line each. Durations are the engine's; loading takes none.
Left out: pulling, creating and deleting models, and /api/embed (``/v1/embeddings`` has vectors).
"""

from __future__ import annotations

import datetime
import json

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from jaxllama.serving.api.answers import finish_reason
from jaxllama.serving.api.bodies import Chat
from jaxllama.serving.api.calls import AcceptedCall, Prompts
from jaxllama.serving.api.messages import TextPiece
from jaxllama.serving.api.ollama_bodies import OllamaChat, OllamaGenerate
from jaxllama.serving.api.ollama_schemas import OllamaModel, OllamaTags
from jaxllama.serving.api.reading import parts_of
from jaxllama.serving.api.schemas import ApiError, to_json
from jaxllama.serving.http.context import Context, rfc3339
from jaxllama.serving.http.generation import answered
from jaxllama.serving.http.runs import CallRun, EventAnswer
from jaxllama.serving.tools.parts import AnswerPart
from jaxllama.typing import JsonObject


class OllamaApi:
    prefix, kind = "ollama-", None

    def read(
        self, prompts: Prompts, body: OllamaChat | OllamaGenerate, id: str, owner: str
    ) -> AcceptedCall:
        asked = body.translated()
        if isinstance(asked, Chat):
            return prompts.chat(asked, id, owner)
        return prompts.completion(asked, id, owner)

    def write(self, run: CallRun, body: OllamaChat | OllamaGenerate) -> EventAnswer:
        return OllamaAnswer(run, isinstance(body, OllamaChat))


async def chat(server: Context, http: HttpRequest, body: OllamaChat) -> ASGIApp:
    return await answered(server, http, body, OllamaApi())


async def generate(server: Context, http: HttpRequest, body: OllamaGenerate) -> ASGIApp:
    return await answered(server, http, body, OllamaApi())


async def tags(server: Context, _: HttpRequest) -> OllamaTags:
    """Return the list of models."""
    details = {
        "format": "jaxllama",
        "family": server.settings.name,
        "parameter_size": "",
        "quantization_level": "",
    }
    names = server.prompts.models
    return OllamaTags([OllamaModel(name, name, server.began, 0, "", details) for name in names])


class OllamaAnswer(EventAnswer):
    """An answer in ollama's lines. is_chat: whether lines have messages or plain text."""

    media_type = b"application/x-ndjson"

    def __init__(self, run: CallRun, is_chat: bool) -> None:
        super().__init__(run)
        self._is_chat = is_chat
        self._message: JsonObject = {"content": "", "thinking": "", "tool_calls": []}
        self._ended: JsonObject = {}
        self._called: JsonObject | None = None  # the call whose arguments are still coming

    async def _whole(self) -> JsonObject:
        said = {name: text for name, text in self._message.items() if text or name == "content"}
        return self._line(said, self._ended)

    def _written(self, event: JsonObject) -> bytes:
        return to_json(event) + b"\n"

    def _failure(self, error: ApiError) -> bytes:
        return self._written({"error": str(error)})

    def _read(self, piece: TextPiece) -> list[JsonObject]:
        """Return the lines of a piece, and add them to the whole message."""
        messages: list[JsonObject] = []
        for part in parts_of(self._reader, piece):
            messages += self._take(part)
        if piece.finish_reason is not None:
            messages += self._end_call()
        for message in messages:
            for name, value in message.items():
                self._message[name] += value
        lines = [self._line(message, {}) for message in messages]
        if piece.finish_reason is not None:
            self._ended = self._end(piece)
            lines.append(self._line({"content": ""}, self._ended))
        return lines

    def _take(self, part: AnswerPart) -> list[JsonObject]:
        if part.kind == "arguments":
            if self._called is not None:
                self._called["arguments"] += part.text
            return []
        ended = self._end_call()
        if part.kind == "call":
            self._called = {"name": part.text, "arguments": ""}
        elif part.text:
            name = "thinking" if part.kind == "reasoning" else "content"
            ended.append({"content": "", name: part.text})
        return ended

    def _end_call(self) -> list[JsonObject]:
        called, self._called = self._called, None
        if called is None:
            return []
        message: JsonObject = {"content": "", "tool_calls": [{"function": called}]}
        try:
            arguments = json.loads(called["arguments"] or "{}", strict=False)
            called["arguments"] = arguments if isinstance(arguments, dict) else {}
            to_json(self._line(message, {}))
        except (ValueError, RecursionError):  # an answer that was cut, or a lone surrogate
            called["arguments"] = {}
        return [message]

    def _end(self, piece: TextPiece) -> JsonObject:
        usage = self.run.usage()
        submitted, admitted, first, ended = piece.times or (0.0, 0.0, 0.0, 0.0)
        return {
            "done_reason": finish_reason(piece),
            "total_duration": int((ended - submitted) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int((first - admitted) * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": int((ended - first) * 1e9),
        }

    def _line(self, message: JsonObject, end: JsonObject) -> JsonObject:
        line: JsonObject = {
            "model": self.run.call.model,
            "created_at": rfc3339(datetime.datetime.now(datetime.UTC)),
        }
        if self._is_chat:
            line["message"] = {"role": "assistant", **message}
        else:
            line["response"] = message["content"]
            if "thinking" in message:
                line["thinking"] = message["thinking"]
        return {**line, "done": bool(end), **end}
