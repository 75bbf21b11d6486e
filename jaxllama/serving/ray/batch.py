"""``jaxllama batch --ray``: a batch file answered by engines on a Ray cluster, through Ray Data.

    run(cluster, name, open_app, source, target, at_once, show) -> counts, as ``http.batch.run``

The lines without an answer become blocks of ``at_once`` lines. Each engine is an actor of Ray Data,
which has ``CALLS`` blocks at a time, so that it always has work. This process alone writes answers,
as their blocks come. So a batch can be resumed as without Ray, also after this process was killed:
lines whose block had not come are answered again, and each has one answer in the file. If a node is
lost, Ray Data sends its blocks to other engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError
from starlette.types import ASGIApp

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.http import batch
from jaxllama.serving.ray.cluster import connect, resources_of
from jaxllama.serving.ray.options import ClusterOptions

CALLS = 2  # blocks that an engine has at a time
OpenApp = Callable[[], contextlib.AbstractContextManager[ASGIApp]]


class BlockAnswers:
    """An engine in an actor of Ray Data: blocks of lines to blocks of answers."""

    def __init__(self, name: str, open_app: OpenApp) -> None:
        self._name, self._stack = name, contextlib.ExitStack()
        self._app = self._stack.enter_context(open_app())

    async def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        lines = [json.loads(line) for line in block["line"]]
        answers = await asyncio.gather(
            *(batch.answer(self._app, self._name, tuple(line)) for line in lines)
        )
        status, texts = zip(*answers, strict=True)
        return {"status": list(status), "answer": list(texts)}


def run(
    cluster: ClusterOptions,
    name: str,
    open_app: OpenApp,
    source: Path,
    target: Path,
    at_once: int,
    show: bool = True,
) -> dict[str, int]:
    """Answer a batch file and return the numbers of answers, as ``http.batch.run``.

    open_app: the application over an engine, opened in each actor; picklable. at_once: number of
    lines in a block.
    """
    lines, kept = batch.left(source, target)
    with batch.answer_file(target, len(lines), kept, show) as (counts, add):
        if not lines:
            return counts
        connect(cluster.address)
        try:
            for row in _answered(cluster, name, open_app, lines, at_once):
                add(row["status"], row["answer"])
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            reason = str(cause).strip().splitlines()
            raise JaxLlamaError(reason[-1] if reason else type(cause).__name__) from None
        finally:
            ray.shutdown()
    return counts


def _answered(
    cluster: ClusterOptions, name: str, open_app: OpenApp, lines: list[batch.Line], at_once: int
) -> Any:
    """Yield a row with status and answer for each line, as their blocks end."""
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    resources = dict(resources_of(cluster))
    pool = ActorPoolStrategy(
        min_size=cluster.replicas,
        max_size=cluster.most,
        max_tasks_in_flight_per_actor=2 * CALLS,
        max_concurrent_calls_per_actor=CALLS,
    )
    blocks = -(-len(lines) // at_once)
    rows = ray.data.from_items(
        [{"line": json.dumps(line)} for line in lines], override_num_blocks=blocks
    )
    answered = rows.map_batches(
        BlockAnswers,
        fn_constructor_args=(name, open_app),
        batch_size=None,
        compute=pool,
        num_cpus=resources.pop("CPU", 0),
        num_gpus=resources.pop("GPU", 0) or None,
        resources=resources or None,
    )
    return answered.iter_rows()
