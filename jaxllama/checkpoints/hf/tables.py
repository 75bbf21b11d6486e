"""The parameters of a model beside the tensors of its family's files.

tensor_table(cfg, present) -> {path: Param}        ``model.params``'s, with the family's names
"""

from __future__ import annotations

from collections.abc import Collection

from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.checkpoints.hf.names import FLA, LINEAR, LLAMA
from jaxllama.config import ModelConfig
from jaxllama.model.names import Names
from jaxllama.model.param import Param, Path
from jaxllama.model.params import param_table


def names_of(cfg: ModelConfig) -> Names:
    """Return the names of the tensors of a model's family."""
    kind = cfg.stored.family
    default = FLA if "gla" in cfg.layer_types else LLAMA
    return (FAMILIES[kind].tensors if kind in FAMILIES else LINEAR.get(kind)) or default


def tensor_table(cfg: ModelConfig, present: Collection[str] = ()) -> dict[Path, Param]:
    """Return the parameters of ``cfg`` and the tensors of its family's files.

    present: the names of a file's tensors, if it is at hand.
    """
    return param_table(cfg, present, names_of(cfg))
