"""Read and write float4_e2m1fn weights: MXFP4 and NVFP4, as compressed-tensors and ModelOpt do.

    MXFP4   weight_packed uint8 [out, in / 2], weight_scale uint8 [out, in / 32] (an exponent + 127)
    NVFP4   weight_packed uint8 [out, in / 2], weight_scale float8_e4m3fn [out, in / 16],
            weight_global_scale float32 [1]      w = code * scale / global     (compressed-tensors)
    NVFP4   weight uint8, weight_scale, weight_scale_2 float32 []
                                                 w = code * scale * scale_2    (ModelOpt)

The lower half of a byte is the column that comes first.  Activations stay in floats: the scales of
an activation (``input_global_scale``, ``input_scale``) are not read, and not written.

A QTensor's unit is a factor, so compressed-tensors' divisor is inverted, in float32.  Two divisors
can have one inverse.  ``divisor`` prefers the one that a bfloat16 weight's largest magnitude gives,
as llm-compressor computes it.  A unit from ModelOpt may be no inverse; then the nearest is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.checkpoints.packed import fp8 as packed_fp8
from jaxllama.checkpoints.packed.codes import E8M0, FP4, FP8, check_scale, from_nibbles, nibbles
from jaxllama.checkpoints.packed.module import FLOATS, Module, PackedPart, Reader
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject, Tree

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor

OTHER_FILE = "hf_quant_config.json"  # of ModelOpt, whose config.json may have no such key
GROUPS = {"mxfp4": 32, "nvfp4": 16}
_TOP = np.float32(6 * 448)  # the largest code times the largest scale
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8")


def part(module: Module, name: str, is_modelopt: bool = False) -> PackedPart:
    """Return one Linear of the format ``name``, its tensors checked."""
    (out, width), group = module.shape, GROUPS[name]
    codes = "weight" if is_modelopt else "weight_packed"
    if width % group:
        raise JaxLlamaError(f"{module.name}: {name} groups do not divide {width} inputs")
    module.expect(codes, ("U8",), (out, width // 2))
    scale = ("F8_E4M3",) if name == "nvfp4" else ("U8", "F8_E8M0")
    module.expect("weight_scale", scale, (out, width // group))
    names = [codes, "weight_scale"]
    if name == "nvfp4":
        names.append("weight_scale_2" if is_modelopt else "weight_global_scale")
        module.expect(names[-1], ("F32",), (), (1,))
    names += ["input_scale", "input_global_scale"]

    def build() -> QTensor:
        from pallas_kernels.qtensor import QTensor

        q = nibbles(module.read(codes)).view(FP4)
        scales = module.read("weight_scale")
        if name == "mxfp4":
            w = QTensor(q, scales.view(E8M0))
        else:
            given = module.read(names[2]).reshape(())
            with np.errstate(divide="ignore"):
                unit = given if is_modelopt else np.float32(1) / given
            w = QTensor(q, scales, unit=np.full((out, 1), unit, np.float32))
        check_scale(w, module.name)
        return w

    return module.part(build, *names)


def modelopt_reader(config: JsonObject) -> Reader:
    """Return the reader of a ``quantization_config`` of method "modelopt".

    Also of ``hf_quant_config.json``'s object. Raises JaxLlamaError naming what is not supported.
    """
    nested = config.get("quantization")
    read = JsonReader(nested if isinstance(nested, dict) else config, "quantization_config.")
    algorithm = read.text("quant_algo", "").upper()
    if algorithm not in _ALGORITHMS:
        raise read.error("quant_algo", f"not supported; supported: {', '.join(_ALGORITHMS)}")
    if algorithm == "FP8":
        return packed_fp8.reader({"activation_scheme": "static"})
    if read.get("group_size", 16) != 16:
        raise read.error("group_size", "NVFP4 has groups of 16")

    def found(module: Module) -> PackedPart | None:
        if module.has("weight") and module.dtype("weight") in FLOATS:
            return None
        return part(module, "nvfp4", is_modelopt=True)

    return found


# --- writing -------------------------------------------------------------------------------------


def format_of(w: QTensor) -> str | None:
    """Return the format that holds these codes and scales, or None."""
    if np.dtype(w.q.dtype) != FP4 or w.activations is not None or w.columns is not None:
        return None
    kind = np.dtype(w.scale.dtype), w.unit is None, w.shape[1] // w.scale.shape[1]
    if kind == (E8M0, True, 32):
        return "mxfp4"
    return "nvfp4" if kind == (FP8, False, 16) else None


def to_tensors(w: QTensor, is_modelopt: bool = False) -> dict[str, np.ndarray]:
    """Return the tensors of one Linear, whose rows share one unit."""
    packed = from_nibbles(np.asarray(w.q).view(np.uint8) & np.uint8(15))
    tensors = {"weight" if is_modelopt else "weight_packed": packed}
    if w.unit is None:
        return {**tensors, "weight_scale": np.ascontiguousarray(w.scale).view(np.uint8)}
    tensors["weight_scale"] = np.ascontiguousarray(w.scale)
    unit = np.asarray(w.unit)[0, 0]
    if is_modelopt:
        return {**tensors, "weight_scale_2": np.array(unit, np.float32)}
    return {**tensors, "weight_global_scale": np.array([divisor(unit)], np.float32)}


def layout(w: QTensor, is_modelopt: bool = False) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return the shapes and dtypes of ``to_tensors``."""
    out, width = w.shape
    is_mx = w.unit is None
    entries: dict[str, tuple[tuple[int, ...], Tree]] = {
        "weight" if is_modelopt else "weight_packed": ((out, width // 2), np.uint8),
        "weight_scale": (tuple(w.scale.shape), np.uint8 if is_mx else FP8),
    }
    if not is_mx and is_modelopt:
        entries["weight_scale_2"] = ((), np.float32)
    elif not is_mx:
        entries["weight_global_scale"] = ((1,), np.float32)
    return {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in entries.items()}


def divisor(unit: np.float32) -> np.float32:
    """Return the float32 whose inverse in float32 is ``unit``, or the nearest to it."""
    single = np.float32(1)
    if unit == 0:
        return np.float32(np.inf)
    first = single / unit
    near = (first, np.nextafter(first, np.float32(0)), np.nextafter(first, np.float32(np.inf)))
    exact = [g for g in near if single / g == unit]

    def is_of_bfloat16(g: np.float32) -> bool:
        peak = (_TOP / g).astype(ml_dtypes.bfloat16).astype(np.float32)
        return bool(_TOP / peak == g)

    return next((g for g in exact if is_of_bfloat16(g)), exact[0] if exact else first)


def modelopt_config(floats: list[str]) -> JsonObject:
    """Return the ``quantization_config`` of ModelOpt; ``floats`` are the Linears not quantized."""
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "group_size": 16,
        "ignore": floats,
        "kv_cache_scheme": None,
        "producer": {"name": "modelopt", "version": ""},
    }


def modelopt_file(floats: list[str]) -> JsonObject:
    """Return ``hf_quant_config.json``, which programs read that ignore config.json's object."""
    return {
        "producer": {"name": "modelopt", "version": ""},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": floats,
        },
    }
