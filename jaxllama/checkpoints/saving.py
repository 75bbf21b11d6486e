"""A model's parameters into a new directory, in the format that the caller names.

``hf`` writes floats, ``packed`` writes quantized weights in their codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import jax
from jax.typing import DTypeLike

from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.packed import load as packed
from jaxllama.config import ModelConfig
from jaxllama.decoding.sampling import Sampling
from jaxllama.errors import JaxLlamaError
from jaxllama.model.summary import is_quantized
from jaxllama.typing import Params

FORMATS = ("floats", *packed.FORMATS)


def check_format(format: str | None) -> None:
    """Raise JaxLlamaError if ``format`` is neither None nor one of ``FORMATS``."""
    if format not in (None, *FORMATS):
        raise JaxLlamaError(f"format = {format!r}: is not one of {', '.join(FORMATS)}")


def save(
    directory: str | Path,
    cfg: ModelConfig,
    params: Params,
    tokenizer_files: Iterable[str | Path],
    *,
    format: str | None,
    dtype: DTypeLike,
    sampling: Sampling | None,
    progress: bool,
) -> Path:
    """Write a model's parameters, as ``LanguageModel.save`` describes it.

    format: None is "native" for quantized weights and "floats" for others.
    dtype: of quantized weights that are written as floats.
    """
    is_packed = any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))
    format = format or ("native" if is_packed else "floats")
    if format != "floats":
        return packed.save(
            directory,
            cfg,
            params,
            tokenizer_files,
            format=format,
            sampling=sampling,
            progress=progress,
        )
    params = packed.in_floats(params, dtype) if is_packed else params
    cfg = cfg.with_head_of(params)
    return hf.save(directory, cfg, params, tokenizer_files, sampling=sampling, progress=progress)
