"""Gated Linear Attention as an op: every form against a float64 recurrence that shares no code.

Errors are relative RMS.  Bounds: 1e-5 in float32 and 5e-3 in bfloat16, the op's promise.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gla import chunked as gla_chunked
from pallas_kernels.gla.op import gla, gla_step
from pallas_kernels.gla.reference import gla_parallel, gla_recurrent
from pallas_kernels.recurrence import decay as gla_decay
from pallas_kernels.recurrence import groups

BOUND = {"float32": 1e-5, "bfloat16": 5e-3}
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
        for shape in ((b, t, h, d_k), (b, t, h, d_k), (b, t, h, d_v), (b, t, h, d_k),
                      (b, h, d_k, d_v))
    )  # fmt: skip
    g = np.asarray(gate) * -np.log1p(np.exp(-g))
    cast = [jnp.asarray(x, dtype) for x in (q, k, v)]
    return *cast, jnp.asarray(g, jnp.float32), jnp.asarray(s, jnp.float32)


def oracle(q, k, v, g, s, d_o=None, d_s=None):
    """(o, state) in float64, and with cotangents also the gradients of q, k, v, g, s."""
    q, k, v, g, s = (np.asarray(x).astype(np.float64) for x in (q, k, v, g, s))
    scale, decay = q.shape[-1] ** -0.5, np.exp(g)
    before, o = [], np.zeros_like(v)
    for t in range(q.shape[1]):
        before.append(s)
        s = decay[:, t, :, :, None] * s + k[:, t, :, :, None] * v[:, t, :, None, :]
        o[:, t] = scale * (q[:, t, :, None] @ s)[:, :, 0]
    if d_o is None:
        return o, s
    d_o, d_state = np.asarray(d_o, np.float64), np.asarray(d_s, np.float64)
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


@functools.partial(jax.jit, static_argnames=("form", "chunk"))
def values_and_gradients(q, k, v, g, s, d_o, d_s, form=gla, **options):
    def run(q, k, v, g, s):
        return form(q, k, v, g, initial_state=s, **options)

    out, pull = jax.vjp(run, q, k, v, g, s)
    return *out, *pull((d_o, d_s))


def cotangents(v, s, seed=9):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(v.shape), v.dtype), jnp.asarray(
        rng.standard_normal(s.shape), jnp.float32
    )


@pytest.mark.parametrize(
    ("length", "widths"),
    [(1, (60, 96)), (7, (96, 60)), (63, (60, 96)), (64, (96, 60)), (65, (60, 96)),
     (1000, (60, 96)), (1000, (96, 60))],
)  # fmt: skip
def test_all_forms_are_the_recurrence(length, widths):
    """One row each for weak, usual and strong gates."""
    gate = np.array([0.1, 1.0, 10.0]).reshape(3, 1, 1, 1)
    inputs = make(3, length, 1, *widths, gate=gate)
    want = oracle(*inputs)
    forms = (gla, gla_recurrent) if length > 100 else (gla, gla_recurrent, gla_parallel)
    for form in forms:
        got = jax.jit(form)(*inputs[:4], initial_state=inputs[4])
        for x, y in zip(got, want, strict=True):
            for row in range(3):
                assert error(x[row], y[row]) < BOUND["float32"], (form.__name__, row)


@pytest.mark.parametrize("chunk", [1, 4, 32, 128])
def test_the_chunk_changes_nothing(chunk):
    inputs = make(2, 77, 2, 16, 24)
    got = gla(*inputs[:4], initial_state=inputs[4], chunk=chunk)
    for x, y in zip(got, oracle(*inputs), strict=True):
        assert error(x, y) < BOUND["float32"]


def test_prefix_sums_in_three_chunks_of_four():
    """The worked example of chunkwise scans: 0..11 in three chunks.  Without decay, and with q = k
    = 1, o is the running sum of v."""
    ones = jnp.ones((1, 12, 1, 1))
    numbers = jnp.arange(12.0).reshape(1, 12, 1, 1)
    o, state = gla(ones, ones, numbers, 0 * ones, scale=1.0, chunk=4)
    assert o.ravel().tolist() == [0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55, 66]
    assert state.ravel().tolist() == [66]
    # Each chunk by itself, then carried on with the state before it.
    parts = [numbers[:, i : i + 4] for i in (0, 4, 8)]
    alone = [gla(ones[:, :4], ones[:, :4], x, 0 * x, scale=1.0)[0].ravel().tolist() for x in parts]
    assert alone == [[0, 1, 3, 6], [4, 9, 15, 22], [8, 17, 27, 38]]
    carried = gla(
        ones[:, :4], ones[:, :4], parts[2], 0 * parts[2], scale=1.0,
        initial_state=jnp.full((1, 1, 1, 1), 28.0),
    )[0]  # fmt: skip
    assert carried.ravel().tolist() == [36, 45, 55, 66]


@pytest.mark.parametrize(
    ("dtype", "t", "d_k", "d_v"),
    [("float32", 65536, 12, 2), ("float32", 300, 512, 8), ("bfloat16", 300, 512, 8),
     ("bfloat16", 5000, 48, 4)],
)  # fmt: skip
def test_stability_promise(dtype, t, d_k, d_v):
    """Every gate from 0 to -inf, mixed token by token (row 0) and one to a channel (row 1)."""
    q, k, v, _, s = make(2, t, 1, d_k, d_v, dtype=dtype)
    gates = np.random.default_rng(1).choice(GATES, (2, t, 1, d_k))
    gates[1] = GATES[np.arange(d_k) % 6]
    g = jnp.asarray(gates, jnp.float32)
    d_o, d_s = cotangents(v, s)
    got = values_and_gradients(q, k, v, g, s, d_o, d_s)
    want = oracle(q, k, v, g, s, d_o, d_s)
    for name, x, y in zip(("o", "s", "dq", "dk", "dv", "dg", "ds"), got, want, strict=True):
        assert np.isfinite(np.asarray(x).astype(np.float32)).all(), name
        for row in range(2):
            assert error(x[row], y[row]) < BOUND[dtype], (name, row)
    assert not np.asarray(got[5])[np.exp(gates) == 0].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stability_promise_with_the_gpu_s_choices(dtype, monkeypatch):
    """The branches that XLA takes on a GPU: 16-bit operands, sums by products, unrolled scans."""
    monkeypatch.setattr(groups, "on_gpu", lambda: True)
    jax.clear_caches()
    q, k, v, _, s = make(2, 200, 1, 48, 16, dtype=dtype)
    gates = np.random.default_rng(1).choice(GATES, (2, 200, 1, 48))
    gates[1] = GATES[np.arange(48) % 6]
    g = jnp.asarray(gates, jnp.float32)
    d_o, d_s = cotangents(v, s)
    got = values_and_gradients(q, k, v, g, s, d_o, d_s)
    jax.clear_caches()
    want = oracle(q, k, v, g, s, d_o, d_s)
    for name, x, y in zip(("o", "s", "dq", "dk", "dv", "dg", "ds"), got, want, strict=True):
        assert error(x, y) < BOUND[dtype], name
    assert not np.asarray(got[5])[np.exp(gates) == 0].any()


def test_both_ways_of_summing_decays_agree():
    """Additions up a tree (CPU) and products with 0/1 matrices (GPU), and their transposes."""
    rng = np.random.default_rng(0)
    g = jnp.asarray(rng.choice(GATES, (2, 64, 5)), jnp.float32)
    float32 = jnp.dtype(jnp.float32)
    climbed = gla_decay.decay_sums(g, float32, on_gpu=False)
    d = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), climbed)
    want = gla_decay.transpose_sums(d, float32, on_gpu=False)
    matrices = gla_decay.sum_matrices(64)
    assert error(want, sum(m.T @ np.asarray(x) for m, x in zip(
        matrices, jax.tree.leaves(d), strict=True))) < 1e-6  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        sums = gla_decay.decay_sums(g, jnp.dtype(dtype), on_gpu=True)
        for x, y in zip(jax.tree.leaves(sums), jax.tree.leaves(climbed), strict=True):
            assert error(jnp.exp(x), np.exp(np.asarray(y, np.float64))) < 1e-5
        assert error(gla_decay.transpose_sums(d, jnp.dtype(dtype), on_gpu=True), want) < 1e-5


def test_no_exponential_of_a_positive_number(monkeypatch):
    q, k, v, _, s = make(1, 40, 1, 8, 8)
    gates = np.random.default_rng(1).choice(GATES, (1, 40, 1, 8))
    d_o, d_s = cotangents(v, s)
    exponents = []

    class Recorder:
        def __getattr__(self, name):
            return getattr(jnp, name)

        def exp(self, x):
            exponents.append(float(jnp.max(x)))
            return jnp.exp(x)

    monkeypatch.setattr(gla_chunked, "jnp", Recorder())
    with jax.disable_jit():
        _, pull = jax.vjp(
            lambda q, k, v, g, s: gla(q, k, v, g, initial_state=s, chunk=16),
            q, k, v, jnp.asarray(gates, jnp.float32), s,
        )  # fmt: skip
        pull((d_o, d_s))
    assert len(exponents) > 10 and max(exponents) <= 0


@pytest.mark.parametrize("gate", [0.1, 1.0, 10.0])
def test_gradients_are_the_recurrence_s(gate):
    inputs = make(2, 200, 2, 60, 96, gate=gate)
    d = cotangents(inputs[2], inputs[4])
    want = oracle(*inputs, *d)
    for form in (gla, gla_recurrent):
        got = values_and_gradients(*inputs, *d, form=form)
        for name, x, y in zip(("o", "s", "dq", "dk", "dv", "dg", "ds"), got, want, strict=True):
            assert error(x, y) < BOUND["float32"], (form.__name__, name)


def test_lengths_keep_padding_out_of_values_and_gradients():
    q, k, v, g, s = make(4, 150, 2, 16, 24)
    d_o, d_s = cotangents(v, s)
    lengths = [150, 0, 64, 77]
    padded = np.arange(150)[None, :] >= np.asarray(lengths)[:, None]
    spoiled = [jnp.where(padded[:, :, None, None], jnp.nan, x) for x in (q, k, v, g, d_o)]
    got = values_and_gradients(
        *spoiled[:4], s, spoiled[4], d_s, lengths=jnp.asarray(lengths, jnp.int32)
    )
    for row, n in enumerate(lengths):
        want = oracle(*(x[row : row + 1, :n] for x in (q, k, v, g)), s[row : row + 1],
                      d_o[row : row + 1, :n], d_s[row : row + 1])  # fmt: skip
        for index, (x, y) in enumerate(zip(got, want, strict=True)):
            if index in (1, 6):
                assert error(x[row], y[0]) < BOUND["float32"]
            else:
                assert not np.asarray(x[row, n:]).any()
                assert n == 0 or error(x[row, :n], y[0]) < BOUND["float32"]


def test_packed_segments_are_separate_calls():
    q, k, v, g, s = make(1, 200, 2, 16, 24)
    d_o, d_s = cotangents(v, s)
    starts = [0, 1, 65, 130, 200]
    ids = np.repeat([5, 3, 5, 0], np.diff(starts))[None]
    got = values_and_gradients(q, k, v, g, s, d_o, d_s, segment_ids=jnp.asarray(ids, jnp.int32))
    for i, (a, b) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        first, last = i == 0, i == len(starts) - 2
        part = [x[:, a:b] for x in (q, k, v, g)]
        want = oracle(*part, s if first else 0 * s, d_o[:, a:b], d_s if last else 0 * d_s)
        for index in (0, 2, 3, 4, 5):
            x, y = np.asarray(got[index][:, a:b]), want[index].copy()
            if index == 5 and not first:
                y[:, 0] = 0  # the decay that was replaced by a reset
            assert error(x, y) < BOUND["float32"], (i, index)
        if last:
            assert error(got[1], want[1]) < BOUND["float32"]
        if first:
            assert error(got[6], want[6]) < BOUND["float32"]


def test_segments_and_lengths_together():
    q, k, v, g, s = make(1, 60, 1, 8, 8)
    ids = jnp.asarray(np.arange(60)[None] // 25, jnp.int32)
    o, state = gla(q, k, v, g, initial_state=s, segment_ids=ids,
                   lengths=jnp.asarray([40], jnp.int32))  # fmt: skip
    want_o, want_s = oracle(*(x[:, 25:40] for x in (q, k, v, g)), 0 * s)
    assert error(o[:, 25:40], want_o) < BOUND["float32"]
    assert error(state, want_s) < BOUND["float32"] and not np.asarray(o[:, 40:]).any()


def test_steps_are_the_sequence():
    q, k, v, g, s = make(2, 20, 3, 16, 24)
    want, want_state = oracle(q, k, v, g, s)
    step = jax.jit(gla_step, donate_argnums=4)
    for t in range(20):
        o, s = step(q[:, t], k[:, t], v[:, t], g[:, t], s)
        assert error(o, want[:, t]) < BOUND["float32"]
    assert error(s, want_state) < BOUND["float32"] and s.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_inputs_scale_and_no_state(dtype):
    q, k, v, g, s = make(1, 90, 2, 16, 24, dtype=dtype)
    o, state = gla(q, k, v, g.astype(jnp.bfloat16), scale=0.5, return_state=False)
    want, _ = oracle(q, k, v, g.astype(jnp.bfloat16), 0 * s)
    assert o.dtype == jnp.dtype(dtype) and state is None
    assert error(o, want * 0.5 * 4) < BOUND["bfloat16"]  # Dk ** -0.5 is 1 / 4
    one, state = gla_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], s, scale=0.5)
    assert one.dtype == jnp.dtype(dtype) and state.dtype == jnp.float32
    assert error(one, 2 * oracle(*(x[:, :1] for x in (q, k, v, g)), s)[0][:, 0]) < 5e-3


def test_memory_of_the_gradient_grows_linearly():
    d_k, d_v = 32, 64

    def temporary(t):
        q = jax.ShapeDtypeStruct((1, t, 2, d_k), jnp.float32)
        v = jax.ShapeDtypeStruct((1, t, 2, d_v), jnp.float32)
        loss = jax.grad(lambda q, k, v, g: jnp.sum(gla(q, k, v, g)[0]), argnums=(0, 1, 2, 3))
        return jax.jit(loss).lower(q, q, v, q).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(8192), temporary(32768)
    assert large < 4.2 * small
    # Far from a state per token, and no more than a dozen copies of the inputs.
    assert large < 12 * 4 * 32768 * 2 * (3 * d_k + d_v)


def test_parity_with_flash_linear_attention():
    """Its naive recurrence with gradients, run in torch (golden/make_gla_golden.py)."""
    from tests.golden.make_gla_golden import op_inputs

    golden = np.load(GOLDEN)
    data = {name: jnp.asarray(x) for name, x in op_inputs().items()}
    got = values_and_gradients(*(data[name] for name in ("q", "k", "v", "g", "s", "d_o", "d_s")))
    names = ("op/o", "op/s", "op/d_q", "op/d_k", "op/d_v", "op/d_g", "op/d_s")
    for name, x in zip(names, got, strict=True):
        assert error(x, golden[name]) < 1e-5, name


def wrong(**changes):
    q, k, v, g, s = make(2, 5, 3, 8, 4)
    return {"q": q, "k": k, "v": v, "log_decay": g, "initial_state": s} | changes


BAD = {
    "q has three axes": (wrong(q=jnp.zeros((2, 5, 8))), r"gla: q \(2, 5, 8\) is not \[B, T"),
    "k of other width": (
        wrong(k=jnp.zeros((2, 5, 3, 7))),
        r"gla: k \(2, 5, 3, 7\) .* Dk is 8",
    ),
    "decay per head": (wrong(log_decay=jnp.zeros((2, 5, 3, 1))), "gla: log_decay"),
    "v of other length": (
        wrong(v=jnp.zeros((2, 6, 3, 4))),
        r"gla: v \(2, 6, 3, 4\) .* T is 5",
    ),
    "integer q": (wrong(q=jnp.zeros((2, 5, 3, 8), jnp.int32)), "gla: q is int32"),
    "mixed dtypes": (wrong(k=jnp.zeros((2, 5, 3, 8), jnp.bfloat16)), "give them one dtype"),
    "state of wrong shape": (wrong(initial_state=jnp.zeros((2, 3, 4, 8))), "gla: initial_state"),
    "state in bfloat16": (
        wrong(initial_state=jnp.zeros((2, 3, 8, 4), jnp.bfloat16)),
        "gla: initial_state is bfloat16",
    ),
    "positive decay": (wrong(log_decay=jnp.full((2, 5, 3, 8), 0.25)), "log_decay holds 0.25"),
    "lengths of wrong shape": (wrong(lengths=jnp.zeros((3,), jnp.int32)), r"gla: lengths \(3,\)"),
    "float lengths": (wrong(lengths=jnp.zeros((2,))), "gla: lengths is float32"),
    "segments per row": (wrong(segment_ids=jnp.zeros((2,), jnp.int32)), r"gla: segment_ids \(2,\)"),
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
    q, k, v, g, s = make(1, 6, 1, 8, 4)
    g = g.at[:, 4:].set(3.0)
    o, _ = gla(q, k, v, g, lengths=jnp.asarray([4], jnp.int32))
    assert error(o[:, :4], oracle(*(x[:, :4] for x in (q, k, v, g)), 0 * s)[0]) < 1e-5
    # Under jit there is nothing to look at: the recursion is followed as it stands.
    grown, _ = jax.jit(gla)(q, k, v, g)
    assert error(grown, oracle(q, k, v, g, 0 * s)[0]) < 1e-5


def test_mosaic_names_what_it_cannot_take():
    q, k, v, g, _ = make(1, 6, 1, 8, 4)
    with pytest.raises(NotImplementedError, match="gla: no Mosaic kernel for this call: q is"):
        gla(q, k, v, g, implementation="mosaic")
