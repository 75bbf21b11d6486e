"""Write QTensors as compressed-tensors checkpoints; ``compressed`` describes the tensors.

int4 and int8 codes with float activations, and int4 codes with FP8 activations, are
"pack-quantized". Both with int8 activations are "int-quantized", with one byte for an int4 code.
FP8 codes are "float-quantized", in blocks of 128 x 128 where rows repeat their scales so.
float4_e2m1fn codes are "mxfp4-pack-quantized" and "nvfp4-pack-quantized" (``float4``). Scales in
two levels of int4 codes are written as their products. Weights of one kind make one config group.
If all quantized weights are of one kind, the group's target is the class Linear; otherwise modules
are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from jaxllama.checkpoints.packed import float4, fp8
from jaxllama.checkpoints.packed.codes import FP8, INT4, pack, packed_size, unsigned
from jaxllama.typing import JsonObject, Tree

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor


def _packed(w: QTensor) -> bool:
    words = np.dtype(w.q.dtype)
    return words != FP8 and (w.activations is None or (words == INT4 and w.activations != "int8"))


def _bits(w: QTensor) -> int:
    return 4 if np.dtype(w.q.dtype) == INT4 else 8


def to_tensors(w: QTensor) -> dict[str, np.ndarray]:
    """Return the tensors of one Linear."""
    if float4.format_of(w) is not None:
        return float4.to_tensors(w)
    if fp8.is_blocked(w):
        return fp8.to_tensors(w, "weight_scale")
    w, tensors = w.in_one_level, {}
    if _packed(w):
        tensors["weight_packed"] = pack(unsigned(w.q, _bits(w)), _bits(w))
        tensors["weight_shape"] = np.array(w.shape, np.int64)
    else:
        tensors["weight"] = np.ascontiguousarray(w.q if _bits(w) == 8 else w.q.astype(np.int8))
    tensors["weight_scale"] = np.ascontiguousarray(w.scale)
    if w.zero is not None and _packed(w):
        fields = np.ascontiguousarray(unsigned(w.zero, _bits(w)).T)
        tensors["weight_zero_point"] = np.ascontiguousarray(pack(fields, _bits(w)).T)
    if w.input_scale is not None:
        tensors["input_scale"] = np.reshape(w.input_scale, (1,))
    return tensors


def layout(w: QTensor) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return the shapes and dtypes of ``to_tensors``."""
    if float4.format_of(w) is not None:
        return float4.layout(w)
    if fp8.is_blocked(w):
        return fp8.layout(w, "weight_scale")
    out, width = w.shape
    tensors: dict[str, tuple[tuple[int, ...], Tree]] = {}
    if _packed(w):
        tensors["weight_packed"] = (out, packed_size(width, _bits(w))), np.int32
        tensors["weight_shape"] = (2,), np.int64
    else:
        tensors["weight"] = (out, width), w.q.dtype if _bits(w) == 8 else np.int8
    tensors["weight_scale"] = tuple(w.scale.shape), (w.scale if w.unit is None else w.unit).dtype
    if w.zero is not None and _packed(w):
        zeros = (packed_size(out, _bits(w)), w.scale.shape[1])
        tensors["weight_zero_point"] = zeros, np.int32
    if w.input_scale is not None:
        tensors["input_scale"] = (1,), np.float32
    return {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in tensors.items()}


def to_config(weights: Mapping[str, QTensor], floats: list[str]) -> JsonObject:
    """Return the ``quantization_config`` of Linears by name; ``floats`` are those not quantized."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name, w in weights.items():
        kinds.setdefault(_kind(w), []).append(name)
    groups = {}
    for index, names in enumerate(kinds.values()):
        group = _group(weights[names[0]])
        groups[f"group_{index}"] = {"targets": ["Linear"] if len(kinds) == 1 else names, **group}
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": floats,
        "kv_cache_scheme": None,
    }


def _kind(w: QTensor) -> tuple[object, ...]:
    """Return the properties that the members of a config group share."""
    groups = None if w.scale.shape[1] == 1 else w.group_size
    static = w.input_scale is not None
    form = float4.format_of(w) or ("fp8-block" if fp8.is_blocked(w) else None)
    return np.dtype(w.q.dtype).name, groups, w.zero is None, w.activations, static, form


def _group(w: QTensor) -> JsonObject:
    name = float4.format_of(w)
    if name is not None:
        return _float4_group(name)
    kind = "float" if np.dtype(w.q.dtype) == FP8 else "int"
    weights: JsonObject = {"num_bits": _bits(w), "type": kind, "symmetric": w.zero is None}
    if fp8.is_blocked(w):
        weights |= {"strategy": "block", "block_structure": [fp8.BLOCK, fp8.BLOCK]}
    elif w.scale.shape[1] == 1:
        weights["strategy"] = "channel"
    else:
        weights |= {"strategy": "group", "group_size": w.group_size}
    inputs = None
    if w.activations is not None:
        inputs = {
            "num_bits": 8,
            "type": "int" if w.activations == "int8" else "float",
            "symmetric": True,
            "strategy": "token" if w.input_scale is None else "tensor",
            "dynamic": w.input_scale is None,
        }
        if fp8.is_blocked(w):
            inputs |= {"strategy": "group", "group_size": fp8.BLOCK}
    plain = "float-quantized" if kind == "float" else "int-quantized"
    return {
        "weights": {**weights, "dynamic": False},
        "input_activations": inputs,
        "output_activations": None,
        "format": "pack-quantized" if _packed(w) else plain,
    }


def _float4_group(name: str) -> JsonObject:
    """Return the config group of MXFP4 or NVFP4 weights beside activations in floats."""
    is_mx = name == "mxfp4"
    scale = "torch.uint8" if is_mx else "torch.float8_e4m3fn"
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group" if is_mx else "tensor_group",
        "group_size": float4.GROUPS[name],
        "scale_dtype": scale,
        "zp_dtype": scale,
    }
    return {
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": f"{name}-pack-quantized",
    }
