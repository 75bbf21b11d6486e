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
RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]
KINDS = ("attention", "gla", "delta")  # kinds of layers whose options are fields of their own
Options = tuple[tuple[str, Any], ...]
Norm = Literal["rms", "layer"]
QKNorm = Literal["none", "head", "full"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "relu", "xielu"]
UNGATED = ("relu2", "relu", "xielu")  # activations that no feed-forward with a gate has
FeatureMap = Literal["none", "elu", "relu", "sqrelu", "sigmoid", "logsigmoid", "silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding (RoFormer, arXiv 2104.09864) and its context-extension rules.

    original_max_position: context length of the training before scaling, in tokens.
    low_freq_factor, high_freq_factor: for llama3. beta_*, mscale*: for yarn (arXiv 2309.00071).
    short_factor, long_factor: for longrope (2402.13753), one number for each pair of features.
    attention_factor: for both. query_beta: q at position p is multiplied by ``1 + query_beta *
    log(1 + floor(p / original_max_position))`` (Llama 4, Ministral 3). rotary_dim: number of a
    head's features that rotate; None for all, 0 for none (a layer without positions).
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
        _check_literals(self)
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
    """Gated Linear Attention mixer (arXiv 2312.06635), with the names of flash-linear-attention.

    The width of keys is ``expand_k * d_model`` and that of values ``expand_v * d_model``, over
    ``n_heads``. With ``n_kv_heads < n_heads``, groups of query heads share keys, values and gates.

    decay: "channel" has one number for each key feature, from a product of rank
    ``gate_low_rank_dim``. "head" has one for each head (simple GLA), "none" has none (linear
    attention, arXiv 2006.16236). feature_map: function of q and k; "elu" is elu(x) + 1. normalizer:
    whether each output is divided by q z_t, where z_t is the sum of keys, which decays as the
    state. output_norm: RMSNorm or LayerNorm of a head, with a weight if ``norm_weight``. gate_bias:
    whether the output gate's product has a bias.
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
        _check_literals(self)
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
    """Mixer of the gated delta rule.

    Gated DeltaNet (arXiv 2412.06464), Kimi Delta Attention (2510.26692) and DeltaNet (2406.06484)
    are three settings of it.

    n_heads, d_v: number and width of value heads. n_k_heads, d_k: of the key heads that they read.
    conv_size: taps of the short convolution of q, k and v, 0 for none. decay: one number for each
    "head", for each key "channel" from a product of rank d_v, or "none". gate: the output gate is a
    "full" product, a product of rank d_v ("low_rank", with a bias if ``gate_bias``), or "none".
    beta_max: beta is this times a sigmoid; 2 allows negative eigenvalues.
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
        _check_literals(self)
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
    """Attention with keys and values from a latent (DeepSeek-V2, arXiv 2405.04434).

    A token has one normed latent of ``kv_rank`` features, without positions. A head's key has
    ``d_nope`` features from the latent and ``d_rope`` that all heads share; values have ``d_v``.
    """

    kv_rank: int
    d_nope: int
    d_rope: int
    d_v: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for key in ("kv_rank", "d_nope", "d_rope", "d_v"):
            _require(
                getattr(self, key) > 0, f"latent.{key}", getattr(self, key), "must be positive"
            )


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of a layer's feed-forward (arXiv 1701.06538).

    A router scores ``n_experts`` experts of width ``d_ff`` for each token. The token passes the
    ``n_active`` best ones, and their outputs are summed with weights.

    scores: the router's scores are the "softmax" or "sigmoid" of its logits, or "sparsemixer"'s
    (arXiv 2409.12136), of logits at most 2 ``jitter`` below the best. normalize: whether a
    token's weights sum to 1; with softmax that is the softmax over the chosen experts. scale:
    multiplies the weights. router_bias: whether the logits have a bias. choice_bias: whether a bias
    is added to the scores for the choice only. n_groups, n_active_groups: the choice is among the
    best groups of experts, by the sum of a group's two best scores (DeepSeek-V3, arXiv 2412.19437).
    shared: width of an expert that every token passes, 0 for none. shared_gate: whether its output
    is multiplied by the sigmoid of a product. bias: whether the experts' products have biases.
    gate_limit, gate_alpha: of gpt-oss's clamped SwiGLU; None for the model's own activation.
    layers: indices of the layers with experts, empty for every layer; other layers have the dense
    feed-forward.
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
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    gate_limit: float | None = None
    gate_alpha: float = 1.702
    jitter: float = 0.01
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_literals(self)
        for key in ("n_experts", "n_active", "d_ff", "n_groups", "n_active_groups"):
            value = getattr(self, key)
            _require(value > 0, f"experts.{key}", value, "must be positive")
        limit = self.gate_limit
        _require(limit is None or limit > 0, "experts.gate_limit", limit, "must be positive")
        _require(self.shared >= 0, "experts.shared", self.shared, "must not be negative")
        _require(
            self.shared > 0 or not self.shared_gate, "experts.shared_gate", True, "needs shared"
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
class CheckpointForm:
    """The differences between a checkpoint's tensors and the parameters, which loading folds.

    family: family of the tensors' names (``model.family_names``) and of their class in
    transformers. embed: multiplier of the embedding. query: of q (or its norm's weight). residual:
    of the outputs that o and down add to the stream. logits: of the last norm's weight.
    norm_offset: added to the weights of norms (Gemma's 1 + w). interleaved: whether RoPE rotates
    features 2i and 2i + 1 together, and not i and i + H/2. Sources: Granite (arXiv 2408.13359),
    Gemma 2 (2408.00118).
    """

    family: str = "llama"
    embed: float = 1.0
    query: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    norm_offset: float = 0.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        for key in ("embed", "query", "residual", "logits"):
            _require(getattr(self, key) != 0, f"stored.{key}", 0.0, "must not be 0")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model.

    Its layers are attention, GLA, the gated delta rule, or another kind of ``model.mixers``. Sizes
    are counts of features, heads or tokens. ``load_config`` makes one from a preset or a TOML file,
    and ``replace`` changes fields of one. rope is a ``RopeConfig``.

    layer_types: "attention", "gla", "delta" or a key of ``mixers`` for each layer. sliding_window:
    number of keys that a query sees, itself included; None for all of them. window_layers: indices
    of the layers with a window; empty for every layer. window_rope: RoPE of these layers, if it
    differs. nope_layers: layers without positions (NoPE). attn_sparsity: share of the attention
    weights that decode keeps (FlexGen, arXiv 2303.06865, section 5). embedding_scale: whether
    embeddings are multiplied by sqrt(d_model).

    norm: RMSNorm or LayerNorm, with a bias if ``norm_bias`` and without a weight if not
    ``norm_weight`` (OLMo). pre_norms: norms before a layer's two sublayers. post_norms: norms
    after them, before their outputs are added to the stream (OLMo 2, Gemma 2). post_norm_layers:
    indices of layers that have norms after their sublayers and none before, where the others have
    them before (OLMo Hybrid). qk_norm: RMSNorm of each head of q and k ("head", Qwen3), or of all
    heads at once ("full", OLMo 2). qk_norm_last: whether it follows RoPE (HunYuan).
    parallel_block: whether both sublayers read the stream before either output is added (Cohere);
    parallel_norms: whether each has a norm of its own there (GPT-NeoX). learned_positions: offset
    of the first position in a learned table that is added to the embeddings (0: GPT-2, 2: OPT),
    None for no table.
    attn_softcap, logit_softcap: x becomes cap tanh(x / cap). attn_gate: whether attention's heads
    are multiplied by the sigmoid of a product of its input (Qwen3-Next). attn_sinks: whether each
    head has a learned logit in its softmax's denominator (gpt-oss). latent: keys and values come
    from latents (Kimi-Linear); the cache keeps them whole. experts: a mixture of experts, in all or
    some layers, in place of the feed-forward of width d_ff. mixers: options of other kinds of
    layers, ``{kind: {option: value}}`` in TOML (``options_of``). mtp_layers: 1 with a head for
    multi-token prediction (``model.mtp``), which drafts; else 0. gated_mlp: whether the
    feed-forward is down(activation(gate) * up), or down(activation(up)) as Nemotron's; the
    activations "relu2", "relu" and "xielu" need the second. bare_layers: indices of layers without
    a feed-forward (Mamba-2).
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
    norm_weight: bool = True
    post_norm_layers: tuple[int, ...] = ()
    qk_norm_last: bool = False
    parallel_norms: bool = False
    learned_positions: int | None = None
    stored: CheckpointForm = dataclasses.field(default_factory=CheckpointForm)

    def __post_init__(self) -> None:
        _check_literals(self)
        _require(isinstance(self.rope, RopeConfig), "rope", self.rope, "must be a RopeConfig")
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
                "must be 'attention', 'gla' or 'delta'",
            )
        _require(
            set(self.nope_layers) <= set(range(self.n_layers)),
            "nope_layers",
            self.nope_layers,
            f"must be below n_layers ({self.n_layers})",
        )
        bare = tuple(sorted(set(self.bare_layers)))
        _require(
            set(bare) <= set(range(self.n_layers)),
            "bare_layers",
            bare,
            f"must be below n_layers ({self.n_layers})",
        )
        object.__setattr__(self, "bare_layers", bare)
        after = tuple(sorted(set(self.post_norm_layers)))
        _require(
            set(after) <= set(range(self.n_layers)),
            "post_norm_layers",
            after,
            f"must be below n_layers ({self.n_layers})",
        )
        object.__setattr__(self, "post_norm_layers", after)
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
            not (self.gated_mlp and self.activation in UNGATED),
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
        for key in ("rope", "window_rope"):
            rope = getattr(self, key)
            turning = 0 if rope is None or rope.rotary_dim is None else rope.rotary_dim
            _require(
                turning <= self.head_dim,
                f"{key}.rotary_dim",
                turning,
                f"must not exceed head_dim ({self.head_dim})",
            )
        if self.latent is not None:
            width = self.latent.d_nope + self.latent.d_rope
            for key, want in (
                ("head_dim", width),
                ("n_kv_heads", self.n_heads),
                ("qkv_bias", False),
                ("qk_norm", "none"),
                ("attn_gate", False),
                ("attn_sinks", False),
            ):
                found = getattr(self, key)
                _require(found == want, key, found, f"must be {want!r} where keys are latent")
            _require(
                self.rope.rotary_dim == 0 or len(self.nope_layers) == self.n_layers,
                "nope_layers",
                self.nope_layers,
                "must be all layers where keys are latent",
            )
            _require(
                self.latent.d_v <= width,
                "latent.d_v",
                self.latent.d_v,
                f"must not exceed head_dim ({width})",
            )
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

    def options_of(self, kind: str) -> JsonObject:
        """Return the options of a kind of layers in ``mixers``."""
        return dict(dict(self.mixers)[kind])

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
        """Return the sliding window of one layer."""
        return self.sliding_window if layer in (self.window_layers or (layer,)) else None

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Return the experts of one layer, None if it has a dense feed-forward."""
        if self.experts is None or layer not in (self.experts.layers or (layer,)):
            return None
        return self.experts.of_a_layer

    def norms_of(self, layer: int) -> tuple[bool, bool]:
        """Return whether one layer has norms before its sublayers, and whether after them."""
        if layer in self.post_norm_layers:
            return False, True
        return self.pre_norms, self.post_norms

    def rope_of(self, layer: int) -> RopeConfig:
        """Return the RoPE of one layer."""
        if layer in self.nope_layers:
            return dataclasses.replace(self.rope, rotary_dim=0)
        slides = self.window_rope is not None and self.window_of(layer) is not None
        return typing.cast(RopeConfig, self.window_rope) if slides else self.rope

    @functools.cached_property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct RoPEs of the attention layers."""
        layers = (i for i, kind in enumerate(self.layer_types) if kind == "attention")
        return tuple(dict.fromkeys(self.rope_of(i) for i in layers))

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
        """Return the config with these fields.

        If all layers are of one kind, a changed ``n_layers`` keeps that kind.
        """
        if "n_layers" in changes and len(set(self.layer_types)) == 1:
            changes = {"layer_types": self.layer_types[:1] * changes["n_layers"], **changes}
        return dataclasses.replace(self, **changes)

    def first_layers(self, count: int) -> ModelConfig:
        """Return the config of the first ``count`` layers."""
        windows = tuple(i for i in range(count) if self.window_of(i) is not None)
        sparse = tuple(i for i in range(count) if self.experts_of(i) is not None)
        experts = self.experts and dataclasses.replace(self.experts, layers=sparse)
        return dataclasses.replace(
            self,
            n_layers=count,
            layer_types=self.layer_types[:count],
            sliding_window=self.sliding_window if windows else None,
            window_layers=windows,
            nope_layers=tuple(i for i in self.nope_layers if i < count),
            bare_layers=tuple(i for i in self.bare_layers if i < count),
            post_norm_layers=tuple(i for i in self.post_norm_layers if i < count),
            experts=experts if sparse else None,
            mtp_layers=0,
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
            post_norm_layers=(),
            learned_positions=None,
            experts=self.experts and dataclasses.replace(self.experts, layers=()),
            attn_sparsity=1.0,
            mtp_layers=0,
        )

    def to_dict(self) -> JsonObject:
        fields = dataclasses.asdict(self)
        mixers = {kind: self.options_of(kind) for kind, _ in fields.pop("mixers")}
        return fields | ({"mixers": mixers} if mixers else {})


def load_config(name: str | Path) -> ModelConfig:
    """Return the config of a preset, given by name ("llama-3.1-8b"), or of a TOML file.

    Raises JaxLlamaError naming the presets, the file or the key.
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


def _check_literals(instance: Any) -> None:
    for key, hint in _type_hints(type(instance)).items():
        if typing.get_origin(hint) is Literal:
            _convert(hint, getattr(instance, key), key)


def _require(condition: bool, key: str, value: Any, why: str) -> None:
    if not condition:
        raise JaxLlamaError(f"{key} = {value!r}: {why}")
