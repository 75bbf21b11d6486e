"""Write QTensors to packed checkpoints: the tensors of each parameter, in every format.

Each Linear of a fused parameter becomes its own set of tensors, from a slice of the parameter's
rows. The names are those of the model's family. One parameter at a time comes to the host, and it
is packed when it is written. Nothing is rounded: a weight that a format cannot hold is a
JaxLlamaError that names the parameter.

    native              everything; in files that other programs do not look for
    awq                 int4; one group size for all, the finest there is (scales repeat)
    gptq                int4, int8, act-order; exceptions go into ``dynamic``
    compressed-tensors  int4, int8, FP8, with their activations, MXFP4, NVFP4; a config group per
                        kind
    fp8                 FP8 in blocks of 128 x 128
    modelopt            NVFP4
    mxfp4               gpt-oss's experts in MXFP4; all else in floats

AWQ and GPTQ store scales as float16, so the scales must be exact in float16.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllama.checkpoints.folding import unfold
from jaxllama.checkpoints.hf.config import config_to_hf, generation_config
from jaxllama.checkpoints.hf.save import (
    FOREIGN,
    GENERATION,
    MAX_SHARD_BYTES,
    OURS,
    SaveUnit,
    check_paths,
    flatten,
    floats_unit,
    joined,
    write_directory,
)
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.checkpoints.packed import awq as packed_awq
from jaxllama.checkpoints.packed import compressed_save as packed_compressed_save
from jaxllama.checkpoints.packed import float4 as packed_float4
from jaxllama.checkpoints.packed import fp8 as packed_fp8
from jaxllama.checkpoints.packed import gptq as packed_gptq
from jaxllama.checkpoints.packed import mxfp4 as packed_mxfp4
from jaxllama.checkpoints.packed import native as packed_native
from jaxllama.checkpoints.packed.codes import FP4, FP8, INT4, INT8, check_scale
from jaxllama.config import ModelConfig
from jaxllama.decoding.sampling import Sampling
from jaxllama.errors import JaxLlamaError
from jaxllama.model.param import Param, TensorSource
from jaxllama.typing import JsonObject, Params, ParamsDict, Tree
from pallas_kernels.qtensor import QTensor, RowBlocks, dequantize

if TYPE_CHECKING:
    from jaxllama.model.param import Path as Key

FORMATS = ("native", "awq", "gptq", "compressed-tensors", "fp8", "modelopt", "mxfp4")
Tensors = dict[str, np.ndarray]
Layout = dict[str, tuple[tuple[int, ...], np.dtype]]


@dataclasses.dataclass(frozen=True)
class _Member:
    """One tensor (or Linear) of the checkpoint: rows ``start:stop`` of ``block``.

    A block is a parameter, or one block of a RowBlocks parameter. The rows of experts' matrices
    ``[E, out, in]`` are counted through.
    """

    source: TensorSource
    block: Tree
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def linear(self) -> str:
        return self.name.removesuffix(".weight")

    def outline(self) -> QTensor:
        """Return its QTensor with shapes in place of codes and scales."""
        w, rows = self.block, self.stop - self.start
        q, scale = (
            jax.ShapeDtypeStruct((rows, leaf.shape[-1]), leaf.dtype) for leaf in (w.q, w.scale)
        )
        slices = slice(self.start, self.stop)
        zero, unit = (
            None if v is None else _by_rows(np.asarray(v))[slices] for v in (w.zero, w.unit)
        )
        if np.dtype(w.q.dtype) == FP8:  # whose scales may be blocks'
            scale = _by_rows(np.asarray(w.scale))[slices]
        return dataclasses.replace(w, q=q, scale=scale, zero=zero, unit=unit)


def _by_rows(array: np.ndarray) -> np.ndarray:
    """Return experts' matrices ``[E, out, in]`` as ``[E * out, in]``, and any other array as is."""
    return array.reshape(-1, array.shape[-1]) if array.ndim == 3 else array


@dataclasses.dataclass(frozen=True)
class _Format:
    """How a format stores one quantized Linear, and its ``quantization_config``."""

    layout: Callable[[QTensor], Layout]
    to_tensors: Callable[[QTensor], Tensors]
    config: JsonObject
    documents: dict[str, JsonObject] = dataclasses.field(default_factory=dict)


def save(
    directory: str | Path,
    cfg: ModelConfig,
    params: Params,
    tokenizer_files: Iterable[str | Path] | None = None,
    *,
    format: str = "native",
    sampling: Sampling | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = False,
) -> Path:
    """Write parameters with their QTensors bit for bit, as config.json and safetensors.

    Parameters
    ----------
    params : dict
        Parameter tree with QTensors.
    format : str
        One of ``FORMATS``. "native" holds everything, and only ``hf.load`` reads it: transformers
        and other programs find no weight file in it. The other formats hold what their programs
        support.
    directory, cfg, tokenizer_files, sampling, max_shard_bytes, progress
        As for ``hf.save``.

    Raises
    ------
    JaxLlamaError
        Naming the parameter that the format cannot hold, and why.
    """
    if format not in FORMATS:
        raise JaxLlamaError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    cfg = cfg.with_head_of(params)
    options, units, more = _units(cfg, params, format)
    dtype = np.dtype(params["norm"]["weight"].dtype).name
    config = {**config_to_hf(cfg, dtype), "quantization_config": options}
    documents = {"config.json": config, GENERATION: generation_config(cfg, sampling), **more}
    stem = OURS if format == "native" else FOREIGN
    return write_directory(
        directory, documents, units, tokenizer_files, max_shard_bytes, progress, stem
    )


def in_floats(params: Params, dtype: DTypeLike) -> ParamsDict:
    """Return the tree with every quantized weight dequantized to floats."""

    def dense(leaf: Tree) -> Tree:
        if isinstance(leaf, RowBlocks):
            return jnp.concatenate([dense(block) for block in leaf.blocks])
        return dequantize(leaf, dtype) if isinstance(leaf, QTensor) else leaf

    return jax.tree.map(dense, params, is_leaf=lambda leaf: isinstance(leaf, QTensor | RowBlocks))


def check(cfg: ModelConfig, params: Params, format: str) -> None:
    """Raise JaxLlamaError for what ``save`` would refuse; ``params`` may be stand-ins."""
    _units(cfg.with_head_of(params), params, format)


def _units(
    cfg: ModelConfig, params: Params, format: str
) -> tuple[JsonObject, list[SaveUnit], dict[str, JsonObject]]:
    """Return (the ``quantization_config``, the tensors of every parameter, further documents)."""
    flat, table = flatten(params), tensor_table(cfg)
    check_paths(flat, table)
    for path, spec in table.items():
        if tuple(flat[path].shape) != spec.shape:
            raise JaxLlamaError(
                f"params: {'/'.join(path)}: shape {list(flat[path].shape)}, "
                f"but the config wants {list(spec.shape)}"
            )
    if format == "native":
        units = [_native_unit(path, flat[path]) for path in table]
        return packed_native.to_config(flat), units, {}
    if any(layer.form.name == "shared" for layer in cfg.layers):
        raise JaxLlamaError(f"layers that share weights need format 'native', not {format!r}")
    if format == "mxfp4":
        return packed_mxfp4.CONFIG, packed_mxfp4.units(cfg, table, flat), {}
    # All experts' matrices in one tensor, as some families store them, stay in floats.
    stacked = {
        path: spec
        for path, spec in table.items()
        if any(len(source.shape) == 3 for source in spec.sources)
    }
    for path in stacked:
        if isinstance(flat[path], QTensor):
            raise JaxLlamaError(
                f"{'/'.join(path)}: this model's files have all experts in one tensor, which "
                f"format {format!r} cannot quantize; use format 'native', or experts_*=none in "
                "the scheme"
            )
    members = {
        path: _members(path, flat[path], spec)
        for path, spec in table.items()
        if path not in stacked
    }
    chosen = _choose(format, members, _tied_head(cfg))
    units = [
        floats_unit(spec, flat[path]) if path in stacked else _unit(members[path], chosen)
        for path, spec in table.items()
    ]
    return chosen.config, joined(units), chosen.documents


def _native_unit(path: Key, value: Tree) -> SaveUnit:
    name = ".".join(path)

    def values() -> Iterator[np.ndarray]:
        host = jax.tree.map(np.asarray, value)
        return (np.ascontiguousarray(array) for _, array in packed_native.to_tensors(name, host))

    return SaveUnit(tuple(packed_native.layout(name, value)), values)


def _members(path: Key, value: Tree, spec: Param) -> list[_Member]:
    """Return the checkpoint's tensors of a parameter, each within one of its blocks."""
    members = []
    blocks = list(value.blocks) if isinstance(value, RowBlocks) else [value]
    at = 0
    for source in spec.sources:
        rows = math.prod(spec.shape[:-1]) if len(spec.shape) == 3 else spec.shape[0]
        block, stop = blocks[0], at + source.size * rows // spec.size
        n_rows = math.prod(block.shape[:-1]) if len(spec.shape) == 3 else block.shape[0]
        if stop > n_rows:
            raise JaxLlamaError(f"{'/'.join(path)}: its blocks do not end where {source.name} does")
        members.append(_Member(source, block, at, stop))
        at = stop
        if at == n_rows:
            blocks, at = blocks[1:], 0
    return members


def _tied_head(cfg: ModelConfig) -> list[str]:
    """Return the head for which other programs have a Linear although it is the embedding."""
    if not cfg.tie_embeddings:
        return []
    spec = tensor_table(cfg.replace(tie_embeddings=False))["head", "weight"]
    return [source.name.removesuffix(".weight") for source in spec.sources]


def _choose(format: str, members: dict[Key, list[_Member]], tied_head: list[str]) -> _Format:
    """Return the format for these Linears. Raises JaxLlamaError for weights that it cannot hold."""
    weights: dict[str, QTensor] = {}
    floats: list[str] = []
    for path, parts in members.items():
        for member in parts:
            if isinstance(member.block, QTensor):
                reason = _obstacle(format, path, member.block)
                if reason is not None:
                    raise _refusal(format, "/".join(path), reason)
                outline = member.outline()
                if reason := _member_obstacle(format, outline):
                    raise _refusal(format, member.linear, reason)
                weights[member.linear] = outline
            elif path[0] != "embed" and len(member.shape) == 2:
                floats.append(member.linear)
    if not weights:
        raise JaxLlamaError(f"no weight is quantized: format {format!r} has nothing to hold")
    if format == "awq":
        group_size = packed_awq.common_group_size(weights.values())
        return _Format(
            lambda w: packed_awq.layout(w, group_size),
            lambda w: packed_awq.to_tensors(w, group_size),
            packed_awq.to_config(group_size, floats),
        )
    if format == "gptq":
        v2 = any(packed_gptq.needs_v2(w) for w in weights.values())
        for name, w in weights.items():
            reason = packed_gptq.obstacle(w)
            if reason is not None:
                raise _refusal(format, name, reason)
        return _Format(
            packed_gptq.layout,
            lambda w: packed_gptq.to_tensors(w, v2),
            packed_gptq.to_config(weights, floats, v2),
        )
    if format == "fp8":
        config = packed_fp8.to_config(floats + tied_head)
        return _Format(packed_fp8.layout, packed_fp8.to_tensors, config)
    if format == "modelopt":
        return _Format(
            functools.partial(packed_float4.layout, is_modelopt=True),
            functools.partial(packed_float4.to_tensors, is_modelopt=True),
            packed_float4.modelopt_config(floats + tied_head),
            {packed_float4.OTHER_FILE: packed_float4.modelopt_file(floats + tied_head)},
        )
    unify = packed_compressed_save.unifier(weights.values())
    weights = {name: unify(w) for name, w in weights.items()}
    return _Format(
        lambda w: packed_compressed_save.layout(unify(w)),
        lambda w: packed_compressed_save.to_tensors(unify(w)),
        packed_compressed_save.to_config(weights, floats + tied_head),
    )


def _refusal(format: str, weight: str, reason: str) -> JaxLlamaError:
    return JaxLlamaError(
        f"format {format!r} cannot hold {weight}: {reason}; native holds every scheme"
    )


def _obstacle(format: str, path: Key, w: QTensor) -> str | None:
    """Return why the format cannot hold ``w``, or None."""
    if path[0] == "embed":
        return "it has no quantized embedding"
    if w.zero is not None and np.dtype(w.zero.dtype) != INT8:
        return f"it has no zeros of {w.zero.dtype}"
    words = np.dtype(w.q.dtype)
    if w.zero is not None:
        if words == FP8 or w.activations is not None:
            return f"it has no zeros beside {words} codes" + " with activations" * (words != FP8)
        half = 8 if words == INT4 else 128
        if np.min(w.zero) < -half or np.max(w.zero) >= half:
            return f"zero points beyond {words} codes"
    if words == FP4 and format in ("compressed-tensors", "modelopt"):
        name = packed_float4.format_of(w)
        if name is None or (format == "modelopt" and name != "nvfp4"):
            return f"it has no {words} codes with {w.scale.dtype} scales of {w.group_size} columns"
        return None
    if format == "modelopt":
        return f"it has no {words} codes"
    if format == "fp8":
        rounds = w.activations is not None and not packed_fp8.is_blocked(w)
        if words != FP8 or rounds or w.columns is not None:
            return "it holds FP8 codes without quantized activations or another order of columns"
        return None
    if format == "compressed-tensors":
        if w.columns is not None:
            return "its programs no longer read act-order (columns)"
        if w.activations is not None and w.activations != words.name and words != INT4:
            return f"it has no {words} codes with {w.activations} activations"
        return None
    if w.activations is not None:
        return f"it has no {w.activations} activations"
    allowed = (INT4,) if format == "awq" else (INT4, INT8)
    if words not in allowed:
        return f"it has no {words} codes"
    if format == "awq" and path[0] == "head":
        return "it leaves the head in floats"
    if format == "awq" and w.columns is not None:
        return "it has no act-order (columns)"
    scale = np.asarray(w.scale).astype(np.float32)
    with np.errstate(over="ignore"):
        exact = np.array_equal(scale, scale.astype(np.float16).astype(np.float32))
    if exact:
        return None
    return (
        f"{w.scale.dtype} scales that float16 does not hold exactly; "
        f"quantize --format {format} chooses codes for scales of float16"
    )


def _member_obstacle(format: str, w: QTensor) -> str | None:
    """Return why the format cannot hold one Linear's rows, or None."""
    if format == "fp8" and not packed_fp8.is_blocked(w):
        return "its scales are not those of blocks of 128 x 128"
    if w.unit is not None and np.dtype(w.q.dtype) == FP4 and np.min(w.unit) != np.max(w.unit):
        return "its rows have different tensor scales"
    return None


def _unit(members: list[_Member], chosen: _Format) -> SaveUnit:
    """Return a parameter's tensors."""
    entries = []
    for member in members:
        if isinstance(member.block, QTensor):
            for tensor, (shape, dtype) in chosen.layout(member.outline()).items():
                entries.append((f"{member.linear}.{tensor}", shape, dtype))
        else:
            entries.append((member.name, member.shape, np.dtype(member.block.dtype)))

    def values() -> Iterator[np.ndarray]:
        block = host = None
        for member in members:
            if member.block is not block:
                block = member.block
                host = jax.tree.map(lambda part: _by_rows(np.asarray(part)), block)
            rows = slice(member.start, member.stop)
            if isinstance(host, QTensor):
                w = unfold(member.source, host.rows(rows))
                check_scale(w, member.linear)
                yield from chosen.to_tensors(w).values()
            else:
                assert host is not None
                yield np.ascontiguousarray(unfold(member.source, host[rows]))

    return SaveUnit(tuple(entries), values)
