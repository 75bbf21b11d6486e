"""The decoder: embedding, blocks, final norm, head.  One description for Llama, GLA and hybrids.

    hidden, cache = forward(cfg, params, tokens, lengths, cache)
    scores        = logits(cfg, params, hidden)

    block:  stream += mixer(norm(stream));  stream += mlp(norm(stream))     mixer by cfg.layer_types

The config decides where norms stand, which norms they are, and whether the two sublayers read the
same stream.  The parameters of a layer have no entry for a norm that it lacks.

All functions here are pure functions of the parameter tree that ``model.module`` declares; the
functions for users are in ``generation``.  ``walk`` is the only loop over the layers and ``block``
the only layer: training, distillation, calibration and offloading call them too.  For parameters on
a mesh, ``forward`` and ``logits`` run over it (``model.sharded``).

In a decode step of few rows on Hopper, a Llama or GLA layer is five kernels: one for each line of
``mix_half`` and ``feed_half`` that calls an op.  A norm after a sublayer (Gemma) is one more.

Sources: Llama (arXiv 2302.13971), GLA (2312.06635).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model import layer_inputs, linear, shared_block
from jaxllama.model.cache import (
    Cache,
    LayerState,
    cache_specs,
)
from jaxllama.model.elementwise import activated
from jaxllama.model.experts.feed import feed_experts
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.model.lora import ROWS, chosen
from jaxllama.model.mixers import MIXERS
from jaxllama.model.param import Path, Shape
from jaxllama.model.params import param_table
from jaxllama.model.records import At, Hidden, new_tokens, pieces_of, positions_of
from jaxllama.model.sharded import over_mesh, over_pieces
from jaxllama.parallel.collectives import lookup_rows
from jaxllama.parallel.mesh import MODEL_AXIS, RowAxis, is_split, traced_mesh
from jaxllama.parallel.sequence import cut, is_cut, joined, piece_width, sequence_shards
from jaxllama.typing import Params, Tree
from pallas_kernels.cpu import CpuWeight
from pallas_kernels.cpu.handler import CpuPlan
from pallas_kernels.cpu.head import norm_matmul
from pallas_kernels.cpu.head import plan as head_plan
from pallas_kernels.dispatch import is_recording
from pallas_kernels.qtensor import QTensor, RowBlocks, dequantize

# A layer


def block(
    cfg: ModelConfig,
    kind: str,
    p: Params,
    stream: Stream,
    state: LayerState,
    at: At,
    ops: LayerOps = linear,
) -> tuple[Stream, LayerState]:
    """One layer; ``cfg`` and ``kind`` are ``layer_config``'s.

    state: None where there is no cache.  ops: who does ``norm_linear`` and ``linear_add``: the
    module ``model.linear``, or an ``observer.Observer`` that records.
    """
    mixed, state = mix_half(cfg, kind, p, stream, state, at, ops)
    stream = feed_half(cfg, p, mixed, ops, stream if cfg.parallel_block else None)
    if cfg.layer_inputs is not None:
        stream = layer_inputs.add(cfg, p["inputs"], stream, at, ops)
    return scaled(p, stream), state


def mix_half(
    cfg: ModelConfig,
    kind: str,
    p: Params,
    stream: Stream,
    state: LayerState,
    at: At,
    ops: LayerOps = linear,
) -> tuple[Stream, LayerState]:
    """A layer's first half: norm and mixer."""
    if cfg.shared_blocks is not None and kind == "attention":
        return shared_block.attend(cfg, p, stream, state, at, ops)
    mixer, own = MIXERS[kind].mix, p["mixer"]
    stream = _placed(cfg, p, stream, at)
    y, stream = mixer_inputs(cfg, p, stream, mixer.inputs(cfg, own), ops)
    heads, state = mixer.mix(cfg, own, y, state, at)
    after = ops.linear_add(heads, own["o"], stream, cfg, p.get("mixer_out_norm"))
    return after._replace(beside=stream.beside, embedded=stream.embedded), state


def mixer_inputs(
    cfg: ModelConfig,
    p: Params,
    stream: Stream,
    weights: Params | Sequence[Params],
    ops: LayerOps = linear,
) -> tuple[Tree, Stream]:
    """Return the products of the mixer's input, and the stream.

    Two mixers that stand side by side are two layers.  The first one leaves its normed input beside
    the stream, and the second one reads that.
    """
    if cfg.is_beside:
        if stream.beside is None:
            raise JaxLlamaError("this layer reads the input of the layer before, which is not here")
        beside, stream = stream.beside, stream._replace(beside=None)
        if cfg.shared_blocks is None:
            return ops.norm_linear(Stream(beside), None, weights, cfg)[0], stream
        both = Stream(stream.total + beside)
        return ops.norm_linear(both, p.get("mixer_norm"), weights, cfg)[0], stream
    if not cfg.has_beside:
        y, after = ops.norm_linear(stream, p.get("mixer_norm"), weights, cfg)
        return y, after._replace(embedded=stream.embedded)
    normed, stream = linear.norm(stream, p.get("mixer_norm"), cfg)
    y, _ = ops.norm_linear(Stream(normed), None, weights, cfg)
    return y, stream._replace(beside=normed)


def _placed(cfg: ModelConfig, p: Params, stream: Stream, at: At) -> Stream:
    """The embeddings as the first layer's mixer reads them: with the learned vectors of their
    positions, and their norm."""
    if cfg.learned_positions is not None:
        table, places = p["positions"]["weight"], at.positions + cfg.learned_positions
        vectors = table[jnp.clip(places, 0, table.shape[0] - 1)]
        stream = Stream(stream.total + vectors.astype(stream.x.dtype))
    return Stream(linear.norm(stream, p["embed_norm"], cfg)[0]) if cfg.embed_norm else stream


def feed_half(
    cfg: ModelConfig,
    p: Params,
    stream: Stream,
    ops: LayerOps = linear,
    before: Stream | None = None,
) -> Stream:
    """A layer's second half: norm and SwiGLU, ``down(silu(gate) * up)``, or its experts, or nothing
    in a layer without them.

    before: what a parallel block reads instead, the stream without the mixer's part.
    """
    if cfg.bare_layers:
        return stream
    if cfg.shared_blocks is not None:
        return shared_block.feed(cfg, p, stream, ops)
    if cfg.experts is not None:
        return feed_experts(cfg, p, stream, ops, before)
    if before is not None:
        own = p["mlp_norm" if cfg.parallel_norms else "mixer_norm"]
        y, _ = inner(cfg, p["mlp"], before, own, ops)
    else:
        y, stream = inner(cfg, p["mlp"], stream, p.get("mlp_norm"), ops)
    return ops.linear_add(y, p["mlp"]["down"], stream, cfg, p.get("mlp_out_norm"))


def scaled(p: Params, stream: Stream) -> Stream:
    """The stream behind a layer, times the layer's number if it has one (Gemma 4)."""
    if "scale" not in p:
        return stream
    return Stream(stream.total * p["scale"]["weight"].astype(stream.x.dtype))


def inner(
    cfg: ModelConfig, p: Params, stream: Stream, norm: Params | None, ops: LayerOps = linear
) -> tuple[linear.Input, Stream]:
    """(what the last product of the feed-forward ``p`` reads, the stream)."""
    if cfg.gated_mlp and cfg.inner_norms:
        y, stream = ops.norm_linear(stream, norm, p["gate_up"], cfg)
        gate, up = jnp.split(y, 2, axis=-1)
        return _inner_norm(cfg, p, activated(gate, cfg.activation) * up), stream
    if cfg.gated_mlp:
        return ops.norm_linear(stream, norm, p["gate_up"], cfg, into=p["down"])
    y, stream = ops.norm_linear(stream, norm, p["up"], cfg)
    scalars = p["xielu"]["weight"] if cfg.activation == "xielu" else None
    return _inner_norm(cfg, p, activated(y, cfg.activation, scalars)), stream


def _inner_norm(cfg: ModelConfig, p: Params, x: jax.Array) -> jax.Array:
    """The input of a feed-forward's last product, with its norm if it has one (BitNet)."""
    return linear.norm(Stream(x), p["inner_norm"], cfg)[0] if cfg.inner_norms else x


@functools.lru_cache(maxsize=1024)
def layer_config(cfg: ModelConfig, index: int) -> tuple[ModelConfig, str]:
    """Return (config, kind) of a layer: all that its program depends on.

    Layers that are alike have equal results. Raises JaxLlamaError if there is no layer ``index``.
    """
    if not 0 <= index < cfg.n_layers:
        raise JaxLlamaError(f"index = {index}: {cfg.name} has layers 0 to {cfg.n_layers - 1}")
    kind = cfg.layer_types[index]
    pre_norms, post_norms = cfg.norms_of(index)
    one = cfg.with_heads_of(index).replace(
        sliding_window=cfg.window_of(index),
        rope=cfg.rope_of(index),
        d_ff=cfg.d_ff_of(index),
        shared_kv_layers=0,
        shared_kv_d_ff=None,
        experts=cfg.experts_of(index),
        n_layers=1,
        layer_types=(kind,),
        window_layers=(),
        window_rope=None,
        nope_layers=(),
        pre_norms=pre_norms,
        post_norms=post_norms,
        post_norm_layers=(),
        learned_positions=None if index else cfg.learned_positions,
        embed_norm=cfg.embed_norm and not index,
        bare_layers=(0,) if index in cfg.bare_layers else (),
        beside_layers=tuple(i for i in (0, 1) if index + i in cfg.beside_layers),
    )
    return one, kind


def walk(
    cfg: ModelConfig,
    params: Params,
    stream: Stream,
    states: Sequence[LayerState] | None,
    at: At,
    each: Callable[..., tuple[Stream, LayerState]] = block,
) -> tuple[Stream, tuple[LayerState, ...]]:
    """Run the stream through all layers; each: the function of one layer, called as ``block``.

    A layer without keys and values gets the new state of the layer that lends it its own.
    """
    new: list[LayerState] = []
    for index in range(cfg.n_layers):
        state = None if states is None else states[index]
        source, own = cfg.kv_source(index), at
        if source is not None:
            state = new[source]
        if at.inputs is not None:
            own = dataclasses.replace(at, inputs=at.inputs[:, :, index])
        layer = params[f"layer_{index}"]
        stream, state = each(*layer_config(cfg, index), layer, stream, state, own)
        new.append(state if source is None else None)
    return stream, tuple(new)


# Traced and lowered once for all layers that are alike; the compiler inlines it.
_block_once = jax.jit(block, static_argnums=(0, 1))


def block_of_a_program() -> Callable[..., tuple[Stream, LayerState]]:
    """Return ``block`` for a program, compiled once for all layers that are alike.

    While choices are recorded, every layer is traced, so that each records its own choices.
    """
    return block if is_recording() else _block_once


# The code around the layers


def begin(
    cfg: ModelConfig, params: Params, tokens: jax.Array, dtype: DTypeLike, at: At
) -> tuple[Stream, At]:
    """Return the first layer's stream and record of ``tokens[B, T]``, whose places ``at`` has."""
    x = embed_tokens(cfg, params, tokens, dtype)
    if cfg.layer_inputs is not None:
        inputs = layer_inputs.inputs_of(cfg, params["inputs"], tokens, x)
        at = dataclasses.replace(at, inputs=inputs)
    return first_stream(cfg, x), at


def embed_tokens(
    cfg: ModelConfig, params: Params, tokens: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """``tokens[B, T]`` -> ``[B, T, D]``."""
    return scale_embedded(cfg, _rows_of_table(params["embed"]["weight"], tokens, dtype))


def first_stream(cfg: ModelConfig, x: jax.Array) -> Stream:
    """Return the stream of embeddings ``x[..., D]``."""
    return Stream(x) if cfg.shared_blocks is None else Stream(x, embedded=x)


def _rows_of_table(weight: linear.Weight, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
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


class ForwardOptions(TypedDict, total=False):
    """Options of ``forward`` that a caller passes on."""

    total_lengths: jax.Array | None
    sparse: bool | jax.Array
    fresh: bool


@overload
def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: None = ...,
    total_lengths: jax.Array | None = ...,
    *,
    sparse: bool | jax.Array = ...,
    fresh: bool = ...,
) -> tuple[Hidden, None]: ...
@overload
def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    total_lengths: jax.Array | None = ...,
    *,
    sparse: bool | jax.Array = ...,
    fresh: bool = ...,
) -> tuple[Hidden, Cache]: ...
@overload
def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache | None,
    total_lengths: jax.Array | None = ...,
    *,
    sparse: bool | jax.Array = ...,
    fresh: bool = ...,
) -> tuple[Hidden, Cache | None]: ...
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
        if cache is not None and sparse is False:
            batch, n_new = tokens.shape
            if is_cut(mesh, batch, n_new, cache.table is not None, layer_work(cfg, params)):
                return _forward_in_pieces(mesh, cfg, params, tokens, lengths, cache, total_lengths)
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
    stream, states = walk(cfg, params, stream, states, at, block_of_a_program())
    hidden = Hidden(stream.total)
    return hidden, None if cache is None else Cache(states, start + lengths, table)


def layer_work(cfg: ModelConfig, params: Params) -> float:
    """Return the multiplications of a token in a layer with weights, in the mean of the layers."""
    total = 0.0
    for index in range(cfg.n_layers):
        experts = cfg.experts_of(index)
        share = 1.0 if experts is None else experts.n_active / experts.n_experts
        for part in params[f"layer_{index}"].values():
            for name, weights in part.items():
                size = sum(leaf.size for leaf in jax.tree.leaves(weights))
                total += size * share if name.startswith("experts_") else size
    return total / cfg.n_layers


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
    cfg = cfg.replace(mtp_layers=0)  # the model runs without its head for drafts
    return tuple((path, param.shape) for path, param in param_table(cfg).items())


def _forward_over(
    mesh: AbstractMesh,
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache | None,
    total_lengths: jax.Array | None,
    **options: bool | jax.Array,
) -> tuple[Hidden, Cache | None]:
    """``forward`` of parameters on a mesh."""

    def specs(rows: RowAxis) -> tuple[P, Cache | None]:
        return P(rows), None if cache is None else cache_specs(cache, rows)

    arrays = tokens, lengths, cache, total_lengths
    return over_mesh(forward, mesh, cfg, params, *arrays, out=specs, **options)


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
    n = sequence_shards(mesh, batch, cache.table is not None)
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
        stream, states = walk(cfg, params, stream, cache.layers, at, block_of_a_program())
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
        return norm_matmul(hidden.x, params["norm"]["weight"], weight, cfg.norm_eps)
    return linear.norm_linear(Stream(hidden.x), params["norm"], head(params), cfg)[0]


def _has_float_head(cfg: ModelConfig, params: Params, x: jax.Array) -> bool:
    """Whether a CPU's handler takes the head: of floats, where the layers' weights are in codes."""
    own = head(params)
    is_plain = set(own) == {"weight"} and isinstance(own["weight"], jax.Array)
    if not is_plain or cfg.norm != "rms" or not _has_prepared_weights(params):
        return False
    return isinstance(head_plan(x, own["weight"]), CpuPlan)


def _has_prepared_weights(params: Params) -> bool:
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, CpuWeight))
    return any(isinstance(leaf, CpuWeight) for leaf in leaves)


def softcap(scores: jax.Array, cap: float | None) -> jax.Array:
    """``cap tanh(scores / cap)`` in float32; None is no cap.  Training's chunks call it, too."""
    scores = scores.astype(jnp.float32)
    return scores if cap is None else cap * jnp.tanh(scores / cap)
