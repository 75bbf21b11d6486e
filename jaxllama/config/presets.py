"""Presets and shipped TOML files, by name or by path."""

from __future__ import annotations

from pathlib import Path

from jaxllama.config.model import ModelConfig
from jaxllama.config.reader import nearest, read_toml
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

_PACKAGE = Path(__file__).resolve().parents[1]


def load_config(name: str | Path) -> ModelConfig:
    """Return the config of a preset or of a TOML file.

    Parameters
    ----------
    name : str or Path
        Name of a preset ("llama-3.1-8b"), or path of a file that ends with ".toml".

    Raises
    ------
    JaxLlamaError
        For an unknown name, a file that cannot be read, or a wrong key. The message lists the
        presets or names the file and the key.
    """
    path = _preset_path(name)
    data = read_toml(path)
    data.setdefault("name", path.stem)
    data.pop("sampling", None)
    try:
        return ModelConfig.of(**data)
    except JaxLlamaError as error:
        raise JaxLlamaError(f"{path}: {error}") from None


def preset_sampling(name: str | Path) -> JsonObject:
    """Return the sampling of a preset: keyword arguments of ``sampling.Sampling``."""
    return read_toml(_preset_path(name)).get("sampling", {})


def preset_names() -> list[str]:
    return sorted(path.stem for path in (configs_dir() / "models").glob("*.toml"))


def shipped(kind: str, name: str | Path) -> Path:
    """Return the path of a TOML file, given by path, or of a shipped one, given by name.

    Raises JaxLlamaError naming the shipped ones.
    """
    path = Path(name)
    if path.suffix == ".toml":
        return path
    files = {file.stem: file for file in (configs_dir() / kind).glob("*.toml")}
    if str(name) not in files:
        raise JaxLlamaError(f"{str(name)!r} is no .toml file; shipped: {', '.join(sorted(files))}")
    return files[str(name)]


def configs_dir() -> Path:
    """Return the folder of the shipped TOML files, in a wheel or in a checkout."""
    packaged = _PACKAGE / "configs"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "configs"


def _preset_path(name: str | Path) -> Path:
    path = Path(name)
    if path.suffix != ".toml":
        path = configs_dir() / "models" / f"{name}.toml"
        if not path.is_file():
            names = preset_names()
            raise JaxLlamaError(
                f"no preset {str(name)!r}; presets: {', '.join(names)}{nearest(str(name), names)}"
            )
    return path
