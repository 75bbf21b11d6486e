"""Write QTensors as compressed-tensors checkpoints; ``compressed`` describes the tensors.

int4 and int8 codes with float activations, and int4 codes with FP8 activations, are
"pack-quantized". Both with int8 activations are "int-quantized", with one byte for an int4 code.
FP8 codes are "float-quantized", in blocks of 128 x 128 where rows repeat their scales so.
float4_e2m1fn codes are "mxfp4-pack-quantized" and "nvfp4-pack-quantized" (``float4``). Scales in
two levels of int4 codes are written as their products. 4-bit weights with zero points share one
group size, because transformers 5.24 loads no others (``unifier``). Weights of one kind
make one config group. If all quantized weights are of one kind, the group's target is the
class Linear; otherwise modules are named.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxllama.checkpoints.packed import float4, fp8
from jaxllama.checkpoints.packed.awq import common_group_size
from jaxllama.checkpoints.packed.codes import (
    FP8,
    INT4,
    pack,
    packed_size,
    repeat_groups,
    unsigned,
)
from jaxllama.errors import WeightWarning
from jaxllama.typing import JsonObject, Tree

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor


_FINEST = 16  # columns of a group; finer ones would cost more than they save


def _packed(w: QTensor) -> bool:
    words = np.dtype(w.q.dtype)
    return words != FP8 and (w.activations is None or (words == INT4 and w.activations != "int8"))


def _bits(w: QTensor) -> int:
    return 4 if np.dtype(w.q.dtype) == INT4 else 8


def unifier(weights: Iterable[QTensor]) -> Callable[[QTensor], QTensor]:
    """Return the function that gives 4-bit weights with zero points one group size.

    transformers reads zero points only if all weights have one scheme. So the scales of coarser
    groups repeat for the finest. Weights of which that makes no single scheme stay as they are.
    """
    found = list(weights)
    alike = all(_packed(w) and _bits(w) == 4 and w.activations is None for w in found)
    if not alike or all(w.zero is None for w in found):
        return lambda w: w
    size = common_group_size(found)
    if size != -1 and size < _FINEST:
        return lambda w: w

    def unify(w: QTensor) -> QTensor:
        zero = np.zeros(w.scale.shape, np.int8) if w.zero is None else w.zero
        w = dataclasses.replace(w, zero=zero)
        if size == -1 or isinstance(w.scale, np.ndarray):
            return w if size == -1 else repeat_groups(w, size)
        groups = (w.shape[0], w.shape[1] // size)  # an outline
        scale = jax.ShapeDtypeStruct(groups, w.scale.dtype)
        return dataclasses.replace(w, scale=scale, zero=np.broadcast_to(np.int8(0), groups))

    return unify


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
    has_zeros = any(_packed(w) and w.zero is not None for w in weights.values())
    reason = _transformers_obstacle(weights, floats, has_zeros, len(groups))
    if reason is not None:
        warnings.warn(f"transformers 5.24 will not load it: {reason}", WeightWarning, stacklevel=2)
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": floats,
        "kv_cache_scheme": None,
        # transformers 5.24 reads packed zero points only where it dequantizes at load.
        **({"dequantize": True} if has_zeros and len(groups) == 1 else {}),
    }


def _transformers_obstacle(
    weights: Mapping[str, QTensor], floats: list[str], has_zeros: bool, n_groups: int
) -> str | None:
    """Return why transformers 5.24 refuses these weights, and what it loads; None if it does not.

    It unpacks zero points only while it dequantizes, by one scheme for all. It expects every expert
    of a packed checkpoint in codes without zero points.
    """
    experts = {name: w for name, w in weights.items() if ".experts." in name}
    if any(w.zero is not None for w in experts.values()):
        return "it reads no experts with zero points; scheme w4a16-sym has none"
    all_fp8 = all(np.dtype(w.q.dtype) == FP8 for w in weights.values())
    if not experts and not all_fp8 and any(".experts." in name for name in floats):
        return "it reads no experts in floats beside these weights; give the experts a scheme"
    if has_zeros and n_groups > 1:
        return "it reads no zero points beside another scheme; scheme w4a16-sym has none"
    return None


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
