"""The backward pass for a decay a key channel: its registers' work, every thread on the CPU."""

from __future__ import annotations

import contextlib

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.helpers import warp_emulator
from tests.helpers.cases import slow
from tests.helpers.delta_cases import case, oracle, relative_rms, unit
from tests.kernels.gated_delta.test_inverse import fragments
from tests.kernels.gated_delta.test_tree import (
    SCALE,
    between,
    decays,
    emulate,
    get,
    put,
    rounded,
)

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.gated_delta import gradients_channels as registers
    from pallas_kernels.gated_delta import gradients_channels_products as products
    from pallas_kernels.gated_delta import kernel_inverse
    from pallas_kernels.recurrence import channels, slices
    from pallas_kernels.rows import fused_parts

C, BF16 = 64, ml_dtypes.bfloat16
TILE, BASE = 8192, 1024
WORDS, PAIRS, STATES = BASE, BASE + 4 * TILE, BASE + 8 * TILE
GATES, DIAGONAL = BASE + 11 * TILE, BASE + 13 * TILE
THROUGH, SIZE = DIAGONAL + 256, DIAGONAL + 2048


def words(x):
    """A [64, 64] matrix as the products leave it: ``x[tile][half]`` of every thread, bf16 pairs."""
    thread = np.arange(128)
    row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
    pairs = x.astype(BF16).view(np.uint16).reshape(C, C // 2, 2).astype(np.uint32)
    pairs = pairs[..., 0] | pairs[..., 1] << 16
    return [
        [pairs[row + 8 * half, 4 * tile + column // 2] for half in range(2)] for tile in range(8)
    ]


@contextlib.contextmanager
def threads():
    block = warp_emulator.Block(128, SIZE)
    with warp_emulator.running_on(
        block, channels, fused_parts, kernel_inverse, products, registers, slices
    ):
        yield block


def symmetric(block, at, lower):
    products._symmetric(block.c(at), words(lower), words(lower.T))
    products._diagonal(block.c(DIAGONAL), fragments(lower))


def test_pairs_are_symmetric_and_sorted_by_level():
    x = np.random.default_rng(0).normal(size=(C, C)).astype(BF16).astype(np.float64)
    with threads() as block:
        symmetric(block, PAIRS, x)
        whole, levels = get(block, PAIRS), get(block, PAIRS + TILE)
        diagonal = block.memory[DIAGONAL : DIAGONAL + 4 * C].view(np.float32)
    below = np.tril(x, -1)
    np.testing.assert_array_equal(whole, below + below.T)
    np.testing.assert_array_equal(diagonal, np.diag(x))
    i, j = np.indices((C, 16))
    for n in range(4):
        met = (i % 16 ^ j) >> n == 1
        want = np.where(met, whole[i, i // 16 * 16 + j], 0)
        np.testing.assert_array_equal(levels[:, 16 * n : 16 * n + 16], want)


def test_states_and_their_gradients_are_summed_over_value_channels():
    rng = np.random.default_rng(0)
    states, ends = (rounded(rng.normal(size=(2, C, C))) for _ in range(2))
    with threads() as block:
        for n in range(2):
            put(block, BASE + (products._S + 2 * n) * TILE, states[n])
            put(block, BASE + (products._E + 2 * n) * TILE, ends[n])
        products._sum_states(block.c(BASE), block.c(DIAGONAL, np.int64))
        got = block.memory[DIAGONAL : DIAGONAL + 1024].view(np.float32).reshape(4, C)
    want = np.sum((states * ends).reshape(2, 4, 16, C), axis=(0, 2))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def slice_gradients(q, k, g, d_p, d_n, states, through):
    """dq, dk and dlog_decay of 64 key channels, by the registers' work."""
    with threads() as block:
        for n, x in enumerate((q, k)):
            put(block, WORDS + n * TILE, x)
        for half in range(2):
            part = g[:, 32 * half : 32 * half + 32]
            put(block, WORDS + (2 + half) * TILE, part, np.float32)
        symmetric(block, PAIRS + 2 * TILE, d_n)
        symmetric(block, PAIRS, d_p)  # the last, for its diagonal
        for n, x in enumerate(states):
            put(block, STATES + n * TILE, x)
        raw = through.astype(np.float32).view(np.uint8)
        block.memory[THROUGH : THROUGH + len(raw)] = raw
        state = registers.levels(block.c(WORDS), block.c(PAIRS))
        given = WORDS, STATES, GATES, DIAGONAL, THROUGH
        registers.finish(*(block.c(at) for at in given), state)
        halves = [get(block, GATES + n * TILE, np.float32) for n in range(2)]
        return *(get(block, STATES + n * TILE) for n in range(2)), np.concatenate(halves, 1)


@pytest.mark.parametrize("kind", ["weak", "mixed"])
def test_gradients_of_a_slice(kind):
    rng = np.random.default_rng(0)
    q, k = (rounded(unit(rng.normal(size=(C, C)))) for _ in range(2))
    g, through = decays(kind, rng, C), rng.normal(size=C)
    d_p, d_n = (rounded(np.tril(rng.normal(size=(C, C)), -n)) for n in range(2))
    states = [rounded(rng.normal(size=(C, C))) for _ in range(3)]
    d_q, d_k, d_g = slice_gradients(q, k, g, d_p, d_n, states, through)

    decay = between(g)
    start = decay[:, 0] * np.exp(g[0])
    asked, seen, keys = start * states[0], start * states[1], decay[-1] * states[2]
    by_query = asked + np.einsum("ij,ijd,jd->id", d_p, decay, k)
    by_row = seen + np.einsum("ij,ijd,jd->id", d_n, decay, k)
    by_column = keys + np.einsum("ij,ijd,id->jd", d_p, decay, q)
    by_column += np.einsum("ij,ijd,id->jd", d_n, decay, k)
    flux = q * by_query + k * (by_row - by_column)
    want = np.cumsum(flux[::-1], 0)[::-1] + np.sum(k * keys, 0) + through
    assert relative_rms(d_q, by_query) < 3e-3
    assert relative_rms(d_k, by_row + by_column) < 3e-3
    assert relative_rms(d_g, np.where(np.exp(g) == 0, 0, want)) < 3e-3
    assert np.all(d_g[np.exp(g) == 0] == 0)


def two_parts(x):
    return rounded(x) + rounded(x - rounded(x))


def kernels_gradients(q, k, v, g, beta, d_out, end, state):
    """The backward pass with every rounding of the kernels, one head; the decays, and what has them
    in it, by the emulated registers."""
    length = len(q)
    beta = np.maximum(beta, 1e-10)
    chunks, starts = [slice(at, at + C) for at in range(0, length, C)], []
    for at in chunks:
        (a, p), operands = emulate(q[at], k[at], g[at], beta[at])
        x = two_parts(np.linalg.inv(np.eye(C) + two_parts(a)) * beta[at])
        m, keys = rounded(two_parts(p) @ x), rounded(x.T @ operands[2])
        starts.append((x, m, keys, *operands, rounded(state)))
        rest = rounded(v[at] - operands[1] @ rounded(state))
        state = operands[3].astype(float)[:, None] * state + keys.T @ rest
    d_q, d_k, d_v, d_g, d_beta = (np.zeros(y.shape) for y in (q, k, v, g, beta))
    for at, start in zip(chunks[::-1], starts[::-1], strict=True):
        x, m, keys, q_start, k_start, _, whole, state = start
        d_rest = m.T @ d_out[at] + keys @ two_parts(end)
        d_v[at] = rounded(d_rest)
        writes = x @ two_parts(v[at] - k_start @ state)
        d_beta[at] = np.sum(writes * d_v[at], 1) / beta[at] ** 2
        writes, after = rounded(writes), rounded(end)
        d_p, d_n = SCALE * np.tril(d_out[at] @ writes.T), np.tril(-d_v[at] @ writes.T, -1)
        moved = SCALE * d_out[at] @ state.T, -d_v[at] @ state.T, writes @ after.T
        through = whole * np.sum(state * after, 1)
        for n in range(0, q.shape[1], C):
            channels = slice(n, n + C)
            d_q[at, channels], d_k[at, channels], d_g[at, channels] = slice_gradients(
                *(y[at, channels] for y in (q, k, g)),
                d_p,
                d_n,
                [y[:, channels] for y in moved],
                through[channels],
            )
        end = whole[:, None] * end + q_start.T @ d_out[at] - k_start.T @ two_parts(d_rest)
    return d_q, d_k, d_v, d_g, d_beta, end


@pytest.mark.parametrize("kind", ["mixed", *slow("equal", "near")])
def test_rounded_as_the_kernels_do_it_stays_below_5e_3(kind):
    given = case((1, 256, 1, 1, 128, 128), kind, by_channel=True)
    *x, state = (np.asarray(y, np.float64) for y in given)
    rng = np.random.default_rng(9)
    d_out, d_last = rounded(rng.normal(size=x[2].shape)), rng.normal(size=state.shape)
    _, _, *want = oracle(*x, state, d_out, d_last, scale=SCALE)
    one = [y[0, :, 0] for y in (*x, d_out)]
    got = kernels_gradients(*one, d_last[0, 0], state[0, 0])
    names = "q", "k", "v", "log_decay", "beta", "state"
    errors = {n: relative_rms(a, np.squeeze(b)) for n, a, b in zip(names, got, want, strict=True)}
    assert all(error < 5e-3 for error in errors.values()), errors
