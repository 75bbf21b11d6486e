"""The end of a greedy decode step: the likeliest token, its log-probability, and the loop's state.

    token   = the first largest logit              logprob = log_softmax(logits)[token]

A NaN counts as -inf and +inf as the largest float; a row without any finite logit, or without room
in its cache, gives token 0 and NaN.  In one kernel, in place, where XLA has five small ones.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Implementation, Reason, choose_plan, own_plan
from pallas_kernels.operands import check, half_reason
from pallas_kernels.transform import Op, chosen

_OPERANDS = {
    "logits": "float [B, V+]",
    "rows": "int32 [5, B]",
    "written": "int32 [2, B, N+]",
    "stop_ids": "int32 [stops]",
}
_STOPS = 32  # stop tokens that the kernel looks at: one a lane


@dataclasses.dataclass(frozen=True)
class GreedyPlan:
    """One cluster of blocks: there is nothing to choose."""

    kernel: ClassVar[str] = "append_greedy"

    def __str__(self) -> str:
        return ""


_Static = tuple[int | None, GreedyPlan | None]


def append_greedy(
    logits: jax.Array,
    rows: jax.Array,
    written: jax.Array,
    stop_ids: jax.Array,
    *,
    capacity: int | None,
    implementation: Implementation | None = None,
    planned: GreedyPlan | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(rows, written) behind a step that took each row's newest token.

    logits ``[B, V]``, of the token that follows.
    rows int32 ``[5, B]``: a row's newest token, whether it is done, how many it has, what its cache
        held before the step, and the step.  A row that is done stands still, with token 0.
    written int32 ``[2, B, N]``: tokens, and the bits of their log-probabilities; the step is the
        place to write to.
    stop_ids int32 ``[stops]`` end a row.
    capacity: of the cache, None where it has none.
    planned: ``own_append``'s plan, which is then not asked for again.

    Under jax's transformations as ``rms_norm``; what comes out are integers, without a derivative.
    Raises ValueError naming the operand for a wrong shape or dtype, NotImplementedError for a
    kernel that is not there.
    """
    operands = logits, rows, written, stop_ids
    check("append_greedy", _OPERANDS, **dict(zip(_OPERANDS, operands, strict=True)))
    find = lambda: planned or plan(logits, stop_ids)  # noqa: E731
    found = choose_plan("append_greedy", implementation, find, logits, rows, written)
    return _append_greedy(chosen(found, implementation), (capacity, found), *operands)


def own_append(logits: jax.Array | jax.ShapeDtypeStruct, stop_ids: jax.Array) -> GreedyPlan | None:
    """``append_greedy``'s plan for such logits, or None where there is no kernel for them here."""
    return own_plan(lambda: plan(logits, stop_ids), logits)


def plan(logits: jax.Array | jax.ShapeDtypeStruct, stop_ids: jax.Array) -> GreedyPlan | Reason:
    """How the kernel computes a call."""
    batch, vocabulary = logits.shape
    if reason := half_reason(logits=logits):
        return Reason(reason)
    if batch != 1:
        return Reason(f"{batch} rows; the kernel is of one")
    if vocabulary % 8:
        return Reason(f"{vocabulary} logits, no multiple of 8")
    if len(stop_ids) > _STOPS:
        return Reason(f"{len(stop_ids)} stop tokens, over {_STOPS}")
    return GreedyPlan()


def _kernel(static: _Static, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.rows import greedy_kernel

    return greedy_kernel.append_greedy(*operands, capacity=static[0])


def _xla(
    static: _Static, logits: jax.Array, rows: jax.Array, written: jax.Array, stop_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (capacity, _), (_, done, counts, lengths, step) = static, rows
    live = 1 - done
    scores = logits.astype(jnp.float32)
    grown = live
    if capacity is not None:
        scores = jnp.where((lengths + live <= capacity)[:, None], scores, jnp.nan)
        grown = jnp.minimum(live, jnp.maximum(capacity - lengths, 0))
    scores = jnp.minimum(jnp.where(jnp.isnan(scores), -jnp.inf, scores), jnp.finfo("float32").max)
    tokens, best = jnp.argmax(scores, axis=1).astype(jnp.int32), jnp.max(scores, axis=1)
    total = jnp.sum(jnp.exp(scores - best[:, None]), axis=1)  # NaN where nothing is finite
    logprobs = -jnp.log(total)
    new = jnp.stack([tokens, lax.bitcast_convert_type(logprobs, jnp.int32)])
    new = jnp.where(live > 0, new, 0)
    done |= jnp.any(tokens[:, None] == stop_ids, axis=1).astype(jnp.int32)
    written = lax.dynamic_update_slice_in_dim(written, new[:, :, None], step[0], axis=2)
    return jnp.stack([new[0], done, counts + live, lengths + grown, step + 1]), written


_append_greedy = Op("append_greedy", _xla, _kernel)
