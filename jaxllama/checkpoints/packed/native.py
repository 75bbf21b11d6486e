"""jaxllama's own packed checkpoints: every parameter under its path, QTensors by their leaves.

    layer_0.mixer.qkv.weight.q            int8, float8_e4m3fn, or uint8: two int4 codes + 8, or two
                                          float4_e2m1fn codes, a byte
                            .scale  .zero  .columns  .input_scale  .unit as the QTensor has them
    layer_0.mixer.qkv.weight.0.q ...      RowBlocks, by index (a block in floats has no ".q")
    norm.weight                           anything that is not quantized

The files are ``jaxllama.safetensors``, or shards ``jaxllama-00001-of-0000N`` and an index. Older
files are named ``model.safetensors``, which transformers mistook for a model with random weights.

``quantization_config`` is ``{"quant_method": "jaxllama", "version": 1, "weights": {path: entry}}``.
An entry is ``{"words": dtype, "activations": dtype or null}``, null for floats, or a list for
RowBlocks. Loading returns the tree that was saved; only parameters that are not quantized are cast.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.checkpoints.packed.codes import (
    FP4,
    INT4,
    INT8,
    check_scale,
    from_nibbles,
    nibbles,
    signed,
    unsigned,
)
from jaxllama.checkpoints.packed.module import FLOATS, Leaf, Module, PackedPart, Tensors, plain
from jaxllama.errors import JaxLlamaError
from jaxllama.model.param import Param, Path
from jaxllama.typing import ArrayOrNumpy, JsonObject, Tree

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor, RowBlocks

_VERSION = 1
_STORED = {"int4": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float4_e2m1fn": "U8"}
_PACKED = ("int4", "float4_e2m1fn")
_BESIDE = ("scale", "zero", "columns", "input_scale", "unit")
_ACTIVATIONS = {
    "int4": ("int8", "float8_e4m3fn"),
    "int8": ("int8",),
    "float8_e4m3fn": ("float8_e4m3fn",),
    "float4_e2m1fn": (),
}


def plan(config: JsonObject, table: Mapping[Path, Param], files: Tensors) -> dict[Path, Leaf]:
    """Return how every parameter of ``table`` is read.

    Raises JaxLlamaError naming an invalid entry or tensor.
    """
    read = JsonReader(config, "quantization_config.")
    if read.natural("version") != _VERSION:
        raise read.error("version", f"only {_VERSION} is supported")
    weights = read.get("weights", {})
    if not isinstance(weights, Mapping):
        raise read.error("weights", "expected an object of path to entry")
    for path in weights:
        if tuple(path.split("/")) not in table:
            raise JaxLlamaError(f"quantization_config.weights: {path[:80]!r} is no parameter")
    return {
        path: _leaf(path, weights.get("/".join(path)), spec.shape, files)
        for path, spec in table.items()
    }


def _leaf(path: Path, entry: Tree, shape: tuple[int, ...], files: Tensors) -> Leaf:
    name = ".".join(path)
    if entry is None:
        return Leaf((plain(name, shape, files),), operator.itemgetter(0))
    if len(shape) not in (2, 3):
        raise _wrong(name, "only matrices and experts are quantized")
    if len(shape) == 3 or not isinstance(entry, list):
        return Leaf((_quantized(name, entry, shape, files),), operator.itemgetter(0))
    parts, rows = [], 0
    for index, block in enumerate(entry):
        part = f"{name}.{index}"
        tensor = part if block is None else f"{part}.q"
        if tensor not in files:
            raise JaxLlamaError(f"missing tensor {tensor!r}")
        found = files[tensor][1].shape
        if len(found) != 2:
            raise _wrong(part, f"shape {list(found)} is no block of rows")
        size = (found[0], shape[1])
        parts.append(
            plain(part, size, files) if block is None else _quantized(part, block, size, files)
        )
        rows += size[0]
    if rows != shape[0]:
        raise _wrong(name, f"blocks of {rows} rows, but the config wants {shape[0]}")
    return Leaf(tuple(parts), _row_blocks)


def _row_blocks(parts: list[Tree]) -> RowBlocks:
    from pallas_kernels.qtensor import RowBlocks

    return RowBlocks(tuple(parts))


def _wrong(name: str, why: str) -> JaxLlamaError:
    return JaxLlamaError(f"quantization_config.weights: {name}: {why}")


def _quantized(name: str, entry: Tree, shape: tuple[int, ...], files: Tensors) -> PackedPart:
    if not isinstance(entry, Mapping):
        raise _wrong(name, "expected an object or null")
    words, activations = entry.get("words"), entry.get("activations")
    if not isinstance(words, str) or words not in _STORED:
        raise _wrong(name, f"words {str(words)[:80]!r}; supported: {', '.join(_STORED)}")
    if activations is not None and activations not in _ACTIVATIONS[words]:
        raise _wrong(name, f"activations {str(activations)[:80]!r} with words {words!r}")
    module = Module(name, shape, files)
    (*out, width), beside = shape, [leaf for leaf in _BESIDE if module.has(leaf)]
    module.expect("q", (_STORED[words],), (*out, -(-width // 2)) if words in _PACKED else shape)
    groups = module.shape_of("scale")[-1:] if module.has("scale") else (1,)
    module.expect("scale", _scale_dtypes(words, "unit" in beside), (*out, *groups))
    if not groups[0] or width % groups[0]:
        raise module.error("scale", f"{groups[0]} groups do not divide {width} columns")
    if "unit" in beside:
        module.expect("unit", ("F32",), (*out, 1))
        if words not in _PACKED:
            raise module.error("unit", f"beside {words} codes")
    grouped = groups != (1,) and words != "float8_e4m3fn"
    if activations is not None and words != "int4" and (grouped or module.has("zero")):
        raise _wrong(name, "quantized activations need one scale a row and no zeros")
    if "zero" in beside and words == "float4_e2m1fn":
        raise module.error("zero", f"beside {words} codes")
    if "zero" in beside:
        module.expect("zero", ("I8", *FLOATS), (*out, *groups))
    if "columns" in beside:
        module.expect("columns", ("I32",), (width,))
    if "input_scale" in beside:
        module.expect("input_scale", ("F32",), ())
    return module.part(lambda: _read(module, words, activations), "q", *beside)


def _scale_dtypes(words: str, has_unit: bool) -> tuple[str, ...]:
    """Return the types that the scales of such codes may have."""
    if words == "float4_e2m1fn":
        return ("F8_E4M3",) if has_unit else ("F8_E8M0", "F8_E4M3", *FLOATS)
    return ("I8",) if has_unit else FLOATS


def _read(module: Module, words: str, activations: str | None) -> QTensor:
    from pallas_kernels.qtensor import QTensor

    q, width = module.read("q"), module.shape[-1]
    if words == "int4":
        q = signed(nibbles(q)[..., :width], 4)
    elif words == "float4_e2m1fn":
        q = nibbles(q)[..., :width].view(FP4)

    def part_of(name: str) -> np.ndarray | None:
        return module.read(name) if module.has(name) else None

    w = QTensor(
        q,
        module.read("scale"),
        part_of("zero"),
        activations,
        part_of("columns"),
        part_of("input_scale"),
        part_of("unit"),
    )
    columns, input_scale = w.columns, w.input_scale
    if columns is not None and not np.array_equal(np.sort(columns), np.arange(width)):
        raise module.error("columns", f"no order of {width} columns")
    if input_scale is not None and (not np.isfinite(input_scale) or input_scale <= 0):
        raise module.error("input_scale", f"{input_scale} is no scale")
    _check(w, module.name)
    return w.found_blocks()


def _check(w: QTensor, name: str) -> None:
    """Check the scales and zeros. GGUF's scales may be negative, and its zeros are floats."""
    from pallas_kernels.qtensor import QTensor

    if w.zero is not None and w.zero.dtype != INT8:
        if not np.isfinite(w.zero.astype(np.float32)).all():
            raise JaxLlamaError(f"{name}: zeros that are NaN or infinite")
        if not np.isfinite(w.scale.astype(np.float32)).all():
            raise JaxLlamaError(f"{name}: scales that are NaN or infinite")
        return
    scale = w.scale if w.q.dtype == FP4 else abs(w.scale)
    check_scale(QTensor(w.q, scale, w.zero, unit=w.unit), name)


def to_tensors(
    name: str, value: QTensor | RowBlocks | ArrayOrNumpy
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of one parameter (of numpy arrays)."""
    from pallas_kernels.qtensor import QTensor, RowBlocks

    if isinstance(value, RowBlocks):
        for index, block in enumerate(value.blocks):
            yield from to_tensors(f"{name}.{index}", block)
    elif isinstance(value, QTensor):
        _check(value, name)
        yield f"{name}.q", _stored(value.q)
        for leaf in _BESIDE:
            if getattr(value, leaf) is not None:
                yield f"{name}.{leaf}", getattr(value, leaf)
    else:
        yield name, np.asarray(value)


def _stored(codes: ArrayOrNumpy) -> np.ndarray:
    q = np.asarray(codes)
    if q.dtype == FP4:
        return from_nibbles(q.view(np.uint8))
    return from_nibbles(unsigned(q, 4)) if q.dtype == INT4 else q


def layout(
    name: str, value: QTensor | RowBlocks | Any
) -> Iterator[tuple[str, tuple[int, ...], np.dtype]]:
    """Yield the names, shapes and dtypes of ``to_tensors``."""
    from pallas_kernels.qtensor import QTensor, RowBlocks

    if isinstance(value, RowBlocks):
        for index, block in enumerate(value.blocks):
            yield from layout(f"{name}.{index}", block)
    elif isinstance(value, QTensor):
        *out, width = value.shape
        packed = value.q.dtype in (INT4, FP4)
        shape = (*out, -(-width // 2)) if packed else (*out, width)
        yield f"{name}.q", shape, np.dtype(np.uint8) if packed else np.dtype(value.q.dtype)
        for leaf in _BESIDE:
            array = getattr(value, leaf)
            if array is not None:
                yield f"{name}.{leaf}", tuple(array.shape), np.dtype(array.dtype)
    else:
        yield name, tuple(value.shape), np.dtype(value.dtype)


def to_config(params: Mapping[Path, Any]) -> JsonObject:
    """Return the ``quantization_config`` of parameters by path."""
    from pallas_kernels.qtensor import QTensor, RowBlocks

    def entry(value: Any) -> Any:
        if isinstance(value, RowBlocks):
            return [entry(block) for block in value.blocks]
        if not isinstance(value, QTensor):
            return None
        return {"words": np.dtype(value.q.dtype).name, "activations": value.activations}

    entries = {"/".join(path): entry(value) for path, value in params.items()}
    weights = {path: found for path, found in entries.items() if found is not None}
    return {"quant_method": "jaxllama", "version": _VERSION, "weights": weights}
