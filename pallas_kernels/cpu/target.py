"""Which instructions the handlers are generated for.

    target() -> Target | Reason        of this machine, or what JAXLLAMA_CPU_ISA names

The best of ``TARGETS`` that the CPU has, in their order.  ``JAXLLAMA_CPU_ISA=avx2`` takes a lesser
one (for tests and comparisons), ``=off`` none.  Code is generated for the target, not for the model
of the CPU, so that an object depends on nothing else and can be compiled for another machine.
"""

from __future__ import annotations

import dataclasses
import functools
import os

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


def target() -> Target | Reason:
    """Of this process.  Needs llvmlite."""
    return _of_host(os.environ.get(VARIABLE, ""))


@functools.cache
def _of_host(wanted: str) -> Target | Reason:
    from llvmlite import binding

    names = ", ".join(t.name for t in TARGETS)
    if wanted == "off":
        return Reason(f"{VARIABLE}=off")
    if wanted and wanted not in names.split(", "):
        return Reason(f"{VARIABLE}={wanted} is not off or one of {names}")
    arch = binding.get_default_triple().split("-")[0].replace("arm64", "aarch64")
    has = {name for name, is_there in binding.get_host_cpu_features().items() if is_there}
    if binding.get_host_cpu_name().startswith("apple-m"):  # where LLVM asks the system for less
        has.add("dotprod")
    for one in TARGETS:
        if wanted in ("", one.name) and one.arch == arch and has.issuperset(one.needs):
            return one
    return Reason(f"this CPU ({binding.get_host_cpu_name()}) has none of {wanted or names}")
