"""Options of layers with a state of fixed size: Gated Linear Attention and the delta rule."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from jaxllama.config.reader import check_types, requirement

Norm = Literal["rms", "layer"]
FeatureMap = Literal["none", "elu", "relu", "sqrelu", "sigmoid", "logsigmoid", "silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class GLAConfig:
    """Options of Gated Linear Attention (arXiv 2312.06635), named as in flash-linear-attention.

    Over all ``n_heads`` heads, keys are ``expand_k * d_model`` wide and values
    ``expand_v * d_model``. Both widths must be multiples of ``n_heads``.

    Parameters
    ----------
    n_heads : int
        Number of query heads.
    n_kv_heads : int
        Number of heads of keys, values and gates; it divides ``n_heads``. Groups of query heads
        share them.
    expand_k, expand_v : float
        Widths of keys and values as multiples of ``d_model``.
    gate_low_rank_dim : int
        Rank of the product that gives the decay.
    gate_logit_normalizer : float
        Divisor of the decay's logarithm.
    clamp_min : float, optional
        Smallest logarithm of a decay.
    use_short_conv : bool
        Whether q, k and v pass a short causal convolution and SiLU.
    conv_size : int
        Taps of this convolution.
    use_output_gate : bool
        Whether the output is multiplied by SiLU of a product of the layer's input.
    norm_eps : float
        Epsilon of the norm of each head's output.
    decay : {"channel", "head", "none"}
        "channel" has one decay for each key feature, "head" one for each head (simple GLA), and
        "none" has no decay (linear attention, arXiv 2006.16236).
    feature_map : str
        Function of q and k; "elu" is elu(x) + 1.
    normalizer : bool
        Whether each output is divided by q z_t, where z_t is the decayed sum of keys.
    output_norm : {"rms", "layer"}
        Norm of each head's output.
    norm_weight : bool
        Whether this norm has a weight.
    gate_bias : bool
        Whether the output gate's product has a bias.

    Raises
    ------
    JaxLlamaError
        If a field is out of range or contradicts another. The message names the field.
    """

    kind: ClassVar[str] = "gla"
    n_heads: int
    n_kv_heads: int
    expand_k: float
    expand_v: float
    gate_low_rank_dim: int = 16
    gate_logit_normalizer: float = 16.0
    clamp_min: float | None = None
    use_short_conv: bool = False
    conv_size: int = 4
    use_output_gate: bool = True
    norm_eps: float = 1e-5
    decay: Literal["channel", "head", "none"] = "channel"
    feature_map: FeatureMap = "none"
    normalizer: bool = False
    output_norm: Norm = "rms"
    norm_weight: bool = True
    gate_bias: bool = False

    def __post_init__(self) -> None:
        check_types(self, "gla.")
        need = requirement(self, "gla.")
        need(self.use_output_gate or not self.gate_bias, "gate_bias", "needs gla.use_output_gate")
        for key in ("n_heads", "n_kv_heads", "gate_low_rank_dim", "conv_size"):
            need(getattr(self, key) > 0, key, "must be positive")
        need(
            self.n_heads % self.n_kv_heads == 0,
            "n_kv_heads",
            f"must divide gla.n_heads ({self.n_heads})",
        )

    def check_width(self, d_model: int) -> None:
        """Raise JaxLlamaError if heads of a model of width ``d_model`` have no whole sizes."""
        need = requirement(self, "gla.")
        for key in ("expand_k", "expand_v"):
            width = getattr(self, key) * d_model
            need(
                width > 0 and width == int(width) and int(width) % self.n_heads == 0,
                key,
                f"times d_model ({d_model}) must divide into {self.n_heads} heads",
            )

    def head_dims(self, d_model: int) -> tuple[int, int]:
        """Return (Dk, Dv) of one head."""
        widths = self.expand_k * d_model, self.expand_v * d_model
        return int(widths[0]) // self.n_heads, int(widths[1]) // self.n_heads


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """Options of the gated delta rule.

    Gated DeltaNet (arXiv 2412.06464), Kimi Delta Attention (2510.26692) and DeltaNet (2406.06484)
    are three settings of it.

    Parameters
    ----------
    n_heads, d_v : int
        Number and width of the value heads.
    n_k_heads, d_k : int
        Number and width of the query and key heads. ``n_k_heads`` divides ``n_heads``.
    norm_eps : float
        Epsilon of the norm of each head's output.
    conv_size : int
        Taps of the short convolution of q, k and v; 0 for none.
    decay : {"head", "channel", "none"}
        "head" has one decay for each head, "channel" one for each key feature, from a product of
        rank ``d_v``.
    gate : {"full", "low_rank", "none"}
        Output gate: one product, or a product of rank ``d_v``.
    gate_bias : bool
        Whether a low-rank gate has a bias.
    gate_activation : {"silu", "sigmoid"}
        Activation of the output gate.
    beta_max : float
        beta is this number times a sigmoid. A value of 2 allows negative eigenvalues.

    Raises
    ------
    JaxLlamaError
        If a field is out of range or contradicts another. The message names the field.
    """

    kind: ClassVar[str] = "delta"
    n_heads: int
    n_k_heads: int
    d_k: int
    d_v: int
    norm_eps: float
    conv_size: int = 4
    decay: Literal["none", "head", "channel"] = "head"
    gate: Literal["none", "full", "low_rank"] = "full"
    gate_bias: bool = False
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    beta_max: float = 1.0

    def __post_init__(self) -> None:
        check_types(self, "delta.")
        need = requirement(self, "delta.")
        for key in ("n_heads", "n_k_heads", "d_k", "d_v"):
            need(getattr(self, key) > 0, key, "must be positive")
        need(self.conv_size >= 0, "conv_size", "must not be negative")
        need(
            self.n_heads % self.n_k_heads == 0,
            "n_k_heads",
            f"must divide delta.n_heads ({self.n_heads})",
        )
