"""A decode step's products of one normed x with several weights, in one kernel.

    y_i[..., N_i] = rms_norm(x) w_i^T

The kernels of few rows (``matmul.few_rows``) for weights that lie in different places.
GLA's projections then cost one launch, with neither a second copy of the codes nor another
parameter tree.  Neighbours that are stored alike come out side by side in one array.  Small weights
of another form have blocks of their own. An example is a low-rank projection that stays in floats
beside quantized ones.

Leaves out: bias, residual and SwiGLU; more than 16 rows; several large weights of different forms.
There is no XLA form: where ``find_plan`` has none, callers take one product after the other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Plan, Reason, choose_plan, is_empty, own_plan
from pallas_kernels.matmul import choice
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows.blocks_plan import BlocksPlan, divide_blocks
from pallas_kernels.matmul.few_rows.plan import RowPlan
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.operands import Columns
from pallas_kernels.qtensor import QTensor, RowBlocks, stacked
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.transform import Op, OpChoice

Weight = jax.Array | QTensor
_Static = tuple[float, jnp.dtype, Plan | None]  # eps, the result's dtype, the plan
_Groups = tuple[tuple[Weight, ...], ...]
SMALL = 64  # rows of a weight that has blocks of its own, one to 16 of them


def blocks_matmul(
    x: jax.Array,
    weights: Sequence[Weight],
    *,
    norm: tuple[jax.Array, float],
    out_dtype: DTypeLike | None = None,
    plan: BlocksPlan | None = None,
) -> list[Columns]:
    """``x[..., K]`` and ``w_i[N_i, K]`` -> each ``[..., N_i]``, in x's dtype by default.

    norm: (weight ``[K]``, eps) of the RMSNorm of x that comes first.  plan: ``own_blocks``'.
    Raises NotImplementedError, naming the fact, for what ``find_plan`` has no plan for.
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    find = functools.partial(find_plan, x, weights, norm=norm, out_dtype=out_dtype)
    find = find if plan is None else lambda: plan
    made = choose_plan("blocks_matmul", "mosaic", find, x, list(weights), has_xla=False)
    (gamma, eps), rows, groups = norm, x.reshape(-1, x.shape[-1]), alike(weights)
    outs = _blocks(OpChoice("mosaic"), (float(eps), out_dtype, made), rows, groups, gamma)
    columns = []
    for group, out in zip(groups, outs, strict=True):
        out, start = out.reshape(*x.shape[:-1], out.shape[-1]), 0
        for w in group:
            columns.append(Columns(out, start, w.shape[0]))
            start += w.shape[0]
    return columns


def _kernel(static: _Static, rows: jax.Array, groups: _Groups, gamma: jax.Array) -> list[jax.Array]:
    from pallas_kernels.matmul.few_rows import blocks as kernel

    eps, out_dtype, plan = static
    return kernel.matmul(rows, groups, gamma, eps=eps, out_dtype=out_dtype, plan=plan)


def _one_by_one(
    static: _Static, rows: jax.Array, groups: _Groups, gamma: jax.Array
) -> list[jax.Array]:
    eps, out_dtype, _ = static
    y = rms_norm(rows, gamma, eps, implementation="xla")
    one = functools.partial(quantized_matmul, y, out_dtype=out_dtype, implementation="xla")
    return [jnp.concatenate([one(w) for w in group], axis=-1) for group in groups]


_blocks = Op("blocks_matmul", _one_by_one, _kernel)


def own_blocks(
    x: jax.Array, weights: Sequence[Weight | RowBlocks], *, norm: tuple[jax.Array, float]
) -> BlocksPlan | None:
    """The plan of ``blocks_matmul`` of these, or None where it has none here."""
    whole = [w for w in weights if not isinstance(w, RowBlocks)]
    if len(whole) < len(weights):
        return None
    return own_plan(lambda: find_plan(x, whole, norm=norm), x, whole)


def find_plan(
    x: jax.Array,
    weights: Sequence[Weight],
    *,
    norm: tuple[jax.Array, float],
    out_dtype: DTypeLike | None = None,
) -> BlocksPlan | Reason:
    """How one kernel divides them, or why there is none or it is not the faster way."""
    if is_empty(x, list(weights)):
        return Reason("an operand of size 0")
    if any(w.shape[0] % 16 for w in weights):
        rows = ", ".join(str(w.shape[0]) for w in weights)
        return Reason(f"rows {rows}, not all multiples of 16")
    (gamma, eps), groups = norm, alike(weights)
    out = x.dtype if out_dtype is None else out_dtype
    calls = [MatmulCall.of(x, stacked(group), out, gamma=gamma, eps=float(eps)) for group in groups]
    chosen = [choice.plan(call) for call in calls]
    for call, found in zip(calls, chosen, strict=True):
        # A small weight shares the launch of a large one, so its own time does not decide.
        if isinstance(found, Reason) and (found.plan is None or call.n > SMALL):
            return Reason(found.text)
    if sum(call.n > SMALL for call in calls) > 1:
        return Reason("several large weights that are stored differently")
    largest = chosen[max(range(len(calls)), key=lambda i: calls[i].n)]
    rows = [tuple(w.shape[0] for w in group) for group in groups]
    return divide_blocks(calls, rows, by_rows=isinstance(largest, RowPlan))


def alike(weights: Sequence[Weight]) -> tuple[tuple[Weight, ...], ...]:
    """Neighbours whose rows could be one array's, together."""
    return tuple(tuple(group) for _, group in itertools.groupby(weights, key=_form))


def _form(w: Weight) -> tuple[object, ...]:
    leaves = tuple((leaf.shape[1:], jnp.dtype(leaf.dtype).name) for leaf in jax.tree.leaves(w))
    return leaves, jax.tree.structure(w)
