"""How a weight is stored: the one record that planners and kernels read.  It has facts, no values.

What a kernel derives from it, such as the columns of a step, stands beside that kernel.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.operands import HasShape
from pallas_kernels.qtensor import FLOAT4, QTensor
from pallas_kernels.rounding import E4M3, E8M0, NIBBLES

KIND = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_SCALE_KIND = {**KIND, E8M0: "e8m0", E4M3: "e4m3"}
_FORMS = {E4M3: "float8", "bfloat16": "float", "float16": "float", "float32": "float"}


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A weight ``[..., N, K]``: floats, or codes with a scale for ``group`` columns of a row.

    codes, scale, zero: dtypes; scale and zero are None if there are none.
    has_unit: whether scales have two levels (``QTensor.unit``).
    has_blocks: whether each 128 rows share their scales.
    interleaved: whether columns are in the order of ``matmul.interleave``.
    """

    codes: jnp.dtype
    group: int
    n_groups: int = 0
    scale: jnp.dtype | None = None
    zero: jnp.dtype | None = None
    has_unit: bool = False
    has_blocks: bool = False
    interleaved: bool = False

    @classmethod
    def of(cls, w: HasShape) -> StoredWeight:
        if not isinstance(w, QTensor):
            return cls(jnp.dtype(w.dtype), w.shape[-1])
        scale, zero = (None if v is None else jnp.dtype(v.dtype) for v in (w.scale, w.zero))
        groups, notes = (w.group_size, w.scale.shape[-1]), (w.has_blocks, w.interleaved)
        return cls(jnp.dtype(w.dtype), *groups, scale, zero, w.unit is not None, *notes)

    @property
    def plain(self) -> bool:
        """Whether w is in floats."""
        return self.scale is None

    @property
    def float4(self) -> bool:
        """Whether the codes are float4_e2m1fn, of MXFP4 or NVFP4."""
        return self.codes == FLOAT4

    @property
    def float8(self) -> bool:
        """Whether the codes are float8_e4m3fn."""
        return self.codes.name == E4M3

    @property
    def form(self) -> str:
        """The name of the codes in plans: "float", "int8", "int4", "float8", "mxfp4" or "nvfp4"."""
        if self.float4:
            return "mxfp4" if self.scale_kind == "e8m0" else "nvfp4"
        return _FORMS.get(self.codes.name, self.codes.name)

    @property
    def is_format(self) -> bool:
        """Whether w is MXFP4 or NVFP4 with the groups of those formats."""
        facts = self.scale_kind, self.group, self.has_unit
        return self.float4 and facts in (("e8m0", 32, False), ("e4m3", 16, True))

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 4 if self.codes.name in NIBBLES else 8 * self.codes.itemsize

    @property
    def per_word(self) -> int:
        """Values in 32 bits."""
        return 32 // self.bits

    @property
    def scale_kind(self) -> str:
        return "" if self.scale is None else _SCALE_KIND.get(self.scale.name, "")

    @property
    def int_zero(self) -> bool:
        """Whether integers are subtracted before the scale."""
        return self.zero is not None and jnp.issubdtype(self.zero, jnp.integer)

    @property
    def float_zero(self) -> bool:
        """Whether floats are added after the scale."""
        return self.zero is not None and not self.int_zero

    @property
    def scale_bytes(self) -> int:
        return 0 if self.scale is None else self.scale.itemsize

    @property
    def zero_bytes(self) -> int:
        return 0 if self.zero is None else self.zero.itemsize

    @property
    def scale_row(self) -> int:
        """Bytes of a row's scales."""
        return self.n_groups * self.scale_bytes

    @property
    def zero_row(self) -> int:
        """Bytes of a row's zeros, or of float4's unit, which takes their place in kernels."""
        return 4 if self.float4 and self.has_unit else self.n_groups * self.zero_bytes
