"""The families of models: a table from ``model_type`` to the meaning of its config.json.

Each file of this folder has a part of the table, its ``FAMILIES``. A family has the keys that
change the computation, and their translation to the flat form of a ModelConfig and back.
``hf.config`` reads the keys that all families share (sizes, RoPE, token ids), and ``defaults.json``
what transformers takes for a key that is missing.

To add a family: a file here with its entry, which has the names of its tensors if they differ from
Llama's, and a case in the parity test. docs/howto/family.md has the steps.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

from jaxllama.checkpoints.hf.common import defaults_of
from jaxllama.checkpoints.hf.family import Family
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError

_FILES = [file.name for file in pkgutil.iter_modules(__path__)]
FAMILIES: dict[str, Family] = {
    kind: dataclasses.replace(family, defaults={**defaults_of(kind), **family.defaults})
    for file in sorted(_FILES, key=lambda name: name != "llama")  # errors list Llama first
    for kind, family in importlib.import_module(f"{__name__}.{file}").FAMILIES.items()
}

# Families with Llama's tensor names and no folding. They share one name, so that equivalent configs
# are equal.
ALIKE = ("llama", "mistral", "ministral", "qwen2")


def stored_name(family: str) -> str:
    """Return the name under which a config keeps a family."""
    return ALIKE[0] if family in ALIKE else family


def family_of(cfg: ModelConfig) -> str:
    """Return the architecture whose fixed options are those of ``cfg``."""
    if cfg.stored.family not in ALIKE:
        return cfg.stored.family
    if cfg.sliding_window is None and cfg.qkv_bias == cfg.o_bias:
        return "llama"
    if cfg.mlp_bias:
        raise JaxLlamaError("mlp_bias = True: only llama has it, without a window, bias q|k|v|o")
    if cfg.o_bias:
        raise JaxLlamaError("o_bias = True: only llama has it, without a window, bias q|k|v|o")
    if cfg.qkv_bias:
        return "qwen2"
    return "ministral" if cfg.window_layers else "mistral"
