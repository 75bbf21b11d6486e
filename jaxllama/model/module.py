"""The decoder as a linen module: it declares the parameters, and ``decoder``'s functions compute.

    Decoder(cfg).init(key, method="tree")           draws them, in float32
    Decoder(cfg).apply({"params": params}, ...)     is ``decoder.forward``

Only what draws parameters imports this file: flax takes a third of a second to import.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig
from jaxllama.model.cache import Cache
from jaxllama.model.decoder import forward, logits
from jaxllama.model.flax_state import register
from jaxllama.model.param import Param
from jaxllama.model.params import nested, param_table
from jaxllama.model.records import Hidden

register()


class ParameterTree(nn.Module):
    """Declares the parameters below one name and hands them out as a nested dict, whatever they are
    stored as: linen's own shape check knows no QTensor, so it is ``check``'s."""

    table: Any  # nested: {name: Param or the same again}

    @nn.compact
    def __call__(self) -> dict[str, Any]:
        found = {}
        for name, node in self.table.items():
            if not isinstance(node, Param):
                found[name] = ParameterTree(node, name=name)()
            elif self.has_variable("params", name):
                found[name] = self.get_variable("params", name)
            else:
                found[name] = self.param(name, _initializer(node), node.shape, jnp.float32)
        return found


def _initializer(param: Param) -> nn.initializers.Initializer:
    if param.std:
        return nn.initializers.normal(param.std)
    return nn.initializers.constant(param.mean)


class Decoder(nn.Module):
    """Declares the parameters; ``__call__`` is ``forward`` and ``logits`` ``logits`` of them."""

    cfg: ModelConfig

    def setup(self) -> None:
        cfg = self.cfg.with_head_of(self.variables.get("params", {}))
        self.names = tuple(nested(param_table(cfg)))
        for name, table in nested(param_table(cfg)).items():
            setattr(self, name, ParameterTree(table))

    def tree(self) -> dict[str, Any]:
        """All parameters."""
        return {name: getattr(self, name)() for name in self.names}

    def __call__(self, *args: Any, **options: Any) -> tuple[Hidden, Cache | None]:
        return forward(self.cfg, self.tree(), *args, **options)

    def logits(self, hidden: Hidden) -> jax.Array:
        return logits(self.cfg, self.tree(), hidden)
