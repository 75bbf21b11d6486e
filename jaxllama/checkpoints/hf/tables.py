"""The parameters of a model beside the tensors of its family's files.

tensor_table(cfg, shapes) -> {path: Param}        ``model.params``'s, with the family's names
"""

from __future__ import annotations

import types
from collections.abc import Mapping

from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.checkpoints.hf.names import FLA, LINEAR, LLAMA
from jaxllama.config import ModelConfig
from jaxllama.model.names import Names
from jaxllama.model.param import Param, Path, Shape
from jaxllama.model.params import param_table


def names_of(cfg: ModelConfig, shapes: Mapping[str, Shape]) -> Names:
    """Return the names of the tensors of a model's family; shapes: of a file's tensors."""
    kind = cfg.stored.family
    default = FLA if "gla" in cfg.layer_types else LLAMA
    if kind not in FAMILIES:
        return LINEAR.get(kind, default)
    family = FAMILIES[kind]
    if family.tensors_of is not None:
        return family.tensors_of(cfg, shapes)
    return family.tensors or default


def tensor_table(
    cfg: ModelConfig, shapes: Mapping[str, Shape] = types.MappingProxyType({})
) -> dict[Path, Param]:
    """Return the parameters of ``cfg`` and the tensors of its family's files.

    shapes: of a file's tensors, if it is at hand.
    """
    return param_table(cfg, shapes, names_of(cfg, shapes))
