"""gpt-oss's own files: experts in MXFP4, two codes of a byte, read and written bit for bit.

    NAME_blocks    uint8 [E, out, in / 32, 16]    low half first, float4_e2m1fn
    NAME_scales    uint8 [E, out, in / 32]        float8_e8m0fnu: 2^(byte - 127)

NAME is a tensor of all experts, ``mlp.experts.gate_up_proj`` for example.  Unlike its floats, whose
matrices are ``[in, out]``, the blocks are in the order of our rows, except that gate and up take
turns.  All other tensors are floats.  Source: transformers' ``Mxfp4Config``; the OCP Microscaling
specification v1.0.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.checkpoints.hf.save import SaveUnit, floats_unit
from jaxllama.checkpoints.packed.codes import E8M0, FP4, from_nibbles, nibbles
from jaxllama.checkpoints.packed.module import Leaf, PackedPart, Tensors
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.param import Param, Path, Stacked, TensorSource

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor

GROUP = 32
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_NAN = 255  # the scale that is no number


def plan(table: Mapping[Path, Param], files: Tensors) -> dict[Path, Leaf]:
    """Return how the parameters with blocks are read; those in floats are not in it.

    Raises JaxLlamaError naming a tensor of the wrong shape or dtype, or if there are no blocks.
    """
    leaves = {}
    for path, spec in table.items():
        source = spec.sources[0]
        is_stack = isinstance(source.turned, Stacked)
        if is_stack and len(spec.shape) == 3 and f"{source.name}_blocks" in files:
            names = _check(source, files)
            part = PackedPart(names, functools.partial(_read, source, files))
            leaves[path] = Leaf((part,), operator.itemgetter(0))
    if not leaves:
        raise JaxLlamaError("quantization_config says 'mxfp4', but no weight is quantized")
    return leaves


def _names(source: TensorSource) -> tuple[str, str]:
    return f"{source.name}_blocks", f"{source.name}_scales"


def _check(source: TensorSource, files: Tensors) -> tuple[str, str]:
    names = _names(source)
    count, rows, width = source.shape
    for name, more in zip(names, ((GROUP // 2,), ()), strict=True):
        if name not in files:
            raise JaxLlamaError(f"missing tensors: {name}")
        file, info = files[name]
        wanted = (count, rows, width // GROUP, *more)
        if width % GROUP or info.shape != wanted or info.dtype != "U8":
            raise file.error(
                f"tensor {name!r}: {info.dtype} {list(info.shape)}, but the config wants "
                f"U8 {list(wanted)}"
            )
    return names


def _read(source: TensorSource, files: Tensors) -> QTensor:
    from pallas_kernels.qtensor import QTensor

    found = (files[name] for name in _names(source))
    blocks, scales = (file.read(info.name) for file, info in found)
    if (scales == _NAN).any():
        raise files[_names(source)[1]][0].error(f"tensor {source.name + '_scales'!r}: NaN")
    order = source.row_order()
    assert order is not None  # every matrix is one of a stack
    blocks, scales = (x.reshape(source.n_rows, -1)[order] for x in (blocks, scales))
    codes = nibbles(blocks).view(FP4).reshape(source.shape)
    return QTensor(codes, scales.view(E8M0).reshape(*source.shape[:2], -1))


def units(
    cfg: ModelConfig, table: Mapping[Path, Param], flat: Mapping[Path, Any]
) -> list[SaveUnit]:
    """Return the tensors of every parameter of a model whose experts are MXFP4.

    Raises JaxLlamaError naming another model, or a parameter that is stored otherwise.
    """
    family = FAMILIES.get(cfg.stored.family)
    if family is None or not family.has_mxfp4:
        owners = ", ".join(kind for kind, family in FAMILIES.items() if family.has_mxfp4)
        raise JaxLlamaError(f"format 'mxfp4' is {owners}'s own, and not of {cfg.stored.family!r}")
    return [_unit(path, spec, flat[path]) for path, spec in table.items()]


def _unit(path: Path, spec: Param, value: Any) -> SaveUnit:
    from pallas_kernels.qtensor import QTensor, RowBlocks

    if len(spec.shape) != 3:
        if isinstance(value, QTensor | RowBlocks):
            raise JaxLlamaError(f"{'/'.join(path)}: quantized, but format 'mxfp4' has experts only")
        return floats_unit(spec, value)
    is_ours = isinstance(value, QTensor) and (value.q.dtype, value.scale.dtype) == (FP4, E8M0)
    if not is_ours or value.group_size != GROUP:
        raise JaxLlamaError(f"{'/'.join(path)}: format 'mxfp4' needs experts_*=mxfp4")
    source = spec.sources[0]
    count, rows, width = source.shape
    groups = (count, rows, width // GROUP)
    shapes, byte = ((*groups, GROUP // 2), groups), np.dtype(np.uint8)
    named = zip(_names(source), shapes, strict=True)
    entries = tuple((name, shape, byte) for name, shape in named)
    return SaveUnit(entries, functools.partial(_tensors, source, value, shapes))


def _tensors(
    source: TensorSource, w: QTensor, shapes: tuple[tuple[int, ...], ...]
) -> Iterator[np.ndarray]:
    """Yield a weight's blocks and scales as the file has them."""
    order = source.row_order(inverse=True)
    assert order is not None  # every matrix is one of a stack
    for leaf, shape in zip((w.q, w.scale), shapes, strict=True):
        fields = np.asarray(leaf).view(np.uint8).reshape(source.n_rows, -1)[order]
        yield (from_nibbles(fields) if leaf is w.q else fields).reshape(shape)
