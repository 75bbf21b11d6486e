"""``grouped_matmul`` on a GPU: device time of each form beside ``jax.lax.ragged_dot`` and our own
dense product of as many bytes, and values against the reference.  The dense product has as many
rows of x as an expert has pairs.

    python -m benchmarks.kernels.experts [--tokens 1 8 64 512 8192] [--schemes bf16 w8 w4 mxfp4]
    python -m benchmarks.kernels.experts --route      the kernel of norm, router and choice instead

The shapes are Qwen3-30B-A3B's (8 of 128 experts) and gpt-oss-20b's (4 of 32), gate and up with
SwiGLU, and down, which reads a row for each pair.  ``share`` is the bytes of the experts that some
token has chosen, over the time and the rate of a copy.  Tokens choose their experts at random,
others in each call.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernels.timing import device_us
from pallas_kernels import quantize, quantized_matmul
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.experts import op, xla
from pallas_kernels.experts import plan as planning
from pallas_kernels.experts.gate import apply_gate
from pallas_kernels.experts.op import grouped_matmul_reference
from pallas_kernels.experts.route import norm_and_route
from pallas_kernels.experts.summed_plan import summed_plan
from pallas_kernels.qtensor import QTensor, dequantize, tree_bytes
from pallas_kernels.rounding import FORMATS

SHAPES = {  # experts, chosen, rows and columns of one, SwiGLU
    "qwen3 gate_up": (128, 8, 1536, 2048, True),
    "qwen3 down": (128, 8, 2048, 768, False),
    "gpt-oss gate_up": (32, 4, 5760, 2880, True),
    "gpt-oss down": (32, 4, 2880, 2880, False),
    "olmoe gate_up": (64, 8, 2048, 2048, True),
    "olmoe down": (64, 8, 2048, 1024, False),
}
FOUR_BITS = {"group_size": 128, "symmetric": False}
MOST_SUMMED = 16  # tokens of which the summing kernel is timed; the op gives it one
CALLS = 8  # choices of experts, which the calls take in turn


def weight(scheme: str, n_experts: int, n: int, k: int) -> Any:
    """Random experts ``[E, N, K]``, or None where no group divides K."""

    def one(key: jax.Array) -> Any:
        w = (jax.random.normal(key, (n, k)) * k**-0.5).astype(jnp.bfloat16)
        if scheme == "bf16":
            return w
        if scheme == "w8":
            return quantize(w, "int8", scale_dtype="float32")
        return quantize(w, scheme) if scheme in FORMATS else quantize(w, "int4", **FOUR_BITS)

    if scheme == "w4" and k % 128:
        return None
    return jax.jit(functools.partial(lax.map, one))(jax.random.split(jax.random.key(0), n_experts))


def choices(tokens: int, chosen: int, n_experts: int) -> list[jax.Array]:
    """Different experts for each token, int32 ``[T, k]``."""
    rng = np.random.default_rng(0)
    order = [rng.random((tokens, n_experts)).argsort(-1)[:, :chosen] for _ in range(CALLS)]
    return [jnp.asarray(one.astype(np.int32)) for one in order]


def of_form(form: str, swiglu: bool) -> Callable[..., jax.Array]:
    """XLA's form of the op, whatever is predicted."""

    def run(x: jax.Array, w: Any, experts: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        sums = xla.sums(rows, w, experts.reshape(-1), experts.size // rows.shape[0], form)
        return (apply_gate(sums, "silu") if swiglu else sums).astype(x.dtype)

    return run


def of_plan(plan: Any, gated: str | None) -> Callable[..., jax.Array]:
    """The op by a kernel's plan, whatever is predicted."""

    def run(x: jax.Array, w: Any, experts: jax.Array) -> jax.Array:
        fan = experts.size // (x.size // x.shape[-1])
        static = op.GroupedStatic(fan, gated, plan, x.dtype, w.shape[0], False)
        return op.planned(static, x, w, experts)

    return run


def of_sum(plan: Any) -> Callable[..., jax.Array]:
    """The kernel that sums over a token's experts, each with a weight of 1."""

    def run(x: jax.Array, w: Any, experts: jax.Array) -> jax.Array:
        static = op.GroupedStatic(1, None, plan, x.dtype, w.shape[0], False)
        return op.planned(static, x, w, experts, jnp.ones(experts.shape, jnp.float32))

    return run


def sorted_ragged(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """``jax.lax.ragged_dot`` alone: rows that are sorted by expert already, no gate.

    w: ``[E, K, N]``.  sizes: pairs of each expert.
    """
    return lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)


def ragged(swiglu: bool) -> Callable[..., jax.Array]:
    """``jax.lax.ragged_dot`` on rows sorted by expert, of a weight in floats; floats of codes are
    made first.  Sorting, gathering and the scatter of results count."""

    def run(x: jax.Array, w: Any, experts: jax.Array) -> jax.Array:
        rows, pairs = x.reshape(-1, x.shape[-1]), experts.reshape(-1)
        order = jnp.argsort(pairs, stable=True)
        sizes = jnp.bincount(pairs, length=w.shape[0]).astype(jnp.int32)
        floats = dequantize(w, x.dtype) if isinstance(w, QTensor) else w
        y = lax.ragged_dot(
            rows[order // (experts.size // rows.shape[0])],
            floats.transpose(0, 2, 1),
            sizes,
            preferred_element_type=jnp.float32,
        )
        sums = jnp.zeros_like(y).at[order].set(y)
        return (apply_gate(sums, "silu") if swiglu else sums).astype(x.dtype)

    return run


def dense(w: Any, hit: int) -> Any:
    """As many experts' rows as one weight ``[hit N, K]``."""
    return jax.tree.map(lambda v: v[:hit].reshape(-1, v.shape[-1]), w)


def report(name: str, scheme: str, tokens: int, path: str | None, only: list[str]) -> None:
    """Measure every form of one case; append the times to the file if one is given."""
    n_experts, chosen, n, k, swiglu = SHAPES[name]
    w = weight(scheme, n_experts, n, k)
    if w is None:
        return
    shape = (tokens, k) if swiglu else (tokens, chosen, k)
    x = jax.random.normal(jax.random.key(1), shape).astype(jnp.bfloat16)
    picked = choices(tokens, chosen, n_experts)
    sets = [(x, w, experts) for experts in picked]
    hit = int(np.mean([len(np.unique(np.asarray(experts))) for experts in picked]))
    floor = 1e6 * tree_bytes(w) * hit / n_experts / gpu().copy_rate
    gated = "silu" if swiglu else None
    pairs, rows = tokens * chosen, x.size // k
    forms: dict[Any, Callable[..., jax.Array]] = {"blocks": of_form("blocks", swiglu)}
    if pairs <= 512:
        forms["gather"] = of_form("gather", swiglu)
    plans = {"mosaic": planning.row_plan, "tiles": planning.tile_plan}
    for form, plan in plans.items():
        found = plan(x, w, pairs, gated)
        if not isinstance(found, Reason):
            forms[form] = of_plan(found, gated)
    if not swiglu:
        found = summed_plan(x, w, pairs, chosen, most_tokens=MOST_SUMMED)
        if not isinstance(found, Reason):
            forms["summed"] = of_sum(found)
    if plan.has_every(w, rows):
        forms["every"] = of_form("every", swiglu)
    forms["ragged"] = ragged(swiglu)
    forms = {form: f for form, f in forms.items() if not only or form in only}
    want = None
    if pairs <= 64:
        want = np.asarray(grouped_matmul_reference(x, w, picked[0], gated=gated), np.float32)
    ours = [form for form in forms if form != "ragged"]
    us_of = {form: plan.form_us(form, w, pairs, rows, swiglu) for form in ours}
    shortest = min(us_of, key=us_of.__getitem__, default=None)
    for form, f in forms.items():
        us, error = device_us(f, sets), ""
        if want is not None:
            wanted = want.sum(axis=1) if form == "summed" else want
            got = np.asarray(jax.jit(f)(*sets[0]), np.float32).reshape(wanted.shape)
            error = f"error {np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2)):.1e}"
        mark = "*" if form == shortest else ""
        predicted = f"predicted {us_of[form]:.1f}{mark}" if form in us_of else ""
        print(
            f"{name:16} {scheme:5} T={tokens:5} {form:10} {us:9.1f} us  share {floor / us:5.0%}  "
            f"{predicted:22} {error}",
            flush=True,
        )
        if path is not None:
            row = {"card": jax.devices()[0].device_kind, "shape": SHAPES[name][:4]}
            row |= {"scheme": scheme, "tokens": tokens, "rows": rows}
            with open(path, "a") as file:
                print(json.dumps({**row, "form": form, "us": round(us, 1)}), file=file)
    if not only or "dense" in only:
        one = jax.jit(functools.partial(dense, hit=hit))(w)
        wide = jax.random.normal(jax.random.key(2), (-(-pairs // hit), k)).astype(jnp.bfloat16)
        us = device_us(quantized_matmul, [(wide, one)])
        of = f"{len(wide)} rows, {hit} experts' bytes, no gate"
        print(f"{name:16} {scheme:5} T={tokens:5} {'dense':10} {us:9.1f} us  {of}", flush=True)
        del one
    if scheme == "bf16" and (not only or "ragged_dot" in only):
        turned = jnp.swapaxes(w, 1, 2) + 0  # + 0: it is stored so
        sizes = [jnp.bincount(e.reshape(-1), length=n_experts).astype(jnp.int32) for e in picked]
        rows_of_pairs = jax.random.normal(jax.random.key(3), (pairs, k)).astype(jnp.bfloat16)
        us = device_us(sorted_ragged, [(rows_of_pairs, turned, size) for size in sizes])
        of = "sorted rows, no gate"
        print(f"{name:16} {scheme:5} T={tokens:5} {'ragged_dot':10} {us:9.1f} us  {of}", flush=True)


def report_route(tokens: int, n: int, d: int, k: int) -> None:
    """Time ``norm_and_route``'s kernel beside its parts, and count equal choices."""
    x, gamma = jnp.ones((tokens, d), jnp.bfloat16), jnp.ones((d,), jnp.bfloat16)
    x = x * jax.random.normal(jax.random.key(0), x.shape).astype(x.dtype)
    keys = jax.random.split(jax.random.key(1), 96)  # more than the L2 holds
    routers = [(jax.random.normal(key, (n, d)) * d**-0.5).astype(x.dtype) for key in keys]
    us, found = {}, {}
    for form in ("mosaic", "xla"):
        options = {"k": k, "normalize": True, "implementation": form}
        f = jax.jit(lambda x, r, options=options: norm_and_route(x, (gamma, 1e-6), r, **options))
        us[form] = device_us(f, [(x, router) for router in routers], 96)
        found[form] = [f(x, router) for router in routers[:8]]
    pairs = list(zip(found["mosaic"], found["xla"], strict=True))
    same = np.mean([np.array_equal(ours[1], theirs[1]) for ours, theirs in pairs])
    off = max(float(jnp.max(jnp.abs(ours[2] - theirs[2]))) for ours, theirs in pairs)
    print(
        f"route {k} of {n}, {d} columns, T={tokens}: kernel {us['mosaic']:.1f} us, parts "
        f"{us['xla']:.1f}; equal choices {same:.0%}, weights off by {off:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 8192])
    parser.add_argument("--schemes", nargs="+", default=["bf16", "w8", "w4", "mxfp4"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--json", metavar="FILE", help="append the times, for experts_fit")
    parser.add_argument("--forms", nargs="+", default=[], help="default: all")
    parser.add_argument("--route", action="store_true", help="norm, router and choice")
    options = parser.parse_args()
    print(jax.devices()[0].device_kind, "jax", jax.__version__)
    if options.route:
        for tokens in (1, 8):
            report_route(tokens, 128, 2048, 8)
            report_route(tokens, 32, 2880, 4)
        return
    for name in options.shapes:
        for scheme in options.schemes:
            for tokens in options.tokens:
                report(name, scheme, tokens, options.json, options.forms)


if __name__ == "__main__":
    main()
