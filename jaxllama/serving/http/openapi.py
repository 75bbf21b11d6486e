"""The OpenAPI document of a server, made from the table of routes.

document(max_len, keyed) -> dict     for GET /openapi.json
"""

from __future__ import annotations

import functools
from typing import Any

from pydantic import TypeAdapter

from jaxllama import __version__
from jaxllama.serving.api.batch_schemas import CreateBatch
from jaxllama.serving.api.message_schemas import MessageError
from jaxllama.serving.api.ollama_schemas import OllamaError
from jaxllama.serving.api.schemas import ErrorObject
from jaxllama.serving.http.routes import BATCHABLE, BINARY, JSON, ROUTES, Route
from jaxllama.typing import JsonObject

_ERRORS = {
    400: "A field is wrong, or the request is beyond a limit",
    401: "The API key is missing or wrong",
    403: "A page of another origin sent a file",
    404: "There is no such model or answer",
    409: "It is in use, or has ended",
    410: "It ended without an answer, for the reason given",
    408: "The headers or the body did not arrive in time",
    413: "The body is too large",
    415: "The body is not application/json",
    421: "The Host header names another server",
    429: "The queue is full, or the key's limit reached: come again after Retry-After seconds",
    431: "The URL and the headers are too large",
    503: "The server is stopping, or cannot write its journal",
}
USUAL = (400, 404, 408, 413, 415, 421, 429, 431, 503)  # of a route with a body
_UNTYPED: dict[str, JsonObject] = {  # schemas of content types that are no text
    BINARY: {"type": "string", "format": "binary"},
    JSON: {"type": "object"},
}
_SSE, _NDJSON = "text/event-stream", "application/x-ndjson"
# Type of an error and content type of a stream, of the first row that begins the path.
_APIS: dict[str, tuple[type, str]] = {
    "/v1/messages": (MessageError, _SSE),
    "/api/": (OllamaError, _NDJSON),
    "/": (ErrorObject, _SSE),
}
_FILE: JsonObject = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
    },
}


@functools.cache
def document(
    max_len: int, keyed: bool, adapts: bool = False, has_files: bool = False
) -> JsonObject:
    """Return the OpenAPI document.

    max_len: the context length in tokens, for the description. keyed: whether requests need an API
    key. adapts: whether clients may load adapters. has_files: whether it keeps files and batches.
    """
    has = {"files": has_files, "adapters": adapts, None: True}
    rows = [row for row in ROUTES if has[row.needs]]
    kinds = {(row.body, "validation") for row in rows if row.body is not None}
    answers = [row.documented for row in rows if isinstance(row.documented, type)]
    kinds |= {
        (kind, "serialization") for kind in (*answers, *(error for error, _ in _APIS.values()))
    }
    inputs: Any = [(kind, mode, TypeAdapter(kind)) for kind, mode in kinds]
    refs, shared = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    schema = {kind: ref for (kind, _), ref in refs.items()}
    paths: JsonObject = {}
    for row in rows:
        path = row.path.replace(":path", "")
        paths.setdefault(path, {})[row.method.lower()] = _operation(row, schema, keyed)
    components: JsonObject = {"schemas": shared["$defs"]}
    if has_files:
        endpoint = components["schemas"][CreateBatch.__name__]["properties"]["endpoint"]
        endpoint["enum"] = list(BATCHABLE)
    page: JsonObject = {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxllama",
            "version": __version__,
            "description": f"OpenAI's API for one model with a context of {max_len} tokens.",
        },
        "paths": paths,
        "components": components,
    }
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
    return page


def _operation(row: Route, schema: dict[Any, JsonObject], keyed: bool) -> JsonObject:
    operation: JsonObject = {"summary": row.summary}
    text: JsonObject = {"type": "string", "minLength": 1}
    parameters: list[JsonObject] = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in ("id", "model")
        if f"{{{name}" in row.path
    ]
    for name in row.query:
        kind = {"type": "integer", "minimum": 1} if name == "limit" else {"type": "string"}
        parameters.append({"name": name, "in": "query", "schema": kind})
    if parameters:
        operation["parameters"] = parameters
    if row.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(schema[row.body])}
    elif row.path == "/v1/files" and row.method == "POST":
        content = {"multipart/form-data": {"schema": _FILE}}
        operation["requestBody"] = {"required": True, "content": content}
    error, chunks = next(api for begin, api in _APIS.items() if row.path.startswith(begin))
    answer = row.documented
    if isinstance(answer, str):
        content = {answer: {"schema": _UNTYPED.get(answer, {"type": "string"})}}
    else:
        content = _json(schema[answer])
    if row.stream:
        # A stream has chunks, and an error object if the engine fails midway: no schema fits both.
        content = {**content, chunks: {}}
    responses: JsonObject = {"200": {"description": "The answer", "content": content}}
    statuses = row.errors or (() if row.body is None else USUAL)
    for status in (*statuses, *((401,) if keyed and row.scope == "key" else ())):
        responses[str(status)] = {"description": _ERRORS[status], "content": _json(schema[error])}
    operation["responses"] = responses
    if keyed and row.scope == "everybody":
        operation["security"] = []
    return operation


def _json(schema: JsonObject) -> JsonObject:
    return {JSON: {"schema": schema}}
