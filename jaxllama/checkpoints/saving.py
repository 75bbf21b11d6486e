"""A model's parameters into a new directory or file, in the format that the caller names.

``hf`` writes floats, ``packed`` quantized weights in their codes, ``gguf`` one file of either.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import jax
from jax.typing import DTypeLike

from jaxllama.checkpoints.gguf import save as gguf
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.packed import save as packed
from jaxllama.config import ModelConfig
from jaxllama.decoding.sampling import Sampling
from jaxllama.errors import JaxLlamaError
from jaxllama.model.summary import is_quantized
from jaxllama.typing import Params

FORMATS = ("floats", *packed.FORMATS, "gguf")


def format_of(path: str | Path, format: str | None) -> str | None:
    """Return the format that is asked for, or "gguf" for a path that ends so, or None."""
    return format or ("gguf" if Path(path).suffix == ".gguf" else None)


def check_format(format: str | None, type: str | None) -> None:
    """Raise JaxLlamaError for a format that is not in ``FORMATS``, or a type without GGUF."""
    if format not in (None, *FORMATS):
        raise JaxLlamaError(f"format = {format!r}: is not one of {', '.join(FORMATS)}")
    if type is not None and format != "gguf":
        raise JaxLlamaError(f"type = {type!r}: only format 'gguf' has types")


def check(path: Path, cfg: ModelConfig, params: Params, format: str) -> None:
    """Raise JaxLlamaError for what ``save`` would refuse of quantized weights.

    params: may be stand-ins.
    """
    if format == "gguf":
        gguf.check(path, cfg, params)
    else:
        packed.check(cfg, params, format)


def save(
    path: str | Path,
    cfg: ModelConfig,
    params: Params,
    tokenizer_files: Iterable[str | Path],
    *,
    format: str | None,
    dtype: DTypeLike,
    sampling: Sampling | None,
    progress: bool,
    type: str | None = None,
) -> Path:
    """Write a model's parameters, as ``LanguageModel.save`` describes it.

    format: None is "native" for quantized weights and "floats" for others.
    dtype: of quantized weights that are written as floats.
    """
    is_packed = any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))
    format = format or ("native" if is_packed else "floats")
    if is_packed and (format == "floats" or type is not None):
        params = packed.in_floats(params, dtype)
    if format == "gguf":
        return gguf.save(path, cfg, params, tokenizer_files, type=type, progress=progress)
    if format != "floats":
        return packed.save(
            path,
            cfg,
            params,
            tokenizer_files,
            format=format,
            sampling=sampling,
            progress=progress,
        )
    cfg = cfg.with_head_of(params)
    return hf.save(path, cfg, params, tokenizer_files, sampling=sampling, progress=progress)
