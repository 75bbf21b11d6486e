"""The parameters of further inputs of every layer (``model.layer_inputs``).

    inputs/table           weight [V, L P]      project  weight [L P, D]      norm  weight [P]
    layer_i/inputs/gate    weight [P, D]        out      weight [D, P]        norm  weight [D]

This file imports no jax.
"""

from __future__ import annotations

from jaxllama.config import ModelConfig
from jaxllama.model.names import LayerInputNames
from jaxllama.model.param import Param, Path, one, written


def table(cfg: ModelConfig, names: LayerInputNames) -> dict[Path, Param]:
    """Return the parameters that are no layer's."""
    own = cfg.layer_inputs
    assert own is not None
    width = own.n_layers * own.width
    return {
        ("table", "weight"): one(f"{names.table}.weight", own.vocab_size, width),
        ("project", "weight"): one(f"{names.project}.weight", width, cfg.d_model),
        ("norm", "weight"): one(f"{names.norm}.weight", own.width, mean=1.0, std=0.0),
    }


def layer_table(cfg: ModelConfig, layer: str, names: LayerInputNames) -> dict[Path, Param]:
    """Return the parameters of a layer."""
    assert cfg.layer_inputs is not None
    width, d = cfg.layer_inputs.width, cfg.d_model
    return {
        ("gate", "weight"): one(f"{layer}{names.gate}.weight", width, d),
        **written("out", f"{layer}{names.out}", d, width, False),
        ("norm", "weight"): one(f"{layer}{names.out_norm}.weight", d, mean=1.0, std=0.0),
    }
