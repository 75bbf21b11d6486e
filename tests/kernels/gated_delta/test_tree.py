"""A chunk whose decay is one number a key channel: its registers' work, every thread on the CPU."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.helpers import warp_emulator
from tests.helpers.delta_cases import relative_rms, unit
from tests.kernels.gated_delta.test_inverse import matrix

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.gated_delta import kernel_inverse
    from pallas_kernels.gated_delta import kernel_tree as tree
    from pallas_kernels.recurrence import channels
    from pallas_kernels.recurrence import tree as gates_registers

C, BF16 = 64, ml_dtypes.bfloat16
BASE = 1024
SCRATCH = BASE + 9 * 8192
DECAY, BETAS, SIZE = SCRATCH + 2048, SCRATCH + 4096, SCRATCH + 8192
SCALE = 0.25


def places(address, dtype):
    """Byte offsets of a swizzled tile's entries."""
    size = np.dtype(dtype).itemsize
    i, j = np.indices((C, 128 // size))
    return address + 128 * i + 16 * (j * size // 16 ^ i & 7) + j * size % 16


def put(block, address, x, dtype=BF16):
    raw = np.ascontiguousarray(x.astype(dtype)).view(np.uint8).reshape(*x.shape, -1)
    for n in range(raw.shape[-1]):
        block.memory[places(address, dtype) + n] = raw[..., n]


def get(block, address, dtype=BF16):
    at = places(address, dtype)
    raw = np.stack([block.memory[at + n] for n in range(np.dtype(dtype).itemsize)], -1)
    return raw.view(dtype)[..., 0].astype(np.float64)


def emulate(q, k, g, beta, limit=None):
    """A, P, and by slice scale * Q exp(G), K exp(G), K exp(G_64 - G), exp(G_64)."""
    block = warp_emulator.Block(128, SIZE)
    slices = q.shape[1] // 64
    raw = np.ascontiguousarray(beta.astype(np.float32)).view(np.uint8)
    block.memory[BETAS : BETAS + len(raw)] = raw
    with warp_emulator.running_on(block, kernel_inverse, channels, gates_registers, tree):
        base, scratch = block.c(BASE), block.c(SCRATCH)
        tree.load_betas(block.c(BETAS, np.int64), scratch, block.c(limit or C), 4)
        acc, out = tree.empty_sums(), []
        for s, slot in enumerate(tree.SLOTS[:slices]):
            at = slice(64 * s, 64 * s + 64)
            put(block, BASE + 8192 * slot.q, q[:, at])
            put(block, BASE + 8192 * slot.k, k[:, at])
            for half in range(2):
                columns = slice(64 * s + 32 * half, 64 * s + 32 * half + 32)
                put(block, BASE + 8192 * (slot.gates + half), g[:, columns], np.float32)
            tree.add_slice(
                base,
                acc,
                slot,
                scratch,
                block.c(DECAY, np.int64),
                None if limit is None else block.c(limit),
                SCALE,
            )
            whole = block.memory[DECAY : DECAY + 256].view(np.float32).copy()
            tiles = (BASE + 8192 * n for n in (slot.q, slot.near, slot.k))
            out.append([*(get(block, at) for at in tiles), whole])
        tree.spread(gates_registers.Lane(base), acc, base)
        found = tree.coefficients(kernel_inverse.InverseRows(), base, scratch, SCALE)
        return [matrix(x) for x in found], [np.concatenate(x, -1) for x in zip(*out, strict=True)]


def between(g):
    """exp(sum of g over j + 1 .. i), [i, j, d], zero for j > i."""
    out = np.zeros((C, *g.shape))
    for j in range(C):
        out[j, j] = 1.0
        for i in range(j + 1, C):
            out[i, j] = out[i - 1, j] * np.exp(g[i])
    return out


def decays(kind, rng, width):
    if kind == "mixed":
        values = np.array([0.0, -1e-3, -1.0, -20.0, -1e4, -np.inf])
        return values[rng.integers(0, 6, size=(C, width))]
    return -np.abs(rng.normal(size=(C, width))) * 0.05


@pytest.mark.parametrize(
    "width, kind, limit", [(128, "weak", None), (128, "mixed", 37), (64, "mixed", None)]
)
def test_products_and_gated_operands(width, kind, limit):
    rng = np.random.default_rng(0)
    q, k = (unit(rng.normal(size=(C, width))).astype(BF16).astype(np.float64) for _ in range(2))
    g, beta = decays(kind, rng, width), rng.uniform(size=C)
    given = [x.copy() for x in (q, k, g, beta)]
    if limit:
        for x, y in zip(given, (q, k, g, beta), strict=True):
            x[limit:], y[limit:] = np.nan, 0
    (a, weights), (q_start, k_start, k_end, whole) = emulate(*given, limit=limit)
    exact = between(g)
    start = exact[:, 0] * np.exp(g[0])
    want = [
        np.tril(np.einsum("id,jd,ijd->ij", k, k, exact), -1) * beta[:, None],
        np.tril(np.einsum("id,jd,ijd->ij", q, k, exact)) * SCALE,
        SCALE * q * start,
        k * start,
        k * exact[-1],
    ]
    for x, y in zip((a, weights, q_start, k_start, k_end), want, strict=True):
        assert relative_rms(x, y) < 2.3e-3
    np.testing.assert_allclose(whole, start[-1], rtol=1e-4, atol=1e-30)


def rounded(x):
    return x.astype(BF16).astype(np.float64)


@pytest.mark.parametrize("kind", ["weak", "mixed", "equal", "equal, weak"])
def test_rounded_as_the_kernels_do_it_stays_below_5e_3(kind):
    """Four chunks in numpy with every rounding of the kernels, from the emulated operands."""
    rng = np.random.default_rng(1)
    width, n = 128, 4
    q, k = (rounded(unit(rng.normal(size=(n * C, width)))) for _ in range(2))
    v, beta = rounded(rng.normal(size=(n * C, width))), rng.uniform(size=n * C)
    g = np.concatenate([decays("mixed" if kind == "mixed" else "weak", rng, width)] * n)
    if kind.startswith("equal"):
        k[:], beta[:] = k[0], 1.0
        g *= 0.02 if "weak" in kind else 0.0
    state = exact = rng.normal(size=(width, width))
    got, want = [], []
    for c in range(n):
        at = slice(C * c, C * c + C)
        (a, p), (q_start, k_start, k_end, whole) = emulate(q[at], k[at], g[at], beta[at])
        x = np.linalg.inv(np.eye(C) + a) * beta[at]
        m, keys = rounded(p @ x), rounded(x.T @ k_end)
        rest = rounded(v[at] - k_start @ rounded(state))
        got.append(q_start @ rounded(state) + m @ rest)
        state = whole.astype(np.float64)[:, None] * state + keys.T @ rest
        for t in range(C * c, C * c + C):
            exact = np.exp(g[t])[:, None] * exact
            exact = exact + np.outer(k[t], beta[t] * (v[t] - k[t] @ exact))
            want.append(SCALE * q[t] @ exact)
    assert relative_rms(rounded(np.concatenate(got)), np.stack(want)) < 5e-3
    assert relative_rms(state, exact) < 5e-3
