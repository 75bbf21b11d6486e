"""How XLA compiles decode loops, where its defaults are slow on GPUs.

    for_device()                options for ``jax.jit`` of a loop on one device, None for XLA's
    for_mesh(mesh)              options for ``jax.jit`` of a loop, None for XLA's defaults
    compiled_for(program, mesh) a jitted loop, with these options
    compiled_here(lowered)      a program that can be serialized

On one GPU jax 0.11 makes each step a CUDA graph, and the host reads behind each whether there is
another.  A graph may hold the loop itself, so that the device decides: 11 us a step less on an
H200.  Its condition has to compute something: an element of the carry is read too early.

A step of a model on a mesh has two sums a layer, of 16 KB.  jax 0.11 makes each with a kernel of
its own on one of four side streams, outside of its CUDA graphs: two hand-overs between streams and
a launch from the host every 30 us, which the host does not keep up with, and the device that is
late keeps the other waiting.  With NCCL's kernels, which graphs may hold, a step is one graph; and
in symmetric buffers, which devices write for each other, a sum takes 4 us instead of 7.
Llama-3.1-8B in bfloat16 on two H200s, one row: 3.70 ms a step by default; in one graph 3.14 to 3.2,
with symmetric buffers 2.96 to 2.99.  64 rows of the serving engine: 8.3 to 8.8 ms a step by
default, 8.1 in one graph; its prompts beside them take as long either way.

Versions of jax that do not know the options get none; a small sum is tried first, with symmetric
buffers and without, and a backend that refuses it gets none either.

Left out: several processes; prefill on a mesh; the whole loop as one graph on a mesh (XLA cannot
instantiate it with NCCL inside).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.dispatch import untested_jax
from pallas_kernels.jax_internals import persistent_cache_min_compile_time_secs

_KNOWN = untested_jax() is None
Options = dict[str, str | bool | int]
_WHOLE_LOOP: Options = {
    # XLA's defaults and loops; a graph may be a single operation.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": 1,
}
_ONE_GRAPH: Options = {
    # XLA's defaults and collectives.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES"
    ),
    "xla_gpu_experimental_use_collective_kernels": "",
}
_SYMMETRIC: Options = {**_ONE_GRAPH, "xla_gpu_experimental_enable_nccl_symmetric_buffers": True}


@functools.cache
def for_device() -> Options | None:
    """For a loop on one of the default devices; a small one is tried first."""
    is_gpu = jax.default_backend() == "gpu"
    return _WHOLE_LOOP if _KNOWN and is_gpu and _counts(_WHOLE_LOOP) else None


@functools.cache
def for_mesh(mesh: Mesh | None) -> Options | None:
    """For a loop with sums over the "model" axis of ``mesh``."""
    if not _KNOWN or mesh is None or mesh.shape["model"] == 1:
        return None
    devices = list(mesh.devices.flat)
    is_one_process = len({device.process_index for device in devices}) == 1
    if devices[0].platform not in ("gpu", "cuda") or not is_one_process:
        return None
    choices = (_SYMMETRIC, _ONE_GRAPH)
    return next((options for options in choices if _adds_up(mesh, options)), None)


def compiled_for(program: Any, mesh: Mesh | None, **jit: Any) -> Any:
    """The jitted ``program``, or, where a loop on ``mesh`` (None: on one device) has options, the
    same compiled with them (one function per program and options).  jit: what else ``program`` was
    jitted with."""
    options = for_device() if mesh is None else for_mesh(mesh)
    if options is None:
        return program
    return _jit(program.__wrapped__, tuple(options.items()), tuple(jit.items()))


def compiled_here(lowered: Any) -> Any:
    """Compile a lowered program past jax's cache, in this thread: it can then be serialized.

    A CPU's program that jax read from its cache loses functions when it is serialized again.  So
    this one has a key of its own there, by an option that is XLA's default, and is not stored.
    """
    with persistent_cache_min_compile_time_secs(1e9):
        return lowered.compile(compiler_options={"xla_embed_ir_in_executable": False})


@functools.cache
def _jit(
    function: Callable[..., Any], options: tuple[tuple[str, Any], ...], jit: tuple[tuple, ...]
) -> Any:
    return jax.jit(function, compiler_options=dict(options), **dict(jit))


def _counts(options: Options) -> bool:
    """Does a loop, compiled so, stop where it should, and again when its arrays are others?"""

    def count(until: jax.Array) -> jax.Array:
        return lax.while_loop(lambda i: i < until, lambda i: i + 1, jnp.zeros_like(until))

    try:
        run = jax.jit(count, compiler_options=options)
        return [int(run(jnp.int32(until))) for until in (3, 5)] == [3, 5]
    except jax.errors.JaxRuntimeError:
        return False


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
