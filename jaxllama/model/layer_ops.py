"""The type of who computes a layer's operations: ``model.linear``, or an ``observer.Observer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, overload

import jax
from jax.typing import DTypeLike

from jaxllama.config import ExpertsConfig, ModelConfig
from jaxllama.model.linear import Input, Stream
from jaxllama.typing import Params, Tree
from pallas_kernels.experts.gate import Gate


class LayerOps(Protocol):
    """The operations that a layer calls, as ``model.linear`` describes them."""

    def norm_linear(
        self,
        stream: Stream,
        scale: Params | None,
        linear: Params | Sequence[Params],
        cfg: ModelConfig,
        *,
        into: Params | None = None,
    ) -> tuple[Tree, Stream]: ...
    def linear_add(
        self,
        x: Input,
        linear: Params,
        stream: Stream,
        cfg: ModelConfig,
        scale: Params | None = None,
    ) -> Stream: ...
    @overload
    def product(
        self, x: Input, params: Params, dtype: DTypeLike, cfg: ModelConfig, /, *, into: None = None
    ) -> jax.Array: ...
    @overload
    def product(
        self, x: Input, params: Params, dtype: DTypeLike, cfg: ModelConfig, /, *, into: Params
    ) -> Input: ...
    def route(
        self, options: ExpertsConfig, x: jax.Array, router: Params, /
    ) -> tuple[jax.Array, jax.Array]: ...
    def grouped(
        self,
        x: jax.Array,
        params: Params,
        experts: jax.Array,
        /,
        *,
        weights: jax.Array | None = None,
        gated: Gate | None = None,
        first: jax.Array | None = None,
        dtype: DTypeLike | None = None,
    ) -> jax.Array: ...
