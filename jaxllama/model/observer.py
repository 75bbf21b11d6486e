"""Observer: runs a layer's operations like ``model.linear``, and records inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
from jax.typing import DTypeLike

from jaxllama.config import ExpertsConfig, ModelConfig
from jaxllama.model import linear as ops
from jaxllama.model.linear import Input, Stream
from jaxllama.typing import Options, Params, Tree
from pallas_kernels.experts.gate import Gate

Made = TypeVar("Made")


class Observer:
    """Runs the two operations step by step and records each layer's input and output.

    ``inputs`` and ``outputs`` are keyed by the identity of the layer's parameters.  Calibration and
    distillation read them.
    """

    def __init__(self) -> None:
        self.inputs: dict[int, jax.Array] = {}
        self.outputs: dict[int, Tree] = {}
        self.experts: dict[int, jax.Array] = {}  # that a mixture's layer took, ``[T, k]``

    def norm_linear(
        self,
        stream: Stream,
        scale: Params | None,
        linear: Params | Sequence[Params],
        cfg: ModelConfig,
        *,
        into: Params | None = None,
    ) -> tuple[Tree, Stream]:
        x, stream = ops.norm(stream, scale, cfg)
        if isinstance(linear, Mapping):
            y = self._tell(linear, x, ops.product(x, linear, stream.x.dtype, cfg, into=into))
        else:
            y = ops.columns(x, linear)
            for one, made in zip(linear, y, strict=True):
                self._tell(one, x, made.value)
        return y, stream

    def linear_add(
        self,
        x: Input,
        linear: Params,
        stream: Stream,
        cfg: ModelConfig,
        scale: Params | None = None,
    ) -> Stream:
        y = self._tell(linear, x, ops.product(x, linear, stream.x.dtype, cfg))
        return Stream(stream.total, y if scale is None else ops.norm(Stream(y), scale, cfg)[0])

    def product(
        self,
        x: Input,
        linear: Params,
        dtype: DTypeLike,
        cfg: ModelConfig,
        *,
        into: Params | None = None,
    ) -> Tree:
        return self._tell(linear, x, ops.product(x, linear, dtype, cfg, into=into))

    def route(
        self, options: ExpertsConfig, x: jax.Array, router: Params
    ) -> tuple[jax.Array, jax.Array]:
        return ops.route(options, x, router)

    def grouped(
        self,
        x: jax.Array,
        linear: Params,
        experts: jax.Array,
        *,
        weights: jax.Array | None = None,
        gated: Gate | None = None,
        first: jax.Array | None = None,
        dtype: DTypeLike | None = None,
    ) -> jax.Array:
        self.experts[id(linear)] = experts
        how: Options = {"gated": gated, "first": first, "dtype": dtype}
        y = ops.grouped(x, linear, experts, weights=weights, **how)
        return self._tell(linear, x, y)

    def _tell(self, linear: Params, x: Tree, y: Made) -> Made:
        self.inputs[id(linear)], self.outputs[id(linear)] = x, y
        return y
