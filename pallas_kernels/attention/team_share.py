"""Which steps of a row a warp of the decode attention kernel computes: see ``kernel``.

Short rows: the teams of a block, or of a cluster of blocks, take a row's steps in turn.  Long rows:
a team takes a chunk of tokens.  Everything is emitted while the kernel is traced.

Copies: lanes load the row's number and its lengths.  Waits: for the kernel before, for no barrier.
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels import ptx as p
from pallas_kernels.attention.codes import Codes
from pallas_kernels.attention.pages import BlockTable, Paging
from pallas_kernels.attention.plan import AttentionPlan, blocks_of, gather_of, team_of, units_of
from pallas_kernels.attention.tile import TILE
from pallas_kernels.ptx import Value


class QueryRows(NamedTuple):
    """Which query rows meet a kv head of a row of the cache: G heads of each of its query tokens.

    A kv head's are numbered ``token * G + head``; q and out are ``[B, T, N, H]``, lengths ``[B,
    T]``.  There are ``tokens`` (up to 16) a row, of ``n`` heads on the cache's ``n_kv``, and
    ``capacity`` keys.
    """

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
        return p.larger(p.smaller(length, self.capacity), 0)

    def span(self, lengths_ref, row, lane):
        """(fewest, most) keys that a token of the row sees, of the tokens that see any."""
        if self.tokens == 1:
            most = self.seen(lengths_ref, row)
            return most, most
        most = self.seen(lengths_ref, row, p.minimum(lane & 15, self.tokens - 1))
        fewest = p.where(most < 1, p.ci(self.capacity), most)
        for lanes in (1, 2, 4, 8):
            most = p.larger(most, p.shuffle_xor(most, lanes))
            fewest = p.smaller(fewest, p.shuffle_xor(fewest, lanes))
        return fewest, most


class DecodeFacts(NamedTuple):
    """The facts of a launch of the kernel."""

    plan: AttentionPlan
    codes: Codes
    rows: QueryRows
    head_dim: int
    paging: Paging | None
    window: int | None
    scale: float
    kind: str  # of the queries' floats


class TeamPlace(NamedTuple):
    """The place of a thread in the grid, and of its warp in the team."""

    thread: Value
    warp: Value
    lane: Value
    g: Value  # lane / 4
    quad: Value  # lane % 4
    row: Value  # of the batch
    in_row: Value  # block of the row
    team: Value  # of the block
    member: Value  # warp of the team
    sub: Value  # which query rows of the kv head, ``fuls`` times eight
    own: Value  # kv head of the team


class TeamShare:
    """The share of a warp's team in a row.

    begin, end, apart: the first token of its first step, the end of the last, tokens from step to
    step.  seen: the first token that any query row sees.  first_head, head: the first kv head of
    the team, and the warp's own.  chunk: of the row, None where a cluster shares it.  pages: the
    row's block table, or None.  busy: whether the team has work.  gathering: of a cluster's parts.
    """

    def __init__(self, gmem, smem, facts: DecodeFacts):
        self.gmem, self.smem = gmem, smem
        self.plan, self.codes, self.rows, _, self.paging, self.window, *_ = facts
        plan, rows = self.plan, self.rows
        self.members, self.teams = team_of(plan, rows.width)
        self.subs = self.members // plan.heads  # warps of a kv head
        self.step_tokens = plan.tiles * TILE
        self.here = self.place()
        self.find()

    def place(self, **anew) -> TeamPlace:
        """anew: how the registers are read, so that a second reading is one."""
        thread, block = p.register("tid.x", **anew), p.register("ctaid.x", **anew)
        blocks = blocks_of(self.plan, self.rows.capacity, self.rows.n_kv, self.rows.width)
        warp, lane = thread >> 5, thread & 31
        g, quad = lane >> 2, lane & 3
        row, in_row = block // blocks, block % blocks
        team, member = warp // self.members, warp % self.members
        sub, own = member % self.subs, member // self.subs
        return TeamPlace(thread, warp, lane, g, quad, row, in_row, team, member, sub, own)

    def unit_of(self, in_row, team):
        """(the team's first kv head, its chunk of the row, its unit of work); a row that a cluster
        shares has no chunks."""
        heads = self.plan.heads
        if self.plan.cluster:
            return in_row // self.plan.cluster * heads, None, None
        unit = in_row * self.teams + team
        first_head = (unit % (self.rows.n_kv // heads)) * heads
        return first_head, unit // (self.rows.n_kv // heads), unit

    def find(self) -> None:
        """Find the tokens of the team: from ``begin`` to ``end``, a step every ``apart``."""
        plan, here = self.plan, self.here
        self.busy = here.team < self.teams
        p.await_kernel()
        if plan.by_length:
            (row,) = p.load_global(p.offset(p.address(self.gmem.order), here.row, 4), 1)
            self.here = here = here._replace(row=row)
        fewest, length = self.rows.span(self.gmem.lengths, here.row, here.lane)
        if plan.cluster:
            begin, late = self.share_steps(length)
        else:
            begin, late = self.share_chunks(length)
        self.head = self.first_head + here.own  # the warp's kv head
        self.pages = BlockTable(self.gmem.table, here.row, self.paging) if self.paging else None
        self.seen = begin
        if self.window is not None:
            self.seen = p.larger(begin, fewest - self.window)
            begin = self.seen & -self.step_tokens
        self.begin = begin + late

    def share_steps(self, length):
        """All teams of the row, in all blocks of the cluster, take steps in turn."""
        plan, here, smem = self.plan, self.here, self.smem
        rank = p.register("cluster_ctarank") if plan.cluster > 1 else p.ci(0)
        gather = gather_of(plan, self.rows.width, self.codes)
        self.gathering = gather.on(smem.parts, smem.shares, smem.arrivals, here.thread, rank)
        self.gathering.start()
        self.first_head, self.chunk, _ = self.unit_of(here.in_row, here.team)
        begin, self.end = p.ci(0), length
        late = (rank * self.teams + here.team) * self.step_tokens
        self.apart = plan.cluster * self.teams * self.step_tokens
        return begin, late

    def share_chunks(self, length):
        """A team takes a chunk of the row."""
        plan, here = self.plan, self.here
        self.first_head, self.chunk, unit = self.unit_of(here.in_row, here.team)
        begin = self.chunk * plan.chunk
        self.end = p.smaller(begin + plan.chunk, length)
        units = units_of(plan, self.rows.capacity, self.rows.n_kv)
        self.busy = self.busy & (unit < units)
        late, self.apart = p.ci(0), self.step_tokens
        return begin, late
