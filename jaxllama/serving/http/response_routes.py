"""The routes of /v1/responses: create, stream, continue, retrieve and delete.

The memory of the engine's process keeps responses for all front ends (``hub.StoredResponses``).
They are not in the state folder, so a restarted server knows none of them.
"""

from __future__ import annotations

import asyncio
import dataclasses

from pydantic import TypeAdapter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxllama.serving.api.bodies import Message, parse
from jaxllama.serving.api.calls import Prompts
from jaxllama.serving.api.response_bodies import Responses, to_chat
from jaxllama.serving.api.response_schemas import ResponseDeleted, ResponseObject
from jaxllama.serving.api.schemas import ApiError, respond, to_json
from jaxllama.serving.http.middleware import (
    CLIENT_GONE,
    ClientGone,
    read_body,
    unless_disconnected,
)
from jaxllama.serving.http.responses import ResponseFrame, ResponseStream, whole
from jaxllama.serving.http.runs import CallRun, submit
from jaxllama.serving.ipc.link import EngineClient

CONVERSATION = TypeAdapter(list[Message])


class ResponseRoutes:
    def __init__(self, prompts: Prompts, link: EngineClient, max_body: int) -> None:
        self._prompts, self._link, self._max_body = prompts, link, max_body

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/{id}", self.retrieve),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
        ]

    async def create(self, http: HttpRequest) -> ASGIApp:
        data, owner = await read_body(http, self._max_body), http.state.owner
        limit = self._prompts.max_len
        body = await asyncio.to_thread(parse, Responses, data, limit, limit)
        earlier = b"[]"
        if body.previous_response_id is not None:
            key = "previous_response_id"
            _, earlier = await self._recall(body.previous_response_id, owner, key)
        frame = await asyncio.to_thread(self._frame, body, earlier, http.state.request_id, owner)
        call, stream = await submit(self._link, frame.call)
        frame = dataclasses.replace(frame, call=call)
        run = CallRun(
            "response", call, stream, http.state.fields, lambda id, answer: None, kept=False
        )

        async def done(response: ResponseObject) -> None:
            if response.store:
                said = CONVERSATION.dump_json(frame.conversation(response.output))
                await self._link.ask("keep", response.id, owner, to_json(response), said, len(data))

        if frame.body.stream:
            return ResponseStream(run, frame, done)
        try:
            response = await unless_disconnected(http.receive, whole(run, frame))
        except ClientGone:
            run.abandon()
            return Response(status_code=CLIENT_GONE)
        await done(response)
        return respond(response)

    def _frame(self, body: Responses, earlier: bytes, request_id: str, owner: str) -> ResponseFrame:
        chat, messages = to_chat(body, CONVERSATION.validate_json(earlier))
        call = self._prompts.chat(chat, f"resp_{request_id}", owner)
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

    async def delete(self, http: HttpRequest) -> Response:
        id, owner = http.path_params["id"], http.state.owner
        await self._recall(id, owner, "id")
        await self._link.ask("forget", id, owner)
        return respond(ResponseDeleted(id, "response", True))
