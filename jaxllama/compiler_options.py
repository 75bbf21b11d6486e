"""XLA options for decode loops, for GPUs on which the defaults are slow.

    for_device()                options for ``jax.jit`` of a loop on one device; None: the defaults
    of_fusions(fixed)           those of them that decide how XLA computes a fusion
    for_small_products()        options for a loop or a prompt whose large products are kernels
    for_mesh(mesh)              options for ``jax.jit`` of a loop on a mesh; None: the defaults
    check_sums(mesh)            raises JaxLlamaError if the defaults cannot add over its devices
    compiled_for(program, mesh, fixed)    a jitted loop with these options
    compiled_here(lowered)      a program that can be serialized

fixed: the program's sums are fixed (``fixed_sums``). XLA then keeps each cast to 16 bits. By
default it drops one whose result a fusion makes float32 again, in some programs and not in others.

On one GPU jax 0.11 makes each step a CUDA graph. After each step the host reads whether another
step follows. A graph may also hold the loop itself, so that the device decides. This saves 11 us a
step on an H200. The loop's condition must compute something: a plain element of the carry is read
too early.

On a mesh each layer has two sums of 16 KB. jax 0.11 runs each sum as a kernel of its own on one of
four side streams, outside of its CUDA graphs. Each sum then costs two hand-overs between streams,
and the host launches a kernel every 30 us. The host cannot keep up, and a late device delays the
other one. NCCL's kernels may be part of a graph, so with them a step is one graph. In symmetric
buffers the devices write into each other's memory, and a sum takes 4 us instead of 7.

Measured on two H200s, Llama-3.1-8B in bfloat16, one row: 3.70 ms a step by default, 3.14 to 3.2 in
one graph, 2.96 to 2.99 with symmetric buffers. The serving engine with 64 rows takes 8.3 to 8.8 ms
a step by default and 8.1 in one graph. Prompts beside them take as long either way.

Versions of jax without these options get none. A small sum is tried first, with and without
symmetric buffers. A backend that refuses it gets no options either.

Left out: prefill on a mesh; the whole loop as one graph on a mesh, which XLA cannot instantiate
with NCCL inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllama.errors import JaxLlamaError
from jaxllama.typing import Jitted, Tree
from pallas_kernels.dispatch import untested_jax
from pallas_kernels.jax_internals import persistent_cache_min_compile_time_secs
from pallas_kernels.transform import is_traced

if TYPE_CHECKING:
    from pallas_kernels.primitives.lowered import Kernel

_KNOWN = untested_jax() is None
Options = dict[str, str | bool | int]
_WHOLE_LOOP: Options = {
    # XLA's defaults and loops; a graph may be a single operation.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": 1,
    # XLA compiles each fusion in two ways and times both: 2 to 5 s of a program's compilation, for
    # steps that took 0.98 to 1.01 of their time without it.
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
_KEPT: Options = {"xla_allow_excess_precision": False}
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
    """Return the options for a loop on one default device, or None. A small loop is tried first."""
    is_gpu = jax.default_backend() == "gpu"
    return _WHOLE_LOOP if _KNOWN and is_gpu and _counts(_WHOLE_LOOP) else None


def _kept(options: Options | None, fixed: bool) -> Options | None:
    """Return the options, and with fixed sums the one that keeps casts."""
    return options and {**options, **(_KEPT if fixed else {})}


def of_fusions(fixed: bool) -> Options | None:
    """Return the options with which a program off the loop computes fusions as a loop does.

    XLA would time two ways to compile each fusion, whose exponentials and quotients differ in bits.
    """
    name = "xla_gpu_experimental_enable_fusion_autotuner"
    return None if for_device() is None else _kept({name: _WHOLE_LOOP[name]}, fixed)


def for_small_products() -> Options | None:
    """Return ``for_device`` for a program that leaves XLA a router's product and no larger one.

    By default XLA compiles dozens of forms of a product and times them: 5 s for each number of
    rows, and more beside other programs.
    """
    options = for_device()
    return options and {**options, "xla_gpu_enable_triton_gemm": False}


@functools.cache
def for_mesh(mesh: Mesh | None) -> Options | None:
    """Return the options for a loop with sums over the "model" axis of ``mesh``, or None."""
    if not _KNOWN or mesh is None or mesh.shape["model"] == 1:
        return None
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return None
    choices = (_SYMMETRIC, _ONE_GRAPH)
    return next((options for options in choices if _adds_up(mesh, options)), None)


@functools.cache
def check_sums(mesh: Mesh) -> None:
    """Raise JaxLlamaError if XLA's defaults cannot add small arrays over the GPUs of ``mesh``.

    That is so on hosts without NVLink multicast if jax started its devices before the mesh was
    made (``parallel.mesh``).
    """
    axis = next((name for name, size in reversed(mesh.shape.items()) if size > 1), None)
    if axis is None or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return
    if not _adds_up(mesh, {}, axis):
        raise JaxLlamaError(
            "mesh: XLA's kernels for sums fail between these GPUs; make the mesh before anything "
            "else uses jax, or set XLA_FLAGS=--xla_gpu_experimental_use_collective_kernels="
        )


def compiled_for(program: Jitted, mesh: Mesh | None, fixed: bool = False, **jit: Any) -> Jitted:
    """Return the jitted ``program`` with the options for its devices.

    Without options it is ``program`` itself, and so it is inside of a trace, where jax takes no
    options. There is one function per program and options.

    mesh: the mesh of the loop; None for one device.
    jit: the other arguments with which ``program`` was jitted.
    """
    if is_traced():
        return program
    options = for_device() if mesh is None else for_mesh(mesh)
    return compiled_with(_kept(options, fixed), program, **jit)


def compiled_with(options: Options | None, program: Jitted, **jit: Any) -> Jitted:
    """Return the jitted ``program`` with these options; jit: as for ``compiled_for``."""
    if options is None or is_traced():
        return program
    return _jit(program.__wrapped__, tuple(options.items()), tuple(jit.items()))


def compiled_here(
    lowered: jax.stages.Lowered, kernels: Sequence[Kernel] | None = None
) -> jax.stages.Compiled:
    """Compile a lowered program in this thread, so that it can be serialized.

    A GPU's program waits for its kernels (``pallas_kernels/primitives/lowered.py``), or for all if
    they are not known.

    A CPU program that jax read from its cache loses functions when it is serialized again.
    Therefore a CPU's program gets another key, by an option that equals XLA's default, and is not
    stored there.
    """
    if jax.default_backend() != "cpu":
        from pallas_kernels.primitives.lowered import await_assembled  # a CPU needs no Pallas

        await_assembled(kernels)
        return lowered.compile()
    with persistent_cache_min_compile_time_secs(1e9):
        return lowered.compile(compiler_options={"xla_embed_ir_in_executable": False})


@functools.cache
def _jit(
    function: Callable[..., Tree],
    options: tuple[tuple[str, object], ...],
    jit: tuple[tuple[str, Tree], ...],
) -> Jitted:
    return jax.jit(function, compiler_options=dict(options), **dict(jit))


def _counts(options: Options) -> bool:
    """Return whether a loop with these options stops correctly, also when its arrays change."""

    def count(until: jax.Array) -> jax.Array:
        return lax.while_loop(lambda i: i < until, lambda i: i + 1, jnp.zeros_like(until))

    try:
        run = jax.jit(count, compiler_options=options)
        return [int(run(jnp.int32(until))) for until in (3, 5)] == [3, 5]
    except jax.errors.JaxRuntimeError:
        return False


def _adds_up(mesh: Mesh, options: Options, axis: str = "model") -> bool:
    """Return whether a sum over an axis of the devices with these options is correct.

    The mesh's processes call this together and have the same answer.
    """
    n = mesh.shape[axis]
    rows = np.arange(n * 1024, dtype=np.float32).reshape(n, 1024)
    split = NamedSharding(mesh, P(axis))
    placed = jax.make_array_from_callback(rows.shape, split, lambda index: rows[index])
    total = jax.shard_map(
        lambda row: lax.psum(row, axis), mesh=mesh, in_specs=P(axis), out_specs=P()
    )
    try:
        got = jax.jit(total, compiler_options=options)(placed)
        parts = [np.asarray(shard.data)[0] for shard in got.addressable_shards]
        is_right = all(np.array_equal(part, rows.sum(axis=0)) for part in parts)
    except jax.errors.JaxRuntimeError:
        is_right = False
    if jax.process_count() == 1:
        return is_right
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.array(is_right)).all())
