"""The operands of a model: checks of a caller's arrays, the places of new tokens, hidden states.

    at = Chunk(...) | Step(...) | Draft(...) | Pieces(...)      the kind of a call's tokens
    hidden = Hidden(x)                            before the last norm; ``decoder.logits`` reads it

A ``Chunk`` is any number of consecutive tokens of each row: a prompt, a piece of it, or a whole
sequence without a cache.  A ``Step`` is one generated token of each row.  A ``Draft`` is several
tokens of each row that may not stay.  ``Pieces`` are a ``Chunk`` whose tokens are spread over
devices.  A mixer asks which of them it has, never how many tokens.

The checks at the end read no values, so they also work on traced arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig, StepConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.rope import Ropes, rope_tables
from jaxllama.parallel.sequence import gathered, local_pieces, piece_indices
from jaxllama.typing import ArrayOrNumpy


def _static(default: bool) -> bool:
    """A field that is part of a record's type, not one of its arrays."""
    return dataclasses.field(default=default, metadata={"static": True})


class _ByRow:
    """Tokens whose rows are those of the cache, or pieces of them."""

    lengths: jax.Array

    def row_lengths(self) -> jax.Array:
        """Return the number of valid tokens of each row of the cache, int32 ``[B]``."""
        return self.lengths

    def by_row(self, x: jax.Array) -> jax.Array:
        """Return ``x[B, T, ...]`` with the tokens of a row of the cache side by side."""
        return x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk(_ByRow):
    """Consecutive tokens of every row.

    Attributes
    ----------
    positions, lengths
        int32 ``[B, T]``, and int32 ``[B]``, the number of valid new tokens of each row.
    rope
        Tables for the layers' kinds of positions, None if no layer is attention.
    table
        The cache's table of pages.
    sparse_tokens
        Which tokens read the share ``attn_sparsity`` of V, bool ``[B, T]``. None if all tokens
        are alike; ``sparse`` then says whether they do.
    fresh
        Every row begins here, so its cache need not be read.
    segments
        int32 ``[B, T]`` where several sequences lie in a row, for rows without a cache. A token
        sees only tokens of its own segment, and a state begins anew where the number changes.
    inputs
        Further inputs of all layers, ``[B, T, L, P]``, or of one layer, ``[B, T, P]``
        (``ModelConfig.layer_inputs``).
    begins
        int32 ``[B, M]``, where the segments begin, then -1; None if that is not known.
    """

    positions: jax.Array
    lengths: jax.Array
    rope: Ropes | None
    table: jax.Array | None = None
    sparse_tokens: jax.Array | None = None
    sparse: bool = _static(False)
    fresh: bool = _static(False)
    segments: jax.Array | None = None
    inputs: jax.Array | None = None
    begins: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step(_ByRow):
    """One token of every row, behind its cache: a ``Chunk``'s fields with T = 1.

    ``lengths`` is 1 if the row has a token, else 0.
    """

    positions: jax.Array
    lengths: jax.Array
    rope: Ropes | None
    table: jax.Array | None = None
    sparse_tokens: jax.Array | None = None
    sparse: bool = _static(True)
    inputs: jax.Array | None = None
    segments: ClassVar[None] = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """``width`` tokens of every row of the cache that ``verification.commit`` may keep.

    Each is a row of the batch, ``positions[B width, 1]`` and ``lengths[B width]``, as in a step of
    so many rows. exact: with the bits of such a step. sparse: whether they read V sparsely
    (``verification.propose``).
    """

    positions: jax.Array
    lengths: jax.Array
    rope: Ropes | None
    width: int = dataclasses.field(metadata={"static": True})
    table: jax.Array | None = None
    exact: bool = _static(False)
    sparse: bool = _static(True)
    inputs: jax.Array | None = None
    sparse_tokens: ClassVar[None] = None
    segments: ClassVar[None] = None

    def row_lengths(self) -> jax.Array:
        """Return the tokens of each row of the cache, int32 ``[B]``; a row's stand first."""
        return self.lengths.reshape(-1, self.width).sum(axis=1, dtype=self.lengths.dtype)

    def by_row(self, x: jax.Array) -> jax.Array:
        """Return ``x[B width, 1, ...]`` as ``[B, width, ...]``: a cache row's tokens together."""
        return x.reshape(-1, self.width, *x.shape[2:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces(_ByRow):
    """This device's pieces of a chunk that ``parallel.sequence`` cut: two of each row.

    Each is a row of the batch, first those of all rows with the lower index. The cache is whole on
    every device of the "data" axis, which all do the same with it.

    Attributes
    ----------
    positions, lengths
        int32 ``[2 B, T]``, and int32 ``[2 B]``, the number of valid tokens of each piece.
    rope
        As ``Chunk``'s, of these positions.
    start, totals
        int32 ``[B]``: tokens that each row of the cache holds, and its new tokens on all devices.
    n
        Number of devices.
    table
        The cache's table of pages.
    """

    positions: jax.Array
    lengths: jax.Array
    rope: Ropes | None
    start: jax.Array
    totals: jax.Array
    n: int = dataclasses.field(metadata={"static": True})
    table: jax.Array | None = None
    inputs: jax.Array | None = None
    sparse: ClassVar[bool] = False
    sparse_tokens: ClassVar[None] = None
    segments: ClassVar[None] = None

    def every(self, x: jax.Array) -> jax.Array:
        """``x[2 B, ...]`` of these pieces -> ``[2n, B, ...]`` of all, in the tokens' order."""
        return gathered(x, self.start.shape[0], self.n)

    def local(self, every: jax.Array) -> jax.Array:
        """The inverse of ``every``: ``[2n, B, ...]`` -> ``[2 B, ...]``."""
        return local_pieces(every, self.n)


At = Chunk | Step | Draft | Pieces


def new_tokens(
    positions: jax.Array,
    lengths: jax.Array,
    rope: Ropes | None,
    sparse: bool | jax.Array = False,
    table: jax.Array | None = None,
    fresh: bool = False,
    *,
    cached: bool,
) -> Chunk | Step:
    """Return the record of ``T`` new tokens a row.

    cached: they stand behind a cache; there one token is a ``Step``, whatever it came from.
    sparse: which tokens read V sparsely: none, all, or bool ``[B, T]``.
    """
    tokens, every = (None, sparse) if isinstance(sparse, bool) else (sparse, True)
    if cached and positions.shape[1] == 1:
        return Step(positions, lengths, rope, table, tokens, every)
    return Chunk(positions, lengths, rope, table, tokens, every, fresh)


def positions_of(
    cfg: StepConfig, start: jax.Array, total: jax.Array, n_new: int
) -> tuple[jax.Array, Ropes | None]:
    """(positions ``[B, n_new]`` from ``start[B]`` on, RoPE tables or None); total[B]: tokens of
    each row when the whole prompt is in."""
    positions = start[:, None] + jnp.arange(n_new, dtype=jnp.int32)[None, :]
    if not cfg.ropes:
        return positions, None
    tables = (rope_tables(*options, positions, total) for options in cfg.ropes)
    return positions, Ropes(cfg.ropes, tuple(tables))


def pieces_of(
    cfg: ModelConfig,
    start: jax.Array,
    lengths: jax.Array,
    total: jax.Array,
    width: int,
    n: int,
    table: jax.Array | None = None,
) -> Pieces:
    """Return this device's pieces of ``lengths[B]`` new tokens behind ``start[B]`` others.

    total: tokens of each row when its whole prompt is in, for RoPE alone.  width: tokens of a
    piece.  n: devices.
    """
    first = (piece_indices(n)[:, None] * width).astype(jnp.int32)
    of_pieces = jnp.clip(lengths[None, :] - first, 0, width).reshape(-1)
    starts, totals = (start[None, :] + first).reshape(-1), jnp.tile(total, 2)
    positions, rope = positions_of(cfg, starts, totals, width)
    return Pieces(positions, of_pieces, rope, start, lengths, n, table)


def places_of(
    cfg: StepConfig, start: jax.Array, lengths: jax.Array, width: int
) -> tuple[jax.Array, jax.Array, Ropes | None]:
    """Return the places of ``lengths[B]`` tokens from ``start[B]`` on, each as a row by itself.

    width: the largest number of tokens of a row.

    Returns (positions ``[B width, 1]``, 1 for each token that exists, else 0, int32 ``[B width]``,
    RoPE tables or None).
    """
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    first = (start[:, None] + place).reshape(-1)
    is_new = (place < lengths[:, None]).astype(jnp.int32).reshape(-1)
    positions, rope = positions_of(cfg, first, first + is_new, 1)
    return positions, is_new, rope


def whole_rows(
    cfg: StepConfig,
    batch: int,
    length: int,
    segments: jax.Array | None = None,
    begins: jax.Array | None = None,
) -> Chunk:
    """Return the Chunk of ``batch`` rows of ``length`` tokens, without padding or a past.

    segments: int32 ``[batch, length]``, for packed rows; positions then count from each segment's
    first token. begins: as ``Chunk`` has it. Tables of dynamic RoPE are those of ``length`` tokens.
    """
    lengths = jnp.full((batch,), length, jnp.int32)
    if segments is None:
        positions, rope = positions_of(cfg, jnp.zeros_like(lengths), lengths, length)
        return Chunk(positions, lengths, rope)
    positions, rope = places_in_segments(segments), None
    if cfg.ropes:
        tables = (rope_tables(*options, positions, lengths) for options in cfg.ropes)
        rope = Ropes(cfg.ropes, tuple(tables))
    return Chunk(positions, lengths, rope, segments=segments, begins=begins)


def places_in_segments(segments: jax.Array) -> jax.Array:
    """Return each token's position in its segment of packed rows, int32 ``[B, T]``."""
    place = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    is_first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return place - lax.cummax(jnp.where(is_first, place, 0), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hidden:
    """Hidden states ``x[..., D]`` behind the last layer, before the last norm.

    ``hidden[index]`` picks tokens, ``flat()`` makes them rows, ``last`` takes one of each row.
    taps: ``[..., K D]``: the states before the K layers of ``cfg.taps``; None without taps.
    """

    x: jax.Array
    taps: jax.Array | None = None

    @classmethod
    def zeros(cls, cfg: ModelConfig, shape: tuple[int, ...], dtype: DTypeLike) -> Hidden:
        """Return states of zeros ``[*shape, D]``."""
        width = len(cfg.taps) * cfg.d_model
        taps = jnp.zeros((*shape, width), dtype) if width else None
        return cls(jnp.zeros((*shape, cfg.d_model), dtype), taps)

    def __getitem__(
        self, index: ArrayOrNumpy | slice | int | tuple[ArrayOrNumpy | slice | int, ...]
    ) -> Hidden:
        return jax.tree.map(lambda x: x[index], self)

    def last(self, lengths: jax.Array, before: Hidden | None = None) -> Hidden:
        """Return the state of each row's last valid token, ``[B, D]``.

        A row without tokens keeps its state in ``before``, if that is given.
        """
        picked = self[jnp.arange(self.x.shape[0]), jnp.maximum(lengths - 1, 0)]
        if before is None:
            return picked
        has_tokens = (lengths > 0)[:, None]
        return jax.tree.map(lambda x, old: jnp.where(has_tokens, x, old), picked, before)

    def flat(self) -> Hidden:
        """Return the states of all tokens as rows, ``[N, D]``."""
        return self.reshaped(-1)

    def reshaped(self, *shape: int) -> Hidden:
        """Return the states as ``[*shape, D]``."""
        return jax.tree.map(lambda x: x.reshape(*shape, x.shape[-1]), self)


# Checks of the arrays and dtypes that a caller passes


def check_ints(name: str, x: ArrayOrNumpy, axes: str, batch: int | None = None) -> None:
    """Raise JaxLlamaError unless ``x`` is an integer array with these axes."""
    _check_array(name, x, f"an array of integers {axes}")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise JaxLlamaError(f"{name}: {x.dtype}: expected integers")
    if len(x.shape) != axes.count(",") + 1 or 0 in x.shape:
        raise JaxLlamaError(f"{name}{list(x.shape)}: expected {axes}, at least one of each")
    if batch is not None and x.shape[0] != batch:
        raise JaxLlamaError(f"{name}{list(x.shape)}: expected {batch}, one for each row")


def check_features(cfg: ModelConfig, x: ArrayOrNumpy, axes: str = "[..., D]") -> None:
    """Raise JaxLlamaError unless ``x`` is a float array with these axes, and D is d_model."""
    _check_array("x", x, f"an array of floats {axes}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise JaxLlamaError(f"x: {x.dtype}: expected floats")
    n_axes = len(x.shape) if "..." in axes else axes.count(",") + 1
    if len(x.shape) != n_axes or x.shape[-1:] != (cfg.d_model,):
        raise JaxLlamaError(f"x{list(x.shape)}: expected {axes} with D = {cfg.d_model} (d_model)")


def check_key(name: str, key: ArrayOrNumpy) -> None:
    """Raise JaxLlamaError unless ``key`` is one PRNG key, typed or of raw uint32 words."""
    _check_array(name, key, "a PRNG key: jax.random.key(seed)")
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and (key.dtype != jnp.uint32 or len(key.shape) != 1):
        raise JaxLlamaError(
            f"{name}: {key.dtype}{list(key.shape)}: expected a PRNG key: jax.random.key(seed)"
        )


def float_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of weights and activations.

    Raises JaxLlamaError for any dtype but float32, bfloat16, float16 and float64.
    """
    with contextlib.suppress(TypeError):
        found = jnp.dtype(dtype)
        if jnp.issubdtype(found, jnp.floating) and found.itemsize in (2, 4, 8):
            return found
        dtype = found.name
    raise JaxLlamaError(f"dtype {dtype!r} is not float32, bfloat16 or float16")


def _check_array(name: str, x: ArrayOrNumpy, what: str) -> None:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise JaxLlamaError(f"{name}: {type(x).__name__}: expected {what}")
