"""/v1/files and /v1/batches, OpenAI's APIs for many requests at once.

They need a state folder: ``file_store`` keeps the objects there, and ``batch_worker`` runs the
batches. Without one they answer 400. A key sees its own files and batches only.

Browsers send a form to any address without asking, so an upload with an ``Origin`` header is taken
from the server's own pages and from ``--allowed-origin`` alone. Left out: purposes other than
batch, ``expires_after``, uploads in parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import python_multipart  # noqa: F401  # pyright: ignore[reportUnusedImport] - for Starlette's forms
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

from jaxllama.serving.api.batch_schemas import (
    OPEN,
    BatchList,
    BatchObject,
    CreateBatch,
    FileDeleted,
    FileList,
    FileObject,
)
from jaxllama.serving.api.schemas import ApiError
from jaxllama.serving.http.batch_worker import BatchWorker
from jaxllama.serving.http.context import Context
from jaxllama.serving.http.file_store import RETRY_SECONDS, FileStore, StoredBatch
from jaxllama.serving.http.limits import UPLOAD_SECONDS
from jaxllama.serving.http.middleware import is_ascending, page_size

NAME_LENGTH = 255  # characters of a file's name that are kept
FIELDS = ("file", "purpose")


@contextlib.asynccontextmanager
async def running(server: Context, app: ASGIApp, at_once: int) -> AsyncGenerator[None]:
    """Run batches over ``app`` within the block, if there is a state folder.

    at_once: number of lines in flight.
    """
    settings = server.settings
    if settings.state is None:
        yield
        return
    store = FileStore(settings.state, settings.files)
    server.worker = BatchWorker(store, settings.name, at_once, server.link, server.batchable)
    try:
        async with server.worker.running(app):
            yield
    finally:
        store.close()


def _worker(server: Context) -> BatchWorker:
    if server.worker is None:
        message = "files and batches need a server that was started with --state DIR"
        raise ApiError(400, message, code="unsupported")
    return server.worker


def _store(server: Context) -> FileStore:
    return _worker(server).store


# Files


async def upload(server: Context, http: HttpRequest) -> FileObject:
    _check_origin(server, http)
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        message = f"the content type is {kind or 'missing'}: send multipart/form-data"
        raise ApiError(415, message)
    async with _form(server, http) as form:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            message = "file: is required, as a part with a file's name"
            raise ApiError(400, message, param="file", code="missing_parameter")
        if purpose != "batch":
            raise ApiError.unsupported("purpose", f"{str(purpose)[:64]!r}: only batch is supported")
        for name in form:
            if name not in FIELDS:
                message = f"{name[:64]}: only file and purpose are supported"
                raise ApiError(400, message, param=name[:64], code="unsupported")
        name = (file.filename or "file")[:NAME_LENGTH].encode(errors="replace").decode()
        stored = await asyncio.to_thread(_store(server).add, http.state.owner, name, file.file)
    return stored


@contextlib.asynccontextmanager
async def _form(server: Context, http: HttpRequest) -> AsyncGenerator[Any]:
    """Yield the parts of an upload, which lie in the temporary folder meanwhile."""
    bounds, owner, size = _store(server).bounds, http.state.owner, 0
    limit, room = bounds.file_bytes, bounds.uploading * bounds.file_bytes
    arriving = server.arriving

    async def stream() -> AsyncGenerator[bytes]:
        nonlocal size
        async for part in http.stream():
            size += len(part)
            arriving[owner] += len(part)
            if size > limit + server.settings.max_body:
                raise ApiError.at("file", f"larger than {limit} bytes", "body_too_large", 413)
            is_alone = arriving.total() == size
            if not is_alone and (arriving.total() > room or arriving[owner] > room // 2):
                message = "too many files arrive at once: come again later"
                raise ApiError(429, message, param="file", code="too_many_uploads", retry_after=5)
            yield part

    try:
        form = await _parsed(http, stream(), limit)
        try:
            yield form
        finally:
            await form.close()
    finally:
        arriving[owner] -= size
        if not arriving[owner]:
            del arriving[owner]


async def _parsed(http: HttpRequest, parts: AsyncGenerator[bytes], limit: int) -> Any:
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            form = await MultiPartParser(http.headers, parts, max_files=1, max_fields=8).parse()
    except MultiPartException as error:
        raise ApiError(400, error.message, code="invalid_form") from None
    except ClientDisconnect:
        raise ApiError(400, "the body broke off") from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive in {UPLOAD_SECONDS:g} s") from None
    except OSError as error:  # the temporary folder
        message = f"the server's temporary folder cannot be used: {error.strerror or error}"
        raise ApiError(503, message, code="state_unavailable", retry_after=RETRY_SECONDS) from None
    file = form.get("file")
    if isinstance(file, UploadFile) and (file.size or 0) > limit:
        await form.close()
        raise ApiError.at("file", f"larger than {limit} bytes", "body_too_large", 413)
    return form


def _check_origin(server: Context, http: HttpRequest) -> None:
    origin = http.headers.get("origin")
    if origin is None or "*" in server.settings.origins or origin in server.settings.origins:
        return
    if origin.partition("://")[2] != http.headers.get("host"):
        message = f"pages of {origin[:100]} may not send files: see --allowed-origin"
        raise ApiError(403, message, code="unknown_origin")


async def files(server: Context, http: HttpRequest) -> FileList:
    query, limit, ascending = http.query_params, page_size(http, 10_000, 10_000), is_ascending(http)
    purpose, after = query.get("purpose"), query.get("after")
    found, has_more = await asyncio.to_thread(
        _store(server).files, http.state.owner, purpose, after, limit, ascending
    )
    return FileList("list", found, *_ends(found), has_more)


async def file(server: Context, http: HttpRequest) -> FileObject:
    id = http.path_params["id"]
    found = await asyncio.to_thread(_store(server).file, id, http.state.owner)
    if found is None:
        raise _missing("file", id)
    return found


async def content(server: Context, http: HttpRequest) -> Response:
    found = await file(server, http)
    path = _store(server).path(found.id)
    if not path.is_file():
        message = f"the contents of {found.id!r} are gone from the server's disk"
        raise ApiError(410, message, param="file_id", code="not_found")
    return FileResponse(path, media_type="application/octet-stream")


async def delete(server: Context, http: HttpRequest) -> FileDeleted:
    id = http.path_params["id"]
    if not await asyncio.to_thread(_store(server).delete, id, http.state.owner):
        raise _missing("file", id)
    return FileDeleted(id, "file", True)


# Batches


async def create(server: Context, http: HttpRequest, body: CreateBatch) -> BatchObject:
    worker = _worker(server)
    if body.url not in server.batchable:
        raise ApiError.at("endpoint", f"must be one of {', '.join(server.batchable)}")
    batch = await asyncio.to_thread(
        worker.store.create, http.state.owner, body.url, body.input_file_id, body.metadata
    )
    worker.wake()
    return batch


async def batches(server: Context, http: HttpRequest) -> BatchList:
    after, limit = http.query_params.get("after"), page_size(http, 100, 20)
    found, has_more = await asyncio.to_thread(
        _store(server).batches, http.state.owner, after, limit
    )
    return BatchList("list", found, *_ends(found), has_more)


async def batch(server: Context, http: HttpRequest) -> BatchObject:
    return (await _batch(server, http)).batch


async def _batch(server: Context, http: HttpRequest) -> StoredBatch:
    id = http.path_params["id"]
    found = await asyncio.to_thread(_store(server).batch, id, http.state.owner)
    if found is None:
        raise _missing("batch", id)
    return found


async def cancel(server: Context, http: HttpRequest) -> BatchObject:
    """Begin to cancel a batch; its answers so far become its output files."""
    found = await _batch(server, http)

    def change(batch: BatchObject) -> None:
        if batch.status == "cancelling":
            return
        if batch.status not in OPEN:
            message = f"id: the batch is {batch.status}: only a running one can be cancelled"
            raise ApiError(409, message, param="id", code="invalid_value")
        batch.status, batch.cancelling_at = "cancelling", int(time.time())

    batch = await asyncio.to_thread(_store(server).update, found.batch.id, change)
    _worker(server).wake()
    return batch


def _ends(page: list[Any]) -> tuple[str | None, str | None]:
    return (page[0].id, page[-1].id) if page else (None, None)


def _missing(kind: str, id: str) -> ApiError:
    return ApiError.at("id", f"no {kind} with the id {id[:64]!r}", "not_found", 404)
