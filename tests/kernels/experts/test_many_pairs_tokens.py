"""The kernel of many pairs where the weight is bfloat16: what a warpgroup does with its sums."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ptx as p
from pallas_kernels.experts import many_pairs_program, many_pairs_tokens
from pallas_kernels.experts.gate import ClampedGate, apply_gate
from pallas_kernels.experts.many_pairs_program import PairsFinish
from pallas_kernels.experts.many_pairs_tokens import TokenMultiplier
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


def stored(sums, bias, gate, dtype, n0: int, n_out: int) -> np.ndarray:
    """The result after the tile of n0 has been stored in zeros."""
    finish = PairsFinish(False, gate, 1.0, jnp.dtype(dtype).itemsize)
    scheme = SimpleNamespace(gated=gate is not None)
    tile = SimpleNamespace(rows=sums.shape[1])
    block = SimpleNamespace(
        finish=finish, scheme=scheme, n=N, n_out=n_out, tile=tile, smem=None, gmem=None
    )
    block.warpgroup = 0
    place = {"pairs": jnp.asarray(np.random.default_rng(0).permutation(N_PAIRS), jnp.int32)}

    def body(gmem, smem) -> None:
        del smem
        scalar = lambda v: SimpleNamespace(registers=SimpleNamespace(flat=[p.ci(v)]))  # noqa: E731
        zero = p.mul(p.register("tid.x"), 4)
        for i in range(-(-N_PAIRS * n_out * jnp.dtype(dtype).itemsize // 512)):
            at = p.add(zero, 512 * i)
            is_inside = p.less(at, N_PAIRS * n_out * jnp.dtype(dtype).itemsize)
            store = lambda at=at: p.store_global(p.offset(p.address(gmem.out), at), p.ci(0))  # noqa: E731
            p.when(is_inside, store)
        biases = [] if bias is None else [gmem.bias]
        scalars = [scalar(v) for v in (n0, FIRST, END)]
        multiplier = TokenMultiplier(block)
        multiplier.stored(
            None, gmem.out, gmem.pairs, gmem.part, *biases, *scalars, fragment(sums)
        )

    operands = {**place, "part": jnp.asarray([EXPERT, 0, 0, 0], jnp.int32)}
    operands |= {} if bias is None else {"bias": bias}
    out = {"out": jax.ShapeDtypeStruct((N_PAIRS, n_out), dtype)}
    with emulated(many_pairs_tokens, many_pairs_program, unpack, __import__(__name__, fromlist=["p"])):
        (found,) = launch(body, operands, out, name="stored", grid=1, registers=True, warpgroups=1)
    return np.asarray(found, np.float32), np.asarray(place["pairs"])


@newest
@pytest.mark.parametrize("gate", [None, ClampedGate()])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_sums_reach_their_pairs(gate, dtype, monkeypatch) -> None:
    """Of 64 tokens 51 are the part's, and the tile's last 8 results are another expert's."""
    pick = lambda pair, e: pair[int(e[0])]  # noqa: E731
    monkeypatch.setattr(many_pairs_tokens, "llvm", SimpleNamespace(extractelement=pick))
    n_out = N // 2 if gate else N
    rows = 32 if gate else 32
    n0 = n_out - 8
    sums = activations((64, rows), jnp.float32)
    bias = activations((3, N), jnp.float32, 2)
    got, pairs = stored(sums, bias, gate, dtype, n0, n_out)
    want = np.zeros((N_PAIRS, n_out), np.float32)
    own = np.asarray(sums)[: END - FIRST]
    if gate:
        half = rows // 2
        both = np.concatenate([own[:, :8], own[:, half : half + 8]], 1)
        both += np.concatenate([bias[EXPERT, n0 : n0 + 8], bias[EXPERT, n_out + n0 : n_out + n0 + 8]])
        result = apply_gate(jnp.asarray(both), gate)
    else:
        result = own[:, :8] + np.asarray(bias)[EXPERT, n0 : n0 + 8]
    want[pairs[FIRST:END], n0:] = np.asarray(jnp.asarray(result).astype(dtype), np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-5, atol=1e-6)
