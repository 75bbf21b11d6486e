"""AutoAWQ's GEMM layout <-> QTensors.

    qweight  int32 [in, out / 8]         eight 4-bit codes of one input in the order 0 2 4 6 1 3 5 7
    qzeros   int32 [in / group, out / 8]     packed alike
    scales   float [in / group, out]         w = (word - zero) * scale

Source: AutoAWQ's WQLinear_GEMM; AWQ is arXiv 2306.00978. AWQ folds its channel scales into the
weights beforehand, so the file has no trace of them. Left out: the GEMV, GEMV-fast, Marlin, ExLlama
and llm-awq layouts, and codes without zero points, which this layout lacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.checkpoints.packed.codes import (
    by_group,
    check_scale,
    consecutive,
    n_groups,
    pack,
    repeat_groups,
    signed,
    unpack,
    unsigned,
)
from jaxllama.checkpoints.packed.module import FLOATS, Module, PackedPart, Reader
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor

_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the output whose code field i holds
_PLACE = np.argsort(_ORDER)
_BITS, _FIELDS = 4, 8


def reader(config: JsonObject) -> Reader:
    """Return the reader of a ``quantization_config`` of method "awq".

    Raises JaxLlamaError naming an option that is not supported.
    """
    read = JsonReader(config, "quantization_config.")
    for key in ("version", "format", "checkpoint_format"):
        if read.text(key, "gemm").lower() != "gemm":
            raise read.error(key, "only 'gemm' is supported")
    if read.text("backend", "auto").lower() == "llm-awq":
        raise read.error("backend", "the llm-awq layout is not supported, only AutoAWQ's 'gemm'")
    bits_key = "bits" if config.get("bits") is not None else "w_bit"
    if read.natural(bits_key, _BITS) != _BITS:
        raise read.error(bits_key, "only 4 is supported")
    if not read.flag("zero_point", True):
        raise read.error("zero_point", "only true is supported")
    group_size = read_group_size(
        read, "group_size" if config.get("group_size") is not None else "q_group_size"
    )

    def part(module: Module) -> PackedPart | None:
        if not module.has("qweight") and module.has("weight"):
            return None
        out, width = module.shape
        layout = _layout(out, width, n_groups(width, group_size))
        module.expect("qweight", ("I32",), layout["qweight"])
        module.expect("qzeros", ("I32",), layout["qzeros"])
        module.expect("scales", FLOATS, layout["scales"])
        return module.part(lambda: _read(module, group_size), "qweight", "qzeros", "scales")

    return part


def read_group_size(read: JsonReader, key: str) -> int | None:
    """Return the columns of a group; None, which files write as -1, is the whole row."""
    value = read.get(key, 128)
    if type(value) is not int or (value != -1 and not 0 < value <= 1 << 20):
        raise read.error(key, "expected -1 or a positive number of columns")
    return None if value == -1 else value


def file_group_size(w: QTensor) -> int:
    """Return the group size as files write it: -1 for the whole row."""
    return -1 if w.scale.shape[1] == 1 else w.group_size


def _layout(out: int, width: int, groups: int) -> dict[str, tuple[int, int]]:
    if out % _FIELDS:
        raise JaxLlamaError(f"AWQ packs {_FIELDS} outputs together, which does not divide {out}")
    return {
        "qweight": (width, out // _FIELDS),
        "qzeros": (groups, out // _FIELDS),
        "scales": (groups, out),
    }


def _read(module: Module, group_size: int | None) -> QTensor:
    words, zeros = (signed(_unpack(module.read(name)), _BITS) for name in ("qweight", "qzeros"))
    scale = np.ascontiguousarray(module.read("scales").T)
    groups = consecutive(module.shape[1], group_size)
    w = by_group(words, scale, zeros.astype(np.int8), groups)
    check_scale(w, module.name)
    return w


def _unpack(packed: np.ndarray) -> np.ndarray:
    """Convert int32 [rows, out / 8] to uint8 [out, rows]."""
    fields = unpack(packed, _BITS).reshape(len(packed), -1, _FIELDS)[..., _PLACE]
    return np.ascontiguousarray(fields.reshape(len(packed), -1).T)


def _pack(fields: np.ndarray) -> np.ndarray:
    """Undo ``_unpack``."""
    fields = fields.T.reshape(fields.shape[1], -1, _FIELDS)[..., _ORDER]
    return pack(fields.reshape(len(fields), -1), _BITS)


def common_group_size(weights: Iterable[QTensor]) -> int:
    """Return the one group size of a file: -1 if every group is a row, otherwise the finest.

    The scales of coarser groups are repeated for it.
    """
    weights = list(weights)
    if all(file_group_size(w) == -1 for w in weights):
        return -1
    return math.gcd(*(w.group_size for w in weights))


def to_tensors(w: QTensor, group_size: int) -> dict[str, np.ndarray]:
    """Return the tensors of one Linear in groups of ``group_size`` (-1: rows)."""
    if group_size != -1:
        w = repeat_groups(w, group_size)
    zero = np.zeros_like(w.scale, np.int8) if w.zero is None else w.zero
    return {
        "qweight": _pack(unsigned(w.q, _BITS)),
        "qzeros": _pack(unsigned(zero, _BITS)),
        "scales": np.ascontiguousarray(w.scale.astype(np.float16).T),
    }


def layout(w: QTensor, group_size: int) -> dict[str, tuple[tuple[int, int], np.dtype]]:
    """Return the shapes and dtypes of ``to_tensors``."""
    out, width = w.shape
    shapes = _layout(out, width, 1 if group_size == -1 else width // group_size)
    dtypes = {"qweight": np.int32, "qzeros": np.int32, "scales": np.float16}
    return {name: (shape, np.dtype(dtypes[name])) for name, shape in shapes.items()}


def to_config(group_size: int, floats: list[str]) -> JsonObject:
    """Return the ``quantization_config``; ``floats`` are the Linears that are not quantized."""
    return {
        "quant_method": "awq",
        "bits": _BITS,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": floats or None,
    }
