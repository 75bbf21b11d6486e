"""The units that a model is run in, and the jitted programs of each.

    units_of(cfg, sep_layer) -> [embed, layer or (mix, feed), ..., head]

A unit is the part of the model whose weights are on the device together.  Its programs are those of
``model.Block`` and ``model.Decoder``, so that a model run unit by unit gives the bits of the whole
program (what may differ is stated in ``engine``).  Layers that are alike share one compilation.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxllama.cache import GLAState, KVCache
from jaxllama.config import ModelConfig
from jaxllama.layers import Embedding, RMSNorm
from jaxllama.model import Block, Decoder, add_norm
from jaxllama.rope import rope_tables

Kind = Literal["embed", "layer", "mix", "feed", "head"]
Hidden = tuple[jax.Array, jax.Array | None]  # the residual stream: (x, pending)
LayerState = KVCache | GLAState
Rope = tuple[jax.Array, jax.Array] | None
_HALVES = {"mix": ("mixer_norm", "mixer"), "feed": ("mlp_norm", "mlp")}


@dataclasses.dataclass(frozen=True)
class Unit:
    """One part of the model; ``layer`` is -1 for embed and head."""

    kind: Kind
    layer: int = -1

    @property
    def has_cache(self) -> bool:
        return self.kind in ("layer", "mix")

    def weights(self, params: dict[str, Any], tied: bool) -> dict[str, Any]:
        """This unit's part of the parameter tree."""
        if self.kind == "embed":
            return {"embed": params["embed"]}
        if self.kind == "head":
            table = "embed" if tied else "head"
            return {"norm": params["norm"], table: params[table]}
        layer = params[f"layer_{self.layer}"]
        return {name: layer[name] for name in _HALVES.get(self.kind, tuple(layer))}

    def __str__(self) -> str:
        return self.kind if self.layer < 0 else f"{self.kind}_{self.layer}"


def units_of(cfg: ModelConfig, sep_layer: bool) -> list[Unit]:
    kinds: tuple[Kind, ...] = ("mix", "feed") if sep_layer else ("layer",)
    layers = [Unit(kind, index) for index in range(cfg.n_layers) for kind in kinds]
    return [Unit("embed"), *layers, Unit("head")]


@functools.lru_cache(maxsize=1024)
def layer_config(cfg: ModelConfig, unit: Unit) -> tuple[ModelConfig, str]:
    """What a layer's program depends on: the same for layers that are alike."""
    kind = cfg.layer_types[unit.layer]
    same = cfg.replace(
        sliding_window=cfg.window_of(unit.layer), n_layers=1, layer_types=(kind,),
        first_window_layer=0,
    )  # fmt: skip
    return same, kind


@functools.partial(jax.jit, static_argnums=(0, 3))
def positions_of(
    cfg: ModelConfig, start: jax.Array, total: jax.Array, n_new: int
) -> tuple[jax.Array, Rope]:
    """(positions ``[B, n_new]`` from ``start[B]`` on, RoPE tables); total[B]: tokens of each row
    when the whole prompt is in."""
    positions = start[:, None] + jnp.arange(n_new, dtype=jnp.int32)[None, :]
    if "attention" not in cfg.layer_types:
        return positions, None
    return positions, rope_tables(cfg.rope, cfg.head_dim, positions, total)


@functools.partial(jax.jit, static_argnums=(0, 1))
def embed(cfg: ModelConfig, dtype: jnp.dtype, weights: Any, tokens: jax.Array) -> jax.Array:
    table = Embedding(cfg.vocab_size, cfg.d_model)
    return _scaled(cfg, table.apply({"params": weights["embed"]}, tokens, dtype))


@functools.partial(jax.jit, static_argnums=(0, 1))
def embed_rows(cfg: ModelConfig, dtype: jnp.dtype, rows: jax.Array) -> jax.Array:
    """``embed`` of rows that were looked up already."""
    return _scaled(cfg, rows.astype(dtype))


def _scaled(cfg: ModelConfig, x: jax.Array) -> jax.Array:
    return x * jnp.asarray(cfg.d_model**0.5, x.dtype) if cfg.embedding_scale else x


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def run_layer(
    cfg: ModelConfig,
    kind: str,
    part: Kind,
    weights: Any,
    hidden: Hidden,
    state: LayerState | None,
    positions: jax.Array,
    lengths: jax.Array,
    rope: Rope,
) -> tuple[Hidden, LayerState | None]:
    """A layer or one of its halves; ``cfg`` and ``kind`` are ``layer_config``'s."""
    block, params = Block(cfg, kind), {"params": weights}
    if part == "feed":
        return block.apply(params, *hidden, method=Block.feed), None
    method = Block.mix if part == "mix" else Block.__call__
    x, pending, state = block.apply(params, *hidden, state, positions, lengths, rope, method=method)
    return (x, pending), state


@functools.partial(jax.jit, static_argnums=0)
def last_hidden(
    cfg: ModelConfig, weights: Any, hidden: Hidden, n_new: jax.Array, last: jax.Array | None
) -> jax.Array:
    """The normed hidden state of each row's last valid token, ``[B, D]``; rows without a new token
    keep ``last``."""
    normed = _final_norm(cfg, weights, hidden)
    picked = normed[jnp.arange(normed.shape[0]), jnp.maximum(n_new - 1, 0)]
    return picked if last is None else jnp.where((n_new > 0)[:, None], picked, last)


@functools.partial(jax.jit, static_argnums=0)
def head_logits(cfg: ModelConfig, weights: Any, hidden: jax.Array) -> jax.Array:
    """Normed hidden states ``[..., D]`` to float32 logits ``[..., V]``."""
    decoder = Decoder(cfg, hidden.dtype)
    return decoder.apply({"params": weights}, hidden, method=Decoder.logits)


@functools.partial(jax.jit, static_argnums=0)
def final_hidden(cfg: ModelConfig, weights: Any, hidden: Hidden) -> jax.Array:
    """Normed hidden states ``[B, T, D]`` of every position."""
    return _final_norm(cfg, weights, hidden)


@functools.partial(jax.jit, static_argnums=0)
def all_logits(cfg: ModelConfig, weights: Any, hidden: Hidden) -> jax.Array:
    """Float32 logits ``[B, T, V]`` of every position."""
    normed = _final_norm(cfg, weights, hidden)
    return Decoder(cfg, normed.dtype).apply({"params": weights}, normed, method=Decoder.logits)


def _final_norm(cfg: ModelConfig, weights: Any, hidden: Hidden) -> jax.Array:
    norm = RMSNorm(cfg.d_model, cfg.norm_eps).bind({"params": weights["norm"]})
    return add_norm(norm, *hidden)[0]
