"""``fetch``'s kernel: every thread copies vectors of 16 bytes from pinned host memory.

    all blocks    pieces of 16 KB of all experts of the list, one after the other, round by round
    a thread      four loads of 16 bytes from the host under way, then four stores

Floor: the link.
"""

from __future__ import annotations

import jax

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.jax_internals import arith
from pallas_kernels.launch import launch
from pallas_kernels.ptx import Value

THREADS, LOADS = 256, 4
PIECE = THREADS * LOADS  # vectors of 16 bytes


def fetch(addresses: jax.Array, experts: jax.Array, out: jax.ShapeDtypeStruct) -> jax.Array:
    """As ``fetch.fetch``; out: the type of the result."""
    count = addresses.shape[0]

    def body(gmem, smem) -> None:
        del smem
        _copy(gmem, count, out.shape)

    (found,) = launch(
        body,
        {"addresses": addresses, "experts": experts},
        {"out": out},
        name="fetch_experts",
        grid=gpu().sms,
        warpgroups=THREADS // 128,
        registers=True,
    )
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
