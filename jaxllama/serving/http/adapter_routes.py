"""The routes of vLLM that load and unload LoRA adapters while requests run.

    POST /v1/load_lora_adapter      {"lora_name", "lora_path", "load_inplace"}
    POST /v1/unload_lora_adapter    {"lora_name"}

The server has them only with ``--lora-slots``: a client names a directory of the server's machine.
A loaded adapter is a model of its own name for all front ends. A request that runs as its adapter
is unloaded keeps it to its end, and so does one that is replaced in place. The engine
(``engine.adapters``) reads the directory and bounds its size. Left out: names of the hub.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from jaxllama.serving.api.bodies import LoadAdapter, UnloadAdapter
from jaxllama.serving.api.schemas import ApiError
from jaxllama.serving.http.context import Context


async def load(server: Context, http: HttpRequest, body: LoadAdapter) -> Response:
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


async def unload(server: Context, http: HttpRequest, body: UnloadAdapter) -> Response:
    name = body.lora_name
    if name not in server.link.loaded:
        message = f"The lora adapter '{name}' cannot be found."
        raise ApiError(404, message, param="lora_name", code="not_found")
    await server.link.ask("unload_adapter", name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
