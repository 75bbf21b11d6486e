"""LoRA adapters beside a model's weights (arXiv 2106.09685): ``y = w x + b_i (a_i x)``, i by row.

DoRA (2402.09353) multiplies that, without the bias, by the gain ``m_i / |w + b_i a_i|`` of each
output, where m_i are the adapter's magnitudes and norms are of rows.

    params = attach(table, params, adapters)   once: the adapters' factors into the tree
    params = reserve(table, params, targets, n, rank); params = put(table, params, index, adapter)
                                           the same in two steps, for adapters that come later
    params = for_rows(params, rows)            rows int32 [B]: each row's adapter from 1 on, 0: none

``for_rows`` makes every function of the tree that takes B rows (prefill, decode_step, the engine's)
one with adapters.  Without it the tree is the base model's and compiles to the same programs.

One mechanism serves any rows and any number of tokens.  One product multiplies x by the first
factors of all n adapters.  The results of adapters other than the row's own become zero.  A second
product multiplies the rest by the second factors.  So no factor is gathered, and a step reads each
factor once for all rows.  A row without an adapter gets exactly zero added.

Sums, including the base product's, are float32 before the one cast, except in training
(``TrainedLora``).  The values between the two
products are in the activations' dtype.  The input is the norm's output in floats, even if the
weight takes it quantized.

Beside a weight with a quantized input, adapters need no kernel of their own up to 64 rows on
Hopper.  The kernel that quantizes a row also multiplies it with the row's first factors
(``pallas_kernels.rows.low_rank``), and the product adds the second ones.

A step of m rows reads ``n r (S in + out)`` values for each product and computes 2 m times as much.
This cost grows with n; for hundreds of adapters, factors gathered by row would be cheaper.
``docs/lab/model.md`` has the numbers for an 8B model.  An offloaded model keeps the factors
on the device, whatever its policy for the weights.  Left out: meshes, which take merged adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import linalg
from jax.typing import DTypeLike

from jaxllama.errors import JaxLlamaError
from jaxllama.model.param import Param, Path
from jaxllama.typing import Params, ParamsDict, Tree
from pallas_kernels.cpu import CpuWeight, restore
from pallas_kernels.matmul.codes import low_rank_sums
from pallas_kernels.qtensor import QTensor, RowBlocks, dequantize
from pallas_kernels.rows.low_rank import inner_products, quantize_adapted

ROWS = "lora_rows"  # where a tree says which adapter each row of a call has


class Adapted(NamedTuple):
    """The input of a quantized product with adapters.

    codes: the quantized rows.  inner: products of the rows, before quantization, with the first
    factors of each row's adapter.
    """

    codes: QTensor
    inner: jax.Array


class Lora(NamedTuple):
    """The factors of n adapters of one product.

    a ``[n, S, r, in]``, and for each of the S tensors that are fused in the product b ``[out, n
    r]``.  r is the largest rank that some adapter needs.  rows int32 ``[B]``, or None: of no
    effect.  gain float32 ``[n, out]`` multiplies an adapter's whole result (DoRA); None: none has
    one.
    """

    a: jax.Array
    b: tuple[jax.Array, ...]
    rows: jax.Array | None = None
    gain: jax.Array | None = None

    def of(self, x: jax.Array) -> jax.Array:
        """int32 ``[B, T]``: the adapters of ``x[B, T, ...]``."""
        assert self.rows is not None
        return jnp.broadcast_to(self.rows[:, None], x.shape[:2])

    def product(self, x: jax.Array) -> jax.Array:
        """Return each row's low-rank product of ``x[B, T, in]``, float32 ``[B, T, out]``."""
        return low_rank_sums(inner_products(x, self.a, self.of(x)), self.b)

    def sums_in(self, dtype: DTypeLike) -> DTypeLike:
        """Return the dtype in which a result of ``dtype`` and the base's product are added."""
        return jnp.float32

    def scaled(self, y: jax.Array) -> jax.Array:
        """Return float32 ``y[B, T, out]``, the product without a bias, times its rows' gains."""
        if self.gain is None:
            return y
        of_none = jnp.ones_like(self.gain[:1])
        return y * jnp.concatenate([of_none, self.gain])[self.of(y)]

    def adapted(
        self,
        x: jax.Array,
        codes: str,
        *,
        norm: tuple[jax.Array, float] | None = None,
        residual: jax.Array | None = None,
        gated: bool = False,
    ) -> tuple[Adapted, *tuple[jax.Array, ...]]:
        """Return x in ``codes`` with its inner products, and the sum if there is a residual.

        norm, residual, gated: as ``quantize_adapted`` takes them.
        """
        q, inner, *total = quantize_adapted(
            x, self.a, self.of(x), codes, norm=norm, residual=residual, gated=gated
        )
        return Adapted(q, inner), *total

    def added(self, index: int) -> np.ndarray:
        """Return the matrix ``[out, in]`` that adapter ``index`` adds to the weight, in float32."""
        a, r = np.asarray(self.a[index], np.float32), self.a.shape[2]
        ours = [np.asarray(b[:, index * r : index * r + r], np.float32) for b in self.b]
        return np.concatenate([high @ low for high, low in zip(ours, a, strict=True)])


class TrainedLora(Lora):
    """The factors of the one adapter that a training step's rows have.

    a ``[1, S, r, in]``, b S matrices ``[out, r]``. Both products and their derivatives are in the
    activations' dtype, without float32 copies of rows as wide as the result: these took longer than
    the products.
    """

    def product(self, x: jax.Array) -> jax.Array:
        """``x[B, T, in]`` -> ``[B, T, out]`` in x's dtype."""
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        first = self.a[0].reshape(-1, x.shape[-1])
        inner = jnp.einsum("...k,rk->...r", x, first, precision=precision)
        second = linalg.block_diag(*self.b)  # one product for all S tensors
        return jnp.einsum("...r,nr->...n", inner, second, precision=precision)

    def sums_in(self, dtype: DTypeLike) -> DTypeLike:
        return dtype


def attach(
    table: Mapping[Path, Param],
    params: Params,
    adapters: Sequence[Mapping[str, tuple[np.ndarray, ...]]],
) -> ParamsDict:
    """The tree with a ``Lora`` beside each weight that some adapter changes.

    adapters: of each, by the name of a checkpoint's tensor, (a ``[r, in]``, b ``[out, r]``), or
    (a, b, magnitudes ``[out]``) for DoRA, as ``checkpoints.peft.read`` gives them.
    Raises JaxLlamaError for DoRA beside weights that are not on a device.
    """
    tree, dtype = dict(params), params["norm"]["weight"].dtype
    for (*rooms, _), param in table.items():
        names = [source.name for source in param.sources]
        if not any(name in adapter for adapter in adapters for name in names):
            continue
        rank = max(
            len(adapter[name][0]) for adapter in adapters for name in names if name in adapter
        )
        n, wide = len(adapters), param.shape[1]
        a = np.zeros((n, len(names), rank, wide), np.float32)
        b = [np.zeros((source.shape[0], n, rank), np.float32) for source in param.sources]
        for index, adapter in enumerate(adapters):
            for source, name in enumerate(names):
                if name in adapter:
                    low, high, *_ = adapter[name]
                    a[index, source, : len(low)] = low
                    b[source][:, index, : len(low)] = high
        room: ParamsDict = tree
        for name in rooms:
            room[name] = room = dict(room[name])
        second = tuple(jnp.asarray(adapter.reshape(-1, n * rank), dtype) for adapter in b)
        gain = _gains(room["weight"], names, adapters, a, b)
        room["lora"] = Lora(jnp.asarray(a, dtype), second, gain=gain)
    return tree


def _gains(
    weight: Tree,
    names: Sequence[str],
    adapters: Sequence[Mapping[str, tuple[np.ndarray, ...]]],
    a: np.ndarray,
    b: Sequence[np.ndarray],
) -> jax.Array | None:
    """Return the gains ``[n, out]`` of one product, or None if no adapter has magnitudes there."""
    found = [[list(adapter.get(name, ()))[2:] for name in names] for adapter in adapters]
    if not any(magnitude for adapter in found for magnitude in adapter):
        return None
    rows = []
    for index, magnitudes in enumerate(found):
        second = np.concatenate([adapter[:, index] for adapter in b])
        norms = row_norms(weight, a[index], second, [len(adapter) for adapter in b])
        sizes = np.cumsum([len(adapter) for adapter in b])[:-1]
        parts = [
            jnp.asarray(magnitude[0]) / norm if magnitude else jnp.ones_like(norm)
            for magnitude, norm in zip(magnitudes, jnp.split(norms, sizes), strict=True)
        ]
        rows.append(jnp.concatenate(parts))
    return jnp.stack(rows)


def row_norms(
    weight: Tree, a: np.ndarray | jax.Array, b: np.ndarray | jax.Array, sizes: Sequence[int]
) -> jax.Array:
    """Return the norms of the rows of ``weight + b a``, float32 ``[out]``.

    Parameters
    ----------
    weight : array, QTensor, RowBlocks or CpuWeight
        ``[out, in]``.
    a : array
        ``[S, r, in]``: of each of the tensors that are fused in the weight.
    b : array
        ``[out, r]``.
    sizes : sequence of int
        Rows of each tensor.
    """
    whole, begin, parts = floats(weight), 0, []
    for low, size in zip(a, sizes, strict=True):
        rows = slice(begin, begin + size)
        added = jnp.dot(b[rows], low, precision="highest", preferred_element_type=jnp.float32)
        parts.append(jnp.sqrt(jnp.sum(jnp.square(whole[rows] + added), axis=-1)))
        begin += size
    return jnp.concatenate(parts)


def floats(weight: Tree) -> jax.Array:
    """Return a weight ``[out, in]`` in float32.

    Raises JaxLlamaError if it is not on a device.
    """
    if isinstance(weight, CpuWeight):
        weight = restore(weight)
    if isinstance(weight, RowBlocks):
        return jnp.concatenate([floats(block) for block in weight.blocks])
    if isinstance(weight, QTensor):
        return dequantize(weight)
    if not isinstance(weight, (jax.Array, np.ndarray)):
        raise JaxLlamaError("DoRA needs its weights on the device: merge it, or offload none")
    return jnp.asarray(weight).astype(jnp.float32)


def reserve(
    table: Mapping[Path, Param], params: Params, targets: Collection[str], n: int, rank: int
) -> ParamsDict:
    """Return the tree with n more adapters of zeros, for ``put``.

    Parameters
    ----------
    table : mapping
        The model's parameters, with the names of a checkpoint's tensors.
    params : dict
        Its parameters, with or without adapters.
    targets : collection of str
        Checkpoint names of the weights that take adapters.
    n : int
        Number of adapters to add.
    rank : int
        Their largest rank.
    """
    tree, dtype = dict(params), params["norm"]["weight"].dtype
    n_before = max((len(lora.a) for lora in factors(params)), default=0)
    for (*rooms, _), param in table.items():
        sources, wide = param.sources, param.shape[1] if len(param.shape) == 2 else 0
        if not any(source.name in targets for source in sources):
            continue
        room: ParamsDict = tree
        for name in rooms:
            room[name] = room = dict(room[name])
        before, most = room.get("lora"), rank
        if isinstance(before, Lora):
            most = max(rank, before.a.shape[2])
        a = np.zeros((n_before + n, len(sources), most, wide), np.float32)
        b = [np.zeros((source.shape[0], n_before + n, most), np.float32) for source in sources]
        if isinstance(before, Lora):
            r = before.a.shape[2]
            a[:n_before, :, :r] = np.asarray(before.a, np.float32)
            for wider, high in zip(b, before.b, strict=True):
                wider[:, :n_before, :r] = np.asarray(high, np.float32).reshape(-1, n_before, r)
        second = tuple(jnp.asarray(factor.reshape(len(factor), -1), dtype) for factor in b)
        gain = before.gain if isinstance(before, Lora) else None
        if gain is not None:
            gain = jnp.concatenate([gain, jnp.ones((n, gain.shape[1]), gain.dtype)])
        room["lora"] = Lora(jnp.asarray(a, dtype), second, gain=gain)
    return tree


def put(
    table: Mapping[Path, Param],
    params: Params,
    index: int,
    adapter: Mapping[str, tuple[np.ndarray, ...]],
) -> ParamsDict:
    """Return the tree with another adapter at ``index``; the given tree stays as it is.

    Parameters
    ----------
    table : mapping
        The model's parameters, with the names of a checkpoint's tensors.
    params : dict
        Its parameters after ``reserve``.
    index : int
        Number of the adapter from 0 on.
    adapter : mapping
        Factors by checkpoint name, of at most the reserved rank, as for ``attach``; without
        magnitudes.
    """
    tree = dict(params)
    for (*rooms, _), param in table.items():
        room: Tree = tree
        for name in rooms:
            room = room.get(name, {})
        if not isinstance(room.get("lora"), Lora):
            continue
        lora: Lora = room["lora"]
        _, n_sources, rank, wide = lora.a.shape
        a = np.zeros((n_sources, rank, wide), np.float32)
        b = [np.zeros((source.shape[0], rank), np.float32) for source in param.sources]
        for number, source in enumerate(param.sources):
            if source.name in adapter:
                low, high, *_ = adapter[source.name]
                a[number, : len(low)] = low
                b[number][:, : len(low)] = high
        inner: ParamsDict = tree
        for name in rooms:
            inner[name] = inner = dict(inner[name])
        inner["lora"] = _with_adapter(lora, np.int32(index), a, tuple(b))
    return tree


@jax.jit
def _with_adapter(
    lora: Lora, index: jax.Array | np.int32, a: np.ndarray, b: tuple[np.ndarray, ...]
) -> Lora:
    rank = lora.a.shape[2]
    firsts = jax.lax.dynamic_update_index_in_dim(lora.a, a.astype(lora.a.dtype), index, 0)
    seconds = tuple(
        jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), index * rank, 1)
        for old, new in zip(lora.b, b, strict=True)
    )
    return lora._replace(a=firsts, b=seconds)


def for_rows(params: Params, rows: jax.Array | np.ndarray) -> ParamsDict:
    """See the module docstring."""
    return {**params, ROWS: rows}


def chosen(params: Params) -> Params:
    """Return the parameters with the tree's adapter rows set in each ``Lora``."""
    rows = params.get(ROWS)
    return params if rows is None else with_rows(dict(params), rows)


def with_rows(tree: ParamsDict, rows: jax.Array) -> ParamsDict:
    """The tree, or a part of one, with ``rows[B]`` in each ``Lora``."""

    def walk(node: Tree) -> Tree:
        if isinstance(node, Lora):
            return node._replace(rows=rows)
        return {name: walk(part) for name, part in node.items()} if isinstance(node, dict) else node

    return walk(tree)


def factors(params: Params) -> list[Lora]:
    """Every ``Lora`` of a tree."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Lora))
    return [leaf for leaf in leaves if isinstance(leaf, Lora)]
