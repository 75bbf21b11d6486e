"""Kernels that processes of their own assemble, for a GPU that is not here either."""

from __future__ import annotations

import importlib.metadata
import queue
import subprocess
import sys

import jax
import pytest

from pallas_kernels.cards.architecture import BY_NAME
from pallas_kernels.primitives import assembler, lowered
from tests.helpers import assembling
from tests.helpers.lowering import lowered as text_of
from tests.helpers.matmul_cases import newest
from tests.kernels.test_lowered import ARRAYS, norm

HERE = {x.name for x in importlib.metadata.distributions() if x.name in assembling.WHEELS}
needs_wheels = pytest.mark.skipif(
    HERE != set(assembling.WHEELS), reason="pip install 'jaxllama[assemble]'"
)


@pytest.fixture
def kernel(monkeypatch):
    """A kernel; no process is idle, and none stays."""
    monkeypatch.setattr(assembler, "_idle", queue.SimpleQueue())
    monkeypatch.setenv("JAXLLAMA_TARGET", "sm_90")
    found = []
    with lowered.noted(found.append):
        text_of(lambda x, gamma: norm(x, gamma), *ARRAYS)
    monkeypatch.delenv("JAXLLAMA_TARGET")
    yield found[0]
    while not assembler._idle.empty():
        assembler._idle.get().end()


@newest
@pytest.mark.newer
@needs_wheels
def test_a_process_assembles_kernels_for_a_gpu_that_is_not_here(
    kernel, monkeypatch, tmp_path
) -> None:
    with assembling.assembler(BY_NAME["sm_90"]) as where:
        monkeypatch.setattr(jax, "local_devices", lambda: list(where.device_set))
        assembler.start(1)
        with assembler.assembler() as process:
            programs = [process.program(kernel) for _ in range(2)]
            with pytest.raises(RuntimeError):
                process.program(kernel._replace(code=b"no module"))
        assert b"norm_to_bf16" in programs[0][0] and len(programs[0][0]) == len(programs[1][0])
        with assembler.assembler() as again:
            assert again is process, "it was idle"
        process._process.kill()
        process._process.wait()  # as if it had been idle for long
        with assembler.assembler() as another:
            assert another is not process and another.program(kernel)
        assert assembler._file(kernel) is None, "jax's cache is off"
        monkeypatch.setattr(assembler, "_file", lambda kernel: tmp_path / "kernel-0.pickle")
        made = assembler.serialized(kernel)
        monkeypatch.setattr(assembler, "Assembler", None)
        monkeypatch.setattr(assembler, "assembler", None)
        assert assembler.serialized(kernel) == made, "from its file"


@newest
def test_a_kernel_is_assembled_here_if_no_process_can(kernel, monkeypatch) -> None:
    begun, here = [], []

    class Ending(assembler.Assembler):
        def __init__(self) -> None:
            begun.append(self)
            self._process = subprocess.Popen(
                [sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )

    monkeypatch.setattr(assembler, "Assembler", Ending)
    monkeypatch.setattr(lowered, "program_of", here.append)
    lowered._assemble(kernel)
    assert len(begun) == 1 and here == [kernel] and assembler._idle.empty()
    monkeypatch.setattr(assembler, "Assembler", None)  # none can begin
    lowered._assemble(kernel)
    assert here == [kernel, kernel]
