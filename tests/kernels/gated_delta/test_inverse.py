"""The registers' work inside a chunk, every thread of it on the CPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.helpers import warp_emulator

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.gated_delta import gradients_kernel_sums as sums
    from pallas_kernels.gated_delta import kernel_inverse, remainder
    from pallas_kernels.recurrence import channels

TILES, SCRATCH, VECTORS, OUT, TABLE = 1024, 18432, 32768, 40960, 49152


def fragments(x):
    """[64, 64] as ``x[tile][half][e]``, an entry a thread."""
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    return [
        [
            [x[row + 8 * half, 8 * tile + column + e].astype(np.float32) for e in range(2)]
            for half in range(2)
        ]
        for tile in range(8)
    ]


def matrix(parts):
    out = np.zeros((64, 64))
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    for tile in range(8):
        for half in range(2):
            for e in range(2):
                out[row + 8 * half, 8 * tile + column + e] = parts[tile][half][e]
    return out


def run(work):
    block = warp_emulator.Block(128, 1 << 16)
    with warp_emulator.running_on(block, kernel_inverse, channels, sums, remainder):
        return work(block)


def keys(kind, rng):
    k = rng.normal(size=(64, 128))
    if kind != "random":
        k = k[:1] + (0.0 if kind == "equal" else 0.05) * rng.normal(size=(64, 128))
    return k / np.linalg.norm(k, axis=1, keepdims=True)


@pytest.mark.parametrize("kind, tolerance", [("random", 2e-5), ("near", 1e-4), ("equal", 2e-5)])
def test_inverse(kind, tolerance):
    k = keys(kind, np.random.default_rng(0))
    a = np.tril(k @ k.T, -1)

    def work(block):
        rows = kernel_inverse.InverseRows()
        return matrix(
            kernel_inverse.inverse_transposed(rows, block.c(TILES), block.c(SCRATCH), fragments(a))
        )

    want = np.linalg.inv(np.eye(64) + a).T
    assert np.max(np.abs(run(work) - want)) < tolerance


@pytest.mark.parametrize("limit", [64, 37])
def test_vectors_and_coefficients(limit):
    rng = np.random.default_rng(1)
    heads, head = 3, 1
    g = rng.choice([0.0, -0.01, -1.0, -30.0, -np.inf], size=(64, heads)).astype(np.float32)
    beta = rng.uniform(size=(64, heads)).astype(np.float32)
    g[limit:], beta[limit:] = np.nan, np.nan
    kk, qk = rng.normal(size=(2, 64, 64))

    def work(block):
        for at, x in ((VECTORS, g), (VECTORS + 1024, beta)):
            raw = x.reshape(-1).view(np.uint8)
            block.memory[at : at + len(raw)] = raw
        scratch = block.c(SCRATCH)
        kernel_inverse.chunk_vectors(
            scratch,
            block.c(VECTORS + 4 * head, np.int64),
            block.c(VECTORS + 1024 + 4 * head, np.int64),
            block.c(limit),
            4 * heads,
            block.c(OUT, np.int64),
            0.5,
        )
        floats = block.memory.view(np.float32)
        vectors = [floats[(SCRATCH + at) // 4 :][:64].copy() for at in (0, 256, 512)]
        out = floats[OUT // 4 :][:128].copy()
        rows = kernel_inverse.InverseRows()
        found = kernel_inverse.coefficients(rows, scratch, fragments(kk), fragments(qk), 0.5)
        return (*vectors, out, *map(matrix, found))

    _, beta_got, to_end, out, a, weights = run(work)
    log = np.where(np.arange(64) < limit, g[:, head], 0).astype(np.float64)
    decay = np.zeros((64, 64))
    for i in range(64):
        for j in range(i + 1):
            decay[i, j] = np.exp(log[j + 1 : i + 1].sum())
    b = np.where(np.arange(64) < limit, beta[:, head], 0)
    np.testing.assert_array_equal(beta_got, b)
    np.testing.assert_allclose(to_end, decay[-1], rtol=1e-3, atol=1e-30)
    start = np.exp(np.cumsum(log))
    np.testing.assert_allclose(out, np.concatenate([start, start / 2]), rtol=1e-3, atol=1e-30)
    np.testing.assert_allclose(a, np.tril(kk * decay, -1) * b[:, None], rtol=1e-3, atol=1e-30)
    np.testing.assert_allclose(weights, np.tril(qk * decay) * 0.5, rtol=1e-3, atol=1e-30)


@pytest.mark.parametrize("transposed", [False, True])
def test_decays_and_their_sums(transposed):
    rng = np.random.default_rng(2)
    log = np.cumsum(-rng.uniform(size=64)).astype(np.float32)

    def work(block):
        block.store(
            block.c(SCRATCH) + 4 * np.arange(128, dtype=np.uint32) % 256, [np.resize(log, 128)]
        )
        rows = kernel_inverse.InverseRows()
        x = kernel_inverse.decays(rows, block.c(SCRATCH), transposed)
        kernel_inverse.sum_rows(rows, block.c(TABLE), x)
        kernel_inverse.sum_columns(rows, block.c(TABLE + 256), x)
        return matrix(x), block.memory.view(np.float32)[TABLE // 4 :][:320].copy()

    x, table = run(work)
    between = np.exp2(np.minimum(log[:, None].astype(np.float64) - log, 0))
    want = np.tril(between, -1).T if transposed else np.tril(between)
    np.testing.assert_allclose(x, want, rtol=1e-4)
    np.testing.assert_allclose(table[:64], want.sum(1), rtol=1e-4)
    np.testing.assert_allclose(table[64:].reshape(4, 64).sum(0), want.sum(0), rtol=1e-4)


@pytest.mark.parametrize("limit", [64, 37])
def test_the_last_step(limit):
    rng = np.random.default_rng(3)
    heads, head = 3, 2
    table = rng.normal(size=(sums.TABLE_ROWS, 64)).astype(np.float32)
    beta, g = rng.uniform(size=64).astype(np.float32), -rng.uniform(size=(64, heads))
    g[5, head] = -np.inf

    def work(block):
        own = np.ascontiguousarray(g[:, head], np.float32)
        for at, x in (
            (SCRATCH + kernel_inverse.BETA, beta),
            (TABLE, table),
            (SCRATCH + kernel_inverse.DECAY, own),
        ):
            raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
            block.memory[at : at + len(raw)] = raw
        d_g, d_b = (block.c(at + 4 * head, np.int64) for at in (OUT, OUT + 1024))
        sums.finish(block.c(SCRATCH), block.c(TABLE), d_g, d_b, block.c(limit), 4 * heads)
        floats = block.memory.view(np.float32)[OUT // 4 :]
        return floats[: 64 * heads].reshape(64, heads), floats[256:][: 64 * heads].reshape(
            64, heads
        )

    d_g, d_b = run(work)
    by_warp = [table[at : at + 4].sum(0) for at in (sums.BY_SCORES, sums.BY_KEYS)]
    moved = table[[sums.FROM, sums.FROM + 1, sums.INSIDE, sums.INSIDE + 1]].sum(0)
    moved = moved - by_warp[0] + beta * by_warp[1]
    whole = table[[sums.STATES, sums.STATES + 1, sums.TO_END, sums.TO_END + 1]].sum()
    want = np.where(np.isinf(g[:, head]), 0, np.cumsum(moved[::-1])[::-1] + whole)
    np.testing.assert_allclose(d_g[:limit, head], want[:limit], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        d_b[:limit, head], (table[sums.BETAS] + by_warp[1])[:limit], rtol=1e-5
    )
    assert np.all(np.isnan(d_g[limit:, head])) and np.all(np.isnan(d_g[:, 0]))


def test_four_bits_of_what_bf16_leaves():
    rng = np.random.default_rng(4)
    x = (rng.normal(size=(8, 128)) * np.exp2(rng.integers(-60, 60, (8, 128)))).astype(np.float32)
    x[0, :4] = 0.0, 1.0 + 2.0**-8, -1.0 - 3 * 2.0**-8, 2.0 - 2.0**-9  # ties, and a power of two

    def work(block):
        p = warp_emulator._modules(block)["p"]
        wide = [p.bits(p.widen(p.pack(y, y))) for y in x]
        codes = [remainder.code(*pair) for pair in zip(x, wide, strict=True)]
        assert all(np.all(y < 16) for y in codes)
        word = sum(y << np.uint32(4 * n) for n, y in enumerate(codes))
        return np.stack([remainder.decoded(word, n, y) for n, y in enumerate(wide)])

    assert np.max(np.abs(run(work) - x) - np.abs(x) * 2.0**-12) <= 1e-38
