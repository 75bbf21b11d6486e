"""Tokens of a GLA layer that may not stay, and the taking of some of them, against the recursion in
float64 and, bit for bit, against as many steps of one token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Reason
from pallas_kernels.gla import token
from pallas_kernels.gla.commit import gla_commit
from pallas_kernels.gla.commit import plan as plan_commit
from pallas_kernels.gla.token import GlaLayerTokens, gla_token
from tests.helpers.arrays import as_jax
from tests.helpers.cases import each_once
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.warp_emulator import emulated
from tests.kernels.gla.test_gla_token import (
    EPS,
    NORMALIZER,
    ROUNDS,
    case,
    expected,
    newest,
    relative_rms,
)

OPTIONS = {"eps": EPS, "normalizer": NORMALIZER, "clamp_min": -0.02}


def steps(streams, weights, state, tokens, run):
    """(each token's y, each state), of ``run`` for one token after the other."""
    ys, states = [], [state]
    for t in range(tokens):
        now = [x._replace(rows=x.rows[t::tokens]) for x in streams]
        y, after = run(now, *weights, jnp.ones(state.shape[0], jnp.int32), states[-1])
        ys.append(y)
        states.append(as_jax(after, jnp.float32))
    return ys, states


def draft(rows, tokens, shape, **special):
    """(streams of ``tokens`` a row, (decay, norm), state) of a call."""
    streams, decay, norm, _, _ = case(rows * tokens, *shape, **special)
    state = jax.random.normal(jax.random.key(3), (rows, *(shape[i] for i in (0, 2, 3))))
    return streams, (decay, norm), state


def check(rows, tokens, shape, **special):
    streams, weights, state = draft(rows, tokens, shape, **special)
    y, *kept = gla_token(GlaLayerTokens(streams, *weights, None, state), **OPTIONS)
    least = ROUNDS[y.dtype.name]
    before = np.asarray(state)
    y = np.asarray(y, np.float64).reshape(rows, tokens, -1)
    for t, want in enumerate(
        steps(streams, weights, state, tokens, lambda *given: expected(*given, -0.02))[0]
    ):
        assert relative_rms(y[:, t], want.reshape(rows, -1)) < least
    # The same state and tokens of two layers, of which the second one's are one token on.
    kept = [[x, jnp.roll(x, 1, axis=1)] for x in kept]
    one = lambda *given: gla_token(GlaLayerTokens(*given), **OPTIONS)  # noqa: E731
    ys, states = steps(streams, weights, state, tokens, one)
    for t, one in enumerate(ys):
        np.testing.assert_array_equal(y[:, t], np.asarray(one, np.float64).reshape(rows, -1))
    np.testing.assert_array_equal(state, before)
    count = as_jax([tokens, 0, 1, 2][:rows], jnp.int32)
    layers = list(zip([as_jax(state), states[1]], *kept, strict=True))
    first, second = gla_commit(layers, count)
    for row, n in enumerate(count.tolist()):
        np.testing.assert_array_equal(first[row], states[n][row])
        if n == 0:
            np.testing.assert_array_equal(second[row], states[1][row])
    wide = [np.asarray(x[1], np.float64) for x in kept]
    want = np.asarray(states[1], np.float64)[0]
    for k, v, g in zip(*(x[0] for x in wide), strict=True):
        want = np.exp(g)[..., None] * want + k[..., None] * v[:, None]
    assert relative_rms(second[0], want) < 1e-6


CASES = {  # rows, tokens, (heads, kv heads, Dk, Dv), and what is special
    "one": (1, 1, (2, 2, 64, 128), {}),
    "draft": (1, 4, (2, 2, 128, 256), {}),
    "more-than-warps": (2, 5, (2, 2, 64, 256), {"together": False}),
    "groups": (3, 3, (4, 2, 64, 128), {"rank": 24, "gate": False}),
    "float16": (2, 3, (2, 2, 128, 256), {"dtype": "float16"}),
}


@newest
@pytest.mark.parametrize("name, divided", each_once([*CASES], [((128, 4),), ((64, 4),)]), ids=str)
def test_a_draft_s_tokens_are_steps_bit_for_bit(name, divided, monkeypatch):
    from pallas_kernels import dispatch
    from pallas_kernels.gla import head_norm_kernel, step_kernel, step_registers

    monkeypatch.setattr(step_kernel, "divided", lambda *_: step_kernel.GlaStepPlan(*divided))
    monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)
    rows, tokens, shape, special = CASES[name]
    with emulated(step_kernel, step_registers, head_norm_kernel):
        check(rows, tokens, shape, **special)


def test_the_xla_form_of_a_commit_is_the_recursion():
    rng = np.random.default_rng(0)
    k, g = rng.standard_normal((2, 2, 5, 3, 8))
    v, state = rng.standard_normal((2, 5, 3, 4)), rng.standard_normal((2, 3, 8, 4))
    given = [as_jax(x, jnp.float32) for x in (state, k, v, -np.abs(g))]
    (after,) = gla_commit([given], as_jax([3, 0], jnp.int32))
    for t in range(3):
        kv = k[0, t][..., None] * v[0, t][:, None]
        state[0] = np.exp(-np.abs(g[0, t]))[..., None] * state[0] + kv
    assert relative_rms(after, state) < 1e-6


def test_what_the_kernels_refuse_is_said():
    streams, weights, state = draft(1, 17, (2, 2, 64, 128))
    given = GlaLayerTokens(streams, *weights, None, state)
    assert "17 tokens of 1 rows" in token.plan(given).text
    with pytest.raises(NotImplementedError, match="over 16 each"):
        gla_token(given, **OPTIONS)
    with pytest.raises(ValueError, match="gla_tokens: 17 rows of q"):
        gla_token(given._replace(state=jnp.concatenate([state] * 2)), **OPTIONS)
    k, v = jnp.zeros((1, 4, 2, 64), jnp.bfloat16), jnp.zeros((1, 4, 2, 128), jnp.bfloat16)
    g, count = jnp.zeros(k.shape), jnp.ones((1,), jnp.int32)

    def reason(states=(state,), k=k, v=v):
        found = plan_commit([(x, k, v, g) for x in states], count)
        return found.text if isinstance(found, Reason) else None

    assert reason() is None
    assert "k is float32" in reason(k=g)
    assert "several shapes" in reason((state, state[:, :1]))
    assert "65 layers" in reason((state,) * 65)
    with pytest.raises(ValueError, match="gla_commit: count"):
        gla_commit([(state, k, v, g)], jnp.ones((2,), jnp.int32))


@newest
def test_a_commit_lowers_for_cuda_as_one_kernel_in_place(monkeypatch):
    from pallas_kernels import dispatch

    monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)
    layers, types = 24, (((4, 4, 256), jnp.bfloat16), ((4, 4, 512), jnp.bfloat16))
    k, v, g = (
        [jax.ShapeDtypeStruct((2, *shape), dtype)] * layers
        for shape, dtype in (*types, ((4, 4, 256), jnp.float32))
    )
    states = [jax.ShapeDtypeStruct((2, 4, 256, 512), jnp.float32)] * layers
    count = jax.ShapeDtypeStruct((2,), jnp.int32)

    def call(states, *given):
        *kept, count = given
        return gla_commit(list(zip(states, *kept, strict=True)), count)

    text = lowered(call, states, k, v, g, count, donate_argnums=0)
    assert len(kernels_in(text)) == 1 and text.count("tf.aliasing_output") == layers


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, tokens, shape, special",
    [
        *CASES.values(),
        (1, 4, (4, 4, 256, 512), {}),
        (1, 5, (4, 4, 256, 512), {}),
        (3, 8, (4, 4, 256, 512), {}),
        (1, 16, (4, 4, 256, 512), {}),
        (1, 16, (2, 2, 512, 256), {}),
        (4, 8, (8, 4, 128, 1024), {}),
    ],
)
def test_values_on_the_gpu(rows, tokens, shape, special):
    check(rows, tokens, shape, **special)
