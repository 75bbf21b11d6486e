"""Random calls of the ops beside a product, at the sizes of published models and at odd ones."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from pallas_kernels.attention import op as attention
from pallas_kernels.attention import rope_attention, rope_cache
from pallas_kernels.dispatch import Plan, Reason
from pallas_kernels.experts import plan as experts_plan
from pallas_kernels.experts.best import best, best_plan
from pallas_kernels.experts.gate import ClampedGate
from pallas_kernels.experts.route import norm_and_route
from pallas_kernels.experts.route_plan import RouteStatic, route_plan
from pallas_kernels.gated_delta import kernel as delta_kernel
from pallas_kernels.gated_delta import step_kernel as delta_step_kernel
from pallas_kernels.gla import kernel as gla_kernel
from pallas_kernels.gla import step_kernel as gla_step_kernel
from pallas_kernels.qtensor import QTensor
from pallas_kernels.recurrence.op import Heads
from pallas_kernels.rows import plan as rows_plan
from pallas_kernels.shapes import MODELS
from pallas_kernels.ssd import kernel as ssd_kernel
from pallas_kernels.ssd.op import ssd
from tests.helpers.random_products import BF16, F16, F32, ROWS, draw_codes

S = jax.ShapeDtypeStruct
INT32 = jnp.dtype(jnp.int32)
# Width, an expert's inner width, experts, and how many of them a token has.
MIXTURES = (
    (2048, 768, 128, 8),
    (2880, 2880, 32, 4),
    (7168, 2048, 256, 8),
    (1536, 512, 40, 8),
    (4096, 14336, 8, 2),
    (2048, 1408, 60, 4),
    (2048, 512, 512, 10),
)
BATCHES = (1, 1, 2, 3, 4, 5, 8, 13, 16, 32, 64, 100, 256)
CAPACITIES = 16, 64, 100, 256, 512, 1000, 1152, 2048, 4097, 8192, 16384, 32768, 131072
LENGTHS = 1, 5, 64, 100, 128, 512, 1000, 2048, 8192, 16384


@dataclasses.dataclass(frozen=True)
class RandomCall:
    """A call of an op: ``find`` asks its planner, and ``function(*operands)`` takes the kernel."""

    op: str
    find: Callable[[], Plan | Reason]
    function: Callable[..., Any]
    operands: tuple[Any, ...]

    def __str__(self) -> str:
        leaves = jax.tree.leaves(self.operands)
        return f"{self.op} {' '.join(f'{x.dtype.name}{list(x.shape)}' for x in leaves)}"


def _kernel_of(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return functools.partial(function, **options, implementation="mosaic")


def _half(draw: random.Random) -> jnp.dtype:
    return draw.choice((BF16, BF16, BF16, F16))


def draw_grouped(draw: random.Random) -> RandomCall:
    width, inner, n_experts, k = draw.choice(MIXTURES)
    if draw.random() < 0.2:
        width, inner = 64 * draw.randint(2, 64), 32 * draw.randint(4, 64)
    gate = draw.choice((None, "silu", "silu", "gelu", ClampedGate()))
    rows, columns = (2 * inner, width) if gate is not None else (width, inner)
    one = draw_codes(draw, rows, columns, BF16)
    w = jax.tree.map(lambda x: S((n_experts, *x.shape), x.dtype), one)
    tokens = draw.choice((1, 1, 1, 2, 3, 8, 13, 31, 64, 200, 512, 1024, 4096))
    x = S((tokens, k, columns) if gate is None else (tokens, columns), BF16)
    given = {"weights": S((tokens, k), F32)} if draw.random() < 0.5 else {}
    if draw.random() < 0.3:
        given["bias"] = S((n_experts, rows), BF16)
    joined = k if given.get("weights") is not None and gate is None else 0
    find = functools.partial(experts_plan.plan, x, w, tokens * k, gate, joined=joined)

    def run(x: Any, w: Any, chosen: Any, given: Any) -> Any:
        return pk.grouped_matmul(x, w, chosen, gated=gate, implementation="mosaic", **given)

    return RandomCall("grouped_matmul", find, run, (x, w, S((tokens, k), INT32), given))


def draw_route(draw: random.Random) -> RandomCall:
    width, _, n, k = draw.choice(MIXTURES)
    if draw.random() < 0.3:
        width, n = 8 * draw.randint(8, 1000), draw.randint(k, 512)
    x, router = S((draw.choice((1, 1, 2, 3, 8)), width), BF16), S((n, width), BF16)
    normalize = draw.random() < 0.5
    find = functools.partial(route_plan, x, router, RouteStatic(k, normalize, 1.0, 1e-6))

    def run(x: Any, gamma: Any, router: Any) -> Any:
        how = {"k": k, "normalize": normalize, "implementation": "mosaic"}
        return norm_and_route(x, (gamma, 1e-6), router, None, **how)

    return RandomCall("norm_and_route", find, run, (x, S((width,), BF16), router))


def draw_best(draw: random.Random) -> RandomCall:
    n = draw.choice((8, 32, 60, 64, 128, 256, 512, draw.randint(1, 512)))
    k = draw.randint(1, min(n, 32))
    scores = S((draw.choice(ROWS), n), F32)
    find = functools.partial(best_plan, scores, k)
    return RandomCall("best", find, _kernel_of(best, k=k), (scores,))


def _cache(draw: random.Random, dtype: jnp.dtype, shape: tuple[int, ...]) -> Any:
    kind = draw.choice((None, None, "int8", "int4", "float8_e4m3fn"))
    floats = S(shape, dtype)
    if kind is None:
        return floats
    return jax.eval_shape(functools.partial(rope_cache.quantize_kv, dtype=kind), floats)


def _heads(draw: random.Random) -> tuple[int, int, int]:
    """Return query heads, kv heads and features of a head."""
    if draw.random() < 0.7:
        _, _, n, n_kv, h, _ = draw.choice([x for x in MODELS.values() if x[4] in (64, 128, 256)])
        return n, n_kv, h
    n_kv = draw.choice((1, 2, 3, 4, 5, 8, 16))
    return n_kv * draw.choice((1, 2, 3, 5, 7, 8, 9, 16, 24)), n_kv, draw.choice((64, 128, 256))


def draw_decode(draw: random.Random) -> RandomCall:
    (n, n_kv, h), dtype = _heads(draw), _half(draw)
    batch, capacity = draw.choice(BATCHES), draw.choice(CAPACITIES)
    shape = (batch,) if draw.random() < 0.6 else (batch, draw.choice((1, 2, 4, 5, 8)))
    table = None
    cache = batch, capacity
    if draw.random() < 0.4:
        page = draw.choice((16, 64, 128))
        cache, table = (2 * batch + 5, page), S((batch, max(1, capacity // page)), INT32)
    k = _cache(draw, dtype, (*cache, n_kv, h))
    q = S((*shape, n, h), dtype)
    given = {} if table is None else {"table": table}
    if draw.random() < 0.2:
        given["sinks"] = S((n,), F32)
    window = draw.choice((None, None, 100, 1024))

    def run(q: Any, k: Any, v: Any, lengths: Any, given: Any) -> Any:
        how = {"window": window, "implementation": "mosaic"}
        return pk.decode_attention(q, k, v, lengths, **how, **given)

    find = functools.partial(attention.plan, q, k, k, table)
    return RandomCall("decode_attention", find, run, (q, k, k, S(shape, INT32), given))


def draw_rope_attend(draw: random.Random) -> RandomCall:
    (n, n_kv, h), dtype = _heads(draw), _half(draw)
    batch, capacity = draw.choice((1, 2)), draw.choice(CAPACITIES)
    k, half = S((batch, capacity, n_kv, h), dtype), S((batch, h // 2), F32)
    qkv = S((batch, n + 2 * n_kv, h), dtype)
    find = functools.partial(rope_attention.plan, qkv, k)
    operands = qkv, half, half, k, k, S((batch,), INT32)
    return RandomCall("rope_and_attend", find, _kernel_of(pk.rope_and_attend), operands)


def draw_rope_write(draw: random.Random) -> RandomCall:
    (n, n_kv, h), dtype = _heads(draw), _half(draw)
    batch, half = draw.choice(BATCHES), h // 2
    k = _cache(draw, dtype, (batch, draw.choice(CAPACITIES), n_kv, h))
    qkv = S((batch, n + 2 * n_kv, h), dtype)
    find = functools.partial(rope_cache.plan, qkv, k)
    operands = qkv, S((batch, half), F32), S((batch, half), F32), k, k, S((batch,), INT32)
    return RandomCall("rope_and_write", find, _kernel_of(pk.rope_and_write), operands)


def _sequences(draw: random.Random, batch: int, state: tuple[int, ...]) -> dict[str, Any]:
    given = {}
    if draw.random() < 0.3:
        given["initial_state"] = S(state, F32)
    if draw.random() < 0.3:
        given["lengths"] = S((batch,), INT32)
    return given


WIDTHS = ((128, 128), (256, 512), (64, 64), (64, 128), (128, 256), (256, 256), (512, 512))


def draw_gla(draw: random.Random) -> RandomCall:
    batch, length = draw.choice(BATCHES[:9]), draw.choice(LENGTHS)
    heads, (dk, dv) = draw.choice((1, 3, 4, 8, 16, 32)), draw.choice(WIDTHS)
    q, v = S((batch, length, heads, dk), BF16), S((batch, length, heads, dv), BF16)
    given = _sequences(draw, batch, (batch, heads, dk, dv))

    def run(q: Any, k: Any, v: Any, g: Any, given: Any) -> Any:
        return pk.gla(q, k, v, g, implementation="mosaic", **given)

    find = functools.partial(gla_kernel.plan, Heads(q, q, v, S(q.shape, F32)))
    return RandomCall("gla", find, run, (q, q, v, S(q.shape, F32), given))


def draw_gla_step(draw: random.Random) -> RandomCall:
    batch, heads, (dk, dv) = draw.choice(BATCHES), draw.choice((1, 3, 4, 16)), draw.choice(WIDTHS)
    if draw.random() < 0.3:
        dv = 32 * draw.randint(1, 16)
    dtype = _half(draw)
    q, v = S((batch, heads, dk), dtype), S((batch, heads, dv), dtype)
    find = functools.partial(gla_step_kernel.plan, q, q, v)
    operands = q, q, v, S(q.shape, F32), S((batch, heads, dk, dv), F32)
    return RandomCall("gla_step", find, _kernel_of(pk.gla_step), operands)


def draw_delta(draw: random.Random) -> RandomCall:
    batch, length = draw.choice(BATCHES[:9]), draw.choice(LENGTHS)
    key_heads, heads = draw.choice(((16, 16), (4, 16), (16, 32), (2, 4), (1, 1), (3, 6)))
    dk, dv = draw.choice(WIDTHS)
    q, v = S((batch, length, key_heads, dk), BF16), S((batch, length, heads, dv), BF16)
    beta = S((batch, length, heads), F32)
    g = S((batch, length, heads, dk), F32) if draw.random() < 0.35 else beta
    given = _sequences(draw, batch, (batch, heads, dk, dv))
    norm = draw.random() < 0.4

    def run(q: Any, k: Any, v: Any, g: Any, beta: Any, given: Any) -> Any:
        how = {"normalize_qk": norm, "implementation": "mosaic"}
        return pk.gated_delta(q, k, v, g, beta, **how, **given)

    find = functools.partial(delta_kernel.plan, Heads(q, q, v, g, beta))
    return RandomCall("gated_delta", find, run, (q, q, v, g, beta, given))


def draw_delta_step(draw: random.Random) -> RandomCall:
    batch, (dk, dv), dtype = draw.choice(BATCHES), draw.choice(WIDTHS), _half(draw)
    key_heads, heads = draw.choice(((16, 16), (4, 16), (2, 4), (1, 1), (3, 6)))
    q, v = S((batch, key_heads, dk), dtype), S((batch, heads, dv), dtype)
    beta = S((batch, heads), F32)
    g = S((batch, heads, dk), F32) if draw.random() < 0.35 else beta
    find = functools.partial(delta_step_kernel.plan, q, q, v)
    operands = q, q, v, g, beta, S((batch, heads, dk, dv), F32)
    return RandomCall("gated_delta_step", find, _kernel_of(pk.gated_delta_step), operands)


def draw_ssd(draw: random.Random) -> RandomCall:
    batch, length = draw.choice(BATCHES[:9]), draw.choice(LENGTHS)
    groups, heads = draw.choice(((8, 64), (1, 48), (8, 8), (1, 1), (2, 80)))
    dk, dv = draw.choice(((128, 64), (64, 64), (256, 64), (128, 32), (128, 128), (64, 16)))
    q, v = S((batch, length, groups, dk), BF16), S((batch, length, heads, dv), BF16)
    given = _sequences(draw, batch, (batch, heads, dk, dv))

    def run(q: Any, k: Any, v: Any, g: Any, given: Any) -> Any:
        return ssd(q, k, v, g, implementation="mosaic", **given)

    find = functools.partial(ssd_kernel.plan, Heads(q, q, v, S((batch, length, heads), F32)))
    return RandomCall("ssd", find, run, (q, q, v, S((batch, length, heads), F32), given))


def _rows_of(draw: random.Random) -> tuple[int, int, jnp.dtype]:
    width, inner, *_ = draw.choice(list(MODELS.values()))
    return draw.choice(ROWS), draw.choice((width, inner, 8 * draw.randint(1, 4096))), _half(draw)


def _coded(draw: random.Random) -> tuple[str | None, dict[str, Any]]:
    codes = draw.choice((None, "int8", "float8_e4m3fn"))
    return codes, {"scale": S((), F32)} if codes and draw.random() < 0.3 else {}


def draw_norm(draw: random.Random) -> RandomCall:
    (m, width, dtype), (codes, given) = _rows_of(draw), _coded(draw)
    x, weight, has_scale = S((m, width), dtype), S((width,), draw.choice((dtype, F32))), bool(given)
    residual = x if draw.random() < 0.4 else None
    out = codes or dtype.name
    find = functools.partial(
        rows_plan.plan, "norm", x, out, weight, residual, 1e-5, given=has_scale
    )

    def run(x: Any, weight: Any, residual: Any, given: Any) -> Any:
        how = {"quantize": codes, "residual": residual, "implementation": "mosaic"}
        return pk.rms_norm(x, weight, 1e-5, **how, **given)

    return RandomCall("rms_norm", find, run, (x, weight, residual, given))


def draw_swiglu(draw: random.Random) -> RandomCall:
    (m, width, dtype), (codes, given) = _rows_of(draw), _coded(draw)
    codes = codes or "int8"
    x, has_scale = S((m, 2 * width), dtype), bool(given)
    find = functools.partial(rows_plan.plan, "gate", x, codes, given=has_scale)

    def run(x: Any, given: Any) -> Any:
        return pk.swiglu(x, quantize=codes, implementation="mosaic", **given)

    return RandomCall("swiglu", find, run, (x, given))


def draw_tokens(draw: random.Random) -> RandomCall:
    (m, width, dtype), (codes, given) = _rows_of(draw), _coded(draw)
    codes = codes or "int8"
    x, has_scale = S((m, width), dtype), bool(given)
    find = functools.partial(rows_plan.plan, "copy", x, codes, given=has_scale)

    def run(x: Any, given: Any) -> QTensor:
        return pk.quantize_tokens(x, dtype=codes, implementation="mosaic", **given)

    return RandomCall("quantize_tokens", find, run, (x, given))


DRAWERS: dict[str, Callable[[random.Random], RandomCall]] = {
    "grouped_matmul": draw_grouped,
    "norm_and_route": draw_route,
    "best": draw_best,
    "decode_attention": draw_decode,
    "rope_and_attend": draw_rope_attend,
    "rope_and_write": draw_rope_write,
    "gla": draw_gla,
    "gla_step": draw_gla_step,
    "gated_delta": draw_delta,
    "gated_delta_step": draw_delta_step,
    "ssd": draw_ssd,
    "rms_norm": draw_norm,
    "swiglu": draw_swiglu,
    "quantize_tokens": draw_tokens,
}
