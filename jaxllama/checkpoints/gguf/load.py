"""GGUF checkpoints: a file's ModelConfig and its parameters.

``read_config(path)`` reads metadata only. ``load_params(path, cfg, dtype)`` reads one tensor at a
time from the mapped file. It writes a few hundred rows at once into the fused arrays of the
parameter tree. So the peak memory is the tree plus a few MB. Every type that ``gguf`` can
dequantize is read. ``keep_quantized`` keeps quantized matrices as QTensors (``codes``) with the
file's codes and scales, in groups of 16, 32 or 256. ``dequantize`` then gives the same float32 bits
as ``gguf``.

``model.params`` has the table of parameters that all checkpoints share, with their tensors and the
folding. llama.cpp's conversion has folded Gemma's 1 + w already.

Source: the GGUF specification and llama.cpp's conversion rules; dequantization is
``gguf.quants``'s.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from numpy.typing import DTypeLike

from jaxllama.checkpoints.folding import fold
from jaxllama.checkpoints.gguf import codes as gguf_words
from jaxllama.checkpoints.gguf.architectures import ARCHITECTURES
from jaxllama.checkpoints.gguf.codes import to_floats
from jaxllama.checkpoints.gguf.config import read_config
from jaxllama.checkpoints.gguf.file import GGUFFile, opened
from jaxllama.checkpoints.gguf.names import is_fused_qkv, param_tensors
from jaxllama.checkpoints.gguf.types import BLOCKS, FLOATS, KEPT, READABLE
from jaxllama.checkpoints.gguf.types import TensorType as Type
from jaxllama.checkpoints.packed.module import fuse
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.model.param import Param, TensorSource, Tiled
from jaxllama.model.param import Path as TreePath
from jaxllama.progress import working
from jaxllama.typing import Leaf, ParamsDict
from pallas_kernels.cpu import TILE, from_blocks, stacked

if TYPE_CHECKING:
    from pallas_kernels.cpu import CpuWeight
    from pallas_kernels.qtensor import QTensor, RowBlocks

__all__ = ["load_params", "read_config"]

# Tables of frequencies, which follow from the config.
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Weights that choose experts, or one expert's share, and are read as floats in any case.
_FLOATS = ("router", "shared_gate")
# Types that ``from_blocks`` reads -> bits of a code, and whether blocks have a minimum.
_LAID_OUT = {Type.Q4_0: (4, False), Type.Q4_1: (4, True), Type.Q8_0: (8, False)}
_CHUNK = 1 << 17  # number of features dequantized at once: 512 KB of float32 stay in the L2 cache


def load_params(
    path: str | Path | GGUFFile,
    cfg: ModelConfig,
    dtype: DTypeLike,
    *,
    keep_quantized: bool = False,
    laid_out: bool = False,
    progress: bool = False,
    place: Callable[[TreePath, Leaf], Leaf] | None = None,
) -> ParamsDict:
    """Return the parameter tree of a GGUF file.

    Parameters
    ----------
    path : str, Path or GGUFFile
        The file, which may be open.
    cfg : ModelConfig
        Config of the file's model.
    dtype : data-type
        Dtype of the numpy arrays; scales and zeros of QTensors are float32.
    keep_quantized : bool
        Whether quantized matrices become QTensors. A fused matrix whose parts have different types
        becomes RowBlocks.
    laid_out : bool
        With ``keep_quantized``, matrices of Q4_0, Q4_1 and Q8_0 become CpuWeights instead, with the
        same codes, scales and zeros.
    progress : bool
        Whether to show a bar on stderr.
    place : callable or None
        ``place(path, leaf)`` returns the tree's value of each parameter after it was read; the leaf
        may be dropped then.

    Raises
    ------
    JaxLlamaError
        Naming the file and the tensor that is missing, unexpected, of the wrong shape or of an
        unsupported type.

    Warns
    -----
    WeightWarning
        For NaN or infinite weights.
    """
    dtype = np.dtype(dtype)
    with opened(path) as file:
        if "gla" in cfg.layer_types:
            raise JaxLlamaError(f"{file.path}: GGUF has no GLA layers, but {cfg.name!r} does")
        arch = ARCHITECTURES[file.string("general.architecture")]
        if is_fused_qkv(file.tensors, cfg) and cfg.stored.query != 1 and cfg.qk_norm == "none":
            raise file.error("tensor 'blk.0.attn_qkv.weight'", "q has a multiplier of its own here")
        table = param_tensors(arch, cfg, file.tensors)
        _check(file, table, _left_out(file, cfg))
        total = sum(file.tensors[s.name].nbytes for spec in table.values() for s in spec.sources)
        params: ParamsDict = {}
        with working(f"reading {file.path.name}", total, progress) as advance:
            for (*rooms, name), spec in table.items():
                room = params
                for key in rooms:
                    room = room.setdefault(key, {})
                infos = [file.tensors[source.name] for source in spec.sources]
                is_kept = keep_quantized and any(info.type in KEPT for info in infos)
                is_kept = is_kept and rooms[-1] not in _FLOATS and len(spec.shape) > 1
                value = None
                if rooms[-1].startswith("experts_"):
                    value = _experts_laid_out(file, spec) if is_kept and laid_out else None
                    value = value or _read_experts(file, spec, dtype, is_kept)
                elif rooms[-1] == "kv_b" and len(infos) == 2:
                    value = _read_latent(file, spec, dtype)
                elif is_kept and laid_out:
                    value = _read_laid_out(file, spec.sources)
                if value is None:
                    read = _read_quantized if is_kept else _read_dense
                    value = read(file, spec.sources, dtype)
                if isinstance(value, np.ndarray):
                    value = value.reshape(spec.shape)
                room[name] = value if place is None else place((*rooms, name), value)
                del value  # before the next parameter is read
                for info in infos:
                    file.release(info)
                    advance(info.nbytes)
        return params


def _left_out(file: GGUFFile, cfg: ModelConfig) -> tuple[str, ...]:
    """Return the prefixes of tensors that no parameter has: heads behind the layers."""
    name = file.string("general.architecture")
    if not ARCHITECTURES[name].ignores_mtp:
        return ()
    heads = file.integer(f"{name}.nextn_predict_layers", 0)
    return tuple(f"blk.{cfg.n_layers + index}." for index in range(heads))


def _check(file: GGUFFile, table: dict[TreePath, Param], left_out: tuple[str, ...]) -> None:
    """Check names, shapes and types before anything is allocated."""
    sources = {source.name: source for spec in table.values() for source in spec.sources}
    missing = [name for name in sources if name not in file.tensors]
    if missing:
        raise file.error("tensors", f"missing: {_some(missing)}")
    unexpected = [
        name
        for name in file.tensors
        if name not in sources and name not in _IN_CONFIG and not name.startswith(left_out)
    ]
    if unexpected:
        raise file.error("tensors", f"unexpected: {_some(unexpected)}")
    for name, source in sources.items():
        info = file.tensors[name]
        if _own_shape(info.shape) != _own_shape(source.shape):
            raise file.error(
                f"tensor {name!r}",
                f"shape {list(info.shape)}, but the config wants {list(source.shape)}",
            )
        is_weight = name.endswith(".weight") and len(source.shape) > 1
        kinds = READABLE if is_weight else FLOATS
        if info.type not in kinds:
            known = ", ".join(kind.name for kind in kinds)
            raise file.error(f"tensor {name!r}", f"type {info.type.name} is not one of {known}")


def _own_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its first ones, which converters keep or leave out."""
    ones = next((i for i, n in enumerate(shape) if n != 1), len(shape) - 1)
    return shape[ones:]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _stored_rows(file: GGUFFile, source: TensorSource) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield ``(rows, bytes[rows, row_bytes])`` in the tree's row order.

    The elements of a vector count as its rows.
    """
    raw = file.rows(file.tensors[source.name]).reshape(source.shape[0], -1)
    order = source.row_order()
    step = max(1, _CHUNK * source.shape[0] // source.size)
    for start in range(0, len(raw), step):
        rows = slice(start, min(start + step, len(raw)))
        yield rows, raw[rows] if order is None else raw[order[rows]]


@np.errstate(all="ignore")  # NaN and infinity are reported by name, not as numpy's warnings
def _read_dense(file: GGUFFile, sources: Sequence[TensorSource], dtype: np.dtype) -> np.ndarray:
    """Return the tensors as one array of ``dtype``, their rows one behind the other.

    Rows and columns are in the tree's order, and each source's multipliers and offset are applied.
    """
    shape = (sum(source.shape[0] for source in sources), *sources[0].shape[1:])
    out = np.empty(shape, dtype)
    first = 0
    for source in sources:
        target = out[first : first + source.shape[0]]
        first += source.shape[0]
        scale, offset = source.factor(target.ndim), np.float32(source.offset)
        plain = not source.is_scaled
        finite = True
        for rows, raw in _stored_rows(file, source):
            values = to_floats(raw, file.tensors[source.name].type).reshape(target[rows].shape)
            if source.is_rate:
                values = np.log(-values.astype(np.float32))
            part = scale[rows] if source.row_scales else scale
            target[rows] = values if plain else values.astype(np.float32) * part + offset
            finite = finite and bool(np.isfinite(target[rows]).all())
        if not finite:
            _warn(file, source)
        if source.columns is not None:
            target[...] = target[:, source.columns.rows()]
    return out


def _read_experts(
    file: GGUFFile, spec: Param, dtype: np.dtype, is_kept: bool
) -> QTensor | np.ndarray:
    """Return the matrices (or biases) of all experts, of which a file has gate and up apart.

    They are floats if ``is_kept`` is False, or if the two are of different types.
    """
    kinds = {file.tensors[source.name].type for source in spec.sources}
    read = _read_quantized if is_kept and len(kinds) == 1 else _read_dense

    def stacked(x: np.ndarray) -> np.ndarray:
        n_experts, *rest = spec.shape
        middle = (-1,) if len(rest) > 1 else ()
        return x.reshape(n_experts, *middle, x.shape[-1])

    parts = []
    for source in spec.sources:
        rows = source.size // source.shape[-1], source.shape[-1]
        part = read(file, [dataclasses.replace(source, shape=rows)], dtype)
        parts.append(jax.tree.map(stacked, part))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)


def _experts_laid_out(file: GGUFFile, spec: Param) -> CpuWeight | None:
    """Return the matrices of all experts as ``_read_laid_out`` returns one, or None as it does."""
    kind = _kind_laid_out(file, spec.sources)
    n_experts, high, _ = spec.shape
    if kind is None or high % TILE:
        return None
    parts = [
        file.rows(file.tensors[source.name]).reshape(n_experts, source.shape[1], -1)
        for source in spec.sources
    ]
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    blocks = rows.reshape(n_experts * high, -1, BLOCKS[kind][1])
    return stacked(from_blocks(blocks, *_LAID_OUT[kind]), n_experts)


def _read_latent(file: GGUFFile, spec: Param, dtype: np.dtype) -> np.ndarray:
    """Return the matrix that makes keys and values of latents, each head's keys before its values.

    A file has the heads' keys as ``[heads, rank, d]``, so their codes run along the other axis and
    become floats.
    """
    keys, values = (_read_dense(file, [source], dtype) for source in spec.sources)
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(spec.shape)


def _warn(file: GGUFFile, source: TensorSource) -> None:
    warnings.warn(
        f"{file.path}: tensor {source.name!r} holds NaN or infinite weights",
        WeightWarning,
        stacklevel=5,
    )


def _read_laid_out(file: GGUFFile, sources: Sequence[TensorSource]) -> CpuWeight | None:
    """Return a matrix in the layout of the CPU's handlers, straight from the file's blocks.

    Returns None for a matrix that must become a QTensor or RowBlocks first: one of another type, of
    several types, with a multiplier, or with scales that ``from_blocks`` refuses.
    """
    kind = _kind_laid_out(file, sources)
    if kind is None:
        return None
    parts = []
    for source in sources:
        order, rows = source.row_order(), file.rows(file.tensors[source.name])
        parts.append(rows if order is None else rows[order])
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    size = BLOCKS[kind][1]
    return from_blocks(rows.reshape(len(rows), -1, size), *_LAID_OUT[kind])


def _kind_laid_out(file: GGUFFile, sources: Sequence[TensorSource]) -> Type | None:
    """Return the type of these tensors if ``from_blocks`` can read them as one matrix."""
    kind, *others = {file.tensors[source.name].type for source in sources}
    is_plain = not any(source.is_scaled or source.columns is not None for source in sources)
    return kind if kind in _LAID_OUT and not others and is_plain else None


@np.errstate(all="ignore")
def _read_quantized(
    file: GGUFFile, sources: Sequence[TensorSource], dtype: np.dtype
) -> QTensor | RowBlocks | np.ndarray:
    """Return the stored codes and scales; parts in floats stay floats."""
    kinds = {file.tensors[source.name].type for source in sources}
    whole = [sources] if len(kinds) == 1 else [[source] for source in sources]
    is_multiplied = any(source.is_scaled for source in sources)
    if is_multiplied or any(source.columns is not None for source in sources):
        whole = [[source] for source in sources]
    blocks = []
    for alike in whole:
        kind = file.tensors[alike[0].name].type
        if kind not in KEPT:
            blocks.append(_read_dense(file, alike, dtype))
            continue
        words = gguf_words.empty(kind, sum(s.shape[0] for s in alike), alike[0].shape[1])
        first = 0
        for source in alike:
            info = file.tensors[source.name]
            for rows, raw in _stored_rows(file, source):
                at = slice(first + rows.start, first + rows.stop)
                words.fill(at, raw)
                file.release(info, rows.start, rows.stop - rows.start)
            part = slice(first, first + source.shape[0])
            first = part.stop
            if not words.finite(part):
                _warn(file, source)
        in_order = dataclasses.replace(alike[0], turned=None)
        block = fold(in_order, words.to_qtensor(is_multiplied))
        columns = alike[0].columns
        blocks.append(block if columns is None else _with_columns(block, columns))
    return fuse(blocks)


def _with_columns(weight: QTensor, columns: Tiled) -> QTensor:
    """Return a weight whose columns are in our order.

    Columns move with their groups if a head has whole groups; otherwise the product reorders its
    input.
    """
    order = columns.rows()
    group = weight.shape[1] // weight.scale.shape[1]
    if columns.head_dim % group:
        return dataclasses.replace(weight, columns=np.argsort(order).astype(np.int32))
    groups = order[::group] // group
    zero = None if weight.zero is None else weight.zero[:, groups]
    return dataclasses.replace(
        weight, q=weight.q[:, order], scale=weight.scale[:, groups], zero=zero
    )
