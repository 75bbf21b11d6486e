"""The routes of /v1/files and /v1/batches, OpenAI's APIs for many requests at once.

    POST /v1/files (multipart form: file, purpose), GET /v1/files, GET and DELETE /v1/files/ID,
    GET /v1/files/ID/content
    POST /v1/batches, GET /v1/batches, GET /v1/batches/ID, POST /v1/batches/ID/cancel

They need a state folder: ``file_store`` keeps the objects there, and ``batch_worker`` runs the
batches. Without one they answer 400. A key sees its own files and batches only.

Browsers send a form to any address without asking, so an upload with an ``Origin`` header is taken
from the server's own pages and from ``--allowed-origin`` alone. Left out: purposes other than
batch, ``expires_after``, uploads in parts.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import python_multipart  # noqa: F401  # pyright: ignore[reportUnusedImport] - for Starlette's forms
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route
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
from jaxllama.serving.api.bodies import parse
from jaxllama.serving.api.schemas import ApiError, respond
from jaxllama.serving.http.batch_worker import BatchWorker
from jaxllama.serving.http.file_store import RETRY_SECONDS, Bounds, FileStore, StoredBatch
from jaxllama.serving.http.limits import UPLOAD_SECONDS
from jaxllama.serving.http.middleware import read_body
from jaxllama.serving.ipc.link import EngineClient

NAME_LENGTH = 255  # characters of a file's name that are kept
FIELDS = ("file", "purpose")


class BatchRoutes:
    """state: the state folder, None for none. name: the model of lines that name none.
    at_once: number of lines in flight. origins: as for ``ServerSettings``.
    """

    def __init__(
        self,
        link: EngineClient,
        state: str | None,
        name: str,
        at_once: int,
        max_body: int,
        origins: tuple[str, ...],
        bounds: Bounds | None = None,
    ) -> None:
        self._link, self._state, self._bounds = link, state, bounds
        self._kept: FileStore | None = None  # while the application runs
        self._name, self._at_once, self._max_body = name, at_once, max_body
        self._origins = origins
        # bytes of the files that arrive now, by owner
        self._arriving: collections.Counter[str] = collections.Counter()
        self._worker: BatchWorker | None = None

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.files),
            Route("/v1/files/{id}", self.file),
            Route("/v1/files/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self.content),
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.batches),
            Route("/v1/batches/{id}", self.batch),
            Route("/v1/batches/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    @contextlib.asynccontextmanager
    async def running(self, app: ASGIApp) -> AsyncGenerator[None]:
        """Run batches over ``app`` within the block, if there is a state folder."""
        if self._state is None:
            yield
            return
        self._kept = FileStore(self._state, self._bounds)
        self._worker = BatchWorker(self._kept, self._name, self._at_once, self._link)
        try:
            async with self._worker.running(app):
                yield
        finally:
            self._kept.close()

    @property
    def _store(self) -> FileStore:
        if self._kept is None:
            message = "files and batches need a server that was started with --state DIR"
            raise ApiError(400, message, code="unsupported")
        return self._kept

    # Files

    async def upload(self, http: HttpRequest) -> Response:
        self._check_origin(http)
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            message = f"the content type is {kind or 'missing'}: send multipart/form-data"
            raise ApiError(415, message)
        async with self._form(http) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                message = "file: is required, as a part with a file's name"
                raise ApiError(400, message, param="file", code="missing_parameter")
            if purpose != "batch":
                message = f"purpose: {str(purpose)[:64]!r}: only batch is supported"
                raise ApiError(400, message, param="purpose", code="unsupported")
            for name in form:
                if name not in FIELDS:
                    message = f"{name[:64]}: only file and purpose are supported"
                    raise ApiError(400, message, param=name[:64], code="unsupported")
            name = (file.filename or "file")[:NAME_LENGTH]
            stored = await asyncio.to_thread(self._store.add, http.state.owner, name, file.file)
        return respond(stored)

    @contextlib.asynccontextmanager
    async def _form(self, http: HttpRequest) -> AsyncGenerator[Any]:
        """Yield the parts of an upload, which lie in the temporary folder meanwhile."""
        bounds, owner, size = self._store.bounds, http.state.owner, 0
        limit, room = bounds.file_bytes, bounds.uploading * bounds.file_bytes

        async def stream() -> AsyncGenerator[bytes]:
            nonlocal size
            async for part in http.stream():
                size += len(part)
                self._arriving[owner] += len(part)
                if size > limit + self._max_body:
                    message = f"file: larger than {limit} bytes"
                    raise ApiError(413, message, param="file", code="body_too_large")
                is_alone = self._arriving.total() == size
                if not is_alone and (
                    self._arriving.total() > room or self._arriving[owner] > room // 2
                ):
                    message = "too many files arrive at once: come again later"
                    raise ApiError(
                        429, message, param="file", code="too_many_uploads", retry_after=5
                    )
                yield part

        try:
            form = await self._parsed(http, stream(), limit)
            try:
                yield form
            finally:
                await form.close()
        finally:
            self._arriving[owner] -= size
            self._arriving += collections.Counter[str]()  # without zeros

    async def _parsed(self, http: HttpRequest, parts: AsyncGenerator[bytes], limit: int) -> Any:
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
            raise ApiError(
                503, message, code="state_unavailable", retry_after=RETRY_SECONDS
            ) from None
        file = form.get("file")
        if isinstance(file, UploadFile) and (file.size or 0) > limit:
            await form.close()
            raise ApiError(
                413, f"file: larger than {limit} bytes", param="file", code="body_too_large"
            )
        return form

    def _check_origin(self, http: HttpRequest) -> None:
        origin = http.headers.get("origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        if urlsplit(origin).netloc != http.headers.get("host"):
            message = f"pages of {origin[:100]} may not send files: see --allowed-origin"
            raise ApiError(403, message, code="unknown_origin")

    async def files(self, http: HttpRequest) -> Response:
        query = http.query_params
        limit, order = _limit(http, 10_000, 10_000), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, "order: must be asc or desc", param="order", code="invalid_value")
        found, has_more = await asyncio.to_thread(
            self._store.files,
            http.state.owner,
            query.get("purpose"),
            query.get("after"),
            limit,
            order == "asc",
        )
        return respond(FileList("list", found, *_ends(found), has_more))

    async def file(self, http: HttpRequest) -> Response:
        return respond(await self._file(http))

    async def _file(self, http: HttpRequest) -> FileObject:
        id = http.path_params["id"]
        found = await asyncio.to_thread(self._store.file, id, http.state.owner)
        if found is None:
            raise _missing("file", id)
        return found

    async def content(self, http: HttpRequest) -> Response:
        found = await self._file(http)
        path = self._store.path(found.id)
        if not path.is_file():
            message = f"the contents of {found.id!r} are gone from the server's disk"
            raise ApiError(410, message, param="file_id", code="not_found")
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, http: HttpRequest) -> Response:
        id = http.path_params["id"]
        if not await asyncio.to_thread(self._store.delete, id, http.state.owner):
            raise _missing("file", id)
        return respond(FileDeleted(id, "file", True))

    # Batches

    async def create(self, http: HttpRequest) -> Response:
        store = self._store
        body = parse(CreateBatch, await read_body(http, self._max_body), 1, 1)
        batch = await asyncio.to_thread(
            store.create, http.state.owner, body.url, body.input_file_id, body.metadata
        )
        self._wake()
        return respond(batch)

    async def batches(self, http: HttpRequest) -> Response:
        found, has_more = await asyncio.to_thread(
            self._store.batches,
            http.state.owner,
            http.query_params.get("after"),
            _limit(http, 100, 20),
        )
        return respond(BatchList("list", found, *_ends(found), has_more))

    async def batch(self, http: HttpRequest) -> Response:
        return respond((await self._batch(http)).batch)

    async def _batch(self, http: HttpRequest) -> StoredBatch:
        id = http.path_params["id"]
        found = await asyncio.to_thread(self._store.batch, id, http.state.owner)
        if found is None:
            raise _missing("batch", id)
        return found

    async def cancel(self, http: HttpRequest) -> Response:
        """Begin to cancel a batch; its answers so far become its output files."""
        found = await self._batch(http)

        def change(batch: BatchObject) -> None:
            if batch.status == "cancelling":
                return
            if batch.status not in OPEN:
                message = f"id: the batch is {batch.status}: only a running one can be cancelled"
                raise ApiError(409, message, param="id", code="invalid_value")
            batch.status, batch.cancelling_at = "cancelling", int(time.time())

        batch = await asyncio.to_thread(self._store.update, found.batch.id, change)
        self._wake()
        return respond(batch)

    def _wake(self) -> None:
        if self._worker is not None:
            self._worker.wake()


def _limit(http: HttpRequest, most: int, default: int) -> int:
    """Return the length of a page."""
    limit = http.query_params.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:6]) <= most):
        message = f"limit: must be a whole number from 1 to {most}"
        raise ApiError(400, message, param="limit", code="invalid_value")
    return int(limit)


def _ends(page: list[Any]) -> tuple[str | None, str | None]:
    return (page[0].id, page[-1].id) if page else (None, None)


def _missing(kind: str, id: str) -> ApiError:
    return ApiError(404, f"id: no {kind} with the id {id[:64]!r}", param="id", code="not_found")
