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
from pathlib import Path
from typing import Literal

from jaxllama import files
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.errors import JaxLlamaError
from jaxllama.files import exists, short

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
    if not exists(path):
        return None
    modules = files.parse_json(files.read(path, files.SETTINGS), str(path))
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise JaxLlamaError(f"{path}: expected a list of modules")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        supported = "Transformer, Pooling and Normalize are supported, in this order"
        raise JaxLlamaError(f"{path}: modules {short(', '.join(kinds))}: {supported}")
    folder = JsonReader(modules[1], f"{path}: Pooling: ").text("path", "")
    # A name with ".." or a slash in front leads elsewhere.
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise JaxLlamaError(f"{path}: the Pooling module's path is outside of the directory")
    config_path = directory / folder / "config.json"
    if not exists(config_path):
        raise JaxLlamaError(f"{path}: there is no {short(str(Path(folder) / 'config.json'))}")
    config = JsonReader(files.read_json(config_path, files.SETTINGS), f"{config_path}: ")
    flags = [name for flag, name in _FLAGS.items() if config.flag(flag, False)]
    given = config.get("pooling_mode", flags)
    names = given if isinstance(given, list) else [given]
    if len(names) != 1 or not isinstance(names[0], str) or names[0] not in _MODES:
        raise JaxLlamaError(
            f"{config_path}: pooling_mode = {short(given)}: one of {', '.join(_MODES)} is supported"
        )
    return Pooling(_MODES[names[0]], "Normalize" in kinds)
