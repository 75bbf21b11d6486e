"""How decode attention on Hopper cuts its work: among warps, teams, blocks and clusters."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax

from pallas_kernels.attention.codes import Codes
from pallas_kernels.attention.gather import Gather
from pallas_kernels.attention.ring import ring_bytes, scale_bytes
from pallas_kernels.attention.tile import HEADS, TILE
from pallas_kernels.device import block_bytes, gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.qtensor import QTensor

AttentionCall = tuple[
    jax.Array, jax.Array | jax.ShapeDtypeStruct | QTensor, int
]  # q, the keys' rows, query heads
CLUSTER = 8  # the largest cluster that any Hopper GPU takes
# A row that would be cut into no more chunks than this is one cluster's instead: about as many SMs
# then work on a long row beside short ones.  Not of int4, which wants long runs of memory.  With a
# row for every SM twice as many.
FEW_CHUNKS = 4
# Tokens that a row may have from which on the longest rows begin first.  The order is one more load
# before a block's first copies: 512 rows of 128 to 256 tokens took 67.2 us for 65.8.
LONGEST_FIRST = 1024
# Tokens times kv heads of a cache from which on chunks are faster with a ring for each warp, by the
# bits of a number: 64 x 8192 x 8, bfloat16 514.6 us (a team's ring 599.9), int4 170.0 (225.6), on
# an H200 with jax 0.12.  With 0.11.2, whose assembler gives the team's code other registers, the
# team's took 536 and 155.
LONG_BY_WARP = {16: 64 * 8192 * 8, 4: 64 * 8192 * 8}
_ASSEMBLED_BY_NVJITLINK = jax.__version_info__ >= (0, 12)
FULS = {64: 3, 128: 3, 256: 1}  # of a warp with 255 registers a thread, by a head's features


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """How the work is cut.

    tiles: mma tiles of tokens per step.  depth: steps of keys and of values in the ring.  warps: of
    a block.  heads: kv heads of a team.  cluster: blocks that share a row's steps, and sum their
    parts; 0: chunks of ``chunk`` tokens to a team, and a second kernel that sums.  fuls: times
    eight query rows of a kv head that a warp takes.  by_warp: every warp has a ring of its own and
    copies for itself (``warp_ring``); a team then has one kv head.  by_length: the longest rows
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


def plan(call: AttentionCall) -> AttentionPlan | Reason:
    """Return the fastest measured division of (q, k, query heads) that fits shared memory."""
    if not gpu().arch.bulk_copies:
        return divided(call, by_warp=True)
    found = divided(call, by_warp=False)
    q, k, _ = call
    batch, capacity, n_kv, _ = k.shape
    is_long = batch * capacity * n_kv >= LONG_BY_WARP.get(Codes.of(q, k).bits, math.inf)
    if isinstance(found, Reason):
        return found
    is_measured = gpu().arch.wgmma and _ASSEMBLED_BY_NVJITLINK
    if is_measured and is_long and q.ndim == 3 and not found.cluster:
        return divided(call, by_warp=True)
    return found


def divided(call: AttentionCall, *, by_warp: bool) -> AttentionPlan | Reason:
    """Return the division with a ring for each warp, or for each team, or why none fits.

    Chunks are as long as possible under two conditions: every SM has a team, and rows of unequal
    lengths can share the SMs.  A row then has 2^k chunks, which 2^i rows divide evenly.
    """
    q, k, n = call
    batch, capacity, n_kv, _ = k.shape
    codes, group = Codes.of(q, k), n // n_kv
    sms = 1 << gpu().sms.bit_length() - 1  # a power of two of blocks fills the GPU
    # Two blocks of 8 warps fit where a thread needs 128 registers by itself; 16 warps force that.
    tiles, depth, warps = {16: (1, 1, 8), 8: (2, 1, 16), 4: (2, 2, 16)}[codes.bits]
    # Elsewhere than on Hopper ptxas gives the code of small codes more registers.
    tight = codes.bits == 4 and not gpu().arch.wgmma
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
    longest = {16: max(512, min(1024, capacity // 128)), 8: 512, 4: 1024}[codes.bits]
    needed = 1 << (-(-capacity // longest) - 1).bit_length()
    plan = None
    is_full = batch * (n_kv // widest) >= gpu().sms  # an SM has a row at least
    if needed <= FEW_CHUNKS * (2 if is_full else 1) and codes.bits > 4:
        at_once = sms * (16 // warps)  # blocks
        heads = max(
            (d for d in range(1, widest + 1) if n_kv % d == 0 and batch * n_kv >= d * at_once),
            default=1,
        )
        cluster = 1
        while cluster < CLUSTER and 2 * cluster * batch * (n_kv // heads) <= sms:
            cluster *= 2
        if cluster == 1 or gpu().arch.clusters:
            # Rows that wait for an SM: those that begin last should be short.
            waits = batch * (n_kv // heads) > gpu().sms * (16 // warps)
            by_length = waits and capacity >= LONGEST_FIRST
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
