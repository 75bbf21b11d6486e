"""The HTTP server: OpenAI's API over the engine, as a Starlette application.

    application(model, link, settings, max_queue) -> ASGI application       for a front end
    create_app(lm, engine, settings, metrics)       the same in the engine's own process

    POST /v1/completions, /v1/chat/completions    whole or streamed (server-sent events)
    GET  /v1/completions/ID, /v1/chat/completions/ID    an answer again (with a state folder)
    POST, GET, DELETE /v1/responses               (``response_routes``)
    POST /v1/messages, /v1/messages/count_tokens  Anthropic's API (``messages``)
    POST /v1/embeddings, /v1/rerank, /v1/score    (``vector_routes``)
    POST /api/chat, /api/generate; GET /api/tags, /api/version    ollama's API (``ollama``)
    /v1/files, /v1/batches                        (``batch_routes``, with a state folder)
    POST /tokenize, /detokenize
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter     (``adapter_routes``, with lora_slots)
    GET  /v1/models, /version, /health, /live, /ready, /metrics, /openapi.json, / (a chat page)

Contract. Every accepted body is answered once: with its tokens, or with OpenAI's error object. A
client that disconnects cancels its rows. A body is refused before it costs anything: 400 with the
field's name, 401, 404, 413, 415, and 429 with Retry-After when the engine's queue is full. The
event loop never computes. Tokenizing runs in threads. The model, embeddings and prompt logprobs run
in the engine's process (``hub``).

``middleware`` has keys, ids, logs and errors, ``calls`` the meaning of bodies, ``runs`` a call's
way to its answer, ``answers`` the answers. With a state folder a body is stored before its answer
begins (``journal``), and after a kill the next server answers the stored bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxllama import __version__
from jaxllama.engine.engine import Engine
from jaxllama.engine.journal import Entry, Journal
from jaxllama.engine.request import EngineClosed, EngineFailed, QueueFull
from jaxllama.engine.scoring import Scores
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.serving.api import openapi
from jaxllama.serving.api.bodies import (
    MAX_IDS,
    Chat,
    Completion,
    Detokenize,
    Tokenize,
    parse,
)
from jaxllama.serving.api.calls import AcceptedCall, Prompts, ServedModel
from jaxllama.serving.api.keys import ApiKey, Quotas
from jaxllama.serving.api.messages import Accepted, Finish
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.api.schemas import (
    ApiError,
    Health,
    ModelList,
    ModelObject,
    Text,
    Tokens,
    Version,
    respond,
    to_json,
)
from jaxllama.serving.http.adapter_routes import AdapterRoutes
from jaxllama.serving.http.batch_routes import BatchRoutes
from jaxllama.serving.http.file_store import Bounds
from jaxllama.serving.http.messages import MessageRoutes
from jaxllama.serving.http.middleware import (
    CLIENT_GONE,
    PAGE,
    ClientGone,
    Middleware,
    answer_error,
    api_error,
    open_to,
    read_body,
    unless_disconnected,
)
from jaxllama.serving.http.ollama import OllamaRoutes
from jaxllama.serving.http.page_files import page_file
from jaxllama.serving.http.response_routes import ResponseRoutes
from jaxllama.serving.http.runs import CallRun, ChunkStream, Outcome, submit
from jaxllama.serving.http.traces import Tracer
from jaxllama.serving.http.vector_routes import VectorRoutes
from jaxllama.serving.ipc import link
from jaxllama.serving.ipc.hub import Hub
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.serving.ipc.served import Passes, Served, forward_passes

MAX_CHOICES = 128  # prompts times n of one body
BATCH_SHARE = 4  # the lines of batches take one part in so many of the engine's queue
SMALL_BODY = 2048  # bytes of a body that is tokenized sooner than a thread is woken


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    name: the model's name for clients; aliases: its other names. max_len: largest number of tokens
    of prompt and answer together. max_body: largest number of bytes. state: the journal's folder,
    None for none. origins: origins of web pages that may send requests, "*" for all. hosts: names
    that a Host header may have beside the local ones; None allows any. named_keys: API keys with
    names and limits, beside ``api_keys``. lora_slots: adapters that clients may load at run time.
    files: largest sizes of files and batches. traces: URL of the OpenTelemetry collector, None for
    no traces.
    """

    name: str
    max_len: int
    api_keys: tuple[str, ...] = ()
    max_body: int = 4 * 2**20
    state: str | None = None
    aliases: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    named_keys: tuple[ApiKey, ...] = ()
    lora_slots: int = 0
    files: Bounds = Bounds()
    traces: str | None = None

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return (*map(ApiKey, self.api_keys), *self.named_keys)


def create_app(
    lm: LanguageModel,
    engine: Served,
    settings: ServerSettings,
    metrics: Metrics,
    journal: Journal | None = None,
) -> ASGIApp:
    """Return the application. ``engine`` is running; the application does not stop it.

    journal: of the state folder; by default it is opened here.
    """
    if journal is None and settings.state is not None:
        journal = Journal(settings.state)
    hub = Hub(engine, _passes(lm, engine), metrics, journal, quotas=Quotas(settings.keys))
    own = link.local(hub, lm.tokenizer, lm.config.eos_token_ids)
    return application(lm, own, settings, engine.options.max_queue, hub.close)


def _passes(lm: LanguageModel, engine: Served) -> Passes:
    return forward_passes(lm, engine.adapters if isinstance(engine, Engine) else None)


def application(
    model: ServedModel,
    link: EngineClient,
    settings: ServerSettings,
    max_queue: int,
    ended: Callable[[], None] = lambda: None,
) -> ASGIApp:
    """Return the application of a front end.

    max_queue: the engine's. ended: called after the last request.
    """
    server = _Server(model, link, settings, max_queue, ended)
    document = openapi.document(
        settings.max_len,
        bool(settings.keys),
        settings.lora_slots > 0,
        settings.state is not None,
    )
    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat_completions, methods=["POST"]),
        Route("/v1/completions/{id}", server.stored_completion),
        Route("/v1/chat/completions/{id}", server.stored_chat),
        Route("/v1/models", server.models),
        Route("/v1/models/{model:path}", server.model),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/health", server.health),
        Route("/live", server.live),
        Route("/ready", server.health),
        Route("/version", server.version),
        Route("/metrics", server.metrics_page),
        Route("/openapi.json", lambda _: JSONResponse(document)),
        *server.responses.routes(),
        *server.messages.routes(),
        *server.vectors.routes(),
        *server.batches.routes(),
        *server.ollama.routes(),
        *(server.adapters.routes() if settings.lora_slots else ()),
        *(Route(path, page_file(name, kind)) for path, (name, kind) in PAGE.items()),
    ]
    errors = dict.fromkeys(
        (ApiError, EngineFailed, JaxLlamaError, HTTPException, Exception), _answer_error
    )
    app = Starlette(routes=routes, lifespan=server.lifespan, exception_handlers=errors)
    paths = [route.path for route in routes if "{" not in route.path]
    app = Middleware(app, link, settings.keys, paths, settings.hosts, server.tracer)
    server.app = app
    return open_to(app, settings.origins)


async def _answer_error(http: HttpRequest, error: Exception) -> Response:
    return answer_error(error, http.url.path)


class _Server:
    """The request handlers and their shared state."""

    def __init__(
        self,
        model: ServedModel,
        link: EngineClient,
        settings: ServerSettings,
        max_queue: int,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._lm, self._link, self._settings, self._ended = model, link, settings, ended
        max_choices = min(MAX_CHOICES, max_queue)
        self._prompts = Prompts(
            model,
            settings.name,
            settings.max_len,
            max_choices,
            settings.aliases,
            lambda: link.loaded,
        )
        self.ollama = OllamaRoutes(self._prompts, link, settings.max_body)
        self.adapters = AdapterRoutes(self._prompts, link, settings.max_body)
        self.responses = ResponseRoutes(self._prompts, link, settings.max_body)
        self.messages = MessageRoutes(self._prompts, link, settings.max_body)
        self.vectors = VectorRoutes(self._prompts, link, settings.max_body)
        self.batches = BatchRoutes(
            link,
            settings.state,
            settings.name,
            max(1, max_queue // BATCH_SHARE),
            settings.max_body,
            settings.origins,
            settings.files,
        )
        self.tracer = None if settings.traces is None else Tracer(settings.traces, settings.name)
        self.app: ASGIApp | None = None  # with the middleware, for batches
        self._scoring = 0
        self._max_queue = max_queue
        self._created = int(time.time())
        self._is_kept = settings.state is not None

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        """Answer the bodies that a killed server left, beside new requests."""
        owed = await self._link.ask("owed") if self._is_kept else []
        tasks = [asyncio.create_task(self._resume(Entry(*entry))) for entry in owed]
        try:
            assert self.app is not None
            async with self.batches.running(self.app):
                yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.responses.close()
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)
            self._ended()

    # Completions and chat

    async def completions(self, http: HttpRequest) -> ASGIApp:
        return await self._generate(http, "completion")

    async def chat_completions(self, http: HttpRequest) -> ASGIApp:
        return await self._generate(http, "chat")

    async def _generate(self, http: HttpRequest, kind: str) -> ASGIApp:
        data, owner = await read_body(http, self._settings.max_body), http.state.owner
        call_id = f"{'cmpl' if kind == 'completion' else 'chatcmpl'}-{http.state.request_id}"
        if len(data) <= SMALL_BODY:
            body, call = self._call(kind, call_id, data, owner)
        else:
            body, call = await asyncio.to_thread(self._call, kind, call_id, data, owner)
        if call.to_score is not None:
            try:
                call = await unless_disconnected(http.receive, self._scored(call))
            except ClientGone:
                return Response(status_code=CLIENT_GONE)
        entry, is_kept = None, self._is_kept and not http.state.is_batch
        if is_kept:
            seeded = body.model_copy(update={"seed": call.seed})
            text = seeded.model_dump_json(exclude_none=True, by_alias=True)
            entry = Accepted(kind, call.created, text, owner)
        call, stream = await submit(self._link, call, entry)
        finish = self._finish if is_kept else (lambda id, answer: None)
        run = CallRun(kind, call, stream, http.state.fields, finish, is_kept or not body.stream)
        if body.stream:
            return ChunkStream(run, body)
        try:
            answer = await unless_disconnected(http.receive, run.whole())
        except ClientGone:
            run.abandon()
            return Response(status_code=CLIENT_GONE)
        return respond(answer)

    def _call(
        self, kind: str, call_id: str, data: bytes | bytearray, owner: str = ""
    ) -> tuple[Completion | Chat, AcceptedCall]:
        """Return a body and its call; tokenizing a long text takes long.

        owner: as for ``Prompts.chat``.
        """
        longest = self._settings.max_len
        if kind == "completion":
            body = parse(Completion, data, self._prompts.max_choices * longest, longest)
            return body, self._prompts.completion(body, call_id, owner)
        body = parse(Chat, data, longest, longest)
        return body, self._prompts.chat(body, call_id, owner)

    async def _scored(self, call: AcceptedCall) -> AcceptedCall:
        """Return the call with its prompts' logprobs. Raises QueueFull if too many calls wait."""
        if call.to_score is None:
            return call
        if self._scoring >= self._max_queue:
            raise QueueFull(self._scoring, 1.0)
        self._scoring += 1
        try:
            scores = [
                Scores(**await self._link.ask("score", p.prompt, call.to_score, p.adapter))
                for p in call.prompts
            ]
        finally:
            self._scoring -= 1
        return dataclasses.replace(call, scores=tuple(scores))

    def _finish(self, call_id: str, answer: Callable[[], Outcome] | None) -> None:
        """Store the final answer or error; None leaves the body to the next server."""
        if self._is_kept:
            text = None
            try:
                text = None if answer is None else to_json(answer()).decode()
            finally:
                self._link.tell(Finish(call_id, text))

    async def _resume(self, accepted: Entry) -> None:
        call_id, stream = str(accepted.id), None
        try:
            data = accepted.body.encode()
            _, call = await asyncio.to_thread(
                self._call, accepted.kind, call_id, data, accepted.owner
            )
            call = dataclasses.replace(call, created=accepted.at)
            while stream is None:
                try:
                    if not call.scores:
                        call = await self._scored(call)
                    call, stream = await submit(self._link, call, is_known=True)
                except QueueFull as full:
                    await asyncio.sleep(full.retry_after)
        except (EngineClosed, EngineFailed):  # before the body began: the next server answers it
            self._finish(call_id, None)
            return
        except Exception as error:
            self._finish(call_id, api_error(error).body)
            return
        with contextlib.suppress(Exception):  # the stored answer reports the error
            await CallRun(accepted.kind, call, stream, {}, self._finish).whole()

    async def stored_completion(self, http: HttpRequest) -> Response:
        return await self._stored(http, "completion")

    async def stored_chat(self, http: HttpRequest) -> Response:
        return await self._stored(http, "chat")

    async def _stored(self, http: HttpRequest, kind: str) -> Response:
        """Return a stored answer; wait while it is being made."""
        if not self._is_kept:
            raise ApiError(404, "answers are kept only by a server with a state folder")
        call_id = http.path_params["id"]
        try:
            asked = self._link.ask("find", call_id, kind, http.state.owner)
            [answer] = await unless_disconnected(http.receive, asked)
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        if answer == "":
            raise ApiError(503, "the server is stopping", code="stopping", retry_after=1)
        if answer is None:
            raise ApiError(404, f"no answer with the id {call_id!r}", param="id", code="not_found")
        status = 410 if answer.startswith('{"error"') else 200
        return Response(answer, status, media_type="application/json")

    # The rest

    async def tokenize(self, http: HttpRequest) -> Response:
        data = await read_body(http, self._settings.max_body)
        return await asyncio.to_thread(self._tokenize, data)

    def _tokenize(self, data: bytearray) -> Response:
        limit = self._settings.max_len
        body = parse(Tokenize, data, limit, limit)
        self._prompts.adapter_of(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt")
        if body.messages is not None:
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            ids = self._prompts.encode_chat(self._prompts.chat_prompt(body, tools or None))
        else:
            special = body.add_special_tokens is not False
            ids = self._prompts.encode(body.prompt or "", "prompt", special)
        return respond(Tokens(ids, len(ids), limit))

    async def detokenize(self, http: HttpRequest) -> Response:
        data = await read_body(http, self._settings.max_body)
        return await asyncio.to_thread(self._detokenize, data)

    def _detokenize(self, data: bytearray) -> Response:
        body = parse(Detokenize, data, MAX_IDS, MAX_IDS)
        self._prompts.adapter_of(body.model)
        return respond(Text(self._prompts.tokenizer().decode(body.tokens, skip_special=False)))

    def _model(self, name: str) -> ModelObject:
        tokenizer = self._lm.tokenizer
        return ModelObject(
            id=name,
            object="model",
            created=self._created,
            owned_by="jaxllama",
            max_model_len=self._settings.max_len,
            vocab_size=self._lm.config.vocab_size,
            chat=tokenizer is not None and tokenizer.chat_template is not None,
        )

    async def models(self, _: HttpRequest) -> Response:
        return respond(ModelList("list", [self._model(name) for name in self._prompts.models]))

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["model"]
        self._prompts.adapter_of(name)
        return respond(self._model(name))

    async def health(self, _: HttpRequest) -> Response:
        problem = self._link.problem
        return respond(Health("ok")) if problem is None else respond(Health(problem), 503)

    async def live(self, _: HttpRequest) -> Response:
        """Return 503 only for what a restart repairs: an engine that failed or stands still."""
        why = self._link.standstill
        return respond(Health("ok")) if why is None else respond(Health(why), 503)

    async def version(self, _: HttpRequest) -> Response:
        return respond(Version(__version__))

    async def metrics_page(self, _: HttpRequest) -> Response:
        kind, page = await self._link.ask("metrics")
        return Response(page, headers={"Content-Type": kind})
