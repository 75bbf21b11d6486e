"""The objects of /v1/files and /v1/batches, as dataclasses, and the body of a new batch.

``schemas`` has the other objects, ``bodies`` the other bodies.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxllama.serving.api.bodies import Strict
from jaxllama.serving.api.schemas import Page, Schema, schema

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
# The statuses that a batch leaves again.
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class CreateBatch(Strict):
    """Body of POST /v1/batches."""

    # ``endpoint`` of a Strict is the path of the body itself.
    url: str = Field(alias="endpoint")
    input_file_id: str = Field(max_length=64)
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: None = None  # files stay until they are deleted


@schema
class FileObject(Schema):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


@schema
class FileList(Page):
    data: list[FileObject]


@schema
class FileDeleted(Schema):
    id: str
    object: Literal["file"]
    deleted: bool


@schema
class RequestCounts(Schema):
    """completed: answers with status 200; failed: all other answers."""

    total: int
    completed: int
    failed: int


@schema
class BatchError(Schema):
    """A reason why a batch failed. line: of the input file, from 1 on."""

    code: str
    message: str
    param: str | None
    line: int | None


@schema
class BatchErrors(Schema):
    object: Literal["list"]
    data: list[BatchError]


@schema
class BatchObject(Schema):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


@schema
class BatchList(Page):
    data: list[BatchObject]
