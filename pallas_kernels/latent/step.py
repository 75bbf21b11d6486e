"""A decode step's latent attention between its products: norm, RoPE, cache, both up products.

    entry  = norm(low) | rope(key)               -> the cache at the token's slot
    q'     = up_k^T q_still | rope(q_turning)     of each head
    out    = up_v attention(q', cache)            [B, N, d_v]

On Hopper this is three kernels: ``heads_kernel`` writes the cache and q', ``latent.kernel``
attends, and ``lift_kernel`` merges the chunks and multiplies by up_v.  XLA's form is one op after
the other.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.operands import capacity_of
from pallas_kernels.attention.plain import rotate
from pallas_kernels.attention.rope_cache import store
from pallas_kernels.dispatch import Implementation, Plan, choose_plan
from pallas_kernels.fixed_sums import by_blocks, has_fixed_sums
from pallas_kernels.latent.op import latent_attention
from pallas_kernels.latent.step_plan import LatentStep, LatentStepPlan, step_plan
from pallas_kernels.operands import Columns
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.transform import Op, chosen


class _Static(NamedTuple):
    """start: of the entry's columns.  eps: of the norm.  plan: None for XLA's form."""

    start: int
    eps: float
    plan: Plan | None


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


def of_heads(shapes: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the float32 products of ``x[B, T, N, K]`` and each head's matrix ``w[N, ., .]``."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        options = {"precision": "highest", "preferred_element_type": jnp.float32}
        return by_blocks(functools.partial(jnp.einsum, shapes, **options), x, w, axes=2)

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
    attend = functools.partial(latent_attention, scale=q.shape[-1] ** -0.5, table=x.table)
    out = attend(q, cache[:, :, 0], x.lengths[:, None], implementation="xla")
    out = of_heads("btnr,nvr->btnv", out, x.up[:, x.still :])[:, 0]
    return out.astype(x.q.dtype), cache


def _kernel(static: _Static, x: LatentStep) -> Result:
    from pallas_kernels.latent.heads_kernel import heads_and_entries
    from pallas_kernels.latent.kernel import traced_chunks
    from pallas_kernels.latent.lift_kernel import lifted_chunks

    assert isinstance(static.plan, LatentStepPlan)
    plan = static.plan.attention
    q, cache = heads_and_entries(x, start=static.start, eps=static.eps)
    scale = x.q.shape[-1] ** -0.5
    given = q[:, None], cache[:, :, 0], x.lengths[:, None], x.table
    parts, stats = traced_chunks(*given, scale=scale, plan=plan, overlaps=True)
    assert stats is not None  # the plan has several chunks
    cut = {"capacity": capacity_of(cache, x.table), "chunk": plan.chunk, "still": x.still}
    return lifted_chunks(parts, stats, x.lengths, x.up, **cut), cache


_step = Op("latent_step", _xla, _kernel)
