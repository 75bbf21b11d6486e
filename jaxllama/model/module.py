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

import dataclasses
from typing import ClassVar, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllama.config import ExpertsConfig, FeedConfig, LayerConfig, ModelConfig, Norm
from jaxllama.errors import JaxLlamaError
from jaxllama.model import linear
from jaxllama.model.cache import Cache, LayerState
from jaxllama.model.declare import (
    Declared,
    ParameterTree,
    declare,
    table_of,
    table_of_layer,
    tokens_at,
)
from jaxllama.model.decoder import (
    ForwardOptions,
    activation_dtype,
    begin,
    block,
    forward,
    head_product,
    softcap,
)
from jaxllama.model.experts.feed import mixture
from jaxllama.model.forms.sequential import inner
from jaxllama.model.linear import Stream
from jaxllama.model.mixers import MIXERS
from jaxllama.model.mixers.module import LayerModule
from jaxllama.model.records import At, Hidden, check_features, check_ints
from jaxllama.model.stacked import recomputed_block, runs, walk
from jaxllama.parallel.mesh import MODEL_AXIS, traced_mesh
from jaxllama.typing import Params, ParamsDict


class RMSNorm(nn.Module):
    """RMSNorm over the last axis, of ``cfg.d_model`` features, with ``cfg.norm_eps``.

    ``__call__`` takes and returns floats ``[..., d_model]``.
    """

    cfg: ModelConfig
    norm: ClassVar[Norm] = "rms"

    @nn.compact
    def tree(self) -> ParamsDict:
        """Return the norm's parameters by name, as the pure functions take them."""
        return declare(self, table_of(self.cfg)["norm"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the norm of ``x[..., D]`` in its shape and dtype; D is ``cfg.d_model``.

        Raises JaxLlamaError if x has another width or holds no floats.
        """
        check_features(self.cfg, x)
        kind = dataclasses.replace(self.cfg.norm, kind=self.norm)
        y, _ = linear.norm(Stream(x), self.tree(), dataclasses.replace(self.cfg, norm=kind))
        assert isinstance(y, jax.Array)
        return y


class LayerNorm(RMSNorm):
    """LayerNorm with a weight, and a bias if ``cfg.norm_bias``; otherwise as ``RMSNorm``."""

    norm: ClassVar[Norm] = "layer"


class SwiGLU(nn.Module):
    """The feed-forward ``down(silu(gate(x)) * up(x))`` of width ``cfg.d_ff``.

    ``cfg.activation`` takes the place of SiLU; without ``cfg.gated_mlp`` it is
    ``down(activation(up(x)))``. ``cfg.experts`` has no effect. ``__call__`` takes and returns
    floats ``[..., d_model]``.
    """

    cfg: ModelConfig

    @nn.nowrap
    def _experts(self) -> ExpertsConfig | None:
        """Return the options of the experts; None for a dense feed-forward."""
        return None

    index: int = 0

    @nn.nowrap
    def layer(self) -> LayerConfig:
        """Return the record of layer ``index``, with this feed-forward."""
        layer = self.cfg.layer(self.index)
        feeds = (layer.feed, *(candidate.feed for candidate in self.cfg.layers), *self.cfg.spare)
        feed = next(candidate for candidate in feeds if isinstance(candidate, FeedConfig))
        return layer.replace(feed=dataclasses.replace(feed, experts=self._experts()))

    @nn.compact
    def tree(self) -> ParamsDict:
        """Return the feed-forward's parameters by name, as the pure functions take them."""
        return declare(self, table_of_layer(self.layer())["mlp"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the output for ``x[..., D]`` in its shape and dtype; D is ``cfg.d_model``.

        Raises JaxLlamaError if x has another width or holds no floats.
        """
        check_features(self.cfg, x)
        params = self.tree()
        y, _ = inner(self.layer(), params, Stream(x), None)
        return linear.linear(y, params["down"], x.dtype)


class MixtureOfExperts(SwiGLU):
    """A mixture of experts with the options ``cfg.experts``, an ``ExpertsConfig``.

    A router chooses the experts of each token, and their outputs are summed with weights. An
    optional shared expert is added. ``__call__`` takes and returns floats ``[..., d_model]``.
    """

    @nn.nowrap
    def _experts(self) -> ExpertsConfig:
        """Return the options of the experts."""
        if self.cfg.experts is None:
            raise JaxLlamaError("experts = None: is needed by MixtureOfExperts")
        return self.cfg.experts

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the mixture's output for ``x[..., D]`` in its shape and dtype.

        Raises JaxLlamaError if D is not ``cfg.d_model``, if x holds no floats, or if
        ``cfg.experts`` is None.
        """
        check_features(self.cfg, x)
        if self._experts().shared_norms:
            raise JaxLlamaError(f"{self.cfg.name}: its experts read the stream; run a DecoderLayer")
        return mixture(self.layer(), self.tree(), x)


class DecoderLayer(LayerModule):
    """Layer ``index`` of a model: ``x += mixer(norm(x)); x += mlp(norm(x))``.

    The layer's mixer is ``cfg.layer_types[index]``. The module can be the body of ``nn.scan``: x is
    the carry, and the state is the output of each iteration.
    """

    @nn.compact
    def tree(self) -> ParamsDict:
        layer = self.layer()
        modules = {
            "mixer": MIXERS[layer.kind].module.MIXER,
            "mlp": SwiGLU if layer.experts is None else MixtureOfExperts,
        }
        found = {}
        for name, table in table_of(self.cfg)[f"layer_{self.index}"].items():
            if name in modules:
                found[name] = modules[name](self.cfg, self.index, name=name).tree()
            else:
                found[name] = ParameterTree(table, name=name).tree()
        return found

    @nn.nowrap
    def _run(
        self, layer: LayerConfig, params: Params, x: jax.Array, state: LayerState, at: At
    ) -> tuple[jax.Array, LayerState]:
        if layer.needs_model:
            raise JaxLlamaError(f"{self.cfg.name}: {layer.needs_model}; run the Decoder")
        stream, state = block(layer, params, Stream(x), state, at)
        return stream.total, state


class Decoder(nn.Module):
    """A whole model: embedding, layers, last norm, head.

    ``__call__`` returns hidden states, and ``logits`` their logits. Both options below are for
    whole sequences. Decoding takes per-layer parameters; ``unstack_layers`` converts to them.

    scan: whether layers that are alike are one loop over stacked parameters (``stack_layers``). A
        deep model then compiles as fast as a shallow one.
    remat: whether the backward pass keeps only each layer's input and recomputes the rest.
    """

    cfg: ModelConfig
    scan: bool = False
    remat: bool = False

    @nn.compact
    def tree(self) -> ParamsDict:
        """Return all parameters, as ``decoder.forward`` takes them; with ``scan`` stacked."""
        cfg = self.cfg.with_head_of(self.variables.get("params", {}))
        table = table_of(cfg)
        found = {"embed": ParameterTree(table["embed"], name="embed").tree()}
        if "inputs" in table:
            found["inputs"] = ParameterTree(table["inputs"], name="inputs").tree()
        for run in runs(cfg):
            for index, name in enumerate(run.names, run.first):
                if self.scan and run.count > 1:
                    layers = _stacked(table[f"layer_{index}"], run.count)
                    found[name] = ParameterTree(layers, name=name).tree()
                    continue
                for layer_index in range(index, index + run.period * run.count, run.period):
                    found[f"layer_{layer_index}"] = DecoderLayer(
                        cfg, layer_index, name=f"layer_{layer_index}"
                    ).tree()
        norm = RMSNorm if cfg.norm.kind == "rms" else LayerNorm
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
        """Return the hidden states of tokens, and the cache with them.

        Parameters
        ----------
        tokens : int [B, T]
            Token ids, padded on the right.
        lengths : int32 [B], optional
            Number of valid tokens of each row. The default is T.
        cache : Cache, optional
            The state after earlier tokens (``jl.init_cache``). None for whole sequences.
        **options
            Keyword arguments of ``jaxllama.model.decoder.forward``.

        Returns
        -------
        (Hidden, Cache or None)
            Hidden states ``[B, T, D]`` for ``logits``; field ``x`` is their array. The cache is
            None if the argument was None.

        Raises
        ------
        JaxLlamaError
            If tokens or lengths have another shape or dtype. Also for a cache or options with
            ``scan`` or ``remat``, or with parameters that are split over a mesh.
        """
        check_ints("tokens", tokens, "[B, T]")
        batch, width = tokens.shape
        if lengths is not None:
            check_ints("lengths", lengths, "[B]", batch)
        lengths = jnp.full((batch,), width, jnp.int32) if lengths is None else lengths
        params = self.tree()
        mesh = traced_mesh(params)
        is_split = mesh is not None and mesh.shape[MODEL_AXIS] > 1
        if not (self.scan or self.remat or is_split):
            return forward(self.cfg, params, tokens, lengths, cache, **options)
        if cache is not None or options:
            raise JaxLlamaError(
                "a Decoder with scan or remat, or split over a mesh, takes whole sequences; decode "
                "with Decoder(cfg) and unstack_layers(params), on a mesh with jl.prefill"
            )
        at = tokens_at(self.cfg, tokens, None, lengths, None)
        stream, at = begin(self.cfg, params, tokens, activation_dtype(params), at)
        run_block = recomputed_block if self.remat else block
        return Hidden(walk(self.cfg, params, stream, at, run_block).total), None

    def logits(self, hidden: Hidden) -> jax.Array:
        """Return float32 logits ``[..., V]`` of the hidden states ``[..., D]`` of ``__call__``."""
        return softcap(head_product(self.cfg, self.tree(), hidden), self.cfg.logit_softcap)


def _stacked(table: Params, count: int) -> ParamsDict:
    """``table`` of ``count`` layers."""
    is_leaf = lambda node: isinstance(node, Declared)  # noqa: E731
    return jax.tree.map(lambda node: node.stacked(count), table, is_leaf=is_leaf)
