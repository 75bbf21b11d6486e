"""The kernel of many pairs: what a warpgroup does with its sums."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ptx as p
from pallas_kernels.experts.gate import ClampedGate, apply_gate
from pallas_kernels.experts.many_pairs import finish_program, pairs_program, tokens_program
from pallas_kernels.experts.many_pairs.finish_program import PairsFinish
from pallas_kernels.experts.many_pairs.pairs_program import PairsMultiplier
from pallas_kernels.experts.many_pairs.tokens_program import TokenMultiplier
from pallas_kernels.launch import launch
from pallas_kernels.matmul.many_rows import unpack
from tests.helpers.matmul_cases import activations, newest
from tests.helpers.warp_emulator import emulated

EXPERT, N, N_PAIRS = 1, 128, 90
FIRST, END = 20, 71  # of the warpgroup's tokens, of which it could have 64
PAIRS = np.random.default_rng(0).permutation(N_PAIRS).astype(np.int32)  # by expert


def fragment(sums: jax.Array):
    """Sums ``[64, rows]`` as the registers of 128 threads, in wgmma's layout."""
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    registers = np.empty((sums.shape[1] // 8, 2), object)
    for i in range(registers.shape[0]):
        for h in range(2):
            registers[i, h] = [np.asarray(sums)[row + 8 * h, 8 * i + column + e] for e in range(2)]
    return SimpleNamespace(registers=registers, shape=sums.shape)


def stored(of, sums, bias, gate, dtype, n0: int, n_out: int, scalars) -> np.ndarray:
    """The result ``[N_PAIRS, n_out]`` of the tile whose first result is n0, by a multiplier's code.

    of: (block) -> the multiplier.  A result that is not stored is NaN, as the emulator's memory is.
    """
    block = SimpleNamespace(
        finish=PairsFinish(False, gate, 1.0, jnp.dtype(dtype).itemsize),
        gated=gate is not None,
        tile=SimpleNamespace(rows=sums.shape[1]),
        across=1,
        n=N,
        n_out=n_out,
        smem=None,
        gmem=None,
        warpgroup=0,
    )

    def body(gmem, smem) -> None:
        given = [SimpleNamespace(registers=SimpleNamespace(flat=[p.ci(v)])) for v in scalars]
        refs = gmem.out, gmem.pairs, gmem.part, smem.stage, gmem.bias
        of(block).stored(*refs, *given, fragment(sums))

    part = jnp.asarray([EXPERT, FIRST, END, 0], jnp.int32)
    out = {"out": jax.ShapeDtypeStruct((N_PAIRS, n_out), dtype)}
    operands = {"pairs": jnp.asarray(PAIRS), "part": part, "bias": bias}
    modules = tokens_program, pairs_program, finish_program, unpack
    with emulated(*modules, sys.modules[__name__]):
        (found,) = launch(
            body,
            operands,
            out,
            name="stored",
            grid=1,
            registers=True,
            warpgroups=1,
            scratch={"stage": 4096},
        )
    return np.asarray(found, np.float32)


def wanted(products, gate, dtype, n0: int, n_out: int) -> np.ndarray:
    """The result where the part's pairs have these products ``[pairs, results (2)]``."""
    result = products if gate is None else apply_gate(jnp.asarray(products), gate)
    want = np.full((N_PAIRS, n_out), np.nan, np.float32)
    want[PAIRS[FIRST:END], n0:] = np.asarray(jnp.asarray(result).astype(dtype), np.float32)
    return want


def check(got, want, dtype) -> None:
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=1e-6)


@pytest.fixture
def vectors(monkeypatch) -> None:
    """MLIR's vectors of two sums are lists here."""
    pick = SimpleNamespace(extractelement=lambda pair, e: pair[int(e[0])])
    for module in (tokens_program, pairs_program):
        monkeypatch.setattr(module, "llvm", pick)


BOTH_GATES = pytest.mark.parametrize("gate", [None, ClampedGate()])
BOTH_DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])


@newest
@BOTH_GATES
@BOTH_DTYPES
@pytest.mark.usefixtures("vectors")
def test_sums_of_tokens_reach_their_pairs(gate, dtype) -> None:
    """Of 64 tokens 51 are the part's, and the tile's last results are another expert's."""
    n_out = N // 2 if gate else N
    n0, rows = n_out - 24, 128
    sums, bias = activations((64, rows), jnp.float32), activations((3, N), jnp.float32, 2)
    got = stored(TokenMultiplier, sums, bias, gate, dtype, n0, n_out, (n0, FIRST, END))
    columns = [n0, n_out + n0] if gate else [n0]
    own = [
        np.asarray(sums)[: END - FIRST, first : first + 24]
        + np.asarray(bias)[EXPERT, column : column + 24]
        for first, column in zip((0, rows // 2), columns, strict=False)
    ]
    check(got, wanted(np.concatenate(own, 1), gate, dtype, n0, n_out), dtype)


def multiplier_of_rows(block) -> PairsMultiplier:
    """A multiplier of 64 rows, without its memory."""
    found = object.__new__(PairsMultiplier)
    found.block = block
    found.where = unpack.FragmentRows(8, 32) if block.gated else unpack.FragmentRows()
    return found


@newest
@BOTH_GATES
@BOTH_DTYPES
@pytest.mark.parametrize("tokens", [56, 64])
@pytest.mark.usefixtures("vectors")
def test_sums_of_rows_reach_their_pairs(gate, dtype, tokens) -> None:
    """A thread has a result of gate and the same of up, which are eight rows apart."""
    n_out = N // 2 if gate else N
    n0 = n_out - 24
    sums, bias = activations((64, tokens), jnp.float32), activations((3, N), jnp.float32, 2)
    got = stored(multiplier_of_rows, sums, bias, gate, dtype, n0, n_out, (n0,))
    rows, columns = np.arange(24), [n0]
    if gate:
        rows, columns = rows // 8 * 16 + rows % 8, [n0, n_out + n0]
    own = [
        np.asarray(sums)[rows + 8 * i, : END - FIRST].T + np.asarray(bias)[EXPERT, c : c + 24]
        for i, c in enumerate(columns)
    ]
    check(got, wanted(np.concatenate(own, 1), gate, dtype, n0, n_out), dtype)
