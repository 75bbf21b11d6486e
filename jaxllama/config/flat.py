"""The flat form of a model's configuration, in which presets, TOML files and changes are written.

    records_of(flat) -> {"layers": ...}     one record for each layer
    keys_of(layers) -> {"n_layers": ...}    the keys of such records

``config.model`` makes a ModelConfig of the former, and a FlatConfig of the latter.
Where layers differ, a flat key has the indices of some of them. Checks of indices are here. Checks
of the values of one layer are in its records, whose fields have the names of flat keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from jaxllama.config.attention import (
    PLAIN_SCORES,
    AttentionConfig,
    AttentionOptions,
    FullAttentionConfig,
    LayerInputsConfig,
    RopeConfig,
    SharedBlocks,
)
from jaxllama.config.latent import LatentAttentionConfig, LatentConfig
from jaxllama.config.layer import (
    Beside,
    FeedConfig,
    Form,
    Inputs,
    LayerConfig,
    MixerOptions,
    NormConfig,
    Parallel,
    Shared,
)
from jaxllama.config.linear import DeltaConfig, GLAConfig, Norm
from jaxllama.config.reader import check_types, frozen, require_all, requirement
from jaxllama.config.stored import CheckpointForm
from jaxllama.typing import JsonMapping, JsonObject

Options = tuple[tuple[str, Any], ...]
_KINDS = ("attention", "latent", "gla", "delta")
PLACES = (
    "window_layers",
    "nope_layers",
    "bare_layers",
    "post_norm_layers",
    "expert_layers",
)


class Layered(Protocol):
    """The records of a model, as ``ModelConfig`` has them."""

    @property
    def layers(self) -> tuple[LayerConfig, ...]: ...
    @property
    def norm(self) -> NormConfig: ...
    @property
    def spare(self) -> tuple[Any, ...]: ...
    @property
    def mtp(self) -> LayerConfig | None: ...
    @property
    def stored(self) -> CheckpointForm: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatConfig(AttentionOptions, FeedConfig):
    """The flat form of a decoder-only language model.

    Beside these keys it has those of ``AttentionOptions`` and of ``FeedConfig``, for all layers
    that have attention and a feed-forward.

    Parameters
    ----------
    name : str
        Name of the model, for messages.
    vocab_size, d_model, n_layers, max_position : int
        Number of token ids (V), width of the residual stream (D), number of layers, and context
        length in tokens.
    tie_embeddings : bool
        Whether the head is the embedding.
    layer_types : tuple of str
        "attention", "latent", "gla", "delta" or a key of ``mixers``, for each layer. Empty for
        attention in every layer, which is "latent" where ``latent`` is given.
    gla, delta : GLAConfig, DeltaConfig, optional
        Options of the "gla" and of the "delta" layers.
    latent : LatentConfig, optional
        Latents of the "latent" layers, where each head has keys and values of its own. Then
        ``head_dim`` is the width of a key, and ``rope.rotary_dim`` is ``latent.d_rope``.
    mixers : mapping of str to mapping
        Options of other kinds of layers, ``{kind: {option: value}}``.
    window_layers : tuple of int
        Layers with ``sliding_window``; empty for every layer.
    window_rope : RopeConfig, optional
        Rotary positions of layers with a window, if they differ.
    nope_layers : tuple of int
        Layers without positions (NoPE).
    full : FullAttentionConfig, optional
        Heads of the attention layers without a window, if they differ.
    shared_kv_layers : int
        The last so many layers have no keys and values. Each reads those of the last layer before
        them all that has a window where it has one, and none where it has none.
    shared_kv_d_ff : int, optional
        Width of the feed-forward of these layers, if it differs.
    bare_layers : tuple of int
        Layers without a feed-forward.
    expert_layers : tuple of int
        Layers with ``experts``; empty for every layer.
    norm : {"rms", "layer"}
        RMSNorm or LayerNorm.
    norm_bias : bool
        Whether LayerNorm has a bias.
    norm_out_eps : float, optional
        Epsilon of the norms of sublayers' outputs, if it differs.
    pre_norms, post_norms : bool
        Whether a layer has norms before its two sublayers, and norms of their outputs.
    post_norm_layers : tuple of int
        Layers that have norms after their sublayers and none before.
    parallel_block, parallel_norms : bool
        Whether both sublayers read the stream before either output is added, and whether each has a
        norm of its own there.
    beside_layers : tuple of int
        Layers whose mixer reads the normed input of the layer before, which is one of
        ``bare_layers``; with ``shared_blocks``, what the block before has written.
    shared_blocks : SharedBlocks, optional
        Options of attention layers that share weights.
    layer_inputs : LayerInputsConfig, optional
        A further input of every layer.
    layer_scale : bool
        Whether each layer multiplies the stream by a stored number.
    embedding_scale : bool
        Whether embeddings are multiplied by sqrt(d_model).
    learned_positions : int, optional
        Offset of the first position in a learned table that is added to the embeddings.
    embed_norm : bool
        Whether embeddings, with their positions, pass a norm.
    head_bias : bool
        Whether the head has a bias.
    logit_softcap : float, optional
        Cap of the logits: x becomes cap tanh(x / cap).
    bos_token_id : int, optional
        Token that begins a text.
    eos_token_ids : tuple of int
        Tokens that end a text.
    mtp_layers : int
        1 if the model has a head for multi-token prediction, which drafts; else 0.
    stored : CheckpointForm
        Form of the checkpoint's tensors.

    Raises
    ------
    JaxLlamaError
        If a value has another type, or if an index is no layer's. The message names the key.
    """

    name: str
    vocab_size: int
    d_model: int
    n_layers: int
    max_position: int
    tie_embeddings: bool
    layer_types: tuple[str, ...] = ()
    gla: GLAConfig | None = None
    delta: DeltaConfig | None = None
    latent: LatentConfig | None = None
    mixers: tuple[tuple[str, Options], ...] = ()
    window_layers: tuple[int, ...] = ()
    window_rope: RopeConfig | None = None
    nope_layers: tuple[int, ...] = ()
    full: FullAttentionConfig | None = None
    shared_kv_layers: int = 0
    shared_kv_d_ff: int | None = None
    bare_layers: tuple[int, ...] = ()
    expert_layers: tuple[int, ...] = ()
    norm: Norm = "rms"
    norm_bias: bool = False
    norm_out_eps: float | None = None
    pre_norms: bool = True
    post_norms: bool = False
    post_norm_layers: tuple[int, ...] = ()
    parallel_block: bool = False
    parallel_norms: bool = False
    beside_layers: tuple[int, ...] = ()
    shared_blocks: SharedBlocks | None = None
    layer_inputs: LayerInputsConfig | None = None
    layer_scale: bool = False
    embedding_scale: bool = False
    learned_positions: int | None = None
    embed_norm: bool = False
    head_bias: bool = False
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mtp_layers: int = 0
    stored: CheckpointForm = dataclasses.field(default_factory=CheckpointForm)

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "mixers", frozen(dict(self.mixers)))
        if not self.layer_types:
            kind = "attention" if self.latent is None else "latent"
            object.__setattr__(self, "layer_types", (kind,) * self.n_layers)
        need = requirement(self)
        need(self.n_layers > 0, "n_layers", "must be positive")
        entries = f"must have n_layers ({self.n_layers}) entries"
        n_types = len(self.layer_types)
        need(n_types == self.n_layers, "layer_types", entries, value=n_types)
        for key in PLACES:
            is_below = set(getattr(self, key)) <= set(range(self.n_layers))
            need(is_below, key, f"must be below n_layers ({self.n_layers})")
        self._check_kinds()
        self._check_forms()
        self._check_keys()

    def _check_kinds(self) -> None:
        need, known = requirement(self), dict(self.mixers)
        for kind in self.layer_types:
            need(
                kind in _KINDS or kind in known,
                "layer_types",
                f"must be {', '.join(map(repr, _KINDS))} or a key of mixers",
                value=kind,
            )
        for kind in _KINDS[1:]:
            has_options = kind not in self.layer_types or getattr(self, kind) is not None
            need(has_options, kind, f"is needed by layers of type {kind!r}")

    def _check_forms(self) -> None:
        """Check the places of norms, and of layers that read more than the stream."""
        need, after = requirement(self), self.post_norm_layers
        need(
            not after or (self.pre_norms and not self.post_norms and not self.parallel_block),
            "post_norm_layers",
            "needs pre_norms, without post_norms and parallel_block",
        )
        is_one = not after or self.stored.residual == 1.0
        need(is_one, "stored.residual", "must be 1 with post_norm_layers")
        need(self.norm == "layer" or not self.norm_bias, "norm_bias", 'needs norm = "layer"')
        has_both = self.parallel_block or not self.parallel_norms
        need(has_both, "parallel_norms", "needs parallel_block")
        need(self.pre_norms or not self.parallel_block, "pre_norms", "parallel_block needs it")
        beside, n = set(self.beside_layers), self.n_layers
        is_below = beside <= set(range(n + 1))  # n: of a model cut before it
        need(is_below, "beside_layers", f"must not exceed n_layers ({n})")
        if self.shared_blocks is None:
            need(
                not beside
                or ({i - 1 for i in beside} <= {-1, *self.bare_layers} and not self.parallel_block),
                "beside_layers",
                "must each stand behind a layer of bare_layers, without parallel_block",
            )
        elif n > 1:
            need(
                beside == {i + 1 for i, kind in enumerate(self.layer_types) if kind == "attention"},
                "beside_layers",
                "must be the layers behind those of attention, whose blocks are shared",
            )
        needs_own = self.layer_inputs is not None or self.layer_scale
        is_plain = not (self.parallel_block or beside or self.shared_blocks)
        need(is_plain or not needs_own, "layer_inputs", "needs layers one behind the other")

    def _check_keys(self) -> None:
        """Check the options of keys that layers share, and of heads that differ."""
        need, full, shared = requirement(self), self.full, self.shared_kv_layers
        if full is not None:
            need(self.sliding_window is not None, "full", "needs a sliding_window")
            divides = f"must divide n_heads ({self.n_heads})"
            need(self.n_heads % full.n_kv_heads == 0, "full.n_kv_heads", divides)
        need(0 <= shared < self.n_layers, "shared_kv_layers", "must be below n_layers")
        has_shared = shared > 0 or self.shared_kv_d_ff is None
        need(has_shared, "shared_kv_d_ff", "needs shared_kv_layers")
        need(self.mtp_layers in (0, 1), "mtp_layers", "must be 0 or 1")
        if shared:
            is_attention = set(self.layer_types) == {"attention"}
            need(is_attention, "layer_types", "must be attention where layers share keys")
            slides = {self.slides(i) for i in range(self.n_layers - shared)}
            need(
                {self.slides(i) for i in range(self.n_layers)} <= slides,
                "shared_kv_layers",
                "leaves no layer that keeps the keys of windows, or of none",
            )
        if self.gla is not None and "gla" in self.layer_types:
            self.gla.check_width(self.d_model)

    def slides(self, index: int) -> bool:
        """Return whether layer ``index`` has a window."""
        return self.sliding_window is not None and index in (self.window_layers or (index,))

    def to_dict(self) -> JsonObject:
        """Return the keys as a nested dict of plain values, which ``from_dict`` reads."""
        mixers = {kind: dict(options) for kind, options in self.mixers}
        found = dataclasses.asdict(self) | {"mixers": mixers}
        return found if mixers else {key: found[key] for key in found if key != "mixers"}


# Keys of the last version that went, with the only value that this version's models have.
_WENT: JsonObject = {
    "first_norm": True,
    "sum_norms": "none",
    "token_types": 0,
    "embed_width": None,
    "head_width": None,
    "head_transform": False,
    "head_transform_bias": False,
    "sine_theta": None,
    "kv_role": "own",
}


def of_last_version(keys: JsonMapping) -> JsonObject:
    """Return flat keys, which the last version may have written, as this version has them."""
    found = {key: value for key, value in keys.items() if _WENT.get(key, ...) != value}
    kinds = found.get("layer_types") or ()
    if found.get("latent") is not None and "latent" not in kinds:  # all attention was
        found["layer_types"] = ["latent" if kind == "attention" else kind for kind in kinds]
    if found.pop("v_norm", False):
        found["attention_parts"] = ["value_norm"]
    experts = found.get("experts")
    if isinstance(experts, Mapping):
        kept = dict(experts)
        if "layers" in kept:
            found["expert_layers"] = kept.pop("layers")
        if "beside" in kept:
            kept["shared_norms"] = kept.pop("beside")
        found["experts"] = kept
    return found


def records_of(flat: FlatConfig) -> JsonObject:
    """Return the fields of ``Layered`` of a flat form; alike layers share their record.

    Raises JaxLlamaError if a value is out of range or contradicts another. The message names the
    flat key.
    """
    same: dict[LayerConfig, LayerConfig] = {}
    records = (_layer(flat, index) for index in range(flat.n_layers))
    layers = tuple(same.setdefault(layer, layer) for layer in records)
    stated = [*_others(flat).values(), _attention(flat, None), _feed(flat, None)]
    used = {part.kind for layer in layers for part in (layer.mixer, layer.feed) if part}
    return {
        "layers": layers,
        "spare": tuple(record for record in stated if record.kind not in used),
        "norm": _norm(flat),
        "mtp": _layer(flat, None) if flat.mtp_layers else None,
    }


def _norm(flat: FlatConfig) -> NormConfig:
    own = flat.norm_bias, flat.norm_weight, flat.norm_out_eps
    return NormConfig(flat.norm, flat.norm_eps, *own)


def _others(flat: FlatConfig) -> dict[str, Any]:
    """Return the records of the mixers beside attention, by kind."""
    found: dict[str, Any] = {"gla": flat.gla, "delta": flat.delta, "latent": _latent(flat, None)}
    found |= {kind: MixerOptions(kind, options) for kind, options in flat.mixers}
    return {kind: record for kind, record in found.items() if record is not None}


def _layer(flat: FlatConfig, index: int | None) -> LayerConfig:
    """Return the record of a layer; None: of the head for multi-token prediction."""
    kind = "attention" if index is None else flat.layer_types[index]
    by_layer: dict[str, Any] = {"attention": _attention, "latent": _latent}
    mixer = by_layer[kind](flat, index) if kind in by_layer else _others(flat)[kind]
    if index is None:
        mixer = mixer.replace(sliding_window=None, attn_sparsity=1.0)
    return LayerConfig(
        d_model=flat.d_model,
        norm=_norm(flat),
        mixer=mixer,
        feed=None if index in flat.bare_layers else _feed(flat, index),
        form=_form(flat, index),
        learned_positions=flat.learned_positions if index == 0 else None,
        embed_norm=flat.embed_norm and index == 0,
    )


def _is_still(flat: FlatConfig, index: int | None) -> bool:
    """Return whether a layer has no positions."""
    return index in flat.nope_layers or len(flat.nope_layers) == flat.n_layers


def _latent(flat: FlatConfig, index: int | None) -> LatentAttentionConfig | None:
    """Return the options of attention from latents in a layer; None: as the flat form states
    them."""
    latent = flat.latent
    if latent is None:
        return None
    width = latent.d_nope + latent.d_rope
    plain = {"head_dim": width, "n_kv_heads": flat.n_heads, "qk_norm": "none", "full": None}
    plain |= {"sliding_window": None, "qkv_limit": None, "d_v": None, **PLAIN_SCORES}
    if index is not None and "attention" not in flat.layer_types:
        require_all(flat, plain, "keys are latent")
    return LatentAttentionConfig(
        **{field.name: getattr(latent, field.name) for field in dataclasses.fields(latent)},
        n_heads=flat.n_heads,
        rope=dataclasses.replace(flat.rope, rotary_dim=0) if _is_still(flat, index) else flat.rope,
        qkv_bias=flat.qkv_bias,
        o_bias=flat.o_bias,
    )


def _attention(flat: FlatConfig, index: int | None) -> AttentionConfig:
    """Return the options of attention in a layer; None: as the flat form states them."""
    names = (field.name for field in dataclasses.fields(AttentionOptions))
    found: JsonObject = {name: getattr(flat, name) for name in names}
    has_window = flat.sliding_window is not None and flat.full is None
    slides = has_window if index is None else flat.slides(index)
    if _is_still(flat, index):
        found["rope"] = dataclasses.replace(flat.rope, rotary_dim=0)
    elif slides and flat.window_rope is not None and index is not None:
        turning = flat.window_rope.rotary_dim or 0
        widest = f"must not exceed head_dim ({flat.head_dim})"
        requirement(flat)(turning <= flat.head_dim, "window_rope.rotary_dim", widest)
        found["rope"] = flat.window_rope
    if not slides:
        found["sliding_window"] = None
        if flat.full is not None:
            found |= dataclasses.asdict(flat.full)
            found["query_scale"] = (flat.full.head_dim / flat.head_dim) ** 0.5
    if flat.shared_kv_layers and index is not None:
        found |= _shared_keys(flat, index)
    return AttentionConfig(**found)


def _shared_keys(flat: FlatConfig, index: int) -> JsonObject:
    """Return whether layer ``index`` lends or borrows its keys, with their name."""
    first, slides = flat.n_layers - flat.shared_kv_layers, flat.slides(index)
    name = "window" if slides else "full"
    if index >= first:
        return {"borrows": name}
    is_last = all(flat.slides(i) != slides for i in range(index + 1, first))
    is_read = any(flat.slides(i) == slides for i in range(first, flat.n_layers))
    return {"lends": name} if is_last and is_read else {}


def _feed(flat: FlatConfig, index: int | None) -> FeedConfig:
    """Return the feed-forward of a layer; None: as the flat form states it."""
    names = (field.name for field in dataclasses.fields(FeedConfig))
    found: JsonObject = {name: getattr(flat, name) for name in names}
    is_late = index is not None and index >= flat.n_layers - flat.shared_kv_layers
    if is_late and flat.shared_kv_d_ff is not None:
        found["d_ff"] = flat.shared_kv_d_ff
    experts = flat.experts
    if experts is not None and experts.shared_norms:  # the dense feed-forward
        experts = dataclasses.replace(experts, shared=found["d_ff"])
    has_experts = index is None or index in (flat.expert_layers or (index,))
    found["experts"] = experts if has_experts else None
    return FeedConfig(**found)


def _form(flat: FlatConfig, index: int | None) -> Form:
    """Return the form of a layer; None: without neighbours."""
    places: JsonObject = {"pre_norms": flat.pre_norms, "post_norms": flat.post_norms}
    if index in flat.post_norm_layers:
        places = {"pre_norms": False, "post_norms": True}
    if flat.parallel_block:
        return Parallel(**places, two_norms=flat.parallel_norms)
    if flat.layer_inputs is not None or flat.layer_scale:
        return Inputs(**places, tables=flat.layer_inputs, layer_scale=flat.layer_scale)
    if index is None:
        return Form(**places)
    reads = index in flat.beside_layers
    if flat.shared_blocks is not None:
        block = flat.shared_blocks if flat.layer_types[index] == "attention" else None
        return Shared(**places, block=block, reads=reads)
    if reads or index + 1 in flat.beside_layers:
        return Beside(**places, reads=reads)
    return Form(**places)


def keys_of(cfg: Layered) -> JsonObject:
    """Return the flat keys of a model's records, the inverse of ``records_of``."""
    norm = cfg.norm
    found: JsonObject = {"norm": norm.kind, "norm_bias": norm.bias, "norm_weight": norm.weight}
    kinds = tuple(layer.kind for layer in cfg.layers)
    found |= {"norm_eps": norm.eps, "norm_out_eps": norm.out_eps}
    found |= {"n_layers": len(kinds), "layer_types": kinds}
    found |= {"mtp_layers": int(cfg.mtp is not None)}
    records = {layer.kind: layer.mixer for layer in reversed(cfg.layers)}
    records |= {spare.kind: spare for spare in cfg.spare if not isinstance(spare, FeedConfig)}
    found |= {"gla": records.pop("gla", None), "delta": records.pop("delta", None)}
    latent = records.pop("latent", None)
    found |= {"latent": None if latent is None else latent.latent}
    found |= _flat_attention(cfg, records.pop("attention"))
    found |= {"mixers": {kind: dict(record.options) for kind, record in records.items()}}
    found |= _flat_feed(cfg)
    found |= _flat_forms(cfg)
    first = cfg.layers[0]
    return found | {"learned_positions": first.learned_positions, "embed_norm": first.embed_norm}


def _some(places: Iterable[int], of: Collection[int]) -> tuple[int, ...]:
    """Return the places; () where they are all places ``of`` which there are some."""
    found = tuple(places)
    return () if len(found) == len(of) else found


def _flat_attention(cfg: Layered, first: AttentionConfig) -> JsonObject:
    """Return the keys of attention; first: the options of the first such layer."""
    heads = {i: layer.mixer for i, layer in enumerate(cfg.layers) if layer.kind == "attention"}
    slides = [i for i in heads if heads[i].sliding_window is not None]
    window = heads[slides[0]] if slides else None
    whole = next((options for options in heads.values() if options.sliding_window is None), None)
    base: AttentionConfig = window or whole or first
    names = (field.name for field in dataclasses.fields(AttentionOptions))
    found: JsonObject = {name: getattr(base, name) for name in names}
    placed = {i: layer for i, layer in enumerate(cfg.layers) if layer.ropes}
    turning = [i for i in placed if placed[i].mixer.rope.rotary_dim != 0]
    ropes = {placed[i].window is not None: placed[i].mixer.rope for i in reversed(turning)}
    found["rope"] = ropes.get(False, ropes.get(True, base.rope))
    if ropes.get(True, found["rope"]) != found["rope"]:
        found["window_rope"] = ropes[True]
    is_still = first.rope.rotary_dim == 0 and not turning
    still = range(len(cfg.layers)) if is_still else [i for i in placed if i not in turning]
    found |= {"nope_layers": tuple(still), "window_layers": _some(slides, heads)}
    if window is not None and whole is not None:
        full, other = (
            FullAttentionConfig(one.head_dim, one.n_kv_heads, one.k_is_v, one.attn_sinks)
            for one in (whole, window)
        )
        if full != other:
            found["full"] = full
    if base.query_scale != 1.0:  # of the layers without a window, where no other is left
        query = cfg.stored.query * base.query_scale
        found["stored"] = dataclasses.replace(cfg.stored, query=query)
    found["shared_kv_layers"] = sum(bool(options.borrows) for options in heads.values())
    return found


def _flat_feed(cfg: Layered) -> JsonObject:
    """Return the keys of the feed-forwards."""
    feeds = {i: layer.feed for i, layer in enumerate(cfg.layers) if layer.feed is not None}
    spare = [record for record in cfg.spare if isinstance(record, FeedConfig)]
    base = [*feeds.values(), *spare][0]
    found = {field.name: getattr(base, field.name) for field in dataclasses.fields(FeedConfig)}
    sparse = {i: feed.experts for i, feed in feeds.items() if feed.experts is not None}
    found["bare_layers"] = tuple(i for i in range(len(cfg.layers)) if i not in feeds)
    found["experts"] = next(iter(sparse.values()), base.experts)
    found["expert_layers"] = _some(sparse, feeds)
    last = feeds.get(len(cfg.layers) - 1, base)
    if cfg.layers[-1].borrows and last.d_ff != base.d_ff:
        found["shared_kv_d_ff"] = last.d_ff
    return found


def _flat_forms(cfg: Layered) -> JsonObject:
    """Return the keys of the layers' forms."""
    forms = [layer.form for layer in cfg.layers]
    form = forms[0]
    after = [i for i, form in enumerate(forms) if form.post_norms and not form.pre_norms]
    found: JsonObject = {"pre_norms": form.pre_norms, "post_norms": form.post_norms}
    if after and len(after) < len(forms):
        found = {"post_norm_layers": tuple(after)}
    if isinstance(form, Parallel):
        found |= {"parallel_block": True, "parallel_norms": form.two_norms}
    if isinstance(form, Inputs):
        found |= {"layer_inputs": form.tables, "layer_scale": form.layer_scale}
    blocks = [form.block for form in forms if isinstance(form, Shared) and form.block is not None]
    if blocks:
        found["shared_blocks"] = blocks[0]
    beside = [i for i, form in enumerate(forms) if isinstance(form, Beside | Shared) and form.reads]
    last = forms[-1]
    is_cut = isinstance(last, Beside) and not last.reads
    is_cut = is_cut or (isinstance(last, Shared) and last.block is not None)
    found["beside_layers"] = tuple(beside) + (len(forms),) * is_cut
    return found
