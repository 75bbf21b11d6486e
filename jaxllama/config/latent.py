"""Options of attention from latents: the latents, the indexer, and a layer of them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxllama.config.attention import RopeConfig
from jaxllama.config.reader import check_types, requirement


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """Options of an indexer, which chooses the keys that a query reads (DeepSeek-V3.2).

    Parameters
    ----------
    n_heads, head_dim : int
        Heads of the indexer's queries, and width of a head and of its key, which all heads share.
    top_k : int
        Number of keys that a query reads.
    interleaved : bool
        Whether a checkpoint's RoPE of the indexer rotates features 2i and 2i + 1 together.

    Raises
    ------
    JaxLlamaError
        If a field is out of range. The message names the field.
    """

    n_heads: int
    head_dim: int
    top_k: int
    interleaved: bool = False

    def __post_init__(self) -> None:
        need = requirement(self, "latent.indexer.")
        for key in ("n_heads", "head_dim", "top_k"):
            need(getattr(self, key) > 0, key, "must be positive")


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
    indexer : IndexerConfig, optional
        It chooses the keys that a query reads. None where a query reads all of them.

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
    indexer: IndexerConfig | None = None

    def __post_init__(self) -> None:
        need = requirement(self, "latent.")
        for key in ("kv_rank", "d_nope", "d_rope", "d_v", "q_rank"):
            value = getattr(self, key)
            need(value is None or value > 0, key, "must be positive")
        need(self.d_rope % 2 == 0, "d_rope", "must be even (RoPE)")
        if self.indexer is not None:
            need(self.q_rank is not None, "q_rank", "is needed by the indexer")
            widest = f"must be even and not less than d_rope ({self.d_rope})"
            width = self.indexer.head_dim
            need(width % 2 == 0 and width >= self.d_rope, "indexer.head_dim", widest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(LatentConfig):
    """Options of one layer of attention from latents: those of ``LatentConfig``, and these.

    Parameters
    ----------
    n_heads : int
        Number of heads.
    rope : RopeConfig
        Rotary positions, whose ``rotary_dim`` is ``d_rope``, or 0 for none.
    qkv_bias, o_bias : bool
        Whether the products of the layer's input and the last product have a bias.

    Raises
    ------
    JaxLlamaError
        If a field is out of range or contradicts another. The message names the field.
    """

    kind: ClassVar[str] = "latent"
    n_heads: int
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False

    def __post_init__(self) -> None:
        check_types(self, "latent.")
        super().__post_init__()
        need, widest = requirement(self), f"must not exceed head_dim ({self.head_dim})"
        is_turning = self.rope.rotary_dim in (0, self.d_rope)
        need(is_turning, "rope.rotary_dim", f"must be latent.d_rope ({self.d_rope}) or 0")
        requirement(self, "latent.")(self.d_v <= self.head_dim, "d_v", widest)

    @property
    def head_dim(self) -> int:
        """Features of a head's query and key."""
        return self.d_nope + self.d_rope

    @property
    def width(self) -> int:
        """Features that the cache holds of a token."""
        return self.kv_rank + self.d_rope

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The (RoPE, number of features) of the tables that the layer reads."""
        return ((self.rope, self.d_rope),)

    @property
    def latent(self) -> LatentConfig:
        """The options that the flat form has under ``latent``."""
        names = (field.name for field in dataclasses.fields(LatentConfig))
        return LatentConfig(**{name: getattr(self, name) for name in names})

    def replace(self, **changes: Any) -> LatentAttentionConfig:
        """Return the options with changed fields."""
        return dataclasses.replace(self, **changes)
