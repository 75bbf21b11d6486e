"""Shared by all tests: strict numerics, the order of files, which cases can run here.

Lanes, each usable alone:

    pytest                      everything but slow tests, on all cores; before a commit
    pytest -m core              identities and oracles; after each edit
    pytest -m "not slow and (core or newer)" tests/kernels    on a second jax, >= 0.11.2: without
                                what ran on the first one
    pytest tests/kernels        on Python >= 3.12: the emulator runs the Mosaic kernels
    pytest -m gpu               on a GPU: the kernels themselves; with JAXLLAMA_TARGET=sm_80 those
                                of older cards, and -rs names what has no form there
    pytest -m plans             on a GPU: every plan, in parts; a small call of each kernel
    pytest -m slow PATH         minutes of evidence, a room at a time
    python -m tests.slow_lane PATH...    many rooms, a fresh process for each few tests
    python tests/faults.py      planted faults, when tests are removed or moved to slow (FAULTS.md)

A test goes to ``slow`` where a default test covers the same behaviour. Nine tenths of the suite's
time is tracing, lowering and compiling, so a new test shares a model, shapes and options with its
neighbours, or computes its reference in numpy. Models of one layer are enough where layers are
alike. Eager jax costs 20 to 30 ms for each shape and op: ``jnp.asarray(x, dtype)`` (``as_jax``
costs nothing), ``jnp.ones``, slices and sums of jax's arrays, ``np.max`` of one (numpy asks jax).
Each worker collects all files: none calls jax when it is imported, and large libraries that few
tests need are ``cases.on_demand``.
jax's compilation cache keeps programs between runs, in ``jaxllama/tests`` of the cache folder, also
of processes that tests start: a second run takes 40% less CPU time, and a first one 1% more.
Optimizing passes and programs shared between modules were measured: neither changes the time by
more than a few percent.
``PYTHONDONTWRITEBYTECODE`` costs each process 0.4 s.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllama import kept, progress
from jaxllama.checkpoints import hub
from pallas_kernels.cards.architecture import asked_target
from pallas_kernels.dispatch import hopper_reason
from tests.helpers.compiling import SOON

PROGRAMS = (hub.cache_dir() / "tests").resolve()  # the path is a part of a program's key
MONTH = 30 * 86_400.0  # seconds
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
    # jax finds a program by its lowered text, so a changed program is compiled again.
    if jax.config.values["jax_compilation_cache_dir"] is None:
        with contextlib.suppress(OSError):  # a home that is full or read-only keeps nothing
            PROGRAMS.mkdir(parents=True, exist_ok=True)
            # In a fresh checkout each worker would read the constants of all sources: 6 s.
            os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(PROGRAMS / "hypothesis"))
            jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)  # of the processes tests start
            os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Whole models' programs are found by the sources alone, which a test may have patched.
kept.folder = lambda name: None
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Tracing makes many objects. jax answers each of Python's collections with one of its own, which
# takes 7% of a program's tracing and lowering at Python's default thresholds.
gc.set_threshold(50_000, 10, 10)


# The longest first, by CPU time with kept programs, so that no worker ends with one of them.
LONG = [
    "parallel/test_parallel",
    "offload/test_offload",
    "kernels/test_plan_records",
    "training/test_training",
    "test_loading",
    "quantization/test_calibration",
    "model/test_modules",
    "model/test_model",
    "cli/test_cli",
    "cli/test_serve_command",
    "engine/test_engine_state",
    "experiments/test_experiments",
    "model/test_parity",
    "kernels/matmul/test_quantized_matmul",
    "offload/test_offload_experts",
    "decoding/test_eagle3",
    "decoding/test_mtp",
    "kernels/gated_delta/test_gated_delta",
    "kernels/test_op_transformations",
    "serving/http/test_server_page",
    "model/test_indexer",
    "engine/test_engine",
    "training/test_training_goals",
    "kernels/test_op_operands",
    "kernels/test_assembled",
]


JAX = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
HAS_EMULATOR = JAX >= (0, 11, 2)
LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--newest", action="store_true", help="core tests, and those that an older jax leaves out"
    )
    parser.addoption("--part", default="1/1", help="i/n: the plans of one part (-m plans)")
    parser.addoption("--seeds", default="1", help="of random calls (-m plans, -m gpu)")
    parser.addoption("--runs", help="folder for a line of each plan and call that ran (-m plans)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give random calls their seeds, and a seed as many tests as its module's TESTS says."""
    if "seed_and_part" in metafunc.fixturenames:
        seeds = [int(seed) for seed in metafunc.config.getoption("--seeds").split(",")]
        parts = range(metafunc.module.TESTS)
        metafunc.parametrize("seed_and_part", [(s, i) for s in seeds for i in parts], ids=str)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the workers of ``-n auto``: none for a few files, and on a GPU few enough for its
    memory."""
    files = [arg for arg in config.args if Path(arg.split("::")[0]).suffix == ".py"]
    if files and len(files) == len(config.args) and len(files) <= 2:
        return 0
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, 6) if os.path.exists("/dev/nvidiactl") else cores


def cannot_run(item: pytest.Item, no_gpu: str | None) -> bool:
    """Whether this machine's jax, or the lack of a Hopper GPU, rules the test out."""
    if no_gpu is not None and item.get_closest_marker("gpu"):
        return True
    if not HAS_EMULATOR and "interpreter" in getattr(item, "fixturenames", ()):
        return True
    return any(mark.args and mark.args[0] is True for mark in item.iter_markers("skipif"))


def is_for_newest(item: pytest.Item) -> bool:
    """Whether the test is a core test, or one that some version of jax leaves out."""
    marked = item.get_closest_marker("core") or item.get_closest_marker("skipif")
    return marked is not None or "interpreter" in getattr(item, "fixturenames", ())


# What tests that only run on jax >= 0.11.2 say where they are left out.
NEEDS_NEWER = re.compile(r"jax >= 0\.11\.2|need 0\.11\.2|lowers no kernel")


def needs_newer_jax(item: pytest.Item) -> bool:
    """Whether a jax older than 0.11.2 leaves the test out, so that no other lane of CI runs it."""
    if "interpreter" in getattr(item, "fixturenames", ()):
        return True
    marks = item.iter_markers("skipif")
    return any(NEEDS_NEWER.search(mark.kwargs.get("reason", "")) for mark in marks)


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Give tests that need a newer jax their mark, which ``-m newer`` selects."""
    if needs_newer_jax(item):
        item.add_marker("newer")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files, the longest first, and leave out what cannot run here.

    Tests that ``-m gpu`` names stay, and say why they do not run.
    """
    places = {Path(__file__).parent / f"{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))
    marked = any(item.get_closest_marker("gpu") for item in items)
    no_gpu = hopper_reason() if marked else None
    if "gpu" in config.getoption("-m") and no_gpu is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=no_gpu))
        return
    if config.getoption("-m") == "core":  # which takes the place of "not slow"
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if config.getoption("--newest"):
        items[:] = [item for item in items if is_for_newest(item)]
    left_out = [item for item in items if cannot_run(item, no_gpu)]
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        names = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in names]


def pytest_configure(config: pytest.Config) -> None:
    """Remove files that are older than a month: most of them are of older sources."""
    if not hasattr(config, "workerinput") and PROGRAMS.is_dir():
        for path in PROGRAMS.rglob("*"):
            if path.is_file() and path.stat().st_mtime < time.time() - MONTH:
                path.unlink(missing_ok=True)


def pytest_collection_finish() -> None:
    """Let Python's collector leave out the modules, which takes 6% of a program's tracing."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Under ``JAXLLAMA_TARGET`` a kernel that needs more than the target has is skipped."""
    del item
    try:
        return (yield)
    except NotImplementedError as error:
        if asked_target() is None or not re.search(r"sm_\d+[^:]* has no ", str(error)):
            raise
        pytest.skip(f"no portable form: {error}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Take the number of tests left out from a worker; all workers collect the same."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many tests were left out, and how to run them."""
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{count} tests left out: a Hopper GPU (pytest -m gpu there) or jax >= 0.11.2 "
            f"(Python >= 3.12) runs them; this is jax {jax.__version__}"
        )


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Free what a module compiled.  A process that keeps all of this suite's programs comes to the
    system's limit of memory maps (65,530), and the next compilation is a segmentation fault."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def engines_of_one_size() -> Iterator[None]:
    """Let engines decode in one size, ``max_slots``, which halves the programs they compile.

    ``tests/engine/test_engine.py`` decodes in all sizes.
    """
    from jaxllama.engine.options import ResolvedOptions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResolvedOptions, "sizes", property(lambda options: (options.max_slots,)))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a module's tests share."""
    return tmp_path_factory.mktemp("folder")


@pytest.fixture
def interpreter() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context manager under which Mosaic GPU kernels run on the CPU (jax >= 0.11.2).

    The only place that touches the private module.
    """
    if not HAS_EMULATOR:
        pytest.skip(f"jax {jax.__version__}: the GPU interpreter lacks what the kernels use")
    from jax._src.pallas.mosaic_gpu.interpret import params

    @contextlib.contextmanager
    def run() -> Iterator[None]:
        with params.force_gpu_interpret_mode(params.InterpretGPUParams()):
            yield

    return run
