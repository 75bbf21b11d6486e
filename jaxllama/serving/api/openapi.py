"""The OpenAPI page of ``server``, made from the types of bodies and answers.

document(max_len, keyed) -> dict     for GET /openapi.json
"""

from __future__ import annotations

from pydantic import TypeAdapter

from jaxllama.serving.api import (
    batch_schemas,
    bodies,
    message_schemas,
    ranking,
    response_schemas,
    schemas,
)
from jaxllama.serving.api.message_bodies import CountTokens, Messages
from jaxllama.serving.api.response_bodies import Responses
from jaxllama.typing import JsonObject

_ANSWERS = {
    **vars(schemas),
    **vars(response_schemas),
    **vars(message_schemas),
    **vars(ranking),
    **vars(batch_schemas),
}
_BODIES = {
    **vars(bodies),
    **vars(ranking),
    "Responses": Responses,
    "Messages": Messages,
    "CountTokens": CountTokens,
    "CreateBatch": batch_schemas.CreateBatch,
}
_ERRORS = {
    "400": "A field is wrong, or the request is beyond a limit",
    "403": "A page of another origin sent a file",
    "404": "There is no such model or answer",
    "409": "It is in use, or has ended",
    "408": "The headers or the body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not application/json",
    "421": "The Host header names another server",
    "429": "The queue is full, or the key's limit reached: come again after Retry-After seconds",
    "431": "The URL and the headers are too large",
    "503": "The server is stopping, or cannot write its journal",
}

_USUAL = tuple(status for status in _ERRORS if status not in ("403", "409"))


def document(
    max_len: int, keyed: bool, adapts: bool = False, has_files: bool = False
) -> JsonObject:
    """Return the OpenAPI document.

    max_len: the context length in tokens, for the description. keyed: whether requests need an API
    key. adapts: whether clients may load adapters. has_files: whether it keeps files and batches.
    """
    from jaxllama import __version__

    bodies_read = (
        "Completion",
        "Chat",
        "Responses",
        "Messages",
        "CountTokens",
        "Embedding",
        "Rerank",
        "Score",
        "Tokenize",
        "Detokenize",
        "LoadAdapter",
        "UnloadAdapter",
        "CreateBatch",
    )
    answers = (
        "CompletionObject",
        "ChatObject",
        "ResponseObject",
        "ResponseDeleted",
        "InputItemList",
        "MessageObject",
        "TokenCount",
        "MessageError",
        "EmbeddingList",
        "RerankObject",
        "ScoreList",
        "ModelObject",
        "ModelList",
        "Tokens",
        "Text",
        "Health",
        "Version",
        "ErrorObject",
        "FileObject",
        "FileList",
        "FileDeleted",
        "BatchObject",
        "BatchList",
    )
    refs, shared = TypeAdapter.json_schemas(
        [
            *((name, "validation", TypeAdapter(_BODIES[name])) for name in bodies_read),
            *((name, "serialization", TypeAdapter(_ANSWERS[name])) for name in answers),
        ],
        ref_template="#/components/schemas/{model}",
    )
    schema = {name: ref for (name, _), ref in refs.items()}
    post = {
        "/v1/completions": ("Continue prompts", "Completion", "CompletionObject"),
        "/v1/chat/completions": ("Answer a conversation", "Chat", "ChatObject"),
        "/v1/responses": ("Go on with a conversation", "Responses", "ResponseObject"),
        "/v1/messages": ("Answer a conversation (Anthropic's API)", "Messages", "MessageObject"),
        "/v1/messages/count_tokens": ("Count a prompt's tokens", "CountTokens", "TokenCount"),
        "/v1/embeddings": ("Vectors of texts", "Embedding", "EmbeddingList"),
        "/v1/rerank": ("Documents in the order of their scores", "Rerank", "RerankObject"),
        "/v1/score": ("Scores of pairs of texts", "Score", "ScoreList"),
        "/tokenize": ("Text or messages to token ids", "Tokenize", "Tokens"),
        "/detokenize": ("Token ids to text", "Detokenize", "Text"),
    }
    paths: JsonObject = {}
    for path, (text, body, answer) in post.items():
        streams = body in ("Completion", "Chat", "Responses", "Messages")
        error = "MessageError" if path.startswith("/v1/messages") else "ErrorObject"
        paths[path] = {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": _json(schema[body])},
                "responses": _responses(
                    schema, _json(schema[answer]), streams, keyed, _USUAL, error
                ),
            }
        }
    for name in ("load", "unload") if adapts else ():
        text = {"text/plain": {"schema": {"type": "string"}}}
        body = schema[f"{name.capitalize()}Adapter"]
        paths[f"/v1/{name}_lora_adapter"] = {
            "post": {
                "summary": f"{name.capitalize()} a LoRA adapter while requests run",
                "requestBody": {"required": True, "content": _json(body)},
                "responses": _responses(schema, text, False, keyed, _USUAL),
            }
        }
    get = {
        "/v1/models": (
            "The model of this server, and each of its adapters",
            _json(schema["ModelList"]),
        ),
        "/health": ("Whether the server is up", _json(schema["Health"])),
        "/live": ("Whether the server needs no restart", _json(schema["Health"])),
        "/ready": ("Whether the server takes requests", _json(schema["Health"])),
        "/version": ("This program's version", _json(schema["Version"])),
        "/metrics": ("Prometheus metrics", {"text/plain": {"schema": {"type": "string"}}}),
    }
    probes = "/health", "/live", "/ready"
    for path, (text, content) in get.items():
        responses = _responses(schema, content, False, keyed and path not in probes, ())
        paths[path] = {"get": {"summary": text, "responses": responses}}
    paths["/v1/models/{model}"] = {
        "get": {
            "summary": "One model",
            "parameters": [_path_parameter("model")],
            "responses": _responses(schema, _json(schema["ModelObject"]), False, keyed, ("404",)),
        }
    }
    for path, answer in (
        ("/v1/completions", "CompletionObject"),
        ("/v1/chat/completions", "ChatObject"),
    ):
        responses = _responses(schema, _json(schema[answer]), False, keyed, ("404",))
        responses["410"] = {
            "description": "It ended without an answer, for the reason given",
            "content": _json(schema["ErrorObject"]),
        }
        paths[f"{path}/{{id}}"] = {
            "get": {
                "summary": "An answer again, from the server's state folder",
                "parameters": [_path_parameter("id")],
                "responses": responses,
            }
        }
    for method, text, answer in (
        ("get", "A response again, while it is kept in memory", "ResponseObject"),
        ("delete", "Forget a response", "ResponseDeleted"),
    ):
        responses = _responses(schema, _json(schema[answer]), False, keyed, ("404",))
        paths.setdefault("/v1/responses/{id}", {})[method] = {
            "summary": text,
            "parameters": [_path_parameter("id")],
            "responses": responses,
        }
    for method, name, text, answer in (
        ("get", "input_items", "The input of a response", "InputItemList"),
        ("post", "cancel", "End a response in the background", "ResponseObject"),
    ):
        paths[f"/v1/responses/{{id}}/{name}"] = {
            method: {
                "summary": text,
                "parameters": [_path_parameter("id")],
                "responses": _responses(
                    schema, _json(schema[answer]), False, keyed, ("400", "404", "503")
                ),
            }
        }
    if has_files:
        paths |= _files_and_batches(schema, keyed)
    components: JsonObject = {"schemas": shared["$defs"]}
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
        for path in probes:
            paths[path]["get"]["security"] = []
    return page


_PAGED = ("limit", "after")  # query parameters of a list
# The operations of /v1/files and /v1/batches: path, method, summary, answer, errors, query.
_STORED: tuple[tuple[str, str, str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("/v1/files", "get", "The files of this key", "FileList", ("400",), (*_PAGED, "order")),
    ("/v1/files/{id}", "get", "A file's name and size", "FileObject", ("404",), ()),
    ("/v1/files/{id}", "delete", "Delete a file", "FileDeleted", ("404", "409"), ()),
    ("/v1/batches", "get", "The batches of this key", "BatchList", ("400",), _PAGED),
    ("/v1/batches/{id}", "get", "How far a batch is", "BatchObject", ("404",), ()),
    ("/v1/batches/{id}/cancel", "post", "End a batch", "BatchObject", ("404", "409"), ()),
)


def _files_and_batches(schema: JsonObject, keyed: bool) -> JsonObject:
    """Return the paths of /v1/files and /v1/batches."""
    paths: JsonObject = {}
    for path, method, text, answer, errors, query in _STORED:
        parameters = [_path_parameter("id")] if "{id}" in path else []
        for name in query:
            kind = {"type": "integer", "minimum": 1} if name == "limit" else {"type": "string"}
            parameters.append({"name": name, "in": "query", "schema": kind})
        paths.setdefault(path, {})[method] = {
            "summary": text,
            "parameters": parameters,
            "responses": _responses(schema, _json(schema[answer]), False, keyed, errors),
        }
    file = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"const": "batch"},
        },
    }
    paths["/v1/files"]["post"] = {
        "summary": "Store a file of a batch's requests",
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": file}}},
        "responses": _responses(
            schema, _json(schema["FileObject"]), False, keyed, ("400", "403", "408", "413", "415")
        ),
    }
    paths["/v1/batches"]["post"] = {
        "summary": "Answer the requests of a file",
        "requestBody": {"required": True, "content": _json(schema["CreateBatch"])},
        "responses": _responses(schema, _json(schema["BatchObject"]), False, keyed, _USUAL),
    }
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    paths["/v1/files/{id}/content"] = {
        "get": {
            "summary": "A file's contents",
            "parameters": [_path_parameter("id")],
            "responses": _responses(schema, content, False, keyed, ("404",)),
        }
    }
    return paths


def _json(schema: JsonObject) -> JsonObject:
    return {"application/json": {"schema": schema}}


def _path_parameter(name: str) -> JsonObject:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _responses(
    schema: JsonObject,
    content: JsonObject,
    streams: bool,
    keyed: bool,
    errors: tuple[str, ...],
    error: str = "ErrorObject",
) -> JsonObject:
    if streams:
        # A stream has chunks, and an error object if the engine fails midway: no schema fits both.
        content = {**content, "text/event-stream": {}}
    out = {"200": {"description": "The answer", "content": content}}
    texts = dict(_ERRORS)
    if keyed:
        errors, texts["401"] = (*errors, "401"), "The API key is missing or wrong"
    for status in errors:
        out[status] = {"description": texts[status], "content": _json(schema[error])}
    return out
