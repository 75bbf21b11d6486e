"""The server as an application of Ray Serve: one front end, and engines that Serve scales.

    application_of(setup, pool, start) -> Application       for ``ray.serve.run``

The application has two deployments. ``Api`` answers HTTP: the same ASGI application as without Ray,
with its hub, journal, quotas and metrics. It is one actor on the cluster's head node, where Serve's
proxy listens. ``engine`` has the replicas. Serve places, scales and replaces them, and checks their
health. Requests and tokens go through Serve's handle, a stream each.

Limits. The head node is a single point of failure, as it is for Ray itself: if the actor of ``Api``
dies, Serve starts it again, and connections break. With a journal the new one answers the bodies
that the old one owed. No adapters are loaded at run time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging.config
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from jaxllama.engine.journal import Journal
from jaxllama.engine.request import Request
from jaxllama.errors import JaxLlamaError
from jaxllama.serving import logs
from jaxllama.serving.api.keys import Quotas
from jaxllama.serving.api.messages import EngineReport
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.http.process import report
from jaxllama.serving.http.server import ServerSettings, application
from jaxllama.serving.ipc import link
from jaxllama.serving.ipc.hub import Hub
from jaxllama.serving.ipc.pool import PooledEngine, Read, ReplicaLost, Taken, follow
from jaxllama.serving.ipc.replica import About, Start
from jaxllama.serving.ray.replica import EngineReplica
from jaxllama.serving.ray.router import PrefixRouter

HEAD = {"node:__internal_head__": 0.001}  # the resource that every head node has
HEALTH = 5.0  # seconds between two health checks
HUNG = 30.0  # seconds without an answer after which a replica counts as hung
QUIET = {"enable_access_log": False}  # the front end logs each request
REPORT = 1.0  # seconds between two reports
REPORTS = 5.0  # seconds to wait for the reports of all replicas


@dataclasses.dataclass(frozen=True)
class ReplicaPool:
    """How many engines there are, and what each of them takes.

    replicas, most: the least and the largest number; Serve chooses between them by the requests in
    flight, ``slots`` for each. slots, max_queue: requests that an engine runs and that wait in it.
    resources: Ray's resources of a replica on each of its hosts, "CPU" and "GPU" by these names.
    hosts: number of hosts of a replica (``hosts.StartOnHosts``). up, down: seconds of more or less
    load before Serve adds or removes a replica. drain: seconds that a removed one has for its
    requests.
    """

    replicas: int
    most: int
    slots: int
    max_queue: int
    resources: Mapping[str, float]
    hosts: int = 1
    up: float = 10.0
    down: float = 300.0
    drain: float = 30.0

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the deployment."""
        rest = dict(self.resources)
        actor = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0), "resources": rest}
        number: dict[str, Any] = {"num_replicas": self.replicas}
        if self.most > self.replicas:
            scaling = AutoscalingConfig(
                min_replicas=self.replicas,
                max_replicas=self.most,
                target_ongoing_requests=self.slots,
                upscale_delay_s=self.up,
                downscale_delay_s=self.down,
                look_back_period_s=max(self.up, 1.0),
            )
            number = {"autoscaling_config": scaling}
        if self.hosts > 1:
            number["placement_group_bundles"] = [dict(self.resources)] * self.hosts
            number["placement_group_strategy"] = "STRICT_SPREAD"
        return number | {
            "name": "engine",
            "ray_actor_options": actor,
            "max_ongoing_requests": self.slots + self.max_queue,
            "request_router_config": RequestRouterConfig(request_router_class=PrefixRouter),
            "health_check_period_s": HEALTH,
            "health_check_timeout_s": HUNG,
            "graceful_shutdown_timeout_s": self.drain,
            "logging_config": QUIET,
        }


class ServePool:
    """The replicas behind a handle of Ray Serve, as an ``ipc.pool.Pool``."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle, self._stream = handle, handle.options(stream=True)

    async def open(self) -> None:
        """Do nothing: Serve watches the replicas."""

    async def run(self, request: Request, taken: Taken, read: Read) -> None:
        response = self._stream.generate.remote(request)
        try:
            with _losses():
                await follow(response, taken, read)
        finally:
            with contextlib.suppress(Exception):  # it may have ended meanwhile
                response.cancel()

    async def forward(self, name: str, arguments: Sequence[Any]) -> Any:
        with _losses():
            return await self._handle.forward.remote(name, list(arguments))

    async def reports(self) -> list[EngineReport]:
        await asyncio.sleep(REPORT)
        asked = self._handle.broadcast("report")
        with _losses():
            found = await asked.results_async(timeout_s=REPORTS, return_exceptions=True)
        return [report for report in found if isinstance(report, EngineReport)]

    def stop(self) -> None:
        """Do nothing: Serve ends the replicas."""

    async def about(self) -> About:
        """Wait for the first replica, and return its description."""
        while True:
            with contextlib.suppress(ReplicaLost), _losses():
                return await self._handle.about.remote()


@contextlib.contextmanager
def _losses() -> Any:
    """Raise Ray's exceptions as ReplicaLost, but a JaxLlamaError of the replica as it is."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, JaxLlamaError):
            raise error.cause from None
        raise ReplicaLost(f"{type(error.cause).__name__}: {error.cause}") from None
    except (RayError, RayServeException) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ReplicaLost(f"{type(error).__name__}: {lines[0]}") from None


@serve.ingress()
class Api:
    """The front end; the module docstring has its place.

    settings: ``max_len`` is the engine's, whatever is given.
    """

    async def __init__(self, replicas: DeploymentHandle[Any], settings: ServerSettings) -> None:
        logging.config.dictConfig(logs.configuration())
        pool, metrics = ServePool(replicas), Metrics(settings.name)
        about = await pool.about()
        settings = dataclasses.replace(settings, max_len=about.max_len)
        journal = None if settings.state is None else Journal(settings.state)
        self._engine = PooledEngine(pool, about, metrics.observe)
        metrics.watch(self._engine)
        quotas = Quotas(settings.keys)
        self._hub = Hub(self._engine, self._engine.passes, metrics, journal, True, quotas)
        self._engine.on_empty = self._hub.report_empty
        await self._engine.open()
        facts = about.facts
        client = link.local(self._hub, facts.tokenizer, facts.config.eos_token_ids)
        self._app = application(facts, client, settings, about.max_queue, self._end)
        self._reporting = asyncio.create_task(report(self._engine))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    def _end(self) -> None:
        self._reporting.cancel()
        self._engine.stop()
        self._hub.close()


def application_of(settings: ServerSettings, pool: ReplicaPool, start: Start) -> serve.Application:
    """Return the application for ``ray.serve.run``.

    start: called in each replica; picklable. settings: ``max_len`` is the engine's, whatever is
    given.
    """
    engines = serve.deployment(EngineReplica).options(**pool.options).bind(start)
    front = serve.deployment(Api).options(
        name="api",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": HEAD},
        max_ongoing_requests=1_000_000,  # the hub refuses what is too much
        health_check_period_s=HEALTH,
        health_check_timeout_s=HUNG,
        graceful_shutdown_timeout_s=pool.drain,
        logging_config=QUIET,
    )
    return front.bind(engines, settings)
