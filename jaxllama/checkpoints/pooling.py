"""Pooling: how a model for embeddings turns hidden states into one vector.

    read(directory) -> Pooling | None     from sentence-transformers' files; None without them

``modules.json`` lists the modules in their order: Transformer, Pooling and, for vectors of length
1, Normalize. The folder of the Pooling module has a ``config.json`` that names the mode. Older
files have one flag for each mode (``pooling_mode_lasttoken``), newer ones a name
(``pooling_mode``).

Left out: joined modes, and modules with weights after the pooling (Dense). ``read`` refuses both,
because the vectors would differ from the model's own.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from jaxllama.errors import JaxLlamaError

FILE = "modules.json"
PoolingMode = Literal["mean", "last", "cls", "max"]
_MODES: dict[str, PoolingMode] = {
    "mean": "mean",
    "lasttoken": "last",
    "cls": "cls",
    "max": "max",
}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclasses.dataclass(frozen=True)
class Pooling:
    """The definition of a model's vectors.

    mode: the mean of all tokens' hidden states, the last or first token's ("cls"), or the largest
    value of each feature. normalize: whether a vector is scaled to length 1.
    """

    mode: PoolingMode = "mean"
    normalize: bool = True


def read(directory: Path) -> Pooling | None:
    """Return the pooling of a directory's files; None without ``modules.json``.

    Raises
    ------
    JaxLlamaError
        Naming the file and the module or mode that is not supported.
    """
    path = directory / FILE
    if not path.is_file():
        return None
    modules = _parsed(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise JaxLlamaError(f"{path}: expected a list of modules")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        supported = "Transformer, Pooling and Normalize are supported, in this order"
        raise JaxLlamaError(f"{path}: modules {', '.join(kinds)}: {supported}")
    config_path = directory / str(modules[1].get("path")) / "config.json"
    if not config_path.resolve().is_relative_to(directory.resolve()):
        raise JaxLlamaError(f"{path}: the Pooling module's path is outside of the directory")
    if not config_path.is_file():
        raise JaxLlamaError(f"{path}: there is no {config_path.relative_to(directory)}")
    config = _parsed(config_path)
    if not isinstance(config, dict):
        raise JaxLlamaError(f"{config_path}: expected an object")
    given = config.get("pooling_mode", [name for flag, name in _FLAGS.items() if config.get(flag)])
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _MODES:
        raise JaxLlamaError(
            f"{config_path}: pooling_mode = {str(given)[:80]}: one of {', '.join(_MODES)} "
            "is supported"
        )
    return Pooling(_MODES[names[0]], "Normalize" in kinds)


def _parsed(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise JaxLlamaError(f"{path}: {error}") from None
