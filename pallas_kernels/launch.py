"""The one way in which a Mosaic GPU kernel is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def launch(
    body: Callable[..., None],
    operands: Sequence[Any],
    out: Any,
    *,
    name: str,
    grid: int | Mapping[str, int],
    cluster: int = 1,
    warpgroups: int | None = None,
    scratch: Sequence[Any] = (),
    registers: bool = False,
) -> Any:
    """Results of a kernel, of the type or types ``out``; None among the operands is left out.

    body: called with references to operands, results and scratch, in this order; registers: it is
        written in ``pallas_kernels.ptx`` alone, its references are memrefs.
    grid: blocks (where ``cluster`` of them are a cluster: clusters), axis "block", or by axis.
        The axes "rank" and "warpgroup" number blocks of a cluster and warpgroups of a block.
    warpgroups: of a block; None is one, which has no axis.
    scratch: shared memory: a number of float32, or what ``plgpu.kernel`` takes.
    """

    def emit(ctx: Any, *refs: Any) -> None:
        del ctx
        body(*refs)

    def kernel(*refs: Any) -> None:
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(emit)(*refs)

    grid = grid if isinstance(grid, Mapping) else {"block": grid}
    return plgpu.kernel(
        kernel if registers else body,
        out_type=out,
        kernel_name=name,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=("rank",) if cluster > 1 else (),
        num_threads=warpgroups,
        thread_name=None if warpgroups is None else "warpgroup",
        scratch_types=[plgpu.SMEM((x,), jnp.float32) if isinstance(x, int) else x for x in scratch],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*[x for x in operands if x is not None])


def in_place(kernel: Callable[[Any], Any], arrays: Any) -> tuple[Any, Any]:
    """(what ``kernel`` of references to a pytree of arrays gives, the arrays after it)."""
    refs = jax.tree.map(jax.new_ref, arrays)
    out = kernel(refs)
    return out, jax.tree.map(jax.freeze, refs)
