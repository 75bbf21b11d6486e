"""The checks and log lines of every HTTP request, on any path.

An ASGI middleware gives the request an id (``X-Request-Id``, the client's own if it is plain). It
checks the Host and the API key, and adds headers. Afterwards it counts the request and logs one
line. ``scope["state"]["owner"]`` names the key: a digest of it, "" if the server has no keys. The
module also has the connection helpers of the handlers:

    answer_error(error)                      OpenAI's error object for any exception
    open_to(app, origins)                    the application for pages of other origins
    read_body(request, limit)                413 beyond the limit, 408 when it does not come
    unless_disconnected(receive, work)       the work's result, or ClientGone and the work cancelled
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllama.engine.journal import JournalUnavailable
from jaxllama.engine.request import EngineClosed, EngineFailed, QueueFull
from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api.keys import ApiKey
from jaxllama.serving.api.message_schemas import message_error
from jaxllama.serving.api.messages import ServedRequest
from jaxllama.serving.api.reading import PARSE_TIMES
from jaxllama.serving.api.schemas import ApiError, respond
from jaxllama.serving.http.traces import Tracer
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.typing import JsonObject

CLIENT_GONE = 499  # nginx's status for a client that left; only the log shows it
BODY_SECONDS = 30.0  # seconds for a body to arrive
RETRY_JOURNAL = 5  # seconds after which a client tries again if its body could not be journalled
# Paths that probes ask all the time: without traces, and in the log only for debugging.
UNTRACED = ("/health", "/live", "/ready", "/metrics")
# The attributes of a request's span, by the field of the log.
ATTRIBUTES = {
    "id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "outcome": "jaxllama.outcome",
    "key": "jaxllama.key",
}
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
        b"require-trusted-types-for 'script'; trusted-types dompurify",
    ),
)
_log = logging.getLogger("jaxllama.serving")
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


class Middleware:
    """The middleware of a server; the module docstring has its tasks.

    paths: the paths that metrics distinguish. open_paths: those that need no key. hosts: names that
    a Host header may have beside the local ones; None allows any. tracer: takes each request's
    times, None for no traces.
    """

    def __init__(
        self,
        app: ASGIApp,
        link: EngineClient,
        keys: Sequence[ApiKey],
        paths: Collection[str],
        open_paths: Collection[str],
        hosts: Sequence[str] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._app, self._link, self._paths = app, link, frozenset(paths)
        self._open, self._keys = open_paths, tuple(keys)
        self._tracer = tracer
        self._hosts = None if hosts is None else frozenset(map(_host_name, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = sent_id if _ID.fullmatch(sent_id) else uuid.uuid4().hex
        fields: JsonObject = {}
        state: JsonObject = {
            **scope.get("state", {}),
            "request_id": request_id,
            "fields": fields,
            "scored_tokens": 0,  # tokens of forward passes beside the engine
        }
        scope["state"] = state
        status = CLIENT_GONE  # stays if nothing is ever sent
        trace = None
        if self._tracer is not None and scope["path"] in self._paths:
            trace = self._tracer.begin(headers)
            PARSE_TIMES.set(trace.parsing if trace.is_sampled else None)
            fields["trace_id"] = trace.trace_id

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]
                extra = [*_HEADERS, *ids]
                if trace is not None:
                    extra.append((b"traceparent", trace.header))
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        # A line of a batch, which this server sends itself, has its owner and no headers.
        owner: str | None = state.get("batch_owner")
        state["is_batch"] = owner is not None
        try:
            try:
                if owner is None:
                    self._check_host(headers)
                    key = self._key(scope["path"], headers)
                else:
                    key = self._key_of(owner)
                state["owner"] = "" if key is None else key.owner
                if key is not None and key.name is not None:
                    fields["key"] = key.name
                if key is not None and key.is_limited and scope["method"] == "POST":
                    await self._check_quota(key)
            except ApiError as error:
                await answer_error(error, scope["path"])(scope, receive, watched)
            else:
                await self._app(scope, receive, watched)
        finally:
            seconds = time.perf_counter() - start
            path = scope["path"] if scope["path"] in self._paths else "other"
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
            times = fields.pop("times", None)
            if times is not None:
                submitted, admitted, first, ended = times
                fields["queue_seconds"] = round(admitted - submitted, 4)
                fields["prefill_seconds"] = round(first - admitted, 4)
                fields["decode_seconds"] = round(ended - first, 4)
            owner, tokens = str(state.get("owner", "")), state["scored_tokens"]
            self._link.tell(ServedRequest(path, method, status, seconds, owner, tokens))
            if trace is not None and self._tracer is not None and path not in UNTRACED:
                named = {ATTRIBUTES[key]: fields[key] for key in ATTRIBUTES if key in fields}
                named |= {
                    "http.request.method": method,
                    "url.path": path,
                    "http.response.status_code": status,
                    "jaxllama.request_id": request_id,
                }
                self._tracer.end(trace, f"{method} {path}", seconds, times, status, named)
            level = logging.DEBUG if path in UNTRACED else logging.INFO
            client = scope.get("client")
            line = {
                "request_id": request_id,
                "client": client[0] if client else None,
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "seconds": round(seconds, 4),
                **fields,
            }
            _log.log(level, "request", extra={"fields": line})

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Raise ApiError 421 for a name that is not this server's.

        A foreign web page can make its name point to 127.0.0.1. Its browser then treats this server
        as the same origin, but sends the page's name as the Host.
        """
        host = headers.get(b"host")
        if self._hosts is None or host is None:  # browsers always send it
            return
        name = _host_name(host.decode("latin-1"))
        if name in self._hosts or is_local(name):
            return
        message = f"this server is not {name[:100]!r}: start it with --allowed-host to allow that"
        raise ApiError(421, message, code="unknown_host")

    def _key(self, path: str, headers: dict[bytes, bytes]) -> ApiKey | None:
        """Return the API key of a request, or None if none is needed. Raises ApiError 401."""
        if not self._keys or path in self._open:
            return None
        scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
        sent = sent.strip() if scheme.lower() == b"bearer" else b""
        sent = sent or headers.get(b"x-api-key", b"").strip()  # Anthropic's clients
        # All keys are compared, each in constant time.
        found = [key for key in self._keys if hmac.compare_digest(sent, key.key.encode())]
        if sent and found:
            return found[0]
        message = "the API key is missing or wrong: send 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_api_key")

    def _key_of(self, owner: str) -> ApiKey | None:
        """Return the API key of a batch's owner. Raises ApiError 401 if it is gone."""
        if not self._keys and not owner:
            return None
        for key in self._keys:
            if key.owner == owner:
                return key
        message = "the API key that the batch was created with is no longer valid"
        raise ApiError(401, message, code="invalid_api_key")

    async def _check_quota(self, key: ApiKey) -> None:
        """Take a request from the key's limits. Raises ApiError 429 that names the limit."""
        [refused] = await self._link.ask("admit", key.owner)
        if refused is not None:
            limit, value, seconds = refused
            retry = max(1, round(seconds + 0.5))
            message = f"this key may use {value} {limit.removesuffix('_per_minute')} a minute"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=retry)


def _host_name(host: str) -> str:
    """Return a Host header's name without its port: "::1" of "[::1]:8000"."""
    host = host.lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if host.count(":") > 1:  # an IPv6 address without a port
        return host
    return host.partition(":")[0].rstrip(".")


def is_local(host: str) -> bool:
    """Return whether a host's name or address always means this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def api_error(error: Exception) -> ApiError:
    """Return the ApiError for any exception; internal errors are logged and not shown."""
    if isinstance(error, QueueFull):
        retry = max(1, round(error.retry_after + 0.5))
        return ApiError(429, str(error), code="queue_full", retry_after=retry)
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error), code="stopping", retry_after=1)
    if isinstance(error, JournalUnavailable):
        return ApiError(503, str(error), code="state_unavailable", retry_after=RETRY_JOURNAL)
    if isinstance(error, JaxLlamaError):
        return ApiError(400, str(error))
    if isinstance(error, EngineFailed):
        return ApiError(503, str(error), code="engine_failed")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail)
    if isinstance(error, ApiError):
        return error
    _log.error("an error of ours", exc_info=error)
    return ApiError(500, "internal error: the server's log has the reason")


def open_to(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the application with CORS for the origins of other pages.

    It is outermost, because a browser's preflight request has no key.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("X-Request-Id", "Retry-After"),
    )


def answer_error(error: Exception, path: str = "") -> Response:
    """Return the error object for any exception: Anthropic's at its paths, ollama's and OpenAI's
    elsewhere."""
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, HTTPException):
        error = _wrong_route(error, path, headers)
    error = api_error(error)
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if path.startswith("/api/"):
        return JSONResponse({"error": str(error)}, error.status, headers)
    body = message_error(error) if path.startswith("/v1/messages") else error.body()
    return respond(body, error.status, headers)


async def _handle(http: Request, error: Exception) -> Response:
    return answer_error(error, http.url.path)


ERROR_HANDLERS = dict.fromkeys(
    (ApiError, ClientGone, EngineFailed, JaxLlamaError, HTTPException, Exception), _handle
)


def _wrong_route(error: HTTPException, path: str, headers: dict[str, str]) -> Exception:
    """Return the error of a path or method that no route has, with what to do."""
    if error.status_code == 404:
        hint = "the guide's page HTTP lists the routes"
        if path.endswith("_lora_adapter"):
            hint = "serve --lora-slots N adds it"
        return ApiError(404, f"this server has no route {path[:100]}: {hint}", code="not_found")
    if error.status_code == 405 and "Allow" in headers:
        allowed = ", ".join(sorted(headers["Allow"].split(", ")))  # Starlette's are in any order
        headers["Allow"] = allowed
        return ApiError(405, f"{path[:100]}: the method must be {allowed}")
    return error


async def read_body(request: Request, limit: int) -> bytearray:
    """Return the JSON body's bytes.

    A form's content type is refused, so that no web page of another origin can send requests in its
    visitor's name.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content type is {kind or 'missing'}: send application/json")
    size, data = 0, bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                # Read further than the limit: a client that still sends does not see an answer.
                if size <= limit:
                    data += part
                elif size > 8 * limit:
                    break
    except ClientDisconnect:
        raise ApiError(400, "the body broke off") from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    if size > limit:
        raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    return data


def page_size(http: Request, most: int, default: int) -> int:
    """Return the query's ``limit``, the number of entries of a page. Raises ApiError 400."""
    limit = http.query_params.get("limit", str(default))
    if not (re.fullmatch("[0-9]{1,6}", limit) and 1 <= int(limit) <= most):
        raise ApiError.at("limit", f"must be a whole number from 1 to {most}")
    return int(limit)


def is_ascending(http: Request) -> bool:
    """Return whether the query's ``order`` is "asc" and not "desc". Raises ApiError 400."""
    order = http.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError.at("order", "must be asc or desc")
    return order == "asc"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the work's result, or raise ClientGone if the client disconnects first.

    The body must have been read: then the next message can only be the disconnection.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for other in (task, gone):
            other.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await other


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
