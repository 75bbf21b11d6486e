"""A replica over several hosts: one engine whose mesh spans the devices of all of them.

    StartOnHosts(load, options, hosts)     in the place of ``ipc.replica.StartEngine``

The replica's actor is the first process. It starts an actor on each other host of its placement
group. All join by JAX's distributed runtime, load their parts of the weights, and compile. The
first engine then takes the requests, and sends the input of each step to the others
(``engine.lockstep``); JAX's collectives keep them together. If one of the processes ends, the first
one's engine counts as failed, so Serve starts the whole replica again.

Left out: embeddings, ranking and prompt logprobs, whose passes the other processes would have to
run in the same order as the steps.
"""

from __future__ import annotations

import dataclasses
import logging.config
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxllama.engine.engine import Engine
from jaxllama.engine.lockstep import StepInput, follow, follower_options
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.parallel import hosts
from jaxllama.serving import logs
from jaxllama.serving.api.calls import ModelFacts
from jaxllama.serving.ipc.replica import Observe, Started
from jaxllama.serving.ipc.served import Passes
from jaxllama.serving.ray.cluster import free_port
from jaxllama.typing import Options

KEPT = 4  # newest steps whose results are looked at
LOOK = 0.5  # seconds between two looks at the other processes
JOIN = 300.0  # seconds in which all processes of a replica have started


class Follower:
    """The actor on another host; it repeats the steps of the first process."""

    @ray.method(concurrency_group="steps")
    def start(self, where: str, load: Callable[[], LanguageModel], options: Options) -> None:
        """Join the others at ``where`` (as for ``hosts.join``), load the model and compile."""
        hosts.join(where, JOIN)
        self._engine = Engine(load(), **follower_options(options))
        self._engine.warm_up()

    @ray.method(concurrency_group="steps")
    def step(self, step: StepInput) -> None:
        follow(self._engine, step)

    @ray.method(concurrency_group="life")
    def wait(self) -> None:
        """Wait until this process ends."""
        threading.Event().wait()


@dataclasses.dataclass(frozen=True)
class StartOnHosts:
    """Starts an engine over ``hosts`` hosts, in the actor of a replica.

    load: returns the model on a mesh of all hosts' devices. options: of the engine.
    """

    load: Callable[[], LanguageModel]
    options: Options
    hosts: int

    def __call__(self, observe: Observe) -> Started:
        logging.config.dictConfig(logs.configuration())
        others = self._others()
        address = f"{get_node_ip_address()}:{free_port()}"
        started = [
            other.start.remote(f"{address},{self.hosts},{index}", self.load, self.options)
            for index, other in enumerate(others, start=1)
        ]
        hosts.join(f"{address},{self.hosts},0", JOIN)
        lm = self.load()
        engine = Engine(lm, observe=observe, **self.options)
        engine.warm_up()
        ray.get(started)

        def send(step: StepInput) -> None:
            for other in others:
                # Calls of one caller run in their order, in the group's one thread.
                recent.append(other.step.remote(step))
            del recent[: -KEPT * len(others)]

        recent: list[Any] = []
        waits = [other.wait.remote() for other in others]
        threading.Thread(target=_watch, args=(engine, waits, recent), daemon=True).start()
        engine.on_step = send
        engine.start()
        passes: Passes = {name: _refused for name in ("embed", "rank", "score")}
        return Started(engine, ModelFacts.of(lm), passes)

    def _others(self) -> list[Any]:
        group = get_current_placement_group()
        resources = dict(group.bundle_specs[1])
        actor = ray.remote(concurrency_groups={"steps": 1, "life": 1})(Follower)
        return [
            actor.options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(1, self.hosts)
        ]


def _watch(engine: Engine, waits: list[Any], steps: list[Any]) -> None:
    """Record a failure of the engine when another process of its mesh ends or fails in a step."""
    while True:
        refs = [*waits, *steps]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=LOOK)
        for task in done:
            try:
                ray.get(task)
            except Exception as error:
                reason = str(error).strip().splitlines()[0]
                engine.failure = engine.failure or f"a process of the replica has ended: {reason}"
                return


def _refused(*_: object) -> None:
    raise JaxLlamaError("the model is on several hosts: no embeddings, no logprobs of prompts")
