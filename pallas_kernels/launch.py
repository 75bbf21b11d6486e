"""The one way in which a Mosaic GPU kernel is launched.

A launch has three tables: operands, results and scratch memory.  Each maps a name to an array or a
type of memory.  The kernel's body gets references under the same names, grouped by place:

    def body(gmem, smem, barrier): ...      gmem.q   gmem.out   smem.k   barrier.full

so every name is written once, where its type is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

Arrays = TypeVar("Arrays")  # a pytree of arrays, or of references to them
R = TypeVar("R")
REF = plgpu.RefType()  # a reference, as an argument of ``inline``


class Views(dict[str, object]):
    """One piece of shared memory under several names, each with a type of its own.

    ``Views(rows=plgpu.SMEM(...), tiles=plgpu.SMEM(...))`` in a scratch table gives a body
    ``smem.x.rows`` and ``smem.x.tiles``.
    """


class _Table:
    """The leaves of a table in order, and the way back from references to names."""

    def __init__(
        self, named: Mapping[str, object], is_leaf: Callable[[object], bool] | None = None
    ):
        self.named = named
        self.leaves, self.tree = jax.tree.flatten(list(named.values()), is_leaf=is_leaf)

    def take(self, refs: Iterator[object]) -> dict[str, object]:
        """Return the next references by name."""
        values = self.tree.unflatten(itertools.islice(refs, len(self.leaves)))
        return dict(zip(self.named, values, strict=True))


def launch(
    body: Callable[..., Any],
    operands: Mapping[str, object],
    out: Mapping[str, object],
    *,
    name: str,
    grid: int | Mapping[str, int],
    cluster: int | Mapping[str, int] = 1,
    warpgroups: int | None = None,
    scratch: Mapping[str, object] | None = None,
    registers: bool = False,
    **compiler: Any,
) -> list[jax.Array]:
    """Launch a kernel.

    Parameters
    ----------
    body : callable
        ``body(gmem, smem, barrier)``; with ``registers``, ``body(gmem, smem)``.  It emits the
        code, or returns an object whose ``run()`` does: it may be the class of a program.  gmem
        holds the references to operands and results, smem and barrier those to scratch.  Each is a
        namespace with the names of the tables.
    operands : mapping
        Arrays, references to arrays, or pytrees of them.  A name of None stays None in the body.
    out : mapping
        Types of the results, pytrees of them, or None.
    name : str
        The kernel's name in profiles.
    grid : int or mapping
        The number of blocks, with a cluster the number of clusters: axis "block", or by axis.
    cluster : int or mapping
        Blocks of a cluster: axis "rank", which 1 block does not have, or by axis.
    warpgroups : int, optional
        Warpgroups of a block: axis "warpgroup".  None is one warpgroup, which has no axis.
    scratch : mapping, optional
        Shared memory and barriers: types that ``plgpu.kernel`` takes, a number of float32,
        ``Views``, or a list of these.  None allocates nothing and stays None in the body.
    registers : bool
        The body is written in ``pallas_kernels.ptx`` alone.  Its references are memrefs, and its
        barriers are words of shared memory.
    **compiler
        Further fields of ``plgpu.CompilerParams``.

    Returns
    -------
    list
        The results, in the order of ``out``.
    """
    inputs, results = _Table(operands), _Table(out)
    memory = _Table(scratch or {}, is_leaf=lambda x: x is not None and not isinstance(x, list))

    def named(*refs: object) -> None:
        rest = iter(refs)
        gmem = SimpleNamespace(**inputs.take(rest), **results.take(rest))
        held = {key: _by_view(memory.named[key], x) for key, x in memory.take(rest).items()}
        places = {"smem": held}
        if not registers:
            barrier = {key: held.pop(key) for key, x in memory.named.items() if _is_barrier(x)}
            places["barrier"] = barrier
        program = body(gmem, *(SimpleNamespace(**place) for place in places.values()))
        if program is not None:
            program.run()

    def kernel(*refs: object) -> None:
        inline(*[REF] * len(refs))(named)(*refs)

    grid = grid if isinstance(grid, Mapping) else {"block": grid}
    if not isinstance(cluster, Mapping):
        cluster = {"rank": cluster} if cluster > 1 else {}
    found = plgpu.kernel(
        kernel if registers else named,
        out_type=tuple(results.leaves),
        kernel_name=name,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        num_threads=warpgroups,
        thread_name=None if warpgroups is None else "warpgroup",
        scratch_types=[_memory(x) for x in memory.leaves],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            **compiler,
        ),
    )(*inputs.leaves)
    return results.tree.unflatten(found)


def inline(*arg_types: Any, out: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: a function of the kernel's own values becomes a call from Pallas.

    The function runs while the kernel is traced.  It emits its code at the place of the call.

    arg_types: of the arguments, ``REF`` for a reference, or layouts.  out: types of the results.
    """

    def decorate(emit: Callable[..., Any]) -> Callable[..., Any]:
        return plgpu.inline_mgpu(arg_types=arg_types, return_type=out)(
            lambda _, *values: emit(*values)
        )

    return decorate


def _memory(kind: Any) -> Any:
    """Return the type that ``plgpu.kernel`` takes for an entry of a scratch table."""
    if isinstance(kind, int):
        return plgpu.SMEM((kind,), jnp.float32)
    return plgpu.RefUnion(*kind.values()) if isinstance(kind, Views) else kind


def _is_barrier(kind: object) -> bool:
    """Return whether an entry of a scratch table is a barrier, or a list of them."""
    first = kind[0] if isinstance(kind, list) and kind else kind
    return isinstance(first, plgpu.Barrier | plgpu.ClusterBarrier)


def _by_view(kind: object, ref: Any) -> object:
    """Return the references of ``Views`` by name, and any other reference as it is."""
    return SimpleNamespace(**dict(zip(kind, ref, strict=True))) if isinstance(kind, Views) else ref


def in_place(kernel: Callable[[Arrays], R], arrays: Arrays) -> tuple[R, Arrays]:
    """Update arrays in place.

    Parameters
    ----------
    kernel : callable
        Takes references to ``arrays``, in the same pytree, and returns results.
    arrays : pytree
        The arrays to be updated; a jitted caller who donates them pays for no copy.

    Returns
    -------
    tuple
        (the results of ``kernel``, the arrays after it).
    """
    refs = jax.tree.map(jax.new_ref, arrays)
    out = kernel(refs)
    return out, jax.tree.map(jax.freeze, refs)
