"""The operations of a layer, one step after another, by ``model.linear`` or by a ``Steps``.

``observer.Observer`` and ``training.fp8.Fp8`` are ``Steps`` with products of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Unpack, overload

import jax
from jax.typing import DTypeLike

from jaxllama.config import StepConfig
from jaxllama.model import linear as ops
from jaxllama.model.experts.route import Routed, route
from jaxllama.model.linear import Grouping, Input, Stream
from jaxllama.typing import Params, Tree
from pallas_kernels.operands import Columns


class LayerOps(Protocol):
    """The operations that a layer calls, as ``model.linear`` describes them."""

    def norm_linear(
        self,
        stream: Stream,
        scale: Params | None,
        linear: Params | Sequence[Params],
        cfg: StepConfig,
        *,
        into: Params | None = None,
    ) -> tuple[Tree, Stream]: ...
    def linear_add(
        self,
        x: Input,
        linear: Params,
        stream: Stream,
        cfg: StepConfig,
        scale: Params | None = None,
    ) -> Stream: ...
    @overload
    def product(
        self,
        x: Input,
        params: Params,
        dtype: DTypeLike,
        cfg: StepConfig,
        /,
        *,
        into: None = None,
    ) -> jax.Array: ...
    @overload
    def product(
        self,
        x: Input,
        params: Params,
        dtype: DTypeLike,
        cfg: StepConfig,
        /,
        *,
        into: Params,
    ) -> Input: ...
    def norm_route(
        self, stream: Stream, scale: Params | None, router: Params, cfg: StepConfig
    ) -> tuple[jax.Array, Stream, Routed]: ...
    def grouped(
        self, x: jax.Array, params: Params, experts: jax.Array, /, **options: Unpack[Grouping]
    ) -> jax.Array: ...


class Steps:
    """The operations of ``model.linear``, step by step; a subclass has a ``product`` of its own."""

    def norm_linear(
        self,
        stream: Stream,
        scale: Params | None,
        linear: Params | Sequence[Params],
        cfg: StepConfig,
        *,
        into: Params | None = None,
    ) -> tuple[Tree, Stream]:
        x, stream = ops.norm(stream, scale, cfg)
        if isinstance(linear, Mapping):
            return self.product(x, linear, stream.x.dtype, cfg, into=into), stream
        products = (self.product(x, params, x.dtype, cfg) for params in linear)
        return list(map(Columns.whole, products)), stream

    def linear_add(
        self,
        x: Input,
        linear: Params,
        stream: Stream,
        cfg: StepConfig,
        scale: Params | None = None,
    ) -> Stream:
        y = self.product(x, linear, stream.x.dtype, cfg)
        return Stream(stream.total, y if scale is None else ops.norm(Stream(y), scale, cfg)[0])

    def product(
        self,
        x: Input,
        linear: Params,
        dtype: DTypeLike,
        cfg: StepConfig,
        *,
        into: Params | None = None,
    ) -> Tree:
        return ops.product(x, linear, dtype, cfg, into=into)

    def norm_route(
        self, stream: Stream, scale: Params | None, router: Params, cfg: StepConfig
    ) -> tuple[jax.Array, Stream, Routed]:
        options = cfg.experts
        assert options is not None
        x, stream = ops.norm(stream, scale, cfg)
        return x, stream, route(options, x.reshape(-1, x.shape[-1]), router)

    def grouped(
        self, x: jax.Array, linear: Params, experts: jax.Array, **options: Unpack[Grouping]
    ) -> jax.Array:
        return ops.grouped(x, linear, experts, **options)
