"""Shared memory of the decode kernel: a team's ring of keys and values, and its scales.

A step of a team is 8 runs of neighbouring tokens, one run for each row of an mma's 8 x 8 block.  So
most copies are one run of memory: 2 KB of int4 with 8 heads of 128.  The team's warps share out the
runs, which lie 32 bytes apart in the banks; with ``Ring.order`` no read has a conflict.

    slot   run 0 | pad | run 1 | pad | ...     token (run, i) at order(run) * stride + i * token
    full   8 arrivals, a run each, and the runs' bytes          empty   one arrival per warp

Scales are read a step ahead into registers, a lane per token.  They are put into shared memory as
the float32 numbers that the products take.  Every warp has its own, so only its lanes wait.

Copies: ``fill``, by the warps of a team, a lane a run.  Waits: ``wait`` on ``full`` by every warp
that reads; ``refill`` on ``empty`` by every warp that copies, until all of the team have read.

``WarpRing`` serves GPUs without a copy engine (before Hopper).  A warp copies the tokens of its own
kv head by ``cp.async``, 16 bytes a lane. It waits only for its own groups of copies, so no two
warps wait for each other. A group is the keys or the values of a step. Groups are closed in the
order in which the steps wait for them, so the number of younger ones is known. Every fill closes a
group, also one that copies nothing.

Its tokens lie as a team's of one head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pallas_kernels import ptx as p
from pallas_kernels.attention.codes import Codes
from pallas_kernels.attention.pages import BlockTable
from pallas_kernels.ptx import Value
from pallas_kernels.rows.fused_parts import floats

RUNS = 8
PAD = 32  # bytes between two runs in shared memory


def ring_bytes(plan, heads: int, codes: Codes) -> int:
    """Shared memory of a team: keys and values, every step of the ring."""
    return 2 * plan.depth * RUNS * (2 * plan.tiles * heads * codes.row_bytes + PAD)


def scale_bytes(plan, codes: Codes) -> int:
    """Shared memory of a warp: scales of keys and values of one step."""
    return 2 * RUNS * 2 * plan.tiles * 4 * codes.staged if codes.quantized else 0


class RingPlace(NamedTuple):
    """Where a warp and its ring are.

    heads: kv heads of the team, of the cache's ``n_kv``.  member: this warp's number among the
    ``members`` of the team.  ring, barriers: addresses in shared memory.
    bases: addresses in device memory of the row's first token of keys and of values, at the team's
    first head.  last: the last token that may be read; past it that token is copied once more.
    apart: tokens from one step of the team to its next.  pages: where the tokens are scattered over
    pages, and bases are the pool's; a copy then takes the entry for its step.
    """

    heads: int
    n_kv: int
    members: int
    member: Value
    lane: Value
    ring: Value
    barriers: Value
    bases: Sequence[Value]
    last: Value
    apart: Value | int
    pages: BlockTable | None


class Ring:
    """``depth`` steps of keys and as many of values."""

    def __init__(self, plan, codes: Codes, place: RingPlace):
        self.depth, self.heads, self.n_kv, self.members = plan.depth, *place[:3]
        self.member, self.lane, self.ring, self.barriers = place[3:7]
        self.bases, self.last, self.apart, self.pages = place[7:]
        self.per_run = 2 * plan.tiles
        self.token_bytes = self.heads * codes.row_bytes  # of the team, in shared memory
        self.from_bytes = self.n_kv * codes.row_bytes  # in the cache
        self.stride = self.per_run * self.token_bytes + PAD
        self.slot_bytes = RUNS * self.stride

    @staticmethod
    def order(row):
        """The run of an mma's row: neighbours, and every second row, lie in different banks."""
        even = row >> 1
        odd = (even ^ 2) + 4
        return p.where(row & 1 < 1, even, odd)

    def initialise(self, teams: int, first) -> None:
        """All barriers of all teams, by one thread; first: the address of the first."""
        for i in range(2 * self.depth * teams):
            p.barrier_init(first + 16 * i, RUNS)
            p.barrier_init(first + (16 * i + 8), self.members)
        p.barriers_ready()

    def start(self, condition, fills: Sequence[Callable[[], None]]) -> None:
        """Make the first fills of a slot where the condition holds (None: always)."""

        def body() -> None:
            for fill in fills:
                fill()

        body() if condition is None else p.when(condition, body)

    def barrier(self, slot, values: bool, empty: bool):
        at = (16 * self.depth if values else 0) + 8 * empty
        return self.barriers + slot * 16 + at

    def fill(self, token0, slot, values: bool, entry) -> None:
        """Copy this warp's runs of the step at ``token0``, a lane a run."""
        full = self.barrier(slot, values, False)
        mine = self.lane < RUNS
        if self.members > 1:
            turn = self.lane % self.members
            mine = mine & p.equal(turn, self.member)

        p.when(mine, lambda: self.fill_run(token0, slot, values, entry, full))

    def fill_run(self, token0, slot, values: bool, entry, full) -> None:
        """Copy the lane's run, as one piece where its tokens are neighbours in memory."""
        to = (
            self.ring
            + slot * self.slot_bytes
            + self.lane * self.stride
            + (self.depth * self.slot_bytes if values else 0)
        )
        first = token0 + self.lane * self.per_run
        size = self.per_run * self.token_bytes
        p.barrier_expect(full, size)
        shift = self.pages.shift(token0, entry) if self.pages else None
        one_by_one = functools.partial(self.copy_tokens, first, shift, values, to, full)
        if self.heads < self.n_kv:
            one_by_one()
            return
        whole = p.below(first + (self.per_run - 2), self.last)
        p.when(whole, lambda: p.copy_bulk(to, self.source(first, shift, values), size, full))
        p.when(p.at_most(self.last, first + (self.per_run - 2)), one_by_one)

    def source(self, token, shift, values: bool):
        """The address of a token's keys or values in the cache."""
        token = token + shift if self.pages else token
        return p.offset_rows(self.bases[values], token, self.from_bytes)

    def copy_tokens(self, first, shift, values: bool, to, full) -> None:
        """Copy a run token by token; past the last token that one is copied once more."""

        def copy(i, _):
            source = self.source(p.smaller(first + i, self.last), shift, values)
            at = to + i * self.token_bytes
            p.copy_bulk(at, source, self.token_bytes, full)
            return []

        p.loop(0, self.per_run, 1, [], copy)

    def neighbour(self, slot, parity, step: int):
        """The slot and the parity of the next (1) or the last (-1) step."""
        if self.depth == 1:
            return slot, parity ^ 1
        edge, over = (self.depth - 1, 0) if step > 0 else (0, self.depth - 1)
        wraps = p.equal(slot, edge)
        return (p.where(wraps, p.ci(over), slot + step), p.where(wraps, parity ^ 1, parity))

    def wait(self, slot, parity, values: bool) -> None:
        p.barrier_wait(self.barrier(slot, values, False), parity)

    def release(self, slot, values: bool) -> None:
        """This warp has read the slot."""
        p.warp_barrier()
        empty = self.barrier(slot, values, True)
        p.when(self.lane < 1, lambda: p.barrier_arrive(empty))

    def refill(self, token0, slot, parity, values: bool, entry) -> None:
        """The step that follows ``depth`` steps after the one at ``token0``, into its slot."""
        token = token0 + self.depth * self.apart

        def go():
            p.barrier_wait(self.barrier(slot, values, True), parity)
            self.fill(token, slot, values, entry)

        p.when(p.at_most(token, self.last), go)

    def refill_if(self, condition, token0, slot, parity, values: bool, entry) -> None:
        """``refill`` where the condition holds."""
        p.when(condition, lambda: self.refill(token0, slot, parity, values, entry))


class TokenWords:
    """The words of a step's tokens that a lane of a warp multiplies, out of the ring.

    own: the warp's kv head within the team; g, quad: the lane's place (``attention.tile``).
    """

    def __init__(self, ring: Ring, codes: Codes, own, g, quad):
        self.codes, self.token_bytes, self.slot_bytes = codes, ring.token_bytes, ring.slot_bytes
        at = ring.ring + own * codes.row_bytes
        self.k_at = at + Ring.order(g) * ring.stride + quad * codes.k_chunk
        at = at + g * codes.v_chunk + ring.depth * ring.slot_bytes
        self.v_at = [at + Ring.order(quad * 2 + i) * ring.stride for i in range(2)]

    def keys(self, slot, tile: int) -> list[list]:
        """The words of the tile's rows g and g + 8."""
        codes, at = self.codes, self.k_at + slot * self.slot_bytes
        return [
            [
                w
                for j in range(codes.k_chunks)
                for w in p.load_shared(
                    at,
                    codes.k_chunk // 4,
                    (2 * tile + half) * self.token_bytes + j * 4 * codes.k_chunk,
                )
            ]
            for half in range(2)
        ]

    def values(self, slot, tile: int) -> list[list]:
        """The words of the tile's rows 2 quad, 2 quad + 1, + 8 and + 9."""
        codes, at = self.codes, slot * self.slot_bytes
        return [
            [
                w
                for j in range(codes.v_chunks)
                for w in p.load_shared(
                    self.v_at[t % 2] + at,
                    codes.v_chunk // 4,
                    (2 * tile + t // 2) * self.token_bytes + j * 8 * codes.v_chunk,
                )
            ]
            for t in range(4)
        ]


class Scales:
    """A warp's scales, and zero points, of a step: ``load`` them, ``store`` them later, ``read``.

    keys, values: addresses of [scale | zero], each of the row's first token at the warp's head.
    adjust: (scale, zero or None, values?) -> the float32 numbers to be kept, as many.
    pages: as the ring has them.
    """

    def __init__(
        self, plan, codes: Codes, *, n_kv, lane, at, sources, last, pages, adjust: Callable
    ):
        self.codes, self.lane, self.at, self.sources = codes, lane, at, sources
        self.last, self.pages, self.adjust = last, pages, adjust
        self.per_run = 2 * plan.tiles
        self.per_step = RUNS * self.per_run
        self.from_bytes = n_kv * codes.groups * codes.scale_size
        self.token_bytes = 4 * codes.staged
        self.half = self.per_step * self.token_bytes  # keys, then values

    def _rounds(self):
        """(token of the step, where it is kept) of this lane, in turn: [i in its run][run]."""
        for first in range(0, self.per_step, 32):
            token = self.lane + first
            if self.per_step < 32:  # the upper lanes repeat the lower
                token = token & (self.per_step - 1)
            shift = self.per_run.bit_length() - 1
            place = (token & (self.per_run - 1)) * RUNS + (token >> shift)
            yield token, self.at + place * self.token_bytes

    def load(self, token0, entry) -> list:
        """The words of the step at ``token0``."""
        loaded = []
        size = self.codes.groups * self.codes.scale_size
        shift = self.pages.shift(p.smaller(token0, self.last), entry) if self.pages else 0
        for token, _ in self._rounds():
            token = p.smaller(token0 + token, self.last) + shift
            for source in (source for pair in self.sources for source in pair):
                at = p.offset_rows(source, token, self.from_bytes)
                if size == 2:
                    loaded.append(p.load_half(at))
                else:
                    loaded += p.load_global(at, size // 4)
        return loaded

    def store(self, loaded: Sequence) -> None:
        """After every lane has read what was there."""
        codes, rest = self.codes, list(loaded)
        p.warp_barrier()
        for _, to in self._rounds():
            for values in (False, True):
                parts = [self._floats(rest) for _ in self.sources[values]]
                scale, zero = parts if codes.zeros else (parts[0], [None] * codes.groups)
                pairs = [self.adjust(s, z, values) for s, z in zip(scale, zero, strict=True)]
                kept = [x for column in zip(*pairs, strict=True) for x in column]
                p.store_shared(to, kept, self.half * values)
        p.warp_barrier()

    def _floats(self, rest: list) -> list:
        """One leaf of one token, a float per group, taken off the loaded words."""
        groups = self.codes.groups
        if self.codes.scale_size == 4:
            return [p.from_bits(rest.pop(0)) for _ in range(groups)]
        count = max(1, groups // 2)
        words = [rest.pop(0) for _ in range(count)]
        return floats(words, "f16")[:groups]

    def read(self, run, i: int, values: bool) -> list:
        """[scale, zero][group] (without zero points, [scale]) of token i of a run."""
        at = self.at + run * self.token_bytes
        offset = i * RUNS * self.token_bytes + self.half * values
        groups, kept = self.codes.groups, p.load_shared(at, self.codes.staged, offset, "f32")
        return [kept[j : j + groups] for j in range(0, len(kept), groups)]


# --- without a copy engine ------------------------------------------------------------------------


_PIECE = 16  # bytes of one copy


class WarpRing(Ring):
    """``Ring`` of one warp: ``member`` and ``barriers`` are unused."""

    def start(self, condition: p.Value | None, fills: Sequence[Callable[[], None]]) -> None:
        for fill in fills:
            self._group(condition, fill)

    def _group(self, condition: p.Value | None, fill: Callable[[], None]) -> None:
        """Copy where the condition holds (None: always), and close the group in any case."""
        if condition is None:
            fill()
        else:
            p.when(condition, fill)
        p.copies_commit()

    def fill(self, token0: p.Value, slot: p.Value, values: bool, entry: p.Value | None) -> None:
        pieces = self.token_bytes // _PIECE  # of a token
        at_once = 32 // pieces  # tokens
        token = self.lane >> (pieces.bit_length() - 1)
        piece = (self.lane & (pieces - 1)) * _PIECE
        run = token >> (self.per_run.bit_length() - 1)
        to = (
            self.ring
            + slot * self.slot_bytes
            + run * self.stride
            + (token & (self.per_run - 1)) * self.token_bytes
            + piece
            + (self.depth * self.slot_bytes if values else 0)
        )
        shift = self.pages.shift(token0, entry) if self.pages else None
        unit = max(at_once, self.per_run)  # tokens of a turn: whole runs

        def copy(done: p.Value, carry: list[p.Value]) -> list[p.Value]:
            # Unrolled, the turns' addresses take more registers than there are.
            (at,) = carry
            for rest in range(0, unit, at_once):
                here = p.smaller(first + done + rest, self.last)
                source = p.offset(self.source(here, shift, values), piece)
                p.copy_async(at, source, rest * self.token_bytes)
            return [at + unit // self.per_run * self.stride]

        first = token0 + token
        p.loop(0, p.opaque(RUNS * self.per_run), unit, [to], copy)

    def wait(self, slot: p.Value, parity: p.Value, values: bool) -> None:
        del slot, parity, values
        # A step closes two groups.  With one step in the ring the keys of the next come before the
        # values of this one; with more, the values of ``depth - 1`` steps ahead before the keys.
        p.copies_wait(1 if self.depth == 1 else 2 * self.depth - 2)
        p.warp_barrier()

    def release(self, slot: p.Value, values: bool) -> None:
        del slot, values
        p.warp_barrier()

    def refill(
        self, token0: p.Value, slot: p.Value, parity: p.Value, values: bool, entry: p.Value | None
    ) -> None:
        self.refill_if(None, token0, slot, parity, values, entry)

    def refill_if(
        self,
        condition: p.Value | None,
        token0: p.Value,
        slot: p.Value,
        parity: p.Value,
        values: bool,
        entry: p.Value | None,
    ) -> None:
        del parity
        token = token0 + self.depth * self.apart
        inside = p.at_most(token, self.last)
        if condition is not None:
            inside = condition & inside
        self._group(inside, lambda: self.fill(token, slot, values, entry))
