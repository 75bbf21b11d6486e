"""Random calls of the ops beside a product, at the sizes of published models and at odd ones."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.shapes import MODELS
from pallas_kernels.experts.gate import ClampedGate
from tests.helpers import op_calls
from tests.helpers.op_calls import OpCall
from tests.helpers.random_products import BF16, F16, F32, ROWS, S, draw_codes

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
WIDTHS = ((128, 128), (256, 512), (64, 64), (64, 128), (128, 256), (256, 256), (512, 512))


def _half(draw: random.Random) -> jnp.dtype:
    return draw.choice((BF16, BF16, BF16, F16))


def draw_grouped(draw: random.Random) -> OpCall:
    width, inner, n_experts, k = draw.choice(MIXTURES)
    if draw.random() < 0.2:
        width, inner = 64 * draw.randint(2, 64), 32 * draw.randint(4, 64)
        n_experts = draw.choice((4, 8, n_experts))
        k = min(k, n_experts)
    gate = draw.choice((None, "silu", "silu", "gelu", ClampedGate()))
    rows, columns = (2 * inner, width) if gate is not None else (width, inner)
    one = draw_codes(draw, rows, columns, BF16)
    w = jax.tree.map(lambda x: S((n_experts, *x.shape), x.dtype), one)
    tokens = draw.choice((1, 1, 1, 2, 3, 8, 13, 31, 64, 200, 512, 1024, 4096))
    weights, bias = draw.random() < 0.5, draw.random() < 0.3
    return op_calls.grouped(tokens, k, w, gate, weights=weights, bias=bias)


def draw_mixture(draw: random.Random) -> OpCall:
    d, f, n_experts, k = draw.choice([size for size in MIXTURES if size[0] * size[1] < 1 << 23])
    weights = [
        jax.tree.map(lambda x: S((n_experts, *x.shape), x.dtype), draw_codes(draw, *shape, BF16))
        for shape in ((2 * f, d), (d, f))
    ]
    return op_calls.mixture(k, *weights)


def draw_gated(draw: random.Random) -> OpCall:
    width, inner, *_ = draw.choice(list(MODELS.values()))
    if draw.random() < 0.3:
        width, inner = 16 * draw.randint(8, 512), 128 * draw.randint(1, 64)
    return op_calls.gated_product(draw.choice(ROWS), 2 * inner, width)


def draw_route(draw: random.Random) -> OpCall:
    width, _, n, k = draw.choice(MIXTURES)
    if draw.random() < 0.3:
        width, n = 8 * draw.randint(8, 1000), draw.randint(k, 512)
    tokens = draw.choice((1, 1, 2, 3, 8))
    return op_calls.route(tokens, width, n, k, draw.random() < 0.5, draw.random() < 0.5)


def draw_best(draw: random.Random) -> OpCall:
    n = draw.choice((8, 32, 60, 64, 128, 256, 512, draw.randint(1, 512)))
    k = draw.randint(1, min(n, 32))
    return op_calls.largest(draw.choice(ROWS), n, k)


def _cache_kind(draw: random.Random, dtype: jnp.dtype) -> str:
    return draw.choice((dtype.name, dtype.name, "int8", "int4", "float8_e4m3fn"))


def _heads(draw: random.Random) -> tuple[int, int, int]:
    """Return query heads, kv heads and features of a head."""
    if draw.random() < 0.7:
        _, _, n, n_kv, h, _ = draw.choice([x for x in MODELS.values() if x[4] in (64, 128, 256)])
        return n, n_kv, h
    n_kv = draw.choice((1, 2, 3, 4, 5, 8, 16))
    return n_kv * draw.choice((1, 2, 3, 5, 7, 8, 9, 16, 24)), n_kv, draw.choice((64, 128, 256))


def draw_decode(draw: random.Random) -> OpCall:
    heads, dtype = _heads(draw), _half(draw)
    batch, capacity = draw.choice(BATCHES), draw.choice(CAPACITIES)
    return op_calls.decode(
        heads,
        batch,
        capacity,
        _cache_kind(draw, dtype),
        tokens=None if draw.random() < 0.6 else draw.choice((1, 2, 4, 5, 8)),
        page=draw.choice((16, 64, 128)) if draw.random() < 0.4 else None,
        window=draw.choice((None, None, 100, 1024)),
        sinks=draw.random() < 0.2,
        dtype=dtype,
    )


def draw_latents(draw: random.Random, chosen: bool = False) -> OpCall:
    page = draw.choice((0, 0, 8, 16, 32, 64, 128))
    capacity = max(page, 8) * int(2 ** draw.uniform(1, 9))
    if page and draw.random() < 0.1:  # a row of one page, which tiles need not divide
        page = capacity
    return op_calls.latents(
        draw.choice((1, 1, 2, 3, 5, 9, 40, 133)),
        draw.choice((1, 1, 2, 3, 5, 8, 16)),
        draw.choice((1, 5, 8, 16, 16, 20, 32, 40, 64, 100, 128)),
        capacity,
        page,
        draw.randint(1, capacity) if chosen else 0,
    )


def draw_latent_step(draw: random.Random) -> OpCall:
    n, still, d_v = draw.choice(((20, 192, 256), (16, 128, 128), (128, 128, 128), (64, 192, 256)))
    if draw.random() < 0.3:
        n, still, d_v = draw.randint(1, 140), 64 * draw.randint(1, 4), 64 * draw.randint(1, 4)
    page = draw.choice((0, 16, 32, 64))
    capacity = 64 * draw.choice((2, 3, 8, 32, 128))
    return op_calls.latent_step(draw.choice((1, 1, 2, 3, 8)), n, still, d_v, capacity, page)


def draw_latent_codes(draw: random.Random) -> OpCall:
    """Few query rows over latents in 8 bits."""
    page = draw.choice((0, 0, 8, 16, 32, 64, 128))
    tokens, heads = draw.choice(((1, 20), (1, 16), (1, 5), (1, 24), (2, 8), (3, 8), (3, 1)))
    return op_calls.latents(
        draw.choice((1, 1, 2, 3, 5, 9, 40, 133)),
        tokens,
        heads,
        max(page, 8) * int(2 ** draw.uniform(1, 9)),
        page,
        kind=draw.choice(("int8", "float8_e4m3fn")),
    )


def draw_latent_prompt(draw: random.Random) -> OpCall:
    tokens, heads = int(2 ** draw.uniform(0, 12)) | 1, draw.choice((16, 20, 32, 40, 64, 128))
    return op_calls.latent_prompt(draw.choice((1, 1, 2, 3)), tokens, heads)


def draw_rope_attend(draw: random.Random) -> OpCall:
    heads, dtype = _heads(draw), _half(draw)
    batch, capacity = draw.choice((1, 2)), draw.choice(CAPACITIES)
    return op_calls.rope_attend(heads, batch, capacity, dtype.name, dtype)


def draw_rope_write(draw: random.Random) -> OpCall:
    heads, dtype = _heads(draw), _half(draw)
    batch, kind = draw.choice(BATCHES), _cache_kind(draw, dtype)
    return op_calls.rope_write(heads, batch, draw.choice(CAPACITIES), kind, dtype)


def _sequences(
    draw: random.Random, op: str, heads: tuple[int, int], widths: tuple[int, int], **how: Any
) -> OpCall:
    batch, length = draw.choice(BATCHES[:9]), draw.choice(LENGTHS)
    initial, ends = draw.random() < 0.3, draw.random() < 0.3
    return op_calls.sequences(op, batch, length, heads, widths, initial=initial, ends=ends, **how)


def draw_gla(draw: random.Random) -> OpCall:
    heads = draw.choice((1, 3, 4, 8, 16, 32))
    return _sequences(draw, "gla", (heads, heads), draw.choice(WIDTHS))


def draw_gla_step(draw: random.Random) -> OpCall:
    batch, heads, (dk, dv) = draw.choice(BATCHES), draw.choice((1, 3, 4, 16)), draw.choice(WIDTHS)
    if draw.random() < 0.3:
        dv = 32 * draw.randint(1, 16)
    return op_calls.step("gla_step", batch, (heads, heads), (dk, dv), dtype=_half(draw))


def draw_delta(draw: random.Random) -> OpCall:
    heads = draw.choice(((16, 16), (4, 16), (16, 32), (2, 4), (1, 1), (3, 6)))
    how = {"by_channel": draw.random() < 0.35, "normalize": draw.random() < 0.4}
    return _sequences(draw, "gated_delta", heads, draw.choice(WIDTHS), **how)


def draw_delta_step(draw: random.Random) -> OpCall:
    batch, widths, dtype = draw.choice(BATCHES), draw.choice(WIDTHS), _half(draw)
    heads = draw.choice(((16, 16), (4, 16), (2, 4), (1, 1), (3, 6)))
    by_channel = draw.random() < 0.35
    return op_calls.step(
        "gated_delta_step", batch, heads, widths, by_channel=by_channel, dtype=dtype
    )


def draw_ssd(draw: random.Random) -> OpCall:
    heads = draw.choice(((8, 64), (1, 48), (8, 8), (1, 1), (2, 80)))
    widths = draw.choice(((128, 64), (64, 64), (256, 64), (128, 32), (128, 128), (64, 16)))
    return _sequences(draw, "ssd", heads, widths, by_channel=False)


def _rowwise(draw: random.Random, op: str, **how: Any) -> OpCall:
    width, inner, *_ = draw.choice(list(MODELS.values()))
    rows, dtype = draw.choice(ROWS), _half(draw)
    width = draw.choice((width, inner, 8 * draw.randint(1, 4096)))
    codes = draw.choice((None, "int8", "float8_e4m3fn"))
    given = codes is not None and draw.random() < 0.3
    if op == "rms_norm":
        how = {"residual": draw.random() < 0.4, "weight": draw.choice((dtype, F32))}
    else:
        codes = codes or "int8"
    return op_calls.rowwise(op, rows, width, codes, given=given, dtype=dtype, **how)


DRAWERS: dict[str, Callable[[random.Random], OpCall]] = {
    "gated_matmul": draw_gated,
    "grouped_matmul": draw_grouped,
    "norm_and_route": draw_route,
    "shared_mixture": draw_mixture,
    "best": draw_best,
    "decode_attention": draw_decode,
    "latent_attention": draw_latents,
    "latent_step": draw_latent_step,
    "chosen_latent_attention": functools.partial(draw_latents, chosen=True),
    "rope_and_attend": draw_rope_attend,
    "rope_and_write": draw_rope_write,
    "gla": draw_gla,
    "gla_step": draw_gla_step,
    "gated_delta": draw_delta,
    "gated_delta_step": draw_delta_step,
    "ssd": draw_ssd,
    **{op: functools.partial(_rowwise, op=op) for op in ("rms_norm", "swiglu", "quantize_tokens")},
}
