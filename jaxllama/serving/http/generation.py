"""Answers of the model: one way for all APIs, from a body to the answer, whole or streamed.

    async def handler(server, http, body): return await answered(server, http, body, Api())

An API is a translation in and out: ``read`` makes the call of a body, and ``write`` an ``Answer``
of the call's pieces of text. Completions and chats are here, and the answers that are owed or asked
again by their ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxllama.engine.journal import Entry
from jaxllama.engine.request import EngineClosed, EngineFailed, QueueFull
from jaxllama.engine.scoring import Scores
from jaxllama.serving.api.bodies import Chat, Completion
from jaxllama.serving.api.calls import AcceptedCall, Prompts
from jaxllama.serving.api.messages import Accepted, Finish
from jaxllama.serving.api.schemas import ApiError, respond, to_json
from jaxllama.serving.http.body_threads import in_thread
from jaxllama.serving.http.context import Context
from jaxllama.serving.http.middleware import api_error, unless_disconnected
from jaxllama.serving.http.runs import Answer, CallRun, ChunkAnswer, Outcome, submit


class Api(Protocol):
    """The translation of one API, for one body.

    prefix: of the answers' ids. kind: of the journal's entries, None for none.
    """

    @property
    def prefix(self) -> str: ...
    @property
    def kind(self) -> str | None: ...

    def read(self, prompts: Prompts, body: Any, id: str, owner: str) -> AcceptedCall:
        """Return the body's call; runs in a thread."""
        ...

    def write(self, run: CallRun, body: Any) -> Answer:
        """Return the answer that the call's pieces make."""
        ...


async def answered(server: Context, http: HttpRequest, body: Any, api: Api) -> ASGIApp:
    """Answer a body, whole or streamed."""
    answer = await begun(server, http, body, api)
    if body.stream:
        return answer
    return respond(await answer.run.until_left(http.receive, answer.whole()))


async def begun(
    server: Context, http: HttpRequest, body: Any, api: Api, size: int = 0, is_behind: bool = False
) -> Answer:
    """Submit a body's call, and return its answer on its way.

    size: bytes that are read beside the body. is_behind: whether no client waits.
    """
    state, id = http.state, f"{api.prefix}{http.state.request_id}"
    size += state.body_size
    call = await in_thread(http, size, api.read, server.prompts, body, id, state.owner)
    if call.to_score is not None:
        call = await unless_disconnected(http.receive, _scored(server, call))
        if not call.is_written:
            state.scored_tokens = sum(len(request.prompt) for request in call.prompts)
    entry, is_kept = None, server.is_kept and api.kind is not None and not state.is_batch
    if is_kept:
        seeded = body.model_copy(update={"seed": call.seed})
        text = seeded.model_dump_json(exclude_none=True, by_alias=True)
        entry = Accepted(str(api.kind), call.created, text, state.owner)
    call, stream = await submit(server.link, call, state.owner, entry)
    fields, finish = {} if is_behind else state.fields, _finish(server) if is_kept else None
    kept = api.kind is not None and (is_kept or not body.stream)
    return api.write(CallRun(api.kind, call, stream, fields, finish, kept), body)


async def _scored(server: Context, call: AcceptedCall) -> AcceptedCall:
    """Return the call with its prompts' logprobs. Raises QueueFull if too many calls wait."""
    if call.to_score is None:
        return call
    if server.scoring >= server.max_queue:
        raise QueueFull.of(server.scoring, 1.0)
    server.scoring += 1
    try:
        scores = [
            Scores(**await server.link.ask("score", p.prompt, call.to_score, p.adapter))
            for p in call.prompts
        ]
    finally:
        server.scoring -= 1
    return dataclasses.replace(call, scores=tuple(scores))


# Completions and chats


class ChunkApi:
    """kind: "completion" or "chat"."""

    def __init__(self, kind: str) -> None:
        self.kind, self.prefix = kind, "cmpl-" if kind == "completion" else "chatcmpl-"

    def read(self, prompts: Prompts, body: Completion | Chat, id: str, owner: str) -> AcceptedCall:
        if isinstance(body, Completion):
            return prompts.completion(body, id, owner)
        return prompts.chat(body, id, owner)

    def write(self, run: CallRun, body: Completion | Chat) -> Answer:
        return ChunkAnswer(run, body)


async def completions(server: Context, http: HttpRequest, body: Completion) -> ASGIApp:
    return await answered(server, http, body, ChunkApi("completion"))


async def chat_completions(server: Context, http: HttpRequest, body: Chat) -> ASGIApp:
    return await answered(server, http, body, ChunkApi("chat"))


# The journal's answers


async def stored_completion(server: Context, http: HttpRequest) -> Response:
    return await _stored(server, http, "completion")


async def stored_chat(server: Context, http: HttpRequest) -> Response:
    return await _stored(server, http, "chat")


async def _stored(server: Context, http: HttpRequest, kind: str) -> Response:
    """Return a stored answer; wait while it is being made."""
    if not server.is_kept:
        raise ApiError(404, "answers are kept only by a server with a state folder")
    id = http.path_params["id"]
    asked = server.link.ask("find", id, kind, http.state.owner)
    [answer] = await unless_disconnected(http.receive, asked)
    if answer == "":
        raise ApiError(503, "the server is stopping", code="stopping", retry_after=1)
    if answer is None:
        raise ApiError(404, f"no answer with the id {id!r}", param="id", code="not_found")
    status = 410 if answer.startswith('{"error"') else 200
    return Response(answer, status, media_type="application/json")


def _finish(server: Context) -> Callable[[str, Callable[[], Outcome] | None], None]:
    def finish(call_id: str, answer: Callable[[], Outcome] | None) -> None:
        """Store the final answer or error; None leaves the body to the next server."""
        text = None
        try:
            text = None if answer is None else to_json(answer()).decode()
        finally:
            server.link.tell(Finish(call_id, text))

    return finish


async def resume(server: Context, entry: Entry, read: Callable[[Entry], Any]) -> None:
    """Answer a body that a killed server left. read: returns the body."""
    api, call_id, stream, finish = ChunkApi(entry.kind), str(entry.id), None, _finish(server)
    try:
        body = await asyncio.to_thread(read, entry)
        call = await asyncio.to_thread(api.read, server.prompts, body, call_id, entry.owner)
        call = dataclasses.replace(call, created=entry.at)
        while stream is None:
            try:
                if not call.scores:
                    call = await _scored(server, call)
                call, stream = await submit(server.link, call, entry.owner, is_known=True)
            except QueueFull as full:
                await asyncio.sleep(full.retry_after)
    except (EngineClosed, EngineFailed):  # before the body began: the next server answers it
        finish(call_id, None)
        return
    except Exception as error:
        finish(call_id, api_error(error).body)
        return
    with contextlib.suppress(Exception):  # the stored answer reports the error
        await CallRun(entry.kind, call, stream, {}, finish).whole()
