"""Which query rows meet a kv head of a row of the cache: G heads of each of its query tokens.

A kv head's are numbered ``token * G + head``; q and out are ``[B, T, N, H]``, lengths ``[B, T]``.
Everything is emitted while a kernel is traced.
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith


class QueryRows(NamedTuple):
    """``tokens`` (up to 16) a row, of ``n`` heads on the cache's ``n_kv``; ``capacity`` keys."""

    tokens: int
    n: int
    n_kv: int
    capacity: int

    @property
    def group(self) -> int:
        return self.n // self.n_kv

    @property
    def width(self) -> int:
        """Query rows of a kv head."""
        return self.tokens * self.group

    def token(self, j):
        return j // self.group

    def line(self, row, head, j):
        """The line of ``[B, T, N]`` that is number j of a kv head."""
        if self.tokens == 1:
            return row * self.n + head * self.group + j
        token = row * self.tokens + self.token(j)
        own = j % self.group
        return token * self.n + head * self.group + own

    def seen(self, lengths_ref, row, token=None):
        """How many keys a token sees."""
        at = row if token is None else row * self.tokens + token
        (length,) = p.load_global(p.offset(p.address(lengths_ref), at, 4), 1)
        return p.larger(p.smaller(length, p.ci(self.capacity)), p.ci(0))

    def span(self, lengths_ref, row, lane):
        """(fewest, most) keys that a token of the row sees, of the tokens that see any."""
        if self.tokens == 1:
            most = self.seen(lengths_ref, row)
            return most, most
        most = self.seen(lengths_ref, row, p.minimum(lane & 15, self.tokens - 1))
        fewest = arith.select(most < 1, p.ci(self.capacity), most)
        for lanes in (1, 2, 4, 8):
            most = p.larger(most, p.shuffle_xor(most, lanes))
            fewest = p.smaller(fewest, p.shuffle_xor(fewest, lanes))
        return fewest, most
