"""The record that the handlers of a front end share: prompts, the engine's link, settings."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import time
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp

from jaxllama.serving.api.calls import ModelFacts, Prompts
from jaxllama.serving.api.keys import ApiKey
from jaxllama.serving.http.batch_worker import BatchWorker
from jaxllama.serving.http.file_store import Bounds
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.typing import JsonObject

MAX_CHOICES = 128  # prompts times n of one body


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    name: the model's name for clients; aliases: its other names. max_len: largest number of tokens
    of prompt and answer together. max_body: largest number of bytes. state: the journal's folder,
    None for none. origins: origins of web pages that may send requests, "*" for all. hosts: names
    that a Host header may have beside the local ones; None allows any. named_keys: API keys with
    names and limits, beside ``api_keys``. lora_slots: adapters that clients may load at run time.
    files: largest sizes of files and batches. traces: URL of the OpenTelemetry collector, None for
    no traces.
    """

    name: str
    max_len: int
    api_keys: tuple[str, ...] = ()
    max_body: int = 4 * 2**20
    state: str | None = None
    aliases: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    named_keys: tuple[ApiKey, ...] = ()
    lora_slots: int = 0
    files: Bounds = Bounds()
    traces: str | None = None

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return (*map(ApiKey, self.api_keys), *self.named_keys)


class Context:
    """The state that handlers share.

    max_queue: the engine's. ended: called after the last request. worker: of files and batches,
    while the application runs with a state folder. arriving: bytes of the files that arrive now, by
    owner. behind: responses in the background. scoring, vectors: number of bodies whose prompts are
    scored, and that wait for vectors or scores. app: the application with its middleware, for
    batches.
    """

    def __init__(
        self,
        model: ModelFacts,
        link: EngineClient,
        settings: ServerSettings,
        max_queue: int,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.link, self.settings = model, link, settings
        self.max_queue, self.ended = max_queue, ended
        self.prompts = Prompts(
            model,
            settings.name,
            settings.max_len,
            min(MAX_CHOICES, max_queue),
            settings.aliases,
            lambda: link.loaded,
        )
        self.worker: BatchWorker | None = None
        self.arriving: collections.Counter[str] = collections.Counter()
        self.behind: set[asyncio.Task[None]] = set()
        self.scoring = self.vectors = 0
        self.app: ASGIApp | None = None
        self.document: JsonObject = {}  # the OpenAPI document
        self.batchable: Mapping[str, bool] = {}  # ``routes.BATCHABLE``
        self.created = int(time.time())
        self.began = rfc3339(datetime.datetime.now(datetime.UTC))

    @property
    def is_kept(self) -> bool:
        """Whether bodies and answers are kept in a state folder."""
        return self.settings.state is not None


def rfc3339(time: datetime.datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")
