"""The table of a server's routes, and the one way from a request to its handler.

    ROUTES                      the table
    served(server)              Starlette's routes of the rows that a server has

The OpenAPI document (``openapi``), the port of several models (``model_router``), the URLs of
batches (``BATCHABLE``) and the docs' table come from the same rows. A new route is a row, a body
(``api/bodies.py``) and a function:

    def handler(server, body) -> object                 computed in a thread
    async def handler(server, http, body) -> object     on the event loop
    async def handler(server, http) -> object           of a row without a body

A returned object becomes JSON; a returned ASGI response is sent as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

from jaxllama.engine.journal import Entry
from jaxllama.serving.api import bodies, schemas
from jaxllama.serving.api.message_schemas import MessageObject
from jaxllama.serving.api.ollama_schemas import OllamaChatLine, OllamaGenerateLine
from jaxllama.serving.api.response_schemas import ResponseObject
from jaxllama.serving.api.schemas import ChatObject, CompletionObject, EmbeddingList, Health
from jaxllama.serving.http import (
    basics,
    batch_routes,
    generation,
    messages,
    ollama,
    page_files,
    response_routes,
    vector_routes,
)
from jaxllama.serving.http.body_threads import SMALL, in_thread
from jaxllama.serving.http.context import Context
from jaxllama.serving.http.middleware import read_body

# Content types of answers without a type.
TEXT, BINARY, JSON = "text/plain", "application/octet-stream", "application/json"
AGAIN = "An answer again, from the server's state folder"
PAGED = ("limit", "after")
# Fields with schemas, for which making a call waits for another process (``grammar_process``).
FORMS = ("response_format", "text", "output_config", "output_format", "format", "tools")


# How many token ids a body may have, and each of its lists.


def _contexts(server: Context) -> tuple[int, int]:
    return server.prompts.max_len, server.prompts.max_len


def _choices(server: Context) -> tuple[int, int]:
    return server.prompts.max_choices * server.prompts.max_len, server.prompts.max_len


def _texts(server: Context) -> tuple[int, int]:
    return vector_routes.TOKENS, server.prompts.max_len


def _many(_: Context) -> tuple[int, int]:
    return bodies.MAX_IDS, bodies.MAX_IDS


def _none(server: Context) -> tuple[int, int]:
    return 0, server.prompts.max_len


@dataclasses.dataclass(frozen=True)
class Route:
    """A row of the table.

    path: as Starlette's. handler: see the module docstring; its annotations name the types of the
    body and the answer. summary: for the docs. answer: type of an answer that the handler sends
    itself, or its content type. errors: statuses in the docs beside those of every body. query:
    names of parameters. stream: whether ``stream`` of the body streams the answer. scope: who may
    ask when there are keys: their holders, or everybody. needs: what the server must have.
    batchable: whether lines of batches may be such bodies. n_ids: largest number of token ids in a
    body, and in a list.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Callable[..., Any]
    summary: str = ""
    answer: type | str | None = None
    errors: tuple[int, ...] = ()
    query: tuple[str, ...] = ()
    stream: bool = False
    scope: Literal["key", "everybody"] = "key"
    needs: Literal["files", "adapters"] | None = None
    batchable: bool = False
    n_ids: Callable[[Context], tuple[int, int]] = _contexts

    @functools.cached_property
    def body(self) -> type[BaseModel] | None:
        """The type of the JSON body."""
        return get_type_hints(self.handler).get("body")

    @functools.cached_property
    def documented(self) -> type | str:
        """The type of the answer in the OpenAPI document, or its content type."""
        return self.answer or get_type_hints(self.handler)["return"]

    @property
    def is_routed(self) -> bool:
        """Whether the body names a model."""
        return self.body is not None and "model" in self.body.model_fields


_post, _get, _delete = (functools.partial(Route, method) for method in ("POST", "GET", "DELETE"))
_files_post, _files_get, _files_delete = (
    functools.partial(row, needs="files") for row in (_post, _get, _delete)
)
ROUTES: tuple[Route, ...] = (
    _post(
        "/v1/completions",
        generation.completions,
        "Continue prompts",
        CompletionObject,
        stream=True,
        batchable=True,
        n_ids=_choices,
    ),
    _post(
        "/v1/chat/completions",
        generation.chat_completions,
        "Answer a conversation",
        ChatObject,
        stream=True,
        batchable=True,
    ),
    _get("/v1/completions/{id}", generation.stored_completion, AGAIN, CompletionObject, (404, 410)),
    _get("/v1/chat/completions/{id}", generation.stored_chat, AGAIN, ChatObject, (404, 410)),
    _get("/v1/models", basics.models, "The model of this server, and each of its adapters"),
    _get("/v1/models/{model:path}", basics.model, "One model", errors=(404,)),
    _post("/tokenize", basics.tokenize, "Text or messages to token ids"),
    _post("/detokenize", basics.detokenize, "Token ids to text", n_ids=_many),
    _get("/health", basics.health, "Whether the server is up", Health, scope="everybody"),
    _get("/live", basics.live, "Whether the server needs no restart", Health, scope="everybody"),
    _get("/ready", basics.health, "Whether the server takes requests", Health, scope="everybody"),
    _get("/version", basics.version, "This program's version"),
    _get("/metrics", basics.metrics, "Prometheus metrics", TEXT),
    _get("/openapi.json", basics.document, "This document", JSON, scope="everybody"),
    # Responses
    _post(
        "/v1/responses",
        response_routes.create,
        "Go on with a conversation",
        ResponseObject,
        stream=True,
        batchable=True,
    ),
    _post(
        "/v1/responses/input_tokens",
        response_routes.input_tokens,
        "Count the tokens of a response's input",
    ),
    _get(
        "/v1/responses/{id}",
        response_routes.retrieve,
        "A response again, while it is kept in memory",
        ResponseObject,
        (404,),
    ),
    _get(
        "/v1/responses/{id}/input_items",
        response_routes.input_items,
        "The input of a response",
        errors=(400, 404, 503),
    ),
    _post(
        "/v1/responses/{id}/cancel",
        response_routes.cancel,
        "End a response in the background",
        ResponseObject,
        (400, 404, 503),
    ),
    _delete("/v1/responses/{id}", response_routes.delete, "Forget a response", errors=(404,)),
    # Messages, Anthropic's API
    _post(
        "/v1/messages",
        messages.create,
        "Answer a conversation (Anthropic's API)",
        MessageObject,
        stream=True,
    ),
    _post("/v1/messages/count_tokens", messages.count_tokens, "Count a prompt's tokens"),
    # Vectors and scores
    _post(
        "/v1/embeddings",
        vector_routes.embeddings,
        "Vectors of texts",
        EmbeddingList,
        batchable=True,
        n_ids=_texts,
    ),
    _post(
        "/v1/rerank",
        vector_routes.rerank,
        "Documents in the order of their scores",
        batchable=True,
        n_ids=_none,
    ),
    _post(
        "/v1/score", vector_routes.score, "Scores of pairs of texts", batchable=True, n_ids=_none
    ),
    # Files and batches
    _files_post(
        "/v1/files",
        batch_routes.upload,
        "Store a file of a batch's requests",
        errors=(400, 403, 408, 413, 415),
    ),
    _files_get(
        "/v1/files",
        batch_routes.files,
        "The files of this key",
        errors=(400,),
        query=(*PAGED, "order"),
    ),
    _files_get("/v1/files/{id}", batch_routes.file, "A file's name and size", errors=(404,)),
    _files_delete("/v1/files/{id}", batch_routes.delete, "Delete a file", errors=(404, 409)),
    _files_get("/v1/files/{id}/content", batch_routes.content, "A file's contents", BINARY, (404,)),
    _files_post("/v1/batches", batch_routes.create, "Answer the requests of a file"),
    _files_get(
        "/v1/batches", batch_routes.batches, "The batches of this key", errors=(400,), query=PAGED
    ),
    _files_get("/v1/batches/{id}", batch_routes.batch, "How far a batch is", errors=(404,)),
    _files_post("/v1/batches/{id}/cancel", batch_routes.cancel, "End a batch", errors=(404, 409)),
    # ollama's API
    _post(
        "/api/chat",
        ollama.chat,
        "Answer a conversation (ollama's API)",
        OllamaChatLine,
        stream=True,
    ),
    _post(
        "/api/generate",
        ollama.generate,
        "Answer or continue a prompt (ollama's API)",
        OllamaGenerateLine,
        stream=True,
    ),
    _get("/api/tags", ollama.tags, "List the models (ollama's API)"),
    _get("/api/version", basics.version, "Return this program's version (ollama's API)"),
    # Adapters
    _post(
        "/v1/load_lora_adapter",
        basics.load_adapter,
        "Load a LoRA adapter while requests run",
        TEXT,
        needs="adapters",
    ),
    _post(
        "/v1/unload_lora_adapter",
        basics.unload_adapter,
        "Unload a LoRA adapter while requests run",
        TEXT,
        needs="adapters",
    ),
    *(
        _get(path, page_files.page, "A file of the chat page", kind, scope="everybody")
        for path, (_, kind) in page_files.PAGE.items()
    ),
)
# Paths of a batch's lines, and whether their bodies have a priority.
BATCHABLE = {
    row.path: "priority" in row.body.model_fields
    for row in ROUTES
    if row.batchable and row.body is not None
}
# Paths without a key and without secrets.
OPEN = frozenset(row.path for row in ROUTES if row.scope == "everybody")


def served(server: Context) -> list[StarletteRoute]:
    """Return Starlette's routes. Without a state folder those of files say how to get one."""
    return [
        StarletteRoute(row.path, _endpoint(server, row), methods=[row.method])
        for row in ROUTES
        if row.needs != "adapters" or server.settings.lora_slots
    ]


def _endpoint(server: Context, row: Route) -> Callable[[HttpRequest], Any]:
    """Return the function that answers the requests of a row."""
    handler, kind = row.handler, row.body
    is_async = inspect.iscoroutinefunction(handler)

    async def plain(http: HttpRequest) -> ASGIApp:
        return _response(await handler(server, http))

    if kind is None:
        return plain
    limits = row.n_ids(server)

    def parsed(data: bytearray) -> Any:
        return bodies.parse(kind, data, *limits)

    async def with_body(http: HttpRequest) -> ASGIApp:
        data = await read_body(http, server.settings.max_body)
        if not is_async:
            work = lambda: _response(handler(server, parsed(data)))  # noqa: E731
            return await in_thread(http, len(data), work)
        body = await in_thread(http, len(data), parsed, data)
        waits = any(getattr(body, name, None) is not None for name in FORMS)
        http.state.body_size = max(len(data), SMALL + 1) if waits else len(data)
        return _response(await handler(server, http, body))

    return with_body


def _response(answer: Any) -> Any:
    return answer if callable(answer) else schemas.respond(answer)


def parse_entry(server: Context, entry: Entry) -> Any:
    """Return the body of a journal's entry."""
    path = "/v1/completions" if entry.kind == "completion" else "/v1/chat/completions"
    row = next(row for row in ROUTES if row.path == path)
    assert row.body is not None
    return bodies.parse(row.body, entry.body.encode(), *row.n_ids(server))
