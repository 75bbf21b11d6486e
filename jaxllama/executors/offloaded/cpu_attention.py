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

from jaxllama.config import LayerConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.offloaded.programs import Rope
from jaxllama.model.forms import FORMS
from jaxllama.model.linear import Stream, linear_add
from jaxllama.model.mixers import MIXERS
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.rope import Ropes
from jaxllama.offload.policy import Shares
from jaxllama.typing import LocalDevice, Tree

Parts = tuple[KVCache | None, KVCache | None]  # rows on the device, rows on the CPU


class SplitCache:
    """A cache like ``LayerCache``. ``load`` returns the two parts after the prefill."""

    moves = False

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
    inputs = qkv, positions[:, 0], lengths, rope
    sinks = MIXERS[layer.kind].beside.sinks_of(layer.mixer, weights["mixer"])
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
        out, new[-1] = _attend(layer, *mine, sinks, part)
        outs.append(out if device is None else jax.device_put(out, stream.x.sharding))
    heads = outs[0] if len(outs) == 1 else jnp.concatenate(outs)
    return output(layer, weights, heads, gate, stream), (new[0], new[1])


@functools.partial(jax.jit, static_argnums=0)
def project(
    layer: LayerConfig, weights: Tree, stream: Stream
) -> tuple[jax.Array, jax.Array | None, Stream]:
    """Return what attention reads of one token a row (``beside.before``), and the stream."""
    mixer, p = MIXERS[layer.kind], weights["mixer"]
    if layer.form.name == "shared":
        raise JaxLlamaError("attention beside the device: not of layers that share their weights")
    read = FORMS[layer.form.name].read
    projected, stream = read(layer, weights, stream, mixer.mix.inputs(layer, p))
    return *mixer.beside.before(layer, p, projected), stream


@functools.partial(jax.jit, static_argnums=0, donate_argnums=6)
def _attend(
    layer: LayerConfig,
    new: jax.Array,
    position: jax.Array,
    lengths: jax.Array,
    rope: Ropes,
    sinks: jax.Array | None,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """Return the heads of one token a row and the cache with it (``beside.attend``)."""
    return MIXERS[layer.kind].beside.attend(layer, new, position, lengths, rope, sinks, cache)


@functools.partial(jax.jit, static_argnums=0)
def output(
    layer: LayerConfig, weights: Tree, heads: jax.Array, gate: jax.Array | None, stream: Stream
) -> Stream:
    """Return the stream with the output product of attention's heads added.

    weights: the layer's parameters.  heads: of ``_attend``, from the host.  gate: ``[B, 1, N H]``
    of the heads, or None.  stream: ``[B, 1, D]`` before the layer.
    """
    p, norm = weights["mixer"], weights.get("mixer_out_norm")
    y = MIXERS[layer.kind].beside.after(layer, p, heads[:, None], gate)
    after = linear_add(y, p["o"], stream, layer, norm)
    return after._replace(handed=stream.handed)
