"""Further steps of attention between the products of the layer's input and the positions.

    part(name)        the file of this name; ``AttentionOptions.attention_parts`` has the names
        SPLIT: {parameter's name: axis}
        table(layer, prefix, source) -> {path: Param}     its own parameters, of the mixer's tree
        apply(cfg, p, qkv) -> qkv                         ``[..., (N + 2K) H]``: q, then k, then v

A step that one family alone has is one file here, and its name in the family's entry. Such a file
imports jax in ``apply`` only, because the table of parameters needs none.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Protocol

from jaxllama.config import AttentionConfig, LayerConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.names import Source
from jaxllama.model.param import Param, Path
from jaxllama.typing import Params

if TYPE_CHECKING:
    import jax

NAMES = tuple(sorted(file.stem for file in FilePath(__file__).parent.glob("[a-z]*.py")))


class Part(Protocol):
    """A file of this folder."""

    SPLIT: Mapping[str, int]

    def table(self, layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]: ...
    def apply(self, cfg: AttentionConfig, p: Params, qkv: jax.Array) -> jax.Array: ...


@functools.cache
def part(name: str) -> Part:
    """Return the file. Raises JaxLlamaError listing the files there are."""
    if name not in NAMES:
        raise JaxLlamaError(f"attention_parts = {name!r}: allowed values are {', '.join(NAMES)}")
    return importlib.import_module(f"{__name__}.{name}")  # type: ignore[return-value]
