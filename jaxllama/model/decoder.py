"""The decoder: embedding, blocks, final norm, head.  One description for Llama, GLA and hybrids.

    hidden, cache = forward(cfg, params, tokens, lengths, cache)
    scores        = logits(cfg, params, hidden)

    block:  stream += mixer(norm(stream));  stream += mlp(norm(stream))     a record of cfg.layers

A layer's record names its form (``model.forms``), which says where norms stand and what the two
sublayers read.  The parameters of a layer have no entry for a norm that it lacks.

All functions here are pure functions of the parameter tree that ``model.module`` declares; the
functions for users are in ``generation``.  ``walk`` is the only loop over the layers and ``block``
the only layer: training, distillation, calibration and offloading call them too.  For parameters on
a mesh, ``forward`` and ``logits`` run over it (``model.sharded``).

In a decode step of few rows on Hopper, a Llama or GLA layer is five kernels: one for each line of
``forms.sequential`` that calls an op.  A norm after a sublayer is one more.

Sources: Llama (arXiv 2302.13971), GLA (2312.06635).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.model import linear
from jaxllama.model.cache import Cache, LayerState, cache_specs
from jaxllama.model.forms import FORMS
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.model.lora import ROWS, chosen
from jaxllama.model.param import Path, Shape
from jaxllama.model.params import param_table
from jaxllama.model.records import At, Hidden, new_tokens, pieces_of, positions_of
from jaxllama.model.sharded import layer_work, over_mesh, over_pieces
from jaxllama.parallel.collectives import lookup_rows
from jaxllama.parallel.mesh import MODEL_AXIS, RowAxis, is_split, traced_mesh
from jaxllama.parallel.sequence import cut, is_cut, joined, piece_width, sequence_shards
from jaxllama.typing import Params, Tree
from pallas_kernels.cpu import CpuWeight
from pallas_kernels.cpu.handler import CpuPlan
from pallas_kernels.cpu.head import norm_matmul
from pallas_kernels.cpu.head import plan as head_plan
from pallas_kernels.dispatch import is_recording
from pallas_kernels.fixed_sums import fixed_sums
from pallas_kernels.qtensor import QTensor, RowBlocks, dequantize, leaves_of

# A layer


def block(
    layer: LayerConfig,
    p: Params,
    stream: Stream,
    state: LayerState,
    at: At,
    ops: LayerOps = linear,
) -> tuple[Stream, LayerState]:
    """One layer, in its form (``model.forms``).

    state: None where there is no cache.  ops: who does ``norm_linear`` and ``linear_add``: the
    module ``model.linear``, or an ``observer.Observer`` that records.
    """
    form = FORMS[layer.form.name]
    mixed, state = form.mix(layer, p, stream, state, at, ops)
    return form.finish(layer, p, form.feed(layer, p, mixed, stream, ops), at, ops), state


def walk(
    cfg: ModelConfig,
    params: Params,
    stream: Stream,
    states: Sequence[LayerState] | None,
    at: At,
    run: Callable[..., tuple[Stream, LayerState]] = block,
) -> tuple[Stream, tuple[LayerState, ...], jax.Array | None]:
    """Run the stream through all layers; run: the function of one layer, called as ``block``.

    A layer that borrows keys and values reads the new state of the layer that lends them.
    Returns (stream, states, ``Hidden.taps``).
    """
    new: list[LayerState] = []
    lent: dict[str, LayerState] = {}
    tapped: dict[int, jax.Array] = {}
    for index, layer in enumerate(cfg.layers):
        if index in cfg.taps:
            tapped[index] = stream.total
        here = at if at.inputs is None else dataclasses.replace(at, inputs=at.inputs[:, :, index])
        state = None if states is None else states[index]
        state = lent.get(layer.borrows, state)
        stream, state = run(layer, params[f"layer_{index}"], stream, state, here)
        new.append(None if layer.borrows else state)
        lent |= {layer.lends: state} if layer.lends else {}
    tapped[cfg.n_layers] = stream.total
    taps = [tapped[index] for index in cfg.taps]
    return stream, tuple(new), jnp.concatenate(taps, axis=-1) if taps else None


def _block(
    fixed: bool, layer: LayerConfig, p: Params, stream: Stream, state: LayerState, at: At
) -> tuple[Stream, LayerState]:
    with fixed_sums(fixed):
        return block(layer, p, stream, state, at)


# Traced and lowered once for all layers that are alike; the compiler inlines it.
_block_once = jax.jit(_block, static_argnums=(0, 1))


def block_of_a_program(cfg: ModelConfig) -> Callable[..., tuple[Stream, LayerState]]:
    """Return ``block`` for a program, compiled once for all layers that are alike.

    While choices are recorded, every layer is traced, so that each records its own choices.
    """
    return functools.partial(_block if is_recording() else _block_once, cfg.fixed_sums)


# The code around the layers


def begin(
    cfg: ModelConfig, params: Params, tokens: jax.Array, dtype: DTypeLike, at: At
) -> tuple[Stream, At]:
    """Return the first layer's stream and record of ``tokens[B, T]``, whose places ``at`` has."""
    x, form = embed_tokens(cfg, params, tokens, dtype), FORMS[cfg.layers[0].form.name]
    with fixed_sums(cfg.fixed_sums):
        inputs = form.inputs(cfg, params, tokens, x)
    return form.begin(x), at if inputs is None else dataclasses.replace(at, inputs=inputs)


def embed_tokens(
    cfg: ModelConfig, params: Params, tokens: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Return the embeddings of ``tokens[B, T]``, as the first layer reads them, ``[B, T, D]``."""
    return scale_embedded(cfg, rows_of_table(params["embed"]["weight"], tokens, dtype))


def first_stream(cfg: ModelConfig, x: jax.Array) -> Stream:
    """Return the stream of embeddings ``x[..., D]``."""
    return FORMS[cfg.layers[0].form.name].begin(x)


def rows_of_table(weight: linear.Weight, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows ``tokens[...]`` of a table ``[V, D]``."""
    assert not isinstance(weight, RowBlocks)  # a table has one scheme
    if is_split():
        assert not isinstance(weight, CpuWeight)  # a mesh keeps weights in their first layout
        return lookup_rows(weight, tokens, dtype)
    if isinstance(weight, QTensor | CpuWeight):
        return dequantize(weight.rows(tokens), dtype)
    return weight[tokens].astype(dtype)


def scale_embedded(cfg: ModelConfig, x: jax.Array) -> jax.Array:
    """Return embeddings ``[..., D]`` as the first layer reads them."""
    return x * jnp.asarray(cfg.d_model**0.5, x.dtype) if cfg.embedding_scale else x


def final_norm(cfg: ModelConfig, params: Params, stream: Stream | Hidden) -> jax.Array:
    """Apply the final norm; the head's product reads its result."""
    stream = Stream(stream.x) if isinstance(stream, Hidden) else stream
    return linear.norm(stream, params["norm"], cfg)[0]


def head(params: Params) -> Params:
    """The product to logits: its own weight, or the embedding's."""
    return params["head"] if "head" in params else params["embed"]


def activation_dtype(params: Params) -> jnp.dtype:
    """Norm weights are never quantized, so their dtype is the activations'."""
    return params["norm"]["weight"].dtype


# The model


SomeCache = TypeVar("SomeCache", bound=Cache | None)


class ForwardOptions(TypedDict, total=False):
    """Options of ``forward``."""

    sparse: bool | jax.Array
    fresh: bool


@overload
def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    **options: Unpack[ForwardOptions],
) -> tuple[Hidden, None]: ...
@overload
def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: SomeCache,
    total_lengths: jax.Array | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Hidden, SomeCache]: ...
def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache | None = None,
    total_lengths: jax.Array | None = None,
    *,
    sparse: bool | jax.Array = False,
    fresh: bool = False,
) -> tuple[Hidden, Cache | None]:
    """Return (hidden states ``[B, T, D]`` for ``logits``, cache) of new tokens.

    tokens: ``[B, T]``, right-padded; the first ``lengths[B]`` of a row are valid.
    cache: the tokens are appended to it.  With None they are whole sequences by themselves.  Tokens
    for which the cache has no room are left out, like padding.
    total_lengths[B]: tokens of each row after its whole prompt, if the call is one chunk of it.
    Dynamic RoPE depends on it.
    sparse: which of these tokens read the share ``cfg.attn_sparsity`` of the cache's values:
    none (a prompt), all (a decode step), or bool ``[B, T]``.
    fresh: every row with tokens is empty; then a GPU need not ask the host how much there is to
    read, and the call returns before it has been computed.
    Raises ValueError naming a parameter whose shape is not ``cfg``'s.
    """
    mesh = traced_mesh(params)
    if mesh is not None:
        rows = tokens, lengths, cache, total_lengths
        return _forward_over(mesh, cfg, params, *rows, sparse=sparse, fresh=fresh)
    check(cfg, params)
    params = chosen(params) if ROWS in params else params
    start = jnp.zeros_like(lengths) if cache is None else cache.lengths
    if cache is not None and cache.capacity is not None:
        lengths = jnp.minimum(lengths, jnp.maximum(cache.capacity - start, 0))
    total = start + lengths if total_lengths is None else total_lengths
    positions, rope = positions_of(cfg, start, total, tokens.shape[1])
    states, table = (None, None) if cache is None else (cache.layers, cache.table)
    at = new_tokens(positions, lengths, rope, sparse, table, fresh, cached=cache is not None)
    stream, at = begin(cfg, params, tokens, activation_dtype(params), at)
    stream, states, taps = walk(cfg, params, stream, states, at, block_of_a_program(cfg))
    hidden = Hidden(stream.total, taps)
    if cache is None:
        return hidden, None
    return hidden, dataclasses.replace(cache, layers=states, lengths=start + lengths)


def check(cfg: ModelConfig, params: Params) -> None:
    """Raise ValueError naming a parameter that is missing or has another shape than ``cfg``'s."""
    for path, shape in _shapes(cfg):
        value: Tree = params
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        found = None if value is None else value.shape
        if found != shape:
            raise ValueError(f"{'/'.join(path)}: shape {found}, but the config wants {shape}")


@functools.lru_cache(maxsize=64)
def _shapes(cfg: ModelConfig) -> tuple[tuple[Path, Shape], ...]:
    cfg = cfg.replace(mtp=None)  # the model runs without its head for drafts
    return tuple((path, param.shape) for path, param in param_table(cfg).items())


def _forward_over(
    mesh: AbstractMesh,
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache | None,
    total_lengths: jax.Array | None,
    *,
    sparse: bool | jax.Array,
    fresh: bool,
) -> tuple[Hidden, Cache | None]:
    """Return ``forward``'s result for parameters on a mesh.

    Each device runs ``forward`` on its rows and its part of the weights. A long prompt's tokens are
    divided among the devices instead (``_forward_in_pieces``).
    """
    if cache is not None and sparse is False:
        batch, n_new = tokens.shape
        if is_cut(mesh, batch, n_new, cache.shares_pages, layer_work(cfg, params)):
            return _forward_in_pieces(mesh, cfg, params, tokens, lengths, cache, total_lengths)

    def out(rows: RowAxis) -> tuple[P, Tree]:
        return P(rows), None if cache is None else cache_specs(cache, rows)

    operands = tokens, lengths, cache, total_lengths
    return over_mesh(forward, mesh, cfg, params, *operands, out=out, sparse=sparse, fresh=fresh)


def _forward_in_pieces(
    mesh: AbstractMesh,
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    total_lengths: jax.Array | None,
) -> tuple[Hidden, Cache]:
    """``forward`` of long rows that the devices of the "data" axis share (``parallel.sequence``).

    Each device computes its pieces of every row, and has the whole cache.
    """
    batch, n_new = tokens.shape
    n = sequence_shards(mesh, batch, cache.shares_pages)
    width = piece_width(n_new, n)
    if cache.capacity is not None:
        lengths = jnp.minimum(lengths, jnp.maximum(cache.capacity - cache.lengths, 0))
    total = cache.lengths + lengths if total_lengths is None else total_lengths

    def run(
        cfg: ModelConfig,
        params: Params,
        tokens: jax.Array,
        cache: Cache,
        lengths: jax.Array,
        total: jax.Array,
    ) -> tuple[Hidden, Cache]:
        check(cfg, params)
        at = pieces_of(cfg, cache.lengths, lengths, total, width, n, cache.table)
        stream, at = begin(cfg, params, tokens, activation_dtype(params), at)
        stream, states, _ = walk(cfg, params, stream, cache.layers, at, block_of_a_program(cfg))
        return Hidden(stream.total), Cache(states, cache.lengths + lengths, cache.table)

    pieces = cut(tokens, n, width)
    hidden, after = over_pieces(run, mesh, cfg, params, pieces, cache, lengths, total)
    return Hidden(joined(hidden.x, batch, n, n_new)), after


def logits(cfg: ModelConfig, params: Params, hidden: Hidden) -> jax.Array:
    """The last norm and the head: hidden states ``[..., D]`` to float32 logits ``[..., V]``."""
    mesh = traced_mesh(params)
    if mesh is not None:
        return _logits_over(mesh, cfg, params, hidden)
    return softcap(head_product(cfg, params, hidden), cfg.logit_softcap)


def stored_logits(cfg: ModelConfig, params: Params, hidden: Hidden) -> jax.Array:
    """``logits`` in the hidden states' dtype if the values are the same.

    A product's result in 16 bits is a quarter of the bytes that its cast to float32 moves.
    """
    if traced_mesh(params) is None and cfg.logit_softcap is None:
        return head_product(cfg, params, hidden)
    return logits(cfg, params, hidden)


def _logits_over(mesh: AbstractMesh, cfg: ModelConfig, params: Params, hidden: Hidden) -> jax.Array:
    """``logits`` of parameters on a mesh, without the rows that pad the vocabulary."""

    def spec(rows: RowAxis) -> P:
        return P(rows, *(None,) * (hidden.x.ndim - 2), MODEL_AXIS)

    return over_mesh(logits, mesh, cfg, params, hidden, out=spec)[..., : cfg.vocab_size]


def head_product(cfg: ModelConfig, params: Params, hidden: Hidden) -> jax.Array:
    """``logits`` in the hidden states' dtype, before the cap."""
    if _has_float_head(cfg, params, hidden.x):
        # XLA's product would round a row by how many there are.
        weight = head(params)["weight"]
        return norm_matmul(hidden.x, params["norm"]["weight"], weight, cfg.norm.eps)
    with fixed_sums(cfg.fixed_sums):
        return linear.norm_linear(Stream(hidden.x), params["norm"], head(params), cfg)[0]


def _has_float_head(cfg: ModelConfig, params: Params, x: jax.Array) -> bool:
    """Whether a CPU's handler takes the head: of floats, where the layers' weights are in codes."""
    last = head(params)
    is_plain = set(last) == {"weight"} and isinstance(last["weight"], jax.Array)
    if not is_plain or cfg.norm.kind != "rms":
        return False
    has_codes = bool(leaves_of(params, CpuWeight))
    return has_codes and isinstance(head_plan(x, last["weight"]), CpuPlan)


def softcap(scores: jax.Array, cap: float | None) -> jax.Array:
    """``cap tanh(scores / cap)`` in float32; None is no cap.  Training's chunks call it, too."""
    scores = scores.astype(jnp.float32)
    return scores if cap is None else cap * jnp.tanh(scores / cap)
