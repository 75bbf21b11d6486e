"""Tensor, data and expert parallelism: one mesh of devices, and a model cut over it.

    mesh = make_mesh("data=1,model=4")
    config, params = shard_params(cfg, params, mesh)      or jl.load(..., mesh="model=4")
    cache = init_cache(config, batch, max_len, dtype, mesh=mesh)

and then ``prefill``, ``decode_step``, ``generate``, ``logits`` as always.  A mesh has the axes
"data" and "model", and "expert" between them where its size is above 1.  That axis divides the
experts of a mixture, and the rows as "data" does (``parallel.exchange``).

The mesh is part of the arrays' types, so the model finds it while tracing (``traced_mesh``). It
runs under ``shard_map`` (``model.sharded``). Each device runs its own, smaller model
(``model.split``) on local arrays, with its own kernels. A layer has two sums
(``parallel.collectives``). The code around the model (sampling, inserting rows) is plain jnp on
sharded arrays, which XLA partitions: logits stay split over the vocabulary. Gradients pass through;
a parameter's is summed over the data axis.

Source: Megatron-LM (arXiv 1909.08053).  Communication is XLA's (NCCL on GPUs, gloo between CPUs);
several hosts are ``parallel.hosts``, and long rows cut by their tokens ``parallel.sequence``.
Training also has meshes of the axes "data" and "stage" (``make_stages``), on which
``training.pipeline`` divides the layers.  Left out: pipelines for inference.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxllama.errors import JaxLlamaError
from jaxllama.typing import Tree

DATA_AXIS, EXPERT_AXIS, MODEL_AXIS, STAGE_AXIS = "data", "expert", "model", "stage"
AXES = (DATA_AXIS, EXPERT_AXIS, MODEL_AXIS)
STAGES = (DATA_AXIS, STAGE_AXIS)  # the axes of a mesh with stages
_WITHOUT_EXPERTS = (DATA_AXIS, MODEL_AXIS)
_CPU_DEVICES = "--xla_force_host_platform_device_count"
_COLLECTIVE_KERNELS = "xla_gpu_experimental_use_collective_kernels"
RowAxis: TypeAlias = str | tuple[str, ...] | None  # the axes that rows are split over


# The mesh


def make_mesh(shape: str | Mapping[str, int] | Mesh) -> Mesh:
    """ "data=1,model=4", a mapping of the same, or a Mesh with these axes; a missing axis is 1.

    The result has the axis "expert" only if its size is above 1.

    "model" is the inner axis, so that it stays on one host where it fits.  Raises JaxLlamaError
    naming the axis, or the number of devices that there are.
    """
    _choose_collectives()
    sizes = mesh_sizes(shape)
    if isinstance(shape, Mesh):
        order = [shape.axis_names.index(axis) for axis in AXES if axis in shape.axis_names]
        devices = np.transpose(shape.devices, order)
    else:
        devices = _first_devices(dict(zip(AXES, sizes, strict=True)))
    if sizes[1] == 1:
        names, sizes = _WITHOUT_EXPERTS, (sizes[0], sizes[2])
    else:
        names = AXES
    return Mesh(devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def make_stages(shape: str | Mesh) -> Mesh | None:
    """Return the mesh of "data=2,stage=4", with the axes "data" and "stage"; None without stages.

    "stage" is the inner axis.  Raises JaxLlamaError as ``make_mesh`` does, and for other axes.
    """
    if isinstance(shape, Mesh):
        return shape if shape.axis_names == STAGES else None
    sizes = stage_sizes(shape)
    if sizes is None:
        return None
    _choose_collectives()
    devices = _first_devices(dict(zip(STAGES, sizes, strict=True)))
    return Mesh(devices.reshape(sizes), STAGES, axis_types=(AxisType.Auto,) * 2)


def stage_sizes(text: str) -> tuple[int, int] | None:
    """Return the sizes of "data" and "stage" in a mesh's text, or None without stages.

    Raises JaxLlamaError naming another axis.
    """
    sizes = _parse(text, (*AXES, STAGE_AXIS))
    if STAGE_AXIS not in sizes:
        return None
    for axis, size in sizes.items():
        if axis not in STAGES or size < 1:
            raise JaxLlamaError(f"mesh {text!r}: stage=N goes with data=N alone")
    return sizes.get(DATA_AXIS, 1), sizes[STAGE_AXIS]


def is_staged(tree: Tree) -> bool:
    """Whether arrays, traced ones too, are on a mesh with stages, outside of a shard_map."""
    mesh = jax.typeof(jax.tree.leaves(tree)[0]).sharding.mesh
    return mesh.axis_names == STAGES and not mesh.manual_axes


def _choose_collectives() -> None:
    """Set what NCCL and XLA read when jax starts its devices; what the user has set stays."""
    # XLA already orders its NCCL calls, inside and outside of CUDA graphs.  By default NCCL orders
    # the two kinds again, with two more graph nodes for every sum.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    # From jax 0.12 on XLA computes small sums with kernels of its own, which ask NCCL for addresses
    # of the peers' memory.  On hosts without NVLink multicast NCCL refuses (ncclSystemError).
    # Earlier versions do not know the flag, and end the process.
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__ >= (0, 12) and _COLLECTIVE_KERNELS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_COLLECTIVE_KERNELS}=".strip()


def mesh_sizes(shape: str | Mapping[str, int] | Mesh) -> tuple[int, ...]:
    """Devices along each of AXES.  Raises JaxLlamaError naming the axis."""
    if isinstance(shape, str):
        shape = _parse(shape)
    elif isinstance(shape, Mesh):
        shape = dict(shape.shape)
    if not isinstance(shape, Mapping):
        raise JaxLlamaError(
            f"mesh = {shape!r}: expected text such as 'data=1,model=4', a mapping of it, or a Mesh"
        )
    for axis, size in shape.items():
        if axis not in AXES:
            raise JaxLlamaError(f"mesh: axis {axis!r} is not one of {', '.join(AXES)}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise JaxLlamaError(f"mesh: {axis} = {size!r}: must be a whole number from 1 on")
    return tuple(shape.get(axis, 1) for axis in AXES)


def _parse(text: str, axes: tuple[str, ...] = AXES) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        axis, _, size = (word.strip() for word in entry.partition("="))
        if not size.isdecimal() or axis in sizes:
            words = ",".join(f"{axis}=N" for axis in axes)
            raise JaxLlamaError(f"mesh {text!r}: expected {words}, each at most once")
        sizes[axis] = int(size)
    return sizes


def _first_devices(sizes: Mapping[str, int]) -> np.ndarray:
    wanted, devices = math.prod(sizes.values()), jax.devices()
    words = ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1 or axis != EXPERT_AXIS)
    if wanted > len(devices):
        platform = devices[0].platform
        trial = f"; for a trial XLA_FLAGS={_CPU_DEVICES}={wanted} shows the CPU as {wanted} devices"
        raise JaxLlamaError(
            f"mesh {words}: needs {wanted} devices, and jax sees {len(devices)} ({platform})"
            f"{trial if platform == 'cpu' else ''}"
        )
    hosts = {device.process_index for device in devices[:wanted]}
    if len(hosts) < jax.process_count():
        raise JaxLlamaError(
            f"mesh {words}: its {wanted} devices are on {len(hosts)} of {jax.process_count()} "
            f"hosts, and every host must have a part: {len(devices)} devices in all"
        )
    return np.array(devices[:wanted])


def mesh_of(params: Tree) -> Mesh | None:
    """Return the mesh that (concrete) arrays are on, or None."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return sharding.mesh if sharding.mesh.axis_names in (AXES, _WITHOUT_EXPERTS) else None


def traced_mesh(params: Tree) -> AbstractMesh | None:
    """The same from the arrays' types, so inside ``jit`` too; None inside a shard_map, where arrays
    are one shard's."""
    mesh = jax.typeof(jax.tree.leaves(params)[0]).sharding.mesh
    is_own = mesh.axis_names in (AXES, _WITHOUT_EXPERTS)
    return mesh if is_own and not mesh.manual_axes else None


def is_split() -> bool:
    """Is this traced inside a shard_map over a model axis of two or more?"""
    mesh = jax.sharding.get_abstract_mesh()
    return MODEL_AXIS in mesh.manual_axes and mesh.shape[MODEL_AXIS] > 1


def expert_axes() -> tuple[str, ...]:
    """Return the axes over which the experts are split, inside a shard_map over axes of two or
    more devices; none outside of one."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = (axis for axis in (EXPERT_AXIS, MODEL_AXIS) if axis in mesh.manual_axes)
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def expert_groups(mesh: Mesh | AbstractMesh) -> int:
    """Return the size of the "expert" axis."""
    return mesh.shape.get(EXPERT_AXIS, 1)


# Rows


def row_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the axes along which weights outside of experts are whole: "data" and "expert"."""
    return tuple(axis for axis in (DATA_AXIS, EXPERT_AXIS) if axis in mesh.shape)


def row_axis(mesh: Mesh | AbstractMesh, batch: int) -> RowAxis:
    """Return the axis or axes that ``batch`` rows are split over, None if every device has all."""
    axes = row_axes(mesh)
    size = math.prod(mesh.shape[axis] for axis in axes)
    if len(axes) > 1 and batch % size == 0:
        return axes
    size = mesh.shape[DATA_AXIS]
    return DATA_AXIS if size > 1 and batch % size == 0 else None


def check_axes(mesh: Mesh | AbstractMesh) -> None:
    """Raise JaxLlamaError for a mesh with "model" or "expert" above 1, which training has not."""
    for axis in (EXPERT_AXIS, MODEL_AXIS):
        size = mesh.shape.get(axis, 1)
        if size > 1:
            raise JaxLlamaError(f"mesh: {axis}={size}: training takes data=N and stage=N only")


def check_rows(mesh: Mesh | AbstractMesh, rows: Tree) -> None:
    """Raise JaxLlamaError for a mesh with "model" or "expert" above 1, or rows that "data" does not
    divide.
    """
    check_axes(mesh)
    count, data = jax.tree.leaves(rows)[0].shape[0], mesh.shape[DATA_AXIS]
    if count % data:
        raise JaxLlamaError(f"mesh: data={data} does not divide the {count} rows of a batch")
