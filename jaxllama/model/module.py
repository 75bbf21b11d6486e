"""The layers as Flax (linen) modules: they declare the parameters, and pure functions compute.

    y, _   = Attention(cfg)(x)             a mixer; GatedLinearAttention, GatedDeltaNet, ...
    y      = SwiGLU(cfg)(x)                also RMSNorm, LayerNorm
    x, _   = DecoderLayer(cfg, index)(x)   norm, mixer, norm, SwiGLU, with the residuals
    hidden, cache = Decoder(cfg)(tokens, lengths, cache)         is ``decoder.forward``

Each module reads its parameters' shapes, initializers and split axes from the parameter table
(``declare``).  It calls the functions that decoding and training call, so its numbers are theirs.
``nn.tabulate``, ``nn.remat``, ``nn.scan`` and ``nn.get_partition_spec`` work as on other modules.
Users import these names from ``jaxllama.modules``.

On a mesh the parameters lie as their metadata says, in the table's order, and XLA partitions the
computation.  The trees of ``shard_params``, whose fused rows stand shard by shard, are for the
functions (``jl.prefill``, ``jl.logits``) and not for these modules.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig, Norm
from jaxllama.model import linear
from jaxllama.model.cache import Cache, LayerState, init_cache
from jaxllama.model.declare import Declared, ParameterTree, declare, table_of, tokens_at
from jaxllama.model.decoder import (
    ForwardOptions,
    activation_dtype,
    block,
    embed_tokens,
    forward,
    head_product,
    inner,
    layer_config,
    softcap,
)
from jaxllama.model.experts.feed import mixture
from jaxllama.model.linear import Stream
from jaxllama.model.mixers import MIXERS
from jaxllama.model.records import Hidden
from jaxllama.model.stacked import recomputed_block, runs, walk
from jaxllama.parallel.mesh import MODEL_AXIS, traced_mesh
from jaxllama.typing import Params, ParamsDict


class RMSNorm(nn.Module):
    """RMSNorm over the last axis, of ``cfg.d_model`` features, with ``cfg.norm_eps``."""

    cfg: ModelConfig
    norm: ClassVar[Norm] = "rms"

    @nn.compact
    def tree(self) -> ParamsDict:
        """The parameters, as the pure functions take them."""
        return declare(self, table_of(self.cfg)["norm"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x[..., D]`` -> the same shape and dtype."""
        y, _ = linear.norm(Stream(x), self.tree(), self.cfg.replace(norm=self.norm))
        assert isinstance(y, jax.Array)
        return y


class LayerNorm(RMSNorm):
    """LayerNorm, with a bias if ``cfg.norm_bias``."""

    norm: ClassVar[Norm] = "layer"


class SwiGLU(nn.Module):
    """The feed-forward ``down(silu(gate(x)) * up(x))``, or with ``cfg.activation`` for SiLU."""

    cfg: ModelConfig

    @nn.compact
    def tree(self) -> ParamsDict:
        """The parameters, as the pure functions take them."""
        return declare(self, table_of(layer_config(self.cfg, 0)[0])["layer_0"]["mlp"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x[..., D]`` -> the same shape and dtype."""
        params, cfg = self.tree(), self.cfg
        y, _ = inner(cfg, params, Stream(x), None)
        return linear.linear(y, params["down"], x.dtype)


class MixtureOfExperts(SwiGLU):
    """The feed-forward of a layer with experts: router, chosen experts, shared expert."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x[..., D]`` -> the same shape and dtype."""
        return mixture(layer_config(self.cfg, 0)[0], self.tree(), x)


class DecoderLayer(nn.Module):
    """Layer ``index`` of a model: ``x += mixer(norm(x)); x += mlp(norm(x))``.

    Called with the arguments of a mixer (``MixerModule``), and so it is a body of ``nn.scan``: x is
    the carry, the state what each turn returns.
    """

    cfg: ModelConfig
    index: int = 0

    @nn.nowrap
    def init_state(self, batch: int, max_len: int, dtype: DTypeLike | None = None) -> LayerState:
        """Return the state of ``batch`` rows without tokens; arguments as in ``jl.init_cache``."""
        return init_cache(layer_config(self.cfg, self.index)[0], batch, max_len, dtype).layers[0]

    @nn.compact
    def tree(self) -> ParamsDict:
        """The parameters, as ``decoder.block`` takes them."""
        cfg, kind = layer_config(self.cfg, self.index)
        norm = RMSNorm if cfg.norm == "rms" else LayerNorm
        feed = SwiGLU if cfg.experts is None else MixtureOfExperts
        modules = {"mixer": MIXERS[kind].module.MIXER, "mlp": feed}
        names = table_of(cfg)["layer_0"]
        found = {}
        for name, table in names.items():
            if name == "positions":
                found[name] = ParameterTree(table, name=name).tree()
            else:
                found[name] = modules.get(name, norm)(cfg, name=name).tree()
        return found

    def __call__(
        self,
        x: jax.Array,
        state: LayerState = None,
        lengths: jax.Array | None = None,
        start: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerState]:
        """``x[B, T, D]`` -> (the same shape, state); see ``MixerModule`` for the arguments."""
        cfg, kind = layer_config(self.cfg, self.index)
        at = tokens_at(cfg, x, state, lengths, start)
        stream, state = block(cfg, kind, self.tree(), Stream(x), state, at)
        return stream.total, state


class Decoder(nn.Module):
    """A whole model: embedding, layers, last norm, head.

    scan: layers that are alike are one loop over stacked parameters (``stacked``), so that a deep
    model compiles as fast as a shallow one.  remat: the backward pass keeps each layer's input and
    recomputes the rest.  Both are for whole sequences; decoding takes the per-layer tree, which
    ``unstack_layers`` makes of a stacked one.
    """

    cfg: ModelConfig
    scan: bool = False
    remat: bool = False

    @nn.compact
    def tree(self) -> ParamsDict:
        """All parameters, as ``decoder.forward`` takes them; with ``scan`` a stacked tree."""
        cfg = self.cfg.with_head_of(self.variables.get("params", {}))
        table = table_of(cfg)
        found = {"embed": ParameterTree(table["embed"], name="embed").tree()}
        for run in runs(cfg):
            for index, name in enumerate(run.names, run.first):
                if self.scan and run.count > 1:
                    layers = _stacked(table[f"layer_{index}"], run.count)
                    found[name] = ParameterTree(layers, name=name).tree()
                    continue
                for one in range(index, index + run.period * run.count, run.period):
                    found[f"layer_{one}"] = DecoderLayer(cfg, one, name=f"layer_{one}").tree()
        norm = RMSNorm if cfg.norm == "rms" else LayerNorm
        found["norm"] = norm(cfg, name="norm").tree()
        if "head" in table:
            found["head"] = ParameterTree(table["head"], name="head").tree()
        if "mtp" in table:
            found["mtp"] = ParameterTree(table["mtp"], name="mtp").tree()
        return found

    def __call__(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        cache: Cache | None = None,
        **options: Unpack[ForwardOptions],
    ) -> tuple[Hidden, Cache | None]:
        """Run ``decoder.forward``: ``tokens[B, T]`` -> (hidden states ``[B, T, D]``, cache).

        lengths int32 ``[B]``: valid tokens of each row, T if omitted.  options: ``forward``'s.
        Raises ValueError for a cache or options where ``scan`` or ``remat`` is set, or where the
        parameters are split over a mesh.
        """
        batch, width = tokens.shape
        lengths = jnp.full((batch,), width, jnp.int32) if lengths is None else lengths
        params = self.tree()
        mesh = traced_mesh(params)
        is_split = mesh is not None and mesh.shape[MODEL_AXIS] > 1
        if not (self.scan or self.remat or is_split):
            return forward(self.cfg, params, tokens, lengths, cache, **options)
        if cache is not None or options:
            raise ValueError(
                "a Decoder with scan or remat, or split over a mesh, takes whole sequences; decode "
                "with Decoder(cfg) and unstack_layers(params), on a mesh with jl.prefill"
            )
        at = tokens_at(self.cfg, tokens, None, lengths, None)
        stream = Stream(embed_tokens(self.cfg, params, tokens, activation_dtype(params)))
        each = recomputed_block if self.remat else block
        return Hidden(walk(self.cfg, params, stream, at, each).total), None

    def logits(self, hidden: Hidden) -> jax.Array:
        """The last norm and the head: hidden states ``[..., D]`` to float32 logits ``[..., V]``."""
        return softcap(head_product(self.cfg, self.tree(), hidden), self.cfg.logit_softcap)


def _stacked(table: Params, count: int) -> ParamsDict:
    """``table`` of ``count`` layers."""
    is_leaf = lambda node: isinstance(node, Declared)  # noqa: E731
    return jax.tree.map(lambda node: node.stacked(count), table, is_leaf=is_leaf)
