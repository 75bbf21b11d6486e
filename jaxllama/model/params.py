"""The parameters of a model: one table, read by init, sharding, loading, saving and schemes.

    param_table(cfg) -> {path: Param}     in the order of the forward pass

A path is that of the parameter tree, ("layer_0", "mixer", "qkv", "weight").  A ``Param`` has its
shape, what it is drawn from, and the tensors of a checkpoint whose rows, one after the other, it
is.  Fusion (q|k|v, gate|up) is therefore data, and loading and saving are the same walk in two
directions.  Another family of names is another ``Names``; models with GLA layers have those of
flash-linear-attention.  Along which axis a mesh splits a parameter is a rule of its path
(``parallel.layout.split_axis``).

``module.Parameters`` are the linen modules that declare them.  This file imports no jax: who only
reads a checkpoint does without.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllama.config import ModelConfig

Path = tuple[str, ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Turned:
    """Rows that RoPE turns, as a checkpoint orders them: the first ``heads`` heads of ``head_dim``
    rows each, of which ``rotary_dim`` turn, two that are neighbours or half of them apart.

    Ours are a head's two halves, row i turning with row i + head_dim / 2; rows that do not turn
    stand behind those that do in each half.  gated: behind each head are as many rows of its gate,
    which in ours stand before all heads.
    """

    heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    gated: bool = False

    @property
    def block(self) -> int:
        """Rows that change places only among themselves."""
        return 2 * self.heads * self.head_dim if self.gated else self.head_dim

    def rows(self) -> np.ndarray:
        """For each of our rows the checkpoint's."""
        turning, rest = np.arange(self.rotary_dim), np.arange(self.rotary_dim, self.head_dim)
        halves = (turning[0::2], turning[1::2]) if self.interleaved else np.split(turning, 2)
        head = np.concatenate([halves[0], *np.split(rest, 2)[:1], halves[1], np.split(rest, 2)[1]])
        starts = np.arange(self.heads)[:, None] * self.head_dim
        if not self.gated:
            return (starts + head).reshape(-1)
        gates = 2 * starts + self.head_dim + np.arange(self.head_dim)
        return np.concatenate([gates.reshape(-1), (2 * starts + head).reshape(-1)])


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Rows of several ``parts`` (rows a group), of which a checkpoint has all of one group together
    and we have all groups of one part."""

    groups: int
    parts: tuple[int, ...]

    @property
    def block(self) -> int:
        return self.groups * sum(self.parts)

    def rows(self) -> np.ndarray:
        theirs = np.arange(self.block).reshape(self.groups, -1)
        ends = np.cumsum(self.parts)[:-1]
        return np.concatenate([part.reshape(-1) for part in np.split(theirs, ends, axis=1)])


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor as the checkpoint has it; the parameter's rows are ``scale * tensor + offset``, in
    our order of what RoPE turns, or of what is fused in groups."""

    name: str
    shape: Shape
    scale: float = 1.0
    offset: float = 0.0
    turned: Turned | Grouped | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_folded(self) -> bool:
        return (self.scale, self.offset) != (1.0, 0.0) or self.turned is not None

    def row_order(self, inverse: bool = False) -> np.ndarray | None:
        """For each row of the parameter the tensor's (inverse: the other way), None where they are
        the same."""
        if self.turned is None:
            return None
        rows, turned = np.arange(self.shape[0]), self.turned.rows()
        rows[: turned.size] = turned
        return np.argsort(rows) if inverse else rows


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter of ``shape`` whose memory is its ``sources``' memory, one after the other.

    mean, std: of the normal distribution that it is drawn from.
    """

    sources: tuple[Source, ...]
    shape: Shape
    mean: float = 0.0
    std: float = 0.02

    def __post_init__(self) -> None:
        assert sum(source.size for source in self.sources) == math.prod(self.shape), self

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def one(name: str, *shape: int, fold: Mapping[str, Any] | None = None, **facts: Any) -> Param:
    """A parameter that is one tensor; fold: of its ``Source``."""
    return Param((Source(name, shape, **(fold or {})),), shape, **facts)


def rows(parts: Sequence[Source], **facts: Any) -> Param:
    """A parameter that stacks tensors ``[rows_i, ...]``."""
    rest = parts[0].shape[1:]
    return Param(tuple(parts), (sum(part.shape[0] for part in parts), *rest), **facts)


@dataclasses.dataclass(frozen=True)
class DeltaNames:
    """Of a gated delta layer; ``mixer`` goes before them.

    inputs, gates, conv: the tensors of q|k|v|output gate, of beta|decay and of the convolutions,
    each with how many of those parts it is.  grouped: the first two have the parts of each key head
    together.  low_rank: of decay and output gate, each two tensors.  rate: A_log's shape, -1 for
    the heads.
    """

    mixer: str = "linear_attn."
    inputs: tuple[tuple[str, int], ...] = (("in_proj_qkv", 3), ("in_proj_z", 1))
    gates: tuple[tuple[str, int], ...] = (("in_proj_b", 1), ("in_proj_a", 1))
    conv: tuple[tuple[str, int], ...] = (("conv1d", 3),)
    grouped: bool = False
    low_rank: tuple[tuple[str, str], ...] = ()
    rate: tuple[int, ...] = (-1,)
    norm: str = "norm"
    o: str = "out_proj"


@dataclasses.dataclass(frozen=True)
class GLANames:
    """Of a GLA layer.  norms: of a head's output, of which a file has one; the first is the name
    beside an output gate, where nothing else is known."""

    decay: str = "gk_proj"
    norms: tuple[str, ...] = ("g_norm_swish_gate", "g_norm")


@dataclasses.dataclass(frozen=True)
class Names:
    """What a checkpoint family calls the parts of a decoder; ``layer`` takes the index.  ``mixer``
    and ``mlp`` go before their tensors' names; ``other_mlp`` is another prefix that files may have
    in the place of ``mlp``.  One name for ``qkv`` or ``gate_up``: the file has
    them in one tensor."""

    embed: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    mixer_norm: str = "input_layernorm"
    mixer: str = "self_attn."
    mixer_out_norm: str = "post_self_attn_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp."
    other_mlp: str = ""
    mlp_out_norm: str = "post_mlp_layernorm"
    norm: str = "model.norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    o: str = "o_proj"
    down: str = "down_proj"
    delta: DeltaNames | None = None
    gla: GLANames = GLANames()


LLAMA = Names()
FLA = Names(embed="model.embeddings", mixer_norm="attn_norm", mixer="attn.", mlp_norm="mlp_norm")
_BEHIND = {"mixer_out_norm": "post_attention_layernorm",
           "mlp_out_norm": "post_feedforward_layernorm"}  # fmt: skip
_GEMMA = Names(mlp_norm="pre_feedforward_layernorm", **_BEHIND)
_QWEN_NEXT = DeltaNames(inputs=(("in_proj_qkvz", 4),), gates=(("in_proj_ba", 2),), grouped=True)
_FLA_DELTA = DeltaNames(
    mixer="attn.",
    inputs=tuple((f"{name}_proj", 1) for name in "qkvg"),
    gates=(("b_proj", 1), ("a_proj", 1)),
    conv=tuple((f"{name}_conv1d", 1) for name in "qkv"),
    low_rank=(("f_proj.0", "f_proj.1"), ("g_proj.0", "g_proj.1")),
    norm="o_norm",
    o="o_proj",
)
_KIMI = dataclasses.replace(
    _FLA_DELTA,
    mixer="self_attn.",
    low_rank=(("f_a_proj", "f_b_proj"), ("g_a_proj", "g_b_proj")),
    rate=(1, 1, -1, 1),
)
# By ``cfg.stored.family``; LLAMA for those that are not here.
FAMILIES = {
    "gla": FLA,
    "simple_gla": FLA,
    "linear_attn": dataclasses.replace(FLA, gla=GLANames(norms=("norm",))),
    "gla_paper": Names(
        embed="transformer.wte",
        layer="transformer.h.{}",
        mixer_norm="ln_1",
        mixer="attn.",
        mlp_norm="ln_2",
        mlp="",
        norm="transformer.ln_f",
        gate_up=("w1", "w3"),
        down="w2",
        o="out_proj",
        gla=GLANames(decay="k_gate"),
    ),
    **dict.fromkeys(
        ("gated_deltanet", "kda", "delta_net"), dataclasses.replace(FLA, delta=_FLA_DELTA)
    ),
    "kimi_linear": Names(delta=_KIMI, other_mlp="block_sparse_moe."),
    "qwen3_next": Names(delta=_QWEN_NEXT),
    "qwen3_5_text": Names(delta=DeltaNames()),
    "phi3": Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    "glm": Names(gate_up=("gate_up_proj",)),
    "glm4": Names(gate_up=("gate_up_proj",)),
    "olmo2": Names(**_BEHIND),
    "olmo3": Names(**_BEHIND),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
}


def param_table(
    cfg: ModelConfig, present: Collection[str] = (), names: Names | None = None
) -> dict[Path, Param]:
    """See the module docstring.

    present: a checkpoint's tensors, where a family has had more than one name for a thing; without
        them the names are the library's present ones.
    names: another container's (GGUF), instead of those of the family's Hugging Face directories.
    """
    if names is None:
        names = FAMILIES.get(cfg.stored.family, FLA if "gla" in cfg.layer_types else LLAMA)
    d, stored = cfg.d_model, cfg.stored
    table: dict[Path, Param] = {
        ("embed", "weight"): one(
            f"{names.embed}.weight", cfg.vocab_size, d, fold={"scale": stored.embed}
        )
    }
    for index, kind in enumerate(cfg.layer_types):
        prefix, layer = names.layer.format(index), f"layer_{index}"
        if kind == "attention":
            mixer = _attention(cfg, f"{prefix}.{names.mixer}", names)
        elif kind == "delta":
            mixer = _delta(cfg, f"{prefix}.", names.delta or _FLA_DELTA)
        else:
            mixer = _gla(cfg, f"{prefix}.{names.mixer}", names, present)
        is_other = f"{prefix}.{names.other_mlp}{names.gate_up[0]}.weight" in present
        mlp_prefix = names.other_mlp if is_other else names.mlp
        mlp = _mlp(cfg, f"{prefix}.{mlp_prefix}", names, present)
        norm = functools.partial(_norm, cfg)
        if cfg.pre_norms:
            table |= norm((layer, "mixer_norm"), f"{prefix}.{names.mixer_norm}")
        table |= {(layer, "mixer", *path): param for path, param in mixer.items()}
        if cfg.post_norms:
            table |= norm((layer, "mixer_out_norm"), f"{prefix}.{names.mixer_out_norm}")
        if cfg.pre_norms and not cfg.parallel_block:
            table |= norm((layer, "mlp_norm"), f"{prefix}.{names.mlp_norm}")
        table |= {(layer, "mlp", *path): param for path, param in mlp.items()}
        if cfg.post_norms:
            table |= norm((layer, "mlp_out_norm"), f"{prefix}.{names.mlp_out_norm}")
    # A tied head has the embedding's multiplier, too.
    scale = stored.logits / (stored.embed if cfg.tie_embeddings else 1.0)
    table |= _norm(cfg, ("norm",), names.norm, scale)
    if not cfg.tie_embeddings:
        table["head", "weight"] = one(f"{names.head}.weight", cfg.vocab_size, d)
    return table


def _norm(cfg: ModelConfig, path: Path, name: str, scale: float = 1.0) -> dict[Path, Param]:
    """A norm of the stream; the checkpoint's weight w stands for ``scale * (w + norm_offset)``."""
    fold = {"scale": scale, "offset": scale * cfg.stored.norm_offset}
    weight = one(f"{name}.weight", cfg.d_model, mean=1.0, std=0.0, fold=fold)
    table = {(*path, "weight"): weight}
    if cfg.norm_bias:
        bias = one(f"{name}.bias", cfg.d_model, std=0.0, fold={"scale": scale})
        table[*path, "bias"] = bias
    return table


def _attention(cfg: ModelConfig, prefix: str, names: Names) -> dict[Path, Param]:
    """q, k and v fused by rows, before them q's gate, the norms of q and k, and o; or q, and what
    makes k and v of latents."""
    if cfg.latent is not None:
        return _latent(cfg, prefix, names)
    h, stored = cfg.head_dim, cfg.stored
    q, kv = cfg.n_heads * h, cfg.n_kv_heads * h
    n_rows = (2 * q if cfg.attn_gate else q), kv, kv
    partial = next((r.rotary_dim for r in cfg.ropes if r.rotary_dim), h)
    turned = functools.partial(
        Turned, head_dim=h, rotary_dim=partial, interleaved=stored.interleaved
    )
    moves = partial != h or stored.interleaved
    scales = (stored.query if cfg.qk_norm == "none" else 1.0, 1.0, 1.0)
    heads = (cfg.n_heads, cfg.n_kv_heads, 0)
    if len(names.qkv) == 1:
        assert scales[0] == 1.0, "a multiplier of q, which is one tensor with k and v"
        n_rows, heads = (sum(n_rows),), (cfg.n_heads + cfg.n_kv_heads,)
    folds = [
        {"scale": scale, "turned": turned(count) if moves and count else None}
        for scale, count in zip(scales, heads, strict=False)
    ]
    if cfg.attn_gate:
        assert scales[0] == 1.0 and len(names.qkv) == 3, (
            "a gate that is multiplied, or with k and v"
        )
        folds[0] = {"turned": turned(cfg.n_heads, gated=True)}
    sources = [f"{prefix}{name}" for name in names.qkv]
    parts = list(zip(sources, n_rows, folds, strict=False))
    table = _fused("qkv", parts, cfg.d_model, cfg.qkv_bias)
    if cfg.qk_norm != "none":
        for name, width, scale in (("q_norm", q, stored.query), ("k_norm", kv, 1.0)):
            width = h if cfg.qk_norm == "head" else width
            fold = {"scale": scale, "offset": scale * stored.norm_offset,
                    "turned": turned(width // h) if moves else None}  # fmt: skip
            table[name, "weight"] = one(
                f"{prefix}{name}.weight", width, mean=1.0, std=0.0, fold=fold
            )
    o = _back("o", f"{prefix}{names.o}", cfg.d_model, q, cfg.o_bias, stored.residual)
    return table | o


def _latent(cfg: ModelConfig, prefix: str, names: Names) -> dict[Path, Param]:
    latent, d, n = cfg.latent, cfg.d_model, cfg.n_heads
    assert latent is not None
    rank, width = latent.kv_rank, n * (latent.d_nope + latent.d_v)
    table = {
        ("q", "weight"): one(f"{prefix}q_proj.weight", n * cfg.head_dim, d),
        ("kv_a", "weight"): one(f"{prefix}kv_a_proj_with_mqa.weight", rank + latent.d_rope, d),
        ("kv_norm", "weight"): one(f"{prefix}kv_a_layernorm.weight", rank, mean=1.0, std=0.0),
        ("kv_b", "weight"): one(f"{prefix}kv_b_proj.weight", width, rank),
    }
    return table | _back("o", f"{prefix}{names.o}", d, n * latent.d_v, cfg.o_bias)


def _mlp(
    cfg: ModelConfig, prefix: str, names: Names, present: Collection[str]
) -> dict[Path, Param]:
    """gate and up fused by rows, and down.  Old checkpoints of flash-linear-attention have both in
    one tensor, too."""
    gate_up = [f"{prefix}{name}" for name in names.gate_up]
    if f"{gate_up[0]}.weight" in present and f"{gate_up[-1]}.weight" not in present:
        gate_up = gate_up[:1]
    parts = [(name, 2 * cfg.d_ff // len(gate_up), {}) for name in gate_up]
    table = _fused("gate_up", parts, cfg.d_model, cfg.mlp_bias)
    down = f"{prefix}{names.down}"
    residual = cfg.stored.residual
    return table | _back("down", down, cfg.d_model, cfg.d_ff, cfg.mlp_bias, residual)


def _fused(
    name: str, parts: list[tuple[str, int, dict[str, Any]]], width: int, bias: bool
) -> dict[Path, Param]:
    """A product that reads the residual stream."""
    table = {(name, "weight"): rows([Source(f"{n}.weight", (r, width), **f) for n, r, f in parts])}
    if bias:
        table[name, "bias"] = rows([Source(f"{n}.bias", (r,), **f) for n, r, f in parts], std=0.0)
    return table


def _back(
    name: str, source: str, d: int, width: int, bias: bool, scale: float = 1.0
) -> dict[Path, Param]:
    """A product that writes it; its bias is added once, to the sum."""
    fold = {"scale": scale}
    table = {(name, "weight"): one(f"{source}.weight", d, width, fold=fold)}
    if bias:
        table[name, "bias"] = one(f"{source}.bias", d, std=0.0, fold=fold)
    return table


def _gla(
    cfg: ModelConfig, prefix: str, names: Names, present: Collection[str]
) -> dict[Path, Param]:
    """The parameters of one GLA mixer."""
    gla = cfg.gla
    assert gla is not None
    d_k, d_v = cfg.gla_head_dims
    q, k, v = gla.n_heads * d_k, gla.n_kv_heads * d_k, gla.n_kv_heads * d_v
    d, out = cfg.d_model, gla.n_heads * d_v
    table: dict[Path, Param] = {
        ("q", "weight"): one(f"{prefix}q_proj.weight", q, d, fold={"scale": cfg.stored.query}),
        ("k", "weight"): one(f"{prefix}k_proj.weight", k, d),
        ("v", "weight"): one(f"{prefix}v_proj.weight", v, d),
    }
    if gla.use_short_conv:
        for name, width in (("q", q), ("k", k), ("v", v)):
            # The checkpoint's [features, 1, W] is the same memory.
            source = Source(f"{prefix}{name}_conv1d.weight", (width, 1, gla.conv_size))
            table[f"{name}_conv", "weight"] = Param(
                (source,), (width, gla.conv_size), std=gla.conv_size**-0.5
            )
    rank, decay = gla.gate_low_rank_dim, f"{prefix}{names.gla.decay}"
    if gla.decay == "channel":
        table["gk_0", "weight"] = one(f"{decay}.0.weight", rank, d)
        table["gk_1", "weight"] = one(f"{decay}.1.weight", k, rank)
        table["gk_1", "bias"] = one(f"{decay}.1.bias", k, std=0.0)
    elif gla.decay == "head":
        table["gk", "weight"] = one(f"{decay}.weight", gla.n_heads, d)
        table["gk", "bias"] = one(f"{decay}.bias", gla.n_heads, std=0.0)
    if gla.use_output_gate:
        table["g", "weight"] = one(f"{prefix}g_proj.weight", out, d)
        if gla.gate_bias:
            table["g", "bias"] = one(f"{prefix}g_proj.bias", out, std=0.0)
    if gla.norm_weight:
        norms = [f"{prefix}{name}" for name in names.gla.norms]
        plain = norms[0] if gla.use_output_gate else norms[-1]
        norm = next((name for name in norms if f"{name}.weight" in present), plain)
        table["g_norm", "weight"] = one(f"{norm}.weight", d_v, mean=1.0, std=0.0)
    return table | _back("o", f"{prefix}{names.o}", d, out, False)


def _delta(cfg: ModelConfig, layer: str, names: DeltaNames) -> dict[Path, Param]:
    """The parameters of one gated delta mixer."""
    delta = cfg.delta
    assert delta is not None
    prefix, d, rank = f"{layer}{names.mixer}", cfg.d_model, delta.d_v
    k, v, heads = delta.n_k_heads * delta.d_k, delta.n_heads * delta.d_v, delta.n_heads

    def fused(tensors: Sequence[tuple[str, int]], sizes: Sequence[int], *rest: int) -> Param:
        parts, at = [], 0
        for name, count in tensors:
            one, at = tuple(sizes[at : at + count]), at + count
            if one:
                groups = delta.n_k_heads
                turned = Grouped(groups, tuple(n // groups for n in one)) if names.grouped else None
                turned = turned if rest == (d,) else None
                parts.append(Source(f"{prefix}{name}.weight", (sum(one), *rest), turned=turned))
        return rows(parts)

    full = delta.gate == "full"
    table = {("qkvz", "weight"): fused(names.inputs, (k, k, v, v) if full else (k, k, v), d)}
    table["ba", "weight"] = fused(names.gates, (heads,) * (1 + (delta.decay == "head")), d)
    if delta.conv_size:
        conv = fused(names.conv, (k, k, v), 1, delta.conv_size)
        # The checkpoint's [features, 1, W] is the same memory.
        table["conv", "weight"] = dataclasses.replace(
            conv, shape=(2 * k + v, delta.conv_size), std=delta.conv_size**-0.5
        )
    low_rank = (("f", delta.decay == "channel", heads * delta.d_k),
                ("g", delta.gate == "low_rank", v))  # fmt: skip
    for index, (name, there, width) in enumerate(low_rank):
        if there:
            first, second = (f"{prefix}{tensor}" for tensor in names.low_rank[index])
            table[f"{name}_0", "weight"] = one(f"{first}.weight", rank, d)
            table[f"{name}_1", "weight"] = one(f"{second}.weight", width, rank)
            if name == "g" and delta.gate_bias:
                table["g_1", "bias"] = one(f"{second}.bias", width, std=0.0)
    if delta.decay != "none":
        n_rates = heads * delta.d_k if delta.decay == "channel" else heads
        rate = Source(f"{prefix}A_log", tuple(heads if n < 0 else n for n in names.rate))
        table["decay", "a_log"] = Param((rate,), (heads,), mean=2.0, std=0.5)
        table["decay", "dt_bias"] = one(f"{prefix}dt_bias", n_rates, mean=-4.6, std=1.0)
    table["o_norm", "weight"] = one(f"{prefix}{names.norm}.weight", delta.d_v, mean=1.0, std=0.0)
    return table | _back("o", f"{prefix}{names.o}", d, v, False)


def nested(table: Mapping[Path, Any]) -> dict[str, Any]:
    """A tree of dicts out of a dict by path."""
    tree: dict[str, Any] = {}
    for path, value in table.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree


def check(cfg: ModelConfig, params: Mapping[str, Any]) -> None:
    """Raises ValueError naming a parameter that is missing or has another shape than ``cfg``'s."""
    for path, param in param_table(cfg).items():
        value: Any = params
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        found = None if value is None else value.shape
        if found != param.shape:
            raise ValueError(f"{'/'.join(path)}: shape {found}, but the config wants {param.shape}")
