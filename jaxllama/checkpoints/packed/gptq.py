"""GPTQ checkpoints (AutoGPTQ, GPTQModel) <-> QTensors.

    qweight  int32 [in * bits / 32, out]     consecutive inputs of one output packed together
    qzeros   int32 [groups, out * bits / 32]     consecutive outputs
    scales   float [groups, out]             w = (word - zero) * scale
    g_idx    int32 [in]                      the group of each input; absent: i // group_size

The first checkpoint format ("gptq") stores ``zero - 1``, "gptq_v2" stores the zero. A zero of 0
does not fit the first format. GPTQModel then borrows from the field above, and adding 1 to every
field of the int32 at once undoes that. Older programs read such a zero as 16. So both formats are
read, and the second is written for such weights. With ``desc_act`` the groups of g_idx are not
consecutive; see ``codes.by_group``. ``dynamic`` is GPTQModel's: patterns of module names with other
bits or group sizes.

Sources: AutoGPTQ's and GPTQModel's QuantLinear; GPTQ is arXiv 2210.17323. Left out: 2 and 3 bits,
Marlin and BitBLAS layouts, rotations, adapters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.checkpoints.packed.awq import file_group_size, read_group_size
from jaxllama.checkpoints.packed.codes import (
    by_group,
    check_scale,
    consecutive,
    n_groups,
    pack,
    packed_size,
    signed,
    unpack,
    unsigned,
)
from jaxllama.checkpoints.packed.module import FLOATS, Module, PackedPart, Reader
from jaxllama.typing import JsonMapping, JsonObject

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor

_ONES = {4: 0x11111111, 8: 0x01010101}
# Options that change the meaning of the tensors, with the supported values.
_FIXED: dict[str, tuple[object, ...]] = {
    "is_marlin_format": (False,),
    "pack_dtype": ("int32",),
    "rotation": ("",),
    "adapter": ({},),
}


def reader(config: JsonObject) -> Reader:
    """Return the reader of a ``quantization_config`` of method "gptq".

    Raises JaxLlamaError naming an option that is not supported.
    """
    read = JsonReader(config, "quantization_config.")
    for key, allowed in _FIXED.items():
        if config.get(key) is not None and config[key] not in allowed:
            raise read.error(key, f"only {allowed[0]!r} is supported")
    key = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
    kind = read.text(key, "gptq").lower()
    if kind not in ("gptq", "gptq_v2"):
        raise read.error(key, "not supported; supported: 'gptq', 'gptq_v2'")
    default = (_bits(read), read_group_size(read, "group_size"))
    rules = _rules(read)

    def part(module: Module) -> PackedPart | None:
        if not module.has("qweight") and module.has("weight"):
            return None
        bits, group_size = default
        for pattern, override in rules:
            if any(map(pattern.match, module.names)):
                override_reader = JsonReader(
                    override, f"quantization_config.dynamic[{module.name!r}]."
                )
                bits = _bits(override_reader) if "bits" in override else bits
                if "group_size" in override:
                    group_size = read_group_size(override_reader, "group_size")
                break
        out, width = module.shape
        layout = _layout(out, width, n_groups(width, group_size), bits)
        module.expect("qweight", ("I32",), layout["qweight"])
        module.expect("qzeros", ("I32",), layout["qzeros"])
        module.expect("scales", FLOATS, layout["scales"])
        if module.has("g_idx"):
            module.expect("g_idx", ("I32", "I64"), layout["g_idx"])
        v2 = kind == "gptq_v2"
        return module.part(lambda: _read(module, bits, group_size, v2), *layout)

    return part


def _bits(read: JsonReader) -> int:
    bits = read.natural("bits")
    if bits not in (4, 8):
        raise read.error("bits", "not supported; supported: 4, 8")
    return bits


def _rules(read: JsonReader) -> list[tuple[re.Pattern[str], JsonMapping]]:
    """Return (pattern of module names, overrides); the first match decides.

    A "-:" pattern marks a module in floats, which its tensors show too.
    """
    dynamic = read.get("dynamic", {})
    if not isinstance(dynamic, Mapping):
        raise read.error("dynamic", "expected an object of pattern to overrides")
    rules = []
    for pattern, override in dynamic.items():
        if not isinstance(override, Mapping):
            raise read.error("dynamic", "expected an object of pattern to overrides")
        try:
            compiled = re.compile(pattern.removeprefix("+:").removeprefix("-:"))
        except (re.error, RecursionError, OverflowError):
            raise read.error("dynamic", f"{pattern[:80]!r} is no regular expression") from None
        rules.append((compiled, override))
    return rules


def _layout(out: int, width: int, groups: int, bits: int) -> dict[str, tuple[int, ...]]:
    return {
        "qweight": (packed_size(width, bits), out),
        "qzeros": (groups, packed_size(out, bits)),
        "scales": (groups, out),
        "g_idx": (width,),
    }


def _read(module: Module, bits: int, group_size: int | None, v2: bool) -> QTensor:
    out, width = module.shape
    groups = consecutive(width, group_size)
    if module.has("g_idx"):
        groups = module.expect_groups("g_idx", n_groups(width, group_size))
    words = signed(unpack(module.read("qweight").T, bits)[:, :width], bits)
    zeros = module.read("qzeros").view(np.uint32)
    zeros = zeros if v2 else zeros + np.uint32(_ONES[bits])
    zero = signed(unpack(zeros.view(np.int32), bits)[:, :out].T, bits).astype(np.int8)
    scale = np.ascontiguousarray(module.read("scales").T)
    w = by_group(words, scale, zero, groups)
    check_scale(w, module.name)
    return w


def bits_of(w: QTensor) -> int:
    return 4 if w.q.dtype != np.int8 else 8


def needs_v2(w: QTensor) -> bool:
    """Return whether a zero point is 0, which the first format cannot store."""
    return w.zero is not None and int(np.min(w.zero)) == -(1 << bits_of(w) - 1)


def obstacle(w: QTensor) -> str | None:
    """Return why these tensors cannot hold ``w``, apart from its dtypes, or None."""
    fields = 32 // bits_of(w)
    if w.shape[0] % fields or w.shape[1] % fields:
        return f"shape {list(w.shape)}: GPTQ packs {fields} inputs or outputs together"
    return None


def to_tensors(w: QTensor, v2: bool) -> dict[str, np.ndarray]:
    """Return the tensors of one Linear; ``w`` must have no ``obstacle``."""
    bits = bits_of(w)
    groups = consecutive(w.shape[1], w.group_size)
    words = unsigned(w.q, bits)
    if w.columns is not None:
        order = np.argsort(w.columns)
        words, groups = words[:, order], groups[order]
    zero = np.zeros(w.scale.shape, np.int8) if w.zero is None else w.zero
    zeros = pack(np.ascontiguousarray(unsigned(zero, bits).T), bits).view(np.uint32)
    zeros = zeros if v2 else zeros - np.uint32(_ONES[bits])
    return {
        "qweight": np.ascontiguousarray(pack(words, bits).T),
        "qzeros": zeros.view(np.int32),
        "scales": np.ascontiguousarray(w.scale.astype(np.float16).T),
        "g_idx": groups,
    }


def layout(w: QTensor) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return the shapes and dtypes of ``to_tensors``."""
    out, width = w.shape
    shapes = _layout(out, width, w.scale.shape[1], bits_of(w))
    dtypes = {"scales": np.float16}
    return {name: (shape, np.dtype(dtypes.get(name, np.int32))) for name, shape in shapes.items()}


def to_config(weights: Mapping[str, QTensor], floats: list[str], v2: bool) -> JsonObject:
    """Return the ``quantization_config`` of Linears by name; ``floats`` are those not quantized."""
    schemes = {name: (bits_of(w), file_group_size(w)) for name, w in weights.items()}
    kinds = list(schemes.values())
    bits, group_size = max(set(kinds), key=lambda kind: (kinds.count(kind), kind))
    dynamic: dict[str, dict[str, int]] = {f"-:^{re.escape(name)}$": {} for name in floats}
    for name, scheme in schemes.items():
        if scheme != (bits, group_size):
            dynamic[f"+:^{re.escape(name)}$"] = {"bits": scheme[0], "group_size": scheme[1]}
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": any(w.columns is not None for w in weights.values()),
        "sym": all(w.zero is None for w in weights.values()),
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
        "lm_head": "lm_head" in weights,
        "pack_dtype": "int32",
        "dynamic": dynamic or None,
    }
