"""The defaults of transformers for missing keys of config.json.

COMMON                 of all model types
defaults_of(kind)      of one type, where they differ: ``defaults.json``, made by
                       ``tests/golden/make_family_defaults.py`` from transformers' classes
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from jaxllama.typing import JsonObject

DEFAULTS = Path(__file__).with_name("defaults.json")
COMMON: JsonObject = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def defaults_of(kind: str) -> JsonObject:
    """Return the defaults of a model type, under the shared names of keys."""
    return _table().get(kind, {})


@functools.cache
def _table() -> dict[str, JsonObject]:
    return json.loads(DEFAULTS.read_text(encoding="utf-8"))
