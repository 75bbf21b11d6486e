"""The program of a warp of the decode attention kernel: see ``kernel`` for its timeline.

``DecodeKernel.run`` is the whole program.  Everything is emitted while the kernel is traced, in
the order of the calls.

The phases are ``open_ring``, ``attend`` (``fill_ring``, then ``step`` by ``step``, then
``write_parts``) and the cluster's ``Gathering.finish``.  ``kernel`` says who copies and who waits.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import jax

from pallas_kernels import ptx as p
from pallas_kernels.attention import tile as mma_tile
from pallas_kernels.attention.gather import write_heads
from pallas_kernels.attention.ring import (
    Ring,
    RingPlace,
    Scales,
    TokenWords,
    WarpRing,
    ring_bytes,
    scale_bytes,
)
from pallas_kernels.attention.team_share import DecodeFacts, TeamPlace, TeamShare
from pallas_kernels.attention.tile import HEADS, LEAST, NEG_INF


class _Sums(NamedTuple):
    """A warp's sums for eight query rows: two of them are a lane's."""

    top: list  # maximum of the scores, base 2
    total: list  # of the weights
    zeros: list  # of the weights times the values' zero points, [group][row]
    out: list  # of the weights times the values


class DecodeKernel:
    """The program of one warp.

    gmem: q; k and v, each [codes, scales, zero points] or the start of it; lengths; table or None;
    out; and stats, None where a cluster sums the parts.
    """

    def __init__(self, gmem, smem, facts: DecodeFacts):
        self.gmem, self.smem, self.plan, self.codes = gmem, smem, facts.plan, facts.codes
        self.rows, self.head_dim = facts.rows, facts.head_dim
        self.window, self.scale, self.kind = facts.window, facts.scale, facts.kind
        self.n_kv, self.width = self.rows.n_kv, self.rows.width
        self.capacity = self.rows.capacity
        self.share = TeamShare(gmem, smem, facts)

    def run(self) -> None:
        here = self.share.here
        self.open_ring()
        some = self.share.busy & p.below(self.share.begin, self.share.end)
        p.when(some, self.attend)
        if self.plan.cluster:
            first = here.own * self.width
            mine = [first + i for i in range(self.width)]
            idle = self.share.busy & ~some
            p.when(idle, lambda: self.share.gathering.empty(here.team, mine))
            lines = write_heads(self.gmem.out, self.line, here.lane, self.kind, self.head_dim)
            self.share.gathering.finish(lines, self.gmem.sinks, self.query_head)

    # --- the ring ---

    def open_ring(self) -> None:
        plan, codes, here = self.plan, self.codes, self.share.here
        self.order = Ring.order(here.g)
        barriers = p.shared_address(self.smem.barriers)
        self.last = self.share.end - 1
        self.entries = [None] * (plan.depth + 1)  # of the steps that the ring takes first
        if self.share.pages:
            # The first step's is asked for before the row's length is known, but for a window's.
            later = [self.share.begin + (i + 1) * self.share.apart for i in range(plan.depth)]
            self.entries = [self.share.pages.entry(self.share.begin), *map(self.entry_of, later)]
        ring_size = ring_bytes(plan, plan.heads, codes)
        owner = here.warp if plan.by_warp else here.team
        place = RingPlace(
            heads=plan.heads,
            n_kv=self.n_kv,
            members=self.share.members,
            member=here.member,
            lane=here.lane,
            ring=p.shared_address(self.smem.ring) + owner * ring_size,
            barriers=barriers + here.team * (2 * plan.depth * 16),
            bases=[
                self.row_of(refs[0], self.share.first_head, codes.row_bytes)
                for refs in (self.gmem.k, self.gmem.v)
            ],
            last=self.last,
            apart=self.share.apart,
            pages=self.share.pages,
        )
        self.ring = (WarpRing if plan.by_warp else Ring)(plan, codes, place)
        self.tokens = TokenWords(self.ring, codes, here.own, here.g, here.quad)
        self.k_token = self.order * self.ring.per_run
        if plan.by_warp:
            return
        p.when(here.thread < 1, lambda: self.ring.initialise(self.share.teams, barriers))
        p.barrier()

    def entry_of(self, step):
        """The table's entry for the step at a token, past the end for the row's last page."""
        return self.share.pages.entry(p.smaller(step, self.last))

    def row_of(self, ref, first, size: int):
        """The address of a row's (a pool's) first token at a head, ``size`` bytes each."""
        base = p.address(ref)
        if not self.share.pages:
            base = p.offset(base, self.share.here.row, self.capacity * self.n_kv * size)
        return p.offset(base, first, size)

    def fill_ring(self) -> None:
        for i in range(self.plan.depth):
            token0 = self.share.begin + i * self.share.apart
            inside = p.below(token0, self.share.end) if i else None
            fills = (functools.partial(self.fill_slot, token0, i, v) for v in (False, True))
            self.ring.start(inside, list(fills))

    def fill_slot(self, token0, i: int, values: bool) -> None:
        self.ring.fill(token0, p.ci(i), values, self.entries[i])

    def open_scales(self) -> Scales:
        at = p.shared_address(self.smem.scales)
        return Scales(
            self.plan,
            self.codes,
            n_kv=self.n_kv,
            lane=self.share.here.lane,
            at=at + self.share.here.warp * scale_bytes(self.plan, self.codes),
            last=self.last,
            adjust=lambda *numbers: self.queries.adjust(*numbers),
            pages=self.share.pages,
            sources=[self.scales_of(refs) for refs in (self.gmem.k, self.gmem.v)],
        )

    def scales_of(self, refs) -> list:
        size = self.codes.groups * self.codes.scale_size
        return [self.row_of(ref, self.share.head, size) for ref in refs[1:]]

    # --- the query rows ---

    def load_queries(self, ful: int):
        """The words of eight query rows; those past the last are copies of it."""
        here, fuls = self.share.here, self.plan.fuls
        number = here.sub * (fuls * HEADS) + here.g + ful * HEADS
        number = p.smaller(number, self.width - 1)
        first = p.address(self.gmem.q)
        at = p.offset(first, self.rows.line(here.row, self.share.head, number), 2 * self.head_dim)
        at = p.offset(at, here.quad * (2 * mma_tile.features_of(self.codes)))
        return mma_tile.load_heads(at, self.codes)

    def number_of(self, here: TeamPlace, ful: int, c: int):
        """The number of one of the lane's two query rows, among the kv head's."""
        first = here.sub * (self.plan.fuls * HEADS)
        return first + here.quad * 2 + (ful * HEADS + c)

    def span_of(self, ful: int, c: int):
        """(first, past the last) key that one of the lane's query rows sees in the share."""
        if self.rows.tokens == 1:
            return self.share.seen, self.share.end
        number = p.smaller(self.number_of(self.share.here, ful, c), self.width - 1)
        token = self.rows.token(number)
        own = self.rows.seen(self.gmem.lengths, self.share.here.row, token)
        first = None if self.window is None else own - self.window
        return first, p.smaller(own, self.share.end)

    def is_seen(self, token, ful: int, c: int):
        first, end = self.spans[ful][c]
        inside = p.below(token, end)
        if self.window is not None:
            inside = inside & p.at_most(first, token)
        return inside

    # --- scores, weights, outputs ---

    def attend(self) -> None:
        """All steps of the share, and its parts written."""
        plan, codes, fuls = self.plan, self.codes, range(self.plan.fuls)
        self.fill_ring()
        if codes.quantized:
            self.scales = self.open_scales()
            coming = self.scales.load(self.share.begin, self.entries[0])
        loaded = [self.load_queries(ful) for ful in fuls]
        self.spans = [[self.span_of(ful, c) for c in range(2)] for ful in fuls]
        self.queries = mma_tile.Queries(loaded, codes, self.scale, self.kind)
        if codes.quantized:
            self.scales.store(coming)
        zero = p.cf(0.0)
        zeros = 2 * codes.groups if codes.zeros else 0
        start = _Sums([p.cf(LEAST)] * 2, [zero] * 2, [zero] * zeros, [zero] * (self.head_dim // 4))
        flat, self.tree = jax.tree.flatten([start] * plan.fuls)
        first = [*(self.entries[1:] if self.share.pages else []), p.ci(0), p.ci(0)]
        last = p.loop(self.share.begin, self.share.end, self.share.apart, first + flat, self.step)
        *_, sums = self.parts_of(last)
        if not self.share.pages:
            return self.write_parts(sums, self.share.here, self.share.head, self.share.chunk)
        # Carried through the loop, this takes a thread past the 128 registers with which two blocks
        # share an SM.
        again = self.share.place(volatile=True)
        first_head, chunk, _ = self.share.unit_of(again.in_row, again.team)
        return self.write_parts(sums, again, first_head + again.own, chunk)

    def parts_of(self, carry):
        """(entries for the ``depth`` steps to come, slot, parity, ``_Sums`` of each ful)."""
        ahead = self.entries
        if self.share.pages:
            ahead, carry = carry[: self.plan.depth], carry[self.plan.depth :]
        return ahead, *carry[:2], jax.tree.unflatten(self.tree, carry[2:])

    def step(self, token0, carry):
        """wait K | scores | release K | weights | refill | wait V | outputs | release V | refill"""
        plan, ring = self.plan, self.ring
        ahead, slot, parity, sums = self.parts_of(carry)
        later = []
        if self.share.pages:
            later = [self.entry_of(token0 + (plan.depth + 1) * self.share.apart)]
        if self.codes.quantized:
            coming = self.scales.load(token0 + self.share.apart, ahead[0])
        ring.wait(slot, parity, False)
        scores = self.scores_of(token0, slot)
        weights, sums = zip(*map(self.weigh, sums, scores), strict=True)
        rights = self.right_operands(weights, sums)
        self.refill_ahead(token0, slot, parity, ahead)
        ring.wait(slot, parity, True)
        self.add_outputs(slot, sums, rights)
        ring.refill(token0, slot, parity, plan.depth == 1, ahead[-1])
        if self.codes.quantized:
            self.scales.store(coming)
        following = ring.neighbour(slot, parity, 1)
        ahead = [*ahead[1:], *later] if self.share.pages else []
        return [*ahead, *following, *jax.tree.leaves(list(sums))]

    def scores_of(self, token0, slot) -> list:
        """[ful][tile]: scores of the step's tokens, -inf where a query row does not see one."""
        fuls, tiles = range(self.plan.fuls), self.plan.tiles
        scores = [[] for _ in fuls]
        for u in range(tiles):
            words = self.tokens.keys(slot, u)
            if u == tiles - 1:
                self.ring.release(slot, False)
            keys, numbers = mma_tile.key_pairs(words, self.codes), self.numbers_of(u, False)
            for ful in fuls:
                products = self.queries.scores(keys, numbers, ful)
                for i in range(4):
                    token = token0 + self.k_token + (2 * u + i // 2)
                    inside = self.is_seen(token, ful, i % 2)
                    products[i] = p.where(inside, products[i], NEG_INF)
                scores[ful].append(products)
        return scores

    def numbers_of(self, u: int, values: bool):
        """A tile's scales and zero points, or None."""
        if not self.codes.quantized:
            return None
        return [self.scales.read(self.order, 2 * u + half, values) for half in range(2)]

    def weigh(self, sums: _Sums, scores):
        """The weights of the step's tiles, and the sums up to it, faded to the new maximum."""
        top, fade = mma_tile.maxima(scores, sums.top)
        weights = mma_tile.weights_of(scores, top)
        total = [
            functools.reduce(
                operator.add, [w[i] for w in weights for i in (c, c + 2)], sums.total[c] * fade[c]
            )
            for c in range(2)
        ]
        out = [x * fade[i % 2] for i, x in enumerate(sums.out)]
        zeros = [x * fade[i % 2] for i, x in enumerate(sums.zeros)]
        return weights, _Sums(top, total, zeros, out)

    def right_operands(self, weights, sums) -> list:
        """[tile][ful]: weights as the mma's operand; the sums' zeros are added to."""
        rights = []
        for u in range(self.plan.tiles):
            numbers = self.numbers_of(u, True)
            rights.append(
                [
                    mma_tile.right_operand(weights[ful][u], numbers, sums[ful].zeros, self.codes)
                    for ful in range(self.plan.fuls)
                ]
            )
        return rights

    def refill_ahead(self, token0, slot, parity, ahead) -> None:
        """Refill the values of the step before, with a ring of one step the keys of this one."""
        ring = self.ring
        if self.plan.depth == 1:
            return ring.refill(token0, slot, parity, False, ahead[-1])
        before, emptied = token0 - self.share.apart, ring.neighbour(slot, parity, -1)
        follows = p.at_most(self.share.begin, before)
        return ring.refill_if(follows, before, *emptied, True, ahead[-2])

    def add_outputs(self, slot, sums, rights) -> None:
        tiles = self.plan.tiles
        for u in range(tiles):
            values = self.tokens.values(slot, u)
            if u == tiles - 1:
                self.ring.release(slot, True)
            mma_tile.add_values([x.out for x in sums], values, rights[u], self.codes)

    # --- parts -> shared memory of the cluster, or device memory ---

    def write_parts(self, sums, here: TeamPlace, head, chunk) -> None:
        for ful, own in enumerate(sums):
            for c in range(2):
                whole, *zeros = [mma_tile.over_tokens(x) for x in (own.total[c], *own.zeros[c::2])]
                number = self.number_of(here, ful, c)
                outputs = functools.partial(mma_tile.head_outputs, own.out, zeros, c, self.codes)
                stats = [own.top[c], whole]
                if self.plan.cluster:
                    write = functools.partial(self.share_part, here, number, stats, outputs)
                else:
                    place = here, head, chunk
                    write = functools.partial(self.store_part, place, number, stats, outputs)
                p.when(number < self.width, write)

    def share_part(self, here: TeamPlace, number, stats, outputs) -> None:
        """Leave a query row's part where the cluster gathers them."""
        run = mma_tile.run_of(self.codes)
        own_head = here.own * self.width + number
        at, to_stats = self.share.gathering.part(here.team, own_head)
        at = at + here.g * (4 * run)
        p.when(here.g < 1, lambda: p.store_shared(to_stats, stats))
        for first, values in outputs():
            p.store_shared(at, values, 4 * first)

    def store_part(self, place, number, stats, outputs) -> None:
        """Write a query row's part for the kernel that merges chunks."""
        here, head, chunk = place
        run = mma_tile.run_of(self.codes)
        chunk = here.row * -(-self.capacity // self.plan.chunk) + chunk
        line = self.rows.line(chunk, head, number)
        base = p.offset(p.address(self.gmem.out), line, 4 * self.head_dim)
        base = p.offset(base, here.g, 4 * run)
        to_stats = p.offset(p.address(self.gmem.stats), line, 8)
        p.when(here.g < 1, lambda: p.store_global(to_stats, stats))
        for first, values in outputs():
            p.store_global(base, values, 4 * first)

    def line(self, number):
        """The line of the result of one of the team's query rows."""
        row, rows = self.share.here.row, self.rows
        if rows.tokens == 1:
            return rows.line(row, self.share.first_head, number)
        head = self.share.first_head + number // self.width
        return rows.line(row, head, number % self.width)

    def query_head(self, number):
        """Which of the model's query heads one of the team's query rows is of."""
        group = self.rows.group
        head = self.share.first_head + number // self.width
        own = number % self.width % group
        return head * group + own
