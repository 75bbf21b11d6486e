"""The gated delta rule's kernels: algorithm in numpy, rules, lowering; values on a Hopper GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.delta_cases import case, gradients, recurrence, relative_rms

CHUNK = 64
VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.gated_delta import kernel


def test_a_chunks_products_and_gradients():
    """What the kernels multiply, against the recursion and its transpose."""
    (q, k, v, g, beta, state) = (
        np.asarray(x, np.float64)[0] for x in case((1, CHUNK, 1, 1, 8, 6), "weak")
    )
    scale, rng = 0.4, np.random.default_rng(1)
    d_o, d_last = rng.normal(size=(CHUNK, 6)), rng.normal(size=(8, 6))
    given = (x[None] for x in (q, k, v, g, beta))
    wide = d_o[None, :, None]
    want = gradients(*given, wide, d_last[None, None], state[None], scale)
    want = [np.squeeze(x) for x in want]
    o, last = recurrence(*(x[None] for x in (q, k, v, g, beta, state)), scale)
    q, k, v, g, beta, state = q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state[0]

    log = np.cumsum(g)
    e, to_end = np.exp(log)[:, None], np.exp(log[-1] - log)[:, None]
    decay = np.tril(np.exp(np.minimum(log[:, None] - log, 0)))
    below = np.tril(decay, -1)
    a, scores = beta[:, None] * (k @ k.T) * below, scale * (q @ k.T) * decay
    t = np.linalg.inv(np.eye(CHUNK) + a)
    x = t * beta
    m, keys = scores @ x, x.T @ (to_end * k)
    rest = v - e * (k @ state)
    np.testing.assert_allclose(scale * e * (q @ state) + m @ rest, o[0, :, 0], atol=1e-10)
    np.testing.assert_allclose(e[-1] * state + keys.T @ rest, last[0, 0], atol=1e-10)

    d_rest = m.T @ d_o + keys @ d_last
    d_m, d_keys = d_o @ rest.T, rest @ d_last.T
    asked, seen = scale * e * (d_o @ state.T), e * (d_rest @ state.T)
    d_scores = np.tril(d_m @ x.T)
    d_x = scores.T @ d_m + to_end * (k @ d_keys.T)
    d_end = to_end * (x @ d_keys)
    d_a = -np.tril(t.T @ (d_x * beta) @ t.T, -1)
    d_beta = np.sum(t * d_x, 0) + np.sum(d_a * (k @ k.T) * below, 1)
    d_qk, d_kk = scale * d_scores * decay, d_a * beta[:, None] * below
    d_q = asked + d_qk @ k
    d_k = -seen + d_qk.T @ q + (d_kk + d_kk.T) @ k + d_end
    moved = d_a * a + d_scores * scores
    d_log = np.sum(moved, 1) - np.sum(moved, 0) + np.sum(asked * q - (seen + d_end) * k, 1)
    d_log[-1] += np.sum(d_end * k) + e[-1, 0] * np.sum(state * d_last)
    d_g = np.cumsum(d_log[::-1])[::-1]
    d_state = e[-1] * d_last + scale * (e * q).T @ d_o - (e * k).T @ d_rest
    for got, expected in zip((d_q, d_k, d_rest, d_g, d_beta, d_state), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-9)


def operands(b, t, hk, h, dk, dv, dtype=jnp.bfloat16):
    spec = jax.ShapeDtypeStruct
    q, gate = spec((b, t, hk, dk), dtype), spec((b, t, h), jnp.float32)
    return q, q, spec((b, t, h, dv), dtype), gate, gate


@pytest.mark.parametrize(
    "change, reason",
    [({"dtype": jnp.float32}, "q is float32"), ({"dk": 512}, "Dk = 512"), ({"dv": 96}, "Dv = 96")],
)
def test_a_reason_names_the_fact(change, reason):
    shape = {"b": 1, "t": 64, "hk": 1, "h": 1, "dk": 128, "dv": 128} | change
    assert reason in kernel.plan(*operands(**shape)[:4]).text


def test_wide_keys_decay_by_head():
    q, k, v, g, _ = operands(1, 64, 2, 2, 256, 128)
    assert kernel.plan(q, k, v, g).segments == 1
    assert "Dk = 256" in kernel.plan(q, k, v, jax.ShapeDtypeStruct(q.shape, g.dtype)).text


@pytest.mark.parametrize(
    "dk, dv, backward", [(128, 128, True), (128, 256, False), (256, 128, False)]
)
def test_gradients_of_wide_heads_are_xlas(dk, dv, backward):
    assert kernel.plan(*operands(1, 64, 1, 1, dk, dv)[:4]).backward == backward


@pytest.mark.parametrize(
    "rows, heads, dv, chunks, segments",
    [(8, 16, 128, 64, 1), (1, 16, 128, 256, 4), (1, 48, 128, 256, 1), (1, 1, 128, 3, 1),
     (1, 32, 128, 256, 1), (1, 8, 128, 256, 6), (1, 4, 128, 2048, 15)],
)  # fmt: skip
def test_segments_where_they_pay(rows, heads, dv, chunks, segments):
    assert kernel.segments_for(rows, heads, dv, chunks) == segments


@pytest.mark.parametrize("reverse", [False, True])
def test_segment_starts_equal_the_plain_recursion(reverse):
    rng = np.random.default_rng(0)
    local, transitions = rng.normal(size=(1, 2, 3, 4, 5)), rng.normal(size=(1, 2, 3, 4, 4))
    state = rng.normal(size=(1, 2, 4, 5))
    given = (jnp.asarray(x, jnp.float32) for x in (local, transitions, state))
    starts = kernel.segment_starts(*given, reverse=reverse)
    for s in (2, 1, 0) if reverse else (0, 1, 2):
        np.testing.assert_allclose(starts[:, :, s], state, rtol=1e-4, atol=1e-4)
        moves = transitions[:, :, s].swapaxes(-1, -2) if reverse else transitions[:, :, s]
        state = moves @ state + local[:, :, s]


def lowered(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "shape, kernels",
    [
        ((8, 4096, 4, 16, 128, 128), 2),
        ((1, 16384, 16, 16, 128, 128), 3),
        ((8, 4096, 6, 6, 256, 512), 2),
        ((1, 16384, 4, 8, 256, 256), 3),
    ],
)
def test_forward_lowers(shape, kernels):
    text = lowered(functools.partial(kernel.gated_delta_forward, scale=0.1), *operands(*shape))
    assert text.count("@mosaic_gpu_v2(") == kernels
    assert "stablehlo.transpose" not in text  # everything is read and written where it lies


@pytest.mark.parametrize("heads, kernels", [(64, 2), (8, 3)])
def test_decays_by_channel_lower(heads, kernels):
    q, k, v, _, beta = operands(1, 8192, heads, heads, 128, 128)
    g = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    text = lowered(functools.partial(kernel.gated_delta_forward, scale=0.1), q, k, v, g, beta)
    assert text.count("@mosaic_gpu_v2(") == kernels
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize("by_channel", [False, True])
def test_short_ragged_rows_lower(by_channel):
    state = jax.ShapeDtypeStruct((2, 4, 64, 64), jnp.float32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    q, k, v, g, beta = operands(2, 10, 2, 4, 64, 64)
    if by_channel:
        g = jax.ShapeDtypeStruct((*g.shape, 64), jnp.float32)
    text = lowered(
        lambda *x: kernel.gated_delta_forward(*x[:5], scale=0.1, initial_state=x[5], lengths=x[6]),
        q, k, v, g, beta, state, lengths,
    )  # fmt: skip
    assert text.count("@mosaic_gpu_v2(") == 2


@pytest.mark.parametrize(
    "shape, by_channel, kernels",
    [
        ((8, 4096, 8, 16, 128, 128), False, 4),
        ((1, 16384, 16, 16, 64, 64), False, 6),
        ((1, 8192, 64, 64, 128, 128), True, 5),
        ((1, 16384, 8, 16, 64, 64), True, 7),
    ],
)
def test_backward_lowers(shape, by_channel, kernels):
    x = list(operands(*shape))
    if by_channel:
        x[3] = jax.ShapeDtypeStruct((*x[3].shape, shape[-2]), jnp.float32)
    text = lowered(lambda *x: kernel.gated_delta_backward(*x, None, scale=0.1), *x, x[2])
    assert text.count("@mosaic_gpu_v2(") == kernels


# --- Values, on the GPU ---------------------------------------------------------------------------
CASES = [  # (B, T, Hk, H, Dk, Dv), kind, segments
    ((1, 64, 1, 1, 128, 128), "weak", 1),
    ((2, 10, 1, 2, 128, 128), "mixed", 1),
    ((2, 300, 2, 4, 128, 128), "mixed", 1),
    ((2, 300, 2, 2, 128, 256), "weak", 1),
    ((1, 515, 1, 4, 64, 64), "mixed", 3),
    ((1, 1000, 1, 2, 128, 128), "weak", 4),
    ((1, 512, 1, 2, 128, 128), "equal", 1),
    ((1, 512, 1, 2, 128, 128), "near", 4),
    ((9, 70, 4, 8, 128, 128), "mixed", 1),  # a block of the scan has 128 channels
]
WIDE = [
    ((1, 10, 1, 1, 256, 64), "weak", 1),
    ((2, 300, 2, 4, 256, 512), "mixed", 1),
    ((1, 1000, 1, 2, 256, 128), "weak", 4),
    ((1, 512, 1, 2, 256, 128), "equal", 1),
    ((1, 512, 1, 2, 256, 256), "near", 4),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, kind, segments, by_channel",
    [(*x, by_channel) for x in CASES for by_channel in (False, True)] + [(*x, False) for x in WIDE],
)
def test_values(shape, kind, segments, by_channel):
    *x, state = case(shape, kind, by_channel=by_channel)
    f = functools.partial(kernel.gated_delta_forward, scale=0.1, segments=segments)
    for start in (None, state):
        got, again = (f(*x, initial_state=start) for _ in range(2))
        want = recurrence(*x, 0 * state if start is None else state, 0.1)
        for a, b, c in zip(got, again, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            assert relative_rms(a, c) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, kind, segments, by_channel",
    [
        (*x, by_channel)
        for x in [((1, 512, 4, 4, 128, 128), "equal", 1), *CASES]
        for by_channel in (False, True)
        if x[0][-1] <= 128 and (by_channel or x[1] != "near")  # near: README.md
    ],
)
def test_gradients(shape, kind, segments, by_channel):
    *x, state = case(shape, kind, by_channel=by_channel)
    rng = np.random.default_rng(9)
    d_out = jnp.asarray(rng.normal(size=x[2].shape), jnp.bfloat16)
    d_last = jnp.asarray(rng.normal(size=state.shape), jnp.float32)
    got = kernel.gated_delta_backward(
        *x, d_out, d_last, scale=0.1, initial_state=state, segments=segments
    )
    want = gradients(*x, d_out, d_last, state, 0.1)
    names = ("q", "k", "v", "log_decay", "beta", "state")
    errors = {n: relative_rms(a, b) for n, a, b in zip(names, got, want, strict=True)}
    assert all(error < 5e-3 for error in errors.values()), errors


@pytest.mark.gpu
@pytest.mark.parametrize("dk, by_channel", [(128, False), (128, True), (256, False)])
@pytest.mark.parametrize("segments", [1, 2])
def test_padding_may_hold_anything(segments, dk, by_channel):
    *x, state = case((3, 330, 2, 4, dk, 128), "mixed", by_channel=by_channel)
    lengths = np.array([330, 129, 20], np.int32)
    valid = np.arange(330)[None] < lengths[:, None]
    shaped = [valid.reshape(3, 330, *[1] * (y.ndim - 2)) for y in x]
    poison, clean = (
        [jnp.where(m, y, fill).astype(y.dtype) for m, y in zip(shaped, x, strict=True)]
        for fill in (jnp.nan, 0)
    )
    o, last = kernel.gated_delta_forward(
        *poison, scale=0.1, initial_state=state, lengths=jnp.asarray(lengths), segments=segments
    )
    want, want_last = recurrence(*clean, state, 0.1)
    assert relative_rms(last, want_last) < 5e-3
    assert relative_rms(o, np.where(valid[..., None, None], want, 0)) < 5e-3
    assert np.all(np.where(valid[..., None, None], 0, np.asarray(o, np.float32)) == 0)
