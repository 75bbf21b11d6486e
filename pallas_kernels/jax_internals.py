"""All that this project takes from jax's private modules: a new jax is checked against this file.

Kernels emit MLIR through jax's own dialects, which have no public name. ``cudnn_attention`` and
``distributed_state`` import late: most programs need neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu, llvm, memref, scf, vector

__all__ = [
    "arith",
    "cudnn_attention",
    "distributed_state",
    "gpu",
    "ir",
    "llvm",
    "memref",
    "scf",
    "vector",
]


def cudnn_attention() -> tuple[Callable[..., Any], Any]:
    """cuDNN's fused attention and the enumeration of its masks."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    return dot_product_attention, MaskType


def distributed_state() -> Any:
    """The state of ``jax.distributed``, whose client is the processes' key-value store."""
    from jax._src.distributed import global_state

    return global_state
