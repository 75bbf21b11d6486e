"""Rows: the state that every decoding loop carries, and the report that the host reads.

A GPU runs a kernel for each small array that changes in a step.  Therefore the small integers of
all rows are one array, ``Rows.ints``, whose parts ``Fields`` names.  Tokens and the bits of their
log-probabilities are another, ``Rows.written``.

The arrays of ``Rows`` are donated to the next step.  A ``Report`` is a copy, so the
host may read it while the device works on the next step.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllama.decoding.sampling import History
from jaxllama.model.cache import Cache
from jaxllama.model.mixers.common import LayerState
from jaxllama.typing import Tree
from pallas_kernels.operands import short_repr


class Fields(NamedTuple):
    """The small integers of B rows, int32 ``[B]`` each; the first five are always there, in the
    order in which ``pallas_kernels.rows.greedy`` reads them.

    newest: the newest token, which the cache does not hold yet.
    done: 1 for a row that has ended.
    count: tokens written.
    length: tokens that the cache holds.
    step: turns taken; the same number in each row.
    drafted: tokens that drafts proposed.  accepted: those that the model sampled too.
    ask, wait, pause: the fields of ``drafts.Pace``; ask is its ``tokens``.
    """

    newest: jax.Array
    done: jax.Array
    count: Tree
    length: jax.Array
    step: jax.Array
    drafted: Tree = None
    accepted: Tree = None
    ask: Tree = None
    wait: Tree = None
    pause: Tree = None

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

    ints: Tree
    written: Tree

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
    """B rows that are decoded.

    ints: int32 ``[5 or 10, B]``; ``fields`` has them by name.
    written: int32 ``[2, B, N]``: tokens, and the bits of their log-probabilities.
    layers, table, parts: of the cache.  Its lengths are in ``ints``.  ``layers`` is
        empty if the executor keeps the states itself.
    history: None unless a row has penalties.
    text: int32 ``[B, L]``, the prompt followed by the answer; None without drafts.
    kept: the draft's own state.
    """

    ints: jax.Array
    written: jax.Array
    layers: tuple[LayerState, ...]
    table: jax.Array | None = None
    history: History | None = None
    text: jax.Array | None = None
    kept: Tree = None
    parts: int = dataclasses.field(default=1, metadata={"static": True})

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
            parts=cache.parts,
        )

    @property
    def fields(self) -> Fields:
        return Fields(*self.ints)

    @property
    def cache(self) -> Cache:
        return self.cache_of(self.lengths)

    def cache_of(self, lengths: jax.Array) -> Cache:
        """The cache of these rows, given ``fields.length``."""
        return Cache(self.layers, lengths, self.table, self.parts)

    @property
    def report(self) -> Report:
        """Return the arrays themselves, to be read before the rows are donated."""
        return Report(self.ints, self.written)

    def copied_report(self) -> Report:
        """Copies of the arrays, for programs to which the rows are donated."""
        return Report(jnp.copy(self.ints), jnp.copy(self.written))

    def ended(self, rows: np.ndarray) -> Rows:
        """End the rows that are true in ``rows[B]``."""
        return dataclasses.replace(self, ints=_ended(self.ints, rows))

    # The parts of ``ints`` and ``written``, for callers of ``jl.generate``

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
