"""Decode attention beside the keys: a batch's first rows on the device, the others on the CPU.

    SplitCache       the cache of one layer and batch, split by rows, which never moves
    decode_layer     mixer norm and qkv on the device; attention of each part beside its cache;
                     the output projection on the device

A step moves one query, key and value a row to the CPU, and one attended vector back. The cache does
not move (FlexGen, arXiv 2303.06865, section 4.1). On a machine with a GPU the CPU's attention
rounds differently. Its tokens are then those of a resident model on the CPU, without the same bits.

The device runs the prefill and hands the rows over afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxllama.config import AttentionConfig, LayerConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.offloaded.programs import Rope
from jaxllama.model.forms import FORMS
from jaxllama.model.linear import Stream, linear_add
from jaxllama.model.mixers.attention import latent
from jaxllama.model.mixers.attention.mix import (
    finished,
    inputs,
    sinks_of,
    split_heads,
    unpacked,
)
from jaxllama.model.mixers.attention.sparse import sparse_decode
from jaxllama.model.mixers.attention.state import KVCache, LatentCache
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.rope import Ropes, narrowed, widened
from jaxllama.offload.policy import Shares
from jaxllama.typing import LocalDevice, Tree
from pallas_kernels.attention.blockwise import blockwise_attention
from pallas_kernels.attention.rope_cache import (
    from_cache_basis,
    rope_and_write,
    store,
    to_cache_basis,
)

Parts = tuple[KVCache | None, KVCache | None]  # rows on the device, rows on the CPU


class SplitCache:
    """A cache like ``LayerCache``. ``load`` returns the two parts after the prefill."""

    moves = False
    stored = ()

    def __init__(self, shares: Shares, empty: Callable[[], LayerState]) -> None:
        self._shares, self.empty = shares, empty
        self._parts: Parts | None = None

    def load(self) -> KVCache | Parts:
        parts, self._parts = self._parts, None
        return self.empty() if parts is None else parts

    def load_whole(self) -> KVCache:
        parts = self.load()
        if isinstance(parts, KVCache):
            return parts
        here = jax.devices()[0]
        moved = [jax.device_put(part, here) for part in parts if part is not None]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *moved)

    def save(self, state: KVCache | Parts, *_: object) -> None:
        if isinstance(state, KVCache):
            rows = self._shares.rows(state.k.shape[0])[0]
            device = jax.tree.map(lambda leaf: leaf[:rows], state) if rows else None
            host = None
            if rows < state.k.shape[0]:
                host = jax.tree.map(lambda leaf: leaf[rows:], state)
                # A separate array, which later steps write in place.
                host = jax.block_until_ready(jax.device_put(host, cpu(), may_alias=False))
            state = device, host
        self._parts = state


@functools.cache
def cpu() -> LocalDevice:
    """Return the CPU device. Raises JaxLlamaError if jax has none beside the GPU."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        raise JaxLlamaError(
            "policy: cpu_attention needs jax's CPU backend too: JAX_PLATFORMS=cuda,cpu, or unset"
        ) from None


def decode_layer(
    layer: LayerConfig,
    weights: Tree,
    stream: Stream,
    parts: Parts,
    positions: jax.Array,
    lengths: jax.Array,
    rope: Rope,
) -> tuple[Stream, Parts]:
    """Run the mixer's half of an attention layer for one token a row."""
    qkv, gate, stream = project(layer, weights, stream)
    inputs, sinks = (qkv, positions[:, 0], lengths, rope), sinks_of(layer.mixer, weights["mixer"])
    outs, new = [], []
    first = 0
    for part, device in zip(parts, (None, cpu()), strict=True):
        new.append(part)
        if part is None:
            continue
        rows = slice(first, first + part.k.shape[0])
        first = rows.stop
        mine = jax.tree.map(lambda leaf, rows=rows: leaf[rows], inputs)
        if device is not None:
            mine, sinks = jax.device_put((mine, sinks), device)
        out, new[-1] = _attend(layer.mixer, *mine, sinks, part)
        outs.append(out if device is None else jax.device_put(out, stream.x.sharding))
    heads = outs[0] if len(outs) == 1 else jnp.concatenate(outs)
    return output(layer, weights, heads, gate, stream), (new[0], new[1])


@functools.partial(jax.jit, static_argnums=0)
def project(
    layer: LayerConfig, weights: Tree, stream: Stream
) -> tuple[jax.Array, jax.Array | None, Stream]:
    """Return qkv ``[B, N + 2K, H]`` of one token a row, the heads' gate or None, and the stream.

    With latents, ``[B, N + 1, R + r]``: the queries of latents, and what the cache holds.
    """
    mixer, cfg = weights["mixer"], layer.mixer
    if layer.form.name == "shared":
        raise JaxLlamaError("attention beside the device: not of layers that share their weights")
    if cfg.latent is not None and cfg.latent.indexer is not None:
        raise JaxLlamaError("attention beside the device: not of layers with an indexer")
    read = FORMS[layer.form.name].read
    projected, stream = read(layer, weights, stream, inputs(layer, mixer))
    if cfg.latent is not None:
        heads = latent.heads_of(cfg, mixer, projected)
        both = latent.absorbed(cfg, mixer, heads), latent.entries(heads)
        return jnp.concatenate(both, axis=2)[:, 0], None, stream
    gate, qkv = unpacked(cfg, mixer, projected)
    return split_heads(cfg, mixer, qkv[:, 0]), gate, stream


@functools.partial(jax.jit, static_argnums=0, donate_argnums=6)
def _attend(
    cfg: AttentionConfig,
    qkv: jax.Array,
    position: jax.Array,
    lengths: jax.Array,
    rope: Ropes,
    sinks: jax.Array | None,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """Return heads ``[B, N, H]`` of ``qkv [B, N + 2K, H]`` and the cache, in the form that runs
    anywhere.
    """
    slots = jnp.where(lengths > 0, position, cache.k.shape[1])
    last = jnp.where(lengths > 0, position, -1)[:, None]
    if cfg.latent is not None:
        heads = latent.turned_last(cfg.latent, qkv[:, None], *rope.of(cfg.rope, cfg.head_dim))
        (heads,) = to_cache_basis(cache.k, heads)
        q, new = jnp.split(heads, (cfg.n_heads,), axis=2)
        k = store(cache.k, new, slots[:, None])
        out = blockwise_attention(q, k, k, last, window=cfg.sliding_window)
        return from_cache_basis(k, out[:, 0]), LatentCache(k, None)
    qkv, rope = widened(qkv, rope, cache.k.shape[-1])
    cos, sin = (table[:, 0] for table in rope.of(cfg.rope, qkv.shape[-1]))
    q, k, v = rope_and_write(qkv, cos, sin, cache.k, cache.v, slots, implementation="xla")
    cache = KVCache(k, v)
    if cfg.attn_sparsity < 1.0:
        out = sparse_decode(
            q[:, None], cache, position[:, None], cfg.attn_sparsity, cfg.sliding_window
        )
        return narrowed(from_cache_basis(cache.v, out[:, 0]), cfg.head_dim), cache
    out = blockwise_attention(
        q[:, None],
        k,
        v,
        last,
        window=cfg.sliding_window,
        softcap=cfg.attn_softcap,
        sinks=sinks,
    )
    return narrowed(from_cache_basis(cache.v, out[:, 0]), cfg.head_dim), cache


@functools.partial(jax.jit, static_argnums=0)
def output(
    layer: LayerConfig, weights: Tree, heads: jax.Array, gate: jax.Array | None, stream: Stream
) -> Stream:
    """Return the stream with the output product of attention's heads added.

    weights: the layer's parameters.  heads: ``[B, N, H]``, from the host.  gate: ``[B, 1, N H]`` of
    the heads, or None.  stream: ``[B, 1, D]`` before the layer.
    """
    mixer, heads, cfg = weights["mixer"], heads[:, None], layer.mixer
    if cfg.latent is not None:
        heads = latent.lifted(cfg, mixer, heads)
    norm = weights.get("mixer_out_norm")
    after = linear_add(finished(cfg, mixer, heads, gate), mixer["o"], stream, layer, norm)
    return after._replace(handed=stream.handed)
