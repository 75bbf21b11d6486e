"""``fetch``'s kernel: every thread copies vectors of 16 bytes from pinned host memory.

    out[g] = the part's bytes at addresses[experts[g]], as they lie or in rows        g < G

    all blocks    pieces of 16 KB of all experts of the list, one after the other, round by round
    a thread      four loads of 16 bytes from the host under way, then their stores

A vector of a tile is one unit of 4 rows (of 16 rows, if a unit is a byte). Its parts go to their
rows, where the lanes beside it write the neighbouring units, 32 bytes in all.

Copies: every thread, from the host's memory through registers.  Waits: for the kernel before; no
barrier, as threads share nothing.  Writes: the thread that has loaded a vector; zeros for an index
outside of the table.  An index inside must have an address.

Floor: the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.experts.fetch_layout import FetchedLeaf
from pallas_kernels.launch import launch
from pallas_kernels.ptx import Value

THREADS, LOADS = 256, 4
PIECE = THREADS * LOADS  # vectors of 16 bytes


def fetch(
    addresses: jax.Array,
    experts: jax.Array,
    leaves: Sequence[FetchedLeaf],
    out: Sequence[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """As ``fetch.fetch``; out: the types of the results."""
    count, listed = addresses.shape[0], experts.shape[0]

    def body(gmem, smem) -> None:
        del smem
        table, chosen = p.address(gmem.addresses), p.address(gmem.experts)
        p.await_kernel()
        for leaf, ref in zip(leaves, gmem.out, strict=True):
            _Copy(table, chosen, p.address(ref), count, leaf).run(listed)

    return launch(
        body,
        {"addresses": addresses, "experts": experts},
        {"out": list(out)},
        name="fetch_experts",
        grid=gpu().sms,
        warpgroups=THREADS // 128,
        registers=True,
    )[0]


class _Copy:
    """The program of one thread for one leaf. Everything is emitted while the kernel is traced."""

    def __init__(self, table: Value, chosen: Value, out: Value, count: int, leaf: FetchedLeaf):
        self.table, self.chosen, self.out, self.count, self.leaf = table, chosen, out, count, leaf
        self.vectors = leaf.nbytes // 16
        self.store: Callable[[Value, Value, list[Value]], None] = {
            0: self.store_as_it_is,
            1: self.store_bytes,
            4: self.store_words,
        }[leaf.item]

    def run(self, listed: int) -> None:
        self.pieces = -(-self.vectors // PIECE)
        self.thread = p.register("tid.x")
        block = p.register("ctaid.x")
        p.loop(block, p.ci(listed * self.pieces), p.ci(gpu().sms), [], self.piece)

    def piece(self, index: Value, _: list[Value]) -> list[Value]:
        pieces = p.ci(self.pieces)
        slot, own = index // pieces, index % pieces
        (expert,) = p.load_global(p.offset(self.chosen, slot, 4), 1)
        to = p.offset(self.out, slot, self.leaf.nbytes)
        first = own * PIECE + self.thread
        # The last piece's threads that lie past the end copy the last vector.
        places = [p.minimum(first + THREADS * i, self.vectors - 1) for i in range(LOADS)]
        is_one = expert < self.count

        def copy() -> None:
            source = p.load_address(p.offset(self.table, expert, 8))
            found = [
                p.load_global(p.offset(source, at, 16), 4, self.leaf.offset, cache=p.READ_ONLY)
                for at in places
            ]
            for at, words in zip(places, found, strict=True):
                self.store(to, at, words)

        def clear() -> None:
            for at in places:
                p.store_global(p.offset(to, at, 16), [p.ci(0)] * 4)

        p.when(is_one, copy)
        p.when(~is_one, clear)
        return []

    def store_as_it_is(self, to: Value, at: Value, words: list[Value]) -> None:
        p.store_global(p.offset(to, at, 16), words)

    def place(self, at: Value, per_unit: int) -> tuple[Value, Value]:
        """(the first row, the unit) of vector ``at``, of which a unit has ``per_unit``."""
        per_tile = p.ci(self.leaf.units * per_unit)
        tile, own = at // per_tile, at % per_tile
        part = own & (per_unit - 1)
        row = tile * 16 + part * (16 // per_unit)
        return row, own >> (per_unit.bit_length() - 1)

    def store_words(self, to: Value, at: Value, words: list[Value]) -> None:
        row, unit = self.place(at, 4)
        word = row * self.leaf.units + unit
        base = p.offset(to, word, 4)
        for i, own in enumerate(words):
            own = _in_order(own, self.leaf.flip) if self.leaf.is_nibbles else own
            p.store_global(base, [own], 4 * i * self.leaf.units)

    def store_bytes(self, to: Value, at: Value, words: list[Value]) -> None:
        row, unit = self.place(at, 1)
        base = p.offset(to, row * self.leaf.units + unit)
        for i in range(16):
            byte = words[i // 4] >> (8 * (i % 4))
            p.store_byte(p.offset(base, p.ci(i * self.leaf.units)), byte)


def _in_order(word: Value, flip: int) -> Value:
    """Eight codes, the low halves of the bytes before the high halves, in the order of columns."""

    def gathered(own: Value) -> Value:
        own = own & 0x0F0F0F0F
        own = (own | (own >> 4)) & 0x00FF00FF
        return (own | (own >> 8)) & 0xFFFF

    both = gathered(word) | (gathered(word >> 4) << 16)
    return both ^ flip if flip else both
