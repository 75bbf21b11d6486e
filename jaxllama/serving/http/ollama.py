"""Ollama's API as a thin table over the same calls: one JSON object a line, as ollama streams.

    POST /api/chat, /api/generate       GET /api/tags, /api/version

Calls of tools are sent whole, in one line each. Durations are the engine's; loading takes none.
Left out: pulling, creating and deleting models, and /api/embed (``/v1/embeddings`` has vectors).
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import AsyncGenerator

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxllama import __version__
from jaxllama.serving.api.answers import finish_reason
from jaxllama.serving.api.bodies import Chat, parse
from jaxllama.serving.api.calls import AcceptedCall, Prompts
from jaxllama.serving.api.messages import TextPiece
from jaxllama.serving.api.ollama_bodies import OllamaChat, OllamaGenerate
from jaxllama.serving.api.reading import PLAIN, answer_reader
from jaxllama.serving.api.schemas import ApiError, to_json
from jaxllama.serving.http.body_threads import in_thread
from jaxllama.serving.http.middleware import read_body
from jaxllama.serving.http.runs import CallRun, EventStream, submit
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.serving.tools.parts import AnswerPart
from jaxllama.typing import JsonObject


class OllamaRoutes:
    def __init__(self, prompts: Prompts, link: EngineClient, max_body: int) -> None:
        self._prompts, self._link, self._max_body = prompts, link, max_body
        self._began = _rfc3339(datetime.datetime.now(datetime.UTC))

    def routes(self) -> list[Route]:
        return [
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/tags", self.tags),
            Route("/api/version", self.version),
        ]

    async def chat(self, http: HttpRequest) -> ASGIApp:
        """Answer a conversation (ollama's API)."""
        return await self._answer(http, OllamaChat)

    async def generate(self, http: HttpRequest) -> ASGIApp:
        """Answer or continue a prompt (ollama's API)."""
        return await self._answer(http, OllamaGenerate)

    async def _answer(
        self, http: HttpRequest, kind: type[OllamaChat] | type[OllamaGenerate]
    ) -> ASGIApp:
        data, owner = await read_body(http, self._max_body), http.state.owner
        id = f"ollama-{http.state.request_id}"
        call, body = await in_thread(http, len(data), self._call, kind, data, id, owner)
        call, stream = await submit(self._link, call, owner)
        fields = http.state.fields
        run = CallRun("ollama", call, stream, fields, lambda id, answer: None, kept=False)
        lines = OllamaStream(run, kind is OllamaChat, fields)
        if body.stream:
            return lines
        return JSONResponse(await run.until_left(http.receive, lines.whole()))

    def _call(
        self, kind: type[OllamaChat] | type[OllamaGenerate], data: bytearray, id: str, owner: str
    ) -> tuple[AcceptedCall, OllamaChat | OllamaGenerate]:
        limit = self._prompts.max_len
        body = parse(kind, data, limit, limit)
        asked = body.translated()
        if isinstance(asked, Chat):
            return self._prompts.chat(asked, id, owner), body
        return self._prompts.completion(asked, id, owner), body

    async def tags(self, _: HttpRequest) -> Response:
        """List the models (ollama's API)."""
        details = {"format": "jaxllama", "family": self._prompts.name, "parameter_size": ""}
        models = [
            {
                "name": name,
                "model": name,
                "modified_at": self._began,
                "size": 0,
                "digest": "",
                "details": {**details, "quantization_level": ""},
            }
            for name in self._prompts.models
        ]
        return JSONResponse({"models": models})

    async def version(self, _: HttpRequest) -> Response:
        """Return this program's version (ollama's API)."""
        return JSONResponse({"version": __version__})


class OllamaStream(EventStream):
    """An answer in ollama's lines. is_chat: whether lines have messages or plain text."""

    media_type = b"application/x-ndjson"

    def __init__(self, run: CallRun, is_chat: bool, fields: JsonObject) -> None:
        super().__init__(run)
        self._is_chat, self._fields = is_chat, fields
        self._reader = answer_reader(run.call.reading or PLAIN)
        self._called: JsonObject | None = None  # the call whose arguments are still coming

    async def whole(self) -> JsonObject:
        """Return the whole answer as one object."""
        content, thinking, calls = "", "", list[JsonObject]()
        last: JsonObject = {}
        async with contextlib.aclosing(self._messages()) as messages:
            async for part, end in messages:
                content += part["content"]
                thinking += part.get("thinking", "")
                calls += part.get("tool_calls", ())
                last = end
        message: JsonObject = {"content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return self._line(message, last)

    async def _pieces(self) -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(self._messages()) as messages:
            async for message, end in messages:
                yield to_json(self._line(message, end)) + b"\n"

    def _failure(self, error: ApiError) -> bytes:
        return to_json({"error": str(error)}) + b"\n"

    async def _messages(self) -> AsyncGenerator[tuple[JsonObject, JsonObject]]:
        """Yield (part of a message, fields of the end), the latter empty before the end."""
        async with contextlib.aclosing(self._run.events()) as events:
            async for pieces in events:
                for piece in pieces:
                    parts = self._reader.feed(piece.text)
                    if piece.finish_reason is not None:
                        parts += self._reader.close()
                    for part in parts:
                        for message in self._read(part):
                            yield message, {}
                    if piece.finish_reason is not None:
                        for message in self._end_call():
                            yield message, {}
                        yield {"content": ""}, self._end(piece)

    def _read(self, part: AnswerPart) -> list[JsonObject]:
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
        try:
            called["arguments"] = json.loads(called["arguments"] or "{}")
        except (ValueError, RecursionError):  # an answer that was cut
            called["arguments"] = {}
        return [{"content": "", "tool_calls": [{"function": called}]}]

    def _end(self, piece: TextPiece) -> JsonObject:
        usage = self._run.usage()
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
            "model": self._run.call.model,
            "created_at": _rfc3339(datetime.datetime.now(datetime.UTC)),
        }
        if self._is_chat:
            line["message"] = {"role": "assistant", **message}
        else:
            line["response"] = message["content"]
            if "thinking" in message:
                line["thinking"] = message["thinking"]
        return {**line, "done": bool(end), **end}


def _rfc3339(time: datetime.datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")
