"""One token of a gated delta layer as one kernel, against the recursion in float64.

Errors are relative RMS: bfloat16 rounds q, k, v and the output by 1.7e-3 each, as the ops one after
the other do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.gated_delta.commit import _commit, gated_delta_commit
from pallas_kernels.gated_delta.reference import EPSILON
from pallas_kernels.gated_delta.token import DeltaLayerTokens, gated_delta_token, plan
from pallas_kernels.operands import Columns
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow
from tests.helpers.delta_cases import relative_rms
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.warp_emulator import emulated

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
newest = pytest.mark.skipif(VERSION < (0, 11, 2), reason="Mosaic kernels need jax >= 0.11.2")
EPS = 1e-6


ROUNDS = {"bfloat16": 1.0, "float16": 1 / 8}  # against bfloat16


def case(b, key_heads, heads, dk, dv=128, *, gate=True, taps=4, seed=0, dtype="bfloat16"):
    """Streams, taps, decay, norm, lengths (the second row stands still), state, last inputs."""
    rng = np.random.default_rng(seed)

    def draw(*shape, size=1.0, mean=0.0):
        return as_jax((mean + size * rng.standard_normal(shape)).astype(jnp.dtype(dtype)))

    features = 2 * key_heads * dk + heads * dv
    width = features + gate * heads * dv
    streams = Columns(draw(b, width + 8), 8, width), Columns(draw(b, 2 * heads), 0, 2 * heads)
    decay = draw(heads), draw(heads, mean=-2.0)
    lengths = as_jax([1, 0, 1][:b], jnp.int32)
    state = as_jax(rng.standard_normal((b, heads, dk, dv)), jnp.float32)
    conv, norm = draw(features, taps, size=0.5), draw(dv, size=0.2, mean=1.0)
    return streams, conv, decay, norm, lengths, state, draw(b, taps - 1, features)


def expected(streams, conv, decay, norm, lengths, state, last, beta_max):
    """y, the state and the last inputs, in float64."""
    b, heads, dk, dv = state.shape
    wide = (np.asarray(x, np.float64) for x in (*(x.value for x in streams), conv, *decay, norm))
    qkvz, ba, conv, a_log, dt, norm = wide
    moves = np.asarray(lengths) > 0
    features = conv.shape[0]
    qkv, z = qkvz[:, :features], qkvz[:, features:]
    inputs = np.concatenate([np.asarray(last, np.float64), qkv[:, None]], axis=1)
    y = np.einsum("bwf,fw->bf", inputs, conv)
    y = y / (1 + np.exp(-y))
    keys = (features - heads * dv) // 2
    q, k = (x.reshape(b, -1, dk) for x in (y[:, :keys], y[:, keys : 2 * keys]))
    q, k = (x / np.sqrt(np.sum(x**2, -1, keepdims=True) + EPSILON) for x in (q, k))
    q, k = (np.repeat(x, heads // x.shape[1], axis=1) for x in (q, k))
    v = y[:, 2 * keys :].reshape(b, heads, dv)
    beta = beta_max / (1 + np.exp(-ba[:, :heads]))
    a = np.exp(-np.exp(a_log) * np.logaddexp(0, ba[:, heads:] + dt))
    new = a[..., None, None] * np.asarray(state, np.float64)
    change = beta[..., None] * (v - np.einsum("bhk,bhkv->bhv", k, new))
    new = new + k[..., None] * change[:, :, None]
    o = dk**-0.5 * np.einsum("bhk,bhkv->bhv", q, new)
    o = o / np.sqrt(np.mean(o**2, -1, keepdims=True) + EPS) * norm
    if z.size:
        o = o * (z / (1 + np.exp(-z))).reshape(o.shape)
    new = np.where(moves[:, None, None, None], new, np.asarray(state, np.float64))
    return o, new, np.where(moves[:, None, None], inputs[:, 1:], inputs[:, :-1])


def check(given, beta_max=1.0):
    want, want_state, want_last = expected(*given, beta_max)
    before = np.asarray(given[5])
    y, state, last = gated_delta_token(DeltaLayerTokens(*given), eps=EPS, beta_max=beta_max)
    moves, error = np.asarray(given[4]) > 0, ROUNDS[y.dtype.name]
    assert relative_rms(np.asarray(y, np.float32)[moves], want[moves]) < 8e-3 * error
    assert relative_rms(state, want_state) < 2e-3 * error
    np.testing.assert_array_equal(np.asarray(state)[~moves], before[~moves])
    np.testing.assert_array_equal(np.asarray(last, np.float64), want_last)


CASES = {  # rows, key heads, heads, Dk, and what is special
    "one": ((1, 1, 1, 64), {}),
    "groups": ((2, 2, 4, 128), {}),
    "three": ((1, 1, 3, 128), {"gate": False, "taps": 2}),
    "wide": ((2, 2, 2, 256), {}),
    "float16": ((2, 2, 4, 128), {"dtype": "float16"}),
}


@newest
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_s_code_on_numpy(name):
    from pallas_kernels.gated_delta import token_kernel, token_registers

    shape, special = CASES[name]
    with emulated(token_kernel, token_registers):
        check(case(*shape, **special), 2.0 if name == "groups" else 1.0)


@newest
def test_the_portable_kernel_in_any_order():
    """Before Hopper the value heads of a key head are no cluster, and read a copy.

    The cluster's arrival is relaxed. The emulator has no end of a load, but for a stronger arrival.
    """
    from tests.helpers.emulator.launch import emulated

    with emulated(target="sm_80"):
        check(case(*CASES["groups"][0]), 2.0)


def check_draft(rows, tokens, shape, **special):
    """A draft's tokens are steps bit for bit, and so are those of them that are taken."""
    streams, conv, decay, norm, *_ = case(rows * tokens, *shape, **special)
    *_, state, last = case(rows, *shape, **special, seed=1)
    weights, options = (conv, decay, norm), {"eps": EPS, "beta_max": 1.0}
    given = DeltaLayerTokens(streams, *weights, None, state, last)
    y, *kept = gated_delta_token(given, **options)
    y = np.asarray(y, np.float32).reshape(rows, tokens, -1)
    ones, after = jnp.ones((rows,), jnp.int32), [(state, last)]
    for t in range(tokens):
        now = [x._replace(rows=x.rows[t::tokens]) for x in streams]
        given = DeltaLayerTokens(now, *weights, ones, *map(jnp.array, after[-1]))
        one, *new = gated_delta_token(given, **options)
        np.testing.assert_array_equal(y[:, t], np.asarray(one, np.float32).reshape(rows, -1))
        after.append(new)
    count = as_jax([tokens - 1, 0, 1][:rows], jnp.int32)
    # A second layer, whose state is a token on and takes the same ones again.
    layers = [(*map(jnp.array, before), *kept) for before in after[:2]]
    states, lasts = gated_delta_commit(layers, count)
    for row, n in enumerate(count.tolist()):
        np.testing.assert_array_equal(states[0][row], after[n][0][row])
        np.testing.assert_array_equal(lasts[0][row], after[n][1][row])
        if n == 0:
            np.testing.assert_array_equal(states[1][row], after[1][0][row])
    np.testing.assert_array_equal(lasts[1][0, -1], kept[-1][0, count[0] - 1])
    layers = [(*map(jnp.array, before), *kept) for before in after[:2]]
    for got, want in zip(
        (states, lasts), _commit.xla(None, *zip(*layers, strict=True), count), strict=True
    ):
        for one, other in zip(got, want, strict=True):
            assert relative_rms(one, np.asarray(other, np.float64)) < 2e-3  # it rounds no k


DRAFTS = {  # rows, tokens, (key heads, heads, Dk), and what is special
    "one": (1, 2, (1, 1, 64), {"gate": False}),
    "groups": (3, 5, (2, 4, 128), {}),
    "two-taps": (1, 4, (1, 1, 64), {"taps": 2}),
    "float16": (2, 3, (1, 2, 64), {"dtype": "float16"}),
}


@newest
@pytest.mark.parametrize("name", ["groups", "two-taps", *slow("one", "float16")])
def test_a_draft_s_tokens_are_steps_bit_for_bit(name, monkeypatch):
    from pallas_kernels.gated_delta import token_kernel, token_registers

    monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)
    rows, tokens, shape, special = DRAFTS[name]
    with emulated(token_kernel, token_registers):
        check_draft(rows, tokens, shape, **special)


@newest
@pytest.mark.slow
@pytest.mark.parametrize("name", ["groups", "two-taps"])
def test_a_draft_in_any_order(name):
    from tests.helpers.emulator.launch import emulated

    rows, tokens, shape, special = DRAFTS[name]
    with emulated(target="sm_80"):
        check_draft(rows, tokens, shape, **special)


def test_what_the_kernel_refuses_is_said():
    def reason(*shape, **special):
        found = plan(DeltaLayerTokens(*case(*shape, **special)))
        return found.text if isinstance(found, dispatch.Reason) else None

    assert reason(1, 16, 32, 128) is None
    assert "Dv = 128" in reason(1, 1, 1, 128, 256)
    assert "9 value heads" in reason(1, 1, 9, 64)
    assert "not 2 or 4 taps" in reason(1, 1, 1, 64, taps=3)
    given = DeltaLayerTokens(*case(1, 1, 2, 64))
    last = given.last
    assert "last is float32" in plan(given._replace(last=last.astype(jnp.float32))).text
    with pytest.raises(ValueError, match="conv .* does not fit state"):
        plan(given._replace(conv=given.conv[:-1], last=last[..., :-1]))
    with pytest.raises(ValueError, match="ba is 2 columns"):
        plan(given._replace(streams=[given.streams[0], given.streams[1]._replace(width=2)]))
    with pytest.raises(ValueError, match="one input less"):
        plan(given._replace(last=last[:, :2]))


@newest
def test_it_lowers_for_cuda_as_one_kernel_in_place():
    streams, *given = jax.eval_shape(lambda: case(1, 16, 32, 128))
    rows = [x.rows for x in streams]
    widths = 12288, 64

    def call(rows, conv, decay, norm, lengths, state, last):
        columns = [Columns(x, x.shape[1] - w, w) for x, w in zip(rows, widths, strict=True)]
        given = DeltaLayerTokens(columns, conv, decay, norm, lengths, state, last)
        return gated_delta_token(given, eps=EPS, beta_max=1.0)

    text = lowered(call, rows, *given, donate_argnums=(5, 6))
    assert kernels_in(text) == ["gated_delta_token"] and text.count("tf.aliasing_output") == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, special",
    [*CASES.values(), ((3, 16, 32, 128), {}), ((1, 4, 32, 128), {}), ((1, 16, 16, 128), {})],
)
def test_values_on_the_gpu(shape, special):
    check(case(*shape, **special), 2.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, tokens, shape, special",
    [
        *DRAFTS.values(),
        (1, 5, (16, 32, 128), {}),
        (3, 8, (16, 32, 128), {}),
        (1, 3, (1, 1, 256), {}),
    ],
)
def test_drafts_on_the_gpu(rows, tokens, shape, special):
    check_draft(rows, tokens, shape, **special)
