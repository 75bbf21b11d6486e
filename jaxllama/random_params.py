"""random_params: weights of a model's shape, made and quantized on the device, one at a time.

    random_params(cfg, key, dtype, scheme) -> params

The values are ``init_params``'s in kind (normal, 0.02; norms 1; biases 0).  A weight is drawn in
``dtype``, quantized as ``quantize_params`` would, and its floats are gone before the next one is
drawn, so that a model whose floats do not fit beside its words can still be measured: a 70B shape
in w4a16 on one GPU.  Weights of one shape share one program.  The tree is that of ``init_params``,
or of ``quantize_params`` of it.

Left out: shardings (a mesh's devices draw their own parts elsewhere), and any claim about what such
a model says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllama.checkpoints.tensor_map import Path, tensor_table
from jaxllama.config import ModelConfig
from jaxllama.generation import Params
from jaxllama.quantization.scheme import quantize_params


def random_params(
    cfg: ModelConfig,
    key: jax.Array,
    dtype: DTypeLike = jnp.float32,
    scheme: str | None = None,
    place: Callable[[Path, Any], Any] | None = None,
) -> Params:
    """See the module docstring.  ``place(path, leaf)`` gives what goes into the tree.  Raises
    JaxLlamaError for an unknown scheme, or naming a weight that no group size divides."""
    params: Params = {}
    for index, (path, spec) in enumerate(tensor_table(cfg).items()):
        mean, std = _distribution(path, spec.shape)
        own = jax.random.fold_in(key, index)
        value = _draw(own, spec.shape, jnp.dtype(dtype).name, mean, std)
        value = value if scheme is None else _quantized(path, value, scheme)
        _put(params, path, value if place is None else place(path, value))
    return params


def param_shapes(cfg: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The parameter tree with a ``jax.ShapeDtypeStruct`` for every leaf."""
    shapes: Params = {}
    for path, spec in tensor_table(cfg).items():
        _put(shapes, path, jax.ShapeDtypeStruct(spec.shape, jnp.dtype(dtype)))
    return shapes


def _put(tree: Params, path: Path, value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _distribution(path: Path, shape: tuple[int, ...]) -> tuple[float, float]:
    """(mean, standard deviation) of the parameter at a path."""
    if path[-1] == "bias":
        return 0.0, 0.0
    if path[-2].endswith("norm"):
        return 1.0, 0.0
    return 0.0, shape[-1] ** -0.5 if path[-2].endswith("_conv") else 0.02


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: str, mean: float, std: float) -> jax.Array:
    if std == 0:
        return jnp.full(shape, mean, dtype)
    return (mean + std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _quantized(path: Path, value: jax.Array, scheme: str) -> Any:
    """One leaf through ``quantize_params``, which decides by its path."""
    tree: Params = {}
    _put(tree, path, value)
    tree = quantize_params(tree, scheme)
    return functools.reduce(lambda room, name: room[name], path, tree)
