"""The forward kernels' values on the CPU, in any order in which their warpgroups may run."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.delta_cases import case, oracle, relative_rms

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.gated_delta import kernel_chunks, kernel_scan, value_tiles
    from pallas_kernels.recurrence import scan
    from tests.helpers.warpgroup_emulator import emulated


def parts(x):
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(np.float32)).astype(jnp.bfloat16)


def vectors_call(scale, pitch):
    """The sums of a chunk's decays, as ``kernel_inverse.chunk_vectors`` leaves them."""
    del pitch

    def call(scratch, log_decay, beta, out, limit):
        inside = np.arange(64) < limit[0]
        log, beta = (np.where(inside, np.resize(x[...], 64), 0) for x in (log_decay, beta))
        sums = np.cumsum(np.maximum(log, -1e3), dtype=np.float32)
        scratch[:64], scratch[64:128], scratch[128:192] = sums, beta, np.exp(sums[-1] - sums)
        out[...] = np.stack([np.exp(sums), np.float32(scale) * np.exp(sums)])

    return call


def inverse_call(scale, save):
    """P's two parts to q's place, A's to theirs, and the inverse's."""
    del save

    def call(scratch, q, tiles, kk, qk):
        log, beta = scratch[:64], scratch[64:128]
        decay = np.tril(np.exp(np.minimum(log[:, None] - log, 0)))
        a = np.tril(kk * beta[:, None] * decay, -1)
        q[0], q[1] = parts(qk * np.float32(scale) * decay)
        tiles[0], tiles[1] = parts(a)
        x = np.linalg.inv(np.eye(64) + a.astype(np.float64)).T
        return parts(x.astype(np.float32))

    return call


def store_transposed(tile, x):
    tile[...] = x.T.astype(jnp.bfloat16)


def write_state(dv):
    del dv

    def write(place, state):
        place[...] = state.T

    return write


STAND_INS = {  # of code that is written for registers
    "vectors_call": vectors_call,
    "_inverse_call": inverse_call,
    "high_low": parts,
    "read_transposed": lambda tile, mask: np.where(mask[0], tile[...].T, 0).astype(jnp.bfloat16),
    "store_transposed": store_transposed,
    "read_state": lambda dk, dv: lambda place: place[...].T,
    "write_state": write_state,
}


def forward(shape, kind, lengths=None, seed=0, sms=132):
    """(the operands, a first state, o, the last state).  sms: of the GPU; few of them, and a block
    of the scan has two warpgroups."""
    *x, state = case(shape, kind)
    q, k, v, g, beta = map(np.asarray, x)
    start = np.asarray(state)[:, :, None]
    modules = kernel_chunks, kernel_scan, value_tiles, scan
    gpu = {"gpu": lambda: SimpleNamespace(sms=sms)}
    with emulated(*modules, seed=seed, **STAND_INS, **gpu):
        prepared = kernel_chunks.chunks(q, k, g, beta, lengths, 0.1)
        o, last = kernel_scan.scan(q, k, *prepared, v, start=start, lengths=lengths)
    return x, state, o, last[:, :, 0]


@pytest.mark.parametrize("sms, seed", [(1, 0), (1, 1), (1, 2), (132, 0)])
def test_values(sms, seed):
    x, state, *got = forward((1, 500, 1, 2, 128, 128), "weak", seed=seed, sms=sms)
    for a, b in zip(got, oracle(*x, state, scale=0.1), strict=True):
        assert relative_rms(a, b) < 5e-3


def test_ragged_rows():
    lengths = np.array([0, 37, 300], np.int32)
    x, state, o, last = forward((3, 330, 1, 2, 128, 128), "mixed", lengths)
    for row, n in enumerate(lengths):
        own = [y[row : row + 1, :n] for y in x]
        want, want_last = oracle(*own, state[row : row + 1], scale=0.1)
        assert relative_rms(last[row : row + 1], want_last) < 5e-3
        assert not n or relative_rms(o[row : row + 1, :n], want) < 5e-3
        assert np.all(o[row, n:].astype(np.float32) == 0)
