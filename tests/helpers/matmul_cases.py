"""Operands of quantized products and what the products have to be, in float64.

numpy makes and reads all of it: an eager jax op compiles a program for every shape.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.qtensor import QTensor
from pallas_kernels.rounding import E4M3, E8M0
from tests.helpers.arrays import as_jax

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
newest = pytest.mark.skipif(VERSION < (0, 11, 2), reason="Mosaic kernels need jax >= 0.11.2")
EPS = 1e-5

# Relative RMS and max |error| / RMS(out).  16-bit outputs: their own rounding, and that of the
# weights where a scale is folded into them.
BOUNDS = {"float32": (2e-6, 2e-5), "bfloat16": (4e-3, 4e-2), "float16": (1e-3, 1e-2)}

WEIGHTS = {  # words, group, zeros
    "w4-row": ("int4", None, None),
    "w4-g32": ("int4", 32, None),
    "w4-g64-zero": ("int4", 64, "int"),
    "w4-g128": ("int4", 128, None),
    "w4-g128-zero": ("int4", 128, "int"),
    "w4-g256": ("int4", 256, None),
    "w4-g32-minimum": ("int4", 32, "float"),
    "w4-g128-minimum": ("int4", 128, "float"),
    "w8-row": ("int8", None, None),
    "w8-g128": ("int8", 128, None),
    "w8-g32": ("int8", 32, None),
    "w8-g64-zero": ("int8", 64, "int"),
    "fp8-row": ("float8_e4m3fn", None, None),
    "fp8-g32": ("float8_e4m3fn", 32, None),
    "fp8-block": ("float8_e4m3fn", 128, None),
    "mxfp4": ("float4_e2m1fn", 32, None),
    "nvfp4": ("float4_e2m1fn", 16, None),
}


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def activations(shape, dtype, seed=1) -> jax.Array:
    return as_jax(np.random.default_rng(seed).standard_normal(shape), dtype)


def codes(shape, dtype, seed=0) -> jax.Array:
    """Over the whole range of integers; float8 within its own."""
    rng = np.random.default_rng(seed)
    if dtype == "float4_e2m1fn":
        return jnp.asarray(rng.integers(0, 16, shape).astype(np.uint8).view(jnp.dtype(dtype)))
    if dtype == "float8_e4m3fn":
        return as_jax(np.clip(120 * rng.standard_normal(shape), -448, 448), dtype)
    end = 8 if dtype == "int4" else 128
    return as_jax(rng.integers(-end, end, shape), dtype)


def weights(name, n, k, scale_dtype, seed=0) -> QTensor:
    """A weight of about 0.02 in one of the schemes, or of plain floats."""
    rng = np.random.default_rng(seed + 100)
    dtype, group, zeros = WEIGHTS[name]
    groups = n, k // (group or k)
    if name == "mxfp4":
        bits = rng.integers(117, 123, groups).astype(np.uint8)
        return QTensor(codes((n, k), dtype, seed), jnp.asarray(bits.view(jnp.dtype(E8M0))))
    if name == "nvfp4":
        bits = rng.integers(1, 127, groups).astype(np.uint8)  # subnormal ones too
        unit = jnp.asarray(rng.uniform(0.03, 0.09, (n, 1)) / (6 * 448), jnp.float32)
        scale = jnp.asarray(bits.view(jnp.dtype(E4M3)))
        return QTensor(codes((n, k), dtype, seed), scale, unit=unit)
    largest = {"int4": 7, "int8": 127}.get(dtype, 448)
    scale = as_jax(rng.uniform(0.03, 0.09, groups) / largest, scale_dtype)
    zero = None
    if zeros == "int":
        zero = as_jax(rng.integers(-8, 8, groups), jnp.int8)
    elif zeros == "float":
        zero = as_jax(rng.standard_normal(groups) * 0.01, scale_dtype)
    return QTensor(codes((n, k), dtype, seed), scale, zero)


def weight(name, n, k, dtype, seed=0) -> Any:
    if name == "plain":
        return as_jax(0.02 * np.random.default_rng(seed).standard_normal((n, k)), dtype)
    return weights(name, n, k, dtype, seed)


def exact(t: Any) -> np.ndarray:
    """The floats that an operand stands for."""
    if not isinstance(t, QTensor):
        return wide(t)
    scale = wide(t.scale) if t.unit is None else wide(t.scale) * wide(t.unit)
    q, scale = wide(t.q), np.repeat(scale, t.group_size, axis=-1)
    if t.zero is None:
        return q * scale
    zero = np.repeat(wide(t.zero), t.group_size, axis=-1)
    return (q - zero) * scale if jnp.issubdtype(t.zero.dtype, jnp.integer) else q * scale + zero


def product(x, w, bias=None) -> np.ndarray:
    out = exact(x) @ exact(w).T
    return out if bias is None else out + wide(bias)


def fused_product(x, w, bias=None, norm=None, residual=None, swiglu=False, activation="silu"):
    """The fused product on the same words: x * gamma is rounded once to x's type (the kernel's
    docstring), which alone is a bound's worth where one value is all of a row."""
    values = exact(x)
    if norm is not None:
        scaled = wide((values * wide(norm[0])).astype(np.float32).astype(x.dtype))
        values = scaled / np.sqrt(np.mean(values**2, -1, keepdims=True) + norm[1])
    out = values @ exact(w).T
    if bias is not None:
        out = out + wide(bias)
    if swiglu:
        gate, up = np.split(out, 2, axis=-1)
        if activation == "gelu_tanh":
            u = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            out = gate * (1 + np.tanh(u)) / 2 * up
        else:
            out = gate / (1 + np.exp(-np.clip(gate, -700, None))) * up
    return out if residual is None else out + wide(residual)


def extras(m, n, k, dtype, kinds, gamma_dtype=jnp.bfloat16) -> dict[str, Any]:
    """norm, residual, swiglu and its like with GELU as ``kinds`` (letters n, r, s, g) asks."""
    given: dict[str, Any] = {}
    if "n" in kinds:
        gamma = 1 + 0.2 * np.random.default_rng(4).standard_normal(k)
        given["norm"] = as_jax(gamma, gamma_dtype), EPS
    if "r" in kinds:
        given["residual"] = activations((m, n), dtype, 5)
    if {*"sg"} & {*kinds}:
        given["swiglu"] = True
    if "g" in kinds:
        given["activation"] = "gelu_tanh"
    return given


def hostile(x):
    """A row of zeros and a row with one huge value."""
    return x.at[-1].set(0).at[0, 7].set(1e4) if len(x) > 1 else x


def check(out, ref, dtype) -> None:
    rms, largest = BOUNDS[jnp.dtype(dtype).name]
    out = wide(out)
    size = np.sqrt(np.mean(ref**2))
    assert np.sqrt(np.mean((out - ref) ** 2)) <= rms * size
    # A gate's outputs have long tails: beside the bound an output may be off by its own rounding.
    half_ulp = np.where(ref == 0, 0, float(jnp.finfo(dtype).eps) * np.exp2(np.frexp(ref)[1] - 2))
    assert (np.abs(out - ref) - half_ulp).max() <= largest * size


def error(got, want) -> float:
    """Relative RMS."""
    got = wide(got)
    assert np.isfinite(got).all()
    return float(np.sqrt(np.sum((got - want) ** 2) / np.sum(want**2)))


def shaped(shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
