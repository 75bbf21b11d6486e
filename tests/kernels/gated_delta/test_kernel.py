"""The gated delta rule's kernels: rules, lowering; values on a Hopper GPU."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import sms
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow
from tests.helpers.delta_cases import case, oracle, relative_rms
from tests.helpers.lowering import kernels_in, lowered

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.gated_delta import kernel
    from pallas_kernels.recurrence.op import Heads


def operands(b, t, hk, h, dk, dv, dtype=jnp.bfloat16, by_channel=False):
    spec = jax.ShapeDtypeStruct
    q, beta = spec((b, t, hk, dk), dtype), spec((b, t, h), jnp.float32)
    decay = spec((b, t, h, dk), jnp.float32) if by_channel else beta
    return Heads(q, q, spec((b, t, h, dv), dtype), decay, beta)


@pytest.mark.parametrize(
    "change, reason",
    [({"dtype": jnp.float32}, "q is float32"), ({"dk": 512}, "Dk = 512"), ({"dv": 96}, "Dv = 96")],
)
def test_a_reason_names_the_fact(change, reason):
    shape = {"b": 1, "t": 64, "hk": 1, "h": 1, "dk": 128, "dv": 128} | change
    assert reason in kernel.plan(operands(**shape)).text


def test_wide_keys_decay_by_head():
    heads = operands(1, 64, 2, 2, 256, 128)
    assert kernel.plan(heads).segments == 1
    by_channel = jax.ShapeDtypeStruct(heads.q.shape, jnp.float32)
    assert "Dk = 256" in kernel.plan(heads._replace(log_decay=by_channel)).text


@pytest.mark.parametrize(
    "dk, dv, backward", [(128, 128, True), (128, 256, False), (256, 128, False)]
)
def test_gradients_of_wide_heads_are_xlas(dk, dv, backward):
    assert kernel.plan(operands(1, 64, 1, 1, dk, dv)).backward == backward


def test_segments_are_one_wave_of_whole_chunks():
    """And more rows, which fill the GPU themselves, are never cut into more."""
    for heads, dv, chunks, dk in itertools.product(
        (1, 4, 16, 96), (64, 128, 512), (1, 3, 64, 256, 2048), (128, 256)
    ):
        shapes = [operands(rows, 64 * chunks, heads, heads, dk, dv) for rows in (1, 2, 8, 64)]
        found = [kernel.segments_of(shape) for shape in shapes]
        assert found == sorted(found, reverse=True)
        for rows, n in zip((1, 2, 8, 64), found, strict=True):
            blocks = rows * heads * (1 + (dk > 128)) * -(-dv // 128)
            assert n == 1 or (n * blocks <= sms() and chunks >= 4 * n)
    assert kernel.segments_of(operands(1, 64 * 2048, 1, 1, 128, 128)) > 1  # a long row alone is cut


@pytest.mark.parametrize("reverse", [False, True])
def test_segment_starts_equal_the_plain_recursion(reverse):
    rng = np.random.default_rng(0)
    local, transitions = rng.normal(size=(1, 2, 3, 4, 5)), rng.normal(size=(1, 2, 3, 4, 4))
    state = rng.normal(size=(1, 2, 4, 5))
    given = (as_jax(x, jnp.float32) for x in (local, transitions, state))
    starts = kernel.segment_starts(*given, reverse=reverse)
    for s in (2, 1, 0) if reverse else (0, 1, 2):
        np.testing.assert_allclose(starts[:, :, s], state, rtol=1e-4, atol=1e-4)
        moves = transitions[:, :, s].swapaxes(-1, -2) if reverse else transitions[:, :, s]
        state = moves @ state + local[:, :, s]


@pytest.mark.parametrize(
    "shape, by_channel",
    [
        ((8, 4096, 4, 16, 128, 128), False),
        ((1, 8192, 8, 8, 128, 128), True),
        *slow(((1, 16384, 4, 8, 256, 256), False), ((1, 8192, 64, 64, 128, 128), True)),
    ],
    ids=str,
)
def test_forward_lowers_as_planned(shape, by_channel):
    heads = operands(*shape, by_channel=by_channel)
    text = lowered(functools.partial(kernel.gated_delta_forward, scale=0.1), heads)
    chunks = "gated_delta_channels" if by_channel else "gated_delta_chunks"
    scans = 1 + (kernel.plan(heads).segments > 1)  # of the segments' own states
    assert kernels_in(text) == [chunks, *["gated_delta_scan"] * scans]
    assert "stablehlo.transpose" not in text  # everything is read and written where it lies


@pytest.mark.parametrize("by_channel", [False, True])
def test_short_ragged_rows_lower(by_channel):
    state = jax.ShapeDtypeStruct((2, 4, 64, 64), jnp.float32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lowered(
        lambda heads, *x: kernel.gated_delta_forward(
            heads, scale=0.1, initial_state=x[0], lengths=x[1]
        ),
        operands(2, 10, 2, 4, 64, 64, by_channel=by_channel),
        state,
        lengths,
    )
    assert len(kernels_in(text)) == 2


@pytest.mark.parametrize(
    "shape, by_channel",
    [
        ((8, 4096, 8, 16, 128, 128), False),
        ((1, 16384, 8, 16, 64, 64), True),
        *slow(((1, 8192, 64, 64, 128, 128), True)),
    ],
    ids=str,
)
def test_backward_lowers(shape, by_channel):
    x = operands(*shape, by_channel=by_channel)
    text = lowered(lambda *x: kernel.gated_delta_backward(*x, None, scale=0.1), x, x.v)
    assert {"gated_delta_gradients", "gated_delta_reverse"} < set(kernels_in(text))


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
        got, again = (f(Heads(*x), initial_state=start) for _ in range(2))
        want = oracle(*x, 0 * state if start is None else state, scale=0.1)
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
    d_out = as_jax(rng.normal(size=x[2].shape), jnp.bfloat16)
    d_last = as_jax(rng.normal(size=state.shape), jnp.float32)
    heads, d_state = kernel.gated_delta_backward(
        Heads(*x), d_out, d_last, scale=0.1, initial_state=state, segments=segments
    )
    _, _, *want = oracle(*x, state, d_out, d_last, scale=0.1)
    names = ("q", "k", "v", "log_decay", "beta", "state")
    errors = {n: relative_rms(a, b) for n, a, b in zip(names, (*heads, d_state), want, strict=True)}
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
        Heads(*poison), scale=0.1, initial_state=state, lengths=as_jax(lengths), segments=segments
    )
    want, want_last = oracle(*clean, state, scale=0.1)
    assert relative_rms(last, want_last) < 5e-3
    assert relative_rms(o, np.where(valid[..., None, None], want, 0)) < 5e-3
    assert np.all(np.where(valid[..., None, None], 0, np.asarray(o, np.float32)) == 0)
