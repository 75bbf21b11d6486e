"""Observer: runs a layer's operations like ``model.linear``, and records inputs and outputs."""

from __future__ import annotations

from typing import TypeVar, Unpack

import jax
from jax.typing import DTypeLike

from jaxllama.config import StepConfig
from jaxllama.model.layer_ops import Steps
from jaxllama.model.linear import Grouping, Input
from jaxllama.typing import Params, Tree

Output = TypeVar("Output")


class Observer(Steps):
    """Runs a layer's operations step by step and records each product's input and output.

    ``inputs`` and ``outputs`` are keyed by the identity of the layer's parameters.  Calibration and
    distillation read them.
    """

    def __init__(self) -> None:
        self.inputs: dict[int, jax.Array] = {}
        self.outputs: dict[int, Tree] = {}
        self.experts: dict[int, jax.Array] = {}  # that a mixture's layer took, ``[T, k]``

    def product(
        self,
        x: Input,
        linear: Params,
        dtype: DTypeLike,
        cfg: StepConfig,
        *,
        into: Params | None = None,
    ) -> Tree:
        return self._record(linear, x, super().product(x, linear, dtype, cfg, into=into))

    def grouped(
        self, x: jax.Array, linear: Params, experts: jax.Array, **options: Unpack[Grouping]
    ) -> jax.Array:
        self.experts[id(linear)] = experts
        return self._record(linear, x, super().grouped(x, linear, experts, **options))

    def _record(self, linear: Params, x: Tree, y: Output) -> Output:
        self.inputs[id(linear)], self.outputs[id(linear)] = x, y
        return y
