"""The parameters of a gated short convolution, and functions of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import numpy as np

from jaxllama.config import ModelConfig, from_dict
from jaxllama.errors import JaxLlamaError
from jaxllama.model.mixers.common import Heads, Sites
from jaxllama.model.names import Names
from jaxllama.model.param import Param, Path, TensorSource, rows, written
from jaxllama.typing import Options

KEEPS_TOKENS = False
SPLIT = dict.fromkeys(("bcx", "conv"), 0)


@dataclasses.dataclass(frozen=True)
class ShortConvOptions:
    """Options of a short convolution: width of the streams, and taps (``[mixers.short_conv]``)."""

    width: int
    taps: int = 3

    def __post_init__(self) -> None:
        for key in ("width", "taps"):
            if getattr(self, key) < 1:
                raise JaxLlamaError(f"mixers.short_conv.{key}: must be positive")


@dataclasses.dataclass(frozen=True)
class ShortConvNames:
    """The names of the tensors in a checkpoint; ``mixer`` is their prefix.

    is_flat: the convolution is a matrix.
    """

    mixer: str = "conv."
    inputs: str = "in_proj"
    conv: str = "conv"
    o: str = "out_proj"
    is_flat: bool = False


@functools.lru_cache(maxsize=64)
def options(cfg: ModelConfig) -> ShortConvOptions:
    """Raises JaxLlamaError naming the key."""
    return from_dict(ShortConvOptions, cfg.options_of("short_conv"), "mixers.short_conv.")


def table(
    cfg: ModelConfig, layer: str, names: Names, present: Collection[str]
) -> dict[Path, Param]:
    """b|c|x fused by rows, the convolution's taps, and o."""
    del present
    own, (width, taps), d = names.of("short_conv", ShortConvNames()), _sizes(cfg), cfg.d_model
    prefix = f"{layer}{own.mixer}"
    # The checkpoint's [features, 1, W] is the same memory.
    between = () if own.is_flat else (1,)
    conv = TensorSource(f"{prefix}{own.conv}.weight", (width, *between, taps))
    return {
        ("bcx", "weight"): rows([TensorSource(f"{prefix}{own.inputs}.weight", (3 * width, d))]),
        ("conv", "weight"): Param((conv,), (width, taps), std=taps**-0.5),
        **written("o", f"{prefix}{own.o}", d, width, False),
    }


def _sizes(cfg: ModelConfig) -> tuple[int, int]:
    own = options(cfg)
    return own.width, own.taps


def heads(cfg: ModelConfig) -> int:
    """Return the largest number of shards that each have a stream."""
    return options(cfg).width


def obstacle(cfg: ModelConfig, n: int) -> str | None:
    """Return the name of the streams that ``n`` shards do not divide, or None."""
    width = options(cfg).width
    return f"the {width} streams of the short convolution" if width % n else None


def replicated(cfg: ModelConfig, n: int) -> Options:
    """No changes."""
    del cfg, n
    return {}


def shard(cfg: ModelConfig, n: int) -> Options:
    """Changes of the config that make it one of ``n`` shards'."""
    return {"mixers": cfg.with_options("short_conv", width=options(cfg).width // n)}


def fused_heads(cfg: ModelConfig, name: str, n: int) -> Heads | None:
    """(heads, rows a head) of the parts that a parameter's rows are, None where none moves."""
    del n
    return [(options(cfg).width, 1)] * 3 if name == "bcx" else None


def sites(cfg: ModelConfig) -> Sites:
    """o's input is a multiple of c."""
    width = options(cfg).width
    return Sites(("bcx",), "bcx", (width, 2 * width), np.arange(width))


def flops(cfg: ModelConfig, index: int, sequence_length: int) -> float:
    """A token's operations beside its products with weights."""
    del index, sequence_length
    width, taps = _sizes(cfg)
    return 2.0 * width * taps
