"""How decode attention on Hopper cuts its work: tokens into chunks, warps into teams."""

from __future__ import annotations

import dataclasses

from pallas_kernels.attention_words import Words
from pallas_kernels.decode_attention_ring import ring_bytes, scale_bytes

SHARED_BYTES = 226 * 1024
SMS = 128  # blocks that fill the GPU
TILE = 16  # tokens of one mma
HEADS = 8  # query heads of one mma


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is cut: ``chunk`` tokens to a team of warps, ``tiles`` mma tiles of tokens per
    step, ``depth`` steps of keys and of values in the ring, ``warps`` to a block."""

    chunk: int
    tiles: int
    depth: int
    warps: int


def make_plan(batch: int, capacity: int, n_kv: int, group: int, words: Words, **given) -> Plan:
    """What was fastest, cut down to the shared memory there is; given: fields to set instead.

    Chunks are as long as leaves every SM a team (one row of 1152 tokens in bfloat16: 16 tokens a
    chunk 6.1 us, 128 16.9; 64 rows: 576 tokens 76 us, 128 84), but no longer than lets rows of
    unequal lengths share the SMs; then there are 2^k of them to a row, which 2^i rows deal out
    evenly.
    """
    # Two blocks of 8 warps fit where a thread needs 128 registers by itself; 16 warps force that.
    tiles, depth, warps = {16: (1, 1, 8), 8: (2, 1, 16), 4: (2, 2, 16)}[words.bits]
    heads, _, _ = team_of(n_kv, -(-group // HEADS), warps)
    if words.quantized and batch * (n_kv // heads) * capacity < 64 * SMS:
        tiles, warps = 1, 8  # so little that one small step is all that a team gets
    heads, _, teams = team_of(n_kv, -(-group // HEADS), warps)
    longest = {16: max(512, min(1024, capacity // 128)), 8: 512, 4: 1024}[words.bits]
    needed = 1 << (-(-capacity // longest) - 1).bit_length()
    splits = max(SMS * teams // (batch * (n_kv // heads)), needed)
    step = tiles * TILE
    chunk = -(-capacity // (splits * step)) * step
    plan = dataclasses.replace(Plan(chunk, tiles, depth, warps), **given)
    while sum(shared_bytes(plan, n_kv, group, words)) > SHARED_BYTES:
        if plan.depth > 1:
            plan = dataclasses.replace(plan, depth=plan.depth - 1)
        elif plan.warps > 8:
            plan = dataclasses.replace(plan, warps=8)
        else:
            plan = dataclasses.replace(plan, tiles=plan.tiles // 2)
    return plan


def shared_bytes(plan: Plan, n_kv: int, group: int, words: Words) -> tuple[int, int, int]:
    """Of a block: ring, scales, barriers."""
    heads, _, teams = team_of(n_kv, -(-group // HEADS), plan.warps)
    scales = max(16, plan.warps * scale_bytes(plan, words))
    return teams * ring_bytes(plan, heads, words), scales, teams * 2 * plan.depth * 16


def team_of(n_kv: int, subs: int, warps: int) -> tuple[int, int, int]:
    """(kv heads of a team, warps of a team, teams of a block): a team reads neighbouring heads of
    the same tokens, so that what it copies per token is one run of memory."""
    heads = max(d for d in range(1, n_kv + 1) if n_kv % d == 0 and d * subs <= 8)
    return heads, heads * subs, warps // (heads * subs)
