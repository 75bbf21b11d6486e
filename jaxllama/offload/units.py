"""The units that a model is run in, and the jitted programs of each.

    units_of(cfg, sep_layer) -> [embed, layer or (mix, feed), ..., head]

A unit is the part of the model whose weights are on the device together.  Its programs are the
functions that ``model.decoder.forward`` is made of, so that a model run unit by unit gives the bits
of the whole program (what may differ is stated in ``offload.model``).  Layers that are alike share
one compilation.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model import decoder
from jaxllama.model.cache import LayerState
from jaxllama.model.linear import Stream
from jaxllama.model.records import Draft, Hidden, new_tokens
from jaxllama.model.rope import Ropes
from jaxllama.offload.policy import Policy

Kind = Literal["embed", "layer", "mix", "feed", "head"]
Rope = Ropes | None
_HALVES = {
    "mix": ("mixer_norm", "mixer", "mixer_out_norm"),
    "feed": ("mlp_norm", "mlp", "mlp_out_norm"),
}


@dataclasses.dataclass(frozen=True)
class ModelUnit:
    """One part of the model; ``layer`` is -1 for embed and head."""

    kind: Kind
    layer: int = -1

    @property
    def has_cache(self) -> bool:
        return self.kind in ("layer", "mix")

    def weights(self, params: dict[str, Any]) -> dict[str, Any]:
        """This unit's part of the parameter tree."""
        if self.kind == "embed":
            return {"embed": params["embed"]}
        if self.kind == "head":
            table = "head" if "head" in params else "embed"
            return {"norm": params["norm"], table: params[table]}
        layer = params[f"layer_{self.layer}"]
        return {name: layer[name] for name in _HALVES.get(self.kind, tuple(layer)) if name in layer}

    def __str__(self) -> str:
        return self.kind if self.layer < 0 else f"{self.kind}_{self.layer}"


def check_halves(cfg: ModelConfig, policy: Policy) -> None:
    """Raises JaxLlamaError for a policy that cuts a layer in two where both halves read the same
    stream."""
    for name, halves in (
        ("sep_layer", policy.sep_layer),
        ("cpu_attention", policy.cpu_attention),
        ("attn_sparsity", cfg.attn_sparsity < 1),
    ):
        if cfg.parallel_block and halves:
            raise JaxLlamaError(f"policy: {name}: the sublayers of {cfg.name} run in parallel")


def units_of(cfg: ModelConfig, sep_layer: bool) -> list[ModelUnit]:
    kinds: tuple[Kind, ...] = ("mix", "feed") if sep_layer else ("layer",)
    layers = [ModelUnit(kind, index) for index in range(cfg.n_layers) for kind in kinds]
    return [ModelUnit("embed"), *layers, ModelUnit("head")]


positions_of = jax.jit(decoder.positions_of, static_argnums=(0, 3))
head_logits = jax.jit(decoder.logits, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def embed(cfg: ModelConfig, dtype: jnp.dtype, weights: Any, tokens: jax.Array) -> Stream:
    return Stream(decoder.embed_tokens(cfg, weights, tokens, dtype))


@functools.partial(jax.jit, static_argnums=(0, 1))
def embed_rows(cfg: ModelConfig, dtype: jnp.dtype, rows: jax.Array) -> Stream:
    """``embed`` of rows that were looked up already."""
    return Stream(decoder.scale_embedded(cfg, rows.astype(dtype)))


_LAYER = {"static_argnums": (0, 1, 2), "static_argnames": ("sparse", "drafted")}


@functools.partial(jax.jit, **_LAYER, donate_argnums=5)
def run_layer(
    cfg: ModelConfig,
    kind: str,
    part: Kind,
    weights: Any,
    stream: Stream,
    state: LayerState | None,
    positions: jax.Array,
    lengths: jax.Array,
    rope: Rope,
    *,
    sparse: bool = False,
    drafted: int | None = None,
) -> tuple[Stream, Any]:
    """A layer or one of its halves; ``cfg`` and ``kind`` are ``layer_config``'s, sparse and drafted
    say which record of ``model.records`` the tokens are."""
    if part == "feed":
        return decoder.feed_half(cfg, weights, stream), None
    run = decoder.mix_half if part == "mix" else decoder.block
    if drafted is None:
        at = new_tokens(positions, lengths, rope, sparse, cached=state is not None)
    else:
        at = Draft(positions, lengths, rope, drafted)
    return run(cfg, kind, weights, stream, state, at)


# The same where a state is to stay: what verifies a draft gives the tokens that it would take.
verify_layer = jax.jit(run_layer.__wrapped__, **_LAYER)


@jax.jit
def last_hidden(stream: Stream, n_new: jax.Array, last: Hidden | None) -> Hidden:
    """``Hidden.last`` of what leaves the last layer."""
    return Hidden(stream.total).last(n_new, last)


@functools.partial(jax.jit, static_argnums=0)
def all_logits(cfg: ModelConfig, weights: Any, stream: Stream) -> jax.Array:
    """Float32 logits ``[B, T, V]`` of every position."""
    return decoder.logits(cfg, weights, Hidden(stream.total))
