"""Sums that do not depend on how many rows a call has.

    with fixed_sums(True): ...        each row gets the same bits in calls of any number of rows

Two rules hold within.  Planners plan every call for ``block_rows()`` rows (``planned_rows``), so a
weight has one plan: one tile of K and one order of sums.  XLA may choose another algorithm for
another number of rows, so it computes products in blocks of that many rows (``by_blocks``).  The
choice is made while a function is traced, and jax keeps a trace for each value of the flag.
XLA's attention divides keys by their positions.  Samplers, norms and recurrences add a row's terms
in one order.

Left out: attention of a prompt's first piece and cuDNN's, whose shapes follow the call, and the
mass of top-p, whose rounding decides about one token at its edge.
``docs/concepts/same-bits.md`` says what was compared where.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import device_of

# Rows of a block, by whether the device is a CPU.  A GPU's products of 512 rows take most of its
# rate, and their kernels still read the weights at the memory's rate where there are few rows.
_ROWS = {True: 32, False: 512}
# Largest number of blocks that are no loop, as a CUDA graph has no loop that stacks results.
_UNROLLED = {True: 1, False: 4}
# Tokens.  Keys are then divided by the length of a row, and not by the cache that it lies in.
_CAPACITY = 2048

# Terms that ``ordered_sums`` adds at once: a vocabulary of 128,256 takes five such sums.
_TERMS = 16

barrier = lax.optimization_barrier
Tree = Any
Results = TypeVar("Results")
_fixed = jax.make_user_context(False)


def fixed_sums(on: bool) -> contextlib.AbstractContextManager[None]:
    """Within, the bits of a row do not depend on the number of rows, if ``on``."""
    return _fixed(on)


def has_fixed_sums() -> bool:
    """Whether this is traced within ``fixed_sums(True)``."""
    return bool(_fixed.value)


def block_rows() -> int:
    """Return the rows of a block on the device on which new arrays are placed."""
    return _ROWS[_is_on_cpu()]


def _is_on_cpu() -> bool:
    return device_of(()).platform == "cpu"


def planned_rows(rows: int) -> int:
    """Return the number of rows for which a kernel is planned in a call of ``rows`` rows."""
    return block_rows() if has_fixed_sums() else rows


def planned_capacity(tokens: int) -> int:
    """Return the length of a row's cache for which attention to ``tokens`` tokens is planned."""
    return _CAPACITY if has_fixed_sums() else tokens


def row_sums(x: jax.Array, axis: int = -1) -> jax.Array:
    """Return the sums over an axis, which is kept, in the order of ``ordered_sums`` if fixed.

    XLA divides a reduction among threads by the number of rows, on a CPU and on a GPU.
    """
    return ordered_sums(x, axis) if has_fixed_sums() else jnp.sum(x, axis=axis, keepdims=True)


def ordered_sums(x: jax.Array, axis: int = -1) -> jax.Array:
    """Return the sums over an axis, which is kept. XLA cannot change the order of these sums."""
    axis %= x.ndim
    x = _rounded(x)
    while (size := x.shape[axis]) > 1:
        terms = min(size, _TERMS)
        rest = -size % terms
        x = jnp.pad(x, [(0, rest if at == axis else 0) for at in range(x.ndim)])
        x = functools.reduce(operator.add, jnp.split(x, terms, axis))
    return x


def rounded(product: jax.Array) -> jax.Array:
    """Return a product that is a term of a sum, rounded before it is added if sums are fixed."""
    return _rounded(product) if has_fixed_sums() else product


def _rounded(product: jax.Array) -> jax.Array:
    """A fusion decides whether a product and a sum are rounded once; a maximum parts them."""
    if not jnp.issubdtype(product.dtype, jnp.floating):
        return product
    return jnp.maximum(product, jnp.finfo(product.dtype).min)


def by_blocks(
    product: Callable[..., Results],
    x: Tree,
    *weights: Tree | None,
    axes: int = 1,
    size: int | None = None,
) -> Results:
    """Return ``product(x, *weights)``, if the sums are fixed block by block, the last one padded.

    x: a pytree of arrays whose first ``axes`` axes are the rows, and of scalars, which all blocks
    read. With several axes a block's arrays keep them: all but the first have size 1. The result
    is a pytree of arrays with these axes. weights: pytrees that all blocks read. XLA makes one
    product of those with the same rows or the same weight, unless it is given here.
    size: rows of a block, ``block_rows()`` by default.
    """
    if not has_fixed_sums():
        return product(x, *weights)
    leaves, tree = jax.tree.flatten(x)
    lead = next(leaf.shape[:axes] for leaf in leaves if leaf.ndim)
    rows, size, ones = math.prod(lead), size or block_rows(), (1,) * (axes - 1)
    if not rows:
        return product(x, *weights)
    count = -(-rows // size)

    def blocks_of(leaf: jax.Array) -> jax.Array:
        inner = leaf.shape[axes:]
        padding = [(0, count * size - rows), *[(0, 0)] * len(inner)]
        return jnp.pad(leaf.reshape(rows, *inner), padding).reshape(count, size, *ones, *inner)

    def one(block: list[jax.Array], weights: tuple[Tree, ...]) -> Results:
        parts = iter(block)
        whole = tree.unflatten([next(parts) if leaf.ndim else leaf for leaf in leaves])
        return product(whole, *weights)

    blocks = [blocks_of(leaf) for leaf in leaves if leaf.ndim]

    def alone(block: list[jax.Array]) -> Results:
        # XLA chooses an algorithm for a product and all that it fuses: nothing else may be part.
        out = one(*barrier((block, weights)))
        # For CPUs it drops a barrier before it fuses, and may round a product and a sum once.
        return jax.tree.map(_rounded, out) if _is_on_cpu() else barrier(out)

    if count > _UNROLLED[_is_on_cpu()]:
        out = lax.map(alone, blocks)
    else:
        found = [alone([leaf[index] for leaf in blocks]) for index in range(count)]
        out = jax.tree.map(lambda *parts: jnp.stack(parts), *found)

    def rows_of(leaf: jax.Array) -> jax.Array:
        inner = leaf.shape[axes + 1 :]
        return leaf.reshape(count * size, *inner)[:rows].reshape(*lead, *inner)

    return jax.tree.map(rows_of, out)
