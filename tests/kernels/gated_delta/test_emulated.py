"""The forward kernels' values on the CPU, in any order in which their warpgroups may run."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.helpers.delta_cases import case, oracle, relative_rms

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.gated_delta import kernel_chunks, kernel_scan
    from pallas_kernels.recurrence.op import Heads
    from tests.helpers.emulator.launch import emulated


def forward(shape, kind, lengths=None, seed=0, sms=132):
    """(the operands, a first state, o, the last state).  sms: of the GPU; few of them, and a block
    of the scan has two warpgroups."""
    *x, state = case(shape, kind)
    with emulated(seed, sms=sms):
        prepared, _ = kernel_chunks.chunks(Heads(*x), lengths, 0.1)
        o, last = kernel_scan.scan(prepared, x[2], start=state[:, :, None], lengths=lengths)
    return x, state, o, last[:, :, 0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2))])
def test_two_warpgroups_of_a_scan(seed):
    x, state, *got = forward((1, 140, 1, 2, 128, 128), "weak", seed=seed, sms=1)
    for a, b in zip(got, oracle(*x, state, scale=0.1), strict=True):
        assert relative_rms(a, b) < 5e-3


def test_ragged_rows():
    lengths = np.array([0, 37, 72], np.int32)
    x, state, o, last = forward((3, 110, 1, 2, 128, 128), "mixed", lengths)
    for row, n in enumerate(lengths):
        own = [y[row : row + 1, :n] for y in x]
        want, want_last = oracle(*own, state[row : row + 1], scale=0.1)
        assert relative_rms(last[row : row + 1], want_last) < 5e-3
        assert not n or relative_rms(o[row : row + 1, :n], want) < 5e-3
        assert np.all(o[row, n:].astype(np.float32) == 0)
