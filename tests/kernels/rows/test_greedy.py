"""The end of a greedy step: the XLA form against float64, the kernel on the emulator (and on a
Hopper GPU) against the XLA form, and what has no kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cards.architecture import TARGET
from pallas_kernels.dispatch import Reason
from pallas_kernels.rows import greedy
from pallas_kernels.rows.greedy import append_greedy
from tests.helpers import warp_emulator
from tests.helpers.arrays import as_jax

PLACES = 7
by_xla = jax.jit(append_greedy, static_argnames="capacity")


def operands(vocabulary, stops=(3,), *, done=0, length=9, step=2, batch=1, seed=0):
    rng = np.random.default_rng(seed)
    logits = as_jax(3 * rng.normal(size=(batch, vocabulary)), jnp.bfloat16)
    rows = np.tile(np.asarray([[11], [done], [step], [length], [step]], np.int32), (1, batch))
    written = rng.integers(0, 99, (2, batch, PLACES)).astype(np.int32)
    rest = (as_jax(x, jnp.int32) for x in (rows, written, tuple(stops)))
    return logits, *rest


def by_kernel(*operands, capacity):
    """On a GPU as it is, elsewhere emulated."""
    if jax.default_backend() == "gpu":
        return append_greedy(*operands, capacity=capacity, implementation="mosaic")
    from pallas_kernels.rows import greedy_kernel

    assert not isinstance(greedy.plan(operands[0], operands[3]), Reason)
    with warp_emulator.emulated(greedy_kernel):
        return greedy_kernel.append_greedy(*operands, capacity=capacity)


def check(got, want):
    (rows, written), (rows_x, written_x) = got, want
    np.testing.assert_array_equal(rows, rows_x)
    np.testing.assert_array_equal(written[0], written_x[0])
    logprobs, wanted = (np.asarray(x[1]).view(np.float32) for x in (written, written_x))
    np.testing.assert_allclose(logprobs, wanted, rtol=3e-6, atol=1e-6)


@pytest.mark.core
def test_the_xla_form_against_float64():
    logits, rows, written, _ = operands(1000, batch=3)
    x = np.asarray(logits, np.float64)
    token = x.argmax(1)
    logprob = x.max(1) - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) - x.max(1)
    rows = rows.at[1, 1].set(1)  # done
    stops = as_jax([token[2]], jnp.int32)
    after, out = map(np.asarray, by_xla(logits, rows, written, stops, capacity=None))
    np.testing.assert_array_equal(after[0], [token[0], 0, token[2]])
    np.testing.assert_array_equal(after[1], [0, 1, 1])
    np.testing.assert_array_equal(after[2:], [[3, 2, 3], [10, 9, 10], [3, 3, 3]])
    np.testing.assert_array_equal(out[0, :, 2], after[0])
    got = np.ascontiguousarray(out[1, :, 2]).view(np.float32)
    np.testing.assert_allclose(got[[0, 2]], logprob[[0, 2]], rtol=1e-6)
    assert got[1] == 0
    kept = np.delete(np.arange(PLACES), 2)
    np.testing.assert_array_equal(out[:, :, kept], written[:, :, kept])


# A part of a round, one round, a part of the second.
@pytest.mark.parametrize("vocabulary", [1000, 65536, 128256])
def test_the_kernel(vocabulary):
    made = operands(vocabulary, (5, 7), seed=vocabulary)
    check(by_kernel(*made, capacity=None), by_xla(*made, capacity=None))


def test_the_portable_kernels(monkeypatch):
    """Before Hopper the blocks leave their parts in device memory."""
    monkeypatch.setenv(TARGET, "sm_80")
    test_the_kernel(1000)
    test_the_kernel_at_the_edges("a stop token")


CASES = {
    "a stop token": {"at": [(777, 90.0)], "stops": (1, 777, 2)},
    "the first of equals": {"at": [(40001, 50.0), (777, 50.0), (8192, 50.0)]},
    "done": {"done": 1},
    "the last place": {"step": PLACES - 1},
    "room for one": {"capacity": 10},
    "no room": {"capacity": 9, "stops": (0,)},
    "done, without room": {"capacity": 9, "done": 1},
    "no stop tokens": {"stops": ()},
    "NaN": {"at": [(5, np.nan), (65000, np.nan)]},
    "+inf twice": {"at": [(65000, np.inf), (9, np.inf)]},
    "nothing finite": {"fill": -np.inf, "stops": (0,)},
    "one token is certain": {"fill": -np.inf, "at": [(60000, 2.0)]},
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_at_the_edges(name):
    case = dict(CASES[name])
    capacity, at, fill = (case.pop(key, None) for key in ("capacity", "at", "fill"))
    logits, *rest = operands(65536, case.pop("stops", (3,)), **case)
    logits = np.array(logits)
    if fill is not None:
        logits[:] = fill
    for token, value in at or ():
        logits[0, token] = value
    logits = as_jax(logits)
    want = by_xla(logits, *rest, capacity=capacity)
    check(by_kernel(logits, *rest, capacity=capacity), want)
    if name == "the first of equals":
        assert want[0][0, 0] == 777
    if name in ("no room", "nothing finite"):
        assert want[0][0, 0] == 0 and np.isnan(np.asarray(want[1][1, 0, 2]).view(np.float32))


def test_what_has_no_kernel():
    def reason(*made):
        found = greedy.plan(made[0], made[3])
        return found.text if isinstance(found, Reason) else None

    assert reason(*operands(128256)) is None
    assert reason(*operands(50257)) == "50257 logits, no multiple of 8"
    assert reason(*operands(64, batch=2)) == "2 rows; the kernel is of one"
    assert "33 stop tokens" in reason(*operands(64, range(33)))
    logits, *rest = operands(64)
    assert "float32" in reason(logits.astype(jnp.float32), *rest)


def test_as_a_whole_loop():
    """And lowered for a GPU."""
    logits, rows, written, stops = operands(512)

    def loop(implementation, rows, written):
        def turn(carry):
            scores = logits + carry[0][4, 0].astype(logits.dtype)
            return append_greedy(scores, *carry, stops, capacity=64, implementation=implementation)

        return jax.lax.while_loop(lambda carry: carry[0][4, 0] < 5, turn, (rows, written))

    loop = jax.jit(loop, static_argnums=0)
    after, out = loop("xla", rows, written)
    assert after[4, 0] == 5 and (out[0, 0, 2:5] == out[0, 0, 2]).all()
    if tuple(int(v) for v in jax.__version__.split(".")[:3]) >= (0, 11, 2):
        lowered = loop.trace("mosaic", rows, written).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("mosaic_gpu") >= 1


@pytest.mark.gpu
def test_on_a_gpu():
    for vocabulary in (512, 49152, 128256, 151936):
        made = operands(vocabulary, (5, 7), seed=vocabulary)
        want = append_greedy(*made, capacity=64, implementation="xla")
        check(by_kernel(*made, capacity=64), want)
