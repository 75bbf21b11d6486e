"""How XLA compiles the decode loop, where its defaults are slow on several GPUs.

    for_mesh(mesh)    options for ``jax.jit`` of the loop, None for XLA's defaults

A step of a model on a mesh has two sums a layer, of 16 KB.  jax 0.11 makes each with a kernel of
its own on one of four side streams, outside of its CUDA graphs: two hand-overs between streams and
a launch from the host every 30 us, which the host does not keep up with, and the device that is
late keeps the other waiting.  With NCCL's kernels, which graphs may hold, a step is one graph.
Llama-3.1-8B in bfloat16 on two H200s, one row: 3.70 ms a step by default, 3.32 so.

Versions of jax that do not know the options get none; a small sum is tried first, and a backend
that refuses it gets none either.

Left out: several processes; prefill; the whole loop as one graph (XLA cannot instantiate it with
NCCL inside); NCCL's symmetric buffers, 3.01 ms in one run without preallocated memory
(``XLA_PYTHON_CLIENT_PREALLOCATE=false`` and
``XLA_FLAGS=--xla_gpu_experimental_enable_nccl_symmetric_buffers=true``), which need peers that
reach each other's memory.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

_KNOWN = (0, 11, 2) <= jax.__version_info__ < (0, 13)
Options = dict[str, str | bool]
_ONE_GRAPH: Options = {
    # XLA's defaults and collectives.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES"
    ),
    "xla_gpu_experimental_use_collective_kernels": "",
}


@functools.cache
def for_mesh(mesh: Mesh | None) -> Options | None:
    """For a loop with sums over the "model" axis of ``mesh``."""
    if not _KNOWN or mesh is None or mesh.shape["model"] == 1:
        return None
    devices = list(mesh.devices.flat)
    is_one_process = len({device.process_index for device in devices}) == 1
    if devices[0].platform not in ("gpu", "cuda") or not is_one_process:
        return None
    return _ONE_GRAPH if _adds_up(mesh, _ONE_GRAPH) else None


def _adds_up(mesh: Mesh, options: Options) -> bool:
    """Does a sum over the devices, compiled so, give the right numbers?"""
    n = mesh.shape["model"]
    rows = np.arange(n * 1024, dtype=np.float32).reshape(n, 1024)
    total = jax.shard_map(
        lambda row: lax.psum(row, "model"), mesh=mesh, in_specs=P("model"), out_specs=P()
    )
    try:
        got = jax.jit(total, compiler_options=options)(jnp.asarray(rows))
        return bool(np.array_equal(np.asarray(got)[0], rows.sum(axis=0)))
    except jax.errors.JaxRuntimeError:
        return False
