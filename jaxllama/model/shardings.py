"""Parameters on a mesh: functions that split, place, load and gather them.

    specs(params, mesh) -> tree of PartitionSpec
    shard_params(cfg, params, mesh) -> (config, params)        gather_params undoes it
    read_leaf(cfg, mesh, dtype, path, shape, read) -> array

``cfg`` is always the original model's; the config that comes back differs from it where kv heads
are repeated.  The scales and zero points of a quantized weight follow their rows and, along the
inputs, their groups.  A scale for a whole row is on every shard.  Groups that shards would cut are
split into smaller ones with the same numbers.

``read_leaf`` asks only for the rows and columns that this process's devices hold.  So each of
several hosts reads only its share of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.model.linear import POST
from jaxllama.model.split import (
    Path,
    check_groups,
    natural_rows,
    replicated_config,
    row_order,
    split_axis,
)
from jaxllama.parallel.mesh import EXPERT_AXIS, MODEL_AXIS, expert_groups
from jaxllama.typing import ArrayOrNumpy, Leaf, Params, ParamsDict, Tree
from pallas_kernels.qtensor import BLOCK_ROWS, QTensor, RowBlocks


class _Shaped(Protocol):
    """An object with a shape: an array, or jax.ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]: ...


# read(start, out): fill the flat ``out`` with the parameter's elements from ``start`` on.
Read = Callable[[int, np.ndarray], None]


def specs(params: Params, mesh: Mesh | AbstractMesh | None = None) -> Tree:
    """How the arrays of a parameter tree (as ``shard_params`` leaves it) are split.

    mesh: says whether an axis divides the experts alone; without it, none does.
    """
    return _map_arrays(lambda path, field, array, _: _spec(mesh, path, field, array), params)


def _spec(mesh: Mesh | AbstractMesh | None, path: Path, field: str, array: _Shaped) -> P:
    """field: of a QTensor, "" of a plain array."""
    if path[-1] == POST:
        return P(MODEL_AXIS)
    axis = split_axis(path)
    if mesh is not None and expert_groups(mesh) > 1 and path[-2].startswith("experts_"):
        return P((EXPERT_AXIS, MODEL_AXIS))
    if field == "columns" and axis == 1:
        return P(MODEL_AXIS)
    one_scale_a_row = axis == 1 and field in ("scale", "zero", "unit") and array.shape[-1] == 1
    if axis is None or one_scale_a_row or field in ("columns", "input_scale"):
        return P()
    return P(*(None,) * axis, MODEL_AXIS)


def shard_params(cfg: ModelConfig, params: Params, mesh: Mesh) -> tuple[ModelConfig, ParamsDict]:
    """(config, parameters on ``mesh``) of numpy or jax arrays, quantized or not.

    Raises JaxLlamaError naming what the mesh does not divide.
    """
    check_groups(cfg, mesh.shape[MODEL_AXIS], expert_groups(mesh))
    config = replicated_config(cfg, mesh.shape[MODEL_AXIS])
    return config, _map_leaves(lambda path, leaf: shard_leaf(cfg, mesh, path, leaf), dict(params))


def shard_leaf(cfg: ModelConfig, mesh: Mesh, path: Path, leaf: Leaf) -> Leaf:
    """One parameter: an array, a QTensor or RowBlocks."""
    n = mesh.shape[MODEL_AXIS]

    def shard_array(
        path: Path, field: str, array: ArrayOrNumpy, order: np.ndarray | None
    ) -> jax.Array:
        array = array if order is None else _take(array, order)
        return put(array, NamedSharding(mesh, _spec(mesh, path, field, array)))

    leaf = _map_qtensors(lambda weight: split_groups(path, weight, n), leaf)
    order = row_order(cfg, path, n)
    return _with_shards_blocks(
        path, leaf, _arrays_of_leaf(shard_array, path, leaf, order), order, n
    )


def _with_shards_blocks(
    path: Path, leaf: Leaf, placed: Leaf, order: np.ndarray | None, n: int
) -> Leaf:
    """Return ``placed``, ``leaf``'s rows in an order, with what is known of a shard's blocks."""
    if not isinstance(leaf, QTensor) or not isinstance(placed, QTensor):
        return placed
    if not leaf.has_blocks or leaf.ndim > 2 or split_axis(path) != 0:
        return placed
    order, rows = np.arange(leaf.shape[-2]) if order is None else order, None
    if len(order) % (n * BLOCK_ROWS) == 0:
        by_block = order.reshape(-1, BLOCK_ROWS)
        is_whole = (by_block[:, :1] % BLOCK_ROWS == 0) & (np.diff(by_block) == 1).all(
            1, keepdims=True
        )
        rows = len(order) // n if is_whole.all() else None
    return dataclasses.replace(placed, blocked=rows)


def leaf_readers(
    cfg: ModelConfig, mesh: Mesh, dtype: DTypeLike
) -> tuple[Callable[[Path, Leaf], Leaf], Callable[[Path, tuple[int, ...], Read], jax.Array]]:
    """(place, stream) for ``checkpoints.hf.load``: ``shard_leaf`` and ``read_leaf``.

    Raises JaxLlamaError naming what the mesh does not divide.
    """
    check_groups(cfg, mesh.shape[MODEL_AXIS], expert_groups(mesh))
    return (
        functools.partial(shard_leaf, cfg, mesh),
        functools.partial(read_leaf, cfg, mesh, dtype),
    )


def computed_leaf(
    cfg: ModelConfig, mesh: Mesh, path: Path, make: Callable[..., Leaf], *args: Tree
) -> Leaf:
    """The parameter ``make(*args)`` on ``mesh``, inside ``jit``, with nothing sent.

    Each device computes its part alone.  If the rows have another order on the mesh, it computes
    the whole parameter and keeps its part.  Experts, the largest parameters, keep their order.
    """
    n = mesh.shape[MODEL_AXIS]

    def stored(*args: Tree) -> Leaf:
        leaf = _map_qtensors(lambda weight: split_groups(path, weight, n), make(*args))
        order = row_order(cfg, path, n)
        return _arrays_of_leaf(
            lambda _, __, x, row_order: x if row_order is None else _take(x, row_order),
            path,
            leaf,
            order,
        )

    def part(path: Path, field: str, x: jax.Array, _: object) -> jax.Array:
        split = _spec(mesh, path, field, x)
        axis = next((axis for axis, names in enumerate(split) if names is not None), None)
        if axis is None:
            return x
        at, size = lax.axis_index(split[axis]), x.shape[axis] // lax.axis_size(split[axis])
        return lax.dynamic_slice_in_dim(x, at * size, size, axis)

    def placed(path: Path, field: str, x: jax.Array, _: object) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, _spec(mesh, path, field, x)))

    if row_order(cfg, path, n) is None:
        return _arrays_of_leaf(placed, path, stored(*args), None)
    shapes = jax.eval_shape(stored, *args)
    return jax.shard_map(
        lambda *args: _arrays_of_leaf(part, path, stored(*args), None),
        mesh=mesh,
        in_specs=P(),
        out_specs=_arrays_of_leaf(lambda *leaf: _spec(mesh, *leaf[:3]), path, shapes, None),
        check_vma=False,  # nothing says that all devices compute the same
    )(*args)


def place_params(cfg: ModelConfig, params: Params, mesh: Mesh) -> tuple[ModelConfig, ParamsDict]:
    """(config, parameters), each where it belongs, of parameters that are in their stored order,
    some of them just computed from others (quantized, say)."""
    n = mesh.shape[MODEL_AXIS]

    def place(path: Path, leaf: Leaf) -> Leaf:
        leaf = _map_qtensors(lambda weight: split_groups(path, weight, n), leaf)
        placed = _arrays_of_leaf(
            lambda path, field, array, _: jax.device_put(
                array, NamedSharding(mesh, _spec(mesh, path, field, array))
            ),
            path,
            leaf,
            None,
        )
        return _with_shards_blocks(path, leaf, placed, None, n)

    return replicated_config(cfg, n), _map_leaves(place, dict(params))


def gather_params(cfg: ModelConfig, params: Params, n: int) -> ParamsDict:
    """Undo ``shard_params``: return numpy arrays from parameters on a mesh of ``model=n``.

    Groups that were split stay split.
    """

    def gather(path: Path, field: str, array: ArrayOrNumpy, order: np.ndarray | None) -> np.ndarray:
        whole = fetch(array)
        return whole if order is None else whole[natural_rows(order)]

    def of_leaf(path: Path, leaf: Leaf) -> Leaf:
        order = row_order(cfg, path, n)
        if order is None or not isinstance(leaf, RowBlocks):
            return _arrays_of_leaf(gather, path, leaf, order)
        # Each block holds the same consecutive part of every shard's rows.
        shards, blocks, begin = order.reshape(n, -1), [], 0
        for block in leaf.blocks:
            end = begin + block.shape[0] // n
            rows = shards[:, begin:end].reshape(-1)
            blocks.append(_arrays_of_leaf(gather, path, block, rows - rows.min()))
            begin = end
        return RowBlocks(tuple(blocks))

    return _map_leaves(of_leaf, dict(params))


def split_groups(path: Path, weight: QTensor, n: int) -> QTensor:
    """Return the weight; smaller groups of the same scales replace those that shards would cut."""
    groups = weight.scale.shape[-1]
    if split_axis(path) != 1 or groups == 1 or groups % n == 0:
        return weight
    repeats = weight.group_size // math.gcd(weight.group_size, weight.shape[-1] // n)

    def repeat(array: jax.Array | None) -> jax.Array | None:
        return None if array is None else jnp.repeat(array, repeats, axis=-1)

    return dataclasses.replace(weight, scale=repeat(weight.scale), zero=repeat(weight.zero))


def put(array: ArrayOrNumpy, sharding: NamedSharding) -> jax.Array:
    """An array that every host has, on the devices of ``sharding``."""
    if sharding.is_fully_addressable:
        if isinstance(array, jax.Array) and len(array.devices()) == 1:
            # From device to device, where device_put would cut it on the host.
            parts = sharding.addressable_devices_indices_map(array.shape)
            shards = [jax.device_put(array[part], device) for device, part in parts.items()]
            return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(tree: Tree) -> Tree:
    """The values as numpy arrays, on every host (all of them must call it)."""

    def whole(x: object) -> object:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        assert isinstance(x.sharding, NamedSharding)
        return jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)

    return jax.device_get(jax.tree.map(whole, tree))


# From disk


def read_leaf(
    cfg: ModelConfig, mesh: Mesh, dtype: DTypeLike, path: Path, shape: tuple[int, ...], read: Read
) -> jax.Array:
    """The parameter at ``path``, of the original ``shape`` and row-major in its file, on ``mesh``.

    A parameter split by rows is read shard by shard; another in one pass over the columns that this
    process needs, of which its devices then take theirs.
    """
    order = row_order(cfg, path, mesh.shape[MODEL_AXIS])
    stored = shape if order is None else (len(order), *shape[1:])
    sharding = NamedSharding(mesh, _spec(mesh, path, "", np.empty(0)))
    needed = [
        tuple(part.indices(size)[:2] for part, size in zip(index, stored, strict=True))
        for index in sharding.addressable_devices_indices_map(stored).values()
        if index is not None
    ]
    blocks: dict[tuple[tuple[int, ...], ...], np.ndarray] = {}
    if split_axis(path) == 1:
        hull = min(begin for _, (begin, _) in needed), max(end for _, (_, end) in needed)
        columns = _read_columns(shape, hull, np.dtype(dtype), read)
        for key in needed:
            begin, end = key[1]
            blocks[key] = columns[:, begin - hull[0] : end - hull[0]]
    else:
        rows = np.arange(shape[0]) if order is None else order
        for key in needed:
            if key not in blocks:
                blocks[key] = _read_rows(rows[slice(*key[0])], shape[1:], np.dtype(dtype), read)

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return blocks[
            tuple(part.indices(size)[:2] for part, size in zip(index, stored, strict=True))
        ]

    return jax.make_array_from_callback(stored, sharding, block)


def _read_rows(rows: np.ndarray, rest: tuple[int, ...], dtype: np.dtype, read: Read) -> np.ndarray:
    """Rows of the file, in runs; row -1 is zeros."""
    width = math.prod(rest)
    out = np.zeros((len(rows), width), dtype)
    # A run ends where the next row is not the next one in the file.
    ends = [*np.flatnonzero(np.diff(rows) != 1) + 1, len(rows)]
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        if rows[begin] >= 0:
            read(int(rows[begin]) * width, out[begin:end].reshape(-1))
    return out.reshape(len(rows), *rest)


def _read_columns(
    shape: tuple[int, ...], columns: tuple[int, int], dtype: np.dtype, read: Read
) -> np.ndarray:
    rows, width = shape
    begin, end = columns
    out = np.empty((rows, end - begin), dtype)
    if end - begin == width:
        read(0, out.reshape(-1))
    else:
        for row in range(rows):
            read(row * width + begin, out[row])
    return out


# Trees: a leaf is a parameter; it is an array, a QTensor of arrays, or RowBlocks of both


def _is_leaf(node: object) -> bool:
    return isinstance(node, QTensor | RowBlocks)


def _map_leaves(function: Callable[[Path, Leaf], Tree], params: Params) -> ParamsDict:
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: function(tuple(key.key for key in keys), leaf), params, is_leaf=_is_leaf
    )


def _map_qtensors(function: Callable[[QTensor], QTensor], leaf: Leaf) -> Leaf:
    return jax.tree.map(
        lambda node: function(node) if isinstance(node, QTensor) else node,
        leaf,
        is_leaf=lambda node: isinstance(node, QTensor),
    )


_ArrayFunction = Callable[[Path, str, Tree, np.ndarray | None], Tree]


def _map_arrays(function: _ArrayFunction, params: Params) -> ParamsDict:
    return _map_leaves(lambda path, leaf: _arrays_of_leaf(function, path, leaf, None), dict(params))


def _arrays_of_leaf(
    function: _ArrayFunction, path: Path, leaf: Leaf, order: np.ndarray | None
) -> Tree:
    """``function(path, field, array, order of its rows)`` of every array."""
    if isinstance(leaf, RowBlocks):
        blocks = zip(leaf.blocks, _orders_of_blocks(path, leaf, order), strict=True)
        return RowBlocks(tuple(_arrays_of_leaf(function, path, *block) for block in blocks))
    if not isinstance(leaf, QTensor):
        return function(path, "", leaf, order)
    fields = {
        field.name: getattr(leaf, field.name)
        for field in dataclasses.fields(leaf)
        if not field.metadata.get("static")
    }
    if order is not None:
        leaf = dataclasses.replace(leaf, blocked=None)
    return dataclasses.replace(
        leaf,
        **{
            name: function(path, name, x, None if name in ("columns", "input_scale") else order)
            for name, x in fields.items()
            if x is not None
        },
    )


def _orders_of_blocks(
    path: Path, leaf: RowBlocks, order: np.ndarray | None
) -> list[np.ndarray | None]:
    """Each block's own rows in the order of the whole, which keeps a shard's rows together."""
    if order is None:
        return [None] * len(leaf.blocks)
    orders, begin = [], 0
    for block in leaf.blocks:
        end = begin + block.shape[0]
        orders.append(order[(order >= begin) & (order < end)] - begin)
        begin = end
    return orders


def _take(array: ArrayOrNumpy, order: np.ndarray) -> ArrayOrNumpy:
    """Return the rows ``order`` of an array ``[n, ...]``, zeros for negative indices."""
    taken = array[np.maximum(order, 0)]
    if (order >= 0).all():
        return taken
    padding = (order < 0).reshape(-1, *(1,) * (array.ndim - 1))
    module = np if isinstance(array, np.ndarray) else jnp
    return module.where(padding, module.zeros((), array.dtype), taken)
