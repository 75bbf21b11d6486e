"""Small routes: tokenize, the list of models, health, the version, metrics, adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from jaxllama import __version__
from jaxllama.serving.api.bodies import Detokenize, LoadAdapter, Tokenize, UnloadAdapter
from jaxllama.serving.api.schemas import (
    ApiError,
    Health,
    ModelList,
    ModelObject,
    Text,
    Tokens,
    Version,
    respond,
)
from jaxllama.serving.http.context import Context


def tokenize(server: Context, body: Tokenize) -> Tokens:
    prompts = server.prompts
    prompts.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "send either prompt or messages", param="prompt")
    if body.messages is not None:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        ids = prompts.encode_chat(prompts.chat_prompt(body, tools or None))
    else:
        ids = prompts.encode(body.prompt or "", "prompt", body.add_special_tokens is not False)
    return Tokens(ids, len(ids), prompts.max_len)


def detokenize(server: Context, body: Detokenize) -> Text:
    server.prompts.adapter_of(body.model)
    return Text(server.prompts.tokenizer().decode(body.tokens, skip_special=False))


def _model(server: Context, name: str) -> ModelObject:
    tokenizer = server.model.tokenizer
    return ModelObject(
        id=name,
        object="model",
        created=server.created,
        owned_by="jaxllama",
        max_model_len=server.settings.max_len,
        vocab_size=server.model.config.vocab_size,
        chat=tokenizer is not None and tokenizer.chat_template is not None,
    )


async def models(server: Context, _: HttpRequest) -> ModelList:
    return ModelList("list", [_model(server, name) for name in server.prompts.models])


async def model(server: Context, http: HttpRequest) -> ModelObject:
    name = http.path_params["model"]
    server.prompts.adapter_of(name)
    return _model(server, name)


async def health(server: Context, _: HttpRequest) -> Response:
    problem = server.link.problem
    return respond(Health("ok")) if problem is None else respond(Health(problem), 503)


async def live(server: Context, _: HttpRequest) -> Response:
    """Return 503 only for what a restart repairs: an engine that failed or stands still."""
    why = server.link.standstill
    return respond(Health("ok")) if why is None else respond(Health(why), 503)


async def version(*_: Any) -> Version:
    return Version(__version__)


async def document(server: Context, _: HttpRequest) -> Response:
    return JSONResponse(server.document)


async def metrics(server: Context, _: HttpRequest) -> Response:
    kind, page = await server.link.ask("metrics")
    return Response(page, headers={"Content-Type": kind})


# Adapters, with ``--lora-slots`` only


async def load_adapter(server: Context, http: HttpRequest, body: LoadAdapter) -> Response:
    """Load a LoRA adapter, which becomes a model of its own name for all front ends.

    ``engine.adapters`` reads the directory, one of the server's machine, and bounds its size. A
    request that runs as its adapter is unloaded, or replaced in place, keeps it to its end. Left
    out: names of the hub.
    """
    name, in_place, link = body.lora_name, bool(body.load_inplace), server.link
    if name in server.prompts.models and not (in_place and name in link.loaded):
        raise ApiError(
            400,
            f"The lora adapter '{name}' has already been loaded. If you want to load the "
            "adapter in place, set 'load_inplace' to True.",
            param="lora_name",
        )
    try:
        is_there = await asyncio.to_thread(Path(body.lora_path).is_dir)
    except OSError:  # a name that is too long, a folder above it that nobody may read
        is_there = False
    if not is_there:
        shown = body.lora_path[:200]
        message = f"No adapter found for {shown}: this server reads no such directory"
        raise ApiError(404, message, param="lora_path", code="not_found")
    await link.ask("load_adapter", name, body.lora_path, in_place)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(server: Context, http: HttpRequest, body: UnloadAdapter) -> Response:
    name = body.lora_name
    if name not in server.link.loaded:
        message = f"The lora adapter '{name}' cannot be found."
        raise ApiError(404, message, param="lora_name", code="not_found")
    await server.link.ask("unload_adapter", name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
