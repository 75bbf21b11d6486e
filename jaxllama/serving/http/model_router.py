"""One port for several models, which ``model_pool`` starts and ends.

    serve_models(options, pool)       blocks until SIGTERM or Ctrl-C

A request goes to the server of the model that its body names, as it is; the answer comes back as it
is made. A body without ``model`` goes to the first model. Keys, hosts, sizes and the log line are
this process's too, so that no stranger starts a model. A request by an id (a response, a stored
completion) is tried at each model that runs. ``/metrics`` counts the models, and
``/metrics?model=NAME`` is a running model's own page.

Left out: files and batches, adapters loaded at run time, ``/openapi.json``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxllama import __version__
from jaxllama.serving.api.keys import ApiKey
from jaxllama.serving.api.schemas import ApiError, Health, Version, respond
from jaxllama.serving.http import limits, page_files
from jaxllama.serving.http.middleware import (
    ERROR_HANDLERS,
    Middleware,
    open_to,
    read_body,
    unless_disconnected,
)
from jaxllama.serving.http.model_pool import ModelPool
from jaxllama.serving.http.routes import OPEN, ROUTES
from jaxllama.serving.ipc.link import EngineClient

# Headers that belong to one connection, or that this process writes itself.
_OWN = frozenset(
    "connection content-security-policy date keep-alive referrer-policy request-id server "
    "transfer-encoding x-content-type-options x-request-id".split()
)
_SENT = ("authorization", "x-api-key", "content-type", "accept", "traceparent", "tracestate")


class _NoEngine(EngineClient):
    """The link of a process without an engine: nothing is counted here."""

    def tell(self, message: Any) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class RouterSettings:
    """Settings of the port; as those of ``ServerSettings``."""

    keys: tuple[ApiKey, ...] = ()
    max_body: int = 4 * 2**20
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None


class Router:
    def __init__(self, pool: ModelPool, settings: RouterSettings) -> None:
        self._pool, self._settings = pool, settings
        self._created = int(time.time())
        self._session: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        # A model closes idle connections, perhaps just when one would be used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, auto_decompress=False
        ) as self._session:
            try:
                yield
            finally:
                await self._pool.close()

    async def routed(self, http: HttpRequest) -> Response:
        data = await read_body(http, self._settings.max_body)
        name, data = self._named(data)
        http.state.fields["model"] = name
        stack = contextlib.AsyncExitStack()

        async def connect() -> aiohttp.ClientResponse:
            url = await stack.enter_async_context(self._pool.use(name))
            return await stack.enter_async_context(self._ask(http, url, bytes(data)))

        try:
            reply = await unless_disconnected(http.receive, connect())
        except BaseException:
            await stack.aclose()
            raise

        async def body() -> AsyncGenerator[bytes]:
            async with stack:  # a client that leaves ends the model's request too
                async for part in reply.content.iter_any():
                    yield part

        return StreamingResponse(body(), reply.status, _headers(reply))

    def _named(self, data: bytearray) -> tuple[str, bytearray | bytes]:
        """Return the model that a body names, and the body with the name of a model."""
        try:
            body = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            asked = msgspec.json.decode(body.get("model", b"null"), type=str | None)
        except msgspec.ValidationError:
            raise ApiError(400, "the body must be a JSON object, and model a text") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ApiError(400, "the body is not valid JSON", code="invalid_json") from None
        name = self._pool.resolve(asked)
        if asked is None:
            body["model"] = msgspec.Raw(msgspec.json.encode(name))
            data = bytearray(msgspec.json.encode(body))
        return name, data

    @contextlib.asynccontextmanager
    async def _ask(
        self, http: HttpRequest, url: str, data: bytes | None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        assert self._session is not None
        headers = {name: value for name in _SENT if (value := http.headers.get(name)) is not None}
        headers["x-request-id"] = http.state.request_id
        url += http.url.path + (f"?{http.url.query}" if http.url.query else "")
        try:
            async with self._session.request(http.method, url, headers=headers, data=data) as reply:
                yield reply
        except aiohttp.ClientError:
            message = "the model's process has ended: send the request again"
            raise ApiError(503, message, code="model_failed", retry_after=1) from None

    async def by_id(self, http: HttpRequest) -> Response:
        for url in self._pool.urls():
            async with self._ask(http, url, None) as reply:
                if reply.status != 404:
                    return Response(await reply.read(), reply.status, _headers(reply))
        id = http.path_params["id"]
        raise ApiError.at("id", f"no running model knows {id[:100]!r}", "not_found", 404)

    def _model(self, name: str) -> dict[str, Any]:
        loaded, made = self._pool.resolve(name) in self._pool.loaded, self._created
        of = {"object": "model", "created": made, "owned_by": "jaxllama"}
        return {"id": name, **of, "loaded": loaded}

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [*map(self._model, self._pool.specs)]})

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["model"]
        self._pool.resolve(name)
        return JSONResponse(self._model(name))

    async def tags(self, _: HttpRequest) -> Response:
        return JSONResponse({"models": [{"name": n, "model": n} for n in self._pool.specs]})

    async def version(self, _: HttpRequest) -> Response:
        return respond(Version(__version__))

    async def health(self, _: HttpRequest) -> Response:
        return respond(Health("ok"))

    async def metrics(self, http: HttpRequest) -> Response:
        name = http.query_params.get("model")
        if name is None:
            registry = CollectorRegistry()
            registry.register(_Counts(self._pool))
            return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")
        name = self._pool.resolve(name)
        if name not in self._pool.loaded:
            raise ApiError.at("model", f"{name} does not run", "not_found", 404)
        async with self._pool.use(name) as url, self._ask(http, url, None) as reply:
            return Response(await reply.read(), reply.status, _headers(reply))


class _Counts:
    """The metrics of a pool."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def collect(self) -> list[GaugeMetricFamily]:
        loaded, starts = self._pool.loaded, self._pool.starts
        texts = {
            "jaxllama_model_loaded": "Whether a model runs",
            "jaxllama_model_memory_bytes": "Bytes that a running model takes of the budget",
            "jaxllama_model_starts": "How often a model was started",
        }
        families = [GaugeMetricFamily(name, text, labels=["model"]) for name, text in texts.items()]
        for name in self._pool.specs:
            values = float(name in loaded), loaded.get(name, 0), starts[name]
            for family, value in zip(families, values, strict=True):
                family.add_metric([name], value)
        return families


def _headers(reply: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.lower() not in _OWN}


def application(pool: ModelPool, settings: RouterSettings) -> ASGIApp:
    """Return the application of the port."""
    router = Router(pool, settings)
    routes = [
        *(Route(row.path, router.routed, methods=[row.method]) for row in ROUTES if row.is_routed),
        # The model that made an id knows it.
        *(
            Route(row.path, router.by_id, methods=[row.method])
            for row in ROUTES
            if "{id}" in row.path and row.needs is None
        ),
        Route("/v1/models", router.models),
        Route("/v1/models/{model:path}", router.model),
        Route("/api/tags", router.tags),
        *(Route(path, router.version) for path in ("/api/version", "/version")),
        *(Route(path, router.health) for path in ("/health", "/live", "/ready")),
        Route("/metrics", router.metrics),
        *(Route(path, functools.partial(page_files.page, router)) for path in page_files.PAGE),
    ]
    app: ASGIApp = Starlette(
        routes=routes, lifespan=router.lifespan, exception_handlers=ERROR_HANDLERS
    )
    paths = [route.path for route in routes if "{" not in route.path]
    # The models count for the keys' limits.
    keys = [ApiKey(key.key, key.name) for key in settings.keys]
    app = Middleware(app, _NoEngine(), keys, paths, OPEN, settings.hosts)
    return open_to(app, settings.origins)


def serve_models(app: ASGIApp, listener: Any, banner: str, drain_timeout: int, **tls: Any) -> None:
    """Serve the application on a bound socket until SIGTERM or Ctrl-C."""
    limits.raise_descriptors()
    config = limits.uvicorn_config(app, drain_timeout, **tls)
    server = limits.Server(config, lambda: print(f"jaxllama serves {banner}", flush=True))
    with listener, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve([listener]))
