"""A small call of every Mosaic kernel, for ``emulated()``, and what it has to give.

``CASES[name]()`` makes a case.  A case's ``run`` calls the kernels, and ``want`` says what they
have to give.  Shapes are the smallest whose rings come round and whose tiles are cut off, with the
plans of a GPU of ``sms`` multiprocessors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gated_delta, gla, quantize, quantized_matmul
from pallas_kernels.attention import past
from pallas_kernels.device import tiles_of
from pallas_kernels.experts.best import best
from pallas_kernels.experts.many_pairs.plan import TokenTile
from pallas_kernels.experts.op import grouped_matmul, grouped_matmul_reference
from pallas_kernels.gated_delta.op import gated_delta_step
from pallas_kernels.gla.op import gla_step
from pallas_kernels.matmul.blocks import blocks_matmul
from pallas_kernels.matmul.many_rows.plan import WeightTile
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.recurrence.op import Heads
from pallas_kernels.rows.greedy import append_greedy
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.ssd.op import ssd
from tests.helpers import kernel_cases as real
from tests.helpers import op_calls

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
HEADS = 4, 2, 64
XLA, MOSAIC = {"implementation": "xla"}, {"implementation": "mosaic"}


@dataclasses.dataclass(frozen=True)
class Case:
    """kernels: the names of what ``run`` launches.  error: the relative RMS allowed."""

    kernels: str
    run: Callable[[], Any]
    want: Callable[[], Any]
    sms: int = 132
    error: float = 6e-3
    target: str = ""


def array(shape, dtype, seed: int = 0) -> jax.Array:
    """Normal floats; negative float32, which are decays as well; small integers."""
    r = np.random.default_rng([seed, *shape])
    if jnp.issubdtype(dtype, jnp.floating):
        x = r.standard_normal(shape)
        return jnp.asarray(-np.abs(x) * 0.2 - 0.01 if dtype == F32 else x, F32).astype(dtype)
    return jnp.asarray(r.integers(0, 4, shape), dtype)


def built(make: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """(function, arrays) of ``kernel_cases``, where it has types."""
    seeds = iter(range(1000))
    with (
        mock.patch.object(real, "S", lambda shape, dtype: array(shape, dtype, next(seeds))),
        mock.patch.object(jax, "eval_shape", lambda f, *args: f(*args)),
    ):
        return make(*args, **named)


def both(kernels: str, f: Callable[..., Any], *args: Any, **facts: Any) -> Case:
    """A case of an op, whose XLA form says what is wanted."""
    run, want = (functools.partial(f, *args, **how) for how in (MOSAIC, XLA))
    return Case(kernels, run, want, **facts)


def product(
    kernels: str, m: int, n: int, k: int, scheme: str, words=None, sms=2, target="", **named
) -> Case:
    x, w = array((m, k), BF16), array((n, k), BF16, 1) * k**-0.5
    if scheme != "bfloat16":
        w = quantize(w, scheme, **named)
    if words == "fp8-block":
        x = quantize_tokens(x, dtype="float8_e4m3fn", group_size=128, **XLA)
    elif words is not None:
        x = quantize_tokens(x, dtype=words, **XLA)
    return both(kernels, quantized_matmul, x, w, sms=sms, target=target)


def lengths(batch: int, capacity: int, tokens: int | None = None) -> jax.Array:
    last = np.random.default_rng(1).integers(capacity // 2, capacity - 8, batch)
    last[0] = capacity - 9
    own = last if tokens is None else last[:, None] + np.arange(tokens)
    return jnp.asarray(own, I32)


def decode(kernels: str, kind: str, batch: int, capacity: int, tokens=None, sms=132, **how) -> Case:
    f, (q, k, v, _) = built(real.decode, kind, batch, capacity, tokens, HEADS)
    return both(kernels, f.func, q, k, v, lengths(batch, capacity, tokens), sms=sms, **how)


def latent(kernels: str, batch: int, tokens: int, n: int, capacity: int, page=0, sms=2) -> Case:
    f, (q, cache, _, *table) = built(real.latent, batch, tokens, n, capacity, page)
    table = [jnp.arange(t.size, dtype=I32).reshape(t.shape) for t in table]
    return both(kernels, f, q, cache, lengths(batch, capacity, tokens), *table, sms=sms)


def chosen(kernels: str, batch: int, n: int, capacity: int, places: int) -> Case:
    f, (q, cache, _) = built(real.chosen, batch, n, capacity, places)
    listed = jnp.arange(places, dtype=I32)[::-1] * (capacity // places)
    return both(kernels, f, q, cache, jnp.tile(listed, (batch, 1, 1)), sms=1)


def latent_step(kernels: str, *sizes: int) -> Case:
    """The heads alone: a step leaves the rest of its cache as it was."""
    call = op_calls.latent_step(*sizes)
    given = jax.tree.map(jnp.nan_to_num, call.values(np.random.default_rng(0)))
    return both(kernels, lambda *x, **how: call.function(*x, **how)[0], *given)


def rope(kernels: str, op, kind: str, batch: int, capacity: int, tokens=None) -> Case:
    f, given = built(real.rope, op, kind, batch, capacity, tokens, HEADS)
    return both(kernels, f.func, *given[:-1], lengths(batch, capacity, tokens))


def past_case() -> Case:
    f, (q, k, v, _) = built(real.past, 256, 256, (2, 1, 64))
    v, n_keys = v.at[:, 200:].set(0), jnp.asarray([200], I32)

    def want():
        keys = np.asarray(k.q, np.float64) * np.asarray(k.scale)
        scores = np.einsum("btnh,bskh->bnts", np.asarray(q, np.float64), keys)
        scores = scores[..., :200] * 64**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        mean = np.einsum("bnts,bsh->btnh", weights / total, np.asarray(v, np.float64)[:, :200, 0])
        return mean, np.moveaxis(np.log(total[..., 0]) + scores.max(-1), 1, 2)

    return Case("attend_past_int8", lambda: past.attend(q, k, v, n_keys), want, error=0.02)


def experts_of(tokens: int, n_experts: int, chosen: int) -> jax.Array:
    r = np.random.default_rng(5)
    found = np.stack([r.permutation(n_experts)[:chosen] for _ in range(tokens)])
    return jnp.asarray(np.where(found == 1, 0, found), I32)  # an expert that no pair has


def stacked(scheme: str, n_experts: int, n: int, k: int):
    floats = [array((n, k), BF16, i) * k**-0.5 for i in range(n_experts)]
    if scheme == "bfloat16":
        return jnp.stack(floats)
    one = [quantize(w, scheme, **({"group_size": 64} if scheme == "int4" else {})) for w in floats]
    return jax.tree.map(lambda *v: jnp.stack(v), *one)


def grouped(kernels: str, scheme: str, tokens=1, gated=None, tile=None, sms=4) -> Case:
    """Pairs of tokens and experts.  tile: of the kernel of many pairs."""
    n, k, n_experts = 256, 576, 4
    x, w = array((tokens, k), BF16), stacked(scheme, n_experts, n, k)
    experts = experts_of(tokens, n_experts, 2)
    if tile is None:
        call = functools.partial(grouped_matmul, x, w, experts, gated=gated)
        return both(kernels, call, sms=sms)

    def run():
        from pallas_kernels.experts.many_pairs.kernel import grouped_tiles
        from pallas_kernels.experts.many_pairs.plan import fitted

        own = fitted(tile, StoredWeight.of(w), gated is not None)
        out = grouped_tiles(
            x, w, experts.reshape(-1), fan=2, gate=gated, tile=own, out_dtype=jnp.dtype(F32)
        )
        return out.reshape(tokens, 2, -1)

    want = functools.partial(grouped_matmul_reference, x, w, experts, gated=gated)
    return Case(kernels, run, want, sms=sms, error=4e-3)


def experts_sum() -> Case:
    x, w = array((1, 2, 1152), BF16), stacked("int4", 4, 256, 1152)
    call = functools.partial(grouped_matmul, x, w, experts_of(1, 4, 2), weights=-array((1, 2), F32))
    return both("grouped_matmul_sum", call, sms=8)


def gla_case(kernels: str, shape, save: str = "nothing", sms: int = 132) -> Case:
    f, given = built(real.gla_chunks, *shape, save)
    q, k, v, g = given[:4]
    forward = functools.partial(gla, scale=0.1, **XLA)

    def want():
        if save == "nothing":
            return forward(q, k, v, g)
        (o, state), back = jax.vjp(forward, q, k, v, g)
        return o, back((given[4], state))

    def run():
        found = f(*given)
        return found if save == "nothing" else (found[0], found[1][:4])

    return Case(kernels, run, want, sms=sms, error=0.01)


def delta_case(kernels: str, shape, by_channel=False, backward=False, sms: int = 132) -> Case:
    f, given = built(real.delta_chunks, *shape, by_channel, backward)
    q, k, v, g, beta = (given[0] / 11, given[1] / 11, *given[2:5])
    beta = -beta
    forward = functools.partial(gated_delta, scale=0.1, **XLA)
    inputs = (q, k, v, g, beta)
    if not backward:
        want = functools.partial(forward, *inputs)
        return Case(kernels, lambda: f(*inputs), want, sms=sms, error=0.01)

    def gradients():
        (_, state), back = jax.vjp(forward, *inputs)
        return back((given[5], jnp.zeros_like(state)))

    return Case(kernels, lambda: f(*inputs, given[5])[0], gradients, sms=sms, error=0.02)


def ssd_case(kernels: str, segments: int) -> Case:
    _, (q, k, v, g) = built(real.ssd_chunks, 2, 256, 1, 2, 128, 64)
    run = functools.partial(real.ssd.ssd_forward, Heads(q, k, v, g), segments=segments)
    return Case(kernels, run, functools.partial(ssd, q, k, v, g, **XLA), error=0.01)


def step_case(kernels: str, op, hk: int, h: int, gates: int, *more) -> Case:
    _, (q, k, v, g, state) = built(real.step, None, 2, hk, h, 128, 128, gates)
    extra = [-g[..., 0] if gates == 2 else -g] if more else []
    return both(kernels, op, q, k, v, g, *extra, state)


def blocks_case() -> Case:
    x, gamma = array((8, 1024), BF16), array((1024,), BF16, 3)
    floats = [array((n, 1024), BF16, i) for i, n in enumerate((256, 64))]
    w = [quantize(one, "int4", group_size=128) for one in floats]
    norm = gamma, 1e-5
    return Case(
        "quantized_matmul_blocks",
        lambda: [y.rows[:, y.start : y.start + y.width] for y in blocks_matmul(x, w, norm=norm)],
        lambda: [quantized_matmul(x, one, norm=norm, **XLA) for one in w],
    )


def greedy_case(kernels: str, target: str = "") -> Case:
    logits, rows = array((1, 20000), BF16), jnp.asarray([[11], [0], [2], [9], [2]], I32)
    written, stops = array((2, 1, 64), I32), jnp.asarray([3, 5], I32)
    call = functools.partial(append_greedy, logits, rows, written, stops, capacity=4096)
    return both(kernels, call, target=target)


def from_table(kernels: str, make, *args, **named) -> Case:
    f, given = built(make, *args, **named)
    if isinstance(f, functools.partial) and "implementation" in f.keywords:
        rest = {key: x for key, x in f.keywords.items() if key != "implementation"}
        return both(kernels, functools.partial(f.func, *f.args, **rest), *given)
    raise TypeError(f"{make} has no implementation to choose")


def normed(words=None) -> Case:
    x, weight = array((3, 1024), BF16), array((1024,), BF16, 1)
    kernel = "residual_norm_to_bf16" if words is None else "residual_norm_to_s8"
    how = {"residual": array((3, 1024), BF16, 2), "quantize": words}
    return both(kernel, functools.partial(real.rms_norm, x, weight, 1e-5, **how))


def routed() -> Case:
    x, gamma, router, bias = (
        array(shape, BF16, i) for i, shape in enumerate([(1, 512), (512,), (16, 512), (16,)])
    )
    f = functools.partial(real.norm_and_route, k=4, normalize=True)
    return both("route_experts", f, x, (gamma, 1e-6), router, bias)


CASES: dict[str, Callable[[], Case]] = {
    "row": lambda: product("quantized_matmul_row", 1, 256, 1024, "int4", group_size=128),
    "few rows": lambda: product("quantized_matmul_decode", 8, 512, 1024, "int4", group_size=128),
    "few rows, floats": lambda: product("quantized_matmul_decode", 8, 256, 512, "bfloat16"),
    "blocks": blocks_case,
    "weight int4": lambda: product("quantized_matmul_w4a16", 96, 256, 1024, "int4", group_size=128),
    "weight int8": lambda: product("quantized_matmul_w8a16", 96, 256, 1024, "int8"),
    "weight mxfp4": lambda: product("quantized_matmul_w4a16", 200, 256, 1024, "mxfp4"),
    "pair int8": lambda: product("quantized_matmul_w8a8", 200, 256, 1024, "int8", "int8"),
    "pair W4A8": lambda: product(
        "quantized_matmul_w4a8", 96, 256, 1024, "int4", "int8", group_size=128
    ),
    "pair FP8": lambda: product(
        "quantized_matmul_fp8", 96, 256, 1024, "float8_e4m3fn", "float8_e4m3fn"
    ),
    "plain": lambda: product("quantized_matmul_plain", 48, 256, 1024, "bfloat16"),
    "pair FP8 blocks": lambda: product(
        "quantized_matmul_fp8_block", 96, 256, 1024, "fp8-block", "fp8-block"
    ),
    "mid rows": lambda: product("quantized_matmul_mid", 96, 128, 512, "int8", target="sm_80"),
    "decode int4": lambda: decode(
        "decode_attention_kernel decode_attention_merge", "int4", 2, 1024, sms=8
    ),
    "decode int8": lambda: decode("decode_attention_kernel", "int8", 3, 640, sms=8),
    "decode, several tokens": lambda: decode(
        "decode_attention_kernel", "bfloat16", 2, 512, 3, sms=8
    ),
    "latent": lambda: latent("latent_attention_kernel", 1, 1, 8, 192, sms=1),
    "latent, tokens in pages": lambda: latent(
        "latent_attention_kernel decode_attention_merge", 1, 2, 8, 256, 32
    ),
    "chosen": lambda: chosen("chosen_latents_kernel", 1, 8, 256, 128),
    "chosen of 24 heads": lambda: chosen("chosen_latents_kernel", 1, 24, 512, 384),
    "latent step": lambda: latent_step(
        "latent_heads latent_attention_kernel latent_merge_and_lift", 1, 3, 64, 64, 128
    ),
    "direct": lambda: rope("decode_attention_direct", real.rope_and_attend, "bfloat16", 1, 256),
    "rope": lambda: rope("rope_and_cache_write", real.rope_and_write, "int8", 3, 64),
    "past": past_case,
    "experts row": lambda: grouped("grouped_matmul_row", "int4", gated="silu"),
    "many pairs bfloat16": lambda: grouped(
        "experts_sort grouped_matmul_bfloat16",
        "bfloat16",
        60,
        "silu",
        tiles_of("pairs codes", WeightTile)[1],
    ),
    "many pairs mxfp4": lambda: grouped(
        "experts_sort grouped_matmul_e8m0",
        "mxfp4",
        60,
        None,
        tiles_of("pairs codes", WeightTile)[1],
    ),
    "many pairs sorted": lambda: grouped(
        "experts_sort experts_rows grouped_matmul_e8m0",
        "mxfp4",
        60,
        None,
        tiles_of("pairs float4 sorted", WeightTile)[0],
    ),
    "many pairs tokens": lambda: grouped(
        "experts_sort grouped_matmul_bfloat16", "bfloat16", 90, "silu", TokenTile()
    ),
    "experts sum": lambda: experts_sum(),
    "route": routed,
    "best": lambda: both("best_of_rows", best, array((9, 32), F32), 4),
    "greedy": lambda: greedy_case("append_greedy"),
    "greedy without clusters": lambda: greedy_case("append_greedy_parts append_greedy", "sm_80"),
    "norm": normed,
    "norm to int8": lambda: normed("int8"),
    "gate to int8": lambda: from_table(
        "gate_to_s8", real.rows, real.swiglu, 5, 1024, quantize="int8"
    ),
    "GLA": lambda: gla_case("gla_gates gla_scan", (1, 256, 1, 128, 128)),
    "GLA gradients": lambda: gla_case(
        "gla_gates gla_scan gla_scan_reverse gla_chunk_gradients", (1, 128, 1, 128, 128), "all"
    ),
    "GLA gradients, wide": lambda: gla_case(
        "gla_gates gla_scan gla_scan_reverse gla_chunk_products gla_chunk_gradients",
        (1, 64, 1, 256, 512),
        "all",
    ),
    "GLA step": lambda: step_case("gla_step", gla_step, 2, 2, 2),
    "SSD": lambda: ssd_case("ssd_scan", 1),
    "SSD segments": lambda: ssd_case("ssd_states ssd_scan", 2),
    "delta": lambda: delta_case("gated_delta_chunks gated_delta_scan", (1, 256, 1, 2, 128, 128)),
    "delta gradients": lambda: delta_case(
        "gated_delta_chunks gated_delta_scan gated_delta_reverse gated_delta_gradients",
        (1, 128, 1, 1, 128, 128),
        backward=True,
    ),
    "KDA": lambda: delta_case(
        "gated_delta_channels gated_delta_scan", (1, 64, 1, 1, 128, 128), True
    ),
    "KDA gradients": lambda: delta_case(
        "gated_delta_channels gated_delta_scan gated_delta_reverse gated_delta_products "
        "gated_delta_gradients",
        (1, 128, 1, 1, 128, 128),
        True,
        True,
    ),
    "delta step": lambda: step_case("gated_delta_step", gated_delta_step, 2, 4, 1, "beta"),
}
