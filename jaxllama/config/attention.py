"""Options of attention layers: positions, latents, heads, shared blocks."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxllama.config.reader import check_types, requirement

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding (RoFormer, arXiv 2104.09864) and its context-extension rules.

    Parameters
    ----------
    theta : float
        Base of the frequencies.
    scaling : str
        Rule that extends the context: "none", "linear", "dynamic", "llama3", "yarn" (arXiv
        2309.00071) or "longrope" (arXiv 2402.13753). "proportional" has the frequencies of a head
        of which all features rotate, divided by ``factor``; only the first ``rotary_dim / 2`` pairs
        rotate (Gemma 4).
    factor : float
        Ratio of the extended context to the trained one.
    original_max_position : int, optional
        Length of the trained context in tokens. All rules but "none", "linear" and "proportional"
        need it.
    low_freq_factor, high_freq_factor : float
        Borders of the blended frequencies of "llama3".
    beta_fast, beta_slow : float
        Borders of the blended frequencies of "yarn", in turns within the trained context.
    attention_factor : float, optional
        Factor of cos and sin of "yarn" and "longrope". None computes it from ``factor``.
    mscale, mscale_all_dim : float, optional
        DeepSeek's numbers for the attention factor of "yarn".
    truncate : bool
        Whether "yarn" rounds its borders to whole pairs of features.
    short_factor, long_factor : tuple of float
        Divisors of the frequencies of "longrope", one for each pair of features. Rows longer than
        the trained context take the second.
    query_beta : float
        q at position p is multiplied by ``1 + query_beta log(1 + floor(p / m))``, where m is
        ``original_max_position`` (Llama 4, Ministral 3).
    rotary_dim : int, optional
        Number of a head's features that rotate. None for all, 0 for none.

    Raises
    ------
    JaxLlamaError
        If a field is out of range or contradicts another. The message names the field.
    """

    theta: float
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    rotary_dim: int | None = None
    query_beta: float = 0.0

    def __post_init__(self) -> None:
        check_types(self, "rope.")
        need = requirement(self, "rope.")
        need(
            self.query_beta == 0 or self.original_max_position is not None,
            "original_max_position",
            "is needed by query_beta",
        )
        turning = self.rotary_dim or 0
        need(turning >= 0 and turning % 2 == 0, "rotary_dim", "must be even")
        need(self.theta > 0, "theta", "must be positive")
        need(self.factor > 0, "factor", "must be positive")
        if self.scaling in ("llama3", "yarn", "dynamic", "longrope"):
            need(
                self.original_max_position is not None and self.original_max_position > 0,
                "original_max_position",
                f"is needed by scaling {self.scaling!r}",
            )
        if self.scaling == "llama3":
            need(
                self.high_freq_factor > self.low_freq_factor > 0,
                "high_freq_factor",
                "must exceed low_freq_factor, which must be positive",
            )


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Options of attention with keys and values from a latent (DeepSeek-V2, arXiv 2405.04434).

    Parameters
    ----------
    kv_rank : int
        Number of features of a token's latent, which is normed and has no positions.
    d_nope : int
        Number of features that a head's key takes from the latent.
    d_rope : int
        Number of key features that all heads share.
    d_v : int
        Width of a head's value.
    norm_eps : float
        Epsilon of the latent's norm.
    q_rank : int, optional
        Number of features of a latent that queries come from, which is normed. None if queries come
        from the layer's input.

    Raises
    ------
    JaxLlamaError
        If a field is out of range or contradicts another. The message names the field.
    """

    kv_rank: int
    d_nope: int
    d_rope: int
    d_v: int
    norm_eps: float = 1e-6
    q_rank: int | None = None

    def __post_init__(self) -> None:
        need = requirement(self, "latent.")
        for key in ("kv_rank", "d_nope", "d_rope", "d_v", "q_rank"):
            value = getattr(self, key)
            need(value is None or value > 0, key, "must be positive")
        need(self.d_rope % 2 == 0, "d_rope", "must be even (RoPE)")


@dataclasses.dataclass(frozen=True)
class FullAttentionConfig:
    """Heads of the attention layers without a window, where they differ from the others' (Gemma 4).

    Parameters
    ----------
    head_dim, n_kv_heads : int
        Width of a head, and number of key and value heads.
    k_is_v : bool
        Whether one product gives both keys and values.

    Raises
    ------
    JaxLlamaError
        If a field is out of range. The message names the field.
    """

    head_dim: int
    n_kv_heads: int
    k_is_v: bool = False

    def __post_init__(self) -> None:
        check_types(self, "full.")
        need = requirement(self, "full.")
        for key in ("head_dim", "n_kv_heads"):
            need(getattr(self, key) > 0, key, "must be positive")
        need(self.head_dim % 2 == 0, "head_dim", "must be even (RoPE)")


@dataclasses.dataclass(frozen=True)
class SharedBlocks:
    """Attention layers that take turns with a few blocks of weights (Zamba2).

    Such a layer reads the stream and the embeddings side by side, and has a feed-forward behind its
    attention without a sum. The stream stays as it is: what the layer writes is added to the input
    of the next layer's mixer alone. Each layer has low-rank adapters of its own, and in memory its
    own copy of the block.

    Parameters
    ----------
    count : int
        Number of blocks; the i-th attention layer has the weights of block i modulo ``count``.
    rank : int
        Rank of the adapters.
    attention_adapters : bool
        Whether q, k and v have adapters, too, beside the feed-forward.

    Notes
    -----
    Source: Zamba2 (arXiv 2411.15242).
    """

    count: int = 1
    rank: int = 128
    attention_adapters: bool = False

    def __post_init__(self) -> None:
        need = requirement(self, "shared_blocks.")
        for key in ("count", "rank"):
            value = getattr(self, key)
            need(value > 0, key, "must be positive")
