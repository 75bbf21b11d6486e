"""The routes of /v1/responses: create, stream, continue, retrieve, list the input, cancel, delete.

The memory of the engine's process keeps responses for all front ends (``ipc.stored_responses``).
They are not in the state folder, so a restarted server knows none of them. A response in the
background is stored as it begins and again as it ends. A task of the front end that took it makes
it, so it ends with that process. Any front end can cancel it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable

import msgspec
from pydantic import TypeAdapter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxllama.serving.api.bodies import Message, parse
from jaxllama.serving.api.calls import Prompts
from jaxllama.serving.api.response_bodies import LOGPROBS, Responses, to_chat
from jaxllama.serving.api.response_schemas import (
    InputItemList,
    ResponseDeleted,
    ResponseError,
    ResponseObject,
)
from jaxllama.serving.api.schemas import ApiError, respond, to_json
from jaxllama.serving.http.body_threads import in_thread
from jaxllama.serving.http.middleware import page_size, read_body
from jaxllama.serving.http.responses import ResponseFrame, ResponseStream, whole
from jaxllama.serving.http.runs import CallRun, submit
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.typing import JsonObject

CANCEL_SECONDS, CANCEL_LOOKS = 0.02, 250
_log = logging.getLogger("jaxllama.serving")
CONVERSATION = TypeAdapter(list[Message])


class ResponseRoutes:
    def __init__(self, prompts: Prompts, link: EngineClient, max_body: int) -> None:
        self._prompts, self._link, self._max_body = prompts, link, max_body
        self._behind: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End the responses in the background."""
        for task in self._behind:
            task.cancel()
        await asyncio.gather(*self._behind, return_exceptions=True)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/{id}", self.retrieve),
            Route("/v1/responses/{id}/input_items", self.input_items),
            Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
        ]

    async def create(self, http: HttpRequest) -> ASGIApp:
        data, owner = await read_body(http, self._max_body), http.state.owner
        limit = self._prompts.max_len
        body = await in_thread(http, len(data), parse, Responses, data, limit, limit)
        earlier = b"[]"
        if body.previous_response_id is not None:
            key = "previous_response_id"
            _, earlier = await self._recall(body.previous_response_id, owner, key)
        size, id = len(data) + len(earlier), http.state.request_id
        frame = await in_thread(http, size, self._frame, body, earlier, id, owner)
        call, stream = await submit(self._link, frame.call, owner)
        frame = dataclasses.replace(frame, call=call)
        fields = {} if body.background else http.state.fields
        run = CallRun("response", call, stream, fields, lambda id, answer: None, kept=False)
        items = msgspec.json.encode(body.input_items(call.id))

        async def done(response: ResponseObject, how: str = "keep") -> None:
            if response.store:
                said = CONVERSATION.dump_json(frame.conversation(response.output))
                answer = to_json(response)
                await self._link.ask(how, response.id, owner, answer, said, items)

        if frame.body.background:
            begun = frame.response("in_progress", [])
            await done(begun)
            task = asyncio.create_task(self._behind_client(run, frame, done, fields))
            self._behind.add(task)
            task.add_done_callback(self._behind.discard)
            return respond(begun)
        if frame.body.stream:
            return ResponseStream(run, frame, done)
        response = await run.until_left(http.receive, whole(run, frame))
        await done(response)
        return respond(response)

    async def _behind_client(
        self,
        run: CallRun,
        frame: ResponseFrame,
        done: Callable[[ResponseObject, str], Awaitable[None]],
        fields: JsonObject,
    ) -> None:
        """Make a response that no client waits for, and store how it ended."""
        try:
            response = await whole(run, frame)
        except ApiError as error:
            if error.code == "stopping":  # its request was cancelled
                response = frame.response("cancelled", [])
            else:
                failure = ResponseError("server_error", str(error))
                response = frame.response("failed", [], error=failure)
        await done(response, "replace")
        tokens = sum(fields.get(name, 0) for name in ("prompt_tokens", "completion_tokens"))
        line = {"id": response.id, "status": response.status, "tokens": tokens}
        _log.info("response in the background", extra={"fields": line})

    def _frame(self, body: Responses, earlier: bytes, request_id: str, owner: str) -> ResponseFrame:
        chat, messages = to_chat(body, CONVERSATION.validate_json(earlier))
        call = self._prompts.chat(chat, f"resp_{request_id}", owner)
        if body.has_logprobs and call.reading is not None:
            message = (
                f"include: {LOGPROBS} is for plain text, and this model's answers are split into "
                "reasoning, text and calls: chat completions have logprobs of all tokens"
            )
            raise ApiError(400, message, param="include", code="unsupported")
        return ResponseFrame(call, body, messages)

    async def _recall(self, id: str, owner: str, param: str) -> tuple[bytes, bytes]:
        """Return a response and its conversation, as JSON.

        Raises ApiError 404 if it is missing or belongs to another key.
        """
        [kept] = await self._link.ask("recall", id, owner)
        if kept is None:
            message = f"{param}: no response with the id {id!r}"
            raise ApiError(404, message, param=param, code="not_found")
        return kept

    async def retrieve(self, http: HttpRequest) -> Response:
        response, _ = await self._recall(http.path_params["id"], http.state.owner, "id")
        return Response(response, media_type="application/json")

    async def input_items(self, http: HttpRequest) -> Response:
        """Return a page of the items that the response's body had."""
        id, query = http.path_params["id"], http.query_params
        [kept] = await self._link.ask("items", id, http.state.owner)
        if kept is None:
            raise ApiError(404, f"id: no response with the id {id!r}", param="id", code="not_found")
        items: list[JsonObject] = msgspec.json.decode(kept)
        order, limit, after = (
            query.get("order", "desc"),
            page_size(http, 100, 20),
            query.get("after"),
        )
        if order not in ("asc", "desc"):
            raise ApiError(400, "order: must be asc or desc", param="order", code="invalid_value")
        items = items if order == "asc" else items[::-1]
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                message = f"after: no item with the id {after!r}"
                raise ApiError(400, message, param="after", code="invalid_value")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return respond(InputItemList("list", page, first, last, len(items) > len(page)))

    async def cancel(self, http: HttpRequest) -> Response:
        """End a response in the background, and return it as it ended."""
        id, owner = http.path_params["id"], http.state.owner
        for _ in range(CANCEL_LOOKS):
            response, _ = await self._recall(id, owner, "id")
            now = msgspec.json.decode(response)
            if not now["background"]:
                message = "id: only a response in the background can be cancelled"
                raise ApiError(400, message, param="id", code="invalid_value")
            if now["status"] != "in_progress":
                return Response(response, media_type="application/json")
            await self._link.ask("cancel", id, owner)
            await asyncio.sleep(CANCEL_SECONDS)
        raise ApiError(503, f"the response {id!r} has not ended yet", retry_after=1)

    async def delete(self, http: HttpRequest) -> Response:
        id, owner = http.path_params["id"], http.state.owner
        await self._recall(id, owner, "id")
        await self._link.ask("cancel", id, owner)
        await self._link.ask("forget", id, owner)
        return respond(ResponseDeleted(id, "response", True))
