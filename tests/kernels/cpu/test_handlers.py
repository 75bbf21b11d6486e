"""The generated handlers' ground: targets, threads, errors, the cache of objects."""

from __future__ import annotations

import dataclasses
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import elf, jit, sealed
from pallas_kernels.cpu import target as cpu_target
from pallas_kernels.cpu.jit import SelfTest, fault
from pallas_kernels.cpu.target import TARGETS, VARIABLE, Target, _from_linux, target
from pallas_kernels.dispatch import Reason
from tests.helpers.cpu_cases import in_six_threads


@dataclasses.dataclass(frozen=True)
class Doubled(SelfTest):
    """A program of another name, which no other test has registered."""

    bits: int = 8


def fault_on(target: Target) -> str | None:
    return fault(lambda program: jit.compiled(program, target).address)


def _operands(n: int = 200, seed: int = 0):
    rng = np.random.default_rng(seed)
    w, x = (rng.integers(-127, 128, (n, 64), dtype=np.int8) for _ in range(2))
    return w, x, (w.astype(np.int32) * x).reshape(n, 16, 4).sum(-1)


def _by_hand(w: np.ndarray, x: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros((len(w), 16), np.int32), np.zeros((len(w), 16), np.float32)
    jit.run(SelfTest(8), [w, x], list(out), threads=threads)
    return out


@pytest.mark.core
def test_handlers_run_on_this_machine():
    assert jit.unavailable() is None


@pytest.mark.parametrize("one", TARGETS, ids=lambda one: one.name)
def test_every_target_compiles_to_its_own_instruction(one):
    assembly = jit.build(SelfTest(8), one, assembly=True)
    wanted = {"avx512vnni": "%zmm", "avxvnni": "vpdpbusd", "avx2": "vpmaddubsw", "neon": "sdot"}
    assert wanted[one.name] in assembly
    assert ("vpdpbusd" in assembly) == ("vnni" in one.name)
    assert ("zmm" in assembly) == (one.name == "avx512vnni")


@pytest.mark.parametrize("isa", ["avx2", "off", "sse9"])
def test_a_lesser_target_is_taken_or_refused_by_name(isa, monkeypatch):
    monkeypatch.setenv(VARIABLE, isa)
    found = jit.unavailable()
    if isa == "avx2":
        assert found is None and target().name == "avx2"
    else:
        assert f"{VARIABLE}={isa}" in found.text


@pytest.mark.parametrize("threads", [0, 1, 2, 8, 65], ids=lambda n: f"{n} threads")
def test_bits_are_equal_for_any_number_of_threads(threads):
    w, x, exact = _operands()
    found, powers = _by_hand(w, x, threads)
    np.testing.assert_array_equal(found, exact)
    np.testing.assert_array_equal(powers, _by_hand(w, x, 1)[1])


def test_calls_from_many_threads_do_not_meet():
    wrong = []

    def work(seed: int) -> None:
        w, x, exact = _operands(50, seed)
        for _ in range(20):
            if not np.array_equal(_by_hand(w, x, 3)[0], exact):
                wrong.append(seed)

    in_six_threads(work)
    assert not wrong


def test_xla_runs_a_handler_and_hears_its_error():
    w, x, exact = _operands()
    name = jit.register(SelfTest(8))
    results = (
        jax.ShapeDtypeStruct(exact.shape, jnp.int32),
        jax.ShapeDtypeStruct(exact.shape, jnp.float32),
    )

    def run(*operands):
        return jax.jit(lambda *args: jax.ffi.ffi_call(name, results)(*args))(*operands)

    np.testing.assert_array_equal(run(w, x)[0], exact)
    with pytest.raises(jax.errors.JaxRuntimeError, match="SelfTest_8: not 2 operands, 2 results"):
        run(w)
    with pytest.raises(ValueError, match="SelfTest_8: not 2 operands"):
        jit.run(SelfTest(8), [w], [np.zeros(exact.shape, np.int32)] * 2)


def test_an_object_is_generated_once(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLAMA_CACHE", str(tmp_path))
    jit._compiled.cache_clear()
    built = []
    build = jit.build
    monkeypatch.setattr(jit, "build", lambda *args: built.append(args) or build(*args))
    on = jit.host()
    assert fault_on(on) is None and len(built) == 2
    jit._compiled.cache_clear()
    assert fault_on(on) is None and len(built) == 2
    files = sorted(path.name for path in (tmp_path / "cpu").iterdir())
    assert len(files) == 2 and all(on.name in name for name in files)
    jit._compiled.cache_clear()


def test_linux_s_names_of_features_are_llvm_s():
    flags = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx_vnni"
    facts = {"vendor_id": "V", "cpu family": 6, "model": 207, "model name": "A CPU", "stepping": 2}
    lines = [f"{name}\t: {value}" for name, value in {**facts, "flags": flags}.items()]
    cpu = _from_linux("\n".join(lines) + "\n\nprocessor\t: 1\nflags\t: none\n")
    needs = {name for one in TARGETS if one.arch == "x86_64" for name in one.needs}
    assert cpu.name == "A CPU" and cpu.features == needs
    assert cpu.identity == ("V", "6", "207", "2", flags)


@pytest.mark.parametrize(
    ("first", "second", "features"),
    [
        (1 << 20 | 0b11, 0, {"fp", "neon", "dotprod"}),
        (1 << 20 | 1 << 22 | 0b11, 1 << 13, {"fp", "neon", "dotprod", "sve", "i8mm"}),
        (0b11, 0, {"fp", "neon"}),
    ],
    ids=["ARMv8.2", "ARMv9", "ARMv8.0"],
)
def test_the_kernel_s_words_decide_on_arm(first, second, features, monkeypatch):
    """Without ``/proc/cpuinfo`` and LLVM, which may describe another CPU."""
    monkeypatch.setattr(cpu_target.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(cpu_target, "_auxiliary", {16: first, 26: second}.__getitem__)
    monkeypatch.setattr(Path, "read_text", lambda *_: pytest.fail("a file was read"))
    host, of_host = cpu_target.host_cpu.__wrapped__(), cpu_target._of_host.__wrapped__
    assert (host.arch, host.features) == ("aarch64", features)
    monkeypatch.setattr(cpu_target, "host_cpu", lambda: host)
    found = of_host("")
    assert found.name == "neon" if "dotprod" in features else "none of" in found.text


def test_the_kernel_answers_this_process():
    """The page size, entry 6 of the vector that Linux passes on every machine."""
    if sys.platform == "linux":
        assert cpu_target._auxiliary(6) == mmap.PAGESIZE


def test_an_object_that_llvm_places_gives_the_same(monkeypatch):
    """``elf`` places it on x86-64 Linux, LLVM everywhere else."""
    w, x, _ = _operands()
    by_elf = _by_hand(w, x, 2)
    monkeypatch.setattr(elf, "load", lambda data: None)
    jit._compiled.cache_clear()
    by_llvm = _by_hand(w, x, 2)
    jit._compiled.cache_clear()
    for one, other in zip(by_elf, by_llvm, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_kept_object_needs_no_llvm(tmp_path):
    """LLVM's library takes 100 MB of a process's memory."""
    code = """
import sys
from pallas_kernels.cpu import jit, elf
assert jit.unavailable() is None and jit.identity()
print("llvmlite.binding" in sys.modules, elf.load(b"no object") is None)
"""
    env = {**os.environ, "JAXLLAMA_CACHE": str(tmp_path), "PYTHONPATH": os.getcwd()}
    said = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
        for _ in range(2)
    ]
    is_placed = elf.load(jit.build(SelfTest(8), jit.host())) is not None
    assert said[0].stdout.split() == [b"True", b"True"]
    assert said[1].stdout.split() == [b"False" if is_placed else b"True", b"True"]


DAMAGES = {
    "empty": lambda data: b"",
    "a header alone": lambda data: data[:40],
    "truncated": lambda data: data[: len(data) // 2],
    "a byte short": lambda data: data[:-1],
    "a byte more": lambda data: data + b"\0",
    "random": lambda data: np.random.default_rng(0).bytes(len(data)),
    "flipped": lambda data: _flipped(data, 64),
    "one bit": lambda data: _flipped(data, 1),
    "no checksum": lambda data: jit.build(SelfTest(8), jit.host()),
}


def _flipped(data: bytes, count: int) -> bytes:
    codes = np.frombuffer(data, np.uint8).copy()
    codes[np.random.default_rng(1).integers(60, len(data), count)] ^= 4
    return codes.tobytes()


def test_a_damaged_object_is_generated_anew(tmp_path, monkeypatch):
    """Loading one crashes the process, in which nothing can be caught."""
    monkeypatch.setenv("JAXLLAMA_CACHE", str(tmp_path))
    program, on = SelfTest(8), jit.host()
    jit._compiled.cache_clear()
    jit.compiled(program, on)
    [path] = (tmp_path / "cpu").iterdir()
    whole = path.read_bytes()
    for name, damage in DAMAGES.items():
        path.write_bytes(damage(whole))
        jit._compiled.cache_clear()
        assert fault_on(on) is None, name
        assert path.read_bytes() == whole, name
    jit._compiled.cache_clear()


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "one"
    sealed.write(path, b"first")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sealed.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        sealed.write(path, b"second")
    assert sealed.read(path) == b"first" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "cpu").write_text("a file where the folder would be")
    monkeypatch.setenv("JAXLLAMA_CACHE", str(tmp_path))
    jit._compiled.cache_clear()
    assert fault_on(jit.host()) is None
    jit._compiled.cache_clear()


def test_threads_that_need_one_program_get_one():
    names, start = [], threading.Barrier(6)

    def work() -> None:
        start.wait()
        names.append(jit.register(Doubled()))

    workers = [threading.Thread(target=work) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(names) == 6 and len(set(names)) == 1


def test_without_llvmlite_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda name: None)
    jit._unavailable.cache_clear()
    found = jit.unavailable()
    jit._unavailable.cache_clear()
    assert isinstance(found, Reason) and found.text.startswith("llvmlite is not installed")


def test_this_process_has_a_target():
    assert not isinstance(target(), Reason)
