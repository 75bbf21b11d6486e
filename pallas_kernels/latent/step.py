"""A decode step's latent attention between its products: norm, RoPE, cache, both up products.

    entry  = norm(low) | rope(key)               -> the cache at the token's slot
    q'     = up_k^T q_still | rope(q_turning)     of each head
    out    = up_v attention(q', cache)            [B, N, d_v]

On Hopper this is three kernels: ``heads_kernel`` writes the cache and q', ``latent.kernel``
attends, and ``lift_kernel`` merges the chunks and multiplies by up_v.  XLA's form is one op after
the other.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.operands import LatentCodes, capacity_of
from pallas_kernels.attention.plain import rotate
from pallas_kernels.attention.rope_cache import store
from pallas_kernels.device import lacking
from pallas_kernels.dispatch import Implementation, Reason, choose_plan, named_plan
from pallas_kernels.fixed_sums import by_blocks, has_fixed_sums, planned_rows
from pallas_kernels.latent.op import latent_attention
from pallas_kernels.latent.plan import (
    LATENT,
    MOST_FEW_ROWS,
    TILE,
    LatentPlan,
    microseconds,
    plans,
    query_rows,
)
from pallas_kernels.latent.plan import plan as attention_plan
from pallas_kernels.operands import Columns
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.transform import Op, chosen

MOST_ROWS = 8  # a block's warps


class LatentStep(NamedTuple):
    """The operands of a step: one new token of each row.

    q: before RoPE, ``[B, N, d + r]``.  entry: latent and key before norm and RoPE, the columns
    ``[B, R + r]`` from ``start`` on of these rows.  gamma: the norm's weight ``[R]``.  cos, sin:
    float32 ``[B, r / 2]``.  cache: ``[B, S, 1, R + r]``, or pages with ``table``.  slots: int32
    ``[B]``, a place from S on is not written.  lengths: int32 ``[B]``, the keys that a row sees.
    up: each head's product that makes its key, then its value, ``[N, d + d_v, R]``.
    """

    q: jax.Array
    entry: jax.Array
    gamma: jax.Array
    cos: jax.Array
    sin: jax.Array
    cache: jax.Array
    slots: jax.Array
    lengths: jax.Array
    table: jax.Array | None
    up: jax.Array

    @property
    def still(self) -> int:
        """Features of a query that do not turn."""
        return self.q.shape[-1] - 2 * self.cos.shape[-1]


class _Static(NamedTuple):
    """start: of the entry's columns.  eps: of the norm.  plan: None for XLA's form."""

    start: int
    eps: float
    plan: LatentStepPlan | None


@dataclasses.dataclass(frozen=True)
class LatentStepPlan:
    """attention: the plan of the kernel that attends."""

    kernel: ClassVar[str] = "latent_step_mosaic"
    attention: LatentPlan

    def __str__(self) -> str:
        return str(self.attention)

    def representative(self) -> LatentStepPlan:
        return LatentStepPlan(self.attention.representative())


Result = tuple[jax.Array, jax.Array]


def latent_step(
    x: LatentStep, *, start: int, eps: float, implementation: Implementation | None = None
) -> Result:
    """Return (the heads ``[B, N, d_v]``, the cache with the new tokens).

    start: first column of the entry in its rows.  eps: the norm's.  Scores are divided by the root
    of a query's width.  Under jax's transformations it is as ``latent_attention``.
    """
    found = choose_plan("latent_step", implementation, lambda: step_plan(x), *x)
    return _step(chosen(found, implementation), _Static(start, float(eps), found), x)


def step_plan(x: LatentStep) -> LatentStepPlan | Reason:
    """Return how the kernels compute a step, or why there is none."""
    if reason := lacking("wgmma"):
        return Reason(reason)
    batch, n, width = x.q.shape
    if isinstance(x.cache, LatentCodes):
        return Reason("the cache is in 8 bits")
    entries = jax.ShapeDtypeStruct((*x.cache.shape[:2], x.cache.shape[-1]), x.cache.dtype)
    q = jax.ShapeDtypeStruct((batch, 1, n, x.cache.shape[-1]), x.q.dtype)
    found = attention_plan(q, entries, x.table)
    if named_plan(found) is None:
        assert isinstance(found, Reason)
        return found
    if planned_rows(batch) > MOST_ROWS:
        return Reason(f"{batch} rows; the kernels of a step take {MOST_ROWS}")
    if x.up.dtype != jnp.bfloat16 or x.up.shape[-1] != LATENT:
        return Reason(f"up is {x.up.dtype.name}{list(x.up.shape)}; the kernels take bfloat16")
    if x.still % 32 or (x.up.shape[1] - x.still) % 64:
        return Reason(f"{x.still} features of a key and {x.up.shape[1] - x.still} of a value")
    capacity = capacity_of(x.cache, x.table)
    # The last kernel merges chunks, so there are two at least.
    cut = [one for one in plans(1, n, capacity, most=MOST_FEW_ROWS) if one.chunk < capacity]
    if not cut:
        return Reason(f"a row holds {capacity} tokens; the kernels of a step take {TILE + 1}")
    rows = query_rows(1, n)
    return LatentStepPlan(min(cut, key=lambda one: microseconds(one, batch, rows, capacity)))


def of_heads(shapes: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the float32 products of ``x[B, T, N, K]`` and each head's matrix ``w[N, ., .]``."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        one = functools.partial(jnp.einsum, shapes, preferred_element_type=jnp.float32)
        return by_blocks(lambda x: one(x, w, precision="highest"), x, axes=2)

    def of_floats(x: jax.Array, w: jax.Array) -> jax.Array:
        # XLA's CPU has no product of 16 bits with float32 sums.
        return product(x.astype(jnp.float32), w.astype(jnp.float32))

    def of_two(x: jax.Array, w: jax.Array) -> jax.Array:
        # XLA makes a sum of a product of one row, and on a GPU may write its terms to memory first.
        return product(jnp.broadcast_to(x, (x.shape[0], 2, *x.shape[2:])), w)[:, :1]

    is_one = not has_fixed_sums() and x.shape[0] * x.shape[1] == 1
    forms = {"default": of_two if is_one else product, "cpu": of_floats}
    return lax.platform_dependent(x, w.astype(x.dtype), **forms)


def absorbed(q: jax.Array, up: jax.Array, width: int) -> jax.Array:
    """Return queries of latents ``[B, T, N, R + r]`` of turned queries ``q[B, T, N, d + r]``.

    up: ``[N, d, R]``.  They are scaled such that dividing scores by the root of ``width`` gives
    those of the heads.
    """
    still, turned = jnp.split(q, (up.shape[1],), axis=-1)
    both = [of_heads("btnd,ndr->btnr", still, up), turned.astype(jnp.float32)]
    factor = (width / q.shape[-1]) ** 0.5
    return (jnp.concatenate(both, axis=-1) * factor).astype(q.dtype)


def turned_last(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Return ``x[B, T, heads, ...]`` with RoPE of its last features; tables ``[B, T, r / 2]``."""
    still, turning = jnp.split(x, (x.shape[-1] - 2 * cos.shape[-1],), axis=-1)
    return jnp.concatenate([still, rotate(turning, cos, sin)], axis=-1)


def _xla(static: _Static, x: LatentStep) -> Result:
    cos, sin = x.cos[:, None], x.sin[:, None]
    rank, turning = x.gamma.shape[0], 2 * x.cos.shape[-1]
    entry = Columns(x.entry, static.start, rank + turning).value
    low = rms_norm(entry[:, :rank], x.gamma, static.eps, implementation="xla")
    entry = jnp.concatenate([low, entry[:, rank:]], axis=-1)
    cache = store(x.cache, turned_last(entry[:, None, None], cos, sin), x.slots[:, None], x.table)
    q = absorbed(turned_last(x.q[:, None], cos, sin), x.up[:, : x.still], rank + turning)
    given = q, cache[:, :, 0], x.lengths[:, None]
    how = {"scale": q.shape[-1] ** -0.5, "table": x.table}
    out = latent_attention(*given, **how, implementation="xla")
    out = of_heads("btnr,nvr->btnv", out, x.up[:, x.still :])[:, 0]
    return out.astype(x.q.dtype), cache


def _kernel(static: _Static, x: LatentStep) -> Result:
    from pallas_kernels.latent.heads_kernel import heads_and_entries
    from pallas_kernels.latent.kernel import attended_chunks
    from pallas_kernels.latent.lift_kernel import lifted_chunks

    assert static.plan is not None
    plan = static.plan.attention
    q, cache = heads_and_entries(x, start=static.start, eps=static.eps)
    scale = x.q.shape[-1] ** -0.5
    given = q[:, None], cache[:, :, 0], x.lengths[:, None], x.table
    parts, stats = attended_chunks(*given, scale=scale, plan=plan, overlaps=True)
    assert stats is not None  # the plan has several chunks
    cut = {"capacity": capacity_of(cache, x.table), "chunk": plan.chunk, "still": x.still}
    return lifted_chunks(parts, stats, x.lengths, x.up, **cut), cache


_step = Op("latent_step", _xla, _kernel)
