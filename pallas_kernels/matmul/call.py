"""One call of a product as what chooses its kernel sees it: shapes and dtypes, no values."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.device import H200
from pallas_kernels.qtensor import QTensor

Weight = jax.ShapeDtypeStruct | QTensor
N_SM = H200.sms  # which the plans' tables were measured on


@dataclasses.dataclass(frozen=True)
class Call:
    """``x[M, K] w[N, K]^T`` and what is fused around it.  Of what is only added or multiplied, the
    dtype; None where it is not there."""

    m: int
    x: jnp.dtype  # of a quantized x, its codes'
    w: Weight
    out: jnp.dtype
    quantized_x: bool = False
    bias: bool = False
    norm: jnp.dtype | None = None
    eps: float | None = None
    residual: jnp.dtype | None = None
    swiglu: bool = False
    pending: jnp.dtype | None = None

    @classmethod
    def of(
        cls,
        x: jax.Array | QTensor,
        w: jax.Array | QTensor,
        out_dtype: DTypeLike,
        *,
        bias: jax.Array | None = None,
        gamma: jax.Array | None = None,
        eps: float | None = None,
        residual: jax.Array | None = None,
        swiglu: bool = False,
        pending: jax.Array | None = None,
    ) -> Call:
        """Of arrays or of their shapes; x ``[..., K]``."""
        norm, residual, pending = (
            None if v is None else jnp.dtype(v.dtype) for v in (gamma, residual, pending)
        )
        return cls(
            m=math.prod(x.shape[:-1]),
            x=jnp.dtype(x.dtype),
            w=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), w),
            out=jnp.dtype(out_dtype),
            quantized_x=isinstance(x, QTensor),
            bias=bias is not None,
            norm=norm,
            eps=eps,
            residual=residual,
            swiglu=swiglu,
            pending=pending,
        )

    @property
    def n(self) -> int:
        return self.w.shape[0]

    @property
    def k(self) -> int:
        return self.w.shape[1]

    @property
    def plain(self) -> bool:
        """Is w in floats?"""
        return not isinstance(self.w, QTensor)

    @property
    def alone(self) -> bool:
        """Is nothing fused but what the kernels of many rows fuse, SwiGLU behind plain weights?"""
        return self.norm is None and self.residual is None and (self.plain or not self.swiglu)
