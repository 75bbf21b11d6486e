"""random_params: random weights of a model's shape, drawn one at a time on their devices.

    random_params(cfg, key, dtype, scheme) -> params

The values are distributed as in ``init_params`` (normal, 0.02; norms 1; biases 0). With a scheme
the tree has the form of ``quantize_params``, but no floats are drawn for it. Codes are drawn
uniformly over their bits (float8: normal), with one constant scale that gives the same deviation.
So a model whose floats fit nowhere can be measured, such as a 70B shape in w4a16 on one GPU.
Weights of one shape share one program. On a mesh every device draws its part of a weight
(``model.shardings.computed_leaf``), and the model equals the model of one device, split.

Such a model's text has no meaning.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.param import Path
from jaxllama.model.params import param_table
from jaxllama.model.shardings import computed_leaf
from jaxllama.model.split import check_groups
from jaxllama.offload.store import available_memory
from jaxllama.parallel.mesh import MODEL_AXIS, expert_groups
from jaxllama.progress import working
from jaxllama.quantization.quantize import quantize_params
from jaxllama.typing import Leaf, Params, ParamsDict
from pallas_kernels.qtensor import FLOAT4, QTensor, tree_bytes

# Standard deviations of random codes.
_MULTIPLE = 12  # multiple in the scales of two levels
_DEVIATIONS = {"int8": 73.9, "int4": 4.61, "float8_e4m3fn": 100.0, "float4_e2m1fn": 2.93}


def random_params(
    cfg: ModelConfig,
    key: jax.Array,
    dtype: DTypeLike = jnp.float32,
    scheme: str | None = None,
    place: Callable[[Path, Leaf], Leaf] | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> Params:
    """Return random parameters; see the module docstring.

    Parameters
    ----------
    cfg : ModelConfig
        Config of the model.
    key : jax.Array
        Random key.
    dtype : data-type
        Dtype of the floats.
    scheme : str or None
        Recipe of the quantized weights.
    place : callable or None
        ``place(path, leaf)`` returns the tree's value of a parameter.
    mesh : Mesh or None
        Devices that share the parameters.
    progress : bool
        Whether to show a bar on stderr.

    Raises
    ------
    JaxLlamaError
        For an unknown scheme, or naming a weight that no group size divides or a size that the mesh
        does not divide.
    """
    if mesh is not None:
        check_groups(cfg, mesh.shape[MODEL_AXIS], expert_groups(mesh))
    shapes = _shapes(cfg, dtype, scheme)
    flat = jax.tree_util.tree_leaves_with_path(shapes, is_leaf=lambda x: isinstance(x, QTensor))
    leaves = {tuple(entry.key for entry in path): leaf for path, leaf in flat}
    # The table's order fixes the random numbers; leaves that a scheme adds follow.
    table = param_table(cfg)
    order = [path for path in table if path in leaves]
    order += [path for path in leaves if path not in set(order)]
    seed, kind = np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key))
    params: ParamsDict = {}
    with working("drawing weights", tree_bytes(shapes), progress) as bar:
        for index, path in enumerate(order):
            spec = table.get(path, table["embed", "weight"])  # the head's own copy in a tied model
            where = () if mesh is None else (cfg, mesh, _alike(cfg, path))
            value = _draw(seed, np.uint32(index), kind, leaves[path], spec.mean, spec.std, *where)
            _put(params, path, value if place is None else place(path, value))
            jax.block_until_ready(value)
            bar(tree_bytes(leaves[path]))
    return params


def check_memory(cfg: ModelConfig, dtype: DTypeLike, scheme: str | None) -> None:
    """Raise JaxLlamaError if one device has too little memory for the weights."""
    stats = jax.local_devices()[0].memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"] if stats else available_memory()
    need = tree_bytes(_shapes(cfg, dtype, scheme))
    if free is not None and need > free:
        raise JaxLlamaError(
            f"{cfg.name}: its weights need {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory "
            "are free: quantize them, or offload them with a policy"
        )


def _shapes(cfg: ModelConfig, dtype: DTypeLike, scheme: str | None) -> Params:
    shapes = param_shapes(cfg, dtype)
    if scheme is None:
        return shapes
    return jax.eval_shape(functools.partial(quantize_params, scheme=scheme), shapes)


def param_shapes(cfg: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """Return the parameter tree with a ``jax.ShapeDtypeStruct`` for every leaf.

    Leaves that loading keeps in float32 are float32.
    """
    shapes: ParamsDict = {}
    for path, spec in param_table(cfg).items():
        leaf_dtype = jnp.float32 if spec.is_float32 else dtype
        _put(shapes, path, jax.ShapeDtypeStruct(spec.shape, jnp.dtype(leaf_dtype)))
    return shapes


def _alike(cfg: ModelConfig, path: Path) -> Path:
    """Return the path in the first layer that is alike, so that such layers share a program."""
    if not path[0].startswith("layer_"):
        return path
    layer = cfg.layers[int(path[0].removeprefix("layer_"))]
    return (f"layer_{cfg.layers.index(layer)}", *path[1:])


def _put(tree: ParamsDict, path: Path, value: Leaf | jax.ShapeDtypeStruct) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


@functools.partial(jax.jit, static_argnums=range(2, 9))
def _draw(
    seed: jax.Array,
    index: jax.Array,
    kind: str,
    like: jax.ShapeDtypeStruct | QTensor,
    mean: float,
    std: float,
    cfg: ModelConfig | None = None,
    mesh: Mesh | None = None,
    path: Path = (),
) -> Leaf:
    """Return a leaf like ``like``, a shape or a QTensor of shapes; on a mesh that at ``path``."""

    def make(seed: jax.Array, index: jax.Array) -> jax.Array | QTensor:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl=kind), index)
        if not isinstance(like, QTensor):
            return _floats(key, like.shape, like.dtype, mean, std)
        scale = std / _DEVIATIONS[like.q.dtype.name]
        fields = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)  # zero points
        scales = {"scale": jnp.full(like.scale.shape, scale, like.scale.dtype)}
        if like.unit is not None:
            scales["scale"] = jnp.full(like.scale.shape, _MULTIPLE, like.scale.dtype)
            scales["unit"] = jnp.full(like.unit.shape, scale / _MULTIPLE, like.unit.dtype)
        return dataclasses.replace(fields, q=_words(key, like.q.shape, like.q.dtype), **scales)

    if mesh is None:
        return make(seed, index)
    assert cfg is not None
    return computed_leaf(cfg, mesh, path, make, seed, index)


def _floats(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, mean: float, std: float
) -> jax.Array:
    if std == 0:
        return jnp.full(shape, mean, dtype)
    return (mean + std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _words(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    if dtype == FLOAT4:
        return lax.bitcast_convert_type(_words(key, shape, jnp.int4), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        values = _DEVIATIONS[dtype.name] * jax.random.normal(key, shape, jnp.float32)
        most = float(jnp.finfo(dtype).max)
        return jnp.clip(values, -most, most).astype(dtype)
    bits = lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), jnp.int8)
    return (bits >> (8 - jnp.iinfo(dtype).bits)).astype(dtype)
