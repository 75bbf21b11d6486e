"""Read FP8 checkpoints of method "fp8" (DeepSeek, Qwen, AutoFP8, transformers) into QTensors, and
write those with blocks of 128 x 128.

    weight            float8_e4m3fn [out, in]
    weight_scale_inv  (or weight_scale) float, w = weight * scale:
                      [] or [1] one for the tensor, [out] or [out, 1] one a row,
                      [out / rows, in / columns] one a block of ``weight_block_size``
    input_scale       (or activation_scale) float [] or [1], where activation_scheme is "static"

Scales are expanded to rows, which loses nothing. With scales of rows or tensors, activations become
FP8 too, with one scale for each token or the static one. Blocks become groups along the inputs, and
activations stay in floats. That is more exact than the FP8 activations with which such models are
often served; the scheme ``fp8-block-a8`` takes those.

A QTensor of the format "fp8-block", or one that was read so, is written with ``weight_scale_inv``,
bit for bit.

Sources: DeepSeek-V3 (arXiv 2412.19437), transformers' FP8Linear. Left out: UE8M0 scales, FP4;
writing other forms.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING

import numpy as np

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.checkpoints.packed.codes import (
    FP8,
    block_scales,
    by_group,
    check_scale,
    consecutive,
    n_groups,
)
from jaxllama.checkpoints.packed.module import FLOATS, Module, PackedPart, Reader
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.typing import JsonObject

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor

_SCALES = ("weight_scale_inv", "weight_scale")
_INPUTS = ("input_scale", "activation_scale")
BLOCK = 128  # rows and columns of a block that is written
_FIXED = {"fmt": "e4m3", "scale_fmt": "float", "expert_dtype": "fp8"}


def reader(config: JsonObject) -> Reader:
    """The reader of a ``quantization_config`` of method "fp8".

    Raises JaxLlamaError naming the option that is not supported.
    """
    read = JsonReader(config, "quantization_config.")
    for key, value in _FIXED.items():
        if read.text(key, value).lower() != value:
            raise read.error(key, f"only {value!r} is supported")
    activations = read.text("activation_scheme", "dynamic").lower()
    if activations not in ("dynamic", "static"):
        raise read.error("activation_scheme", "not supported; supported: 'dynamic', 'static'")
    block = read_block(read, "weight_block_size")
    static = activations == "static"
    if static and block is not None:
        raise read.error("activation_scheme", "not supported with weight_block_size")

    def part(module: Module) -> PackedPart | None:
        if module.has("weight") and module.dtype("weight") != "F8_E4M3":
            return None
        module.expect("weight", ("F8_E4M3",), module.shape)
        scale = next((name for name in _SCALES if module.has(name)), _SCALES[0])
        inputs = next((name for name in _INPUTS if module.has(name)), _INPUTS[0])
        module.expect(scale, FLOATS, *scale_shapes(module.shape, block))
        if static:
            module.expect(inputs, FLOATS, (), (1,), (1, 1))
        names = ("weight", scale, *((inputs,) if static else ()))

        def build() -> QTensor:
            w = read_weight(module, scale, block)
            if block is not None:
                return w
            w = dataclasses.replace(w, activations="float8_e4m3fn")
            return with_input_scale(w, module, inputs) if static else w

        return module.part(build, *names)

    return part


def read_block(read: JsonReader, key: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block that shares a scale, or None."""
    block = read.get(key, None)
    if block is None:
        return None
    ok = isinstance(block, list) and len(block) == 2
    if not ok or not all(type(size) is int and 0 < size <= 1 << 20 for size in block):
        raise read.error(key, "expected two positive sizes")
    return block[0], block[1]


def scale_shapes(
    shape: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[tuple[int, ...], ...]:
    """Return the possible shapes of a weight's scales."""
    out, width = shape
    if block is None:
        return (), (1,), (1, 1), (out,), (out, 1)
    return ((n_groups(out, block[0]), n_groups(width, block[1])),)


def read_weight(module: Module, scale_name: str, block: tuple[int, int] | None) -> QTensor:
    """Return the stored codes with a scale for every row (and group of columns)."""
    out, width = module.shape
    words, scale = module.read("weight"), module.read(scale_name)
    if block is None:
        scale = np.broadcast_to(scale.reshape(-1, 1), (out, 1)).copy()
        groups = consecutive(width, None)
    else:
        scale = np.repeat(scale, block[0], axis=0)[:out]
        groups = consecutive(width, block[1])
    w = by_group(words, scale, None, groups)
    if block is not None and block[0] == BLOCK and out % BLOCK == 0 and w.scale.shape[1] > 1:
        w = dataclasses.replace(w, blocked=out)
    check_scale(w, module.name)
    if words.dtype != np.int8:
        bad = int(np.count_nonzero((words.view(np.uint8) & 127) == 127))
        if bad:
            warnings.warn(
                f"tensor {f'{module.name}.weight'!r}: {bad} of {words.size} weights are NaN",
                WeightWarning,
                stacklevel=4,
            )
    return w


def with_input_scale(w: QTensor, module: Module, tensor: str) -> QTensor:
    """Return ``w`` with the static scale of its activations."""
    scale = module.read(tensor).astype(np.float32).reshape(())
    if not np.isfinite(scale) or scale <= 0:
        raise JaxLlamaError(f"{module.name}.{tensor}: {scale} is no scale")
    return dataclasses.replace(w, input_scale=scale)


# --- writing -------------------------------------------------------------------------------------


def is_blocked(w: QTensor) -> bool:
    """Whether blocks of 128 x 128 hold these codes and scales."""
    # The format's readers quantize activations in groups of 128 columns of a token.
    of_groups = w.activations is None or (w.input_scale is None and w.scale.shape[1] > 1)
    is_plain = of_groups and w.zero is None and w.columns is None
    return np.dtype(w.q.dtype) == FP8 and is_plain and block_scales(w, BLOCK) is not None


def to_tensors(w: QTensor, scale_name: str = "weight_scale_inv") -> dict[str, np.ndarray]:
    """Return the tensors of one Linear that ``is_blocked``."""
    scale = block_scales(w, BLOCK)
    assert scale is not None
    return {"weight": np.ascontiguousarray(w.q), scale_name: np.ascontiguousarray(scale)}


def layout(
    w: QTensor, scale_name: str = "weight_scale_inv"
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return the shapes and dtypes of ``to_tensors``."""
    out, width = w.shape
    blocks = n_groups(out, BLOCK), n_groups(width, BLOCK)
    return {"weight": ((out, width), FP8), scale_name: (blocks, np.dtype(w.scale.dtype))}


def to_config(floats: list[str]) -> JsonObject:
    """Return the ``quantization_config``; ``floats`` are the Linears that are not quantized."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": floats,
    }
