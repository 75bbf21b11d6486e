"""A front end: a process that talks HTTP and has no model, the child of the engine's.

    start(socket, listener) -> Popen     socket: to the engine's process; listener: of clients
    main()                               what that runs; its arguments are their descriptors

It takes its model's facts from the ``Welcome``, then accepts connections of the port that all front
ends share, until it is told to ``Drain``.  When the engine's process is gone, whoever waits gets
503, and it ends with status 1.  It answers each ``Ping`` (``wire.Pulse``).
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
from typing import Any

import uvicorn

from jaxllama.serving import logs
from jaxllama.serving.api import messages
from jaxllama.serving.http import limits
from jaxllama.serving.http.server import ServerSettings, application
from jaxllama.serving.ipc.facts import Facts
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.serving.ipc.wire import Wire

GONE = "the engine's process has ended"


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
