"""The terms in which every mixer describes its parameters."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from jaxllama.typing import Tree

QUANTIZED_CACHE = ("int8", "int4", "float8_e4m3fn")
Heads = list[tuple[int, int]]  # of each fused part: heads, rows a head

# What a layer keeps of earlier tokens (or None), or of a draft's: a pytree of the mixer's own type.
LayerState: TypeAlias = Tree


class Sites(NamedTuple):
    """Where a scale per channel fits around a mixer (``quantization.sites``).

    readers: the Linears that read the layer's input.  source: what makes o's input and can absorb a
    scale, "" where nothing can; rows: the slice of the source's rows that does, None for a norm's
    weight.  channel ``[K]``: the source's channel behind each input channel of o.
    """

    readers: tuple[str, ...]
    source: str
    rows: tuple[int, int] | None
    channel: np.ndarray


def heads_obstacle(kind: str, heads: int, kv_heads: int, n: int) -> str | None:
    """Return the name of the grouped heads that ``n`` shards do not divide, or None."""
    if heads % n:
        return f"the {heads} {kind}heads"
    if kv_heads % n and n % kv_heads:
        return f"(and is not a multiple of) the {kv_heads} {kind}kv heads"
    return None
