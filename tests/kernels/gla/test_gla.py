"""Gated Linear Attention as an op: every form against a float64 recurrence that shares no code.

Errors are relative RMS.  Bounds: 1e-5 in float32 and 5e-3 in bfloat16, the op's promise.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gla import chunked as gla_chunked
from pallas_kernels.gla.op import gla, gla_step
from pallas_kernels.gla.reference import gla_parallel, gla_recurrent
from pallas_kernels.recurrence import groups
from pallas_kernels.recurrence import groups as gla_decay
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow

BOUND = {"float32": 1e-5, "bfloat16": 5e-3}
NAMES = ("o", "s", "dq", "dk", "dv", "dg", "ds")
GATES = np.array([0.0, -1e-3, -1.0, -20.0, -1e4, -np.inf])
GOLDEN = Path(__file__).parents[2] / "golden" / "gla_golden.npz"


def error(got, want) -> float:
    got, want = np.asarray(got).astype(np.float64), np.asarray(want, np.float64)
    rms = np.sqrt(np.mean(want**2))
    difference = np.sqrt(np.mean((got - want) ** 2))
    return float(difference if rms == 0 else difference / rms)


def make(b, t, h, d_k, d_v, *, gate=1.0, seed=0, dtype="float32"):
    """q, k, v, log_decay, initial_state; ``gate`` scales a typical layer's log_decay."""
    rng = np.random.default_rng(seed)
    q, k, v, g, s = (
        rng.standard_normal(shape)
        for shape in (
            (b, t, h, d_k),
            (b, t, h, d_k),
            (b, t, h, d_v),
            (b, t, h, d_k),
            (b, h, d_k, d_v),
        )
    )
    g = np.asarray(gate) * -np.log1p(np.exp(-g))
    cast = [as_jax(x, dtype) for x in (q, k, v)]
    return *cast, as_jax(g, jnp.float32), as_jax(s, jnp.float32)


def oracle(q, k, v, g, s, d_o=None, d_s=None, scale=None):
    """(o, state) in float64, and with cotangents also the gradients of q, k, v, g, s."""
    q, k, v, g, s = (np.asarray(x).astype(np.float64) for x in (q, k, v, g, s))
    scale, decay = scale or q.shape[-1] ** -0.5, np.exp(g)
    before, o = [], np.zeros_like(v)
    for t in range(q.shape[1]):
        before.append(s)
        s = decay[:, t, :, :, None] * s + k[:, t, :, :, None] * v[:, t, :, None, :]
        o[:, t] = scale * (q[:, t, :, None] @ s)[:, :, 0]
    if d_o is None:
        return o, s
    d_o, d_state = (np.asarray(x).astype(np.float64) for x in (d_o, d_s))
    after = [*before[1:], s]
    d_q, d_k, d_v, d_g = (np.zeros_like(x) for x in (q, k, v, g))
    for t in reversed(range(q.shape[1])):
        d_q[:, t] = scale * (after[t] @ d_o[:, t, :, :, None])[..., 0]
        d_state = d_state + scale * q[:, t, :, :, None] * d_o[:, t, :, None, :]
        d_k[:, t] = (d_state @ v[:, t, :, :, None])[..., 0]
        d_v[:, t] = (k[:, t, :, None] @ d_state)[:, :, 0]
        d_g[:, t] = decay[:, t] * np.sum(before[t] * d_state, axis=-1)
        d_state = decay[:, t, :, :, None] * d_state
    return o, s, d_q, d_k, d_v, d_g, d_state


@functools.partial(jax.jit, static_argnames="chunk")
def values_and_gradients(q, k, v, g, s, d_o, d_s, **options):
    def run(q, k, v, g, s):
        return gla(q, k, v, g, initial_state=s, **options)

    out, pull = jax.vjp(run, q, k, v, g, s)
    return *out, *pull((d_o, d_s))


def cotangents(v, s):
    rng = np.random.default_rng(9)
    d_o = as_jax(rng.standard_normal(v.shape), v.dtype)
    return d_o, as_jax(rng.standard_normal(s.shape), jnp.float32)


@pytest.mark.parametrize(
    ("length", "widths"),
    [
        (1, (60, 96)),
        (65, (96, 60)),
        (1000, (60, 96)),
        *slow((63, (96, 60)), (64, (60, 96))),
    ],
)
def test_all_forms_are_the_recurrence(length, widths):
    """One row each for weak, usual and strong gates."""
    gate = np.array([0.1, 1.0, 10.0]).reshape(3, 1, 1, 1)
    inputs = make(3, length, 1, *widths, gate=gate)
    want = oracle(*inputs)
    forms = (gla, gla_recurrent) if length > 100 else (gla, gla_recurrent, gla_parallel)
    for form in forms:
        got = jax.jit(form)(*inputs[:4], initial_state=inputs[4])
        for x, y in zip(map(np.asarray, got), want, strict=True):
            for row in range(3):
                assert error(x[row], y[row]) < BOUND["float32"], (form.__name__, row)


@pytest.mark.parametrize("chunk", [4, *slow(1, 128)])
def test_the_chunk_changes_nothing(chunk):
    inputs = make(2, 77, 2, 16, 24)
    run = jax.jit(gla, static_argnames="chunk")
    got = run(*inputs[:4], initial_state=inputs[4], chunk=chunk)
    for x, y in zip(got, oracle(*inputs), strict=True):
        assert error(x, y) < BOUND["float32"]


@pytest.mark.parametrize(
    ("dtype", "t", "d_k", "d_v"),
    [("float32", 300, 512, 8), *slow(("float32", 65536, 12, 2), ("bfloat16", 5000, 48, 4))],
)
def test_stability_promise(dtype, t, d_k, d_v):
    """Every gate from 0 to -inf, mixed token by token (row 0) and one to a channel (row 1)."""
    check_stability(t, d_k, d_v, dtype)


def check_stability(t, d_k, d_v, dtype):
    q, k, v, _, s = make(2, t, 1, d_k, d_v, dtype=dtype)
    gates = np.random.default_rng(1).choice(GATES, (2, t, 1, d_k))
    gates[1] = GATES[np.arange(d_k) % 6]
    inputs = q, k, v, as_jax(gates, jnp.float32), s
    check_rows(values_and_gradients, oracle, NAMES, inputs, BOUND[dtype])


def check_rows(run, oracle, names, inputs, bound):
    """Values and gradients are finite, and those of the oracle row by row."""
    d = cotangents(inputs[2], inputs[-1])
    got = [np.asarray(x) for x in run(*inputs, *d)]
    for name, x, y in zip(names, got, oracle(*inputs, *d), strict=True):
        assert np.isfinite(x.astype(np.float32)).all(), name
        for row in range(len(x)):
            assert error(x[row], y[row]) < bound, (name, row)
    assert not got[5][np.exp(np.asarray(inputs[3])) == 0].any()


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
def test_stability_promise_with_the_gpu_s_choices(dtype, monkeypatch):
    """The branches that XLA takes on a GPU: 16-bit operands, sums by products, unrolled scans."""
    monkeypatch.setattr(groups, "on_gpu", lambda: True)
    jax.clear_caches()
    check_stability(200, 48, 16, dtype)
    jax.clear_caches()


def test_both_ways_of_summing_decays_agree():
    """Additions up a tree (CPU) and products with 0/1 matrices (GPU), and their transposes."""
    rng = np.random.default_rng(0)
    g = as_jax(rng.choice(GATES, (2, 64, 5)), jnp.float32)
    add, back = (
        jax.jit(f, static_argnames=("dtype", "on_gpu"))
        for f in (gla_decay.decay_sums, gla_decay.transpose_sums)
    )
    climbed = add(g, dtype=jnp.dtype(jnp.float32), on_gpu=False)
    d = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), climbed)
    want = back(d, dtype=jnp.dtype(jnp.float32), on_gpu=False)
    matrices = zip(gla_decay.sum_matrices(64), jax.tree.leaves(d), strict=True)
    assert error(want, sum(m.T @ x for m, x in matrices)) < 1e-6
    for dtype in map(jnp.dtype, ("float32", "bfloat16")):
        sums = add(g, dtype=dtype, on_gpu=True)
        for x, y in zip(jax.tree.leaves(sums), jax.tree.leaves(climbed), strict=True):
            assert error(np.exp(np.asarray(x)), np.exp(np.asarray(y, np.float64))) < 1e-5
        assert error(back(d, dtype=dtype, on_gpu=True), want) < 1e-5


@contextlib.contextmanager
def exponents_of(module):
    """A list of the largest exponent of each ``exp`` that the module's programs compute."""
    found = []

    class Recorder:
        def __getattr__(self, name):
            return getattr(jnp, name)

        def exp(self, x):
            jax.debug.callback(lambda most: found.append(float(most)), jnp.max(x))
            return jnp.exp(x)

    jax.clear_caches()
    with mock.patch.object(module, "jnp", Recorder()):
        yield found
        jax.effects_barrier()
    jax.clear_caches()


def test_no_exponential_of_a_positive_number():
    q, k, v, _, s = make(1, 40, 1, 8, 8)
    gates = np.random.default_rng(1).choice(GATES, (1, 40, 1, 8)).astype(np.float32)
    with exponents_of(gla_chunked) as exponents:
        jax.block_until_ready(values_and_gradients(q, k, v, gates, s, *cotangents(v, s), chunk=16))
    assert len(exponents) > 10 and max(exponents) <= 0


def test_gradients_are_the_recurrence_s():
    """One row each for weak, usual and strong gates."""
    gate = np.array([0.1, 1.0, 10.0]).reshape(3, 1, 1, 1)
    inputs = make(3, 200, 2, 60, 96, gate=gate)
    check_rows(values_and_gradients, oracle, NAMES, inputs, BOUND["float32"])


def check_lengths(run, oracle, names, inputs):
    """NaN behind the ends of four rows of 150 tokens reaches no value and no gradient."""
    *inputs, s = inputs
    *inputs, s, d_o, d_s = map(np.array, (*inputs, s, *cotangents(inputs[2], s)))
    lengths = [150, 0, 64, 77]
    padded = np.arange(150)[None, :] >= np.asarray(lengths)[:, None]
    *spoiled, spoiled_d_o = (x.copy() for x in (*inputs, d_o))
    for x in (*spoiled, spoiled_d_o):
        x[padded] = np.nan
    got = run(*spoiled, s, spoiled_d_o, d_s, lengths=as_jax(lengths, jnp.int32))
    got = [np.asarray(x) for x in got]
    for row, n in enumerate(lengths):
        one = slice(row, row + 1)
        want = oracle(*(x[one, :n] for x in inputs), s[one], d_o[one, :n], d_s[one])
        for name, x, y in zip(names, got, want, strict=True):
            if name in ("s", "ds"):
                assert error(x[row], y[0]) < BOUND["float32"]
            else:
                assert not x[row, n:].any()
                assert n == 0 or error(x[row, :n], y[0]) < BOUND["float32"], (row, name)


def check_segments(run, oracle, names, inputs):
    """Segments of a row of 200 tokens are calls of their own."""
    *inputs, s = inputs
    *inputs, s, d_o, d_s = map(np.asarray, (*inputs, s, *cotangents(inputs[2], s)))
    starts = [0, 1, 65, 130, 200]
    ids = np.repeat([5, 3, 5, 0], np.diff(starts))[None]
    got = run(*inputs, s, d_o, d_s, segment_ids=as_jax(ids, jnp.int32))
    got = [np.asarray(x) for x in got]
    for i, (a, b) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        first, last = i == 0, i == len(starts) - 2
        part = [x[:, a:b] for x in inputs]
        want = oracle(*part, s if first else 0 * s, d_o[:, a:b], d_s if last else 0 * d_s)
        for name, x, y in zip(names, got, want, strict=True):
            if name not in ("s", "ds"):
                y = y.copy()
                if name == "dg" and not first:
                    y[:, 0] = 0  # the decay that was replaced by a reset
                assert error(x[:, a:b], y) < BOUND["float32"], (i, name)
            elif (last, first)[name == "ds"]:
                assert error(x, y) < BOUND["float32"], (i, name)


def check_steps(step, inputs, want):
    """The steps of ``want``'s tokens give its outputs and its last state."""
    *inputs, s = inputs
    inputs = [np.asarray(x) for x in inputs]
    for t in range(inputs[0].shape[1]):
        o, s = step(*(x[:, t] for x in inputs), s)
        assert error(o, want[0][:, t]) < BOUND["float32"]
    assert error(s, want[1]) < BOUND["float32"] and s.dtype == jnp.float32


def test_lengths_keep_padding_out_of_values_and_gradients():
    check_lengths(values_and_gradients, oracle, NAMES, make(4, 150, 2, 16, 24))


@pytest.mark.core
def test_packed_segments_are_separate_calls():
    check_segments(values_and_gradients, oracle, NAMES, make(1, 200, 2, 16, 24))


def test_segments_and_lengths_together():
    q, k, v, g, s = make(1, 60, 1, 8, 8)
    ids = as_jax(np.arange(60)[None] // 25, jnp.int32)
    lengths = as_jax([40], jnp.int32)
    o, state = jax.jit(gla)(q, k, v, g, initial_state=s, segment_ids=ids, lengths=lengths)
    q, k, v, g, s, o = (np.asarray(x) for x in (q, k, v, g, s, o))
    want_o, want_s = oracle(*(x[:, 25:40] for x in (q, k, v, g)), 0 * s)
    assert error(o[:, 25:40], want_o) < BOUND["float32"]
    assert error(state, want_s) < BOUND["float32"] and not o[:, 40:].any()


@pytest.mark.core
def test_steps_are_the_sequence():
    inputs = make(2, 20, 3, 16, 24)
    check_steps(jax.jit(gla_step, donate_argnums=4), inputs, oracle(*inputs))


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float16")])
def test_16_bit_inputs_scale_and_no_state(dtype):
    q, k, v, g, s = make(1, 90, 2, 16, 24, dtype=dtype)
    rounded = np.asarray(g).astype(jnp.bfloat16)
    run = jax.jit(functools.partial(gla, scale=0.5, return_state=False))
    o, state = run(q, k, v, rounded)
    q, k, v, g, s = (np.asarray(x) for x in (q, k, v, g, s))
    want, _ = oracle(q, k, v, rounded, 0 * s)
    assert o.dtype == jnp.dtype(dtype) and state is None
    assert error(o, want * 0.5 * 4) < BOUND["bfloat16"]  # Dk ** -0.5 is 1 / 4
    step = jax.jit(functools.partial(gla_step, scale=0.5))
    one, state = step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], s)
    assert one.dtype == jnp.dtype(dtype) and state.dtype == jnp.float32
    assert error(one, 2 * oracle(*(x[:, :1] for x in (q, k, v, g)), s)[0][:, 0]) < 5e-3


def test_memory_of_the_gradient_is_a_few_copies_of_the_inputs():
    """Far from a state a token: it grows as the row does."""
    t, d_k, d_v = 32768, 32, 64
    q = jax.ShapeDtypeStruct((1, t, 2, d_k), jnp.float32)
    v = jax.ShapeDtypeStruct((1, t, 2, d_v), jnp.float32)
    loss = jax.grad(lambda q, k, v, g: jnp.sum(gla(q, k, v, g)[0]), argnums=(0, 1, 2, 3))
    memory = jax.jit(loss).lower(q, q, v, q).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 12 * 4 * t * 2 * (3 * d_k + d_v)


def test_parity_with_flash_linear_attention():
    """Its naive recurrence with gradients, run in torch (golden/make_gla_golden.py)."""
    from tests.golden.make_gla_golden import op_inputs

    golden = np.load(GOLDEN)
    data = {name: as_jax(x) for name, x in op_inputs().items()}
    got = values_and_gradients(*(data[name] for name in ("q", "k", "v", "g", "s", "d_o", "d_s")))
    names = ("op/o", "op/s", "op/d_q", "op/d_k", "op/d_v", "op/d_g", "op/d_s")
    for name, x in zip(names, got, strict=True):
        assert error(x, golden[name]) < 1e-5, name


def zeros(shape, dtype=jnp.float32):
    return np.zeros(shape, dtype)


def wrong(**changes):
    q, k, v, g, s = make(2, 5, 3, 8, 4)
    return {"q": q, "k": k, "v": v, "log_decay": g, "initial_state": s} | changes


BAD = {  # axes of every size and other dtypes: test_op_operands
    "k of other width": (
        wrong(k=zeros((2, 5, 3, 7))),
        r"gla: k \(2, 5, 3, 7\) .* Dk is 8",
    ),
    "decay per head": (wrong(log_decay=zeros((2, 5, 3, 1))), "gla: log_decay"),
    "integer q": (wrong(q=zeros((2, 5, 3, 8), jnp.int32)), "gla: q is int32"),
    "mixed dtypes": (wrong(k=zeros((2, 5, 3, 8), jnp.bfloat16)), "give them one dtype"),
    "state in bfloat16": (
        wrong(initial_state=zeros((2, 3, 8, 4), jnp.bfloat16)),
        "gla: initial_state is bfloat16",
    ),
    "positive decay": (
        wrong(log_decay=np.full((2, 5, 3, 8), np.float32(0.25))),
        "log_decay holds 0.25",
    ),
    "float lengths": (wrong(lengths=zeros((2,))), "gla: lengths is float32"),
    "chunk of 48": (wrong(chunk=48), "gla: chunk 48 is not a power of two"),
    "unknown implementation": (wrong(implementation="cuda"), "gla: implementation 'cuda'"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_a_named_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        gla(**arguments)


def test_bad_input_of_the_step_is_a_named_error():
    q, k, v, g, s = (x[:, 0] if x.ndim == 4 else x for x in make(2, 1, 3, 8, 4))
    s = jnp.zeros((2, 3, 8, 4))
    with pytest.raises(ValueError, match=r"gla_step: state \(2, 3, 4, 8\) is not"):
        gla_step(q, k, v, g, jnp.zeros((2, 3, 4, 8)))
    with pytest.raises(ValueError, match="gla_step: log_decay holds 1"):
        gla_step(q, k, v, jnp.ones_like(g), s)
    with pytest.raises(ValueError, match=r"gla_step: v"):
        gla_step(q, k, v[:1], g, s)


def test_a_positive_decay_is_found_only_where_it_counts():
    q, k, v, g, s = (np.array(x) for x in make(1, 6, 1, 8, 4))
    g[:, 4:] = 3.0
    o, _ = gla(q, k, v, g, lengths=as_jax([4], jnp.int32))
    o = np.asarray(o)
    assert error(o[:, :4], oracle(*(x[:, :4] for x in (q, k, v, g)), 0 * s)[0]) < 1e-5
    # Under jit there is nothing to look at: the recursion is followed as it stands.
    grown, _ = jax.jit(gla)(q, k, v, g)
    assert error(grown, oracle(q, k, v, g, 0 * s)[0]) < 1e-5


def test_mosaic_names_what_it_cannot_take():
    q, k, v, g, _ = make(1, 6, 1, 8, 4)
    with pytest.raises(NotImplementedError, match="gla: no Mosaic kernel for this call: q is"):
        gla(q, k, v, g, implementation="mosaic")
