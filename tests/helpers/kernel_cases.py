"""Calls of every Mosaic kernel at real shapes: a function and the types of its operands."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import quantize
from pallas_kernels.attention.op import decode_attention
from pallas_kernels.attention.past import attend as attend_past
from pallas_kernels.attention.rope_attention import rope_and_attend
from pallas_kernels.attention.rope_cache import quantize_kv, rope_and_write, rope_and_write_tokens
from pallas_kernels.experts.best import best
from pallas_kernels.experts.fetch import fetch
from pallas_kernels.experts.fetch_layout import FetchedLeaf
from pallas_kernels.experts.gate import ClampedGate, Gate
from pallas_kernels.experts.op import grouped_matmul
from pallas_kernels.experts.route import norm_and_route
from pallas_kernels.gated_delta import kernel as delta
from pallas_kernels.gated_delta import step_kernel as delta_step
from pallas_kernels.gated_delta import token as delta_token
from pallas_kernels.gated_delta import token_kernel as delta_token_kernel
from pallas_kernels.gla import kernel as gla
from pallas_kernels.gla import step_kernel
from pallas_kernels.gla.token import GlaLayerTokens, gla_token
from pallas_kernels.latent.chosen import chosen_latent_attention
from pallas_kernels.latent.op import latent_attention
from pallas_kernels.matmul import sums
from pallas_kernels.matmul.blocks import blocks_matmul
from pallas_kernels.matmul.gated import gated_matmul
from pallas_kernels.matmul.interleave import interleaved
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.operands import Columns
from pallas_kernels.recurrence.op import Heads
from pallas_kernels.rounding import FORMATS
from pallas_kernels.rows import greedy_kernel
from pallas_kernels.rows.low_rank import quantize_adapted
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.rows.swiglu import swiglu
from pallas_kernels.rows.words import row_bytes, scatter
from pallas_kernels.ssd import kernel as ssd
from tests.helpers.latent_cases import in_codes

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
S = jax.ShapeDtypeStruct
HEADS = 32, 8, 128  # Llama-3.1-8B's: query heads, kv heads, features


def weight(scheme: str, n: int, k: int):
    floats = S((n, k), BF16)
    if scheme == "bfloat16":
        return floats
    if scheme == "interleaved":  # "multiples" in the order of the kernel
        w = dataclasses.replace(weight("multiples", n, k), activations="int8")
        return jax.eval_shape(interleaved, w)
    if scheme in FORMATS:
        return jax.eval_shape(functools.partial(quantize, dtype=scheme), floats)
    how = {"int4": (128, True), "zeros": (128, False), "zeros-64": (64, False)}
    how = how.get(scheme, (k, True))
    words, named = ("int4" if scheme.startswith("zeros") else scheme), {}
    if scheme == "multiples":  # of one scale a row, with zero points
        words, how, named = "int4", (128, False), {"scale_dtype": "int8"}
    made = functools.partial(quantize, dtype=words, group_size=how[0], symmetric=how[1], **named)
    return jax.eval_shape(made, floats)


def product(rows: int, scheme: str, words: str | None = None, shape=(14336, 4096), **named):
    """A product of ``rows`` tokens; words: the tokens' own codes, "fp8-static" of one scale."""
    x = S((rows, shape[1]), BF16)
    if words == "fp8-block":
        to_codes = functools.partial(quantize_tokens, dtype="float8_e4m3fn", group_size=128)
        x = jax.eval_shape(to_codes, x)
    elif words == "fp8-static":
        x = jax.eval_shape(lambda x: quantize_tokens(x, "float8_e4m3fn", scale=jnp.float32(1.0)), x)
    elif words is not None:
        x = jax.eval_shape(functools.partial(quantize_tokens, dtype=words), x)
    return functools.partial(quantized_matmul, implementation="mosaic", **named), (
        x,
        weight(scheme, *shape),
    )


def given_scale(op, rows: int, width: int, quantizes: bool = True):
    """Codes of a scale that is an operand."""
    words = {"quantize" if quantizes else "dtype": "float8_e4m3fn"}

    def f(x, scale):
        return op(x, **words, scale=scale, implementation="mosaic")

    return f, (S((rows, width), BF16), S((), F32))


def gated_codes(rows: int, n: int = 28672, k: int = 4096):
    """gate and up between static scales."""
    _, (x, w) = product(rows, "float8_e4m3fn", "fp8-static", shape=(n, k))
    f = functools.partial(gated_matmul, dtype=BF16, implementation="mosaic")
    return f, (x, w, S((), F32))


def grouped(
    scheme: str, n: int, k: int, gated: Gate | None = None, tokens: int = 1, of=(128, 8), **named
):
    """Tokens through 8 of 128 experts, or ``of``."""
    n_experts, chosen = of
    one = weight(scheme, n, k)
    w = jax.tree.map(lambda v: S((n_experts, *v.shape), v.dtype), one)
    given = S((tokens, k) if gated else (tokens, chosen, k), BF16), w, S((tokens, chosen), I32)
    f = functools.partial(grouped_matmul, gated=gated, implementation="mosaic")
    return functools.partial(f, **named), given


def grouped_sum(scheme: str, n: int, k: int, of=(128, 8)):
    """One token's sum over its experts, with a bias where the model has one."""
    f, given = grouped(scheme, n, k, of=of)
    weights, bias = S((1, of[1]), F32), S((of[0], n), BF16)
    return lambda *x: f(*x[:3], weights=x[3], bias=x[4]), (*given, weights, bias)


def grouped_biased(scheme: str, n: int, k: int, tokens: int, of: tuple[int, int]):
    """Gate and up with gpt-oss's gate and biases."""
    f, given = grouped(scheme, n, k, ClampedGate(), tokens, of)
    return lambda *x: f(*x[:3], bias=x[3]), (*given, S((of[0], n), BF16))


def routed(n: int, d: int, k: int):
    f = functools.partial(norm_and_route, k=k, normalize=True, implementation="mosaic")
    given = S((1, d), BF16), S((d,), BF16), S((n, d), BF16), S((n,), BF16)
    return lambda x, gamma, router, bias: f(x, (gamma, 1e-6), router, bias), given


def cache_of(kind: str, batch: int, capacity: int, heads=HEADS):
    floats = S((batch, capacity, *heads[1:]), BF16)
    return (
        floats
        if kind == "bfloat16"
        else jax.eval_shape(functools.partial(quantize_kv, dtype=kind), floats)
    )


def decode(kind: str, batch: int, capacity: int, tokens: int | None = None, heads=HEADS):
    shape = (batch,) if tokens is None else (batch, tokens)
    kv = cache_of(kind, batch, capacity, heads)
    given = S((*shape, heads[0], heads[2]), BF16), kv, kv, S(shape, I32)
    return functools.partial(decode_attention, implementation="mosaic"), given


def latent(batch: int, tokens: int, n: int, capacity: int, page: int = 0, kind: str = "bfloat16"):
    q, lengths = S((batch, tokens, n, 576), BF16), S((batch, tokens), I32)
    given = q, S((batch, capacity, 576), BF16), lengths
    if page:
        pages = batch * capacity // page
        given = q, S((pages, page, 576), BF16), lengths, S((batch, capacity // page), I32)
    entries = functools.partial(in_codes, kind=kind)
    given = given[0], jax.eval_shape(entries, given[1]), *given[2:]

    def f(q, cache, lengths, table=None, implementation="mosaic"):
        named = {"table": table, "implementation": implementation}
        return latent_attention(q, cache, lengths, scale=576**-0.5, **named)

    return f, given


def chosen(batch: int, n: int, capacity: int, places: int):
    q, cache = S((batch, 1, n, 576), BF16), S((batch, capacity, 576), BF16)
    f = functools.partial(chosen_latent_attention, scale=576**-0.5, implementation="mosaic")
    return f, (q, cache, S((batch, 1, places), I32))


def rope(op, kind: str, batch: int, capacity: int, tokens: int | None = None, heads=HEADS):
    n, n_kv, h = heads
    shape = (batch,) if tokens is None else (batch, tokens)
    half, kv = S((*shape, h // 2), F32), cache_of(kind, batch, capacity, heads)
    given = S((*shape, n + 2 * n_kv, h), BF16), half, half, kv, kv, S(shape, I32)
    return functools.partial(op, implementation="mosaic"), given


def past(width: int, capacity: int, heads=HEADS, dtype=BF16):
    n, n_kv, h = heads
    kv = cache_of("int8", 1, capacity, heads)
    given = S((1, width, n, h), dtype), kv, S((1, capacity, n_kv, h), dtype), S((1,), I32)
    return attend_past, given


def of_heads(op, **options):
    """The op as a function of the arrays of its heads."""
    return lambda *x, **named: op(Heads(*x), **options, **named)


def gla_chunks(b: int, t: int, h: int, dk: int, dv: int, save="nothing"):
    q, v = S((b, t, h, dk), BF16), S((b, t, h, dv), BF16)
    forward = of_heads(gla.gla_forward, scale=0.1, save=save)
    if save == "nothing":
        return forward, (q, q, v, S(q.shape, F32))

    def both(q, k, v, g, d_out):
        heads = Heads(q, k, v, g)
        o, state, saved = forward(*heads[:4])
        return o, gla.gla_backward(heads, d_out, state, scale=0.1, saved=saved)

    return both, (q, q, v, S(q.shape, F32), v)


def ssd_chunks(b: int, t: int, groups: int, h: int, dk: int, dv: int):
    q, v = S((b, t, groups, dk), BF16), S((b, t, h, dv), BF16)
    # One row of 16,384 tokens is cut.
    forward = of_heads(ssd.ssd_forward, segments=4 if b == 1 else 1)
    return forward, (q, q, v, S((b, t, h), F32))


def delta_chunks(b, t, hk, h, dk, dv, by_channel=False, backward=False):
    q, v, beta = S((b, t, hk, dk), BF16), S((b, t, h, dv), BF16), S((b, t, h), F32)
    g = S((b, t, h, dk), F32) if by_channel else beta
    if not backward:
        return of_heads(delta.gated_delta_forward, scale=0.1), (q, q, v, g, beta)
    f = functools.partial(delta.gated_delta_backward, scale=0.1)
    return lambda *x: f(Heads(*x[:5]), x[5], None), (q, q, v, g, beta, v)


def step(f, b: int, hk: int, h: int, dk: int, dv: int, gates: int):
    q, v, g, state = (
        S((b, *x), y)
        for x, y in (((hk, dk), BF16), ((h, dv), BF16), ((h, dk)[:gates], F32), ((h, dk, dv), F32))
    )
    return f, (q, q, v, g, state)


def ssd_one(b: int, h: int, dk: int, dv: int):
    """GLA's step of narrow heads."""
    return step(lambda *x: gla.gla_step(*x, 1.0), b, h, h, dk, dv, 2)


def delta_one(q, k, v, g, state):
    plan, beta = delta_step.plan(q, k, v), g if g.ndim == 2 else g[..., 0]
    return delta_step.gated_delta_step(q, k, v, g, beta, state, scale=0.1, plan=plan)


def rows(op, count: int, width: int, **named):
    return functools.partial(op, implementation="mosaic", **named), (S((count, width), BF16),)


def normed(x, words=None):
    weight = jnp.ones((x.shape[-1],), x.dtype)
    return rms_norm(x, weight, 1e-5, residual=x, quantize=words, implementation="mosaic")


def fetched(rows: int, width: int, count: int):
    """MXFP4 experts in the layout of the CPU's handlers."""
    codes, scales = rows * width // 2, rows * width // 32
    leaves = (
        FetchedLeaf(0, codes, 4, width // 8, is_nibbles=True),
        FetchedLeaf(codes, scales, 1, width // 32),
    )
    return lambda table, experts: fetch(table, experts, leaves), (
        S((128, 2), I32),
        S((count,), I32),
    )


def records(kind: str, count: int):
    """Pages of 64 tokens of Llama-3.1-8B's cache, from their records."""
    codes, scales = S((1000, 64, 8, 128), jnp.dtype(kind)), S((1000, 64, 8, 1), F32)
    arrays = [codes, scales] * 64 if kind == "int8" else [codes] * 64
    data = S((count, sum(map(row_bytes, arrays)) // 4), jnp.uint32)
    return scatter, (arrays, S((count,), I32), data)


CASES = {
    "product 1 int4": lambda: product(1, "int4"),
    "product 1 zeros": lambda: product(1, "zeros"),
    "product 1 int8": lambda: product(1, "int8"),
    "product 1 bfloat16": lambda: product(1, "bfloat16"),
    "product 1 int4 swiglu": lambda: product(1, "int4", shape=(28672, 4096), swiglu=True),
    "experts bfloat16": lambda: grouped("bfloat16", 2048, 768),
    "experts bfloat16 swiglu": lambda: grouped("bfloat16", 1536, 2048, "silu"),
    "experts zeros swiglu": lambda: grouped("zeros", 1536, 2048, "silu"),
    "experts zeros short row": lambda: grouped("zeros", 2048, 768),
    "experts int8": lambda: grouped("int8", 2048, 1024),
    "experts fetched": lambda: fetched(5760, 2880, 16),
    "records of pages int8": lambda: records("int8", 31),
    "records of pages bfloat16": lambda: records("bfloat16", 31),
    "experts 64 bfloat16": lambda: grouped("bfloat16", 1536, 2048, "silu", 64),
    "experts 64 zeros": lambda: grouped("zeros", 1536, 2048, "silu", 64),
    "experts 8192 bfloat16 bias": lambda: grouped_biased("bfloat16", 5760, 2880, 8192, (32, 4)),
    "experts 512 mxfp4": lambda: grouped("mxfp4", 5760, 2880, ClampedGate(), 512, (32, 4)),
    "experts 64 zeros-64": lambda: grouped("zeros-64", 5760, 2880, ClampedGate(), 64, (32, 4)),
    "experts sum zeros": lambda: grouped_sum("zeros", 2048, 768),
    "experts sum mxfp4": lambda: grouped_sum("mxfp4", 2880, 2880, (32, 4)),
    "experts sum zeros-64": lambda: grouped_sum("zeros-64", 2880, 2880, (32, 4)),
    "experts zeros-64": lambda: grouped("zeros-64", 5760, 2880, ClampedGate(), 1, (32, 4)),
    "product 1 zeros-64": lambda: product(1, "zeros-64", shape=(5120, 2880)),
    "norm and route": lambda: routed(128, 2048, 8),
    "best of 128": lambda: (lambda x: best(x, 8, implementation="mosaic"), (S((256, 128), F32),)),
    "experts 8192 int8": lambda: grouped("int8", 2048, 768, None, 8192),
    "experts 8192 fp8-block": lambda: grouped("fp8-block", 2048, 768, None, 8192),
    "product 8 int4": lambda: product(8, "int4"),
    "product 1 mxfp4": lambda: product(1, "mxfp4", shape=(28672, 4096), swiglu=True),
    "product 1 nvfp4": lambda: product(1, "nvfp4"),
    "product 1 fp8-block": lambda: product(1, "fp8-block"),
    "product 16 fp8-block": lambda: product(16, "fp8-block"),
    "product 8 mxfp4": lambda: product(8, "mxfp4"),
    "product 16 nvfp4": lambda: product(16, "nvfp4"),
    "product 64 nvfp4": lambda: product(64, "nvfp4"),
    "product 64 fp8-block": lambda: product(64, "fp8-block"),
    "product 2048 fp8-block": lambda: product(2048, "fp8-block"),
    "product 64 mxfp4": lambda: product(64, "mxfp4"),
    "product 2048 mxfp4": lambda: product(2048, "mxfp4"),
    "product 2048 nvfp4": lambda: product(2048, "nvfp4"),
    "grouped mxfp4": lambda: grouped("mxfp4", 5760, 2880),
    "product 16 int8": lambda: product(16, "int8"),
    "product 64 int4": lambda: product(64, "int4"),
    "product 64 W8A8": lambda: product(64, "int8", "int8"),
    "product 64 W4A8": lambda: product(64, "int4", "int8"),
    "product 64 W4A8, two levels": lambda: product(64, "multiples", "int8", out_dtype=BF16),
    "product 64 W4A8, wide": lambda: product(
        64, "multiples", "int8", shape=(28672, 4096), out_dtype=BF16
    ),
    "product 64 W4A8, long": lambda: product(
        64, "multiples", "int8", shape=(4096, 14336), out_dtype=BF16
    ),
    "product 64 W4A8, interleaved": lambda: product(64, "interleaved", "int8", out_dtype=BF16),
    "product 64 W4A8, interleaved, long": lambda: product(
        64, "interleaved", "int8", shape=(4096, 14336), out_dtype=BF16
    ),
    "product 2048 W4A8, interleaved": lambda: product(2048, "interleaved", "int8", out_dtype=BF16),
    "product 2048 int4": lambda: product(2048, "int4"),
    "product 2048 zeros": lambda: product(2048, "zeros"),
    "product 2048 int8": lambda: product(2048, "int8"),
    "product 2048 W8A8": lambda: product(2048, "int8", "int8"),
    "product 2048 FP8": lambda: product(2048, "float8_e4m3fn", "float8_e4m3fn"),
    "product 11264 FP8, float32 result": lambda: product(
        11264, "float8_e4m3fn", "float8_e4m3fn", (2048, 8192), out_dtype=F32
    ),
    "product 64 FP8 static": lambda: product(64, "float8_e4m3fn", "fp8-static"),
    "gated FP8 static": lambda: gated_codes(64),
    "gated FP8 static, many rows": lambda: gated_codes(2048),
    "product 64 FP8 blocks": lambda: product(64, "fp8-block", "fp8-block"),
    "product 2048 FP8 blocks": lambda: product(2048, "fp8-block", "fp8-block"),
    "product 2048 W4A8": lambda: product(2048, "int4", "int8"),
    "product 2048 W4A8 zeros": lambda: product(2048, "zeros", "int8"),
    "decode 64 bfloat16": lambda: decode("bfloat16", 64, 8192),
    "decode 64 int8": lambda: decode("int8", 64, 1152),
    "decode 64 int4": lambda: decode("int4", 64, 8192),
    "latent 64": lambda: latent(64, 1, 16, 8192),
    "latent 64 of 128 heads": lambda: latent(64, 1, 128, 8192),
    "latent 16 of 4 tokens in pages": lambda: latent(16, 4, 16, 8192, 64),
    "latent codes 64": lambda: latent(64, 1, 20, 8192, 64, "int8"),
    "chosen latents 64": lambda: chosen(64, 16, 131072, 2048),
    "chosen latents 64 of 128 heads": lambda: chosen(64, 128, 131072, 2048),
    "decode 1 of 5 tokens": lambda: decode("bfloat16", 1, 1536, 5),
    "direct": lambda: rope(rope_and_attend, "bfloat16", 1, 1152),
    "rope and cache int8": lambda: rope(rope_and_write, "int8", 64, 1152),
    "rope of many tokens": lambda: rope(rope_and_write_tokens, "int8", 8, 4096, 2048),
    "past": lambda: past(32768, 32768),
    "past, heads of 64": lambda: past(32768, 32768, (32, 8, 64)),
    "past, float16": lambda: past(32768, 131072, dtype=jnp.float16),
    "GLA": lambda: gla_chunks(8, 4096, 16, 128, 128),
    "GLA gradients": lambda: gla_chunks(8, 4096, 16, 128, 128, "all"),
    "GLA in segments": lambda: gla_chunks(1, 16384, 16, 128, 128),
    "GLA-1.3B": lambda: gla_chunks(8, 2048, 4, 256, 512, "all"),
    "GLA-1.3B, pairs of blocks": lambda: gla_chunks(32, 2048, 4, 256, 512),
    "GLA-1.3B gradients, pairs of blocks": lambda: gla_chunks(32, 2048, 4, 256, 512, "all"),
    "GLA step": lambda: step(lambda *x: gla.gla_step(*x, 0.1), 64, 4, 4, 256, 512, 2),
    "SSD": lambda: ssd_chunks(8, 4096, 8, 64, 128, 64),
    "SSD in segments": lambda: ssd_chunks(1, 16384, 1, 48, 128, 64),
    "SSD, Dk = 256": lambda: ssd_chunks(8, 4096, 1, 48, 256, 64),
    "SSD step": lambda: ssd_one(64, 64, 128, 64),
    "delta": lambda: delta_chunks(8, 4096, 16, 16, 128, 128),
    "delta gradients": lambda: delta_chunks(8, 4096, 16, 16, 128, 128, backward=True),
    "delta in segments": lambda: delta_chunks(1, 16384, 16, 16, 128, 128),
    "delta, Dk = 256": lambda: delta_chunks(8, 4096, 6, 6, 256, 512),
    "KDA": lambda: delta_chunks(1, 8192, 64, 64, 128, 128, True),
    "KDA gradients": lambda: delta_chunks(1, 8192, 64, 64, 128, 128, True, True),
    "delta step": lambda: step(delta_one, 64, 16, 32, 128, 128, 1),
    "norm": lambda: (normed, (S((64, 4096), BF16),)),
    "norm to int8": lambda: (functools.partial(normed, words="int8"), (S((8192, 4096), BF16),)),
    "gate to int8": lambda: rows(swiglu, 64, 28672, quantize="int8"),
    "gate to a given FP8": lambda: given_scale(swiglu, 64, 28672),
    "tokens to a given FP8": lambda: given_scale(quantize_tokens, 64, 4096, False),
    "tokens to int8": lambda: rows(quantize_tokens, 64, 4096, dtype="int8"),
}


def fused(rows: int, scheme: str, shape=(28672, 4096), **which):
    """A product with a norm, and what else is named: bias, residual, pending, swiglu."""
    n, k = shape
    x, out = S((rows, k), BF16), S((rows, n), BF16)
    given = {"bias": S((n,), BF16), "residual": out, "pending": S((rows, k), F32)}
    given = {name: type_ for name, type_ in given.items() if which.get(name)}

    def run(x, w, gamma, given):
        return quantized_matmul(
            x,
            w,
            norm=(gamma, 1e-5),
            swiglu=which.get("swiglu", False),
            implementation="mosaic",
            **given,
        )

    return run, (x, weight(scheme, n, k), S((k,), BF16), given)


def biased(rows: int, scheme: str, words: str | None = None, dtype=BF16):
    f, (x, w) = product(rows, scheme, words)
    if words is None:
        x, w = jax.tree.map(lambda x: S(x.shape, dtype) if x.dtype == BF16 else x, (x, w))
    return lambda x, w, bias: f(x, w, bias=bias), (x, w, S((w.shape[0],), F32))


def low_rank_product():
    f, (x, w) = product(64, "int8", "int8", shape=(6144, 4096))
    second = tuple(S((n, 64), BF16) for n in (4096, 1024, 1024))
    return lambda x, w, *low: f(x, w, low_rank=low), (x, w, S((64, 3 * 64), BF16), second)


def blocks(m: int = 8, k: int = 4096, words: str | None = "int4"):
    large = (S((n, k), BF16) if words is None else weight(words, n, k) for n in (4096, 1024))
    return lambda x, w, gamma: [x.rows for x in blocks_matmul(x, w, norm=(gamma, 1e-5))], (
        S((m, k), BF16),
        (*large, S((64, k), BF16)),
        S((k,), BF16),
    )


def in_pages(op, kind: str, batch: int, tokens: int | None = None, rotates=False, **options):
    """An attention op over a cache of 512 pages of 64 tokens."""
    f, given = rope(op, kind, 512, 64) if rotates else decode(kind, 512, 64)
    shape = (batch,) if tokens is None else (batch, tokens)
    place = 3 if rotates else 1
    few = [S((*shape, *x.shape[1:]), x.dtype) for x in given[:place]]
    table = S((batch, 32), I32)
    return lambda *x: f(*x[:-1], table=x[-1], **options), (
        *few,
        *given[place : place + 2],
        S(shape, I32),
        table,
    )


def with_sinks(batch: int, capacity: int, tokens: int | None = None):
    """gpt-oss-20b: 64 query heads on 8 kv heads of 64, and a window."""
    f, given = decode("bfloat16", batch, capacity, tokens, (64, 8, 64))
    return lambda *x: f(*x[:-1], window=128, sinks=x[-1]), (*given, S((64,), F32))


def direct_normed():
    f, given = rope(rope_and_attend, "bfloat16", 2, 1152)
    weights = S((128,), BF16), S((128,), BF16)
    return lambda *x: f(*x[:-2], norm=(*x[-2:], 1e-6), window=500), (*given, *weights)


def with_lengths(f, given, batch: int):
    return lambda *x: f(*x[:-1], lengths=x[-1]), (*given, S((batch,), I32))


def with_state(f, given, batch: int, heads: int, dk: int, dv: int):
    return lambda *x: f(*x[:-1], initial_state=x[-1]), (*given, S((batch, heads, dk, dv), F32))


def gla_layer(tokens: int = 1, sizes=(8, 4, 256, 512, 16)):
    b, h, dk, dv, rank = sizes
    widths = h * dk, h * dk, h * dv, rank, h * dv
    streams = [S((b * tokens, width), BF16) for width in widths]
    decay = S((h * dk, rank), BF16), S((h * dk,), BF16)
    options = {"eps": 1e-6, "normalizer": 16.0, "clamp_min": None if tokens == 1 else -1.0}

    def run(streams, *rest):
        columns = [Columns(x, 0, width) for x, width in zip(streams, widths, strict=True)]
        return gla_token(GlaLayerTokens(columns, *rest), **options)

    lengths = S((b,), I32) if tokens == 1 else None
    return run, (streams, decay, S((dv,), BF16), lengths, S((b, h, dk, dv), F32))


def gla_kept():
    b, t, h, dk, dv = 8, 4, 4, 256, 512
    layer = S((b, h, dk, dv), F32), S((b, t, h, dk), BF16), S((b, t, h, dv), BF16)
    return lambda *x: step_kernel.gla_commit(*x, plan=step_kernel.divided(b, h, dk, dv)), (
        *((x, x) for x in (*layer, S((b, t, h, dk), F32))),
        S((b,), I32),
    )


def delta_layer(tokens: int = 1, sizes=(8, 16, 32, 128)):
    b, hk, h, d = sizes
    features = 2 * hk * d + h * d
    widths = features + h * d, 2 * h
    streams = [S((b * tokens, width), BF16) for width in widths]
    decay = S((h,), BF16), S((h,), BF16)

    def run(streams, *rest):
        columns = [Columns(x, 0, width) for x, width in zip(streams, widths, strict=True)]
        given = delta_token.DeltaLayerTokens(columns, *rest)
        return delta_token.gated_delta_token(given, eps=1e-6, beta_max=1.0)

    lengths = S((b,), I32) if tokens == 1 else None
    state, last = S((b, h, d, d), F32), S((b, 3, features), BF16)
    return run, (streams, S((features, 4), BF16), decay, S((d,), BF16), lengths, state, last)


def delta_kept():
    b, t, hk, h, d = 8, 4, 16, 32, 128
    features = 2 * hk * d + h * d
    layer = (
        S((b, h, d, d), F32),
        S((b, 3, features), BF16),
        S((b, t, hk, d), BF16),
        S((b, t, h, d), BF16),
        S((b, t, h), F32),
        S((b, t, h), F32),
        S((b, t, features), BF16),
    )
    plan = delta_token_kernel.DeltaTokenPlan(8)
    run = functools.partial(delta_token_kernel.gated_delta_commit, plan=plan)
    return run, (*((x, x) for x in layer), S((b,), I32))


def greedy(stops: int, capacity: int | None):
    run = functools.partial(greedy_kernel.append_greedy, capacity=capacity)
    return run, (S((1, 128256), BF16), S((5, 1), I32), S((2, 1, 64), I32), S((stops,), I32))


def adapted():
    x, first = S((8, 4096), BF16), S((2, 3, 16, 4096), BF16)

    def run(x, residual, weight, first, adapter):
        return quantize_adapted(
            x,
            first,
            adapter,
            "int8",
            norm=(weight, 1e-5),
            residual=residual,
            implementation="mosaic",
        )

    return run, (x, x, S((4096,), BF16), first, S((8,), I32))


def posted_sums():
    """A layer's two products whose sums are posted on two devices, and the readers behind them."""
    d, f = 4096, 7168

    def run(heads, o, stream, gate_up, gamma, down, tables):
        pending = sums.post(heads, o, tables[0])
        norm = {"norm": (gamma, 1e-5), "out_dtype": BF16, "swiglu": True}
        y, total = sums.norm_matmul(stream, gate_up, pending, **norm)
        return total, sums.collect(sums.post(y, down, tables[1]))

    weights = S((2 * f, d), BF16), S((d,), BF16), S((d, f), BF16)
    tables = [S((1, 4, 2), I32)] * 2
    return run, (S((1, d // 2), BF16), S((d, d // 2), BF16), S((1, d), BF16), *weights, tables)


# Branches of the kernels that CASES leave out.  They are lowered, not assembled.
VARIANTS = {
    "decode 64 with sinks": lambda: with_sinks(64, 4096),
    "decode 2 of 3 tokens with sinks": lambda: with_sinks(2, 131072, 3),
    "direct with sinks": lambda: with_sinks(1, 1152),
    "product 1 int8 all": lambda: fused(1, "int8", (4096, 4096), residual=True, pending=True),
    "product 1 bfloat16 swiglu": lambda: fused(1, "bfloat16", swiglu=True, bias=True),
    "product 1 bfloat16, posted sums": posted_sums,
    "product 8 int4 all": lambda: fused(8, "int4", (4096, 4096), residual=True, pending=True),
    "product 8 int8 swiglu": lambda: fused(8, "int8", swiglu=True),
    "product 16 int8 bias": lambda: biased(16, "int8"),
    "product 8 zeros": lambda: product(8, "zeros"),
    "product 8 bfloat16": lambda: product(8, "bfloat16"),
    "product 8 in blocks": blocks,
    "product 1 in blocks": lambda: blocks(1, 2048),
    "product 1 in blocks, floats": lambda: blocks(1, 2048, None),
    "product 64 bfloat16": lambda: product(64, "bfloat16"),
    "product 64 bfloat16 swiglu": lambda: product(64, "bfloat16", shape=(28672, 4096), swiglu=True),
    "product 64 W8A8 low rank": low_rank_product,
    "product 64 int8": lambda: product(64, "int8"),
    "product 64 zeros": lambda: product(64, "zeros"),
    "product 64 int4, wide K": lambda: product(64, "int4", shape=(4096, 14336)),
    "product 256 int4": lambda: product(256, "int4"),
    "product 256 int8": lambda: product(256, "int8"),
    "product 256 W8A8, wide K": lambda: product(256, "int8", "int8", shape=(4096, 14336)),
    "product 2048 int4 bias": lambda: biased(2048, "int4"),
    "product 2048 int4 float16": lambda: biased(2048, "int4", dtype=jnp.float16),
    "product 2048 W8A8 bias": lambda: biased(2048, "int8", "int8"),
    "product 2048 W4A8 bias": lambda: biased(2048, "int4", "int8"),
    "product 2048 W4A FP8": lambda: product(2048, "int4", "float8_e4m3fn"),
    "decode 64 float8": lambda: decode("float8_e4m3fn", 64, 1152),
    "decode 4 of 5 tokens int4": lambda: decode("int4", 4, 8192, 5),
    "decode 64 window": lambda: (lambda f, x: (functools.partial(f, window=300), x))(
        *decode("int8", 64, 8192)
    ),
    "decode 64 in pages": lambda: in_pages(decode_attention, "bfloat16", 64),
    "decode 64 int4 in pages": lambda: in_pages(decode_attention, "int4", 64, window=700),
    "decode 512 float8 in pages": lambda: in_pages(decode_attention, "float8_e4m3fn", 512),
    "decode 64 of 3 tokens int8 in pages": lambda: in_pages(decode_attention, "int8", 64, 3),
    "direct, norms and window": direct_normed,
    "direct int4": lambda: decode("int4", 1, 1152),
    "direct in pages": lambda: in_pages(rope_and_attend, "bfloat16", 1, rotates=True),
    "rope and cache int4 in pages": lambda: in_pages(rope_and_write, "int4", 64, rotates=True),
    "rope and cache 512 float8 in pages": lambda: in_pages(
        rope_and_write, "float8_e4m3fn", 512, rotates=True
    ),
    "SSD step, heads of 32": lambda: ssd_one(64, 48, 128, 32),
    "SSD step of a row": lambda: ssd_one(1, 48, 128, 32),
    "SSD, lengths": lambda: with_lengths(*ssd_chunks(8, 4096, 1, 48, 64, 64), 8),
    "SSD, initial state": lambda: with_state(*ssd_chunks(8, 4096, 8, 8, 128, 64), 8, 8, 128, 64),
    "GLA, lengths": lambda: with_lengths(*gla_chunks(8, 4096, 16, 128, 128), 8),
    "GLA, initial state": lambda: with_state(*gla_chunks(8, 4096, 16, 128, 128), 8, 16, 128, 128),
    "GLA gradients of states": lambda: gla_chunks(8, 4096, 16, 128, 128, "states"),
    "GLA layer": gla_layer,
    "GLA layer of 4 tokens": lambda: gla_layer(4),
    "GLA commit": gla_kept,
    "delta, lengths": lambda: with_lengths(*delta_chunks(8, 4096, 16, 16, 128, 128), 8),
    "delta, initial state": lambda: with_state(
        *delta_chunks(8, 4096, 16, 32, 128, 128), 8, 32, 128, 128
    ),
    "delta gradients, shared keys": lambda: delta_chunks(8, 4096, 16, 32, 128, 128, backward=True),
    "delta gradients in segments": lambda: delta_chunks(1, 16384, 16, 16, 128, 128, backward=True),
    "KDA, lengths": lambda: with_lengths(*delta_chunks(1, 8192, 64, 64, 128, 128, True), 1),
    "KDA gradients, shared keys": lambda: delta_chunks(1, 8192, 32, 64, 128, 128, True, True),
    "delta step by channel": lambda: step(delta_one, 64, 16, 32, 128, 128, 2),
    "delta layer": delta_layer,
    "delta layer of 4 tokens": lambda: delta_layer(4),
    "delta commit": delta_kept,
    "one row norm": lambda: (normed, (S((1, 4096), BF16),)),
    "norm FP8": lambda: (functools.partial(normed, words="float8_e4m3fn"), (S((64, 4096), BF16),)),
    "rows with adapters": adapted,
    "greedy": lambda: greedy(3, 4096),
    "greedy without stops": lambda: greedy(0, None),
}
