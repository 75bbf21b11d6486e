"""``mail``'s kernels.

    post       one block copies x and the experts to pinned host memory, then writes the turn
    collect    a thread of each block looks at the answered turn; then all copy the wanted rows

Copies: vectors of 16 bytes, from or to the host's memory through registers.  Waits: ``post`` for
its own threads, whose data are in the host's memory before the turn; ``collect`` for the CPU's
turn, minutes at most, as a process may be stopped.  Writes: the thread that has loaded a vector.

Floor: the link, and one look at the turn (about 1 us).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.cpu.mail import ANSWERED, EXPERTS, POSTED, MailLayout
from pallas_kernels.device import gpu
from pallas_kernels.launch import launch
from pallas_kernels.ptx import Value

POSTING, THREADS = 512, 256


def post(
    address: jax.Array, turn: jax.Array, x: jax.Array, experts: jax.Array, layout: MailLayout
) -> jax.Array:
    def body(gmem, smem) -> None:
        del smem
        p.await_kernel()
        start, thread = p.load_address(p.address(gmem.address)), p.register("tid.x")
        _write(gmem.experts, start, EXPERTS, layout.pairs, thread)
        _write(gmem.x, start, layout.x, layout.rows * layout.width, thread)
        p.ptx("fence.acq_rel.sys;")
        p.barrier()

        def tell() -> None:
            (now,) = p.load_global(p.address(gmem.turn), 1)
            p.ptx("fence.acq_rel.sys;")
            p.ptx(f"st.release.sys.global.b32 [$0+{POSTED}], $1;", start, now)
            p.store_global(p.address(gmem.out), [now])

        p.when(p.equal(thread, p.ci(0)), tell)

    return launch(
        body,
        {"address": address, "turn": turn, "x": x, "experts": experts},
        {"out": jax.ShapeDtypeStruct((1,), jnp.int32)},
        name="post_tokens",
        grid=1,
        warpgroups=POSTING // 128,
        registers=True,
    )[0]


def _write(ref: Value, start: Value, at: int, words: int, thread: Value) -> None:
    """Copy an array's words to the host; all threads of the block."""
    source, each = p.address(ref), 4 if words % 4 == 0 else 1

    def one(i: Value, _: list[Value]) -> list[Value]:
        found = p.load_global(p.offset(source, i, 4 * each), each)
        p.store_global(p.offset(start, i, 4 * each), found, at)
        return []

    p.loop(thread, words // each, POSTING, [], one)


def collect(
    address: jax.Array, posted: jax.Array, wanted: jax.Array, layout: MailLayout
) -> jax.Array:
    each = layout.width // 4  # vectors of a row
    count = layout.pairs * each
    blocks = min(gpu().sms, -(-count // THREADS))

    def body(gmem, smem) -> None:
        del smem
        p.await_kernel()
        start, thread = p.load_address(p.address(gmem.address)), p.register("tid.x")
        rows, out = p.address(gmem.wanted), p.address(gmem.out)

        def wait() -> None:
            (now,) = p.load_global(p.address(gmem.posted), 1)
            p.await_turn(start, now, ANSWERED)

        p.when(p.equal(thread, p.ci(0)), wait)
        p.barrier()

        def one(i: Value, _: list[Value]) -> list[Value]:
            (is_wanted,) = p.load_global(p.offset(rows, i // p.ci(each), 4), 1)

            def copy() -> None:
                words = p.load_posted(p.offset(start, i, 16), layout.y)
                p.store_global(p.offset(out, i, 16), words)

            p.when(p.below(p.ci(0), is_wanted), copy)
            return []

        first = p.register("ctaid.x") * THREADS + thread
        p.loop(first, count, blocks * THREADS, [], one)

    return launch(
        body,
        {"address": address, "posted": posted, "wanted": wanted},
        {"out": jax.ShapeDtypeStruct((layout.pairs, layout.width), jnp.float32)},
        name="collect_answer",
        grid=blocks,
        warpgroups=THREADS // 128,
        registers=True,
    )[0]
