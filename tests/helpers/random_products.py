"""Random calls of a product, at the sizes of published models and at odd ones."""

from __future__ import annotations

import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.shapes import MODELS
from pallas_kernels.matmul.call import LowRank, MatmulCall
from pallas_kernels.qtensor import QTensor
from tests.helpers.arrays import as_jax
from tests.helpers.matmul_cases import codes, fused_product, product, wide

S = jax.ShapeDtypeStruct
BF16, F16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
INT8, INT4 = jnp.dtype(jnp.int8), jnp.dtype(jnp.int4)
E4M3, E8M0 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e8m0fnu)
FLOAT4 = jnp.dtype(jnp.float4_e2m1fn)
# Around the limits of the kernels' tiles.
ROWS = (1, 1, 1, 2, 3, 4, 5, 8, 9, 13, 16, 17, 31, 32, 33, 48, 64, 65, 96, 128, 129, 192, 200, 208)
ROWS += 209, 256, 257, 384, 416, 512, 1000, 1024, 2048, 2049, 4096, 6000, 8191, 8192


def draw_shape(draw: random.Random, *, even: bool = False) -> tuple[int, int]:
    """Return N and K of a model's weight, or of one of ``parts`` devices, or any."""
    if draw.random() < 0.2:
        n = draw.choice((1, 2, 8, 16, 64, 128)) * draw.randint(1, 120)
        return n * (1 + even), draw.choice((16, 32, 64, 128, 256)) * draw.randint(1, 72)
    width, inner, heads, kv_heads, head_dim, vocabulary = draw.choice(list(MODELS.values()))
    n, k = draw.choice(
        (
            ((heads + 2 * kv_heads) * head_dim, width),
            (width, heads * head_dim),
            (2 * inner, width),
            (width, inner),
            (vocabulary, width),
        )
    )
    parts = draw.choice((1, 1, 1, 2, 4, 8))
    if k == inner or draw.random() < 0.3:
        return n, k // parts if k % (16 * parts) == 0 else k
    return n // parts if n % (2 * parts) == 0 else n, k


def draw_codes(draw: random.Random, n: int, k: int, dtype: jnp.dtype) -> Any:
    """Return a weight beside floats of x."""
    scale = draw.choice((dtype, dtype, F32))
    kind = draw.choice(("plain", "int4", "int4", "int4", "int8", "float8", "mxfp4", "nvfp4"))
    if kind == "plain":
        return S((n, k), dtype)
    if kind == "mxfp4" and k % 32 == 0:
        return QTensor(S((n, k), FLOAT4), S((n, k // 32), E8M0))
    if kind == "nvfp4" and k % 16 == 0:
        return QTensor(S((n, k), FLOAT4), S((n, k // 16), E4M3), unit=S((n, 1), F32))
    group = draw.choice([size for size in (32, 64, 128, 256, k) if k % size == 0])
    groups = n, k // group
    zero = draw.choice((None, None, S(groups, INT8), S(groups, scale)))
    if kind == "int4":
        return QTensor(S((n, k), INT4), S(groups, scale), zero)
    return QTensor(S((n, k), INT8 if kind == "int8" else E4M3), S(groups, scale))


def draw_product(draw: random.Random) -> MatmulCall:
    """Return a call of floats or of codes of x."""
    m = draw.choice(ROWS) if draw.random() < 0.8 else round(2 ** draw.uniform(0, 13))
    return _of_codes(draw, m) if draw.random() < 0.3 else _of_floats(draw, m)


def _of_floats(draw: random.Random, m: int) -> MatmulCall:
    swiglu = draw.random() < 0.25
    n, k = draw_shape(draw, even=swiglu)
    swiglu = swiglu and n % 2 == 0
    dtype = draw.choice((BF16, BF16, BF16, F16, F32))
    w = draw_codes(draw, n, k, dtype)
    around: dict[str, Any] = {"bias": draw.random() < 0.3, "swiglu": swiglu}
    if draw.random() < 0.4:
        around |= {"norm": draw.choice((dtype, F32)), "eps": 1e-6}
        around["pending"] = draw.choice((None, F32, dtype))
    out = draw.choice((dtype, dtype, F32))
    if draw.random() < 0.3:
        around["residual"] = out
    return MatmulCall(m, dtype, w, out, **around)


def _of_codes(draw: random.Random, m: int) -> MatmulCall:
    n, k = draw_shape(draw)
    x = draw.choice((INT8, E4M3))
    out, around = draw.choice((BF16, BF16, F16, F32)), {"bias": draw.random() < 0.3}
    if draw.random() < 0.5:
        blocks = x == E4M3 and k % 128 == 0 and draw.random() < 0.5
        w = QTensor(S((n, k), x), S((n, k // 128 if blocks else 1), F32))
        if blocks and n % 128 == 0 and draw.random() < 0.5:
            w = QTensor(w.q, w.scale, blocked="bfloat16")
        elif not blocks and n % 32 == 0 and draw.random() < 0.3:
            around["low_rank"] = LowRank(BF16, draw.choice((5, 16, 64)), (n,))
        return MatmulCall(m, x, w, out, True, **around)
    group = draw.choice([size for size in (32, 64, 128, 256, k) if k % size == 0])
    groups = n, k // group
    zero = draw.choice((None, S(groups, INT8)))
    levels = x == INT8 and draw.random() < 0.5
    scale, unit = (INT8, S((n, 1), F32)) if levels else (draw.choice((BF16, F32)), None)
    w = QTensor(S((n, k), INT4), S(groups, scale), zero, unit=unit)
    assert math.prod(w.shape) > 0
    return MatmulCall(m, x, w, out, True, **around)


# --- operands -------------------------------------------------------------------------------------


def shapes_of(call: MatmulCall) -> tuple[Any, Any, dict[str, Any]]:
    """Return the shapes of x, w and of what stands around the product."""
    m, n, k = call.m, call.n, call.k
    x: Any = S((m, k), call.x)
    if call.quantized_x:
        groups = call.w.scale.shape[1] if call.x == call.w.dtype else 1
        x = QTensor(x, S((m, groups), F32))
    columns = n // 2 if call.swiglu else n
    around = {"bias": S((n,), BF16)} if call.bias else {}
    for name, dtype, shape in (
        ("gamma", call.norm, (k,)),
        ("residual", call.residual, (m, columns)),
        ("pending", call.pending, (m, k)),
    ):
        if dtype is not None:
            around[name] = S(shape, dtype)
    if (low := call.low_rank) is not None:
        second = tuple(S((rows, low.ranks), low.dtype) for rows in low.sources)
        around["low_rank"] = S((m, low.ranks * len(second)), low.dtype), second
    return x, call.w, around


def quantized_weight(rng: np.random.Generator, t: QTensor, size: float) -> QTensor:
    """Return values like t's shapes, of about ``size``; zeros are of about the codes' size."""
    q = codes(t.q.shape, t.dtype.name, int(rng.integers(1 << 30)))
    peak = {"int4": 8, "int8": 128, "float4_e2m1fn": 6}.get(t.dtype.name, 448)
    zero = t.zero
    if zero is not None:
        is_code = jnp.issubdtype(zero.dtype, jnp.integer)
        drawn = rng.integers(-8, 8, zero.shape) if is_code else 0.1 * rng.normal(size=zero.shape)
        zero = as_jax(drawn, zero.dtype)
    if t.scale.dtype in (E8M0, E4M3):
        low, high = (120, 126) if t.scale.dtype == E8M0 else (1, 127)
        bits = rng.integers(low, high, t.scale.shape).astype(np.uint8)
        scale: Any = jnp.asarray(bits.view(t.scale.dtype))
    elif t.unit is not None:
        scale = as_jax(rng.integers(1, 9, t.scale.shape), INT8)
    else:
        scale = as_jax(rng.uniform(size / 2, size, t.scale.shape) / peak, t.scale.dtype)
    if t.blocked is not None:
        scale = as_jax(np.repeat(wide(scale)[::128], 128, axis=0)[: len(scale)], scale.dtype)
    unit = None if t.unit is None else as_jax(rng.uniform(1e-4, 3e-4, t.unit.shape), F32)
    return QTensor(q, scale, zero, unit=unit, blocked=t.blocked)


def values_of(call: MatmulCall, seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """Return operands of a call: a product of about 1, and zeros of about the codes' size."""
    rng = np.random.default_rng(seed)
    x, w, around = shapes_of(call)

    def filled(shape: S, size: float = 1.0) -> jax.Array:
        return as_jax(size * rng.standard_normal(shape.shape), shape.dtype)

    x = quantized_weight(rng, x, 1.0) if isinstance(x, QTensor) else filled(x)
    w = quantized_weight(rng, w, 0.05) if isinstance(w, QTensor) else filled(w, 0.02)
    return x, w, jax.tree.map(filled, around)


def columns_of(
    call: MatmulCall, x: Any, w: Any, around: dict[str, Any], count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers of some columns of the result, and their values in float64."""
    width = call.n // 2 if call.swiglu else call.n
    chosen = np.unique(np.random.default_rng(seed).integers(0, width, count))
    rows = np.concatenate([chosen, chosen + width]) if call.swiglu else chosen

    def some(v: Any) -> Any:
        return None if v is None else as_jax(np.asarray(v)[rows], v.dtype)

    if isinstance(w, QTensor):
        w = QTensor(some(w.q), some(w.scale), some(w.zero), unit=some(w.unit))
    else:
        w = some(w)
    if (pending := around.get("pending")) is not None:
        x = as_jax((wide(x) + wide(pending)).astype(np.float32), x.dtype)
    given = {}
    if "gamma" in around:
        given["norm"] = around["gamma"], call.eps
    bias = None if "bias" not in around else np.asarray(around["bias"])[rows]
    if isinstance(x, QTensor):
        out = product(x, w, bias)
        if "low_rank" in around:
            inner, (second, *_) = around["low_rank"]
            out = out + wide(inner) @ wide(second)[rows].T
        return chosen, out
    if "residual" in around:
        given["residual"] = np.asarray(around["residual"])[:, chosen]
    return chosen, fused_product(x, w, bias, swiglu=call.swiglu, **given)
