"""Every op beside every wrong operand: dtypes replaced, axes of 0, 1 and 3; and where a kernel is
chosen.  A call gives the reference's value or an error that names the operand, in both forms."""

from __future__ import annotations

import dataclasses
import logging
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from pallas_kernels import dispatch
from pallas_kernels.attention.rope_cache import quantize_kv
from pallas_kernels.gla.token import GlaLayerTokens, gla_token
from pallas_kernels.operands import Columns
from tests.helpers.arrays import as_jax
from tests.kernels.gla.test_gla_token import case as token_case
from tests.kernels.gla.test_gla_token import expected as token_expected

DTYPES = ("float32", "bfloat16", "float16", "int8", "int32", "uint32")
newest = pytest.mark.skipif(
    jax.__version_info__ < dispatch.TESTED_JAX[0], reason=f"jax {jax.__version__} lowers no kernel"
)
EPS = 1e-5
quantized = jax.jit(
    pk.quantize, static_argnames=("dtype", "group_size", "symmetric", "scale_dtype")
)
quantized_kv = jax.jit(quantize_kv, static_argnums=1)


def draw(*shape, seed=0, dtype="bfloat16"):
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape).astype(jnp.dtype(dtype))


def wide(x):
    return np.asarray(x).astype(np.float32).astype(np.float64)


def floats(q, scale, zero=None, dtype=None):
    """What words, scales and zeros stand for."""
    words = wide(q).reshape(*scale.shape, q.shape[-1] // scale.shape[-1])
    scale = wide(scale)[..., None]
    if zero is None:
        return (words * scale).reshape(q.shape)
    zero, is_int = wide(zero)[..., None], jnp.issubdtype(zero.dtype, jnp.integer)
    return ((words - zero) * scale if is_int else words * scale + zero).reshape(q.shape)


def qtensor(a, name, **static):
    parts = {part: a[f"{name}.{part}"] for part in ("q", "scale", "zero") if f"{name}.{part}" in a}
    return pk.QTensor(**parts, **static)


def parts(name, w):
    given = {f"{name}.q": w.q, f"{name}.scale": w.scale, f"{name}.zero": w.zero}
    return {key: np.asarray(x) for key, x in given.items() if x is not None}


def cached(a, name):
    return a[name] if name in a else qtensor(a, name)


def cached_floats(a, name):
    if name in a:
        return wide(a[name])
    return floats(*(a.get(f"{name}.{part}") for part in ("q", "scale", "zero")))


# --- the calls: (operands by name, the op, its value in float64) ---


def normed(x, gamma):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * gamma


def plain_matmul():
    given = {"x": draw(2, 512), "w": draw(32, 512, seed=1), "bias": draw(32)}

    def want(a):
        return wide(a["x"]) @ wide(a["w"]).T + wide(a["bias"])

    return given, lambda a, **kw: pk.quantized_matmul(a["x"], a["w"], bias=a["bias"], **kw), want


def fused_matmul():
    given = {
        "x": draw(2, 512),
        "w": draw(32, 512, seed=1),
        "norm's weight": draw(512),
        "residual": draw(2, 32),
        "pending": draw(2, 512, seed=2, dtype="float32"),
    }

    def call(a, **kw):
        options = {"residual": a["residual"], "pending": a["pending"]}
        return pk.quantized_matmul(a["x"], a["w"], norm=(a["norm's weight"], EPS), **options, **kw)

    def want(a):
        total = wide((a["x"].astype(np.float32) + a["pending"]).astype(a["x"].dtype))
        y = normed(total, wide(a["norm's weight"])) @ wide(a["w"]).T
        return y + wide(a["residual"]), total

    return given, call, want


def weight_only(words, group, zeros):
    def build():
        drawn = as_jax(draw(32, 1024, seed=1))
        w = quantized(drawn, words, group_size=group, symmetric=not zeros)

        def want(a):
            return wide(a["x"]) @ floats(*(a.get(f"w.{p}") for p in ("q", "scale", "zero"))).T

        call = lambda a, **kw: pk.quantized_matmul(a["x"], qtensor(a, "w"), **kw)  # noqa: E731
        return {"x": draw(2, 1024)} | parts("w", w), call, want

    return build


def quantized_pair():
    x, w = (quantized(as_jax(draw(n, 128)), scale_dtype="float32") for n in (2, 32))

    def want(a):
        return floats(a["x.q"], a["x.scale"]) @ floats(a["w.q"], a["w.scale"]).T

    def call(a, **kw):
        return pk.quantized_matmul(qtensor(a, "x"), qtensor(a, "w"), **kw)

    return parts("x", x) | parts("w", w), call, want


def rms_norm(quantize):
    def build():
        given = {"x": draw(2, 1024), "weight": draw(1024), "residual": draw(2, 1024, seed=1)}

        def call(a, **kw):
            options = {"residual": a["residual"], "quantize": quantize}
            y, total = pk.rms_norm(a["x"], a["weight"], EPS, **options, **kw)
            return (pk.dequantize(y) if quantize else y), total

        def want(a):
            total = wide(a["x"] + a["residual"])
            return normed(total, wide(a["weight"])), total

        return given, call, want

    return build


def swiglu():
    def want(a):
        gate, up = np.split(wide(a["gate_up"]), 2, axis=-1)
        return gate / (1 + np.exp(-gate)) * up

    def call(a, **kw):
        return pk.dequantize(pk.swiglu(a["gate_up"], quantize="int8", **kw))

    return {"gate_up": draw(2, 2048)}, call, want


def quantize_tokens():
    def call(a, **kw):
        return pk.dequantize(pk.quantize_tokens(a["x"], **kw))

    return {"x": draw(2, 1024)}, call, lambda a: wide(a["x"])


def quantize():
    def call(a, implementation):
        return pk.dequantize(pk.quantize(a["w"], "int8"))

    return {"w": draw(4, 64)}, call, lambda a: wide(a["w"])


def dequantize():
    w = quantized(as_jax(draw(4, 64)), "int4", group_size=32, symmetric=False)
    order = np.random.default_rng(0).permutation(64).astype(np.int32)

    def call(a, implementation):
        return pk.dequantize(qtensor(a, "w", columns=a["w.columns"]))

    def want(a):
        values = floats(a["w.q"], a["w.scale"], a["w.zero"])
        return values[..., np.argsort(a["w.columns"])]

    return parts("w", w) | {"w.columns": order}, call, want


def cache_of(words, batch=5):
    k, v = (draw(batch, 16, 2, 64, seed=s) for s in (1, 2))
    if words is None:
        return {"k": k, "v": v}
    k, v = (quantized_kv(as_jax(x), words) for x in (k, v))
    return parts("k", k) | parts("v", v)


def spread(x):
    """The basis of an int4 cache: Walsh and Hadamard's, its own inverse."""
    w, width = np.ones((1, 1)), x.shape[-1] & -x.shape[-1]
    while len(w) < width:
        w = np.kron(w, [[1, 1], [1, -1]])
    return (x.reshape(*x.shape[:-1], x.shape[-1] // len(w), len(w)) @ w).reshape(x.shape) * len(
        w
    ) ** -0.5


def attention(q, k, v, lengths):
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[2]
    for b, n in np.ndindex(*q.shape[:2]):
        seen = min(max(int(lengths[b]), 0), k.shape[1])
        if seen == 0 or q.shape[2] == 0:
            continue
        keys, values = (x[b, :seen, n // group] for x in (k, v))
        weights = np.exp(keys @ q[b, n] * q.shape[2] ** -0.5)
        out[b, n] = weights @ values / weights.sum()
    return out


def decode_attention(words):
    def build():
        given = {
            "q": draw(5, 4, 64),
            "lengths": np.asarray([16, 5, 0, 1, 9], np.int32),
            **cache_of(words),
        }

        def call(a, **kw):
            return pk.decode_attention(a["q"], cached(a, "k"), cached(a, "v"), a["lengths"], **kw)

        def want(a):
            k, v = (cached_floats(a, name) for name in "kv")
            out = attention(wide(a["q"]), k, v, a["lengths"])
            return spread(out) if words == "int4" else out

        return given, call, want

    return build


def pool_of(table):
    """12 pages of 32 tokens, and two of them, or places of none, for each of five rows."""
    k, v = (draw(12, 32, 2, 64, seed=s) for s in (1, 2))
    return {"k": k, "v": v, "table": np.asarray(table, np.int32)}


def rows_of(a, name):
    pool = wide(a[name])
    if not pool.size:
        return np.zeros((len(a["table"]), 0, *pool.shape[2:]))
    pages = pool[np.clip(a["table"], 0, len(pool) - 1)]
    return pages.reshape(len(pages), a["table"].shape[1] * pool.shape[1], *pool.shape[2:])


def attention_in_pages():
    table = [[7, 3], [0, -1], [99, 12], [5, 99], [4, 11]]
    given = {"q": draw(5, 4, 64), "lengths": np.asarray([64, 5, 0, 32, 40], np.int32)}

    def call(a, **kw):
        return pk.decode_attention(a["q"], a["k"], a["v"], a["lengths"], table=a["table"], **kw)

    def want(a):
        return attention(wide(a["q"]), *(rows_of(a, name) for name in "kv"), a["lengths"])

    return given | pool_of(table), call, want


def rotated(x, cos, sin):
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)


def rope(op, words, batch=5):
    """Two rows' slots are outside, and neither written nor seen."""

    def build():
        angle = np.random.default_rng(3).uniform(0, 6, (batch, 32))
        tables = {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
        slots = {"slots": np.asarray([3, -1, 16, 0, 15][:batch], np.int32)}
        given = {"qkv": draw(batch, 8, 64), **tables, **cache_of(words, batch), **slots}

        def call(a, **kw):
            k, v = cached(a, "k"), cached(a, "v")
            out, k, v = op(a["qkv"], a["cos"], a["sin"], k, v, a["slots"], **kw)
            return out, *((pk.dequantize(x) if words else x) for x in (k, v))

        def want(a):
            before = [cached_floats(a, name) for name in "kv"]
            capacity, n_kv = before[0].shape[1:3]
            x = wide(a["qkv"])
            cos, sin = (wide(a[table])[:, None] for table in ("cos", "sin"))
            n = x.shape[1] - 2 * n_kv
            q, k = rotated(x[:, :n], cos, sin), rotated(x[:, n : n + n_kv], cos, sin)
            v, slots = x[:, n + n_kv :], a["slots"]
            if words == "int4":
                q, k, v = spread(q), spread(k), spread(v)
            for row, slot in enumerate(slots):
                if 0 <= slot < capacity:
                    before[0][row, slot], before[1][row, slot] = k[row], v[row]
            if op is pk.rope_and_write:
                return q, *before
            seen = np.where((slots >= 0) & (slots < capacity), slots + 1, 0)
            return attention(q, *before, seen), *before

        return given, call, want

    return build


def rope_in_pages():
    """Two slots are outside, and one is on no page."""

    def build():
        given, _, _ = rope(pk.rope_and_write, None)()
        table = [[7, 3], [0, -1], [2, 10], [99, 1], [4, 11]]
        slots = {"slots": np.asarray([3, -1, 64, 0, 40], np.int32)}
        return given | pool_of(table) | slots, call, want

    def call(a, **kw):
        rest = (a[name] for name in ("qkv", "cos", "sin", "k", "v", "slots"))
        return pk.rope_and_write(*rest, table=a["table"], **kw)

    def want(a):
        pools = [wide(a[name]) for name in "kv"]
        n_kv, page = pools[0].shape[2], pools[0].shape[1]
        x, n = wide(a["qkv"]), a["qkv"].shape[1] - 2 * n_kv
        turned = rotated(x[:, : n + n_kv], *(wide(a[t])[:, None] for t in ("cos", "sin")))
        for row, slot in enumerate(a["slots"]):
            if not 0 <= slot < page * a["table"].shape[1]:
                continue
            entry = a["table"][row, slot // page]
            if 0 <= entry < len(pools[0]):
                pools[0][entry, slot % page] = turned[row, n:]
                pools[1][entry, slot % page] = x[row, n + n_kv :]
        return turned[:, :n], *pools

    return build()


def recursion(q, k, v, g, *rest, lengths=None, segments=None):
    """The gated delta rule of ``[B, T, H, D]`` in float64, or GLA, which has no beta."""
    *beta, state = rest
    o, repeats = np.zeros(v.shape), v.shape[2] // max(q.shape[2], 1)
    q, k = np.repeat(q, repeats, 2), np.repeat(k, repeats, 2)
    decay = np.exp(g if g.ndim == 4 else g[..., None])[..., None]
    for b, t in np.ndindex(*q.shape[:2]):
        if lengths is not None and t >= lengths[b]:
            continue
        new = segments is not None and t > 0 and segments[b, t] != segments[b, t - 1]
        state[b] = decay[b, t] * (not new) * state[b]
        u = v[b, t]
        if beta:
            u = beta[0][b, t][:, None] * (u - np.einsum("hk,hkv->hv", k[b, t], state[b]))
        state[b] += k[b, t][..., None] * u[:, None]
        o[b, t] = max(q.shape[-1], 1) ** -0.5 * np.einsum("hk,hkv->hv", q[b, t], state[b])
    return o, state


def recurrence(op, d_v, is_delta=False):
    """A delta rule has two heads of values to a key's, and a decay a head."""

    def build():
        heads, one_step = 4 + 4 * is_delta, op in (pk.gla_step, pk.gated_delta_step)
        at = (2,) if one_step else (2, 5)
        decays = (heads,) if is_delta else (heads, 64)
        given = {
            "q": draw(*at, 4, 64),
            "k": draw(*at, 4, 64, seed=1) / (8 if is_delta else 1),
            "v": draw(*at, heads, d_v, seed=2),
            "log_decay": -np.abs(draw(*at, *decays, seed=3, dtype="float32")),
        }
        if is_delta:
            given["beta"] = 1 / (1 + np.exp(draw(*at, heads, seed=4, dtype="float32")))
        state = draw(2, heads, 64, d_v, dtype="float32")
        if one_step:
            return given | {"state": state}, call, want_of_step
        given |= {"initial_state": state, "lengths": np.asarray([5, 2], np.int32)}
        given["segment_ids"] = np.asarray([[0, 0, 0, 1, 1]] * 2, np.int32)
        return given, call, want

    def call(a, **kw):
        return op(**a, **kw)

    def want(a):
        *given, lengths, segments = a.values()
        return recursion(*map(wide, given), lengths=lengths, segments=segments)

    def want_of_step(a):
        *given, state = (wide(x) for x in a.values())
        o, state = recursion(*(x[:, None] for x in given), state)
        return o[:, 0], state

    return build


def one_token():
    """``gla.token`` has the kernel alone."""
    streams, decay, norm, lengths, state = token_case(5, 4, 2, 64, 128, together=False)
    given = dict(zip(("q", "k", "v", "low", "gate"), (x.rows for x in streams), strict=True))
    given |= {
        "decay weight": decay[0],
        "decay bias": decay[1],
        "norm": norm,
        "lengths": lengths,
        "state": state,
    }
    given = {name: np.asarray(x) for name, x in given.items()}

    def taken(a):
        *rows, weight, bias, norm, lengths, state = (a[name] for name in given)
        return list(map(Columns.whole, rows)), (weight, bias), norm, lengths, state

    def call(a, implementation):
        return gla_token(GlaLayerTokens(*taken(a)), eps=1e-5, normalizer=16.0, clamp_min=None)

    return given, call, lambda a: token_expected(*taken(a), None)


def grouped_matmul():
    given = {
        "x": draw(2, 64),
        "w": draw(3, 16, 64, seed=1),
        "experts": np.asarray([[0, 2], [1, 0]], np.int32),
        "weights": draw(2, 2, dtype="float32"),
    }

    def call(a, **kw):
        return pk.grouped_matmul(a["x"], a["w"], a["experts"], weights=a["weights"], **kw)

    def want(a):
        own = wide(a["w"])[np.clip(a["experts"], 0, len(a["w"]) - 1)]
        return np.einsum("ti,tkoi,tk->to", wide(a["x"]), own, wide(a["weights"]))

    return given, call, want


CASES = {
    "quantized_matmul plain": plain_matmul,
    "quantized_matmul fused": fused_matmul,
    "quantized_matmul w4": weight_only("int4", 128, zeros=True),
    "quantized_matmul w8": weight_only("int8", None, zeros=False),
    "quantized_matmul w8a8": quantized_pair,
    "rms_norm": rms_norm(None),
    "rms_norm to int8": rms_norm("int8"),
    "swiglu": swiglu,
    "quantize_tokens": quantize_tokens,
    "quantize": quantize,
    "dequantize": dequantize,
    "decode_attention": decode_attention(None),
    "decode_attention int8": decode_attention("int8"),
    "decode_attention int4": decode_attention("int4"),
    "decode_attention pages": attention_in_pages,
    "rope_and_write": rope(pk.rope_and_write, None),
    "rope_and_write pages": rope_in_pages,
    "rope_and_write int8": rope(pk.rope_and_write, "int8"),
    "rope_and_write int4": rope(pk.rope_and_write, "int4"),
    "rope_and_attend": rope(pk.rope_and_attend, None, 2),
    "gated_delta": recurrence(pk.gated_delta, 128, is_delta=True),
    "gated_delta_step": recurrence(pk.gated_delta_step, 128, is_delta=True),
    "gla": recurrence(pk.gla, 64),
    "gla_step": recurrence(pk.gla_step, 128),
    "gla_token": one_token,
    "grouped_matmul": grouped_matmul,
}
WITHOUT_KERNEL = {"quantize", "dequantize", "grouped_matmul"}
# The XLA form of these is that of the case beside them.
WITHOUT_XLA = {
    "gla_token",
    "quantized_matmul w8",
    "rms_norm",
    "decode_attention int8",
    "rope_and_write int8",
}
# The same operands stand in another scheme or form beside these: with `-m slow`.
SCHEMES = {
    "quantized_matmul w8",
    "decode_attention int8",
    "decode_attention int4",
    "decode_attention pages",
    "rope_and_write int8",
    "rope_and_write int4",
    "rope_and_write pages",
    "gated_delta",
    "quantized_matmul plain",
    "rope_and_write",
    "gla",
}
CORE = ("quantize_tokens", "decode_attention")
# The second of a new token's 16 levels: range / 15 / sqrt(12) / standard deviation.
ERROR, ERROR_INT4 = 0.03, {"rope_and_write int4": 0.1}


def changes(given):
    """(what, the operands changed, the names of which an error is to have one)."""
    yield "nothing", given, ()
    for name, x in given.items():
        for dtype in DTYPES:
            if dtype != x.dtype.name:
                # What a negative float becomes as an unsigned number differs between CPUs.
                values = np.abs(x) if dtype == "uint32" else x
                yield f"{name} {dtype}", given | {name: values.astype(dtype)}, (name,)
        for axis, size in np.ndindex(x.ndim, 3):
            size = (0, 1, 3)[size]
            if size != x.shape[axis]:
                yield f"{name} {axis}={size}", given | {name: resized(x, axis, size)}, (name,)
    # Axes of one size in all operands that have it, found by their sizes: rows, heads, tokens ...
    # These calls are computed; each size becomes 0, and 1 or 3 in turn.
    for turn, old in enumerate(sorted({n for x in given.values() for n in x.shape})):
        for new in (0, 1 + 2 * (turn % 2)):
            changed = dict(given)
            for name, x in given.items():
                for axis in range(x.ndim):
                    if x.shape[axis] == old:
                        changed[name] = resized(changed[name], axis, new)
            yield f"{old} becomes {new}", changed, tuple(given)


def resized(x, axis, size):
    return x.take(np.arange(size) % x.shape[axis], axis)


def refuses(error, names, what):
    message = str(error)
    assert re.match(r"[a-z_]+: ", message) and "\n" not in message, (what, message)
    words = [name.split(".")[0] for name in names]
    assert any(re.search(rf"\b{re.escape(w)}\b", message) for w in words), (what, message)


def walk(name, implementation, run):
    given, call, want = CASES[name]()
    op = lambda a: call(a, implementation=implementation)  # noqa: E731
    n_taken, other_dtypes = 0, set()
    for what, operands, names in changes(given):
        # Of the dtypes that an operand may have beside its own, one is computed.
        is_known = what.split()[-1] in DTYPES and names in other_dtypes
        try:
            if is_known:
                jax.eval_shape(op, operands)
                continue
            got = run(op, operands)
        except (ValueError, NotImplementedError) as error:
            assert names, error  # the unchanged call
            refuses(error, names, what)
            continue
        n_taken += 1
        if what.split()[-1] in DTYPES:
            other_dtypes.add(names)
        if got is None:
            continue
        for x, y in zip(*(jax.tree.leaves(t) for t in (got, want(operands))), strict=True):
            assert x.shape == y.shape, what
            x = wide(x)
            assert np.isfinite(x).all(), what
            most = ERROR_INT4.get(name, ERROR) * np.linalg.norm(y) + 1e-6
            assert np.linalg.norm(x - y) <= most, what
    assert n_taken


@pytest.fixture(autouse=True)
def forget(forget_programs):
    """As ``forget_programs`` does, after each test: some hundred programs."""
    yield
    jax.clear_caches()


def value(op, operands):
    # Hundreds of small programs: on a CPU what compiles soonest is soonest done.
    quickly = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(op, compiler_options=quickly)(operands)


def lowered(op, operands):
    text = jax.jit(op).trace(operands).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) == (not dispatch.is_empty(operands)), "launched for nothing"


def cases_but(without):
    marks = dict.fromkeys(SCHEMES, pytest.mark.slow) | dict.fromkeys(CORE, pytest.mark.core)
    names = (name for name in CASES if name not in without)
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks.get(name, ())) for name in names]
    )


@cases_but(WITHOUT_XLA)
def test_the_xla_form_is_right_or_names_the_operand(name):
    walk(name, "xla", value)


@newest
@cases_but(WITHOUT_KERNEL)
def test_the_kernel_lowers_or_the_operand_is_named(name):
    walk(name, "mosaic", lowered)


@pytest.mark.gpu
@cases_but(WITHOUT_KERNEL)
def test_the_kernel_is_right_or_names_the_operand(name):
    walk(name, "mosaic", value)


# --- where a kernel is chosen ---

HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
CPU = jax.devices("cpu")[0]


@pytest.fixture
def hopper_host(monkeypatch):
    """A machine whose default device is a Hopper GPU, with a tested jax."""
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda kind=None: devices(kind) if kind else [HOPPER])
    monkeypatch.setattr(jax, "__version_info__", dispatch.TESTED_JAX[0])
    dispatch._say_once.cache_clear()


def wants(*operands):
    return dispatch.wants_kernel(None, *operands)


def test_work_on_a_cpu_gets_no_kernel_on_a_hopper_host(hopper_host):
    seen = []

    def look(x):
        seen.append(wants(x))
        return x

    mesh = jax.sharding.Mesh(np.asarray([CPU]), ("model",))
    x = jnp.ones((4,))
    assert wants() and wants(x) and wants(jax.ShapeDtypeStruct((4,), jnp.float32))
    assert not wants(x, jax.device_put(x, CPU))
    assert not wants(jax.device_put(x, jax.NamedSharding(mesh, P())))
    jax.jit(look)(x)
    with jax.default_device(CPU):
        assert not wants() and not wants(x)
        jax.jit(look)(x)
    with jax.default_device("cpu"):
        assert not wants(x)
    with jax.set_mesh(mesh):
        jax.jit(look)(x)
    jax.jit(jax.shard_map(look, mesh=mesh, in_specs=P(), out_specs=P()))(x)
    assert seen == [True, False, False, False]


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 13, 0)])
def test_an_untested_jax_takes_xla_and_says_so_once(hopper_host, monkeypatch, caplog, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        for _ in range(2):
            assert not wants(jnp.ones(3))
    assert [r.message for r in caplog.records] == [
        f"no Mosaic kernel is used: jax {jax.__version__} is not one of the tested versions, "
        "0.11.2 <= jax < 0.13.0, which need Python 3.12"
    ]


# --- explain ---


def test_explain_says_why_there_is_no_kernel(hopper_host, monkeypatch):
    x, w = draw(2, 1024), draw(1024)
    assert pk.explain("rms_norm", x, w, EPS, implementation="xla").endswith(
        "xla (it was asked for)"
    )
    assert pk.explain("swiglu", x, quantize="int8") == (
        "swiglu bfloat16[2,1024]: xla (XLA is as fast below 1024 columns)"
    )
    assert "gate_up has rows of float32" in pk.explain(
        pk.swiglu, x.astype("float32"), quantize="int8"
    )
    cpu = jax.device_put(x, CPU)
    assert "on 'cpu'" in pk.explain("rms_norm", cpu, w, EPS)
    assert "size 0" in pk.explain("rms_norm", x[:0], w, EPS, implementation="mosaic")
    assert pk.explain("quantize", w) == "quantize: xla (it has no kernel)"
    with pytest.raises(ValueError, match="'softmax' is no op"):
        pk.explain("softmax", x)
    with pytest.raises(ValueError, match="rms_norm: weight"):
        pk.explain("rms_norm", x, w[1:], EPS)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "tested versions" in pk.explain("rms_norm", x, w, EPS)


@newest
def test_explain_tells_the_plan_that_the_planner_has():
    from pallas_kernels.attention import op as attention
    from pallas_kernels.gla import kernel, step_kernel
    from pallas_kernels.matmul.op import product_plan
    from pallas_kernels.recurrence.op import Heads

    shape, bf16, f32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.float32
    w = pk.QTensor(shape((28672, 4096), jnp.int4), shape((28672, 32), bf16))
    rows = [shape((m, 4096), bf16) for m in (1, 16, 512)]
    head, heads = shape((1, 4, 128), bf16), shape((1, 64, 4, 128), bf16)
    decays = shape(head.shape, f32), shape(heads.shape, f32)
    state = shape((1, 4, 128, 128), f32)
    whole = Heads(heads, heads, heads, decays[1])
    cache, lengths = shape((1, 1024, 4, 128), bf16), shape((1,), jnp.int32)
    calls = [
        *(("quantized_matmul", (x, w), product_plan(x, w, out_dtype=bf16)) for x in rows),
        ("gla", tuple(whole[:4]), kernel.plan(whole)),
        ("gla_step", (head, head, head, decays[0], state), step_kernel.plan(head, head, head)),
        ("decode_attention", (head, cache, cache, lengths), attention.plan(head, cache, cache)),
    ]
    for op, operands, plan in calls:
        text = pk.explain(op, *operands, implementation="mosaic")
        assert f": mosaic, {plan.kernel}, " in text and text.endswith(str(plan)), text
    x = draw(1, 4096)
    for op, operands, options in (
        ("rms_norm", (x, draw(4096), EPS), {}),
        ("swiglu", (x,), {"quantize": "int8"}),
    ):
        text = pk.explain(op, *operands, implementation="mosaic", **options)
        assert ": mosaic, rowwise_mosaic, " in text
    text = pk.explain("swiglu", x, implementation="mosaic")
    assert ": no mosaic kernel (without a quantize it is element-wise" in text


def test_numpy_operands_are_arrays():
    x, w = np.ones((2, 8), np.float32), np.ones((3, 4, 8), np.float32)
    assert (pk.grouped_matmul(x, w, np.zeros((2, 1), np.int32)) == 8).all()
    angle, cache = np.zeros((1, 4), np.float32), np.zeros((1, 4, 1, 8), np.float32)
    heads, at = np.ones((1, 3, 8), np.float32), np.zeros(1, np.int32)
    q, k, _ = pk.rope_and_write(heads, angle + 1, angle, cache, cache, at)
    assert (q == 1).all() and k.sum() == 8


def test_a_kernel_that_gelu_does_not_have_is_refused():
    x = np.ones((2, 8), np.float32)
    with pytest.raises(NotImplementedError, match="swiglu: no Mosaic kernel"):
        pk.swiglu(x, activation="gelu", implementation="mosaic")


def test_fp8_groups_go_with_plain_columns():
    x, w = draw(2, 256), draw(128, 256)
    codes = pk.quantize_tokens(x, "float8_e4m3fn", group_size=128)
    w = pk.quantize(w, "float8_e4m3fn", group_size=128)
    columns = jnp.arange(256, dtype=jnp.int32)[::-1]
    for changed in ({"columns": columns}, {"zero": jnp.ones_like(w.scale)}):
        with pytest.raises(ValueError, match="quantized_matmul: with groups of x"):
            pk.quantized_matmul(codes, dataclasses.replace(w, **changed))


@pytest.mark.parametrize("dtype", ["int4", "bool", "nonsense"])
def test_an_op_names_a_dtype_that_it_does_not_make(dtype):
    x, w = np.ones((2, 32), np.float32), np.ones(32, np.float32)
    rows = "int8 or float8_e4m3fn"
    floats = "float32, bfloat16 or float16"
    for call, message in (
        (
            lambda: pk.rms_norm(x, w, 1e-5, quantize=dtype),
            f"rms_norm: quantize '{dtype}' is not {rows}",
        ),
        (
            lambda: pk.rms_norm(x, w, 1e-5, out_dtype=dtype),
            f"rms_norm: out_dtype '{dtype}' is not {floats}",
        ),
        (lambda: pk.swiglu(x, quantize=dtype), f"swiglu: quantize '{dtype}' is not {rows}"),
        (lambda: pk.quantize_tokens(x, dtype), f"quantize_tokens: dtype '{dtype}' is not {rows}"),
        (
            lambda: pk.quantize(x, scale_dtype=dtype),
            f"quantize: scale_dtype '{dtype}' is not {floats}",
        ),
        (
            lambda: pk.dequantize(pk.QTensor(np.ones((2, 32), np.int8), w[:2, None]), dtype),
            f"dequantize: dtype '{dtype}' is not {floats}",
        ),
        (
            lambda: pk.quantized_matmul(x, x, out_dtype=dtype),
            f"quantized_matmul: out_dtype '{dtype}' is not {floats}",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
