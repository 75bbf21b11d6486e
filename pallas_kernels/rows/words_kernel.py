"""Records out of the rows of many arrays, and back: one launch for all arrays.

    record i = row places[i] of each array, one array's bytes behind the other's

    all blocks    ``parts`` of them share a record; each goes over all arrays
    a thread      ``LOADS`` loads of 16 bytes under way, then their stores

A short row has a vector for some threads of the record only. So each array begins at the block
behind the one before, and all blocks have as much to do.

Copies: every thread, through registers.  Waits: for the kernel before; no barrier, as threads share
nothing.  Writes: the thread that has loaded a vector.  A place past the end moves nothing.

Floor: device memory, which each byte passes twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.launch import in_place, launch
from pallas_kernels.ptx import Value

THREADS, LOADS, PARTS = 256, 4, 32


def gather(arrays: Sequence[jax.Array], places: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """As ``words.gather``; sizes: bytes of a row of each array, multiples of 16."""
    out = {"records": jax.ShapeDtypeStruct((len(places), sum(sizes) // 4), jnp.uint32)}
    return _launch({"arrays": arrays, "places": places}, out, sizes)[0]


def scatter(
    arrays: Sequence[jax.Array], places: jax.Array, records: jax.Array, sizes: Sequence[int]
) -> Sequence[jax.Array]:
    """As ``words.scatter``; sizes: as for ``gather``."""

    def kernel(refs: Sequence[jax.Array]) -> list[jax.Array]:
        return _launch({"arrays": refs, "places": places, "records": records}, {}, sizes)

    return in_place(kernel, arrays)[1]


def _launch(operands: Mapping[str, Any], out: Mapping[str, Any], sizes: Sequence[int]) -> list[Any]:
    n_rows, n_records = operands["arrays"][0].shape[0], len(operands["places"])
    is_loading = "records" in operands
    parts = min(-(-max(sizes) // (16 * THREADS)), PARTS)
    threads = parts * THREADS
    # (an array, the first of as many vectors of its row as there are threads)
    vectors = [(i, at) for i, size in enumerate(sizes) for at in range(0, size // 16, threads)]

    def body(gmem, smem) -> None:
        del smem
        p.await_kernel()
        block, thread = p.register("ctaid.x"), p.register("tid.x")
        record, part = block // p.ci(parts), block % p.ci(parts)
        (place,) = p.load_global(p.offset(p.address(gmem.places), record, 4), 1)
        packed = p.offset(p.address(gmem.records), record, sum(sizes))

        def vector(number: int, first: int) -> tuple[Value | None, Value, Value]:
            """(whether it is there, its address in the array, its address in the record)."""
            count, here, is_there = sizes[number] // 16, part, None
            if is_short := count < first + threads:
                # Anew for each array, as registers would not hold them all.
                here = (part + p.opaque(number)) % p.ci(parts)
            own = here * THREADS + thread + first
            if is_short:
                is_there, own = own < count, p.minimum(own, count - 1)
            row = p.offset(p.address(gmem.arrays[number]), place, sizes[number])
            begin = p.offset(packed, p.ci(sum(sizes[:number])))
            return is_there, p.offset(row, own, 16), p.offset(begin, own, 16)

        def move() -> None:
            for begin in range(0, len(vectors), LOADS):
                some = [vector(*which) for which in vectors[begin : begin + LOADS]]
                found = [p.load_global(ends[is_loading], 4) for _, *ends in some]
                for (is_there, *ends), words in zip(some, found, strict=True):
                    if is_there is None:
                        p.store_global(ends[not is_loading], words)
                    else:
                        p.store_four(ends[not is_loading], words, is_there)

        p.when(place < n_rows, move)

    return launch(
        body,
        operands,
        out,
        name="copy_records",
        grid=n_records * parts,
        warpgroups=THREADS // 128,
        registers=True,
    )
