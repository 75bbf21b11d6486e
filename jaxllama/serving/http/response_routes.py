"""/v1/responses: made, streamed, continued, read again and forgotten.

They are kept in this process's memory (``Store``), not in a state folder: a server that starts
again knows none of them, and owes none.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxllama.serving.http.bodies import parse
from jaxllama.serving.http.calls import Prompts
from jaxllama.serving.http.dispatcher import Dispatcher
from jaxllama.serving.http.middleware import (
    CLIENT_GONE,
    ClientGone,
    read_body,
    unless_disconnected,
)
from jaxllama.serving.http.response_bodies import Responses, to_chat
from jaxllama.serving.http.response_schemas import ResponseDeleted, ResponseObject
from jaxllama.serving.http.responses import Frame, ResponseStream, Store, whole
from jaxllama.serving.http.runs import Run
from jaxllama.serving.http.schemas import respond


class ResponseRoutes:
    def __init__(self, prompts: Prompts, dispatcher: Dispatcher, max_body: int) -> None:
        self._prompts, self._dispatcher, self._max_body = prompts, dispatcher, max_body
        self._store = Store()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/{id}", self.retrieve),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
        ]

    async def create(self, http: HttpRequest) -> ASGIApp:
        data = await read_body(http, self._max_body)
        frame = await asyncio.to_thread(self._frame, data, http.state.request_id)
        stream = await self._dispatcher.submit(frame.call.requests)
        run = Run("response", frame.call, stream, http.state.fields, lambda id, answer: None)

        def done(response: ResponseObject) -> None:
            if response.store:
                self._store.put(response, frame.conversation(response.output), len(data))

        if frame.body.stream:
            return ResponseStream(run, frame, done)
        try:
            response = await unless_disconnected(http.receive, whole(run, frame))
        except ClientGone:
            run.abandon()
            return Response(status_code=CLIENT_GONE)
        done(response)
        return respond(response)

    def _frame(self, data: bytearray, request_id: str) -> Frame:
        limit = self._prompts.max_len
        body = parse(Responses, data, limit, limit)
        earlier = []
        if body.previous_response_id is not None:
            key = "previous_response_id"
            earlier = self._store.find(body.previous_response_id, key).messages
        chat, messages = to_chat(body, earlier)
        call_id = f"resp_{request_id}"
        while call_id in self._store or self._dispatcher.has(f"{call_id}/0"):
            call_id += "_"  # clients may use a request id again
        return Frame(self._prompts.chat(chat, call_id), body, messages)

    async def retrieve(self, http: HttpRequest) -> Response:
        stored = self._store.find(http.path_params["id"], "id")
        return Response(stored.json, media_type="application/json")

    async def delete(self, http: HttpRequest) -> Response:
        self._store.drop(http.path_params["id"])
        return respond(ResponseDeleted(http.path_params["id"], "response", True))
