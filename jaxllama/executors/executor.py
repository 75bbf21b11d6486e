"""Executor: where a model runs.  A LanguageModel holds one and calls these methods.

    decoding = executor.begin(cfg, params, call)     prompts, and each row's first token
    report   = decoding.advance(until)               more tokens

``resident`` has all parameters on one device or a mesh, and ``offloaded`` loads them as it runs.
An executor holds no parameters.  Each call passes them; the executor knows where they lie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.decoding.drafts import DraftPlan
from jaxllama.decoding.gain import DRAFT, Gain
from jaxllama.decoding.rows import Report
from jaxllama.decoding.sampling import SamplingParams
from jaxllama.kept import KeptPrograms
from jaxllama.model.records import Hidden
from jaxllama.typing import ArrayOrNumpy, Params

# Tokens of a pass in ``generate`` of a deterministic model, and the fewest of one in its engine.
DETERMINISTIC_ROWS = 32


class DraftSource(NamedTuple):
    """The plan of drafts, and the draft model's parameters (None for n-grams).

    gains: of ``generate``'s calls, by rows and capacity; None if drafting may not end.
    """

    plan: DraftPlan
    params: Params | None
    gains: Mapping[tuple[int, int], Gain] | None = None


class Alone(NamedTuple):
    """The shapes in which a deterministic model reads prompts, those of an engine.

    rows: tokens of every decode step; an offloaded model takes its policy's ``gpu_batch_size``.
    piece, last: widths of the pieces in which a row's prompt without its last token is read
    (``text.rows.fixed_pieces``). Pieces begin at multiples of ``piece``.
    """

    rows: int
    piece: int
    last: int


@dataclasses.dataclass(frozen=True)
class Call:
    """A batch of rows to be decoded.

    tokens int32 ``[B, T]``, right-padded beyond ``lengths[B]``: the prompts.
    capacity: tokens of a row that the cache holds.
    room: number of columns for written tokens.  limit: most tokens that a row may write.
    stop_ids int32 ``[stops]``: tokens that end a row.
    kv_dtype: dtype of the cache.  chunk: tokens of a prompt that go through the model at once.
    alone: shapes of a deterministic model; None for others.  drafting: None without drafts.
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
    kept: KeptCalls | None = None


class KeptCalls(NamedTuple):
    """Compiled programs, and the signature of the parameters that they take."""

    programs: KeptPrograms
    signature: str


class RowsDecoder(Protocol):
    """The state of rows on their way through a model."""

    @property
    def report(self) -> Report:
        """Return the rows' tokens so far. Read it before the next call of ``advance``."""
        ...

    def advance(self, until: int, how: int = DRAFT) -> Report:
        """Take turns until every row has ``until`` tokens or has ended, and return the report.

        how: of ``decoding.gain``, for rows with drafts.
        """
        ...

    def end(self, rows: np.ndarray) -> None:
        """End the rows that are true in ``rows[B]``."""
        ...


class Executor(Protocol):
    """The interface of an executor. See the module docstring.

    on_device: whether all parameters are arrays that any program may take. runs_ahead: whether
    ``advance`` returns before the device has finished the turns.
    """

    on_device: ClassVar[bool]
    runs_ahead: ClassVar[bool]

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that holds the parameters; None for one device."""
        ...

    @property
    def block_size(self) -> int | None:
        """Largest number of rows that run together, from first to last token; None for no limit."""
        ...

    def with_params(self, params: Params) -> Executor:
        """Return the executor of these parameters."""
        ...

    def laid_out(self, params: Params) -> Params:
        """``params`` in the layout in which this executor runs them."""
        ...

    def whole(self, cfg: ModelConfig, params: Params) -> Params:
        """Every parameter in one piece, to be saved.  Raises JaxLlamaError if it cannot be."""
        ...

    @property
    def arrangement(self) -> str | None:
        """Where the parameters are, as text: a policy or a mesh; None for one device."""
        ...

    def leaves(self, params: Params) -> Iterator[tuple[str, ArrayOrNumpy]]:
        """Yield (path, array) of every parameter, one at a time; a part of several has several."""
        ...

    def cache_options(
        self,
        cfg: ModelConfig,
        kv_dtype: DTypeLike | None,
        chunk: int | None,
        dtype: DTypeLike | None,
    ) -> tuple[Any, int | None]:
        """(cache's dtype, chunk) for the user's values; dtype: the cache's default.

        Raises JaxLlamaError if the executor has fixed values and the user's differ from them, or
        if the model has no keys and values that ``kv_dtype`` could be of.
        """
        ...

    def check_drafts(self, deterministic: bool) -> None:
        """Raise JaxLlamaError if a pass of such a model cannot verify drafts."""
        ...

    def begin(self, cfg: ModelConfig, params: Params, call: Call) -> RowsDecoder:
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
        """(hidden states ``[B, T, D]``, the parameters that turn them into logits).

        kv_dtype: dtype of a cache through which every token attends as in decode, with
        ``attn_sparsity`` if the model has it.  None for no cache.
        """
        ...
