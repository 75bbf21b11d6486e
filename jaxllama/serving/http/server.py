"""The HTTP server: OpenAI's API over the engine, as a Starlette application.

    application(model, link, settings, max_queue) -> ASGI application       for a front end
    create_app(lm, engine, settings, metrics)       the same in the engine's own process

``routes`` has the table of routes.

Contract. Every accepted body is answered once: with its tokens, or with OpenAI's error object. A
client that disconnects cancels its rows. A body is refused before it costs anything: 400 with the
field's name, 401, 404, 413, 415, and 429 with Retry-After when the engine's queue is full. The
event loop never computes. Tokenizing runs in threads. The model, embeddings and prompt logprobs run
in the engine's process (``hub``).

``middleware`` has keys, ids, logs and errors, ``calls`` the meaning of bodies, ``generation`` and
``runs`` a call's way to its answer, ``answers`` the answers. With a state folder a body is stored
before its answer begins (``journal``), and after a kill the next server answers the stored bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable

from starlette.applications import Starlette
from starlette.types import ASGIApp

from jaxllama.engine.engine import Engine
from jaxllama.engine.journal import Entry, Journal
from jaxllama.language_model import LanguageModel
from jaxllama.serving.api.calls import ModelFacts
from jaxllama.serving.api.keys import Quotas
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.http import batch_routes, generation, openapi, routes
from jaxllama.serving.http.context import Context, ServerSettings
from jaxllama.serving.http.middleware import ERROR_HANDLERS, Middleware, open_to
from jaxllama.serving.http.traces import Tracer
from jaxllama.serving.ipc import link
from jaxllama.serving.ipc.hub import Hub
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.serving.ipc.served import Served, forward_passes

__all__ = ["ServerSettings", "application", "create_app"]

BATCH_SHARE = 4  # the lines of batches take one part in so many of the engine's queue


def create_app(
    lm: LanguageModel,
    engine: Served,
    settings: ServerSettings,
    metrics: Metrics,
    journal: Journal | None = None,
) -> ASGIApp:
    """Return the application. ``engine`` is running; the application does not stop it.

    journal: of the state folder; by default it is opened here.
    """
    if journal is None and settings.state is not None:
        journal = Journal(settings.state)
    passes = forward_passes(lm, engine.adapters if isinstance(engine, Engine) else None)
    hub = Hub(engine, passes, metrics, journal, quotas=Quotas(settings.keys))
    client = link.local(hub, lm.tokenizer, lm.config.eos_token_ids)
    facts = ModelFacts.of(lm)
    return application(facts, client, settings, engine.options.max_queue, hub.close)


def application(
    model: ModelFacts,
    link: EngineClient,
    settings: ServerSettings,
    max_queue: int,
    ended: Callable[[], None] = lambda: None,
) -> ASGIApp:
    """Return the application of a front end.

    max_queue: the engine's. ended: called after the last request.
    """
    server = Context(model, link, settings, max_queue, ended)
    server.document = openapi.document(
        settings.max_len,
        bool(settings.keys),
        settings.lora_slots > 0,
        settings.state is not None,
    )
    server.batchable = routes.BATCHABLE
    tracer = None if settings.traces is None else Tracer(settings.traces, settings.name)
    rows = routes.served(server)
    app = Starlette(
        routes=rows,
        lifespan=lambda _: _running(server, tracer),
        exception_handlers=ERROR_HANDLERS,
    )
    paths = [row.path for row in rows if "{" not in row.path]
    server.app = Middleware(app, link, settings.keys, paths, routes.OPEN, settings.hosts, tracer)
    return open_to(server.app, settings.origins)


@contextlib.asynccontextmanager
async def _running(server: Context, tracer: Tracer | None) -> AsyncGenerator[None]:
    """Answer the bodies that a killed server left, beside new requests, and run batches."""
    entries = [Entry(*entry) for entry in await server.link.ask("owed")] if server.is_kept else []
    read = functools.partial(routes.parse_entry, server)
    tasks = [asyncio.create_task(generation.resume(server, entry, read)) for entry in entries]
    at_once = max(1, server.max_queue // BATCH_SHARE)
    try:
        assert server.app is not None
        async with batch_routes.running(server, server.app, at_once):
            yield
    finally:
        for task in (*tasks, *server.behind):
            task.cancel()
        await asyncio.gather(*tasks, *server.behind, return_exceptions=True)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        server.ended()
