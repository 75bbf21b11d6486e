"""One call of a product as the planners see it: shapes and dtypes, no values.

The checks of a product's operands beyond their dtypes and axes (whose table is in ``matmul.op``)
raise ValueError that names the operand and the fact.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cpu.weight import CpuWeight
from pallas_kernels.dispatch import Plan
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.operands import HasShape
from pallas_kernels.qtensor import QTensor

Weight = jax.ShapeDtypeStruct | QTensor | CpuWeight


def _static(*default: Any) -> Any:
    values = {"default": default[0]} if default else {}
    return dataclasses.field(**values, metadata={"static": True})


EMPTY = 0xFFFFFFFF  # of a mailbox (``matmul.sums``): a NaN that no instruction makes
LowRankTerm = tuple[jax.Array, tuple[jax.Array, ...]]  # inner products, second factors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Around:
    """The work around a product ``x w^T``, as ``quantized_matmul`` describes it.

    out: the result's dtype.  gamma, eps: the norm's.  post, posted: tables of the sums over devices
    that a product of one row posts, or reads as ``pending`` (``matmul.sums``).
    """

    out: jnp.dtype = _static()
    bias: jax.Array | None = None
    gamma: jax.Array | None = None
    eps: float | None = _static(None)
    residual: jax.Array | None = None
    pending: jax.Array | None = None
    swiglu: bool = _static(False)
    activation: str | None = _static(None)
    low_rank: LowRankTerm | None = None
    post: jax.Array | None = None
    posted: jax.Array | None = None

    @property
    def others(self) -> tuple[jax.Array | None, ...]:
        """The arrays beside the bias that a fused kernel reads."""
        return self.gamma, self.residual, self.pending

    @property
    def gate(self) -> str:
        """SwiGLU's activation."""
        return self.activation or "silu"


class LowRank(NamedTuple):
    """A low-rank term beside the product."""

    dtype: jnp.dtype
    ranks: int  # of all adapters
    sources: tuple[int, ...]  # the rows of w that each has


@dataclasses.dataclass(frozen=True)
class MatmulCall:
    """``x[M, K] w[N, K]^T`` and what is fused around it.

    An operand that is only added or multiplied is its dtype, or None if it is not there.
    """

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
    activation: str = "silu"  # of SwiGLU's gate
    pending: jnp.dtype | None = None
    low_rank: LowRank | None = None

    @classmethod
    def of(
        cls,
        x: HasShape,
        w: jax.Array | Weight,
        out_dtype: DTypeLike,
        *,
        bias: HasShape | None = None,
        gamma: HasShape | None = None,
        residual: HasShape | None = None,
        pending: HasShape | None = None,
        low_rank: LowRankTerm | None = None,
        **fixed: Any,
    ) -> MatmulCall:
        """Return the call of these arrays or shapes; x is ``[..., K]``.

        fixed: eps, swiglu, activation.
        """
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), w)
        added = {"norm": gamma, "residual": residual, "pending": pending}
        dtypes = {name: None if v is None else jnp.dtype(v.dtype) for name, v in added.items()}
        call = math.prod(x.shape[:-1]), jnp.dtype(x.dtype), shapes, jnp.dtype(out_dtype)
        if low_rank is not None:
            inner, second = low_rank
            rows = tuple(b.shape[0] for b in second)
            fixed["low_rank"] = LowRank(jnp.dtype(inner.dtype), second[0].shape[1], rows)
        return cls(*call, isinstance(x, QTensor), bias is not None, **dtypes, **fixed)

    @classmethod
    def around(cls, x: HasShape, w: jax.Array | Weight, work: Around) -> MatmulCall:
        """Return the call of a product with the work around it."""
        return cls.of(
            x,
            w,
            work.out,
            bias=work.bias,
            gamma=work.gamma,
            residual=work.residual,
            pending=work.pending,
            low_rank=work.low_rank,
            eps=None if work.eps is None else float(work.eps),
            swiglu=work.swiglu,
            activation=work.gate,
        )

    def work(self, **arrays: Any) -> Around:
        """Return the work around this call's product with these arrays."""
        gated = {"swiglu": self.swiglu, "activation": self.activation}
        return Around(self.out, eps=self.eps, **gated, **arrays)

    @property
    def n(self) -> int:
        return self.w.shape[0]

    @property
    def k(self) -> int:
        return self.w.shape[1]

    @property
    def plain(self) -> bool:
        """Is w in floats?"""
        return not isinstance(self.w, QTensor | CpuWeight)

    @property
    def codes(self) -> QTensor:
        """w, which is not in floats."""
        assert isinstance(self.w, QTensor)
        return self.w

    @property
    def weight(self) -> StoredWeight:
        """How w is stored."""
        return StoredWeight.of(self.w)

    @property
    def alone(self) -> bool:
        """Is nothing fused, except SwiGLU after plain weights, which many-row kernels fuse too?"""
        return self.norm is None and self.residual is None and (self.plain or not self.swiglu)


class Static(NamedTuple):
    """The static facts of a product, which its traced operands do not carry.

    out: the result's dtype.  call, plan: those of the kernel, None for XLA's form.  Each kernel has
    its own type of plan.
    """

    out: jnp.dtype
    call: MatmulCall | None = None
    plan: Plan | None = None


# --- checks of operands ---------------------------------------------------------------------------


def check_codes(x: QTensor, w: jax.Array | QTensor | CpuWeight, has_norm: bool) -> None:
    """Raise ValueError for a quantized x that no scheme multiplies by w, or that has a norm."""
    if has_norm:
        raise ValueError(
            "quantized_matmul: a norm comes before x is quantized: rms_norm(x, weight, eps, "
            "quantize=...) gives the codes"
        )
    if not isinstance(w, QTensor):
        raise ValueError("quantized_matmul: a quantized x goes with a quantized w")
    pair = (jnp.dtype(x.dtype).name, jnp.dtype(w.dtype).name)
    if pair[0] not in ("int8", "float8_e4m3fn") or pair[1] not in (pair[0], "int4"):
        raise ValueError(
            f"quantized_matmul: no scheme multiplies {pair[0]} by {pair[1]} codes, x by w"
        )
    if x.columns is not None:
        raise ValueError("quantized_matmul: a quantized x has its columns in order")
    if pair == ("float8_e4m3fn", "float8_e4m3fn") and x.scale.shape[-1] > 1:
        groups = x.scale.shape[-1], w.scale.shape[-1]
        if groups[0] != groups[1]:
            raise ValueError(
                f"quantized_matmul: x has {groups[0]} groups of scales, and w {groups[1]}"
            )
        if w.columns is not None or w.zero is not None:
            raise ValueError("quantized_matmul: with groups of x, w has neither columns nor zeros")
        return
    for name, t in (("x", x), ("w", w)):
        if t.dtype == jnp.int4:
            if t.zero is not None and not jnp.issubdtype(t.zero.dtype, jnp.integer):
                raise ValueError("quantized_matmul: with a quantized x, w needs integer zeros")
        elif t.scale.shape[-1] != 1 or t.zero is not None:
            raise ValueError(
                f"quantized_matmul: with a quantized x, {name} needs one scale per row and no "
                f"zeros, not {t.scale.shape[-1]} groups"
                + (" with zeros" if t.zero is not None else "")
            )


def check_low_rank(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor | CpuWeight,
    inner: jax.Array,
    second: tuple[jax.Array, ...],
) -> None:
    """Raise ValueError for a low-rank term that does not fit the product."""
    op, ranks = "quantized_matmul", second[0].shape[-1]
    if not isinstance(x, QTensor):
        raise ValueError(f"{op}: low_rank goes with a quantized x")
    shape = (*x.shape[:-1], len(second) * ranks)
    fits = all(b.ndim == 2 and b.shape[1] == ranks and b.dtype == inner.dtype for b in second)
    if not fits or inner.shape != shape or sum(b.shape[0] for b in second) != w.shape[0]:
        raise ValueError(
            f"{op}: low_rank {inner.shape} and {[b.shape for b in second]} do not fit x {x.shape} "
            f"and w {w.shape}"
        )
