"""Read compressed-tensors checkpoints (llm-compressor, Neural Magic) into QTensors.

    pack-quantized    weight_packed int32 [out, in * bits / 32], weight_shape, weight_scale,
                      weight_zero_point int32 [out * bits / 32, groups] (old files: int8),
                      weight_g_idx int32 [in] (old files: act-order; -1: none)
    int-quantized     weight int8 [out, in], weight_scale (and weight_zero_point int8); 4 bits too
    float-quantized   weight float8_e4m3fn [out, in], weight_scale
                      with input_scale where activations have one static scale
    nvfp4-pack-quantized, mxfp4-pack-quantized        see ``float4``

``config_groups`` says how each Linear is stored: by name, by regular expression, by class. A scale
is for the tensor, a row (channel), a group of columns or a block; see ``fp8`` for blocks.
Activations become codes too if the config says so, with a scale for each token or one static scale.

``compressed_save`` writes such checkpoints. Source: the compressed-tensors library. Refused by
name: widths other than 4 and 8 bits, sparsity, transforms, quantized caches and outputs, and
asymmetric activations. So are quantized activations if a row of 8-bit weights has several scales,
except for blocks. 4-bit weights beside quantized activations (W4A8, W4AFP8) keep their groups.
Scales that are exact multiples of one number a row are stored as those multiples
(``QTensor.unit``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.checkpoints.packed import float4 as packed_float4
from jaxllama.checkpoints.packed.codes import (
    INT4,
    by_group,
    check_scale,
    consecutive,
    n_groups,
    packed_size,
    signed,
    unpack,
)
from jaxllama.checkpoints.packed.fp8 import read_block, read_weight, scale_shapes, with_input_scale
from jaxllama.checkpoints.packed.module import FLOATS, Module, PackedPart, Reader
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor

_CLASS = "Linear"
_FLOAT4 = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    *_FLOAT4,
)
_ABSENT: tuple[object, ...] = (None, {}, [])


@dataclasses.dataclass(frozen=True)
class _Scheme:
    """One of ``config_groups``, checked: how the Linears of its targets are stored."""

    packed: bool
    bits: int
    floating: bool
    symmetric: bool
    group_size: int | None  # None: one scale a row, or one for the tensor
    block: tuple[int, int] | None
    activations: str | None
    static: bool
    float4: str | None = None  # "mxfp4" or "nvfp4"


def reader(config: JsonObject) -> Reader:
    """Return the reader of a ``quantization_config`` of method "compressed-tensors".

    Raises JaxLlamaError naming an option that is not supported.
    """
    read = JsonReader(config, "quantization_config.")
    if read.text("quantization_status", "compressed") != "compressed":
        raise read.error("quantization_status", "only 'compressed' is supported")
    for key in ("kv_cache_scheme", "transform_config"):
        if config.get(key) not in _ABSENT:
            raise read.error(key, "not supported")
    sparsity = read.get("sparsity_config", {})
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise read.error("sparsity_config", "not supported")
    groups = read.get("config_groups", {})
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise read.error("config_groups", "expected an object of objects")
    ignored = _targets(read, "ignore")
    schemes = []
    for name, group in groups.items():
        reader_of_group = JsonReader(group, f"quantization_config.config_groups.{name}.")
        schemes.append(
            (_targets(reader_of_group, "targets"), _scheme(reader_of_group, config.get("format")))
        )

    def part(module: Module) -> PackedPart | None:
        scheme = None
        if _rank(ignored, module) is None:
            matches = [
                (rank, found)
                for targets, found in schemes
                if (rank := _rank(targets, module)) is not None
            ]
            scheme = min(matches, key=lambda pair: pair[0])[1] if matches else None
        return None if scheme is None else _part(module, scheme)

    return part


def _targets(read: JsonReader, key: str) -> list[str | re.Pattern[str]]:
    """Return the modules that a config's ``key`` lists.

    Names and classes are strings. Entries that begin with "re:" are compiled expressions.
    """
    names = read.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise read.error(key, "expected a list of strings")
    targets: list[str | re.Pattern[str]] = []
    for name in names:
        try:
            targets.append(re.compile(name[3:]) if name.startswith("re:") else name)
        except (re.error, RecursionError, OverflowError):
            raise read.error(key, f"{name[:80]!r} is no regular expression") from None
    return targets


def _rank(targets: list[str | re.Pattern[str]], module: Module) -> int | None:
    """Return how closely the targets name a Linear: 0 by name, 1 by pattern, 2 by class."""
    ranks = []
    for target in targets:
        if isinstance(target, re.Pattern):
            ranks += [1] if any(map(target.match, module.names)) else []
        elif target in (*module.names, _CLASS):
            ranks.append(2 if target == _CLASS else 0)
    return min(ranks, default=None)


def _scheme(read: JsonReader, default_format: Any) -> _Scheme:
    kind = read.get("format", default_format)
    if kind not in _FORMATS:
        message = f"format {str(kind)[:80]!r} is not supported; supported: {', '.join(_FORMATS)}"
        raise JaxLlamaError(f"{read.prefix}{message}")
    if read.config.get("output_activations") is not None:
        raise read.error("output_activations", "not supported")
    weights = _nested(read, "weights")
    if weights is None:
        raise JaxLlamaError(f"missing key '{read.prefix}weights'")
    if kind in _FLOAT4:
        return _float4_scheme(read, weights, _FLOAT4[kind])
    floating, bits = _codes(weights)
    if weights.get("dynamic", False) is not False:
        raise weights.error("dynamic", "only false is supported")
    strategy = _strategy(weights)
    group_size = block = None
    if strategy == "group":
        group_size = weights.size("group_size", limit=1 << 20)
    elif strategy == "block":
        block = read_block(weights, "block_structure")
    elif strategy not in ("tensor", "channel"):
        raise weights.error("strategy", "not supported; supported: tensor, channel, group, block")
    packed = kind == "pack-quantized"
    if floating and packed:
        raise weights.error("type", "pack-quantized codes are integers")
    if not packed and bits != 8 and kind == "float-quantized":
        raise weights.error("num_bits", f"{kind} codes have 8 bits")
    if block is not None and packed:
        raise weights.error("strategy", "not supported with pack-quantized")
    symmetric = weights.flag("symmetric", True)
    scheme = _Scheme(packed, bits, floating, symmetric, group_size, block, None, False)
    return _with_activations(scheme, read)


def _float4_scheme(read: JsonReader, weights: JsonReader, name: str) -> _Scheme:
    """Return the scheme of float4_e2m1fn codes. Activations in codes of floats stay floats."""
    group = packed_float4.GROUPS[name]
    wanted = {"num_bits": 4, "type": "float", "group_size": group, "symmetric": True}
    for key, value in wanted.items():
        if weights.get(key, True if key == "symmetric" else None) != value:
            raise weights.error(key, f"{name} has {value!r}")
    inputs = _nested(read, "input_activations")
    if inputs is not None and inputs.text("type", "int") != "float":
        raise inputs.error("type", f"not supported beside {name} weights; supported: 'float'")
    return _Scheme(True, 4, True, True, group, None, None, False, name)


def _nested(read: JsonReader, key: str) -> JsonReader | None:
    value = read.get(key, None)
    if value is not None and not isinstance(value, Mapping):
        raise read.error(key, "expected an object")
    return None if value is None else JsonReader(value, f"{read.prefix}{key}.")


def _codes(read: JsonReader) -> tuple[bool, int]:
    """Return (floating?, bits) of weights or activations."""
    kind = read.text("type", "int")
    if kind not in ("int", "float"):
        raise read.error("type", "not supported; supported: 'int', 'float'")
    bits, allowed = read.natural("num_bits", 8), (8,) if kind == "float" else (4, 8)
    if bits not in allowed:
        raise read.error("num_bits", f"{kind} codes of {' or '.join(map(str, allowed))} bits only")
    return kind == "float", bits


def _strategy(read: JsonReader) -> str:
    """Return the strategy, which ``group_size`` implies if it is missing."""
    size = read.get("group_size", None)
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    return read.text("strategy", default)


def _with_activations(scheme: _Scheme, read: JsonReader) -> _Scheme:
    inputs = _nested(read, "input_activations")
    if inputs is None:
        return scheme
    floating, bits = _codes(inputs)
    dynamic, strategy = inputs.get("dynamic", False), _strategy(inputs)
    if scheme.block is not None and strategy == "group" and dynamic is True:
        return scheme  # blocks of both: the activations stay in floats
    if bits != 8 or (scheme.bits == 8 and floating != scheme.floating):
        raise inputs.error(
            "num_bits", "only 8-bit activations with weights of the same type, or 4 bits"
        )
    if not inputs.flag("symmetric", True):
        raise inputs.error("symmetric", "asymmetric activations are not supported")
    if (dynamic, strategy) not in ((True, "token"), (False, "tensor")):
        raise inputs.error(
            "strategy", f"with dynamic = {dynamic!r}; supported: token (dynamic), tensor (static)"
        )
    if (
        scheme.block is not None
        or not scheme.symmetric
        or (scheme.group_size is not None and scheme.bits == 8)
    ):
        raise inputs.error("strategy", "quantized activations need weights of one scale a row")
    words = "float8_e4m3fn" if floating else "int8"
    return dataclasses.replace(scheme, activations=words, static=not dynamic)


def _part(module: Module, scheme: _Scheme) -> PackedPart:
    if scheme.float4 is not None:
        return packed_float4.part(module, scheme.float4)
    out, width = module.shape
    groups = n_groups(width, scheme.group_size)
    names = ["weight_packed" if scheme.packed else "weight", "weight_scale"]
    if scheme.packed:
        module.expect("weight_packed", ("I32",), (out, packed_size(width, scheme.bits)))
    else:
        dtype = "F8_E4M3" if scheme.floating else "I8"
        module.expect("weight", (dtype,), module.shape)
    if scheme.group_size is None:
        shapes = scale_shapes(module.shape, scheme.block)
    else:
        shapes = ((out, groups),)
    module.expect("weight_scale", FLOATS, *shapes)
    if module.has("weight_shape"):
        module.expect("weight_shape", ("I64", "I32"), (2,))
        names.append("weight_shape")
    if not scheme.symmetric and not module.has("weight_zero_point"):
        raise JaxLlamaError(f"missing tensor {f'{module.name}.weight_zero_point'!r}")
    if module.has("weight_zero_point"):
        if module.dtype("weight_zero_point") == "I32":
            zeros = ((packed_size(out, scheme.bits), groups),)
        else:
            zeros = shapes
        module.expect("weight_zero_point", ("I32", "I8", "F8_E4M3"), *zeros)
        names.append("weight_zero_point")
    if scheme.packed and module.has("weight_g_idx"):
        module.expect("weight_g_idx", ("I32", "I64"), (width,))
        names.append("weight_g_idx")
    if scheme.static:
        module.expect("input_scale", FLOATS, (), (1,))
        names.append("input_scale")
        if module.has("input_zero_point"):
            module.expect("input_zero_point", ("I8", "F8_E4M3"), (), (1,))
            names.append("input_zero_point")
    return module.part(lambda: _read(module, scheme), *names)


def _read(module: Module, scheme: _Scheme) -> QTensor:
    if module.has("weight_shape"):
        shape = tuple(module.read("weight_shape").tolist())
        if shape != module.shape:
            raise module.error("weight_shape", f"{list(shape)} is not {list(module.shape)}")
    if scheme.packed:
        w = _unpack(module, scheme)
    else:
        w = _plain(module, scheme)
    if scheme.activations is not None:
        if w.zero is not None:
            raise module.error("weight_zero_point", "zero points with quantized activations")
        w = dataclasses.replace(_in_two_levels(w, scheme), activations=scheme.activations)
    if not scheme.static:
        return w
    if module.has("input_zero_point") and module.read("input_zero_point").astype(np.int8).any():
        raise module.error("input_zero_point", "asymmetric activations are not supported")
    return with_input_scale(w, module, "input_scale")


def _in_two_levels(w: QTensor, scheme: _Scheme) -> QTensor:
    """Return 4-bit weights beside int8 activations with scales in two levels, if that is exact."""
    if (scheme.bits, scheme.activations) != (4, "int8") or w.scale.shape[1] == 1:
        return w
    from pallas_kernels.rounding import multiples

    multiple, unit = (np.asarray(v) for v in multiples(w.scale.astype(np.float32), w.zero))
    found = dataclasses.replace(w, scale=multiple, unit=unit)
    return found if np.array_equal(found.in_one_level.scale, w.scale.astype(np.float32)) else w


def _unpack(module: Module, scheme: _Scheme) -> QTensor:
    """Return a weight whose codes the file packs several to an int32 word."""
    out, width = module.shape
    words = signed(unpack(module.read("weight_packed"), scheme.bits)[:, :width], scheme.bits)
    groups = consecutive(width, scheme.group_size)
    if module.has("weight_g_idx") and (module.read("weight_g_idx") != -1).any():
        groups = module.expect_groups("weight_g_idx", n_groups(width, scheme.group_size))
    scale = _per_row(module.read("weight_scale"), out, scheme)
    w = by_group(words, scale, _zeros(module, scheme), groups)
    check_scale(w, module.name)
    return w


def _plain(module: Module, scheme: _Scheme) -> QTensor:
    """Return a weight whose codes the file stores one to an integer or an 8-bit float."""
    zero = _zeros(module, scheme)
    if scheme.group_size is None and zero is None and scheme.bits == 8:
        return read_weight(module, "weight_scale", scheme.block)
    if scheme.block is not None:
        raise module.error("weight_zero_point", "zero points of blocks are not supported")
    scale = _per_row(module.read("weight_scale"), module.shape[0], scheme)
    groups = consecutive(module.shape[1], scheme.group_size)
    stored = module.read("weight")
    if scheme.bits == 4:
        if stored.min() < -8 or stored.max() > 7:
            raise module.error("weight", "codes beyond 4 bits")
        stored = stored.astype(INT4)
    w = by_group(stored, scale, zero, groups)
    check_scale(w, module.name)
    return w


def _per_row(values: np.ndarray, out: int, scheme: _Scheme) -> np.ndarray:
    if scheme.group_size is not None:
        return values
    return np.broadcast_to(values.reshape(-1, 1), (out, 1)).copy()


def _zeros(module: Module, scheme: _Scheme) -> np.ndarray | None:
    """Return zero points in the QTensor's form; None if all are 0."""
    if not module.has("weight_zero_point"):
        return None
    out, stored = module.shape[0], module.read("weight_zero_point")
    if stored.dtype == np.int32:
        fields = unpack(stored.T, scheme.bits)[:, :out].T
        zero = signed(np.ascontiguousarray(fields), scheme.bits).astype(np.int8)
    elif scheme.floating:
        if stored.astype(np.float32).any():
            raise module.error("weight_zero_point", "zero points of FP8 codes are not supported")
        return None
    else:
        zero = _per_row(stored.astype(np.int8), out, scheme)
    return zero if zero.any() else None
