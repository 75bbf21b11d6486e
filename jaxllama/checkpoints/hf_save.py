"""Parameters to an HF directory that transformers loads, all of it or nothing.

The same table that loading reads (``tensor_map``) says where each parameter is cut into the
checkpoint's tensors; one parameter at a time comes to the host.  Everything is written into a
temporary folder beside the target, which one rename puts in place.  Left out: quantized weights
(``checkpoints.packed``), overwriting.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxllama.checkpoints import safetensors_file, tensor_map
from jaxllama.checkpoints.hf_config import config_to_hf, generation_config
from jaxllama.checkpoints.tensor_map import TensorSpec, tensor_table
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def save(
    directory: str | Path,
    cfg: ModelConfig,
    params: dict[str, Any],
    tokenizer_files: Iterable[str | Path] | None = None,
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write an HF directory: config.json, generation_config.json, safetensors, and copies of
    ``tokenizer_files``.  Weights keep their dtype.

    The directory must not exist or be empty; it appears complete or, on any failure, not at all.
    Raises JaxLlamaError naming the path, the option HF has no word for, or the quantized weight.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise JaxLlamaError(f"{directory}: already exists; nothing is overwritten")
    leaves = _leaves(cfg, params)
    dtype = np.dtype(params["embed"]["weight"].dtype)
    documents = {
        "config.json": config_to_hf(cfg, dtype.name),
        "generation_config.json": generation_config(cfg),
    }
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise JaxLlamaError(f"{directory}: {error.strerror or error}") from None
    try:
        for name, document in documents.items():
            _write_json(scratch / name, document)
        _write_shards(scratch, leaves, max_shard_bytes)
        for path in tokenizer_files or ():
            shutil.copyfile(path, scratch / Path(path).name)
        scratch.chmod(0o755)
        os.replace(scratch, directory)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise JaxLlamaError(f"{directory}: not written: {error.strerror or error}{where}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


Leaf = tuple[TensorSpec, Any]


def _leaves(cfg: ModelConfig, params: dict[str, Any]) -> list[Leaf]:
    """(spec, array) of every parameter, with the tree checked against the table."""
    flat = dict(_flatten(params))
    table = tensor_table(cfg)
    for path in table.keys() ^ flat.keys():
        state = "missing" if path in table else "unexpected"
        raise JaxLlamaError(f"params: {state}: {'/'.join(path)}")
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


def _flatten(tree: dict[str, Any], at: tensor_map.Path = ()) -> Iterator[tuple[Any, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, (*at, key))
        else:
            yield (*at, key), value


def _write_shards(folder: Path, leaves: list[Leaf], max_shard_bytes: int) -> None:
    """One file, or several and an index; parameters stay whole, in the table's order."""
    shards: list[list[Leaf]] = [[]]
    size = total = 0
    for spec, value in leaves:
        nbytes = spec.size * np.dtype(value.dtype).itemsize
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((spec, value))
        size, total = size + nbytes, total + nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = [
            (source.name, source.shape, np.dtype(value.dtype))
            for spec, value in shard
            for source in spec.sources
        ]
        safetensors_file.write(folder / name, entries, _parts(shard))
        weight_map |= {entry[0]: name for entry in entries}
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _parts(shard: list[Leaf]) -> Iterator[np.ndarray]:
    """The checkpoint's tensors: each parameter comes to the host once and is cut."""
    for spec, value in shard:
        flat = np.ascontiguousarray(value).reshape(-1)
        at = 0
        for source in spec.sources:
            yield flat[at : at + source.size]
            at += source.size


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
