"""An experiment's TOML file: checked whole, and expanded into points.

    title = "Schemes by perplexity"      # heading of the table
    workload = "quality"                 # quality | speed | train | offload | serve | learn
    seeds = [0, 1, 2]                    # a point is measured once a seed; the spread is the noise
    [models.tiny]                        # models without a preset: configs/models' keys
    [settings]                           # the workload's; a list is an axis of the grid
    model = "smollm2-135m"
    scheme = ["none", "w8a16"]
    [[case]]                             # any number: these settings instead, grids one by one
    [table]                              # columns = [...]: settings and results, in this order
    [[picture]]                          # x, y, by, where, x_scale, y_scale, title

A setting whose type is a list is an axis if its value is a list of lists. Settings of a nested
table have names with dots ("optimizer.warmup_steps"). Paths are relative to the file. Two points
with the same settings are an error, and so is everything that the settings' classes refuse.
Messages name the file, the key and what is allowed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jaxllama.config import FlatConfig, ModelConfig, expand, from_dict, read_toml, shipped
from jaxllama.errors import JaxLlamaError
from jaxllama.experiments.settings import (
    BIBLE,
    FACTS,
    SETTINGS,
    Settings,
    TrainSettings,
    Workload,
    flatten,
)
from jaxllama.typing import JsonObject, Tree


@dataclasses.dataclass(frozen=True)
class Table:
    """columns: settings and results; by default the varying settings and all numeric results."""

    columns: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Picture:
    """``y`` over ``x``, with one line for every combination of ``by``.

    x, y, by: names of settings or results; results that are lists are curves. where: settings of
    the points that are drawn.
    """

    x: str
    y: str
    by: tuple[str, ...] = ()
    x_scale: Literal["linear", "log"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    title: str = ""
    where: JsonObject = dataclasses.field(default_factory=JsonObject)


@dataclasses.dataclass(frozen=True)
class _File:
    """The keys of the file."""

    title: str
    workload: Workload
    settings: JsonObject
    seeds: tuple[int, ...] = (0,)
    models: JsonObject = dataclasses.field(default_factory=JsonObject)
    case: tuple[JsonObject, ...] = ()
    table: Table = Table()
    picture: tuple[Picture, ...] = ()


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination of settings.

    settings: for the workload. flat: by dotted name, for tables and files. name: for people and
    file names.
    """

    settings: Any  # one of ``settings.Settings``, by the workload
    flat: JsonObject
    name: str


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A file that was read; only checks that need data are left."""

    path: Path
    title: str
    workload: Workload
    seeds: tuple[int, ...]
    models: dict[str, ModelConfig]
    points: tuple[Point, ...]
    axes: tuple[str, ...]
    columns: tuple[str, ...]
    pictures: tuple[Picture, ...]

    @property
    def identity(self) -> JsonObject:
        """The settings that the numbers depend on, in JSON's types.

        Titles, tables and pictures may change.
        """
        identity = {
            "workload": self.workload,
            "models": {name: cfg.to_dict() for name, cfg in self.models.items()},
            "points": [point.flat for point in self.points],
            "seeds": self.seeds,
        }
        return json.loads(json.dumps(identity))

    @property
    def digest(self) -> str:
        return digest(self.identity)

    def find(self, name: str) -> Path:
        """Return a path that is relative to the file."""
        return (self.path.parent / Path(name).expanduser()).resolve()


def load_experiment(name: str | Path, text: str | Path | None = None) -> Experiment:
    """Return a shipped experiment, given by name, or the experiment of a TOML file, given by path.

    text: a file, or "bible", that replaces every text in the TOML file except "facts". Raises
    JaxLlamaError naming the file, the key and what is allowed.
    """
    path = shipped("experiments", name)
    data = read_toml(path)
    try:
        if text is not None:
            _replace_texts(data, str(text) if text == BIBLE else str(Path(text).resolve()))
        return _experiment(path, data)
    except JaxLlamaError as error:
        raise JaxLlamaError(f"{path}: {error}") from None


def _replace_texts(data: JsonObject, text: str) -> None:
    """Replace the texts in the settings and the pictures of a file's unchecked data."""

    def replaced(old: Tree) -> Tree:
        if isinstance(old, list):
            return list(dict.fromkeys(map(replaced, old)))
        return old if old == FACTS else text

    cases, pictures = data.get("case", []), data.get("picture", [])
    tables = [data.get("settings"), *(cases if isinstance(cases, list) else [])]
    changed = [table for table in tables if isinstance(table, dict) and "text" in table]
    if not changed:
        raise JaxLlamaError(f"--text = {text}: the experiment reads no text")
    pictures = [picture for picture in pictures if isinstance(picture, dict)]
    wheres = [where for picture in pictures if isinstance(where := picture.get("where"), dict)]
    for table in changed + [where for where in wheres if "text" in where]:
        table["text"] = replaced(table["text"])


def _experiment(path: Path, data: JsonObject) -> Experiment:
    file = from_dict(_File, data)
    if not file.seeds or len(set(file.seeds)) < len(file.seeds):
        raise JaxLlamaError(f"seeds = {list(file.seeds)}: one or more different whole numbers")
    models = {}
    for name, table in file.models.items():
        if not isinstance(table, dict):
            raise JaxLlamaError(f"models.{name} = {table!r}: expected a table")
        flat = from_dict(FlatConfig, {"name": name, **table}, f"models.{name}.")
        models[name] = expand(flat)
    tables = [_merge(file.settings, case) for case in file.case or ({},)]
    settings = [
        _read(file.workload, point_settings, path, models)
        for table in tables
        for point_settings in _grid(table, _settings_class(file.workload))
    ]
    flats = [flatten(point_settings) for point_settings in settings]
    keys = list(dict.fromkeys(key for flat in flats for key in flat))
    axes = [key for key in keys if len({str(flat.get(key)) for flat in flats}) > 1]
    points: dict[str, Point] = {}
    for point_settings, flat in zip(settings, flats, strict=True):
        name = ", ".join(f"{key}={flat.get(key)}" for key in axes) or file.workload
        if name in points:
            raise JaxLlamaError(f"two points are the same: {name}")
        points[name] = Point(point_settings, flat, name)
    for picture in file.picture:
        for key in picture.by:
            _known(key, keys, "picture.by")
        for key, value in picture.where.items():
            _known(key, keys, "picture.where")
            if not any(flat.get(key) == value for flat in flats):
                raise JaxLlamaError(f"picture.where: no point has {key} = {value!r}")
        wanted = picture.where.items()
        if not any(all(flat.get(key) == value for key, value in wanted) for flat in flats):
            raise JaxLlamaError(f"picture.where: no point has all of {dict(wanted)}")
    return Experiment(
        path.resolve(),
        file.title,
        file.workload,
        file.seeds,
        models,
        tuple(points.values()),
        tuple(axes),
        file.table.columns,
        file.picture,
    )


def _known(key: str, keys: list[str], where: str) -> None:
    if key not in keys:
        raise JaxLlamaError(f"{where} = {key!r}: no such setting; allowed: {', '.join(keys)}")


def _settings_class(workload: str) -> type:
    if workload == "train":
        from jaxllama.training import TrainConfig

        return TrainConfig
    return SETTINGS[workload]


def _read(workload: str, table: JsonObject, path: Path, models: dict[str, ModelConfig]) -> Settings:
    """Return the typed settings of one point."""
    if workload != "train":
        return from_dict(SETTINGS[workload], table, "settings.")
    from jaxllama.training import train_config_from_dict

    if "seed" in table:
        raise JaxLlamaError("unknown key 'settings.seed'; the file's own key is seeds")
    texts = {key: table.pop(key) for key in ("text", "tokenizer") if key in table}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise JaxLlamaError(f"settings.{key} = {value!r}: expected str")
    data = dict(table.get("data", {}))
    if ("text" in texts) == ("tokens" in data):
        raise JaxLlamaError("settings: exactly one of text and data.tokens is needed")
    tokens = data.get("tokens")
    data["tokens"] = str(path.parent / tokens) if isinstance(tokens, str) else ""
    table["data"] = data
    if table.get("model") in models:
        table["model"] = models[table["model"]]
    return TrainSettings(config=train_config_from_dict(table, "settings", path.parent), **texts)


def _merge(base: JsonObject, over: JsonObject) -> JsonObject:
    """Merge two tables recursively; ``over`` has priority."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merge(old, value)
        merged[key] = value
    return merged


def _grid(table: JsonObject, cls: type) -> Iterator[JsonObject]:
    """Yield every combination of the axes, the first axis slowest."""
    axes = list(_axes(table, cls, ()))
    for path, values in axes:
        if not values:
            raise JaxLlamaError(f"settings.{'.'.join(path)} = []: an axis needs a value")
    for chosen in itertools.product(*(values for _, values in axes)):
        point = _merge({}, table)
        for (path, _), value in zip(axes, chosen, strict=True):
            room = point
            for key in path[:-1]:
                room[key] = dict(room[key])
                room = room[key]
            room[path[-1]] = value
        yield point


def _axes(
    table: JsonObject, cls: type | None, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[object]]]:
    hints = typing.get_type_hints(cls) if cls and dataclasses.is_dataclass(cls) else {}
    for key, value in table.items():
        hint = hints.get(key)
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        if isinstance(value, dict):
            yield from _axes(value, hint, (*path, key))
        elif isinstance(value, list):
            is_list = typing.get_origin(hint) is tuple
            if not is_list or any(isinstance(entry, list) for entry in value):
                yield (*path, key), value


def digest(value: object) -> str:
    """Return ten hex digits of a JSON value's hash."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]
