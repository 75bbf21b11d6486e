"""A kernel is lowered once in a process, and every program gets the same copy of it."""

from __future__ import annotations

import pickle
import re
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import pytest
from jax.core import ShapedArray

from pallas_kernels import rms_norm
from pallas_kernels.primitives import lowered as module
from tests.helpers.kernel_cases import CASES
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.matmul_cases import newest

ARRAYS = (
    jax.ShapeDtypeStruct((256, 512), jnp.bfloat16),
    jax.ShapeDtypeStruct((512,), jnp.bfloat16),
)


@pytest.fixture
def made(monkeypatch) -> list[object]:
    """The kernels that the process lowers from now on, of which it had none."""
    found, function = [], module._function

    def counted(*args):
        found.append(function(*args))
        return found[-1]

    monkeypatch.setattr(module, "_function", counted)
    monkeypatch.setattr(module, "_kept", {})
    return found


def norm(x, gamma, eps=1e-6):
    return rms_norm(x, gamma, eps, implementation="mosaic")


@newest
def test_once_for_two_programs(made) -> None:
    first = lowered(lambda x, gamma: norm(x, gamma) + 1, *ARRAYS)
    second = lowered(lambda x, gamma: 2 * norm(norm(x, gamma), gamma), *ARRAYS)
    assert len(made) == 1
    assert kernels_in(first) == kernels_in(second) == ["norm_to_bf16"]  # two calls, one function
    module._kept.clear()
    again = lowered(lambda x, gamma: 2 * norm(norm(x, gamma), gamma), *ARRAYS)
    assert len(made) == 2 and again.replace("<lambda>", "") == second.replace("<lambda>", "")


@newest
def test_kernels_that_differ(made, monkeypatch) -> None:
    x, gamma = ARRAYS
    wide = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    lowered(lambda x, gamma: norm(x, gamma), x, gamma)
    lowered(lambda x, gamma: norm(x, gamma), wide, gamma)
    lowered(lambda x, gamma: norm(x, gamma, 1e-5), x, gamma)
    monkeypatch.setattr(module, "asked_target", lambda: "another")
    lowered(lambda x, gamma: norm(x, gamma), x, gamma)
    assert len(made) == 4


@newest
def test_as_many_as_there_is_room_for(made, monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST", 1)
    for eps in (1e-6, 1e-5, 1e-6):
        lowered(lambda x, gamma, eps=eps: norm(x, gamma, eps), *ARRAYS)
    assert len(made) == 3 and len(module._kept) == 1


@newest
@pytest.mark.parametrize("case", ["rope and cache int8"])
def test_kernels_that_write_in_place(case, made) -> None:
    f, operands = CASES[case]()
    texts = [lowered(lambda *operands: f(*operands), *operands) for _ in range(2)]
    assert texts[0] == texts[1] and len(made) == 1


@newest
def test_a_kernel_is_assembled_once_and_is_the_programs(monkeypatch) -> None:
    """jaxlib knows a kernel by its module, which must be the same in all programs."""
    noted, alone = [], []
    with module.noted(noted.append):
        program = lowered(lambda x, gamma: norm(norm(x, gamma) + 1, gamma), *ARRAYS)
        lowered(lambda x, gamma: norm(x, gamma) + 2, *ARRAYS)
    lowered(lambda x, gamma: norm(x, gamma, 1e-5), *ARRAYS)
    assert len(noted) == 2, "one of each program"
    monkeypatch.setattr(module, "_assemble", alone.append)
    monkeypatch.setattr(module, "_assembled", {})
    monkeypatch.setattr(module, "asked_target", lambda: None)
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(jax, "default_backend", lambda: "gpu")
        for kernel in noted:
            module.assemble(pickle.loads(pickle.dumps(kernel)))  # as from a child
    module.await_assembled(None)
    [kernel] = alone
    other = kernel._replace(code=b"another")
    module._assembled[module._known(other)] = Future()  # which never comes
    module.await_assembled([kernel, kernel._replace(code=b"not asked for")])

    def called(*arrays):
        avals = tuple(ShapedArray(x.shape, x.dtype) for x in kernel.results)
        return module.module_p.bind(*arrays, name=kernel.name, code=kernel.code, avals=avals)

    calls = re.findall(r'kernel_hash = "[^"]*".*?module = "[^"]*"', program)
    assert calls and set(calls) == set(
        re.findall(r'kernel_hash = "[^"]*".*?module = "[^"]*"', lowered(called, *kernel.operands))
    )
