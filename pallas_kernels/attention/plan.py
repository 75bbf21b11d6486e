"""How decode attention on Hopper cuts its work: among warps, teams, blocks and clusters."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from pallas_kernels.attention.codes import Codes
from pallas_kernels.attention.gather import Gather
from pallas_kernels.attention.ring import ring_bytes, scale_bytes
from pallas_kernels.attention.tile import HEADS, TILE
from pallas_kernels.cards.table import Cache
from pallas_kernels.device import block_bytes, gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.qtensor import QTensor

AttentionCall = tuple[
    jax.Array, jax.Array | jax.ShapeDtypeStruct | QTensor, int
]  # q, the keys' rows, query heads
CLUSTER = 8  # the largest cluster that any Hopper GPU takes
FULS = {64: 3, 128: 3, 256: 1}  # of a warp with 255 registers a thread, by a head's features


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """How the work is cut.

    tiles: mma tiles of tokens per step.  depth: steps of keys and of values in the ring.  warps: of
    a block.  heads: kv heads of a team.  cluster: blocks that share a row's steps, and sum their
    parts; 0: chunks of ``chunk`` tokens to a team, and a second kernel that sums.  fuls: times
    eight query rows of a kv head that a warp takes.  by_warp: every warp has a ring of its own and
    copies for itself (``ring.WarpRing``); a team then has one kv head.  by_length: the longest rows
    begin first (``kernel.longest_first``).
    """

    kernel: ClassVar[str] = "decode_attention_mosaic"
    tiles: int
    depth: int
    warps: int
    heads: int
    cluster: int
    chunk: int = 0
    fuls: int = 1
    by_warp: bool = False
    by_length: bool = False

    def representative(self) -> AttentionPlan:
        chunk = self.tiles * TILE if self.chunk else 0
        few = {"heads": min(self.heads, 2), "cluster": min(self.cluster, 2)}
        return dataclasses.replace(self, chunk=chunk, **few)


def plan(call: AttentionCall) -> AttentionPlan | Reason:
    """Return the fastest measured division of (q, k, query heads) that fits shared memory."""
    if not gpu().bulk_copies:
        return divided(call, by_warp=True)
    found = divided(call, by_warp=False)
    q, k, _ = call
    batch, capacity, n_kv, _ = k.shape
    if isinstance(found, Reason):
        return found
    is_long = gpu().wgmma and batch * capacity * n_kv >= _cache_of(Codes.of(q, k).bits).long
    if is_long and q.ndim == 3 and not found.cluster:
        return divided(call, by_warp=True)
    return found


def _cache_of(bits: int) -> Cache:
    """Return the card's numbers of a cache."""
    card = gpu()
    return {16: card.cache16, 8: card.cache8, 4: card.cache4}[bits]


def divided(call: AttentionCall, *, by_warp: bool) -> AttentionPlan | Reason:
    """Return the division with a ring for each warp, or for each team, or why none fits.

    Chunks are as long as possible under two conditions: every SM has a team, and rows of unequal
    lengths can share the SMs.  A row then has 2^k chunks, which 2^i rows divide evenly.
    """
    q, k, n = call
    batch, capacity, n_kv, _ = k.shape
    codes, group, card = Codes.of(q, k), n // n_kv, gpu().attention
    sms = 1 << gpu().sms.bit_length() - 1  # a power of two of blocks fills the GPU
    cache = _cache_of(codes.bits)
    tiles, depth, warps = cache.tiles, cache.depth, cache.warps
    # Elsewhere than on Hopper ptxas gives the code of small codes more registers.
    tight = codes.bits == 4 and not gpu().wgmma
    if by_warp or tight:
        warps = 8
    fuls = 1
    if q.ndim == 4 and group > HEADS:  # several tokens: a block has an SM's registers to itself
        # Few warps to a head, of which 8 make whole teams.
        least = -(-group // (HEADS * (1 if by_warp else max(1, FULS[codes.head_dim] - tight))))
        tiles, warps, fuls = 1, 8, -(-group // (HEADS << (least - 1).bit_length()))
    subs = -(-group // (HEADS * fuls))
    # A team reads neighbouring heads of the same tokens: what it copies per token is one run.
    most = 1 if by_warp else n_kv
    widest = max(d for d in range(1, most + 1) if n_kv % d == 0 and d * subs <= 8)
    longest = max(cache.least_chunk, min(cache.most_chunk, capacity // 128))
    needed = 1 << (-(-capacity // longest) - 1).bit_length()
    plan = None
    is_full = batch * (n_kv // widest) >= gpu().sms  # an SM has a row at least
    # A row of few chunks is one cluster's; with a row for every SM twice as many are few.  int4
    # wants long runs of memory.
    if needed <= card.few_chunks * (2 if is_full else 1) and codes.bits > 4:
        at_once = sms * (16 // warps)  # blocks
        heads = max(
            (d for d in range(1, widest + 1) if n_kv % d == 0 and batch * n_kv >= d * at_once),
            default=1,
        )
        cluster = 1
        while cluster < CLUSTER and 2 * cluster * batch * (n_kv // heads) <= sms:
            cluster *= 2
        if cluster == 1 or gpu().clusters:
            # Rows that wait for an SM: those that begin last should be short.
            waits = batch * (n_kv // heads) > gpu().sms * (16 // warps)
            by_length = waits and capacity >= card.longest_first
            plan = AttentionPlan(
                tiles, depth, warps, heads, cluster, 0, fuls, by_warp, by_length=by_length
            )
    if plan is None:
        if codes.quantized and batch * (n_kv // widest) * capacity < 64 * sms:
            tiles, warps = 1, 8  # so little that one small step is all that a team gets
        splits = max(sms * (warps // (widest * subs)) // (batch * (n_kv // widest)), needed)
        step = tiles * TILE
        chunk = -(-capacity // (splits * step)) * step
        plan = AttentionPlan(tiles, depth, warps, widest, 0, chunk, fuls, by_warp)
    while block_bytes(shared_bytes(plan, group, codes)) > gpu().shared_bytes:
        if plan.depth > 1:
            plan = dataclasses.replace(plan, depth=plan.depth - 1)
        elif plan.warps > 8:
            plan = dataclasses.replace(plan, warps=8)
        elif plan.tiles > 1:
            plan = dataclasses.replace(plan, tiles=plan.tiles // 2)
        elif plan.warps > 4 and plan.heads * subs <= 4:
            plan = dataclasses.replace(plan, warps=4)
        elif plan.heads % 2 == 0:
            plan = dataclasses.replace(plan, heads=plan.heads // 2)
        else:
            return Reason(
                f"{group} query rows of {codes.head_dim} features on a kv head of k need more than "
                "shared memory holds"
            )
    return plan


def team_of(plan: AttentionPlan, group: int) -> tuple[int, int]:
    """(warps of a team, teams of a block)."""
    members = plan.heads * -(-group // (HEADS * plan.fuls))
    return members, plan.warps // members


def units_of(plan: AttentionPlan, capacity: int, n_kv: int) -> int:
    """Return the number of units of work for teams in a row that is cut into chunks."""
    return -(-capacity // plan.chunk) * (n_kv // plan.heads)


def blocks_of(plan: AttentionPlan, capacity: int, n_kv: int, group: int) -> int:
    """Return the number of blocks of a row."""
    if plan.cluster:
        return n_kv // plan.heads * plan.cluster
    return -(-units_of(plan, capacity, n_kv) // team_of(plan, group)[1])


def gather_of(plan: AttentionPlan, group: int, codes: Codes) -> Gather:
    teams = team_of(plan, group)[1]
    return Gather(codes.head_dim, teams, plan.heads * group, plan.cluster, plan.warps, codes.zeros)


def shared_bytes(plan: AttentionPlan, group: int, codes: Codes) -> tuple[int, ...]:
    """Return a block's bytes of shared memory: ring, scales, barriers, and the gather's if any."""
    teams = team_of(plan, group)[1]
    scales = max(16, plan.warps * scale_bytes(plan, codes))
    rings = plan.warps if plan.by_warp else teams
    own = rings * ring_bytes(plan, plan.heads, codes), scales, teams * 2 * plan.depth * 16
    return own + tuple(4 * n for n in gather_of(plan, group, codes).floats) if plan.cluster else own
