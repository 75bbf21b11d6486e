"""Options of attention layers: positions, heads, what layers share."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from jaxllama.config.reader import check_types, require_all, requirement
from jaxllama.typing import JsonObject

QKNorm = Literal["none", "head", "full"]
RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
# Options that attention must not have where layers share keys, or where keys are latent.
PLAIN_SCORES: JsonObject = {
    "attn_gate": False,
    "attn_sinks": False,
    "attn_softcap": None,
    "attn_sparsity": 1.0,
}
# Options that attention must not have where values are narrower than keys.
_WITHOUT_WIDTHS: JsonObject = {
    "attn_gate": False,
    "attention_parts": (),
    "inner_norms": False,
    "k_is_v": False,
    "lends": "",
    "borrows": "",
}


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
        if self.scaling == "longrope":
            is_whole = len(self.long_factor) == len(self.short_factor) > 0
            need(is_whole, "long_factor", "must have as many entries as short_factor, at least one")
        if self.scaling == "llama3":
            need(
                self.high_freq_factor > self.low_freq_factor > 0,
                "high_freq_factor",
                "must exceed low_freq_factor, which must be positive",
            )


@dataclasses.dataclass(frozen=True)
class FullAttentionConfig:
    """Heads of the attention layers without a window, where they differ from the others'.

    Parameters
    ----------
    head_dim, n_kv_heads : int
        Width of a head, and number of key and value heads.
    k_is_v : bool
        Whether one product gives both keys and values.
    attn_sinks : bool
        Whether each head has a sink.

    Raises
    ------
    JaxLlamaError
        If a field is out of range. The message names the field.
    """

    head_dim: int
    n_kv_heads: int
    k_is_v: bool = False
    attn_sinks: bool = False

    def __post_init__(self) -> None:
        check_types(self, "full.")
        need = requirement(self, "full.")
        for key in ("head_dim", "n_kv_heads"):
            need(getattr(self, key) > 0, key, "must be positive")
        need(self.head_dim % 2 == 0, "head_dim", "must be even (RoPE)")


@dataclasses.dataclass(frozen=True)
class SharedBlocks:
    """Blocks of weights that attention layers take turns with (``layer.Shared``).

    Parameters
    ----------
    count : int
        Number of blocks; the i-th attention layer has the weights of block i modulo ``count``.
    rank : int
        Rank of the adapters.
    attention_adapters : bool
        Whether q, k and v have adapters, too, beside the feed-forward.
    """

    count: int = 1
    rank: int = 128
    attention_adapters: bool = False

    def __post_init__(self) -> None:
        need = requirement(self, "shared_blocks.")
        for key in ("count", "rank"):
            value = getattr(self, key)
            need(value > 0, key, "must be positive")


@dataclasses.dataclass(frozen=True)
class LayerInputsConfig:
    """A further input of every layer, from tables by token (``layer.Inputs``).

    Parameters
    ----------
    width : int
        Features of a layer's input.
    vocab_size : int
        Rows of the table.
    n_layers : int
        Layers that the table has features for.

    Raises
    ------
    JaxLlamaError
        If a field is out of range. The message names the field.
    """

    width: int
    vocab_size: int
    n_layers: int

    def __post_init__(self) -> None:
        check_types(self, "layer_inputs.")
        need = requirement(self, "layer_inputs.")
        for key in ("width", "vocab_size", "n_layers"):
            value = getattr(self, key)
            need(value > 0, key, "must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of attention that a model's flat form states, under the same names.

    Parameters
    ----------
    n_heads, n_kv_heads, head_dim : int
        Query heads, key and value heads, and their width. ``n_kv_heads`` divides ``n_heads``;
        ``head_dim`` is even.
    rope : RopeConfig
        Rotary positions; ``rotary_dim = 0`` for a layer without positions (NoPE).
    norm_eps : float
        Epsilon of the norms of q and k.
    norm_weight : bool
        Whether these norms have a weight.
    sliding_window : int, optional
        Number of keys that a query sees, its own included. None for all of them.
    qkv_bias, o_bias : bool
        Whether these products have a bias.
    qk_norm : {"none", "head", "full"}
        RMSNorm of each head of q and k ("head"), or of all heads at once ("full").
    qk_norm_last : bool
        Whether that norm follows RoPE.
    qkv_limit : float, optional
        Largest magnitude of q, k and v before positions; larger ones are clipped.
    attn_softcap : float, optional
        Cap of the scores: x becomes cap tanh(x / cap).
    attn_gate : bool
        Whether heads are multiplied by the sigmoid of a product of the layer's input.
    attn_sinks : bool
        Whether each head has a learned logit in its softmax's denominator.
    attn_sparsity : float
        Share of the attention weights that decode keeps (FlexGen, arXiv 2303.06865, section 5).
    inner_norms : bool
        Whether a norm stands before the last product. A feed-forward has the same option.
    attention_parts : tuple of str
        Further steps between the products and the positions, files of
        ``model/mixers/attention/parts``, in their order.
    k_is_v : bool
        Whether one product gives both keys and values.
    d_v : int, optional
        Width of a head's value, if it is narrower than ``head_dim``. The cache stores zeros behind.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: RopeConfig
    norm_eps: float
    norm_weight: bool = True
    sliding_window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QKNorm = "none"
    qk_norm_last: bool = False
    qkv_limit: float | None = None
    attn_softcap: float | None = None
    attn_gate: bool = False
    attn_sinks: bool = False
    attn_sparsity: float = 1.0
    inner_norms: bool = False
    attention_parts: tuple[str, ...] = ()
    k_is_v: bool = False
    d_v: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(AttentionOptions):
    """Options of one attention layer: those of ``AttentionOptions``, and these.

    Parameters
    ----------
    query_scale : float
        Multiplier of q beside that of the checkpoint's form; loading folds both.
    lends, borrows : str
        A layer that lends its keys and values has a name for them. A layer that borrows them has
        none of its own and names the lender's.

    Raises
    ------
    JaxLlamaError
        If a field is out of range or contradicts another. The message names the field.
    """

    kind: ClassVar[str] = "attention"
    query_scale: float = 1.0
    lends: str = ""
    borrows: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        need = requirement(self)
        for key in ("n_heads", "n_kv_heads", "head_dim", "sliding_window", "qkv_limit", "d_v"):
            value = getattr(self, key)
            need(value is None or value > 0, key, "must be positive")
        need(self.attn_softcap is None or self.attn_softcap > 0, "attn_softcap", "must be positive")
        divides = f"must divide n_heads ({self.n_heads})"
        need(self.n_heads % self.n_kv_heads == 0, "n_kv_heads", divides)
        need(self.head_dim % 2 == 0, "head_dim", "must be even (RoPE)")
        need(self.norm_eps >= 0, "norm_eps", "must not be negative")
        need(0 < self.attn_sparsity <= 1, "attn_sparsity", "must be in (0, 1]")
        self._check_norms()
        turning = self.rope.rotary_dim or 0
        widest = f"must not exceed head_dim ({self.head_dim})"
        need(turning <= self.head_dim, "rope.rotary_dim", widest)
        if self.d_v is not None:
            need(self.d_v <= self.head_dim, "d_v", widest)
            require_all(self, _WITHOUT_WIDTHS, "values are narrower than keys")
        if self.lends or self.borrows:
            plain = {"qk_norm_last": False, "qkv_limit": None, "inner_norms": False}
            require_all(self, plain | PLAIN_SCORES, "layers share keys")
            need(self.qk_norm != "full", "qk_norm", "must be none or head where layers share keys")

    def _check_norms(self) -> None:
        need, is_bare = requirement(self), self.qk_norm == "none"
        has_heads = self.qk_norm == "head" or not self.qk_norm_last
        need(has_heads, "qk_norm_last", "needs qk_norm = 'head'")
        need(is_bare or not self.rope.query_beta, "rope.query_beta", "needs qk_norm = 'none'")
        need(self.qkv_limit is None or is_bare, "qkv_limit", "needs qk_norm = 'none'")
        for holds, where in (
            (self.attn_softcap is not None, "attention scores are capped"),
            (self.attn_sinks, "attention has sinks"),
        ):
            is_full = not holds or self.attn_sparsity == 1.0
            need(is_full, "attn_sparsity", f"must be 1 where {where}")

    @property
    def value_dim(self) -> int:
        """Width of a head's value as its product gives it."""
        return self.head_dim if self.d_v is None else self.d_v

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The (RoPE, number of features) of the tables that the layer reads."""
        return ((self.rope, self.head_dim),)

    @property
    def group_size(self) -> int:
        """Query heads per kv head (G)."""
        return self.n_heads // self.n_kv_heads

    def replace(self, **changes: Any) -> AttentionConfig:
        """Return the options with changed fields."""
        return dataclasses.replace(self, **changes)
