"""Flax modules' parameters, declared from the parameter table.

``table_of(cfg)`` is ``params.param_table`` as a nested dict of ``Declared`` entries: the table's
``Param`` (shape, distribution) and the mesh axis of each dimension (``split.split_axis``).  A
module's ``tree`` declares its part of it and returns the values as the nested dict that the pure
functions take.  Only modules import this file, because flax takes a third of a second to import.

``init`` returns every parameter in an ``nn.Partitioned`` box, so that ``nn.get_partition_spec`` and
``nn.get_sharding`` answer; ``nn.unbox`` removes the boxes.  ``apply`` takes either.  A value may be
stored as anything (a QTensor, codes in a CPU's layout): linen's check of shapes knows floats alone,
so it is left out for parameters that exist.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.meta import AxisMetadata

from jaxllama.config import LayerConfig, ModelConfig, StepConfig, model_of
from jaxllama.errors import JaxLlamaError
from jaxllama.model.flax_state import register
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.param import Param
from jaxllama.model.params import nested, param_table
from jaxllama.model.records import At, check_ints, new_tokens, positions_of
from jaxllama.model.split import split_axis
from jaxllama.parallel.mesh import MODEL_AXIS
from jaxllama.typing import Params, ParamsDict, Tree

register()


@dataclasses.dataclass(frozen=True)
class Declared:
    """A parameter to declare: ``axes`` names each dimension's mesh axis, or None.  count: of layers
    that are stacked along a new first dimension; 0 for a parameter of one layer."""

    param: Param
    axes: tuple[str | None, ...]
    count: int = 0

    def stacked(self, count: int) -> Declared:
        """The same parameter of ``count`` layers."""
        return dataclasses.replace(self, count=count)

    def init(self, key: jax.Array) -> nn.Partitioned[jax.Array]:
        """Draw the values, float32, in their box."""
        lead = (self.count,) if self.count else ()
        param, axes = self.param, (None,) * len(lead) + self.axes
        draw = nn.initializers.normal(param.std)
        drawn = param.mean + draw(key, (*lead, *param.shape), jnp.float32)
        return nn.Partitioned(drawn, axes)


@functools.lru_cache(maxsize=64)
def table_of(cfg: ModelConfig) -> ParamsDict:
    """The parameter table as ``{name: Declared or the same again}``, in the table's order."""
    declared: dict[tuple[str, ...], Declared] = {}
    for path, param in param_table(cfg).items():
        split = split_axis(path)
        axes = (MODEL_AXIS if axis == split else None for axis in range(len(param.shape)))
        declared[path] = Declared(param, tuple(axes))
    return nested(declared)


def declare(module: nn.Module, table: Params) -> ParamsDict:
    """Declare ``table``'s parameters in ``module`` and return their values, nested as it is."""
    return {
        name: _value(module, name, node)
        if isinstance(node, Declared)
        else ParameterTree(node, name=name).tree()
        for name, node in table.items()
    }


def _value(module: nn.Module, name: str, declared: Declared) -> Tree:
    if not module.has_variable("params", name):
        return module.param(name, declared.init)
    value = module.get_variable("params", name)
    return value.unbox() if isinstance(value, AxisMetadata) else value


class ParameterTree(nn.Module):
    """Parameters below one name, where no other module computes with them alone."""

    table: Params  # {name: Declared or the same again}

    @nn.compact
    def tree(self) -> ParamsDict:
        """The parameters' values."""
        return declare(self, self.table)


@functools.lru_cache(maxsize=64)
def table_of_layer(layer: LayerConfig) -> ParamsDict:
    """``table_of`` for one layer, whatever model it is of."""
    return table_of(model_of(layer))["layer_0"]


def layer_alone(name: str, layer: LayerConfig) -> LayerConfig:
    """Return the record of a layer that runs by itself; it lends no keys.

    name: the model's.  Raises JaxLlamaError for a layer that needs another one or the model's
    tables.
    """
    if layer.borrows:
        raise JaxLlamaError(f"{name}: this layer reads another layer's keys; run the Decoder")
    return layer.replace(mixer=layer.mixer.replace(lends="")) if layer.lends else layer


def tokens_at(
    cfg: StepConfig,
    x: jax.Array,
    state: LayerState,
    lengths: jax.Array | None,
    start: jax.Array | None,
) -> At:
    """Return the record of the new tokens ``x[B, T, ...]``, as ``decoder.forward`` makes it.

    lengths int32 ``[B]``: valid tokens of each row (None: all T).  start int32 ``[B]``: tokens that
    ``state`` holds already.  Raises JaxLlamaError if one of ``state`` and ``start`` is missing, or
    if lengths or start is no such array.
    """
    if (state is None) != (start is None):
        raise JaxLlamaError("a state and start, the tokens of each row that it holds, go together")
    batch, width = x.shape[:2]
    for name, value in (("lengths", lengths), ("start", start)):
        if value is not None:
            check_ints(name, value, "[B]", batch)
    lengths = jnp.full((batch,), width, jnp.int32) if lengths is None else lengths
    before = jnp.zeros_like(lengths) if start is None else start
    positions, rope = positions_of(cfg, before, before + lengths, width)
    is_step = state is not None and width == 1
    return new_tokens(positions, lengths, rope, sparse=is_step, cached=state is not None)
