"""The model over a mesh: each device runs its own, smaller model on its own arrays.

Under ``shard_map`` a device has the kernels of one, on ``model.split.local_config``'s shapes,
with two sums a layer (``parallel.collectives``).  Rows are split over "data" where it divides them;
otherwise, and where they share pages, every group does all of them.  Long rows that "data" does not
divide are split by their tokens (``over_pieces``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxllama.config import ModelConfig
from jaxllama.model.cache import Cache, cache_specs
from jaxllama.model.shardings import specs
from jaxllama.model.split import local_config
from jaxllama.parallel.mesh import MODEL_AXIS, RowAxis, expert_groups, row_axes, row_axis
from jaxllama.typing import Params, Tree

Result = TypeVar("Result")


def over_mesh(
    function: Callable[..., Result],
    mesh: AbstractMesh,
    cfg: ModelConfig,
    params: Params,
    *args: Tree,
    out: Callable[[RowAxis], Tree],
    **options: bool | jax.Array | None,
) -> Result:
    """``function(cfg, params, *args, **options)`` on global arrays.

    Arguments are caches, None, or (trees of) arrays that, like those among the options, have the
    first one's rows.  out: the results' specs, from the axis that rows are split over.
    """
    rows = row_axis(mesh, jax.tree.leaves(args[0])[0].shape[0])
    if any(isinstance(arg, Cache) and arg.shares_pages for arg in args):
        rows = None
    local = local_config(
        cfg, mesh.shape[MODEL_AXIS], expert_groups(mesh), own_rows=rows == row_axes(mesh)
    )
    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    fixed = {name: value for name, value in options.items() if name not in arrays}

    def run(arrays: dict[str, jax.Array], params: Params, *args: Tree) -> Result:
        return function(local, params, *args, **fixed, **arrays)

    split = [cache_specs(arg, rows) if isinstance(arg, Cache) else P(rows) for arg in args]
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(P(rows), specs(params, mesh), *split),
        out_specs=out(rows),
        check_vma=False,  # kernels do not say over which axes their results vary
    )(arrays, dict(params), *args)


def over_pieces(
    function: Callable[..., tuple[Tree, Cache]],
    mesh: AbstractMesh,
    cfg: ModelConfig,
    params: Params,
    pieces: jax.Array,
    cache: Cache,
    *rows: jax.Array,
) -> tuple[Tree, Cache]:
    """``function(cfg, params, pieces, cache, *rows)`` of tokens that ``sequence.cut`` cut.

    Each device gets its own pieces, and the whole cache and rows.  The first result is an array of
    pieces, or a tree of them.
    """
    local = local_config(cfg, mesh.shape[MODEL_AXIS], expert_groups(mesh), own_rows=True)
    pieces_over: Tree = P(row_axes(mesh))
    whole = cache_specs(cache, None)

    def run(params: Params, pieces: jax.Array, cache: Cache, *rows: jax.Array):
        return function(local, params, pieces, cache, *rows)

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs(params, mesh), pieces_over, whole, *(P(),) * len(rows)),
        out_specs=(pieces_over, whole),
        check_vma=False,  # as in over_mesh
    )(dict(params), pieces, cache, *rows)


def layer_work(cfg: ModelConfig, params: Params) -> float:
    """Return the multiplications of a token in a layer with weights, in the mean of the layers."""
    total = 0.0
    for index, layer in enumerate(cfg.layers):
        experts = layer.experts
        share = 1.0 if experts is None else experts.n_active / experts.n_experts
        for part in params[f"layer_{index}"].values():
            for name, weights in part.items():
                size = sum(leaf.size for leaf in jax.tree.leaves(weights))
                total += size * share if name.startswith("experts_") else size
    return total / len(cfg.layers)
