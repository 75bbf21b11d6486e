"""The parts of an engine that a server needs, and the forward passes beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from jaxllama.engine.adapters import AdapterSlots
from jaxllama.engine.embeddings import Embedder, Ranker
from jaxllama.engine.request import Event, FinishReason, Request
from jaxllama.engine.scoring import Scorer
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel


class EngineLimits(Protocol):
    """Sizes of an engine.

    max_len: largest number of tokens of a request, prompt and answer together. max_queue: largest
    number of waiting requests.
    """

    @property
    def max_len(self) -> int: ...
    @property
    def max_queue(self) -> int: ...


class Served(Protocol):
    """The interface of an engine that a server needs; ``Engine`` and ``PooledEngine`` have it.

    failure: why the engine has ended. closed: why it takes no more requests. stalled: why a restart
    would help. All three are None while it works.
    """

    @property
    def options(self) -> EngineLimits: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def closed(self) -> str | None: ...
    @property
    def stalled(self) -> str | None: ...
    def submit(
        self, request: Request, on_event: Callable[[Event], None], *, with_text: bool
    ) -> None: ...
    def end(self, request_id: str, reason: FinishReason) -> None: ...
    def listen(self, listener: Callable[[], None]) -> None: ...


@runtime_checkable
class Adapting(Protocol):
    """An engine that loads adapters while it runs."""

    def load_adapter(self, name: str, path: str) -> str: ...
    def unload_adapter(self, id: str) -> None: ...


Passes = Mapping[str, Callable[..., object]]


def forward_passes(lm: LanguageModel, adapters: AdapterSlots | None = None) -> Passes:
    """Return the passes beside the engine: a row's embedding (float32 bytes), the probabilities
    of its classes or answers, a prompt's logprobs.

    adapters: of the running engine, if it loads some.

    An offloaded model refuses them, because its weights belong to the running block.
    """
    if not lm.executor.on_device:

        def refused(*_: object) -> None:
            raise JaxLlamaError("the model is offloaded: no embeddings, no logprobs of prompts")

        return {"embed": refused, "rank": refused, "score": refused}
    embed = Embedder(lm)
    return {
        "embed": lambda row: embed(row).tobytes(),
        "rank": Ranker(lm),
        "score": Scorer(lm, adapters),
    }
