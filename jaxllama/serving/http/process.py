"""``jaxllama serve``: load, warm up, listen, and end well.

    serve(options, load)                 blocks until SIGTERM or Ctrl-C
    local_app(lm, name, engine options)  the application without a port, for batches

The port is bound before the model is loaded, so that a taken one is known at once, and listened to
when everything is compiled.  SIGTERM drains: no new connections, what is in flight is answered;
what has not ended after ``drain_timeout`` seconds gets 503 (and, with a state folder, is done at
the next start).  When the engine fails, all clients are told and the process ends with status 1,
for a supervisor to start again.  The one line on stdout says where the server listens; logs are
JSON on stderr, the model's own sampling, where it has one, among the first; while there is work,
one says every ``INTERVAL`` seconds what the engine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from jaxllama import progress
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.sampling import Sampling

try:
    import uvicorn
    from starlette.types import ASGIApp

    from jaxllama.serving.http import logs
    from jaxllama.serving.http.metrics import HasStats, Metrics
    from jaxllama.serving.http.server import Settings, create_app
except ImportError as error:
    raise JaxLlamaError(f"serving needs {error.name}: pip install 'jaxllama[serve]'") from None
from jaxllama.serving.engine.engine import Engine

INTERVAL = 10.0
KEY_VARIABLE = "JAXLLAMA_API_KEY"


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """engine: options of ``Engine``.  names: what clients call the model, its own where there are
    none.  origins: of web pages that may ask.  Raises JaxLlamaError naming the flag."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_body: int = 4 * 2**20
    drain_timeout: int = 30
    state: Path | None = None
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keys = self.api_keys or tuple(filter(None, [os.environ.get(KEY_VARIABLE)]))
        if not all(key.isascii() and key.isprintable() and key.strip() == key for key in keys):
            raise JaxLlamaError(f"${KEY_VARIABLE}: must be printable ASCII, no spaces around it")
        object.__setattr__(self, "api_keys", keys)


def serve(options: ServeOptions, load: Callable[[], LanguageModel]) -> None:
    """See the module docstring.  load: makes the model, once the port is ours."""
    listener = _bind(options.host, options.port)
    with listener, _logged_progress():
        if not options.api_keys and options.host not in ("127.0.0.1", "::1", "localhost"):
            warnings.warn(
                f"anybody who reaches {options.host} can use it: no --api-key", stacklevel=2
            )
        lm = load()
        metrics = Metrics()
        engine = Engine(lm, observe=metrics.observe, **options.engine)
        metrics.watch(engine)
        name, *aliases = options.names or (model_name(options.model),)
        settings = Settings(
            name=name,
            aliases=tuple(aliases),
            origins=options.origins,
            max_len=engine.options.max_len,
            api_keys=options.api_keys,
            max_body=options.max_body,
            state=None if options.state is None else str(options.state),
        )
        app = create_app(lm, engine, settings, metrics)
        config = uvicorn.Config(
            app, lifespan="on", ws="none", log_config=logs.configuration(), access_log=False,
            server_header=False, timeout_graceful_shutdown=options.drain_timeout + 5,
        )  # fmt: skip
        with progress.working("compiling (later starts take it from the cache)"):
            engine.start()
        # uvicorn raises the signal again when it is done; drained is no failure.
        signal.signal(signal.SIGTERM, lambda *_: None)
        url = _url(options.host, listener.getsockname()[1])
        banner = f"{settings.name} on {url}"
        _Server(config, engine, options.drain_timeout, banner, lm.sampling).run([listener])
        if engine.failure is not None:
            raise SystemExit(f"error: {engine.failure}")


@contextlib.contextmanager
def local_app(
    lm: LanguageModel, name: str, options: dict[str, Any]
) -> Generator[tuple[ASGIApp, Engine]]:
    """The application over an engine of its own, which runs meanwhile, without a port."""
    metrics = Metrics()
    engine = Engine(lm, observe=metrics.observe, **options)
    with progress.working("compiling (later starts take it from the cache)"):
        engine.start()
    try:
        yield create_app(lm, engine, Settings(name, engine.options.max_len), metrics), engine
    finally:
        engine.stop()


@contextlib.contextmanager
def _logged_progress() -> Generator[None]:
    """How far loading and compiling are is a line of the log, where it is no bar."""
    write, log = progress.write, logs.JsonLines()

    def record(line: str) -> None:
        write(log.format(logging.makeLogRecord({"levelname": "INFO", "msg": line})))

    progress.write = record
    try:
        yield
    finally:
        progress.write = write


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, engine: Engine, drain_timeout: int, banner: str,
        sampling: Sampling | None,
    ) -> None:  # fmt: skip
        super().__init__(config)
        self._sampling = sampling
        self._engine, self._drain_timeout, self._banner = engine, drain_timeout, banner

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._reporting = asyncio.create_task(report(self._engine))
        print(f"jaxllama serves {self._banner}", flush=True)
        if self._sampling is not None:
            said = {"default": str(self._sampling), "from": "the model's own"}
            logging.getLogger("jaxllama.serving").info("sampling", extra={"fields": said})

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._engine.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.create_task(self._stop_late())
        await super().shutdown(sockets)
        late.cancel()
        self._reporting.cancel()
        await asyncio.to_thread(self._engine.stop)

    async def _stop_late(self) -> None:
        await asyncio.sleep(self._drain_timeout)
        await asyncio.to_thread(self._engine.stop)


async def report(engine: HasStats) -> None:
    """A line of the log every ``INTERVAL`` seconds in which there was something to do."""
    log, before, then = logging.getLogger("jaxllama.serving"), engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL)
        now, stats = time.monotonic(), engine.stats()
        seconds, then, last, before = now - then, now, before, stats
        if stats.steps == last.steps:
            continue
        read, written = (
            getattr(stats, f"{kind}_tokens") - getattr(last, f"{kind}_tokens")
            for kind in ("prompt", "completion")
        )
        found = stats.prefix_hit_tokens - last.prefix_hit_tokens
        fields = {
            "prompt_tokens_per_s": round(read / seconds, 1),
            "output_tokens_per_s": round(written / seconds, 1),
            "running": stats.running,
            "waiting": stats.waiting,
            "cache_share": round(stats.cache_tokens / stats.cache_capacity, 3),
            "prefix_hit_share": round(found / read, 3) if read else 0.0,
        }
        log.info("throughput", extra={"fields": fields})


def model_name(model: str) -> str:
    """What clients call it: a preset's or hub name as it is, a path's last part."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise JaxLlamaError(f"cannot listen on {_url(host, port)}: {error.strerror}") from None
    return listener


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
