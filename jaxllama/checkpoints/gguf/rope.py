"""RoPE's keys of config.json from a GGUF file's metadata and its tensors of factors.

``rope_keys(file, name, kind, sizes)`` is the whole interface. Source: llama.cpp's conversion rules.
"""

from __future__ import annotations

import math

import numpy as np

from jaxllama.checkpoints.gguf.architectures import ARCHITECTURES
from jaxllama.checkpoints.gguf.file import GGUFFile, GGUFTensor
from jaxllama.checkpoints.gguf.types import TensorType
from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.typing import JsonObject

# The constants of the rope factors in circulation (Llama 3.1 and 3.2).
_LLAMA3 = {
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def rope_keys(file: GGUFFile, name: str, kind: str, sizes: JsonObject) -> JsonObject:
    """Return the keys of RoPE, with a table for each kind of layer if the family has two."""
    head_dim, family = sizes["head_dim"], FAMILIES[kind]
    theta = file.number(f"{name}.rope.freq_base", 10000.0)
    turning = file.integer(f"{name}.rope.dimension_count", head_dim)
    result: JsonObject = {"rope_theta": theta}
    if "partial_rotary_factor" in family.defaults:
        result["partial_rotary_factor"] = turning / head_dim if head_dim else 1.0
    elif turning != head_dim:
        raise file.error(
            f"{name}.rope.dimension_count", f"{turning} differs from the head's {head_dim}"
        )
    scaling = _scaling(file, name, theta, turning, sizes["max_position_embeddings"])
    if "original_max_position_embeddings" in scaling:
        original = scaling["original_max_position_embeddings"]
        result["original_max_position_embeddings"] = original
    key = f"{name}.rope.freq_base_swa"
    local = file.number(key, ARCHITECTURES[name].local_theta or theta)
    if not family.is_local:
        if key in file and local != theta:
            raise file.error(key, f"{local} differs from {name}.rope.freq_base ({theta})")
        return result | ({"rope_scaling": scaling} if scaling else {})
    return result | {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **scaling, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    }


def _scaling(file: GGUFFile, name: str, theta: float, turning: int, context: int) -> JsonObject:
    prefix = f"{name}.rope.scaling"
    factor = file.number(f"{prefix}.factor", 1.0)
    kind = file.string(f"{prefix}.type", "none" if factor == 1.0 else "linear")
    if kind == "none" and file.number(f"{name}.rope.scale_linear", 1.0) != 1.0:
        kind, factor = "linear", file.number(f"{name}.rope.scale_linear")
    trained = file.integer(f"{prefix}.original_context_length", context)
    tables = [f"rope_factors_{which}.weight" for which in ("long", "short")]
    if any(table in file.tensors for table in tables):
        if kind not in ("none", "longrope") or "rope_freqs.weight" in file.tensors:
            raise file.error(f"tensor {tables[0]!r}", f"beside {kind!r} scaling or rope_freqs")
        long, short = (_factors(file, table, turning).tolist() for table in tables)
        found: JsonObject = {
            "rope_type": "longrope",
            "original_max_position_embeddings": trained,
            "long_factor": long,
            "short_factor": short,
        }
        key = f"{prefix}.attn_factor"
        names = FAMILIES[ARCHITECTURES[name].family].amplitude
        return found | (dict.fromkeys(names, file.number(key)) if key in file else {})
    for key, neutral in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0)):
        key = f"{prefix}.{key}"
        usual = 0.1 * math.log(max(factor, 1.0)) + 1.0  # yarn's own rule gives this value
        value = file.number(key, neutral)
        if value != neutral and not (kind == "yarn" and math.isclose(value, usual, rel_tol=1e-5)):
            raise file.error(key, f"{value} is not supported (only {neutral})")
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise file.error(f"{prefix}.type", f"{kind!r} beside rope_freqs.weight")
        return _llama3_rope(file, _factors(file, "rope_freqs.weight", turning), theta)
    if kind == "none":
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        why = "without its tensors of factors" if kind == "longrope" else "is not none, linear"
        raise file.error(f"{prefix}.type", f"{kind!r} {why} or yarn")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
        "beta_fast": file.number(f"{prefix}.yarn_beta_fast", 32.0),
        "beta_slow": file.number(f"{prefix}.yarn_beta_slow", 1.0),
    }


def _factors(file: GGUFFile, name: str, turning: int) -> np.ndarray:
    """Return a tensor with the divisor of each frequency, float64 ``[turning / 2]``."""
    info: GGUFTensor | None = file.tensors.get(name)
    if info is None:
        raise file.error(f"tensor {name!r}", "is missing")
    if info.shape != (turning // 2,) or info.type != TensorType.F32:
        raise file.error(
            f"tensor {name!r}", f"{info.type.name} {info.shape}; expected F32 ({turning // 2},)"
        )
    found = file.rows(info).view("<f4")[0]
    # the shortest decimals that round to these values
    return np.array([str(x) for x in found], np.float64)


def _llama3_rope(file: GGUFFile, divisors: np.ndarray, theta: float) -> JsonObject:
    """Find the llama3 rule that gives ``rope_freqs.weight``, which holds each frequency's divisor.

    The file does not have the rule's constants. Those of Llama 3.1 and 3.2 are tried with the
    factor that the slowest frequency implies, and must reproduce the tensor.
    """
    if (divisors == 1.0).all():
        return {}
    with np.errstate(all="ignore"):  # invalid values become NaN and fail the comparison
        inv_freq = np.float64(theta) ** (-np.arange(len(divisors)) / len(divisors))
        turns = _LLAMA3["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        # 1 / divisor = keep + (1 - keep) / factor, solved for the slowest frequency.
        factor = float(np.round((1.0 - keep[-1]) / (1.0 / divisors[-1] - keep[-1]), 3))
        expected = 1.0 / (keep + (1.0 - keep) / np.float64(factor))
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise file.error(
            "tensor 'rope_freqs.weight'",
            "is not Llama 3.1's rule (original context 8192, factors 1 and 4): not supported",
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
