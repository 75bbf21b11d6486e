"""The gated delta rule as an op: every form against a float64 recursion that shares no code.

Errors are relative RMS.  Bounds: 1e-5 in float32 and 5e-3 in bfloat16, the op's promise.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_delta, gated_delta_step
from pallas_kernels.gated_delta import chunked
from pallas_kernels.gated_delta.reference import gated_delta_parallel, gated_delta_recurrent
from pallas_kernels.recurrence import groups
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow
from tests.helpers.delta_cases import oracle
from tests.kernels.gla.test_gla import (
    BOUND,
    GATES,
    check_lengths,
    check_rows,
    check_segments,
    check_steps,
    cotangents,
    error,
    exponents_of,
    zeros,
)

NAMES = ("o", "s", "dq", "dk", "dv", "dg", "db", "ds")


def make(b, t, h, d_k, d_v, *, key_heads=None, decay="head", gate=1.0, dtype="float32", seed=0):
    """q, k, v, log_decay, beta, initial_state; keys of length one."""
    rng = np.random.default_rng(seed)
    n = key_heads or h
    q, k = rng.standard_normal((2, b, t, n, d_k))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v, s = rng.standard_normal((b, t, h, d_v)), rng.standard_normal((b, h, d_k, d_v))
    g = -np.log1p(np.exp(-rng.standard_normal((b, t, h, d_k) if decay == "channel" else (b, t, h))))
    beta = 1 / (1 + np.exp(-rng.standard_normal((b, t, h))))
    cast = [as_jax(x, dtype) for x in (q, k, v)]
    return *cast, *(as_jax(x, jnp.float32) for x in (gate * g, beta, s))


@functools.partial(jax.jit, static_argnames="normalize_qk")
def values_and_gradients(q, k, v, g, beta, s, d_o, d_s, **options):
    def run(q, k, v, g, beta, s):
        return gated_delta(q, k, v, g, beta, initial_state=s, **options)

    out, pull = jax.vjp(run, q, k, v, g, beta, s)
    return *out, *pull((d_o, d_s))


def check(got, want, bound, names=NAMES):
    for name, x, y in zip(names, got, want, strict=False):
        assert error(x, y) < bound, name


@pytest.mark.parametrize(
    ("length", "widths", "decay"),
    [
        (65, (96, 60), "head"),
        (65, (96, 60), "channel"),
        *slow((1, (60, 96), "head"), (63, (60, 96), "channel"), (300, (60, 96), "head")),
    ],
)
def test_all_forms_are_the_recursion(length, widths, decay):
    """One row each for weak, usual and strong decays; two value heads to a key head."""
    inputs = make(3, length, 2, *widths, key_heads=1, decay=decay)
    strength = np.asarray([0.01, 1, 10], np.float32).reshape(3, *(1,) * (inputs[3].ndim - 1))
    inputs = (*inputs[:3], np.asarray(inputs[3]) * strength, *inputs[4:])
    want = oracle(*inputs)
    forms = (gated_delta, gated_delta_recurrent, gated_delta_parallel)
    for form in forms[: 2 if length > 100 else 3]:
        got = jax.jit(form)(*inputs[:5], initial_state=inputs[5])
        for x, y in zip(map(np.asarray, got), want, strict=True):
            for row in range(3):
                assert error(x[row], y[row]) < BOUND["float32"], (form.__name__, row)


def hard(t, d_k, d_v, dtype, decay, seed=2):
    """Rows: every decay from 0 to -inf token by token; no decay and random keys; one key for all
    tokens; keys that are zero, equal, opposite or orthogonal in turn.  beta is 1 in the last two,
    and 0, 1 or between in the first two."""
    q, k, v, g, beta, s = make(4, t, 1, d_k, d_v, dtype=dtype, decay=decay, seed=seed)
    rng = np.random.default_rng(1)
    gates = rng.choice(GATES, g.shape)
    gates[1:3] = 0.0
    beta = np.array(rng.choice([0.0, 0.5, 1.0], beta.shape))
    beta[2:] = 1.0
    k = np.array(k, np.float32)
    one, other = np.eye(d_k)[:2]
    k[2] = one
    k[3, :, 0] = np.stack([0 * one, one, -one, other])[rng.integers(0, 4, t)]
    as32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    return q, as_jax(k.astype(jnp.dtype(dtype))), v, as32(gates), as32(beta), s


@pytest.mark.parametrize(
    ("dtype", "t", "d_k", "d_v", "decay"),
    [
        ("float32", 1000, 12, 6, "head"),
        ("bfloat16", 600, 48, 4, "channel"),
        *slow(("float32", 200, 256, 8, "channel")),
        *(
            pytest.param(dtype, 65536, 12, 4, decay, marks=pytest.mark.slow)
            for dtype in BOUND
            for decay in ("head", "channel")
        ),
    ],
)
def test_stability_promise(dtype, t, d_k, d_v, decay):
    given = hard(t, d_k, d_v, dtype, decay)
    check_rows(values_and_gradients, oracle, NAMES, given, BOUND[dtype])


@pytest.mark.core
def test_equal_keys_that_are_not_exact():
    """One unit key whose numbers float32 rounds, normalized by the op; beta 1, no decay."""
    q, k, v, g, beta, s = map(np.asarray, make(1, 640, 1, 48, 8))
    k = np.broadcast_to(k[:, :1], k.shape) * np.float32(3)
    d_o, d_s = cotangents(v, s)
    given = q, k, v, 0 * g, 0 * beta + 1, s, d_o, d_s
    got = values_and_gradients(*given, normalize_qk=True)
    check(got, oracle(*given, normalize=True), BOUND["float32"])


@pytest.mark.parametrize("decay", ["channel", *slow("head")])
def test_what_a_gpu_takes(decay, monkeypatch):
    """Sums by products, unrolled scans."""
    monkeypatch.setattr(groups, "on_gpu", lambda: True)
    jax.clear_caches()
    given = hard(200, 48, 16, "float32", decay)
    d = cotangents(given[2], given[5])
    got = values_and_gradients(*given, *d)
    jax.clear_caches()
    check(got, oracle(*given, *d), BOUND["float32"])


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_no_exponential_of_a_positive_number(decay):
    given = hard(20, 8, 8, "float32", decay)
    with exponents_of(chunked) as exponents:
        out = jax.jit(gated_delta)(*given[:5], initial_state=given[5])
        jax.block_until_ready(out)
    assert len(exponents) >= 3 and max(exponents) <= 0


@pytest.mark.parametrize("decay", ["channel", *slow("head")])
def test_gradients_of_grouped_normalized_heads(decay):
    inputs = make(2, 150, 4, 20, 24, key_heads=2, decay=decay)
    d = cotangents(inputs[2], inputs[5])
    want = oracle(*inputs, *d, normalize=True)
    got = values_and_gradients(*inputs, *d, normalize_qk=True)
    check(got, want, BOUND["float32"])


def test_lengths_keep_padding_out_of_values_and_gradients():
    check_lengths(values_and_gradients, oracle, NAMES, make(4, 150, 2, 16, 24))


def test_packed_segments_are_separate_calls():
    inputs = make(1, 200, 2, 16, 24, decay="channel")
    check_segments(values_and_gradients, oracle, NAMES, inputs)


@pytest.mark.core
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_steps_are_the_sequence(decay):
    inputs = make(2, 20, 4, 16, 24, key_heads=2, decay=decay)
    step = jax.jit(functools.partial(gated_delta_step, normalize_qk=True), donate_argnums=5)
    check_steps(step, inputs, oracle(*inputs, normalize=True))


def test_gradients_under_x64_are_float32():
    q, k, v, g, beta, _ = make(1, 70, 2, 16, 24)
    with jax.enable_x64(True):
        d = jax.grad(lambda v: jnp.sum(gated_delta(q, k, v, g, beta)[0]))(v)
    assert d.dtype == jnp.float32 and np.isfinite(d).all()


def test_no_decay_is_the_delta_rule_and_beta_0_keeps_the_state():
    q, k, v, g, beta, s = map(np.asarray, make(1, 90, 2, 16, 24))
    run = jax.jit(functools.partial(gated_delta, scale=1.0))
    _, state = run(q, k, v, 0 * g, 0 * beta, initial_state=s)
    assert error(state, s) == 0
    # A key that was just written with beta 1 is read back whole.
    o, _ = run(k, k, v, 0 * g, 0 * beta + 1, initial_state=s)
    assert error(o, v) < BOUND["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float16")])
def test_16_bit_inputs_scale_and_no_state(dtype):
    q, k, v, g, beta, s = map(np.asarray, make(1, 90, 2, 16, 24, dtype=dtype))
    g, beta = g.astype(jnp.bfloat16), beta.astype(jnp.bfloat16)
    o, state = jax.jit(functools.partial(gated_delta, scale=0.5))(q, k, v, g, beta)
    want, _ = oracle(q, k, v, g, beta, 0 * s)
    assert o.dtype == jnp.dtype(dtype) and state.dtype == jnp.float32
    assert error(o, want * 0.5 * 4) < BOUND["bfloat16"]  # Dk ** -0.5 is 1 / 4
    step = jax.jit(functools.partial(gated_delta_step, scale=0.5))
    one, _ = step(*(x[:, 0] for x in (q, k, v, g, beta)), s)
    assert one.dtype == jnp.dtype(dtype)
    want, _ = oracle(*(x[:, :1] for x in (q, k, v, g, beta)), s)
    assert error(one, 2 * want[:, 0]) < BOUND["bfloat16"]


def test_memory_of_the_gradient_is_a_few_copies_of_the_inputs():
    """Far from a state a token: it grows as the row does."""
    t, width = 32768, 32
    q = jax.ShapeDtypeStruct((1, t, 2, width), jnp.float32)
    gate = jax.ShapeDtypeStruct((1, t, 2), jnp.float32)
    loss = jax.grad(lambda *x: jnp.sum(gated_delta(*x)[0]), argnums=(0, 1, 2, 3, 4))
    memory = jax.jit(loss).lower(q, q, q, gate, gate).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 4 * t * 2 * (3 * width + 2)


def wrong(**changes):
    q, k, v, g, beta, s = make(2, 5, 4, 8, 4, key_heads=2)
    given = {"q": q, "k": k, "v": v, "log_decay": g, "beta": beta, "initial_state": s}
    return given | changes


BAD = {
    "k of other width": (wrong(k=zeros((2, 5, 2, 7))), r"gated_delta: k .* Dk is 8"),
    "decay of key heads": (wrong(log_decay=zeros((2, 5, 2))), r"log_decay .* H is 4"),
    "decay of other width": (wrong(log_decay=zeros((2, 5, 4, 7))), r"log_decay .* Dk is 8"),
    "beta a channel": (wrong(beta=zeros((2, 5, 4, 8))), r"gated_delta: beta .* \[B, T, H\]"),
    "heads that do not divide": (
        wrong(q=zeros((2, 5, 3, 8)), k=zeros((2, 5, 3, 8))),
        "gated_delta: v has 4 heads, no multiple of the 3 of q",
    ),
    "positive decay": (wrong(log_decay=1 - zeros((2, 5, 4))), "log_decay holds 1"),
    "unknown implementation": (wrong(implementation="cuda"), "gated_delta: implementation 'cuda'"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_a_named_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        gated_delta(**arguments)
