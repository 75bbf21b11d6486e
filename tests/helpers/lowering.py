"""What a program launches on a GPU, read from the text that it is lowered to; no GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax


def lowered(f: Callable, *operands: Any, **jit: Any) -> str:
    """Text of ``jax.jit(f, **jit)`` for these operands, or types, lowered for CUDA."""
    return jax.jit(f, **jit).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def kernels_in(text: str) -> list[str]:
    """Names of the Mosaic kernels of a lowered program, in alphabetical order."""
    names = [x for x in re.findall(r"([a-z]\w*)_mosaic_gpu\b", text) if x != "stable"]
    assert len(names) == text.count("@mosaic_gpu_v2(")
    return sorted(names)
