"""The recursion of Mamba-2: the op and the parts of its kernel; values of that on a Hopper GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gla.step_kernel import plan as step_plan
from pallas_kernels.recurrence.op import Heads
from pallas_kernels.ssd import kernel
from pallas_kernels.ssd.op import ssd, ssd_as_gla
from tests.helpers.arrays import as_jax
from tests.helpers.lowering import kernels_in, lowered
from tests.kernels.gla.test_gla import GATES, error

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())


def case(shape, seed=3, dtype=jnp.bfloat16, strength=1.0):
    """q, k, v, log_decay with gates of all strengths, and a state."""
    b, t, groups, h, dk, dv = shape
    rng = np.random.default_rng(seed)
    q, k = (as_jax(x, dtype) for x in rng.normal(size=(2, b, t, groups, dk)) * dk**-0.5)
    v = as_jax(rng.normal(size=(b, t, h, dv)), dtype)
    g = strength * GATES[rng.integers(0, len(GATES), size=(b, t, h))]
    return q, k, v, as_jax(g, jnp.float32), as_jax(rng.normal(size=(b, h, dk, dv)), jnp.float32)


def recursion(q, k, v, g, state, lengths=None):
    """In float64; o is 0 past a row's end."""
    q, k, v, g, state = (np.array(x.astype(jnp.float32), np.float64) for x in (q, k, v, g, state))
    repeats = v.shape[2] // q.shape[2]
    q, k, o = np.repeat(q, repeats, 2), np.repeat(k, repeats, 2), np.zeros(v.shape)
    for b, t in np.ndindex(*q.shape[:2]):
        if lengths is None or t < lengths[b]:
            state[b] = np.exp(g[b, t])[:, None, None] * state[b]
            state[b] += k[b, t][..., None] * v[b, t][:, None]
            o[b, t] = np.einsum("hk,hkv->hv", q[b, t], state[b])
    return o, state


def test_values_on_any_device():
    q, k, v, g, state = case((2, 20, 2, 4, 16, 8), dtype=jnp.float32)
    lengths = as_jax([20, 9], jnp.int32)
    o, last = ssd(q, k, v, g, initial_state=state, lengths=lengths, implementation="xla")
    want, want_last = recursion(q, k, v, g, state, [20, 9])
    assert error(o, want) < 1e-5 and error(last, want_last) < 1e-5


def test_a_head_must_have_a_group():
    q, k, v, g, _ = case((1, 3, 2, 4, 16, 8))
    with pytest.raises(ValueError, match="2 groups, which do not divide the 3 heads"):
        ssd(q, k, v[:, :, :3], g[:, :, :3])


def test_a_reason_names_the_fact():
    q, k, v, g, _ = case((1, 3, 2, 4, 96, 64))
    assert "Dk = 96" in kernel.plan(Heads(q, k, v, g)).text
    assert "v has Dv = 40" in kernel.plan(Heads(q[..., :64], k[..., :64], v[..., :40], g)).text
    assert "v is float32" in kernel.plan(Heads(q, k, v.astype(jnp.float32), g)).text


def test_sums_of_chunks_start_at_zero_and_never_reach_infinity():
    g = np.asarray(-np.random.default_rng(0).exponential(size=(2, 100, 3)), np.float32)
    g[0, 5, 1] = -np.inf
    sums = np.asarray(kernel.chunk_sums(as_jax(g)))
    want = np.pad(np.maximum(g / np.log(2), -128), ((0, 0), (0, 28), (0, 0)))
    want = np.cumsum(want.reshape(2, 2, 64, 3), axis=2).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(sums, want, rtol=1e-5)


@pytest.mark.skipif(VERSION < (0, 11, 2), reason="Mosaic kernels need jax >= 0.11.2")
def test_blocks_of_one_head_count_as_those_of_two():
    """20 blocks of one head of 64 channels each, and 20 of two: the same waves, the same plan."""
    q = jax.ShapeDtypeStruct((1, 8192, 20, 64), jnp.bfloat16)
    plans = []
    g = jax.ShapeDtypeStruct((1, 8192, 20), jnp.float32)
    for dv in (64, 128):
        v = jax.ShapeDtypeStruct((1, 8192, 20, dv), jnp.bfloat16)
        plans.append(kernel.plan(Heads(q, q, v, g)))
    assert plans[0] == plans[1] and plans[0].segments == 6


def test_first_states_of_segments_are_those_of_the_row():
    """Three chunks in two segments, whose own states the recursion gives."""
    q, k, v, g, state = case((1, 192, 1, 2, 8, 4), dtype=jnp.float32, strength=0.01)
    zeros = jnp.zeros_like(state)
    first, second = ([x[:, part] for x in (q, k, v, g)] for part in (np.s_[:128], np.s_[128:]))
    local = np.stack([recursion(*x, zeros)[1] for x in (first, second)], axis=2)
    starts = kernel.segment_starts(as_jax(local, jnp.float32), kernel.chunk_sums(g), state, 2)
    np.testing.assert_array_equal(starts[:, :, 0], state)
    assert error(starts[:, :, 1], recursion(*first, state)[1]) < 1e-5


@pytest.mark.skipif(VERSION < (0, 11, 2), reason="the kernels need 0.11.2")
@pytest.mark.parametrize("shape, scans", [((8, 4096, 8, 64), 1), ((1, 16384, 1, 48), 2)])
def test_forward_lowers_as_planned(shape, scans):
    b, t, groups, h = shape
    q = jax.ShapeDtypeStruct((b, t, groups, 128), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((b, t, h, 64), jnp.bfloat16)
    g = jax.ShapeDtypeStruct((b, t, h), jnp.float32)
    found = kernel.plan(Heads(q, q, v, g))
    forward = functools.partial(kernel.ssd_forward, segments=found.segments)
    names = kernels_in(lowered(forward, Heads(q, q, v, g)))
    assert names == ["ssd_scan", "ssd_states"][:scans]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, segments",
    [
        ((1, 64, 1, 1, 64, 64), 1),
        ((2, 300, 2, 4, 128, 64), 1),
        ((1, 1003, 1, 3, 128, 64), 1),  # a block of one head
        ((2, 700, 2, 4, 128, 32), 4),  # heads padded to 64
        ((2, 520, 1, 2, 64, 128), 3),
        ((1, 300, 2, 2, 128, 80), 1),
        ((2, 300, 1, 2, 256, 64), 2),
    ],
)
def test_values(shape, segments):
    *x, state = case(shape)
    want = recursion(*x, state)
    for given in ({"segments": segments}, {"lengths": jnp.full((shape[0],), shape[1], jnp.int32)}):
        got = kernel.ssd_forward(Heads(*x), initial_state=state, **given)
        for a, b in zip(got, want, strict=True):
            assert error(a, b) < 6e-3


@pytest.mark.gpu
def test_padding_may_hold_anything():
    q, k, v, g, state = case((3, 330, 2, 4, 128, 64))
    lengths = np.array([330, 129, 20], np.int32)
    valid = np.arange(330)[None] < lengths[:, None]

    def poisoned(x):
        return jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, jnp.nan)

    bad = [poisoned(x).astype(x.dtype) for x in (q, k, v, g)]
    want = recursion(q, k, v, g, state, lengths)
    for n in (1, 2):
        given = {"lengths": as_jax(lengths), "segments": n}
        got = kernel.ssd_forward(Heads(*bad), initial_state=state, **given)
        for a, b in zip(got, want, strict=True):
            assert error(a, b) < 6e-3
        assert np.all(np.asarray(got[0], np.float32)[~valid] == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dv", [32, 64])
def test_values_of_a_step_of_narrow_heads(dv):
    from pallas_kernels.gla.op import gla_step

    q, k, v, g, state = case((3, 1, 1, 6, 128, dv))
    now = ssd_as_gla(*(x[:, 0] for x in (q, k, v, g)))
    assert step_plan(*now[:3]).columns == dv
    o, new = gla_step(*now, state, scale=1.0, implementation="mosaic")
    want, want_state = recursion(q, k, v, g, state)
    assert error(o, want[:, 0]) < 4e-3 and error(new, want_state) < 1e-5
