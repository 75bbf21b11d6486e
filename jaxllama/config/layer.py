"""A layer: the options of its mixer, of its feed-forward and of the form that joins them.

    stream += mixer(norm(stream));  stream += feed(norm(stream))        the form "sequential"

A ``LayerConfig`` is all that a layer's program depends on. Layers that are alike are one object.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Literal

from jaxllama.config.attention import (
    LayerInputsConfig,
    RopeConfig,
    SharedBlocks,
)
from jaxllama.config.experts import ExpertsConfig
from jaxllama.config.linear import Norm
from jaxllama.config.reader import check_types, frozen, requirement

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "relu", "xielu"]
UNGATED = ("relu2", "relu", "xielu")  # activations that no feed-forward with a gate has


@dataclasses.dataclass(frozen=True)
class MixerOptions:
    """Options of a mixer whose own folder has their record, ``mixers`` in the flat form."""

    kind: str
    options: tuple[tuple[str, Any], ...]

    def replace(self, **changes: Any) -> MixerOptions:
        """Return the options with changed values."""
        return MixerOptions(self.kind, frozen({**dict(self.options), **changes}))


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """The norms of a model and of its layers.

    Parameters
    ----------
    kind : {"rms", "layer"}
        RMSNorm or LayerNorm; ``norm`` in the flat form.
    eps : float
        Epsilon; ``norm_eps``.
    out_eps : float, optional
        Epsilon of the norms behind sublayers, if it differs; ``norm_out_eps``.
    bias, weight : bool
        Whether LayerNorm has a bias, and whether norms have a weight; ``norm_bias``,
        ``norm_weight``.
    """

    kind: Norm
    eps: float
    bias: bool = False
    weight: bool = True
    out_eps: float | None = None

    def __post_init__(self) -> None:
        need = requirement(self, "norm_")
        need(self.weight or not self.bias, "bias", "needs norm_weight")


@dataclasses.dataclass(frozen=True)
class FeedConfig:
    """A feed-forward: a dense one, or experts. The names are those of a model's flat form.

    Parameters
    ----------
    d_ff : int
        Width of the dense feed-forward.
    activation : str
        "silu", "gelu", "gelu_tanh", "relu", "relu2" or "xielu".
    gated_mlp : bool
        Whether it is down(activation(gate) * up). False for down(activation(up)), which "relu",
        "relu2" and "xielu" need.
    mlp_bias : bool
        Whether its products have a bias.
    inner_norms : bool
        Whether a norm stands before the last product. A gate then has any activation.
    experts : ExpertsConfig, optional
        The mixture of experts in its place.

    Raises
    ------
    JaxLlamaError
        If a field is out of range or contradicts another. The message names the field.
    """

    d_ff: int
    activation: Activation = "silu"
    kind: ClassVar[str] = "feed"
    gated_mlp: bool = True
    mlp_bias: bool = False
    inner_norms: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        check_types(self)
        need = requirement(self)
        need(self.d_ff > 0, "d_ff", "must be positive")
        need(
            self.inner_norms or not (self.gated_mlp and self.activation in UNGATED),
            "gated_mlp",
            f"must be false with activation {self.activation!r}",
        )
        is_dense = self.experts is None and self.activation != "xielu"
        need(not self.inner_norms or is_dense, "inner_norms", "is for dense feed-forwards")


@dataclasses.dataclass(frozen=True)
class Form:
    """The order of a layer's parts: "sequential", of which the other forms are kinds.

    ``model.forms`` has what each form computes, by its ``name``.

    Parameters
    ----------
    pre_norms, post_norms : bool
        Whether norms stand before the two sublayers, and behind them.
    """

    name: ClassVar[str] = "sequential"
    mixer_reads: ClassVar[int] = 1  # vectors [D] side by side that the mixer's first product reads
    pre_norms: bool = True
    post_norms: bool = False

    @property
    def mixer_norm(self) -> bool:
        """Whether the layer has a norm before its mixer."""
        return self.pre_norms

    @property
    def feed_norm(self) -> bool:
        """Whether the layer has a norm before its feed-forward."""
        return self.pre_norms

    @property
    def neighbours(self) -> bool:
        """Whether a neighbouring layer reads more of this one than the stream, or the reverse."""
        return False

    @property
    def needs_model(self) -> str:
        """Reason why the layer does not run without the model's loop, or ""."""
        return ""


@dataclasses.dataclass(frozen=True)
class Parallel(Form):
    """Both sublayers read the stream before either output is added.

    Parameters
    ----------
    two_norms : bool
        Whether each sublayer has a norm of its own.
    """

    name: ClassVar[str] = "parallel"
    two_norms: bool = False

    @property
    def feed_norm(self) -> bool:
        """Whether the layer has a norm before its feed-forward."""
        return self.pre_norms and self.two_norms


@dataclasses.dataclass(frozen=True)
class Beside(Form):
    """Two layers whose mixers read one normed input; the first of them has no feed-forward.

    Parameters
    ----------
    reads : bool
        Whether this is the second layer, which reads the first one's normed input.
    """

    name: ClassVar[str] = "beside"
    reads: bool = False

    @property
    def mixer_norm(self) -> bool:
        """Whether the layer has a norm before its mixer."""
        return self.pre_norms and not self.reads

    @property
    def neighbours(self) -> bool:
        """Whether a neighbouring layer reads more of this one than the stream, or the reverse."""
        return True


@dataclasses.dataclass(frozen=True)
class Shared(Form):
    """A layer of a model in which several layers take turns with a few blocks of weights.

    A block reads the stream and the embeddings side by side, and has a feed-forward behind its
    attention without a sum. The stream stays as it is: what the block writes is added to the input
    of the next layer's mixer alone. Each block's layer has low-rank adapters of its own, and in
    memory its own copy of the block. Source: arXiv 2411.15242.

    Parameters
    ----------
    block : SharedBlocks, optional
        Options of the block, in a layer that has it.
    reads : bool
        Whether this layer's mixer reads what the block before it has written.
    """

    name: ClassVar[str] = "shared"
    block: SharedBlocks | None = None
    reads: bool = False

    @property
    def neighbours(self) -> bool:
        """Whether a neighbouring layer reads more of this one than the stream, or the reverse."""
        return self.reads or self.block is not None


@dataclasses.dataclass(frozen=True)
class Inputs(Form):
    """A layer with a further input, from tables by token, and with a scale of the stream.

    Parameters
    ----------
    tables : LayerInputsConfig, optional
        Sizes of the tables; None for layers without such an input.
    layer_scale : bool
        Whether the layer multiplies the stream by a stored number.
    """

    name: ClassVar[str] = "inputs"
    tables: LayerInputsConfig | None = None
    layer_scale: bool = False

    @property
    def needs_model(self) -> str:
        """Reason why the layer does not run without the model's loop, or ""."""
        return "" if self.tables is None else "its layers have inputs of their own"


@dataclasses.dataclass(frozen=True)
class Eagle(Form):
    """The layer of an EAGLE-3 head: its mixer reads a token's embedding beside the stream.

    Parameters
    ----------
    norm_residual : bool
        Whether the normed stream is what both sublayers are added to.
    """

    name: ClassVar[str] = "eagle"
    mixer_reads: ClassVar[int] = 2
    norm_residual: bool = False


# A mixer's options; a mixer knows that its layers have its own record.
MixerConfig = Any  # AttentionConfig, LatentAttentionConfig, GLAConfig, DeltaConfig, MixerOptions


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """All that the program of one layer depends on.

    Parameters
    ----------
    d_model : int
        Width of the residual stream (D).
    norm : NormConfig
        Its norms.
    mixer : record
        Options of its mixer, such as ``AttentionConfig``; ``kind`` is their ``kind``.
    feed : FeedConfig, optional
        Its feed-forward; None for a layer without one.
    form : Form
        The order of its parts.
    learned_positions : int, optional
        Of a first layer: offset of the first position in a learned table that is added to the
        embeddings.
    embed_norm : bool
        Of a first layer: whether the embeddings, with their positions, pass a norm.
    """

    d_model: int
    norm: NormConfig
    mixer: MixerConfig
    feed: FeedConfig | None
    form: Form = Form()
    learned_positions: int | None = None
    embed_norm: bool = False

    def __hash__(self) -> int:
        # A jitted program hashes its layer at each call: all records take 14 us, these fields one.
        return hash((self.d_model, self.kind, self.learned_positions, self.embed_norm))

    @functools.cached_property
    def kind(self) -> str:
        """Kind of the mixer, a key of ``model.mixers.MIXERS``."""
        return self.mixer.kind

    @functools.cached_property
    def experts(self) -> ExpertsConfig | None:
        """Options of its experts, or None."""
        return None if self.feed is None else self.feed.experts

    @functools.cached_property
    def activation(self) -> Activation:
        """Activation of its feed-forward."""
        return "silu" if self.feed is None else self.feed.activation

    @functools.cached_property
    def gated_mlp(self) -> bool:
        """Whether its feed-forward has a gate."""
        return self.feed is None or self.feed.gated_mlp

    @functools.cached_property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The (RoPE, number of features) of the tables that the mixer reads."""
        return getattr(self.mixer, "ropes", ())

    @functools.cached_property
    def lends(self) -> str:
        """Name under which the layer lends its keys and values, or ""."""
        return getattr(self.mixer, "lends", "")

    @functools.cached_property
    def borrows(self) -> str:
        """Name of the keys and values that the layer borrows, or ""."""
        return getattr(self.mixer, "borrows", "")

    @property
    def window(self) -> int | None:
        """Number of keys that a query sees; None for all of them, or without queries."""
        return getattr(self.mixer, "sliding_window", None)

    @property
    def needs_model(self) -> str:
        """Reason why the layer does not run without the model's loop, or ""."""
        if self.lends or self.borrows:
            return "its layers read each other's keys"
        return self.form.needs_model

    @property
    def whole(self) -> str:
        """Reason why no mesh splits the layer, to be formatted with the model's name, or ""."""
        if getattr(self.form, "block", None) is not None:
            return "layers of {} share blocks of weights"
        if getattr(self.mixer, "qk_norm", "") == "full":
            return "the norms of q and k of {} are over all heads"
        has_inner = getattr(self.mixer, "inner_norms", False)
        has_inner = has_inner or (self.feed is not None and self.feed.inner_norms)
        return "norms of {} are over all heads and features" if has_inner else ""

    def replace(self, **changes: Any) -> LayerConfig:
        """Return the layer with changed fields."""
        return dataclasses.replace(self, **changes)
