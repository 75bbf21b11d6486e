"""Forward passes beside the engine, in a thread of their own: embeddings, and logprobs of prompts.

One row at a time is in the thread's queue, behind one of every other body: bodies take turns, and
what a client has left is not computed.  Once the engine has stopped or failed, nothing is.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxllama.language_model import LanguageModel
from jaxllama.serving.engine.request import EngineClosed, EngineFailed, QueueFull
from jaxllama.serving.http.calls import Call
from jaxllama.serving.http.embeddings import Embedder
from jaxllama.serving.http.scoring import Scorer


class ForwardPasses:
    """See the module docstring.  Its methods raise EngineFailed and EngineClosed."""

    def __init__(self, lm: LanguageModel, engine: Any) -> None:
        self._engine = engine
        self._embed, self._score = Embedder(lm), Scorer(lm)
        # Its own, so that tokenizing never waits for it.
        self._thread = ThreadPoolExecutor(1, "forward")
        self._scoring = 0

    async def vectors(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return await self._in_turns(self._embed, [(row,) for row in rows])

    async def scored(self, call: Call) -> Call:
        """With its prompts' logprobs.  QueueFull where too many wait for theirs."""
        if call.to_score is None:
            return call
        if self._scoring >= self._engine.options.max_queue:
            raise QueueFull(self._scoring, 1.0)
        self._scoring += 1
        try:
            rows = [(p.prompt, call.to_score, p.adapter) for p in call.prompts]
            scores = await self._in_turns(self._score, rows)
        finally:
            self._scoring -= 1
        return dataclasses.replace(call, scores=tuple(scores))

    async def _in_turns(
        self, work: Callable[..., Any], rows: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        loop, done = asyncio.get_running_loop(), []
        for row in rows:
            if self._engine.failure is not None:
                raise EngineFailed(self._engine.failure)
            if self._engine.closed is not None:
                raise EngineClosed(self._engine.closed)
            done.append(await loop.run_in_executor(self._thread, work, *row))
        return done

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
