"""Sequence parallelism: the tokens of long rows, cut into pieces over the mesh's axes of rows.

    pieces = cut(tokens, n, width)          [B, T] -> [2n B, width], to be split over those axes
    tokens = joined(pieces, B, n, T)        undoes it
    inside the shard_map, of local pieces [2 B, ...]:
    every  = gathered(local, B, n)          [2n, B, ...], of all devices, in the order of the tokens
    local  = local_pieces(every, n)         undoes it

A row of T tokens is 2n pieces of equal width.  Device i has piece i and piece 2n - 1 - i, so that
causal attention costs every device the same.  On a device the first pieces of all rows come before
the second ones.  Weights are whole along "data", and heads may be split over "model" as well.  An
"expert" axis counts as part of "data".

Source: the order of pieces is that of striped and zigzag ring attention (arXiv 2311.09431).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from jaxllama.parallel.mesh import row_axes, row_axis

# Least number of tokens for each device: fewer leave the products as slow as those of all tokens.
LEAST_TOKENS = 512
# On GPUs a layer of several devices takes as long as the host needs to launch it, however few its
# tokens: 1.2 ms on four H200s (2,048 tokens of an 8B model in W8A8: 38.1 ms, and 29.1 on one).
# One H200 does so many multiplications a second in 8 bits.
LAYER_SECONDS = 1.2e-3
RATE = 5.2e14
_ALIGNED = 128  # tokens; a multiple suits the kernels


def sequence_shards(
    mesh: Mesh | AbstractMesh | None, batch: int, shares_pages: bool = False
) -> int:
    """Return the number of devices that may share the tokens of ``batch`` rows; 1 if none may.

    Rows that "data" divides are split over it, so their tokens are not.
    shares_pages: the rows' cache is in pages, so they are not split over "data".
    """
    if mesh is None or (row_axis(mesh, batch) is not None and not shares_pages):
        return 1
    return math.prod(mesh.shape[axis] for axis in row_axes(mesh))


def is_cut(
    mesh: Mesh | AbstractMesh,
    batch: int,
    n_new: int,
    shares_pages: bool = False,
    work: float | None = None,
) -> bool:
    """Return whether ``n_new`` tokens of each of ``batch`` rows are cut into pieces.

    work: multiplications of a token in a layer; None: any.
    """
    n = sequence_shards(mesh, batch, shares_pages)
    if n == 1 or n_new < n * LEAST_TOKENS:
        return False
    if work is None or jax.default_backend() == "cpu":
        return True
    return batch * n_new >= least_tokens(work)


def least_tokens(work: float) -> int:
    """Return from how many tokens on several GPUs are faster than one.

    work: multiplications of a token in a layer.
    """
    return math.ceil(LAYER_SECONDS * RATE / work)


def piece_width(n_new: int, n: int) -> int:
    """Return the tokens of a piece of rows of ``n_new`` tokens on ``n`` devices."""
    width = -(-n_new // (2 * n))
    return width if width < _ALIGNED else -(-width // _ALIGNED) * _ALIGNED


def cut(x: jax.Array, n: int, width: int) -> jax.Array:
    """``x[B, T, ...]`` as pieces ``[2n B, width, ...]``, those of a device side by side.

    A row is padded with zeros behind its last token.
    """
    batch, n_new = x.shape[:2]
    rest = ((0, 0), (0, 2 * n * width - n_new)) + ((0, 0),) * (x.ndim - 2)
    pieces = jnp.pad(x, rest).reshape(batch, 2 * n, width, *x.shape[2:])
    return jnp.moveaxis(pieces[:, _order(n)], 1, 0).reshape(-1, width, *x.shape[2:])


def joined(pieces: jax.Array, batch: int, n: int, n_new: int) -> jax.Array:
    """Return the rows ``[B, n_new, ...]`` of ``cut``'s pieces."""
    pieces = pieces.reshape(2 * n, batch, *pieces.shape[1:])[np.argsort(_order(n))]
    return jnp.moveaxis(pieces, 0, 1).reshape(batch, -1, *pieces.shape[3:])[:, :n_new]


def piece_indices(n: int) -> jax.Array:
    """Return int32 ``[2]``: the indices of this device's pieces among a row's ``2n``."""
    first = lax.axis_index(_axes()).astype(jnp.int32)
    return jnp.stack([first, 2 * n - 1 - first])


def gathered(local: jax.Array, batch: int, n: int) -> jax.Array:
    """Return ``[2n, B, ...]``, the arrays of all pieces in the order of the tokens.

    local: this device's, ``[2 B, ...]``.
    """
    halves = local.reshape(2, batch, *local.shape[1:])
    places = lax.all_gather(halves, _axes(), axis=0, tiled=True)
    return places[np.argsort(_order(n))]


def local_pieces(every: jax.Array, n: int) -> jax.Array:
    """Return this device's ``[2 B, ...]`` of ``every[2n, B, ...]``."""
    return every[piece_indices(n)].reshape(-1, *every.shape[2:])


def _axes() -> tuple[str, ...]:
    """Return the axes of rows of the shard_map that is traced."""
    return row_axes(jax.sharding.get_abstract_mesh())


def _order(n: int) -> np.ndarray:
    """Return the piece at each place: 0, 2n - 1, 1, 2n - 2, ..."""
    first = np.arange(n)
    return np.stack([first, 2 * n - 1 - first], axis=1).reshape(-1)
