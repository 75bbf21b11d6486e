"""The GLA kernels: rules, lowering; values on a Hopper GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import sms
from tests.helpers.arrays import as_jax
from tests.helpers.lowering import kernels_in, lowered
from tests.kernels.gla.test_gla import GATES, NAMES, error, oracle

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.gla import kernel as gla_mosaic
    from pallas_kernels.gla import scan
    from pallas_kernels.gla.gates import gates
    from pallas_kernels.gla.op import gla
    from pallas_kernels.recurrence.states import VALUE_BLOCK


def test_segments_fill_the_gpu_and_no_more():
    """One more segment would be a second wave of blocks, or leave one with under four chunks."""
    sizes = itertools.product((1, 2, 8, 32), (1, 4, 16, 96), (64, 128, 512), (1, 3, 16, 256, 4096))
    for rows, heads, dv, chunks in sizes:
        n = gla_mosaic.segments_for(rows, heads, dv, chunks)
        blocks = rows * heads * -(-dv // VALUE_BLOCK)
        assert n == 1 or (n * blocks <= sms() and chunks >= 4 * n)
        assert (n + 1) * blocks > sms() or chunks < 4 * (n + 1)


@pytest.mark.parametrize(
    "chunks, n, reverse", [(6, 3, False), (7, 3, True), (5, 4, False), (5, 4, True)]
)
def test_segment_starts_equal_the_plain_recursion(chunks, n, reverse):
    rng = np.random.default_rng(2)
    decay = rng.uniform(size=(1, 1, chunks, 3)).astype(np.float32)
    update = rng.normal(size=(chunks, 3, 2)).astype(np.float32)
    start = rng.normal(size=(3, 2)).astype(np.float32)
    per = -(-chunks // n)
    order = range(chunks)[::-1] if reverse else range(chunks)
    local, want, state = np.zeros((n, 3, 2), np.float32), {}, start
    for c in order:
        s = c // per
        want.setdefault(s, state)
        local[s] = decay[0, 0, c][:, None] * local[s] + update[c]
        state = decay[0, 0, c][:, None] * state + update[c]
    got = gla_mosaic.segment_starts(
        as_jax(local)[None, None],
        as_jax(decay),
        as_jax(start)[None, None],
        None,
        n,
        reverse=reverse,
    )
    for s, expected in want.items():
        np.testing.assert_allclose(got[0, 0, s], expected, rtol=1e-5, atol=1e-6)


def test_segment_starts_skip_the_chunks_past_a_row():
    decay = np.asarray([0.5, 0.5, np.nan, np.nan], np.float32).reshape(1, 1, 4, 1)
    local = np.asarray([3.0, 0.0], np.float32).reshape(1, 1, 2, 1, 1)
    starts = gla_mosaic.segment_starts(local, decay, None, as_jax([100]), 2)
    np.testing.assert_array_equal(np.asarray(starts).ravel(), [0.0, 3.0])


def operands(b, t, h, dk, dv, dtype=jnp.bfloat16):
    spec = jax.ShapeDtypeStruct
    q = spec((b, t, h, dk), dtype)
    return q, q, spec((b, t, h, dv), dtype), spec((b, t, h, dk), jnp.float32)


@pytest.mark.parametrize(
    "change, reason",
    [({"dtype": jnp.float32}, "q is float32"), ({"dk": 96}, "Dk = 96"), ({"dv": 96}, "Dv = 96")],
)
def test_a_reason_names_the_fact(change, reason):
    shape = {"b": 1, "t": 64, "h": 1, "dk": 128, "dv": 128} | change
    assert reason in gla_mosaic.plan(*operands(**shape)[:3]).text


def test_ragged_rows_cannot_be_saved():
    q, k, v, g = operands(1, 64, 1, 128, 128)
    with pytest.raises(ValueError, match="save needs whole rows"):
        gla_mosaic.gla_forward(q, k, v, g, scale=0.1, lengths=as_jax([3]), save="states")


def test_supported_shapes_have_no_reason():
    for dk, dv in ((64, 64), (64, 128), (128, 128), (256, 512), (512, 128)):
        assert gla_mosaic.plan(*operands(2, 100, 3, dk, dv)[:3]).segments >= 1


def test_halves_of_a_head_are_the_head():
    """In the XLA form: values, state and gradients."""
    rng = np.random.default_rng(0)
    q, k, g = (as_jax(x, jnp.float32) for x in rng.normal(size=(3, 2, 70, 3, 512)))
    v, d_o = (as_jax(x, jnp.float32) for x in rng.normal(size=(2, 2, 70, 3, 64)))
    state = as_jax(rng.normal(size=(2, 3, 512, 64)), jnp.float32)

    def whole(q, k, v, g, state):
        o, new = gla(q, k, v, g, initial_state=state, scale=0.1)
        return jnp.sum(o * d_o) + jnp.sum(new**2), (o, new)

    def cut(q, k, v, g, state):
        parts = *map(gla_mosaic.halves, (q, k)), gla_mosaic.twice(v), gla_mosaic.halves(g)
        o, new = gla(*parts, initial_state=state.reshape(2, 6, 256, 64), scale=0.1)
        o, new = gla_mosaic.summed(o), new.reshape(state.shape)
        return jnp.sum(o * d_o) + jnp.sum(new**2), (o, new)

    operands = q, k, v, -jnp.abs(g), state
    gradient = functools.partial(jax.grad, argnums=range(5), has_aux=True)
    want, got = (jax.jit(gradient(f))(*operands) for f in (whole, cut))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(x, y) < 1e-5


@pytest.mark.parametrize("shape", [(64, 1, 4, 512, 128), (64, 1, 32, 128, 128)], ids=str)
def test_step_lowers_in_place(shape):
    q, k, v, g = (
        jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype) for x in operands(*shape)
    )
    batch, _, heads, dk, dv = shape
    state = jax.ShapeDtypeStruct((batch, heads, dk, dv), jnp.float32)
    text = lowered(lambda *x: gla_mosaic.gla_step(*x, 0.1), q, k, v, g, state, donate_argnums=4)
    assert kernels_in(text) == ["gla_step"] and "tf.aliasing_output = 1" in text


@pytest.mark.parametrize(
    "shape", [(8, 4096, 16, 128, 128), (1, 16384, 16, 128, 128), (8, 4096, 8, 512, 128)], ids=str
)
def test_forward_lowers_as_planned(shape):
    q, k, v, g = operands(*shape)
    text = lowered(lambda *x: gla_mosaic.gla_forward(*x, scale=0.1), q, k, v, g)
    scans = 1 + (gla_mosaic.plan(q, k, v).segments > 1)  # of the segments' own states
    assert kernels_in(text) == ["gla_gates", *["gla_scan"] * scans]
    assert "stablehlo.transpose" not in text  # everything is read and written where it lies


@pytest.mark.parametrize("shape", [(32, 2048, 4, 256, 512), (8, 4096, 8, 512, 128)], ids=str)
def test_backward_lowers(shape):
    q, k, v, g = operands(*shape)
    text = lowered(lambda *x: gla_mosaic.gla_backward(*x, None, scale=0.1), q, k, v, g, v)
    assert {"gla_chunk_gradients", "gla_scan_reverse"} < set(kernels_in(text))
    assert "stablehlo.transpose" not in text


def test_ragged_forward_with_state_lowers():
    given = operands(2, 700, 2, 128, 256)
    state = jax.ShapeDtypeStruct((2, 2, 128, 256), jnp.float32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

    def forward(q, k, v, g, s, n):
        return gla_mosaic.gla_forward(q, k, v, g, scale=0.1, initial_state=s, lengths=n)

    assert set(kernels_in(lowered(forward, *given, state, lengths))) == {"gla_gates", "gla_scan"}


# --- Values, on the GPU ---------------------------------------------------------------------------
CASES = [  # (B, T, H, Dk, Dv), gates, segments
    ((1, 64, 1, 64, 128), "weak", 1),
    ((2, 300, 2, 128, 256), "mixed", None),
    ((1, 1003, 3, 64, 128), "strong", 1),
    ((2, 300, 3, 64, 64), "weak", None),  # Dv padded to 128
    ((2, 520, 2, 256, 512), "weak", 3),
    ((2, 700, 2, 128, 128), "mixed", 4),
    ((2, 520, 2, 512, 128), "mixed", None),  # two halves
    ((1, 300, 1, 512, 64), "weak", 1),
]


def gpu_case(shape, gate):
    b, t, h, dk, dv = shape
    rng = np.random.default_rng(3)
    q, k = (as_jax(x, jnp.bfloat16) for x in rng.normal(size=(2, b, t, h, dk)))
    v, d_out = (as_jax(x, jnp.bfloat16) for x in rng.normal(size=(2, b, t, h, dv)))
    state, d_state = (as_jax(x, jnp.float32) for x in rng.normal(size=(2, b, h, dk, dv)))
    if gate == "mixed":
        g = GATES[rng.integers(0, len(GATES), size=(b, t, h, dk))]
    else:
        g = -np.abs(rng.normal(size=(b, t, h, dk))) * (0.05 if gate == "weak" else 2.0)
    return q, k, v, as_jax(g, jnp.float32), d_out, state, d_state


@pytest.mark.gpu
@pytest.mark.parametrize("shape, gate, segments", CASES)
def test_forward_and_backward_values(shape, gate, segments):
    q, k, v, g, d_out, state, d_state = gpu_case(shape, gate)
    scale = shape[3] ** -0.5

    @jax.jit
    def run(q, k, v, g, d_out, state, d_state):
        o, last, states = gla_mosaic.gla_forward(
            q, k, v, g, scale=scale, initial_state=state, segments=segments, save="states"
        )
        *_, everything = gla_mosaic.gla_forward(
            q, k, v, g, scale=scale, initial_state=state, segments=segments, save="all"
        )
        grads = gla_mosaic.gla_backward(
            q, k, v, g, d_out, d_state, scale=scale, initial_state=state, segments=segments
        )
        saved = [
            gla_mosaic.gla_backward(
                q, k, v, g, d_out, d_state, scale=scale, saved=x, segments=segments
            )
            for x in (states, everything)
        ]
        return (o, last, *grads), saved

    got, saved = run(q, k, v, g, d_out, state, d_state)
    again, _ = run(q, k, v, g, d_out, state, d_state)
    for a, b in zip(got, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for other in saved:
        for a, b in zip(got[2:], other, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    want = oracle(q, k, v, g, state, d_out, d_state, scale=scale)
    errors = {n: error(x, w) for n, x, w in zip(NAMES, got, want, strict=True)}
    assert max(errors.values()) < 5e-3, errors
    dg = np.asarray(got[5])
    assert np.all(dg[np.exp(np.asarray(g)) == 0] == 0)
    hard = np.asarray(g) == -20
    assert np.all(np.abs(dg[hard]) < 1e-5)


@pytest.mark.gpu
def test_padding_may_hold_anything():
    shape = (3, 330, 2, 128, 128)
    q, k, v, g, _, state, _ = gpu_case(shape, "mixed")
    lengths = np.array([330, 129, 20], np.int32)
    valid = (np.arange(330)[None] < lengths[:, None])[:, :, None, None]
    poison = [jnp.where(valid, x, jnp.nan).astype(x.dtype) for x in (q, k, v, g)]
    clean = [jnp.where(valid, x, 0).astype(x.dtype) for x in (q, k, v, g)]
    run = jax.jit(
        lambda *x: gla_mosaic.gla_forward(
            *x[:4], scale=0.1, initial_state=x[4], lengths=x[5], segments=2
        )
    )
    o, last = run(*poison, state, lengths)
    want_o, want_last = oracle(*clean, state, scale=0.1)
    assert error(o, want_o) < 5e-3
    assert error(last, want_last) < 5e-3
    assert np.all(np.where(valid, 0, np.asarray(o, np.float32)) == 0)


@pytest.mark.gpu
def test_pairs_of_blocks_give_the_bits_of_blocks(monkeypatch):
    """Ragged rows, one of which ends in the first chunk."""
    q, k, v, g, _, state, _ = gpu_case((2, 330, 2, 256, 256), "weak")
    lengths = as_jax([330, 20], jnp.int32)
    forward = gla_mosaic.gla_forward.__wrapped__  # each jit traces it anew

    def run(*x):
        return forward(*x, scale=0.1, initial_state=state, lengths=lengths, segments=1)

    alone = jax.jit(run)(q, k, v, g)
    small = dataclasses.replace(scan.gpu(), sms=1)
    monkeypatch.setattr(scan, "gpu", lambda: small)
    pairs = jax.jit(lambda *x: run(*x))(q, k, v, g)
    for a, b in zip(alone, pairs, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.gpu
def test_the_gates_alone():
    q, k, _, g, *_ = gpu_case((1, 200, 2, 128, 128), "mixed")
    qg, kg, attention, decay = jax.jit(lambda q, k, g: gates(q, k, g, None, 0.25))(q, k, g)
    assert qg.shape == (1, 2, 256, 128) and attention.shape == (1, 2, 1, 256, 64)
    g64 = np.zeros((256, 128))
    g64[:200] = np.asarray(g, np.float64)[0, :, 1]
    product = np.exp(g64.reshape(4, 64, 128).sum(axis=1))
    np.testing.assert_allclose(np.asarray(decay)[0, 1], product, rtol=1e-5, atol=1e-30)
    assert np.all(np.triu(np.asarray(attention, np.float32)[0, 0, 0, :64], 1) == 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(3, 5, 128, 128), (2, 2, 256, 512), (1, 1, 64, 128), (3, 2, 512, 128)]
)
def test_step_values(shape):
    b, h, dk, dv = shape
    q, k, v, g, _, state, _ = gpu_case((b, 1, h, dk, dv), "mixed")
    want_o, want_state = oracle(q, k, v, g, state, scale=0.1)
    step = jax.jit(lambda *x: gla_mosaic.gla_step(*x, 0.1), donate_argnums=4)
    o, new = step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], state)
    assert error(o, want_o[:, 0]) < 3e-3
    np.testing.assert_allclose(np.asarray(new), want_state, rtol=1e-5, atol=1e-5)
