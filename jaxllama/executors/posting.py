"""Decode steps of one row whose sums over devices are posted, not collectives.

    params = posting(cfg, params, rows=1)     for a loop of one row; else the same parameters

The products that end in a sum get a table each ("post" in a linear layer, ``model.linear``).
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxllama import compiler_options
from jaxllama.config import ModelConfig
from jaxllama.model import decoder
from jaxllama.model.linear import POST
from jaxllama.parallel.mailboxes import sum_tables
from jaxllama.parallel.mesh import MODEL_AXIS, mesh_of
from jaxllama.typing import Params
from pallas_kernels.matmul.sums import can_post
from pallas_kernels.qtensor import QTensor, RowBlocks
from pallas_kernels.transform import is_traced

Place = tuple[str, str, str]  # layer, part of it, linear layer


def posting(cfg: ModelConfig, params: Params, rows: int) -> Params:
    """Return the parameters with tables for the sums of ``rows`` rows, if they are to be posted.

    The sums of every decode step are posted in the order of the layers.  Parallel blocks and mixers
    side by side are left to collectives, because their products do not wait for each other.
    """
    mesh = None if is_traced() else mesh_of(params)
    if rows != 1 or mesh is None or mesh.shape[MODEL_AXIS] == 1:
        return params
    if any(layer.form.name in ("parallel", "beside", "shared") for layer in cfg.layers):
        return params
    if compiler_options.for_mesh(mesh) is None:
        return params
    places = list(_places(cfg, params))
    tables = sum_tables(mesh, cfg.d_model, len(places))
    if tables is None:
        return params
    changed = dict(params)
    for (layer, part, name), table in zip(places, tables, strict=True):
        layer_params = {**changed[layer], part: {**changed[layer][part]}}
        layer_params[part][name] = {**layer_params[part][name], POST: table}
        changed[layer] = layer_params
    return changed


def _places(cfg: ModelConfig, params: Params) -> Iterator[Place]:
    """Yield the linear layers whose sums can be posted, in the order in which they run."""
    for index in range(cfg.n_layers):
        layer = params[f"layer_{index}"]
        for part, name, norm in (
            ("mixer", "o", "mixer_out_norm"),
            ("mlp", "down", "mlp_out_norm"),
        ):
            linear = layer.get(part, {}).get(name)
            if linear is not None and norm not in layer and _can_post(params, linear):
                yield f"layer_{index}", part, name


def _can_post(params: Params, linear: Params) -> bool:
    weight = linear["weight"]
    if set(linear) != {"weight"} or isinstance(weight, RowBlocks):
        return False
    if isinstance(weight, QTensor) and (weight.activations or weight.columns is not None):
        return False
    local = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype),
        weight,
    )
    x = jax.ShapeDtypeStruct((1, local.shape[1]), decoder.activation_dtype(params))
    return x.dtype == jnp.bfloat16 and can_post(x, local)
