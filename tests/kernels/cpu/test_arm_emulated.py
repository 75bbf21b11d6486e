"""NEON's handlers under qemu's user mode: their values, and integer sums bit for bit.

``test_every_target_compiles_it`` of the neighbouring files is the default test of this code.
"""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.cpu import jit
from pallas_kernels.cpu.jit import SelfTest, fault
from tests.helpers.arm import MISSING, NEON, emulated
from tests.helpers.cpu_cases import SCHEMES, by_hand, error, floats, oracle, prepared, weight
from tests.kernels.cpu import test_cpu_attention as attention
from tests.kernels.cpu import test_cpu_gla as gla
from tests.kernels.cpu import test_cpu_matmul as matmul

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    with emulated(tmp_path_factory.mktemp("arm")) as names:
        yield names
    print(f"{len(set(names))} handlers in {len(names)} calls")


def test_the_self_test_passes(called) -> None:
    """Sums of integers are exact, exponentials near."""
    assert fault(lambda program: jit.compiled(program, NEON).address) is None
    assert len({name for name in called if SelfTest(8).name[:8] in name}) == 2


@pytest.mark.parametrize("rows", [1, 3, 11])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products(scheme: str, rows: int, called) -> None:
    w, x = weight(scheme, 40, 256), floats(rows, 256)
    found = by_hand(x, prepared(w), threads=2, on=NEON)
    assert error(found, oracle(x, w)) < matmul.TOLERANCE
    np.testing.assert_array_equal(found, by_hand(x, prepared(w), on=NEON))
    assert error(found, by_hand(x, prepared(w))) < 5e-7  # this machine's, from the same sums


@pytest.mark.parametrize("cache", attention.CACHES)
def test_attention(cache: str, called) -> None:
    q, k, v, lengths = attention.heads_of(5, attention.PART + 44, *attention.HEADS, cache)
    found = attention.by_hand(q, k, v, lengths, on=NEON)
    assert error(found, attention.softmax(q, k, v, lengths)) < attention.TOLERANCE


@pytest.mark.parametrize("shape", [(1, 4, 64, 128), (3, 2, 33, 96), (2, 1, 5, 16)], ids=str)
def test_a_step_of_gla(shape, called) -> None:
    operands = gla.case(*shape)
    for got, want in zip(gla.by_hand(*operands, on=NEON), gla.oracle(*operands), strict=True):
        assert error(got, want) < gla.TOLERANCE
