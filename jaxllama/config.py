"""Model configuration: frozen dataclasses and the TOML loader that rejects unknown keys.

The forward pass depends on a ``ModelConfig``, the weights and the cache only. Presets are
``configs/models/<name>.toml``. A checkpoint's own config becomes the same dataclass
(``checkpoints.hf.load``, ``checkpoints.gguf.load``). Values that differ between models (theta, eps)
have no defaults here, so no preset can forget them.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject, Params

_PACKAGE = Path(__file__).resolve().parent
RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
KINDS = ("attention", "gla", "delta")  # kinds of layers whose options are fields of their own
Options = tuple[tuple[str, Any], ...]
Norm = Literal["rms", "layer"]
QKNorm = Literal["none", "head", "full", "layer"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "relu", "xielu"]
UNGATED = ("relu2", "relu", "xielu")  # activations that no feed-forward with a gate has
FeatureMap = Literal["none", "elu", "relu", "sqrelu", "sigmoid", "logsigmoid", "silu", "gelu_tanh"]


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
        _check_types(self, "rope.")
        _require(
            self.query_beta == 0 or self.original_max_position is not None,
            "rope.original_max_position",
            None,
            "is needed by query_beta",
        )
        turning = self.rotary_dim or 0
        _require(
            turning >= 0 and turning % 2 == 0,
            "rope.rotary_dim",
            self.rotary_dim,
            "must be even",
        )
        _require(self.theta > 0, "rope.theta", self.theta, "must be positive")
        _require(self.factor > 0, "rope.factor", self.factor, "must be positive")
        if self.scaling in ("llama3", "yarn", "dynamic", "longrope"):
            _require(
                self.original_max_position is not None and self.original_max_position > 0,
                "rope.original_max_position",
                self.original_max_position,
                f"is needed by scaling {self.scaling!r}",
            )
        if self.scaling == "llama3":
            _require(
                self.high_freq_factor > self.low_freq_factor > 0,
                "rope.high_freq_factor",
                self.high_freq_factor,
                "must exceed low_freq_factor, which must be positive",
            )


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
        _check_types(self, "gla.")
        _require(
            self.use_output_gate or not self.gate_bias,
            "gla.gate_bias",
            True,
            "needs gla.use_output_gate",
        )
        for key in ("n_heads", "n_kv_heads", "gate_low_rank_dim", "conv_size"):
            _require(getattr(self, key) > 0, f"gla.{key}", getattr(self, key), "must be positive")
        _require(
            self.n_heads % self.n_kv_heads == 0,
            "gla.n_kv_heads",
            self.n_kv_heads,
            f"must divide gla.n_heads ({self.n_heads})",
        )


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
        _check_types(self, "delta.")
        for key in ("n_heads", "n_k_heads", "d_k", "d_v"):
            _require(getattr(self, key) > 0, f"delta.{key}", getattr(self, key), "must be positive")
        _require(self.conv_size >= 0, "delta.conv_size", self.conv_size, "must not be negative")
        _require(
            self.n_heads % self.n_k_heads == 0,
            "delta.n_k_heads",
            self.n_k_heads,
            f"must divide delta.n_heads ({self.n_heads})",
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
        for key in ("kv_rank", "d_nope", "d_rope", "d_v", "q_rank"):
            value = getattr(self, key)
            _require(value is None or value > 0, f"latent.{key}", value, "must be positive")
        _require(self.d_rope % 2 == 0, "latent.d_rope", self.d_rope, "must be even (RoPE)")


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
        _check_types(self, "full.")
        for key in ("head_dim", "n_kv_heads"):
            _require(getattr(self, key) > 0, f"full.{key}", getattr(self, key), "must be positive")
        _require(self.head_dim % 2 == 0, "full.head_dim", self.head_dim, "must be even (RoPE)")


@dataclasses.dataclass(frozen=True)
class LayerInputsConfig:
    """A further input of every layer, from tables of its own by token (Gemma 3n and 4).

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
        _check_types(self, "layer_inputs.")
        for key in ("width", "vocab_size", "n_layers"):
            value = getattr(self, key)
            _require(value > 0, f"layer_inputs.{key}", value, "must be positive")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Options of a mixture of experts in place of a layer's feed-forward (arXiv 1701.06538).

    A router scores the experts for each token. The token passes the ``n_active`` best ones, and
    their outputs are summed with weights.

    Parameters
    ----------
    n_experts, n_active : int
        Number of experts, and number of experts that a token passes.
    d_ff : int
        Width of an expert.
    scores : {"softmax", "sigmoid", "sparsemixer"}
        Function of the router's logits that gives the scores. "sparsemixer" (arXiv 2409.12136)
        takes only logits near the best one (``jitter``).
    normalize : bool
        Whether a token's weights sum to 1. With "softmax" they are then the softmax over the chosen
        experts.
    scale : float
        Factor of the weights.
    router_bias : bool
        Whether the router's logits have a bias.
    choice_bias : bool
        Whether a bias is added to the scores for the choice, but not for the weights.
    n_groups, n_active_groups : int
        The experts form ``n_groups`` groups, and a token chooses from the ``n_active_groups`` best
        ones.
    group_best : int
        Number of a group's best scores whose sum is the group's score: 2 in DeepSeek-V3 (arXiv
        2412.19437), 1 in DeepSeek-V2.
    shared : int
        Width of the expert that every token passes; 0 for none.
    shared_gate : bool
        Whether the shared expert's output is multiplied by the sigmoid of a product.
    shared_bias : bool
        Whether the shared expert's products have biases.
    bias : bool
        Whether the experts' products have biases.
    gate_limit, gate_alpha : float
        Limit and factor of gpt-oss's clamped SwiGLU (``pallas_kernels.ClampedGate``). A limit of
        None takes the model's own activation.
    jitter : float
        "sparsemixer" takes logits whose relative distance from the best is at most 2 ``jitter``.
    choice_by_logits : bool
        Whether experts are chosen by logits, and not by scores; ``choice_bias`` is added to these.
    out_norm : bool
        Whether the layers with experts have a norm of their output (A.X-K1).
    beside : bool
        Whether the expert that every token passes is a dense feed-forward beside the others, with
        norms of its own (Gemma 4). The router then has a norm too, and a factor of each expert.
    layers : tuple of int
        Indices of the layers with experts; empty for every layer. Other layers have the dense
        feed-forward.
    shards : int
        Devices that hold ``n_experts / shards`` experts each (``split.local_config``).
    exchanges : bool
        Whether the devices have different tokens and exchange them (``split.local_config``).

    Raises
    ------
    JaxLlamaError
        If a field is out of range or contradicts another. The message names the field.
    """

    n_experts: int
    n_active: int
    d_ff: int
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    router_bias: bool = False
    choice_bias: bool = False
    n_groups: int = 1
    n_active_groups: int = 1
    group_best: int = 2
    shared: int = 0
    shared_gate: bool = False
    shared_bias: bool = False
    bias: bool = False
    gate_limit: float | None = None
    gate_alpha: float = 1.702
    jitter: float = 0.01
    out_norm: bool = False
    choice_by_logits: bool = False
    beside: bool = False
    layers: tuple[int, ...] = ()
    shards: int = 1
    exchanges: bool = False

    def __post_init__(self) -> None:
        _check_types(self, "experts.")
        counts = ("n_experts", "n_active", "d_ff", "n_groups", "n_active_groups", "group_best")
        for key in (*counts, "shards"):
            value = getattr(self, key)
            _require(value > 0, f"experts.{key}", value, "must be positive")
        limit = self.gate_limit
        _require(limit is None or limit > 0, "experts.gate_limit", limit, "must be positive")
        _require(self.shared >= 0, "experts.shared", self.shared, "must not be negative")
        _require(
            self.shared > 0 or not self.shared_gate, "experts.shared_gate", True, "needs shared"
        )
        _require(self.shared > 0 or not self.beside, "experts.beside", True, "needs shared")
        _require(
            self.shared > 0 or not self.shared_bias, "experts.shared_bias", True, "needs shared"
        )
        _require(
            self.n_experts % self.n_groups == 0,
            "experts.n_groups",
            self.n_groups,
            f"must divide n_experts ({self.n_experts})",
        )
        _require(
            self.n_active_groups <= self.n_groups,
            "experts.n_active_groups",
            self.n_active_groups,
            f"must not exceed n_groups ({self.n_groups})",
        )
        most = self.n_experts // self.n_groups * self.n_active_groups
        _require(
            self.n_active <= most,
            "experts.n_active",
            self.n_active,
            f"must not exceed the {most} experts that a token chooses among",
        )
        _require(
            self.scores != "sparsemixer" or not (self.choice_bias or self.n_groups > 1),
            "experts.scores",
            self.scores,
            "has neither groups nor a bias of the choice",
        )

    @property
    def of_a_layer(self) -> ExpertsConfig:
        """The same experts for one of the layers that have them."""
        return dataclasses.replace(self, layers=())


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
        for key in ("count", "rank"):
            value = getattr(self, key)
            _require(value > 0, f"shared_blocks.{key}", value, "must be positive")


@dataclasses.dataclass(frozen=True)
class Multipliers:
    """Multipliers of a layer's products and of their inputs, which loading folds into the weights.

    Parameters
    ----------
    attention_input, key, attention_output : float
        Multipliers of attention's input, of its keys and of its output.
    ssm_input, ssm_output : float
        Multipliers of the input and the output of a Mamba-2 mixer.
    ssm_parts : tuple of float
        Multipliers of its z, x, B, C and dt.
    gate, down : float
        Multipliers of the feed-forward's gate and of its output.

    Notes
    -----
    Source: Falcon-H1 (arXiv 2507.22448), after maximal update parametrization (2203.03466).
    """

    attention_input: float = 1.0
    key: float = 1.0
    attention_output: float = 1.0
    ssm_input: float = 1.0
    ssm_parts: tuple[float, ...] = (1.0,) * 5
    ssm_output: float = 1.0
    gate: float = 1.0
    down: float = 1.0

    def __post_init__(self) -> None:
        _require(len(self.ssm_parts) == 5, "ssm_parts", self.ssm_parts, "must be five numbers")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value,)
            _require(all(values), f"stored.products.{field.name}", value, "must not be 0")


@dataclasses.dataclass(frozen=True)
class CheckpointForm:
    """The differences between a checkpoint's tensors and the parameters, which loading folds.

    Parameters
    ----------
    family : str
        Family of the tensors' names (``model.family_names``) and of the class in transformers.
    embed : float
        Multiplier of the embedding.
    query : float
        Multiplier of q, or of its norm's weight.
    residual : float
        Multiplier of the outputs that o and down add to the stream.
    logits : float
        Multiplier of the last norm's weight.
    norm_offset : float
        Number added to the weights of norms (Gemma's 1 + w).
    flipped : bool
        Whether RoPE turns the other way (nanochat).
    shared : float
        Multiplier of the output of the expert that every token passes.
    interleaved : bool
        Whether RoPE rotates features 2i and 2i + 1 together, and not i and i + H/2.
    products : Multipliers, optional
        Multipliers of single products (Falcon-H1).

    Notes
    -----
    Sources: Granite (arXiv 2408.13359), Gemma 2 (2408.00118).
    """

    family: str = "llama"
    embed: float = 1.0
    query: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    norm_offset: float = 0.0
    interleaved: bool = False
    shared: float = 1.0
    flipped: bool = False
    products: Multipliers | None = None

    def __post_init__(self) -> None:
        for key in ("embed", "query", "residual", "logits", "shared"):
            _require(getattr(self, key) != 0, f"stored.{key}", 0.0, "must not be 0")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Configuration of a decoder-only language model.

    ``load_config`` makes one from a preset or a TOML file, and ``replace`` changes fields.
    Sizes are counts of features, heads or tokens.

    Parameters
    ----------
    name : str
        Name of the model, for messages.
    vocab_size : int
        Number of token ids (V).
    d_model : int
        Width of the residual stream (D).
    n_layers : int
        Number of layers.
    n_heads, n_kv_heads, head_dim : int
        Attention's query heads, key and value heads, and their width. ``n_kv_heads`` divides
        ``n_heads``; ``head_dim`` is even.
    d_ff : int
        Width of the dense feed-forward.
    norm_eps : float
        Epsilon of the norms.
    max_position : int
        Context length in tokens.
    rope : RopeConfig
        Rotary positions.
    tie_embeddings : bool
        Whether the head is the embedding.
    qkv_bias, o_bias, mlp_bias, head_bias : bool
        Whether these products have a bias.
    sliding_window : int, optional
        Number of keys that a query sees, its own included. None for all of them.
    window_layers : tuple of int
        Indices of the layers with a window; empty for every layer.
    embedding_scale : bool
        Whether embeddings are multiplied by sqrt(d_model).
    attn_sparsity : float
        Share of the attention weights that decode keeps (FlexGen, arXiv 2303.06865, section 5).
    layer_types : tuple of str
        "attention", "gla", "delta" or a key of ``mixers``, for each layer. Empty for attention in
        every layer.
    gla : GLAConfig, optional
        Options of the "gla" layers.
    bos_token_id : int, optional
        Token that begins a text.
    eos_token_ids : tuple of int
        Tokens that end a text.
    window_rope : RopeConfig, optional
        Rotary positions of layers with a window, if they differ.
    nope_layers : tuple of int
        Indices of layers without positions (NoPE).
    norm : {"rms", "layer"}
        RMSNorm or LayerNorm.
    norm_bias, norm_weight : bool
        Whether LayerNorm has a bias, and whether norms have a weight (OLMo has none).
    pre_norms, post_norms : bool
        Whether a layer has norms before its two sublayers, and norms of their outputs (OLMo 2,
        Gemma 2).
    post_norm_layers : tuple of int
        Indices of layers that have norms after their sublayers and none before, where the others
        have them before (OLMo Hybrid).
    qk_norm : {"none", "head", "full", "layer"}
        RMSNorm of each head of q and k ("head", Qwen3), or of all heads at once ("full", OLMo 2);
        LayerNorm of each head, with a bias ("layer", Persimmon).
    qk_norm_last : bool
        Whether that norm follows RoPE (HunYuan).
    parallel_block, parallel_norms : bool
        Whether both sublayers read the stream before either output is added (Cohere), and whether
        each has a norm of its own there (GPT-NeoX).
    embed_norm : bool
        Whether embeddings, with their positions, pass a norm (nanochat, BERT).
    first_norm : bool
        Whether the first layer has a norm before its mixer. False is for ``embed_norm`` alone
        (ModernBERT).
    sum_norms : {"none", "all_but_last", "both", "first"}
        Whether norms follow the sums with the stream (BERT): "all_but_last" is for a model, whose
        last norm is that of the last sum. The others are for one layer: norms of both sums, or of
        the first alone.
    token_types : int
        Rows of a table of types, whose first row is added to every embedding (BERT); 0 for none.
    embed_width, head_width : int or None
        Features of the embeddings, with their positions and norm, before a product makes d_model of
        them, and of the head's input, which the dense layer before it makes (Electra, RemBERT).
        None: d_model.
    head_transform : bool
        Whether a dense layer and the activation stand between a last norm and another one (BERT).
        Models with ``sum_norms`` have the first of these norms, too.
    head_transform_bias : bool
        Whether this dense layer has a bias.
    learned_positions : int, optional
        Offset of the first position in a learned table that is added to the embeddings (0: GPT-2,
        2: OPT). None for no table.
    sine_theta : float, optional
        The table of positions is not learned: it has the sines and the cosines of the positions
        times ``sine_theta ** (-2 i / d_model)`` (XGLM, CTRL).
    qkv_limit : float, optional
        Largest magnitude of q, k and v before positions; larger ones are clipped (OLMo 1.7).
    inner_norms : bool
        Whether norms stand before the last products of attention and feed-forward (BitNet). The
        feed-forward's gate then has any activation.
    activation : str
        Activation of the feed-forward: "silu", "gelu", "gelu_tanh", "relu", "relu2" or "xielu".
    attn_softcap, logit_softcap : float, optional
        Cap of the attention scores and of the logits: x becomes cap tanh(x / cap).
    attn_gate : bool
        Whether attention's heads are multiplied by the sigmoid of a product of the layer's input
        (Qwen3-Next).
    attn_sinks : bool
        Whether each head has a learned logit in its softmax's denominator (gpt-oss).
    delta : DeltaConfig, optional
        Options of the "delta" layers.
    latent : LatentConfig, optional
        Keys and values come from latents (DeepSeek-V2). The cache stores the latents. Then
        ``head_dim`` is the width of a key, and ``rope.rotary_dim`` is ``latent.d_rope``.
    experts : ExpertsConfig, optional
        Mixture of experts in place of the feed-forward, in all or some layers.
    mixers : mapping of str to mapping
        Options of other kinds of layers, ``{kind: {option: value}}``.
    mtp_layers : int
        1 if the model has a head for multi-token prediction, which drafts; else 0.
    gated_mlp : bool
        Whether the feed-forward is down(activation(gate) * up). False for down(activation(up))
        (Nemotron), which "relu", "relu2" and "xielu" need.
    beside_layers : tuple of int
        Layers whose mixer reads the normed input of the layer before, which is one of bare_layers
        (Falcon-H1: attention and Mamba-2 side by side).
    shared_blocks : SharedBlocks, optional
        Options of attention layers that share weights (Zamba2); None for layers of their own.
    bare_layers : tuple of int
        Indices of layers without a feed-forward (Mamba-2).
    full : FullAttentionConfig, optional
        Heads of the attention layers without a window, if they differ.
    k_is_v : bool
        Whether one product gives both keys and values.
    v_norm : bool
        Whether each head of v has an RMSNorm without a weight.
    shared_kv_layers : int
        The last so many layers have no keys and values. Each reads those of the last layer before
        them all that has a window where it has one, and none where it has none (Gemma 3n and 4).
    shared_kv_d_ff : int, optional
        Width of the feed-forward of these layers, if it differs.
    kv_role : {"own", "lent", "borrowed"}
        Whose keys and values a layer reads, in the config of one layer (``layer_config``): its own,
        its own that other layers read too, or another layer's.
    layer_inputs : LayerInputsConfig, optional
        A further input of every layer.
    layer_scale : bool
        Whether each layer multiplies the stream by a stored number.
    stored : CheckpointForm
        Form of the checkpoint's tensors.

    Raises
    ------
    JaxLlamaError
        If a field is out of range or contradicts another. The message names the field.
    """

    name: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    sliding_window: int | None = None
    window_layers: tuple[int, ...] = ()
    embedding_scale: bool = False
    attn_sparsity: float = 1.0
    layer_types: tuple[str, ...] = ()
    gla: GLAConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    window_rope: RopeConfig | None = None
    nope_layers: tuple[int, ...] = ()
    norm: Norm = "rms"
    norm_bias: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: QKNorm = "none"
    parallel_block: bool = False
    activation: Activation = "silu"
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    attn_gate: bool = False
    attn_sinks: bool = False
    delta: DeltaConfig | None = None
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    mixers: tuple[tuple[str, Options], ...] = ()
    mtp_layers: int = 0
    gated_mlp: bool = True
    bare_layers: tuple[int, ...] = ()
    beside_layers: tuple[int, ...] = ()
    shared_blocks: SharedBlocks | None = None
    norm_weight: bool = True
    post_norm_layers: tuple[int, ...] = ()
    qk_norm_last: bool = False
    parallel_norms: bool = False
    learned_positions: int | None = None
    embed_norm: bool = False
    first_norm: bool = True
    sum_norms: Literal["none", "all_but_last", "both", "first"] = "none"
    token_types: int = 0
    embed_width: int | None = None
    head_width: int | None = None
    head_transform: bool = False
    head_transform_bias: bool = False
    sine_theta: float | None = None
    qkv_limit: float | None = None
    inner_norms: bool = False
    full: FullAttentionConfig | None = None
    k_is_v: bool = False
    v_norm: bool = False
    shared_kv_layers: int = 0
    shared_kv_d_ff: int | None = None
    kv_role: Literal["own", "lent", "borrowed"] = "own"
    layer_inputs: LayerInputsConfig | None = None
    layer_scale: bool = False
    stored: CheckpointForm = dataclasses.field(default_factory=CheckpointForm)

    def __post_init__(self) -> None:
        _check_types(self)
        object.__setattr__(self, "mixers", _frozen(dict(self.mixers)))
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("attention",) * self.n_layers)
        for key in (
            "vocab_size",
            "d_model",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "d_ff",
            "max_position",
        ):
            _require(getattr(self, key) > 0, key, getattr(self, key), "must be positive")
        _require(
            self.n_heads % self.n_kv_heads == 0,
            "n_kv_heads",
            self.n_kv_heads,
            f"must divide n_heads ({self.n_heads})",
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "must be even (RoPE)")
        _require(self.norm_eps >= 0, "norm_eps", self.norm_eps, "must not be negative")
        _require(
            0 < self.attn_sparsity <= 1, "attn_sparsity", self.attn_sparsity, "must be in (0, 1]"
        )
        if self.sliding_window is not None:
            _require(
                self.sliding_window > 0, "sliding_window", self.sliding_window, "must be positive"
            )
        _require(
            set(self.window_layers) <= set(range(self.n_layers)),
            "window_layers",
            self.window_layers,
            f"must be below n_layers ({self.n_layers})",
        )
        # One form for each meaning, so that equivalent configs are equal.
        layers = () if self.sliding_window is None else tuple(sorted(set(self.window_layers)))
        layers = () if len(layers) == self.n_layers else layers
        object.__setattr__(self, "window_layers", layers)
        _require(
            len(self.layer_types) == self.n_layers,
            "layer_types",
            len(self.layer_types),
            f"must have n_layers ({self.n_layers}) entries",
        )
        for kind in self.layer_types:
            _require(
                kind in KINDS or kind in dict(self.mixers),
                "layer_types",
                kind,
                "must be 'attention', 'gla', 'delta' or a key of mixers",
            )
        for key in ("bare_layers", "beside_layers", "post_norm_layers"):
            object.__setattr__(self, key, tuple(sorted(set(getattr(self, key)))))
        for key in ("nope_layers", "bare_layers", "post_norm_layers"):
            found = getattr(self, key)
            _require(
                set(found) <= set(range(self.n_layers)),
                key,
                found,
                f"must be below n_layers ({self.n_layers})",
            )
        beside = self.beside_layers
        _require(
            set(beside) <= set(range(self.n_layers + 1)),  # n_layers: of a model cut before it
            "beside_layers",
            beside,
            f"must not exceed n_layers ({self.n_layers})",
        )
        _require(
            not beside
            or self.shared_blocks is not None
            or ({i - 1 for i in beside} <= {-1, *self.bare_layers} and not self.parallel_block),
            "beside_layers",
            beside,
            "must each stand behind a layer of bare_layers, without parallel_block",
        )
        if self.shared_blocks is not None and self.n_layers > 1:
            behind = {i + 1 for i, kind in enumerate(self.layer_types) if kind == "attention"}
            _require(
                behind == set(beside),
                "beside_layers",
                beside,
                "must be the layers behind those of attention, whose blocks are shared",
            )
        after = self.post_norm_layers
        _require(
            not after or (self.pre_norms and not self.post_norms and not self.parallel_block),
            "post_norm_layers",
            after,
            "needs pre_norms, without post_norms and parallel_block",
        )
        _require(
            not after or self.stored.residual == 1.0,
            "stored.residual",
            self.stored.residual,
            "must be 1 with post_norm_layers",
        )
        _require(self.norm_weight or not self.norm_bias, "norm_bias", True, "needs norm_weight")
        _require(
            self.parallel_block or not self.parallel_norms,
            "parallel_norms",
            True,
            "needs parallel_block",
        )
        _require(
            self.qk_norm == "head" or not self.qk_norm_last,
            "qk_norm_last",
            True,
            "needs qk_norm = 'head'",
        )
        _require(
            self.qk_norm == "none" or not self.rope.query_beta,
            "rope.query_beta",
            self.rope.query_beta,
            "needs qk_norm = 'none'",
        )
        offset = self.learned_positions
        _require(offset is None or offset >= 0, "learned_positions", offset, "must not be negative")
        _require(
            self.inner_norms or not (self.gated_mlp and self.activation in UNGATED),
            "gated_mlp",
            True,
            f"must be false with activation {self.activation!r}",
        )
        if self.experts is not None:
            found = tuple(sorted(set(self.experts.layers)))
            _require(
                set(found) <= set(range(self.n_layers)),
                "experts.layers",
                found,
                f"must be below n_layers ({self.n_layers})",
            )
            found = () if len(found) == self.n_layers else found
            object.__setattr__(self, "experts", dataclasses.replace(self.experts, layers=found))
        _require(self.mtp_layers in (0, 1), "mtp_layers", self.mtp_layers, "must be 0 or 1")
        for key in ("attn_softcap", "logit_softcap"):
            cap = getattr(self, key)
            _require(cap is None or cap > 0, key, cap, "must be positive")
        _require(
            self.attn_softcap is None or self.attn_sparsity == 1.0,
            "attn_sparsity",
            self.attn_sparsity,
            "must be 1 where attention scores are capped",
        )
        _require(
            not self.attn_sinks or self.attn_sparsity == 1.0,
            "attn_sparsity",
            self.attn_sparsity,
            "must be 1 where attention has sinks",
        )
        _require(self.pre_norms or not self.parallel_block, "pre_norms", False, "parallel_block")
        _require(
            self.sine_theta is None or offset is not None,
            "sine_theta",
            self.sine_theta,
            "needs learned_positions",
        )
        limit = self.qkv_limit
        _require(limit is None or limit > 0, "qkv_limit", limit, "must be positive")
        is_plain = self.qk_norm == "none" and self.latent is None and self.stored.query == 1.0
        _require(limit is None or is_plain, "qkv_limit", limit, "needs qk_norm = 'none'")
        _require(
            not self.inner_norms or (self.experts is None and self.activation != "xielu"),
            "inner_norms",
            True,
            "is for dense feed-forwards",
        )
        for key in ("embed_width", "head_width"):
            width = getattr(self, key)
            _require(width is None or width > 0, key, width, "must be positive")
        _require(
            self.head_width is None or self.head_transform,
            "head_width",
            self.head_width,
            "needs head_transform",
        )
        _require(
            not self.tie_embeddings or self.embed_width == self.head_width,
            "head_width",
            self.head_width,
            "must be embed_width where the head is tied",
        )
        _require(
            self.head_transform or not self.head_transform_bias,
            "head_transform_bias",
            True,
            "needs head_transform",
        )
        has_norms = self.pre_norms or self.post_norms or bool(after)
        _require(
            self.sum_norms == "none" or not has_norms,
            "sum_norms",
            self.sum_norms,
            "needs pre_norms = false, without post_norms",
        )
        _require(
            self.token_types == 0 or self.embed_norm or self.learned_positions is not None,
            "token_types",
            self.token_types,
            "needs embed_norm or learned_positions",
        )
        widths = self.head_dim if self.full is None else self.full.head_dim, self.head_dim
        for key, width in zip(("rope", "window_rope"), widths, strict=True):
            rope = getattr(self, key)
            turning = 0 if rope is None or rope.rotary_dim is None else rope.rotary_dim
            _require(
                turning <= width,
                f"{key}.rotary_dim",
                turning,
                f"must not exceed head_dim ({width})",
            )
        if self.latent is not None:
            width = self.latent.d_nope + self.latent.d_rope
            for key, want in (
                ("head_dim", width),
                ("n_kv_heads", self.n_heads),
                ("qk_norm", "none"),
                ("attn_gate", False),
                ("attn_sinks", False),
                ("attn_softcap", None),
                ("attn_sparsity", 1.0),
            ):
                found = getattr(self, key)
                _require(found == want, key, found, f"must be {want!r} where keys are latent")
            turning = self.rope.rotary_dim
            is_still = len(self.nope_layers) == self.n_layers
            _require(
                turning in (0, self.latent.d_rope) or is_still,
                "rope.rotary_dim",
                turning,
                f"must be latent.d_rope ({self.latent.d_rope}) where keys are latent",
            )
            _require(
                self.latent.d_v <= width,
                "latent.d_v",
                self.latent.d_v,
                f"must not exceed head_dim ({width})",
            )
        self._check_shared_kv()
        if "delta" in self.layer_types:
            _require(self.delta is not None, "delta", None, "is needed by layers of type 'delta'")
        if "gla" in self.layer_types:
            _require(self.gla is not None, "gla", None, "is needed by layers of type 'gla'")
            assert self.gla is not None
            for key, expand in (("expand_k", self.gla.expand_k), ("expand_v", self.gla.expand_v)):
                width = expand * self.d_model
                _require(
                    width > 0 and width == int(width) and int(width) % self.gla.n_heads == 0,
                    f"gla.{key}",
                    expand,
                    f"times d_model ({self.d_model}) must divide into {self.gla.n_heads} heads",
                )

    def _check_shared_kv(self) -> None:
        """Check the options of heads that differ between layers, and of keys that layers share."""
        full = self.full
        if full is not None:
            _require(self.latent is None, "full", full, "must be None where keys are latent")
            _require(self.sliding_window is not None, "full", full, "needs a sliding_window")
            _require(
                self.n_heads % full.n_kv_heads == 0,
                "full.n_kv_heads",
                full.n_kv_heads,
                f"must divide n_heads ({self.n_heads})",
            )
        shared = self.shared_kv_layers
        _require(0 <= shared < self.n_layers, "shared_kv_layers", shared, "must be below n_layers")
        _require(
            shared > 0 or self.shared_kv_d_ff is None,
            "shared_kv_d_ff",
            self.shared_kv_d_ff,
            "needs shared_kv_layers",
        )
        if shared:
            own = {self.window_of(i) is None for i in range(self.n_layers - shared)}
            _require(
                all((self.window_of(i) is None) in own for i in range(self.n_layers)),
                "shared_kv_layers",
                shared,
                "leaves no layer that keeps the keys of windows, or of none",
            )
        if not shared and self.kv_role == "own":
            return
        for key, want in (
            ("layer_types", ("attention",) * self.n_layers),
            ("latent", None),
            ("qk_norm_last", False),
            ("attn_gate", False),
            ("attn_sinks", False),
            ("attn_softcap", None),
            ("attn_sparsity", 1.0),
        ):
            found = getattr(self, key)
            _require(found == want, key, found, f"must be {want!r} where layers share keys")

    def options_of(self, kind: str) -> JsonObject:
        """Return the options of a kind of layers in ``mixers``.

        Raises JaxLlamaError if ``mixers`` has no such kind.
        """
        mixers = dict(self.mixers)
        _require(kind in mixers, "mixers", tuple(mixers), f"must have the options of {kind!r}")
        return dict(mixers[kind])

    def with_options(self, kind: str, **changes: Any) -> tuple[tuple[str, Options], ...]:
        """Return ``mixers`` with changed options of one kind."""
        return _frozen(dict(self.mixers) | {kind: self.options_of(kind) | changes})

    def with_head_of(self, params: Params) -> ModelConfig:
        """Return the config, untied if ``params`` have a head beside the embedding.

        ``quantize_params`` makes such a copy of a tied head.
        """
        is_untied = self.tie_embeddings and "head" in params
        return self.replace(tie_embeddings=False) if is_untied else self

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of layer ``layer`` in tokens, or None if it has none."""
        return self.sliding_window if layer in (self.window_layers or (layer,)) else None

    @property
    def layers_read(self) -> str:
        """Reason why layers do not run one by one, or "" if they do."""
        if self.shared_kv_layers:
            return "its layers read each other's keys"
        if self.layer_inputs is not None:
            return "its layers have inputs of their own"
        return "its embeddings have another width" if self.embed_width else ""

    @property
    def layers_are_alone(self) -> bool:
        """Whether each layer reads the stream and its own state alone (``layers_read``)."""
        return not self.layers_read

    def kv_source(self, layer: int) -> int | None:
        """Return the layer whose keys and values layer ``layer`` reads; None for its own."""
        first = self.n_layers - self.shared_kv_layers
        if layer < first:
            return None
        has_window = self.window_of(layer) is not None
        return max(i for i in range(first) if (self.window_of(i) is not None) == has_window)

    def lends_kv(self, layer: int) -> bool:
        """Return whether other layers read the keys and values of layer ``layer``."""
        later = range(self.n_layers - self.shared_kv_layers, self.n_layers)
        return any(self.kv_source(i) == layer for i in later)

    def with_heads_of(self, layer: int) -> ModelConfig:
        """Return the config of a model whose attention layers all have the heads of one layer.

        Scores of heads of both widths have one scale.
        """
        role = "own"
        if self.shared_kv_layers:
            lends = self.lends_kv(layer)
            role = "borrowed" if self.kv_source(layer) is not None else "lent" if lends else "own"
        if self.full is None and role == self.kv_role:
            return self
        changes: JsonObject = {"kv_role": role} if self.shared_kv_layers else {}
        if self.full is not None:
            changes |= {"full": None, "rope": self.rope_of(layer), "window_rope": None}
            if self.window_of(layer) is None:
                changes |= self._full_heads()
        return dataclasses.replace(self, **changes)

    def _full_heads(self) -> JsonObject:
        """Return changes that give every layer the heads of the layers without a window."""
        if self.full is None:
            return {}
        query = self.stored.query * (self.full.head_dim / self.head_dim) ** 0.5
        stored = dataclasses.replace(self.stored, query=query)
        return {**dataclasses.asdict(self.full), "full": None, "stored": stored}

    def d_ff_of(self, layer: int) -> int:
        """Return the width of the dense feed-forward of layer ``layer``."""
        is_shared = layer >= self.n_layers - self.shared_kv_layers
        return self.shared_kv_d_ff if is_shared and self.shared_kv_d_ff else self.d_ff

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Return the options of a layer's experts, or None if its feed-forward is dense."""
        if self.experts is None or layer not in (self.experts.layers or (layer,)):
            return None
        one = self.experts.of_a_layer
        if one.beside:  # the dense feed-forward
            one = dataclasses.replace(one, shared=self.d_ff_of(layer))
        return one

    def norms_of(self, layer: int) -> tuple[bool, bool]:
        """Return whether one layer has norms before its sublayers, and whether after them."""
        if layer in self.post_norm_layers:
            return False, True
        return self.pre_norms, self.post_norms

    def sum_norms_of(self, layer: int) -> Literal["none", "all_but_last", "both", "first"]:
        """Return the ``sum_norms`` of one layer."""
        if self.sum_norms != "all_but_last":
            return self.sum_norms
        return "first" if layer == self.n_layers - 1 else "both"

    @property
    def is_beside(self) -> bool:
        """Whether a layer's mixer reads the input of the layer before; of ``layer_config``'s."""
        return 0 in self.beside_layers

    @property
    def has_beside(self) -> bool:
        """Whether the next layer's mixer reads this one's input; of ``layer_config``'s."""
        return self.n_layers in self.beside_layers

    def rope_of(self, layer: int) -> RopeConfig:
        """Return the RoPE of layer ``layer``. A layer without positions has ``rotary_dim=0``."""
        if layer in self.nope_layers:
            return dataclasses.replace(self.rope, rotary_dim=0)
        slides = self.window_rope is not None and self.window_of(layer) is not None
        return typing.cast(RopeConfig, self.window_rope) if slides else self.rope

    def head_dim_of(self, layer: int) -> int:
        """Return the width of the attention heads of layer ``layer``."""
        is_full = self.full is not None and self.window_of(layer) is None
        return self.full.head_dim if self.full is not None and is_full else self.head_dim

    @functools.cached_property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The distinct (RoPE, width of a head) of the attention layers."""
        layers = (i for i, kind in enumerate(self.layer_types) if kind == "attention")
        return tuple(dict.fromkeys((self.rope_of(i), self.head_dim_of(i)) for i in layers))

    @property
    def product_scale(self) -> float:
        """Multiplier of the products that write the stream; a norm after them has it instead."""
        return 1.0 if self.post_norms else self.stored.residual

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of fixed size instead of keys and values."""
        return set(self.layer_types) != {"attention"}

    @property
    def feed_width(self) -> int:
        """A token's features inside of the widest feed-forward, over all of its experts."""
        experts = self.experts
        if experts is None:
            return self.d_ff
        sparse = experts.n_active * experts.d_ff + experts.shared
        return max(self.d_ff, sparse) if experts.layers else sparse

    @property
    def group_size(self) -> int:
        """Query heads per kv head (G)."""
        return self.n_heads // self.n_kv_heads

    @functools.cached_property
    def gla_head_dims(self) -> tuple[int, int]:
        """(Dk, Dv) of one GLA head."""
        assert self.gla is not None
        return (
            int(self.gla.expand_k * self.d_model) // self.gla.n_heads,
            int(self.gla.expand_v * self.d_model) // self.gla.n_heads,
        )

    def replace(self, **changes: Any) -> ModelConfig:
        """Return the config with changed fields.

        If all layers are of one kind, a changed ``n_layers`` keeps that kind.
        Raises JaxLlamaError if the new fields contradict each other.
        """
        if "n_layers" in changes and len(set(self.layer_types)) == 1:
            changes = {"layer_types": self.layer_types[:1] * changes["n_layers"], **changes}
        return dataclasses.replace(self, **changes)

    def first_layers(self, count: int) -> ModelConfig:
        """Return the config of the first ``count`` layers, from 1 to ``n_layers``."""
        windows = tuple(i for i in range(count) if self.window_of(i) is not None)
        sparse = tuple(i for i in range(count) if self.experts_of(i) is not None)
        experts = self.experts and dataclasses.replace(self.experts, layers=sparse)
        shared = max(0, count - (self.n_layers - self.shared_kv_layers))
        return dataclasses.replace(
            self,
            n_layers=count,
            layer_types=self.layer_types[:count],
            sliding_window=self.sliding_window if windows else None,
            window_layers=windows,
            nope_layers=tuple(i for i in self.nope_layers if i < count),
            bare_layers=tuple(i for i in self.bare_layers if i < count),
            beside_layers=tuple(i for i in self.beside_layers if i < count),
            post_norm_layers=tuple(i for i in self.post_norm_layers if i < count),
            shared_kv_layers=shared,
            shared_kv_d_ff=self.shared_kv_d_ff if shared else None,
            experts=experts if sparse else None,
            mtp_layers=0,
            **({} if windows else self._full_heads()),
        )

    def mtp_config(self) -> ModelConfig:
        """Return the config of the layer of the MTP head: full attention, and experts if any."""
        return dataclasses.replace(
            self,
            n_layers=1,
            layer_types=("attention",),
            sliding_window=None,
            window_layers=(),
            window_rope=None,
            nope_layers=(),
            bare_layers=(),
            beside_layers=(),
            post_norm_layers=(),
            learned_positions=None,
            sine_theta=None,
            embed_norm=False,
            token_types=0,
            first_norm=True,
            experts=self.experts and dataclasses.replace(self.experts, layers=()),
            attn_sparsity=1.0,
            mtp_layers=0,
        )

    def to_dict(self) -> JsonObject:
        """Return the fields as a nested dict of plain values, which ``from_dict`` reads."""
        fields = dataclasses.asdict(self)
        mixers = {kind: self.options_of(kind) for kind, _ in fields.pop("mixers")}
        return fields | ({"mixers": mixers} if mixers else {})


def load_config(name: str | Path) -> ModelConfig:
    """Return the config of a preset or of a TOML file.

    Parameters
    ----------
    name : str or Path
        Name of a preset ("llama-3.1-8b"), or path of a file that ends with ".toml".

    Raises
    ------
    JaxLlamaError
        For an unknown name, a file that cannot be read, or a wrong key. The message lists the
        presets or names the file and the key.
    """
    path = _preset_path(name)
    data = read_toml(path)
    data.setdefault("name", path.stem)
    data.pop("sampling", None)
    try:
        return from_dict(ModelConfig, data)
    except JaxLlamaError as error:
        raise JaxLlamaError(f"{path}: {error}") from None


def preset_sampling(name: str | Path) -> JsonObject:
    """Return the sampling of a preset: keyword arguments of ``sampling.Sampling``."""
    return read_toml(_preset_path(name)).get("sampling", {})


def _preset_path(name: str | Path) -> Path:
    path = Path(name)
    if path.suffix != ".toml":
        path = configs_dir() / "models" / f"{name}.toml"
        if not path.is_file():
            raise JaxLlamaError(f"no preset {str(name)!r}; presets: {', '.join(preset_names())}")
    return path


def shipped(kind: str, name: str | Path) -> Path:
    """Return the path of a TOML file, given by path, or of a shipped one, given by name.

    Raises JaxLlamaError naming the shipped ones.
    """
    path = Path(name)
    if path.suffix == ".toml":
        return path
    files = {file.stem: file for file in (configs_dir() / kind).glob("*.toml")}
    if str(name) not in files:
        raise JaxLlamaError(f"{str(name)!r} is no .toml file; shipped: {', '.join(sorted(files))}")
    return files[str(name)]


def preset_names() -> list[str]:
    return sorted(path.stem for path in (configs_dir() / "models").glob("*.toml"))


def configs_dir() -> Path:
    """Return the folder of the shipped TOML files, in a wheel or in a checkout."""
    packaged = _PACKAGE / "configs"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "configs"


def read_toml(path: Path) -> JsonObject:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JaxLlamaError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JaxLlamaError(f"{path}: not a TOML file: {error}") from None


T = typing.TypeVar("T")


def from_dict(cls: type[T], data: JsonObject, prefix: str = "") -> T:
    """Build a (nested) frozen dataclass, rejecting unknown keys, missing keys and wrong types."""
    hints = _type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise JaxLlamaError(f"unknown key {prefix + key!r}; allowed: {', '.join(fields)}")
    values = {}
    for key, field in fields.items():
        if key in data:
            values[key] = _convert(hints[key], data[key], prefix + key)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise JaxLlamaError(f"missing key {prefix + key!r}")
    return cls(**values)


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Return ``value`` in the type ``hint``; TOML arrays become tuples."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(arg for arg in args if arg is not type(None)), value, key)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, dict):
            return from_dict(typing.cast(type, hint), value, key + ".")
        if isinstance(value, typing.cast(type, hint)):
            return value
    elif origin is Literal:
        if value in args:
            return value
        raise JaxLlamaError(f"{key} = {value!r}: allowed values are {', '.join(map(str, args))}")
    elif origin is tuple:
        if isinstance(value, dict):
            return _frozen(value)
        if isinstance(value, (list, tuple)):
            return tuple(_convert(args[0], item, key) for item in value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise JaxLlamaError(f"{key} = {value!r}: expected {getattr(hint, '__name__', hint)}")


def _frozen(value: Any) -> Any:
    """Return a mapping as a sorted tuple of pairs and a list as a tuple, recursively."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _frozen(one)) for key, one in value.items()))
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


@functools.cache
def _type_hints(cls: type) -> JsonObject:
    return typing.get_type_hints(cls)


def _check_types(instance: Any, prefix: str = "") -> None:
    """Raise JaxLlamaError for a field of another type; lists become tuples, so it can be hashed."""
    for key, hint in _type_hints(type(instance)).items():
        if key != "mixers":  # options of kinds that are not known here
            value = _convert(hint, getattr(instance, key), prefix + key)
            object.__setattr__(instance, key, value)


def _require(condition: bool, key: str, value: Any, why: str) -> None:
    if not condition:
        raise JaxLlamaError(f"{key} = {value!r}: {why}")


UNMULTIPLIED = Multipliers()
