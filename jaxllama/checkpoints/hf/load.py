"""Read HF directories (config.json + safetensors) into parameters.

``load(directory, dtype=...)`` checks every name, shape and type of every shard against the config
before it allocates. Then it reads one tensor at a time into the fused arrays of the parameter tree.
The peak memory is the tree plus a few MB. The arrays are numpy, 64-byte aligned, and
``jax.device_put`` takes them over on the CPU without a copy.

``model.params`` has the table of the tensors of each parameter. ``config`` reads config.json,
``safetensors`` has the container, ``save`` the way back, and ``packed`` reads quantized weights.
Left out: PyTorch .bin files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from jaxllama.checkpoints import pooling
from jaxllama.checkpoints import safetensors as safetensors_file
from jaxllama.checkpoints.hf.config import (
    CLASSIFIER,
    check_preset,
    config_from_hf,
    config_to_hf,
    has_no_head,
    sampling_of,
    text_config,
)
from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.checkpoints.hf.family import MTP
from jaxllama.checkpoints.hf.save import FOREIGN, GENERATION, OURS, index_file, save, weights_file
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.checkpoints.packed import float4
from jaxllama.checkpoints.packed import load as packed
from jaxllama.checkpoints.packed.module import fuse
from jaxllama.checkpoints.peft import Factors
from jaxllama.checkpoints.safetensors import SafetensorsEntry, SafetensorsFile
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.files import INDEX, SETTINGS, exists, read_json
from jaxllama.model import param as tensors
from jaxllama.model.param import Param, TensorSource
from jaxllama.progress import working
from jaxllama.typing import JsonObject, Leaf, ParamsDict

if TYPE_CHECKING:
    from jaxllama.decoding.sampling import Sampling
    from pallas_kernels.qtensor import QTensor

__all__ = ["check_preset", "config_from_hf", "config_to_hf", "load", "read_config", "save"]

_FOLDED = 1 << 20  # number of elements that are folded at once
# Prefixes of the text decoder and its head in multimodal models.
_TEXT_PARTS = (
    ("model.language_model", "lm_head."),
    ("language_model.model", "language_model.lm_head."),
    ("model", "lm_head."),
)

_CLASSIFIER = "score.weight"
# Tables in old checkpoints that follow from the config.
_DERIVED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")

Place = Callable[[tensors.Path, Leaf], Leaf]
Stream = Callable[[tensors.Path, tensors.Shape, Callable[[int, np.ndarray], None]], Leaf]


def read_config(directory: str | Path, name: str | None = None) -> ModelConfig:
    """Return the ModelConfig of a directory's config.json and generation_config.json.

    The result is untied if the weights have a head that differs from the embedding.
    """
    directory = Path(directory)
    config = _read_config(directory)
    cfg = _to_config(directory, config, name)
    reads_files = cfg.tie_embeddings or _may_have_mtp(cfg) or exists(directory / pooling.FILE)
    if not reads_files or not any(directory.glob("*.safetensors")):
        return cfg
    with contextlib.ExitStack() as stack:
        files = _text_tensors(directory, config, stack)
        cfg = _tied_if_headless(directory, cfg, files)
        return _with_mtp(_untied(directory, cfg, files), files)


def read_classifier(directory: str | Path) -> np.ndarray | None:
    """Return the head of a ``...ForSequenceClassification`` model, float32 ``[classes, d_model]``.

    None if the directory is of another model. Raises JaxLlamaError if the tensor is missing.
    """
    directory = Path(directory)
    config = _read_config(directory)
    names = config.get("architectures")
    names = names if isinstance(names, list) else []
    if not any(str(name).endswith(CLASSIFIER) for name in names):
        return None
    with contextlib.ExitStack() as stack:
        files = open_tensors(directory, stack)
        if _CLASSIFIER not in files:
            raise JaxLlamaError(f"{directory}: missing tensors: {_CLASSIFIER!r}")
        shape = files[_CLASSIFIER][1].shape
        width = config_from_hf(config, directory.name).d_model
        if len(shape) != 2 or shape[1] != width:
            raise files[_CLASSIFIER][0].error(
                f"tensor {_CLASSIFIER!r}: shape {list(shape)}, but hidden_size is {width}"
            )
        return _slice(files, _CLASSIFIER, 0, math.prod(shape)).reshape(shape)


def is_packed(directory: str | Path) -> bool:
    """Return whether a directory's configuration has quantized weights."""
    config = _read_config(Path(directory))
    return any(config.get(key) is not None for key in packed.KEYS)


def read_sampling(directory: str | Path) -> Sampling | None:
    """Return the sampling of a directory's generation_config.json; None if it has none."""
    path = Path(directory) / GENERATION
    try:
        return sampling_of(read_json(path, SETTINGS)) if exists(path) else None
    except JaxLlamaError as error:
        raise JaxLlamaError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def _read_config(directory: Path) -> JsonObject:
    """Return config.json, with ModelOpt's own file as its quantization if it names none."""
    if directory.is_dir() and not exists(directory / "config.json"):
        raise JaxLlamaError(
            f"{directory}: no config.json in this folder; a model is a directory with config.json "
            "and safetensors, or a .gguf file"
        )
    config = read_json(directory / "config.json", SETTINGS)
    other = directory / float4.OTHER_FILE
    if any(config.get(key) is not None for key in packed.KEYS) or not exists(other):
        return config
    return {**config, packed.KEYS[0]: {"quant_method": "modelopt", **read_json(other, SETTINGS)}}


def _to_config(directory: Path, config: JsonObject, name: str | None = None) -> ModelConfig:
    generation_path = directory / GENERATION
    generation = read_json(generation_path, SETTINGS) if exists(generation_path) else None
    try:
        return config_from_hf(config, name or directory.resolve().name, generation)
    except JaxLlamaError as error:
        raise JaxLlamaError(f"{directory / 'config.json'}: {error}") from None


def load(
    directory: str | Path,
    *,
    dtype: DTypeLike = np.float32,
    progress: bool = False,
    cfg: ModelConfig | None = None,
    place: Place | None = None,
    stream: Stream | None = None,
    added: Factors | None = None,
) -> tuple[ModelConfig, ParamsDict]:
    """Read an HF directory.

    Parameters
    ----------
    directory : str or Path
        The directory.
    dtype : data-type
        Dtype of the parameters that are not quantized.
    progress : bool
        Whether to show a bar on stderr.
    cfg : ModelConfig or None
        A preset, which must agree with the checkpoint's own config (``check_preset``).
    place : callable or None
        ``place(path, array)`` returns the tree's value of each parameter (a device array, an
        offloaded one) after it was read; the array may be dropped then.
    stream : callable or None
        ``stream(path, shape, read)`` returns the tree's value of a floating-point parameter without
        reading it whole. ``read(start, out)`` fills a flat array from an element on, in the dtype
        of ``out``.
    added : dict or None
        An adapter to merge, from ``checkpoints.peft.read``; it is added in float32 before the cast.

    Returns
    -------
    (ModelConfig, dict)
        The config and the parameter tree of numpy arrays. Weights of a quantized checkpoint
        (``quantization_config``) are QTensors or RowBlocks with the file's codes and scales.

    Raises
    ------
    JaxLlamaError
        Naming the file and the key or tensor that is missing, unexpected, or of the wrong shape or
        type.

    Warns
    -----
    WeightWarning
        For NaN or infinite weights, and for a head that differs from a tied embedding. Such a head
        is kept, as in transformers.
    """
    directory, dtype = Path(directory), np.dtype(dtype)
    if not directory.is_dir():
        raise JaxLlamaError(f"{directory}: no such directory")
    config = _read_config(directory)
    with contextlib.ExitStack() as stack:
        cfg, files, table = _opened(directory, config, cfg, stack)
        leaves = packed.plan(directory, config, table, files)
        plain = {path: spec for path, spec in table.items() if path not in leaves}
        known = {name for leaf in leaves.values() for name in leaf.names}
        check_tensors(directory, files, plain, {*_tied_heads(cfg), *known})
        names = {source.name for spec in plain.values() for source in spec.sources} | known
        total = sum(files[name][1].nbytes for name in names)
        params: ParamsDict = {}
        with working(f"reading {directory.name}", total, progress) as advance:

            def floats(spec: Param) -> np.ndarray:
                kept = np.dtype(np.float32) if spec.is_float32 else dtype
                return read_param(files, spec, kept, added or {}, advance)

            for path, spec in table.items():
                *rooms, leaf = path
                room = params
                for key in rooms:
                    room = room.setdefault(key, {})
                if path not in leaves and stream is not None and not spec.is_float32:
                    read = functools.partial(_read_part, files, spec, added or {}, advance=advance)
                    room[leaf] = stream(path, spec.shape, read)
                    continue
                if path in leaves:
                    value = packed.read(directory, leaves[path], floats, files, advance)
                else:
                    value = floats(spec)
                room[leaf] = value if place is None else place(path, value)
    return cfg, params


Tensors = dict[str, tuple[SafetensorsFile, SafetensorsEntry]]


def packed_examples(directory: str | Path) -> dict[str, QTensor]:
    """Return a part of one weight of each name, "qkv" for example, that a checkpoint has in codes.

    It is empty if all are floats. Raises JaxLlamaError as ``load`` does, before it reads weights.
    """
    found: dict[str, Any] = {}
    directory = Path(directory)
    config = _read_config(directory)
    with contextlib.ExitStack() as stack:
        _, files, table = _opened(directory, config, None, stack)
        for (*_, name, _), leaf in packed.plan(directory, config, table, files).items():
            part = next((p.read for p in leaf.parts if not isinstance(p.read, Param)), None)
            if part is not None and name not in found:
                found[name] = fuse([part()])
    return found


def _opened(
    directory: Path, config: JsonObject, cfg: ModelConfig | None, stack: contextlib.ExitStack
) -> tuple[ModelConfig, Tensors, dict[tensors.Path, Param]]:
    """Return the model, its tensors, and the table of the tensors of each parameter.

    cfg: as for ``load``.
    """
    found = _to_config(directory, config)
    files = _text_tensors(directory, config, stack)
    if found.n_layers > len(files):  # checked before a table of that many layers is made
        raise JaxLlamaError(
            f"{directory}: num_hidden_layers = {found.n_layers}, "
            f"but there are only {len(files)} tensors"
        )
    found = _with_mtp(_tied_if_headless(directory, found, files), files)
    files = _used(directory, found, files)
    found = _untied(directory, found, files)
    cfg = found if cfg is None else check_preset(cfg, found)
    cfg = cfg.replace(mtp_layers=found.mtp_layers)
    table = tensor_table(cfg, _shapes(files))
    return cfg, _in_pieces(files, table), table


def _text_tensors(directory: Path, config: JsonObject, stack: contextlib.ExitStack) -> Tensors:
    """Return ``open_tensors``; for a multimodal model only its text decoder's, with plain names."""
    files = open_tensors(directory, stack)
    if text_config(config) is config:
        if has_no_head(config):
            files.pop(_CLASSIFIER, None)
        if "embed_tokens.weight" in files:  # a bare decoder's names have no "model."
            is_decoder = {name: not name.startswith("lm_head.") for name in files}
            files = {f"model.{name}" if is_decoder[name] else name: files[name] for name in files}
        if "wte.weight" in files:  # as GPT-2's own file has them
            files = {f"transformer.{name}": at for name, at in files.items()}
        return files
    for base, head in _TEXT_PARTS:
        if f"{base}.embed_tokens.weight" in files:
            kept = {base: "model", head: "lm_head.", "mtp.": "mtp."}
            text = {name: files[name] for name in files if name.startswith(tuple(kept))}
            warnings.warn(
                f"{directory}: a multimodal model: its text decoder alone is read, "
                f"{len(files) - len(text)} other tensors are not",
                WeightWarning,
                stacklevel=1,
            )
            return {
                next(
                    new + name[len(old) :] for old, new in kept.items() if name.startswith(old)
                ): at
                for name, at in text.items()
            }
    raise JaxLlamaError(f"{directory}: no text decoder's embed_tokens.weight in its files")


def _in_pieces(files: Tensors, table: dict[tensors.Path, Param]) -> Tensors:
    """Return the tensors, with rows of them in their place where parameters read rows only."""
    pieces: Tensors = {}
    used: set[str] = set()
    for source in (source for spec in table.values() for source in spec.sources):
        piece = tensors.piece_of(source.name)
        if piece is None or piece[0] not in files:
            continue
        (whole, first, total), rows = piece, source.stored_shape[0]
        file, info = files[whole]
        if info.shape[:1] != (total,):
            raise file.error(
                f"tensor {whole!r}: shape {list(info.shape)}, but the config wants {total} rows"
            )
        size = info.nbytes // total  # of a row
        shape, offset = (rows, *info.shape[1:]), info.offset + first * size
        entry = SafetensorsEntry(source.name, shape, info.dtype, offset, rows * size)
        pieces[source.name] = file, entry
        used.add(whole)
    return {name: at for name, at in files.items() if name not in used} | pieces


def _tied_if_headless(directory: Path, cfg: ModelConfig, files: Tensors) -> ModelConfig:
    """Return ``cfg`` tied if a model for embeddings has no head: nothing reads its logits."""
    if cfg.tie_embeddings or not exists(directory / pooling.FILE):
        return cfg
    heads = _tied_heads(cfg.replace(tie_embeddings=True))
    return cfg if any(name in files for name in heads) else cfg.replace(tie_embeddings=True)


def _used(directory: Path, cfg: ModelConfig, files: Tensors) -> Tensors:
    """Return the tensors that the family's models use; one warning counts the others."""
    family = FAMILIES.get(cfg.stored.family)
    if family is not None and family.unused_endings:
        files = {name: files[name] for name in files if not name.endswith(family.unused_endings)}
    unused = () if family is None or cfg.mtp_layers else family.unused
    prefixes = [prefix.format(n_layers=cfg.n_layers) for prefix in unused]
    for index, layer in enumerate(cfg.layers):
        if layer.borrows:  # these layers read the keys and values of another one
            names = ("k_proj", "v_proj", "k_norm", "v_norm")
            prefixes += [f"model.layers.{index}.self_attn.{name}." for name in names]
    unused = {name: None for name in files if name.startswith(tuple(prefixes))}
    if unused:
        warnings.warn(
            f"{directory}: {len(unused)} tensors are not used, as in transformers: "
            f"{_some([*unused])}",
            WeightWarning,
            stacklevel=1,
        )
    return {name: files[name] for name in files if name not in unused}


def _shapes(files: Tensors) -> dict[str, tensors.Shape]:
    return {name: entry.shape for name, (_, entry) in files.items()}


def _may_have_mtp(cfg: ModelConfig) -> bool:
    """Return whether models of this family may have a head for multi-token prediction."""
    family = FAMILIES.get(cfg.stored.family)
    return family is not None and MTP in family.unused


def _with_mtp(cfg: ModelConfig, files: Tensors) -> ModelConfig:
    """Return ``cfg`` with an MTP head if the files have exactly the tensors of one."""
    if not _may_have_mtp(cfg):
        return cfg
    whole = cfg.replace(mtp_layers=1)
    sources = [
        source.name
        for path, spec in tensor_table(whole, _shapes(files)).items()
        if path[0] == "mtp"
        for source in spec.sources
    ]

    def modules(names: Iterable[str]) -> set[str]:
        """The names without a tensor's kind: packed weights have several tensors each."""
        return {name.rpartition(".")[0] for name in names if name.startswith(MTP)}

    return whole if modules(sources) == modules(files) else cfg.replace(mtp_layers=0)


def open_tensors(directory: Path, stack: contextlib.ExitStack) -> Tensors:
    """Return every tensor of a checkpoint by name, with its open, checked file."""
    files: Tensors = {}
    indexes = [directory / index_file(stem) for stem in (FOREIGN, OURS)]
    index_path = next((path for path in indexes if exists(path)), None)
    if exists(directory / weights_file(FOREIGN)) or index_path is None:
        file = stack.enter_context(SafetensorsFile(_single(directory)))
        return {name: (file, info) for name, info in file.tensors.items()}
    weight_map = read_json(index_path, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise JaxLlamaError(f"{index_path}: weight_map: expected an object of tensor to file")
    for shard in dict.fromkeys(map(str, weight_map.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise JaxLlamaError(f"{index_path}: weight_map: {shard[:80]!r} is no file beside it")
        file = stack.enter_context(SafetensorsFile(directory / shard))
        for name, info in file.tensors.items():
            if name in files:
                raise file.error(f"tensor {name!r} is also in {files[name][0].path.name}")
            files[name] = (file, info)
    for name, shard in weight_map.items():
        if name not in files or files[name][0].path.name != shard:
            raise JaxLlamaError(f"{index_path}: tensor {name[:80]!r} is not in {shard[:80]!r}")
    return files


def _single(directory: Path) -> Path:
    for stem in (FOREIGN, OURS):
        if exists(directory / weights_file(stem)):
            return directory / weights_file(stem)
    others, index = sorted(directory.glob("*.safetensors")), index_file(FOREIGN)
    if len(others) == 1:
        return others[0]
    if others:
        names = ", ".join(path.name for path in others[:4])
        raise JaxLlamaError(f"{directory}: {len(others)} safetensors ({names}) without {index}")
    hint = " (PyTorch .bin files are not read)" if any(directory.glob("*.bin")) else ""
    raise JaxLlamaError(f"{directory}: no {weights_file(FOREIGN)} and no {index}{hint}")


def check_tensors(
    directory: Path, files: Tensors, table: dict[tensors.Path, Param], others: Collection[str]
) -> None:
    """Check names, shapes and types before anything is allocated; the ``others`` by name only."""
    sources = {source.name: source for spec in table.values() for source in spec.sources}
    missing = [name for name in sources if name not in files]
    if missing:
        raise JaxLlamaError(f"{directory}: missing tensors: {_some(missing)}")
    for name, (file, info) in files.items():
        source = sources.get(name)
        if source is None:
            if name.endswith(_DERIVED) or name in others:
                continue
            known = {*sources, *others}
            unexpected = [n for n in files if n not in known and not n.endswith(_DERIVED)]
            raise JaxLlamaError(f"{directory}: unexpected tensors: {_some(unexpected)}")
        if info.shape != source.stored_shape:
            raise file.error(
                f"tensor {name!r}: shape {list(info.shape)}, "
                f"but the config wants {list(source.stored_shape)}"
            )
        if info.dtype not in safetensors_file.FLOATS:
            raise file.error(f"tensor {name!r}: dtype {info.dtype} is no floating-point type")


def _tied_heads(cfg: ModelConfig) -> list[str]:
    """Return the tensors of a head that a tied checkpoint may hold in addition to the embedding."""
    untied = tensor_table(cfg.replace(tie_embeddings=False)) if cfg.tie_embeddings else {}
    return [
        source.name for path, spec in untied.items() if path[0] == "head" for source in spec.sources
    ]


def _untied(directory: Path, cfg: ModelConfig, files: Tensors) -> ModelConfig:
    """Return ``cfg`` untied if the checkpoint has a head with other values than the embedding."""
    for head in _tied_heads(cfg):
        (embed,) = tensor_table(cfg)["embed", "weight"].sources
        is_there = head.endswith(".weight") and head in files and embed.name in files
        if is_there and not _equal(files, embed.name, head):
            warnings.warn(
                f"{directory}: tie_word_embeddings = True, but {head!r} differs from "
                f"{embed.name!r}: both are used",
                WeightWarning,
                stacklevel=1,  # one place, so that the warning appears once
            )
            return cfg.replace(tie_embeddings=False)
    return cfg


def _equal(files: Tensors, first: str, other: str) -> bool:
    """Return whether two tensors have the same shape and values."""
    shape, step = files[first][1].shape, 1 << 20
    if shape != files[other][1].shape:
        return False
    size = math.prod(shape)
    parts = ((at, min(step, size - at)) for at in range(0, size, step))
    return all(
        np.array_equal(_slice(files, first, *part), _slice(files, other, *part)) for part in parts
    )


def _slice(files: Tensors, name: str, start: int, size: int) -> np.ndarray:
    """Return elements of a tensor in float32."""
    out = np.empty(size, np.float32)
    _read_slice(files, TensorSource(name, files[name][1].shape), start, out)
    return out


def _read_folded(
    files: Tensors,
    source: TensorSource,
    start: int,
    out: np.ndarray,
    added: tuple[np.ndarray, ...] | None,
) -> bool:
    """Read folded rows of a tensor, some whole heads at once; else as ``_read_slice``.

    added: an adapter's factors.
    """
    n_rows, width = source.n_rows, source.size // source.n_rows
    step = source.turned.block if source.turned else max(1, _FOLDED // width)
    order, stop, finite = source.row_order(), start + out.size, True
    for row in range(start // width // step * step, -(-stop // width), step):
        n = min(step, n_rows - row)
        rows = np.empty((n, width), np.float32)
        _read_slice(files, source, row * width, rows.reshape(-1))
        if source.is_transposed:  # a block is a whole matrix
            rows = rows.reshape(width, n).T
        rows = rows if order is None else rows[order[row : row + n] - row]
        factor = source.factor()
        factor = factor if factor.ndim == 0 else factor[row : row + n]
        rows = rows * factor + np.float32(source.offset)
        if added is not None:
            rows += added[1][row : row + n] @ added[0]
            if len(added) > 2:  # DoRA's magnitudes
                norms = np.linalg.norm(rows, axis=1, keepdims=True)
                rows *= added[2][row : row + n, None] / norms
        begin, end = max(start, row * width), min(stop, (row + n) * width)
        part = out[begin - start : end - start]
        with np.errstate(over="ignore", invalid="ignore"):
            part[...] = rows.reshape(-1)[begin - row * width : end - row * width]
        finite = finite and bool(np.isfinite(part).all())
    return finite


def _read_slice(files: Tensors, source: TensorSource, start: int, out: np.ndarray) -> bool:
    """Fill the flat ``out`` from an element on; return whether all values are finite."""
    file, info = files[source.name]
    offset = info.offset + start * safetensors_file.DTYPES[info.dtype].itemsize
    return file.read_into(dataclasses.replace(info, offset=offset), out)


def read_param(
    files: Tensors, spec: Param, dtype: np.dtype, added: Factors, advance: Callable[[int], None]
) -> np.ndarray:
    """Return a parameter in ``dtype``; added and advance: as ``load`` has them."""
    out = aligned_empty(spec.size, dtype)
    _read_part(files, spec, added, 0, out, advance)
    return out.reshape(spec.shape)


def _read_part(
    files: Tensors,
    spec: Param,
    added: Factors,
    start: int,
    out: np.ndarray,
    advance: Callable[[int], None],
) -> None:
    """Read the parameter's elements from ``start`` on into the flat ``out``."""
    at = 0
    if spec.is_constant:
        out[...] = spec.mean
    for source in spec.sources:
        file, info = files[source.name]
        begin, end = max(start, at), min(start + out.size, at + source.size)
        if begin < end:
            part = out[begin - start : end - start]
            more = added.get(source.name)
            plain = more is None and not source.is_folded
            read = _read_slice if plain else functools.partial(_read_folded, added=more)
            if not read(files, source, begin - at, part):
                bad = part.size - int(np.count_nonzero(np.isfinite(part)))
                warnings.warn(
                    f"{file.path}: tensor {source.name!r}: {bad} of {part.size} weights are NaN or "
                    f"infinite in {out.dtype.name}",
                    WeightWarning,
                    stacklevel=4,
                )
            advance(part.size * safetensors_file.DTYPES[info.dtype].itemsize)
        at += source.size


def aligned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized 1-D array at a 64-byte boundary, as XLA's CPU client needs it."""
    raw = np.empty(size * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * dtype.itemsize].view(dtype)


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:120] for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
