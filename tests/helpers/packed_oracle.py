"""Packed Linears as other programs write them, and what they mean: numpy, written from the formats'
descriptions and sharing nothing with the loader.

Each function makes the tensors of one Linear from random bits and returns them with the float32
weight ``[out, in]`` that they stand for, unpacked one field at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from jaxllama.checkpoints.hf.config import config_to_hf
from jaxllama.checkpoints.hf.tables import tensor_table as param_table
from jaxllama.config import ModelConfig
from tests.helpers.seeded import hf_tensors, seeded_params

Linear = tuple[dict[str, np.ndarray], np.ndarray]
Rng = np.random.Generator


def _int32(rng: Rng, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def _scales(rng: Rng, *shape: int, dtype: Any = np.float16) -> np.ndarray:
    return rng.uniform(0.002, 0.02, shape).astype(dtype)


def _field(word: np.ndarray, index: int, bits: int) -> np.ndarray:
    return (word.astype(np.int64) >> (bits * index)) & (2**bits - 1)


def awq(rng: Rng, out: int, width: int, group: int) -> Linear:
    groups = 1 if group == -1 else -(-width // group)
    qweight, qzeros = _int32(rng, width, out // 8), _int32(rng, groups, out // 8)
    scales = _scales(rng, groups, out)
    weight, rows = np.empty((out, width), np.float32), np.arange(out)
    # Fields 0..7 hold outputs 0, 2, 4, 6, 1, 3, 5, 7 of their eight.
    fields = (rows % 8) // 2 + 4 * (rows % 2)
    for column in range(width):
        g = 0 if group == -1 else column // group
        words = _field(qweight[column, rows // 8], fields, 4)
        zeros = _field(qzeros[g, rows // 8], fields, 4)
        weight[:, column] = (words - zeros).astype(np.float32) * scales[g].astype(np.float32)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales}, weight


def act_order(rng: Rng, width: int, group: int) -> np.ndarray:
    """GPTQ's g_idx after ``desc_act``: groups in the order of a permutation."""
    g_idx = np.empty(width, np.int32)
    g_idx[rng.permutation(width)] = np.arange(width) // (width if group == -1 else group)
    return g_idx


def gptq(
    rng: Rng,
    out: int,
    width: int,
    group: int,
    *,
    bits: int = 4,
    v2: bool = False,
    g_idx: np.ndarray | None = None,
    symmetric: bool = False,
) -> Linear:
    per = 32 // bits
    groups = 1 if group == -1 else -(-width // group)
    qweight = _int32(rng, -(-width // per), out)
    qzeros = _int32(rng, groups, -(-out // per))
    if symmetric:
        stored = 2 ** (bits - 1) - (0 if v2 else 1)
        qzeros[:] = np.array(sum(stored << bits * i for i in range(per))).astype(np.int32)
    # The first format stores the fields' zeros less 1, as one integer less 0x11111111.
    ones = 0 if v2 else sum(1 << bits * i for i in range(per))
    zeros = np.array([[(int(word) + ones) % 2**32 for word in row] for row in qzeros])
    scales = _scales(rng, groups, out)
    order = np.arange(width) // (width if group == -1 else group) if g_idx is None else g_idx
    weight, rows = np.empty((out, width), np.float32), np.arange(out)
    for column, g in enumerate(order):
        words = _field(qweight[column // per], column % per, bits)
        zero = _field(zeros[g, rows // per], rows % per, bits)
        weight[:, column] = (words - zero).astype(np.float32) * scales[g].astype(np.float32)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    return tensors | ({} if g_idx is None else {"g_idx": g_idx}), weight


def packed(
    rng: Rng,
    out: int,
    width: int,
    group: int | None,
    *,
    bits: int = 4,
    zeros: str | None = None,
    g_idx: np.ndarray | None = None,
    per_tensor: bool = False,
    dtype: Any = ml_dtypes.bfloat16,
) -> Linear:
    """compressed-tensors, packed.  group: None is a scale a row; zeros: "packed", "int8"."""
    per, half = 32 // bits, 2 ** (bits - 1)
    groups = 1 if group is None else -(-width // group)
    words = _int32(rng, out, -(-width // per))
    scale = _scales(rng, *((1,) if per_tensor else (out, groups)), dtype=dtype)
    tensors = {
        "weight_packed": words,
        "weight_scale": scale,
        "weight_shape": np.array([out, width], np.int64),
    }
    zero_of = np.zeros((out, groups), np.int64)
    if zeros == "packed":
        stored = _int32(rng, -(-out // per), groups)
        for row in range(out):
            zero_of[row] = _field(stored[row // per], row % per, bits) - half
        tensors["weight_zero_point"] = stored
    elif zeros == "int8":
        zero_of = rng.integers(-half, half, (out, groups))
        tensors["weight_zero_point"] = zero_of.astype(np.int8)
    if g_idx is not None:
        tensors["weight_g_idx"] = g_idx
    weight = np.empty((out, width), np.float32)
    for column in range(width):
        g = 0 if group is None else column // group
        g = g if g_idx is None or -1 in g_idx else g_idx[column]
        word = _field(words[:, column // per], column % per, bits) - half
        s = scale.astype(np.float32)
        weight[:, column] = (word - zero_of[:, g]).astype(np.float32) * (
            s[0] if per_tensor else s[:, g]
        )
    return tensors, weight


def plain(
    rng: Rng,
    out: int,
    width: int,
    *,
    floating: bool,
    scale: str = "row",
    block: tuple[int, int] = (16, 16),
    name: str = "weight_scale",
    static: str | None = None,
    dtype: Any = np.float32,
    bits: int = 8,
    group: int | None = None,
) -> Linear:
    """Words as they are, a byte each, int8 or FP8."""
    if floating:
        words = rng.normal(0, 60, (out, width)).astype(ml_dtypes.float8_e4m3fn)
    else:
        words = rng.integers(-(1 << bits - 1), 1 << bits - 1, (out, width)).astype(np.int8)
    scale = scale if group is None else "group"
    blocks = -(-out // block[0]), -(-width // block[1])
    shapes = {
        "scalar": (),
        "tensor": (1,),
        "row": (out, 1),
        "column": (out,),
        "block": blocks,
        "group": (out, 1 if group is None else width // group),
    }
    scales = np.asarray(_scales(rng, *shapes[scale], dtype=dtype))
    tensors = {"weight": words, name: scales}
    if static is not None:
        tensors[static] = np.array([0.02], np.float32)
    rows, columns = np.indices((out, width))
    at = {
        "scalar": (),
        "tensor": (0,),
        "row": (rows, 0),
        "column": (rows,),
        "block": (rows // block[0], columns // block[1]),
        "group": (rows, columns // (group or width)),
    }[scale]
    return tensors, words.astype(np.float32) * scales[at].astype(np.float32)


def float4(rng: np.random.Generator, out: int, width: int, name: str) -> Linear:
    """Codes two to a byte; name: mxfp4, nvfp4 (compressed-tensors) or modelopt."""
    group = 32 if name == "mxfp4" else 16
    fields = rng.integers(0, 16, (out, width)).astype(np.uint8)
    packed = fields[:, 0::2] | fields[:, 1::2] << 4
    values = fields.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    if name == "mxfp4":
        exponents = rng.integers(117, 123, (out, width // group)).astype(np.uint8)
        scale = np.exp2(exponents.astype(np.float32) - 127)
        tensors = {"weight_packed": packed, "weight_scale": exponents}
        return tensors, values * np.repeat(scale, group, axis=1)
    scales = rng.uniform(0, 448, (out, width // group)).astype(ml_dtypes.float8_e4m3fn)
    peak = np.float32(rng.uniform(0.1, 0.3)).astype(ml_dtypes.bfloat16).astype(np.float32)
    divisor = np.float32(2688) / peak
    if name == "modelopt":
        unit = peak / np.float32(2688)
        more = {"weight_scale_2": np.array(unit), "input_scale": np.array(0.5, np.float32)}
        tensors = {"weight": packed, "weight_scale": scales, **more}
    else:
        unit = np.float32(1) / divisor
        more = {"weight_global_scale": np.array([divisor])}
        tensors = {"weight_packed": packed, "weight_scale": scales, **more}
    return tensors, values * np.repeat(scales.astype(np.float32) * unit, group, axis=1)


def checkpoint(
    cfg: ModelConfig, options: dict[str, Any], make: Callable[[str, int, int], Linear | None]
) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, np.ndarray]]:
    """(tensors, config.json, all weights as floats by their tensor's name) of a model whose Linears
    are ``make(name, out, in)``, or floats where that is None."""
    weights = hf_tensors(cfg, seeded_params(cfg))
    tensors = dict(weights)
    for path, spec in param_table(cfg).items():
        for source in spec.sources:
            name = source.name.removesuffix(".weight")
            if path[0] == "embed" or len(source.shape) != 2:
                continue
            made = make(name, *source.shape)
            if made is not None:
                del tensors[source.name]
                tensors |= {f"{name}.{tensor}": value for tensor, value in made[0].items()}
                weights[source.name] = made[1]
    return tensors, {**config_to_hf(cfg), "quantization_config": options}, weights


def save(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {n: np.ascontiguousarray(value).reshape(value.shape) for n, value in tensors.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")


def fused(cfg: ModelConfig, weights: dict[str, np.ndarray]) -> dict[tuple[str, ...], np.ndarray]:
    """The parameters that these tensors make up."""
    return {
        path: np.concatenate([weights[s.name].reshape(s.shape) for s in spec.sources]).reshape(
            spec.shape
        )
        for path, spec in param_table(cfg).items()
    }


def floats_of(leaf: Any) -> np.ndarray:
    """float32 values of a parameter, by QTensor's definition, in numpy."""
    if hasattr(leaf, "blocks"):
        return np.concatenate([floats_of(block) for block in leaf.blocks])
    if not hasattr(leaf, "q"):
        return np.asarray(leaf, np.float32)
    q, scale = np.asarray(leaf.q).astype(np.float32), np.asarray(leaf.scale).astype(np.float32)
    if leaf.unit is not None:
        scale = scale * np.asarray(leaf.unit)
    wide = lambda a: np.repeat(a, q.shape[-1] // scale.shape[-1], axis=-1)  # noqa: E731
    if leaf.zero is None:
        values = q * wide(scale)
    elif np.asarray(leaf.zero).dtype == np.int8:
        values = (q - wide(np.asarray(leaf.zero).astype(np.float32))) * wide(scale)
    else:
        values = q * wide(scale) + wide(np.asarray(leaf.zero).astype(np.float32))
    if leaf.columns is None:
        return values
    back = np.empty_like(values)
    back[..., np.asarray(leaf.columns)] = values
    return back


def load(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a directory's one file, read with nothing of ours."""
    [path] = folder.glob("*.safetensors")
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    dtypes = {
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "I8": np.int8,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "I32": np.int32,
        "I64": np.int64,
        "U8": np.uint8,
    }
    tensors = {}
    for name, info in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + at for at in info["data_offsets"])
            values = np.frombuffer(raw[begin:end], dtypes[info["dtype"]])
            tensors[name] = values.reshape(info["shape"]).copy()
    return tensors
