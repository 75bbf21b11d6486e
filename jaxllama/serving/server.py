"""The HTTP server: OpenAI's API over the engine, as a Starlette application.

    create_app(lm, engine, settings, metrics) -> ASGI application

    POST /v1/completions, /v1/chat/completions    whole or streamed (server-sent events)
    GET  /v1/completions/ID, /v1/chat/completions/ID    an answer again (with a state folder)
    POST /v1/embeddings, /tokenize, /detokenize
    GET  /v1/models, /health, /metrics, /openapi.json, / (a chat page)

Contract.  Every accepted body is answered once: with its tokens, or with OpenAI's error object.
A client that disconnects cancels its rows.  A body is refused before it costs anything: 400 with
the field's name, 401, 404, 413, 415, and 429 with Retry-After when the engine's queue is full.  The
event loop never computes: tokenizing and embedding run in threads, the model in the engine's.

The door (keys, ids, logs, errors) is ``gate``, what bodies mean ``openai_api``, a call's way to its
answer ``runs``, the answers' shapes ``responses``.  With a state folder a body is written down
before its answer begins (``journal``), and what a killed server still owed is done at the next
start.  Left out: TLS (put a proxy before it), quotas by key, stored files and batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.resources
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.serving import openapi, responses
from jaxllama.serving.dispatcher import Dispatcher, EngineFailed
from jaxllama.serving.embeddings import Embedder
from jaxllama.serving.gate import (
    CLIENT_GONE,
    ClientGone,
    Gate,
    answer_error,
    json_line,
    read_body,
    unless_disconnected,
)
from jaxllama.serving.journal import Accepted, Journal
from jaxllama.serving.metrics import Metrics
from jaxllama.serving.openai_api import Call, Prompts
from jaxllama.serving.request import EngineClosed, QueueFull
from jaxllama.serving.request_bodies import (
    ApiError,
    Chat,
    Completion,
    Detokenize,
    Embedding,
    Tokenize,
    parse,
)
from jaxllama.serving.runs import EventStream, Run

MAX_CHOICES = 128  # prompts x n of one body
EMBEDDINGS_WAITING = 32  # bodies; more get 429
SMALL_BODY = 2048  # bytes of one that becomes tokens sooner than a thread is woken


@dataclasses.dataclass(frozen=True)
class Settings:
    """name: what clients call the model.  max_len: tokens of prompt and answer together.
    max_body: bytes.  state: the journal's folder, None for none."""

    name: str
    max_len: int
    api_keys: tuple[str, ...] = ()
    max_body: int = 4 * 2**20
    state: str | None = None


def create_app(lm: LanguageModel, engine: Any, settings: Settings, metrics: Metrics) -> ASGIApp:
    """The application.  ``engine`` is running; the application does not stop it."""
    server = _Server(lm, engine, settings, metrics)
    document = openapi.document(settings.max_len, bool(settings.api_keys))
    static = {
        "/": ("page.html", "text/html"),
        "/page.js": ("page.js", "text/javascript"),
        "/page.css": ("page.css", "text/css"),
    }
    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat_completions, methods=["POST"]),
        Route("/v1/completions/{id}", server.stored_completion),
        Route("/v1/chat/completions/{id}", server.stored_chat),
        Route("/v1/embeddings", server.embeddings, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{model:path}", server.model),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/health", server.health),
        Route("/metrics", server.metrics_page),
        Route("/openapi.json", lambda _: JSONResponse(document)),
        *(Route(path, _file(name, kind)) for path, (name, kind) in static.items()),
    ]
    errors = dict.fromkeys(
        (ApiError, EngineFailed, JaxLlamaError, HTTPException, Exception), _answer_error
    )
    app = Starlette(routes=routes, lifespan=server.lifespan, exception_handlers=errors)
    paths = [route.path for route in routes if "{" not in route.path]
    return Gate(app, metrics, settings.api_keys, paths)


async def _answer_error(_: HttpRequest, error: Exception) -> Response:
    return answer_error(error)


def _file(name: str, kind: str) -> Callable[[HttpRequest], Response]:
    content = (importlib.resources.files("jaxllama.serving") / name).read_bytes()
    return lambda _: Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})


class _Server:
    """The handlers and what they share."""

    def __init__(
        self, lm: LanguageModel, engine: Any, settings: Settings, metrics: Metrics
    ) -> None:
        self._lm, self._engine, self._settings, self._metrics = lm, engine, settings, metrics
        max_choices = min(MAX_CHOICES, engine.options.max_queue)
        self._prompts = Prompts(lm, settings.name, settings.max_len, max_choices)
        self._dispatcher = Dispatcher(engine)
        self._embed = Embedder(lm)
        # Of their own, so that tokenizing never waits for them.
        self._embedding_thread = ThreadPoolExecutor(1, "embeddings")
        self._embedding = 0
        self._created = int(time.time())
        self._journal = None if settings.state is None else Journal(settings.state)
        self._owed: dict[str, asyncio.Event] = {}  # answers that somebody may wait for

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Run what a killed server left, beside the new requests."""
        owed = [] if self._journal is None else self._journal.unfinished()
        for accepted in owed:
            self._owed[accepted.id] = asyncio.Event()
        tasks = [asyncio.create_task(self._resume(accepted)) for accepted in owed]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._embedding_thread.shutdown(wait=False, cancel_futures=True)
            if self._journal is not None:
                self._journal.close()

    # Completions and chat

    async def completions(self, http: HttpRequest) -> ASGIApp:
        return await self._generate(http, "completion")

    async def chat_completions(self, http: HttpRequest) -> ASGIApp:
        return await self._generate(http, "chat")

    async def _generate(self, http: HttpRequest, kind: str) -> ASGIApp:
        data = await read_body(http, self._settings.max_body)
        call_id = f"{'cmpl' if kind == 'completion' else 'chatcmpl'}-{http.state.request_id}"
        if call_id in self._owed or (self._journal and self._journal.find(call_id) is not None):
            message = f"X-Request-Id {http.state.request_id} has been used"
            raise ApiError(400, message, code="duplicate_request_id")
        if len(data) <= SMALL_BODY:
            body, call = self._call(kind, call_id, data)
        else:
            body, call = await asyncio.to_thread(self._call, kind, call_id, data)
        stream = await self._dispatcher.submit(call.requests)
        run = Run(kind, call, stream, http.state.fields, self._finish)
        self._owed[call_id] = asyncio.Event()
        if self._journal is not None:
            seeded = body.model_copy(update={"seed": call.seed})
            text = seeded.model_dump_json(exclude_none=True, by_alias=True)
            try:
                self._journal.accept(call_id, kind, call.created, text)
            except BaseException:
                run.abandon()
                raise
        if body.stream:
            return EventStream(run, body)
        try:
            answer = await unless_disconnected(http.receive, run.whole())
        except ClientGone:
            run.abandon()
            return Response(status_code=CLIENT_GONE)
        return Response(json_line(answer), media_type="application/json")

    def _call(self, kind: str, call_id: str, data: bytes | str) -> tuple[Completion | Chat, Call]:
        """A long text takes a while to become tokens."""
        if kind == "completion":
            body = parse(Completion, data)
            return body, self._prompts.completion(body, call_id)
        body = parse(Chat, data)
        return body, self._prompts.chat(body, call_id)

    def _finish(self, call_id: str, answer: Callable[[], dict[str, Any]] | None) -> None:
        """The answer is certain, be it an error, or None, and owed by the next server."""
        try:
            if self._journal is not None and answer is not None:
                self._journal.finish(call_id, json_line(answer()))
        finally:
            self._owed.pop(call_id).set()

    async def _resume(self, accepted: Accepted) -> None:
        try:
            _, call = await asyncio.to_thread(self._call, accepted.kind, accepted.id, accepted.body)
            call = dataclasses.replace(call, created=accepted.created)
            stream = None
            while stream is None:
                try:
                    stream = await self._dispatcher.submit(call.requests)
                except QueueFull as full:
                    await asyncio.sleep(full.retry_after)
        except EngineClosed:  # the next server owes it
            self._finish(accepted.id, None)
            return
        except Exception as error:
            body = json.loads(answer_error(error).body)
            self._finish(accepted.id, lambda: body)
            return
        with contextlib.suppress(Exception):  # told to whoever asks for the answer
            await Run(accepted.kind, call, stream, {}, self._finish).whole()

    async def stored_completion(self, http: HttpRequest) -> Response:
        return await self._stored(http, "completion")

    async def stored_chat(self, http: HttpRequest) -> Response:
        return await self._stored(http, "chat")

    async def _stored(self, http: HttpRequest, kind: str) -> Response:
        """An answer again, or for the first time: waits while it is being made."""
        if self._journal is None:
            raise ApiError(404, "answers are kept only by a server with a state folder")
        call_id = http.path_params["id"]
        if call_id in self._owed and self._journal.find(call_id, kind) is not None:
            try:
                await unless_disconnected(http.receive, self._owed[call_id].wait())
            except ClientGone:
                return Response(status_code=CLIENT_GONE)
        answer = self._journal.find(call_id, kind)
        if answer == "":
            raise ApiError(503, "the server is stopping", code="stopping", retry_after=1)
        if answer is None:
            raise ApiError(404, f"no answer with the id {call_id!r}", param="id", code="not_found")
        status = 410 if answer.startswith('{"error"') else 200
        return Response(answer, status, media_type="application/json")

    # The rest

    async def embeddings(self, http: HttpRequest) -> Response:
        data = await read_body(http, self._settings.max_body)
        if self._embedding >= EMBEDDINGS_WAITING:
            message = f"{self._embedding} requests for embeddings are waiting"
            raise ApiError(429, message, code="queue_full", retry_after=1)
        self._embedding += 1
        try:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._embedding_thread, self._embeddings, data)
        finally:
            self._embedding -= 1
        return Response(answer, media_type="application/json")

    def _embeddings(self, data: bytes) -> str:
        body = parse(Embedding, data)
        self._prompts.check_model(body.model)
        width, limit = self._lm.config.d_model, self._settings.max_len
        if body.dimensions not in (None, width):
            message = f"dimensions: this model's embeddings have {width}"
            raise ApiError(400, message, param="dimensions", code="unsupported")
        rows = self._prompts.rows(body.input, "input")
        longest = max(len(row) for row in rows)
        if longest > limit:
            message = f"input: {longest} tokens are more than the context of {limit}"
            raise ApiError(400, message, param="input", code="context_length_exceeded")
        as_base64 = body.encoding_format == "base64"
        return json_line(
            responses.embeddings(
                self._embed(rows), self._settings.name, sum(map(len, rows)), as_base64
            )
        )

    async def tokenize(self, http: HttpRequest) -> Response:
        data = await read_body(http, self._settings.max_body)
        answer = await asyncio.to_thread(self._tokenize, data)
        return Response(answer, media_type="application/json")

    def _tokenize(self, data: bytes) -> str:
        body = parse(Tokenize, data)
        self._prompts.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt")
        if body.messages is not None:
            ids = self._prompts.chat_ids(body.messages, None)
        else:
            special = body.add_special_tokens is not False
            ids = self._prompts.tokenizer().encode(body.prompt, special)
        limit = self._settings.max_len
        return json_line({"tokens": ids, "count": len(ids), "max_model_len": limit})

    async def detokenize(self, http: HttpRequest) -> Response:
        data = await read_body(http, self._settings.max_body)
        return JSONResponse(await asyncio.to_thread(self._detokenize, data))

    def _detokenize(self, data: bytes) -> dict[str, Any]:
        body = parse(Detokenize, data)
        self._prompts.check_model(body.model)
        text = self._prompts.tokenizer().decode(body.tokens, skip_special=False)
        return {"prompt": text}

    def _model(self) -> dict[str, Any]:
        tokenizer = self._lm.tokenizer
        return {
            "id": self._settings.name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxllama",
            "max_model_len": self._settings.max_len,
            "vocab_size": self._lm.config.vocab_size,
            "chat": tokenizer is not None and tokenizer.chat_template is not None,
        }

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, http: HttpRequest) -> Response:
        self._prompts.check_model(http.path_params["model"])
        return JSONResponse(self._model())

    async def health(self, _: HttpRequest) -> Response:
        if self._dispatcher.failure is not None:
            return JSONResponse({"status": self._dispatcher.failure}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics_page(self, _: HttpRequest) -> Response:
        kind, page = self._metrics.page()
        return Response(page, headers={"Content-Type": kind})
