"""Write a model as one GGUF file, which llama.cpp reads: all of it or nothing.

``save(path, cfg, params, tokenizer_files)`` is the whole interface. ``metadata`` has the config's
keys, ``names`` the tensors' names, ``blocks`` the values, ``vocabulary`` the tokenizer. The
``gguf`` package writes the container.

Metadata is written first, and our own reader must find the same config and tokens in it. So a model
that the format cannot state is refused before its weights are written. Left out: split files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllama.checkpoints.folding import unfold
from jaxllama.checkpoints.gguf import blocks, vocabulary
from jaxllama.checkpoints.gguf.architectures import ARCHITECTURES
from jaxllama.checkpoints.gguf.config import read_config
from jaxllama.checkpoints.gguf.file import GGUFFile
from jaxllama.checkpoints.gguf.metadata import (
    architecture_of,
    check_peer,
    check_way_back,
    metadata,
    rope_tensors,
)
from jaxllama.checkpoints.gguf.names import param_tensors
from jaxllama.checkpoints.gguf.types import BLOCKS
from jaxllama.checkpoints.gguf.types import TensorType as Type
from jaxllama.checkpoints.hf.save import check_paths, flatten
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.model.param import Path as TreePath
from jaxllama.model.param import TensorSource
from jaxllama.progress import working
from jaxllama.typing import JsonObject, Params, Tree
from pallas_kernels.qtensor import QTensor, RowBlocks

TYPES = {kind.name.lower(): kind for kind in blocks.WRITABLE}
# Weights that choose experts, or one expert's share, stay in float32.
_FLOATS = ("router", "shared_gate")
_COARSE = (Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q5_0, Type.Q5_1, Type.Q5_K, Type.MXFP4)
_DTYPES = {"float32": Type.F32, "float16": Type.F16, "bfloat16": Type.BF16}
_FILE_TYPES = {
    **{Type.F32: 0, Type.F16: 1, Type.Q4_0: 2, Type.Q4_1: 3, Type.Q8_0: 7, Type.Q5_0: 8},
    **{Type.Q5_1: 9, Type.Q4_K: 14, Type.Q5_K: 16, Type.Q6_K: 18, Type.BF16: 32, Type.MXFP4: 38},
}
_CHUNK = 1 << 22  # number of features that are rounded at once
_ALIGNMENT = 32
_VALUES = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of the file; value: its part of a parameter, or the parameter's block."""

    source: TensorSource
    kind: Type
    value: Tree

    @property
    def byte_shape(self) -> tuple[int, ...]:
        block, size = BLOCKS[self.kind]
        return (*self.source.shape[:-1], self.source.shape[-1] // block * size)

    @property
    def nbytes(self) -> int:
        return math.prod(self.byte_shape)


def save(
    path: str | Path,
    cfg: ModelConfig,
    params: Params,
    tokenizer_files: Iterable[str | Path] = (),
    *,
    type: str | None = None,
    progress: bool = False,
) -> Path:
    """Write a GGUF file.

    Parameters
    ----------
    path : str or Path
        A file that does not exist yet. It appears complete or, on any failure, not at all.
    cfg : ModelConfig
        Config of the model.
    params : dict
        Parameter tree; quantized weights keep their codes.
    tokenizer_files : iterable of paths
        tokenizer.json, tokenizer_config.json and a chat template, if the model has them.
    type : str or None
        Type of ``TYPES`` to which matrices in floats are rounded; None keeps their dtype. A K type
        becomes the next simple one where 256 does not divide the columns.
    progress : bool
        Whether to show a bar on stderr.

    Returns
    -------
    Path

    Raises
    ------
    JaxLlamaError
        Naming the path, the option that the format has no key for, or the weight that it cannot
        hold.

    Warns
    -----
    WeightWarning
        If float16 rounds scales.
    """
    path, cfg = Path(path), cfg.with_head_of(params)
    check(path, cfg, params, type)
    tensors = _tensors(cfg, params, TYPES[type] if type else None)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
            file = Path(scratch, path.name)
            rounded = _write(file, cfg, tensors, tuple(tokenizer_files), progress)
            os.replace(file, path)
    except OSError as error:
        raise JaxLlamaError(f"{path}: not written: {error.strerror or error}") from None
    if rounded:
        warnings.warn(
            f"{path}: float16 rounds scales or minima of {rounded} of {len(tensors)} tensors; "
            "the codes are unchanged",
            WeightWarning,
            stacklevel=3,
        )
    return path


def check(path: Path, cfg: ModelConfig, params: Params, type: str | None = None) -> None:
    """Raise JaxLlamaError for what ``save`` would refuse; ``params`` may be stand-ins."""
    if type is not None and type not in TYPES:
        raise JaxLlamaError(f"type = {type!r}: is not one of {', '.join(TYPES)}")
    if path.suffix != ".gguf":
        raise JaxLlamaError(f"{path}: format 'gguf' writes one file, whose name ends with .gguf")
    if path.exists():
        raise JaxLlamaError(f"{path}: already exists; nothing is overwritten")
    cfg = cfg.with_head_of(params)
    check_peer(architecture_of(cfg), cfg)
    _tensors(cfg, params, None)


def _tensors(cfg: ModelConfig, params: Params, kind: Type | None) -> list[_Tensor]:
    """Return the tensors of all parameters, in the table's order."""
    flat = flatten(params)
    table = param_tensors(ARCHITECTURES[architecture_of(cfg)], cfg)
    check_paths(flat, table)
    found = []
    for path, spec in table.items():
        value, name = flat[path], "/".join(path)
        if tuple(value.shape) != spec.shape:
            raise JaxLlamaError(
                f"params: {name}: shape {list(value.shape)}, "
                f"but the config wants {list(spec.shape)}"
            )
        axis, first = int(len(spec.shape) > 1 and path[-2].startswith("experts_")), 0
        for source in spec.sources:
            stop = first + source.shape[axis]
            part = _part(value, axis, first, stop, name)
            found.append(_Tensor(source, _kind(path, source, part, kind), part))
            first = stop
    return found


def _part(value: Tree, axis: int, first: int, stop: int, name: str) -> Tree:
    """Return rows of a parameter, of every expert if ``axis`` is 1."""
    if isinstance(value, RowBlocks):
        for block in value.blocks:
            if stop <= block.shape[0] and first >= 0:
                return _part(block, axis, first, stop, name)
            first, stop = first - block.shape[0], stop - block.shape[0]
        raise JaxLlamaError(f"{name}: its blocks do not end where a tensor does")
    if stop - first == value.shape[axis]:
        return value
    at: Any = (slice(None),) * axis + (slice(first, stop),)
    return value.rows(at) if isinstance(value, QTensor) else value[at]


def _kind(path: TreePath, source: TensorSource, value: Tree, kind: Type | None) -> Type:
    """Return the type of a tensor: the type of its codes, or of its floats."""
    if isinstance(value, QTensor):
        try:
            return blocks.kind_of(value)
        except blocks.Obstacle as error:
            raise JaxLlamaError(
                f"format 'gguf' cannot hold {source.name}: {error}; native holds every scheme"
            ) from None
    *others, columns = source.shape
    is_matrix = source.name.endswith(".weight") and bool(others)
    if not is_matrix or path[-2] in _FLOATS:
        return Type.F32
    if kind in _COARSE and path[0] in ("embed", "head"):
        kind = Type.Q6_K  # as in llama.cpp: rounding errors of a head are the tokens' own
    return blocks.kind_for(kind or _DTYPES[np.dtype(value.dtype).name], columns)


def _keys(
    cfg: ModelConfig, tensors: Sequence[_Tensor], tokenizer_files: Sequence[str | Path]
) -> JsonObject:
    """Return the metadata, with the type that most bytes have."""
    sizes: dict[Type, int] = {}
    for tensor in tensors:
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.nbytes
    kind = max(sizes, key=lambda kind: sizes[kind])
    return {
        "general.type": "model",
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": 2,
        **metadata(architecture_of(cfg), cfg),
        **vocabulary.keys(tokenizer_files, cfg),
    }


def _write(
    file: Path,
    cfg: ModelConfig,
    tensors: Sequence[_Tensor],
    tokenizer_files: Sequence[str | Path],
    progress: bool,
) -> int:
    """Write the file; return the number of tensors whose scales float16 rounds."""
    import gguf  # takes 70 ms

    tables = [
        _Tensor(TensorSource(name, table.shape), Type.F32, table)
        for name, table in rope_tensors(cfg).items()
    ]
    tensors = (*tables, *tensors)
    writer = gguf.GGUFWriter(file, architecture_of(cfg))
    with contextlib.closing(writer):
        for key, value in _keys(cfg, tensors, tokenizer_files).items():
            getattr(writer, f"add_{_VALUES[type(value)]}")(key, value)
        for tensor in tensors:
            kind = gguf.GGMLQuantizationType(int(tensor.kind))
            writer.add_tensor_info(
                tensor.source.name, tensor.byte_shape, np.dtype(np.uint8), tensor.nbytes, kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        sizes = (file.stat().st_size, *(tensor.nbytes for tensor in tensors))
        for table in tables:
            writer.write_tensor_data(_bytes(table)[0])
        writer.flush()
        os.truncate(file, sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        _read_back(file, cfg, tokenizer_files)
        rounded = 0
        with working(f"writing {file.name}", sum(sizes), progress) as advance:
            for tensor in tensors[len(tables) :]:
                data, is_exact = _bytes(tensor)
                writer.write_tensor_data(data)
                advance(data.nbytes)
                rounded += not is_exact
    return rounded


def _read_back(file: Path, cfg: ModelConfig, tokenizer_files: Sequence[str | Path]) -> None:
    """Check config and tokens that our reader finds in a file whose weights are still zeros."""
    try:
        with GGUFFile(file) as back:
            check_way_back(cfg, read_config(back))
            vocabulary.check_way_back(back, tokenizer_files)
    except JaxLlamaError as error:
        raise JaxLlamaError(str(error).replace(f"{file}:", "format 'gguf':")) from None


def _bytes(tensor: _Tensor) -> tuple[np.ndarray, bool]:
    """Return a tensor's rows as bytes, and whether its scales are exact."""
    source, columns = tensor.source, tensor.source.shape[-1]
    host = unfold(source, jax.tree.map(np.asarray, tensor.value))
    if isinstance(host, QTensor):
        q, scale = (x.reshape(-1, x.shape[-1]) for x in (host.q, host.scale))
        zero = None if host.zero is None else host.zero.reshape(scale.shape)
        try:
            return blocks.of_codes(QTensor(q, scale, zero), tensor.kind)
        except JaxLlamaError as error:
            raise JaxLlamaError(f"{source.name}: {error}") from None
    rows = host.reshape(-1, columns)
    step = max(1, _CHUNK // columns)
    starts = range(0, len(rows), step)
    made = [blocks.of_floats(rows[first : first + step], tensor.kind) for first in starts]
    return np.concatenate(made), True
