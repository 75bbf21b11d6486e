"""Rows: the state that every decoding loop carries, and the report that the host reads.

A GPU spends one kernel on each small array that changes in a step. Therefore one array holds the
small integers of all rows (``Rows.ints``). Another holds the tokens with the bits of their
log-probabilities (``Rows.written``). ``Fields`` names the parts of the first.

The next step takes over the arrays of ``Rows`` (they are donated). A ``Report`` is a copy, so the
host may read it while the device works on the next step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllama.decoding.sampling import History
from jaxllama.model.cache import Cache
from pallas_kernels.brief import short_repr


class Fields(NamedTuple):
    """The small integers of B rows, int32 ``[B]`` each.

    The first five are always there, in the order in which ``pallas_kernels.rows.greedy`` reads
    them.

    newest: the newest token, which the cache does not hold yet.
    done: 1 for a row that has ended.
    count: number of tokens written.
    length: number of tokens in the cache.
    step: number of turns taken, the same in each row.
    drafted, accepted: number of tokens that drafts proposed, and of those that the model also
        sampled.
    ask, wait, pause: as in ``drafts.Pace``.
    """

    newest: Any
    done: Any
    count: Any
    length: Any
    step: Any
    drafted: Any = None
    accepted: Any = None
    ask: Any = None
    wait: Any = None
    pause: Any = None

    def packed(self) -> jax.Array:
        """Return the fields as one int32 array ``[5, B]``, or ``[10, B]`` with drafts."""
        return jnp.stack([field for field in self if field is not None])

    def is_live(self, limit: jax.Array | int | None = None) -> jax.Array:
        """Return bool ``[B]``: the row has not ended, and has fewer than ``limit`` tokens."""
        is_open = self.done == 0
        return is_open if limit is None else is_open & (self.count < limit)


class Report(NamedTuple):
    """The part of ``Rows`` that the host reads, on the device or fetched.

    The properties are for a fetched report and return numpy arrays.
    """

    ints: Any
    written: Any

    @property
    def tokens(self) -> np.ndarray:
        """int32 ``[B, N]``, of which row b's first ``counts[b]`` are real."""
        return self.written[0]

    @property
    def logprobs(self) -> np.ndarray:
        """float32 ``[B, N]``."""
        return np.asarray(self.written[1]).view(np.float32)

    @property
    def counts(self) -> np.ndarray:
        """int32 ``[B]``."""
        return self.ints[Fields._fields.index("count")]

    @property
    def done(self) -> np.ndarray:
        """bool ``[B]``: the row met a stop token."""
        return self.ints[Fields._fields.index("done")] != 0

    @property
    def drafts(self) -> np.ndarray:
        """int32 ``[2, B]``: tokens drafted and accepted; zeros without drafts."""
        first = Fields._fields.index("drafted")
        found = self.ints[first : first + 2]
        return found if len(found) else np.zeros((2, self.ints.shape[1]), np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The state of B rows during decoding.

    ints: int32 ``[5 or 10, B]``, named by ``fields``.
    written: int32 ``[2, B, N]``: tokens, and the bits of their log-probabilities.
    layers, table: those of the cache, whose lengths are in ``ints``. There are no layers if another
        object keeps them.
    history: None unless a row has penalties.
    text: int32 ``[B, L]``: each row's prompt and, behind it, its answer; None without drafts.
    kept: the draft's own state.
    """

    ints: jax.Array
    written: jax.Array
    layers: tuple[Any, ...]
    table: jax.Array | None = None
    history: History | None = None
    text: jax.Array | None = None
    kept: Any = None

    __repr__ = short_repr

    @classmethod
    def empty(
        cls, lengths: jax.Array, cache: Cache, room: int, history: History | None = None
    ) -> Rows:
        """Return rows of prompts of ``lengths[B]`` tokens, with room for ``room`` written tokens.

        A row of length 0 is done from the beginning.
        """
        batch = lengths.shape[0]
        none = jnp.zeros((batch,), jnp.int32)
        done = (lengths == 0).astype(jnp.int32)
        return cls(
            ints=Fields(none, done, none, cache.lengths, none).packed(),
            written=jnp.zeros((2, batch, room), jnp.int32),
            layers=cache.layers,
            table=cache.table,
            history=history,
        )

    @property
    def fields(self) -> Fields:
        return Fields(*self.ints)

    @property
    def cache(self) -> Cache:
        return self.cache_of(self.lengths)

    def cache_of(self, lengths: jax.Array) -> Cache:
        """Return the cache with these lengths, which must be ``fields.length``."""
        return Cache(self.layers, lengths, self.table)

    @property
    def report(self) -> Report:
        """Return the arrays themselves, to be read before the rows are donated."""
        return Report(self.ints, self.written)

    def copied_report(self) -> Report:
        """Return copies of the arrays, for use inside of a program that takes the rows."""
        return Report(jnp.copy(self.ints), jnp.copy(self.written))

    def ended(self, rows: np.ndarray) -> Rows:
        """Return the rows, with those marked in bool ``rows[B]`` done."""
        return dataclasses.replace(self, ints=_ended(self.ints, rows))

    # One by one, for callers of ``jl.generate``

    @property
    def tokens(self) -> jax.Array:
        """int32 ``[B, N]``: row b's first ``counts[b]`` entries are its tokens, a stop token
        included.
        """
        return self.written[0]

    @property
    def logprobs(self) -> jax.Array:
        """float32 ``[B, N]``."""
        return lax.bitcast_convert_type(self.written[1], jnp.float32)

    @property
    def counts(self) -> jax.Array:
        """int32 ``[B]``: tokens written."""
        return self.ints[Fields._fields.index("count")]

    @property
    def lengths(self) -> jax.Array:
        """int32 ``[B]``: tokens in the cache."""
        return self.ints[Fields._fields.index("length")]

    @property
    def done(self) -> jax.Array:
        """bool ``[B]``: the row met a stop token."""
        return self.ints[Fields._fields.index("done")] != 0

    @property
    def step(self) -> jax.Array:
        """Number of turns taken; the first token is one turn."""
        return self.ints[Fields._fields.index("step"), 0]


@jax.jit
def _ended(ints: jax.Array, rows: jax.Array) -> jax.Array:
    return ints.at[Fields._fields.index("done")].max(rows.astype(jnp.int32))


def bits_of(floats: jax.Array) -> jax.Array:
    """Return the bits of float32 numbers as int32."""
    return lax.bitcast_convert_type(floats, jnp.int32)
