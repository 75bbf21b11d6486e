"""Packed checkpoints: quantized codes in a file -> QTensors, without loss.

    plan(directory, config, table, files)   which parameters are packed, and how each is read

``hf.load`` calls ``plan`` with config.json. Its ``quantization_config`` names the method, and each
method is one file here: AutoAWQ (``awq``), GPTQ (``gptq``), compressed-tensors (``compressed``),
FP8 (``fp8``), ModelOpt (``float4``), gpt-oss's MXFP4 (``mxfp4``) and jaxllama's own (``native``). A
Linear's tensors show
whether it is quantized; for compressed-tensors the config does. The rows of a fused parameter (qkv,
gate_up) are its members' rows, one after the other. Members that are stored differently (other
groups, bits or column orders, or floats) become ``RowBlocks``.

Every file is checked, by name, shape and type, before anything is allocated. ``packed.save`` is
the way back. Left out: finding the codes (``jaxllama.quantization``), GGUF
(``checkpoints.gguf.load``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxllama.checkpoints.folding import fold
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.checkpoints.packed import awq as packed_awq
from jaxllama.checkpoints.packed import compressed as packed_compressed
from jaxllama.checkpoints.packed import float4 as packed_float4
from jaxllama.checkpoints.packed import fp8 as packed_fp8
from jaxllama.checkpoints.packed import gptq as packed_gptq
from jaxllama.checkpoints.packed import mxfp4 as packed_mxfp4
from jaxllama.checkpoints.packed import native as packed_native
from jaxllama.checkpoints.packed.module import (
    Floats,
    Leaf,
    Module,
    PackedPart,
    Reader,
    Tensors,
    fuse,
    plain,
)
from jaxllama.errors import JaxLlamaError
from jaxllama.model import param as tensors
from jaxllama.model.param import Param, TensorSource
from jaxllama.typing import ArrayOrNumpy, JsonMapping, JsonObject

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor, RowBlocks

_READERS: dict[str, Callable[[JsonObject], Reader]] = {
    "awq": packed_awq.reader,
    "gptq": packed_gptq.reader,
    "compressed-tensors": packed_compressed.reader,
    "fp8": packed_fp8.reader,
    "modelopt": packed_float4.modelopt_reader,
}
_NATIVE, _MXFP4 = "jaxllama", "mxfp4"
KEYS = ("quantization_config", "compression_config")  # keys of config.json


def plan(
    directory: Path,
    config: JsonMapping,
    table: Mapping[tensors.Path, Param],
    files: Tensors,
) -> dict[tensors.Path, Leaf]:
    """Return the parameters of ``table`` that are not plain floats; none if there is no method.

    Raises JaxLlamaError naming an option that is not supported, or the tensor that is missing or of
    the wrong shape or type.
    """
    key = KEYS[0] if config.get(KEYS[0]) else KEYS[1]
    if config.get(key) is None:
        return {}
    with _naming(directory):
        method, options = _method(config, key)
        if method == _NATIVE:
            return packed_native.plan(options, table, files)
        if method == _MXFP4:
            return packed_mxfp4.plan(table, files)
        part = _READERS[method](options)
        sources = {source.name for spec in table.values() for source in spec.sources}
        leaves = {
            path: leaf
            for path, spec in table.items()
            if path[0] != "embed" and (leaf := _leaf(spec, part, files, sources)) is not None
        }
        if not leaves:
            raise JaxLlamaError(f"{key} says {method!r}, but no weight is quantized")
        return leaves


@contextlib.contextmanager
def _naming(directory: Path) -> Generator[None]:
    """Make errors begin with the directory or a file in it."""
    try:
        yield
    except JaxLlamaError as error:
        if str(error).startswith(str(directory)):
            raise
        raise JaxLlamaError(f"{directory}: {error}") from None


def _method(config: JsonMapping, key: str) -> tuple[str, JsonObject]:
    options = config[key]
    if not isinstance(options, dict):
        raise JsonReader(config).error(key, "expected an object")
    default = "compressed-tensors" if "config_groups" in options else ""
    method = options.get("quant_method", default)
    known = (*_READERS, _MXFP4, _NATIVE)
    if method not in known:
        supported = ", ".join(known)
        raise JsonReader(options, f"{key}.").error(
            "quant_method", f"not supported; supported: {supported}"
        )
    return method, options


def _leaf(spec: Param, part: Reader, files: Tensors, sources: Collection[str]) -> Leaf | None:
    """Return a parameter's leaf; None if all members are floats or it is no Linear's weight."""
    is_matrix = len(spec.shape) in (2, 3)
    if not is_matrix or any(len(source.shape) != 2 for source in spec.sources):
        return None
    names = [source.name.removesuffix(".weight") for source in spec.sources]
    modules = [Module(name, s.shape, files) for name, s in zip(names, spec.sources, strict=True)]
    found_parts = [part(module) for module in modules]
    if not any(found_parts):
        return None
    parts: list[PackedPart] = []
    for source, module, found in zip(spec.sources, modules, found_parts, strict=True):
        if found is None:
            plain(source.name, source.shape, files)
            found = PackedPart((source.name,), Param((source,), source.shape))
        elif module.has("bias") and f"{module.name}.bias" not in sources:
            # AutoGPTQ gives every Linear a bias; if the model has none, the bias must be zero.
            if module.read("bias").astype(np.float32).any():
                raise module.error("bias", "not zero, and the config has no bias here")
            found = PackedPart((*found.names, f"{module.name}.bias"), found.read)
        if source.is_folded and not isinstance(found.read, Param):
            found = PackedPart(found.names, functools.partial(_folded, source, found.read))
        parts.append(found)
    is_stacked = len(spec.shape) == 3
    return Leaf(tuple(parts), functools.partial(_experts, spec) if is_stacked else fuse)


def _experts(spec: Param, parts: list[QTensor | np.ndarray]) -> QTensor:
    """Return the experts' matrices ``[E, out, in]`` of their Linears."""
    from pallas_kernels.qtensor import QTensor

    w, name = fuse(parts), spec.sources[0].name
    if not isinstance(w, QTensor):
        raise JaxLlamaError(f"{name}: experts of one layer are quantized in different ways")
    if w.columns is not None or w.input_scale is not None:
        raise JaxLlamaError(f"{name}: experts with act-order or static activations are not read")
    is_fp8 = w.activations == np.dtype(w.q.dtype).name == "float8_e4m3fn"
    if w.activations is not None and not is_fp8:
        raise JaxLlamaError(f"{name}: experts with {w.activations} activations are not read")

    def stack(rows: ArrayOrNumpy | None) -> ArrayOrNumpy | None:
        return None if rows is None else rows.reshape(spec.shape[0], -1, rows.shape[-1])

    q, scale, zero, unit = map(stack, (w.q, w.scale, w.zero, w.unit))
    blocked = None if w.blocked is None or q is None else q.shape[1]
    return dataclasses.replace(w, q=q, scale=scale, zero=zero, unit=unit, blocked=blocked)


def _folded(source: TensorSource, read: Callable[[], QTensor]) -> QTensor:
    return fold(source, read())


def read(
    directory: Path, leaf: Leaf, floats: Floats, files: Tensors, advance: Callable[[int], None]
) -> QTensor | RowBlocks | np.ndarray:
    """Return the value of a planned parameter; ``floats`` reads its parts that are not packed.

    Raises JaxLlamaError naming a tensor whose values are invalid.
    """
    with _naming(directory):
        value = leaf.read(floats)
    packed = [part.names for part in leaf.parts if not isinstance(part.read, Param)]
    advance(sum(files[name][1].nbytes for names in packed for name in names))
    return value
