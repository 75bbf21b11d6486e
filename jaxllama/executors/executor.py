"""Executor: the interface of the place where a model runs. A LanguageModel holds one.

    decoding = executor.begin(cfg, params, call)     prompts, and each row's first token
    report   = decoding.advance(until)               more tokens

``resident`` has all parameters on one device or a mesh. ``offloaded`` loads them as it runs. An
executor holds no parameters: each call passes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.decoding.drafts import DraftPlan
from jaxllama.decoding.forward import Params
from jaxllama.decoding.rows import Report
from jaxllama.decoding.sampling import SamplingParams
from jaxllama.kept import KeptPrograms
from jaxllama.model.records import Hidden


class DraftSource(NamedTuple):
    """The plan of drafts, and the parameters of the draft model; None for n-grams."""

    plan: DraftPlan
    params: Params | None


class Alone(NamedTuple):
    """The shapes in which a deterministic model, like an engine, reads prompts.

    rows: number of tokens of every decode step.
    widths: widths of the programs that read a row's prompt without its last token, one after the
        other (``text.rows.pieces_of``).
    """

    rows: int
    widths: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """A batch of rows to decode.

    tokens: int32 ``[B, T]``, right-padded beyond ``lengths[B]``: the prompts.
    capacity: number of tokens of a row that the cache holds.
    room: columns for written tokens, of which the caller uses at most ``limit``.
    stop_ids: int32 ``[stops]``: tokens that end a row.
    kv_dtype: the cache's dtype.
    chunk: number of tokens of a prompt that pass through the model at once.
    alone: the shapes of a deterministic model.
    on_prompt: called as (tokens read, tokens of the longest prompt) after each chunk.
    kept: programs that earlier processes have compiled for these parameters.
    """

    tokens: jax.Array
    lengths: jax.Array
    sampling: SamplingParams
    stop_ids: jax.Array
    capacity: int
    room: int
    limit: int
    kv_dtype: DTypeLike
    chunk: int | None = None
    alone: Alone | None = None
    drafting: DraftSource | None = None
    on_prompt: Callable[[int, int], None] | None = None
    kept: Kept | None = None


class Kept(NamedTuple):
    """Compiled programs, and the signature of the parameters that they take."""

    programs: KeptPrograms
    signature: str


class Decoding(Protocol):
    """The state of rows on their way through a model."""

    @property
    def report(self) -> Report:
        """Return the rows' tokens so far. Read it before the next call of ``advance``."""
        ...

    def advance(self, until: int) -> Report:
        """Take turns until every row has ``until`` tokens or has ended, and return the report."""
        ...

    def end(self, rows: np.ndarray) -> None:
        """End the rows that are true in ``rows[B]``."""
        ...


class Executor(Protocol):
    """The interface of an executor. See the module docstring."""

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that holds the parameters; None for one device."""
        ...

    @property
    def block_size(self) -> int | None:
        """Most rows that run together, from their first to their last token; None for no limit."""
        ...

    @property
    def on_device(self) -> bool:
        """Whether all parameters are arrays that any program may take."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether ``advance`` returns before the device has finished the turns."""
        ...

    def with_params(self, params: Params) -> Executor:
        """Return the executor of these parameters."""
        ...

    def laid_out(self, params: Params) -> Params:
        """Return ``params`` in the layout in which they run."""
        ...

    def whole(self, cfg: ModelConfig, params: Params) -> Params:
        """Return the parameters in one piece each, to be saved.

        Raises JaxLlamaError if the executor cannot do so.
        """
        ...

    def cache_options(
        self, kv_dtype: DTypeLike | None, chunk: int | None, dtype: Any
    ) -> tuple[Any, int | None]:
        """Return the cache's dtype and the chunk for the user's arguments; ``dtype`` is the
        default.

        Raises JaxLlamaError if the executor has values of its own and they differ.
        """
        ...

    def check_drafts(self) -> None:
        """Raise JaxLlamaError if a pass cannot verify drafts."""
        ...

    def begin(self, cfg: ModelConfig, params: Params, call: Call) -> Decoding:
        """Read the prompts and write each row's first token."""
        ...

    def logits(
        self, cfg: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        """Return teacher-forced float32 logits ``[B, T, V]`` of ``tokens[B, T]``."""
        ...

    def states(
        self,
        cfg: ModelConfig,
        params: Params,
        tokens: jax.Array,
        lengths: jax.Array,
        kv_dtype: DTypeLike | None = None,
    ) -> tuple[Hidden, Params]:
        """Return the hidden states ``[B, T, D]`` and the parameters that make logits of them.

        kv_dtype: dtype of a cache through which every token attends, sparsely if the model decodes
            so. None uses no cache.
        """
        ...
