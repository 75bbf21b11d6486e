"""The configuration of a model, which the forward pass depends on beside weights and cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxllama.config.attention import RopeConfig
from jaxllama.config.flat import PLACES, FlatConfig, keys_of, records_of
from jaxllama.config.layer import FeedConfig, LayerConfig, NormConfig
from jaxllama.config.reader import check_types, from_dict, nearest, requirement, said_options
from jaxllama.config.stored import CheckpointForm
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject, Params


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Configuration of a decoder-only language model.

    ``load_config`` makes one from a preset or a TOML file, ``of`` from flat keys, and ``replace``
    changes keys. A flat key is an attribute, too, such as ``cfg.sliding_window`` or ``cfg.gla``;
    ``config.flat`` describes these keys.

    Parameters
    ----------
    name : str
        Name of the model, for messages.
    vocab_size : int
        Number of token ids (V).
    d_model : int
        Width of the residual stream (D).
    layers : tuple of LayerConfig
        The layers; those that are alike are one object.
    norm : NormConfig
        The last norm.
    max_position : int
        Context length in tokens.
    tie_embeddings : bool
        Whether the head is the embedding.
    spare : tuple
        Options of mixers and of a feed-forward that no layer has, but that the flat form states.
        ``replace`` may put them into layers.
    embedding_scale : bool
        Whether embeddings are multiplied by sqrt(d_model).
    head_bias : bool
        Whether the head has a bias.
    logit_softcap : float, optional
        Cap of the logits: x becomes cap tanh(x / cap).
    bos_token_id : int, optional
        Token that begins a text.
    eos_token_ids : tuple of int
        Tokens that end a text.
    mtp : LayerConfig, optional
        The layer of the head for multi-token prediction, which drafts.
    stored : CheckpointForm
        Form of the checkpoint's tensors.
    taps : tuple of int
        Layers before which the hidden states leave the model for a head that drafts; ``n_layers``
        stands for the last layer's output. The flat form leaves them out.
    fixed_sums : bool
        Whether the bits of a row do not depend on how many rows a call has
        (``pallas_kernels.fixed_sums``). ``deterministic`` sets it; the flat form leaves it out.

    Raises
    ------
    JaxLlamaError
        If a field is out of range. The message names the field.
    """

    name: str
    vocab_size: int
    d_model: int
    layers: tuple[LayerConfig, ...] = dataclasses.field(hash=False)  # a hash is asked for each call
    norm: NormConfig
    max_position: int
    tie_embeddings: bool
    spare: tuple[Any, ...] = dataclasses.field(default=(), hash=False)
    embedding_scale: bool = False
    head_bias: bool = False
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mtp: LayerConfig | None = dataclasses.field(default=None, hash=False)
    stored: CheckpointForm = dataclasses.field(default_factory=CheckpointForm)
    taps: tuple[int, ...] = ()
    fixed_sums: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        need = requirement(self)
        for key in ("vocab_size", "d_model", "max_position", "logit_softcap"):
            value = getattr(self, key)
            need(value is None or value > 0, key, "must be positive")
        offset = self.layers[0].learned_positions
        is_natural = offset is None or offset >= 0
        need(is_natural, "learned_positions", "must not be negative", value=offset)

    @classmethod
    def of(cls, **keys: Any) -> ModelConfig:
        """Return the configuration of flat keys, such as ``n_layers`` and ``n_heads``.

        Raises JaxLlamaError naming the key that is missing, unknown, out of range, or contradicts
        another.
        """
        return expand(from_dict(FlatConfig, keys))

    @functools.cached_property
    def flat(self) -> FlatConfig:
        """The flat form of the configuration."""
        fields = {field.name for field in dataclasses.fields(self)}
        names = (field.name for field in dataclasses.fields(FlatConfig) if field.name in fields)
        return FlatConfig(**{**{name: getattr(self, name) for name in names}, **keys_of(self)})

    def __getattr__(self, key: str) -> Any:
        """Return the value of a flat key that is no field."""
        if key.startswith("_") or key not in type(self)._flat_keys():
            raise AttributeError(f"ModelConfig has no field and no flat key {key!r}")
        return getattr(self.flat, key)

    @staticmethod
    @functools.cache
    def _flat_keys() -> frozenset[str]:
        return frozenset(field.name for field in dataclasses.fields(FlatConfig))

    @functools.cached_property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @functools.cached_property
    def layer_types(self) -> tuple[str, ...]:
        """Kind of each layer's mixer."""
        return tuple(layer.kind for layer in self.layers)

    def layer(self, index: int) -> LayerConfig:
        """Return layer ``index``. Raises JaxLlamaError if there is no such layer."""
        if not 0 <= index < len(self.layers):
            last = len(self.layers) - 1
            raise JaxLlamaError(f"index = {index}: {self.name} has layers 0 to {last}")
        return self.layers[index]

    @functools.cached_property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The distinct (RoPE, width of a head) of the attention layers."""
        return tuple(dict.fromkeys(rope for layer in self.layers for rope in layer.ropes))

    @property
    def needs_model(self) -> str:
        """Reason why layers do not run one by one, or "" if they do."""
        return next((layer.needs_model for layer in self.layers if layer.needs_model), "")

    @functools.cached_property
    def feed_width(self) -> int:
        """A token's features inside of the widest feed-forward, over all of its experts."""
        widths = [0]
        feeds = [layer.feed for layer in self.layers] + [*self.spare]
        for feed in {candidate for candidate in feeds if isinstance(candidate, FeedConfig)}:
            experts = feed.experts
            sparse = 0 if experts is None else experts.n_active * experts.d_ff + experts.shared
            widths.append(feed.d_ff if experts is None else sparse)
        return max(widths)

    def with_head_of(self, params: Params) -> ModelConfig:
        """Return the config, untied if ``params`` have a head beside the embedding.

        ``quantize_params`` makes such a copy of a tied head.
        """
        is_untied = self.tie_embeddings and "head" in params
        return self.replace(tie_embeddings=False) if is_untied else self

    def replace(self, **changes: Any) -> ModelConfig:
        """Return the config with changed fields or flat keys.

        With fewer ``n_layers`` the first layers stay. More layers have the kind of the others.
        Raises JaxLlamaError if the new values contradict each other.
        """
        fields = {field.name for field in dataclasses.fields(self)}
        if "norm" not in changes and set(changes) <= fields:
            return dataclasses.replace(self, **changes)
        base, count = self, changes.get("n_layers", self.n_layers)
        if 0 < count < self.n_layers and "layer_types" not in changes:
            base = dataclasses.replace(self.first_layers(count), mtp=self.mtp)
        unknown = next((key for key in changes if key not in fields | self._flat_keys()), None)
        if unknown is not None:
            known = sorted(fields | self._flat_keys())
            raise JaxLlamaError(f"unknown key {unknown!r}{nearest(unknown, known)}")
        flat = base.flat
        given: JsonObject = {}
        if count != self.n_layers:
            given = {key: tuple(i for i in getattr(flat, key) if i < count) for key in PLACES}
        if count > self.n_layers and len(set(self.layer_types)) == 1:
            given["layer_types"] = self.layer_types[:1] * count
        return expand(dataclasses.replace(flat, **{**given, **changes}))

    def of_layers(self, layers: Sequence[LayerConfig]) -> ModelConfig:
        """Return the config of a model of these layers, without a head for drafts."""
        same: dict[LayerConfig, LayerConfig] = {}
        alike = tuple(same.setdefault(layer, layer) for layer in layers)
        used = {part.kind for layer in same for part in (layer.mixer, layer.feed) if part}
        parts = [part for layer in self.layers for part in (layer.mixer, layer.feed) if part]
        stated = {part.kind: part for part in (*reversed(parts), *self.spare)}
        spare = tuple(part for kind, part in stated.items() if kind not in used)
        return dataclasses.replace(self, layers=alike, spare=spare, mtp=None)

    def map_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
        """Return the config with every layer changed, the one of the head for drafts too."""
        mtp = None if self.mtp is None else change(self.mtp)
        return dataclasses.replace(
            self.of_layers([change(layer) for layer in self.layers]), mtp=mtp
        )

    def first_layers(self, count: int) -> ModelConfig:
        """Return the config of the first ``count`` layers, from 1 to ``n_layers``."""
        layers = self.layers[:count]
        borrowed = {layer.borrows for layer in layers}

        def alone(layer: LayerConfig) -> LayerConfig:
            is_idle = layer.lends not in borrowed | {""}
            return layer.replace(mixer=layer.mixer.replace(lends="")) if is_idle else layer

        return self.of_layers([alone(layer) for layer in layers])

    def draft_head(self) -> ModelConfig:
        """Return the config of a model of the draft head's layer. Raises JaxLlamaError without."""
        if self.mtp is None:
            raise JaxLlamaError(f"mtp_layers = 0: {self.name} has no head that drafts")
        return self.of_layers([self.mtp])

    def __str__(self) -> str:
        """Return a text for people: the options that have no default, or another value."""
        return "\n".join(f"{name}: {text}" for name, text in said_options(self.flat))

    def to_dict(self) -> JsonObject:
        """Return the flat keys as a nested dict of plain values."""
        return self.flat.to_dict()


def expand(flat: FlatConfig) -> ModelConfig:
    """Return the configuration with one record for each layer; alike layers share theirs.

    Raises JaxLlamaError if a value is out of range or contradicts another. The message names the
    flat key.
    """
    found = records_of(flat)
    flat_names = {field.name for field in dataclasses.fields(FlatConfig)}
    names = {field.name for field in dataclasses.fields(ModelConfig)} & flat_names - found.keys()
    return ModelConfig(**found, **{name: getattr(flat, name) for name in names})


# A layer, or a model for its last norm and head: what a step around a product may belong to.
StepConfig = LayerConfig | ModelConfig


def model_of(layer: LayerConfig) -> ModelConfig:
    """Return the config of a model of one layer, for its table of parameters."""
    return ModelConfig("layer", 1, layer.d_model, (layer,), layer.norm, 1, True)
