"""Parameters and optimizer state divided among the devices of the data axis (ZeRO-3, FSDP).

With ``fsdp = false`` both are whole on every device, and gradients are averaged once a step.

    state = jax.device_put(state, shardings(setup, state, mesh))    1/N of each matrix on a device
    gradient_on_rows(setup, function)(params, fixed, rows)          function of each device's rows

A device keeps a part of each matrix, of its gradient and of its moments. Vectors are whole on every
device. A layer's matrices are gathered when the layer begins, in the activations' dtype. The
backward pass gathers them again. Gradients are summed in float32 on the way back to the devices
that keep them. AdamW is element-wise, so each device updates its part.

The model runs under ``shard_map``, kernels included. Source: ZeRO (arXiv 1910.02054), stage 3. Left
out: overlap by hand (XLA's scheduler overlaps what it can), and parts of frozen weights, which are
whole on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxllama.config import LayerConfig, ModelConfig, model_of
from jaxllama.model.decoder import block
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.params import param_table
from jaxllama.model.records import At
from jaxllama.model.stacked import one_layer_path
from jaxllama.parallel.mesh import DATA_AXIS, check_rows, traced_mesh
from jaxllama.training.config import TrainConfig
from jaxllama.training.start import TrainingSetup
from jaxllama.typing import Params, ParamsDict, Tree

_GATHERED = "gathered weights"
_FLOATS = ("router",)  # matrices that multiply in float32


def shardings(setup: TrainingSetup, tree: Tree, mesh: Mesh) -> Tree:
    """Return a NamedSharding for each leaf of a parameter tree, or of a pytree that has some."""
    specs = _specs(setup, tree, mesh.shape[DATA_AXIS])
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def _specs(setup: TrainingSetup, tree: Tree, size: int) -> Tree:
    """Return each leaf's PartitionSpec over ``size`` devices."""
    table = param_table(setup.model)

    def leaf_spec(keys: tuple[Tree, ...], leaf: jax.Array) -> P:
        names = tuple(key.key for key in keys if hasattr(key, "key"))
        # A state has "params" and "moments" before the parameter's path.
        names = names[1:] if names and names[0] in ("params", "moments") else names
        path, lead = one_layer_path(names) if names else ((), 0)
        if size == 1 or path not in table or leaf.ndim - lead < 2:
            return P()
        axes = (axis for axis in range(lead, leaf.ndim) if leaf.shape[axis] % size == 0)
        axis = next(axes, None)
        return P() if axis is None else P(*(None,) * axis, DATA_AXIS)

    if not setup.config.fsdp:
        return jax.tree.map(lambda _: P(), tree)
    return jax.tree_util.tree_map_with_path(leaf_spec, tree)


def _is_spec(leaf: Tree) -> bool:
    return isinstance(leaf, P)


def gradient_on_rows(setup: TrainingSetup, function: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return ``function(params, fixed, rows)`` with its rows split over the mesh of ``params``.

    function: returns (gradients by the params, other means over its rows). Without a mesh it runs
    unchanged. Raises JaxLlamaError as ``parallel.mesh.check_rows`` does.
    """
    return _on_rows(setup, function, True)


def mean_on_rows(setup: TrainingSetup, function: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return ``function(params, fixed, rows)``, a mean over rows, as ``gradient_on_rows`` does."""
    return _on_rows(setup, function, False)


def _on_rows(
    setup: TrainingSetup, function: Callable[..., Tree], is_gradient: bool
) -> Callable[..., Tree]:
    def run(params: Params, fixed: Params | None, rows: Tree) -> Tree:
        mesh = traced_mesh(params)
        if mesh is None:
            return function(params, fixed, rows)
        check_rows(mesh, rows)
        size = mesh.shape[DATA_AXIS]
        specs = _specs(setup, params, size)

        def mean_of(spec: P, leaf: jax.Array) -> jax.Array:
            return leaf / size if DATA_AXIS in spec else lax.pmean(leaf, DATA_AXIS)

        def averaged(params: Params, fixed: Params | None, rows: Tree) -> Tree:
            found = function(params, fixed, rows)
            if not is_gradient:
                return lax.pmean(found, DATA_AXIS)
            # Gathering summed the gradients of parts.
            gradients = jax.tree.map(mean_of, specs, found[0], is_leaf=_is_spec)
            return gradients, lax.pmean(found[1], DATA_AXIS)

        return jax.shard_map(
            averaged,
            mesh=mesh,
            in_specs=(specs, P(), P(DATA_AXIS)),
            out_specs=(specs, P()) if is_gradient else P(),
            check_vma=False,
        )(params, fixed, rows)

    return run


def gathered(cfg: ModelConfig, params: Params, dtype: DTypeLike | None = None) -> ParamsDict:
    """Return parameters with their divided matrices whole, which ``cfg`` says.

    params: any part of the tree by layer; that of ``model_of`` a layer is "layer_0".
    dtype: of gathered matrices, float32 by default.
    """
    table = param_table(cfg)

    def gathered_leaf(keys: tuple[Tree, ...], leaf: jax.Array) -> jax.Array:
        path = tuple(key.key for key in keys if hasattr(key, "key"))
        whole = table[path].shape if leaf.ndim > 1 else leaf.shape
        axis = next((i for i, n in enumerate(whole) if n != leaf.shape[i]), None)
        if axis is None:
            return leaf
        is_product = len(whole) == 2 and not path[-2].endswith(("conv", *_FLOATS))
        result = _gather(axis, jnp.dtype(dtype if dtype and is_product else leaf.dtype), leaf)
        return checkpoint_name(result, _GATHERED)

    return jax.tree_util.tree_map_with_path(gathered_leaf, dict(params))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(axis: int, dtype: jnp.dtype, part: jax.Array) -> jax.Array:
    return lax.all_gather(part.astype(dtype), DATA_AXIS, axis=axis, tiled=True)


def _gather_forward(axis: int, dtype: jnp.dtype, part: jax.Array) -> tuple[jax.Array, None]:
    return _gather(axis, dtype, part), None


def _gather_backward(
    axis: int, dtype: jnp.dtype, saved: None, whole: jax.Array
) -> tuple[jax.Array]:
    del dtype, saved
    whole = whole.astype(jnp.float32)
    return (lax.psum_scatter(whole, DATA_AXIS, scatter_dimension=axis, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def has_parts(config: TrainConfig) -> bool:
    """Whether the matrices of a run are parts here, in a function of ``gradient_on_rows``."""
    mesh = jax.sharding.get_abstract_mesh()
    in_rows = DATA_AXIS in mesh.manual_axes
    return in_rows and mesh.shape[DATA_AXIS] > 1 and config.fsdp


def gathered_block(
    layer: LayerConfig,
    params: Params,
    stream: Stream,
    state: LayerState,
    at: At,
    *,
    ops: LayerOps,
    dtype: DTypeLike | None,
    remat: bool,
) -> tuple[Stream, LayerState]:
    """Run ``decoder.block`` of a layer's parts; its whole matrices are kept for no backward pass.

    dtype: of the gathered matrices. remat: keep only the layer's input.
    """

    def run(params: Params, stream: Stream, state: LayerState) -> tuple[Stream, LayerState]:
        whole = gathered(model_of(layer), {"layer_0": params}, dtype)["layer_0"]
        return block(layer, whole, stream, state, at, ops)

    but = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
    return jax.checkpoint(run, policy=None if remat else but)(params, stream, state)
