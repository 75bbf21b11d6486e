"""Calibration data: windows of text, and statistics of every weight's input, block by block.

    tokens = windows(tokenizer, text, 512, 32)          int32 [n, T]
    h = embed(cfg, params, tokens)                      [n, T, D]
    stats = observe(cfg, kind, layer, h, hessian=True)  {site: InputStats} of one block
    h = advance(cfg, kind, layer, h)                    through that block with its current weights

A token's weight says how much an error in it can matter:

    w_t = (1 + attention that t receives, summed over queries) / size_t

An attention sink (arXiv 2309.17453) is one token in hundreds, and every query reads its key and
value. With the weight of one token it is sacrificed for the others (token importance: RSQ, arXiv
2503.01820). Sites that read the block's input use the attention of this block. The other sites use
the attention of the next block, which reads their outputs.

size_t is ``mean(h_t^2)`` for o and down. Their outputs matter relative to the residual stream,
which the next norm divides by its size. For the other sites, whose inputs come from a norm, size_t
is 1. In some layers the activations of the same sink are hundreds of times larger (2402.17762).
Without the division they would dominate the sum over tokens. A GLA layer's tokens receive no
attention.

Only the hidden states before one layer are kept, so memory grows with the length of the calibration
text and not with the model's depth. A layer's parameters are arguments, so one program serves all
layers of a kind. The residual stream is one array between layers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxllama.config import AttentionConfig, LayerConfig, ModelConfig, configs_dir
from jaxllama.errors import JaxLlamaError
from jaxllama.model import linear
from jaxllama.model.decoder import activation_dtype, block, embed_tokens
from jaxllama.model.linear import Stream
from jaxllama.model.mixers.attention.mix import split_heads, unpacked
from jaxllama.model.observer import Observer
from jaxllama.model.records import whole_rows
from jaxllama.model.rope import rope_tables
from jaxllama.quantization.sites import Layer, Part, get, sites
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import Params
from pallas_kernels.attention.plain import attention_scores, is_visible, rotate
from pallas_kernels.qtensor import QTensor, dequantize

DEFAULT_TEXT = configs_dir() / "texts" / "calibration.txt"
SAMPLE = 512  # number of tokens of a site's input that are kept whole
_FIRST = ("mixer/qkv", "mixer/q", "head")  # sites that read the output of the previous block
# Sites whose readers' outputs are added to the residual stream.
_ADDED = ("mixer/o", "mlp/down", "mlp/experts_down")
BATCH = 8  # windows that pass a block at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InputStats:
    """Statistics of a site's input x ``[tokens, K]``, in float32.

    hessian ``[K, K]``: sum of w x x^T over tokens with weight w, or None if no method needs it.
    total, felt ``[K]``: sum and maximum of sqrt(w) |x|. peak ``[K]``: maximum of |x|. sample ``[S,
    K]``: evenly spaced tokens, unweighted. weight ``[S, 1]``: their weights. experts: for a
    mixture's weight (sums of x^2 ``[E, K]``, rows ``[E]``) by expert, else None.
    """

    hessian: jax.Array | None
    total: jax.Array
    felt: jax.Array
    peak: jax.Array
    sample: jax.Array
    weight: jax.Array
    experts: tuple[jax.Array, jax.Array] | None = None

    def scaled(self, s: jax.Array) -> InputStats:
        """Return the statistics of ``x / s``."""
        inverse = 1.0 / s
        hessian = self.hessian
        if hessian is not None:
            hessian = hessian * inverse[:, None] * inverse[None, :]
        columns = (self.total, self.felt, self.peak, self.sample)
        total, felt, peak, sample = (part * inverse for part in columns)
        return InputStats(hessian, total, felt, peak, sample, self.weight, self.experts)


def windows(tokenizer: Tokenizer | None, text: str, window: int, samples: int) -> np.ndarray:
    """Return up to ``samples`` windows of the text's tokens, int32 ``[n, T]``, evenly spread.

    A text shorter than one window is one window. Raises JaxLlamaError for a model without a
    tokenizer or a text of fewer than two tokens.
    """
    if tokenizer is None:
        raise JaxLlamaError("calibration needs text, and this model has no tokenizer")
    ids = np.asarray(tokenizer.encode(text), np.int32)
    if ids.size < 2:
        raise JaxLlamaError(f"the calibration text has {ids.size} tokens: at least 2 are needed")
    window = min(window, ids.size)
    rows = ids[: ids.size // window * window].reshape(-1, window)
    chosen = np.linspace(0, len(rows) - 1, min(samples, len(rows)))
    return rows[np.round(chosen).astype(int)]


def embed(
    cfg: ModelConfig, params: Params, tokens: np.ndarray, dtype: DTypeLike | None = None
) -> list[jax.Array]:
    """Return the residual stream before the first block, in batches of at most ``BATCH`` rows.

    dtype: that of the activations; by default the one of the last norm.

    Raises JaxLlamaError for a model whose layers share weights.
    """
    if any(layer.form.name == "shared" for layer in cfg.layers):
        raise JaxLlamaError(
            f"{cfg.name}: layers share blocks of weights, which are only rounded to nearest; "
            "quantize it without a calibration text"
        )
    count = -(-len(tokens) // BATCH)
    size = -(-len(tokens) // count)
    table = {"embed": params["embed"]}
    name = (activation_dtype(params) if dtype is None else jnp.dtype(dtype)).name
    return [
        _embed(cfg, table, jnp.asarray(tokens[first : first + size]), name)
        for first in range(0, len(tokens), size)
    ]


@functools.partial(jax.jit, static_argnames=("cfg", "dtype"))
def _embed(cfg: ModelConfig, params: Layer, tokens: jax.Array, dtype: str) -> jax.Array:
    return embed_tokens(cfg, params, tokens, jnp.dtype(dtype))


def observe(
    part: Part,
    layer: Layer,
    h: list[jax.Array],
    *,
    hessian: bool,
    following: tuple[LayerConfig, Layer] | None = None,
) -> dict[str, InputStats]:
    """Return statistics of the input of every site of a layer, or of a model's head.

    following: the next layer's record and parameters, if it has attention.
    """
    next_layer, following_layer = (None, None) if following is None else following
    if following_layer is not None:
        mixer = {name: value for name, value in following_layer["mixer"].items() if name != "o"}
        norm = {name: value for name, value in following_layer.items() if name == "mixer_norm"}
        following_layer = {"mixer": mixer, **norm}
    keep = -(-SAMPLE // len(h))
    sums, samples = None, []
    for batch in h:
        found, sample = _observe(part, next_layer, layer, following_layer, batch, hessian, keep)
        sums = found if sums is None else _merge(sums, found)
        samples.append(sample)
    assert sums is not None
    stats: dict[str, InputStats] = {}
    for name, (product, total, felt, peak, by_expert) in sums.items():
        sample, weight = map(jnp.concatenate, zip(*(x[name] for x in samples), strict=True))
        stats[name] = InputStats(product, total, felt, peak, sample, weight, by_expert)
    return stats


# Of a site: hessian, total, felt, peak, experts.
Sums = tuple[jax.Array | None, jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.jit, static_argnums=(0, 1, 5, 6))
def _observe(
    part: Part,
    next_layer: LayerConfig | None,
    layer: Layer,
    following: Layer | None,
    h: jax.Array,
    hessian: bool,
    keep: int,
) -> tuple[dict[str, Sums], dict[str, tuple[jax.Array, jax.Array]]]:
    """Return the statistics of one batch.

    They are ({site: (hessian, total, felt, peak, experts)}, {site: (sample, weight)}).
    """
    watch = Observer()
    if isinstance(part, ModelConfig):
        watch.norm_linear(Stream(h), layer["norm"], layer["head"], part)
        after = h
    else:
        after = _through(part, layer, h, watch)[..., : part.d_model]
    size = jnp.mean(jnp.square(after.astype(jnp.float32)), axis=-1).reshape(-1, 1)
    before = later = jnp.ones_like(size)
    if isinstance(part, LayerConfig) and part.kind == "attention":
        qkv = watch.outputs[id(layer["mixer"]["qkv"])]
        before = 1 + _attention_received(part.mixer, layer["mixer"], qkv).reshape(-1, 1)
    if following is not None and next_layer is not None:
        y, _ = linear.norm(Stream(after), following.get("mixer_norm"), next_layer)
        qkv = linear.linear(y, following["mixer"]["qkv"])
        later = 1 + _attention_received(next_layer.mixer, following["mixer"], qkv).reshape(-1, 1)
    sums, samples = {}, {}
    for site in sites(part):
        reader = id(get(layer, site.readers[0]))
        x = watch.inputs[reader].astype(jnp.float32)
        x = x.reshape(-1, x.shape[-1])
        weight = before if site.name in _FIRST else later
        weight = jnp.repeat(weight, len(x) // len(weight), axis=0)  # a row for each expert
        if site.name in _ADDED:
            weight = weight / (jnp.repeat(size, len(x) // len(size), axis=0) + part.norm.eps)
        by_expert = None
        if reader in watch.experts:
            by_expert = _by_expert(part, x, watch.experts[reader])
        felt = x * jnp.sqrt(weight)
        second = jnp.matmul(felt.T, felt, precision=lax.Precision.HIGHEST) if hessian else None
        felt, at = jnp.abs(felt), np.linspace(0, len(x) - 1, min(keep, len(x))).astype(int)
        peak = jnp.max(jnp.abs(x), axis=0)
        total, largest = jnp.sum(felt, axis=0), jnp.max(felt, axis=0)
        sums[site.name] = (second, total, largest, peak, by_expert)
        samples[site.name] = (x[at], weight[at])
    return sums, samples


def _by_expert(part: Part, x: jax.Array, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (sums of x^2 ``[E, K]``, rows ``[E]``) by expert, for x ``[rows, K]``."""
    options = part.experts
    assert options is not None
    is_of_expert = experts.reshape(len(x), -1)[..., None] == jnp.arange(options.n_experts)
    takes = jnp.sum(is_of_expert, axis=1, dtype=jnp.float32)
    sums = jnp.matmul(takes.T, jnp.square(x), precision=lax.Precision.HIGHEST)
    return sums, jnp.sum(takes, axis=0)


def _attention_received(cfg: AttentionConfig, mixer: Layer, qkv: jax.Array) -> jax.Array:
    """Return the attention weights that each token receives, ``[B, T]``.

    qkv is ``[B, T, (N + 2K) H]``. The weights are summed over the queries of the window and
    averaged over heads.
    """
    length = qkv.shape[1]
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    rope = rope_tables(cfg.rope, cfg.head_dim, positions, jnp.full((1,), length, jnp.int32))
    visible = is_visible(positions, positions, cfg.sliding_window)[:, None, None]

    def received_by(row: jax.Array) -> jax.Array:
        heads = split_heads(cfg, mixer, unpacked(cfg, mixer, row[None])[1])
        q, k, _ = jnp.split(heads, (cfg.n_heads, cfg.n_heads + cfg.n_kv_heads), axis=2)
        scores = attention_scores(rotate(q, *rope), rotate(k, *rope), softcap=cfg.attn_softcap)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return jnp.sum(weights, axis=(0, 1, 2, 3)) / cfg.n_heads

    return lax.map(received_by, qkv)


@functools.partial(jax.jit, donate_argnums=0)
def _merge(first: dict[str, Sums], two: dict[str, Sums]) -> dict[str, Sums]:
    def both(a: Sums, b: Sums) -> Sums:
        hessian = None if a[0] is None or b[0] is None else a[0] + b[0]
        most = jnp.maximum(a[2], b[2]), jnp.maximum(a[3], b[3])
        return hessian, a[1] + b[1], *most, jax.tree.map(jnp.add, a[4], b[4])

    return {name: both(first[name], two[name]) for name in first}


def advance(config: LayerConfig, layer: Layer, h: list[jax.Array]) -> list[jax.Array]:
    """Return the residual stream after a layer."""
    # A pair of mixers adds and takes what stands beside the stream, which changes the shape.
    run = _advance_pair if config.form.neighbours else _advance_alone
    return [run(config, layer, batch) for batch in h]


def _advance(config: LayerConfig, layer: Layer, h: jax.Array) -> jax.Array:
    # A weight-only product equals the product with its dequantized floats. Here it is faster to
    # make the floats once for a whole batch of windows.
    def plain(leaf: jax.Array | QTensor) -> jax.Array | QTensor:
        if isinstance(leaf, QTensor) and leaf.activations is None:
            return dequantize(leaf, h.dtype)
        return leaf

    layer = jax.tree.map(plain, layer, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    return _through(config, layer, h)


_advance_pair = jax.jit(_advance, static_argnums=0)
_advance_alone = jax.jit(_advance, static_argnums=0, donate_argnums=2)


def _through(config: LayerConfig, layer: Layer, h: jax.Array, ops: Any = linear) -> jax.Array:
    at = whole_rows(config, h.shape[0], h.shape[1])
    stream = Stream.unpacked(h, config.d_model)
    return block(config, layer, stream, None, at, ops)[0].packed
