"""A front end: a process that talks HTTP and has no model, the child of the engine's.

    start(socket, listener) -> Popen     socket: to the engine's process; listener: of clients
    main()                               what that runs; its arguments are their descriptors

It takes its model's facts from the ``Welcome``, then accepts connections of the port that all front
ends share, until it is told to ``Drain``.  When the engine's process is gone, whoever waits gets
503, and it ends with status 1.  It answers each ``Ping``: a process that gives no sign of life for
``BEAT * MISSED`` seconds hangs (``Pulse``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from jaxllama.config import ModelConfig
from jaxllama.language_model import LanguageModel
from jaxllama.sampling import Sampling
from jaxllama.serving import logs
from jaxllama.serving.api import messages
from jaxllama.serving.http import limits
from jaxllama.serving.http.server import ServerSettings, application
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.text.tokenizer import Tokenizer

GONE = "the engine's process has ended"
BEAT = 5.0  # seconds between two signs of life
MISSED = 6  # of them, after which a process is taken to hang


@dataclasses.dataclass(frozen=True)
class Facts:
    """What of a LanguageModel a front end knows."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    sampling: Sampling | None
    adapters: tuple[str, ...]

    @classmethod
    def of(cls, lm: LanguageModel) -> Facts:
        return cls(lm.config, lm.tokenizer, lm.sampling, tuple(lm.adapters))


@dataclasses.dataclass(frozen=True)
class FrontEndSetup:
    """max_queue: the engine's.  drain_timeout: seconds from ``Drain`` to the end."""

    facts: Facts
    settings: ServerSettings
    max_queue: int
    drain_timeout: int


def start(theirs: socket.socket, listener: socket.socket) -> subprocess.Popen[bytes]:
    files = theirs.fileno(), listener.fileno()
    # It has no device, and finds the modules that this process has found.
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {__name__} import main; main()", *map(str, files)],
        pass_fds=files,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,  # Ctrl-C is the parent's
    )


class Wire(asyncio.Protocol):
    """Bytes between two processes, as they come.  gone: the other end is closed."""

    def __init__(self) -> None:
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.gone = asyncio.Event()
        self._transport: Any = None

    async def open(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=connection)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.on_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Behind what is written already."""
        self._transport.close()


class Pulse:
    """Another process's signs of life.  ``beat``: one has come."""

    def __init__(self) -> None:
        self._missed = 0

    def beat(self) -> None:
        self._missed = 0

    async def lost(self, ask: Callable[[], None] = lambda: None) -> None:
        """Return when ``MISSED`` beats in a row have not come.  ask: called before each.  Beats are
        counted, not seconds: a machine that sleeps, or is slow, misses none."""
        while self._missed < MISSED:
            self._missed += 1
            ask()
            await asyncio.sleep(BEAT)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, link: EngineClient) -> None:
        super().__init__(config)
        self._link = link

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._link.tell(messages.Ready())


async def _run(connection: socket.socket, listener: socket.socket) -> int:
    welcomed: asyncio.Future[FrontEndSetup] = asyncio.get_running_loop().create_future()
    link, wire, server = EngineClient(), Wire(), None

    def told(message: Any) -> None:
        if isinstance(message, messages.Welcome):
            welcomed.set_result(pickle.loads(message.setup))
        elif isinstance(message, messages.Drain) and server is not None:
            server.should_exit = True

    link.on_told, wire.on_data = told, link.received
    link.open(wire.write)
    await wire.open(connection)
    lost = asyncio.create_task(wire.gone.wait())
    await asyncio.wait((welcomed, lost), return_when=asyncio.FIRST_COMPLETED)
    if not welcomed.done():
        return 1  # the model could not be loaded, and its process says so
    setup = welcomed.result()
    link.know(setup.facts.tokenizer, setup.facts.config.eos_token_ids)
    app = application(setup.facts, link, setup.settings, setup.max_queue)
    config = uvicorn.Config(
        app,
        http=limits.protocol(),
        lifespan="on",
        ws="none",
        log_config=logs.configuration(),
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=setup.drain_timeout,
    )
    server = _Server(config, link)

    async def tell() -> None:
        await lost
        logging.getLogger("jaxllama.serving").error(GONE)
        link.lost(GONE)
        server.should_exit = True

    telling = asyncio.create_task(tell())
    await server.serve([listener])
    if wire.gone.is_set():
        return 1
    telling.cancel()
    wire.close()
    await wire.gone.wait()
    return 0


def main() -> None:
    limits.raise_descriptors()
    ours, clients = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    factory = uvicorn.Config("").get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        sys.exit(runner.run(_run(ours, clients)))
