"""A token's experts with one that all tokens pass, and the residual, in two kernels.

    out[t] = residual[t] + shared(x[t]) + sum_j weights[t, j] expert_j(x[t])
    expert(x) = down(activation(gate x) * up x)

The shared expert is stored apart, in the form of one expert, and is the last of each token's.  The
kernels are those of few pairs (``experts.kernel``) and of sums (``summed_kernel``), with its
addresses in place of an expert's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan, own_plan
from pallas_kernels.experts.gate import Gate
from pallas_kernels.experts.many_pairs.plan import inner_gate
from pallas_kernels.experts.op import grouped_matmul
from pallas_kernels.experts.plan import GroupedRowPlan
from pallas_kernels.experts.plan import plan as grouped_plan
from pallas_kernels.experts.summed_plan import GroupedSumPlan
from pallas_kernels.fixed_sums import planned_rows
from pallas_kernels.qtensor import FLOAT4, QTensor
from pallas_kernels.transform import Op, chosen


class WithShared(NamedTuple):
    """A weight of all experts ``[E, N, K]``, and the shared expert's ``[N, K]``."""

    experts: QTensor
    shared: QTensor


class SharedMixture(NamedTuple):
    """x bfloat16 ``[T, D]``, experts int32 and weights float ``[T, k]``, residual ``[T, D]``."""

    x: jax.Array
    gate_up: WithShared
    down: WithShared
    experts: jax.Array
    weights: jax.Array
    residual: jax.Array


@dataclasses.dataclass(frozen=True)
class MixturePlan:
    """rows: of gate and up.  sums: of down."""

    kernel: ClassVar[str] = "shared_mixture_mosaic"
    rows: GroupedRowPlan
    sums: GroupedSumPlan

    def __str__(self) -> str:
        row = self.rows.row
        return f"{row.warps} warps, {row.chains} chains; sums by {self.sums.warps} warps"

    def representative(self) -> MixturePlan:
        return MixturePlan(self.rows.representative(), self.sums.representative())


class _Static(NamedTuple):
    gated: Gate
    plan: Plan | None


def mixture_plan(x: SharedMixture, gated: Gate) -> MixturePlan | Reason:
    """Return how two kernels compute a mixture, or why they do not."""
    if inner_gate(gated) is None:
        return Reason(f"no kernel has the gate {gated!r}")
    for name in ("gate_up", "down"):
        many, one = getattr(x, name)
        if not (isinstance(many, QTensor) and isinstance(one, QTensor)):
            return Reason(f"{name} is not in codes")
        if many.activations is not None or (many.unit is not None and many.dtype != FLOAT4):
            return Reason(f"{name} has quantized activations, or scales in two levels")
        if _form(many, 1) != _form(one, 0):
            return Reason(f"{name}'s shared expert is not stored as an expert is")
    tokens, k = planned_rows(x.experts.shape[0]), x.experts.shape[1] + 1
    rows = grouped_plan(x.x, x.gate_up.experts, tokens * k, gated)
    inner: Any = jax.ShapeDtypeStruct((tokens, k, x.down.experts.shape[-1]), x.x.dtype)
    sums = grouped_plan(inner, x.down.experts, tokens * k, None, joined=k)
    if not (isinstance(rows, GroupedRowPlan) and isinstance(sums, GroupedSumPlan)):
        return Reason("another kernel of experts is faster")
    return MixturePlan(rows, sums)


def _form(w: QTensor, leading: int) -> object:
    """What a weight's leaves are behind its first axes."""
    leaves = tuple((leaf.shape[leading:], leaf.dtype) for leaf in jax.tree.leaves(w))
    return leaves, jax.tree.structure(w)


def fused_mixture(x: SharedMixture, gated: Gate) -> jax.Array | None:
    """Return ``[T, D]`` in the residual's dtype if two kernels compute all of it, else None."""
    has_kernel = own_plan(lambda: mixture_plan(x, gated), *x) is not None
    return shared_mixture(x, gated) if has_kernel else None


def shared_mixture(
    x: SharedMixture, gated: Gate, implementation: Implementation | None = None
) -> jax.Array:
    """Return ``[T, D]`` in the residual's dtype; gated: the experts' activation."""
    found = choose_plan("shared_mixture", implementation, lambda: mixture_plan(x, gated), *x)
    return _mixture(chosen(found, implementation), _Static(gated, found), x)


def _xla(static: _Static, x: SharedMixture) -> jax.Array:
    def output(
        gate_up: QTensor, down: QTensor, experts: jax.Array, weights: jax.Array
    ) -> jax.Array:
        product = functools.partial(grouped_matmul, experts=experts, implementation="xla")
        inner = product(x.x, gate_up, gated=static.gated)
        return product(inner, down, weights=weights, out_dtype=jnp.float32)

    gate_up, down = (jax.tree.map(lambda leaf: leaf[None], w.shared) for w in (x.gate_up, x.down))
    only = jnp.zeros((x.experts.shape[0], 1), jnp.int32)
    routed = output(x.gate_up.experts, x.down.experts, x.experts, x.weights)
    total = x.residual.astype(jnp.float32) + routed
    return (total + output(gate_up, down, only, jnp.ones_like(only, jnp.float32))).astype(
        x.residual.dtype
    )


def _kernel(static: _Static, x: SharedMixture) -> jax.Array:
    from pallas_kernels.experts.kernel import grouped_rows
    from pallas_kernels.experts.summed_kernel import grouped_sum

    plan, k = static.plan, x.experts.shape[1] + 1
    assert isinstance(plan, MixturePlan)
    inner = grouped_rows(
        x.x,
        x.gate_up.experts,
        x.experts.reshape(-1),
        shared=x.gate_up.shared,
        fan=k,
        gate=static.gated,
        plan=plan.rows,
        out_dtype=jnp.bfloat16,
    )
    return grouped_sum(
        inner.reshape(-1, k, inner.shape[-1]),
        x.down.experts,
        x.experts,
        x.weights,
        shared=x.down.shared,
        residual=x.residual,
        plan=plan.sums,
        out_dtype=x.residual.dtype,
    )


_mixture = Op("shared_mixture", _xla, _kernel)
