"""Registers of a slice of 64 key channels and a chunk's 64 tokens, transposed: channels as rows.

A warp w owns 16 channels and all tokens.  ``x[h][m][e]`` of a thread (g, c) is channel
16w + 8h + g and token 8m + 2c + e.  So levels 1, 8, 16 and 32 of the binary tree over tokens join
registers of one thread.
"""

from __future__ import annotations

from pallas_kernels import ptx as p

LEVELS = (1, 2, 4, 8, 16, 32)


def each(value):
    """[h][m][e] of value(h, m, e)."""
    return [[[value(h, m, e) for e in range(2)] for m in range(8)] for h in range(2)]


def flat(x):
    return [x[h][m][e] for h in range(2) for m in range(8) for e in range(2)]


def nested(values):
    """[h][m][e] of ``flat``'s values."""
    rest = iter(values)
    return each(lambda h, m, e: next(rest))


def load_block(columns, at: int, b: int):
    """bfloat16 token pairs of tokens 16b .. 16b + 15, [h][half], from the tile at byte ``at``."""
    r = p.load_matrices(columns, at=at + 2048 * b, transposed=True)
    return [[r[0], r[2]], [r[1], r[3]]]
