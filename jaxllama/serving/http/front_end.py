"""A front end: a process that speaks HTTP and has no model, a child of the engine's process.

    start(listener) -> Child
    main()                     the child's program; its arguments are the sockets to the engine's
                               process and to clients, as descriptors

The ``Welcome`` message describes the model. The front end then accepts connections on the port that
all front ends share, until a ``Drain`` message. If the engine's process is gone, waiting clients
get 503, and the front end ends with status 1. It answers each ``Ping`` (``wire.Pulse``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

from jaxllama.serving.api import messages
from jaxllama.serving.api.calls import ModelFacts
from jaxllama.serving.http import limits
from jaxllama.serving.http.server import ServerSettings, application
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.serving.ipc.wire import Child, Wire

GONE = "the engine's process has ended"


@dataclasses.dataclass(frozen=True)
class FrontEndSetup:
    """The setup of a front end.

    max_queue: the engine's. drain_timeout: seconds from ``Drain`` to the end. certificate,
    private_key: PEM files for HTTPS.
    """

    facts: ModelFacts
    settings: ServerSettings
    max_queue: int
    drain_timeout: int
    certificate: Path | None = None
    private_key: Path | None = None


def start(listener: socket.socket) -> Child:
    """Start a front end for the clients of ``listener``; it has no device."""
    return Child(__name__, {"JAX_PLATFORMS": "cpu"}, (listener.fileno(),))


async def _run(connection: socket.socket, listener: socket.socket) -> int:
    welcomed: asyncio.Future[FrontEndSetup] = asyncio.get_running_loop().create_future()
    link, wire, server = EngineClient(), Wire(), None

    def handle(message: Any) -> None:
        if isinstance(message, messages.Welcome):
            welcomed.set_result(pickle.loads(message.setup))
        elif isinstance(message, messages.Drain) and server is not None:
            server.should_exit = True

    link.on_told, wire.on_data = handle, link.received
    link.open(wire.write)
    await wire.open(connection)
    lost = asyncio.create_task(wire.gone.wait())
    await asyncio.wait((welcomed, lost), return_when=asyncio.FIRST_COMPLETED)
    if not welcomed.done():
        return 1  # the model could not be loaded, and the engine's process reports it
    setup = welcomed.result()
    link.know(setup.facts.tokenizer, setup.facts.config.eos_token_ids)
    app = application(setup.facts, link, setup.settings, setup.max_queue)
    tls = {"ssl_certfile": setup.certificate, "ssl_keyfile": setup.private_key}
    config = limits.uvicorn_config(app, setup.drain_timeout, **tls)
    server = limits.Server(config, lambda: link.tell(messages.Ready()))

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
