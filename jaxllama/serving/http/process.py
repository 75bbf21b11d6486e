"""``jaxllama serve``: load, warm up, listen, and shut down.

    serve(options, load)                 blocks until SIGTERM or Ctrl-C
    local_app(lm, name, engine options)  the application without a port, for batches

This process has the engine, its metrics and its journal. ``api_servers`` child processes speak HTTP
(``front_end``). They share the port, which is bound before the model is loaded, so a port in use is
reported at once. They listen when the programs of a first request exist; a thread of the engine
compiles the others (``engine.programs``).

A front end that dies loses its own connections: its rows are cancelled, and it is started again,
later each time if it dies before it is ready. A front end that hangs is killed.

SIGTERM drains the server: it takes no new connections and answers the requests in flight. Requests
that have not ended after ``drain_timeout`` seconds get 503; with a state folder they are answered
after the next start. A thread that does not end is given up after ``STUCK`` seconds.

Several engines are processes too (``replicas``). One that is lost is started again, and its
requests go on elsewhere. When the only engine fails, or none can be started, all clients get an
error, and the process ends with status 1, so that a supervisor starts it again. When the engine
stands still, or this process hangs, front ends answer ``/live`` with 503
(``EngineClient.standstill``). When this process is killed, its front ends report that to their
clients and end.

One line on stdout says where the server listens. Logs go to stderr (``logs``). One of the
first lines names the model's own sampling, if it has one. While there is work, a line every
``INTERVAL`` seconds reports the engine's throughput.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import logging.config
import os
import pickle
import signal
import socket
import ssl
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path

from jaxllama import extras, progress
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.typing import JsonObject, Options

try:
    from starlette.types import ASGIApp

    from jaxllama.serving import logs
    from jaxllama.serving.api import messages
    from jaxllama.serving.api.calls import ModelFacts
    from jaxllama.serving.api.keys import ApiKey, Quotas
    from jaxllama.serving.api.keys import read as read_keys
    from jaxllama.serving.api.metrics import HasStats, Metrics
    from jaxllama.serving.http import front_end
    from jaxllama.serving.http.file_store import FileStore, StoreUnavailable
    from jaxllama.serving.http.middleware import is_local
    from jaxllama.serving.http.server import ServerSettings, create_app
    from jaxllama.serving.ipc.hub import THREADS, Hub, Port
    from jaxllama.serving.ipc.pool import PooledEngine
    from jaxllama.serving.ipc.replica import StartEngine
    from jaxllama.serving.ipc.replicas import LocalPool
    from jaxllama.serving.ipc.served import forward_passes
    from jaxllama.serving.ipc.wire import Child, Pulse, Wire, delay
except ImportError as error:
    if not extras.is_optional(error.name):
        raise
    raise extras.missing(str(error.name), "serving") from None
from jaxllama.engine.engine import Engine
from jaxllama.engine.journal import Journal

INTERVAL = 10.0
KEY_VARIABLE = "JAXLLAMA_API_KEY"
LOOK = 0.1  # seconds between two checks of the engine
STUCK = 12.0  # seconds after which threads that do not end are given up
LAST_WORDS = 5  # seconds for front ends to report to their clients that the server stops
_log = logging.getLogger("jaxllama.serving")


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Options of ``serve``.

    keys_file: API keys with names and limits (``api.keys``). certificate, private_key: PEM files
    for HTTPS, both or none. traces: URL of the OpenTelemetry collector, None for no traces.
    engine: options of ``Engine``. names: names of the model for clients; by default the model's
    own. origins: origins of web pages that may send requests. hosts: names that a Host header may
    have beside the local ones; "*" allows any. Without hosts any name is allowed, except on a local
    address without keys. Any web page could reach that one under a name of its own. api_servers:
    number of processes that speak HTTP. replicas: number of engines; several engines are processes
    too, and ``load`` must be picklable. Raises JaxLlamaError naming the flag.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_body: int = 4 * 2**20
    drain_timeout: int = 30
    state: Path | None = None
    engine: JsonObject = dataclasses.field(default_factory=dict)
    names: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    api_servers: int = 1
    replicas: int = 1
    keys_file: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    traces: str | None = None
    named_keys: tuple[ApiKey, ...] = dataclasses.field(init=False, default=())

    def __post_init__(self) -> None:
        self._check_tls()
        if self.traces is not None and not _has_otel():
            raise extras.missing("opentelemetry_sdk", "--otlp-traces-endpoint")
        keys = self.api_keys or tuple(filter(None, [os.environ.get(KEY_VARIABLE)]))
        if not all(key.isascii() and key.isprintable() and key.strip() == key for key in keys):
            raise JaxLlamaError(f"${KEY_VARIABLE}: must be printable ASCII, no spaces around it")
        object.__setattr__(self, "api_keys", keys)
        named = () if self.keys_file is None else read_keys(self.keys_file)
        object.__setattr__(self, "named_keys", named)

    def _check_tls(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            given = "--ssl-keyfile" if self.certificate is None else "--ssl-certfile"
            raise JaxLlamaError(f"{given}: HTTPS needs --ssl-certfile and --ssl-keyfile")
        if self.certificate is None or self.private_key is None:
            return

        def no_password() -> str:  # else openssl asks on the terminal
            raise JaxLlamaError(f"--ssl-keyfile: {self.private_key} has a password")

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.private_key, no_password)
        except (OSError, ssl.SSLError) as error:
            raise JaxLlamaError(
                f"--ssl-certfile {self.certificate} and --ssl-keyfile {self.private_key}: "
                f"{getattr(error, 'reason', None) or error.strerror or error}"
            ) from None

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return (*map(ApiKey, self.api_keys), *self.named_keys)

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.names[0] if self.names else model_name(self.model)

    def settings(self, max_len: int) -> ServerSettings:
        """Return the settings of the front ends. max_len: the engine's."""
        return ServerSettings(
            name=self.name,
            aliases=self.names[1:],
            origins=self.origins,
            hosts=self.known_hosts,
            max_len=max_len,
            api_keys=self.api_keys,
            max_body=self.max_body,
            state=None if self.state is None else str(self.state.resolve()),
            named_keys=self.named_keys,
            lora_slots=self.engine.get("lora_slots", 0),
            traces=self.traces,
        )

    @property
    def is_keyed(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_keys or self.named_keys)

    @property
    def known_hosts(self) -> tuple[str, ...] | None:
        """The names for ``ServerSettings.hosts``."""
        if "*" in self.hosts or not (self.hosts or (is_local(self.host) and not self.is_keyed)):
            return None
        return self.hosts


def _check_files(state: Path) -> None:
    """Raise JaxLlamaError if the state folder's files cannot be used."""
    store = FileStore(state)
    try:
        store.check()
    except StoreUnavailable as error:
        raise JaxLlamaError(f"--state {state}: {error.reason}") from None
    finally:
        store.close()


def _has_otel() -> bool:
    return find_spec("opentelemetry") is not None and find_spec("opentelemetry.sdk") is not None


def serve(options: ServeOptions, load: Callable[[], LanguageModel]) -> None:
    """Run the server until SIGTERM or Ctrl-C; the module docstring has the details.

    load: returns the model; called after the port is bound.
    """
    listener = bind(options.host, options.port)
    with listener, logs.progress_lines(), contextlib.ExitStack() as children:
        if not options.is_keyed and not is_local(options.host):
            warnings.warn(
                f"anybody who reaches {options.host} can use it: no --api-key", stacklevel=2
            )
        # The front ends import their modules while the model is loaded.
        front_ends = [front_end.start(listener) for _ in range(options.api_servers)]
        for child in front_ends:
            children.callback(child.kill)
        journal = None if options.state is None else Journal(options.state)
        if options.state is not None:
            _check_files(options.state)
        name = options.name
        metrics = Metrics(name)
        if options.replicas > 1:
            pool = LocalPool(options.replicas, StartEngine(load, options.engine))
            children.callback(pool.kill)
            with progress.working("loading and compiling replicas"):
                about = pool.start()
            engine: Engine | PooledEngine = PooledEngine(
                pool, about, metrics.observe, options.replicas
            )
            facts, passes = about.facts, engine.passes
        else:
            lm = load()
            engine = Engine(lm, observe=metrics.observe, **options.engine)
            facts, passes = ModelFacts.of(lm), forward_passes(lm, engine.adapters)
            with progress.working("compiling (later starts take it from the cache)"):
                engine.start()
        metrics.watch(engine)
        settings = options.settings(engine.options.max_len)
        setup = front_end.FrontEndSetup(
            facts,
            settings,
            engine.options.max_queue,
            options.drain_timeout + LAST_WORDS,
            options.certificate,
            options.private_key,
        )
        logging.config.dictConfig(logs.configuration())
        hub = Hub(engine, passes, metrics, journal, options.replicas > 1, Quotas(settings.keys))
        is_tls = options.certificate is not None
        banner = f"{name} on {url(options.host, listener.getsockname()[1], is_tls)}"
        server = _Server(hub, engine, pickle.dumps(setup), listener, options.drain_timeout)
        sampling = facts.sampling and str(facts.sampling)
        error = asyncio.run(server.run(front_ends, banner, sampling))
        hub.close()
        stuck = server.stuck or _stuck_thread(STUCK)
        if stuck is not None:  # the interpreter would wait for it without a limit
            children.close()
            print(
                f"error: {error or f'the thread {stuck} does not end'}", file=sys.stderr, flush=True
            )
            os._exit(1)
        if error is not None:
            raise SystemExit(f"error: {error}")


def _stuck_thread(seconds: float) -> str | None:
    """Return the name of a thread of the hub that does not end in time, or None."""
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread.name.startswith(THREADS):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return thread.name
    return None


@contextlib.contextmanager
def local_app(
    lm: LanguageModel, name: str, options: Options, journal: Journal | None = None
) -> Generator[tuple[ASGIApp, Engine]]:
    """Yield the application over a running engine of its own, without a port.

    journal: takes the bodies of completions and chats; the caller closes it.
    """
    metrics = Metrics(name)
    engine = Engine(lm, observe=metrics.observe, **options)
    with progress.working("compiling (later starts take it from the cache)"):
        engine.start()
    try:
        state = None if journal is None else journal.folder
        settings = ServerSettings(name, engine.options.max_len, state=state)
        yield create_app(lm, engine, settings, metrics, journal), engine
    finally:
        engine.stop()


class _Server:
    """The engine's process with its front ends."""

    def __init__(
        self,
        hub: Hub,
        engine: Engine | PooledEngine,
        setup: bytes,
        listener: socket.socket,
        drain_timeout: int,
    ) -> None:
        self._hub, self._engine, self._setup = hub, engine, setup
        self._listener, self._drain_timeout = listener, drain_timeout
        self._living: set[asyncio.Task[None]] = set()
        self._unready = 0
        self._ready, self._ending = asyncio.Event(), asyncio.Event()
        self._error: str | None = None
        self.stuck: str | None = None  # the thread that did not end
        self._children: dict[Child, Wire] = {}
        self._died = 0  # front ends in a row that died before they were ready

    async def run(self, front_ends: list[Child], banner: str, sampling: str | None) -> str | None:
        """Run until SIGTERM, Ctrl-C or a failure; return the failure or None."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        if isinstance(self._engine, PooledEngine):
            self._engine.on_empty = self._hub.report_empty
            await self._engine.open()
        self._unready = len(front_ends)
        for child in front_ends:
            self._watch(child)
        watching = asyncio.create_task(self._watch_engine())
        started = asyncio.create_task(self._ready.wait())
        ended = asyncio.create_task(self._ending.wait())
        await asyncio.wait((started, ended), return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            print(f"jaxllama serves {banner}", flush=True)
            if sampling is not None:
                said = {"default": sampling, "from": "the model's own"}
                _log.info("sampling", extra={"fields": said})
        reporting = asyncio.create_task(report(self._engine))
        await ended
        for task in (started, watching, reporting):
            task.cancel()
        await self._drain()
        return self._error

    def _end(self) -> None:
        """Begin to shut down; a second Ctrl-C interrupts at once."""
        self._ending.set()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _watch(self, child: Child) -> None:
        task = asyncio.create_task(self._serve(child))
        self._living.add(task)
        task.add_done_callback(self._living.discard)

    async def _serve(self, child: Child) -> None:
        """Serve a front end until it is gone; then start another in its place."""
        is_ready, pulse = False, Pulse()

        def ready() -> None:
            nonlocal is_ready
            is_ready, self._died = True, 0
            watching.append(asyncio.create_task(self._kill_if_hung(child, port, pulse)))
            self._unready -= 1
            if not self._unready:
                self._ready.set()

        wire = self._children[child] = Wire()
        port = self._hub.open(wire.write)
        port.on_ready, port.on_pong, wire.on_data = ready, pulse.beat, port.received
        watching: list[asyncio.Task[None]] = []
        await wire.open(child.socket)
        port.send(messages.Welcome(self._setup))
        self._hub.welcome(port)
        await wire.gone.wait()
        for task in watching:
            task.cancel()
        cancelled = port.close()
        status = await asyncio.to_thread(child.process.wait)
        self._children.pop(child, None)
        if self._ending.is_set():
            return
        fields = {"status": status, "cancelled": cancelled}
        _log.error("a front end has ended", extra={"fields": fields})
        if is_ready:
            self._unready += 1
        elif self._ready.is_set():  # the server works, so a later one may start
            self._died += 1
        else:
            self._error = f"a front end ended with status {status} as it started"
            self._ending.set()
        await self._replace()

    async def _replace(self) -> None:
        """Start a front end in the place of one that has ended, if need be after a while."""
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay(self._died)):
                    await self._ending.wait()
                return
            try:
                self._watch(front_end.start(self._listener))
                return
            except OSError as error:  # no process, no memory or no descriptor is left
                self._died += 1
                fields = {"reason": error.strerror or str(error)}
                _log.error("a front end cannot be started", extra={"fields": fields})

    async def _kill_if_hung(self, child: Child, port: Port, pulse: Pulse) -> None:
        await pulse.lost(lambda: port.send(messages.Ping(self._engine.stalled)))
        _log.error("a front end hangs", extra={"fields": {"pid": child.process.pid}})
        child.process.kill()

    async def _watch_engine(self) -> None:
        while self._engine.failure is None:
            await asyncio.sleep(LOOK)
        self._error = self._engine.failure
        self._hub.tell(messages.Failed(self._error))
        self._ending.set()

    async def _drain(self) -> None:
        """Let front ends answer the requests in flight, and stop those that take too long."""
        self._listener.close()
        self._hub.tell(messages.Drain())
        if self._living:
            await asyncio.wait(self._living, timeout=self._drain_timeout)
        stopping = threading.Thread(target=self._engine.stop, name="stop", daemon=True)
        stopping.start()
        await _ended(stopping, LAST_WORDS / 2)
        if stopping.is_alive():  # front ends tell their clients that the engine is gone
            for wire in self._children.values():
                wire.close()
        if self._living:
            await asyncio.wait(self._living, timeout=LAST_WORDS)
        await _ended(stopping, STUCK)
        if stopping.is_alive():
            self.stuck = "jaxllama-engine"
        for child in self._children:  # one that is stopped would be waited for
            child.process.kill()


async def _ended(thread: threading.Thread, seconds: float) -> None:
    """Wait for a thread, at most so long."""
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline:
        await asyncio.sleep(LOOK)


async def report(engine: HasStats) -> None:
    """Log a line every ``INTERVAL`` seconds in which the engine did steps."""
    before, then = engine.stats(), time.monotonic()
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
            "cache_share": round(stats.cache_share, 3),
            "prefix_hit_share": round(found / read, 3) if read else 0.0,
        }
        _log.info("throughput", extra={"fields": fields})


def model_name(model: str) -> str:
    """Return the model's name for clients: a preset's or hub name, or the last part of a path."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound. Raises JaxLlamaError naming the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        where = url(host, port)
        raise JaxLlamaError(
            f"cannot listen on {where}: {error.strerror}; --port and --host name another"
        ) from None
    return listener


def url(host: str, port: int, is_tls: bool = False) -> str:
    """Return the address of a server."""
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{name}:{port}"
