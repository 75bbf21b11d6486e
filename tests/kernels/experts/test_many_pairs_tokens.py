"""The kernel of many pairs where the weight is bfloat16: what a warpgroup does with its sums."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ptx as p
from pallas_kernels.experts import many_pairs_program, many_pairs_tokens_program
from pallas_kernels.experts.gate import ClampedGate, apply_gate
from pallas_kernels.experts.many_pairs_program import PairsFinish
from pallas_kernels.experts.many_pairs_tokens_program import TokenMultiplier
from pallas_kernels.launch import launch
from pallas_kernels.matmul.many_rows import unpack
from tests.helpers.matmul_cases import activations, newest
from tests.helpers.warp_emulator import emulated

EXPERT, N, N_PAIRS = 1, 48, 90
FIRST, END = 20, 71  # of the warpgroup's tokens, of which it could have 64


def fragment(sums: jax.Array):
    """Sums ``[64, rows]`` as the registers of 128 threads, in wgmma's layout."""
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    registers = np.empty((sums.shape[1] // 8, 2), object)
    for i in range(registers.shape[0]):
        for h in range(2):
            registers[i, h] = [np.asarray(sums)[row + 8 * h, 8 * i + column + e] for e in range(2)]
    return SimpleNamespace(registers=registers)


def stored(sums, bias, gate, dtype, n0: int, n_out: int) -> tuple[np.ndarray, np.ndarray]:
    """(the result ``[N_PAIRS, n_out]`` of the tile whose first result is n0, the pairs by expert).

    A result that is not stored is NaN, as memory of the emulator is.
    """
    block = SimpleNamespace(
        finish=PairsFinish(False, gate, 1.0, jnp.dtype(dtype).itemsize),
        scheme=SimpleNamespace(gated=gate is not None),
        tile=SimpleNamespace(rows=sums.shape[1]),
        n=N,
        n_out=n_out,
        smem=None,
        gmem=None,
        warpgroup=0,
    )

    def body(gmem, smem) -> None:
        del smem
        scalars = [
            SimpleNamespace(registers=SimpleNamespace(flat=[p.ci(v)])) for v in (n0, FIRST, END)
        ]
        refs = gmem.out, gmem.pairs, gmem.part, gmem.bias
        TokenMultiplier(block).stored(None, *refs, *scalars, fragment(sums))

    pairs = jnp.asarray(np.random.default_rng(0).permutation(N_PAIRS), jnp.int32)
    part = jnp.asarray([EXPERT, 0, 0, 0], jnp.int32)
    out = {"out": jax.ShapeDtypeStruct((N_PAIRS, n_out), dtype)}
    operands = {"pairs": pairs, "part": part, "bias": bias}
    with emulated(many_pairs_tokens_program, many_pairs_program, unpack, sys.modules[__name__]):
        (found,) = launch(body, operands, out, name="stored", grid=1, registers=True, warpgroups=1)
    return np.asarray(found, np.float32), np.asarray(pairs)


@newest
@pytest.mark.parametrize("gate", [None, ClampedGate()])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_sums_reach_their_pairs(gate, dtype, monkeypatch) -> None:
    """Of 64 tokens 51 are the part's, and the tile's last 8 results are another expert's."""
    pick = lambda pair, e: pair[int(e[0])]  # noqa: E731
    monkeypatch.setattr(many_pairs_tokens_program, "llvm", SimpleNamespace(extractelement=pick))
    n_out = N // 2 if gate else N
    n0, rows = n_out - 8, 32
    sums, bias = activations((64, rows), jnp.float32), activations((3, N), jnp.float32, 2)
    got, pairs = stored(sums, bias, gate, dtype, n0, n_out)
    columns = [n0, n_out + n0] if gate else [n0]
    own = [
        np.asarray(sums)[: END - FIRST, first : first + 8]
        + np.asarray(bias)[EXPERT, column : column + 8]
        for first, column in zip((0, rows // 2), columns, strict=False)
    ]
    both = jnp.asarray(np.concatenate(own, 1))
    result = both if gate is None else apply_gate(both, gate)
    want = np.full((N_PAIRS, n_out), np.nan, np.float32)
    want[pairs[FIRST:END], n0:] = np.asarray(result.astype(dtype), np.float32)
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=1e-6)
