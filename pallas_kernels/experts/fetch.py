"""Experts' bytes from pinned host memory, chosen on the device: no host waits for the choice.

    addresses_of(pieces) -> int32 [E, 2]                   of pinned arrays, 0 where there is none
    fetch(addresses, experts[G], nbytes) -> uint8 [G, nbytes]

A GPU reads pinned host memory by the host's own addresses (CUDA's unified addressing). So a kernel
copies the experts that a router has just chosen, in the program that computes with them, at the
link's rate. A transfer begun by the host waits until the host has read the choice.

    all blocks    pieces of 16 KB of all experts of the list, one after the other, round by round
    a thread      four loads of 16 bytes from the host under way, then four stores

Floor: the link. The caller keeps the pinned arrays while programs that read them run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import hopper_reason
from pallas_kernels.jax_internals import arith
from pallas_kernels.launch import launch
from pallas_kernels.ptx import Value

THREADS, LOADS = 256, 4
PIECE = THREADS * LOADS  # vectors of 16 bytes


def addresses_of(pieces: Mapping[int, jax.Array], n_experts: int) -> np.ndarray:
    """Return the addresses of pinned arrays as words, low before high: int32 ``[E, 2]``."""
    found = np.zeros(n_experts, np.uint64)
    for expert, piece in pieces.items():
        found[expert] = piece.unsafe_buffer_pointer()
    return found.view(np.int32).reshape(n_experts, 2)


def fetch(addresses: jax.Array, experts: jax.Array, nbytes: int) -> jax.Array:
    """Return the bytes of ``experts [G]``, ``uint8 [G, nbytes]``.

    addresses: int32 ``[E, 2]``, as ``addresses_of`` returns them. nbytes: a multiple of 16.
    An index below 0 or behind the last expert reads nothing: its row may hold anything.
    Where the kernel does not run, the host reads its memory in a callback.
    """
    like = jax.ShapeDtypeStruct((experts.shape[0], nbytes), jnp.uint8)
    if hopper_reason() is not None:
        return jax.pure_callback(_copied, like, addresses, experts, nbytes)
    count = addresses.shape[0]

    def body(gmem, smem) -> None:
        del smem
        _copy(gmem, count, like.shape)

    (found,) = launch(
        body,
        {"addresses": addresses, "experts": experts},
        {"out": like},
        name="fetch_experts",
        grid=gpu().sms,
        warpgroups=THREADS // 128,
        registers=True,
    )
    return found


def _copied(addresses: np.ndarray, experts: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    found = np.zeros((len(experts), int(nbytes)), np.uint8)
    own = np.ascontiguousarray(addresses).view(np.uint64).reshape(-1)
    for row, expert in zip(found, np.asarray(experts), strict=True):
        if 0 <= expert < len(own):
            ctypes.memmove(row.ctypes.data, int(own[expert]), row.nbytes)
    return found


def _copy(gmem, count: int, shape: tuple[int, int]) -> None:
    """The program of one thread."""
    experts, nbytes = shape
    vectors = nbytes // 16
    pieces = -(-vectors // PIECE)
    thread, block = p.register("tid.x"), p.register("ctaid.x")
    table, chosen, out = (p.address(x) for x in (gmem.addresses, gmem.experts, gmem.out))
    p.await_kernel()

    def piece(index: Value, _: list[Value]) -> list[Value]:
        slot, own = arith.divui(index, p.ci(pieces)), arith.remui(index, p.ci(pieces))
        (expert,) = p.load_global(p.offset(chosen, slot, 4), 1)

        def copy() -> None:
            source = p.load_address(p.offset(table, expert, 8))
            to = p.offset(out, slot, nbytes)
            first = p.add(p.mul(own, PIECE), thread)
            # The last piece's threads that lie past the end copy the last vector.
            places = [p.minimum(p.add(first, THREADS * i), vectors - 1) for i in range(LOADS)]
            words = [p.load_global(p.offset(source, at, 16), 4, cache=p.READ_ONLY) for at in places]
            for at, own_words in zip(places, words, strict=True):
                p.store_global(p.offset(to, at, 16), own_words)

        p.when(p.less(expert, count), copy)
        return []

    p.loop(block, p.ci(experts * pieces), p.ci(gpu().sms), [], piece)
