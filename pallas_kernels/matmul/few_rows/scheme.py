"""How a weight is stored, as the kernels of few rows see it: facts only."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.formats import E4M3, E8M0
from pallas_kernels.qtensor import FLOAT4, QTensor
from pallas_kernels.rounding import NIBBLES
from pallas_kernels.types import HasShape

KIND = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
SCALE_KIND = {**KIND, E8M0: "e8m0", E4M3: "e4m3"}


@dataclasses.dataclass(frozen=True)
class FewRowsScheme:
    """Codes with scales, or plain 16-bit floats, beside activations of ``kind``.

    float4: the codes are float4_e2m1fn, and ``scale_kind`` is "e8m0" (MXFP4) or "e4m3" (NVFP4).
    float8: the codes are float8_e4m3fn.
    zero: "int", "float", or "unit" for NVFP4's, which take the place of zeros, one a row.
    """

    kind: str
    bits: int
    group: int  # columns
    n_groups: int = 0
    scale_kind: str | None = None
    scale_bytes: int = 0
    zero: str | None = None
    zero_bytes: int = 0
    float4: bool = False
    float8: bool = False

    @classmethod
    def of(cls, w: HasShape, kind: str) -> FewRowsScheme:
        if not isinstance(w, QTensor):
            return cls(kind, 16, w.shape[1])
        zero = None
        if w.zero is not None:
            zero = "int" if jnp.issubdtype(w.zero.dtype, jnp.integer) else "float"
        if w.dtype == FLOAT4 and w.unit is not None:
            zero = "unit"
        return cls(
            kind,
            bits=4 if w.dtype.name in NIBBLES else 8,
            group=w.group_size,
            n_groups=w.scale.shape[1],
            scale_kind=SCALE_KIND[jnp.dtype(w.scale.dtype).name],
            scale_bytes=w.scale.dtype.itemsize,
            zero=zero,
            zero_bytes=0 if w.zero is None else w.zero.dtype.itemsize,
            float4=w.dtype == FLOAT4,
            float8=w.dtype == jnp.float8_e4m3fn,
        )

    @property
    def form(self) -> str:
        """Return how w is stored, as far as the kernels have a program of their own for it."""
        if self.float4:
            return "mxfp4" if self.scale_kind == "e8m0" else "nvfp4"
        name = "float" if self.plain else "float8" if self.float8 else f"int{self.bits}"
        return f"{name} fold" if self.fold and not self.plain else name

    @property
    def scale_row(self) -> int:
        """Bytes of a row's scales."""
        return self.n_groups * self.scale_bytes

    @property
    def zero_row(self) -> int:
        """Bytes of a row's zeros, or of its unit."""
        return 4 if self.zero == "unit" else self.n_groups * self.zero_bytes

    @property
    def plain(self) -> bool:
        return self.bits == 16

    @property
    def per_word(self) -> int:
        """Values in 32 bits."""
        return 32 // self.bits

    @property
    def columns(self) -> int:
        """Columns of a block: 4 lanes x 4 words."""
        return 16 * self.per_word

    @property
    def fold(self) -> bool:
        """Whether scales go into the 16-bit weights instead of the group's float32 sum."""
        return self.group % self.columns != 0 or self.zero == "float"

    @property
    def bias(self) -> int:
        """The pair of floats that a code of 0 becomes before it is taken off again."""
        if self.bits == 4:
            return 0x43084308 if self.kind == "bf16" else 0x64086408
        return 0x64806480
