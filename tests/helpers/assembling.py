"""Assemble kernels for a GPU that is not there: registers, spills and shared memory of each.

    python -m tests.helpers.assembling sm_80 [CASE ...]       a JSON line for each case

A process assembles for one architecture: Mosaic GPU keeps the first one that it meets.  The wheels
are those of the extra ``assemble``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"

import jax
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import utils
from jax.sharding import SingleDeviceSharding

from pallas_kernels import dispatch
from pallas_kernels.cards.architecture import BY_NAME, TARGET, Architecture
from pallas_kernels.jax_internals import ir
from tests.helpers.kernel_cases import CASES, VARIANTS, S
from tests.helpers.kernel_modules import calls_in, text_of

WHEELS = (
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-runtime",
)


@dataclasses.dataclass(frozen=True)
class Assembled:
    """registers: of a thread.  spilled: bytes that a thread stores.  shared: bytes of a block.

    contracted: multiplications and additions of float32 that the assembler may contract.
    """

    kernel: str
    registers: int
    spilled: int
    shared: int
    contracted: int


def description(arch: Architecture) -> str:
    """Return what XLA and Mosaic ask of the device that they compile for, as a text proto."""
    card, (major, minor) = arch.cards[0], arch.capability
    own = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {arch.shared_per_sm} threads_per_core_limit: {arch.threads}
  core_count: {card.sms} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {card.bandwidth:.0f} l2_cache_size: {card.l2} clock_rate_ghz: 1.98
  device_memory_size: {card.memory} shared_memory_per_block_optin: {arch.shared_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} {own} }}
  registers_per_core_limit: {arch.registers} registers_per_block_limit: {arch.registers}
  dnn_version: "9.8.0"
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{card.name}"
"""


# Cases that call Hopper's kernels by name, without a plan.
NEEDS_WGMMA = re.compile(r"(GLA|SSD|delta)(?! (step|layer|commit))|KDA|past")
KERNEL = re.compile(
    r"entry function '(\w+?)_mosaic_gpu_kernel'.*?(\d+) bytes spill stores.*?Used (\d+) registers",
    re.DOTALL,
)
_PTX = re.compile(r"^\.visible \.entry (\w+?)_mosaic_gpu_kernel(.*?)^}", re.DOTALL | re.MULTILINE)
# PTX names the rounding where an operation is to stay as it is.
_CONTRACTED = re.compile(r"\b(?:mul|add|sub|mad)(?:\.ftz)?\.f32\b")
_WARNING = re.compile(r"\(C7\d+\)[^\n]*")
# All shared memory of a block is one view.
_SHARED = re.compile(r"memref<(\d+)xi8, #gpu.address_space<workgroup>>")
_NAME = re.compile(r'sym_name = "(\w+?)_mosaic_gpu')


@contextlib.contextmanager
def _heard() -> Iterator[Any]:
    """Within, what the process writes, C++ too, goes to the file that is given."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for old, number in zip(kept, (1, 2), strict=True):
                os.dup2(old, number)
                os.close(old)


@contextlib.contextmanager
def assembler(arch: Architecture) -> Iterator[SingleDeviceSharding]:
    """Within, programs for the device that is given are assembled for an architecture."""
    jax.config.update("jax_enable_compilation_cache", False)
    where = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=description(arch)
    )
    with mock.patch.object(utils, "_infer_arch", lambda: arch.capability):
        yield SingleDeviceSharding(where.devices[0])


def assemble(case: str, where: SingleDeviceSharding) -> tuple[list[Assembled], list[str]]:
    """Return the kernels of a case and the assembler's warnings."""
    return assemble_program(*(CASES | VARIANTS)[case](), where)


def assemble_program(
    f: Callable[..., Any], operands: Any, where: SingleDeviceSharding
) -> tuple[list[Assembled], list[str]]:
    """Return the kernels of a function of these operands and the assembler's warnings."""
    operands = jax.tree.map(lambda x: S(x.shape, x.dtype, sharding=where), operands)
    with _heard() as file:
        lowered = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",))
        lowered.compile()
        file.seek(0)
        said = file.read().decode(errors="replace")
    contracted = {name: len(_CONTRACTED.findall(text)) for name, text in _PTX.findall(said)}
    used = {
        name: (int(registers), int(spilled)) for name, spilled, registers in KERNEL.findall(said)
    }
    found = {}
    for call in calls_in(lowered.compiler_ir().operation):
        config = ir.DictAttr(call.attributes["mhlo.backend_config"])
        text = text_of(ir.StringAttr(config["module"]).value_bytes)
        name = _NAME.findall(text)[0]
        if name in used:  # else an equal kernel was assembled before
            found[name] = Assembled(
                name,
                *used[name],
                max(map(int, _SHARED.findall(text)), default=0),
                contracted[name],
            )
    return list(found.values()), sorted(set(_WARNING.findall(said)))


def main() -> None:
    arch, cases = BY_NAME[sys.argv[1]], sys.argv[2:] or [*CASES, *VARIANTS]
    os.environ[TARGET] = arch.name
    with assembler(arch) as device, mock.patch.object(dispatch, "hopper_reason", lambda *_: None):
        for case in cases:
            line: dict[str, Any] = {"arch": arch.name, "case": case}
            if NEEDS_WGMMA.match(case) and not arch.wgmma:
                print(json.dumps(line | {"none": f"{arch.name} has no wgmma"}), flush=True)
                continue
            try:
                kernels, warnings = assemble(case, device)
                line |= {"kernels": [dataclasses.asdict(x) for x in kernels]}
                line |= {"warnings": warnings}
            except NotImplementedError as error:
                line["none"] = str(error)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
