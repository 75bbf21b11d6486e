"""The order of columns in which the kernel of W4A8 reads int4 codes: laid out once, at load.

A thread of wgmma multiplies four neighbouring columns of each 16, a word of bytes.  Two neighbours
share a byte of codes, so in the plain layout a thread gathers 2 + 2 bytes and permutes their codes.
Here a word of codes holds one thread's columns of 32: four neighbours in its low nibbles, and the
four 16 columns on in its high ones.  x stays as it is, and so do all sums of int32.

    interleaved(w)      w in that order, or w itself if the kernel does not take it
    in_order(w)         the inverse
    ..._tree            of every weight in a tree of parameters

The result is a QTensor with ``columns``, which every op understands.  Its note ``interleaved`` lets
the kernel read the codes with x in order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.device import lacking
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.many_rows.plan import CODES_K, WeightTile, int4_plan
from pallas_kernels.qtensor import QTensor, map_weights

_BLOCK = 32  # columns of one step of wgmma
_COLUMNS = np.arange(_BLOCK).reshape(2, 4, 4).transpose(1, 2, 0).reshape(-1)
_CODES, _WORD = 8, 4  # of a word; words of a block


def interleaved(w: QTensor, donate: bool = False) -> QTensor:
    """Return w with its columns in the order of the kernel; w itself if that does not take it.

    donate: the codes of w are used up, so that they are not held twice.
    """
    if not _has_kernel(w):
        return w
    columns = np.tile(_COLUMNS, w.shape[1] // _BLOCK)
    columns += np.arange(w.shape[1]) // _BLOCK * _BLOCK
    made = (_moved_donated if donate else _moved)(w.q, _interleave)
    return dataclasses.replace(w, q=made, columns=jnp.asarray(columns, jnp.int32), interleaved=True)


def in_order(w: QTensor) -> QTensor:
    """Return w as it was before ``interleaved``."""
    if not w.interleaved:
        return w
    return dataclasses.replace(w, q=_moved(w.q, _separate), columns=None, interleaved=False)


def interleaved_tree(params: Any, donate: bool = False) -> Any:
    """Return a tree of parameters in which each weight is ``interleaved``."""
    return _map(functools.partial(interleaved, donate=donate), params)


def in_order_tree(params: Any) -> Any:
    """Return a tree of parameters as it was before ``interleaved_tree``."""
    return _map(in_order, params)


def _has_kernel(w: QTensor) -> bool:
    """Whether the kernel of W4A8 reads w's codes, with any number of rows of x."""
    is_int4 = w.dtype == jnp.int4 and w.ndim == 2 and w.columns is None
    if not is_int4 or w.activations != "int8" or w.unit is None or lacking("wgmma"):
        return False
    x = jax.ShapeDtypeStruct((1, w.shape[1]), jnp.int8)
    call = dataclasses.replace(MatmulCall.of(x, w, jnp.bfloat16), quantized_x=True)
    plan = int4_plan(call)
    return isinstance(plan, WeightTile) and plan.block >= CODES_K


def _map(one: Callable[[QTensor], QTensor], params: Any) -> Any:
    return map_weights(lambda w: one(w) if isinstance(w, QTensor) else w, params, QTensor)


def _by_words(q: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """int4 codes ``[N, K]`` with their words moved; move: of uint32 ``[..., 4]``, one block's."""
    words = lax.bitcast_convert_type(q.reshape(len(q), -1, _WORD, _CODES), jnp.uint32)
    return lax.bitcast_convert_type(move(words), jnp.int4).reshape(q.shape)


_moved = jax.jit(_by_words, static_argnums=1)
_moved_donated = jax.jit(_by_words, static_argnums=1, donate_argnums=0)


def _interleave(words: jax.Array) -> jax.Array:
    first, second = words[..., :2], words[..., 2:]
    quads = [_spread(first >> at) | _spread(second >> at) << 4 for at in (0, 16)]
    return jnp.stack(quads, -1).reshape(words.shape)


def _separate(words: jax.Array) -> jax.Array:
    quads = words.reshape(*words.shape[:-1], 2, 2)
    halves = [_gathered(quads >> at) for at in (0, 4)]
    return jnp.concatenate([half[..., 0] | half[..., 1] << 16 for half in halves], -1)


def _spread(half: jax.Array) -> jax.Array:
    """The four codes of a word's low half in the low nibbles of its bytes."""
    half = half & 0xFFFF
    pairs = (half | half << 8) & 0x00FF00FF
    return (pairs | pairs << 4) & 0x0F0F0F0F


def _gathered(word: jax.Array) -> jax.Array:
    """The inverse of ``_spread``."""
    word = word & 0x0F0F0F0F
    pairs = (word | word >> 4) & 0x00FF00FF
    return (pairs | pairs >> 8) & 0xFFFF
