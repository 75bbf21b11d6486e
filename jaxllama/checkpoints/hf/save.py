"""Write parameters to an HF directory that transformers loads, all of it or nothing.

The table of ``model.params``, which loading uses too, says how each parameter is split into the
checkpoint's tensors. One parameter at a time comes to the host. Everything is written into a
temporary folder beside the target, and one rename moves it into place (``write_directory``;
``checkpoints.packed.save`` saves quantized weights with it). Left out: overwriting.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllama.checkpoints import safetensors as safetensors_file
from jaxllama.checkpoints.folding import unfold
from jaxllama.checkpoints.hf.config import config_to_hf, generation_config
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.files import whole_folder
from jaxllama.model import param as tensors
from jaxllama.model.param import Param, piece_of
from jaxllama.progress import working
from jaxllama.typing import JsonObject, Params, Tree

if TYPE_CHECKING:
    from jaxllama.decoding.sampling import Sampling

# Weight files have a name that begins with one of these. transformers and other programs look for
# the first only. So they refuse a directory in jaxllama's own format, whose tensors they do not
# know.
FOREIGN, OURS = "model", "jaxllama"
GENERATION = "generation_config.json"
MAX_SHARD_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True)
class SaveUnit:
    """Tensors that stay in one file.

    entries: (name, shape, dtype) of each. values: makes their values, in this order, when they are
    written.
    """

    entries: tuple[tuple[str, tuple[int, ...], np.dtype], ...]
    values: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self.entries)


def save(
    directory: str | Path,
    cfg: ModelConfig,
    params: Params,
    tokenizer_files: Iterable[str | Path] | None = None,
    *,
    sampling: Sampling | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = False,
) -> Path:
    """Write an HF directory: config.json, generation_config.json, safetensors, tokenizer files.

    Parameters
    ----------
    directory : str or Path
        A folder that does not exist yet, or an empty one. It appears complete or, on any failure,
        not at all.
    cfg : ModelConfig
        Config of the model.
    params : dict
        Parameter tree of plain arrays; weights keep their dtype.
    tokenizer_files : iterable of paths or None
        Files to copy.
    sampling : Sampling or None
        The model's own sampling, for generation_config.json.
    max_shard_bytes : int
        Bytes after which a further file is begun.
    progress : bool
        Whether to show a bar on stderr.

    Returns
    -------
    Path

    Raises
    ------
    JaxLlamaError
        Naming the path, the option that HF has no key for, or the quantized weight.
    """
    units = joined(floats_unit(spec, value) for spec, value in _once(_leaves(cfg, params)))
    dtype = np.dtype(params["embed"]["weight"].dtype)
    config = config_to_hf(cfg, dtype.name)
    documents = {"config.json": config, GENERATION: generation_config(cfg, sampling)}
    return write_directory(directory, documents, units, tokenizer_files, max_shard_bytes, progress)


def weights_file(stem: str) -> str:
    return f"{stem}.safetensors"


def index_file(stem: str) -> str:
    return f"{stem}.safetensors.index.json"


def write_directory(
    directory: str | Path,
    documents: Mapping[str, JsonObject],
    units: Sequence[SaveUnit],
    tokenizer_files: Iterable[str | Path] | None,
    max_shard_bytes: int,
    progress: bool,
    stem: str = FOREIGN,
) -> Path:
    """Write the JSON documents, the units and the tokenizer's files, all or nothing.

    stem: beginning of the weight files' names, FOREIGN or OURS.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise JaxLlamaError(f"{directory}: already exists; nothing is overwritten")
    try:
        with whole_folder(directory) as scratch:
            for name, document in documents.items():
                _write_json(scratch / name, document)
            total = sum(unit.nbytes for unit in units)
            with working(f"writing {directory.name}", total, progress) as advance:
                _write_shards(scratch, units, max_shard_bytes, advance, stem)
            for path in tokenizer_files or ():
                shutil.copyfile(path, scratch / Path(path).name)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise JaxLlamaError(f"{directory}: not written: {error.strerror or error}{where}") from None
    return directory


Leaf = tuple[Param, Any]


def _leaves(cfg: ModelConfig, params: Params) -> list[Leaf]:
    """Return (spec, array) of every parameter, after checking the tree against the table."""
    flat, table = flatten(params), tensor_table(cfg)
    check_paths(flat, table)
    for path, spec in table.items():
        value = flat[path]
        if not hasattr(value, "dtype") or not hasattr(value, "__array__"):
            raise JaxLlamaError(
                f"params: {'/'.join(path)} is {type(value).__name__}: only plain arrays can be "
                "saved as an HF model (quantized ones: checkpoints.packed)"
            )
        if tuple(value.shape) != spec.shape:
            raise JaxLlamaError(
                f"params: {'/'.join(path)}: shape {list(value.shape)}, "
                f"but the config wants {list(spec.shape)}"
            )
    return [(spec, flat[path]) for path, spec in table.items()]


def _once(leaves: list[Leaf]) -> Iterator[Leaf]:
    """Yield the leaves without those whose tensors an earlier one has: layers may share weights.

    Raises JaxLlamaError naming a tensor of which two layers have different values.
    """
    seen: dict[tuple[str, ...], Any] = {}
    for spec, value in leaves:
        names = tuple(source.name for source in spec.sources)
        if not names or names not in seen:
            seen[names] = value
            yield spec, value
        elif not np.array_equal(np.asarray(seen[names]), np.asarray(value)):
            raise JaxLlamaError(
                f"params: layers that share {names[0]} have different values of it, "
                "and no class of transformers has both"
            )


def check_paths(flat: dict[tensors.Path, Tree], table: Iterable[tensors.Path]) -> None:
    """Raise JaxLlamaError naming a parameter that is missing or unknown to the config."""
    paths = set(table)
    for path in paths ^ flat.keys():
        state = "missing" if path in paths else "unexpected"
        raise JaxLlamaError(f"params: {state}: {'/'.join(path)}")


def flatten(tree: Params, at: tensors.Path = ()) -> dict[tensors.Path, Tree]:
    """Return the parameters by path; every value that is not a dict is a parameter."""
    result: dict[tensors.Path, Tree] = {}
    for key, value in tree.items():
        result |= flatten(value, (*at, key)) if isinstance(value, dict) else {(*at, key): value}
    return result


def floats_unit(spec: Param, value: Tree) -> SaveUnit:
    """Return the checkpoint's tensors of a parameter, which comes to the host once and is split."""
    dtype = np.dtype(value.dtype)
    if spec.is_constant and not np.all(np.asarray(value) == dtype.type(spec.mean)):
        raise JaxLlamaError(f"params: a norm without a weight has one that is not {spec.mean:g}")

    def values() -> Iterator[np.ndarray]:
        flat = np.ascontiguousarray(value).reshape(-1)
        at = 0
        for source in spec.sources:
            part = flat[at : at + source.size]
            if source.is_folded:
                part = unfold(source, part.reshape(source.shape)).reshape(-1)
            yield part
            at += source.size

    entries = tuple((source.name, source.stored_shape, dtype) for source in spec.sources)
    return SaveUnit(entries, values)


def joined(units: Iterable[SaveUnit]) -> list[SaveUnit]:
    """Return the units, those that hold rows of tensors as one unit of whole tensors.

    Parameters that share a tensor are neighbours.
    """
    result: list[SaveUnit] = []

    def holds_rows(unit: SaveUnit) -> bool:  # a constant has no tensors
        return any(piece_of(name) is not None for name, *_ in unit.entries)

    for is_piece, group in itertools.groupby(units, key=holds_rows):
        alike = list(group)
        result += [_whole(alike)] if is_piece else alike
    return result


def _whole(units: list[SaveUnit]) -> SaveUnit:
    """Return the tensors whose rows the units hold."""
    entries: dict[str, tuple[str, tuple[int, ...], np.dtype]] = {}
    for name, shape, dtype in (entry for unit in units for entry in unit.entries):
        whole, _, total = piece_of(name) or (name, 0, shape[0])
        entries[whole] = whole, (total, *shape[1:]), dtype

    def values() -> Iterator[np.ndarray]:
        parts: dict[str, dict[int, np.ndarray]] = {name: {} for name in entries}
        for unit in units:
            for (name, *_), value in zip(unit.entries, unit.values(), strict=True):
                whole, first, _ = piece_of(name) or (name, 0, 0)
                parts[whole][first] = value
        for by_row in parts.values():
            yield np.concatenate([by_row[first] for first in sorted(by_row)])

    return SaveUnit(tuple(entries.values()), values)


def _write_shards(
    folder: Path,
    units: Sequence[SaveUnit],
    max_shard_bytes: int,
    advance: Callable[[int], None],
    stem: str,
) -> None:
    """Write one file, or several and an index; units stay whole and in order."""
    shards: list[list[SaveUnit]] = [[]]
    size = 0
    for unit in units:
        if shards[-1] and size + unit.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = weights_file(stem)
        if len(shards) > 1:
            name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = [entry for unit in shard for entry in unit.entries]
        safetensors_file.write(folder / name, entries, _values(shard, advance))
        weight_map |= {entry[0]: name for entry in entries}
    if len(shards) > 1:
        total = sum(unit.nbytes for unit in units)
        document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / index_file(stem), document)


def _values(shard: Iterable[SaveUnit], advance: Callable[[int], None]) -> Iterator[np.ndarray]:
    for unit in shard:
        for array in unit.values():
            yield array
            advance(array.nbytes)


def _write_json(path: Path, value: JsonObject) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
