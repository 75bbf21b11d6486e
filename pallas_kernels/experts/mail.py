"""A device's side of ``cpu.mail``: tokens for the CPU's experts, and their results.

    posted = post(address, turn[1], x, experts, layout)      int32 [1], the turn
    y = collect(address, posted, wanted, layout)             float32 [pairs, width]

``post`` writes into pinned host memory, which a thread of the CPU watches. ``collect`` waits for
the CPU's turn and reads its answer. So a program has its experts computed by the CPU in the middle,
and no host waits for it. Whoever runs such a program begins the CPU's part of the same turn too.
"""

from __future__ import annotations

import ctypes
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.cpu.mail import ANSWERED, EXPERTS, POSTED, MailLayout


def post(
    address: jax.Array, turn: jax.Array, x: jax.Array, experts: jax.Array, layout: MailLayout
) -> jax.Array:
    """Write x ``[rows, width]`` and experts int32 ``[pairs]``, then the turn.

    address: int32 ``[2]`` of the mail, low word before high.  turn: int32 ``[1]``, above the last.
    """
    x = x.astype(jnp.float32)
    if dispatch.hopper_reason() is None:
        from pallas_kernels.experts import mail_kernel

        return mail_kernel.post(address, turn, x, experts, layout)
    return jax.pure_callback(_post, turn, address, turn, x, experts, layout.x)


def collect(
    address: jax.Array, posted: jax.Array, wanted: jax.Array, layout: MailLayout
) -> jax.Array:
    """Wait for the answer and return it; rows that are not wanted hold anything.

    posted: of ``post``.  wanted: int32 ``[pairs]``, 0 for a row that is not.
    """
    if dispatch.hopper_reason() is None:
        from pallas_kernels.experts import mail_kernel

        return mail_kernel.collect(address, posted, wanted, layout)
    like = jax.ShapeDtypeStruct((layout.pairs, layout.width), jnp.float32)
    return jax.pure_callback(_collect, like, address, posted, *layout)


def turn_at(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def words_of(number: int) -> np.ndarray:
    """Return an address or a turn as int32 ``[2]``, low word before high."""
    return np.array([number], np.int64).view(np.int32)


def _start(address: np.ndarray) -> int:
    return int(np.ascontiguousarray(address).view(np.int64)[0])


def _post(
    address: np.ndarray, turn: np.ndarray, x: np.ndarray, experts: np.ndarray, offset: int
) -> np.ndarray:
    start, turn = _start(address), np.asarray(turn)
    for array, at in ((experts, EXPERTS), (x, int(offset))):
        array = np.ascontiguousarray(array)
        ctypes.memmove(start + at, array.ctypes.data, array.nbytes)
    turn_at(start + POSTED).value = int(turn[0])
    return turn


def _collect(address: np.ndarray, posted: np.ndarray, *sizes: int) -> np.ndarray:
    layout = MailLayout(*(int(size) for size in sizes))
    start, turn = _start(address), int(np.asarray(posted)[0])
    while turn_at(start + ANSWERED).value < turn:
        time.sleep(1e-4)
    y = np.empty((layout.pairs, layout.width), np.float32)
    ctypes.memmove(y.ctypes.data, start + layout.y, y.nbytes)
    return y
