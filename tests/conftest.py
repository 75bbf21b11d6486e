"""Shared by all tests: strict numerics, the gpu marker, and Pallas's GPU interpreter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from jaxllama import progress
from pallas_kernels.dispatch import hopper_reason
from tests.helpers.compiling import SOON

# A busy machine may take seconds for what tests expect to leave nothing on stderr.
progress.QUIET = 1e6
# Several test processes may share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Read when jax makes its first backend, here and in the processes that tests start.  A machine with
# a GPU keeps its compiler as it is.
if not os.path.exists("/dev/nvidiactl"):
    os.environ["XLA_FLAGS"] = f"{SOON} {os.environ.get('XLA_FLAGS', '')}".rstrip()
    # CUDA's plugin without CUDA's libraries assembles kernels (tests/kernels/test_assembled.py).
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
jax.config.update("jax_numpy_dtype_promotion", "strict")


# Half of the suite's time, the longest first, so that no worker ends with one of them.
LONG = [
    "model/test_parity", "model/test_model", "parallel/test_parallel", "offload/test_offload",
    "kernels/test_op_transformations", "cli/test_cli", "test_language_model",
    "kernels/gla/test_gla", "kernels/matmul/test_quantized_matmul", "training/test_training",
    "offload/test_offload_bytes", "training/test_training_goals", "model/test_sparse_attention",
    "checkpoints/test_gguf", "quantization/test_calibration", "test_examples",
    "kernels/test_op_operands", "quantization/test_quantization",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first.  Tests marked gpu run where Mosaic kernels can, and say why they do not
    elsewhere."""
    places = {Path(__file__).parent / f"{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = hopper_reason() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Free what a module compiled.  A process that keeps all of this suite's programs comes to the
    system's limit of memory maps (65,530), and the next compilation is a segmentation fault."""
    yield
    jax.clear_caches()


@pytest.fixture
def interpreter() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context manager under which Mosaic GPU kernels run on the CPU (jax >= 0.11.2).

    The only place that touches the private module.
    """
    version = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
    if version < (0, 11, 2):
        pytest.skip(f"jax {jax.__version__}: the GPU interpreter lacks what the kernels use")
    from jax._src.pallas.mosaic_gpu.interpret import params

    @contextlib.contextmanager
    def run() -> Iterator[None]:
        with params.force_gpu_interpret_mode(params.InterpretGPUParams()):
            yield

    return run
