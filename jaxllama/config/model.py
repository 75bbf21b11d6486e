"""The configuration of a model, which the forward pass depends on beside weights and cache."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, Literal

from jaxllama.config.attention import FullAttentionConfig, LatentConfig, RopeConfig, SharedBlocks
from jaxllama.config.experts import ExpertsConfig
from jaxllama.config.linear import DeltaConfig, GLAConfig, Norm
from jaxllama.config.reader import check_types, frozen, requirement
from jaxllama.config.stored import CheckpointForm
from jaxllama.typing import JsonObject, Params

KINDS = ("attention", "gla", "delta")  # kinds of layers whose options are fields of their own
Options = tuple[tuple[str, Any], ...]
QKNorm = Literal["none", "head", "full"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "relu", "xielu"]
UNGATED = ("relu2", "relu", "xielu")  # activations that no feed-forward with a gate has
# What attention must not have where its keys are latent, or shared between layers.
_PLAIN_SCORES: JsonObject = {
    "attn_gate": False,
    "attn_sinks": False,
    "attn_softcap": None,
    "attn_sparsity": 1.0,
}


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
        check_types(self, "layer_inputs.")
        need = requirement(self, "layer_inputs.")
        for key in ("width", "vocab_size", "n_layers"):
            value = getattr(self, key)
            need(value > 0, key, "must be positive")


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
    qk_norm : {"none", "head", "full"}
        RMSNorm of each head of q and k ("head", Qwen3), or of all heads at once ("full", OLMo 2).
    qk_norm_last : bool
        Whether that norm follows RoPE (HunYuan).
    parallel_block, parallel_norms : bool
        Whether both sublayers read the stream before either output is added (Cohere), and whether
        each has a norm of its own there (GPT-NeoX).
    embed_norm : bool
        Whether embeddings, with their positions, pass a norm (nanochat).
    learned_positions : int, optional
        Offset of the first position in a learned table that is added to the embeddings (0: GPT-2,
        2: OPT). None for no table.
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
        check_types(self)
        object.__setattr__(self, "mixers", frozen(dict(self.mixers)))
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("attention",) * self.n_layers)
        self._check_sizes()
        self._check_layers()
        self._normalize_layers()
        self._check_norms()
        self._check_attention()
        self._check_latent()
        self._check_shared_kv()
        self._check_feed_forward()
        self._check_ends()
        self._check_linear()

    def _check_sizes(self) -> None:
        need = requirement(self)
        sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff")
        optional = ("sliding_window", "attn_softcap", "logit_softcap", "qkv_limit")
        for key in (*sizes, "max_position", *optional):
            value = getattr(self, key)
            need(value is None or value > 0, key, "must be positive")
        divides = f"must divide n_heads ({self.n_heads})"
        need(self.n_heads % self.n_kv_heads == 0, "n_kv_heads", divides)
        need(self.head_dim % 2 == 0, "head_dim", "must be even (RoPE)")
        need(self.norm_eps >= 0, "norm_eps", "must not be negative")
        need(0 < self.attn_sparsity <= 1, "attn_sparsity", "must be in (0, 1]")
        need(self.mtp_layers in (0, 1), "mtp_layers", "must be 0 or 1")

    def _check_layers(self) -> None:
        """Check the kinds of the layers, and the fields that hold indices of layers."""
        need, types = requirement(self), self.layer_types
        entries = f"must have n_layers ({self.n_layers}) entries"
        need(len(types) == self.n_layers, "layer_types", entries, value=len(types))
        for kind in types:
            need(
                kind in KINDS or kind in dict(self.mixers),
                "layer_types",
                "must be 'attention', 'gla', 'delta' or a key of mixers",
                value=kind,
            )
        for key in ("window_layers", "nope_layers", "bare_layers", "post_norm_layers"):
            is_below = set(getattr(self, key)) <= set(range(self.n_layers))
            need(is_below, key, f"must be below n_layers ({self.n_layers})")
        if self.experts is not None:
            is_below = set(self.experts.layers) <= set(range(self.n_layers))
            need(is_below, "experts.layers", f"must be below n_layers ({self.n_layers})")
        beside = set(self.beside_layers)
        need(
            beside <= set(range(self.n_layers + 1)),  # n_layers: of a model cut before it
            "beside_layers",
            f"must not exceed n_layers ({self.n_layers})",
        )
        if self.shared_blocks is None:
            need(
                not beside
                or ({i - 1 for i in beside} <= {-1, *self.bare_layers} and not self.parallel_block),
                "beside_layers",
                "must each stand behind a layer of bare_layers, without parallel_block",
            )
        elif self.n_layers > 1:
            need(
                beside == {i + 1 for i, kind in enumerate(types) if kind == "attention"},
                "beside_layers",
                "must be the layers behind those of attention, whose blocks are shared",
            )

    def _normalize_layers(self) -> None:
        """Give each meaning one form, so that equivalent configs are equal."""

        def some(layers: tuple[int, ...]) -> tuple[int, ...]:
            layers = tuple(sorted(set(layers)))
            return () if len(layers) == self.n_layers else layers

        windows = () if self.sliding_window is None else some(self.window_layers)
        object.__setattr__(self, "window_layers", windows)
        for key in ("bare_layers", "beside_layers", "post_norm_layers"):
            object.__setattr__(self, key, tuple(sorted(set(getattr(self, key)))))
        if self.experts is not None:
            experts = dataclasses.replace(self.experts, layers=some(self.experts.layers))
            object.__setattr__(self, "experts", experts)

    def _check_norms(self) -> None:
        need, after = requirement(self), self.post_norm_layers
        need(
            not after or (self.pre_norms and not self.post_norms and not self.parallel_block),
            "post_norm_layers",
            "needs pre_norms, without post_norms and parallel_block",
        )
        is_one = not after or self.stored.residual == 1.0
        need(is_one, "stored.residual", "must be 1 with post_norm_layers")
        need(self.norm_weight or not self.norm_bias, "norm_bias", "needs norm_weight")
        has_both = self.parallel_block or not self.parallel_norms
        need(has_both, "parallel_norms", "needs parallel_block")
        need(self.pre_norms or not self.parallel_block, "pre_norms", "parallel_block needs it")

    def _check_attention(self) -> None:
        need, limit = requirement(self), self.qkv_limit
        has_heads = self.qk_norm == "head" or not self.qk_norm_last
        need(has_heads, "qk_norm_last", "needs qk_norm = 'head'")
        is_bare = self.qk_norm == "none"
        need(is_bare or not self.rope.query_beta, "rope.query_beta", "needs qk_norm = 'none'")
        is_plain = is_bare and self.latent is None and self.stored.query == 1.0
        need(limit is None or is_plain, "qkv_limit", "needs qk_norm = 'none'")
        for holds, where in (
            (self.attn_softcap is not None, "attention scores are capped"),
            (self.attn_sinks, "attention has sinks"),
        ):
            is_full = not holds or self.attn_sparsity == 1.0
            need(is_full, "attn_sparsity", f"must be 1 where {where}")
        widths = self.head_dim if self.full is None else self.full.head_dim, self.head_dim
        for key, width in zip(("rope", "window_rope"), widths, strict=True):
            rope = getattr(self, key)
            turning = 0 if rope is None or rope.rotary_dim is None else rope.rotary_dim
            need(turning <= width, f"{key}.rotary_dim", f"must not exceed head_dim ({width})")

    def _need_fields(self, fields: JsonObject, where: str) -> None:
        """Raise JaxLlamaError if a field has another value than in ``fields``."""
        need = requirement(self)
        for key, want in fields.items():
            need(getattr(self, key) == want, key, f"must be {want!r} where {where}")

    def _check_latent(self) -> None:
        latent, need = self.latent, requirement(self)
        if latent is None:
            return
        width, where = latent.d_nope + latent.d_rope, "keys are latent"
        fields = {"head_dim": width, "n_kv_heads": self.n_heads, "qk_norm": "none", "full": None}
        self._need_fields(fields | _PLAIN_SCORES, where)
        is_still = len(self.nope_layers) == self.n_layers
        need(
            self.rope.rotary_dim in (0, latent.d_rope) or is_still,
            "rope.rotary_dim",
            f"must be latent.d_rope ({latent.d_rope}) where {where}",
        )
        need(latent.d_v <= width, "latent.d_v", f"must not exceed head_dim ({width})")

    def _check_shared_kv(self) -> None:
        """Check the options of heads that differ between layers, and of keys that layers share."""
        need, full, shared = requirement(self), self.full, self.shared_kv_layers
        if full is not None:
            need(self.sliding_window is not None, "full", "needs a sliding_window")
            divides = f"must divide n_heads ({self.n_heads})"
            need(self.n_heads % full.n_kv_heads == 0, "full.n_kv_heads", divides)
        need(0 <= shared < self.n_layers, "shared_kv_layers", "must be below n_layers")
        has_shared = shared > 0 or self.shared_kv_d_ff is None
        need(has_shared, "shared_kv_d_ff", "needs shared_kv_layers")
        own = {self.window_of(i) is None for i in range(self.n_layers - shared)}
        need(
            all((self.window_of(i) is None) in own for i in range(self.n_layers)),
            "shared_kv_layers",
            "leaves no layer that keeps the keys of windows, or of none",
        )
        if shared or self.kv_role != "own":
            kinds = ("attention",) * self.n_layers
            fields = {"layer_types": kinds, "latent": None, "qk_norm_last": False}
            self._need_fields(fields | _PLAIN_SCORES, "layers share keys")

    def _check_feed_forward(self) -> None:
        need = requirement(self)
        need(
            self.inner_norms or not (self.gated_mlp and self.activation in UNGATED),
            "gated_mlp",
            f"must be false with activation {self.activation!r}",
        )
        is_dense = self.experts is None and self.activation != "xielu"
        need(not self.inner_norms or is_dense, "inner_norms", "is for dense feed-forwards")

    def _check_ends(self) -> None:
        """Check the options of the embeddings and of the head."""
        need, offset = requirement(self), self.learned_positions
        need(offset is None or offset >= 0, "learned_positions", "must not be negative")

    def _check_linear(self) -> None:
        """Check the options of layers with a state, and that GLA's heads have whole sizes."""
        need = requirement(self)
        for kind in ("delta", "gla"):
            has_options = kind not in self.layer_types or getattr(self, kind) is not None
            need(has_options, kind, f"is needed by layers of type {kind!r}")
        if self.gla is None or "gla" not in self.layer_types:
            return
        for key in ("expand_k", "expand_v"):
            width, heads = getattr(self.gla, key) * self.d_model, self.gla.n_heads
            need(
                width > 0 and width == int(width) and int(width) % heads == 0,
                f"gla.{key}",
                f"times d_model ({self.d_model}) must divide into {heads} heads",
            )

    def options_of(self, kind: str) -> JsonObject:
        """Return the options of a kind of layers in ``mixers``.

        Raises JaxLlamaError if ``mixers`` has no such kind.
        """
        need = requirement(self)
        mixers = dict(self.mixers)
        need(kind in mixers, "mixers", f"must have the options of {kind!r}", value=tuple(mixers))
        return dict(mixers[kind])

    def with_options(self, kind: str, **changes: Any) -> tuple[tuple[str, Options], ...]:
        """Return ``mixers`` with changed options of one kind."""
        return frozen(dict(self.mixers) | {kind: self.options_of(kind) | changes})

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
        return "" if self.layer_inputs is None else "its layers have inputs of their own"

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
            embed_norm=False,
            experts=self.experts and dataclasses.replace(self.experts, layers=()),
            attn_sparsity=1.0,
            mtp_layers=0,
        )

    def to_dict(self) -> JsonObject:
        """Return the fields as a nested dict of plain values, which ``from_dict`` reads."""
        fields = dataclasses.asdict(self)
        mixers = {kind: self.options_of(kind) for kind, _ in fields.pop("mixers")}
        return fields | ({"mixers": mixers} if mixers else {})
