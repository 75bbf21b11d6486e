"""/v1/responses: create, stream, continue, retrieve, list the input, cancel, delete, count tokens.

The memory of the engine's process keeps responses for all front ends (``ipc.stored_responses``).
They are not in the state folder, so a restarted server knows none of them. A response in the
background is stored as it begins and again as it ends. A task of the front end that took it makes
it, so it ends with that process. Any front end can cancel it.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from pydantic import TypeAdapter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxllama.serving.api.bodies import Message
from jaxllama.serving.api.calls import AcceptedCall, Prompts
from jaxllama.serving.api.response_bodies import LOGPROBS, Responses, to_chat
from jaxllama.serving.api.response_schemas import (
    InputItemList,
    InputTokens,
    ResponseDeleted,
    ResponseError,
    ResponseObject,
)
from jaxllama.serving.api.schemas import ApiError, respond, to_json
from jaxllama.serving.http.body_threads import in_thread
from jaxllama.serving.http.context import Context
from jaxllama.serving.http.generation import begun
from jaxllama.serving.http.middleware import is_ascending, page_size
from jaxllama.serving.http.responses import ResponseAnswer
from jaxllama.serving.http.runs import CallRun
from jaxllama.typing import JsonObject

CANCEL_SECONDS, CANCEL_LOOKS = 0.02, 250
_log = logging.getLogger("jaxllama.serving")
CONVERSATION = TypeAdapter(list[Message])


class ResponseApi:
    """earlier: the conversation that the response goes on with, as JSON. owner: its key."""

    prefix, kind = "resp_", None

    def __init__(self, server: Context, owner: str, earlier: bytes) -> None:
        self._server, self._owner, self._earlier = server, owner, earlier

    def read(self, prompts: Prompts, body: Responses, id: str, owner: str) -> AcceptedCall:
        chat, self._messages = to_chat(body, CONVERSATION.validate_json(self._earlier))
        call = prompts.chat(chat, id, owner)
        if body.has_logprobs and call.reading is not None:
            message = (
                f"include: {LOGPROBS} is for plain text, and this model's answers are split into "
                "reasoning, text and calls: chat completions have logprobs of all tokens"
            )
            raise ApiError(400, message, param="include", code="unsupported")
        return call

    def write(self, run: CallRun, body: Responses) -> ResponseAnswer:
        items = msgspec.json.encode(body.input_items(run.call.id))
        keep = "replace" if body.background else "keep"

        async def kept(response: ResponseObject, conversation: list[Message]) -> None:
            if response.store:
                how = "keep" if response.status == "in_progress" else keep
                said, answer = CONVERSATION.dump_json(conversation), to_json(response)
                await self._server.link.ask(how, response.id, self._owner, answer, said, items)

        return ResponseAnswer(run, body, self._messages, kept)


async def _earlier(server: Context, http: HttpRequest, body: Responses) -> bytes:
    """Return the conversation that a body goes on with, as JSON."""
    if body.previous_response_id is None:
        return b"[]"
    key = "previous_response_id"
    return (await _recall(server, body.previous_response_id, http.state.owner, key))[1]


async def create(server: Context, http: HttpRequest, body: Responses) -> ASGIApp:
    earlier, is_behind = await _earlier(server, http, body), bool(body.background)
    api = ResponseApi(server, http.state.owner, earlier)
    answer = await begun(server, http, body, api, len(earlier), is_behind)
    assert isinstance(answer, ResponseAnswer)
    if is_behind:
        response = answer.response("in_progress", [])
        await answer.keep(response)
        task = asyncio.create_task(_behind_client(answer))
        server.behind.add(task)
        task.add_done_callback(server.behind.discard)
        return respond(response)
    if body.stream:
        return answer
    return respond(await answer.run.until_left(http.receive, answer.whole()))


async def _behind_client(answer: ResponseAnswer) -> None:
    """Make a response that no client waits for, and store how it ended."""
    try:
        response = await answer.whole()
    except ApiError as error:
        if error.code == "stopping":  # its request was cancelled
            response = answer.response("cancelled", [])
        else:
            failure = ResponseError("server_error", str(error))
            response = answer.response("failed", [], error=failure)
        await answer.keep(response)
    fields = {"id": response.id, "status": response.status}
    _log.info("response in the background", extra={"fields": fields})


async def _recall(server: Context, id: str, owner: str, param: str) -> tuple[bytes, bytes]:
    """Return a response and its conversation, as JSON.

    Raises ApiError 404 if it is missing or belongs to another key.
    """
    [kept] = await server.link.ask("recall", id, owner)
    if kept is None:
        message = f"{param}: no response with the id {id!r}"
        raise ApiError(404, message, param=param, code="not_found")
    return kept


async def input_tokens(server: Context, http: HttpRequest, body: Responses) -> InputTokens:
    earlier, owner = await _earlier(server, http, body), http.state.owner
    size = http.state.body_size + len(earlier)
    api = ResponseApi(server, owner, earlier)
    call = await in_thread(http, size, api.read, server.prompts, body, "resp_", owner)
    return InputTokens("response.input_tokens", len(call.requests[0].prompt))


async def retrieve(server: Context, http: HttpRequest) -> Response:
    response, _ = await _recall(server, http.path_params["id"], http.state.owner, "id")
    return Response(response, media_type="application/json")


async def input_items(server: Context, http: HttpRequest) -> InputItemList:
    """Return a page of the items that the response's body had."""
    id = http.path_params["id"]
    [kept] = await server.link.ask("items", id, http.state.owner)
    if kept is None:
        raise ApiError.at("id", f"no response with the id {id!r}", "not_found", 404)
    items: list[JsonObject] = msgspec.json.decode(kept)
    limit, after = page_size(http, 100, 20), http.query_params.get("after")
    items = items if is_ascending(http) else items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ApiError.at("after", f"no item with the id {after!r}")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItemList("list", page, first, last, len(items) > len(page))


async def cancel(server: Context, http: HttpRequest) -> Response:
    """End a response in the background, and return it as it ended."""
    id, owner = http.path_params["id"], http.state.owner
    for _ in range(CANCEL_LOOKS):
        response, _ = await _recall(server, id, owner, "id")
        now = msgspec.json.decode(response)
        if not now["background"]:
            raise ApiError.at("id", "only a response in the background can be cancelled")
        if now["status"] != "in_progress":
            return Response(response, media_type="application/json")
        await server.link.ask("cancel", id, owner)
        await asyncio.sleep(CANCEL_SECONDS)
    raise ApiError(503, f"the response {id!r} has not ended yet", retry_after=1)


async def delete(server: Context, http: HttpRequest) -> ResponseDeleted:
    id, owner = http.path_params["id"], http.state.owner
    await _recall(server, id, owner, "id")
    await server.link.ask("cancel", id, owner)
    await server.link.ask("forget", id, owner)
    return ResponseDeleted(id, "response", True)
