"""What the kernel of one row takes, and how it divides ``x[K] w[N, K]^T`` among an H200's warps.

Arithmetic only; ``matmul.few_rows.row_kernel`` tells what the parts do.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.few_rows.scheme import KIND
from pallas_kernels.qtensor import QTensor

BLOCKS, WARPS = 132, 16
LOADS = 4
MAX_K = 48 * 1024  # x is in shared memory as floats


@dataclasses.dataclass(frozen=True)
class Plan:
    """The division of one product among warps."""

    k: int
    rows: int  # of w that a warp has at a time
    units: int  # of so many rows
    bits: int  # of a value of w
    loads: int  # of 16 bytes that a lane multiplies while as many more are under way

    @property
    def per_load(self) -> int:
        """Values of w in 16 bytes."""
        return 128 // self.bits

    @property
    def x_words(self) -> int:
        """Of x in shared memory: floats, or pairs beside int4."""
        return self.k if self.bits > 4 else self.k // 2

    @property
    def chunks(self) -> int:
        """Instructions that read one row."""
        return self.k // (32 * self.per_load)

    @property
    def blocks(self) -> int:
        return min(BLOCKS, -(-self.units // WARPS))

    @property
    def rounds(self) -> int:
        return -(-self.units // (self.blocks * WARPS))

    @property
    def groups(self) -> list[list[int]]:
        """The chunks of a row by the groups in which they are loaded."""
        each = max(1, self.loads // self.rows)
        return [list(range(c, min(c + each, self.chunks))) for c in range(0, self.chunks, each)]


def make_plan(w: jax.Array | QTensor, swiglu: bool) -> Plan:
    n, k = w.shape
    bits = 8 * w.dtype.itemsize if w.dtype != jnp.int4 else 4
    # Two rows share what is read of x; one round of short rows is better than two.
    one_round = bits == 8 and n % 2 == 0 and n <= 2 * BLOCKS * WARPS and k <= 4096
    rows = 2 if swiglu or bits == 4 or one_round else 1
    return Plan(k, rows, n // rows, bits, LOADS)


def unsupported(
    rows: int, x_dtype, w: jax.Array | QTensor, out_dtype=None, *, norm=None, residual=None,
    swiglu: bool = False,
) -> str | None:  # fmt: skip
    """Why the kernel does not take ``[rows, K] x w``, or None.  norm, residual: the dtypes of a
    norm's weight and of a residual."""
    n, k = w.shape
    if rows != 1 or jnp.dtype(x_dtype) != jnp.bfloat16:
        return f"{rows} rows of {jnp.dtype(x_dtype).name}; the kernel takes one of bfloat16"
    if not isinstance(w, QTensor):
        if w.dtype != jnp.bfloat16:
            return f"plain weights {w.dtype.name}"
    elif w.zero is not None or (w.dtype, w.group_size) not in ((jnp.int8, k), (jnp.int4, 128)):
        return "words other than int8 with one scale a row and int4 in groups of 128, without zeros"
    elif w.columns is not None or w.activations is not None:
        return "columns in another order, or quantized activations"
    wanted = 32 * make_plan(w, swiglu).per_load
    if k % wanted or k > MAX_K:
        return f"K = {k} is not a multiple of {wanted} up to {MAX_K}"
    if out_dtype is not None and jnp.dtype(out_dtype).name not in KIND:
        return f"the output would be {jnp.dtype(out_dtype).name}"
    if norm is not None and KIND.get(jnp.dtype(norm).name) not in ("bf16", "f32"):
        return f"a norm with weights {jnp.dtype(norm).name}"
    if residual is not None and (swiglu or jnp.dtype(residual) != jnp.bfloat16):
        return f"a residual {jnp.dtype(residual).name}, or one behind SwiGLU"
    if n % 2 and (swiglu or w.dtype == jnp.int4):
        return f"N = {n} is odd"
    return None
