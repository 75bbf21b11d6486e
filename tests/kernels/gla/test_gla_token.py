"""One token of a GLA layer as one kernel, and the step alone, against the recursion in float64.

Errors are relative RMS: a bfloat16 output alone rounds by 1.7e-3, a float16 one by 2.1e-4, the
float32 state by 4e-8.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Reason
from pallas_kernels.gla.token import GlaLayerTokens, gla_token, plan
from pallas_kernels.operands import Columns
from tests.helpers.arrays import as_jax
from tests.helpers.cases import each_once
from tests.helpers.delta_cases import relative_rms
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.warp_emulator import emulated

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
newest = pytest.mark.skipif(VERSION < (0, 11, 2), reason="Mosaic kernels need jax >= 0.11.2")
EPS, NORMALIZER = 1e-6, 16.0


ROUNDS = {"bfloat16": 3e-3, "float16": 4e-4}  # an output


def case(
    b, heads, kv_heads, dk, dv, *, gate=True, rank=16, together=True, seed=0, dtype="bfloat16"
):
    """Streams, weights, lengths (the second row stands still) and state of a call."""
    rng = np.random.default_rng(seed)

    def draw(*shape, size=1.0, mean=0.0):
        return as_jax((mean + size * rng.standard_normal(shape)).astype(jnp.dtype(dtype)))

    widths = [heads * dk, kv_heads * dk, kv_heads * dv, rank, heads * dv][: 5 if gate else 4]
    if together:  # with columns in front that nobody reads
        rows, starts = draw(b, 8 + sum(widths)), np.cumsum([8, *widths[:-1]]).tolist()
        streams = [Columns(rows, s, w) for s, w in zip(starts, widths, strict=True)]
    else:
        streams = [Columns(draw(b, w), 0, w) for w in widths]
    decay = draw(kv_heads * dk, rank, size=0.5), draw(kv_heads * dk)
    lengths = as_jax([1, 0, 1, 1, 1][:b], jnp.int32)
    state = as_jax(rng.standard_normal((b, heads, dk, dv)), jnp.float32)
    return streams, decay, draw(dv, size=0.2, mean=1.0), lengths, state


def expected(streams, decay, norm, lengths, state, clamp_min):
    """y and the state, in float64."""
    b, heads, dk, dv = state.shape
    q, k, v, low, *gate = (np.asarray(x.value, np.float64) for x in streams)
    weight, bias, norm, state = (np.asarray(x, np.float64) for x in (*decay, norm, state))
    g = -np.logaddexp(0, -(low @ weight.T + bias)) / NORMALIZER
    g = g if clamp_min is None else np.maximum(g, clamp_min)
    group = heads * dk // k.shape[1]
    q = q.reshape(b, heads, dk)
    k, v, g = (
        np.repeat(x.reshape(b, heads // group, x.shape[-1] * group // heads), group, 1)
        for x in (k, v, g)
    )
    new = np.exp(g)[..., None] * state + k[..., None] * v[:, :, None]
    state = np.where(np.asarray(lengths)[:, None, None, None] > 0, new, state)
    y = dk**-0.5 * np.einsum("bhk,bhkv->bhv", q, state)
    y = y / np.sqrt(np.mean(y**2, -1, keepdims=True) + EPS) * norm
    for x in gate:
        y = y * (x / (1 + np.exp(-x))).reshape(y.shape)
    return y, state


def check(given, clamp_min=None):
    want, want_state = expected(*given, clamp_min)
    before = np.asarray(given[-1])
    options = {"eps": EPS, "normalizer": NORMALIZER, "clamp_min": clamp_min}
    y, state = gla_token(GlaLayerTokens(*given), **options)
    moves = np.asarray(given[3]) > 0
    assert relative_rms(np.asarray(y, np.float32)[moves], want[moves]) < ROUNDS[y.dtype.name]
    assert relative_rms(state, want_state) < 1e-6
    np.testing.assert_array_equal(np.asarray(state)[~moves], before[~moves])


CASES = {  # rows, heads, kv heads, Dk, Dv, and what is special
    "one": ((1, 2, 2, 64, 128), {}),
    "cluster": ((2, 2, 2, 128, 256), {"together": False}),
    "groups": ((2, 4, 2, 64, 128), {"rank": 24}),
    "no-gate": ((1, 1, 1, 64, 512), {"gate": False}),
    "float16": ((2, 2, 2, 128, 256), {"dtype": "float16"}),
    "wide": ((1, 1, 1, 512, 128), {}),
}


@newest
@pytest.mark.parametrize(
    "name, divided, clamp_min", each_once([*CASES], [((128, 4), None), ((64, 4), -0.02)]), ids=str
)
def test_the_kernel_s_code_on_numpy(name, divided, clamp_min, monkeypatch):
    from pallas_kernels.gla import head_norm_kernel, step_registers
    from pallas_kernels.gla import step_kernel as gla_step_mosaic

    monkeypatch.setattr(
        gla_step_mosaic, "divided", lambda *_: gla_step_mosaic.GlaStepPlan(*divided)
    )
    shape, special = CASES[name]
    with emulated(gla_step_mosaic, step_registers, head_norm_kernel):
        check(case(*shape, **special), clamp_min)


@newest
@pytest.mark.parametrize(
    "name, divided", [("float16", (64, 4)), ("no-gate", (128, 4)), ("cluster", (128, 4))], ids=str
)
def test_the_portable_kernels_have_the_bits_of_a_cluster(name, divided, monkeypatch):
    """Before Hopper the norm and the gate are a second kernel, with the same order of its sums."""
    from pallas_kernels.gla import step_kernel as gla_step_mosaic
    from tests.helpers.emulator.launch import emulated

    monkeypatch.setattr(
        gla_step_mosaic, "divided", lambda *_: gla_step_mosaic.GlaStepPlan(*divided)
    )
    shape, special = CASES[name]
    given = case(*shape, **special)
    options = {"eps": EPS, "normalizer": NORMALIZER, "clamp_min": -0.02}
    with emulated():
        own = gla_token(GlaLayerTokens(*given), **options)
    with emulated(target="sm_80"):
        portable = gla_token(GlaLayerTokens(*given), **options)
    jax.tree.map(np.testing.assert_array_equal, portable, own)


@newest
@pytest.mark.parametrize(
    "divided, dtype",
    [((128, 4), "bfloat16"), ((128, 8), "bfloat16"), ((64, 4), "float16")],
    ids=str,
)
def test_the_step_s_code_on_numpy(divided, dtype):
    from pallas_kernels.gla import head_norm_kernel, step_registers
    from pallas_kernels.gla import step_kernel as gla_step_mosaic

    rng = np.random.default_rng(1)
    q, k = (as_jax(x, dtype) for x in rng.standard_normal((2, 2, 3, 128)))
    v = as_jax(rng.standard_normal((2, 3, 256)), dtype)
    g = as_jax(np.where(rng.random((2, 3, 128)) < 0.1, -np.inf, -rng.random((2, 3, 128))))
    state = as_jax(rng.standard_normal((2, 3, 128, 256)), jnp.float32)
    wide = [np.asarray(x, np.float64) for x in (q, k, v, g, state)]
    want = np.exp(wide[3])[..., None] * wide[4] + wide[1][..., None] * wide[2][:, :, None]
    with emulated(gla_step_mosaic, step_registers, head_norm_kernel):
        plan = gla_step_mosaic.GlaStepPlan(*divided)
        o, new = gla_step_mosaic.gla_step(q, k, v, g.astype(jnp.float32), state, 0.1, plan)
    assert relative_rms(new, want) < 1e-6
    assert relative_rms(o, 0.1 * np.einsum("bhk,bhkv->bhv", wide[0], want)) < ROUNDS[dtype]


def test_what_the_kernel_refuses_is_said():
    def reason(shape=(1, 2, 2, 64, 128), **special):
        found = plan(GlaLayerTokens(*case(*shape, **special)))
        return found.text if isinstance(found, Reason) else None

    assert reason() is None and reason((1, 2, 1, 256, 512)) is None
    assert "Dk = 32" in reason((1, 2, 2, 32, 128))
    assert "Dv = 192" in reason((1, 2, 2, 64, 192))
    assert "Dv = 1152" in reason((1, 1, 1, 64, 1152))
    assert "rank of 12" in reason(rank=12)
    streams, decay, norm, lengths, state = case(1, 2, 2, 64, 128)
    moved = [x._replace(start=x.start - 4) for x in streams]
    given = GlaLayerTokens(moved, decay, norm, lengths, state)
    assert "16 bytes" in plan(given).text
    options = {"eps": EPS, "normalizer": NORMALIZER, "clamp_min": None}
    with pytest.raises(NotImplementedError, match="float32"):
        gla_token(given._replace(streams=streams, norm=norm.astype(jnp.float32)), **options)


@newest
def test_it_lowers_for_cuda_as_one_kernel_in_place():
    given = jax.eval_shape(lambda: tuple(jax.tree.leaves(case(1, 4, 4, 256, 512)[1:])))
    pitch, starts = 6160, (0, 1024, 2048, 6144, 4096)
    rows = jax.ShapeDtypeStruct((64, pitch), jnp.bfloat16)
    weight, bias, norm, _, state = given
    lengths = jax.ShapeDtypeStruct((64,), jnp.int32)
    state = jax.ShapeDtypeStruct((64, *state.shape[1:]), state.dtype)

    def call(rows, weight, bias, norm, lengths, state):
        widths = (1024, 1024, 2048, 16, 2048)
        streams = [Columns(rows, *at) for at in zip(starts, widths, strict=True)]
        options = {"eps": EPS, "normalizer": NORMALIZER, "clamp_min": None}
        given = GlaLayerTokens(streams, (weight, bias), norm, lengths, state)
        return gla_token(given, **options)

    text = lowered(call, rows, weight, bias, norm, lengths, state, donate_argnums=5)
    assert kernels_in(text) == ["gla_step"] and "tf.aliasing_output" in text


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, special",
    [
        *CASES.values(),
        ((3, 4, 4, 256, 512), {}),
        ((5, 8, 4, 128, 1024), {}),
        ((70, 4, 4, 256, 512), {"together": False}),
    ],
)
def test_values_on_the_gpu(shape, special):
    given = case(*shape, **special)
    if shape[0] > 5:
        given = *given[:3], jnp.ones(shape[0], jnp.int32).at[3].set(0), given[4]
    check(given, -0.02 if shape[0] == 3 else None)
