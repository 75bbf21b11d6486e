"""Where the tokens of a row lie in a pool of pages: a block table, for the Mosaic kernels.

A step's tokens (16 or 32, aligned) lie in one page.  So one shift added to a token gives its place
in the pool.  Everything else is as in a cache of rows with one row, the pool.  The shift needs an
entry of the table, which kernels load one step before the copy that uses it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels import ptx as p
from pallas_kernels.dispatch import Reason
from pallas_kernels.fixed_sums import planned_capacity, planned_rows
from pallas_kernels.operands import HasShape
from pallas_kernels.qtensor import QTensor

STEP = 32  # the longest of a kernel's steps, tokens


class Paging(NamedTuple):
    """``pool`` pages of ``page`` tokens; ``entries`` of a row's table."""

    pool: int
    page: int
    entries: int

    @classmethod
    def of(cls, k: HasShape, table: jax.Array | None) -> Paging | None:
        return None if table is None else cls(*k.shape[:2], table.shape[1])

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        return self.entries * self.page


class BlockTable:
    """A row's block table; everything is emitted while a kernel is traced."""

    def __init__(self, ref, row, paging: Paging):
        self.paging = paging
        self.at = p.offset(p.address(ref), row, 4 * paging.entries)

    def entry(self, token):
        """The table's entry for the page of ``token``; of any number, an entry of this row."""
        index = p.minimum(token // self.paging.page, self.paging.entries - 1)
        (entry,) = p.load_global(p.offset(self.at, index, 4), 1)
        return entry

    def shift(self, token, entry):
        """Return the shift from a token to its place in the pool, for all tokens of its page.

        entry: the table's entry of that page.  Any value is safe: it is clamped to the pool.
        """
        page = token // self.paging.page
        entry = p.minimum(entry, self.paging.pool - 1)
        return (entry - page) * self.paging.page

    def holds(self, entry):
        """Is the entry a page of the pool?"""
        return entry < self.paging.pool


def as_rows(
    k: jax.Array | QTensor, table: jax.Array | None
) -> jax.ShapeDtypeStruct | QTensor | Reason:
    """The shapes of the rows by which kernels are planned: those that pages stand for."""
    if table is not None and k.shape[1] % STEP:
        return Reason(f"k has pages of {k.shape[1]} tokens; the kernel takes multiples of {STEP}")
    batch, entries = (k.shape[0], 1) if table is None else table.shape
    rows = planned_rows(batch), planned_capacity(entries * k.shape[1])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*rows, *x.shape[2:]), x.dtype), k)
