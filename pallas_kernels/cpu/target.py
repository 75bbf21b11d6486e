"""The instruction sets for which handlers are generated.

    target() -> Target | Reason        the target of this machine, or the one in JAXLLAMA_CPU_ISA

It is the first of ``TARGETS`` that the CPU has.  ``JAXLLAMA_CPU_ISA=avx2`` selects a lesser one
(for tests and comparisons), ``=off`` none.  Code is generated for the target, not for the model of
the CPU.  So an object depends only on its target and can be compiled for another machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from pallas_kernels.dispatch import Reason

VARIABLE = "JAXLLAMA_CPU_ISA"


@dataclasses.dataclass(frozen=True)
class Target:
    """name: as in ``JAXLLAMA_CPU_ISA``.  cpu, features: LLVM's.  needs: LLVM's names of what a host
    has to have.  rows: accumulators of 16 lanes that its registers hold beside the rest."""

    name: str
    arch: str
    cpu: str
    features: str
    needs: tuple[str, ...]
    rows: int


_AVX2 = ("avx2", "fma", "f16c")
TARGETS = (
    Target(
        "avx512vnni",
        "x86_64",
        "x86-64-v4",
        "+avx512vnni,-prefer-256-bit",
        (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"),
        8,
    ),
    Target("avxvnni", "x86_64", "x86-64-v3", "+avxvnni", (*_AVX2, "avxvnni"), 2),
    Target("avx2", "x86_64", "x86-64-v3", "", _AVX2, 2),
    Target("neon", "aarch64", "generic", "+neon,+dotprod", ("dotprod",), 4),
)


# Features that Linux and LLVM name differently.
_LLVM_NAMES = {"avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni"}
_IDENTITY = ("vendor_id", "cpu family", "model", "stepping", "flags")


@dataclasses.dataclass(frozen=True)
class HostCpu:
    """The CPU of this machine.  arch and features: by LLVM's names.  identity: tells it from other
    models."""

    name: str
    arch: str
    features: frozenset[str]
    identity: tuple[str, ...]


def target() -> Target | Reason:
    """The target of this process, or the Reason why there is none."""
    return _of_host(os.environ.get(VARIABLE, ""))


# Numbers of the entries that Linux passes to a process, and the features of their bits:
# <asm/hwcap.h> of 64-bit ARM, by LLVM's names.
_HWCAP, _HWCAP2 = 16, 26
_HWCAP_BITS = {_HWCAP: {0: "fp", 1: "neon", 20: "dotprod", 22: "sve"}, _HWCAP2: {13: "i8mm"}}


@functools.cache
def host_cpu() -> HostCpu:
    """This machine's CPU, as Linux describes it; elsewhere as LLVM does.

    On 64-bit ARM the kernel passes the features to each process. ``/proc/cpuinfo``, which LLVM
    reads, describes another CPU under emulation and is missing in some containers.
    """
    system = sys.platform, platform.machine()
    if system == ("linux", "x86_64"):
        with contextlib.suppress(OSError, KeyError):
            return _from_linux(Path("/proc/cpuinfo").read_text())
    if system == ("linux", "aarch64"):
        with contextlib.suppress(OSError, AttributeError):  # a C library without getauxval
            return _from_auxiliary({kind: _auxiliary(kind) for kind in _HWCAP_BITS})
    from llvmlite import binding

    arch = binding.get_default_triple().split("-")[0].replace("arm64", "aarch64")
    name, found = binding.get_host_cpu_name(), binding.get_host_cpu_features()
    features = {feature for feature, is_there in found.items() if is_there}
    if name.startswith("apple-m"):  # where LLVM asks the system for less
        features.add("dotprod")
    return HostCpu(name, arch, frozenset(features), (name, found.flatten()))


def _from_linux(cpuinfo: str) -> HostCpu:
    """The first CPU that ``/proc/cpuinfo`` lists.  Raises KeyError for a fact that is missing."""
    pairs = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    features = frozenset(_LLVM_NAMES.get(name, name) for name in facts["flags"].split())
    identity = tuple(facts[name] for name in _IDENTITY)
    return HostCpu(facts["model name"], "x86_64", features, identity)


def _auxiliary(kind: int) -> int:
    """An entry of the vector that Linux passes to this process, 0 for one that it lacks."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return getauxval(kind)


def _from_auxiliary(words: Mapping[int, int]) -> HostCpu:
    """An ARM CPU by the bits of its features; words: by the entry's number."""
    features = frozenset(
        name
        for kind, names in _HWCAP_BITS.items()
        for bit, name in names.items()
        if words[kind] >> bit & 1
    )
    return HostCpu("64-bit ARM", "aarch64", features, tuple(f"{word:x}" for word in words.values()))


@functools.cache
def _of_host(wanted: str) -> Target | Reason:
    names = ", ".join(t.name for t in TARGETS)
    if wanted == "off":
        return Reason(f"{VARIABLE}=off")
    if wanted and wanted not in names.split(", "):
        return Reason(f"{VARIABLE}={wanted} is not off or one of {names}")
    host = host_cpu()
    for one in TARGETS:
        if wanted in ("", one.name) and one.arch == host.arch and host.features >= {*one.needs}:
            return one
    return Reason(f"this CPU ({host.name}) has none of {wanted or names}")
