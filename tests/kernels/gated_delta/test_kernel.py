"""The gated delta rule's kernels: algorithm in numpy, rules, lowering; values on a Hopper GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.delta_cases import case, recurrence, relative_rms

CHUNK = 64
VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.gated_delta import kernel


def test_a_chunks_products():
    """What the kernels multiply, against the recursion."""
    given = case((1, CHUNK, 1, 1, 8, 6), "weak")
    q, k, v, g, beta, state = (np.squeeze(np.asarray(x, np.float64)) for x in given)
    scale = 0.4
    log = np.cumsum(g)
    e, to_end = np.exp(log)[:, None], np.exp(log[-1] - log)[:, None]
    decay = np.tril(np.exp(np.minimum(log[:, None] - log, 0)))
    a = beta[:, None] * (k @ k.T) * np.tril(decay, -1)
    x = np.linalg.inv(np.eye(CHUNK) + a) * beta
    m, keys = scale * (q @ k.T) * decay @ x, x.T @ (to_end * k)
    rest = v - e * (k @ state)
    o, last = (np.squeeze(y) for y in recurrence(*given, scale))
    np.testing.assert_allclose(scale * e * (q @ state) + m @ rest, o, atol=1e-10)
    np.testing.assert_allclose(e[-1] * state + keys.T @ rest, last, atol=1e-10)


def operands(b, t, hk, h, dk, dv, dtype=jnp.bfloat16):
    spec = jax.ShapeDtypeStruct
    q, gate = spec((b, t, hk, dk), dtype), spec((b, t, h), jnp.float32)
    return q, q, spec((b, t, h, dv), dtype), gate, gate


@pytest.mark.parametrize(
    "change, reason",
    [({"dtype": jnp.float32}, "q is float32"), ({"dk": 256}, "Dk = 256"), ({"dv": 96}, "Dv = 96")],
)
def test_a_reason_names_the_fact(change, reason):
    shape = {"b": 1, "t": 64, "hk": 1, "h": 1, "dk": 128, "dv": 128} | change
    assert reason in kernel.plan(*operands(**shape)[:4]).text


def test_decays_by_channel_have_no_kernel():
    q, k, v, *_ = operands(1, 64, 1, 1, 128, 128)
    by_channel = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    assert "every key channel" in kernel.plan(q, k, v, by_channel).text


@pytest.mark.parametrize(
    "rows, heads, dv, chunks, segments",
    [(8, 16, 128, 64, 1), (1, 16, 128, 256, 8), (1, 48, 128, 256, 1), (1, 1, 128, 3, 1)],
)
def test_segments_where_four_of_them_fit(rows, heads, dv, chunks, segments):
    assert kernel.segments_for(rows, heads, dv, chunks) == segments


def test_segment_starts_equal_the_plain_recursion():
    rng = np.random.default_rng(0)
    local, transitions = rng.normal(size=(1, 2, 3, 4, 5)), rng.normal(size=(1, 2, 3, 4, 4))
    state = rng.normal(size=(1, 2, 4, 5))
    given = (jnp.asarray(x, jnp.float32) for x in (local, transitions, state))
    starts = kernel.segment_starts(*given)
    for s in range(3):
        np.testing.assert_allclose(starts[:, :, s], state, rtol=1e-4, atol=1e-4)
        state = transitions[:, :, s] @ state + local[:, :, s]


def lowered(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "shape, kernels", [((8, 4096, 4, 16, 128, 128), 2), ((1, 16384, 16, 16, 128, 128), 3)]
)
def test_forward_lowers(shape, kernels):
    text = lowered(functools.partial(kernel.gated_delta_forward, scale=0.1), *operands(*shape))
    assert text.count("@mosaic_gpu_v2(") == kernels
    assert "stablehlo.transpose" not in text  # everything is read and written where it lies


def test_short_ragged_rows_lower():
    state = jax.ShapeDtypeStruct((2, 4, 64, 64), jnp.float32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lowered(
        lambda *x: kernel.gated_delta_forward(*x[:5], scale=0.1, initial_state=x[5], lengths=x[6]),
        *operands(2, 10, 2, 4, 64, 64), state, lengths,
    )  # fmt: skip
    assert text.count("@mosaic_gpu_v2(") == 2


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
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape, kind, segments", CASES)
def test_values(shape, kind, segments):
    *x, state = case(shape, kind)
    f = functools.partial(kernel.gated_delta_forward, scale=0.1, segments=segments)
    for start in (None, state):
        got, again = (f(*x, initial_state=start) for _ in range(2))
        want = recurrence(*x, 0 * state if start is None else state, 0.1)
        for a, b, c in zip(got, again, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            assert relative_rms(a, c) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [1, 2])
def test_padding_may_hold_anything(segments):
    *x, state = case((3, 330, 2, 4, 128, 128), "mixed")
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
