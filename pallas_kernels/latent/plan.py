"""How latent attention on Hopper cuts the tokens of a row into chunks, and how long it takes.

A block takes up to 64 query rows and a chunk.  It copies one tile while it multiplies another, so a
round of 128 tokens takes the longer of the two times.  All blocks of a row read the row's tokens,
the first one from device memory and the others from the L2.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.operands import LatentCodes, capacity_of
from pallas_kernels.device import gpu, lacking
from pallas_kernels.dispatch import Predicted, Reason, shortest
from pallas_kernels.fixed_sums import planned_capacity, planned_rows

LATENT, ROPE = 512, 64  # features of a latent, which is key and value, and further ones of a key
WIDTH = LATENT + ROPE
CODES_BYTES = LATENT + 4 + 2 * ROPE  # of a token in 8 bits
MOST_TOKENS = 16  # query tokens of a row
TILE, ROUND = 64, 128  # query rows of a block, and tokens of a round
# XLA's form reads the cache twice, and its scores and weights go through memory in float32.
XLA_READS = 2
ROWS = 8  # a token's heads are filled up to a multiple: a row of a tile in shared memory
# Query rows of the program for few: what a call takes, and what codes and a step take.
FEW_ROWS, MOST_FEW_ROWS = 16, 24


@dataclasses.dataclass(frozen=True)
class LatentPlan(Predicted):
    """chunk: tokens of a block, a multiple of 64.

    few: query rows of a program for few, or 0: the program for 64.  paired: by pairs of blocks
    that share their copies.  codes: the dtype of latents in 8 bits.
    """

    kernel: ClassVar[str] = "latent_attention_mosaic"
    chunk: int
    few: int = 0
    paired: bool = False
    codes: str = ""

    def __str__(self) -> str:
        program = "pairs of blocks" if self.paired else "blocks"
        if self.few:
            program = f"{self.few} query rows" + (f" of {self.codes}" if self.codes else "")
        return f"{program}, chunks of {self.chunk} tokens"

    def representative(self) -> LatentPlan:
        return dataclasses.replace(self, chunk=TILE)


def plan(
    q: jax.Array, cache: jax.Array | LatentCodes, table: jax.Array | None = None
) -> LatentPlan | Reason:
    """Return the chunk with the least predicted time; q is ``[B, T, N, 576]``."""
    if reason := lacking("wgmma"):
        return Reason(reason)
    codes = cache.dtype.name if isinstance(cache, LatentCodes) else ""
    if q.dtype != jnp.bfloat16 or not (codes or cache.dtype == jnp.bfloat16):
        return Reason(
            f"q is {q.dtype.name} and cache {cache.dtype.name}; the kernel takes bfloat16"
        )
    batch, tokens, n, width = q.shape
    if (rank_of(cache), width) != (LATENT, WIDTH):
        return Reason(f"q has {width} features; the kernel takes 512 + 64")
    most = MOST_FEW_ROWS if codes else FEW_ROWS
    if codes and query_rows(tokens, n) > most:
        rows = f"{tokens} tokens of {n} heads"
        return Reason(f"q has {rows}; the kernel of codes takes {most} query rows")
    if tokens > MOST_TOKENS:
        return Reason(f"q has {tokens} tokens a row; the kernel takes {MOST_TOKENS}")
    if cache.shape[1] % 8:
        held = "row" if table is None else "page"
        return Reason(
            f"cache holds {cache.shape[1]} tokens a {held}; the kernel takes multiples of 8"
        )
    if table is not None and not copy_of(table.shape[1], cache.shape[1]):
        return Reason(
            f"cache has pages of {cache.shape[1]} tokens; the kernel takes 8, 16, 32 and n * 64"
        )
    batch, capacity = planned_rows(batch), planned_capacity(capacity_of(cache, table))
    return shortest(
        plans(tokens, n, capacity, codes, most),
        lambda one: microseconds(one, batch, query_rows(tokens, n), capacity),
        lambda: xla_microseconds(batch, tokens * n, capacity),
    )


def rank_of(cache: jax.Array | LatentCodes) -> int:
    """Return the features of a latent."""
    return cache.low.shape[-1] if isinstance(cache, LatentCodes) else LATENT


def query_rows(tokens: int, n: int) -> int:
    """Return the query rows of a row of the batch, each token's heads filled up to ROWS."""
    return tokens * (-(-n // ROWS) * ROWS)


def plans(
    tokens: int, n: int, capacity: int, codes: str = "", most: int = FEW_ROWS
) -> list[LatentPlan]:
    """Return the plans of rows of this capacity, one for each number of chunks.

    most: query rows of the program for few.
    """
    rows = query_rows(tokens, n)
    few = 0 if rows > most else most if rows > FEW_ROWS or codes else FEW_ROWS
    paired = not few and -(-rows // TILE) % 2 == 0
    return [LatentPlan(chunk, few, paired, codes) for chunk in chunks_of(capacity)]


def copy_of(entries: int, page: int) -> int:
    """Return how many neighbouring tokens a copy takes, or 0 if a tile is no number of copies.

    entries: pages of a row.  A row of one page is as a row without pages.
    """
    if entries == 1 or page % TILE == 0:
        return TILE
    return page if TILE % page == 0 else 0


def chunks_of(capacity: int, unit: int = TILE) -> list[int]:
    """Return the chunks that a row of this capacity may be cut into, the longest first.

    unit: tokens of which a chunk is a multiple.
    """
    units = -(-capacity // unit)
    most = min(units, gpu().sms)
    return sorted({-(-units // splits) * unit for splits in range(1, most + 1)}, reverse=True)


def microseconds(plan: LatentPlan, batch: int, rows: int, capacity: int) -> float:
    """Return the predicted time of the kernels, of full rows."""
    splits, query_tiles = -(-capacity // plan.chunk), -(-rows // TILE)
    blocks = batch * splits * query_tiles
    waves, sms = -(-blocks // gpu().sms), min(blocks, gpu().sms)
    size = ROUND * (CODES_BYTES if plan.codes else 2 * WIDTH)
    card = gpu().latent
    memory = max(size * sms / query_tiles / gpu().copy_rate, size * sms / card.l2_rate) * 1e6
    rounds = -(-min(plan.chunk, capacity) // ROUND)
    round_us = card.few_round_us if plan.few else card.round_us
    own = waves * (card.block_us + rounds * max(round_us, memory))
    if splits == 1:
        return own
    parts = 2 * 4 * LATENT * batch * splits * rows  # written and read
    return own + card.merge_us + parts / gpu().copy_rate * 1e6


def xla_microseconds(batch: int, rows: int, capacity: int) -> float:
    """Return the predicted time of XLA's form."""
    keys = batch * capacity
    moved = XLA_READS * 2 * WIDTH * keys + 16 * rows * keys
    products = 2 * rows * (WIDTH + WIDTH) * keys / gpu().product_rates["bfloat16"]
    return gpu().latent.xla_us + (moved / gpu().copy_rate + products) * 1e6
