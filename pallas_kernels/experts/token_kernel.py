"""A grouped product of few tokens on Hopper, in 4 bits: a token's experts together.

    y[t, j] = x[t] @ w[experts[t, j]].T              float32, behind bias and gate
    out[t]  = sum_j weights[t, j] * (x[t, j] @ w[experts[t, j]].T + bias)      with weights

``token_program`` says who does what.  Codes are on their way before x is: a warp asks for all or
many of its codes at once, and for nothing but the expert's index before them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import ptx as p
from pallas_kernels.experts import token_program
from pallas_kernels.experts.gate import Gate
from pallas_kernels.experts.token_plan import TokenPlan
from pallas_kernels.launch import launch
from pallas_kernels.matmul.few_rows.kernel import parts_of
from pallas_kernels.matmul.few_rows.scheme import KIND, FewRowsScheme
from pallas_kernels.qtensor import QTensor


@functools.partial(jax.jit, static_argnames=("gate", "plan", "out_dtype"))
def token_rows(
    x: jax.Array,
    w: QTensor,
    experts: jax.Array,
    bias: jax.Array | None = None,
    weights: jax.Array | None = None,
    *,
    gate: Gate | None,
    plan: TokenPlan,
    out_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """``[T, k, N]`` in out_dtype (float32 or bfloat16), halved by a gate; ``[T, N]`` with weights.

    x bfloat16 ``[T, K]``, or ``[T, k, K]`` with weights, w ``[E, N, K]``, experts int32 ``[T, k]``,
    bias ``[E, N]``, weights ``[T, k]``.
    """
    n_experts = w.shape[0]
    one = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), w)
    scheme = FewRowsScheme.of(one, KIND[x.dtype.name])
    bias = None if bias is None else bias.astype(jnp.float32)
    weights = None if weights is None else weights.astype(jnp.float32)
    inputs = {"x": x, **parts_of(w), "bias": bias, "experts": experts, "weights": weights}
    shape = (plan.tokens, *(() if plan.joined else (plan.fan,)))
    shape += (plan.results // (1 if plan.joined else plan.fan),)
    out = jax.ShapeDtypeStruct(shape, out_dtype)
    row_bytes = {"w": plan.k // 2, "scale": scheme.scale_row, "zero": scheme.zero_row}

    def body(gmem, smem):
        memory = {name: None if r is None else p.address(r) for name, r in vars(gmem).items()}
        kind = KIND[out.dtype.name]
        program = token_program.TokenProgram(
            plan, scheme, memory, row_bytes, n_experts, gate, kind, smem
        )
        program.run()

    sizes = [-(-size // 4) for size in plan.scratch_sizes]
    (found,) = launch(
        body,
        inputs,
        {"out": out},
        name=plan.kernel.removesuffix("_mosaic"),
        grid=plan.blocks * plan.tokens,
        warpgroups=plan.warps // 4,
        scratch=dict(zip(token_program.SCRATCH, sizes, strict=True)),
        registers=True,
    )
    return found
