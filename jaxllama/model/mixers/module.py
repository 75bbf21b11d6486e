"""The base classes of Flax modules of a layer: of whole ones, and of the mixers' own modules.

Each kind of mixer has its own ``mixers/<kind>/module.py``.
"""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
import jax
from jax.typing import DTypeLike

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.model import linear
from jaxllama.model.cache import init_layer
from jaxllama.model.declare import declare, layer_alone, table_of_layer, tokens_at
from jaxllama.model.linear import Stream
from jaxllama.model.mixers import MIXERS
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.records import At, check_features
from jaxllama.typing import Params, ParamsDict


class LayerModule(nn.Module):
    """Layer ``index`` of a model, or a part of it."""

    cfg: ModelConfig
    index: int = 0

    @nn.nowrap
    def layer(self) -> LayerConfig:
        """Return the record of this layer."""
        return self.cfg.layer(self.index)

    @nn.nowrap
    def init_state(self, batch: int, max_len: int, dtype: DTypeLike | None = None) -> LayerState:
        """Return the state of ``batch`` rows without tokens, as ``jl.init_cache`` makes it."""
        return init_layer(self.layer(), batch, max_len, dtype)

    def tree(self) -> ParamsDict:
        """Return the layer's parameters by name, as the pure functions take them."""
        raise NotImplementedError

    @nn.nowrap
    def _run(
        self, layer: LayerConfig, params: Params, x: jax.Array, state: LayerState, at: At
    ) -> tuple[jax.Array, LayerState]:
        """Return the output of ``x [B, T, D]`` at the places ``at``, and the state behind it."""
        raise NotImplementedError

    def __call__(
        self,
        x: jax.Array,
        state: LayerState = None,
        lengths: jax.Array | None = None,
        start: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerState]:
        """Run the module on tokens, which may read those before them.

        Parameters
        ----------
        x : float [B, T, D]
            The layer's input, padded on the right; D is ``cfg.d_model``.
        state : optional
            What each row keeps of earlier tokens (``init_state``). None for whole sequences.
        lengths : int32 [B], optional
            Number of valid tokens of each row. The default is T.
        start : int32 [B], optional
            Number of tokens of each row that ``state`` holds. It is required with ``state``.

        Returns
        -------
        (float [B, T, D], state)
            The output in x's dtype, and the state after the valid tokens. The state is None if the
            argument was None.

        Raises
        ------
        JaxLlamaError
            If an array has another shape or dtype, or only one of ``state`` and ``start`` is given.
            Also if the config lacks the mixer's options or has no layer ``index``, or if this layer
            needs the others: it reads their keys, or has inputs that the Decoder computes.
        """
        check_features(self.cfg, x, "[B, T, D]")
        layer, params = layer_alone(self.cfg.name, self.layer()), self.tree()
        return self._run(layer, params, x, state, tokens_at(layer, x, state, lengths, start))


class MixerModule(LayerModule):
    """A mixer by itself, ``o(mix(inputs(x)))``, without a norm before it or a residual.

    cfg: a model's config; the mixer is that of layer ``index``, whose window and positions it has.
    It need not be among the config's ``layer_types``, if its options are there.
    """

    kind: ClassVar[str]

    @nn.nowrap
    def layer(self) -> LayerConfig:
        """Return the record of this layer, with this mixer."""
        layer = self.cfg.layer(self.index)
        if layer.kind == self.kind:
            return layer
        kinds = tuple(
            self.kind if i == self.index else kind for i, kind in enumerate(self.cfg.layer_types)
        )
        return self.cfg.replace(layer_types=kinds).layer(self.index)

    @nn.compact
    def tree(self) -> ParamsDict:
        return declare(self, table_of_layer(self.layer())["mixer"])

    @nn.nowrap
    def _run(
        self, layer: LayerConfig, params: Params, x: jax.Array, state: LayerState, at: At
    ) -> tuple[jax.Array, LayerState]:
        mixer = MIXERS[self.kind].mix
        projected, _ = linear.norm_linear(Stream(x), None, mixer.inputs(layer, params), layer)
        heads, state = mixer.mix(layer, params, projected, state, at)
        return linear.linear(heads, params["o"], x.dtype), state
