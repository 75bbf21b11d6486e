"""LoRA adapters beside a model's weights (arXiv 2106.09685): ``y = w x + b_i (a_i x)``, i by row.

    params = attach(cfg, params, adapters)     once: the adapters' factors into the tree
    params = for_rows(params, rows)            rows int32 [B]: each row's adapter from 1 on, 0: none

``for_rows`` makes every function of the tree that takes B rows (prefill, decode_step, the engine's)
one with adapters.  Without it the tree is the base model's and compiles to the same programs.

One mechanism for any rows and any number of tokens: x meets the first factors of all n adapters in
one product, what is not a row's own becomes zero, and the rest meets their second factors in
another.  So no factor is gathered, each is read once a step however many rows use it, and a row
without an adapter gets exactly zero added.  Sums are float32, the base product's with them, before
the one cast; what passes between the two products is in the activations' dtype.  Their input is the
norm's output in floats, also where the weight wants it quantized.

A step of m rows reads ``n R (in + out)`` values for each product and computes 2 m times as much: it
grows with n, and for hundreds of adapters factors gathered by row would be cheaper.  What that is
for an 8B model: ``model/README.md``.  Left out: meshes and offloading (merged adapters go there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.model.params import param_table

ROWS = "lora_rows"  # where a tree says which adapter each row of a call has


class Lora(NamedTuple):
    """The factors of n adapters of one product.

    a ``[n, R, in]``, b ``[n, R, out]``.  Of tensors that are fused in the product each has its own
    ranks, and b is zero where they are another's rows: more to read, and fewer kernels.  R is the
    largest that some adapter needs.  rows int32 ``[B]``, or None: of no effect.
    """

    a: jax.Array
    b: jax.Array
    rows: jax.Array | None = None

    def product(self, x: jax.Array) -> jax.Array:
        """``x[B, T, in]`` -> float32 ``[B, T, out]``."""
        own = self.rows[:, None] == jnp.arange(1, self.a.shape[0] + 1, dtype=jnp.int32)  # [B, n]
        inner = _einsum("bti,nri->btnr", x, self.a)
        inner = jnp.where(own[:, None, :, None], inner, jnp.float32(0)).astype(x.dtype)
        return _einsum("btnr,nro->bto", inner, self.b)


def _einsum(form: str, x: jax.Array, factors: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(form, x, factors, precision=precision, preferred_element_type=jnp.float32)


def attach(
    cfg: ModelConfig,
    params: Mapping[str, Any],
    adapters: Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]],
) -> dict[str, Any]:
    """The tree with a ``Lora`` beside each weight that some adapter changes.

    adapters: of each, by the name of a checkpoint's tensor, (a ``[r, in]``, b ``[out, r]``), as
    ``checkpoints.peft.read`` gives them.
    """
    tree, dtype = dict(params), params["norm"]["weight"].dtype
    for (*rooms, _), param in param_table(cfg).items():
        names = [source.name for source in param.sources]
        if not any(name in adapter for adapter in adapters for name in names):
            continue
        ranks = [max(len(one[name][0]) if name in one else 0 for one in adapters) for name in names]
        columns = np.cumsum([0, *ranks]), np.cumsum([0, *(s.shape[0] for s in param.sources)])
        a = np.zeros((len(adapters), sum(ranks), param.shape[1]), np.float32)
        b = np.zeros((len(adapters), sum(ranks), param.shape[0]), np.float32)
        for index, adapter in enumerate(adapters):
            for name, first, row, end in zip(names, *columns, columns[1][1:], strict=False):
                if name in adapter:
                    low, high = adapter[name]
                    ours = slice(first, first + len(low))
                    a[index, ours], b[index, ours, row:end] = low, high.T
        room: dict[str, Any] = tree
        for name in rooms:
            room[name] = room = dict(room[name])
        room["lora"] = Lora(jnp.asarray(a, dtype), jnp.asarray(b, dtype))
    return tree


def for_rows(params: Mapping[str, Any], rows: jax.Array | np.ndarray) -> dict[str, Any]:
    """See the module docstring."""
    return {**params, ROWS: rows}


def chosen(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the products read: each ``Lora`` with the tree's rows."""
    rows = params.get(ROWS)

    def walk(node: Any) -> Any:
        if isinstance(node, Lora):
            return node._replace(rows=rows)
        return {name: walk(part) for name, part in node.items()} if isinstance(node, dict) else node

    return params if rows is None else walk(dict(params))


def factors(params: Mapping[str, Any]) -> list[Lora]:
    """Every ``Lora`` of a tree."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Lora))
    return [leaf for leaf in leaves if isinstance(leaf, Lora)]
